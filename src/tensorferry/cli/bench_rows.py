# SPDX-License-Identifier: Apache-2.0
"""Which rows a benchmark has: peers with their settings, and limits."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorferry.errors import UsageError

OURS = "tensorferry"
LIMIT = "limit"

_IN_FLIGHT = 4


@dataclass(frozen=True)
class Row:
    """One way of doing the job.

    Attributes:
        name: In tables.
        family: What ``--peers`` calls it, ``"tensorferry"`` or ``"limit"``.
        module: Of ``tensorferry.cli.bench_peers``.
        options: For that module.
        batch: How many payloads are under way at a time; times are for each of them.
        alone: Whether it is done by one process.
        one_host: Whether both processes must be on one host.
        listens: Whether it listens on every interface, whatever it is told.
        one_tensor: Whether it makes sense for payloads of one tensor only.
        elsewhere: Whether its wire is all that counts: what surrounds it is not part of it.
    """

    name: str
    family: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1
    alone: bool = False
    one_host: bool = False
    listens: bool = False
    one_tensor: bool = False
    elsewhere: bool = False


_ROWS = (
    Row("tensorferry served", OURS, "ferry", {"access": "served"}),
    Row(
        f"tensorferry served, {_IN_FLIGHT} pulls in flight",
        OURS,
        "ferry",
        {"access": "served", "take": "start_pull"},
        batch=_IN_FLIGHT,
    ),
    Row("tensorferry rdma", OURS, "ferry", {"access": "rdma"}),
    Row("tensorferry mapped", OURS, "ferry", {"access": "mapped"}, one_host=True),
    Row("tensorferry mapped, reserve", OURS, "ferry", {"access": "mapped", "reserve": True}, one_host=True),
    Row("tensorferry mapped, borrow", OURS, "ferry", {"access": "mapped", "take": "borrow"}, one_host=True),
    Row(
        "tensorferry mapped, reserve and borrow",
        OURS,
        "ferry",
        {"access": "mapped", "reserve": True, "take": "borrow"},
        one_host=True,
    ),
    Row("copy in, copy out, no transport", "copy", "copies", alone=True),
    Row("UCXX", "ucxx", "ucxx", {"error_handling": True}),
    Row("UCXX, segments tuned by hand", "ucxx", "ucxx", {"error_handling": True, "tuned": True}),
    Row("UCXX, error handling off", "ucxx", "ucxx", {"error_handling": False}, one_host=True),
    Row("NIXL", "nixl", "nixl", {"progress_threads": True}),
    Row("NIXL, progress threads off", "nixl", "nixl", {"progress_threads": False}),
    Row(
        "NIXL, progress threads off, segments tuned by hand",
        "nixl",
        "nixl",
        {"progress_threads": False, "tuned": True},
    ),
    Row("Mooncake tcp", "mooncake", "mooncake", listens=True),
    Row("gloo", "gloo", "gloo"),
    Row("ZeroMQ", "zmq", "zeromq"),
    Row("plain sockets", "sockets", "sockets"),
    Row("Ray's object store", "ray", "ray", one_host=True, listens=True),
    Row("limit: numpy copy", LIMIT, "copies", {"limit": True}, alone=True, one_tensor=True, elsewhere=True),
    Row("limit: two sockets, writes of 1 MiB", LIMIT, "ceilings"),
    Row("limit: UCP get in C++", LIMIT, "raw_ucp", {"how": "get"}, batch=5, elsewhere=True),
    Row("limit: UCP active messages in C++", LIMIT, "raw_ucp", {"how": "am"}, batch=5, elsewhere=True),
)

FAMILIES = tuple(dict.fromkeys(row.family for row in _ROWS if row.family not in (OURS, LIMIT)))


def chosen(peers: Sequence[str], access: str, *, limit: bool) -> list[Row]:
    """Return the rows that a user asked for; tensorferry's are always among them.

    Args:
        peers: Families, or ``"all"``.
        access: One access mode of tensorferry's, or ``"all"``.
        limit: Whether limits are shown, too.

    Raises:
        UsageError: There is no such peer.
    """
    unknown = set(peers) - {"all", *FAMILIES}
    if unknown:
        raise UsageError(
            f"--peers takes all, or some of {', '.join(FAMILIES)}; not {', '.join(sorted(unknown))}"
        )
    wanted = {*(FAMILIES if "all" in peers else peers), *((LIMIT,) if limit else ())}
    return [
        row
        for row in _ROWS
        if row.family in wanted or (row.family == OURS and access in ("all", row.options["access"]))
    ]


def module(row: Row) -> Any:
    """Import the module of a row; its library comes with ``load()`` of that module."""
    return importlib.import_module(f"tensorferry.cli.bench_peers.{row.module}")
