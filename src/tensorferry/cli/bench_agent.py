# SPDX-License-Identifier: Apache-2.0
"""The processes of a benchmark on one host: a server that forks one for each connection.

Importing torch takes seconds, and every row of every round gets processes of its own; so this one
imports it once, starts no thread, and forks.  A harness that closes its connection wants the process
at the other end gone, whatever it is stuck in.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from tensorferry.cli import bench_worker
from tensorferry.cli.bench_link import Link, LinkLostError
from tensorferry.cli.demo_channel import parse_address
from tensorferry.errors import UsageError

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""What the environment says to libraries that start threads of their own."""

_TAIL_NBYTES = 2000
_PR_SET_PDEATHSIG = 1


@dataclass
class _Child:
    """A forked process, the connection that it serves, and what it wrote."""

    pid: int
    pidfd: int
    link: Link
    log: IO[bytes]

    def kill(self) -> None:
        """Kill it, and what it has started and not moved elsewhere."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def one_thread_each() -> None:
    """Start this program anew with one thread for torch and numpy, unless it was started so."""
    if all(os.environ.get(name) == value for name, value in ONE_THREAD.items()):
        return
    environment = {**os.environ, **ONE_THREAD}
    os.execve(sys.executable, [sys.executable, "-m", "tensorferry.cli", *sys.argv[1:]], environment)  # noqa: S606


def listen(address: str) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        UsageError: The address has another form, or cannot be listened on.
    """
    host, port = parse_address(address)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=16)
    except OSError as error:
        raise UsageError(f"cannot listen on {address}: {error}") from error


def serve(listener: socket.socket) -> None:
    """Fork a process for each connection until the first one, the harness's own, is closed.

    Whatever ends it, none of the processes is left.
    """
    session, _ = listener.accept()
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(session, select.POLLRDHUP)
    children: list[_Child] = []
    try:
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if session.fileno() in ready:
                return
            for child in [one for one in children if ready & {one.pidfd, one.link.fileno()}]:
                children.remove(child)
                poll.unregister(child.pidfd)
                poll.unregister(child.link)
                _bury(child)
            if listener.fileno() in ready:
                child = _fork(listener, [session, *(one.link for one in children)])
                children.append(child)
                poll.register(child.pidfd, select.POLLIN)
                poll.register(child.link, select.POLLRDHUP)
    finally:
        for child in children:
            child.kill()
        session.close()
        listener.close()


def _fork(listener: socket.socket, inherited: Sequence[socket.socket | Link]) -> _Child:
    connection, _ = listener.accept()
    link = Link(connection)
    log = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the child is buried)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        with suppress(OSError):  # the child has done it already, or has ended
            os.setpgid(pid, pid)
        return _Child(pid, os.pidfd_open(pid), link, log)
    status = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a peer that crashes would write gigabytes
        for other in [listener, *inherited]:
            other.close()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        if os.getppid() == parent:
            bench_worker.work(link)
            status = 0
    except Exception as error:
        traceback.print_exc()
        with suppress(LinkLostError):
            link.tell({"error": _told(error), "lost": isinstance(error, (LinkLostError, ConnectionError))})
            status = 0
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)  # the ends of some libraries hang once their peer has gone


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _bury(child: _Child) -> None:
    """End a child whose harness has gone, or that has ended; then say how, unless it ended well."""
    child.kill()
    _, status = os.waitpid(child.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code:
        child.log.seek(0)
        tail = child.log.read().decode(errors="replace").strip()[-_TAIL_NBYTES:]
        ended = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        with suppress(LinkLostError):
            child.link.tell({"error": f"its process {ended}\n{tail}".strip(), "lost": False})
    os.close(child.pidfd)
    child.link.close()
    child.log.close()
