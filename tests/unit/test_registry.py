# SPDX-License-Identifier: Apache-2.0
"""Backends by name."""

from __future__ import annotations

from importlib import metadata

import fake_backend
import pytest
import torch

from tensorferry.backends import registry
from tensorferry.errors import BackendUnavailableError, UsageError

ARGUMENTS = {"device": torch.device("cpu"), "access": "auto", "options": {}}


def test_a_backend_of_another_package(monkeypatch: pytest.MonkeyPatch):
    def entry_points(*, group: str, name: str) -> list[metadata.EntryPoint]:
        known = {("tensorferry.backends", "carrier-pigeon"): "fake_backend"}
        return [metadata.EntryPoint(name, known[group, name], group)] if (group, name) in known else []

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    reader = registry.open_reader("carrier-pigeon", 4096, **ARGUMENTS)
    assert isinstance(reader, fake_backend.FakeReader)
    with pytest.raises(UsageError, match=r"'owl'.*'ucx'"):
        registry.open_reader("owl", 4096, **ARGUMENTS)


def test_a_backend_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(registry.MODULES, "broken", "no_such_module_anywhere")
    with pytest.raises(BackendUnavailableError, match="no_such_module_anywhere"):
        registry.open_reader("broken", 4096, **ARGUMENTS)
