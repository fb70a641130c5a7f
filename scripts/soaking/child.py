# SPDX-License-Identifier: Apache-2.0
"""The supervisor's end of a process: a socket that never blocks, and signals that never miss."""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path

from soaking.consuming import ConsumerProcess
from soaking.judge import Life
from soaking.messages import MESSAGE_NBYTES, Assignment, Settings
from soaking.process import Process, run_process
from soaking.producing import ProducerProcess

_CLASSES: dict[str, type[Process]] = {"producer": ProducerProcess, "consumer": ConsumerProcess}

# UCX's last words when it aborts a producer because a consumer vanished (docs/security.md): while it
# emulated a get for it, and in UCX 1.13 while they connected.
_KNOWN_ABORTS = ("unexpected error: Endpoint timeout", "stubs.c:", "got REP message")


class Child:
    """A process that was started.

    Args:
        kind: ``"producer"`` or ``"consumer"``.
        index: Which of its kind.
        settings: How it shall be.
        context: Starts it.
    """

    def __init__(self, kind: str, index: int, settings: Settings, context: ForkServerContext) -> None:
        self.kind = kind
        self.index = index
        self.name = settings.name
        self.access = settings.access
        self.life = Life(settings.name)
        self.ready = False
        self.stopped = False
        self.finishing = False
        self.heard = time.monotonic()
        self.running: dict[str, Assignment] = {}
        self.baseline: dict[str, int] = {}
        self._log = settings.log
        self._outgoing: deque[bytes] = deque()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for one in (self.channel, theirs):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_NBYTES)
        self.channel.setblocking(False)
        target = (_CLASSES[kind], theirs, settings)
        self._process = context.Process(target=run_process, args=target, name=settings.name)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        # A number could be another process's by the time of a signal; this cannot.
        self._pidfd = os.pidfd_open(self._process.pid)

    @property
    def available(self) -> bool:
        """Whether it can be given something to do."""
        return self.ready and not self.finishing and self.life.killed is None

    def reads(self, producer: Child) -> bool:
        """Whether this consumer can read what that producer offers."""
        return self.access == "auto" or producer.access in (self.access, "auto")

    def send(self, message: object) -> None:
        """Queue a message; a process that is stopped takes it later."""
        self._outgoing.append(pickle.dumps(message))
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes."""
        while self._outgoing:
            try:
                self.channel.send(self._outgoing[0])
            except BlockingIOError:
                return
            except OSError:  # it is dead
                self._outgoing.clear()
                return
            self._outgoing.popleft()

    def received(self) -> Iterator[object]:
        """Yield the messages that are there.

        Raises:
            EOFError: The process has ended.
        """
        while True:
            try:
                data = self.channel.recv(MESSAGE_NBYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                raise EOFError
            self.heard = time.monotonic()
            yield pickle.loads(data)

    def stop(self) -> None:
        """Send SIGSTOP."""
        self.stopped = True
        self.life.stops.append((time.monotonic(), math.inf))
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT if it is stopped."""
        if self.stopped:
            self._signal(signal.SIGCONT)
            self.stopped = False
            self.heard = time.monotonic()
            self.life.stops[-1] = (self.life.stops[-1][0], self.heard)

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.life.killed is None:
            self.life.killed = time.monotonic()
        self._signal(signal.SIGKILL)

    def explain(self) -> None:
        """Have it write down where its threads are, and give it the time."""
        self._signal(signal.SIGUSR1)
        time.sleep(0.5)

    def bury(self) -> int:
        """Return the exit status of a process that has ended, or is about to; it is killed if it does not."""
        self._process.join(5)
        if self._process.exitcode is None:
            self.explain()
            self._signal(signal.SIGKILL)
            self._process.join(5)
        self.channel.close()
        os.close(self._pidfd)
        return 0 if self._process.exitcode is None else self._process.exitcode

    def aborted_by_ucx(self) -> bool:
        """Whether UCX aborted it in a way that is known of UCX."""
        words = Path(self._log).read_text(errors="replace")
        return self.kind == "producer" and any(known in words for known in _KNOWN_ABORTS)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)
