# SPDX-License-Identifier: Apache-2.0
"""The two processes of one row and payload: what is on the clock, and what is not.

The producer leads.  Before each call it says so, and the consumer answers when it waits; then the
clock runs, at both sides, until the producer was told that the consumer has its tensors.  On one
host both have the same clock, so the job has ended when both know it.
"""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import torch

from tensorferry.cli import bench_environment, bench_payloads, bench_rows
from tensorferry.cli.bench_link import Link
from tensorferry.cli.bench_memory import Peak
from tensorferry.cli.bench_payloads import Checker, Payload
from tensorferry.cli.bench_peers.base import Job, Tensors
from tensorferry.errors import UsageError

LOOP_SECONDS = 20.0
"""After so long a round ends, whatever is left of its calls; three are made in any case."""

_FEWEST_CALLS = 3
_GO, _END = b"go", b"end"


def work(control: Link) -> None:
    """Do what the harness asks for, once, and tell it the outcome; what was made is closed after that."""
    order = control.hear()
    role = order.get("role")
    if role == "probe":
        control.tell(_probe(order))
        return
    row = bench_rows.Row(**order["row"])
    payload = _payload(order["payload"])
    job = Job(
        row.options,
        payload,
        torch.device(order["device"]),
        row.batch,
        order["settings"],
        bool(order["one_host"]),
    )
    torch.set_grad_enabled(False)
    if role == "alone":
        _alone(row, job, control)
    elif role == "producer":
        with socket.create_server((control.host, 0), family=_family(control.host), backlog=1) as listener:
            control.tell({"port": listener.getsockname()[1]})
            connection, _ = listener.accept()
        with Link(connection) as link:
            _produce(row, job, link, control)
    elif role == "consumer":
        with Link(socket.create_connection((order["host"], order["port"]))) as link:
            _consume(row, job, link, control)
    else:
        raise UsageError(f"a role {role!r}; are both sides of one version?")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _payload(plain: Mapping[str, Any]) -> Payload:
    return bench_payloads.named(plain["name"], plain["nbytes"])


def _probe(order: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this host is, and what of the rows cannot be done here."""
    missing: dict[str, str] = {}
    for plain in order["rows"]:
        row = bench_rows.Row(**plain)
        module = bench_rows.module(row)
        try:
            module.load()
        except (ImportError, OSError) as error:
            reason = str(error).partition("\n")[0]
            missing[row.name] = (
                f"{reason}; pip install {module.REQUIREMENT}" if module.REQUIREMENT else reason
            )
    device = torch.device(order["device"])
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        return {"error": f"--device {device} cannot be used here: {str(error).partition(chr(10))[0]}"}
    return {"environment": bench_environment.describe(device), "missing": missing}


def _settle() -> None:
    """Leave what was made so far out of every later collection, so that thousands of tensors start none."""
    gc.collect()
    gc.freeze()


def _variants(job: Job, call: int, built: list[Tensors]) -> list[Tensors]:
    return [built[(call + position) % 2] for position in range(job.batch)]


def _calls(payload: Payload) -> Iterator[tuple[int, bool]]:
    """Yield the number of each call, and whether it counts."""
    end = time.monotonic() + LOOP_SECONDS
    for call in range(payload.warm_up + payload.calls):
        counts = call >= payload.warm_up
        if call >= payload.warm_up + _FEWEST_CALLS and time.monotonic() > end:
            return
        yield call, counts


def _produce(row: bench_rows.Row, job: Job, link: Link, control: Link) -> None:
    built = [job.payload.build(variant, job.device) for variant in (0, 1)]
    with closing(bench_rows.module(row).Sender(job, link)) as sender:
        _settle()
        records: list[list[float]] = []
        for call, counts in _calls(job.payload):
            payloads = _variants(job, call, built)
            sender.prepare(payloads)
            link.send(_GO)
            link.receive()
            used = _cpu_seconds()
            began = time.perf_counter()
            published = sender.send(payloads)
            told = time.perf_counter()
            if counts:
                records.append([began, published, told, _cpu_seconds() - used])
        link.send(_END)
        control.tell({"records": records, "about": sender.about()})


def _consume(row: bench_rows.Row, job: Job, link: Link, control: Link) -> None:
    checker = Checker(job.payload, job.device)
    with closing(bench_rows.module(row).Receiver(job, link)) as receiver:
        _settle()
        records: list[list[float]] = []
        call = came = 0
        peak = Peak()
        while link.receive() == _GO:
            variant = call % 2
            used = _cpu_seconds()
            link.send(_GO)
            received = receiver.receive(lambda tensors, variant=variant: checker.inspect(tensors, variant))
            end = received.end or time.perf_counter()
            used = _cpu_seconds() - used
            records.append([received.arrived, received.wire, received.landing, end, received.unclocked, used])
            checker.keep(received.payloads, variant)
            came = len(received.payloads)
            del received
            call += 1
        # At the peak there were the new results and those that the checker still had.
        expected = receiver.landing_nbytes + (checker.held + came) * job.payload.nbytes * bool(came)
        control.tell({"records": records[job.payload.warm_up :], "above": peak.nbytes() - expected})


def _alone(row: bench_rows.Row, job: Job, control: Link) -> None:
    built = [job.payload.build(variant, job.device) for variant in (0, 1)]
    checker = Checker(job.payload, job.device)
    copier = bench_rows.module(row).Alone(job)
    _settle()
    producer: list[list[float]] = []
    consumer: list[list[float]] = []
    for call, counts in _calls(job.payload):
        payloads = _variants(job, call, built)
        used = _cpu_seconds()
        began = time.perf_counter()
        received = copier.move(payloads)
        end = received.end or time.perf_counter()
        used = _cpu_seconds() - used
        checker.keep(received.payloads, call % 2)
        if counts:
            producer.append([began, received.arrived, end, 0.0])
            consumer.append([received.arrived, received.wire, received.landing, end, 0.0, used])
        del received
    control.tell(
        {"producer": {"records": producer, "about": {}}, "consumer": {"records": consumer, "above": None}}
    )


def _cpu_seconds() -> float:
    """Return what all threads of this process have used so far."""
    return time.process_time()
