# SPDX-License-Identifier: Apache-2.0
"""The doctor on a machine with RDMA devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import lane
import pytest

pytestmark = [*lane.needs_rdma, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_the_doctor_names_the_devices_and_pulls_over_them():
    """On its own device alone, so that UCX takes no other way."""
    device = lane.ends()[0].device
    environment = {**os.environ, "UCX_NET_DEVICES": f"{device}:1,lo"}
    command = [sys.executable, "-m", "tensorferry.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, env=environment)
    assert done.stdout, done.stderr
    findings = json.loads(done.stdout)
    assert done.returncode == 0, findings
    by_area = {finding["area"]: finding for finding in findings}
    assert any(finding["area"] == "RDMA" and device in finding["text"] for finding in findings)
    assert by_area["pull, rdma"]["level"] == "ok", findings
    assert f"rc_verbs/{device}:1" in by_area["pull, rdma"]["text"]
