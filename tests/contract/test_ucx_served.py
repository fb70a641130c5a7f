# SPDX-License-Identifier: Apache-2.0
"""The conformance suite over UCX, on the loopback device, in ``served`` access."""

from __future__ import annotations

from tensorferry.testing import BackendUnderTest, ServedContract

LOOPBACK = {"TLS": "tcp", "NET_DEVICES": "lo"}


class TestServed(ServedContract):
    backend = BackendUnderTest("ucx", access="served", options=LOOPBACK)
