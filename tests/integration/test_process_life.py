# SPDX-License-Identifier: Apache-2.0
"""Ends in the middle of something: sys.exit, signals, cycles, daemon threads, closing under calls, fork.

Each is a script in a process of its own that must end in its time, with its status, and silently.
"""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack

import networks
import pytest
from scripts import Lone, end_of, run, start

import tensorferry

SOON = 50.0  # seconds, of which importing torch on a busy machine takes most


@pytest.fixture(scope="module")
def stuck():
    """A producer that answers nothing, not even a first hello."""
    yield from stopped("")


@pytest.fixture(scope="module")
def stuck_with(library):
    """The same with a UCX library that the test uses as well."""
    yield from stopped(library)


def stopped(library):
    with Lone(library) as one:
        one.process.send_signal(signal.SIGSTOP)
        yield one


@pytest.fixture(params=["served", "mapped"])
def access(request):
    return request.param


# Exit


def test_sys_exit_of_the_main_thread_in_the_middle_of_a_pull(stuck):
    """A handler of a signal calls it while the pull waits for bytes that do not come."""
    run(
        f"""
        signal.signal(signal.SIGALRM, lambda *_: sys.exit(7))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        Consumer("4MiB", **OPTIONS, access="served").pull(bytes.fromhex({stuck.manifest!r}), timeout=600)
        """,
        status=7,
        within=SOON,
    )


def test_sys_exit_in_a_thread_ends_that_thread_only(access):
    out = run(
        f"""
        producer = Producer("4MiB", access={access!r}, **OPTIONS)
        consumer = Consumer("4MiB", **OPTIONS)
        manifest = producer.publish("a", PAYLOAD)
        def leave():
            with consumer.borrow(manifest):
                sys.exit(7)
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert producer.statistics().live == 1  # given back is what was used to the end
        assert torch.equal(consumer.pull(manifest)["x"], PAYLOAD["x"])
        assert producer.wait_released("a", 10)
        print(consumer.statistics().allocated_nbytes, producer.statistics().allocated_nbytes)
        """,
        within=SOON,
    )
    assert out == "0 0\n"


def test_daemon_threads_may_pull_and_publish_while_the_interpreter_ends(access):
    """Several times, since they are in another place each time."""
    with ExitStack() as stack:
        processes = [start(DAEMONS.format(access=access, pause=turn / 20)) for turn in range(4)]
        for process in processes:
            stack.callback(process.communicate)
            stack.callback(process.kill)
        for process in processes:
            status, out, err = end_of(process, SOON * 2)
            assert (status, err) == (0, "")
            assert int(out) > 0


DAEMONS = """
        producer = Producer("16MiB", access={access!r}, **OPTIONS)
        consumer = Consumer("16MiB", **OPTIONS)
        count = 0
        def work(worker):
            global count
            for turn in range(10**9):
                manifest = producer.publish(f"{{worker}}-{{turn}}", PAYLOAD, timeout=10)
                consumer.start_pull(manifest).result() if turn % 2 else consumer.pull(manifest)
                count += 1
        threading.excepthook = lambda args: None  # ClosedError, once exit closes both
        for worker in range(3):
            threading.Thread(target=work, args=(worker,), daemon=True).start()
        while count < 20:
            time.sleep(0.01)
        time.sleep({pause})
        print(count, flush=True)
        """


def test_requests_that_nobody_waits_for_do_not_hold_the_exit_up(stuck):
    run(
        f"""
        import asyncio
        consumer = Consumer("4MiB", **OPTIONS, access="served")
        producer = Producer("1MiB", **OPTIONS)
        manifest = bytes.fromhex({stuck.manifest!r})
        requests = [consumer.start_pull(manifest, timeout=600) for _ in range(20)]
        full = producer.publish("full", {{"x": torch.zeros(1 << 20, dtype=torch.uint8)}})
        requests += [producer.start_publish(str(i), PAYLOAD, timeout=600) for i in range(20)]
        async def wait_a_little():
            await asyncio.wait_for(consumer.start_pull(manifest, timeout=600), 0.3)
        try:
            asyncio.run(wait_a_little())
        except asyncio.TimeoutError:
            sys.exit(4)
        """,
        status=4,
        within=SOON,
    )


