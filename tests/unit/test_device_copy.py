# SPDX-License-Identifier: Apache-2.0
"""The order of stream operations, seen through stand-ins, as most machines have no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorferry import device_copy
from tensorferry.device_copy import Copy, SlotCopies
from tensorferry.errors import UsageError

CUDA0, CUDA1, CPU = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


class World:
    """Records what is asked of CUDA, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.active = "host"
        self.currents = {
            CUDA0: FakeStream(self, "current0", CUDA0),
            CUDA1: FakeStream(self, "current1", CUDA1),
        }


class FakeEvent:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.ended = world, name, False

    def synchronize(self) -> None:
        self.world.log.append(f"host waits for {self.name}")
        self.ended = True

    def query(self) -> bool:
        return self.ended


class FakeStream:
    def __init__(self, world: World, name: str, device: torch.device) -> None:
        self.world, self.name, self.device, self.events = world, name, device, 0

    def wait_stream(self, other: FakeStream) -> None:
        self.world.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.world.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> FakeEvent:
        self.events += 1
        return FakeEvent(self.world, f"{self.name}#{self.events}")

    def synchronize(self) -> None:
        self.world.log.append(f"host waits for {self.name}")


class FakeTensor:
    def __init__(self, world: World, name: str, device: torch.device, error: Exception | None = None) -> None:
        self.world, self.name, self.device, self.error = world, name, device, error

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def copy_(self, source: FakeTensor, non_blocking: bool = False) -> None:
        if source.error is not None:
            raise source.error
        queued = " queued" if non_blocking else ""
        self.world.log.append(f"{source.name} -> {self.name}{queued} on {self.world.active}")

    def record_stream(self, stream: FakeStream) -> None:
        self.world.log.append(f"{self.name} recorded on {stream.name}")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()

    @contextlib.contextmanager
    def activate(stream: FakeStream) -> Iterator[None]:
        world.active = stream.name
        yield
        world.active = "host"

    def as_bytes(tensor: FakeTensor) -> FakeTensor:
        world.log.append(f"{tensor.name} made contiguous on {world.active}")
        return tensor

    monkeypatch.setattr(torch.cuda, "current_stream", world.currents.__getitem__)
    monkeypatch.setattr(torch.cuda, "stream", activate)
    monkeypatch.setattr(device_copy, "as_bytes", as_bytes)
    return world


def write(world: World, pool: torch.device, source: torch.device, **kwargs: Any) -> Any:
    tensor = FakeTensor(world, "source", source, **kwargs)
    return Copy(FakeTensor(world, "slot", pool), tensor, tensor)  # type: ignore[arg-type]


def read(world: World, pool: torch.device, target: torch.device) -> Any:
    tensor = FakeTensor(world, "result", target)
    return Copy(tensor, FakeTensor(world, "slot", pool), tensor)  # type: ignore[arg-type]


def run(copies: SlotCopies, what: list[Any], stream: Any = None, generation: int = 1) -> None:
    copies.run(generation, what, stream)


def test_a_side_stream_is_ordered_on_both_sides(world: World) -> None:
    """In the reference copies of strided input were not ordered with the side stream."""
    side = FakeStream(world, "side", CUDA0)
    run(SlotCopies(), [write(world, CUDA0, CUDA0)], side)
    assert world.log == [
        "side waits for current0",
        "source made contiguous on side",
        "source -> slot queued on side",
        "slot recorded on side",
        "source recorded on side",
        "current0 waits for side#1",
    ]


def test_without_a_stream_the_copy_is_complete_on_return(world: World) -> None:
    for copy in (write(world, CPU, CUDA0), read(world, CPU, CUDA0), read(world, CUDA0, CUDA0)):
        world.log.clear()
        run(SlotCopies(), [copy])
        assert "queued on host" in world.log[-2]
        assert world.log[-1] == "host waits for current0"


def test_copies_into_the_caller_s_host_memory_block(world: World) -> None:
    """The reference returned host memory before the copy into it had ended."""
    run(SlotCopies(), [read(world, CUDA0, CPU)], FakeStream(world, "side", CUDA0))
    assert "slot -> result on side" in world.log  # not queued: complete on return


