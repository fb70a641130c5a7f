# SPDX-License-Identifier: Apache-2.0
"""Makes ``python -m tensorferry.cli`` the same as ``tensorferry``."""

from __future__ import annotations

import sys

from tensorferry.cli import main

if __name__ == "__main__":
    sys.exit(main())
