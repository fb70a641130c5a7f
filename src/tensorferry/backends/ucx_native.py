# SPDX-License-Identifier: Apache-2.0
"""The native unit as the UCX backend uses it: library, errors, contexts and pool memory."""

from __future__ import annotations

import hashlib
import logging
import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tensorferry import _transport
from tensorferry.backends.ucx_library import choose_library, rdma_devices
from tensorferry.errors import (
    BackendUnavailableError,
    ClosedError,
    ConnectError,
    LeaseExpiredError,
    LeaseRevokedError,
    PeerLostError,
    ProtocolError,
    RegistrationError,
    RemoteAccessError,
    TensorferryError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
    UsageError,
)

logger = logging.getLogger(__name__)

DEFAULTS = {
    # UCX's own 8K and 64K cost five times the bandwidth over tcp (docs/benchmarks.md).
    "TCP_TX_SEG_SIZE": "512k",
    "TCP_RX_SEG_SIZE": "512k",
    # Else UCX waits in connect() for a host that does not answer, for two minutes, and lets all others wait.
    "TCP_CONN_NB": "y",
    # A host that is gone without a word is found in about six seconds on an idle connection, in ten where
    # bytes wait for it; UCX's and the kernel's defaults take 16 seconds and a quarter of an hour.
    "TCP_KEEPIDLE": "3s",
    "TCP_KEEPINTVL": "1s",
    "TCP_KEEPCNT": "3",
    "TCP_USER_TIMEOUT": "10s",
    "TCP_SYN_CNT": "3",
}
_SINCE = {"TCP_USER_TIMEOUT": (1, 22), "TCP_SYN_CNT": (1, 17)}  # before, UCX does not take them
RDMA_TRANSPORTS = ("ib", "rc", "dc", "ud", "all")

# ucs_status_t, from UCX's ucs/type/status.h.
_UCS_NO_RESOURCE = -2
_UCS_NO_MEMORY = -4
_UCS_INVALID_PARAM = -5
_UCS_TIMED_OUT = -20
# Unreachable, invalid address, connects failed, no device, rejected.
_UCS_CANNOT_CONNECT = (-6, -7, -13, -14, -23)
# I/O error, cancelled (by the endpoint's end), not connected, connection reset, endpoint timeout.
_UCS_PEER_LOST = (-3, -16, -24, -25, -80)


def translate(error: _transport.TransportError, action: str) -> TensorferryError:
    """Turn a native error into the exception that callers are promised (the one table of this backend)."""
    status = error.status
    message = f"{action}: {error} (status {status})"
    plain: dict[int, type[TensorferryError]] = {
        _transport.LEASE_EXPIRED: LeaseExpiredError,
        _transport.LEASE_REVOKED: LeaseRevokedError,
        _transport.PROTOCOL_VIOLATION: ProtocolError,
        _transport.CLOSED: ClosedError,
        _transport.NO_MEMORY: RegistrationError,
        _transport.LIBRARY_UNUSABLE: BackendUnavailableError,
        _UCS_NO_RESOURCE: RegistrationError,
        _UCS_NO_MEMORY: RegistrationError,
    }
    if status in plain:
        return plain[status](message)
    if status in (_transport.TIMED_OUT, _UCS_TIMED_OUT):
        return TransferTimeoutError(message, status=status)
    if status == _transport.CANCELLED:
        return TransferCancelledError(message, status=status)
    if status == _transport.ACCESS_REFUSED:
        return RemoteAccessError(message, status=status)
    if status in _UCS_CANNOT_CONNECT:
        return ConnectError(message, scope="peer", status=status)
    if status == _transport.PEER_GONE or status in _UCS_PEER_LOST:
        return PeerLostError(message, scope="peer", status=status)
    return TransferError(message, status=status)


@contextmanager
def native_errors(action: str) -> Iterator[None]:
    """Translate what the core throws while ``action`` is done."""
    try:
        yield
    except _transport.TransportError as error:
        raise translate(error, action) from error


@cache
def load_library() -> _transport.Library:
    """Load the UCX library of this process, once; log which one and why.

    Raises:
        BackendUnavailableError: There is none, or it cannot be loaded beside another UCX.
    """
    path, reason = choose_library(os.environ, _transport.Library.mapped_path())
    with native_errors("loading UCX"):
        library = _transport.Library.load(path)
    logger.info("UCX %s from %s (%s)", library.version, library.path, reason)
    return library


