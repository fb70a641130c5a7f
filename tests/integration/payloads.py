# SPDX-License-Identifier: Apache-2.0
"""Payloads that both processes of a test can build alike."""

from __future__ import annotations

from typing import Any

import torch

from tensorferry.dtypes import SUPPORTED_DTYPES

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Bytes whose values say where they belong: equal blocks would hide a misplaced one."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(1 << 62), 1 << 62, (min(nbytes, MIB) // 8 + 1,), generator=generator)
    block = words.view(torch.uint8)
    repeats = -(-nbytes // block.numel())
    if repeats <= 1:
        return block[:nbytes].clone()
    whole = block.view(torch.int64).repeat(repeats).view(repeats, -1)
    whole += torch.arange(repeats).unsqueeze(1)
    return whole.view(-1).view(torch.uint8)[:nbytes]


def pull_and_compare_rows(namespace: Any, manifest: bytes, nbytes: int) -> int:
    """Pull what :func:`of_size` built and compare it row by row, with little memory.

    Returns the first row that differs, -1 if none does.
    """
    got = namespace.consumer.pull(manifest)["x"]
    assert got.nbytes == nbytes
    row = random_bytes(MIB // 8 * 8 + 8).view(torch.int64)
    for index, start in enumerate(range(0, nbytes, row.nbytes)):
        want = (row + index).view(torch.uint8)
        part = got[start : start + row.nbytes]
        if not torch.equal(part, want[: part.numel()]):
            return index
    return -1


def of_size(nbytes: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {"x": random_bytes(nbytes, seed)}


def tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of random bits, so with NaNs of every payload, infinities and subnormals."""
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return (random_bytes(count, seed) & 1).view(torch.bool).reshape(shape)
    return random_bytes(count * dtype.itemsize, seed).view(dtype).reshape(shape)


def every_dtype() -> dict[str, Any]:
    shapes = [(), (1,), (7,), (3, 5), (0, 4), (2, 1, 3, 1)]
    return {
        str(dtype): [tensor(dtype, shape, seed) for seed, shape in enumerate(shapes)]
        for dtype in SUPPORTED_DTYPES
    }


def odd_floats() -> dict[str, Any]:
    """NaNs with payloads, quiet and signalling, of both signs, and negative zeros."""
    words32 = [0x7FC00001, 0x7F800001, 0xFFC12345 - (1 << 32), 0x80000000 - (1 << 32), 0x7F800000, 1]
    words16 = [0x7FC1, 0x7F81, 0x7E01 - 0, 0x7C01, 0x8000 - (1 << 16), 0xFE01 - (1 << 16)]
    words64 = [0x7FF8000000000001, 0x7FF0000000000001, -(1 << 63), 0x7FF4DEADBEEF0001, 1, 0]
    return {
        "f32": torch.tensor(words32, dtype=torch.int32).view(torch.float32),
        "f16": torch.tensor(words16, dtype=torch.int16).view(torch.float16),
        "bf16": torch.tensor(words16, dtype=torch.int16).view(torch.bfloat16),
        "f64": torch.tensor(words64, dtype=torch.int64).view(torch.float64),
        "c64": torch.tensor(words32, dtype=torch.int32).view(torch.complex64),
        "c128": torch.tensor(words64, dtype=torch.int64).view(torch.complex128),
        "runs": [torch.tensor(words32, dtype=torch.int32).view(torch.float32)[i:] for i in (0, 0, 0, 1, 1)],
    }


def every_layout() -> dict[str, Any]:
    base = tensor(torch.float32, (6, 8), 1)
    image = tensor(torch.float32, (2, 3, 4, 5), 2)
    waves = torch.complex(torch.arange(6.0), -torch.arange(6.0)).reshape(2, 3)
    leaf = torch.arange(4.0, requires_grad=True)
    return {
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": base[0].expand(4, -1),
        "channels_last": image.to(memory_format=torch.channels_last),
        "offset": base[1:],
        "odd_offset": random_bytes(100, 3)[3:77],
        "conjugate": waves.conj(),
        "adjoint": waves.t().conj(),
        "negative": waves.conj().imag,
        "real_part": waves.real,
        "leaf": leaf,
        "computed": leaf * 2,
        "zero_dim": base[2, 3],
        "same_twice": [base, base],
        "no_elements": base[:0, :, None],
    }


def nested() -> dict[str, Any]:
    one = torch.arange(3)
    return {
        "a": [one, None, one + 1, None],
        "b": [],
        "c": [None],
        "d": (one,),
        "e": {"f": one, "g": {"h": (None, [one, {}])}},
        "none": None,
        "name with spaces": torch.tensor(True),
        "tuple": (),
    }


def many(count: int, nbytes: int) -> dict[str, torch.Tensor]:
    return {f"t{i}": row for i, row in enumerate(random_bytes(count * nbytes).view(count, nbytes).unbind(0))}


def described(description: list[tuple[str, tuple[int, ...], str]]) -> dict[str, Any]:
    """Build what hypothesis drew: a dtype, a shape and a layout for each tensor."""
    payload: dict[str, Any] = {}
    for seed, (dtype, shape, layout) in enumerate(description):
        one = tensor(getattr(torch, dtype), shape, seed)
        if layout == "transposed" and one.dim() >= 2:
            one = one.transpose(0, -1)
        elif layout == "sliced" and one.dim() >= 1:
            one = one[..., ::2]
        elif layout == "in_list":
            payload[f"t{seed}"] = [None, one, (one,)]
            continue
        payload[f"t{seed}"] = one
    return payload
