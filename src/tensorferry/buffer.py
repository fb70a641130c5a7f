# SPDX-License-Identifier: Apache-2.0
"""A pool of memory with a buddy allocator, and copies of tensors into and out of its slots.

:class:`TransferTensorBuffer` drops in for the class of the same name in SGLang's
``multimodal_gen/runtime/disaggregation/transport``.

Streams.  Without ``stream``, every call is complete when it returns.  With one, copies
between CUDA memory and the pool only join that stream, ordered by events on both sides:
``stream`` first waits for what the current stream was given before the call, and the current
stream goes on only after the copies, so neither a source that is changed in place nor a
result that is used at once needs more care.  Copies from or to the caller's host memory are
complete on return in any case.  A slot whose copies are still running is not given back
before they have ended: :meth:`TransferTensorBuffer.free` waits for them.

Threads.  Any method may be called from any thread, but a slot must not be freed while another
thread is inside a call with its handle.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorferry.allocator import Block, BuddyAllocator
from tensorferry.device_copy import Copy, SlotCopies, allocate_pool
from tensorferry.errors import StaleHandleError, UsageError
from tensorferry.slot_layout import (
    ManifestDict,
    Piece,
    Placement,
    SlotBoundsError,
    check_bounds,
    check_manifest,
    lay_out,
    piece_at,
    plain_tensor,
)

logger = logging.getLogger(__name__)


@dataclass
class SlotHandle:
    """A slot that :meth:`TransferTensorBuffer.allocate` lent; it goes dead when it is freed.

    Attributes:
        request_id: Who holds the slot.
        offset: Bytes from the start of the pool.
        size: Bytes in the slot, at least what was asked for.
        tensor_views: The holder's own; the buffer does not use it.
        generation: Number of this loan, unique in the process.
        freed: Whether the slot was given back through this handle.
    """

    request_id: str
    offset: int
    size: int
    tensor_views: dict[str, torch.Tensor | list[torch.Tensor]] = field(default_factory=dict)
    generation: int = 0
    freed: bool = False

    def __repr__(self) -> str:
        state = " freed" if self.freed else ""
        return (
            f"<SlotHandle{state} {self.request_id!r} offset={self.offset} size={self.size} "
            f"generation={self.generation}>"
        )


class TransferTensorBuffer:
    """Lends slots of one contiguous pool and copies tensors into and out of them.

    Args:
        pool_size: Bytes, positive; rounded up to a power of two.
        min_block_size: Smallest slot in bytes, a power of two.
        role_name: Shown in logs and statistics.
        device: ``"cpu"`` or a CUDA device.
        pin_memory: For a CPU pool.  None pins where an accelerator is available and uses plain
            memory elsewhere, with one log line per process.  True insists.

    Raises:
        ValueError: ``pool_size`` or ``min_block_size`` is out of range.
        UsageError: The device is neither CPU nor CUDA, or a CUDA pool is asked to be pinned.
        RegistrationError: The memory cannot be had, or cannot be pinned although
            ``pin_memory`` is True; the message gives the cause.
    """

    def __init__(
        self,
        pool_size: int,
        min_block_size: int = 1 << 20,
        role_name: str = "unknown",
        device: torch.device | str = "cpu",
        *,
        pin_memory: bool | None = None,
    ) -> None:
        self._role_name = role_name
        self._device = str(device)
        self._allocator = BuddyAllocator(pool_size, min_block_size)
        self._pool = allocate_pool(self._allocator.pool_size, device, pin_memory)
        self._pool_ptr = self._pool.data_ptr()
        self._copies = SlotCopies()

    def __repr__(self) -> str:
        return f"<TransferTensorBuffer {self._role_name!r} on {self._device}: {self._allocator!r}>"

    @property
    def pool_size(self) -> int:
        """Bytes of the pool, after rounding."""
        return self._allocator.pool_size

    @property
    def min_block_size(self) -> int:
        """Bytes of the smallest slot."""
        return self._allocator.min_block_size

    @property
    def free_bytes(self) -> int:
        """Bytes that are not lent, in however many pieces."""
        return self._allocator.free_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes in slots that are lent."""
        return self._allocator.allocated_bytes

    @property
    def num_allocations(self) -> int:
        """Slots that are lent."""
        return self._allocator.num_allocations

    @property
    def device(self) -> str:
        """The pool's device, as it was given."""
        return self._device

    @property
    def pool_data_ptr(self) -> int:
        """Address of the pool's first byte; valid while the buffer lives."""
        return self._pool_ptr

    def allocate(self, size: int, request_id: str) -> SlotHandle | None:
        """Lend a slot.

        Args:
            size: Bytes, positive.
            request_id: Who holds it; for messages and statistics.

        Returns:
            The handle, or None if there is no room; nothing was changed then.

        Raises:
            ValueError: ``size`` is not positive; nothing was changed.
        """
        block = self._allocator.allocate_block(size, request_id)
        if block is None:
            logger.debug("%r has no room for the %d bytes of %r", self, size, request_id)
            return None
        return SlotHandle(request_id, block.offset, block.size, generation=block.generation)

    def free(self, handle: SlotHandle) -> bool:
        """Take a slot back, once the copies that were queued for it have ended.

        Args:
            handle: What :meth:`allocate` returned.

        Returns:
            False, and nothing was changed, if the slot is not lent or no longer the handle's.
        """
        self._copies.wait(handle.generation)
        if not self._allocator.free(handle.offset, handle.generation):
            return False
        self._copies.forget(handle.generation)
        handle.freed = True
        return True

    def synchronize(self, handle: SlotHandle) -> None:
        """Wait until every copy that was queued for a slot with ``stream`` has ended.

        Args:
            handle: A live handle.

        Raises:
            StaleHandleError: The slot was given back.
        """
        self._copies.wait(self._live_block(handle).generation)

    def write_tensor(
        self,
        handle: SlotHandle,
        name: str,
        tensor: torch.Tensor,
        byte_offset: int = 0,
        stream: torch.cuda.Stream | None = None,
    ) -> int:
        """Copy a tensor into a slot, bit for bit and contiguous.

        Args:
            handle: A live handle.
            name: What messages call the tensor.
            tensor: Any strided tensor of a supported dtype, on any device.
            byte_offset: Where in the slot, in bytes.
            stream: Queue the copy of a CUDA tensor here; see the module's text on streams.

        Returns:
            Bytes that the tensor takes up in the slot.

        Raises:
            StaleHandleError: The slot was given back.
            SlotBoundsError: The tensor would leave the slot.  Also a ``ValueError``.
            UsageError: The tensor cannot be copied (its dtype or layout, no data), or
                ``stream`` is on a device that has no part in the copy.

        After any of these errors the slot is as it was.
        """
        block = self._live_block(handle)
        byte_offset = operator.index(byte_offset)
        plain = plain_tensor(name, tensor)
        nbytes = plain.numel() * plain.element_size()
        check_bounds(name, byte_offset, nbytes, block.size)
        self._copy_in(block, [Placement(byte_offset, plain)], stream)
        return nbytes

    def read_tensor(
        self,
        handle: SlotHandle,
        shape: Sequence[int],
        dtype: torch.dtype,
        byte_offset: int = 0,
        device: torch.device | str = "cpu",
        stream: torch.cuda.Stream | None = None,
    ) -> torch.Tensor:
        """Copy a tensor out of a slot into memory of its own.

        Args:
            handle: A live handle.
            shape: Of the tensor; ``[]`` for a scalar.
            dtype: A supported dtype.
            byte_offset: Where in the slot, in bytes; no alignment is needed.
            device: Where the result goes.
            stream: Queue a copy onto a CUDA device here; see the module's text on streams.

        Returns:
            A contiguous tensor that shares no memory with the pool.

        Raises:
            StaleHandleError: The slot was given back.
            SlotBoundsError: The tensor would leave the slot, or a dimension is negative or too
                large.  Also a ``ValueError``.
            UsageError: The dtype is not supported, or ``stream`` is on a device that has no
                part in the copy.

        After any of these errors nothing was read.
        """
        block = self._live_block(handle)
        try:
            piece = piece_at(operator.index(byte_offset), [operator.index(dim) for dim in shape], dtype)
        except UsageError:
            raise
        except ValueError as error:
            raise SlotBoundsError(f"read of {handle.request_id!r}: {error}") from error
        check_bounds(f"read of {handle.request_id!r}", piece.offset, piece.nbytes, block.size)
        return self._copy_out(block, [piece], device, stream)[0]

    def write_tensors_from_gpu(
        self,
        handle: SlotHandle,
        tensors: Mapping[str, Any],
        stream: torch.cuda.Stream | None = None,
    ) -> ManifestDict:
        """Copy tensors into a slot, all or nothing, one after the other.

        Args:
            handle: A live handle.
            tensors: Names to a tensor, None, or a list or tuple of tensors and None.  They may
                be on any device.
            stream: Queue copies of CUDA tensors here; see the module's text on streams.

        Returns:
            Where each tensor is, for :meth:`read_tensors_from_manifest`: names to lists of
            ``{"offset", "shape", "dtype"}``, in lists with ``"list_index"``.  A None has no
            entry.  What these keys cannot tell is told by two more in the first entry:
            ``"list_length"`` for a list that ends in None or is empty, and ``"container"``
            for a tuple.

        Raises:
            StaleHandleError: The slot was given back.
            SlotBoundsError: The tensors do not fit into the slot.  Also a ``ValueError``.
            UsageError: Something is not as ``tensors`` demands; the message names its path.

        After any of these errors the slot is as it was.
        """
        block = self._live_block(handle)
        placements, manifest = lay_out(tensors, block.size)
        self._copy_in(block, placements, stream)
        return manifest

    def read_tensors_from_manifest(
        self,
        handle: SlotHandle,
        manifest: Mapping[str, Sequence[Mapping[str, Any]]],
        device: torch.device | str = "cpu",
        stream: torch.cuda.Stream | None = None,
    ) -> dict[str, Any]:
        """Copy out what :meth:`write_tensors_from_gpu` put into a slot.

        Args:
            handle: A live handle of a slot that holds the same bytes, here or on a peer.
            manifest: What the writer returned, untrusted: all of it is checked first.
            device: Where the results go.
            stream: Queue copies onto a CUDA device here; see the module's text on streams.

        Returns:
            The structure that was written, without names whose value was None.  The tensors
            share no memory with the pool.

        Raises:
            StaleHandleError: The slot was given back.
            ManifestError: An entry is malformed, leaves the slot or has an unknown dtype, or
                the entries add up to more than the slot.  Also a ``ValueError``.
            UsageError: ``stream`` is on a device that has no part in the copies.

        After any of these errors nothing was read.
        """
        block = self._live_block(handle)
        entries = check_manifest(manifest, block.size)
        pieces = [piece for entry in entries.values() for piece in entry.pieces]
        copied = iter(self._copy_out(block, pieces, device, stream))
        return {name: entry.assemble([next(copied) for _ in entry.pieces]) for name, entry in entries.items()}

    def free_slots_count(self, typical_request_size: int) -> int:
        """Return how many slots of ``typical_request_size`` bytes can be lent now."""
        return self._allocator.count_free_slots(typical_request_size)

    def count_free_slots(self, slot_size: int) -> int:
        """Return how many slots of ``slot_size`` bytes can be lent now."""
        return self._allocator.count_free_slots(slot_size)

    def can_allocate(self, size: int) -> bool:
        """Return whether a slot of ``size`` bytes can be lent now."""
        return self._allocator.can_allocate(size)

    def get_block_info(self, offset: int) -> Block | None:
        """Return the lent or free block that starts at ``offset`` bytes, None if there is none."""
        return self._allocator.get_block_info(offset)

    def get_stats(self) -> dict[str, Any]:
        """Return :meth:`BuddyAllocator.get_stats` with the key ``"role"`` added."""
        return {**self._allocator.get_stats(), "role": self._role_name}

    def _live_block(self, handle: SlotHandle) -> Block:
        block = self._allocator.get_block_info(handle.offset)
        if block is None or not block.allocated or block.generation != handle.generation:
            raise StaleHandleError(f"{handle!r} is not lent by {self!r}: it was freed, or is another pool's")
        return block

    def _bytes_at(self, block: Block, offset: int, nbytes: int) -> torch.Tensor:
        return self._pool[block.offset + offset : block.offset + offset + nbytes]

    def _copy_in(
        self, block: Block, placements: Sequence[Placement], stream: torch.cuda.Stream | None
    ) -> None:
        copies = [
            Copy(
                self._bytes_at(block, offset, tensor.numel() * tensor.element_size()), tensor, outside=tensor
            )
            for offset, tensor in placements
            if tensor.numel()
        ]
        self._copies.run(block.generation, copies, stream)

    def _copy_out(
        self,
        block: Block,
        pieces: Sequence[Piece],
        device: torch.device | str,
        stream: torch.cuda.Stream | None,
    ) -> list[torch.Tensor]:
        # Bytes are copied and then viewed, so the offset in the pool needs no alignment, and
        # a result never shares memory with the pool, however its device is spelt.
        results = [torch.empty(piece.nbytes, dtype=torch.uint8, device=device) for piece in pieces]
        copies = [
            Copy(result, self._bytes_at(block, piece.offset, piece.nbytes), outside=result)
            for result, piece in zip(results, pieces, strict=True)
            if piece.nbytes
        ]
        self._copies.run(block.generation, copies, stream)
        return [
            result.view(piece.dtype).reshape(piece.shape)
            for result, piece in zip(results, pieces, strict=True)
        ]
