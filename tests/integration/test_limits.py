# SPDX-License-Identifier: Apache-2.0
"""Processes that the operating system allows little: locked memory, shared memory, looking at others."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import payloads
import peers
import psutil
import pytest
from payloads import MIB

_EVERYTHING = {"TLS": "all", "NET_DEVICES": "lo"}
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000
_CAP_IPC_LOCK, _CAP_SYS_PTRACE = 14, 19
_PR_SET_DUMPABLE = 4


def needs_root(test):
    reason = "needs root, from whom capabilities can be taken"
    return pytest.mark.root(pytest.mark.skipif(os.geteuid() != 0, reason=reason)(test))


@pytest.fixture
def two(library):
    """Two processes of this test's own, since what is taken from them they never get back."""
    with peers.peer(TENSORFERRY_UCX=library) as one, peers.peer(TENSORFERRY_UCX=library) as other:
        yield one, other


def transfer(two: tuple[peers.Peer, peers.Peer], access: str, options: dict[str, str]) -> dict[str, int]:
    """Publish in one process, pull in the other, and return how many pulls there were by access."""
    producer, consumer = two
    producer.call(peers.open_producer, "64MiB", access=access, backend_options=options)
    consumer.call(peers.open_consumer, "64MiB", access=access, backend_options=options)
    for build, args in ((payloads.nested, ()), (payloads.of_size, (16 * MIB,))):
        manifest = producer.call(peers.publish, "a", build, *args)
        assert consumer.call(peers.pull_and_compare, manifest, build, *args) == ""
        assert producer.call(peers.wait_released, "a", 10)
    pulls: dict[str, int] = consumer.call(peers.statistics, "consumer")["pulls_by_access"]
    return pulls


# Functions for peers.


def _must(call: str, *args: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, call)(*args) != 0:
        raise OSError(ctypes.get_errno(), call)


def drop_capability(namespace: SimpleNamespace, number: int) -> None:
    """Take a capability out of the effective set of every thread that will be started."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    _must("capget", header, data)
    data[0] &= ~(1 << number)
    _must("capset", header, data)


def limit_locked_memory(namespace: SimpleNamespace, nbytes: int) -> None:
    drop_capability(namespace, _CAP_IPC_LOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, nbytes))


def shrink_dev_shm(namespace: SimpleNamespace, size: str) -> int:
    """Mount a small /dev/shm that this process alone sees; return its bytes."""
    _must("unshare", _CLONE_NEWNS)
    _must("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    _must("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode())
    there = os.statvfs("/dev/shm")
    return there.f_blocks * there.f_frsize


def hide_from_others(namespace: SimpleNamespace) -> None:
    _must("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


# Limits


@pytest.mark.parametrize("access", ["served", "rdma", "mapped"])
def test_little_locked_memory_is_enough_over_tcp(two, access):
    """openucx/ucx#6264, #7930: registration failed, or RDMA was left out, where 64 KiB may be locked."""
    for peer in two:
        peer.call(limit_locked_memory, 64 << 10)
    assert transfer(two, access, peers.LOOPBACK)[access] == 2


@needs_root
@pytest.mark.parametrize("size", ["64k", "4m"])
@pytest.mark.parametrize("access", ["auto", "served", "mapped"])
def test_a_tiny_dev_shm_stops_nothing(two, access, size):
    """NVIDIA/cudf#22233, ROCm/rocm-systems#3700, openucx/ucx#8508: it hung, or died of SIGBUS."""
    for peer in two:
        assert peer.call(shrink_dev_shm, size) <= 4 * MIB
    assert sum(transfer(two, access, peers.LOOPBACK).values()) == 2


@needs_root
@pytest.mark.parametrize("size", ["64k", "4m"])
def test_a_tiny_dev_shm_stops_ucx_at_most_with_an_error(two, size):
    """The same with UCX's own shared-memory transports, which not every version does without."""
    for peer in two:
        peer.call(shrink_dev_shm, size)
    try:
        transfer(two, "auto", _EVERYTHING)
    except peers.RemoteError as error:
        if error.kind != "RegistrationError":
            raise
    assert sum(transfer(two, "auto", peers.LOOPBACK).values()) == 2


@needs_root
def test_without_the_right_to_look_at_the_producer_it_is_served(two):
    """openucx/ucx#8958, #3046: reading the peer's memory was not permitted in a container; UCX aborted."""
    producer, consumer = two
    producer.call(hide_from_others)
    consumer.call(drop_capability, _CAP_SYS_PTRACE)
    assert transfer(two, "auto", _EVERYTHING) == {"mapped": 0, "served": 2, "rdma": 0}


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
@pytest.mark.parametrize("access", ["served", "rdma", "mapped"])
def test_the_loopback_device_by_ipv6(two, access):
    """kvcache-ai/Mooncake#470, vllm-project/vllm-ascend#4103: addresses of IPv6 were cut at their colons."""
    try:
        assert transfer(two, access, {**peers.LOOPBACK, "TCP_AF_PRIO": "inet6"})[access] == 2
    except peers.RemoteError as error:
        if "UCX 1.13" in error.message and "No such device" in error.message:
            pytest.skip("UCX 1.13 does not take lo for a device of IPv6")
        raise
    listening = [
        one.laddr.ip
        for one in psutil.Process(two[0].pid).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert set(listening) <= {"::1", "::"}
