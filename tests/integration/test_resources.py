# SPDX-License-Identifier: Apache-2.0
"""Nothing grows, and nothing is left behind."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import payloads
import peers
import pytest
from payloads import MIB

CYCLES = int(os.environ.get("TENSORFERRY_CYCLES", "4000"))
"""Of publish and pull; 100000 is the full test."""

_BATCH = 200

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount file systems of its own")


@pytest.fixture
def pair(library):
    with peers.peer(TENSORFERRY_UCX=library) as one, peers.peer(TENSORFERRY_UCX=library) as other:
        yield one, other


# Growth


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("access", ["served", "rdma", "mapped", peers.NIXL])
def test_nothing_grows_with_cycles_of_publish_and_pull(pair, access, record_property):
    """In every way that there is to publish, to pull, and to give back unread; and with errors."""
    producer, consumer = pair
    producer.call(peers.open_producer, "16MiB", access=access)
    consumer.call(peers.open_consumer, "16MiB", access=access)
    cycles(producer, consumer, 5 * _BATCH)
    before = [one.call(count) for one in pair]
    cycles(producer, consumer, CYCLES)
    after = [one.call(count) for one in pair]
    for was, now in zip(before, after, strict=True):
        grown = {what: now[0][what] - was[0][what] for what in was[0]}
        record_property("grown", grown)
        print(
            access, grown, {path: (was[1].get(path, 0), size) for path, size in now[1].items() if size > 20}
        )
        assert grown["resident"] < 32 * MIB
        assert grown["descriptors"] <= 0
        assert grown["threads"] <= 0
        assert grown["shared"] <= 0
        for path, size in now[1].items():
            assert size <= was[1].get(path, 0) + 100, path
    assert producer.call(peers.statistics, "producer")["allocated_nbytes"] == 0
    assert consumer.call(peers.statistics, "consumer")["allocated_nbytes"] == 0


def cycles(producer, consumer, number):
    for start in range(0, number, _BATCH):
        manifests = producer.call(publish_batch, start)
        assert consumer.call(pull_batch, manifests) == _BATCH
        assert producer.call(wait_for_all)


def publish_batch(namespace, start):
    import torch

    one, manifests = namespace.producer, []
    for number in range(start, start + _BATCH):
        name, payload = f"request {number}", {"x": torch.full((25,), number), "y": [None, torch.tensor(1.5)]}
        if number % 10 == 0:
            manifests.append(one.start_publish(name, payload, timeout=10).result())
        elif number % 10 == 1:
            with one.reserve(name, {"x": ((25,), torch.int64)}, timeout=10) as reservation:
                reservation.tensors["x"].fill_(number)
                manifests.append(reservation.publish())
        else:
            manifests.append(one.publish(name, payload, timeout=10))
        if number % 50 == 7:
            one.revoke(name)
    return manifests


def pull_batch(namespace, manifests):
    """Deal with each; return how many came out as they should."""
    from tensorferry import LeaseRevokedError, read_manifest

    one, right = namespace.consumer, 0
    for manifest in manifests:
        number = int(read_manifest(manifest).request_id.split()[-1])
        if number % 50 == 7:
            with pytest.raises(LeaseRevokedError):
                one.start_pull(manifest).result() if number % 100 == 7 else one.pull(manifest)
            right += 1
            continue
        if number % 10 == 2:
            got = number
            one.reject(manifest)
        elif number % 10 == 3:
            with one.borrow(manifest) as borrowed:
                got = int(borrowed["x"][-1])
        elif number % 10 == 4:
            got = int(one.start_pull(manifest).result()["x"][0])
        else:
            got = int(one.pull(manifest)["x"][0])
        right += got == number
    return right


def wait_for_all(namespace):
    end = time.monotonic() + 20
    while namespace.producer.statistics().live or namespace.producer.statistics().draining:
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def count(namespace):
    import held

    held.settled()
    found = [getattr(namespace, what) for what in ("producer", "consumer") if hasattr(namespace, what)]
    return held.resources(), held.entries(*found)


# What is left behind


_EVERYTHING = {"TLS": "all", "NET_DEVICES": "lo"}


@root
@pytest.mark.root
@pytest.mark.parametrize("options", [peers.LOOPBACK, _EVERYTHING], ids=["tcp", "all"])
@pytest.mark.parametrize("access", ["auto", "served", "rdma"])
def test_killed_processes_leave_no_files(pair, access, options):
    """With file systems of their own in all places where UCX or others could leave something."""
    producer, consumer = pair
    places = ["/dev/shm", "/tmp", "/var/tmp", "/run"]
    producer.call(mount_private, places)
    consumer.call(enter_mounts, producer.pid)
    sysv = segments()
    producer.call(peers.open_producer, "16MiB", access=access, backend_options=options)
    consumer.call(peers.open_consumer, "16MiB", access="auto", backend_options=options)
    manifest = producer.call(peers.publish, "a", payloads.of_size, 4 * MIB)
    consumer.call(peers.pull, manifest, release=False)
    producer.kill()
    assert consumer.call(files, places) == []
    consumer.start(peers.pull, manifest, timeout=5.0)
    with pytest.raises(peers.RemoteError, match=r"PeerLostError|ConnectError"):
        consumer.result()
    consumer.call(peers.close, "consumer")
    assert consumer.call(files, places) == []
    assert segments() == sysv


def mount_private(namespace, places, options="size=64m"):
    """Give this process empty file systems in these places; what it runs from stays where it is."""
    libc = ctypes.CDLL(None, use_errno=True)
    must(libc.unshare(_CLONE_NEWNS), "unshare")
    must(libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "mount")
    trees = {sys.prefix, sys.base_prefix, str(Path(__file__).parents[2])}
    for place in places:
        kept = {tree: os.open(tree, os.O_PATH) for tree in trees if Path(tree).is_relative_to(place)}
        must(libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, options.encode()), place)
        for tree, descriptor in kept.items():
            os.makedirs(tree)
            source = f"/proc/self/fd/{descriptor}"
            must(libc.mount(source.encode(), tree.encode(), None, _MS_BIND | _MS_REC, None), tree)
            os.close(descriptor)


def enter_mounts(namespace, pid):
    """See what that process sees."""
    with open(f"/proc/{pid}/ns/mnt") as file:
        must(ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNS), "setns")


_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_SLAVE = 0x20000, 0x1000, 0x4000, 0x80000


def must(result, what):
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


def files(namespace, places):
    """The files in the file systems of these places; what is mounted further down is not theirs."""
    found = []
    for place in places:
        for folder, folders, names in os.walk(place):
            folders[:] = [name for name in folders if not os.path.ismount(os.path.join(folder, name))]
            found += [os.path.join(folder, name) for name in names]
    return found


def segments():
    """System V segments without anyone attached, which is what a killed process would leave."""
    with open("/proc/sysvipc/shm") as table:
        rows = [line.split() for line in table][1:]
    return sorted(row[1] for row in rows if row[6] == "0")
