# SPDX-License-Identifier: Apache-2.0
"""The consumers: processes that pull what they are told to, and see that it is right."""

from __future__ import annotations

import gc
import itertools
import mmap
import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

import tensorferry
from growing.payloads import Payload

LOOPBACK = {"TLS": "tcp", "NET_DEVICES": "lo"}

WAYS = {"served": ("served", "pull"), "mapped": ("mapped", "pull"), "mapped, borrow": ("mapped", "borrow")}
"""How a payload is had: access mode and method."""

_PATIENCE_SECONDS = 120.0
_LARGE_NBYTES = 64 << 20  # consumers keep the memory of smaller results themselves
_CONTEXT = multiprocessing.get_context("forkserver")


class Pulled(NamedTuple):
    """When a consumer had its tensors, in seconds of the clock that all processes share.

    Attributes:
        end: When it had them.
        seconds: How long that took, from the manifest on.
        unclocked: Seconds before that or before the slot was given back which were this study's own.
    """

    end: float
    seconds: float
    unclocked: float


class ConsumerError(Exception):
    """A consumer has failed; the message has its traceback."""


class ConsumerProcess:
    """A process with consumers, one for each access mode."""

    def __init__(self) -> None:
        self._channel, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def open(self, nbytes: int) -> None:
        """Make the consumers, with room for that many bytes."""
        self.start("open", nbytes)
        self.answer()

    def start(self, order: str, *arguments: Any) -> None:
        """Have one of the orders below carried out."""
        self._channel.send((order, arguments))

    def tell(self, message: bytes) -> None:
        """Send a manifest, say, to an order that waits for one."""
        self._channel.send_bytes(message)

    def answer(self) -> Any:
        """Return what it answers.

        Raises:
            ConsumerError: It has failed, has ended or says nothing.
        """
        try:
            if not self._channel.poll(_PATIENCE_SECONDS):
                raise ConsumerError(f"a consumer has said nothing for {_PATIENCE_SECONDS:g} seconds")
            failure, value = self._channel.recv()
        except EOFError:
            raise ConsumerError("a consumer has ended") from None
        if failure:
            raise ConsumerError(failure)
        return value

    def check(self) -> None:
        """Do nothing where no answer is due yet.

        Raises:
            ConsumerError: It has failed or has ended.
        """
        if self._channel.poll():
            self.answer()

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class _Ballast:
    """Memory that large results will be given, held until then.

    Many a virtual machine gives back to its host what has been free for a second or two, and the next touch
    of it costs ten times as much as else.  That is neither growth nor ours, so it is kept off the clock.
    """

    def __init__(self, nbytes: int) -> None:
        self._pages = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(self._pages, dtype=torch.uint8)
        self.fill(nbytes)

    def drop(self, nbytes: int) -> None:
        """Free as much as a result needs."""
        if nbytes >= _LARGE_NBYTES:
            self._pages.madvise(mmap.MADV_DONTNEED, 0, nbytes)

    def fill(self, nbytes: int) -> None:
        """Take back what the result has left."""
        if nbytes >= _LARGE_NBYTES:
            self._memory[: nbytes : mmap.PAGESIZE] = 1


class _Consumers:
    """What the process has; each method with a name that is not private is an order."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._open = ExitStack()
        self._consumers: dict[str, tensorferry.Consumer] = {}

    def open(self, nbytes: int) -> None:
        """Make the consumers."""
        self._ballast = _Ballast(nbytes)
        for access in ("served", "mapped"):
            consumer = tensorferry.Consumer(nbytes, access=access, backend_options=LOOPBACK)  # type: ignore[arg-type]
            self._consumers[access] = self._open.enter_context(consumer)

    def close(self) -> None:
        """Close those that there are."""
        self._open.close()

    def take(self, way: str, payload: Payload, first_variant: int) -> None:
        """Take payloads of two variants, which take turns, until an empty manifest comes."""
        access, method = WAYS[way]
        take: Callable[..., Pulled] = self._borrow if method == "borrow" else self._pull
        settle()
        for turn in itertools.cycle((0, 1)):
            manifest = self._channel.recv_bytes()
            if not manifest:
                return
            pulled = take(self._consumers[access], manifest, payload, first_variant + turn)
            self._channel.send((None, pulled))

    def take_all(self, access: str, payload: Payload, manifests: Sequence[tuple[bytes, int]]) -> None:
        """Wait for the start, pull everything, wait for the end, and compare everything then."""
        settle()
        self._channel.send((None, None))
        self._channel.recv_bytes()
        consumer = self._consumers[access]
        started = time.perf_counter()
        results = [consumer.pull(manifest) for manifest, _ in manifests]
        end = time.perf_counter()
        self._channel.recv_bytes()
        for result, (_, variant) in zip(results, manifests, strict=True):
            payload.check(result, variant)
        self._channel.send((None, Pulled(end, end - started, 0.0)))

    def _pull(
        self, consumer: tensorferry.Consumer, manifest: bytes, payload: Payload, variant: int
    ) -> Pulled:
        nbytes = payload.tensors * payload.nbytes
        came = time.perf_counter()
        self._ballast.drop(nbytes)
        started = time.perf_counter()
        tensors = consumer.pull(manifest)
        end = time.perf_counter()
        self._channel.recv_bytes()  # the producer has its slot back: the clock has stopped
        payload.check(tensors, variant)
        del tensors
        self._ballast.fill(nbytes)
        return Pulled(end, end - started, started - came)

    def _borrow(
        self, consumer: tensorferry.Consumer, manifest: bytes, payload: Payload, variant: int
    ) -> Pulled:
        started = time.perf_counter()
        with consumer.borrow(manifest) as tensors:
            end = time.perf_counter()
            payload.check(tensors, variant)
            checked = time.perf_counter() - end
        self._channel.recv_bytes()
        return Pulled(end, end - started, checked)


def settle() -> None:
    """Leave what there is out of later collections, as the benchmark does."""
    gc.collect()
    gc.freeze()


def _serve(channel: Connection) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    consumers = _Consumers(channel)
    try:
        while True:
            order, arguments = channel.recv()
            getattr(consumers, order)(*arguments)
            if order == "open":
                channel.send((None, None))
    except EOFError:
        pass
    except BaseException:
        channel.send((traceback.format_exc(), None))
    finally:
        consumers.close()
