# SPDX-License-Identifier: Apache-2.0
"""Tensors from one process to another by one-sided reads, with nothing lost."""
