# SPDX-License-Identifier: Apache-2.0
"""``tensorferry bench``: what moving tensors costs here, with tensorferry and with its peers."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorferry.errors import TensorferryError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from tensorferry.cli.bench_harness import Place
    from tensorferry.cli.bench_results import Report
    from tensorferry.cli.bench_rows import Row

ROUNDS = 5
_WIDE = 200


def add_parser(commands: Any) -> None:
    """Add the ``bench`` command to a parser's subcommands."""
    parser = commands.add_parser(
        "bench",
        help="measure what moving tensors costs, with tensorferry and with other libraries",
        description="The job that is measured is the same for all: ordinary tensors at the producer, "
        "ordinary tensors of its own at the consumer, and the producer told that it is done. Every payload "
        "is compared bit for bit, outside of the clock.",
    )
    actions = parser.add_subparsers(dest="action", required=True)
    loopback = actions.add_parser("loopback", help="both processes on this host")
    client = actions.add_parser("client", help="consumers here, producers where `server` runs")
    client.add_argument("server", metavar="HOST:PORT", help="where `tensorferry bench server` listens")
    for one in (loopback, client):
        _add_options(one)
    server = actions.add_parser(
        "server",
        help="producers here, for one client on another host",
        description="Serves one client and ends. What they tell each other is neither encrypted nor "
        "authenticated: for trusted networks only.",
    )
    server.add_argument(
        "--listen", metavar="HOST:PORT", required=True, help="an address of this host; port 0 for any"
    )
    report = actions.add_parser("report", help="tables and plots of an earlier run")
    report.add_argument("file", type=Path, metavar="FILE", help="what --json wrote")
    _add_outputs(report)
    parser.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--payload",
        action="append",
        metavar="NAME",
        help="flux, wan, vlm, many (10,000 tensors of 1 KiB) or one; may be repeated; all by default",
    )
    parser.add_argument(
        "--sizes", metavar="LIST", default="", help="for one: 4KiB,1MiB say; 1 B to 1 GiB by default"
    )
    parser.add_argument(
        "--peers",
        metavar="LIST",
        default="",
        help="all, or some of copy,ucxx,nixl,mooncake,gloo,zmq,sockets,ray",
    )
    parser.add_argument("--limit", action="store_true", help="also what memory, sockets and UCX give at best")
    parser.add_argument(
        "--access",
        choices=("all", "served", "rdma", "mapped"),
        default="all",
        help="rows of tensorferry: all, or one access mode",
    )
    parser.add_argument("--tls", metavar="LIST", help="UCX transports, for example tcp")
    parser.add_argument(
        "--net-devices",
        metavar="LIST",
        help="network devices for UCX; loopback: lo unless --tls or --access rdma say",
    )
    parser.add_argument("--device", default="cpu", help="where tensors are at both ends: cpu, cuda, cuda:1")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, metavar="N", help=f"interleaved rounds ({ROUNDS})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    _add_outputs(parser)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw plots, as PNG and SVG")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")


def run(arguments: argparse.Namespace) -> int:
    """Run a benchmark, serve one, or show an earlier one.

    Returns:
        The exit status: 0; 1 with one line on stderr, or when no row came to a result; 130 after Ctrl-C.
    """
    try:
        with _ended_by_sigterm():
            if arguments.action == "server":
                return _serve(arguments)
            if getattr(arguments, "plots", None) and find_spec("matplotlib") is None:
                raise UsageError('matplotlib is missing: pip install "tensorferry[bench]"')
            if arguments.action == "report":
                return _show(_console(), _read(arguments.file), arguments)
            return _measure(arguments)
    except KeyboardInterrupt:
        return 130
    except (TensorferryError, OSError) as error:
        print(f"tensorferry bench: {error}", file=sys.stderr)
        return 1


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Leave by SystemExit when terminated, so that nothing stays behind."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(arguments: argparse.Namespace) -> int:
    from tensorferry.cli import bench_agent

    bench_agent.one_thread_each()
    listener = bench_agent.listen(arguments.listen)
    print(f"listening on port {listener.getsockname()[1]}", flush=True)
    bench_agent.serve(listener)
    return 0


