# SPDX-License-Identifier: Apache-2.0
"""The memory of a pool, and copies between it and tensors, ordered over CUDA streams."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tensorferry.errors import RegistrationError, UsageError

logger = logging.getLogger(__name__)

# What torch raises when memory cannot be had: out of memory, no driver, a build without CUDA
# (AssertionError), a size that no tensor can have.
_ALLOCATION_ERRORS = (RuntimeError, AssertionError, OverflowError, TypeError)

_SAME_SIZE_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_said_unpinned = threading.Event()


class Copy(NamedTuple):
    """One copy; exactly one side is in the pool.

    ``outside`` is the caller's tensor, either ``source`` or ``destination``.
    """

    destination: torch.Tensor
    source: torch.Tensor
    outside: torch.Tensor


class SlotCopies:
    """Runs copies into and out of slots, and knows which slots still have some under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight: dict[int, list[torch.cuda.Event]] = {}

    def run(self, generation: int, copies: Sequence[Copy], stream: torch.cuda.Stream | None) -> None:
        """Copy each source's bytes to its destination.

        Args:
            generation: The slot that all ``copies`` belong to.
            copies: Destinations are contiguous uint8 tensors, as long as the source has bytes.
            stream: Where copies between CUDA memory and the pool are queued.  None: all
                copies are complete on return.  Those that touch the caller's host memory are
                complete on return anyway.

        Raises:
            UsageError: Some copies are on CUDA devices, but none on the device of ``stream``;
                nothing was copied.

        After another error (no memory for a contiguous copy) the destinations are undefined,
        and what was queued is remembered as under way.
        """
        on_host = [copy for copy in copies if not (copy.source.is_cuda or copy.destination.is_cuda)]
        on_cuda = [copy for copy in copies if copy.source.is_cuda or copy.destination.is_cuda]
        devices = {side.device for copy in on_cuda for side in copy[:2] if side.is_cuda}
        if stream is not None and devices and stream.device not in devices:
            names = ", ".join(sorted(map(str, devices)))
            raise UsageError(f"the stream is on {stream.device}, but the copies are on {names}")
        if on_host:
            self.wait(generation)
            for copy in on_host:
                copy.destination.copy_(as_bytes(copy.source))
        if not on_cuda:
            return
        earlier = self._events(generation)
        # One current stream for each device that takes part; a copy between two devices is
        # ordered by torch between the current streams of both.
        currents = [torch.cuda.current_stream(device) for device in devices]
        if stream is None:
            self._run_to_completion(on_cuda, currents, earlier)
        else:
            self._run_on_stream(generation, on_cuda, currents, earlier, stream)

    def wait(self, generation: int) -> None:
        """Block until no copy of a slot is under way."""
        for event in self._events(generation):
            event.synchronize()

    def forget(self, generation: int) -> None:
        """Drop what is remembered of a slot that was given back."""
        with self._lock:
            self._in_flight.pop(generation, None)

    def _run_to_completion(
        self, copies: list[Copy], currents: list[torch.cuda.Stream], earlier: list[torch.cuda.Event]
    ) -> None:
        for current in currents:
            for event in earlier:
                current.wait_event(event)
        try:
            for copy in copies:
                _enqueue(copy)
        finally:
            for current in currents:
                current.synchronize()

    def _run_on_stream(
        self,
        generation: int,
        copies: list[Copy],
        currents: list[torch.cuda.Stream],
        earlier: list[torch.cuda.Event],
        stream: torch.cuda.Stream,
    ) -> None:
        # Before: kernels that still write a source, or still use memory that a result got.
        for current in currents:
            stream.wait_stream(current)
        for event in earlier:
            stream.wait_event(event)
        try:
            with torch.cuda.stream(stream):
                for copy in copies:
                    _enqueue(copy)
                    for side in copy[:2]:
                        # The caller may drop a tensor that came from a third stream at once.
                        if side.device == stream.device:
                            side.record_stream(stream)
        finally:
            # After: kernels that overwrite a source in place, or use a result.
            done = stream.record_event()
            for current in currents:
                current.wait_event(done)
            with self._lock:
                events = self._in_flight.get(generation, [])
                self._in_flight[generation] = [*filter(_is_under_way, events), done]

    def _events(self, generation: int) -> list[torch.cuda.Event]:
        with self._lock:
            return list(self._in_flight.get(generation, ()))


def _is_under_way(event: Any) -> bool:
    return not event.query()


def _enqueue(copy: Copy) -> None:
    # Host memory of the caller must be free to use on return; pool memory is guarded by events.
    # The contiguous temporary is made on the stream that reads it, so it is recycled in order.
    copy.destination.copy_(as_bytes(copy.source), non_blocking=copy.outside.is_cuda)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a plain tensor in row-major order, as a flat uint8 tensor.

    Args:
        tensor: Strided, detached, neither conjugated nor negated lazily.

    Returns:
        A view where the tensor is contiguous, else of a copy made on the current stream.
    """
    # Integers of the same size copy every bit, and torch can copy them whatever the dtype.
    integer = _SAME_SIZE_INT.get(tensor.dtype.itemsize)
    if integer is not None:
        tensor = tensor.view(integer)
    flat = tensor.contiguous().reshape(-1)
    # A single element counts as contiguous whatever its stride, but is not seen as bytes then.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def allocate_pool(nbytes: int, device: torch.device | str, pin_memory: bool | None) -> torch.Tensor:
    """Allocate a flat uint8 tensor.

    Args:
        nbytes: Its size.
        device: CPU or CUDA.
        pin_memory: For CPU memory; None pins if an accelerator is available and it can be done.

    Raises:
        UsageError: The device is neither CPU nor CUDA, or CUDA memory is to be pinned.
        RegistrationError: The memory cannot be had, or not pinned as demanded.
    """
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"{device!r} is not a device: {_first_line(error)}") from error
    if place.type not in ("cpu", "cuda"):
        raise UsageError(f"a pool is on the CPU or on a CUDA device, not on {str(place)!r}")
    if place.type == "cuda" and pin_memory:
        raise UsageError(f"pin_memory is for CPU pools; memory on {str(place)!r} needs no pinning")
    if place.type == "cpu" and (pin_memory or (pin_memory is None and _accelerator_is_available())):
        try:
            return _empty(nbytes, place, pinned=True)
        except _ALLOCATION_ERRORS as error:
            if pin_memory:
                raise RegistrationError(
                    f"cannot pin {nbytes} bytes: {_first_line(error)}. "
                    f"Leave pin_memory out to use plain memory where pinning is impossible"
                ) from error
            _say_unpinned(nbytes, _first_line(error))
    elif place.type == "cpu" and pin_memory is None:
        _say_unpinned(nbytes, "torch sees no accelerator")
    try:
        return _empty(nbytes, place, pinned=False)
    except _ALLOCATION_ERRORS as error:
        raise RegistrationError(f"cannot allocate {nbytes} bytes on {place}: {_first_line(error)}") from error


def _empty(nbytes: int, device: torch.device, *, pinned: bool) -> torch.Tensor:
    # A pool made in inference mode could not be written outside of it.
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)


def _accelerator_is_available() -> bool:
    accelerator = getattr(torch, "accelerator", None)  # since torch 2.6
    return bool(torch.cuda.is_available() if accelerator is None else accelerator.is_available())


def _say_unpinned(nbytes: int, cause: str) -> None:
    if not _said_unpinned.is_set():
        _said_unpinned.set()
        logger.warning("a pool of %d bytes uses plain memory instead of pinned memory: %s", nbytes, cause)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
