# SPDX-License-Identifier: Apache-2.0
"""Copies within one process: what moving bytes costs when nobody moves them anywhere."""

from __future__ import annotations

import time

import numpy as np
import torch

from tensorferry.cli.bench_peers import packed
from tensorferry.cli.bench_peers.base import Job, Received, Tensors
from tensorferry.cli.bench_peers.packed import Layout

REQUIREMENT = ""


def load() -> None:
    """Nothing is needed."""


class Alone:
    """Copies into a pool and out of it into new tensors; or, as a limit, once between two buffers.

    Args:
        job: What to do.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pool = touched(packed.room(job.payload))

    def move(self, payloads: list[Tensors]) -> Received:
        """Copy one payload."""
        (tensors,) = payloads
        if self._job.options.get("limit"):
            return self._copy_once(tensors)
        layout = Layout.of(tensors)
        layout.pack(self._pool, tensors)
        packed_at = time.perf_counter()
        pool = self._pool[: layout.nbytes]
        if self._job.device.type == "cpu":
            block = packed.fresh(layout.nbytes)
            block.copy_(pool)
        else:
            block = pool
        tensors = packed.finish(layout, block, self._job.device)
        return Received([tensors], packed_at, landing=time.perf_counter() - packed_at)

    def _copy_once(self, tensors: Tensors) -> Received:
        source = packed.flat(next(iter(tensors.values()))).cpu().numpy()
        target = self._pool.numpy()[: source.nbytes]
        arrived = time.perf_counter()
        np.copyto(target, source)
        end = time.perf_counter()
        return Received([], arrived, wire=end - arrived, end=end)


def touched(nbytes: int) -> torch.Tensor:
    """Return memory whose pages are there."""
    return torch.full((nbytes,), 1, dtype=torch.uint8)
