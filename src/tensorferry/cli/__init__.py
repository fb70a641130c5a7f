# SPDX-License-Identifier: Apache-2.0
"""The ``tensorferry`` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tensorferry.cli import bench, demo, doctor, inspect


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    Args:
        argv: Arguments without the program's name; the process's own when None.
    """
    parser = argparse.ArgumentParser(prog="tensorferry", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (bench, demo, doctor, inspect):
        module.add_parser(commands)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))
