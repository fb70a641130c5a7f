# SPDX-License-Identifier: Apache-2.0
"""Adapters that move bytes: one module per library underneath."""
