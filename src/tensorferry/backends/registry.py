# SPDX-License-Identifier: Apache-2.0
"""The backends by name; each is imported when it is first asked for.

A backend is a module with the functions ``export_pool`` and ``open_reader``, whose signatures
are those of the functions below without ``backend``.  Packages may bring one: its name and module are an
entry point of the group ``tensorferry.backends``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module, metadata
from typing import Any

import torch

from tensorferry.backends.base import ExportedPool, Reader
from tensorferry.errors import BackendUnavailableError, UsageError

MODULES = {"ucx": "tensorferry.backends.ucx", "nixl": "tensorferry.backends.nixl"}
"""Module of each backend by its name."""

GROUP = "tensorferry.backends"


def export_pool(
    backend: str,
    nbytes: int,
    *,
    device: torch.device,
    access: str,
    options: Mapping[str, str],
    slots: int,
) -> ExportedPool:
    """Make a pool that peers can read.

    Args:
        backend: Name of the backend.
        nbytes: Size of the pool.
        device: Where the pool is.
        access: The mode to offer, or ``"auto"`` for all that suit.
        options: Settings of the backend.
        slots: How many slots may be admitted at a time.

    Raises:
        UsageError: There is no such backend, or it knows no such option or mode.
        BackendUnavailableError: It cannot be used here.
        RegistrationError: The memory cannot be had, or not registered.
    """
    pool: ExportedPool = _module(backend).export_pool(
        nbytes, device=device, access=access, options=options, slots=slots
    )
    return pool


def open_reader(
    backend: str, nbytes: int, *, device: torch.device, access: str, options: Mapping[str, str]
) -> Reader:
    """Make landing memory, and a way to connect to producers.

    Args:
        backend: Name of the backend.
        nbytes: Size of the landing pool.
        device: Where the landing pool is.
        access: The mode to use, or ``"auto"``.
        options: Settings of the backend.

    Raises:
        UsageError: There is no such backend, or it knows no such option or mode.
        BackendUnavailableError: It cannot be used here.
        RegistrationError: The memory cannot be had, or not registered.
    """
    reader: Reader = _module(backend).open_reader(nbytes, device=device, access=access, options=options)
    return reader


def _module(backend: str) -> Any:
    name = _find(backend) if isinstance(backend, str) else None
    if name is None:
        raise UsageError(f"there is no backend {backend!r}; there are {', '.join(map(repr, MODULES))}")
    try:
        return import_module(name)
    except ImportError as error:
        raise BackendUnavailableError(f"the backend {backend!r} cannot be loaded: {error}") from error


def _find(backend: str) -> str | None:
    installed = MODULES.get(backend)
    if installed is not None:
        return installed
    return next((one.value for one in metadata.entry_points(group=GROUP, name=backend)), None)
