# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of hosts that this one is not."""

from __future__ import annotations

import argparse
import json

import pytest

from tensorferry.backends import ucx_library
from tensorferry.cli import doctor, doctor_host, doctor_trial
from tensorferry.cli.doctor_findings import Finding


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host without anything."""
    monkeypatch.setattr(doctor_host, "_SYS", tmp_path)
    monkeypatch.setattr(doctor_host, "_PROC", tmp_path)
    monkeypatch.setattr(doctor_host, "rdma_devices", list)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def levels(area):
    return [finding.level for finding in doctor_host.look() if finding.area == area]


@pytest.mark.parametrize(
    ("state", "gid", "level"),
    [("4: ACTIVE", "fe80::1", "ok"), ("1: DOWN", "fe80::1", "warn"), ("4: ACTIVE", "0000:0000", "warn")],
)
def test_rdma_devices(host, monkeypatch, state, gid, level):
    monkeypatch.setattr(doctor_host, "rdma_devices", lambda: ["mlx5_0"])
    port = host / "class/infiniband/mlx5_0/ports/1"
    write(host / "class/infiniband/mlx5_0/fw_ver", "28.39")
    for name, text in {"state": state, "rate": "400 Gb/sec", "link_layer": "Ethernet", "gids/0": gid}.items():
        write(port / name, text)
    (found,) = [finding for finding in doctor_host.look() if finding.area == "RDMA"]
    assert found.level == level
    assert "mlx5_0 port 1" in found.text
    assert "400 Gb/sec" in found.text
    assert bool(found.cure) == (level != "ok")


def test_a_library_without_verbs_where_there_are_devices(host, monkeypatch):
    monkeypatch.setattr(doctor_host, "rdma_devices", lambda: ["mlx5_0"])
    monkeypatch.setattr(doctor_host, "has_verbs", lambda path: False)
    assert "warn" in levels("UCX")


def test_a_memlock_limit_is_fatal_where_it_matters(host, monkeypatch):
    monkeypatch.setattr(doctor_host.resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    assert levels("memlock") == ["note"]
    monkeypatch.setattr(doctor_host, "rdma_devices", lambda: ["mlx5_0"])
    assert levels("memlock") == ["fail"]


def test_interfaces_that_lead_nowhere(host, monkeypatch):
    monkeypatch.setattr(doctor_host.socket, "if_nameindex", lambda: [(1, "lo"), (2, "docker0"), (3, "eth0")])
    monkeypatch.setattr(doctor_host, "_ipv4", lambda name: f"10.0.0.{len(name)}")
    assert levels("network") == ["warn", "note"]
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    assert levels("network") == ["ok"]
    write(host / "sys/net/ipv4/tcp_congestion_control", "bbr")
    assert levels("network") == ["ok", "note"]


def test_huge_pages_that_are_off(host):
    write(host / "kernel/mm/transparent_hugepage/enabled", "always madvise [never]")
    assert levels("huge pages") == ["warn"]


def test_no_library_at_all(host, monkeypatch):
    monkeypatch.setattr(ucx_library, "wheel_library", lambda: None)
    monkeypatch.setattr(ucx_library, "system_library", lambda: None)
    monkeypatch.delenv("TENSORFERRY_UCX", raising=False)
    assert levels("UCX") == ["fail"]


@pytest.mark.parametrize(("level", "status"), [("ok", 0), ("note", 0), ("warn", 0), ("fail", 1)])
def test_the_exit_status_is_that_of_the_worst(monkeypatch, capsys, level, status):
    finding = Finding("area", level, "what was found", "what to do")
    monkeypatch.setattr(doctor_host, "look", lambda: [finding])
    monkeypatch.setattr(doctor_trial, "try_out", lambda: [Finding("other", "ok", "fine")])
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    for arguments in (["doctor"], ["doctor", "--json"]):
        parsed = parser.parse_args(arguments)
        assert parsed.run(parsed) == status
        shown = capsys.readouterr().out
        assert "what was found" in shown
        assert "what to do" in shown
    assert json.loads(shown)[0] == finding._asdict()


@pytest.mark.parametrize("address", ["", "host", ":1", "host:port"])
def test_addresses_are_checked(address, capsys):
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["doctor", "--peer", address or "x"])
    assert parsed.run(parsed) == 1
    assert "HOST:PORT" in capsys.readouterr().out
