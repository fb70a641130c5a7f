#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long other Python threads wait while 1 GiB is published and pulled, as one sees that wakes every ms.

Producer and consumer are in the same process, so the thread competes with both for the interpreter's lock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.table import Table

import tensorferry

LOOPBACK = {"TLS": "tcp", "NET_DEVICES": "lo"}
MIB = 1 << 20


class Ticker:
    """Sleeps a millisecond at a time, and keeps how long it was from one waking to the next."""

    def __init__(self) -> None:
        self.gaps: list[float] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Tick during the block."""
        self._stop = False
        thread = threading.Thread(target=self._tick)
        thread.start()
        time.sleep(0.05)
        self.gaps.clear()
        try:
            yield
        finally:
            self._stop = True
            thread.join()

    def _tick(self) -> None:
        last = time.perf_counter()
        while not self._stop:
            time.sleep(0.001)
            now = time.perf_counter()
            self.gaps.append(now - last)
            last = now


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each (default 5)")
    parser.add_argument("--mebibytes", type=int, default=1024, help="of a payload (default 1024)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    nbytes = arguments.mebibytes * MIB
    payload = torch.arange(nbytes // 8).view(torch.uint8)
    table = Table(
        title=f"longest gap of a 1 ms ticker, {arguments.rounds} rounds of {arguments.mebibytes} MiB"
    )
    for column in ("during", "time ms", "longest gap ms", "median gap ms"):
        table.add_column(column, justify="left" if column == "during" else "right")
    wrong = 0
    for access in ("served", "mapped"):
        ticks: dict[str, Ticker] = {"publish": Ticker(), "pull": Ticker()}
        seconds: dict[str, list[float]] = {"publish": [], "pull": []}
        gaps: dict[str, list[float]] = {"publish": [], "pull": []}
        with (
            tensorferry.Producer(nbytes + MIB, access=access, backend_options=LOOPBACK) as producer,
            tensorferry.Consumer(nbytes + MIB, access=access, backend_options=LOOPBACK) as consumer,
        ):
            for number in range(arguments.rounds):
                with ticks["publish"].running():
                    started = time.perf_counter()
                    manifest = producer.publish(str(number), {"x": payload}, lease=600)
                    seconds["publish"].append(time.perf_counter() - started)
                with ticks["pull"].running():
                    started = time.perf_counter()
                    got = consumer.pull(manifest)["x"]
                    seconds["pull"].append(time.perf_counter() - started)
                wrong += not torch.equal(got, payload)
                del got
                producer.wait_released(str(number), timeout=30)
                for name, ticker in ticks.items():
                    gaps[name] += ticker.gaps
        for name, found in gaps.items():
            table.add_row(
                f"{name}, {access}",
                f"{statistics.median(seconds[name]) * 1e3:.0f}",
                f"{max(found) * 1e3:.1f}",
                f"{statistics.median(found) * 1e3:.2f}",
            )
    Console().print(table)
    if wrong:
        sys.exit(f"{wrong} payloads were wrong")


if __name__ == "__main__":
    main()
