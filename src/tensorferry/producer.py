# SPDX-License-Identifier: Apache-2.0
"""The side that has tensors: copies them into its pool and hands out manifests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from tensorferry import arguments, layout, steps, wire
from tensorferry.arguments import Deadline
from tensorferry.backends import registry
from tensorferry.errors import UsageError
from tensorferry.manifest import Checksum
from tensorferry.metadata import plain_metadata
from tensorferry.metrics import ProducerStatistics
from tensorferry.ownership import Closer, Lifetime
from tensorferry.publishing import Placed, Publisher, Terms, place
from tensorferry.request import Request
from tensorferry.reservation import Reservation, as_size
from tensorferry.room import Room
from tensorferry.streams import queued_work
from tensorferry.validation import MAX_CONSUMERS, MAX_NAME_NBYTES

ACCESSES = ("auto", "served", "rdma", "mapped")

_SLOTS = (256, 65536)  # fewest and most publications that may live at a time


class Producer:
    """Publishes tensors: copies them into a pool that consumers read.

    Any method may be called from any thread.  After ``fork()`` every method raises
    :class:`ForkedProcessError` in the child, and the child leaves the parent's pool alone.
    Close it, or use it in a ``with`` statement.

    Args:
        pool_size: Bytes, or text like ``"4GiB"`` or ``"512MB"``.  Never more is used.
        device: Where the pool is: ``"cpu"``, or a CUDA device.
        min_block_size: Smallest piece of the pool in bytes, a power of two of at least 64;
            slots are rounded up to multiples of it.
        backend: Name of the library that moves the bytes, ``"ucx"`` or ``"nixl"``; the same on both sides.
        backend_options: Its settings; UCX settings without ``UCX_``, for example
            ``{"TLS": "tcp", "NET_DEVICES": "lo"}``.  ``docs/backends.md`` has those of ``"nixl"``.
        access: How consumers may read: ``"served"``, ``"rdma"``, ``"mapped"``, or ``"auto"`` for
            all that suit.
        lease: Seconds for which a publication is kept for its consumers by default.
        key: 16 to 64 bytes (or text) shared with the consumers; manifests carry a MAC then, and
            releases and rejects without a valid one are not counted.
        checksum: ``"xxh3"`` adds a checksum of each tensor, which consumers verify.
        name: What consumers and messages call this producer.

    Raises:
        UsageError: An argument is out of range; the message names it.
        RegistrationError: The pool cannot be allocated or registered.
        BackendUnavailableError: The backend cannot be used here.
    """

    def __init__(
        self,
        pool_size: int | str,
        *,
        device: torch.device | str = "cpu",
        min_block_size: int = 4096,
        backend: str = "ucx",
        backend_options: Mapping[str, str] | None = None,
        access: Literal["auto", "served", "rdma", "mapped"] = "auto",
        lease: float = 60.0,
        key: bytes | str | None = None,
        checksum: Checksum | None = None,
        name: str | None = None,
    ) -> None:
        nbytes = arguments.as_nbytes(pool_size, "pool_size")
        self._lease = arguments.as_seconds(lease, "lease", positive=True)
        secret = wire.as_key(key)
        self._name = arguments.as_name(name)
        if checksum not in (None, "xxh3"):
            raise UsageError(f"checksum is None or 'xxh3', not {checksum!r}")
        self._block_size = _as_block_size(min_block_size, nbytes)
        self._device = arguments.as_device(device)
        slots = min(max(nbytes // self._block_size, _SLOTS[0]), _SLOTS[1])
        what = "a Producer" if name is None else f"Producer {name!r}"
        room = Room(nbytes, self._block_size, owner=what, max_loans=slots)
        with torch.inference_mode(False):  # else the pool could not be written outside of it
            pool = registry.export_pool(
                backend,
                nbytes,
                device=self._device,
                access=arguments.as_choice(access, ACCESSES, "access"),
                options=arguments.as_options(backend_options),
                slots=slots,
            )
        self._lifetime = Lifetime(what)
        try:
            self._publisher = Publisher(
                pool,
                room,
                self._lifetime,
                lease=self._lease,
                key=secret,
                checksum=checksum,
                name=self._name,
            )
        except BaseException:  # a thread that the system does not start, for one
            pool.close(0.0)
            raise
        self._pool_nbytes = nbytes
        self._closer = Closer(self, self._lifetime, self._publisher.close)

    def __repr__(self) -> str:
        state = " closed" if self._lifetime.closed else ""
        name = "" if self._name is None else f" {self._name!r}"
        return f"<Producer{name}{state} {self._pool_nbytes} bytes on {self._device}>"

    def __enter__(self) -> Producer:
        self._lifetime.check()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def publish(
        self,
        request_id: str,
        tensors: Mapping[str, Any],
        *,
        metadata: Mapping[str, Any] | None = None,
        consumers: int = 1,
        lease: float | None = None,
        stream: torch.cuda.Stream | None = None,
        timeout: float = 0,
    ) -> bytes:
        """Copy tensors into a slot and return the manifest with which they can be pulled.

        What is published is what earlier work on the current CUDA stream (or on ``stream``)
        leaves in the tensors; this call waits for it.  Afterwards they may be changed.

        Args:
            request_id: Names the publication; at most 4096 bytes.
            tensors: Mapping from names to a tensor, ``None``, or lists, tuples and dicts of
                them.  NumPy arrays and objects with ``__dlpack__`` count as tensors.
            metadata: Plain values that travel in the manifest.
            consumers: How many consumers must release it.
            lease: Seconds for which it is kept; None takes the producer's.
            stream: CUDA stream for the copies, instead of the current one.
            timeout: Seconds to wait for room, first come first served; 0 does not wait.

        Returns:
            The manifest, to be sent over any channel.  It can be pulled from anywhere the
            producer can be reached from.

        Raises:
            UsageError: An object cannot be sent (the message names its path), an argument is
                out of range, or ``request_id`` is published already.
            PayloadTooLargeError: The tensors would not fit into the empty pool.
            PoolExhaustedError: There is no room now, and ``timeout`` is 0.
            PoolTimeoutError: There was no room within ``timeout`` seconds.
            ClosedError: The producer was closed before or meanwhile.
            ForkedProcessError: The producer belongs to the parent process.

        After any error nothing is published and no room is held.
        """
        terms, placed, wait = self._prepare(request_id, tensors, metadata, consumers, lease, stream, timeout)
        return steps.run(self._publisher.publish(terms, placed, wait))

    def start_publish(
        self,
        request_id: str,
        tensors: Mapping[str, Any],
        *,
        metadata: Mapping[str, Any] | None = None,
        consumers: int = 1,
        lease: float | None = None,
        stream: torch.cuda.Stream | None = None,
        timeout: float = 0,
    ) -> Request[bytes]:
        """Start a :meth:`publish` and return at once; any number may wait for room.

        All of them are driven by one thread of this producer, which also makes the copies, one
        after another.  The tensors must not be changed until the request has ended.

        Args:
            request_id: As for :meth:`publish`, and so are the others.
            tensors: What to publish.
            metadata: Plain values that travel in the manifest.
            consumers: How many consumers must release it.
            lease: Seconds for which it is kept, from its publication on.
            stream: CUDA stream for the copies.
            timeout: Seconds to wait for room, from now on.

        Returns:
            The request: ``result()`` waits for the manifest, ``await`` does in an event loop, and
            ``cancel()`` gives it up.

        Raises:
            UsageError: An object cannot be sent (the message names its path), or an argument is
                out of range.
            ClosedError: The producer is closed.
            ForkedProcessError: The producer belongs to the parent process.

        What else :meth:`publish` raises is raised by the request's ``result``.
        """
        terms, placed, wait = self._prepare(request_id, tensors, metadata, consumers, lease, stream, timeout)
        devices = {self._device, *(tensor.device for tensor in placed.columns.tensors)}
        terms = replace(terms, after=queued_work(devices, stream))
        publisher = self._publisher
        return Request(
            self,
            self._lifetime,
            publisher.dispatcher,
            publisher.publish(terms, placed, wait),
            f"publish of {request_id!r}",
        )

    def reserve(
        self,
        request_id: str,
        size: int | str | Mapping[str, Any],
        *,
        timeout: float = 0,
    ) -> Reservation:
        """Take a slot to compute into, which is published without a copy.

        Args:
            request_id: Names the publication to come; at most 4096 bytes.
            size: Bytes of the slot, or text like ``"64MiB"``, in which each tensor starts at a
                multiple of 64; or a mapping from names to ``(shape, dtype)`` or to tensors of that
                shape and dtype (on the device ``"meta"``, say), which are made at once.
            timeout: Seconds to wait for room, first come first served; 0 does not wait.

        Raises:
            UsageError: An argument is out of range, or ``request_id`` is published or reserved.
            PayloadTooLargeError: It would not fit into the empty pool.
            PoolExhaustedError: There is no room now, and ``timeout`` is 0.
            PoolTimeoutError: There was no room within ``timeout`` seconds.
            ClosedError: The producer was closed before or meanwhile.
            ForkedProcessError: The producer belongs to the parent process.

        After an error nothing is reserved.
        """
        with self._lifetime.use():
            _check_request(request_id, 1)
            nbytes, specs = as_size(size)
            held = steps.run(self._publisher.hold(request_id, nbytes, _wait(timeout)))
            reservation = Reservation(self._publisher, self._lifetime, held, self._terms)
            for name, (shape, dtype) in specs.items():
                reservation.empty(name, shape, dtype)
            return reservation

    def revoke(self, request_id: str) -> bool:
        """Take a publication back.

        A pull that is running ends with :class:`LeaseRevokedError` or brings the whole data; its
        slot is used again only when nobody reads it any more.  Later pulls get the same error
        for as long as the producer remembers (it forgets the oldest ends first), and
        :class:`LeaseExpiredError` after that.

        Args:
            request_id: Its name.

        Returns:
            Whether there was a publication of this name to end.

        Raises:
            ClosedError: The producer is closed.
            ForkedProcessError: The producer belongs to the parent process.
        """
        with self._lifetime.use():
            return self._publisher.publications.revoke(request_id)

    def wait_released(self, request_id: str, timeout: float) -> bool:
        """Wait until a publication has ended, for whatever reason, and its slot is free.

        Args:
            request_id: Its name.  Ended publications are forgotten, so the answer for a name
                that was never published is True.
            timeout: Seconds to wait.

        Returns:
            True once no slot is held under this name, False if the time was up first.

        Raises:
            UsageError: ``timeout`` is not a number of seconds.
            ClosedError: The producer was closed before or meanwhile.
            ForkedProcessError: The producer belongs to the parent process.
        """
        with self._lifetime.use():
            seconds = arguments.as_seconds(timeout, "timeout")
            return self._publisher.publications.wait_released(request_id, seconds)

    def statistics(self) -> ProducerStatistics:
        """Return all figures as of now; also after :meth:`close`.

        Raises:
            ForkedProcessError: The producer belongs to the parent process.
        """
        self._lifetime.check_process()
        counts, seconds = self._publisher.figures()
        room = self._publisher.room
        return ProducerStatistics(
            pool_nbytes=self._pool_nbytes,
            allocated_nbytes=room.allocated_nbytes,
            requested_nbytes=room.requested_nbytes,
            waiters=room.waiters,
            publish_seconds=seconds,
            **{name: counts[name] for name in _COUNTED},
        )

    def close(self, timeout: float = 5) -> None:
        """End every publication and free the pool; calls that wait get :class:`ClosedError`.

        May be called again, and from several threads.  In a forked child it does nothing.

        Args:
            timeout: Seconds to wait for reads and calls that are running; what is still
                running then is cut off.

        Raises:
            UsageError: ``timeout`` is not a number of seconds.
        """
        seconds = arguments.as_seconds(timeout, "timeout")
        if self._lifetime.forked:
            return
        self._publisher.close(seconds)
        self._closer.done()

    def _prepare(
        self,
        request_id: str,
        tensors: Mapping[str, Any],
        metadata: Mapping[str, Any] | None,
        consumers: int,
        lease: float | None,
        stream: torch.cuda.Stream | None,
        timeout: float,
    ) -> tuple[Terms, Placed, Deadline | None]:
        with self._lifetime.use(), self._publisher.counting_failures:
            terms = self._terms(request_id, metadata, consumers, lease, stream)
            wait = _wait(timeout)
            return terms, place(tensors), wait

    def _terms(
        self,
        request_id: str,
        metadata: Mapping[str, Any] | None,
        consumers: int,
        lease: float | None,
        stream: torch.cuda.Stream | None,
    ) -> Terms:
        _check_request(request_id, consumers)
        seconds = self._lease if lease is None else arguments.as_seconds(lease, "lease", positive=True)
        plain = plain_metadata({} if metadata is None else dict(metadata))
        return Terms(request_id, consumers, seconds, plain, stream)


_COUNTED = (
    "live",
    "draining",
    "publications",
    "bytes_published",
    "failed_publishes",
    "released",
    "expired",
    "revoked",
    "rejected",
    "ignored_notices",
    "forged_notices",
)


def _wait(timeout: float) -> Deadline | None:
    seconds = arguments.as_seconds(timeout, "timeout")
    return Deadline(seconds) if seconds else None


def _check_request(request_id: str, consumers: int) -> None:
    if not isinstance(request_id, str):
        raise UsageError(f"request_id is a str, not {type(request_id).__name__}")
    if len(request_id) > MAX_NAME_NBYTES:
        raise UsageError(f"request_id has {len(request_id)} characters, the limit is {MAX_NAME_NBYTES} bytes")
    if isinstance(consumers, bool) or not isinstance(consumers, int) or not 1 <= consumers <= MAX_CONSUMERS:
        raise UsageError(f"consumers is an integer in 1..{MAX_CONSUMERS}, not {consumers!r}")


def _as_block_size(min_block_size: int, pool_nbytes: int) -> int:
    if isinstance(min_block_size, bool) or not isinstance(min_block_size, int):
        raise UsageError(f"min_block_size is a number of bytes, not {type(min_block_size).__name__}")
    if min_block_size < layout.ALIGNMENT or min_block_size & (min_block_size - 1):
        raise UsageError(
            f"min_block_size is a power of two of at least {layout.ALIGNMENT} bytes, not {min_block_size}"
        )
    if min_block_size > pool_nbytes:
        raise UsageError(f"pool_size {pool_nbytes} is smaller than one block of {min_block_size} bytes")
    return min_block_size
