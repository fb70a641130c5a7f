#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What calls for small payloads and for thousands of tensors cost by themselves, in a loop in one process.

Nobody is waited for, so these are the least that such calls can take; medians and minima in microseconds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

import tensorferry
from tensorferry.columns import describe
from tensorferry.manifest import decode_manifest
from tensorferry.standing import StandingParts

LOOPBACK = {"TLS": "tcp", "NET_DEVICES": "lo"}
COUNT, ELEMENTS = 10_000, 256


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000, help="of a small payload (default 1000)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="microseconds a call")
    for column in ("what", "median", "least"):
        table.add_column(column, justify="left" if column == "what" else "right")

    def measure(what: str, calls: int, call: Callable[[int], object]) -> None:
        call(-1)
        gc.collect()
        seconds = []
        for number in range(calls):
            began = time.perf_counter()
            call(number)
            seconds.append(time.perf_counter() - began)
        table.add_row(what, f"{statistics.median(seconds) * 1e6:.0f}", f"{min(seconds) * 1e6:.0f}")

    calls, few = arguments.calls, max(arguments.calls // 50, 3)
    small = {"x": torch.arange(4096, dtype=torch.uint8)}
    many = {f"t{i}": torch.full((ELEMENTS,), float(i)) for i in range(COUNT)}
    whole = torch.zeros(COUNT, ELEMENTS)
    nbytes = whole.nbytes
    with (
        tensorferry.Producer("256MiB", access="mapped", backend_options=LOOPBACK) as producer,
        tensorferry.Consumer("1MiB", access="mapped", backend_options=LOOPBACK) as consumer,
    ):
        manifest = producer.publish("small", small, lease=600)
        measure("4 KiB: publish", calls, lambda number: producer.publish(str(number), small))
        measure("4 KiB: decode the manifest", calls, lambda number: decode_manifest(manifest))
        known = StandingParts()
        measure(
            "4 KiB: decode one of a known kind", calls, lambda number: decode_manifest(manifest, known=known)
        )
        measure("4 KiB: pull, mapped", calls, lambda number: consumer.pull(manifest, release=False))
        large = producer.publish("large", many, lease=600)
        values, slot = list(many.values()), torch.zeros(nbytes, dtype=torch.uint8)
        described = describe(values, str)
        offsets = list(range(0, nbytes, nbytes // COUNT))
        measure("10,000 x 1 KiB: describe", few, lambda number: describe(values, str))
        measure("10,000 x 1 KiB: copy", few, lambda number: described.copy(slot, offsets))
        measure("10,000 x 1 KiB: decode the manifest", few, lambda number: decode_manifest(large))
        measure(
            "10,000 x 1 KiB: decode one of a known kind",
            few,
            lambda number: decode_manifest(large, known=known),
        )
        measure("10,000 x 1 KiB: pull, mapped", few, lambda number: consumer.pull(large, release=False))
        measure("10,000 x 1 KiB: torch's unbind of one tensor", few, lambda number: whole.unbind())
    Console().print(table)


if __name__ == "__main__":
    main()
