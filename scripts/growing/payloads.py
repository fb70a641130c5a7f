# SPDX-License-Identifier: Apache-2.0
"""Payloads of any size and number of tensors, and how a consumer sees that it has the right one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

VARIANTS = 16
"""Payloads of two variants differ in every word; of fewer bytes than a word, in the first byte."""

_WORD = 8
_STEP_NBYTES = 64
_CHUNK_WORDS = 1 << 17  # what is compared at a time stays in the caches


class WrongBytesError(Exception):
    """Something else has arrived than was published."""


@dataclass
class Source:
    """Memory with words that say where they are; variants begin at different words of it.

    Args:
        nbytes: Of the largest payload.
    """

    nbytes: int
    _memory: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        words = -(-self.nbytes // _WORD) + VARIANTS * _STEP_NBYTES // _WORD
        self._memory = torch.arange(1, words + 1).view(torch.uint8)

    def bytes(self, nbytes: int, variant: int) -> torch.Tensor:
        """Return the first bytes of a variant; they are shared with all others."""
        start = variant % VARIANTS * _STEP_NBYTES
        return self._memory[start : start + nbytes]


@dataclass(frozen=True)
class Payload:
    """What is published.

    Attributes:
        tensors: How many.
        nbytes: Of each.
    """

    tensors: int
    nbytes: int

    def build(self, source: Source, variant: int) -> dict[str, torch.Tensor]:
        """Return its tensors; several have memory of their own each."""
        whole = source.bytes(self.tensors * self.nbytes, variant)
        if self.tensors == 1:
            return {"t0": whole}
        return {f"t{index}": part.clone() for index, part in enumerate(whole.split(self.nbytes))}

    def check(self, result: dict[str, torch.Tensor], variant: int) -> None:
        """Compare a result with what was published, bit for bit.

        Raises:
            WrongBytesError: It is something else.
        """
        if list(result) != [f"t{index}" for index in range(self.tensors)]:
            raise WrongBytesError(f"names {list(result)[:3]}... of {len(result)} tensors")
        kinds = {(tensor.dtype, tuple(tensor.shape)) for tensor in result.values()}
        if kinds != {(torch.uint8, (self.nbytes,))}:
            raise WrongBytesError(f"tensors are {list(kinds)[:3]}")
        flat = result["t0"] if self.tensors == 1 else torch.cat(list(result.values()))
        first = variant % VARIANTS * _STEP_NBYTES // _WORD + 1
        for start in range(0, flat.numel(), _CHUNK_WORDS * _WORD):
            part = flat[start : start + _CHUNK_WORDS * _WORD]
            begin = first + start // _WORD
            expected = torch.arange(begin, begin - (-part.numel() // _WORD))
            whole = part.numel() // _WORD * _WORD
            if not torch.equal(part[:whole].view(torch.int64), expected[: whole // _WORD]) or not torch.equal(
                part[whole:], expected.view(torch.uint8)[whole : part.numel()]
            ):
                raise WrongBytesError(
                    f"variant {variant} differs between bytes {start} and {start + part.numel()}"
                )
