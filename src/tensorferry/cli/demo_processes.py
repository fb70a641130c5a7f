# SPDX-License-Identifier: Apache-2.0
"""The demo's stages as processes of this host, which always end with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorferry.errors import TensorferryError

LOST_STATUS = 3  # of a stage that ended because another one did

_END_SECONDS = 10.0
_POLL_SECONDS = 0.1
_IDLE_SECONDS = 300.0

OnEvent = Callable[[dict[str, Any]], None]


class StageError(TensorferryError):
    """A stage ended with an error or did nothing any more; the message has what it said."""


class StageProcess:
    """One stage; its events come to ``on_event`` on a thread of its own.

    Args:
        name: Of the stage.
        options: Of ``tensorferry demo``.
        on_event: Told what the stage has done.
    """

    def __init__(self, name: str, options: Sequence[str], on_event: OnEvent) -> None:
        self.name = name
        self._port = 0
        self._listening = threading.Event()
        self._on_event = on_event
        self._said: list[str] = []
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        command = [sys.executable, "-m", "tensorferry.cli", "demo", name, "--events", *options]
        self.process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log, encoding="utf-8"
        )
        self._reader = threading.Thread(target=self._read, name=f"demo-{name}", daemon=True)
        self._reader.start()

    def address(self) -> str:
        """Wait until the stage listens, and return where.

        Raises:
            StageError: It ended instead.
        """
        while not self._listening.wait(_POLL_SECONDS):
            if self.process.poll() is not None:
                raise StageError(self.failure())
        return f"127.0.0.1:{self._port}"

    def failure(self) -> str:
        """Return how the stage, which has ended, did so, and what it said."""
        self._reader.join(_END_SECONDS)
        self._log.seek(0)
        log = ("".join(self._said) + self._log.read()).strip()
        return f"the {self.name} ended with status {self.process.returncode}" + (f":\n{log}" if log else "")

    def join(self) -> None:
        """Reap the process, which has ended or is about to, and hear the last it says."""
        self.process.wait()
        self._reader.join(_END_SECONDS)
        self._log.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:  # UCX writes its log to stdout
                    self._said.append(line)
                    continue
                if event["event"] == "listening":
                    self._port = event["port"]
                    self._listening.set()
                else:
                    self._on_event(event)


def run_pipeline(common: Sequence[str], prompts: Path | None, out: Path, on_event: OnEvent) -> None:
    """Run encoder, denoiser and decoder as processes until all have ended.

    Args:
        common: Options for each of them.
        prompts: The file, or None for the built-in ones.
        out: Folder for the pictures.
        on_event: Told what they do, on other threads.

    Raises:
        StageError: One of them failed, or none did anything for five minutes.

    However it ends, none of the processes is left. To be called on the main thread, since it holds signals.
    """
    stages: list[StageProcess] = []
    heard = [time.monotonic()]

    def hear(event: dict[str, Any]) -> None:
        heard[0] = time.monotonic()
        on_event(event)

    def start(name: str, *options: str) -> StageProcess:
        with _signals_held():
            stages.append(StageProcess(name, [*common, *options], hear))
        return stages[-1]

    try:
        decoder = start("decoder", "--listen", "127.0.0.1:0", "--out", str(out))
        denoiser = start("denoiser", "--listen", "127.0.0.1:0", "--connect", decoder.address())
        given = ["--prompts", str(prompts)] if prompts else []
        start("encoder", "--connect", denoiser.address(), *given)
        while any(stage.process.poll() is None for stage in stages):
            time.sleep(_POLL_SECONDS)
            if any(stage.process.poll() for stage in stages):
                break
            if time.monotonic() - heard[0] > _IDLE_SECONDS:
                raise StageError(f"no stage has done anything for {_IDLE_SECONDS:.0f} s")
        _raise_failure(stages)
    finally:
        _end(stages)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Put off SIGINT and SIGTERM until the end of the block, so that no process is made that nobody knows.

    They are held by handlers, not by a mask or by ignoring them, since a new process would inherit these.
    """
    held: list[int] = []
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(number, lambda number, frame: held.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


def _raise_failure(stages: Sequence[StageProcess]) -> None:
    """Report the stages that failed of themselves, else those that followed another one."""
    end = time.monotonic() + 1.0
    failed: list[StageProcess] = []
    while not (own := [stage for stage in failed if stage.process.returncode != LOST_STATUS]):
        failed = [stage for stage in stages if stage.process.poll()]
        if not failed or time.monotonic() > end:
            break
        time.sleep(_POLL_SECONDS)
    if failed:
        raise StageError("\n".join(stage.failure() for stage in own or failed))


def _end(stages: Sequence[StageProcess]) -> None:
    """Terminate what still runs, kill what does not end by itself, and reap all."""
    end = time.monotonic() + _END_SECONDS
    running = [stage.process for stage in stages if stage.process.poll() is None]
    try:
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
    finally:  # also when the user interrupts again
        for process in running:
            process.kill()
        for stage in stages:
            stage.join()
