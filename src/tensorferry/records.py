# SPDX-License-Identifier: Apache-2.0
"""Typed and bounded access to maps that a peer sent."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

from tensorferry.errors import ManifestError

MAX_KEYS = 256

_LISTED = 8


class Record:
    """A decoded map whose entries are taken with a type and bounds; unknown keys are ignored."""

    def __init__(self, value: Any, what: str) -> None:
        if type(value) is not dict:
            raise ManifestError(f"{what} is not a map but {kind_of(value)}")
        if len(value) > MAX_KEYS:
            raise ManifestError(f"{what} has {len(value)} keys, the limit is {MAX_KEYS}")
        self._entries = value
        self._what = what

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def get(self, key: str) -> Any:
        """Return a value unchecked; None if there is none."""
        return self._entries.get(key)

    def _take(self, key: str, kind: type) -> Any:
        if key not in self._entries:
            raise ManifestError(f"{self._what} has no {key!r}")
        value = self._entries[key]
        if type(value) is not kind:
            raise ManifestError(f"{key!r} of {self._what} is {kind_of(value)}, not {kind.__name__}")
        return value

    def integer(self, key: str, low: int, high: int) -> int:
        """Return an integer in ``low..high``."""
        value: int = self._take(key, int)
        if not low <= value <= high:
            raise ManifestError(f"{key!r} of {self._what} is {value}, not in {low}..{high}")
        return value

    def seconds(self, key: str, *, positive: bool = False) -> float:
        """Return a finite float that is not negative."""
        value: float = self._take(key, float)
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            raise ManifestError(f"{key!r} of {self._what} is {value}")
        return value

    def text(self, key: str, limit: int) -> str:
        """Return text of at most ``limit`` bytes in UTF-8."""
        value: str = self._take(key, str)
        if len(value) > limit or len(value.encode()) > limit:
            raise ManifestError(f"{key!r} of {self._what} is longer than {limit} bytes")
        return value

    def choice(self, key: str, allowed: Sequence[str]) -> str:
        """Return text that is one of ``allowed``."""
        value: str = self._take(key, str)
        if value not in allowed:
            raise ManifestError(f"{key!r} of {self._what} is {value[:64]!r}, not one of {', '.join(allowed)}")
        return value

    def binary(self, key: str, low: int, high: int) -> bytes:
        """Return between ``low`` and ``high`` bytes."""
        value: bytes = self._take(key, bytes)
        if not low <= len(value) <= high:
            raise ManifestError(f"{key!r} of {self._what} has {len(value)} bytes, not {low} to {high}")
        return value

    def items(self, key: str, limit: int) -> list[Any]:
        """Return a list of at most ``limit`` items, which are unchecked."""
        value: list[Any] = self._take(key, list)
        if len(value) > limit:
            raise ManifestError(f"{key!r} of {self._what} has {len(value)} items, the limit is {limit}")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """Return a map, whose values are unchecked."""
        value: dict[str, Any] = self._take(key, dict)
        return value

    def record(self, key: str) -> Record:
        """Return a map as another record."""
        return Record(self._take(key, dict), key)


def shown(text: str, limit: int = 200) -> str:
    """Return text of a peer as a message may hold it: quoted, printable and not long."""
    return repr(text) if len(text) <= limit else f"{text[:limit]!r} and {len(text) - limit} more characters"


def listed(texts: Collection[str]) -> str:
    """Return texts of a peer as a message may list them: a few, each :func:`shown`."""
    more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return ", ".join(shown(text, 40) for text in islice(texts, _LISTED)) + more


def kind_of(value: Any) -> str:
    """Return what to call a decoded value in a message."""
    return f"a {type(value).__name__}" if value is not None else "nil"
