# SPDX-License-Identifier: Apache-2.0
"""Thousands of altered manifests go through all that a consumer does before it connects.

``scripts/fuzz`` does the same for any length of time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import enormous
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import Judge
from mutations import Mutator

from manifests import KEY, make_manifest
from tensorferry import wire
from tensorferry.backends.ucx_offers import MappedKey, RdmaKey
from tensorferry.errors import ManifestError
from tensorferry.manifest import decode_manifest, encode_manifest

CORPUS = Path(__file__).parent / "corpus"
SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz"
INPUTS = 20_000
BUSY_CPU_SECONDS = 5.0  # where other tests compete for caches and cores; one second on a quiet machine


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    judge = Judge(BUSY_CPU_SECONDS)
    yield judge
    judge.close()


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.stem)
def test_corpus(judge, path):
    """The name says what becomes of it, and whether the consumer has a key."""
    verdict = judge.judge(path.read_bytes(), KEY if path.stem.endswith("-signed") else None)
    assert verdict.finding is None
    assert verdict.outcome.startswith("accepted") == path.stem.startswith("accepted-")


@pytest.mark.parametrize("name", enormous.CASES)
def test_manifests_as_large_as_may_be_take_little_time_and_memory(judge, name):
    body = enormous.CASES[name](1.0)
    assert len(body) < wire.MAX_MANIFEST_NBYTES
    assert judge.judge(wire.seal(body, None), None).finding is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mutations(judge):
    mutator = Mutator(1, [path.read_bytes() for path in sorted(CORPUS.iterdir())])
    outcomes: Counter[str] = Counter()
    for index in range(INPUTS):
        data, key, kind, damaged = mutator.draw(index)
        verdict = judge.judge(data, key, damaged=damaged)
        assert verdict.finding is None, f"input {index} ({kind}): {verdict.finding}"
        outcomes[verdict.outcome.partition(",")[0]] += 1
    # Were nearly all refused at the door, nothing behind it would have been tried.
    assert outcomes["accepted"] > INPUTS / 10
    assert outcomes["ManifestError"] > INPUTS / 10
    assert outcomes.keys() == {"accepted", "ManifestError", "AuthenticationError", "VersionError"}


def test_the_same_seed_gives_the_same_inputs():
    one, other = Mutator(7), Mutator(7)
    assert [one.draw(index) for index in range(200)] == [other.draw(index) for index in range(200)]
    assert Mutator(8).draw(0) != one.draw(0)


parts = st.none() | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=8) | st.text(max_size=3)


@given(st.binary(max_size=60) | st.lists(parts | st.lists(parts), max_size=7).map(msgpack.packb))
def test_any_rdma_key_is_taken_apart_or_refused(key):
    try:
        parsed = RdmaKey.parse(key)
    except ManifestError:
        return
    for address, nbytes, packed in parsed:
        assert 0 <= address < address + nbytes < 1 << 64
        assert packed


@given(
    st.integers(0, len(MappedKey(1, 2, 3, 4, 5).pack()) + 8).flatmap(
        lambda size: st.binary(min_size=size, max_size=size)
    )
)
def test_any_mapped_key_is_taken_apart_or_refused(key):
    try:
        pid, control, pool, _, nbytes = MappedKey.parse(key)
    except ManifestError:
        return
    assert (pid > 0, control >= 0, pool >= 0) == (True, True, True)
    assert 0 < nbytes < 1 << 62


# The judge sees what is wrong, and the script says so.


def test_the_judge_sees_what_a_consumer_must_not_do(judge, monkeypatch):
    good = encode_manifest(make_manifest())

    def finding(decoder) -> str:
        monkeypatch.setattr("judging.decode_manifest", decoder)
        return str(judge.judge(good, None).finding)

    def overlapping(data, key):
        manifest = decode_manifest(data, key)
        moved = tuple(spec._replace(offset=0) for spec in manifest.tensors)
        return dataclasses.replace(manifest, tensors=moved)

    def hungry(data, key):
        taken.append(bytearray(os.urandom(1 << 20)) * 300)
        return decode_manifest(data, key)

    def slow(data, key):
        end = time.process_time() + BUSY_CPU_SECONDS / 20
        while time.process_time() < end:
            pass
        return decode_manifest(data, key)

    def raises(error):
        def decoder(data, key):
            raise error

        return decoder

    taken: list[bytearray] = []
    assert finding(decode_manifest) == "None"
    assert "KeyError" in finding(raises(KeyError("x")))
    assert "unprintable" in finding(raises(ManifestError("a\nb")))
    assert "1001 characters" in finding(raises(ManifestError("x" * 1001)))
    assert finding(overlapping) == "tensors overlap"
    assert "MiB of memory" in finding(hungry)
    monkeypatch.setattr(judge, "_cpu_seconds", BUSY_CPU_SECONDS / 50)
    assert "CPU time" in finding(slow)


def test_a_damaged_manifest_must_not_be_accepted(judge):
    assert "damaged" in judge.judge(encode_manifest(make_manifest()), None, damaged=True).finding


# Loads the script, lets the test change it, and runs it: by its own process, since it forks.
WRAPPER = """
import os, signal, sys, time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader

