#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A fleet of encoders and denoisers on a simulated clock, with the room and leases that producers have.

Requests come at random times and go to a random encoder.  Its payload takes a slot of the encoder's pool
(first come first served, as ``publish`` with a timeout) and a lease, and waits for the less busy one of two
random denoisers.  That one pulls it when it begins to work on it, and releases it.  A lost payload is one
that nobody ever pulls or rejects: its slot is held to the end of the lease.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from rich.console import Console
from rich.table import Table

from payload_mixes import LARGEST, MIB, MIXES, moments
from tensorferry.arguments import Deadline, as_nbytes
from tensorferry.lease import Lease
from tensorferry.room import Loan, Room
from tensorferry.steps import Steps

BANDWIDTH = 5e9
"""Bytes a second of one pull."""

UNIT = 4096
NEVER = 1e9
ENDLESS = 1 << 50


@dataclass(frozen=True)
class Scenario:
    """A fleet and its load.

    Attributes:
        encoders: Producers, each with a pool of ``pool`` bytes.
        denoisers: Consumers, each working on one request at a time.
        mix: Name of the payloads' sizes.
        load: Part of the time for which denoisers are busy.
        service: Seconds of work on one request, on average; exponentially distributed.
        lost: Part of the payloads that nobody pulls or rejects.
        lease: Seconds.
        pool: Bytes.
        publications: How many count; those of the beginning do not.
    """

    encoders: int
    denoisers: int
    mix: str = "mixed"
    load: float = 0.85
    service: float = 4.0
    lost: float = 0.0
    lease: float = NEVER
    pool: int = ENDLESS
    publications: int = 60_000
    seed: int = 0

    @property
    def beginning(self) -> float:
        """Seconds until the fleet is in its stride: many times the work on a request, and a lease."""
        return 30 * self.service + (self.lease if self.lost else 0)

    @property
    def rate(self) -> float:
        """Requests a second, all encoders together."""
        return self.load * self.denoisers / (self.service + moments(self.mix)[0] / BANDWIDTH)


@dataclass
class Outcome:
    """What was counted, without the beginning of the run."""

    waits: list[float] = field(default_factory=list)
    holds: list[float] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    expired: int = 0

    @property
    def waited(self) -> float:
        """Part of the publications that waited for room."""
        return sum(wait > 0 for wait in self.waits) / len(self.waits)

    @property
    def too_late(self) -> float:
        """Part of the pulls that came after the end of the lease."""
        return self.expired / (self.expired + len(self.holds))

    @property
    def hold(self) -> float:
        """Mean seconds from a publication to its release."""
        return statistics.fmean(self.holds)


@dataclass(eq=False)
class Publication:
    """A payload in a pool."""

    room: Room
    loan: Loan
    lease: Lease
    since: float
    counted: bool
    being_read: bool = False


class Fleet:
    """Runs one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rng = random.Random(scenario.seed)
        self._now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ready: deque[Callable[[], None]] = deque()
        self._rooms = [Room(scenario.pool, UNIT, owner=f"encoder {n}") for n in range(scenario.encoders)]
        self._queues: list[deque[Publication]] = [deque() for _ in range(scenario.denoisers)]
        self._busy = [False] * scenario.denoisers
        self._counted = 0
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Let time pass until all publications have been made, and have ended."""
        self._arrive()
        while self._events:
            self._now, _, deed = heapq.heappop(self._events)
            deed()
            while self._ready:
                self._ready.popleft()()
        assert not any(room.allocated_nbytes or room.waiters for room in self._rooms), "something was kept"
        return self._outcome

    def _after(self, seconds: float, deed: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), deed))

    def _arrive(self) -> None:
        counted = self._now >= self._scenario.beginning
        self._counted += counted
        room = self._rng.choice(self._rooms)
        nbytes = MIXES[self._scenario.mix](self._rng)
        if counted:
            self._outcome.held.append(room.allocated_nbytes)
        self._go_on(room.take(nbytes, "payload", Deadline(NEVER)), room, self._now, counted)
        if self._counted < self._scenario.publications:
            self._after(self._rng.expovariate(self._scenario.rate), self._arrive)

    def _go_on(self, steps: Steps[Loan], room: Room, asked: float, counted: bool) -> None:
        """Resume the steps of ``Room.take``: they end with a loan, or say what they wait for."""
        try:
            wait = next(steps)
        except StopIteration as end:
            if counted:
                self._outcome.waits.append(self._now - asked)
            self._publish(room, end.value, counted)
        else:
            # The callback may run under the room's lock: the steps go on after it.
            go_on = partial(self._go_on, steps, room, asked, counted)
            wait.pending.watch(partial(self._ready.append, go_on))

    def _publish(self, room: Room, loan: Loan, counted: bool) -> None:
        lease = Lease(duration=self._scenario.lease, consumers=1, now=self._now)
        publication = Publication(room, loan, lease, self._now, counted)
        if self._scenario.lease < NEVER:
            self._after(self._scenario.lease, partial(self._expire, publication))
        if self._rng.random() < self._scenario.lost:
            return
        some, other = (self._rng.randrange(self._scenario.denoisers) for _ in range(2))
        chosen = min(some, other, key=lambda number: len(self._queues[number]) + self._busy[number])
        self._queues[chosen].append(publication)
        if not self._busy[chosen]:
            self._work(chosen)

    def _work(self, denoiser: int) -> None:
        """Begin with the next payload whose lease has not ended."""
        queue = self._queues[denoiser]
        self._busy[denoiser] = False
        while queue:
            publication = queue.popleft()
            if publication.lease.live:
                publication.being_read = self._busy[denoiser] = True
                self._after(publication.loan.nbytes / BANDWIDTH, partial(self._pulled, denoiser, publication))
                return
            self._outcome.expired += publication.counted

    def _pulled(self, denoiser: int, publication: Publication) -> None:
        if publication.lease.release(b"denoiser", self._now):
            if publication.counted:
                self._outcome.holds.append(self._now - publication.since)
        else:
            self._outcome.expired += publication.counted
        publication.room.give_back(publication.loan)
        self._after(self._rng.expovariate(1 / self._scenario.service), partial(self._work, denoiser))

    def _expire(self, publication: Publication) -> None:
        if publication.lease.expire(self._now) and not publication.being_read:
            publication.room.give_back(publication.loan)


