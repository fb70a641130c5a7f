# SPDX-License-Identifier: Apache-2.0
"""The conformance suite fails a backend for each fault that it is there to find."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from tensorferry.testing import BackendUnderTest, Host, ReadContract
from tensorferry.testing.host import HostGoneError
from tensorferry.testing.reading import POOL_NBYTES, SOON

FAULTS = {
    "bytes land one further": "test_every_byte_arrives_where_it_should",
    "generations are not checked": "test_a_slot_that_is_used_again_is_never_the_old_one",
    "one token for all": "test_generations_and_tokens_are_never_used_twice",
    "notices come twice": "test_a_hundred_notices_arrive_once_each",
    "released before it is read": "test_no_release_goes_with_a_read_that_was_given_up",
    "spans are not checked": "test_spans_that_leave_slot_or_landing_pool",
    "deadlines are missed": "test_a_stopped_producer_costs_no_more_than_the_timeout",
    "callbacks come twice": "test_each_watched_read_is_reported_once",
    "any backend will do": "test_a_manifest_of_another_backend",
    "a pool stays open": "test_a_producer_that_closes_and_its_successor",
    "descriptors leak": "test_nothing_is_left_behind",
}


class Contract(ReadContract):
    """Not collected: its tests are called one by one."""

    backend = BackendUnderTest("broken", access="rdma")
    producer_survives = False


def backend(fault: str) -> BackendUnderTest:
    options = {"TLS": "tcp", "NET_DEVICES": "lo", "FAULT": fault}
    return BackendUnderTest("broken", module="broken_backend", access="rdma", options=options)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host(backend("none")) as host:
        yield host


def run(host: Host, fault: str, test: str) -> None:
    """Run a test of the suite as pytest would, with a backend that has this fault."""
    Contract.backend = host.backend = backend(fault)
    method = getattr(Contract(), test)
    wanted = method.__code__.co_varnames[1 : method.__code__.co_argcount]
    try:
        exported = host.export(POOL_NBYTES)
    except HostGoneError:  # over tcp UCX may abort a producer whose reader goes in the middle of an answer
        assert host.ends(SOON)
        host.restart()
        exported = host.export(POOL_NBYTES)
    reader = Contract.backend.open_reader(POOL_NBYTES)
    given = {"host": host, "exported": exported, "reader": reader}
    try:
        method(**{name: given[name] for name in wanted})
    finally:
        reader.close(5.0)
        with suppress(HostGoneError):
            exported.close()


@pytest.mark.parametrize(("fault", "test"), FAULTS.items(), ids=list(FAULTS))
def test_a_fault_is_found(host: Host, fault: str, test: str):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run(host, fault, test)


def test_without_a_fault_the_same_tests_pass(host: Host):
    for test in FAULTS.values():
        run(host, "none", test)
