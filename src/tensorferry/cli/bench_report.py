# SPDX-License-Identifier: Apache-2.0
"""A benchmark's tables, for terminals and for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tensorferry.cli.bench_payloads import readable
from tensorferry.cli.bench_results import PHASES, Report, Series

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = (
    "",
    "p50 ms",
    "rounds ms",
    "p99 ms",
    "GB/s",
    *PHASES,
    "CPU s/GB",
    "memory above",
)
_LARGE_NBYTES = 1 << 20  # below, shares of the payload mean nothing
_NOTES = (
    "p50 is the median of the rounds' medians, the range that of the rounds; phases are medians in ms. CPU "
    "is that of the producer's and of the consumer's process. Memory is the consumer's peak above its pool "
    "and the payload.",
)


def cells(series: Series) -> list[str]:
    """Return a line of the table of one payload."""
    low, high = series.spread
    cpu = series.cpu_per_gb
    above = series.above
    return [
        series.row,
        _milliseconds(series.whole),
        f"{_milliseconds(low)} to {_milliseconds(high)}",
        _milliseconds(series.percentile(0.99)),
        f"{series.throughput / 1e9:.3g}",
        *(_milliseconds(series.phase(name)) if series.phase(name) else "" for name in PHASES),
        f"{cpu[0]:.2f} + {cpu[1]:.2f}" if cpu and series.nbytes >= _LARGE_NBYTES else "",
        _memory(above, series.nbytes) if above is not None else "",
    ]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _memory(nbytes: int, payload: int) -> str:
    size = f"{nbytes / (1 << 20):.1f} MiB"
    return f"{size}, {nbytes / payload:.0%}" if payload >= _LARGE_NBYTES else size


def summary(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of the table of all payloads: ms, medians."""
    names = list(dict.fromkeys(one.row for one in report.series))
    found = {(one.row, one.payload): one for one in report.series if one.rounds}
    lines = [
        [
            name,
            *(
                _milliseconds(found[name, payload].whole) if (name, payload) in found else ""
                for payload in report.payloads
            ),
        ]
        for name in names
    ]
    return ["ms", *report.payloads], [line for line in lines if any(line[1:])]


def ended(report: Report) -> list[str]:
    """Return a line for each row that was not run, or not to its end."""
    lines = [f"{name}: {reason}" for name, reason in report.skipped.items()]
    lines += [f"{one.row}, {one.payload}: {one.ended}" for one in report.series if one.ended]
    return lines


def print_tables(console: Console, report: Report) -> None:
    """Print a table for each payload, one of all, and what was not run."""
    from rich.markup import escape

    for payload in report.payloads:
        series = report.of(payload)
        if series:
            title = f"{payload}: {readable(series[0].nbytes)}" if " " not in payload else payload
            _print(console, title, _COLUMNS, [cells(one) for one in series])
    header, lines = summary(report)
    _print(console, "all payloads", header, lines)
    for line in (*_NOTES, *ended(report)):
        console.print(escape(line), soft_wrap=True)


def _print(console: Console, title: str, header: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for position, name in enumerate(header):
        table.add_column(name, justify="right" if position else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console.print(table)
    console.print()


def markdown(report: Report) -> str:
    """Return everything that was printed, and the environment, as Markdown."""
    parts = [f"`{report.command}`, {report.began}, {report.seconds / 60:.0f} minutes", *_NOTES]
    for host in report.hosts:
        settings = "; ".join(f"{name}: {value}" for name, value in host["settings"].items())
        versions = ", ".join(f"{name} {version}" for name, version in host["packages"].items())
        name = f"{host['host']}: " if len(report.hosts) > 1 else ""
        parts.append(
            f"{name}{host['cpu']}, {host['cpus']} CPUs, Linux {host['kernel']}; {settings}; {versions}"
        )
    parts.append(_table(*summary(report)))
    for payload in report.payloads:
        series = report.of(payload)
        if series:
            parts += [f"### {payload}", _table(_COLUMNS, [cells(one) for one in series])]
    lines = ended(report)
    if lines:
        parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))
