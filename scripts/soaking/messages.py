# SPDX-License-Identifier: Apache-2.0
"""What the supervisor of the soak and its processes say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from soaking.judge import Call

MESSAGE_NBYTES = 1 << 20
"""No message is longer."""

LEASE = 6.0
"""Seconds of a usual lease; shorter ones are meant to run out."""


@dataclass(frozen=True)
class Settings:
    """How a process shall be.

    Attributes:
        name: Of the process, and of its producer or consumer.
        seed: Of everything that it draws.
        backend: Of its producer or consumer.
        access: Of its producer or consumer.
        pool_nbytes: Of its pool.
        threads: That publish or pull.
        pause: Mean seconds between two publications of a thread.
        faults: Kinds of faults; some it injects by itself.
        inject: A fault of the soak's own that must be noticed: ``"wrong"``, ``"leak"``, ``"late"``,
            ``"crash"``, or '' for none.
        log: File for what it prints.
    """

    name: str
    seed: str
    backend: str
    access: str
    pool_nbytes: int
    threads: int
    pause: float
    faults: frozenset[str]
    inject: str
    log: str


# What the supervisor sends.


@dataclass(frozen=True)
class Credit:
    """A publication has been dealt with."""


@dataclass(frozen=True)
class Revoke:
    """Take a publication back."""

    request: str


@dataclass(frozen=True)
class Reopen:
    """Close the producer or consumer under whatever is running, and open another."""


@dataclass(frozen=True)
class Snapshot:
    """Report resources."""

    stage: str


@dataclass(frozen=True)
class Quiet:
    """Begin nothing new."""


@dataclass(frozen=True)
class Finish:
    """Wait until everything is given back, report resources, close and exit."""


@dataclass(frozen=True)
class Assignment:
    """What a consumer shall do with a publication.

    Attributes:
        action: ``"pull"``, ``"borrow"``, ``"hold"``, ``"cancel"``, ``"reject"`` or ``"release"``.
        request: Name of the publication.
        manifest: As the producer's ``publish`` returned it.
        expected: Digests of the payload; they travel beside the manifest, not inside it.
        nbytes: Bytes of the payload.
        timeout: Seconds for the call.
        pause: Seconds after which to cancel, or for which to hold.
    """

    action: str
    request: str
    manifest: bytes
    expected: Mapping[str, str]
    nbytes: int
    timeout: float
    pause: float = 0.0


# What the processes send, beside each Call.


@dataclass(frozen=True)
class Ready:
    """The first producer or consumer is open."""


@dataclass(frozen=True)
class Published:
    """A publication, and the call that made it."""

    call: Call
    manifest: bytes
    expected: Mapping[str, str]
    nbytes: int
    lease: float
    consumers: int


@dataclass(frozen=True)
class Concluded:
    """An assignment has been dealt with; its calls have been reported."""

    request: str


@dataclass(frozen=True)
class Resources:
    """What a process holds, counted under /proc and by the library."""

    stage: str
    held: Mapping[str, int]
