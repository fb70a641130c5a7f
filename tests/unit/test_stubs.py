# SPDX-License-Identifier: Apache-2.0
"""The committed stubs are those that the native modules give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_stubs_are_up_to_date(tmp_path: Path):
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run(
        ["bash", str(ROOT / "scripts" / "stubs.sh"), str(tmp_path)], env=environment, check=True, timeout=60
    )
    for name in ("_transport.pyi", "_tensors.pyi"):
        committed = ROOT / "src" / "tensorferry" / name
        assert (tmp_path / name).read_text() == committed.read_text(), (
            "run scripts/stubs.sh and commit the result"
        )
