"""
UCX underneath tensorferry: contexts, workers, endpoints, memory regions and reads.
"""

from collections.abc import Mapping, Sequence
import enum
from typing import Annotated

import numpy
from numpy.typing import NDArray


class TransportError(Exception):
    """What the core throws; ``status`` is UCX's code or one of the constants of this module."""

    status: int

LEASE_EXPIRED: int = -1001

LEASE_REVOKED: int = -1010

ACCESS_REFUSED: int = -1002

PROTOCOL_VIOLATION: int = -1003

TIMED_OUT: int = -1004

CANCELLED: int = -1005

CLOSED: int = -1006

PEER_GONE: int = -1007

LIBRARY_UNUSABLE: int = -1008

NO_MEMORY: int = -1009

class MemoryType(enum.Enum):
    """Where the bytes of a memory region are."""

    HOST = 0

    CUDA = 1

class Library:
    """A UCX library that was opened at load time."""

    @staticmethod
    def load(path: str) -> Library: ...

    @staticmethod
    def mapped_path() -> str:
        """Path of a libucp that this process has loaded, or ''."""

    @property
    def path(self) -> str: ...

    @property
    def version(self) -> str: ...

    def describe(self, status: int) -> str: ...

class Context:
    """A UCP context: the transports and devices that workers may use."""

    @staticmethod
    def create(library: Library, *, defaults: Mapping[str, str], options: Mapping[str, str], remote_memory: bool) -> Context: ...

class Memory:
    """Bytes that stay valid until the last view of them is gone."""

    @staticmethod
    def allocate(nbytes: int) -> Memory: ...

    @staticmethod
    def allocate_shared(nbytes: int) -> Memory: ...

    @staticmethod
    def borrow(address: int, nbytes: int, owner: object) -> Memory: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def descriptor(self) -> int: ...

    @property
    def address(self) -> int: ...

    def array(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C')]: ...

class MemoryRegion:
    """Memory registered with one context."""

    @staticmethod
    def create(context: Context, memory: Memory, memory_type: MemoryType) -> MemoryRegion: ...

    def pack_key(self) -> bytes: ...

    def close(self) -> None: ...

    @property
    def memory(self) -> Memory: ...

class SlotTable:
    """Which parts of a pool peers may read now."""

    def __init__(self, *, pool_nbytes: int, slots: int, uid: bytes, serves: bool) -> None: ...

    def admit(self, offset: int, nbytes: int, lease: float) -> tuple[int, int, bytes]:
        """Returns index, generation and token."""

    def withdraw(self, index: int, generation: int, *, revoked: bool) -> bool: ...

    def notifications(self, timeout: float) -> list[tuple[int, int, int, bytes, bytes]]:
        """Waits; returns tuples of kind, index, generation, consumer and MAC."""

    def wake(self) -> None: ...

    def close(self) -> None: ...

    @property
    def running_reads(self) -> int: ...

    @property
    def control(self) -> Memory: ...

class RemoteKey:
    """What opens a peer's memory on one endpoint."""

class CompletionQueue:
    """Numbers of what happened to reads, for one thread."""

    def __init__(self) -> None: ...

    def take(self, timeout: float) -> list[int]:
        """
        Waits; returns all numbers there are, none on timeout and after wake().
        """

    def wake(self) -> None: ...

class Read:
    """A batch of reads posted as one."""

    def wait(self, timeout: float) -> bool:
        """True once all bytes are here, False when the time is up first."""

    def abandon(self, status: int) -> None: ...

    def watch(self, queue: CompletionQueue, number: int) -> None:
        """Pushes the number once wait() would not wait any more."""

    @property
    def settled(self) -> bool: ...

class Endpoint:
    """The way to one peer's worker."""

    @property
    def failure(self) -> int: ...

    def hello(self, uid: bytes) -> Read: ...

    def read_served(self, index: int, generation: int, token: bytes, offset: int, nbytes: int, spans: Sequence[tuple[int, int, int]], destination: MemoryRegion, releaser: tuple[bytes, bytes] | None = None) -> Read: ...

    def read_served_into(self, index: int, generation: int, token: bytes, offset: int, nbytes: int, spans: Sequence[tuple[int, int, int]], memories: Sequence[Memory], releaser: tuple[bytes, bytes] | None = None) -> Read:
        """
        The caller keeps what the memories borrow alive until the read is settled.
        """

    def read_remote(self, index: int, generation: int, token: bytes, offset: int, nbytes: int, spans: Sequence[tuple[int, int, int]], destination: MemoryRegion, pool: RemoteKey, control: RemoteKey, releaser: tuple[bytes, bytes] | None = None) -> Read: ...

    def unpack(self, key: bytes, address: int, nbytes: int) -> RemoteKey: ...

    def transports(self) -> list[str]: ...

    def release(self, index: int, generation: int, token: bytes, consumer: bytes, mac: bytes) -> None: ...

    def reject(self, index: int, generation: int, token: bytes, consumer: bytes, mac: bytes) -> None: ...

    def close(self, timeout: float) -> None: ...

class Worker:
    """A UCP worker and the one thread that touches it."""

    @staticmethod
    def create(context: Context) -> Worker: ...

    @property
    def address(self) -> bytes: ...

    def connect(self, address: bytes) -> Endpoint: ...

    def serve(self, table: SlotTable, pool: MemoryRegion) -> None: ...

    def close(self, timeout: float) -> None: ...

class PeerPool:
    """Another process's pool, mapped read-only."""

    @staticmethod
    def open(*, pid: int, control_descriptor: int, pool_descriptor: int, uid: bytes, pool_nbytes: int, slots: int) -> PeerPool: ...

    def verify(self, index: int, generation: int) -> int: ...

    def alive(self) -> int: ...

    def array(self, offset: int, nbytes: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C')]: ...
