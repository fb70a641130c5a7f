# SPDX-License-Identifier: Apache-2.0
"""Anything that holds an array, seen as a plain strided tensor that can be copied from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tensorferry.dtypes import SUPPORTED_DTYPES
from tensorferry.errors import UsageError

_MOST_NBYTES = 1 << 62  # a view may repeat its elements, and torch's own nbytes overflows

_SUPPORTED = frozenset(SUPPORTED_DTYPES)


def as_tensor(value: Any) -> torch.Tensor:
    """Return a detached plain tensor with the values of ``value``, for reading only.

    Memory is shared where possible, also that of read-only arrays: do not write to it.

    Args:
        value: A tensor, a NumPy array, or an object with ``__dlpack__``.

    Raises:
        UsageError: The object is none of these, or of a kind that has no fixed-size elements
            in memory; the message says which.
    """
    if isinstance(value, torch.Tensor):
        return _plain(value)
    if isinstance(value, np.ndarray):
        return _from_numpy(value)
    if hasattr(type(value), "__dlpack__"):
        return _from_dlpack(value)
    raise UsageError(
        f"{_name(value)} cannot be sent: a payload is made of tensors, None, lists, tuples and "
        f"dicts; other values belong into metadata"
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not torch.Tensor:
        tensor = _unwrapped(tensor)
    if tensor.layout is not torch.strided:
        raise UsageError(f"a tensor of layout {tensor.layout} cannot be sent; use to_dense()")
    if tensor.is_nested:
        raise UsageError("a nested tensor cannot be sent; send its parts as a list (unbind())")
    if tensor.is_meta:
        raise UsageError("a tensor on the meta device has no data to send")
    if tensor.dtype not in _SUPPORTED:
        hint = "; send its int_repr() and scale" if tensor.is_quantized else ""
        raise UsageError(f"a tensor of {tensor.dtype} cannot be sent{hint}")
    if tensor.numel() * tensor.itemsize > _MOST_NBYTES:
        raise UsageError(f"a tensor of shape {tuple(tensor.shape)} has more bytes than memory can hold")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Strip a subclass that only adds behaviour; refuse one that is not its own storage."""
    plain_dispatch: Any = torch.Tensor.__torch_dispatch__
    if type(tensor).__torch_dispatch__ is not plain_dispatch:
        raise UsageError(f"{_name(tensor)} wraps other tensors and has no memory of its own; send those")
    return tensor.detach().as_subclass(torch.Tensor)


class _Writable:
    """Shows a read-only array's memory as writable, since torch warns about any other."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.owner = array


def _from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.dtype.hasobject or array.dtype.names is not None or array.dtype.kind in "SUMm":
        raise UsageError(f"a NumPy array of {array.dtype} cannot be sent")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.copy()
    # Types that NumPy learnt from ml_dtypes go by the names that torch gives them.
    extension = getattr(torch, array.dtype.name, None) if array.dtype.num >= 256 else None
    if isinstance(extension, torch.dtype) and extension.itemsize == array.itemsize:
        array = array.view(f"u{array.itemsize}")
    if not array.flags.writeable:
        array = np.asarray(_Writable(array))
    try:
        tensor = torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise UsageError(f"a NumPy array of {array.dtype} cannot be sent: {error}") from error
    return _plain(tensor.view(extension) if isinstance(extension, torch.dtype) else tensor)


def _from_dlpack(value: Any) -> torch.Tensor:
    try:
        tensor: torch.Tensor = torch.from_dlpack(value)  # type: ignore[attr-defined]
    except Exception as error:  # a foreign exporter may raise anything
        raise UsageError(f"{_name(value)} could not be taken by DLPack: {error}") from error
    return _plain(tensor)


def _name(value: Any) -> str:
    kind = type(value)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return f"an object of type {module}{kind.__qualname__}"
