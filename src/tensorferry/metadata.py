# SPDX-License-Identifier: Apache-2.0
"""Metadata: the small plain values that travel inside a manifest."""

from __future__ import annotations

from typing import Any

from tensorferry.errors import UsageError

MAX_DEPTH = 32
MAX_NODES = 1 << 16


def plain_metadata(metadata: Any) -> dict[str, Any]:
    """Return a copy of metadata that is made of plain msgpack types only.

    Allowed are None, bool, int of 64 bits, float, str, bytes, and lists, tuples and dicts
    with str keys of them, nested at most 32 deep.  Tuples become lists; subclasses become what
    they derive from.

    Raises:
        UsageError: A value is of another kind (the message names its path), or there are more
            than 65,536 lists, tuples, dicts and entries of dicts.
    """
    if not isinstance(metadata, dict):
        raise UsageError(f"metadata is a dict, not {type(metadata).__name__}")
    plain: dict[str, Any] = _Copying().plain(metadata, "metadata", 0)
    return plain


class _Copying:
    """One walk over metadata, and how much of it was seen."""

    def __init__(self) -> None:
        self._nodes = 0

    def plain(self, value: Any, path: str, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            if not -(1 << 63) <= value < 1 << 64:
                raise UsageError(f"{path} has more than 64 bits")
            return int.__index__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return _text(value, path)
        if isinstance(value, (bytes, bytearray)):
            return bytes(value)
        if isinstance(value, (list, tuple, dict)):
            return self._container(value, path, depth)
        raise UsageError(
            f"{path} is of type {type(value).__name__}; metadata is made of None, bool, int, float, str, "
            f"bytes, lists and dicts (a tensor belongs into the payload)"
        )

    def _container(self, value: Any, path: str, depth: int) -> Any:
        if depth >= MAX_DEPTH:
            raise UsageError(f"{path} is nested more than {MAX_DEPTH} deep, or contains itself")
        self._nodes += 1 + (len(value) if isinstance(value, dict) else 0)
        if self._nodes > MAX_NODES:
            raise UsageError(
                f"metadata has more than {MAX_NODES} lists, dicts and entries of dicts at {path}"
            )
        if isinstance(value, dict):
            return {_key(k, path): self.plain(v, f"{path}[{k!r}]", depth + 1) for k, v in value.items()}
        return [self.plain(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]


def _key(key: Any, path: str) -> str:
    if not isinstance(key, str):
        raise UsageError(f"{path} has the key {key!r}; the keys of metadata are str")
    return _text(key, path)


def _text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{path} holds {text!r}, which is not valid Unicode") from error
    return str.__str__(text)
