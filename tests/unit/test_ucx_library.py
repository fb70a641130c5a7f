# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tensorferry.backends import ucx_library
from tensorferry.backends.ucx_library import choose_library
from tensorferry.errors import BackendUnavailableError

WHEEL = Path("/wheel/lib/libucp.so.0")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A machine with the wheel, a system UCX with verbs, and an RDMA device; parts can be taken away."""
    system = tmp_path / "libucp.so.0"
    system.touch()
    verbs = tmp_path / "ucx" / "libuct_ib.so.0"
    verbs.parent.mkdir()
    verbs.touch()
    found = {"wheel": WHEEL, "system": system, "devices": ["mlx5_0"]}
    monkeypatch.setattr(ucx_library, "wheel_library", lambda: found["wheel"])
    monkeypatch.setattr(ucx_library, "system_library", lambda: found["system"])
    monkeypatch.setattr(ucx_library, "rdma_devices", lambda: found["devices"])
    return found


def chosen(mapped: str = "", **environ: str) -> str:
    return choose_library(environ, mapped)[0]


def test_the_systems_is_taken_where_an_rdma_device_asks_for_its_verbs(machine):
    assert chosen() == str(machine["system"])


def test_without_a_device_the_wheels_is_taken(machine):
    machine["devices"] = []
    assert chosen() == str(WHEEL)


def test_without_verbs_the_wheels_is_taken(machine):
    (machine["system"].parent / "ucx" / "libuct_ib.so.0").unlink()
    assert chosen() == str(WHEEL)


def test_without_the_wheel_the_systems_is_taken(machine):
    machine |= {"wheel": None, "devices": []}
    assert chosen() == str(machine["system"])


def test_without_any_there_is_an_error_with_the_cure(machine):
    machine |= {"wheel": None, "system": None}
    with pytest.raises(BackendUnavailableError, match="pip install libucx-cu12"):
        chosen()


def test_one_that_the_process_has_loaded_is_kept(machine):
    """ai-dynamo/nixl#1668, #1673: two builds of UCX in one process."""
    assert chosen("/other/libucp.so.0") == "/other/libucp.so.0"
    assert chosen("/other/libucp.so.0", TENSORFERRY_UCX="wheel") == str(WHEEL)


def test_the_environment_chooses(machine, tmp_path: Path):
    assert chosen(TENSORFERRY_UCX="wheel") == str(WHEEL)
    assert chosen(TENSORFERRY_UCX="system") == str(machine["system"])
    assert chosen(TENSORFERRY_UCX=str(machine["system"])) == str(machine["system"])


@pytest.mark.parametrize(("wanted", "missing"), [("wheel", "wheel"), ("system", "system")])
def test_what_was_asked_for_is_not_replaced(machine, wanted: str, missing: str):
    machine[missing] = None
    with pytest.raises(BackendUnavailableError):
        chosen(TENSORFERRY_UCX=wanted)


def test_a_path_that_is_not_there_is_named(machine):
    with pytest.raises(BackendUnavailableError, match="/no/such/file"):
        chosen(TENSORFERRY_UCX="/no/such/file")


def test_the_reason_is_said(machine):
    assert "RDMA" in choose_library({}, "")[1]
    assert choose_library({"TENSORFERRY_UCX": "wheel"}, "")[1] == "TENSORFERRY_UCX=wheel"


def test_the_wheel_of_this_environment_is_found():
    library = ucx_library.wheel_library()
    assert library is not None, "the libucx wheel is a dependency"
    assert library.is_file()


def test_ld_library_path_comes_before_the_linkers_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "libucp.so.0").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/no/such/folder:{tmp_path}")
    assert ucx_library.system_library() == tmp_path / "libucp.so.0"
