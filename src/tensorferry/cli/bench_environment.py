# SPDX-License-Identifier: Apache-2.0
"""What a host is, for the record of a benchmark."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tensorferry.backends.ucx_library import choose_library, rdma_devices
from tensorferry.errors import BackendUnavailableError

_PACKAGES = (
    "tensorferry",
    "torch",
    "numpy",
    "libucx-cu12",
    "ucxx-cu12",
    "nixl-cu12",
    "mooncake-transfer-engine-non-cuda",
    "pyzmq",
    "ray",
)
_VARIABLES = ("UCX_", "TENSORFERRY_", "OMP_", "THP_", "MALLOC_", "GLIBC_", "LD_PRELOAD")
_KERNEL = {
    "transparent huge pages": "/sys/kernel/mm/transparent_hugepage/enabled",
    "huge pages of shared memory": "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "huge pages defrag": "/sys/kernel/mm/transparent_hugepage/defrag",
    "tcp_rmem": "/proc/sys/net/ipv4/tcp_rmem",
    "tcp_wmem": "/proc/sys/net/ipv4/tcp_wmem",
    "congestion control": "/proc/sys/net/ipv4/tcp_congestion_control",
}


def describe(device: torch.device) -> dict[str, Any]:
    """Return plain values: machine, kernel, memory settings, versions, UCX and its environment.

    Args:
        device: Where the tensors are.
    """
    settings = {name: _read(path) for name, path in _KERNEL.items()}
    return {
        "host": platform.node(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "virtual": "hypervisor" in _cpu_field("flags").split(),
        "memory": _memory_nbytes(),
        "system": platform.platform(),
        "kernel": f"{platform.release()} {platform.version()}",
        "load": list(os.getloadavg()),
        "settings": {name: value for name, value in settings.items() if value},
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "ucx": _ucx(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
        "rdma devices": rdma_devices(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _cpu() -> str:
    return _cpu_field("model name") or platform.processor()


def _cpu_field(name: str) -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _memory_nbytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _ucx() -> dict[str, str]:
    """Return the UCX that tensorferry takes here; its version is in what the rows tell of themselves."""
    try:
        path, reason = choose_library(os.environ, "")
    except BackendUnavailableError as error:
        return {"unusable": str(error)}
    return {"library": path, "reason": reason}
