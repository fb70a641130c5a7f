# SPDX-License-Identifier: Apache-2.0
"""What the doctor finds by looking at this host; nothing is loaded and nothing is changed."""

from __future__ import annotations

import os
import platform
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from tensorferry.backends.ucx_library import choose_library, has_verbs, rdma_devices
from tensorferry.cli.doctor_findings import Finding
from tensorferry.errors import BackendUnavailableError

MIB = 1 << 20

_SMALL_SHM_NBYTES = 64 * MIB
_SMALL_MEMLOCK_NBYTES = 64 * MIB
_TINY_MEMLOCK_NBYTES = 64 << 10
_UNROUTED = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "lxc", "podman")
_SIOCGIFADDR = 0x8915

_SHM = "/dev/shm"  # noqa: S108 - only looked at
_SYS = Path("/sys")
_PROC = Path("/proc")


def look() -> Iterator[Finding]:
    """Look at everything, in the order of the report."""
    yield from _software()
    yield from _library()
    yield from _devices()
    yield from _memory()
    yield from _isolation()
    yield from _network()


def _software() -> Iterator[Finding]:
    yield Finding(
        "software",
        "ok",
        f"Python {platform.python_version()}, torch {torch.__version__}, Linux {platform.release()}",
    )
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        yield Finding(
            "accelerator", "ok", f"{torch.cuda.device_count()} CUDA devices: {', '.join(sorted(names))}"
        )
    elif Path("/dev/nvidiactl").exists():
        yield Finding(
            "accelerator",
            "warn",
            f"there is an NVIDIA driver, but torch {torch.__version__} does not use it",
            "install a CUDA build of torch that the driver supports",
        )
    else:
        yield Finding("accelerator", "note", "none; pools are plain memory, not pinned")


def _library() -> Iterator[Finding]:
    try:
        path, reason = choose_library(os.environ, "")
    except BackendUnavailableError as error:
        yield Finding(
            "UCX", "fail", str(error), "pip install libucx-cu12, or install the system's UCX (libucx0)"
        )
        return
    yield Finding("UCX", "ok", f"{path} ({reason})")
    others = [other for other in mapped_libraries() if not os.path.samefile(other, path)]
    if others:
        yield Finding(
            "UCX",
            "warn",
            f"another UCX is in every process here from its start: {', '.join(others)}",
            f"take it out of LD_PRELOAD, or name it by TENSORFERRY_UCX={others[0]}",
        )
    if rdma_devices() and not has_verbs(Path(path)):
        yield Finding(
            "UCX",
            "warn",
            "there are RDMA devices, but this UCX has no verbs and cannot use them",
            "install a UCX with verbs (libucx0, MOFED, HPC-X) and set TENSORFERRY_UCX=system",
        )
    for name, value in sorted(os.environ.items()):
        if name.startswith(("UCX_", "TENSORFERRY_")):
            yield Finding("settings", "note", f"{name}={value} (from the environment)")


def mapped_libraries() -> list[str]:
    """Return every libucp in this process."""
    found = set()
    for line in _read(_PROC / "self/maps").splitlines():
        path = line.partition("/")[2]
        if "libucp.so" in path or "libucp-" in path:
            found.add(f"/{path}")
    return sorted(found)


def _devices() -> Iterator[Finding]:
    devices = rdma_devices()
    if not devices:
        yield Finding("RDMA", "note", "no RDMA device: between hosts bytes go over tcp")
    for name in devices:
        folder = _SYS / "class/infiniband" / name
        firmware = _read(folder / "fw_ver")
        for port in sorted((folder / "ports").glob("*")):
            state, rate = _read(port / "state"), _read(port / "rate")
            gids = [gid for gid in map(_read, sorted((port / "gids").glob("*"))) if gid.strip("0:")]
            text = (
                f"{name} port {port.name}: {state}, {rate}, {_read(port / 'link_layer')}, firmware {firmware}"
            )
            if "ACTIVE" not in state:
                yield Finding(
                    "RDMA", "warn", text, "bring the link up: ip link, the cable, the subnet manager"
                )
            elif not gids and _read(port / "link_layer") == "Ethernet":
                yield Finding("RDMA", "warn", f"{text}; no GID", "give its network interface an address")
            else:
                yield Finding("RDMA", "ok", text)
    if devices and torch.cuda.is_available():
        if (_SYS / "module/nvidia_peermem").exists():
            yield Finding("GPUDirect", "ok", "nvidia_peermem is loaded")
        else:
            yield Finding(
                "GPUDirect",
                "warn",
                "nvidia_peermem is not loaded: GPU pools may have to be staged through host memory",
                "modprobe nvidia_peermem, unless driver and kernel share memory by dma-buf",
            )


