# SPDX-License-Identifier: Apache-2.0
"""The conformance suite over UCX, on the loopback device, in ``mapped`` access."""

from __future__ import annotations

from tensorferry.testing import BackendUnderTest, ViewContract

LOOPBACK = {"TLS": "tcp", "NET_DEVICES": "lo"}


class TestMapped(ViewContract):
    backend = BackendUnderTest("ucx", access="mapped", options=LOOPBACK)
