# SPDX-License-Identifier: Apache-2.0
"""Scripts that run in a process of their own, for tests of how that process ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap

PREAMBLE = """
import contextlib, gc, os, signal, sys, threading, time, warnings
import torch
import tensorferry
from tensorferry import Consumer, Producer
OPTIONS = {"backend_options": {"TLS": "tcp", "NET_DEVICES": "lo"}}
PAYLOAD = {"x": torch.arange(100_000)}
"""


# UCX writes to the standard output, for example that a peer could not be reached.
_UCX_LOG = re.compile(r"^\[\d+\.\d+\] .* UCX .*\n", re.MULTILINE)


def start(script: str, library: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", PREAMBLE + textwrap.dedent(script)],
        env={**os.environ, "TENSORFERRY_UCX": library},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(script: str, library: str = "", *, status: int = 0, within: float = 60.0) -> str:
    """Run a script, which must end with this status in this time and say nothing on stderr.

    Returns what it printed, without UCX's lines.
    """
    found, out, err = end_of(start(script, library), within)
    assert (found, err) == (status, "")
    return out


class Lone:
    """A process with a producer that has published "a".

    Args:
        library: Its UCX.
        options: Added to those of the producer.
    """

    def __init__(self, library: str = "", **options: str) -> None:
        self.process = start(
            f"""
            OPTIONS["backend_options"].update({options!r})
            producer = Producer("4MiB", access="served", **OPTIONS)
            print(producer.publish("a", PAYLOAD, lease=600).hex(), flush=True)
            time.sleep(600)
            """,
            library,
        )
        assert self.process.stdout is not None
        self.manifest = self.process.stdout.readline().strip()

    def __enter__(self) -> Lone:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.communicate()


def end_of(process: subprocess.Popen[str], within: float) -> tuple[int, str, str]:
    """Return exit status, output (without UCX's lines) and errors of a process, which must end in time."""
    try:
        out, err = process.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # faulthandler says where it hangs
        out, err = process.communicate()
        raise AssertionError(f"still running after {within:g} s: {out}{err}") from None
    return process.returncode, _UCX_LOG.sub("", out), err
