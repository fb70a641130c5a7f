# SPDX-License-Identifier: Apache-2.0
"""What a peer has to do: the same job for each.

The job: ordinary tensors at the producer, ordinary tensors of its own at the consumer, and the
producer told that it is done.  A module of a peer has ``REQUIREMENT``, what pip installs for it,
``load()``, which imports its library, and the classes ``Sender`` and ``Receiver``, whose instances
live in processes of their own.  What both must know beforehand they tell each other over a link
while they are made, which is outside of the clock.
"""

from __future__ import annotations

import ipaddress
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorferry.backends.ucx_native import DEFAULTS
from tensorferry.cli.bench_link import Link
from tensorferry.cli.bench_payloads import Payload

Tensors = dict[str, torch.Tensor]
Inspect = Callable[[Tensors], None]


@dataclass(frozen=True)
class Job:
    """What one pair of processes does.

    Attributes:
        options: Of the row, for its module.
        payload: What is sent.
        device: Where the tensors are, at both ends.
        batch: How many payloads are under way at a time.
        settings: UCX settings without ``UCX_``, for those that use UCX.
        one_host: Whether both processes are on one host.
    """

    options: Mapping[str, Any]
    payload: Payload
    device: torch.device
    batch: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    one_host: bool = True


@dataclass
class Received:
    """What came, and when; seconds of ``time.perf_counter``.

    Attributes:
        payloads: The results, none where they have been inspected already.
        arrived: When the consumer knew that there is something for it.
        wire: Seconds until the bytes were there.
        landing: Seconds from there to ordinary tensors.
        end: When the consumer had its tensors; 0.0 for when ``receive`` returned.
        unclocked: Seconds in which the results were inspected before the producer was told.
    """

    payloads: list[Tensors]
    arrived: float
    wire: float = 0.0
    landing: float = 0.0
    end: float = 0.0
    unclocked: float = 0.0


class Sender(ABC):
    """The producer's side.

    Args:
        job: What to do.
        link: To the receiver.
    """

    def __init__(self, job: Job, link: Link) -> None:
        self.job = job
        self.link = link

    def prepare(self, payloads: list[Tensors]) -> None:  # noqa: B027 (most have nothing to prepare)
        """Do what belongs to computing the tensors, outside of the clock."""

    @abstractmethod
    def send(self, payloads: list[Tensors]) -> float:
        """Send payloads, and return when the consumer has told that it has them.

        Returns:
            When they were published, or when sending began where nothing is published.
        """

    def close(self) -> None:  # noqa: B027
        """End what was made."""

    def about(self) -> dict[str, str]:
        """Return versions and settings, for the record."""
        return {}


class Receiver(ABC):
    """The consumer's side; its arguments are those of :class:`Sender`."""

    def __init__(self, job: Job, link: Link) -> None:
        self.job = job
        self.link = link

    @property
    def landing_nbytes(self) -> int:
        """Bytes of a pool to which the first payload gives its pages; others have them before."""
        return 0

    @abstractmethod
    def receive(self, inspect: Inspect) -> Received:
        """Wait for payloads, make tensors of them, and tell the producer.

        Args:
            inspect: Compares tensors that are lent for the time of the call only.
        """

    def close(self) -> None:  # noqa: B027
        """End what was made."""


def ucx_settings(job: Job) -> dict[str, str]:
    """Put a job's UCX settings into the environment of this process, and return them.

    A row that is tuned by hand gets what tensorferry sets by itself.
    """
    tuned = DEFAULTS if job.options.get("tuned") else {}
    settings = {**tuned, **job.settings}
    os.environ.update({f"UCX_{name}": value for name, value in settings.items()})
    return settings


def listening_address(host: str) -> str:
    """Return the address as it stands in an URL.

    Args:
        host: An IPv4 or IPv6 address.
    """
    return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
