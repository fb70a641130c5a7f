# SPDX-License-Identifier: Apache-2.0
"""Makes the modules beside this file importable from every folder of tests."""
