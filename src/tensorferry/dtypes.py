# SPDX-License-Identifier: Apache-2.0
"""The dtypes that can cross, and their names in manifests.

A dtype is supported if its elements have a fixed size in whole bytes and the running torch
can view them as bytes, so that every bit pattern survives (NaN payloads, ``-0.0``).  The
names are torch's own without ``torch.``, for example ``"bfloat16"``; there are no aliases.
"""

from __future__ import annotations

import torch

from tensorferry.errors import ManifestError, UsageError

# Names that an older or newer torch may lack; what is missing there is left out of the table.
_CANDIDATES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "bfloat16", "float32", "float64"),
    *("complex32", "complex64", "complex128"),
    *sorted(name for name in dir(torch) if name.startswith("float8_")),
    # Two 4-bit floats in one byte: torch counts pairs, so shapes and bytes agree.
    "float4_e2m1fn_x2",
)

_BY_NAME: dict[str, torch.dtype] = {
    name: dtype
    for name, dtype in ((name, getattr(torch, name, None)) for name in _CANDIDATES)
    if isinstance(dtype, torch.dtype)
}
_BY_DTYPE: dict[torch.dtype, str] = {dtype: name for name, dtype in _BY_NAME.items()}

SUPPORTED_DTYPES: tuple[torch.dtype, ...] = tuple(_BY_DTYPE)
"""Every dtype of the running torch that can cross, in a fixed order."""


class UnsupportedDtypeError(UsageError, ValueError):
    """The caller's tensor has a dtype that cannot cross; convert it first."""


def dtype_to_str(dtype: torch.dtype) -> str:
    """Return the name under which a dtype crosses.

    Args:
        dtype: A dtype of the running torch.

    Returns:
        The canonical name without ``torch.``, which :func:`str_to_dtype` turns back.

    Raises:
        UnsupportedDtypeError: The dtype has no fixed element size in whole bytes (quantized,
            sub-byte), or ``dtype`` is no dtype.  Also a ``ValueError``.
    """
    name = _BY_DTYPE.get(dtype) if isinstance(dtype, torch.dtype) else None
    if name is None:
        raise UnsupportedDtypeError(
            f"dtype {_shorten(dtype)} cannot be transferred; convert the tensor first. "
            f"Supported: {', '.join(_BY_NAME)}"
        )
    return name


def str_to_dtype(name: str) -> torch.dtype:
    """Return the dtype that a peer named.

    Args:
        name: A name as :func:`dtype_to_str` gives it, untrusted.

    Returns:
        The dtype of the running torch.

    Raises:
        ManifestError: The name is unknown to this library or to the running torch, or is not
            a string.  Also a ``ValueError``.
    """
    dtype = _BY_NAME.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ManifestError(
            f"unknown dtype {_shorten(name)}; torch {torch.__version__} here does not have it"
        )
    return dtype


def itemsize(dtype: torch.dtype) -> int:
    """Return the size of one element in bytes.

    Args:
        dtype: A supported dtype.

    Returns:
        Bytes per element, at least 1.

    Raises:
        UnsupportedDtypeError: As for :func:`dtype_to_str`.
    """
    dtype_to_str(dtype)
    return dtype.itemsize


def _shorten(value: object) -> str:
    """Return a bounded repr, as ``value`` may come from a peer."""
    text = repr(value[:80]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 90 else text[:87] + "..."
