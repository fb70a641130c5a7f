# SPDX-License-Identifier: Apache-2.0
"""What the benchmark sends, and how it sees that exactly that has arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch

from tensorferry.arguments import as_nbytes
from tensorferry.errors import IntegrityError, UsageError

SIZES = (1, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)
"""Bytes of the payloads ``one`` that are swept by default."""

NAMES = ("flux", "wan", "vlm", "many", "one")

_BF16, _F32, _I64, _U8 = "bfloat16", "float32", "int64", "uint8"
_SHAPES: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {
    "flux": {
        "prompt_embeds": ((1, 512, 4096), _BF16),
        "pooled": ((1, 768), _BF16),
        "text_ids": ((512, 3), _BF16),
        "latents": ((1, 4096, 64), _BF16),
    },
    "wan": {
        "prompt_embeds": ((1, 512, 4096), _BF16),
        "negative": ((1, 512, 4096), _BF16),
        "image_embeds": ((1, 257, 1280), _BF16),
        "latents": ((1, 16, 21, 90, 160), _F32),
        "mask": ((1, 4, 21, 90, 160), _BF16),
        "timesteps": ((50,), _F32),
    },
    "vlm": {
        "image_embeds": ((16384, 3584), _BF16),
        "grid": ((64, 3), _I64),
    },
    "many": {f"t{index}": ((256,), _F32) for index in range(10_000)},
}

# An odd number: multiples of it differ in all bytes, and no two of fewer than 2**64 are equal.
_STEP = 0x1E3779B97F4A7C15
_CHUNK_WORDS = 1 << 17

# From this many tensors on they are compared as one, as a call of torch for each takes longer.
_MANY = 64
_HELD_TWICE_NBYTES = 64 << 20

_CALLS = ((64 << 10, 200), (1 << 20, 100), (16 << 20, 30), (128 << 20, 10), (512 << 20, 5))
_FEWEST_CALLS = 3


class WrongBytesError(IntegrityError):
    """A peer brought something else than what was sent."""


@dataclass(frozen=True)
class Payload:
    """Names, shapes and dtypes of tensors.

    Attributes:
        name: ``"flux"``, say, or ``"one 4 KiB"``.
        shapes: Shape and name of the dtype of each tensor, by its name.
    """

    name: str
    shapes: Mapping[str, tuple[tuple[int, ...], str]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(prod(shape) * _dtype(dtype).itemsize for shape, dtype in self.shapes.values())

    @property
    def calls(self) -> int:
        """How often it is sent in a round, for each peer alike: more often the faster it goes."""
        for limit, calls in _CALLS:
            if self.nbytes <= limit:
                return calls
        return _FEWEST_CALLS

    @property
    def warm_up(self) -> int:
        """How often it is sent before anything counts."""
        return max(2, self.calls // 10)

    def build(self, variant: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Return its tensors, each in memory of its own.

        Args:
            variant: 0 or 1; of the two no byte is equal.
            device: Where they are.
        """
        tensors: dict[str, torch.Tensor] = {}
        first = 0
        for name, (shape, dtype) in self.shapes.items():
            tensor = torch.empty(shape, dtype=_dtype(dtype))
            _fill(tensor.view(-1).view(torch.uint8), first, variant)
            first += -(-tensor.nbytes // 8)
            tensors[name] = tensor.to(device)
        return tensors


def named(name: str, nbytes: int = 0) -> Payload:
    """Return a payload by its name; ``one`` is a tensor of ``nbytes`` bytes.

    Raises:
        UsageError: There is none of this name.
    """
    if name == "one":
        return Payload(f"one {readable(nbytes)}", {"x": ((nbytes,), _U8)})
    if name not in _SHAPES:
        raise UsageError(f"--payload is one of {', '.join(NAMES)}, not {name!r}")
    return Payload(name, _SHAPES[name])


def chosen(names: Sequence[str], sizes: Sequence[str]) -> list[Payload]:
    """Return the payloads that a user asked for: by default all, and for ``one`` all of :data:`SIZES`.

    Raises:
        UsageError: A name or a size has another form.
    """
    swept = [as_nbytes(size, "--sizes") for size in sizes] or list(SIZES)
    payloads: list[Payload] = []
    for name in names or NAMES:
        payloads += [named("one", nbytes) for nbytes in swept] if name == "one" else [named(name)]
    return payloads


def readable(nbytes: int) -> str:
    """Return bytes as text, exactly where they are a multiple of a power of 1024."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):g} {unit}"
    return f"{nbytes} B"


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _fill(memory: torch.Tensor, first: int, variant: int) -> None:
    """Write words that say where they belong, counted from ``first``."""
    words = -(-memory.numel() // 8)
    for start in range(0, words, _CHUNK_WORDS):
        count = min(_CHUNK_WORDS, words - start)
        chunk = torch.arange(first + start + 1, first + start + count + 1) * _STEP
        if variant:
            chunk.bitwise_not_()
        part = memory[8 * start : 8 * (start + count)]
        part.copy_(chunk.view(torch.uint8)[: part.numel()])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


class Checker:
    """Compares what a peer brought with what was sent, bit for bit.

    Results are kept for a while and compared again: a peer that hands out the memory of a buffer
    that it uses again is found by what the next payload does to them, and by their addresses.

    Args:
        payload: What is sent.
        device: Where the results shall be.
    """

    def __init__(self, payload: Payload, device: torch.device) -> None:
        self._shapes = payload.shapes
        self._device = device
        self._expected = [payload.build(variant, torch.device("cpu")) for variant in (0, 1)]
        self._joined = [self._join(tensors) for tensors in self._expected] if self._many else []
        self._scratch = torch.empty(payload.nbytes, dtype=torch.uint8) if self._many else None
        self.held = 2 if payload.nbytes <= _HELD_TWICE_NBYTES else 1
        self._kept: deque[tuple[dict[str, torch.Tensor], int]] = deque()

    @property
    def _many(self) -> bool:
        return len(self._shapes) >= _MANY

    def inspect(self, result: dict[str, torch.Tensor], variant: int) -> None:
        """Compare one result.

        Raises:
            WrongBytesError: A name, a shape, a dtype, the device, or a byte is another.
        """
        self._describe(result)
        if self._many and torch.equal(self._join(result, self._scratch), self._joined[variant]):
            return
        for name, expected in self._expected[variant].items():
            got = _bytes(result[name]).cpu()
            if not _equal(got, _bytes(expected)):
                at = int((got != _bytes(expected)).nonzero()[0])
                raise WrongBytesError(f"{name} differs from what was sent, first in byte {at}")

    def keep(self, results: Sequence[dict[str, torch.Tensor]], first_variant: int) -> None:
        """Compare results, of which each next one is of the other variant, and those before once more.

        Raises:
            WrongBytesError: As :meth:`inspect`, or results share memory.
        """
        for position, result in enumerate(results):
            self.inspect(result, (first_variant + position) % 2)
        for result, variant in self._kept:
            try:
                self.inspect(result, variant)
            except WrongBytesError as error:
                raise WrongBytesError(f"a result changed when the next one came: {error}") from error
        self._kept.extend((result, (first_variant + at) % 2) for at, result in enumerate(results))
        _apart(result for result, _ in self._kept)
        while len(self._kept) > self.held:
            self._kept.popleft()

    def _describe(self, result: dict[str, torch.Tensor]) -> None:
        if list(result) != list(self._shapes):
            raise WrongBytesError(f"names {list(result)[:5]}, not {list(self._shapes)[:5]}")
        for (name, tensor), (shape, dtype) in zip(result.items(), self._shapes.values(), strict=True):
            if tuple(tensor.shape) != shape or tensor.dtype != _dtype(dtype):
                raise WrongBytesError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {shape}")
            if tensor.device != self._device or not tensor.is_contiguous():
                raise WrongBytesError(f"{name} is not contiguous on {self._device}")

    def _join(self, tensors: dict[str, torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
        parts = [_bytes(tensor).cpu() for tensor in tensors.values()]
        return torch.cat(parts, out=out) if out is not None else torch.cat(parts)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare flat bytes, eight at a time where that goes."""
    if any(flat.storage_offset() % 8 or flat.data_ptr() % 8 for flat in (one, other)):
        return torch.equal(one, other)
    whole = one.numel() // 8 * 8
    return torch.equal(one[:whole].view(torch.int64), other[:whole].view(torch.int64)) and torch.equal(
        one[whole:], other[whole:]
    )


def _apart(results: Iterable[dict[str, torch.Tensor]]) -> None:
    ranges = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for result in results
        for tensor in result.values()
        if tensor.nbytes
    )
    for (_, end), (start, _) in pairwise(ranges):
        if start < end:
            raise WrongBytesError("results share memory: a buffer is handed out while it is used again")
