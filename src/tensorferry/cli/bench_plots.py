# SPDX-License-Identifier: Apache-2.0
"""A benchmark's plots, each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorferry.cli.bench_results import PHASES, Report, Series
from tensorferry.cli.bench_rows import LIMIT, OURS

_FORMATS = ("png", "svg")
_WIDTH = 9.0


def draw(report: Report, folder: Path) -> list[Path]:
    """Draw bandwidth over size, the distribution of latencies, and the phases; return the files.

    Raises:
        ImportError: matplotlib is missing.
        OSError: A file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    numbers = {name: number for number, name in enumerate(dict.fromkeys(one.row for one in report.series))}
    written += _bandwidth(report, numbers, folder)
    for payload in report.payloads:
        series = report.of(payload)
        if series:
            written += _latencies(payload, series, numbers, folder)
            written += _phases(payload, series, folder)
    return written


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, folder: Path, name: str) -> list[Path]:
    paths = [folder / f"{name}.{kind}" for kind in _FORMATS]
    for path in paths:
        figure.savefig(path, dpi=120)
    return paths


def _style(series: Series, number: int) -> dict[str, Any]:
    """Return a line's looks: ours solid, limits dotted and grey, others dashed."""
    if series.family == LIMIT:
        return {"linestyle": ":", "color": str(0.2 + 0.15 * (number % 4))}
    colour = f"C{number % 10}"
    if series.family == OURS:
        return {"linestyle": "-", "linewidth": 2.2, "color": colour}
    return {"linestyle": ("--", "-.")[number // 10 % 2], "linewidth": 1.2, "color": colour}


def _bandwidth(report: Report, numbers: Mapping[str, int], folder: Path) -> list[Path]:
    swept = [one for one in report.series if one.payload.startswith("one ") and one.rounds]
    if len({one.nbytes for one in swept}) < 2:
        return []
    figure, axes = _figure(6.0)
    for name, number in numbers.items():
        line = sorted((one for one in swept if one.row == name), key=lambda one: one.nbytes)
        if not line:
            continue
        axes.plot(
            [one.nbytes for one in line],
            [one.throughput / 1e9 for one in line],
            marker=".",
            label=name,
            **_style(line[0], number),
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes of one tensor")
    axes.set_ylabel("GB/s, from tensors at the producer to tensors at the consumer")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="x-small")
    return _save(figure, folder, "bandwidth")


def _latencies(
    payload: str, series: Sequence[Series], numbers: Mapping[str, int], folder: Path
) -> list[Path]:
    figure, axes = _figure(5.0)
    for one in series:
        times = sorted(seconds * 1e3 for each in one.rounds for seconds in each.whole)
        shares = [(rank + 1) / len(times) for rank in range(len(times))]
        axes.step(times, shares, where="post", label=one.row, **_style(one, numbers[one.row]))
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    axes.set_ylabel("share of calls that take no longer")
    axes.set_title(f"{payload}: distribution of times")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="x-small")
    return _save(figure, folder, f"latency-{_slug(payload)}")


def _phases(payload: str, series: Sequence[Series], folder: Path) -> list[Path]:
    figure, axes = _figure(1.2 + 0.3 * len(series))
    names = [one.row for one in series]
    left = [0.0] * len(series)
    for number, phase in enumerate(PHASES):
        widths = [one.phase(phase) * 1e3 for one in series]
        axes.barh(names, widths, left=left, label=phase, color=f"C{number}")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.plot([one.whole * 1e3 for one in series], names, "k|", label="whole")
    axes.invert_yaxis()
    axes.set_xlabel("ms, medians")
    axes.set_title(f"{payload}: phases")
    figure.legend(loc="outside right upper", fontsize="x-small")
    return _save(figure, folder, f"phases-{_slug(payload)}")


def _slug(payload: str) -> str:
    return payload.replace(" ", "-")