def test_copies_from_the_caller_s_host_memory_block(world: World) -> None:
    run(SlotCopies(), [write(world, CUDA0, CPU)], FakeStream(world, "side", CUDA0))
    assert "source -> slot on side" in world.log


def test_giving_a_slot_back_waits_for_queued_copies(world: World) -> None:
    """NVIDIA/TensorRT-LLM#15546: a host buffer was overwritten while a queued copy still read it."""
    copies, side = SlotCopies(), FakeStream(world, "side", CUDA0)
    run(copies, [read(world, CPU, CUDA0)], side)
    run(copies, [read(world, CPU, CUDA0)], side, generation=2)
    world.log.clear()
    copies.wait(1)
    assert world.log == ["host waits for side#1"]
    copies.forget(1)
    copies.wait(1)
    assert world.log == ["host waits for side#1"]


def test_a_host_copy_waits_for_what_is_queued_in_its_slot(world: World) -> None:
    copies = SlotCopies()
    run(copies, [write(world, CPU, CUDA0)], FakeStream(world, "side", CUDA0))
    world.log.clear()
    run(copies, [read(world, CPU, CPU)])
    assert world.log == ["host waits for side#1", "slot made contiguous on host", "slot -> result on host"]


def test_a_copy_on_another_stream_waits_for_what_is_queued_in_its_slot(world: World) -> None:
    copies = SlotCopies()
    run(copies, [write(world, CUDA0, CUDA0)], FakeStream(world, "first", CUDA0))
    world.log.clear()
    run(copies, [read(world, CUDA0, CUDA0)], FakeStream(world, "second", CUDA0))
    assert world.log.index("second waits for first#1") < world.log.index("slot -> result queued on second")
    world.log.clear()
    run(copies, [read(world, CUDA0, CUDA0)])
    assert world.log[:2] == ["current0 waits for first#1", "current0 waits for second#1"]


def test_events_that_have_ended_are_dropped(world: World) -> None:
    copies, side = SlotCopies(), FakeStream(world, "side", CUDA0)
    for _ in range(3):
        run(copies, [write(world, CUDA0, CUDA0)], side)
        copies.wait(1)
    assert len(copies._in_flight[1]) == 1


def test_a_copy_between_devices_is_ordered_on_both(world: World) -> None:
    run(SlotCopies(), [write(world, CUDA0, CUDA1)], FakeStream(world, "side", CUDA0))
    first = world.log.index("source made contiguous on side")
    assert set(world.log[:first]) == {"side waits for current0", "side waits for current1"}
    assert set(world.log[-2:]) == {"current0 waits for side#1", "current1 waits for side#1"}
    assert "source recorded on side" not in world.log


def test_a_stream_of_a_device_without_part_is_refused(world: World) -> None:
    """ai-dynamo/nixl#324, #857: the device has to be that of the address."""
    with pytest.raises(UsageError, match="the stream is on cuda:1, but the copies are on cuda:0"):
        run(SlotCopies(), [write(world, CUDA0, CUDA0)], FakeStream(world, "side", CUDA1))
    assert world.log == []


def test_a_stream_does_not_matter_to_host_copies(world: World) -> None:
    run(SlotCopies(), [write(world, CPU, CPU)], object())
    assert world.log == ["source made contiguous on host", "source -> slot on host"]


@pytest.mark.parametrize("with_stream", [True, False])
def test_a_copy_that_fails_leaves_earlier_ones_accounted_for(world: World, with_stream: bool) -> None:
    copies = SlotCopies()
    jobs = [write(world, CUDA0, CUDA0), write(world, CUDA0, CUDA0, error=RuntimeError("out of memory"))]
    with pytest.raises(RuntimeError, match="out of memory"):
        run(copies, jobs, FakeStream(world, "side", CUDA0) if with_stream else None)
    copies.wait(1)
    assert world.log[-1] == ("host waits for side#1" if with_stream else "host waits for current0")


@pytest.mark.parametrize("shape", [(), (3, 4), (0, 2)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128])
def test_as_bytes_is_flat_and_a_view_where_it_can_be(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    flat = device_copy.as_bytes(tensor)
    assert (flat.dtype, flat.dim(), flat.numel()) == (torch.uint8, 1, tensor.numel() * dtype.itemsize)
    assert flat.data_ptr() == tensor.data_ptr()
