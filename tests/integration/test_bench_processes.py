# SPDX-License-Identifier: Apache-2.0
"""The benchmark with real processes; figures are not looked at, since they depend on the machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tensorferry.cli import bench_harness, bench_results
from tensorferry.cli.bench_harness import Place, RowError
from tensorferry.cli.bench_payloads import named
from tensorferry.cli.bench_rows import Row

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "UCX_NET_DEVICES": "lo"}
SECONDS = 300.0
PAIR = Path(__file__).parents[2] / "scripts" / "bench_pair.sh"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tensorferry.cli", "bench", *arguments]


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, **ENVIRONMENT, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def check_series(one: dict[str, Any], rounds: int) -> None:
    """See that a row was run to its end, and that what must hold of any times does."""
    assert one["ended"] == "", one
    assert len(one["rounds"]) == rounds
    payload = named(one["payload"].partition(" ")[0], one["nbytes"])
    for each in one["rounds"]:
        assert len(each["whole"]) == payload.calls
        assert all(0 < seconds < SECONDS for seconds in each["whole"])
        assert all(seconds >= 0 for seconds in each["phases"].values())


@pytest.mark.slow
def test_loopback_measures_every_row_and_writes_everything(tmp_path: Path):
    pytest.importorskip("matplotlib", reason='pip install "tensorferry[bench]"')
    files = [tmp_path / "all.json", tmp_path / "all.md", tmp_path / "plots"]
    options = ["--json", str(files[0]), "--markdown", str(files[1]), "--plots", str(files[2])]
    said = run("loopback", "--payload", "flux", "--rounds", "2", "--peers", "sockets,copy", *options)
    plain = json.loads(files[0].read_text())
    names = [one["row"] for one in plain["series"]]
    assert len(names) == 9
    for one in plain["series"]:
        check_series(one, 2)
        assert one["row"] in said
        assert one["row"] in files[1].read_text()
    served = next(one for one in plain["series"] if one["row"] == "tensorferry served")
    assert served["about"]["UCX"]
    assert served["about"]["NET_DEVICES"] == "lo"
    assert plain["hosts"][0]["settings"]["huge pages of shared memory"]
    assert plain["settings"]["ucx"] == {"NET_DEVICES": "lo"}
    assert len(plain["load"]["flux"]) == 2
    assert {path.name for path in files[2].iterdir()} >= {"phases-flux.png", "latency-flux.svg"}
    assert (
        said.split("flux ...")[1].strip()
        == run("report", str(files[0])).strip() + f"\n4 plots in {files[2]}/"
    )


def test_peers_that_are_not_installed_are_named_with_their_command():
    said = run(
        *("loopback", "--payload", "one", "--sizes", "1", "--rounds", "1", "--access", "mapped"),
        *("--peers", "gloo,nixl", "--limit"),
        PYTHONPATH=f"{hidden_packages()}:{os.environ.get('PYTHONPATH', '')}",
        TENSORFERRY_RAW_UCP="/no/such/program",
        PATH="/usr/bin:/bin",
    )
    assert "NIXL: hidden; pip install nixl-cu12" in " ".join(said.split())
    assert "gloo" in said
    assert "limit: UCP get in C++: the program raw_ucp is not built: cmake " in " ".join(said.split())


def hidden_packages() -> str:
    """Return a folder in which the packages of peers cannot be imported."""
    folder = Path(__file__).parent / "hidden"
    return str(folder)


def raw_ucp() -> str:
    """Return the program that ``scripts/check`` has built, or that is named."""
    built = Path(__file__).parents[2] / "build" / "check-Release" / "bench" / "raw_ucp"
    program = os.environ.get("TENSORFERRY_RAW_UCP", str(built))
    if not os.access(program, os.X_OK):
        pytest.skip(f"{program} is not built; scripts/check does")
    return program


@pytest.mark.slow
@pytest.mark.parametrize("size", ["1", "100KiB", "3MiB"])
def test_the_limits_of_ucx_are_measured_by_a_program(size: str, tmp_path: Path):
    out = tmp_path / "all.json"
    options = ["--limit", "--access", "served", "--rounds", "1", "--json", str(out)]
    run("loopback", "--payload", "one", "--sizes", size, *options, TENSORFERRY_RAW_UCP=raw_ucp())
    limits = [one for one in json.loads(out.read_text())["series"] if one["family"] == "limit"]
    assert len(limits) == 4
    for one in limits:
        check_series(one, 1)
    assert limits[-1]["about"]["TCP_TX_SEG_SIZE"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_a_server_and_a_client_as_on_two_hosts(tmp_path: Path):
    out = tmp_path / "all.json"
    server = subprocess.Popen(
        command("server", "--listen", "127.0.0.1:0"),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    with server:
        assert server.stdout is not None
        port = server.stdout.readline().removeprefix("listening on port ").strip()
        said = run(
            *("client", f"127.0.0.1:{port}", "--payload", "one", "--sizes", "4KiB", "--rounds", "1"),
            *("--net-devices", "lo", "--peers", "gloo,sockets", "--json", str(out)),
        )
        assert server.wait(30) == 0
    plain = json.loads(out.read_text())
    assert [one["row"] for one in plain["series"]] == [
        "tensorferry served",
        "tensorferry served, 4 pulls in flight",
        "tensorferry rdma",
        "gloo",
        "plain sockets",
    ]
    for one in plain["series"]:
        check_series(one, 1)
        assert "manifest" not in one["rounds"][0]["phases"]
    assert "tensorferry mapped: needs both processes on one host" in said
    assert len(plain["hosts"]) == 2


@pytest.mark.slow
def test_the_pair_script_collects_one_report(tmp_path: Path):
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\n[ "$1 $2" = "-o BatchMode=yes" ] && exec bash -c "$4"\n')
    ssh.chmod(0o755)
    perftest = tmp_path / "perftest"
    perftest.write_text('#!/bin/sh\necho "measured $*"\n')
    perftest.chmod(0o755)
    out = tmp_path / "out"
    done = subprocess.run(
        [
            *(str(PAIR), "--out", str(out), "127.0.0.1", "127.0.0.1"),
            *("--payload", "one", "--sizes", "4KiB", "--rounds", "1", "--access", "served"),
        ],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={
            **os.environ,
            **ENVIRONMENT,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "TENSORFERRY": f"{sys.executable} -m tensorferry.cli",
            "UCX_PERFTEST": str(perftest),
            "BENCH_PORT": str(free_port()),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = (out / "report.md").read_text()
    assert "| tensorferry served |" in report
    assert report.count("measured 127.0.0.1 -p") == 6
    assert json.loads((out / "bench.json").read_text())["series"]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a network namespace")
def test_peers_that_listen_everywhere_are_reachable_by_nobody():
    code = (
        "import socket; from tensorferry.cli import bench_namespace; "
        "assert bench_namespace.enter() == ''; print(socket.if_nameindex()); "
        "listener = socket.create_server(('', 0)); "
        "socket.create_connection(('127.0.0.1', listener.getsockname()[1]), timeout=5)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.stdout) == ("", "[(1, 'lo')]\n")


# ---- peers that fail ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failing() -> Iterator[tuple[Place, psutil.Process]]:
    """An agent whose peers fail, and its process."""
    script = Path(__file__).parent / "failing_agent.py"
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT, "OPENBLAS_NUM_THREADS": "1"},
    )
    with process:
        assert process.stdout is not None
        address = "127.0.0.1", int(process.stdout.readline())
        with bench_harness.session(address):
            yield Place(address, address), psutil.Process(process.pid)
        assert process.wait(30) == 0


def no_children(process: psutil.Process) -> bool:
    end = time.monotonic() + 30
    while process.children(recursive=True) and time.monotonic() < end:
        time.sleep(0.05)
    return not process.children(recursive=True)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("Flips", "WrongBytesError: latents differs from what was sent, first in byte 5"),
        ("Aliases", "WrongBytesError: a result changed when the next one came"),
        ("Stale", "WrongBytesError: prompt_embeds differs from what was sent, first in byte 0"),
        ("Raises", "RuntimeError: no such luck"),
        ("Dies", "its process ended by signal SIGSEGV\na last word"),
    ],
)
def test_a_peer_that_fails_says_why(module: str, reason: str, failing: tuple[Place, psutil.Process]):
    place, process = failing
    with pytest.raises(RowError) as raised:
        bench_harness.run_cell(place, Row("it", "it", module), named("flux"))
    assert str(raised.value) == f"the consumer: {reason}" or str(raised.value).startswith(
        f"the consumer: {reason}: "
    )
    assert not raised.value.hung
    assert no_children(process)


def test_a_peer_that_hangs_ends_its_row_and_not_the_run(
    failing: tuple[Place, psutil.Process], monkeypatch: pytest.MonkeyPatch
):
    place, process = failing
    report = bench_results.Report("", "", 0.0, {}, [], {}, [])
    rows = [Row("hangs", "it", "Hangs"), Row("well", "it", "Well")]
    payloads = [named("one", 10), named("one", 11)]
    told: list[str] = []

    def on_cell(payload: str, row: str, number: int) -> None:
        told.append(row)
        monkeypatch.setattr(bench_harness, "PATIENCE_SECONDS", 2.0 if row == "hangs" else 60.0)

    bench_harness.run(place, rows, payloads, 2, on_cell, report)
    assert told == ["hangs", "well"] * 4
    first, well, second, also_well = report.series
    assert first.ended == "nothing from the consumer and the producer in 2 s"
    assert second.ended == f"not run: it hung before ({first.ended})"
    assert [len(one.rounds) for one in report.series] == [0, 2, 0, 2]
    assert (well.ended, also_well.ended) == ("", "")
    assert no_children(process)


def test_a_peer_that_hangs_in_its_end_keeps_its_figures(
    failing: tuple[Place, psutil.Process], monkeypatch: pytest.MonkeyPatch
):
    place, process = failing
    monkeypatch.setattr(bench_harness, "_LEAVE_SECONDS", 1.0)
    result, _ = bench_harness.run_cell(place, Row("it", "it", "HangsInTheEnd"), named("one", 10))
    assert len(result.whole) == named("one", 10).calls
    assert no_children(process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_nothing_is_left_of_a_run_that_was_ended(number: signal.Signals, tmp_path: Path):
    out = tmp_path / "all.json"
    process = subprocess.Popen(
        command("loopback", "--payload", "wan", "--rounds", "9", "--json", str(out)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    with process:
        found: list[psutil.Process] = []
        end = time.monotonic() + 60
        while len(found) < 3 and time.monotonic() < end:  # the agent, and both processes of a row
            assert process.poll() is None, process.communicate()
            found = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.05)
        os.kill(process.pid, number)
        _, error = process.communicate(timeout=60)
    assert psutil.wait_procs(found, timeout=30)[1] == []
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "Traceback" not in error
        assert json.loads(out.read_text())["series"]
