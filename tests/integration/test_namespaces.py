# SPDX-License-Identifier: Apache-2.0
"""Two machines, as far as the network can tell: network namespaces joined by a cable."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from types import SimpleNamespace

import payloads
import peers
import pytest
from payloads import MIB

_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x20000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_CABLE = {"TLS": "tcp", "NET_DEVICES": "tfveth"}

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip, of iproute2"),
]


def enter_network(namespace: SimpleNamespace, network: str) -> None:
    """Move this thread, and those that it will start, into a network namespace.

    UCX looks for devices in sysfs, which shows those of the namespace that it was mounted in.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def must(call: str, *args: object) -> None:
        if getattr(libc, call)(*args) != 0:
            raise OSError(ctypes.get_errno(), call)

    with open(f"/run/netns/{network}", "rb") as file:
        must("setns", file.fileno(), _CLONE_NEWNET)
    must("unshare", _CLONE_NEWNS)
    must("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
    must("mount", b"sysfs", b"/sys", b"sysfs", 0, None)


@pytest.fixture(scope="module")
def cable():
    """Two namespaces, each with one end of a cable and one address."""
    names = [f"tferry{os.getpid()}{end}" for end in "ab"]
    commands = [
        *(f"ip netns add {name}" for name in names),
        f"ip -n {names[0]} link add tfveth type veth peer name tfveth netns {names[1]}",
        *(f"ip -n {name} addr add 10.77.0.{i}/24 dev tfveth" for i, name in enumerate(names, 1)),
        *(f"ip -n {name} link set {device} up" for name in names for device in ("lo", "tfveth")),
    ]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"{command}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture(scope="module")
def hosts(cable, library):
    with peers.peer(TENSORFERRY_UCX=library) as one, peers.peer(TENSORFERRY_UCX=library) as other:
        one.call(enter_network, cable[0])
        other.call(enter_network, cable[1])
        yield one, other


@pytest.mark.parametrize("access", ["served", "rdma"])
def test_tensors_cross_a_cable(hosts, access):
    producer, consumer = hosts
    producer.call(peers.open_producer, "64MiB", access=access, backend_options=_CABLE)
    consumer.call(peers.open_consumer, "64MiB", access=access, backend_options=_CABLE)
    for build, args in ((payloads.nested, ()), (payloads.every_dtype, ()), (payloads.of_size, (32 * MIB,))):
        manifest = producer.call(peers.publish, "a", build, *args)
        assert consumer.call(peers.pull_and_compare, manifest, build, *args) == ""
        assert producer.call(peers.wait_released, "a", 10)


def test_an_unreachable_producer_is_a_connection_error(hosts):
    """Its address is on a loopback device that is another host's."""
    producer, consumer = hosts
    producer.call(peers.open_producer, "1MiB", access="served", backend_options=peers.LOOPBACK)
    consumer.call(peers.open_consumer, "1MiB", access="served", backend_options=_CABLE)
    manifest = producer.call(peers.publish, "a", payloads.nested)
    consumer.start(peers.pull, manifest, timeout=5.0)
    with pytest.raises(peers.RemoteError) as caught:
        consumer.result(30)
    assert caught.value.kind in ("ConnectError", "TransferTimeoutError")


def test_a_cut_cable_ends_a_pull_by_its_timeout_and_heals(hosts, cable):
    producer, consumer = hosts
    producer.call(peers.open_producer, "64MiB", access="served", backend_options=_CABLE)
    consumer.call(peers.open_consumer, "64MiB", access="served", backend_options=_CABLE)
    manifest = producer.call(peers.publish, "a", payloads.of_size, MIB)
    consumer.call(peers.pull, manifest, release=False)
    link = ["ip", "-n", cable[0], "link", "set", "tfveth"]
    subprocess.run([*link, "down"], check=True)
    try:
        consumer.start(peers.pull, manifest, timeout=1.0)
        with pytest.raises(peers.RemoteError) as caught:
            consumer.result(30)
        assert caught.value.kind in ("TransferTimeoutError", "PeerLostError")
    finally:
        subprocess.run([*link, "up"], check=True)
    assert consumer.call(peers.pull_and_compare, manifest, payloads.of_size, MIB) == ""
