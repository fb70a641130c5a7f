# SPDX-License-Identifier: Apache-2.0
"""The run of a benchmark: pairs of processes, one after another, in interleaved rounds.

For each payload every round runs every row once, each in fresh processes, with nothing else of the
benchmark running beside them.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tensorferry.cli import bench_results
from tensorferry.cli.bench_agent import ONE_THREAD
from tensorferry.cli.bench_link import Link, LinkLostError
from tensorferry.cli.bench_payloads import Payload
from tensorferry.cli.bench_results import Series
from tensorferry.cli.bench_rows import LIMIT, Row
from tensorferry.errors import TensorferryError

PATIENCE_SECONDS = 90.0
"""Of a pair of processes that says nothing, with more for payloads that take long to build."""

_BYTES_PER_SECOND = 25e6
_START_SECONDS = 60.0
_LEAVE_SECONDS = 20.0

Address = tuple[str, int]


class BenchError(TensorferryError):
    """A benchmark cannot go on."""


class RowError(TensorferryError):
    """A row came to no result; ``hung`` tells whether it just did nothing any more."""

    def __init__(self, message: str, *, hung: bool = False) -> None:
        super().__init__(message)
        self.hung = hung


@dataclass(frozen=True)
class Place:
    """Where the processes of a run are.

    Attributes:
        producer: Address of the agent on the producer's host.
        consumer: Address of the agent on the consumer's host.
        settings: UCX settings without ``UCX_``.
        device: Where tensors are.
    """

    producer: Address
    consumer: Address
    settings: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"

    @property
    def one_host(self) -> bool:
        """Whether both are the same."""
        return self.producer == self.consumer


@contextmanager
def agent() -> Iterator[Address]:
    """Run an agent on this host for the time of a block.

    Raises:
        BenchError: It did not start.
    """
    command = [sys.executable, "-m", "tensorferry.cli", "bench", "server", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is the harness's, which then ends the session
        env={**os.environ, **ONE_THREAD},
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if not said.startswith("listening on port "):
                raise BenchError(f"the process that starts all others said {said!r} and ended")
            address = "127.0.0.1", int(said.split()[-1])
            with session(address):
                yield address
        finally:
            process.terminate()


@contextmanager
def session(address: Address) -> Iterator[None]:
    """Hold an agent for the time of a block; it ends with the block.

    Raises:
        BenchError: It cannot be reached.
    """
    end = time.monotonic() + _START_SECONDS
    while True:
        try:
            connection = socket.create_connection(address, timeout=5)
            break
        except OSError as error:
            if time.monotonic() > end:
                raise BenchError(
                    f"no `tensorferry bench server` at {address[0]}:{address[1]}: {error}"
                ) from error
            time.sleep(0.2)
    with connection:
        yield


def _connect(address: Address) -> Link:
    try:
        return Link(socket.create_connection(address, timeout=_START_SECONDS))
    except OSError as error:
        raise BenchError(f"the agent at {address[0]}:{address[1]} is gone: {error}") from error


def probe(address: Address, rows: Sequence[Row], device: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what a host is, and the rows that cannot be run there with the reason.

    Raises:
        BenchError: The device cannot be used there.
    """
    with _connect(address) as link:
        link.tell({"role": "probe", "rows": [asdict(row) for row in rows], "device": device})
        link.settimeout(_START_SECONDS)
        try:
            said = link.hear()
        except (LinkLostError, TimeoutError) as error:
            raise BenchError(f"the host {address[0]} does not answer: {error}") from error
    if "error" in said:
        raise BenchError(said["error"])
    return said["environment"], said["missing"]


def run_cell(place: Place, row: Row, payload: Payload) -> tuple[bench_results.Round, dict[str, str]]:
    """Run one row and payload once, in processes of its own; return its round and what the peer told.

    Raises:
        RowError: It came to no result.
        BenchError: An agent is gone.

    In any case its processes have ended, or are about to be killed.
    """
    nbytes = payload.nbytes
    order = {
        "row": asdict(row),
        "payload": {"name": payload.name.partition(" ")[0], "nbytes": nbytes},
        "settings": dict(place.settings),
        "device": place.device,
        "one_host": place.one_host,
    }
    patience = PATIENCE_SECONDS + row.batch * nbytes / _BYTES_PER_SECOND
    with ExitStack() as stack:
        consumer = stack.enter_context(_connect(place.consumer))
        links = {"consumer": consumer}
        try:
            if row.alone:
                consumer.tell({"role": "alone", **order})
                both = _hear_all(links, patience)["consumer"]
                sides = both["producer"], both["consumer"]
            else:
                producer = links["producer"] = stack.enter_context(_connect(place.producer))
                producer.tell({"role": "producer", **order})
                port = _hear_all({"producer": producer}, patience)["producer"]["port"]
                consumer.tell({"role": "consumer", "host": place.producer[0], "port": port, **order})
                said = _hear_all(links, patience)
                sides = said["producer"], said["consumer"]
        except LinkLostError as error:
            raise RowError(str(error)) from error
        _leave(links.values())
    result = bench_results.combine(
        *sides, batch=row.batch, one_host=place.one_host or row.alone, elsewhere=row.elsewhere
    )
    if row.family == LIMIT:
        result.above = None  # its buffers are no results
    return result, sides[0]["about"]


