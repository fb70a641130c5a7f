# SPDX-License-Identifier: Apache-2.0
"""Imports point one way, and foreign libraries come in at one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "tensorferry"

# From the ground up; a module may import from its own layer and those before it, but not in a circle.
# `backends.base` lies low: it holds the words of the contract (tickets, offers), which manifests carry.
LAYERS = (
    ("errors",),
    (
        "dtypes",
        "arguments",
        "arrays",
        "columns",
        "counting",
        "metadata",
        "metrics",
        "pages",
        "records",
        "silence",
        "steps",
        "streams",
        "wire",
        "_tensors",
        "_transport",
    ),
    ("backends", "backends.base", "payload", "tensor_table"),
    (
        "allocator",
        "free_space",
        "lease",
        "manifest",
        "standing",
        "validation",
        "layout",
        "slicing",
        "packing",
        "slot_layout",
        "device_copy",
    ),
    ("buffer", "ownership", "room", "landing", "orders", "dispatcher", "request", "routes"),
    (
        "backends.nixl_agent",
        "backends.nixl_memory",
        "backends.nixl_options",
        "backends.nixl_slots",
        "backends.ucx_library",
        "backends.ucx_native",
        "backends.ucx_offers",
    ),
    (
        "backends.nixl",
        "backends.nixl_connection",
        "backends.nixl_pool",
        "backends.registry",
        "backends.ucx",
        "backends.ucx_connection",
        "backends.ucx_pool",
    ),
    ("publications", "publishing", "receiving", "reservation"),
    ("producer", "consumer"),
    ("",),
    (
        "testing",
        "testing.contract",
        "testing.host",
        "testing.read_contract",
        "testing.reading",
        "testing.user_contract",
    ),
    (
        "cli.bench",
        "cli.bench_agent",
        "cli.bench_environment",
        "cli.bench_harness",
        "cli.bench_link",
        "cli.bench_memory",
        "cli.bench_namespace",
        "cli.bench_payloads",
        "cli.bench_peers",
        "cli.bench_peers.base",
        "cli.bench_peers.ceilings",
        "cli.bench_peers.copies",
        "cli.bench_peers.ferry",
        "cli.bench_peers.gloo",
        "cli.bench_peers.mooncake",
        "cli.bench_peers.nixl",
        "cli.bench_peers.packed",
        "cli.bench_peers.raw_ucp",
        "cli.bench_peers.ray",
        "cli.bench_peers.sockets",
        "cli.bench_peers.ucxx",
        "cli.bench_peers.zeromq",
        "cli.bench_plots",
        "cli.bench_report",
        "cli.bench_results",
        "cli.bench_rows",
        "cli.bench_worker",
        "cli.inspect",
        "cli.demo",
        "cli.demo_channel",
        "cli.doctor",
        "cli.doctor_findings",
        "cli.doctor_host",
        "cli.doctor_trial",
        "cli.demo_models",
        "cli.demo_processes",
        "cli.demo_report",
        "cli.demo_stages",
        "cli",
        "cli.__main__",
    ),
)
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix("."): path
    for path in sorted(ROOT.rglob("*.py"))
}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full.removeprefix("tensorferry.") in RANK else str(node.module)


def test_every_module_has_its_layer():
    assert set(MODULES) == set(RANK) - {"_tensors", "_transport"}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_one_way(module: str):
    for name in imported(MODULES[module]):
        if name.split(".")[0] != "tensorferry":
            continue
        target = name.removeprefix("tensorferry").removeprefix(".")
        assert RANK[target] <= RANK[module], f"{module or 'tensorferry'} imports {name} from a higher layer"


def test_nothing_imports_in_a_circle():
    graph = {
        module: {
            target
            for name in imported(path)
            if (target := name.removeprefix("tensorferry").removeprefix(".")) in MODULES
            and name.split(".")[0] == "tensorferry"
            and target  # `from tensorferry import X` asks for the package, which is there by then
        }
        for module, path in MODULES.items()
    }
    assert tuple(TopologicalSorter(graph).static_order())  # raises CycleError


def users_of(library: str) -> set[str]:
    return {
        module
        for module, path in MODULES.items()
        if any(name == library or name.startswith(f"{library}.") for name in imported(path))
    }


def test_only_the_ucx_backend_imports_what_wraps_ucx():
    assert users_of("tensorferry._transport") == {
        "backends.ucx",
        "backends.ucx_connection",
        "backends.ucx_native",
        "backends.ucx_pool",
    }


def test_only_its_backend_and_the_benchmark_import_nixl():
    assert users_of("nixl") | users_of("nixl_cu12") == {"backends.nixl_agent", "cli.bench_peers.nixl"}


@pytest.mark.parametrize("library", ["pickle", "marshal", "shelve", "dill", "cloudpickle"])
def test_nothing_can_unpickle(library: str):
    assert users_of(library) == set()
