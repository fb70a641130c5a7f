# SPDX-License-Identifier: Apache-2.0
"""The command line of the soak."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from typing import Any

from soaking.judge import SLACK, Judge
from soaking.supervisor import FAULTS, Plan, Supervisor


def main(description: str) -> int:
    """Run the soak and print its figures; return the exit status."""
    arguments, parser = parse(description)
    wanted = frozenset(filter(None, arguments.faults.split(",")))
    unwanted = frozenset(filter(None, arguments.without.split(",")))
    if unknown := (wanted | unwanted) - FAULTS.keys():
        parser.error(f"there are no faults named {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    os.environ["OMP_NUM_THREADS"] = "1"
    logs = arguments.logs or tempfile.mkdtemp(prefix="tensorferry-soak-")
    os.makedirs(logs, exist_ok=True)
    plan = Plan(
        seconds=arguments.seconds,
        producers=arguments.producers,
        consumers=arguments.consumers,
        backend=arguments.backend,
        threads=arguments.threads,
        pause=arguments.pause,
        seed=int(time.time()) if arguments.seed is None else arguments.seed,
        faults=wanted - unwanted,
        inject=arguments.inject,
        logs=logs,
    )
    started = time.monotonic()

    def log(line: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {line}", file=sys.stderr, flush=True)

    report = Supervisor(plan, Judge(arguments.slack), log).run()
    print(json.dumps(report, indent=2))
    summarize(report)
    if report["failures"]:
        print(f"what the processes printed is in {logs}", file=sys.stderr)
        return 1
    if not arguments.logs:
        shutil.rmtree(logs)
    return 0


def parse(description: str) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Return the arguments, and who can complain about them."""
    kinds = "\n".join(f"  {name:15} {text}" for name, text in FAULTS.items())
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"faults:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="of load (default 60)")
    add("--producers", type=int, default=4, help="processes that publish (default 4)")
    add("--consumers", type=int, default=3, help="processes that pull (default 3)")
    add("--threads", type=int, default=2, help="of each process (default 2)")
    add(
        "--pause",
        type=float,
        default=0.02,
        help="mean seconds between a thread's publications (default 0.02)",
    )
    add(
        "--slack", type=float, default=SLACK, help="seconds that a busy machine may add to a call (default 3)"
    )
    add("--backend", default="ucx", choices=["ucx", "nixl"], help="of all of them (default ucx)")
    add("--seed", type=int, default=None, help="of everything that is drawn (default: the time)")
    add("--faults", default=",".join(FAULTS), help="kinds, with commas; '' for none (default: all)")
    add("--without", default="", help="kinds of faults to leave out, with commas")
    add("--logs", default="", help="folder for what the processes print (default: kept on failure only)")
    injections = ["", "wrong", "leak", "late", "crash"]
    add("--inject", default="", choices=injections, help="one promise to break, to see that the soak fails")
    return parser.parse_args(), parser


def summarize(report: dict[str, Any]) -> None:
    """Print what matters on the standard error."""
    print(
        f"\n{report['payloads']} payloads, {report['bytes']} bytes in {report['seconds']} s "
        f"({report['gigabytes_per_second']} GB/s), {sum(report['faults'].values())} faults, "
        f"seed {report['seed']}\n"
        f"wrong payloads {report['wrong_payloads']}, leaked bytes {report['leaked_bytes']}, "
        f"late calls {report['late_calls']} (worst overrun {report['worst_overrun_seconds']} s), "
        f"crashes {report['crashes']}, known aborts by UCX {report['aborts_by_ucx']}, "
        f"unexplained errors {report['unexplained_errors']}",
        file=sys.stderr,
    )
