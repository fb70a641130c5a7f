# SPDX-License-Identifier: Apache-2.0
"""The process that starts the others, injects faults and can never hang.

It waits for nothing without a limit, and whatever is still there at the end is killed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import multiprocessing
import os
import random
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from soaking.broker import Broker
from soaking.child import Child
from soaking.judge import Call, Judge, Publication
from soaking.messages import (
    LEASE,
    Concluded,
    Finish,
    Published,
    Quiet,
    Ready,
    Reopen,
    Resources,
    Revoke,
    Settings,
    Snapshot,
)
from soaking.payloads import MIB

FAULTS: dict[str, str] = {
    "kill_producer": "SIGKILL and restart of a producer",
    "kill_consumer": "SIGKILL and restart of a consumer, of one that holds leases where there is one",
    "stop_producer": "SIGSTOP of a producer, SIGCONT after up to 4 s",
    "stop_consumer": "SIGSTOP of a consumer, SIGCONT after up to 4 s",
    "close_producer": "close() of a producer under running calls, then a new one in the same process",
    "close_consumer": "close() of a consumer under running calls, then a new one in the same process",
    "revoke": "a publication is taken back while consumers may be reading it",
    "expire": "a lease of 0.05 to 0.6 s",
    "reject": "reject() without a pull, sometimes twice",
    "release": "release() without a pull",
    "hold": "a pull that keeps its lease for up to 2 s, or until it runs out",
    "cancel": "cancel() of a request, or of the task that awaits it; of a publish, too",
    "fan_out": "a publication for two consumers",
}

_INTERVALS = {  # mean seconds between two of a kind
    "kill_producer": 5.0,
    "kill_consumer": 5.0,
    "stop_producer": 4.0,
    "stop_consumer": 4.0,
    "close_producer": 6.0,
    "close_consumer": 6.0,
}
_REVOKED = 0.05  # of all publications
_STOPS = (0.05, 0.5, 1.5, 4.0)  # seconds

_ACCESSES = {"producer": ("served", "rdma", "mapped", "auto"), "consumer": ("auto", "auto", "served")}
_POOLS = {"producer": 112 * MIB, "consumer": 160 * MIB}  # tight: two of the largest payloads do not fit
_SILENCE = 30.0  # seconds without a word from a process that has something to do
_START_SECONDS = 90.0
_CONCLUDE_SECONDS = 60.0
_FINISH_SECONDS = 40.0
_TICK = 0.02
_HINDSIGHT = 20.0  # seconds until an error is judged: a process that UCX aborts takes its time to die

# What a survivor may hold more of at the end than after its warm-up: endpoints that are being opened or
# closed, and pools of dead producers that stay mapped until the next connection is made.
_ALLOWED = {"descriptors": 24, "threads": 4, "shared_memory": 8}


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        seconds: Of load, faults included.
        producers: How many.
        consumers: How many.
        backend: Of all of them.
        threads: Of each process.
        pause: Mean seconds between two publications of a thread.
        seed: Of everything that is drawn.
        faults: Kinds of faults.
        inject: A fault of the soak's own, '' for none; see :class:`Settings`.
        logs: Folder for what the processes print.
    """

    seconds: float
    producers: int
    consumers: int
    backend: str
    threads: int
    pause: float
    seed: int
    faults: frozenset[str]
    inject: str
    logs: str


