# SPDX-License-Identifier: Apache-2.0
"""``tensorferry doctor``: say what keeps tensorferry from working here, or from being fast, and what to do.

Looks at the host, and publishes and pulls in each access mode that is offered here.  With ``--listen`` on one
host and ``--peer`` on another it does so between the two.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorferry.backends.ucx_library import rdma_devices
from tensorferry.cli import doctor_host, doctor_trial
from tensorferry.cli.bench_link import Link
from tensorferry.cli.doctor_findings import Finding
from tensorferry.consumer import Consumer
from tensorferry.errors import TensorferryError
from tensorferry.producer import Producer

_COLOURS = {"ok": "green", "note": "default", "warn": "yellow", "fail": "red"}
_PULLS = 4


def add_parser(commands: Any) -> None:
    """Add the subcommand to what ``ArgumentParser.add_subparsers`` returned."""
    parser = commands.add_parser("doctor", help="say what is wrong here, and what to do", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    pair = parser.add_mutually_exclusive_group()
    pair.add_argument("--listen", metavar="HOST:PORT", help="wait for one doctor --peer, and publish to it")
    pair.add_argument("--peer", metavar="HOST:PORT", help="pull from a doctor --listen")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return 1 if one of them is that something fails, else 0."""
    try:
        if arguments.listen:
            findings = _listen(*_address(arguments.listen))
        elif arguments.peer:
            findings = _pull(*_address(arguments.peer))
        else:
            findings = [*doctor_host.look(), *doctor_trial.try_out()]
    except (OSError, TensorferryError, ValueError) as error:
        findings = [Finding("pair", "fail", f"{type(error).__name__}: {error}", "see docs/errors.md")]
    if arguments.json:
        json.dump([finding._asdict() for finding in findings], sys.stdout, indent=1)
        print()
    else:
        Console(highlight=False).print(_table(findings))
    return int(any(finding.level == "fail" for finding in findings))


def _table(findings: list[Finding]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    table.add_column("about", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    for finding in findings:
        text = Text(finding.text)
        if finding.cure:
            text.append(f"\n→ {finding.cure}", style="bold")
        table.add_row(Text(finding.level, style=_COLOURS[finding.level]), finding.area, text)
    return table


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"an address is HOST:PORT, not {text!r}")
    return host.strip("[]"), int(port)


def _listen(host: str, port: int) -> list[Finding]:
    nbytes = doctor_trial.NBYTES
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        Producer(2 * nbytes, name="doctor") as producer,
        socket.create_server((host, port), family=family) as server,
    ):
        print(f"waiting for doctor --peer on port {server.getsockname()[1]}", file=sys.stderr, flush=True)
        connection, _ = server.accept()
        with Link(connection) as link:
            link.settimeout(60)
            for number in range(_PULLS):
                link.send(producer.publish(str(number), {"x": torch.arange(nbytes // 8)}, timeout=30))
                link.receive()
            return [Finding(**finding) for finding in link.hear()["findings"]]


def _pull(host: str, port: int) -> list[Finding]:
    nbytes = doctor_trial.NBYTES
    expected = torch.arange(nbytes // 8)
    seconds = []
    findings = []
    with Link(socket.create_connection((host, port), timeout=30)) as link:
        link.settimeout(60)
        with Consumer(2 * nbytes, name="doctor") as consumer:
            for _ in range(_PULLS):
                manifest = link.receive()
                began = time.perf_counter()
                got = consumer.pull(manifest, timeout=30)["x"]
                seconds.append(time.perf_counter() - began)
                if not torch.equal(got, expected):
                    findings.append(Finding("pair", "fail", "other bytes came than were published"))
                link.send(b"next")
            used = consumer.statistics().peers[-1]
        how = f"by {used.access} over {', '.join(used.transports)}"
        said = f"{link.host} pulled from {link.peer}: 64 MiB at {nbytes / min(seconds) / 1e9:.2f} GB/s {how}"
        if used.access == "served" and rdma_devices():
            cure = "run `tensorferry doctor` on both hosts"
            findings.append(Finding("pair", "warn", f"{said}, not over RDMA", cure))
        else:
            findings.append(Finding("pair", "ok", said))
        link.tell({"findings": [finding._asdict() for finding in findings]})
    return findings
