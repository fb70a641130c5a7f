# SPDX-License-Identifier: Apache-2.0
"""Parts of the study of growth, which study_growth.py runs."""
