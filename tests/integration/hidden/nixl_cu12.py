# SPDX-License-Identifier: Apache-2.0
"""Stands in the way of the real package."""

raise ImportError("hidden")
