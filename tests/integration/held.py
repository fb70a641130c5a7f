# SPDX-License-Identifier: Apache-2.0
"""What a process and its objects hold, by counting it."""

from __future__ import annotations

import collections
import gc
import os
import types
from typing import Any

_SIZED = (dict, list, set, collections.deque)


def resources() -> dict[str, int]:
    """Return descriptors, threads, segments of shared memory and resident bytes of this process."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    with open("/proc/self/maps") as maps:
        shared = {tuple(line.split()[3:5]) for line in maps if "/memfd:" in line or "/dev/shm/" in line}
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared": len(shared),
        "resident": int(fields["VmRSS"].split()[0]) << 10,
    }


def entries(*roots: object) -> dict[str, int]:
    """Return how many entries the containers of these objects have, by the path to each.

    Objects of the package are looked into, whatever their depth; so are its containers.
    """
    found: dict[str, int] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [(type(root).__name__, root) for root in roots]
    while waiting:
        path, one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, _SIZED):
            found[path] = found.get(path, 0) + len(one)
            items = list(one.values()) + list(one) if isinstance(one, dict) else list(one)
            waiting += [(f"{path}[]", item) for item in items]
        else:
            waiting += [(f"{path}.{name}", value) for name, value in _attributes(one).items()]
    return found


def _attributes(one: object) -> dict[str, Any]:
    if isinstance(one, types.MethodType):
        return {"self": one.__self__}
    if not type(one).__module__.startswith("tensorferry"):
        return {}
    names = {name for cls in type(one).__mro__ for name in getattr(cls, "__slots__", ())}
    slots = {name: getattr(one, name) for name in names if hasattr(one, name)}
    return {**slots, **getattr(one, "__dict__", {})}


def settled(count: int = 3) -> None:
    """Let the collector take what it can."""
    for _ in range(count):
        gc.collect()
