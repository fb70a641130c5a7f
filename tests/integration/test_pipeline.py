# SPDX-License-Identifier: Apache-2.0
"""The demo as a user runs it: three processes of models, against one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "tensorferry.cli", "demo"]


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=110)


@pytest.mark.slow
@pytest.mark.parametrize("access", ["served", "rdma", "mapped"])
def test_the_pictures_are_those_of_one_process(access: str, tmp_path: Path):
    prompts = tmp_path / "prompts"
    prompts.write_text("a ferry\na lighthouse\n")
    ended = demo(
        "--access", access, "--tls", "tcp", "--steps", "20", "--prompts", str(prompts), "--out", str(tmp_path)
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "identical, bit for bit" in ended.stdout
    rows = [line for line in ended.stdout.splitlines() if "→" in line]
    assert len(rows) == 4
    assert all(access in row for row in rows), "another access was used"
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["picture-01.png", "picture-02.png"]


@pytest.mark.slow
def test_stages_by_hand(tmp_path: Path):
    common = ["--steps", "20", "--net-devices", "lo", "--out", str(tmp_path)]
    prompts = tmp_path / "prompts"
    prompts.write_text("by hand\n")
    stages: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        stages.append(subprocess.Popen([*COMMAND, *arguments, *common], stdout=subprocess.PIPE, text=True))
        return stages[-1]

    def port(stage: subprocess.Popen[str]) -> str:
        assert stage.stdout is not None
        word, number = stage.stdout.readline().split()
        assert word == "listening"
        return number

    try:
        decoder = start("decoder", "--listen", "127.0.0.1:0")
        denoiser = start("denoiser", "--listen", "127.0.0.1:0", "--connect", f"127.0.0.1:{port(decoder)}")
        start("encoder", "--connect", f"127.0.0.1:{port(denoiser)}", "--prompts", str(prompts))
        outputs = [stage.communicate(timeout=100)[0] for stage in stages]
    finally:
        for stage in stages:
            if stage.poll() is None:
                stage.kill()
                stage.communicate()
    assert [stage.returncode for stage in stages] == [0, 0, 0]
    assert "picture 1: by hand" in outputs[0]
    assert (tmp_path / "picture-01.png").is_file()


def test_a_stage_that_fails_fails_the_demo_and_says_why(tmp_path: Path):
    ended = demo("--tls", "no_such_transport", "--access", "served", "--steps", "20", "--out", str(tmp_path))
    assert ended.returncode == 1
    assert "no_such_transport" in ended.stderr
    assert "Traceback" not in ended.stderr
