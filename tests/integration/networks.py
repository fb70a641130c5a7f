# SPDX-License-Identifier: Apache-2.0
"""Network namespaces as hosts, and cables between them that can be slow, cut, or lose packets."""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x20000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_LOSSY = Path(__file__).with_name("lossy_cable.py")
_SECONDS = 10.0  # for a change of a cable


@dataclass(frozen=True)
class Cable:
    """A cable between two namespaces.

    Attributes:
        hosts: Names of the namespaces.
        device: Of the cable's end, the same in both.
        lose: Sets the share of packets that are lost, and the delay of the rest in seconds.
    """

    hosts: list[str]
    device: str
    lose: Callable[[float, float], None]

    @property
    def options(self) -> dict[str, str]:
        """UCX settings to use this cable only."""
        return {"TLS": "tcp", "NET_DEVICES": self.device}

    def cut(self) -> None:
        ip("-n", self.hosts[0], "link", "set", self.device, "down")

    def mend(self) -> None:
        ip("-n", self.hosts[0], "link", "set", self.device, "up")

    def received(self, end: int) -> int:
        """Bytes that have come out of an end so far."""
        shown = ip("-n", self.hosts[end], "-s", "-j", "link", "show", self.device).stdout
        found: int = json.loads(shown)[0]["stats64"]["rx"]["bytes"]
        return found


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def needed(*command: str) -> None:
    """Run a command; a test that needs it is skipped where it does not work."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")


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


def free_port() -> int:
    """A port of the loopback device where nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def dropping(port: int) -> Iterator[None]:
    """Have a port drop what comes, as a dead host or a firewall would: its queue of connections is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(8):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        yield


@contextmanager
def cable() -> Iterator[Cable]:
    """Two namespaces joined by a pair of ``veth`` devices."""
    with _hosts() as hosts:
        device = "tfveth"
        needed(*f"ip -n {hosts[0]} link add {device} type veth peer name {device} netns {hosts[1]}".split())
        _bring_up(hosts, device)
        yield Cable(hosts, device, lambda loss, delay: _netem(hosts, device, loss, delay))


@contextmanager
def lossy_cable() -> Iterator[Cable]:
    """A cable that can lose packets: by ``netem`` where the kernel has it, else by a process."""
    with cable() as one:
        try:
            one.lose(0.0, 0.0)
        except subprocess.CalledProcessError:
            pass
        else:
            yield one
            return
    with _hosts() as hosts:
        if not os.path.exists("/dev/net/tun"):
            pytest.skip("the kernel has neither netem nor /dev/net/tun")
        carrier = subprocess.Popen(
            [sys.executable, str(_LOSSY), *hosts], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            _answer(carrier)
            _bring_up(hosts, "tfwire")
            yield Cable(hosts, "tfwire", lambda loss, delay: _tell(carrier, f"{loss} {delay}\n"))
        finally:
            carrier.kill()
            carrier.communicate()


@contextmanager
def _hosts() -> Iterator[list[str]]:
    hosts = [f"tferry{os.getpid()}-{time.monotonic_ns() % 10**6}{end}" for end in "ab"]
    try:
        for host in hosts:
            needed("ip", "netns", "add", host)
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


def _bring_up(hosts: list[str], device: str) -> None:
    for number, host in enumerate(hosts, 1):
        ip("-n", host, "addr", "add", f"10.77.0.{number}/24", "dev", device)
        for one in ("lo", device):
            ip("-n", host, "link", "set", one, "up")


def _netem(hosts: list[str], device: str, loss: float, delay: float) -> None:
    for host in hosts:
        command = f"tc -n {host} qdisc replace dev {device} root netem loss {loss:%} delay {delay * 1000:g}ms"
        subprocess.run(command.split(), check=True, capture_output=True)


def _tell(carrier: subprocess.Popen[bytes], line: str) -> None:
    assert carrier.stdin is not None
    carrier.stdin.write(line.encode())
    carrier.stdin.flush()
    _answer(carrier)


def _answer(carrier: subprocess.Popen[bytes]) -> None:
    assert carrier.stdout is not None
    ready, _, _ = select.select([carrier.stdout], [], [], _SECONDS)
    said = os.read(carrier.stdout.fileno(), 100) if ready else b""
    assert said, "the process that carries packets says nothing"
