# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tensorferry import _transport, errors
from tensorferry.backends.ucx_native import PoolMemory, translate

CLASSES = [
    value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)
]


def drawn_tree() -> dict[str, str | None]:
    """Parents by class, as the docstring of the module draws them."""
    parents: dict[str, str | None] = {}
    above: list[str] = []
    for line in str(errors.__doc__).splitlines():
        found = re.match(r"    ([│├└─ ]*)(\w+Error)\b", line)
        if found:
            depth = len(found[1]) // 4
            parents[found[2]] = above[depth - 1] if depth else None
            above[depth:] = [found[2]]
    return parents


def test_the_tree_is_the_one_that_is_drawn():
    drawn = drawn_tree()
    assert set(drawn) == {cls.__name__ for cls in CLASSES}
    for name, parent in drawn.items():
        assert getattr(errors, name).__bases__[0].__name__ == (parent or "Exception")


@pytest.mark.parametrize(
    ("cls", "other"),
    [
        (errors.PoolTimeoutError, TimeoutError),
        (errors.TransferTimeoutError, TimeoutError),
        (errors.ManifestError, ValueError),
    ],
)
def test_some_are_builtin_errors_as_well(cls: type[Exception], other: type[Exception]):
    assert issubclass(cls, other)


def test_a_transfer_error_keeps_scope_and_status():
    error = errors.PeerLostError("gone", scope="peer", status=-25)
    assert (str(error), error.scope, error.status) == ("gone", "peer", -25)
    assert errors.TransferError("x").scope == "operation"


@pytest.mark.parametrize(
    "cls",
    [errors.CapacityError, errors.PoolExhaustedError, errors.PoolTimeoutError],
    ids=lambda cls: cls.__name__,
)
def test_a_capacity_error_keeps_its_figures(cls: type[errors.CapacityError]):
    error = cls("full", requested_nbytes=3, free_nbytes=2, pool_nbytes=8)
    assert (str(error), error.requested_nbytes, error.free_nbytes, error.pool_nbytes) == ("full", 3, 2, 8)
    assert cls("full").pool_nbytes == 0


def test_only_capacity_is_for_a_retry_loop():
    assert {cls.__name__ for cls in CLASSES if issubclass(cls, errors.CapacityError)} == {
        "CapacityError",
        "PoolExhaustedError",
        "PoolTimeoutError",
    }


def native(status: int) -> _transport.TransportError:
    error = _transport.TransportError("said so")
    error.status = status
    return error


@pytest.mark.parametrize(
    ("status", "cls", "scope"),
    [
        (_transport.LEASE_EXPIRED, errors.LeaseExpiredError, None),
        (_transport.LEASE_REVOKED, errors.LeaseRevokedError, None),
        (_transport.ACCESS_REFUSED, errors.RemoteAccessError, "operation"),
        (_transport.PROTOCOL_VIOLATION, errors.ProtocolError, None),
        (_transport.TIMED_OUT, errors.TransferTimeoutError, "operation"),
        (_transport.CANCELLED, errors.TransferCancelledError, "operation"),
        (_transport.CLOSED, errors.ClosedError, None),
        (_transport.PEER_GONE, errors.PeerLostError, "peer"),
        (_transport.LIBRARY_UNUSABLE, errors.BackendUnavailableError, None),
        (_transport.NO_MEMORY, errors.RegistrationError, None),
        (-2, errors.RegistrationError, None),
        (-3, errors.PeerLostError, "peer"),
        (-4, errors.RegistrationError, None),
        (-6, errors.ConnectError, "peer"),
        (-20, errors.TransferTimeoutError, "operation"),
        (-25, errors.PeerLostError, "peer"),
        (-80, errors.PeerLostError, "peer"),
        (-12, errors.TransferError, "operation"),
        (-9999, errors.TransferError, "operation"),
    ],
)
def test_native_errors_are_translated(status: int, cls: type[Exception], scope: str | None):
    error = translate(native(status), "reading")
    assert type(error) is cls
    assert "reading: said so" in str(error)
    assert str(status) in str(error)
    if scope is not None:
        assert isinstance(error, errors.TransferError)
        assert (error.scope, error.status) == (scope, status)


@pytest.mark.parametrize("status", [-3, -4])
def test_a_registration_that_fails_names_the_limit(monkeypatch: pytest.MonkeyPatch, status: int):
    """openucx/ucx#6264: "ibv_reg_mr failed: Cannot allocate memory", which UCX makes an I/O error."""

    def refuse(*args: object) -> None:
        raise native(status)

    monkeypatch.setattr(_transport, "MemoryRegion", SimpleNamespace(create=refuse))
    memory = PoolMemory(4096, torch.device("cpu"), shared=False)
    with pytest.raises(errors.RegistrationError, match=r"4096 bytes: said so .*RLIMIT_MEMLOCK.*ulimit -l"):
        memory.register(None)  # type: ignore[arg-type]


PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")


def documented_statuses() -> list[tuple[int, str]]:
    """Native status and class, by the rows of the second table of the page."""
    return [
        (int(status), cls)
        for row in re.finditer(r"^\| (-\d[^|]*)\| `(\w+)`", PAGE, re.MULTILINE)
        for status, cls in ((number, row[2]) for number in re.findall(r"-\d+", row[1]))
    ]


@pytest.mark.parametrize(("status", "cls"), documented_statuses())
def test_statuses_become_what_the_page_says(status: int, cls: str):
    assert type(translate(native(status), "reading")).__name__ == cls


def test_the_page_has_every_status_of_the_core():
    constants = {
        value
        for name, value in vars(_transport).items()
        if name.isupper() and isinstance(value, int) and value < 0
    }
    assert constants
    assert constants <= {status for status, _ in documented_statuses()}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_documented(cls: type[Exception]):
    assert cls.__doc__
    assert f"| `{cls.__name__}`" in PAGE
