#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How the cost of a publication grows with its size, its tensors, its consumers and the others that live.

The producer is this process, consumers are others on this host, with one torch thread each.  What is timed
begins with ``publish`` and ends when the producer has its slot back and the consumer its tensors, except for
many consumers at once, for which everything was published before.  Every payload is compared with what was
published, outside the clock.  Medians of rounds, each a median of calls; Markdown on the standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.progress import Progress

from growing import report
from growing.curves import GIB, MOST_SLOTS, Consumers, Curve, Live, Sizes, Tensors
from tensorferry.arguments import as_nbytes
from tensorferry.cli import bench_environment
from tensorferry.cli.bench_payloads import readable

_MEMORY = Path("/proc/meminfo")


def available_nbytes() -> int:
    """Return the memory that can be had."""
    for line in _MEMORY.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    raise OSError(f"{_MEMORY} has no MemAvailable")


def fitting(largest: int) -> int:
    """Return the largest size whose source, slot and result fit into memory, and say so if it is smaller."""
    room = (available_nbytes() - GIB) // 3
    size = largest
    while size > max(room, 1):
        size //= 4
    if size < largest:
        print(
            f"{readable(largest)} do not fit three times into memory: up to {readable(size)}", file=sys.stderr
        )
    return size


def parse() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="interleaved over the points of a curve (default 5)")
    add("--largest", default="4GiB", help="size of one tensor, at the most (default 4GiB)")
    add("--tensors", type=int, default=100_000, help="in a payload, at the most (default 100,000)")
    add("--consumers", type=int, default=32, help="that pull at once, at the most (default 32)")
    add(
        "--live",
        type=int,
        default=MOST_SLOTS,
        help=f"publications, at the most (default {MOST_SLOTS:,}, more than which no producer has)",
    )
    add("--json", type=Path, help="file for all rounds and the machine")
    add("--plot", type=Path, help="PNG file to write; needs matplotlib")
    arguments = parser.parse_args()
    if not 2 <= arguments.live <= MOST_SLOTS:
        parser.error(f"--live is from 2 to {MOST_SLOTS}")
    if min(arguments.rounds, arguments.tensors, arguments.consumers) < 1:
        parser.error("--rounds, --tensors and --consumers are at least 1")
    return arguments


def measure(make: Callable[[], Curve], rounds: int, tick: Callable[[], None]) -> Curve:
    """Return a curve after its rounds; one more comes before them, which does not count."""
    with make() as curve:
        for number in range(rounds + 1):
            curve.round(counts=number > 0)
            tick()
    return curve


def main() -> None:
    """Measure all curves, print their tables, and write the files that were asked for."""
    arguments = parse()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    makers: dict[str, Callable[[], Curve]] = {
        "size": lambda: Sizes(fitting(as_nbytes(arguments.largest, "--largest"))),
        "tensors": partial(Tensors, arguments.tensors),
        "consumers": partial(Consumers, arguments.consumers),
        "live": partial(Live, arguments.live),
    }
    curves: dict[str, Curve] = {}
    with Progress(transient=True) as progress:
        for name, make in makers.items():
            task = progress.add_task(name, total=arguments.rounds + 1)
            curves[name] = measure(make, arguments.rounds, partial(progress.advance, task))
    for name, curve in curves.items():
        print(report.markdown(name, curve), end="\n\n")
    if arguments.json:
        figures = {name: report.phases(curve) for name, curve in curves.items()}
        about = bench_environment.describe(torch.device("cpu"))
        arguments.json.write_text(json.dumps({"environment": about, "seconds": figures}, indent=1))
    if arguments.plot:
        report.plot(curves, arguments.plot)


if __name__ == "__main__":
    main()
