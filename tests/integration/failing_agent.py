# SPDX-License-Identifier: Apache-2.0
"""An agent of the benchmark whose peers fail, each in its own way; the module of a row names which."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from tensorferry.cli import bench_agent, bench_rows
from tensorferry.cli.bench_peers import sockets

kept: dict[str, Any] = {}


class Flips(sockets.Receiver):
    """One bit of one result is another."""

    calls = 0

    def receive(self, inspect: Any) -> Any:
        received = super().receive(inspect)
        Flips.calls += 1
        if Flips.calls == 3:
            received.payloads[0]["latents"].view(-1).view(torch.uint8)[5] ^= 4
        return received


class Aliases(sockets.Receiver):
    """All results are in one buffer."""

    def receive(self, inspect: Any) -> Any:
        received = super().receive(inspect)
        for name, tensor in received.payloads[0].items():
            received.payloads[0][name] = kept.setdefault(name, tensor.clone()).copy_(tensor)
        return received


class Stale(sockets.Receiver):
    """The first result comes again and again."""

    def receive(self, inspect: Any) -> Any:
        received = super().receive(inspect)
        for name, tensor in received.payloads[0].items():
            received.payloads[0][name] = kept.setdefault(name, tensor).clone()
        return received


class Well(sockets.Receiver):
    """Nothing is wrong with it."""


class Hangs(sockets.Receiver):
    def receive(self, inspect: Any) -> Any:
        time.sleep(1000)


class Dies(sockets.Receiver):
    def receive(self, inspect: Any) -> Any:
        print("a last word", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)


class Raises(sockets.Receiver):
    def receive(self, inspect: Any) -> Any:
        raise RuntimeError("no such luck")


class HangsInTheEnd(sockets.Receiver):
    def close(self) -> None:
        time.sleep(1000)


def module(row: bench_rows.Row) -> Any:
    return SimpleNamespace(Sender=sockets.Sender, Receiver=globals()[row.module])


if __name__ == "__main__":
    bench_rows.module = module
    listener = bench_agent.listen("127.0.0.1:0")
    print(listener.getsockname()[1], flush=True)
    bench_agent.serve(listener)
    sys.exit(0)
