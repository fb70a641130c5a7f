# SPDX-License-Identifier: Apache-2.0
"""A process of the soak that pulls."""

from __future__ import annotations

import asyncio
import queue
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import tensorferry
from soaking.judge import Call
from soaking.messages import Assignment, Concluded, Settings
from soaking.payloads import digests
from soaking.process import KEY, OPTIONS, Process, ended, failed


class ConsumerProcess(Process):
    """Does with each publication what it is told to, from several threads."""

    def __init__(self, channel: socket.socket, settings: Settings) -> None:
        super().__init__(channel, settings)
        self._assignments: queue.Queue[Assignment] = queue.Queue()
        self._was_late = False
        self.open()

    def open(self) -> None:
        """Open a consumer."""
        self._consumer = tensorferry.Consumer(
            self.settings.pool_nbytes,
            backend=self.settings.backend,
            access=self.settings.access,  # type: ignore[arg-type]
            backend_options=OPTIONS,
            key=KEY,
            name=self.settings.name,
        )

    def close(self, timeout: float) -> None:
        """Close it."""
        self._consumer.close(timeout)

    def held(self) -> dict[str, int]:
        """Return bytes of the landing pool in use or in quarantine."""
        return {"landing_nbytes": self._consumer.statistics().allocated_nbytes}

    def obey(self, order: object) -> None:
        """Do what the supervisor says."""
        if isinstance(order, Assignment):
            self._assignments.put(order)
        else:
            super().obey(order)

    def work(self, rng: random.Random) -> None:
        """Do what is assigned until it is quiet and everything is done."""
        while True:
            try:
                one = self._assignments.get(timeout=0.1)
            except queue.Empty:
                if self.quiet.is_set():
                    return
                continue
            getattr(self, f"_{one.action}")(one, rng)
            self.send(Concluded(one.request))

    def _begin(self, what: str, one: Assignment, **details: Any) -> tuple[tensorferry.Consumer, Call]:
        opening = self.opening  # before the consumer, see Process.obey
        call = Call(what, one.request, time.monotonic(), 0.0, one.timeout, opening=opening)
        return self._consumer, replace(call, **details)

    def _pull(self, one: Assignment, rng: random.Random, *, release: bool = True) -> bool:
        """Pull all or some names; return whether it brought something."""
        names = rng.sample(list(one.expected), rng.randint(1, min(4, len(one.expected))))
        if rng.random() < 0.8:
            names = list(one.expected)
        consumer, call = self._begin("pull", one, expected={name: one.expected[name] for name in names})
        if self.settings.inject == "late" and not self._was_late:
            self._was_late = True
            time.sleep(one.timeout + 25)
        try:
            payload = pull(consumer, one, names, rng, release=release)
        except tensorferry.TensorferryError as error:
            self.send(failed(call, error))
            return False
        call = ended(call)  # hashing takes none of its time
        self.send(replace(call, found=digests(payload), nbytes=nbytes_of(payload)))
        return True

    def _hold(self, one: Assignment, rng: random.Random) -> None:
        if self._pull(one, rng, release=False):
            time.sleep(one.pause)
            if rng.random() < 0.5:  # else its lease must end it
                self._give_back("release", one)

    def _borrow(self, one: Assignment, rng: random.Random) -> None:
        consumer, call = self._begin("borrow", one, expected=one.expected)
        inside = 0.0
        try:
            with consumer.borrow(one.manifest, timeout=one.timeout) as payload:
                entered = time.monotonic()
                found = digests(payload)
                inside = time.monotonic() - entered
        except tensorferry.TensorferryError as error:
            # What the views held counts for nothing then, as the documentation says.
            self.send(failed(replace(call, timeout=call.timeout + inside), error))
            return
        self.send(ended(call, timeout=call.timeout + inside, found=found, nbytes=one.nbytes))

    def _cancel(self, one: Assignment, rng: random.Random) -> None:
        consumer, call = self._begin("cancel", one, expected=one.expected, timeout=one.pause, cancelled=True)
        try:
            request = consumer.start_pull(one.manifest, timeout=one.timeout)
            if rng.random() < 0.5:
                payload = asyncio.run(awaited(request, one.pause))
            else:
                time.sleep(one.pause)
                request.cancel()
                payload = request.result()
        except (tensorferry.TensorferryError, asyncio.CancelledError) as error:
            self.send(failed(call, error))
            return
        call = ended(call)
        self.send(replace(call, found=digests(payload), nbytes=one.nbytes))

    def _reject(self, one: Assignment, rng: random.Random) -> None:
        for _ in range(rng.choice([1, 1, 2])):
            self._give_back("reject", one)

    def _release(self, one: Assignment, rng: random.Random) -> None:
        self._give_back("release", one)

    def _give_back(self, what: str, one: Assignment) -> None:
        consumer, call = self._begin(what, one, timeout=5.0)
        try:
            getattr(consumer, what)(one.manifest)
        except tensorferry.TensorferryError as error:
            self.send(failed(call, error))
            return
        self.send(ended(call))


def pull(
    consumer: tensorferry.Consumer,
    one: Assignment,
    names: Sequence[str],
    rng: random.Random,
    *,
    release: bool,
) -> dict[str, Any]:
    """Pull in one of the ways that there are."""
    options: dict[str, Any] = {"timeout": one.timeout, "release": release}
    if list(names) != list(one.expected) or rng.random() < 0.3:
        options["names"] = names
    way = rng.choice(["pull", "pull", "result", "await"])
    if way == "pull":
        return consumer.pull(one.manifest, **options)
    request = consumer.start_pull(one.manifest, **options)
    return request.result() if way == "result" else asyncio.run(awaited(request))


async def awaited(request: tensorferry.Request[dict[str, Any]], pause: float | None = None) -> dict[str, Any]:
    """Wait for a request in an event loop, or give it up after a pause."""
    waiting = asyncio.ensure_future(_wait(request))
    if pause is not None:
        await asyncio.sleep(pause)
        waiting.cancel()
    return await waiting


async def _wait(request: tensorferry.Request[dict[str, Any]]) -> dict[str, Any]:
    return await request


def nbytes_of(value: Any) -> int:
    """Return the bytes of all tensors in a payload."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(nbytes_of, value.values()))
    return sum(map(nbytes_of, value)) if isinstance(value, (list, tuple)) else 0
