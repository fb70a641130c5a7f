# SPDX-License-Identifier: Apache-2.0
"""The conformance suite as a package."""

from __future__ import annotations

import importlib.util
import sys

import pytest


def test_without_pytest_it_says_so(monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec("tensorferry.testing")
    assert found is not None
    assert found.loader is not None
    monkeypatch.setitem(sys.modules, "pytest", None)
    with pytest.raises(ImportError, match="pip install pytest"):
        found.loader.exec_module(importlib.util.module_from_spec(found))
