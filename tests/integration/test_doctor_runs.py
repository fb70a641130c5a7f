# SPDX-License-Identifier: Apache-2.0
"""The doctor, as its user runs it: on this host as it is, and with something wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tensorferry.backends.ucx_library import system_library, wheel_library

COMMAND = [sys.executable, "-m", "tensorferry.cli", "doctor", "--json"]

pytestmark = pytest.mark.timeout(120)


def doctor(*prefix, **environment):
    """Run it; return its exit status and its findings."""
    done = subprocess.run(
        [*prefix, *COMMAND], capture_output=True, text=True, timeout=100, env={**os.environ, **environment}
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def about(findings, area):
    return [finding for finding in findings if finding["area"] == area]


def test_a_host_without_faults(library):
    status, findings = doctor(TENSORFERRY_UCX=library, UCX_NET_DEVICES="lo")
    assert status == 0, findings
    assert not [finding for finding in findings if finding["level"] == "fail"]
    for area in ("software", "UCX", "memlock", "huge pages", "network", "memory", "settings"):
        assert about(findings, area), area
    for access in ("mapped", "served"):
        (pull,) = about(findings, f"pull, {access}")
        assert pull["level"] == "ok"
        assert re.search(r"64 MiB at [\d.]+ GB/s", pull["text"])
    versions = [finding["text"] for finding in about(findings, "UCX")]
    assert any(re.search(r"version 1\.\d+", text) for text in versions)
    assert "UCX_NET_DEVICES=lo" in about(findings, "network")[0]["text"]


def test_a_transport_that_is_not_there():
    status, findings = doctor(UCX_TLS="no_such_transport")
    assert status == 1
    (trial,) = about(findings, "trial")
    assert trial["level"] == "fail"
    assert "TLS=no_such_transport" in trial["text"]
    assert trial["cure"]


def test_a_library_that_is_not_there(tmp_path):
    status, findings = doctor(TENSORFERRY_UCX=str(tmp_path / "libucp.so.0"))
    assert status == 1
    assert "TENSORFERRY_UCX names" in about(findings, "UCX")[0]["text"]


def test_a_small_memlock_limit():
    _, findings = doctor("prlimit", "--memlock=65536", UCX_NET_DEVICES="lo")
    (memlock,) = about(findings, "memlock")
    assert memlock["level"] in ("warn", "fail")
    assert "65536 bytes" in memlock["text"]
    assert "ulimit -l" in memlock["cure"]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file system of its own")
def test_a_small_dev_shm():
    mount = "mount -t tmpfs -o size=4m none /dev/shm && exec"
    prefix = ["unshare", "--mount", "sh", "-c", f'{mount} "$@"', "sh"]
    status, findings = doctor(*prefix, UCX_NET_DEVICES="lo")
    assert status == 0
    (shm,) = about(findings, "/dev/shm")
    assert (shm["level"], shm["text"].split(";")[0]) == ("warn", "4 MiB")
    assert "--shm-size" in shm["cure"]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make namespaces")
def test_an_empty_container():
    status, findings = doctor("unshare", "--net", "--pid", "--mount", "--fork", "--mount-proc")
    assert status == 1
    (network,) = about(findings, "network")
    assert network["level"] == "fail"
    assert "ip link set lo up" in network["cure"]


def test_two_ucx_libraries_at_once():
    system = system_library()
    if system is None or wheel_library() is None:
        pytest.skip("needs the wheel's UCX and the system's")
    status, findings = doctor(LD_PRELOAD=str(system), TENSORFERRY_UCX="wheel", UCX_NET_DEVICES="lo")
    assert status == 1  # the wheel's does not work with parts of the other
    (two,) = [finding for finding in about(findings, "UCX") if finding["level"] == "warn"]
    assert "another UCX" in two["text"]
    assert "TENSORFERRY_UCX=/" in two["cure"]
    cured = re.search(r"TENSORFERRY_UCX=(\S+)", two["cure"])[1]
    assert doctor(LD_PRELOAD=str(system), TENSORFERRY_UCX=cured, UCX_NET_DEVICES="lo")[0] == 0


def test_two_doctors_pull_from_each_other():
    environment = {**os.environ, "UCX_NET_DEVICES": "lo"}
    with subprocess.Popen(
        [*COMMAND, "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as listening:
        try:
            port = next(filter(None, (re.search(r"on port (\d+)", line) for line in listening.stderr)))[1]
            done = subprocess.run(
                [*COMMAND, "--peer", f"127.0.0.1:{port}"],
                capture_output=True,
                text=True,
                timeout=100,
                env=environment,
            )
            said, _ = listening.communicate(timeout=60)
        finally:
            listening.kill()
    assert (done.returncode, listening.returncode) == (0, 0), done.stderr
    (finding,) = json.loads(done.stdout)
    assert re.search(r"64 MiB at [\d.]+ GB/s by mapped over memory$", finding["text"])
    assert json.loads(said) == [finding]


def test_a_peer_that_is_not_there():
    done = subprocess.run([*COMMAND, "--peer", "127.0.0.1:1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ConnectionRefusedError" in json.loads(done.stdout)[0]["text"]