def _hear_all(links: Mapping[str, Link], patience: float) -> dict[str, dict[str, Any]]:
    """Wait for a message from each.

    Raises:
        RowError: One told of an error, or has ended, or nobody says anything any more.
    """
    said: dict[str, dict[str, Any]] = {}
    failures: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + patience
    with selectors.DefaultSelector() as selector:
        for name, link in links.items():
            selector.register(link, selectors.EVENT_READ, name)
        while len(said) + len(failures) < len(links):
            ready = selector.select(max(0.0, end - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                message = _hear(links[key.data], patience)
                (failures if "error" in message else said)[key.data] = message
                selector.unregister(key.fileobj)
            if failures:
                end = min(end, time.monotonic() + _LEAVE_SECONDS / 4)  # the other one may know more
    if failures:
        # A side that only lost the other one does not know why.
        name = min(failures, key=lambda one: failures[one]["lost"])
        raise RowError(f"the {name}: {failures[name]['error']}")
    if len(said) < len(links):
        raise RowError(
            f"nothing from the {' and the '.join(sorted(links.keys() - said.keys()))} in {patience:.0f} s",
            hung=True,
        )
    return said


def _hear(link: Link, patience: float) -> dict[str, Any]:
    link.settimeout(patience)
    try:
        return link.hear()
    except (LinkLostError, TimeoutError) as error:
        return {"error": str(error), "lost": True}


def _leave(links: Any) -> None:
    """Wait until the processes have ended, so that they do not disturb the next ones."""
    end = time.monotonic() + _LEAVE_SECONDS
    for link in links:
        link.settimeout(max(0.1, end - time.monotonic()))
        with suppress(LinkLostError, TimeoutError):
            link.hear()


def needed_nbytes(row: Row, payload: Payload) -> int:
    """Return about what the processes of a row use: two variants at both ends, pools and results."""
    batch = 1 if row.elsewhere else row.batch
    return (5 + 3 * batch) * payload.nbytes


def available_nbytes() -> int:
    """Return the memory that this host has left."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/meminfo has no MemAvailable")


def run(
    place: Place,
    rows: Sequence[Row],
    payloads: Sequence[Payload],
    rounds: int,
    on_cell: Callable[[str, str, int], None],
    report: bench_results.Report,
) -> None:
    """Run everything; what was measured is in ``report``, also after an error.

    Args:
        place: Where.
        rows: Which can all be run there.
        payloads: What is sent, one after another.
        rounds: How many, interleaved over the rows.
        on_cell: Told payload, row and round before each.
        report: Where results go.

    A row that fails is not run again for that payload; one that hangs is not run again at all.
    """
    hung: dict[str, str] = {}
    memory = available_nbytes()
    for payload in payloads:
        many = len(payload.shapes) > 1
        series = {
            row.name: Series(row.name, row.family, payload.name, payload.nbytes)
            for row in rows
            if not (row.one_tensor and many)
        }
        report.series += series.values()
        loads = report.load.setdefault(payload.name, [])
        for number in range(rounds):
            loads.append(os.getloadavg()[0])
            for row in rows:
                one = series.get(row.name)
                on_cell(payload.name, row.name, number)
                if one is None or one.ended:
                    continue
                if row.name in hung:
                    one.ended = f"not run: {hung[row.name]}"
                    continue
                if needed_nbytes(row, payload) > memory:
                    one.ended = f"not run: it takes {needed_nbytes(row, payload) >> 30} GiB of memory"
                    continue
                try:
                    result, one.about = run_cell(place, row, payload)
                    one.rounds.append(result)
                except RowError as error:
                    one.ended = str(error)
                    if error.hung:
                        hung[row.name] = f"it hung before ({error})"
