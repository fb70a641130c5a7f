# SPDX-License-Identifier: Apache-2.0
"""The figures of a study as Markdown and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from growing.curves import GIB, KIB, MIB, MOST_SLOTS, SHARED, TENSOR, Curve, Line
from tensorferry.cli.bench_payloads import readable

_COLOURS = {"served": "#5b8bb5", "mapped": "#e07a3f", "mapped, borrow": "#6a994e"}
_TICKS = [digit * 10.0**power for power in range(-3, 6) for digit in (1, 2, 5)]  # milliseconds


class View(NamedTuple):
    """How a curve is shown.

    Attributes:
        title: Of its panel.
        axis: What its points are.
        head: Of the first column of its table.
        label: Writes a point.
        cell: Writes the seconds at a point.
        shown: Whether a point has a row in the table.
        ticks: Points that the axis names, if they are there.
        per_unit: Whether the work grows with the points, so that the time may.
    """

    title: str
    axis: str
    head: str
    label: Callable[[int], str]
    cell: Callable[[int, float], str]
    shown: Callable[[int], bool]
    ticks: Sequence[int]
    per_unit: bool


def _duration(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"


def _with_bandwidth(nbytes: int, seconds: float) -> str:
    return f"{_duration(seconds)}, {nbytes / seconds / 1e9:.2f} GB/s" if nbytes >= MIB else _duration(seconds)


VIEWS = {
    "size": View(
        "Size of one tensor",
        "bytes",
        "one tensor",
        readable,
        _with_bandwidth,
        lambda nbytes: nbytes in (1, KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB, 4 * GIB),
        (1, KIB, MIB, GIB),
        per_unit=True,
    ),
    "tensors": View(
        f"Tensors of {TENSOR} bytes",
        "tensors",
        "tensors",
        "{:,}".format,
        lambda count, seconds: f"{_duration(seconds)}, {_duration(seconds / count)} each",
        lambda count: str(count).startswith("1"),
        [10**power for power in range(6)],
        per_unit=True,
    ),
    "consumers": View(
        f"Consumers at once, payloads of {readable(SHARED.nbytes)}",
        "consumer processes",
        "consumers",
        "{:,}".format,
        lambda _, seconds: _with_bandwidth(SHARED.nbytes, seconds),
        lambda _: True,
        [2**power for power in range(11)],
        per_unit=False,
    ),
    "live": View(
        "One payload more, beside publications that live",
        "publications that live",
        "live publications",
        "{:,}".format,
        lambda _, seconds: _duration(seconds),
        lambda _: True,
        [*(10**power for power in range(5)), MOST_SLOTS - 1],
        per_unit=False,
    ),
}


def markdown(name: str, curve: Curve) -> str:
    """Return the table of a curve; its last row compares the last point with the cheapest one."""
    view = VIEWS[name]
    medians = {way: line.medians() for way, line in curve.lines.items()}
    lent = {
        f"of it, entering `{way.partition(', ')[2]}`": line.pulls()
        for way, line in curve.lines.items()
        if way.endswith("borrow")
    }
    rows = [[view.head, *medians, *lent], ["---", *("---:" for _ in (*medians, *lent))]]
    for point in filter(view.shown, curve.points):
        whole = (view.cell(point, line[point]) for line in medians.values())
        rows.append([view.label(point), *whole, *(_duration(line[point]) for line in lent.values())])
    unit = "the last against the cheapest" + (", per unit" if view.per_unit else "")
    rows.append(
        [unit, *(f"{_dearer(line, view.per_unit):.1f}" for line in medians.values()), *("" for _ in lent)]
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _dearer(medians: Mapping[int, float], per_unit: bool) -> float:
    costs = [seconds / point if per_unit else seconds for point, seconds in medians.items()]
    return costs[-1] / min(costs)


def phases(curve: Curve) -> dict[str, dict[int, dict[str, list[float]]]]:
    """Return all rounds of a curve, in seconds, for JSON."""
    return {
        way: {
            point: {"whole": line.whole[point], "publish": line.publish[point], "pull": line.pull[point]}
            for point in line.whole
        }
        for way, line in curve.lines.items()
    }


def plot(curves: Mapping[str, Curve], target: Path) -> None:
    """Draw a panel for each curve: medians, and half of the rounds around them.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    for axes, (name, curve) in zip(figure.subplots(2, 2).flat, curves.items(), strict=True):
        view = VIEWS[name]
        for way, line in curve.lines.items():
            _draw(axes, way, line)
        axes.set(xscale="log", yscale="log", xlabel=view.axis)
        axes.set_ylabel("ms a payload" if name == "consumers" else "ms, from publish to released")
        axes.set_title(view.title, fontsize=10)
        ticks = [tick for tick in view.ticks if tick <= curve.points[-1]]
        axes.set_xticks(ticks, map(view.label, ticks))
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        medians = [seconds * 1e3 for line in curve.lines.values() for seconds in line.medians().values()]
        if view.per_unit:
            _draw_slope(axes, curve.points[-1], max(medians), min(medians))
        else:  # what should be flat shall look flat
            low, high = min(medians) / 4, max(medians) * 4
            axes.set_yticks([tick for tick in _TICKS if low < tick < high])
            axes.set_ylim(low, high)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=150)


def _draw(axes: Any, way: str, line: Line) -> None:
    points = list(line.whole)
    low, middle, high = zip(*(_quartiles(line.whole[point]) for point in points), strict=True)
    axes.plot(points, middle, "o-", markersize=3, color=_COLOURS[way], label=way)
    axes.fill_between(points, low, high, alpha=0.2, linewidth=0, color=_COLOURS[way])


def _quartiles(rounds: Sequence[float]) -> list[float]:
    """Return the quartiles in milliseconds."""
    found = statistics.quantiles(rounds, n=4, method="inclusive") if len(rounds) > 1 else [rounds[0]] * 3
    return [seconds * 1e3 for seconds in found]


def _draw_slope(axes: Any, last: int, highest: float, lowest: float) -> None:
    """Draw what grows as fast as its work, through the dearest of the last points."""
    first = max(1.0, last * lowest / highest)
    axes.plot([first, last], [highest * first / last, highest], "--", color="#9aa5b1", label="slope 1")
