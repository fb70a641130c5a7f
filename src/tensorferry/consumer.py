# SPDX-License-Identifier: Apache-2.0
"""The side that wants tensors: pulls them out of the producers' pools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch

from tensorferry import arguments, steps, wire
from tensorferry.arguments import Deadline
from tensorferry.backends import registry
from tensorferry.errors import UsageError
from tensorferry.landing import BLOCK_NBYTES
from tensorferry.manifest import decode_manifest
from tensorferry.metrics import ConsumerStatistics
from tensorferry.orders import Order
from tensorferry.ownership import Closer, Lifetime
from tensorferry.receiving import Receiver
from tensorferry.request import Request
from tensorferry.slicing import Index
from tensorferry.standing import StandingParts
from tensorferry.streams import current_stream

ACCESSES = ("auto", "served", "rdma", "mapped")

_NOTIFY_SECONDS = 5.0

ManifestBytes = bytes | bytearray | memoryview
_Access = Literal["auto", "served", "rdma", "mapped"]


class Consumer:
    """Pulls published tensors, from any number of producers.

    Any method may be called from any thread.  After ``fork()`` every method raises
    :class:`ForkedProcessError` in the child, and the child leaves the parent's connections
    alone.  Close it, or use it in a ``with`` statement.

    Args:
        pool_size: Bytes of the pool in which remote bytes land before they go onto their
            device, or text like ``"4GiB"``.  Pulls that do not fit side by side wait for each
            other.  ``mapped`` needs none of it.
        device: Where that pool is: ``"cpu"``, or a CUDA device.
        backend: Name of the library that moves the bytes; the producers' must be the same.
        backend_options: Its settings; for ``"ucx"``, UCX settings without ``UCX_``.
        access: How to read: ``"served"``, ``"rdma"``, ``"mapped"``, or ``"auto"`` for the best
            that the producer offers and that works between the two.
        key: 16 to 64 bytes (or text) shared with the producers; manifests without a valid MAC
            are refused then, and releases and rejects carry one.
        max_manifest_bytes: Longer manifests are refused.
        name: What messages call this consumer.

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
        backend: str = "ucx",
        backend_options: Mapping[str, str] | None = None,
        access: _Access = "auto",
        key: bytes | str | None = None,
        max_manifest_bytes: int = wire.MAX_MANIFEST_NBYTES,
        name: str | None = None,
    ) -> None:
        nbytes = arguments.as_nbytes(pool_size, "pool_size")
        if nbytes < BLOCK_NBYTES:
            raise UsageError(f"pool_size is at least {BLOCK_NBYTES} bytes, not {nbytes}")
        self._max_manifest_nbytes = arguments.as_nbytes(max_manifest_bytes, "max_manifest_bytes")
        self._key = wire.as_key(key)
        self._name = arguments.as_name(name)
        self._known = StandingParts()
        self._device = arguments.as_device(device)
        chosen = cast(_Access, arguments.as_choice(access, ACCESSES, "access"))
        with torch.inference_mode(False):  # else the pool could not be written outside of it
            reader = registry.open_reader(
                backend,
                nbytes,
                device=self._device,
                access=chosen,
                options=arguments.as_options(backend_options),
            )
        self._lifetime = Lifetime("a Consumer" if name is None else f"Consumer {name!r}")
        self._receiver = Receiver(reader, chosen, self._lifetime, self._key)
        self._closer = Closer(self, self._lifetime, self._receiver.close)

    def __repr__(self) -> str:
        state = " closed" if self._lifetime.closed else ""
        name = "" if self._name is None else f" {self._name!r}"
        return f"<Consumer{name}{state} {self._receiver.landing.nbytes} bytes on {self._device}>"

    def __enter__(self) -> Consumer:
        self._lifetime.check()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def pull(
        self,
        manifest: ManifestBytes,
        *,
        device: torch.device | str | None = None,
        names: Sequence[str] | None = None,
        slices: Mapping[str, Index] | None = None,
        stream: torch.cuda.Stream | None = None,
        timeout: float = 30.0,
        release: bool = True,
    ) -> dict[str, Any]:
        """Bring published tensors here, and give their slot back.

        Args:
            manifest: What the producer's ``publish`` returned.
            device: Where the results go; None for the device of this consumer's pool.
            names: Top-level names of the payload; only their bytes are read.  None for all.
            slices: Parts of tensors, by the paths that ``read_manifest(...).names`` shows; tensors
                that are not in it come whole.  An index is what basic indexing by torch takes:
                integers, slices with a positive step, ``...``, ``None``, or a tuple of them, and
                means the same.  Only the bytes of these parts are read, with gaps of up to 512
                bytes between them, or of up to 8 KiB where there would be thousands of reads.
                Parts are not compared with checksums, which are of whole tensors.
            stream: CUDA stream for the copies, instead of the current one.
            timeout: Seconds for all of it: waiting for room to land in, connecting, reading.
            release: Whether the slot is given back as soon as the bytes are here.

        Returns:
            The payload in the structure in which it was published, or the part of it under
            ``names``, with ``tensor[index]`` in place of a tensor in ``slices``.  The tensors are
            complete, contiguous, require no gradient, share no memory with either pool, and cannot be
            made larger in place (``resize_``).  Small ones (up to 32 KiB) may share memory of up to
            1 MiB with each other, which lives as long as any of them.

        Raises:
            ManifestError: The manifest is malformed or out of bounds.
            VersionError: It was written for another major version.
            AuthenticationError: The key and its MAC do not belong together.
            UsageError: An argument is out of range, ``names`` or ``slices`` has a name that is not
                there, or an index does not fit its tensor.
            PayloadTooLargeError: The tensors would not fit into the empty pool.
            PoolTimeoutError: There was no room to land in within ``timeout``.
            RegistrationError: The first connection starts the backend, which found no memory.
            ConnectError: The producer cannot be reached, or offers no access that works.
            PeerLostError: It closed or died meanwhile.
            LeaseExpiredError: The slot is not, or may not have been, the manifest's any more.
            LeaseRevokedError: So it is, because the producer revoked the publication.
            IntegrityError: A tensor's checksum does not match; the slot is not given back.
            RemoteAccessError: The producer or the network card refused the read.
            TransferTimeoutError: The bytes did not arrive within ``timeout``.
            ClosedError: The consumer was closed before or meanwhile.
            ForkedProcessError: The consumer belongs to the parent process.

        After an error nothing was handed out and, except for a ``LeaseError``, the slot
        is still held for this consumer until its lease runs out: pull again, or ``reject`` it.
        """
        deadline = Deadline(arguments.as_seconds(timeout, "timeout"))
        order, place = self._prepare(manifest, names, slices, device)
        return steps.run(self._receiver.pull(order, place, stream, deadline, release=release))

    def start_pull(
        self,
        manifest: ManifestBytes,
        *,
        device: torch.device | str | None = None,
        names: Sequence[str] | None = None,
        slices: Mapping[str, Index] | None = None,
        stream: torch.cuda.Stream | None = None,
        timeout: float = 30.0,
        release: bool = True,
    ) -> Request[dict[str, Any]]:
        """Start a :meth:`pull` and return at once; any number may be under way.

        All of them are driven by one thread of this consumer, which also makes the last copies,
        one after another.

        Args:
            manifest: As for :meth:`pull`, and so are the others.
            device: Where the results go.
            names: Top-level names of the payload.
            slices: Parts of tensors by their paths.
            stream: CUDA stream for the copies, instead of the current one of the calling thread.
            timeout: Seconds for all of it, from now on.
            release: Whether the slot is given back.

        Returns:
            The request: ``result()`` waits for the tensors, ``await`` does in an event loop, and
            ``cancel()`` gives it up.

        Raises:
            ManifestError: The manifest is malformed or out of bounds.
            VersionError: It was written for another major version.
            AuthenticationError: The key and its MAC do not belong together.
            UsageError: An argument is out of range, ``names`` or ``slices`` has a name that is not
                there, or an index does not fit its tensor.
            ClosedError: The consumer is closed.
            ForkedProcessError: The consumer belongs to the parent process.

        What else :meth:`pull` raises is raised by the request's ``result``.
        """
        deadline = Deadline(arguments.as_seconds(timeout, "timeout"))
        order, place = self._prepare(manifest, names, slices, device)
        pull = self._receiver.pull(order, place, stream or current_stream(place), deadline, release=release)
        return Request(self, self._lifetime, self._receiver.dispatcher, pull, f"pull of {order}")

    @contextmanager
    def borrow(
        self,
        manifest: ManifestBytes,
        *,
        device: torch.device | str | None = None,
        names: Sequence[str] | None = None,
        slices: Mapping[str, Index] | None = None,
        timeout: float = 30.0,
        release: bool = True,
    ) -> Iterator[dict[str, Any]]:
        """Lend published tensors for the time of a ``with`` block, without the last copy.

        On one host (``mapped``) they are views of the producer's own pool, and nothing is
        copied; else they are views of this consumer's pool.  They must only be read, and only
        inside the block: in ``mapped`` access the memory is read-only, and writing to it kills
        the process.  What they hold after the block is undefined.

        When the block ends, what was queued on the current CUDA stream is waited for, the
        lease is checked once more where the memory is the producer's, and the slot is given
        back.  When it is left by an exception, the slot is not given back.

        With checksums every byte of whole tensors is read on entering; without, entering a ``mapped`` block
        takes the same time for any size.

        Args:
            manifest: What the producer's ``publish`` returned.
            device: None for wherever the tensors are; else ``"cpu"`` or the device of this
                consumer's pool.
            names: Top-level names of the payload; None for all.
            slices: Parts of tensors, as for :meth:`pull`; as views they need not be contiguous.
            timeout: Seconds for entering the block.
            release: Whether the slot is given back when the block ends.

        Yields:
            The payload in the structure in which it was published.

        Raises:
            UsageError: The tensors would be on another device than ``device``; use :meth:`pull`.
            LeaseExpiredError: At the end of the block: the lease ran out inside it, and what
                was computed from the views may be wrong.  On entering: as for :meth:`pull`.
            LeaseRevokedError: The same for a publication that was revoked.
            PeerLostError: At the end of the block: the producer closed or died inside it.
            TensorferryError: On entering, as for :meth:`pull`.
        """
        deadline = Deadline(arguments.as_seconds(timeout, "timeout"))
        self._lifetime.check()
        place = None if device is None else arguments.as_device(device)
        if place not in (None, torch.device("cpu"), self._device):
            raise UsageError(
                f"tensors are borrowed where they are, on cpu or {self._device}, not on {place}; use pull()"
            )
        with self._receiver.counting_failures:
            order = self._order(manifest, names, slices)
        with self._receiver.lend(order, place, deadline, release=release) as tensors:
            yield tensors

    def release(self, manifest: ManifestBytes) -> None:
        """Give a slot back, after a pull with ``release=False`` or without any.

        May be called again; nothing happens then, nor if the publication has ended or its
        producer cannot be reached.

        Args:
            manifest: What the producer's ``publish`` returned.

        Raises:
            ManifestError: The manifest is malformed or out of bounds.
            VersionError: It was written for another major version.
            AuthenticationError: The key and its MAC do not belong together.
            ClosedError: The consumer is closed.
            ForkedProcessError: The consumer belongs to the parent process.
        """
        self._notify("release", manifest)

    def reject(self, manifest: ManifestBytes) -> None:
        """Give a slot back that is not wanted; like :meth:`release`, but counted apart.

        Args:
            manifest: What the producer's ``publish`` returned.

        Raises:
            ManifestError: The manifest is malformed or out of bounds.
            VersionError: It was written for another major version.
            AuthenticationError: The key and its MAC do not belong together.
            ClosedError: The consumer is closed.
            ForkedProcessError: The consumer belongs to the parent process.
        """
        self._notify("reject", manifest)

    def statistics(self) -> ConsumerStatistics:
        """Return all figures as of now; also after :meth:`close`.

        Raises:
            ForkedProcessError: The consumer belongs to the parent process.
        """
        self._lifetime.check_process()
        landing = self._receiver.landing
        landing.sweep()
        counts, seconds = self._receiver.figures()
        return ConsumerStatistics(
            pool_nbytes=landing.nbytes,
            allocated_nbytes=landing.allocated_nbytes,
            quarantined_nbytes=landing.quarantined_nbytes,
            waiters=landing.waiters,
            pulls=counts["pulls"],
            failed_pulls=counts["failed_pulls"],
            pulls_by_access={access: counts[access] for access in ACCESSES[1:]},
            bytes_pulled=counts["bytes_pulled"],
            wire_seconds=seconds.get("wire", 0.0),
            landing_seconds=seconds.get("landing", 0.0),
            integrity_failures=counts["integrity_failures"],
            reconnects=counts["reconnects"],
            peers=self._receiver.peers(),
        )

    def close(self, timeout: float = 5) -> None:
        """Cancel what is running, close all connections and free the pool.

        Calls that are running get :class:`ClosedError`.  May be called again, and from several
        threads.  In a forked child it does nothing.

        Args:
            timeout: Seconds to wait for running calls to leave.

        Raises:
            UsageError: ``timeout`` is not a number of seconds.
        """
        seconds = arguments.as_seconds(timeout, "timeout")
        if self._lifetime.forked:
            return
        self._receiver.close(seconds)
        self._closer.done()

    def _prepare(
        self,
        manifest: ManifestBytes,
        names: Sequence[str] | None,
        slices: Mapping[str, Index] | None,
        device: torch.device | str | None,
    ) -> tuple[Order, torch.device]:
        with self._lifetime.use(), self._receiver.counting_failures:
            place = self._device if device is None else arguments.as_device(device)
            return self._order(manifest, names, slices), place

    def _order(
        self,
        manifest: ManifestBytes,
        names: Sequence[str] | None = None,
        slices: Mapping[str, Index] | None = None,
    ) -> Order:
        if isinstance(names, str):
            raise UsageError(f"names is a list of names, not the text {names!r}")
        return Order.of(
            decode_manifest(manifest, self._key, self._max_manifest_nbytes, self._known), names, slices
        )

    def _notify(self, kind: Literal["release", "reject"], manifest: ManifestBytes) -> None:
        with self._lifetime.use():
            self._receiver.notify(kind, self._order(manifest), Deadline(_NOTIFY_SECONDS))
