# SPDX-License-Identifier: Apache-2.0
"""What users get from a backend: tests through a Producer and a Consumer."""

from __future__ import annotations

import os
import time
from abc import ABC
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

import tensorferry
from tensorferry import errors
from tensorferry.dtypes import SUPPORTED_DTYPES
from tensorferry.testing.host import BackendUnderTest, Host, pattern
from tensorferry.testing.reading import MIB, POOL_NBYTES, SOON, exit_status


class UserContract(ABC):
    """Tests of a backend through a Producer in another process and a Consumer in this one."""

    backend: ClassVar[BackendUnderTest]

    def test_payloads_come_back_bit_for_bit(self, host: Host) -> None:
        with consumer_of(self.backend) as consumer:
            for number, payload in enumerate(PAYLOADS):
                manifest = host.call(_publish, self.backend, number, {})
                assert differences(consumer.pull(manifest), payload()) == []
                assert host.call(_is_released, number)

    def test_the_end_of_a_lease(self, host: Host) -> None:
        with consumer_of(self.backend) as consumer:
            manifest = host.call(_publish, self.backend, 0, {"lease": 0.2})
            time.sleep(0.4)
            with pytest.raises(errors.LeaseExpiredError):
                consumer.pull(manifest)

    def test_a_forked_child_is_told(self, host: Host) -> None:
        assert host.call(_fork_and_use, self.backend) == ""


@contextmanager
def consumer_of(backend: BackendUnderTest) -> Iterator[tensorferry.Consumer]:
    """Return a Consumer in this process."""
    backend.install()
    access: Any = backend.access
    with tensorferry.Consumer(
        POOL_NBYTES,
        backend=backend.name,
        access=access,
        backend_options=backend.options,
        device=backend.device,
    ) as consumer:
        yield consumer


def _numbers() -> dict[str, Any]:
    bits = pattern(960, 5)
    return {
        str(dtype): bits.view(dtype) if dtype != torch.bool else (bits & 1).view(dtype)
        for dtype in SUPPORTED_DTYPES
        if 960 % dtype.itemsize == 0
    }


def _shapes() -> dict[str, Any]:
    base = pattern(4 * 6 * 8, 6).view(torch.float32).reshape(6, 8)
    return {
        "transposed": base.t(),
        "strided": [base[:, ::2], None, base[1:]],
        "zero_dim": (base[0, 0], {"empty": base[:0], "none": None, "nothing": []}),
        "big": pattern(1 * MIB + 3, 7),
    }


def _many() -> dict[str, Any]:
    return {f"tensor {number}": pattern(100 + number, number) for number in range(300)}


PAYLOADS = (_numbers, _shapes, _many)


def differences(one: Any, other: Any, path: str = "payload") -> list[str]:
    """Return where two payloads differ in structure or in any bit."""
    if isinstance(other, torch.Tensor):
        same = isinstance(one, torch.Tensor) and (one.dtype, one.shape) == (other.dtype, other.shape)
        return [] if same and torch.equal(_bits(one.cpu()), _bits(other)) else [path]
    if isinstance(other, dict):
        if not isinstance(one, dict) or list(one) != list(other):
            return [path]
        return [found for key in other for found in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(other, (list, tuple)):
        if type(one) is not type(other) or len(one) != len(other):
            return [path]
        pairs = enumerate(zip(one, other, strict=True))
        return [found for at, (a, b) in pairs for found in differences(a, b, f"{path}[{at}]")]
    return [] if one is None and other is None else [path]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)


# In the process of a Host:

_producers: list[tensorferry.Producer] = []


def _make_producer(backend: BackendUnderTest) -> tensorferry.Producer:
    backend.install()
    access: Any = backend.access
    return tensorferry.Producer(
        POOL_NBYTES,
        backend=backend.name,
        access=access,
        backend_options=backend.options,
        device=backend.device,
    )


def _publish(backend: BackendUnderTest, payload: int, options: dict[str, Any]) -> bytes:
    if not _producers:
        _producers.append(_make_producer(backend))
    return _producers[0].publish(str(payload), PAYLOADS[payload](), **options)


def _is_released(payload: int) -> bool:
    return _producers[0].wait_released(str(payload), SOON)


def _fork_and_use(backend: BackendUnderTest) -> str:
    """Return what is wrong, '' if nothing is."""
    with _make_producer(backend) as producer, consumer_of(backend) as consumer:
        manifest = producer.publish("a", {"x": torch.arange(3)})
        child = os.fork()
        if child == 0:
            told = 0
            for call in (lambda: producer.publish("b", {}), lambda: consumer.pull(manifest)):
                try:
                    call()
                except errors.ForkedProcessError:
                    told += 1
            producer.close()
            consumer.close()
            os._exit(told)
        if (status := exit_status(child)) != 2:
            return f"the child ended with {status}: not each call was refused"
        producer.publish("b", {})
    return ""
