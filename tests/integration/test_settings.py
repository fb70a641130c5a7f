# SPDX-License-Identifier: Apache-2.0
"""Which UCX library and which UCX settings are in force, each in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tensorferry.backends.ucx_library import system_library

PULL = """
import logging, sys
logging.basicConfig(level="INFO", stream=sys.stdout)
import tensorferry, torch
options = eval(sys.argv[1])
with (
    tensorferry.Producer("1MiB", access="served", backend_options=options) as producer,
    tensorferry.Consumer("1MiB", backend_options=options) as consumer,
):
    assert consumer.pull(producer.publish("a", {"x": torch.arange(5)}))["x"].tolist() == [0, 1, 2, 3, 4]
print("pulled")
"""


def run(options: dict[str, str], **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "TENSORFERRY_"))
    }
    return subprocess.run(
        [sys.executable, "-c", PULL, repr(options)],
        env=clean | environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_defaults_work_on_the_loopback_device():
    ended = run({"NET_DEVICES": "lo"})
    assert ended.returncode == 0, ended.stderr
    assert "pulled" in ended.stdout


def test_the_environment_wins_over_our_defaults():
    ended = run({"NET_DEVICES": "lo"}, UCX_TLS="no_such_transport")
    assert ended.returncode == 1
    assert "BackendUnavailableError" in ended.stderr
    assert "TLS=no_such_transport" in ended.stderr


def test_options_win_over_the_environment():
    ended = run({"NET_DEVICES": "lo", "TLS": "tcp"}, UCX_TLS="no_such_transport", UCX_TCP_TX_SEG_SIZE="8k")
    assert ended.returncode == 0, ended.stderr


def test_a_value_that_ucx_does_not_take_is_a_usage_error():
    ended = run({"NET_DEVICES": "lo", "RNDV_THRESH": "many"})
    assert ended.returncode == 1
    assert "UsageError" in ended.stderr
    assert "RNDV_THRESH=many" in ended.stderr


def test_a_port_that_is_taken_is_a_backend_that_cannot_be_used():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        ended = run({"NET_DEVICES": "lo", "TCP_PORT_RANGE": f"{port}-{port}"})
    assert ended.returncode == 1
    assert "BackendUnavailableError" in ended.stderr
    assert "busy" in ended.stderr


def test_a_device_that_is_not_there_is_named():
    ended = run({"NET_DEVICES": "no_such_device"})
    assert ended.returncode == 1
    assert "BackendUnavailableError" in ended.stderr


@pytest.mark.parametrize("which", ["wheel", "system", "path"])
def test_the_library_that_was_asked_for_is_loaded_and_logged(which: str):
    system = system_library()
    if which != "wheel" and system is None:
        pytest.skip("no UCX of the system's is installed (Debian: libucx0)")
    ended = run({"NET_DEVICES": "lo"}, TENSORFERRY_UCX=str(system) if which == "path" else which)
    assert ended.returncode == 0, ended.stderr
    logged = [line for line in ended.stdout.splitlines() if ": UCX " in line or ":UCX " in line]
    wanted = "libucx" if which == "wheel" else str(Path(str(system)).name)
    assert len(logged) == 1
    assert wanted in logged[0]
    assert "TENSORFERRY_UCX" in logged[0]


def test_a_library_that_is_missing_is_named():
    ended = run({}, TENSORFERRY_UCX="/no/such/libucp.so.0")
    assert ended.returncode == 1
    assert "BackendUnavailableError" in ended.stderr
    assert "/no/such/libucp.so.0" in ended.stderr


def test_nothing_in_the_environment_is_changed_and_signal_handlers_stay():
    code = """
import faulthandler, os, signal
faulthandler.enable()
before = dict(os.environ)
handlers = [signal.getsignal(number) for number in signal.valid_signals()]
import tensorferry
options = {"NET_DEVICES": "lo"}
producer = tensorferry.Producer("1MiB", backend_options=options)
consumer = tensorferry.Consumer("1MiB", backend_options=options)
with producer, consumer:
    assert dict(os.environ) == before
    assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers
faulthandler.dump_traceback_later(60)
os.kill(os.getpid(), signal.SIGSEGV)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == -11
    assert "Fatal Python error: Segmentation fault" in ended.stderr, "faulthandler was replaced"
    assert "backtrace (tid" not in ended.stderr, "UCX's handler ran"
