#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the rules of docs/scaling.md for pools and leases over many simulated fleets.  Needs matplotlib."""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from rich.console import Console
from rich.progress import track
from rich.table import Table

from payload_mixes import LARGEST, MIB, moments
from simulate_load import UNIT, Fleet, Scenario, held_on_average, lease_of_rule, pool_of_rule

mpl.use("Agg")
from matplotlib import pyplot as plt

STUDIED = ("flux", "small", "mixed")
HELD = (4000, 1000, 200, 40, 8)
"""Encoders before 4,000 denoisers: the fewer, the more payloads each holds."""


def smallest_pool(scenario: Scenario, held: float) -> float:
    """Return the part of the rule's pool with which at most 1 in 100 publications waits."""
    rule = pool_of_rule(scenario.mix, held)
    for part in (number / 10 for number in range(4, 20)):
        pool = max(int(part * rule), LARGEST[scenario.mix] + UNIT)
        if Fleet(replace(scenario, pool=pool, seed=1)).run().waited <= 0.01:
            return pool / rule
    return math.inf


class Point(NamedTuple):
    """What one producer holds on average, and pools, in multiples of that."""

    payloads: float
    rule: float
    smallest: float


def study_pools() -> dict[str, list[Point]]:
    """Return the points of each mix, and print them."""
    found: dict[str, list[Point]] = {}
    table = Table(title="pools: at most 1 in 100 publications waits (4,000 denoisers, 85 % busy)")
    for column in (
        "mix",
        "encoders",
        "payloads held",
        "bytes held",
        "pool of the rule",
        "smallest pool",
        "waited",
    ):
        table.add_column(column, justify="left" if column == "mix" else "right")
    for mix, encoders in track(list(itertools.product(STUDIED, HELD)), "pools", transient=True):
        scenario = Scenario(encoders, 4000, mix)
        held = held_on_average(scenario)
        rule = pool_of_rule(mix, held)
        smallest = smallest_pool(scenario, held) * rule
        waited = Fleet(replace(scenario, pool=rule, seed=2)).run().waited
        found.setdefault(mix, []).append(Point(held / moments(mix)[0], rule / held, smallest / held))
        sizes = (f"{size / MIB:,.1f} MiB" for size in (held, rule, smallest))
        table.add_row(mix, f"{encoders:,}", f"{held / moments(mix)[0]:.1f}", *sizes, f"{waited:.2%}")
    Console(width=110).print(table)
    return found


LOADS = (0.7, 0.85, 0.95)
LEASES = (2, 3, 4, 6, 8, 10, 12)


def study_leases() -> dict[float, list[float]]:
    """Return the part of the pulls that come too late, for each load and lease, and print it."""
    found = {}
    table = Table(title="pulls that come too late, by lease in multiples of the time of work on a request")
    table.add_column("denoisers busy")
    for lease in LEASES:
        table.add_column(f"{lease}", justify="right")
    for load in track(LOADS, "leases", transient=True):
        scenario = Scenario(200, 4000, load=load, publications=120_000)
        found[load] = [
            Fleet(replace(scenario, lease=lease * scenario.service)).run().too_late for lease in LEASES
        ]
        table.add_row(f"{load:.0%}", *(f"{part:.2%}" for part in found[load]))
    Console().print(table)
    return found


def study_losses() -> None:
    """Print what payloads that nobody pulls or rejects cost."""
    table = Table(title="payloads that nobody pulls or rejects, lease of the rule (200 encoders, 85 % busy)")
    for column in ("lost", "held by one producer", "pool of the rule", "waited", "too late"):
        table.add_column(column, justify="right")
    for lost in (0.0, 0.001, 0.01, 0.05):
        scenario = Scenario(200, 4000, lost=lost, lease=lease_of_rule(Scenario.service), publications=250_000)
        held = held_on_average(scenario)
        pool = pool_of_rule(scenario.mix, held)
        outcome = Fleet(replace(scenario, pool=pool)).run()
        sizes = (f"{size / MIB:,.0f} MiB" for size in (held, pool))
        table.add_row(f"{lost:.1%}", *sizes, f"{outcome.waited:.2%}", f"{outcome.too_late:.2%}")
    Console().print(table)


def plot(pools: dict[str, list[Point]], leases: dict[float, list[float]], target: Path) -> None:
    """Draw the rule and the smallest pools, and what comes too late."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for mix, colour in zip(pools, ("#e07a3f", "#6a994e", "#5b8bb5"), strict=True):
        held, rule, smallest = zip(*sorted(pools[mix]), strict=True)
        left.plot(held, rule, color=colour, label=f"{mix}, the rule")
        left.plot(held, smallest, "o", color=colour, label=f"{mix}, smallest pool")
    left.set(xscale="log", yscale="log", xlabel="payloads that a producer holds on average")
    left.set_ylabel("pool, in multiples of the bytes held")
    left.set_title("Pools with which at most 1 in 100 publications waits", fontsize=10)
    left.set_yticks([1.5, 2, 3, 5, 10, 20], ["1.5", "2", "3", "5", "10", "20"])
    left.minorticks_off()
    for load, colour in zip(leases, ("#a9c5a0", "#6a994e", "#2f5233"), strict=True):
        late = [part or math.nan for part in leases[load]]
        right.plot(LEASES, late, "o-", color=colour, label=f"denoisers busy {load:.0%} of the time")
    right.axvline(lease_of_rule(1), color="#9aa5b1", linestyle="--", label="the rule")
    right.set(yscale="log", xlabel="lease, in multiples of the mean time of work on a request")
    right.set_ylabel("of the pulls came too late")
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.6%}".rstrip("%0").rstrip(".") + "%")
    right.set_title("Leases that end too early", fontsize=10)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=150)


def main() -> None:
    """Run the study, print its tables, and write the plot if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, help="PNG file to write")
    arguments = parser.parse_args()
    study_losses()
    pools, leases = study_pools(), study_leases()
    if arguments.plot:
        plot(pools, leases, arguments.plot)


if __name__ == "__main__":
    main()
