# SPDX-License-Identifier: Apache-2.0
"""What was measured, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

PHASES = ("publish", "manifest", "wire", "landing", "release", "rest")
"""What a call consists of.  ``rest`` is the consumer's time that is neither wire nor landing."""

_DIGITS = 9


@dataclass
class Round:
    """One round of one row and payload; seconds, for each payload that was sent.

    Attributes:
        whole: Of each call, from the tensors at the producer to both sides knowing that it is done.
        phases: Medians of the calls by the name of the phase.
        cpu: CPU seconds of the producer's and the consumer's process, medians of the calls.
        above: Peak bytes of the consumer's private memory above its pool and the payload.
    """

    whole: list[float]
    phases: dict[str, float]
    cpu: tuple[float, float] | None
    above: int | None


@dataclass
class Series:
    """All rounds of one row and payload.

    Attributes:
        row: Name of the row.
        family: Its family.
        payload: Name of the payload.
        nbytes: Bytes of the payload.
        rounds: That were completed.
        ended: Why there are no more of them, "" if there are all.
        about: Versions and settings that the peer told.
    """

    row: str
    family: str
    payload: str
    nbytes: int
    rounds: list[Round] = field(default_factory=list)
    ended: str = ""
    about: dict[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> float:
        """Median of the rounds' medians."""
        return median(median(one.whole) for one in self.rounds)

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest median of a round."""
        medians = [median(one.whole) for one in self.rounds]
        return min(medians), max(medians)

    def percentile(self, share: float) -> float:
        """Return the time that ``share`` of all calls do not exceed."""
        return percentile((seconds for one in self.rounds for seconds in one.whole), share)

    def phase(self, name: str) -> float:
        """Return the median of the rounds' medians of a phase; 0.0 where it was not measured."""
        return median(one.phases.get(name, 0.0) for one in self.rounds)

    @property
    def throughput(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.whole

    @property
    def cpu_per_gb(self) -> tuple[float, float] | None:
        """CPU seconds per 10**9 bytes at the producer and at the consumer, None where unknown."""
        pairs = [one.cpu for one in self.rounds if one.cpu is not None]
        if not pairs:
            return None
        producer, consumer = (median(side) for side in zip(*pairs, strict=True))
        return producer / self.nbytes * 1e9, consumer / self.nbytes * 1e9

    @property
    def above(self) -> int | None:
        """Median of the rounds' :attr:`Round.above`."""
        known = [one.above for one in self.rounds if one.above is not None]
        return int(median(known)) if known else None


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def combine(
    producer: Mapping[str, Any],
    consumer: Mapping[str, Any],
    *,
    batch: int,
    one_host: bool,
    elsewhere: bool = False,
) -> Round:
    """Join what both sides recorded of the same calls.

    Args:
        producer: For each call when it began, was published and was told, and its CPU seconds.
        consumer: For each call when it arrived, seconds of wire and landing, when it ended, seconds
            outside of the clock, and its CPU seconds; and the memory above what was expected.
        batch: Payloads of a call.
        one_host: Whether both have the same clock.  Otherwise what messages took is all in the
            phase ``release``, and a consumer that ended after the producer was told counts as
            ended by then.
        elsewhere: Whether the wire is all that counts.

    Raises:
        ValueError: They recorded different numbers of calls, or none.
    """
    whole: list[float] = []
    phases: dict[str, list[float]] = {name: [] for name in PHASES}
    pairs = list(zip(producer["records"], consumer["records"], strict=True))
    if not pairs:
        raise ValueError("no call was recorded")
    for (began, published, told, _), (arrived, wire, landing, end, unclocked, _) in pairs:
        over = max(told, end) if one_host else told
        took = wire if elsewhere else over - began - unclocked
        whole.append(round(took / batch, _DIGITS))
        if elsewhere:
            phases["wire"].append(wire / batch)
            continue
        one = {"publish": published - began, "wire": wire, "landing": landing}
        one["rest"] = end - arrived - unclocked - wire - landing
        if one_host:
            one["manifest"] = arrived - published
            one["release"] = over - end
        else:
            one["release"] = took - sum(one.values())
        for name, seconds in one.items():
            phases[name].append(max(0.0, seconds) / batch)
    cpu = None
    if not elsewhere:
        cpu = (
            median(record[-1] for record in producer["records"]) / batch,
            median(record[-1] for record in consumer["records"]) / batch,
        )
    medians = {name: round(median(values), _DIGITS) for name, values in phases.items() if values}
    return Round(whole, medians, cpu, consumer["above"])


@dataclass
class Report:
    """A whole run.

    Attributes:
        command: Its command line.
        began: Date and time, UTC.
        seconds: How long it took.
        settings: Of the run.
        hosts: What each of the hosts is.
        skipped: Rows that were not run, and why.
        series: Everything that was measured.
        load: The load average of the consumer's host before each round, by payload.
    """

    command: str
    began: str
    seconds: float
    settings: dict[str, Any]
    hosts: list[dict[str, Any]]
    skipped: dict[str, str]
    series: list[Series]
    load: dict[str, list[float]] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Return values for JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Report:
        """Return the report of which :meth:`to_plain` was made."""
        series = []
        for one in plain["series"]:
            rounds = [Round(**{**each, "cpu": _pair(each["cpu"])}) for each in one["rounds"]]
            series.append(Series(**{**one, "rounds": rounds}))
        return cls(**{**plain, "series": series})

    @property
    def payloads(self) -> list[str]:
        """Names, in the order in which they were measured."""
        return list(dict.fromkeys(one.payload for one in self.series))

    def of(self, payload: str) -> list[Series]:
        """Return what was measured of a payload, the fastest first; without those that have no round."""
        measured = [one for one in self.series if one.payload == payload and one.rounds]
        return sorted(measured, key=lambda one: one.whole)


def _pair(values: Sequence[float] | None) -> tuple[float, float] | None:
    return None if values is None else (values[0], values[1])