sys.dont_write_bytecode = True
loader = SourceFileLoader("fuzz_script", {script!r})
script = module_from_spec(spec_from_loader("fuzz_script", loader))
loader.exec_module(script)
judge = script.Judge.judge
{change}
sys.exit(script.main())
"""


def run(folder: Path, *arguments: str, change: str = "") -> tuple[int, dict[str, Any], str]:
    code = WRAPPER.format(script=str(SCRIPT), change=change)
    command = [sys.executable, "-c", code, "--keep", str(folder), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout), ended.stderr


def test_the_script_reports_figures(tmp_path):
    status, figures, summary = run(tmp_path, "--count", "300", "--cpu-seconds", "60")
    assert status == 0
    assert figures["inputs"] == sum(figures["outcomes"].values()) == 300
    assert figures["findings"] == []
    assert "0 findings" in summary


def test_the_script_stops_in_time(tmp_path):
    _, figures, _ = run(tmp_path, "--seconds", "0.2", "--cpu-seconds", "60")
    assert 0 < figures["inputs"] < 100_000


def test_the_script_keeps_what_it_found(tmp_path):
    status, figures, summary = run(tmp_path, "--count", "3", "--cpu-seconds", "0")
    assert status == 1
    assert len(figures["findings"]) == 3
    kept = Path(figures["findings"][2]["kept"])
    assert kept.parent == tmp_path
    corpus = [path.read_bytes() for path in sorted(CORPUS.iterdir())]
    assert kept.read_bytes() == Mutator(1, corpus).draw(2).data
    assert figures["findings"][2]["kept"] in summary
    status, figures, _ = run(tmp_path, "--cpu-seconds", "60", str(kept))
    assert (status, figures["inputs"]) == (0, 2)


def test_the_script_survives_an_input_that_kills(tmp_path):
    change = """
counted = iter(range(100))
def judged(self, data, key, *, damaged):
    if next(counted) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return judge(self, data, key, damaged=damaged)
script.Judge.judge = judged
"""
    status, figures, _ = run(tmp_path, "--count", "20", "--cpu-seconds", "60", change=change)
    assert status == 1
    assert [(one["index"], one["finding"]) for one in figures["findings"]] == [
        (5, "the process ended with -9")
    ]
    assert Path(figures["findings"][0]["kept"]).is_file()


def test_the_script_ends_an_input_that_hangs(tmp_path):
    change = """
script.HANG_SECONDS = 2.0
script.Judge.judge = lambda *args, **kwargs: time.sleep(100)
"""
    status, figures, _ = run(tmp_path, "--count", "20", change=change)
    assert status == 1
    assert [(one["index"], one["finding"]) for one in figures["findings"]] == [(0, "it hung")]
