# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from tensorferry import steps
from tensorferry.arguments import Deadline
from tensorferry.dispatcher import Dispatcher
from tensorferry.errors import ClosedError, TransferCancelledError
from tensorferry.steps import Gate, Wait


@pytest.fixture
def dispatcher():
    woken = threading.Event()

    def sleep(timeout: float) -> None:
        woken.wait(timeout)
        woken.clear()

    one = Dispatcher("the test", sleep, woken.set)
    yield one
    one.close()
    one.join(5.0)
    assert "tensorferry-requests" not in {thread.name for thread in threading.enumerate()}


def through(gate: Gate, deadline: Deadline, log: list[str], name: str = "it"):
    """Steps that wait for a gate."""
    try:
        yield Wait(gate, deadline)
        if not gate.wait(deadline.remaining()):
            raise TimeoutError(f"{name} waited too long")
        log.append(name)
        return name
    finally:
        log.append(f"{name} left")


def test_the_same_steps_run_on_a_thread_of_their_own(threads, wait_for):
    gate, log = Gate(), []
    waiting = threads.submit(lambda: steps.run(through(gate, Deadline(10), log)))
    gate.open()
    assert waiting.result(5) == "it"
    with pytest.raises(TimeoutError):
        steps.run(through(Gate(), Deadline(0.01), log))


def test_resumes_each_task_when_its_own_gate_opens(dispatcher):
    gates, log = [Gate() for _ in range(100)], []
    tasks = [dispatcher.submit(through(gate, Deadline(30), log, str(i))) for i, gate in enumerate(gates)]
    for i in (7, 3, 99):
        gates[i].open()
        assert tasks[i].outcome.result(5) == str(i)
    assert sum(task.outcome.done() for task in tasks) == 3
    for gate in gates:
        gate.open()
    assert [task.outcome.result(5) for task in tasks] == [str(i) for i in range(100)]


def test_a_gate_that_is_open_is_no_obstacle(dispatcher):
    gate = Gate()
    gate.open()
    assert dispatcher.submit(through(gate, Deadline(30), [])).outcome.result(5) == "it"


def test_a_deadline_resumes_what_waits(dispatcher):
    late = dispatcher.submit(through(Gate(), Deadline(0.05), []))
    with pytest.raises(TimeoutError, match="it waited too long"):
        late.outcome.result(5)


def test_steps_that_go_on_waiting_after_their_time_end_all_the_same(dispatcher):
    """The last wait begins when the time is up already: nobody must wait for its gate."""

    def twice(deadline: Deadline):
        yield Wait(Gate(), deadline)
        yield Wait(second := Gate(), deadline)
        if not second.wait(deadline.remaining()):
            raise TimeoutError

    deadline = Deadline(0.05)
    with pytest.raises(TimeoutError):
        dispatcher.submit(twice(deadline)).outcome.result(5)


def test_cancelling_raises_inside_the_steps(dispatcher):
    log: list[str] = []
    task = dispatcher.submit(through(Gate(), Deadline(30), log))
    dispatcher.cancel(task, TransferCancelledError("enough"))
    with pytest.raises(TransferCancelledError, match="enough"):
        task.outcome.result(5)
    assert log == ["it left"]
    dispatcher.cancel(task, TransferCancelledError("again"))  # harmless


def test_one_task_that_fails_costs_the_others_nothing(dispatcher):
    def fails():
        raise SystemExit("in the middle")
        yield

    gate = Gate()
    good = dispatcher.submit(through(gate, Deadline(30), []))
    with pytest.raises(SystemExit):
        dispatcher.submit(fails()).outcome.result(5)
    gate.open()
    assert good.outcome.result(5) == "it"


def test_closing_ends_all_tasks_and_takes_no_more(dispatcher):
    log: list[str] = []
    tasks = [dispatcher.submit(through(Gate(), Deadline(30), log)) for _ in range(3)]
    dispatcher.close()
    for task in tasks:
        with pytest.raises(ClosedError, match="the test was closed"):
            task.outcome.result(5)
    assert log == ["it left"] * 3
    with pytest.raises(ClosedError):
        dispatcher.submit(through(Gate(), Deadline(1), []))


def test_closing_from_its_own_thread_leaves_the_last_deed_to_it(dispatcher):
    done = threading.Event()

    def closes():
        assert dispatcher.is_this_thread
        dispatcher.close(last_deed=done.set)
        assert not done.is_set()
        return None
        yield

    dispatcher.submit(closes()).outcome.result(5)
    assert done.wait(5)


def test_ended_tasks_are_forgotten(dispatcher):
    """Their deadlines are far away."""
    gate = Gate()
    gate.open()
    for _ in range(1000):
        dispatcher.submit(through(gate, Deadline(600), [])).outcome.result(5)
    assert len(dispatcher._deadlines) < 100
    assert not dispatcher._tasks


class Treasure:
    """Something that a weak reference can watch."""


def test_a_result_lives_no_longer_than_its_task(dispatcher):
    """Not until its deadline either, which is far away."""

    def steps_with_a_result():
        yield from through(opened(), Deadline(600), [])
        return Treasure()

    task = dispatcher.submit(steps_with_a_result())
    kept = weakref.ref(task.outcome.result(5))
    del task
    assert gone(kept)


def test_an_error_keeps_nothing_of_what_the_steps_had(dispatcher):
    """Without the collector's help: it may be a whole pool."""

    def steps_that_fail(kept):
        treasure, other = Treasure(), Treasure()
        kept += [weakref.ref(treasure), weakref.ref(other)]
        yield from through(opened(), Deadline(600), [])
        try:
            fail_with(other)
        except OSError as error:
            raise TimeoutError("no luck") from error

    def fail_with(_):
        raise OSError

    kept = []
    gc.collect()
    gc.disable()
    try:
        task = dispatcher.submit(steps_that_fail(kept))
        assert isinstance(task.outcome.exception(5), TimeoutError)
        assert gone(kept[0])
        assert gone(kept[1])
    finally:
        gc.enable()


def opened():
    gate = Gate()
    gate.open()
    return gate


def gone(kept):
    """The dispatcher's thread may still be on its way out of the task."""
    end = time.monotonic() + 5
    while kept() is not None and time.monotonic() < end:
        time.sleep(0.001)
    return kept() is None