def test_exceptions_in_finalizers_and_cycles_do_not_matter():
    """Producers and consumers in circles with objects whose finalizers raise; some left to the exit."""
    out = run(
        """
        import weakref
        warnings.simplefilter("ignore")
        ignored = []
        sys.unraisablehook = lambda found: ignored.append(found.exc_type.__name__)
        class Node:
            def __init__(self):
                self.producer, self.consumer = Producer("4MiB", **OPTIONS), Consumer("4MiB", **OPTIONS)
                self.manifest = self.producer.publish("a", PAYLOAD)
                self.consumer.pull(self.manifest, release=False)
                self.request = self.consumer.start_pull(self.manifest, release=False)
                self.me = [self]
                weakref.finalize(self.producer, self.fail)
            def fail():
                raise RuntimeError("in a finalizer")
            fail = staticmethod(fail)
            def __del__(self):
                self.consumer.pull(self.manifest)
        node = Node()
        node.request.result()
        del node
        gc.collect()
        gc.collect()
        for _ in range(200):
            if not any(thread.name.startswith("tensorferry") for thread in threading.enumerate()):
                break
            time.sleep(0.05)
        else:
            print("threads live on", threading.enumerate())
        print(sorted(ignored))
        left = Node()
        left.other = Node()
        sys.unraisablehook = lambda found: None
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # finalizers at exit say that they failed
        """,
        within=SOON * 2,
    )
    assert out == "['ClosedError', 'RuntimeError']\n"  # the collector has closed the consumer before __del__


# Closing


@pytest.mark.parametrize("used", [True, False])
def test_closing_twice_from_several_threads_and_without_any_peer(library, access, used):
    out = run(
        f"""
        for turn in range(10):
            producer = Producer("4MiB", access={access!r}, **OPTIONS)
            consumer = Consumer("4MiB", **OPTIONS)
            if {used}:
                consumer.pull(producer.publish("a", PAYLOAD), release=False)
            threads = [threading.Thread(target=one.close, args=(turn % 2,))
                       for one in (producer, consumer) * 4]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            producer.close(), consumer.close()
            for call in (lambda: producer.publish("b", PAYLOAD), lambda: consumer.pull(b"")):
                with contextlib.suppress(tensorferry.ClosedError):
                    print("open", call())
        print(threading.active_count())
        """,
        library,
        within=SOON * 2,
    )
    assert out == "1\n"


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_closed_is_gone_without_the_collector(library, access, kept):
    """Also what somebody still refers to, but for the segment in which peers saw that it is closed."""
    out = run(
        f"""
        warnings.simplefilter("ignore")
        def held():
            with open("/proc/self/maps") as maps:
                shared = {{line.split()[4] for line in maps if "/memfd:" in line}}
            return len(shared), len(os.listdir("/proc/self/fd"))
        def use():
            producer = Producer("4MiB", access={access!r}, **OPTIONS)
            consumer = Consumer("4MiB", **OPTIONS)
            manifest = producer.publish("a", PAYLOAD)
            consumer.pull(manifest, release=False)
            consumer.start_pull(manifest, release=False).result()
            with consumer.borrow(manifest):
                pass
            with producer.reserve("b", 4096) as reservation:
                reservation.empty("x", (10,), torch.uint8)
            producer.start_publish("c", PAYLOAD).result()
            consumer.close(), producer.close()
            return producer, consumer
        use()
        gc.collect()
        gc.disable()
        before = held()
        all_of_them = [use() for _ in range(5)]
        if not {kept}:
            del all_of_them
        now = held()
        print(now[0] - before[0], now[1] - before[1])
        """,
        library,
        within=SOON,
    )
    segments, descriptors = map(int, out.split())
    assert (segments, descriptors) == ((5, 5) if kept else (0, 0))


