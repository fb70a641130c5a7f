# SPDX-License-Identifier: Apache-2.0
"""Names and sizes of the dtypes that can cross."""

from __future__ import annotations

import pytest
import torch

from tensorferry.dtypes import SUPPORTED_DTYPES, UnsupportedDtypeError, dtype_to_str, itemsize, str_to_dtype
from tensorferry.errors import ManifestError, UsageError

ALWAYS = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
]


@pytest.mark.parametrize("name", ALWAYS)
def test_name_round_trips(name: str) -> None:
    dtype = getattr(torch, name)
    assert dtype_to_str(dtype) == name == str(dtype).removeprefix("torch.")
    assert str_to_dtype(name) is dtype


def test_every_float8_of_the_running_torch_is_supported() -> None:
    present = {
        getattr(torch, name) for name in dir(torch) if name.startswith(("float8_", "float4_e2m1fn_x2"))
    }
    assert present <= set(SUPPORTED_DTYPES)


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_a_byte_view_of_every_supported_dtype_keeps_all_bits(dtype: torch.dtype) -> None:
    """vllm-project/vllm-omni#2103, safetensors/safetensors#489: dtypes that were left out."""
    raw = torch.arange(16 * 3, dtype=torch.uint8)
    assert torch.equal(raw.view(dtype).view(torch.uint8), raw)
    assert raw.view(dtype).numel() * itemsize(dtype) == raw.numel()


def test_an_unsupported_dtype_is_refused_at_the_producer() -> None:
    """In the reference it shows at the consumer only."""
    with pytest.raises(UsageError, match="quint8") as caught:
        dtype_to_str(torch.quint8)
    assert isinstance(caught.value, UnsupportedDtypeError)
    assert isinstance(caught.value, ValueError)  # what the reference raises
    with pytest.raises(UsageError):
        itemsize(torch.qint32)


@pytest.mark.parametrize("wrong", ["float32", None, 3, torch.float32.__class__])
def test_dtype_to_str_refuses_what_is_no_dtype(wrong: object) -> None:
    with pytest.raises(UnsupportedDtypeError):
        dtype_to_str(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["float33", "torch.float32", "half", "", "qint8", "dtype", "load", "Float32"]
)
def test_an_unknown_name_from_a_peer_is_refused_by_name(name: str) -> None:
    """NVIDIA-NeMo/Automodel#2533: a map of dtypes made by hand lacked some."""
    with pytest.raises(ManifestError) as caught:
        str_to_dtype(name)
    assert repr(name) in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("wrong", [None, 7, ["float32"], {}, b"float32"])
def test_a_name_of_another_type_is_refused(wrong: object) -> None:
    with pytest.raises(ManifestError):
        str_to_dtype(wrong)  # type: ignore[arg-type]


def test_the_message_stays_short_whatever_the_peer_sends() -> None:
    for hostile in ("x" * 1_000_000, b"y" * 1_000_000):
        with pytest.raises(ManifestError) as caught:
            str_to_dtype(hostile)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 300
