# SPDX-License-Identifier: Apache-2.0
"""The four curves: what a publication costs by its size, its tensors, the consumers and the live others."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import Self

import tensorferry
from growing.consuming import LOOPBACK, WAYS, ConsumerProcess, Pulled, settle
from growing.payloads import VARIANTS, Payload, Source

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

TENSOR = 64
"""Bytes of each of many tensors, and of the payloads beside many others."""

SHARED = Payload(1, MIB)
"""What consumers pull side by side."""

SHARED_COUNT = 128
"""How many of them, all consumers together."""

MOST_SLOTS = 65_536
"""Publications of one producer that may live at a time."""

_SLACK = MIB
_LEASE = 3600.0
_RELEASE_SECONDS = 120.0
_SECONDS = 0.05  # for the calls of a round at one point, and not more than
_CALLS = 50
_BURST_SECONDS = 0.5
_BURSTS = 3
_SAMPLED = 64  # of so many live publications one is looked at

_numbers = itertools.count()


Call = tuple[float, float, float]


@dataclass
class Line:
    """What one way cost at each point of a curve, in seconds: one figure for each round.

    Attributes:
        whole: From ``publish`` until the producer has its slot back and the consumer the tensors.
        publish: Of it, ``publish``.
        pull: Of it, from the manifest to the tensors.
    """

    whole: dict[int, list[float]] = field(default_factory=dict)
    publish: dict[int, list[float]] = field(default_factory=dict)
    pull: dict[int, list[float]] = field(default_factory=dict)

    def add(self, point: int, calls: Sequence[Call]) -> None:
        """Put in the medians of one round."""
        for place, column in enumerate((self.whole, self.publish, self.pull)):
            column.setdefault(point, []).append(statistics.median(call[place] for call in calls))

    def medians(self) -> dict[int, float]:
        """Return the medians of the rounds' whole times."""
        return {point: statistics.median(rounds) for point, rounds in self.whole.items()}

    def pulls(self) -> dict[int, float]:
        """Return the medians of the rounds' times from the manifest to the tensors."""
        return {point: statistics.median(rounds) for point, rounds in self.pull.items()}


class Curve:
    """A curve that is measured in rounds, in a ``with`` statement.

    Attributes:
        points: Where it is measured.
        lines: What was measured, by the way in which payloads were had.
    """

    def __init__(self, points: Sequence[int], ways: Sequence[str]) -> None:
        self.points = points
        self.lines = {way: Line() for way in ways}
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._opened.close()

    def round(self, *, counts: bool) -> None:
        """Measure every point once; a round that does not count makes one call of each."""
        raise NotImplementedError

    def _consumer(self, nbytes: int) -> ConsumerProcess:
        """Start a process with consumers that have room for so many bytes."""
        process = self._opened.enter_context(closing(ConsumerProcess()))
        process.open(nbytes)
        return process


def _producer(nbytes: int, **options: Any) -> tensorferry.Producer:
    """Return a producer in this process, which offers all access modes that there are over tcp."""
    return tensorferry.Producer(nbytes, backend_options=LOOPBACK, lease=_LEASE, **options)


class _Hand:
    """Hands payloads of a producer to a consumer, one after another."""

    def __init__(self, producer: tensorferry.Producer, consumer: ConsumerProcess, source: Source) -> None:
        self._producer = producer
        self._consumer = consumer
        self._source = source

    def calls(self, way: str, payload: Payload, *, counts: bool) -> list[Call]:
        """Have payloads taken for a short time, or one that does not count."""
        first = next(_numbers)
        # Two variants take turns: what is left of the last payload is never right.
        built = [payload.build(self._source, first + turn) for turn in (0, 1)]
        self._consumer.start("take", way, payload, first)
        settle()
        done: list[Call] = []
        end = time.perf_counter() + _SECONDS
        while not done or (counts and len(done) < _CALLS and time.perf_counter() < end):
            done.append(self._call(built[len(done) % 2]))
        self._consumer.tell(b"")
        return done

    def _call(self, tensors: dict[str, torch.Tensor]) -> Call:
        name = f"call {next(_numbers)}"
        began = time.perf_counter()
        manifest = self._producer.publish(name, tensors)
        published = time.perf_counter()
        self._consumer.tell(manifest)
        _wait_released(self._producer, name, [self._consumer])
        told = time.perf_counter()
        self._consumer.tell(b"told")
        pulled: Pulled = self._consumer.answer()
        return max(told, pulled.end) - began - pulled.unclocked, published - began, pulled.seconds


def _wait_released(producer: tensorferry.Producer, name: str, consumers: Sequence[ConsumerProcess]) -> None:
    end = time.monotonic() + _RELEASE_SECONDS
    while not producer.wait_released(name, 1.0):
        for consumer in consumers:
            consumer.check()
        if time.monotonic() > end:
            raise TimeoutError(f"{name!r} was not released within {_RELEASE_SECONDS:g} seconds")


