# SPDX-License-Identifier: Apache-2.0
"""The study of growth notices a payload that is not the one that was published."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from growing.payloads import Payload, Source, WrongBytesError  # noqa: E402

SHAPES = [(1, 1), (1, 7), (1, 64), (1, (1 << 20) + 8), (1, 3_000_001), (3, 64), (1000, 64)]


@pytest.mark.parametrize(("tensors", "nbytes"), SHAPES)
def test_what_was_built_is_right_and_another_variant_is_not(tensors: int, nbytes: int):
    payload, source = Payload(tensors, nbytes), Source(tensors * nbytes)
    for variant in range(20):
        payload.check(payload.build(source, variant), variant)
        with pytest.raises(WrongBytesError):
            payload.check(payload.build(source, variant), variant + 1)


@pytest.mark.parametrize(("tensors", "nbytes"), SHAPES)
def test_one_flipped_bit_is_found_anywhere(tensors: int, nbytes: int):
    payload, source = Payload(tensors, nbytes), Source(tensors * nbytes)
    for name in ("t0", f"t{tensors - 1}"):
        for place in (0, nbytes // 2, nbytes - 1):
            result = {key: tensor.clone() for key, tensor in payload.build(source, 3).items()}
            result[name][place] ^= 128
            with pytest.raises(WrongBytesError):
                payload.check(result, 3)


def test_other_names_shapes_and_dtypes_are_found():
    payload, source = Payload(2, 64), Source(128)
    right = payload.build(source, 0)
    for wrong in (
        {"t0": right["t0"]},
        {"t1": right["t1"], "t0": right["t0"]},
        {**right, "t2": right["t1"]},
        {**right, "t1": right["t1"][:63]},
        {**right, "t1": right["t1"].view(torch.int64)},
    ):
        with pytest.raises(WrongBytesError):
            payload.check(wrong, 0)