def _memory() -> Iterator[Finding]:
    yield _memlock()
    with suppress(OSError):
        shm = os.statvfs(_SHM)
        nbytes = shm.f_frsize * shm.f_blocks
        small = nbytes < _SMALL_SHM_NBYTES
        yield Finding(
            _SHM,
            "warn" if small else "ok",
            f"{nbytes >> 20} MiB; UCX's shared memory and torch's workers need it, pools do not",
            "--shm-size=1g (docker), an emptyDir with medium: Memory (Kubernetes)" if small else "",
        )
    huge = _chosen(_read(_SYS / "kernel/mm/transparent_hugepage/enabled"))
    yield Finding(
        "huge pages",
        "warn" if huge == "never" else "ok",
        f"transparent: {huge or 'unknown'}; for shared memory: "
        f"{_chosen(_read(_SYS / 'kernel/mm/transparent_hugepage/shmem_enabled')) or 'unknown'}",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: large results are faster on them"
        if huge == "never"
        else "",
    )
    reserved = _read(_PROC / "sys/vm/nr_hugepages")
    if rdma_devices() and reserved not in ("", "0") and not os.environ.get("RDMAV_HUGEPAGES_SAFE"):
        yield Finding(
            "huge pages",
            "warn",
            f"{reserved} huge pages are reserved, and RDMAV_HUGEPAGES_SAFE is not set",
            "set RDMAV_HUGEPAGES_SAFE=1, or forking processes may fail to register memory",
        )


def _memlock() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("memlock", "ok", "this process may lock any amount of memory")
    text = f"this process may lock {limit} bytes of memory (RLIMIT_MEMLOCK)"
    if limit >= _SMALL_MEMLOCK_NBYTES:
        return Finding("memlock", "ok", text)
    needed = bool(rdma_devices()) or torch.cuda.is_available()
    return Finding(
        "memlock",
        "fail" if needed else "warn" if limit <= _TINY_MEMLOCK_NBYTES else "note",
        f"{text}; RDMA devices and pinned pools lock as much as the pool has",
        "ulimit -l unlimited, LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (docker)",
    )


def _isolation() -> Iterator[Finding]:
    scope = _read(_PROC / "sys/kernel/yama/ptrace_scope")
    inside = [name for name in (".dockerenv", "run/.containerenv") if Path("/", name).exists()]
    text = (
        "a container"
        if inside or os.environ.get("KUBERNETES_SERVICE_HOST")
        else "no container that shows itself"
    )
    yield Finding(
        "isolation",
        "note",
        f"{text}; {os.readlink('/proc/self/ns/pid')}, ptrace_scope {scope or 'absent'}; pools are mapped "
        "between processes of one user and one process namespace only",
    )


def _network() -> Iterator[Finding]:
    allowed = os.environ.get("UCX_NET_DEVICES", "")
    addresses = {name: address for _, name in socket.if_nameindex() if (address := _ipv4(name))}
    shown = ", ".join(f"{name} {address}" for name, address in addresses.items())
    if not addresses:
        yield Finding(
            "network",
            "fail",
            "no interface has an IPv4 address, not even lo: nothing can be reached, nor listen",
            "ip link set lo up; in a container give it a network (docker: --network; pods: a CNI plugin)",
        )
        return
    doubtful = [name for name in addresses if name.startswith(_UNROUTED)]
    if not allowed and doubtful:
        yield Finding(
            "network",
            "warn",
            f"interfaces: {shown}; peers may be told addresses of {', '.join(doubtful)}, which lead nowhere "
            "from outside",
            "set UCX_NET_DEVICES to the interface that peers reach, for example eth0",
        )
    else:
        yield Finding(
            "network", "ok", f"interfaces: {shown}" + (f"; UCX_NET_DEVICES={allowed}" if allowed else "")
        )
    if not allowed:
        yield Finding(
            "network",
            "note",
            "UCX listens on every interface; whoever reaches its port can talk to it (docs/security.md)",
            "set UCX_NET_DEVICES, and key= on both sides",
        )
    control = _read(_PROC / "sys/net/ipv4/tcp_congestion_control")
    if control == "bbr":
        yield Finding(
            "network",
            "note",
            "tcp congestion control is bbr, which paces what is sent; fast networks may do better without",
            "compare with sysctl net.ipv4.tcp_congestion_control=cubic",
        )


def _ipv4(name: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one, suppress(OSError):
        answer = fcntl.ioctl(one, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _chosen(choices: str) -> str:
    """Return the one in brackets."""
    return choices.partition("[")[2].partition("]")[0]
