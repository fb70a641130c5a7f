# SPDX-License-Identifier: Apache-2.0
"""The study of growth at tiny sizes: that it runs, and writes what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

STUDY = Path(__file__).parents[2] / "scripts" / "study_growth.py"
TINY = ("--rounds", "1", "--largest", "64KiB", "--tensors", "10", "--consumers", "2", "--live", "50")
WAYS = {"served", "mapped", "mapped, borrow"}
POINTS = {
    "size": [4**power for power in range(9)],
    "tensors": [1, 3, 10],
    "consumers": [1, 2],
    "live": [1, 10, 49],
}


def test_all_curves_are_measured_printed_and_drawn(tmp_path):
    figures, picture = tmp_path / "growth.json", tmp_path / "growth.png"
    command = [sys.executable, str(STUDY), *TINY, "--json", str(figures), "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ)
    assert done.returncode == 0, done.stderr
    curves = json.loads(figures.read_text())["seconds"]
    assert curves.keys() == POINTS.keys()
    for name, points in POINTS.items():
        assert set(curves[name]) == (WAYS if name in ("size", "tensors") else WAYS - {"mapped, borrow"})
        for measured in curves[name].values():
            assert [int(point) for point in measured] == points
            for phases in measured.values():
                assert all(seconds > 0 for rounds in phases.values() for seconds in rounds)
                assert {name: len(rounds) for name, rounds in phases.items()} == {
                    "whole": 1,
                    "publish": 1,
                    "pull": 1,
                }
    for head in ("| one tensor |", "| tensors |", "| consumers |", "| live publications |"):
        assert head in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
