# SPDX-License-Identifier: Apache-2.0
"""Hands publications on to consumers, and says what they shall do with them."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from soaking.child import Child
from soaking.judge import Publication
from soaking.messages import LEASE, Assignment, Credit, Published

_SHARES = {
    "reject": 0.05,
    "release": 0.03,
    "hold": 0.05,
    "cancel": 0.08,
    "borrow": 0.15,
}  # of all assignments
_QUEUE = 6  # assignments of one consumer at a time
_TIMEOUTS = (0.3, 1.0, 3.0, 10.0, 10.0)


@dataclass
class _Open:
    """A publication that consumers have not dealt with yet."""

    published: Published
    producer: Child
    judged: Publication
    missing: int
    given: set[str] = field(default_factory=set)
    running: int = 0


class Broker:
    """Gives each publication to as many consumers as it is for.

    Args:
        rng: Draws what consumers do.
        faults: Kinds of faults that may be drawn.
        counts: Of faults.
        later: Calls something after some seconds.
    """

    def __init__(
        self,
        rng: random.Random,
        faults: frozenset[str],
        counts: Counter[str],
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.faults = faults
        self._random = rng
        self._counts = counts
        self._later = later
        self._publications: dict[str, _Open] = {}
        self._backlog: deque[_Open] = deque()

    @property
    def idle(self) -> bool:
        """Whether consumers have dealt with everything."""
        return not self._publications

    def judged(self, request: str) -> Publication | None:
        """Return what the judge has to know of a publication, None if it has been dealt with."""
        found = self._publications.get(request)
        return None if found is None else found.judged

    def add(self, message: Published, producer: Child, consumers: Sequence[Child]) -> None:
        """Take a new publication."""
        call = message.call
        able = sum(consumer.reads(producer) for consumer in consumers)
        judged = Publication(
            producer.life, call.opening, call.started, message.lease, message.nbytes, producer.access
        )
        one = _Open(message, producer, judged, missing=max(1, min(message.consumers, able)))
        self._publications[call.request] = one
        self._backlog.append(one)

    def dispatch(self, consumers: Sequence[Child]) -> None:
        """Give what waits to consumers that have time for it."""
        for _ in range(len(self._backlog)):
            one = self._backlog.popleft()
            able = [child for child in consumers if self._can_take(child, one)]
            for child in self._random.sample(able, min(len(able), one.missing)):
                self._assign(child, one)
            if not one.missing:
                continue
            if time.monotonic() < one.judged.began + LEASE + 2:
                self._backlog.append(one)
            else:  # nobody has time for it, and it has ended by now
                one.missing = 0
                self._close_if_done(one)

    def concluded(self, request: str) -> None:
        """A consumer has dealt with its assignment, or died over it."""
        one = self._publications.get(request)
        if one is not None:
            one.running -= 1
            self._close_if_done(one)

    def forget(self) -> None:
        """Forget everything that is under way."""
        self._publications.clear()
        self._backlog.clear()

    def _can_take(self, child: Child, one: _Open) -> bool:
        new = child.name not in one.given and child.reads(one.producer)
        return new and child.available and len(child.running) < _QUEUE

    def _assign(self, child: Child, one: _Open) -> None:
        rng, published = self._random, one.published
        request, action = published.call.request, self._draw()
        if action in self.faults:
            self._counts[action] += 1
        assignment = Assignment(
            action,
            request,
            published.manifest,
            published.expected,
            published.nbytes,
            timeout=rng.choice(_TIMEOUTS),
            pause=rng.uniform(0.0, 2.0) if action == "hold" else rng.expovariate(50),
        )
        one.missing -= 1
        one.running += 1
        one.given.add(child.name)
        child.running[request] = assignment
        if published.lease < LEASE and rng.random() < 0.5:
            self._later(rng.uniform(0.0, 0.8), lambda: child.send(assignment))
        else:
            child.send(assignment)

    def _draw(self) -> str:
        drawn = self._random.random()
        for action, share in _SHARES.items():
            drawn -= share
            if drawn < 0:
                return action if action == "borrow" or action in self.faults else "pull"
        return "pull"

    def _close_if_done(self, one: _Open) -> None:
        if not one.missing and not one.running:
            del self._publications[one.published.call.request]
            one.producer.send(Credit())
