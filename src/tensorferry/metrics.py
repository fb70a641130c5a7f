# SPDX-License-Identifier: Apache-2.0
"""What producers and consumers count.

Counters only rise; gauges, which say so, show the moment of the call.  All figures of one
object are taken together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProducerStatistics:
    """A snapshot of a :class:`tensorferry.Producer`.

    Attributes:
        pool_nbytes: Bytes of the pool.
        allocated_nbytes: Gauge: bytes of slots that are held, with what rounding added.
        requested_nbytes: Gauge: bytes of those slots that were asked for.
        live: Gauge: publications that consumers may pull now.
        draining: Gauge: publications that have ended, whose slots are still being read.
        waiters: Gauge: calls of ``publish`` that wait for room.
        publications: Publications that were made.
        bytes_published: Bytes of the tensors of those publications.
        publish_seconds: Seconds spent in making them, without waiting for room.
        failed_publishes: Calls of ``publish`` that raised an error, ``CapacityError`` included.
        released: Publications that ended because all their consumers released them.
        expired: Publications that ended because their lease ran out.
        revoked: Publications that ended by ``revoke``.
        rejected: Rejects that counted as a consumer's release.
        ignored_notices: Releases and rejects that changed nothing: of an ended publication,
            or repeated by one consumer.
        forged_notices: Releases and rejects that were not believed: a key is set, and their MAC
            is missing or wrong.  Not among ``ignored_notices``.
    """

    pool_nbytes: int
    allocated_nbytes: int
    requested_nbytes: int
    live: int
    draining: int
    waiters: int
    publications: int
    bytes_published: int
    publish_seconds: float
    failed_publishes: int
    released: int
    expired: int
    revoked: int
    rejected: int
    ignored_notices: int
    forged_notices: int


@dataclass(frozen=True, slots=True)
class PeerStatistics:
    """What a consumer had from one producer in one way.

    Attributes:
        uid: Of the producer, in hexadecimal digits.
        access: How it was read: ``"mapped"``, ``"rdma"`` or ``"served"``.
        transports: What carried the bytes last, each as ``transport/device``, for example
            ``"rc_mlx5/mlx5_0:1"`` or ``"tcp/eth0"``; ``"memory"`` for ``mapped``.
        pulls: Pulls and borrows that brought their tensors.
        bytes_pulled: Bytes of those tensors.
    """

    uid: str
    access: str
    transports: tuple[str, ...]
    pulls: int
    bytes_pulled: int


@dataclass(frozen=True, slots=True)
class ConsumerStatistics:
    """A snapshot of a :class:`tensorferry.Consumer`.

    Attributes:
        pool_nbytes: Bytes of the landing pool.
        allocated_nbytes: Gauge: bytes of the landing pool that are in use, quarantine included.
        quarantined_nbytes: Gauge: bytes of the landing pool that a failed or cancelled read
            may still write to.
        waiters: Gauge: calls that wait for room in the landing pool.
        pulls: Pulls and borrows that brought their tensors.
        failed_pulls: Pulls and borrows that raised an error.
        pulls_by_access: The pulls that succeeded by access mode: ``"mapped"``, ``"rdma"``,
            ``"served"``.
        bytes_pulled: Bytes of the tensors of the pulls that succeeded.
        wire_seconds: Seconds from posting reads until their data was there and verified; for
            ``mapped``, where copying is the wire, the seconds of that copy.
        landing_seconds: Seconds of copying from the landing pool into the results.
        integrity_failures: Tensors whose checksum did not match.
        reconnects: Connections that were found broken and made anew within a pull.
        peers: The producers that were pulled from, the latest last; only the last 1024 are kept.
    """

    pool_nbytes: int
    allocated_nbytes: int
    quarantined_nbytes: int
    waiters: int
    pulls: int
    failed_pulls: int
    pulls_by_access: Mapping[str, int]
    bytes_pulled: int
    wire_seconds: float
    landing_seconds: float
    integrity_failures: int
    reconnects: int
    peers: tuple[PeerStatistics, ...]
