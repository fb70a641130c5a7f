# SPDX-License-Identifier: Apache-2.0
"""Which UCX library to load: the wheel's, the system's, or one named by the user."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tensorferry.errors import BackendUnavailableError

SONAME = "libucp.so.0"


def rdma_devices() -> list[str]:
    """Return the names of this host's RDMA devices, sorted; empty without any."""
    try:
        return sorted(entry.name for entry in Path("/sys/class/infiniband").iterdir())
    except OSError:
        return []


def has_verbs(library: Path) -> bool:
    """Tell whether the UCX at ``library`` was built with InfiniBand verbs."""
    return any((library.parent / "ucx").glob("libuct_ib.so*"))


def wheel_library() -> Path | None:
    """Return the library of the ``libucx`` wheel without importing the package, None without it."""
    found = importlib.util.find_spec("libucx")
    for place in (found and found.submodule_search_locations) or ():
        library = Path(place) / "lib" / SONAME
        if library.is_file():
            return library.resolve().with_name(SONAME)
    return None


def system_library() -> Path | None:
    """Return the library that the dynamic linker would take, None if the system has none."""
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        if (Path(folder) / SONAME).is_file():
            return Path(folder) / SONAME
    for ldconfig in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        try:
            listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=True).stdout  # noqa: S603
        except (OSError, subprocess.CalledProcessError):
            continue
        for line in listing.splitlines():
            name, _, path = line.partition("=>")
            if name.split()[:1] == [SONAME]:
                return Path(path.strip())
    return None


def choose_library(environ: Mapping[str, str], mapped: str) -> tuple[str, str]:
    """Return the path of the UCX library to load, and why it was chosen.

    ``TENSORFERRY_UCX`` is ``wheel``, ``system`` or the path of a ``libucp.so.0``.  Without it a
    library that the process has loaded already is kept, since two of one SONAME don't mix;
    then the system's is taken where an RDMA device is present and that library has verbs;
    else the wheel's.

    Args:
        environ: The environment.
        mapped: Path of the ``libucp.so.0`` that is in this process already, or ``""``.

    Raises:
        BackendUnavailableError: What was asked for, or anything at all, is not there.
    """
    wanted = environ.get("TENSORFERRY_UCX", "")
    wheel, system = wheel_library(), system_library()
    if wanted == "wheel":
        return _present(wheel, "pip install libucx-cu12"), "TENSORFERRY_UCX=wheel"
    if wanted == "system":
        return _present(system, "install libucx0, MOFED or HPC-X"), "TENSORFERRY_UCX=system"
    if wanted:
        path = Path(wanted)
        return _present(
            path if path.is_file() else None, f"TENSORFERRY_UCX names {wanted}"
        ), "TENSORFERRY_UCX"
    if mapped:
        return mapped, "already in this process"
    if system is not None and rdma_devices() and has_verbs(system):
        return str(system), "RDMA device present and this library has verbs"
    if wheel is not None:
        return str(wheel), "the wheel's, as no RDMA device asks for the system's"
    return _present(system, "pip install libucx-cu12"), "the system's, as the wheel is not installed"


def _present(path: Path | None, cure: str) -> str:
    if path is None:
        raise BackendUnavailableError(f"no UCX library ({SONAME}) found: {cure}")
    return str(path)
