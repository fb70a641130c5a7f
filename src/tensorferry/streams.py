# SPDX-License-Identifier: Apache-2.0
"""The order of copies among CUDA streams, and when they are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from tensorferry.errors import UsageError

_NOTHING = nullcontext()


def completed_copies(
    devices: Iterable[torch.device],
    stream: torch.cuda.Stream | None,
    after: Sequence[torch.cuda.Event] = (),
) -> AbstractContextManager[None]:
    """Run copies in the block; all of them are complete when it ends.

    The copies are queued behind what the current stream of each device, or ``stream`` on its
    device, was given before; at the end an event on each of these streams is waited for.  So
    they see what earlier kernels wrote, and afterwards both sides may be used from anywhere.
    The thread's current device and stream are as before.  Works in threads that have never
    used CUDA, and does nothing where no device is a CUDA device.

    Args:
        devices: The devices that take part.
        stream: Used instead of its device's current stream; None for none.
        after: Events that come before the copies as well.

    Raises:
        UsageError: CUDA devices take part, but not the device of ``stream``; the block does not run.
    """
    places = {device for device in devices if device.type == "cuda"}
    if not places:
        return _NOTHING
    if stream is not None and stream.device not in places:
        names = ", ".join(sorted(map(str, places)))
        raise UsageError(f"stream is on {stream.device}, but the tensors and the pool are on {names}")
    return _completed(places, stream, after)


@contextmanager
def _completed(
    places: set[torch.device], stream: torch.cuda.Stream | None, after: Sequence[torch.cuda.Event]
) -> Iterator[None]:
    with ExitStack() as stack:
        if stream is not None:
            stack.enter_context(_on_stream(stream))
        for event in after:
            for place in places:
                torch.cuda.current_stream(place).wait_event(event)
        try:
            yield
        finally:
            # Also after an error: what was queued may still read or write.
            for event in [torch.cuda.current_stream(place).record_event() for place in places]:
                event.synchronize()


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return this thread's current stream of a CUDA device, for work that another thread does."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def queued_work(devices: Iterable[torch.device], stream: torch.cuda.Stream | None) -> list[torch.cuda.Event]:
    """Return events for what this thread has queued so far, for copies that another thread makes.

    Args:
        devices: Those that take part.
        stream: Used instead of its device's current stream; None for none.
    """
    places = {device for device in devices if device.type == "cuda"}
    streams = {place: torch.cuda.current_stream(place) for place in places}
    if stream is not None and stream.device in streams:
        streams[stream.device] = stream
    return [one.record_event() for one in streams.values()]


def finish_queued_work(device: torch.device) -> None:
    """Wait for what was queued on the current streams of ``device`` and of the current device.

    Does nothing where this process has not used CUDA.
    """
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized
    if is_initialized():
        with completed_copies({device, torch.device("cuda", torch.cuda.current_device())}, None):
            pass


@contextmanager
def _on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    # torch.cuda.stream() makes the stream's device the current one; copies of other devices
    # find their own streams, so only the stream is changed here.
    device = torch.cuda.current_device()
    with torch.cuda.stream(stream):
        torch.cuda.set_device(device)
        yield
