# SPDX-License-Identifier: Apache-2.0
"""What machine 2 of ``scripts/rdma_vm.sh two`` runs while machine 1 runs the tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1] / "integration"))

import lane
import payloads  # noqa: F401 - so that each process that is forked has torch and it

if __name__ == "__main__":
    lane.serve_far_machine()
