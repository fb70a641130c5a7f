# SPDX-License-Identifier: Apache-2.0
"""A slot to compute into: tensors in the pool, published without a copy."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tensorferry import arguments, layout
from tensorferry.dtypes import str_to_dtype
from tensorferry.errors import StaleHandleError, UsageError
from tensorferry.ownership import Lifetime
from tensorferry.publications import Held, Publications
from tensorferry.publishing import Publisher, Terms
from tensorferry.slot_layout import piece_at

Spec = tuple[Sequence[int], torch.dtype]


class Reservation:
    """A slot that is kept for one publication; get it from :meth:`tensorferry.Producer.reserve`.

    ``empty`` gives tensors that live in the slot; compute into them, then ``publish``.  As a
    context manager it is cancelled at the end unless it was published.  Any method may be
    called from any thread.

    A slot that was neither published nor cancelled is given back, with a ``ResourceWarning``,
    once neither the reservation nor any of its tensors is left.
    """

    def __init__(
        self, publisher: Publisher, lifetime: Lifetime, held: Held, terms: Callable[..., Terms]
    ) -> None:
        self._publisher = publisher
        self._lifetime = lifetime
        self._held = held
        self._terms = terms
        self._memory = publisher.slot(held)
        self._lent = _Lent(publisher.publications, held, lifetime)
        self._lock = threading.Lock()
        self._state = "open"
        self._tensors: dict[str, torch.Tensor] = {}
        self._used = 0

    def __repr__(self) -> str:
        return f"<Reservation {self.request_id!r} {self._state}, {self._used} of {self.nbytes} bytes used>"

    def __enter__(self) -> Reservation:
        self._lifetime.check()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()

    @property
    def request_id(self) -> str:
        """Name of the publication to come."""
        return self._held.request_id

    @property
    def nbytes(self) -> int:
        """Bytes of the slot."""
        return self._held.loan.nbytes

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that were made so far, by name."""
        return dict(self._tensors)

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in the slot, with undefined contents.

        It may be written until it is published, and read until the publication has ended or the
        reservation is cancelled.  What is done to it afterwards may be done to another request's
        bytes.

        Args:
            name: Its name in the payload; each is used once.
            shape: Sizes of its dimensions.
            dtype: A dtype that can be sent, or the name of one.

        Raises:
            UsageError: The name is taken, there is no such shape or dtype, or the slot has no room
                left for it.
            StaleHandleError: The reservation was published or cancelled.
            ClosedError: The producer is closed.
            ForkedProcessError: The producer belongs to the parent process.
        """
        self._lifetime.check()
        with self._lock:
            self._check_open()
            if not isinstance(name, str) or name in self._tensors:
                raise UsageError(f"{name!r} is taken in the reservation of {self.request_id!r}, or is no str")
            nbytes = _nbytes(name, shape, dtype)
            offset = layout.align(self._used) if nbytes else self._used
            if offset + nbytes > self.nbytes:
                raise UsageError(
                    f"{name} needs {nbytes} bytes at {offset} of the {self.nbytes} bytes reserved for "
                    f"{self.request_id!r}; reserve more (tensors start at multiples of {layout.ALIGNMENT})"
                )
            tensor = self._lent.tensor(self._memory[offset : offset + nbytes])
            tensor = tensor.view(_as_dtype(dtype)).view(tuple(shape))
            self._tensors[name] = tensor
            self._used = offset + nbytes
            return tensor

    def publish(
        self,
        tensors: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        consumers: int = 1,
        lease: float | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> bytes:
        """Publish the tensors as they are, without a copy, and return the manifest.

        Waits for what was queued on the current CUDA stream, or on ``stream``.  The tensors must
        not be written any more.

        Args:
            tensors: The payload, if it shall have another structure than names to tensors: its
                tensors are those of :meth:`empty`, or contiguous parts of them.
            metadata: Plain values that travel in the manifest.
            consumers: How many consumers must release it.
            lease: Seconds for which it is kept; None takes the producer's.
            stream: CUDA stream to wait for, instead of the current one.

        Raises:
            UsageError: An argument is out of range, or a tensor is not in the slot, is not
                contiguous, or shares memory with another (the message names its path).
            StaleHandleError: It was published or cancelled before.
            ClosedError: The producer is closed.
            ForkedProcessError: The producer belongs to the parent process.

        After an error nothing is published, and the slot is still reserved.
        """
        self._lifetime.check()
        with self._lock:
            self._check_open()
            terms = self._terms(self.request_id, metadata, consumers, lease, stream)
            payload = self._tensors if tensors is None else tensors
            manifest = self._publisher.publish_held(terms, self._held, payload)
            self._state = "published"
            return manifest

    def cancel(self) -> None:
        """Give the slot back unless it was published; its tensors must not be used any more.

        May be called again.  In a forked child it does nothing.
        """
        if self._lifetime.forked:
            return
        with self._lock:
            if self._state == "open":
                self._state = "cancelled"
                self._publisher.publications.give_back(self._held)

    def _check_open(self) -> None:
        if self._state != "open":
            raise StaleHandleError(f"the reservation of {self.request_id!r} was {self._state} before")


class _Lent:
    """Lives as long as anything refers to the slot: the reservation, or memory of its tensors."""

    def __init__(self, publications: Publications, held: Held, lifetime: Lifetime) -> None:
        weakref.finalize(self, _forgotten, publications, held, lifetime).atexit = False

    def tensor(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a tensor over memory of the slot that keeps this object alive."""
        if not memory.numel():
            return torch.empty(0, dtype=torch.uint8, device=memory.device)
        lent = _Bytes(self, memory)
        if memory.device.type == "cpu":
            return torch.from_numpy(np.asarray(lent))
        return torch.as_tensor(lent, device=memory.device)


