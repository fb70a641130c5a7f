# SPDX-License-Identifier: Apache-2.0
"""Payloads of the soak: random bits in random structures, and the digests that both ends compare."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
import xxhash

MIB = 1 << 20
LARGEST = 64 * MIB

_DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]
_SPARE = 8 * MIB  # how far the start of a payload may move in the random bytes
_ALIGNMENT = 16  # of every dtype above


class Source:
    """Cuts payloads out of random bytes; equal seeds give equal payloads.

    Two payloads begin at different places of the bytes, so bits of another payload, or of another
    place of the same one, are never the right ones except for a few bytes' worth of chance.

    Args:
        seed: Of everything that is drawn here.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        generator = numpy.random.default_rng(self._random.getrandbits(64))
        self._bytes = torch.from_numpy(generator.integers(0, 256, LARGEST + _SPARE, dtype=numpy.uint8))

    def size(self) -> int:
        """Draw a number of bytes from 1 to 64 MiB, every order of magnitude as often as the others."""
        return min(LARGEST, int(2 ** self._random.uniform(0, 26.3)))

    def payload(self, nbytes: int) -> dict[str, Any]:
        """Draw a payload whose tensors have about ``nbytes`` bytes together, at most 64 MiB."""
        shape = self._random.choice((self._one, self._parts, self._many, self._views))
        return shape(nbytes)

    def _tensor(self, nbytes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Cut a flat tensor of at most ``nbytes`` bytes, and of at least one element if there is room."""
        if dtype is None:
            dtype = self._random.choice([one for one in _DTYPES if one.itemsize <= max(1, nbytes)])
        start = self._random.randrange(0, _SPARE, _ALIGNMENT)
        used = nbytes // dtype.itemsize * dtype.itemsize
        return self._bytes[start : start + used].view(dtype)

    def _one(self, nbytes: int) -> dict[str, Any]:
        return {"x": self._tensor(nbytes)}

    def _parts(self, nbytes: int) -> dict[str, Any]:
        sizes = [nbytes // 2, nbytes // 4, nbytes // 8, nbytes // 16, 24]
        parts = [self._tensor(size) for size in sizes]
        return {
            "list": [parts[0], None, parts[1], None],
            "nested": {"tuple": (parts[2], [], {"a": parts[3]}), "none": None},
            "scalar": self._tensor(8, torch.float64)[0],
            "empty": torch.empty(0, 7, dtype=torch.bfloat16),
            "tail": parts[4],
        }

    def _many(self, nbytes: int) -> dict[str, Any]:
        count = self._random.randint(2, 200)
        each = max(1, min(nbytes // count, 64 << 10))
        return {f"t{i}": self._tensor(each) for i in range(count)}

    def _views(self, nbytes: int) -> dict[str, Any]:
        words = self._tensor(max(nbytes // 2, 32), torch.float32)
        half = words.numel() // 2
        return {
            "transposed": words[: half * 2].view(2, half).t(),
            "strided": words[::2],
            "flags": self._tensor(min(nbytes, 1000), torch.uint8) > 127,
        }


def digests(payload: dict[str, Any]) -> dict[str, str]:
    """Return a digest for each top-level name: of the structure, dtypes, shapes and bits under it.

    Names keep their order, so two payloads are equal if their digests and the order of these are.
    """
    found = {}
    for name, value in payload.items():
        digest = xxhash.xxh3_128()
        _update(digest, value)
        found[name] = digest.hexdigest()
    return found


def _update(digest: xxhash.xxh3_128, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        digest.update(_bits(value))
    elif isinstance(value, dict):
        digest.update(f"dict {len(value)};".encode())
        for key, item in value.items():
            digest.update(f"key {len(key.encode())} {key};".encode())
            _update(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{type(value).__name__} {len(value)};".encode())
        for item in value:
            _update(digest, item)
    elif value is None:
        digest.update(b"none;")
    else:
        raise TypeError(f"a payload does not contain a {type(value).__name__}")


def _bits(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of all elements, in row-major order."""
    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 1:  # contiguous() leaves any stride of a single element as it is
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().data
