# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tensorferry.lease import Lease

ANN, BOB = b"a" * 16, b"b" * 16


def lease(**changes: Any) -> Lease:
    return Lease(**{"duration": 10.0, "consumers": 1, "now": 100.0, **changes})


def test_lives_until_its_consumer_releases_it():
    one = lease()
    assert one.live
    assert one.release(ANN, 101.0)
    assert one.state == "released"


def test_counts_distinct_consumers():
    one = lease(consumers=2)
    assert one.release(ANN, 101.0)
    assert not one.release(ANN, 102.0)
    assert (one.live, one.missing) == (True, 1)
    assert one.release(BOB, 103.0)
    assert one.state == "released"


def test_expires_at_its_deadline_and_not_before():
    one = lease()
    assert one.deadline == 110.0
    assert not one.expire(109.999)
    assert one.expire(110.0)
    assert one.state == "expired"
    assert not one.expire(111.0)


def test_a_release_at_the_deadline_is_too_late():
    one = lease()
    assert not one.release(ANN, 110.0)
    assert one.state == "expired"


@pytest.mark.parametrize("end", ["revoke", "close"])
def test_the_producer_can_end_it_once(end):
    one = lease()
    assert getattr(one, end)()
    assert not getattr(one, end)()
    assert one.state == end + "d"
    assert not one.release(ANN, 101.0)


@pytest.mark.parametrize("wrong", [{"duration": 0.0}, {"duration": float("nan")}, {"consumers": 0}])
def test_refuses_impossible_leases(wrong):
    with pytest.raises(ValueError, match="a lease"):
        lease(**wrong)


def test_shows_its_state():
    assert repr(lease(consumers=3)) == "<Lease live, released by 0 of 3>"


class AnyLease(RuleBasedStateMachine):
    """Whatever is done in whatever order, a lease ends at most once and then stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lease = Lease(duration=5.0, consumers=2, now=0.0)
        self.ended: str | None = None
        self.ends = 0

    @rule(consumer=st.sampled_from([ANN, BOB]), passed=st.floats(0, 2))
    def release(self, consumer, passed):
        self.now += passed
        was = self.lease.missing
        counted = self.lease.release(consumer, self.now)
        assert self.lease.missing == was - counted

    @rule(passed=st.floats(0, 2))
    def expire(self, passed):
        self.now += passed
        self.ends += self.lease.expire(self.now)

    @rule(end=st.sampled_from(["revoke", "close"]))
    def end(self, end):
        self.ends += getattr(self.lease, end)()

    @invariant()
    def ends_once(self):
        assert self.ends <= 1
        if self.ended is not None:
            assert self.lease.state == self.ended
        if not self.lease.live:
            self.ended = self.lease.state
        assert self.lease.live or self.lease.state != "released" or self.lease.missing == 0


TestAnyLease = AnyLease.TestCase
