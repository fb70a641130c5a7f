#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What our UCX settings and borrowing bring on one host: medians over several rounds.

Pulls 16 MiB over tcp on the loopback device, with our defaults and with UCX's, in turn, and borrows 1 GiB
from a mapped pool.  Every payload is compared with what was published, outside the clock.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import torch
from rich.console import Console
from rich.table import Table

import tensorferry

LOOPBACK = {"TLS": "tcp", "NET_DEVICES": "lo"}
UCX_DEFAULTS = {"TCP_TX_SEG_SIZE": "8k", "TCP_RX_SEG_SIZE": "64k"}
MIB = 1 << 20


def produce(channel: Connection, nbytes: int, access: str, options: dict[str, str]) -> None:
    """Publish a payload of ``nbytes`` for every number that comes, until None comes."""
    torch.set_num_threads(1)
    payload = torch.arange(nbytes // 8).view(torch.uint8)
    with tensorferry.Producer(nbytes + MIB, access=access, backend_options=options) as producer:
        while (number := channel.recv()) is not None:
            channel.send(producer.publish(str(number), {"x": payload}, lease=600))
            channel.recv()
            producer.wait_released(str(number), timeout=10)


class Peer:
    """A producer process, and a consumer of it here."""

    def __init__(self, nbytes: int, access: str, options: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=produce, args=(theirs, nbytes, access, options))
        self.process.start()
        self.consumer = tensorferry.Consumer(nbytes + MIB, access=access, backend_options=options)
        self.expected = torch.arange(nbytes // 8).view(torch.uint8)
        self.published = 0

    @contextmanager
    def manifest(self) -> Iterator[bytes]:
        """Have one payload published, and its slot free again afterwards."""
        self.published += 1
        self.channel.send(self.published)
        yield self.channel.recv()
        self.channel.send("pulled")

    def pull(self) -> tuple[float, float]:
        """Return the seconds of a whole pull, and of its time on the wire."""
        before = self.consumer.statistics().wire_seconds
        with self.manifest() as manifest:
            started = time.perf_counter()
            result = self.consumer.pull(manifest)["x"]
            seconds = time.perf_counter() - started
        assert torch.equal(result, self.expected)
        return seconds, self.consumer.statistics().wire_seconds - before

    def borrow(self) -> float:
        """Return the seconds from the manifest to tensors in hand."""
        with self.manifest() as manifest:
            started = time.perf_counter()
            with self.consumer.borrow(manifest) as tensors:
                seconds = time.perf_counter() - started
                assert torch.equal(tensors["x"], self.expected)
        return seconds

    def close(self) -> None:
        """End the other process."""
        self.channel.send(None)
        self.process.join(30)
        self.consumer.close()


def medians(calls: int, measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Return the medians of both figures over some calls."""
    pairs = [measure() for _ in range(calls)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--calls", type=int, default=10, help="pulls a round (default 10)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    nbytes = 16 * MIB
    results: dict[str, list[tuple[float, float]]] = {"ours": [], "ucx": []}
    with ExitStack() as stack:
        peers = {
            "ours": Peer(nbytes, "served", LOOPBACK),
            "ucx": Peer(nbytes, "served", LOOPBACK | UCX_DEFAULTS),
        }
        for peer in peers.values():
            stack.callback(peer.close)
            peer.pull()
        for _ in range(arguments.rounds):
            for name, peer in peers.items():
                results[name].append(medians(arguments.calls, peer.pull))
    lender = Peer(1024 * MIB, "mapped", LOOPBACK)
    borrows = [lender.borrow() for _ in range(arguments.rounds + 1)][1:]
    lender.close()

    table = Table(
        title=f"medians of {arguments.rounds} rounds of {arguments.calls} calls, two processes, one host"
    )
    for column in ("what", "time", "GB/s", "ratio"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for position, phase in enumerate(("whole pull", "of it the wire")):
        seconds = {
            name: statistics.median(one[position] for one in rounds) for name, rounds in results.items()
        }
        for name, label in (("ucx", "UCX's segment sizes"), ("ours", "our defaults")):
            table.add_row(
                f"16 MiB over tcp, {phase}, {label}",
                f"{seconds[name] * 1e3:.2f} ms",
                f"{nbytes / seconds[name] / 1e9:.2f}",
                f"{seconds['ucx'] / seconds[name]:.1f}",
            )
    table.add_row("1 GiB mapped, borrow", f"{statistics.median(borrows) * 1e3:.3f} ms", "", "")
    Console().print(table)


if __name__ == "__main__":
    main()
