# SPDX-License-Identifier: Apache-2.0
"""The doctor's trial: a producer and a consumer, each a process of its own, since UCX may end one.

A process reads one JSON object a line and answers each with one.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch

from tensorferry.cli.doctor_findings import Finding
from tensorferry.cli.doctor_host import mapped_libraries
from tensorferry.errors import TensorferryError

NBYTES = 64 << 20
_PULLS = 4
_SECONDS = 60.0


def try_out() -> Iterator[Finding]:
    """Publish and pull 64 MiB in each access mode that is offered here."""
    copy = _copy_seconds()
    yield Finding("memory", "ok", f"copying 64 MiB: {NBYTES / copy / 1e9:.1f} GB/s")
    with ExitStack() as stack:
        producer = stack.enter_context(Process("produce"))
        try:
            opened = producer.ask({"do": "open"})
        except TrialError as error:
            yield Finding("trial", "fail", f"a producer cannot be opened: {error}", _CURE)
            return
        yield Finding("UCX", "ok", f"version {opened['version']} works")
        others = [path for path in opened["mapped"] if path != opened["library"]]
        if others:
            yield Finding(
                "UCX",
                "warn",
                f"another UCX is in the process as well: {', '.join(others)}",
                "let only one package bring UCX, or name one by TENSORFERRY_UCX",
            )
        ours = [
            f"{name}={value}" for name, value in opened["settings"].items() if f"UCX_{name}" not in os.environ
        ]
        yield Finding("settings", "note", f"{', '.join(ours)} (tensorferry's defaults)")
        for access in opened["offers"]:
            yield _pulled(access, producer, copy)


_CURE = "the message says which setting or limit; docs/errors.md has all of them"


def _pulled(access: str, producer: Process, copy: float) -> Finding:
    area = f"pull, {access}"
    try:
        with Process("consume") as consumer:
            seconds = []
            for _ in range(_PULLS):
                manifest = producer.ask({"do": "publish"})["manifest"]
                answer = consumer.ask({"access": access, "manifest": manifest})
                seconds.append(float(answer["seconds"]))
    except TrialError as error:
        return Finding(area, "fail", f"pulling by {access} failed: {error}", _CURE)
    best = min(seconds)
    speed = f"64 MiB at {NBYTES / best / 1e9:.1f} GB/s, {copy / best:.0%} of copying it"
    return Finding(area, "ok", f"{speed}, over {', '.join(answer['transports'])}")


def _copy_seconds() -> float:
    source, target = np.ones(NBYTES, dtype=np.uint8), np.zeros(NBYTES, dtype=np.uint8)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


class TrialError(Exception):
    """A process of the trial has failed; the message says how."""


class Process:
    """One process of the trial; killed at the end of the block."""

    def __init__(self, role: str) -> None:
        command = [sys.executable, "-m", __spec__.name, role]
        self._process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with suppress(BrokenPipeError):
            self._process.communicate(timeout=10)
        self._process.kill()
        self._process.wait()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a question.

        Raises:
            TrialError: The process says that it failed, or ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise TrialError(self._last_words()) from None
        for line in self._process.stdout:
            if line.startswith("{"):  # UCX writes its log there, too
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise TrialError(answer["error"])
                return answer
        raise TrialError(self._last_words())

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        said = [line for line in self._process.stderr.read().splitlines() if line.strip()]
        status = self._process.wait(10)
        how = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"the process was {how}" + (f"; its last words: {said[-1][:300]}" if said else "")


def main(role: str) -> None:
    """Answer questions until there are no more; every answer is one line."""
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        answer = _Producing(stack).answer if role == "produce" else _Consuming(stack).answer
        for line in sys.stdin:
            try:
                said = answer(json.loads(line))
            except (TensorferryError, OSError, RuntimeError) as error:
                said = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(said), flush=True)


class _Producing:
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._number = 0
        self._payload = torch.arange(NBYTES // 8)

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        from tensorferry.backends.ucx_native import defaults_of, load_library
        from tensorferry.manifest import read_manifest
        from tensorferry.producer import Producer

        if question["do"] == "open":
            library = load_library()
            self._producer = self._stack.enter_context(Producer(2 * NBYTES, name="doctor"))
            manifest = self._producer.publish("offers", {"x": torch.zeros(1)})
            offers = [offer.access for offer in read_manifest(manifest).peer.offers]
            self._producer.revoke("offers")
            return {
                "version": library.version,
                "library": library.path,
                "mapped": mapped_libraries(),
                "offers": offers,
                "settings": defaults_of(library),
            }
        self._number += 1
        manifest = self._producer.publish(str(self._number), {"x": self._payload}, timeout=10, lease=_SECONDS)
        return {"manifest": manifest.hex()}


class _Consuming:
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._consumer: Any = None
        self._expected = torch.arange(NBYTES // 8)

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        from tensorferry.consumer import Consumer

        if self._consumer is None:
            self._consumer = self._stack.enter_context(
                Consumer(2 * NBYTES, access=question["access"], name="doctor")
            )
        began = time.perf_counter()
        got = self._consumer.pull(bytes.fromhex(question["manifest"]), timeout=20)["x"]
        seconds = time.perf_counter() - began
        if not torch.equal(got, self._expected):
            return {"error": "other bytes came than were published"}
        return {"seconds": seconds, "transports": self._consumer.statistics().peers[-1].transports}


if __name__ == "__main__":
    main(sys.argv[1])