def test_closing_wakes_everyone_who_waits(library, stuck_with):
    """For room to publish, for room to land, for a release, for bytes, for a connection; as requests, too."""
    started = time.monotonic()
    out = run(
        f"""
        from concurrent.futures import ThreadPoolExecutor
        stuck = bytes.fromhex({stuck_with.manifest!r})
        producer, consumer = Producer("1MiB", **OPTIONS), Consumer("1MiB", **OPTIONS, access="served")
        full = producer.publish("full", {{"x": torch.zeros(1 << 20, dtype=torch.uint8)}})
        landed = consumer.borrow(full)
        landed.__enter__()
        calls = [
            lambda: producer.publish("b", PAYLOAD, timeout=600),
            lambda: producer.start_publish("c", PAYLOAD, timeout=600).result(),
            lambda: producer.reserve("d", "1MiB", timeout=600),
            lambda: producer.wait_released("full", 600),
            lambda: consumer.pull(full, timeout=600),
            lambda: consumer.start_pull(full, timeout=600).result(),
            lambda: consumer.pull(stuck, timeout=600),
            lambda: consumer.start_pull(stuck, timeout=600).result(),
        ]
        with ThreadPoolExecutor(len(calls)) as threads:
            waiting = [threads.submit(call) for call in calls]
            time.sleep(0.5)
            print([one.done() for one in waiting].count(True))
            began = time.monotonic()
            consumer.close(2), producer.close(2)
            print({{type(one.exception(10)).__name__ for one in waiting}}, time.monotonic() - began < 10)
        """,
        library,
        within=SOON * 2,
    )
    assert out == "0\n{'ClosedError'} True\n"
    assert time.monotonic() - started < SOON * 2


# Fork

FORKED = {
    "Producer": {
        "publish": 'producer.publish("b", PAYLOAD)',
        "start_publish": 'producer.start_publish("b", PAYLOAD)',
        "reserve": 'producer.reserve("b", 10)',
        "revoke": 'producer.revoke("a")',
        "wait_released": 'producer.wait_released("a", 0)',
        "statistics": "producer.statistics()",
    },
    "Consumer": {
        "pull": "consumer.pull(manifest)",
        "start_pull": "consumer.start_pull(manifest)",
        "borrow": "consumer.borrow(manifest).__enter__()",
        "release": "consumer.release(manifest)",
        "reject": "consumer.reject(manifest)",
        "statistics": "consumer.statistics()",
    },
    "Reservation": {
        "empty": 'reservation.empty("y", (1,), torch.uint8)',
        "publish": "reservation.publish()",
    },
    "Request": {"result": "running.result()", "cancel": "running.cancel()"},
}
HARMLESS_AFTER_FORK = {
    "Producer": {"close"},
    "Consumer": {"close"},
    "Reservation": {"cancel", "nbytes", "request_id", "tensors"},
    "Request": {"done"},
}


@pytest.mark.parametrize("kind", list(FORKED))
def test_the_list_of_what_a_forked_child_must_not_do_is_whole(kind):
    public = {name for name in dir(getattr(tensorferry, kind)) if not name.startswith("_")}
    assert public == FORKED[kind].keys() | HARMLESS_AFTER_FORK[kind]


def test_a_forked_child_is_refused_everything_and_its_parent_is_unharmed(library, access, stuck_with):
    """While the parent's threads are in the middle of calls, so that locks may be held at the fork."""
    calls = [call for group in FORKED.values() for call in group.values()]
    out = run(
        f"""
        warnings.simplefilter("ignore")
        producer, consumer = Producer("16MiB", access={access!r}, **OPTIONS), Consumer("16MiB", **OPTIONS)
        manifest = producer.publish("a", PAYLOAD)
        reservation = producer.reserve("r", 4096)
        running = consumer.start_pull(bytes.fromhex({stuck_with.manifest!r}), timeout=600)
        stopping = threading.Event()
        def work():
            for turn in range(10**9):
                if stopping.is_set():
                    return
                consumer.pull(producer.publish(str(turn), PAYLOAD, timeout=10))
        worker = threading.Thread(target=work)
        worker.start()
        for _ in range(10):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                refused = []
                for call in {calls!r}:
                    try:
                        eval(call)
                    except tensorferry.ForkedProcessError:
                        refused.append(call)
                reservation.cancel(), running.done(), producer.close(), consumer.close()
                os._exit(len(refused))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == {len(calls)}, status
        stopping.set()
        worker.join()
        running.cancel()
        reservation.empty("x", (2,), torch.int16).fill_(5)
        assert consumer.pull(reservation.publish())["x"].tolist() == [5, 5]
        assert torch.equal(consumer.pull(manifest)["x"], PAYLOAD["x"])
        assert producer.wait_released("a", 10)
        consumer.close(), producer.close()
        print("unharmed")
        """,
        library,
        within=SOON * 2,
    )
    assert out == "unharmed\n"