def _read(path: Path) -> Report:
    from tensorferry.cli.bench_results import Report

    try:
        return Report.from_plain(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is not what --json writes: {error}") from error


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


def _show(console: Console, report: Report, arguments: argparse.Namespace) -> int:
    """Print the tables, and write what was asked for."""
    from tensorferry.cli import bench_plots, bench_report

    bench_report.print_tables(console, report)
    if arguments.markdown:
        arguments.markdown.write_text(bench_report.markdown(report), encoding="utf-8")
    if arguments.plots:
        files = bench_plots.draw(report, arguments.plots)
        console.print(f"{len(files)} plots in {arguments.plots}{os.sep}", markup=False)
    return 0 if any(one.rounds for one in report.series) else 1


def _measure(arguments: argparse.Namespace) -> int:
    from tensorferry.cli import bench_harness, bench_payloads, bench_rows
    from tensorferry.cli.bench_results import Report

    if arguments.rounds < 1:
        raise UsageError(f"--rounds is at least 1, not {arguments.rounds}")
    payloads = bench_payloads.chosen(arguments.payload or [], _listed(arguments.sizes))
    rows = bench_rows.chosen(_listed(arguments.peers), arguments.access, limit=arguments.limit)
    console = _console()
    report = Report(
        command=shlex.join(["tensorferry", *sys.argv[1:]]),
        began=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=0.0,
        settings={},
        hosts=[],
        skipped={},
        series=[],
    )
    started = time.monotonic()
    with ExitStack() as stack:
        place = _place(arguments, report, stack)
        usable = _usable(place, rows, report)
        cells = len(usable) * len(payloads) * arguments.rounds
        try:
            with _progress(console, cells) as advance:
                bench_harness.run(place, usable, payloads, arguments.rounds, advance, report)
        finally:  # what there is also after Ctrl-C
            report.seconds = time.monotonic() - started
            if arguments.json:
                arguments.json.write_text(json.dumps(report.to_plain()), encoding="utf-8")
    return _show(console, report, arguments)


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _place(arguments: argparse.Namespace, report: Report, stack: ExitStack) -> Place:
    """Start what runs the processes, and say where."""
    from tensorferry.backends.ucx_library import rdma_devices
    from tensorferry.cli import bench_harness, bench_namespace
    from tensorferry.cli.demo_channel import parse_address

    options = {"TLS": arguments.tls, "NET_DEVICES": arguments.net_devices}
    loopback = arguments.action == "loopback"
    wants_rdma = arguments.access == "rdma" and bool(rdma_devices())
    inside = loopback and not arguments.net_devices and not wants_rdma and arguments.tls in (None, "tcp")
    if inside:
        options["NET_DEVICES"] = "lo"
        alone = bench_namespace.enter()
        report.settings["network"] = "a namespace with lo only" if not alone else f"the host's: {alone}"
    else:
        report.settings["network"] = "the host's"
    settings = {name: value for name, value in options.items() if value}
    report.settings.update(
        {"rounds": arguments.rounds, "device": arguments.device, "ucx": settings, "torch threads": 1}
    )
    here = stack.enter_context(bench_harness.agent())
    place = bench_harness.Place(here, here, settings, arguments.device)
    if loopback:
        return place
    there = parse_address(arguments.server)
    stack.enter_context(bench_harness.session(there))
    return replace(place, producer=there)


def _usable(place: Place, rows: list[Row], report: Report) -> list[Row]:
    """Return the rows that can be run, and note why others cannot."""
    from tensorferry.cli import bench_harness

    reasons: dict[str, str] = {}
    for address in dict.fromkeys([place.producer, place.consumer]):
        environment, missing = bench_harness.probe(address, rows, place.device)
        report.hosts.append(environment)
        reasons = {**missing, **reasons}
    listens = report.settings["network"]
    for row in rows:
        if row.one_host and not place.one_host:
            reasons.setdefault(row.name, "needs both processes on one host")
        if row.listens and place.one_host and not listens.startswith("a namespace"):
            reasons.setdefault(row.name, f"listens on every interface, and the network is {listens}")
    report.skipped = reasons
    return [row for row in rows if row.name not in reasons]


@contextmanager
def _progress(console: Console, cells: int) -> Iterator[Callable[[str, str, int], None]]:
    """Show a bar on a terminal, and a line for each payload anywhere else."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if not console.is_terminal:
        told: set[str] = set()

        def tell(payload: str, row: str, number: int) -> None:
            if payload not in told:
                told.add(payload)
                console.print(f"{payload} ...", markup=False)

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=cells, start=True)
        done = -1

        def advance(payload: str, row: str, number: int) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=f"{payload}, round {number + 1}, {row:<40.40}")

        yield advance
        bar.update(task, completed=cells, description="done")