class Sizes(Curve):
    """One tensor of any size."""

    def __init__(self, largest: int) -> None:
        super().__init__([4**power for power in range(17) if 4**power <= largest], list(WAYS))
        source = Source(self.points[-1])
        room = self.points[-1] + _SLACK
        producer = self._opened.enter_context(_producer(room))
        self._hand = _Hand(producer, self._consumer(room), source)

    def round(self, *, counts: bool) -> None:
        """Measure every size in every way."""
        for point, (way, line) in itertools.product(self.points, self.lines.items()):
            calls = self._hand.calls(way, Payload(1, point), counts=counts)
            if counts:
                line.add(point, calls)


class Tensors(Curve):
    """Many tensors of 64 bytes."""

    def __init__(self, most: int) -> None:
        points = [count for power in range(6) for count in (10**power, 3 * 10**power) if count <= most]
        super().__init__(points, list(WAYS))
        room = most * TENSOR + _SLACK
        producer = self._opened.enter_context(_producer(room))
        self._hand = _Hand(producer, self._consumer(room), Source(most * TENSOR))

    def round(self, *, counts: bool) -> None:
        """Measure every number in every way."""
        for point, (way, line) in itertools.product(self.points, self.lines.items()):
            calls = self._hand.calls(way, Payload(point, TENSOR), counts=counts)
            if counts:
                line.add(point, calls)


class Consumers(Curve):
    """Consumers that pull at once; all together always as much, which was published before."""

    def __init__(self, most: int) -> None:
        super().__init__([2**power for power in range(11) if 2**power <= most], ["served", "mapped"])
        self._source = Source(SHARED.nbytes)
        room = SHARED_COUNT * SHARED.nbytes + _SLACK
        self._producer = self._opened.enter_context(_producer(room))
        self._processes = [self._consumer(4 * SHARED.nbytes) for _ in range(self.points[-1])]

    def round(self, *, counts: bool) -> None:
        """Measure every number of consumers in both ways."""
        for point, (way, line) in itertools.product(self.points, self.lines.items()):
            bursts: list[Call] = []
            end = time.perf_counter() + _BURST_SECONDS
            while not bursts or (counts and len(bursts) < _BURSTS and time.perf_counter() < end):
                bursts.append(self._burst(way, self._processes[:point]))
            if counts:
                line.add(point, bursts)

    def _burst(self, way: str, processes: Sequence[ConsumerProcess]) -> Call:
        """Return the seconds of a payload, with those of publishing it apart."""
        names = [f"burst {next(_numbers)}" for _ in range(SHARED_COUNT)]
        built = [SHARED.build(self._source, variant) for variant in range(VARIANTS)]
        began = time.perf_counter()
        manifests = [
            (self._producer.publish(name, built[number % VARIANTS]), number)
            for number, name in enumerate(names)
        ]
        publishing = time.perf_counter() - began
        for index, process in enumerate(processes):
            process.start("take_all", way, SHARED, manifests[index :: len(processes)])
        for process in processes:
            process.answer()
        began = time.perf_counter()
        for process in processes:
            process.tell(b"go")
        for name in names:
            _wait_released(self._producer, name, processes)
        told = time.perf_counter()
        for process in processes:
            process.tell(b"told")
        all_pulled: list[Pulled] = [process.answer() for process in processes]
        end = max(told, *(pulled.end for pulled in all_pulled))
        pull = statistics.fmean(pulled.seconds for pulled in all_pulled) * len(processes)
        return tuple(seconds / SHARED_COUNT for seconds in (end - began, publishing, pull))


class Live(Curve):
    """One publication more beside others that live."""

    def __init__(self, most: int) -> None:
        points = {10**power for power in range(6) if 10**power < most}
        super().__init__(sorted({*points, most - 1}), ["served", "mapped"])
        self._payload = Payload(1, TENSOR)
        self._source = Source(TENSOR)
        self._process = self._consumer(_SLACK)

    def round(self, *, counts: bool) -> None:
        """Fill a new producer, and measure at every number on the way; then look at some that live."""
        built = [self._payload.build(self._source, variant) for variant in range(VARIANTS)]
        sampled = []
        # A slot is at least a block of the pool: with small ones it has as many as there may be.
        with _producer(2 * MOST_SLOTS * TENSOR, min_block_size=TENSOR) as producer:
            hand = _Hand(producer, self._process, self._source)
            for before, point in itertools.pairwise((0, *self.points)):
                for number in range(before, point):
                    manifest = producer.publish(f"live {number}", built[number % VARIANTS])
                    if number % _SAMPLED == 0:
                        sampled.append((manifest, number))
                for way, line in self.lines.items():
                    hand.calls(way, self._payload, counts=False)  # the first one connects
                    calls = hand.calls(way, self._payload, counts=counts)
                    if counts:
                        line.add(point, calls)
                if (found := producer.statistics().live) != point:
                    raise AssertionError(f"{found} publications live, not {point}")
            self._look_at(sampled)

    def _look_at(self, manifests: Sequence[tuple[bytes, int]]) -> None:
        self._process.start("take_all", "served", self._payload, manifests)
        self._process.answer()
        self._process.tell(b"go")
        self._process.tell(b"told")
        self._process.answer()