def test_dataloader_workers_live_beside_pulls(access):
    """Workers that were forked from the middle of it all, and are still there while the parent pulls on."""
    out = run(
        f"""
        warnings.simplefilter("ignore")
        from torch.utils.data import DataLoader
        producer, consumer = Producer("4MiB", access={access!r}, **OPTIONS), Consumer("4MiB", **OPTIONS)
        consumer.pull(producer.publish("first", PAYLOAD))
        loader = DataLoader(range(64), batch_size=8, num_workers=2, multiprocessing_context="fork",
                            persistent_workers=True)
        total = 0
        for epoch in range(3):
            for batch in loader:
                total += int(batch.sum())
                manifest = producer.publish("a", PAYLOAD)
                assert torch.equal(consumer.pull(manifest)["x"], PAYLOAD["x"])
                assert producer.wait_released("a", 10)
        print(total)
        """,
        within=SOON * 2,
    )
    assert out == f"{3 * sum(range(64))}\n"


# Signals


@pytest.mark.parametrize("way", ["pull", "request", "release"])
def test_ctrl_c_while_connecting_to_a_producer_that_never_answers(stuck, way):
    call = {
        "pull": "consumer.pull(manifest, timeout=600)",
        "request": "consumer.start_pull(manifest, timeout=600).result()",
        "release": "consumer.release(manifest)",
    }[way]
    interrupt(
        f"""
        consumer = Consumer("4MiB", **OPTIONS, access="served")
        manifest = bytes.fromhex({stuck.manifest!r})
        print("ready", flush=True)
        try:
            {call}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """
    )


def test_ctrl_c_while_connecting_to_an_address_that_drops_everything():
    port = networks.free_port()
    with Lone(TCP_PORT_RANGE=f"{port}-{port}") as producer:
        manifest = producer.manifest
    with networks.dropping(port):
        interrupt(
            f"""
            consumer = Consumer("4MiB", **OPTIONS, access="served")
            print("ready", flush=True)
            try:
                consumer.pull(bytes.fromhex({manifest!r}), timeout=600)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            """
        )


def test_ctrl_c_while_waiting_for_room():
    interrupt(
        """
        producer = Producer("1MiB", **OPTIONS)
        producer.publish("full", {"x": torch.zeros(1 << 20, dtype=torch.uint8)})
        print("ready", flush=True)
        try:
            producer.publish("a", PAYLOAD, timeout=600)
        except KeyboardInterrupt:
            assert producer.revoke("full")
            producer.publish("a", PAYLOAD)  # neither the name nor any room was kept
            print("interrupted", flush=True)
        """
    )


def interrupt(script):
    """Run a script that says "ready" and waits; after SIGINT it must say so and end well, and soon."""
    process = start(script)
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(1.0)
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGINT)
        assert end_of(process, SOON) == (0, "interrupted\n", "")
    finally:
        process.kill()
        process.communicate()


def test_sigterm_ends_a_process_in_the_middle_of_calls_at_once(stuck):
    process = start(
        f"""
        producer = Producer("4MiB", **OPTIONS)
        consumer = Consumer("4MiB", **OPTIONS, access="served")
        consumer.start_pull(bytes.fromhex({stuck.manifest!r}), timeout=600)
        print("ready", flush=True)
        consumer.pull(bytes.fromhex({stuck.manifest!r}), timeout=600)
        """
    )
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert end_of(process, 5.0) == (-signal.SIGTERM, "", "")
    finally:
        process.kill()
        process.communicate()


def test_the_kernel_knows_of_the_same_signal_handlers_as_before(library):
    """Also of those that nobody set through Python; UCX would like to catch SIGSEGV and others."""
    out = run(
        """
        import faulthandler
        def dispositions():
            with open("/proc/self/status") as status:
                return [line.split() for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
        before = dispositions(), faulthandler.is_enabled()
        producer, consumer = Producer("4MiB", **OPTIONS), Consumer("4MiB", **OPTIONS, access="served")
        during = dispositions(), faulthandler.is_enabled()
        consumer.pull(producer.publish("a", PAYLOAD))
        consumer.start_pull(producer.publish("b", PAYLOAD)).result()
        used = dispositions(), faulthandler.is_enabled()
        consumer.close(), producer.close()
        after = dispositions(), faulthandler.is_enabled()
        print(before == during == used == after, before[1])
        """,
        library,
        within=SOON,
    )
    assert out == "True True\n"
