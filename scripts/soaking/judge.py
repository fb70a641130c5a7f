# SPDX-License-Identifier: Apache-2.0
"""What the soak counts, and when it is a failure: the judge knows of no process and no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SLACK = 3.0
"""Seconds by which a call may outlive its deadline: a busy machine of two cores keeps it waiting so long."""

_ROUNDING = 0.05  # seconds between clocks that were read one after the other

_PATIENCE = 2.0  # seconds that the library gives a producer which was silent when it was last asked

Interval = tuple[float, float]


@dataclass(frozen=True)
class Call:
    """One call with a deadline, as the process that made it reports it.

    Attributes:
        what: ``"pull"``, ``"borrow"``, ``"publish"``, ``"close"``, ...
        request: Name of the publication, '' where there is none.
        started: Seconds of the system's monotonic clock, which all processes share.
        ended: As ``started``.
        timeout: Seconds that the call was given.
        error: Name of the class of the error that it raised; '' if it returned.
        message: Of that error.
        expected: Digests of what the producer published under the names that were asked for.
        found: Digests of what came; None if nothing did.
        nbytes: Bytes of the tensors that came.
        cancelled: Whether the caller had cancelled it.
        opening: Which of the producers or consumers that the process opened one after the other.
    """

    what: str
    request: str
    started: float
    ended: float
    timeout: float
    error: str = ""
    message: str = ""
    expected: Mapping[str, str] | None = None
    found: Mapping[str, str] | None = None
    nbytes: int = 0
    cancelled: bool = False
    opening: int = 0


@dataclass
class Life:
    """What the supervisor did to one process, in seconds of the monotonic clock.

    Attributes:
        name: Of the process.
        stops: From SIGSTOP to SIGCONT; the last may be open, with an infinite end.
        closes: When each of the producers or consumers that it opened was told to close.
        killed: When it was killed; None if it was not.
    """

    name: str
    stops: list[Interval] = field(default_factory=list)
    closes: list[float] = field(default_factory=list)
    killed: float | None = None

    def stopped_seconds(self, start: float, end: float) -> float:
        """Return for how long it was stopped in an interval."""
        return sum(max(0.0, min(stop[1], end) - max(stop[0], start)) for stop in self.stops)

    def gone_by(self, moment: float, opening: int) -> bool:
        """Whether it had been killed, or what it opened told to close, by then."""
        ends = self.closes[opening : opening + 1]
        if self.killed is not None:
            ends.append(self.killed)
        return any(end <= moment + _ROUNDING for end in ends)


@dataclass
class Publication:
    """What the judge has to know of a publication to tell a good error from a bad one."""

    producer: Life
    opening: int
    began: float
    lease: float
    nbytes: int
    access: str
    revoked: float | None = None

    def gone_by(self, moment: float) -> bool:
        """Whether its producer may have closed or died by then."""
        return self.producer.gone_by(moment, self.opening)

    def describe(self, moment: float) -> str:
        """Return what it is, as of a moment."""
        return (
            f"{self.nbytes} bytes, {self.access} by {self.producer.name}, {moment - self.began:.2f} s into "
            f"a lease of {self.lease:.2f} s"
        )

    def may_have_ended(self, moment: float) -> bool:
        """Whether its lease may have been over by then, for whatever reason."""
        if self.revoked is not None and self.revoked <= moment + _ROUNDING:
            return True
        return moment + _ROUNDING >= self.began + self.lease or self.gone_by(moment)


@dataclass
class Figures:
    """What is counted; ``docs/benchmarks.md`` says what each figure means."""

    payloads: int = 0
    bytes: int = 0
    publications: int = 0
    publications_by_access: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong_payloads: int = 0
    unexplained_errors: int = 0
    late_calls: int = 0
    worst_overrun_seconds: float = 0.0
    worst_overrun: str = ""
    crashes: int = 0
    aborts_by_ucx: int = 0
    leaked_bytes: int = 0
    leaked_descriptors: int = 0
    leaked_threads: int = 0
    leaked_shared_memory: int = 0


FAILURES = (
    "wrong_payloads",
    "unexplained_errors",
    "late_calls",
    "crashes",
    "leaked_bytes",
    "leaked_descriptors",
    "leaked_threads",
    "leaked_shared_memory",
)


class Judge:
    """Counts calls, and keeps a note of each that broke a promise.

    Args:
        slack: Seconds by which a call may outlive its deadline.
    """

    def __init__(self, slack: float = SLACK) -> None:
        self.figures = Figures()
        self.notes: list[str] = []
        self._slack = slack

    def call(self, call: Call, caller: Life, publication: Publication | None) -> None:
        """Judge one call."""
        figures = self.figures
        figures.calls[call.what] += 1
        self._judge_time(call, caller)
        if call.error:
            figures.errors[f"{call.what} {call.error}"] += 1
            if not excused(call, caller, publication):
                figures.unexplained_errors += 1
                self._note("unexplained", call, caller, publication, f"{call.error}: {call.message}")
        elif call.found is not None:
            self._judge_content(call, caller, publication)

    def overdue(self, what: str, caller: str, seconds: float) -> None:
        """Count a call that has not come back long after its deadline."""
        self.figures.late_calls += 1
        self._worst(seconds, f"{what} in {caller}")
        self.notes.append(f"late: {what} in {caller} has not ended {seconds:.1f} s after its deadline")

    def crash(self, name: str, code: int, *, by_ucx: bool = False) -> None:
        """Count a process that ended as it should not have.

        Args:
            name: Of the process.
            code: Its exit status, negative for a signal.
            by_ucx: Whether UCX aborted it in a way that is known of UCX (``docs/security.md``), which
                is counted apart.
        """
        if by_ucx:
            self.figures.aborts_by_ucx += 1
            return
        self.figures.crashes += 1
        self.notes.append(f"crash: {name} ended with {code}")

    def leak(self, what: str, name: str, amount: int, explanation: str) -> None:
        """Count what a surviving process holds that it should have given back."""
        if amount > 0:
            setattr(self.figures, what, getattr(self.figures, what) + amount)
            self.notes.append(f"leak: {name} {explanation}")

    def failures(self) -> dict[str, int]:
        """Return the counters that should be 0 and are not."""
        found = {name: getattr(self.figures, name) for name in FAILURES}
        if self.figures.payloads == 0:
            found["no_payload_arrived"] = 1
        return {name: count for name, count in found.items() if count}

    def report(self) -> dict[str, Any]:
        """Return all figures, ready for JSON."""
        figures = {
            name: dict(sorted(value.items())) if isinstance(value, Counter) else value
            for name, value in vars(self.figures).items()
        }
        return figures | {"slack_seconds": self._slack, "notes": self.notes[:100]}

    def _judge_time(self, call: Call, caller: Life) -> None:
        if call.what == "publish" and not call.error:
            return  # its time was for waiting, not for copying
        overrun = outlived(call, caller)
        outcome = call.error or "a result"
        self._worst(
            overrun, f"{call.what} {call.request} in {caller.name} of {call.timeout:.2f} s: {outcome}"
        )
        if overrun > self._slack:
            self.figures.late_calls += 1
            self._note("late", call, caller, None, f"{overrun:.2f} s over its {call.timeout:.2f} s")

    def _judge_content(self, call: Call, caller: Life, publication: Publication | None) -> None:
        expected, found = call.expected or {}, call.found or {}
        if list(expected.items()) != list(found.items()):
            self.figures.wrong_payloads += 1
            names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
            self._note("wrong", call, caller, publication, f"other digests under {names or 'the same names'}")
            return
        self.figures.payloads += 1
        self.figures.bytes += call.nbytes

    def _worst(self, seconds: float, what: str) -> None:
        if seconds > self.figures.worst_overrun_seconds:
            self.figures.worst_overrun_seconds = round(seconds, 3)
            self.figures.worst_overrun = what

    def _note(self, kind: str, call: Call, caller: Life, publication: Publication | None, text: str) -> None:
        of = "" if publication is None else f" ({publication.describe(call.ended)})"
        self.notes.append(
            f"{kind}: {call.what} {call.request} in {caller.name}{of} at {call.ended:.2f} "
            f"after {call.ended - call.started:.2f} s: {text}"
        )


def outlived(call: Call, caller: Life) -> float:
    """Return the seconds by which a call outlived its deadline, less those in which it was stopped."""
    spent = call.ended - call.started - caller.stopped_seconds(call.started, call.ended)
    return max(0.0, spent - call.timeout)


def excused(call: Call, caller: Life, publication: Publication | None) -> bool:
    """Tell whether the supervisor did something by which this error was to be expected."""
    if call.error == "ClosedError":
        return caller.gone_by(call.ended, call.opening)
    if call.error in ("TransferCancelledError", "CancelledError"):
        return call.cancelled
    if call.error == "PoolExhaustedError":
        return call.what == "publish" and call.timeout == 0
    if call.error in ("TransferTimeoutError", "PoolTimeoutError"):
        return call.ended - call.started >= call.timeout - _ROUNDING
    if publication is None:
        return False
    if call.error in ("LeaseExpiredError", "LeaseRevokedError"):
        return publication.may_have_ended(call.ended)
    if call.error == "PeerLostError" and _was_silent(call):
        return True
    if call.error in ("PeerLostError", "ConnectError"):
        return publication.gone_by(call.ended)
    return False


def _was_silent(call: Call) -> bool:
    """Whether a producer counts as lost that had not answered in time before, and did not now."""
    return "has been silent" in call.message and call.ended - call.started >= _PATIENCE - _ROUNDING