class Supervisor:
    """Runs a plan to its end and judges it.

    Args:
        plan: What to run.
        judge: Counts.
        log: Called with a line of text every ten seconds, and for each broken promise.
    """

    def __init__(self, plan: Plan, judge: Judge, log: Callable[[str], None]) -> None:
        self._plan = plan
        self._judge = judge
        self._log = log
        self._random = random.Random(plan.seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "tensorferry"])
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []
        self._incarnations: dict[tuple[str, int], int] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._broker = Broker(self._random, plan.faults, judge.figures.faults, self._later)
        self._injecting = True
        self._interrupted = False
        self._logged = 0
        self._growth: dict[str, dict[str, int]] = {}
        self._unjudged: deque[tuple[float, Callable[[], None]]] = deque()

    def run(self) -> dict[str, Any]:
        """Run the plan; return the report."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)
        seconds = 0.0
        try:
            for kind, count in (("producer", self._plan.producers), ("consumer", self._plan.consumers)):
                for index in range(count):
                    self._start(kind, index)
            self._until(lambda: all(child.ready for child in self._children), _START_SECONDS, "the start")
            started = time.monotonic()
            for fault in sorted(self._plan.faults & _INTERVALS.keys()):
                self._schedule(fault)
            self._status()
            self._until(lambda: self._interrupted or time.monotonic() > started + self._plan.seconds)
            seconds = time.monotonic() - started
            self._wind_down()
        finally:
            for child in self._children:
                child.kill()
            for child in self._children:
                child.bury()
        for _, judge in self._unjudged:
            judge()
        self._log_notes()
        return self._report(seconds)

    def _wind_down(self) -> None:
        self._injecting = False
        self._broker.faults = frozenset()
        for child in self._children:
            child.go_on()
        quiet = time.monotonic() + min(3.0, self._plan.seconds / 5)
        self._until(lambda: time.monotonic() > quiet)  # survivors find the restarted ones again
        self._until(lambda: all(child.ready for child in self._children), _START_SECONDS, "the last starts")
        for child in self._of("producer"):
            child.send(Quiet())
        self._until(lambda: self._broker.idle, _CONCLUDE_SECONDS, "the last calls of consumers")
        for kind in ("consumer", "producer"):
            for child in self._of(kind):
                child.finishing = True
                child.send(Finish())
            self._until(partial(self._none_of, kind), _FINISH_SECONDS, f"the end of each {kind}")

    def _report(self, seconds: float) -> dict[str, Any]:
        plan = self._plan
        return {
            "seconds": round(seconds, 1),
            "seed": plan.seed,
            "producers": plan.producers,
            "consumers": plan.consumers,
            "threads": plan.threads,
            "gigabytes_per_second": round(self._judge.figures.bytes / max(seconds, 1e-9) / 1e9, 3),
            "kinds_of_faults": sorted(plan.faults),
            **self._judge.report(),
            "growth": self._growth,
            "failures": self._judge.failures(),
        }

    # The loop.

    def _until(self, done: Callable[[], bool], limit: float = math.inf, what: str = "") -> None:
        """Do whatever comes until something is true; after ``limit`` seconds count who is in its way."""
        end = time.monotonic() + limit
        while not done():
            if time.monotonic() > end:
                self._give_up(what, limit)
                return
            for key, _ in self._selector.select(_TICK):
                self._hear(key.data)
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()
            while self._unjudged and self._unjudged[0][0] <= now:
                self._unjudged.popleft()[1]()
            self._broker.dispatch(self._of("consumer"))
            for child in list(self._children):
                child.flush()
                self._watch(child, now)
            self._log_notes()

    def _give_up(self, what: str, limit: float) -> None:
        for child in self._children:
            if not child.ready or child.running or child.finishing:
                self._judge.overdue(what, child.name, limit)
                child.explain()
        self._broker.forget()

    def _log_notes(self) -> None:
        for note in self._judge.notes[self._logged :]:
            self._log(note)
        self._logged = len(self._judge.notes)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), action))

    def _interrupt(self, *_: object) -> None:
        self._interrupted = True

    def _of(self, kind: str) -> list[Child]:
        return [child for child in self._children if child.kind == kind]

    def _none_of(self, kind: str) -> bool:
        return not self._of(kind)

    def _status(self) -> None:
        figures = self._judge.figures
        self._log(
            f"{figures.payloads} payloads, {figures.bytes / 1e9:.1f} GB, {figures.faults.total()} faults, "
            f"{figures.errors.total()} errors, worst overrun {figures.worst_overrun_seconds:.2f} s, "
            f"failures {self._judge.failures() or 'none'}"
        )
        self._later(10.0, self._status)

    # Processes.

    def _start(self, kind: str, index: int) -> None:
        incarnation = self._incarnations.get((kind, index), -1) + 1
        self._incarnations[kind, index] = incarnation
        plan, name = self._plan, f"{kind}-{index}.{incarnation}"
        accesses = _ACCESSES[kind] if plan.backend == "ucx" else ("rdma",)
        culprit = name == ("consumer-0.0" if plan.inject == "late" else "producer-0.0")
        settings = Settings(
            name=name,
            seed=f"{plan.seed} {name}",
            backend=plan.backend,
            access=accesses[index % len(accesses)],
            pool_nbytes=_POOLS[kind],
            threads=plan.threads,
            pause=plan.pause,
            faults=plan.faults,
            inject=plan.inject if culprit else "",
            log=os.path.join(plan.logs, f"{name}.log"),
        )
        child = Child(kind, index, settings, self._context)
        self._children.append(child)
        self._selector.register(child.channel, selectors.EVENT_READ, child)

    def _hear(self, child: Child) -> None:
        try:
            for message in child.received():
                self._take(child, message)
        except EOFError:
            self._selector.unregister(child.channel)
            self._ended(child)

    def _take(self, child: Child, message: object) -> None:
        if isinstance(message, Ready):
            child.ready = True
            self._later(min(10.0, self._plan.seconds / 4), lambda: child.send(Snapshot("baseline")))
        elif isinstance(message, Call):
            self._called(child, message, self._broker.judged(message.request))
        elif isinstance(message, Published):
            self._called(child, message.call, None)
            self._published(child, message)
        elif isinstance(message, Concluded):
            if child.running.pop(message.request, None) is not None:
                self._broker.concluded(message.request)
        elif isinstance(message, Resources):
            self._resources(child, message)

    def _called(self, child: Child, call: Call, publication: Publication | None) -> None:
        judge = partial(self._judge.call, call, child.life, publication)
        if call.error:
            self._unjudged.append((time.monotonic() + _HINDSIGHT, judge))
        else:
            judge()

    def _ended(self, child: Child) -> None:
        """Count how a process ended, and start another in its place unless it was to end."""
        self._children.remove(child)
        code = child.bury()
        meant = code == 0 if child.finishing else child.life.killed is not None and code == -signal.SIGKILL
        if not meant:
            self._judge.crash(child.name, code, by_ucx=child.aborted_by_ucx())
            # It may have begun to die at any moment since it was last heard of.
            child.life.killed = child.life.killed or child.heard
        for request in list(child.running):
            self._broker.concluded(request)
        if not child.finishing:
            self._later(self._random.uniform(0, 0.5), lambda: self._start(child.kind, child.index))

    def _watch(self, child: Child, now: float) -> None:
        """Kill a process that has something to do and says nothing."""
        busy = not child.ready or child.running
        if busy and not child.stopped and child.life.killed is None and now - child.heard > _SILENCE:
            self._judge.overdue("everything", child.name, now - child.heard)
            child.explain()
            child.kill()

    def _resources(self, child: Child, message: Resources) -> None:
        held = dict(message.held)
        if message.stage == "baseline":
            child.baseline = held
            return
        for what in ("pool_nbytes", "landing_nbytes"):
            count = held.get(what, 0)
            self._judge.leak("leaked_bytes", child.name, count, f"holds {count} bytes of {what} at its end")
        if child.baseline:
            growth = {what: held[what] - count for what, count in child.baseline.items()}
            self._growth[child.name] = growth
            for what, allowed in _ALLOWED.items():
                text = f"has {growth[what]} more {what} than after its warm-up"
                self._judge.leak(f"leaked_{what}", child.name, growth[what] - allowed, text)

    def _published(self, child: Child, message: Published) -> None:
        figures = self._judge.figures
        figures.publications += 1
        figures.publications_by_access[child.access] += 1
        figures.faults["expire"] += message.lease < LEASE
        figures.faults["fan_out"] += message.consumers > 1
        self._broker.add(message, child, self._of("consumer"))
        if "revoke" in self._plan.faults and self._injecting and self._random.random() < _REVOKED:
            self._later(self._random.expovariate(10), lambda: self._revoke(child, message.call.request))

    # Faults.

    def _schedule(self, fault: str) -> None:
        mean = min(_INTERVALS[fault], self._plan.seconds / 4)
        self._later(self._random.expovariate(1 / mean), lambda: self._inject(fault))

    def _inject(self, fault: str) -> None:
        if not self._injecting:
            return
        action, _, kind = fault.partition("_")
        able = [child for child in self._of(kind) if child.available and not child.stopped]
        if action == "kill":
            # The first of each kind lives to the end, so that growth is seen over the whole time.
            able = [child for child in able if child.index > 0]
            holders = [c for c in able if any(one.action == "hold" for one in c.running.values())]
            able = holders or able
        if able:
            {"kill": Child.kill, "stop": self._stop, "close": self._close}[action](self._random.choice(able))
            self._judge.figures.faults[fault] += 1
        self._schedule(fault)

    def _stop(self, child: Child) -> None:
        child.stop()
        self._later(self._random.choice(_STOPS), child.go_on)

    def _close(self, child: Child) -> None:
        child.life.closes.append(time.monotonic())
        child.send(Reopen())

    def _revoke(self, producer: Child, request: str) -> None:
        judged = self._broker.judged(request)
        if judged is not None:
            judged.revoked = time.monotonic()
            producer.send(Revoke(request))
            self._judge.figures.faults["revoke"] += 1
