# SPDX-License-Identifier: Apache-2.0
"""Sizes of payloads that models hand over, for the scripts beside this one."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

FLUX = 2 * (512 * 4096 + 768 + 512 * 3 + 4096 * 64)
"""Bytes of prompt embeddings, pooled embeddings, ids and latents of a FLUX image: 4.7 MB."""

WAN = 2 * (2 * 512 * 4096 + 257 * 1280 + 4 * 21 * 90 * 160) + 4 * (16 * 21 * 90 * 160 + 50)
"""Bytes of embeddings, latents and mask of a Wan video of 81 frames at 720p: 31 MB."""

VLM_TOKEN = 2 * 3584
"""Bytes that a vision encoder makes of one image token."""

VLM = 16384 * VLM_TOKEN + 64 * 3 * 8
"""Bytes of 64 images for a language model: 117 MB."""


def _small(rng: random.Random) -> int:
    return int(4 * KIB * 2 ** rng.uniform(0, 8))


def _wan(rng: random.Random) -> int:
    return int(WAN * rng.choice((0.4, 0.7, 1.0, 1.0, 1.3)))  # from 33 to 105 frames


def _vlm(rng: random.Random) -> int:
    return 256 * rng.randint(1, 64) * VLM_TOKEN


def _mixed(rng: random.Random) -> int:
    return rng.choices(
        (_small, lambda rng: rng.choice((1, 1, 2, 4)) * FLUX, _wan, _vlm), weights=(20, 50, 20, 10)
    )[0](rng)


MIXES: dict[str, Callable[[random.Random], int]] = {
    "flux": lambda rng: FLUX,
    "wan": lambda rng: WAN,
    "vlm": lambda rng: VLM,
    "small": _small,
    "mixed": _mixed,
}
"""Draws the bytes of one payload.

``small``: 4 KiB to 1 MiB, evenly on a logarithmic scale.  ``mixed``: half of them flux in batches of 1, 2 or
4, a fifth wan of 0.4 to 1.3 times its length, a tenth vlm of 1 to 64 images, a fifth small.
"""


@functools.cache
def moments(mix: str, draws: int = 20_000) -> tuple[float, float]:
    """Return the mean size and the mean of the sizes' squares."""
    rng = random.Random(mix)
    sizes = [MIXES[mix](rng) for _ in range(draws)]
    return sum(sizes) / draws, sum(size * size for size in sizes) / draws


LARGEST = {"flux": FLUX, "wan": WAN, "vlm": VLM, "small": MIB, "mixed": VLM}
"""Bytes of the largest payload of each mix."""
