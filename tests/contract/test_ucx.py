# SPDX-License-Identifier: Apache-2.0
"""The conformance suite over UCX, on the loopback device, in each access mode."""

from __future__ import annotations

from tensorferry.testing import BackendUnderTest, ReadContract, ServedContract, ViewContract

LOOPBACK = {"TLS": "tcp", "NET_DEVICES": "lo"}


class TestServed(ServedContract):
    backend = BackendUnderTest("ucx", access="served", options=LOOPBACK)


class TestRdma(ReadContract):
    backend = BackendUnderTest("ucx", access="rdma", options=LOOPBACK)
    producer_survives = (
        False  # over tcp UCX may abort a producer whose reader goes in the middle of an answer
    )


class TestMapped(ViewContract):
    backend = BackendUnderTest("ucx", access="mapped", options=LOOPBACK)
