# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from importlib import metadata, resources

import tensorferry


def test_the_names_that_are_exported_are_sorted_and_there():
    assert list(tensorferry.__all__) == sorted(tensorferry.__all__)
    assert all(hasattr(tensorferry, name) for name in tensorferry.__all__)
    public = {
        name
        for name, value in vars(tensorferry).items()
        if getattr(value, "__module__", "").startswith("tensorferry.")
    }
    assert {name for name in public if not name.startswith("_")} == set(tensorferry.__all__) - {"__version__"}


def test_every_error_is_exported():
    from tensorferry import errors

    names = {name for name in vars(errors) if name.endswith("Error")}
    assert names <= set(tensorferry.__all__)


def test_the_package_is_typed():
    assert resources.files("tensorferry").joinpath("py.typed").is_file()
    for stub in ("_transport.pyi", "_tensors.pyi"):
        assert resources.files("tensorferry").joinpath(stub).is_file()


def test_the_version_is_that_of_the_distribution():
    assert tensorferry.__version__ == metadata.version("tensorferry")


def test_importing_the_package_loads_no_ucx():
    code = "import tensorferry; print([line for line in open('/proc/self/maps') if 'libucp' in line])"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout.strip() == "[]"
