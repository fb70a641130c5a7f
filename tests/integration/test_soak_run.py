# SPDX-License-Identifier: Apache-2.0
"""The soak in short, and that it notices what it is there to notice."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "scripts" / "soak"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def soak(tmp_path, *arguments):
    """Run it; return its exit status and its figures."""
    command = [sys.executable, str(SOAK), "--seed", "7", "--slack", "20", "--logs", str(tmp_path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def test_eight_seconds_under_every_fault_break_no_promise(tmp_path):
    status, figures, log = soak(tmp_path, "--seconds", "8")
    assert (status, figures["failures"]) == (0, {}), log
    assert figures["payloads"] > 20
    assert figures["faults"].keys() & {"kill_producer", "kill_consumer"}
    assert all(figures["publications_by_access"].values())


@pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None,
    reason='NIXL is not installed: pip install "tensorferry[nixl]"',
)
def test_eight_seconds_over_nixl(tmp_path):
    status, figures, log = soak(tmp_path, "--seconds", "8", "--backend", "nixl")
    assert (status, figures["failures"]) == (0, {}), log
    assert figures["payloads"] > 20
    assert figures["publications_by_access"].keys() == {"rdma"}


@pytest.mark.parametrize(
    ("inject", "failure"),
    [("wrong", "wrong_payloads"), ("leak", "leaked_bytes"), ("late", "late_calls"), ("crash", "crashes")],
)
def test_what_goes_wrong_is_found(tmp_path, inject, failure):
    arguments = ["--seconds", "3", "--faults", "", "--inject", inject, "--producers", "1", "--consumers", "1"]
    if inject == "late":
        arguments += ["--slack", "5"]  # how late it has to be
    status, figures, log = soak(tmp_path, *arguments)
    assert status == 1, log
    assert figures[failure] > 0
