# SPDX-License-Identifier: Apache-2.0
"""The ways of moving tensors that ``tensorferry bench`` compares, a module for each library."""
