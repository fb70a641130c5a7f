# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tensorferry.cli import demo, demo_processes, demo_report, demo_stages, main
from tensorferry.cli.demo_channel import ChannelLostError
from tensorferry.cli.demo_report import Hop, Report
from tensorferry.errors import ProtocolError, UsageError


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(gradients)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "19"],
        ["--steps", "1001"],
        ["--seed", "-1"],
        ["--seed", str(2**63)],
        ["--prompts", "/no/such/file"],
        ["--device", "cuda:99"],
        ["--device", "meta"],
        ["--device", "toaster"],
        ["--listen", "127.0.0.1:0"],
        ["encoder", "--connect", "127.0.0.1:1", "--listen", "127.0.0.1:0"],
        ["decoder", "--connect", "127.0.0.1:1", "--listen", "127.0.0.1:0"],
        ["encoder"],
        ["denoiser", "--listen", "127.0.0.1:0"],
        ["decoder", "--listen", "nowhere"],
    ],
)
def test_wrong_arguments_are_one_line_and_status_1(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    assert main(["demo", "--out", str(tmp_path), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tensorferry demo: ")
    assert error.count("\n") == 1


def test_prompts_are_lines_without_comments(tmp_path: Path):
    file = tmp_path / "prompts"
    file.write_text("# mine\n one \n\ntwo\n", encoding="utf-8")
    assert demo.read_prompts(file) == ["one", "two"]
    file.write_text("#\n")
    with pytest.raises(UsageError):
        demo.read_prompts(file)


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "diffusers" else object())
    assert main(["demo"]) == 1
    expected = 'tensorferry demo: diffusers missing: pip install "tensorferry[demo]"\n'
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (OSError("no"), 1), (UsageError("no"), 1), (ChannelLostError("no"), 3)],
)
def test_exit_statuses(error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch):
    def fail(arguments: Any) -> int:
        raise error

    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(demo, "_run_all", fail)
    assert main(["demo"]) == status
    assert signal.getsignal(signal.SIGTERM) is handler


# ---- comparison ---------------------------------------------------------------------------------


def test_one_changed_bit_makes_a_picture_different(tmp_path: Path):
    picture = torch.rand(8, 8, 3)
    demo_report.write_picture(picture, tmp_path / "picture")
    assert demo_report.same_picture(tmp_path / "picture", picture)
    changed = np.load(tmp_path / "picture.npy")
    changed.view(np.uint8)[0, 0, 0] ^= 1
    np.save(tmp_path / "picture.npy", changed)
    assert not demo_report.same_picture(tmp_path / "picture", picture)


def test_a_changed_png_is_different(tmp_path: Path):
    picture = torch.rand(8, 8, 3)
    demo_report.write_picture(1 - picture, tmp_path / "picture")
    np.save(tmp_path / "picture.npy", picture.numpy())
    assert not demo_report.same_picture(tmp_path / "picture", picture)


@pytest.mark.parametrize("suffix", [".npy", ".png"])
@pytest.mark.parametrize("content", [None, b"", b"nonsense"], ids=["missing", "empty", "nonsense"])
def test_a_picture_that_cannot_be_read_is_different(tmp_path: Path, suffix: str, content: bytes | None):
    picture = torch.rand(8, 8, 3)
    demo_report.write_picture(picture, tmp_path / "picture")
    file = (tmp_path / "picture").with_suffix(suffix)
    file.unlink() if content is None else file.write_bytes(content)
    assert not demo_report.same_picture(tmp_path / "picture", picture)


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Put pictures of random numbers in the place of the models'."""

    def picture(index: int) -> torch.Tensor:
        return torch.rand(8, 8, 3, generator=torch.Generator().manual_seed(index))

    def arrange(added: float) -> None:
        def run_pipeline(common: Any, prompts: Any, out: Path, on_event: Any) -> None:
            for index, prompt in enumerate(demo.read_prompts(prompts)):
                written = (picture(index) + (added if index == 1 else 0)).clamp(0, 1)
                demo_report.write_picture(written, demo_stages.picture_path(out, index))
                hop = Hop("encoder→denoiser", 1, 300, 1e-3, 1000, 1e-3, 0.0, "mapped")
                report = dataclasses.asdict(Report(index, prompt, index, 1.0, [hop]))
                on_event({"event": "step"})
                on_event({"event": "warning", "text": "a [warning]"})
                on_event({"event": "picture", "report": report})

        monkeypatch.setattr(demo_processes, "run_pipeline", run_pipeline)
        monkeypatch.setattr(
            demo_stages, "run_alone", lambda settings, prompts: map(picture, range(len(prompts)))
        )

    return arrange


def test_equal_pictures_are_status_0(pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pipeline(0.0)
    assert main(["demo", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "identical, bit for bit" in said
    assert said.count("a [warning]") == 1


def test_a_different_picture_is_named_and_status_1(
    pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pipeline(1e-6)
    assert main(["demo", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "different from those of one process: 2\n" in said
    assert "identical" not in said


# ---- reports ------------------------------------------------------------------------------------


def reports(count: int) -> list[Report]:
    hops = [
        Hop("encoder→denoiser", 7, 300, 0.0015, 479_390, 0.002, 0.0005, "served"),
        Hop("denoiser→decoder", 1, 300, 0.0005, 36_864, 0.001, 0.0, "mapped"),
    ]
    return [Report(index, "a ferry", index, 1.0, hops) for index in range(count)]


def test_a_report_survives_the_way():
    report = reports(1)[0]
    assert Report.from_plain(dataclasses.asdict(report)) == report


@pytest.mark.parametrize(
    "changed",
    [
        {"index": -1},
        {"index": "../../x"},
        {"index": True},
        {"seed": 1 << 63},
        {"prompt": b"x"},
        {"compute": None},
        {"hops": {}},
        {"hops": [1]},
        {"hops": [{"name": "x"}]},
        {"more": 1},
    ],
    ids=str,
)
def test_what_is_no_report_is_a_protocol_error(changed: dict[str, Any]):
    with pytest.raises(ProtocolError):
        Report.from_plain(dataclasses.asdict(reports(1)[0]) | changed)
    for plain in (None, [], {}, "x"):
        with pytest.raises(ProtocolError):
            Report.from_plain(plain)


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_fits(width: int):
    console = Console(file=io.StringIO(), width=width)
    demo_report.print_table(console, reversed(reports(12)))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert not any("…" in line for line in lines)
    first = next(line.split() for line in lines if line.split()[:1] == ["1"])
    served = ["encoder→denoiser", "served", "7", "479,390", "1.50", "2.00", "0.50", "0.240", "0.40%"]
    assert first == ["1", *served]
    whole = [line.split() for line in lines if line.split()[:1] == ["all"]]
    assert whole[1][1:] == [
        *("denoiser→decoder", "mapped", "12", "442,368", "6.00", "12.00", "-", "0.037", "0.15%"),
    ]
