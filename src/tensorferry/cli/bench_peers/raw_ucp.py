# SPDX-License-Identifier: Apache-2.0
"""What UCX gives at best: a program in C++ that reads one buffer again and again.

It is ``raw_ucp`` of the native unit; both sides of it look for progress without a pause.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorferry.backends.ucx_library import choose_library
from tensorferry.backends.ucx_native import defaults_of, load_library, offers_rdma
from tensorferry.cli.bench_link import Link
from tensorferry.cli.bench_peers import base
from tensorferry.cli.bench_peers.base import Inspect, Job, Received, Tensors

REQUIREMENT = ""

PROGRAM = "raw_ucp"
_BUILD = (
    "cmake -S transport -B build/bench -DTENSORFERRY_BENCH=ON && cmake --build build/bench; it is looked for "
    "there, on PATH, and where TENSORFERRY_RAW_UCP says"
)


def load() -> None:
    """Find the program.

    Raises:
        ImportError: It has not been built.
    """
    _program()


def _program() -> str:
    named = os.environ.get("TENSORFERRY_RAW_UCP", "")
    beside = Path("build/bench/bench") / PROGRAM
    for candidate in (named, shutil.which(PROGRAM), str(beside)):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise ImportError(f"the program {PROGRAM} is not built: {_BUILD}")


def _settings(job: Job) -> dict[str, str]:
    """Return what `rdma` and `served` access have: options win over the environment, it over defaults."""
    defaults = {
        **defaults_of(load_library()),
        "TLS": "ib" if job.options["how"] == "get" and offers_rdma(job.settings) else "tcp",
    }
    unset = {name: value for name, value in defaults.items() if f"UCX_{name}" not in os.environ}
    return {**unset, **job.settings}


def _start(role: str, job: Job, more: Iterable[str]) -> subprocess.Popen[str]:
    path, _ = choose_library(os.environ, "")
    command = [_program(), role, path, str(job.payload.nbytes), *more]
    command += [f"{name}={value}" for name, value in _settings(job).items()]
    return subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next line that is the program's; UCX writes its log to stdout, too."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            said: dict[str, Any] = json.loads(line)
            return said
    raise RuntimeError(f"{PROGRAM} ended with status {process.wait()}")


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def _end(process: subprocess.Popen[str]) -> None:
    process.communicate()


class Sender(base.Sender):
    """Runs the program that is read from."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        self._process = _start("serve", job, ())
        self._said = _line(self._process)
        link.tell(self._said)

    def send(self, payloads: list[Tensors]) -> float:
        began = time.perf_counter()
        self.link.receive()
        return began

    def close(self) -> None:
        _end(self._process)

    def about(self) -> dict[str, str]:
        return {"UCX": self._said["version"], **_settings(self.job)}


class Receiver(base.Receiver):
    """Runs the program that reads."""

    def __init__(self, job: Job, link: Link) -> None:
        super().__init__(job, link)
        serving = link.hear()
        words = [serving["worker"], str(serving["address"]), serving["key"], job.options["how"]]
        self._process = _start("read", job, words)

    def receive(self, inspect: Inspect) -> Received:
        began = time.perf_counter()
        _say(self._process, str(self.job.batch))
        said = _line(self._process)
        end = time.perf_counter()
        self.link.send(b"done")
        if not said["identical"]:
            raise RuntimeError(f"{PROGRAM} read other bytes than were served")
        return Received([], began, wire=said["seconds"], end=end)

    def close(self) -> None:
        _end(self._process)