@cache
def host_mark() -> bytes:
    """Return 16 bytes that are equal where memory can be mapped: one boot, one pid namespace, one user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    namespace = os.readlink("/proc/self/ns/pid").encode()
    return hashlib.blake2b(boot + namespace + str(os.geteuid()).encode(), digest_size=16).digest()


@cache
def _log_plain_memory() -> None:
    logger.info("no accelerator here: pools are plain memory, not pinned")


def offers_rdma(options: Mapping[str, str]) -> bool:
    """Tell whether the transports that the user allows include RDMA devices that are there."""
    allowed = options.get("TLS", os.environ.get("UCX_TLS", "all")).lower()
    return bool(rdma_devices()) and any(part.startswith(RDMA_TRANSPORTS) for part in allowed.split(","))


def defaults_of(library: _transport.Library) -> dict[str, str]:
    """Return our settings as far as this version of UCX has them."""
    version = tuple(int(part) for part in library.version.split(".")[:2])
    return {name: value for name, value in DEFAULTS.items() if version >= _SINCE.get(name, (0, 0))}


def create_context(options: Mapping[str, str], device: torch.device, *, rdma: bool) -> _transport.Context:
    """Create a context for served reads, or with ``rdma`` one that offers remote memory access.

    Args:
        options: UCX settings of the user, without the ``UCX_`` prefix.
        device: Where the pool is that the context will register.
        rdma: Whether peers may read by remote key.

    Raises:
        UsageError: UCX does not take the value of a setting.
        BackendUnavailableError: No UCX library can be used, or none of its transports.
    """
    # Served reads keep to tcp: over RDMA devices UCX's rendezvous would hand out keys to the whole pool.
    transports = "ib" if rdma and offers_rdma(options) else "tcp"
    if device.type == "cuda":
        transports += ",cuda"
    library = load_library()
    allowed = options.get("TLS", os.environ.get("UCX_TLS", transports))
    defaults = {"TLS": transports}
    if "tcp" in allowed or "all" in allowed or allowed.startswith("^"):  # else UCX warns of these settings
        defaults |= defaults_of(library)
    try:
        return _transport.Context.create(
            library, defaults=defaults, options=dict(options), remote_memory=rdma
        )
    except _transport.TransportError as error:
        if error.status == _UCS_INVALID_PARAM:
            raise UsageError(f"{error}: see backend_options and UCX_* in the environment") from error
        raise BackendUnavailableError(
            f"UCX {library.version} cannot be used with TLS={allowed}: {error} (status {error.status}); "
            "see backend_options and UCX_* in the environment"
        ) from error


def start_worker(context: _transport.Context) -> _transport.Worker:
    """Start a worker and its thread.

    Raises:
        RegistrationError: The system has too little of some memory.
        BackendUnavailableError: UCX cannot, for example because TCP_PORT_RANGE has no free port.
    """
    try:
        return _transport.Worker.create(context)
    except _transport.TransportError as error:
        known = translate(error, "starting a UCX worker")
        if isinstance(known, RegistrationError):
            raise known from error
        raise BackendUnavailableError(f"{known}; see backend_options and UCX_* in the environment") from error


def register_memory(
    context: _transport.Context, memory: _transport.Memory, memory_type: _transport.MemoryType
) -> _transport.MemoryRegion:
    """Register memory with a context; the region keeps both alive.

    Raises:
        RegistrationError: The locked-memory limit or the device does not allow it.
    """
    try:
        return _transport.MemoryRegion.create(context, memory, memory_type)
    except _transport.TransportError as error:
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if memory_type == _transport.MemoryType.CUDA and "expandable_segments:True" in os.environ.get(
                name, ""
            ):
                raise RegistrationError(
                    f"UCX cannot register {memory.nbytes} bytes on the GPU: {error} (status {error.status}). "
                    f"Not every device takes torch's expandable segments: leave them out of {name}"
                ) from error
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        lockable = "any amount" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        raise RegistrationError(
            f"UCX cannot register {memory.nbytes} bytes: {error} (status {error.status}). RDMA devices lock "
            f"what they register, and this process may lock {lockable} (RLIMIT_MEMLOCK): raise that limit "
            "(ulimit -l, or the container's ulimits), or make the pool smaller"
        ) from error


class PoolMemory:
    """Pool memory, its tensor, and its registrations; pinned where an accelerator is there."""

    def __init__(self, nbytes: int, device: torch.device, *, shared: bool) -> None:
        self.memory_type = _transport.MemoryType.HOST
        self._pinned_address = 0
        if device.type == "cuda":
            self.tensor = _cuda_pool(nbytes, device)
            self.memory = _transport.Memory.borrow(self.tensor.data_ptr(), nbytes, owner=self.tensor)
            self.memory_type = _transport.MemoryType.CUDA
            return
        if device.type != "cpu":
            raise UsageError(f"a pool is on 'cpu' or 'cuda', not on {str(device)!r}")
        with native_errors(f"allocating a pool of {nbytes} bytes"):
            allocate = _transport.Memory.allocate_shared if shared else _transport.Memory.allocate
            self.memory = allocate(nbytes)
        self.tensor = torch.utils.dlpack.from_dlpack(self.memory.array())
        if torch.cuda.is_available():
            self._pin()
        else:
            _log_plain_memory()

    def _pin(self) -> None:
        status = _cudart().cudaHostRegister(self.memory.address, self.memory.nbytes, 0)
        if int(status) != 0:
            raise RegistrationError(
                f"pinning {self.memory.nbytes} bytes failed with CUDA error {int(status)}: "
                "raise the memlock limit (ulimit -l) or make the pool smaller"
            )
        self._pinned_address = self.memory.address

    def register(self, context: _transport.Context) -> _transport.MemoryRegion:
        """Register the pool with a context; the region keeps both alive.

        Raises:
            RegistrationError: The locked-memory limit or the device does not allow it.
        """
        return register_memory(context, self.memory, self.memory_type)

    def close(self) -> None:
        """Unpin the memory and let go of it; it is freed with the last tensor over it.  Once only."""
        if self._pinned_address:
            _cudart().cudaHostUnregister(self._pinned_address)
            self._pinned_address = 0
        self.tensor = self.tensor.new_empty(0)
        del self.memory


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _cuda_pool(nbytes: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RegistrationError(f"allocating {nbytes} bytes on {device} failed: {error}") from error
