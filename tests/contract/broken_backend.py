# SPDX-License-Identifier: Apache-2.0
"""The UCX backend with one fault, which ``backend_options`` name under ``FAULT``; ``none`` for no fault."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from tensorferry.backends import ucx
from tensorferry.backends.base import Releaser, SlotTicket, Span
from tensorferry.errors import LeaseError, ManifestError

_open: list[Any] = []


class Around:
    """Passes on what it does not spoil."""

    def __init__(self, whole: Any, fault: str) -> None:
        self.whole = whole
        self.fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


class Pool(Around):
    @property
    def peer(self) -> Any:
        return replace(self.whole.peer, backend="broken")

    def notices(self, timeout: float) -> list[Any]:
        found = self.whole.notices(timeout)
        return found * 2 if self.fault == "notices come twice" else found

    def admit(self, offset: int, nbytes: int, *, lease: float) -> Any:
        ticket = self.whole.admit(offset, nbytes, lease=lease)
        return replace(ticket, token=bytes(16)) if self.fault == "one token for all" else ticket

    def close(self, timeout: float) -> None:
        if self.fault == "a pool stays open":
            _open.append(self.whole)
        else:
            self.whole.close(timeout)


class Reader(Around):
    def connect(self, peer: Any, access: Any, deadline: Any) -> Any:
        if peer.backend != "broken" and self.fault != "any backend will do":
            raise ManifestError(f"for backend {peer.backend!r}, this consumer runs 'broken'")
        peer = replace(peer, backend="ucx")
        return Connection((yield from self.whole.connect(peer, access, deadline)), self.fault)

    def close(self, timeout: float) -> None:
        if self.fault == "descriptors leak":
            os.open("/dev/null", os.O_RDONLY)
        self.whole.close(timeout)


class Connection(Around):
    def read(self, ticket: SlotTicket, spans: Sequence[Span], releaser: Releaser | None = None) -> Any:
        if self.fault == "spans are not checked":
            spans = [span for span in spans if sum(span) <= ticket.nbytes]
        if self.fault == "released before it is read" and releaser is not None:
            self.whole.notify("release", ticket, *releaser)
            releaser = None
        if self.fault == "bytes land one further":
            spans = [span._replace(destination=span.destination + 1) for span in spans]
        return Read(self.whole.read(ticket, spans, releaser), self.fault)


class Read(Around):
    def wait(self, timeout: float) -> None:
        if self.fault == "generations are not checked":
            with suppress(LeaseError):
                self.whole.wait(timeout)
        else:
            self.whole.wait(timeout + 2.5 if self.fault == "deadlines are missed" else timeout)

    def watch(self, callback: Callable[[], None]) -> None:
        times = 2 if self.fault == "callbacks come twice" else 1
        self.whole.watch(lambda: [callback() for _ in range(times)])


def export_pool(
    nbytes: int, *, device: torch.device, access: str, options: Mapping[str, str], slots: int
) -> Any:
    rest = {name: value for name, value in options.items() if name != "FAULT"}
    pool = ucx.export_pool(nbytes, device=device, access=access, options=rest, slots=slots)
    return Pool(pool, options["FAULT"])


def open_reader(nbytes: int, *, device: torch.device, access: str, options: Mapping[str, str]) -> Any:
    rest = {name: value for name, value in options.items() if name != "FAULT"}
    return Reader(ucx.open_reader(nbytes, device=device, access=access, options=rest), options["FAULT"])