class _Bytes:
    """Memory as arrays of the CPU and of CUDA devices are told of it."""

    def __init__(self, lent: _Lent, memory: torch.Tensor) -> None:
        self._keep = lent, memory
        interface = "__array_interface__" if memory.device.type == "cpu" else "__cuda_array_interface__"
        data = (memory.data_ptr(), False)
        setattr(self, interface, {"shape": (len(memory),), "typestr": "|u1", "data": data, "version": 3})


def _forgotten(publications: Publications, held: Held, lifetime: Lifetime) -> None:
    if held.owned and not lifetime.forked and not lifetime.closed:
        publications.give_back_later(held)
        message = f"the reservation of {held.request_id!r} was neither published nor cancelled"
        warnings.warn(message, ResourceWarning, stacklevel=2)


def as_size(size: int | str | Mapping[str, Any]) -> tuple[int, dict[str, Spec]]:
    """Return the bytes that a slot needs, and the tensors that are described, if they are.

    Raises:
        UsageError: It is neither a number of bytes nor a mapping to shapes and dtypes.
    """
    if not isinstance(size, Mapping):
        return arguments.as_nbytes(size, "the size of a reservation"), {}
    specs = {name: _spec(name, value) for name, value in size.items()}
    return layout.lay_out(_nbytes(name, *spec) for name, spec in specs.items())[1], specs


def _spec(name: str, value: Any) -> Spec:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return tuple(value.shape), value.dtype
    if isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[0], (tuple, list)):
        return tuple(value[0]), value[1]
    raise UsageError(f"{name!r} is described by a shape and a dtype, not by {value!r:.80}")


def _as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    return str_to_dtype(dtype) if isinstance(dtype, str) else dtype


def _nbytes(name: str, shape: Sequence[int], dtype: torch.dtype) -> int:
    try:
        if not isinstance(_as_dtype(dtype), torch.dtype):
            raise TypeError(f"{dtype!r} is not a dtype")
        return piece_at(0, tuple(int(size) for size in shape), _as_dtype(dtype)).nbytes
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: {error}") from error
