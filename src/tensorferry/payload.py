# SPDX-License-Identifier: Apache-2.0
"""Payloads as a user gives them, taken apart into a structure and a flat list of tensors.

A payload maps names to a tensor, ``None``, or lists, tuples and dicts of them, nested.
Its *structure* is what is left when every tensor is replaced by a mark; it is made of plain
msgpack types, so that a manifest can carry it as it is:

========  =========================================================================
in        in the structure
========  =========================================================================
tensor    ``True``; tensors are numbered in the order in which their marks appear
``None``  ``None``
list      list of the items
tuple     list of ``False`` and then the items
dict      dict with the same keys in the same order
========  =========================================================================
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import torch

from tensorferry.columns import TensorColumns, describe
from tensorferry.errors import UsageError
from tensorferry.records import listed, shown

Structure: TypeAlias = "dict[str, Any]"
Trail: TypeAlias = "tuple[Any, str | int] | None"

MAX_DEPTH = 32
MAX_NODES = 1 << 17
MAX_PATH_CHARACTERS = 16 << 20
TENSOR = True
TUPLE = False


def flatten(tensors: Mapping[str, Any]) -> tuple[Structure, TensorColumns]:
    """Take a payload apart; no tensor is copied where that can be avoided.

    NumPy arrays and objects with ``__dlpack__`` become tensors that share their memory where possible.

    Args:
        tensors: Mapping from names to a tensor, ``None``, or lists, tuples and dicts of
            them, nested at most 32 deep, with 131,072 entries at most in all of them together.

    Returns:
        The structure, and the tensors in the order of their marks in it.

    Raises:
        UsageError: An object is not supported; the message names its path.
    """
    if not isinstance(tensors, Mapping):
        raise UsageError(f"a payload is a mapping from names to tensors, not {type(tensors).__name__}")
    found: list[Any] = []
    # Other mappings may make their values anew each time they are asked.
    structure = _Flattening(found).mapping(dict(tensors), None, 1)
    check_paths(structure)
    return structure, describe(found, lambda place: leaf_paths(structure)[place])


def unflatten(structure: Structure, leaves: Iterable[Any]) -> dict[str, Any]:
    """Put a payload together again; the inverse of :func:`flatten`.

    Args:
        structure: As :func:`flatten` or a decoded manifest gave it.
        leaves: What to put in place of the tensors, in their order.

    Raises:
        UsageError: There are more or fewer leaves than the structure has tensors.
    """
    remaining = iter(leaves)
    try:
        payload = _entries(structure, remaining)
    except _Exhausted:
        raise UsageError("there are fewer leaves than the structure has tensors") from None
    if next(remaining, _Exhausted) is not _Exhausted:
        raise UsageError("there are more leaves than the structure has tensors")
    return payload


def select(structure: Structure, names: Sequence[str]) -> tuple[Structure, list[int]]:
    """Reduce a structure to some of its top-level names, in the order given.

    Returns:
        The smaller structure, and for each of its tensors the index in the whole one.

    Raises:
        UsageError: A name is not in the structure, or is given twice.
    """
    indices: dict[str, range] = {}
    first = 0
    for name, node in structure.items():
        indices[name] = range(first, first + _count(node))
        first = indices[name].stop
    for name in names:
        if name not in indices:
            raise UsageError(f"there is no tensor named {shown(name)}; there are {listed(indices) or 'none'}")
    if len(set(names)) != len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise UsageError(f"the name {shown(twice)} is given twice")
    return {name: structure[name] for name in names}, [i for name in names for i in indices[name]]


def leaf_paths(structure: Structure) -> list[str]:
    """Return the path of each tensor, in order; no two are equal.

    A top-level name stands as it is, unless that would give two tensors one path: then the
    names that are not identifiers are quoted.

    Raises:
        UsageError: All paths together would take too much memory: the sum over all entries of
            containers, of the length of the container's path, is above 16 Mi.
    """
    paths = _Paths()
    for name, node in structure.items():
        paths.add(node, name)
    if len(set(paths.found)) != len(paths.found):
        paths = _Paths()
        for name, node in structure.items():
            paths.add(node, name if name.isidentifier() else _quoted(name))
    return paths.found


def check_paths(structure: Structure) -> None:
    """Make sure that :func:`leaf_paths` will not refuse the structure.

    Raises:
        UsageError: It would.
    """
    if all_tensors(structure.values()):
        return
    paths = _Paths(only_measure=True)
    for name, node in structure.items():
        if node is not TENSOR and node is not None:
            quoted = name if name.isidentifier() else _quoted(name)
            paths.add(node, max(name, quoted, key=len))


def all_tensors(items: Collection[Any]) -> bool:
    """Return whether a container of a structure has entries, and all of them are marks of tensors."""
    return set(map(type, items)) == {bool} and False not in items


def format_trail(trail: Trail) -> str:
    """Return the path that a chain of keys, innermost first, stands for."""
    keys: list[str | int] = []
    while trail is not None:
        trail, key = trail
        keys.append(key)
    path = str(keys.pop()) if keys else ""
    return path + "".join(_step(key) for key in reversed(keys))


class _Exhausted(Exception):  # noqa: N818 - a signal inside this module
    pass


class _Flattening:
    """One walk over a payload: what was found, and how much was seen."""

    def __init__(self, found: list[Any]) -> None:
        self._found = found
        self._nodes = 0

    def mapping(self, tensors: Mapping[str, Any], trail: Trail, depth: int) -> Structure:
        self._count(len(tensors), trail)
        if not (set(map(type, tensors)) <= {str} and "".join(tensors).isascii()):
            for key in tensors:
                if type(key) is not str or not _is_unicode(key):
                    where = f" in {format_trail(trail)}" if trail else ""
                    raise UsageError(f"the key {key!r}{where} is not a str of valid Unicode")
        if self._takes_all(tensors.values()):
            return dict.fromkeys(tensors, TENSOR)
        return {key: self._node(value, (trail, key), depth) for key, value in tensors.items()}

    def _node(self, value: Any, trail: Trail, depth: int) -> Any:
        if value is None:
            return None
        kind = type(value)
        if kind is list or kind is tuple or kind is dict:
            if depth >= MAX_DEPTH:
                raise UsageError(
                    f"{format_trail(trail)} is nested more than {MAX_DEPTH} deep, or contains itself"
                )
            if kind is dict:
                return self.mapping(value, trail, depth + 1)
            self._count(len(value), trail)
            if self._takes_all(value):
                items: list[Any] = [TENSOR] * len(value)
            else:
                items = [self._node(item, (trail, i), depth + 1) for i, item in enumerate(value)]
            return items if kind is list else [TUPLE, *items]
        self._found.append(value)
        return TENSOR

    def _takes_all(self, values: Collection[Any]) -> bool:
        """Take the values of a container at once, if all are tensors: there may be thousands."""
        if set(map(type, values)) != {torch.Tensor}:
            return False
        self._found.extend(values)
        return True

    def _count(self, nodes: int, trail: Trail) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise UsageError(f"the payload has more than {MAX_NODES} entries (at {format_trail(trail)!r})")


def _rebuild(node: Any, leaves: Iterator[Any]) -> Any:
    if node is None:
        return None
    if node is TENSOR:
        leaf = next(leaves, _Exhausted)
        if leaf is _Exhausted:
            raise _Exhausted
        return leaf
    if isinstance(node, dict):
        return _entries(node, leaves)
    if node and node[0] is TUPLE:
        return tuple(_items(node[1:], leaves))
    return _items(node, leaves)


def _entries(nodes: dict[str, Any], leaves: Iterator[Any]) -> dict[str, Any]:
    return dict(zip(nodes, _items(nodes.values(), leaves), strict=True))


def _items(nodes: Collection[Any], leaves: Iterator[Any]) -> list[Any]:
    if not all_tensors(nodes):
        return [_rebuild(item, leaves) for item in nodes]
    items = list(islice(leaves, len(nodes)))  # there may be thousands: no call for each
    if len(items) < len(nodes):
        raise _Exhausted
    return items


def _count(node: Any) -> int:
    if isinstance(node, (dict, list)):
        return sum(map(_count, node.values() if isinstance(node, dict) else node))
    return 1 if node is TENSOR else 0


class _Paths:
    """Paths of tensors, and how many characters they may still take together.

    Without this bound a peer could put a huge key above many marks.
    """

    def __init__(self, *, only_measure: bool = False) -> None:
        self.found: list[str] = []
        self._remaining = MAX_PATH_CHARACTERS
        self._only_measure = only_measure

    def add(self, node: Any, path: str) -> None:
        if node is TENSOR:
            self.found.append(path)
        elif node:
            self._remaining -= len(path) * len(node)
            if self._remaining < 0:
                raise UsageError("there are too long keys above too many entries; use shorter ones")
            if self._only_measure and all_tensors(node.values() if isinstance(node, dict) else node):
                return
            if isinstance(node, dict):
                for key, value in node.items():
                    self.add(value, path + _step(key))
            else:
                self._add_items(node[1:] if node[0] is TUPLE else node, path)

    def _add_items(self, items: list[Any], path: str) -> None:
        for index, item in enumerate(items):
            if item is TENSOR:  # the many items of a long list: no call for each
                self.found.append(f"{path}[{index}]")
            elif item is not None:
                self.add(item, f"{path}[{index}]")


def _step(key: str | int) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if key.isidentifier() else _quoted(key)


def _quoted(key: str) -> str:
    return f"[{json.dumps(key, ensure_ascii=False)}]"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
