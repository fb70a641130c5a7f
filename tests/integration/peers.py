# SPDX-License-Identifier: Apache-2.0
"""Processes that tests drive: each runs functions that it is told to, one after another.

A UCX library is loaded once for the life of a process, so there is a pair of processes for each
library.  Importing torch takes seconds, so they are forked from a server that has done that and
nothing else.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import logging
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from types import SimpleNamespace
from typing import Any

import pytest

from tensorferry.testing.host import stop

LOOPBACK = {"TLS": "tcp", "NET_DEVICES": "lo"}

NIXL = pytest.param(
    "nixl",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("nixl_cu12") is None,
        reason='NIXL is not installed: pip install "tensorferry[nixl]"',
    ),
)
"""In the place of an access mode: the other backend, whose only access is ``rdma``."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch"])


class RemoteError(Exception):
    """What a function in the other process raised, by the name of its class."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind = kind
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteError, (self.kind, self.message, "")


class Peer:
    """A process with a ``SimpleNamespace`` in which functions keep what shall live on."""

    context: BaseContext = _CONTEXT

    def __init__(self, **environment: str) -> None:
        self._connection, theirs = self.context.Pipe()
        self._process = self.context.Process(target=_serve, args=(theirs, environment), daemon=True)  # type: ignore[attr-defined]
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Have ``function(namespace, *args, **kwargs)`` run; its result is fetched by :meth:`result`."""
        self._connection.send((function, args, kwargs))

    def result(self, timeout: float = 60.0) -> Any:
        """Return what the function that was started returned, or raise what it raised."""
        assert self._connection.poll(timeout), f"process {self.pid} gave no answer in {timeout} seconds"
        error, value = self._connection.recv()
        if error is not None:
            raise error
        return value

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function there and return its result."""
        self.start(function, *args, **kwargs)
        return self.result()

    def signal(self, number: int) -> None:
        """Send a signal; after SIGSTOP no thread of the process runs any more."""
        if number == signal.SIGSTOP:
            stop(self.pid)
        else:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process without giving it a chance to say goodbye."""
        self._process.kill()
        self._process.join(10)


def close_both(two: tuple[Peer, Peer]) -> None:
    """Close the producer and the consumer of both."""
    for one in two:
        one.call(close, "producer")
        one.call(close, "consumer")


@contextmanager
def peer(**environment: str) -> Iterator[Peer]:
    """Run a process for the time of a block."""
    one = Peer(**environment)
    try:
        yield one
    finally:
        one.kill()


def _serve(connection: Connection, environment: dict[str, str]) -> None:
    import torch

    os.environ.update(environment)
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    namespace = SimpleNamespace()
    while (order := connection.recv()) is not None:
        function, args, kwargs = order
        try:
            answer = None, function(namespace, *args, **kwargs)
        except BaseException as error:
            answer = RemoteError(type(error).__name__, str(error), traceback.format_exc()), None
        connection.send(answer)


# Functions for peers.  Producers and consumers are kept by name.


def open_producer(namespace: SimpleNamespace, pool_size: int | str, **options: Any) -> None:
    from tensorferry import Producer

    close(namespace, "producer")
    namespace.producer = Producer(pool_size, **_side(options))


def open_consumer(namespace: SimpleNamespace, pool_size: int | str, **options: Any) -> None:
    from tensorferry import Consumer

    close(namespace, "consumer")
    namespace.consumer = Consumer(pool_size, **_side(options))


def _side(options: dict[str, Any]) -> dict[str, Any]:
    backend = {"backend": "nixl", "access": "rdma"} if options.get("access") == "nixl" else {}
    return {"backend_options": LOOPBACK, **options, **backend}


def close(namespace: SimpleNamespace, what: str) -> None:
    if hasattr(namespace, what):
        getattr(namespace, what).close()
        delattr(namespace, what)


def publish(
    namespace: SimpleNamespace, request_id: str, build: Callable[..., Any], *args: Any, **options: Any
) -> bytes:
    """Publish what ``build(*args)`` returns."""
    return namespace.producer.publish(request_id, build(*args), **options)


def pull_and_compare(
    namespace: SimpleNamespace, manifest: bytes, build: Callable[..., Any], *args: Any, **options: Any
) -> str:
    """Pull; return where the result differs from what ``build(*args)`` returns, '' if nowhere."""
    return difference(namespace.consumer.pull(manifest, **options), build(*args))


def borrow_and_compare(
    namespace: SimpleNamespace, manifest: bytes, build: Callable[..., Any], *args: Any
) -> str:
    with namespace.consumer.borrow(manifest) as tensors:
        return difference(tensors, build(*args))


def pull(namespace: SimpleNamespace, manifest: bytes, **options: Any) -> float:
    """Pull, drop the result, and return the seconds that it took."""
    started = time.monotonic()
    namespace.consumer.pull(manifest, **options)
    return time.monotonic() - started


def pull_and_hear(namespace: SimpleNamespace, manifest: bytes) -> list[str]:
    """Pull twice; return the warnings."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tensorferry").addHandler(handler)
    for _ in range(2):
        namespace.consumer.pull(manifest, release=False)
    logging.getLogger("tensorferry").removeHandler(handler)
    return said


def pull_until_it_fails(namespace: SimpleNamespace, manifest: bytes, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        namespace.consumer.pull(manifest, release=False)


def wait_released(namespace: SimpleNamespace, request_id: str, timeout: float) -> bool:
    return namespace.producer.wait_released(request_id, timeout)


def revoke(namespace: SimpleNamespace, request_id: str) -> bool:
    return namespace.producer.revoke(request_id)


def statistics(namespace: SimpleNamespace, what: str) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(getattr(namespace, what).statistics())


def difference(one: Any, other: Any, path: str = "payload") -> str:
    """Return where two payloads differ in structure, dtype, shape or any bit; '' if nowhere."""
    import torch

    if isinstance(other, torch.Tensor):
        if not isinstance(one, torch.Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{path}: {one!r:.80} instead of {other!r:.80}"
        if not one.is_contiguous() or one.requires_grad or one.is_conj() or one.is_neg():
            return f"{path} is not plain"
        return "" if torch.equal(bits(one), bits(other)) else f"{path}: other bits"
    if isinstance(other, dict):
        if not isinstance(one, dict) or list(one) != list(other):
            return f"{path}: other keys"
        return next(filter(None, (difference(one[k], other[k], f"{path}.{k}") for k in other)), "")
    if isinstance(other, (list, tuple)):
        if type(one) is not type(other) or len(one) != len(other):
            return f"{path}: another kind or length"
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (difference(a, b, f"{path}[{i}]") for i, (a, b) in pairs)), "")
    return "" if one is None and other is None else f"{path}: {one!r:.80} instead of {other!r:.80}"


def bits(tensor: Any) -> Any:
    """Return all bytes of a tensor's elements, in row-major order."""
    import torch

    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.numel() == 1:  # contiguous() leaves any stride of a single element as it is
        plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8)
