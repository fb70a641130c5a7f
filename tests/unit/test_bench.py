# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tensorferry.cli import bench, bench_rows, main
from tensorferry.cli.bench_harness import needed_nbytes
from tensorferry.cli.bench_link import Link, LinkLostError
from tensorferry.cli.bench_memory import Peak
from tensorferry.cli.bench_payloads import named
from tensorferry.cli.bench_peers.packed import Layout, Stage, finish, landing, room
from tensorferry.errors import ProtocolError, UsageError

SCRIPTS = Path(__file__).parents[2] / "scripts"
CPU = torch.device("cpu")


# ---- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["loopback", "--payload", "nothing"],
        ["loopback", "--sizes", "big"],
        ["loopback", "--peers", "carrier-pigeon"],
        ["loopback", "--rounds", "0"],
        ["client", "nowhere"],
        ["server", "--listen", "192.0.2.1"],
        ["report", "/no/such/file"],
    ],
)
def test_wrong_arguments_are_one_line_and_status_1(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tensorferry.cli.bench_agent.one_thread_each", lambda: None)
    assert main(["bench", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tensorferry bench: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"series": [{}]}'])
def test_a_file_that_is_no_report_is_named(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "report.json"
    file.write_text(content)
    assert main(["bench", "report", str(file)]) == 1
    assert f"{file} is not what --json writes" in capsys.readouterr().err


def test_without_matplotlib_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert main(["bench", "loopback", "--plots", "here"]) == 1
    assert 'pip install "tensorferry[bench]"' in capsys.readouterr().err


# ---- rows ---------------------------------------------------------------------------------------


def test_tensorferry_is_always_there_and_peers_where_they_are_asked_for():
    assert {row.family for row in bench_rows.chosen([], "all", limit=False)} == {"tensorferry"}
    assert {row.family for row in bench_rows.chosen(["zmq", "gloo"], "all", limit=False)} == {
        "tensorferry",
        "zmq",
        "gloo",
    }
    everything = {row.family for row in bench_rows.chosen(["all"], "all", limit=True)}
    assert everything == {"tensorferry", "limit", *bench_rows.FAMILIES}


@pytest.mark.parametrize("access", ["served", "rdma", "mapped"])
def test_one_access_mode_leaves_its_rows(access: str):
    rows = bench_rows.chosen([], access, limit=False)
    assert rows
    assert {row.options["access"] for row in rows} == {access}


def test_rows_have_names_of_their_own_and_survive_the_way_to_another_process():
    rows = bench_rows.chosen(["all"], "all", limit=True)
    assert len({row.name for row in rows}) == len(rows)
    assert all(bench_rows.Row(**dataclasses.asdict(row)) == row for row in rows)


def test_every_row_has_a_module_with_both_sides():
    for row in bench_rows.chosen(["all"], "all", limit=True):
        module = bench_rows.module(row)
        assert isinstance(module.REQUIREMENT, str)
        assert callable(module.load)
        assert (
            hasattr(module, "Alone")
            if row.alone
            else hasattr(module, "Sender") and hasattr(module, "Receiver")
        )


def test_rows_that_keep_more_need_more_memory():
    payload = named("one", 1 << 20)
    rows = {row.batch: row for row in bench_rows.chosen([], "served", limit=False)}
    assert needed_nbytes(rows[1], payload) == 8 << 20
    assert needed_nbytes(rows[4], payload) == 17 << 20


# ---- packing for peers that know bytes only ------------------------------------------------------


@pytest.mark.parametrize("name", ["flux", "many"])
def test_what_is_packed_comes_out_again(name: str):
    payload = named(name)
    tensors = payload.build(1, CPU)
    layout = Layout.of(tensors)
    assert layout.nbytes <= room(payload)
    block = torch.zeros(room(payload), dtype=torch.uint8)
    layout.pack(block, tensors)
    parsed = Layout.parse(layout.header())
    assert parsed.nbytes == layout.nbytes
    found = finish(parsed, block[: parsed.nbytes], CPU)
    assert list(found) == list(tensors)
    for key, tensor in tensors.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(("name", "parts"), [("flux", 4), ("many", 1)])
def test_few_tensors_are_sent_one_by_one_and_many_as_one(name: str, parts: int):
    payload = named(name)
    tensors = payload.build(0, CPU)
    layout = Layout.of(tensors)
    sent = Stage(room(payload)).parts(layout, tensors)
    block, received = landing(layout)
    assert len(sent) == len(received) == parts
    for source, target in zip(sent, received, strict=True):
        target.copy_(source)
    found = finish(layout, block, CPU)
    assert all(
        torch.equal(found[key].view(torch.uint8), one.view(torch.uint8)) for key, one in tensors.items()
    )
    if parts > 1:
        assert sent[0].data_ptr() == tensors["prompt_embeds"].data_ptr()


# ---- links and memory ---------------------------------------------------------------------------


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with Link(one) as here, Link(other) as there:
        yield here, there


def test_messages_keep_their_bounds(links: tuple[Link, Link]):
    here, there = links
    for message in (b"", b"a", bytes(70_000), b"b"):
        here.send(message)
    assert [len(there.receive()) for _ in range(4)] == [0, 1, 70_000, 1]
    there.tell({"a": [1, None, "x"]})
    assert here.hear() == {"a": [1, None, "x"]}


def test_a_link_that_ends_or_lies_is_an_error(links: tuple[Link, Link]):
    here, there = links
    here.send(b"\x93\x01\x02\x03")
    with pytest.raises(ProtocolError):
        there.hear()
    here.close()
    with pytest.raises(LinkLostError):
        there.receive()


def test_an_announcement_of_gigabytes_is_refused(links: tuple[Link, Link]):
    here, there = links
    here._socket.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="4294967295"):
        there.receive()


def test_the_peak_is_what_was_used_at_a_time():
    peak = Peak()
    size = 64 << 20
    for _ in range(3):
        block = torch.full((size,), 1, dtype=torch.uint8)
        del block
    assert size * 0.9 < peak.nbytes() < size * 1.9


# ---- scripts ------------------------------------------------------------------------------------


def dry_run(*command: str, **environment: str) -> list[str]:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("UCX_")},
            **environment,
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_pair_script_says_what_it_would_do(tmp_path: Path):
    out = tmp_path / "out"
    lines = dry_run(
        str(SCRIPTS / "bench_pair.sh"),
        *("--dry-run", "--out", str(out), "a1", "b2", "--payload", "flux", "--tls", "rc,tcp"),
        UCX_NET_DEVICES="mlx5_0:1,eth 0",
    )
    assert all("export UCX_NET_DEVICES=mlx5_0:1\\,eth\\ 0; " in line for line in lines)
    assert lines[0].startswith("a1: ")
    assert lines[0].endswith("tensorferry bench server --listen a1:18950")
    assert lines[1].startswith("b2: ")
    assert "tensorferry bench client a1:18950 --payload flux --tls rc\\,tcp --json " in lines[1]
    tests = [line for line in lines if "ucx_perftest" in line]
    assert [line[:2] for line in tests] == ["a1", "b2"] * 6
    assert "ucx_perftest a1 -p 18951 -t ucp_get -s 1048576 " in tests[7]
    assert not out.exists()


def test_the_slurm_script_takes_the_nodes_of_its_job(tmp_path: Path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"\n')
    scontrol.chmod(0o755)
    lines = dry_run(
        str(SCRIPTS / "bench_pair.slurm"),
        *("--dry-run", "--peers", "all"),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        SLURM_JOB_NODELIST="n[1-2]",
        SLURM_SUBMIT_DIR=str(SCRIPTS.parent),
    )
    assert lines[0] == "n1: tensorferry bench server --listen n1:18950"
    assert "tensorferry bench client n1:18950 --peers all " in lines[1]


def test_the_pair_script_without_hosts_says_how_to_call_it():
    done = subprocess.run([str(SCRIPTS / "bench_pair.sh")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "HOST_A HOST_B" in done.stderr


def test_unknown_peers_are_named():
    with pytest.raises(UsageError, match="carrier-pigeon"):
        bench_rows.chosen(["carrier-pigeon"], "all", limit=False)
