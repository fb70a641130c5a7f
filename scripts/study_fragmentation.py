#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How full a pool is when the first payload finds no room, by kind of allocator and mix of payloads.

Payloads come, and random ones leave; slightly more come than leave, so the pool fills slowly, through many
departures.  When an allocation fails for the first time, the bytes that live payloads asked for are compared
with the memory that the pool takes up.  Needs matplotlib.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path

import matplotlib as mpl
from rich.console import Console
from rich.progress import track
from rich.table import Table

from payload_mixes import GIB, MIB, MIXES
from tensorferry import BuddyAllocator

mpl.use("Agg")
from matplotlib import pyplot as plt

KINDS: dict[str, dict[str, bool]] = {
    "classic": {},
    "exact": {"exact": True},
    "exact and trimmed": {"exact": True, "trim": True},
}
ARRIVALS = 0.51
POOL = 12 * GIB
SMALL_POOL = 192 * MIB
"""For payloads of 190 KiB on average; in 12 GiB it would take them long to fill it."""


def utilisation(mix: str, kind: dict[str, bool], seed: int) -> float:
    """Return the part of a pool that was of use when the first allocation failed."""
    rng = random.Random(f"{mix} {seed}")
    allocator = BuddyAllocator(SMALL_POOL if mix == "small" else POOL, 4096, **kind)
    live: list[int] = []
    while True:
        if not live or rng.random() < ARRIVALS:
            offset = allocator.allocate(MIXES[mix](rng))
            if offset is None:
                stats = allocator.get_stats()
                return float(stats["requested_bytes"] / stats["pool_size"])
            live.append(offset)
        else:
            place = rng.randrange(len(live))
            live[place], live[-1] = live[-1], live[place]
            allocator.free(live.pop())


def plot(results: dict[tuple[str, str], list[float]], target: Path) -> None:
    """Draw one group of bars for each mix, with the range over the seeds."""
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    width = 0.8 / len(KINDS)
    for index, (kind, colour) in enumerate(zip(KINDS, ("#9aa5b1", "#5b8bb5", "#e07a3f"), strict=True)):
        for place, mix in enumerate(MIXES):
            seen = results[mix, kind]
            middle = statistics.median(seen)
            x = place + (index - (len(KINDS) - 1) / 2) * width
            axes.bar(x, middle, width * 0.92, color=colour, label=kind if place == 0 else None)
            axes.errorbar(x, middle, [[middle - min(seen)], [max(seen) - middle]], color="black", lw=1)
            axes.text(x, 0.03, f"{middle:.0%}", ha="center", fontsize=7, color="white")
    axes.set_xticks(range(len(MIXES)), list(MIXES))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("of the pool's memory in use")
    axes.set_title("How full a pool is when the first payload finds no room", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(KINDS), frameon=False)
    figure.savefig(target, dpi=150)


def main() -> None:
    """Run the study, print the table, and write the plot if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=25, help="runs of each kind and mix (default 25)")
    parser.add_argument("--plot", type=Path, help="PNG file to write")
    arguments = parser.parse_args()
    runs = [(mix, kind) for mix in MIXES for kind in KINDS]
    results = {
        (mix, kind): [utilisation(mix, KINDS[kind], seed) for seed in range(arguments.seeds)]
        for mix, kind in track(runs, "filling pools", transient=True)
    }
    table = Table(title=f"pool in use at the first failure: median (lowest to highest) of {arguments.seeds}")
    table.add_column("mix")
    for kind in KINDS:
        table.add_column(kind, justify="right")
    for mix in MIXES:
        cells = (results[mix, kind] for kind in KINDS)
        table.add_row(mix, *(f"{statistics.median(c):.0%} ({min(c):.0%} to {max(c):.0%})" for c in cells))
    Console().print(table)
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