def pool_of_rule(mix: str, held: float) -> int:
    """Return the bytes of a pool that docs/scaling.md recommends for ``held`` bytes on average."""
    mean, square = moments(mix)
    return int(1.5 * held + 3 * math.sqrt(held * square / mean)) + LARGEST[mix]


def lease_of_rule(service: float) -> float:
    """Return the seconds of a lease that docs/scaling.md recommends."""
    return 10 * service


def held_on_average(scenario: Scenario) -> float:
    """Return the bytes that one producer holds, where the pool is never full."""
    return statistics.fmean(Fleet(replace(scenario, pool=ENDLESS)).run().held)


def show_fleet(scenario: Scenario) -> None:
    """Run a fleet, with the rule's pool if its own is 0, and print what came out."""
    held = held_on_average(scenario)
    recommended = pool_of_rule(scenario.mix, held)
    scenario = replace(scenario, pool=scenario.pool or recommended)
    outcome = Fleet(scenario).run()
    table = Table(show_header=False)
    for label, value in (
        ("requests a second, all encoders", f"{scenario.rate:.1f}"),
        ("held by one producer, if its pool is never full", f"{held / MIB:.1f} MiB on average"),
        ("pool that the rule recommends", f"{recommended / MIB:.0f} MiB"),
        ("pool", f"{scenario.pool / MIB:.0f} MiB"),
        ("lease", f"{scenario.lease:g} s"),
        (
            "from publication to release",
            f"{outcome.hold:.2f} s on average, {max(outcome.holds):.1f} s at most",
        ),
        ("publications that waited for room", f"{outcome.waited:.2%}"),
        ("wait for room, all publications", f"{statistics.fmean(outcome.waits) * 1e3:.1f} ms on average"),
        ("pulls that came too late", f"{outcome.too_late:.2%}"),
    ):
        table.add_row(label, value)
    Console().print(table)


def main() -> None:
    """Run one fleet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encoders", type=int, default=200)
    parser.add_argument("--denoisers", type=int, default=4000)
    parser.add_argument("--mix", choices=MIXES, default="mixed", help="sizes of the payloads")
    parser.add_argument("--load", type=float, default=0.85, help="part of the time for which denoisers work")
    parser.add_argument("--service", type=float, default=4.0, help="seconds of work on a request, on average")
    parser.add_argument("--lost", type=float, default=0.0, help="part that nobody pulls or rejects")
    parser.add_argument("--lease", type=float, help="seconds; by default those of the rule")
    parser.add_argument("--pool", help="of each encoder, such as 2GiB; by default that of the rule")
    given = vars(parser.parse_args())
    given["lease"] = given["lease"] or lease_of_rule(given["service"])
    given["pool"] = as_nbytes(given["pool"], "--pool") if given["pool"] else 0
    show_fleet(Scenario(**given))


if __name__ == "__main__":
    main()
