# SPDX-License-Identifier: Apache-2.0
"""The conformance suite over UCX, on the loopback device, in ``rdma`` access."""

from __future__ import annotations

from tensorferry.testing import BackendUnderTest, ReadContract

LOOPBACK = {"TLS": "tcp", "NET_DEVICES": "lo"}


class TestRdma(ReadContract):
    backend = BackendUnderTest("ucx", access="rdma", options=LOOPBACK)
    producer_survives = False  # over tcp UCX may abort one whose reader goes in the middle of an answer
