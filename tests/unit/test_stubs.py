# SPDX-License-Identifier: Apache-2.0
"""The committed stub is the one that the native module gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_stub_is_up_to_date(tmp_path: Path):
    fresh = tmp_path / "_transport.pyi"
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run(
        ["bash", str(ROOT / "scripts" / "stubs.sh"), str(fresh)], env=environment, check=True, timeout=60
    )
    committed = ROOT / "src" / "tensorferry" / "_transport.pyi"
    assert fresh.read_text() == committed.read_text(), "run scripts/stubs.sh and commit the result"
