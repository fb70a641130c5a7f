# SPDX-License-Identifier: Apache-2.0
"""The parts of the soak that could be wrong without anyone noticing: digests, and the judge."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from soaking.judge import FAILURES, Call, Judge, Life, Publication, excused, outlived  # noqa: E402
from soaking.payloads import LARGEST, Source, digests  # noqa: E402

X = torch.arange(12, dtype=torch.float32)

# Digests


def test_equal_payloads_have_equal_digests():
    one, other = Source("1"), Source("1")
    for _ in range(50):
        nbytes = one.size()
        assert other.size() == nbytes
        assert digests(one.payload(min(nbytes, 100_000))) == digests(other.payload(min(nbytes, 100_000)))


def test_payloads_of_another_place_or_seed_differ():
    source = Source("1")
    found = {str(digests(source._one(1000))) for _ in range(20)} | {str(digests(Source("2")._one(1000)))}
    assert len(found) == 21


def test_sizes_go_from_a_byte_to_the_largest():
    source = Source("1")
    sizes = [source.size() for _ in range(2000)]
    assert (min(sizes), max(sizes)) == (1, LARGEST)


@pytest.mark.parametrize("nbytes", [1, 2, 7, 8, 24, 1000, 99_999])
def test_every_structure_can_be_cut_from_any_size(nbytes):
    source = Source("1")
    for shape in (source._one, source._parts, source._many, source._views):
        assert digests(shape(nbytes))


@pytest.mark.parametrize("bit", [0, 1, 7, 8, 200, 12 * 32 - 1])
def test_one_flipped_bit_changes_the_digest(bit):
    changed = X.clone()
    changed.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert digests({"x": X}) != digests({"x": changed})


@pytest.mark.parametrize(
    "other",
    [
        X.view(torch.int32),  # dtype
        X.view(3, 4),
        X.view(4, 3),
        [X],
        (X,),
        {"x": X},
        None,
        [X, None],
        X[:11],
        X.flip(0),
    ],
)
def test_another_dtype_shape_or_structure_changes_the_digest(other):
    assert digests({"x": X}) != digests({"x": other})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([X, None], [None, X]),
        ([], ()),
        ([], {}),
        ([[]], [[], []]),
        ({"a": X, "b": X}, {"b": X, "a": X}),
        ({"a": None}, {"b": None}),
        ({"ab": None, "c": None}, {"a": None, "bc": None}),
        ([torch.empty(0, 3)], [torch.empty(3, 0)]),
        ([X[:5], X[5:]], [X[:6], X[6:]]),
        (torch.tensor(1.0), torch.tensor([1.0])),
    ],
)
def test_structures_that_could_be_confused_are_not(one, other):
    assert digests({"x": one}) != digests({"x": other})


def test_layout_in_memory_makes_no_difference():
    square = X.view(3, 4)
    assert digests({"x": square.t()}) == digests({"x": square.t().contiguous()})
    assert digests({"x": X[::2]}) == digests({"x": X[::2].clone()})
    assert digests({"x": X[3:4:2]}) == digests({"x": X[3:4].clone()})


def test_what_is_no_payload_is_refused():
    with pytest.raises(TypeError, match="str"):
        digests({"x": "text"})


# The judge

CALLER, PRODUCER = Life("consumer"), Life("producer")
PULL = Call(
    "pull", "a", started=100.0, ended=101.0, timeout=3.0, expected={"x": "1"}, found={"x": "1"}, nbytes=7
)


def publication(producer=PRODUCER, **changes):
    return Publication(
        producer, **{"opening": 0, "began": 99.0, "lease": 6.0, "nbytes": 7, "access": "served", **changes}
    )


def judged(call, caller=CALLER, of=None):
    judge = Judge(slack=1.0)
    judge.call(PULL, CALLER, publication())  # so that something has arrived
    judge.call(call, caller, of or publication())
    return judge


def failed(error, **changes):
    return replace(PULL, found=None, error=error, **changes)


def test_a_right_payload_is_counted():
    judge = judged(PULL)
    assert judge.failures() == {}
    assert (judge.figures.payloads, judge.figures.bytes) == (2, 14)


@pytest.mark.parametrize("found", [{"x": "2"}, {}, {"x": "1", "y": "1"}, {"y": "1"}])
def test_a_wrong_payload_is_a_failure(found):
    judge = judged(replace(PULL, found=found))
    assert judge.failures() == {"wrong_payloads": 1}
    assert judge.figures.payloads == 1
    assert "wrong: pull a in consumer" in judge.notes[0]


def test_names_in_another_order_are_a_wrong_payload():
    call = replace(PULL, expected={"x": "1", "y": "2"}, found={"y": "2", "x": "1"})
    assert judged(call).failures() == {"wrong_payloads": 1}


def test_a_call_that_outlives_its_deadline_is_late():
    assert judged(replace(PULL, ended=103.9)).failures() == {}
    judge = judged(replace(PULL, ended=104.1))
    assert judge.failures() == {"late_calls": 1}
    assert judge.figures.worst_overrun_seconds == 1.1


def test_lateness_counts_whatever_the_outcome():
    late = failed("TransferTimeoutError", ended=105.0)
    assert judged(late).failures() == {"late_calls": 1}


def test_copying_takes_none_of_the_time_of_a_publish():
    slow = replace(PULL, what="publish", found=None, timeout=0.0, ended=110.0)
    assert judged(slow).failures() == {}
    assert judged(replace(slow, error="PoolExhaustedError")).failures() == {"late_calls": 1}


def test_time_in_which_the_caller_was_stopped_is_not_its_own():
    call = replace(PULL, ended=107.0)
    assert outlived(call, Life("consumer")) == 4.0
    assert outlived(call, Life("consumer", stops=[(101.0, 103.0)])) == 2.0
    assert outlived(call, Life("consumer", stops=[(90.0, 101.0), (106.0, math.inf)])) == 2.0
    assert outlived(call, Life("consumer", stops=[(90.0, 99.0), (108.0, 109.0)])) == 4.0


def test_nothing_that_arrived_is_a_failure():
    judge = Judge()
    assert judge.failures() == {"no_payload_arrived": 1}


@pytest.mark.parametrize(
    "what", ["UsageError", "ManifestError", "IntegrityError", "RemoteAccessError", "ValueError"]
)
def test_errors_that_nothing_explains_are_failures(what):
    assert judged(failed(what)).failures() == {"unexplained_errors": 1}


def test_a_lost_peer_is_explained_by_its_end_only():
    dead = Life("producer", killed=100.5)
    for error in ("PeerLostError", "ConnectError"):
        assert not excused(failed(error), CALLER, publication())
        assert excused(failed(error), CALLER, publication(dead))
        assert not excused(failed(error, ended=100.2), CALLER, publication(dead))


def test_a_silent_peer_counts_as_lost_when_it_has_had_its_time():
    silent = failed("PeerLostError", ended=102.1, message="the producer has been silent for 3 seconds")
    assert excused(silent, CALLER, publication())
    assert not excused(replace(silent, ended=101.5), CALLER, publication())
    assert not excused(replace(silent, message="reset"), CALLER, publication())


def test_what_was_opened_after_a_close_is_not_gone():
    closed = Life("producer", closes=[99.5])
    assert excused(failed("PeerLostError"), CALLER, publication(closed, opening=0))
    assert not excused(failed("PeerLostError"), CALLER, publication(closed, opening=1))
    caller = Life("consumer", closes=[100.5])
    assert excused(failed("ClosedError"), caller, publication())
    assert not excused(failed("ClosedError", opening=1), caller, publication())
    assert not excused(failed("ClosedError"), CALLER, publication(closed))


def test_an_ended_lease_is_explained_by_time_revocation_or_the_producers_end():
    late = failed("LeaseExpiredError")
    assert not excused(late, CALLER, publication())
    assert excused(late, CALLER, publication(lease=2.0))
    assert excused(late, CALLER, publication(revoked=100.9))
    assert not excused(late, CALLER, publication(revoked=101.5))
    assert excused(late, CALLER, publication(Life("producer", killed=100.0)))


def test_a_timeout_is_explained_by_all_of_its_time():
    for error in ("TransferTimeoutError", "PoolTimeoutError"):
        assert not excused(failed(error), CALLER, publication())
        assert excused(failed(error, ended=103.0), CALLER, publication())


def test_cancelling_and_not_waiting_explain_their_errors():
    assert not excused(failed("TransferCancelledError"), CALLER, publication())
    assert excused(failed("TransferCancelledError", cancelled=True), CALLER, publication())
    assert not excused(failed("PoolExhaustedError"), CALLER, None)
    assert excused(failed("PoolExhaustedError", what="publish", timeout=0), CALLER, None)


def test_crashes_leaks_and_processes_that_hang_are_failures():
    judge = judged(PULL)
    judge.crash("consumer", -11)
    judge.crash("producer", -6, by_ucx=True)
    judge.leak("leaked_bytes", "producer", 4096, "holds 4096 bytes")
    judge.leak("leaked_threads", "producer", -2, "has fewer")
    judge.overdue("the end", "consumer", 40.0)
    assert judge.failures() == {"crashes": 1, "leaked_bytes": 4096, "late_calls": 1}
    assert judge.figures.worst_overrun_seconds == 40.0
    assert judge.figures.aborts_by_ucx == 1
    assert set(judge.failures()) <= set(FAILURES)
