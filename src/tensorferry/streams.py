# SPDX-License-Identifier: Apache-2.0
"""The order of copies among CUDA streams, and when they are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from tensorferry.errors import UsageError


@contextmanager
def completed_copies(devices: Iterable[torch.device], stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run copies in the block; all of them are complete when it ends.

    The copies are queued behind what the current stream of each device, or ``stream`` on its
    device, was given before; at the end an event on each of these streams is waited for.  So
    they see what earlier kernels wrote, and afterwards both sides may be used from anywhere.
    The thread's current device and stream are as before.  Works in threads that have never
    used CUDA, and does nothing where no device is a CUDA device.

    Args:
        devices: The devices that take part.
        stream: Used instead of its device's current stream; None for none.

    Raises:
        UsageError: CUDA devices take part, but not the device of ``stream``; the block does not run.
    """
    places = {device for device in devices if device.type == "cuda"}
    if not places:
        yield
        return
    if stream is not None and stream.device not in places:
        names = ", ".join(sorted(map(str, places)))
        raise UsageError(f"stream is on {stream.device}, but the tensors and the pool are on {names}")
    with ExitStack() as stack:
        if stream is not None:
            stack.enter_context(_on_stream(stream))
        try:
            yield
        finally:
            # Also after an error: what was queued may still read or write.
            for event in [torch.cuda.current_stream(place).record_event() for place in places]:
                event.synchronize()


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
