# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import io
import sys
from types import SimpleNamespace

import pytest
import torch

from manifests import KEY, make_manifest
from tensorferry.cli import inspect
from tensorferry.manifest import encode_manifest


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    inspect.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["inspect", *arguments])
    return parsed.run(parsed)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "manifest"
    path.write_bytes(encode_manifest(make_manifest(producer="encoder-0")))
    return str(path)


@pytest.mark.parametrize("columns", [80, 160])
def test_everything_is_shown_within_the_width(file, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(file) == 0
    shown = capsys.readouterr().out
    for part in ("req-42", "encoder-0", "60 s", "mapped", "served", "150", "1024, 1024", "pooled[2][0]"):
        assert part in shown
    for part in ("bfloat16", "[1, 77, 64]", "9856", "5 tensors", "9953 bytes (9.7 KiB)"):
        assert part in shown
    assert max(map(len, shown.splitlines())) <= columns


def test_long_names_are_folded_not_cut(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "manifest"
    path.write_bytes(encode_manifest(make_manifest({"n" * 150: torch.zeros(2, 3)}, metadata={})))
    assert run(str(path)) == 0
    shown = capsys.readouterr().out
    assert shown.count("n" * 20) >= 3
    assert "[2, 3]" in shown
    assert "Metadata" not in shown


def test_a_manifest_may_come_from_stdin(monkeypatch, capsys):
    stream = io.BytesIO(encode_manifest(make_manifest()))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
    assert run("-") == 0
    assert "req-42" in capsys.readouterr().out


def test_a_key_may_come_from_a_file(tmp_path, capsys):
    manifest, key = tmp_path / "manifest", tmp_path / "key"
    manifest.write_bytes(encode_manifest(make_manifest(), KEY))
    key.write_bytes(KEY + b"\n")
    assert run(str(manifest), "--key-file", str(key)) == 0
    assert "verified" in capsys.readouterr().out
    assert run(str(manifest)) == 1
    assert "no key" in capsys.readouterr().err


def test_many_tensors_are_cut_off_with_a_count(tmp_path, capsys):
    path = tmp_path / "manifest"
    path.write_bytes(encode_manifest(make_manifest({"x": [torch.zeros(1)] * 30})))
    assert run(str(path), "--limit", "10") == 0
    assert "and 20 more" in capsys.readouterr().out
    assert run(str(path), "--limit", "0") == 0
    assert "x[29]" in capsys.readouterr().out


def test_a_peer_cannot_steer_the_terminal_or_the_markup(tmp_path, capsys):
    path = tmp_path / "manifest"
    hostile = "[red]\x1b[2J\u202e"
    manifest = make_manifest({hostile: torch.zeros(1)}, request_id=hostile, metadata={hostile: hostile})
    path.write_bytes(encode_manifest(manifest))
    assert run(str(path)) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "[red]" in shown


@pytest.mark.parametrize("content", [b"", b"junk", b"\x89TFM\x02\x00\x00\x00", bytes((16 << 20) + 1)])
def test_unreadable_manifests_are_errors_without_traceback(tmp_path, content, capsys):
    path = tmp_path / "manifest"
    path.write_bytes(content)
    assert run(str(path)) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("tensorferry inspect: ")
    assert "Traceback" not in shown.err


def test_a_missing_file_is_an_error(tmp_path, capsys):
    assert run(str(tmp_path / "none")) == 1
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize("expires", [0.0, 1e300, 4e9])
def test_any_time_can_be_shown(tmp_path, expires):
    path = tmp_path / "manifest"
    path.write_bytes(encode_manifest(make_manifest(expires=expires)))
    assert run(str(path)) == 0
