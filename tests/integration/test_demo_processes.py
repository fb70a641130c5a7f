# SPDX-License-Identifier: Apache-2.0
"""``tensorferry demo`` as a user runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tensorferry.cli import demo_processes

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

START_SECONDS = 120
STEPS = "20"
PROMPTS = ["# two of them", "a ferry at dawn", "", "ein Leuchtturm im Öl [bold]"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tensorferry.cli", "demo", "--steps", STEPS, *arguments]


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("demo") / "prompts.txt"
    file.write_text("\n".join(PROMPTS), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def reference(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pictures of a whole demo with ``auto``."""
    out = tmp_path_factory.mktemp("reference")
    run(prompts, out, "mapped", "auto")
    return out


def run(prompts: Path, out: Path, expected: str, access: str, *more: str) -> str:
    """Run the whole demo, and see that it used the expected access and wrote two pictures."""
    arguments = ["--prompts", str(prompts), "--out", str(out), "--access", access, *more]
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "identical, bit for bit" in done.stdout
    rows = re.findall(r"^ *(\d+|all) (encoder→denoiser|denoiser→decoder) +(\w+) ", done.stdout, re.MULTILINE)
    hops = ["encoder→denoiser", "denoiser→decoder"]
    assert rows == [(name, hop, expected) for name in ("1", "2", "all") for hop in hops]
    assert sorted(path.name for path in out.glob("*.png")) == ["picture-01.png", "picture-02.png"]
    return done.stdout


def same_pictures(one: Path, other: Path) -> bool:
    names = [f"picture-0{number}{suffix}" for number in (1, 2) for suffix in (".npy", ".png")]
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_auto_on_one_host(reference: Path):
    first, second = (reference / f"picture-0{number}.png" for number in (1, 2))
    assert first.read_bytes() != second.read_bytes()
    assert first.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("access", "more"),
    [("served", []), ("rdma", ["--tls", "tcp"])],
    ids=["served", "rdma-tcp"],
)
def test_other_access_modes(access: str, more: list[str], prompts: Path, reference: Path, tmp_path: Path):
    said = run(prompts, tmp_path, access, access, *more)
    assert same_pictures(tmp_path, reference)
    if access == "rdma":
        assert "trusted networks only" in " ".join(said.split())


# ---- stages by hand -----------------------------------------------------------------------------


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start ``tensorferry demo`` with arguments; whatever is left at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            for child in [*children(process), process]:
                child.kill()


def port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline().removeprefix("listening on port "))


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=START_SECONDS)
    return process.returncode, out, error


def test_stages_by_hand(start: Start, prompts: Path, reference: Path, tmp_path: Path):
    access = ["--access", "served", "--net-devices", "lo"]
    decoder = start("decoder", "--listen", "[::1]:0", "--out", str(tmp_path), *access)
    denoiser = start("denoiser", "--listen", "[::1]:0", "--connect", f"[::1]:{port(decoder)}", *access)
    encoder = start("encoder", "--connect", f"[::1]:{port(denoiser)}", "--prompts", str(prompts), *access)
    ended = [end(process) for process in (encoder, denoiser, decoder)]
    assert [(status, error) for status, _, error in ended] == [(0, "")] * 3
    assert "encoded 1: a ferry at dawn\n" in ended[0][1]
    assert "picture 2: ein Leuchtturm im Öl [bold] (" in ended[2][1]
    assert same_pictures(tmp_path, reference)


def test_a_stage_whose_neighbour_dies_says_so(start: Start, tmp_path: Path):
    decoder = start("decoder", "--listen", "127.0.0.1:0", "--out", str(tmp_path))
    denoiser = start("denoiser", "--listen", "127.0.0.1:0", "--connect", f"127.0.0.1:{port(decoder)}")
    encoder = start("encoder", "--connect", f"127.0.0.1:{port(denoiser)}")
    assert encoder.stdout is not None
    assert encoder.stdout.readline().startswith("encoded 1")
    encoder.kill()
    for process in (denoiser, decoder):
        status, _, error = end(process)
        assert status == 3, error
        assert error.startswith("tensorferry demo: the stage before ")


# ---- failures of the whole ----------------------------------------------------------------------


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_for_stages(process: subprocess.Popen[str], name: str = "encoder") -> dict[str, psutil.Process]:
    """Wait until the stage of this name runs; return all that run, by name."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        found = {}
        for child in children(process):
            line = child.cmdline()
            if "demo" in line:
                found[line[line.index("demo") + 1]] = child
        if name in found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"the {name} did not start")


@pytest.mark.parametrize("victim", ["encoder", "denoiser", "decoder"])
def test_a_stage_that_dies_ends_the_demo(victim: str, start: Start, tmp_path: Path):
    demo = start("--out", str(tmp_path))
    stages = wait_for_stages(demo)
    stages[victim].kill()
    status, _, error = end(demo)
    assert status == 1
    assert error.startswith(f"tensorferry demo: the {victim} ended with status -9")
    assert psutil.wait_procs(stages.values(), timeout=0)[1] == []


def test_what_a_failed_stage_said_is_shown(start: Start, tmp_path: Path):
    demo = start("--out", str(tmp_path), "--tls", "no_such_transport", "--access", "served")
    status, _, error = end(demo)
    assert status == 1
    assert error.startswith("tensorferry demo: the ")
    assert "TLS=no_such_transport" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_signals_end_all_of_it(number: signal.Signals, status: int, start: Start, tmp_path: Path):
    demo = start("--out", str(tmp_path))
    stages = wait_for_stages(demo)
    os.kill(demo.pid, number)
    ended, _, error = end(demo)
    assert ended == status
    assert "Traceback" not in error
    assert psutil.wait_procs(stages.values(), timeout=0)[1] == []


def test_a_stage_that_does_not_react_is_killed(start: Start, tmp_path: Path):
    demo = start("--out", str(tmp_path))
    stages = wait_for_stages(demo)
    stages["denoiser"].suspend()
    demo.send_signal(signal.SIGINT)
    assert end(demo)[0] == 130
    assert psutil.wait_procs(stages.values(), timeout=0)[1] == []


def test_a_signal_while_a_stage_is_being_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """It came before anyone knew of the process, which then lived on without the demo."""
    made: list[psutil.Process] = []
    popen = subprocess.Popen

    def interrupted(*arguments: object, **options: object) -> subprocess.Popen[str]:
        process = popen(*arguments, **options)  # type: ignore[call-overload]
        made.append(psutil.Process(process.pid))
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(demo_processes.subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo_processes.run_pipeline(["--steps", STEPS], None, tmp_path, lambda event: None)
    assert len(made) == 1
    assert psutil.wait_procs(made, timeout=0)[1] == []
