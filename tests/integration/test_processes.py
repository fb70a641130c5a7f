# SPDX-License-Identifier: Apache-2.0
"""Exit, signals, fork, idling and many threads, with real UCX underneath.

Each test is a script in a process of its own, since how that process ends is what is tested.
Those that depend on nothing inside UCX run with the library that is chosen by default.
"""

from __future__ import annotations

import signal
import time

import pytest
from scripts import run, start


@pytest.fixture(params=["served", "mapped"])
def access(request):
    return request.param


def test_exit_without_close_is_silent_and_quick(library, access):
    started = time.monotonic()
    out = run(
        f"""
        producer, consumer = Producer("64MiB", access={access!r}, **OPTIONS), Consumer("64MiB", **OPTIONS)
        kept = producer.publish("a", PAYLOAD)
        consumer.pull(kept, release=False)
        def wait():
            with contextlib.suppress(tensorferry.ClosedError):
                producer.wait_released("a", 600)
        threading.Thread(target=wait, daemon=True).start()
        print("end", flush=True)
        """,
        library,
    )
    assert out == "end\n"
    assert time.monotonic() - started < 30


def test_what_nobody_has_is_closed_and_warned_of():
    out = run(
        """
        warnings.simplefilter("always")
        def lose():
            producer, consumer = Producer("4MiB", **OPTIONS), Consumer("4MiB", **OPTIONS)
            consumer.pull(producer.publish("a", PAYLOAD))
        with warnings.catch_warnings(record=True) as caught:
            lose()
            gc.collect()
        print(sorted(str(warning.message).split(" was")[0] for warning in caught))
        for _ in range(100):
            if not any(t.name == "tensorferry-producer" for t in threading.enumerate()):
                break
            time.sleep(0.05)
        else:
            print("the thread lives on")
        """
    )
    assert out == "['a Consumer', 'a Producer']\n"


def test_ctrl_c_ends_a_pull_that_hangs():
    """The producer is stopped, so that only the signal can end the pull."""
    producer = start(
        """
        producer = Producer("4MiB", access="served", **OPTIONS)
        print(producer.publish("a", PAYLOAD).hex(), flush=True)
        time.sleep(600)
        """
    )
    manifest = producer.stdout.readline().strip()
    consumer = start(
        f"""
        consumer = Consumer("4MiB", **OPTIONS, access="served")
        manifest = bytes.fromhex({manifest!r})
        consumer.pull(manifest, release=False)
        print("ready", flush=True)
        time.sleep(0.5)
        try:
            consumer.pull(manifest, timeout=600)
        except KeyboardInterrupt:
            print("interrupted", consumer.statistics().failed_pulls, flush=True)
        """
    )
    try:
        assert consumer.stdout.readline() == "ready\n"
        producer.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        consumer.send_signal(signal.SIGINT)
        out, err = consumer.communicate(timeout=30)
        assert (consumer.returncode, out, err) == (0, "interrupted 1\n", "")
    finally:
        for process in (producer, consumer):
            process.kill()
            process.communicate()


def test_a_forked_child_leaves_its_parent_alone(library, access):
    """openucx/ucx#10748, #4325: UCX in a forked child hangs or crashes."""
    out = run(
        f"""
        warnings.simplefilter("ignore")
        producer, consumer = Producer("4MiB", access={access!r}, **OPTIONS), Consumer("4MiB", **OPTIONS)
        manifest = producer.publish("a", PAYLOAD)
        consumer.pull(manifest, release=False)
        for way in ("use", "collect", "exit"):
            child = os.fork()
            if child == 0:
                if way == "use":
                    refused = 0
                    for call in (lambda: producer.publish("b", PAYLOAD), lambda: consumer.pull(manifest),
                                 producer.statistics, consumer.statistics):
                        try:
                            call()
                        except tensorferry.ForkedProcessError:
                            refused += 1
                    producer.close(), consumer.close()
                    os._exit(refused)
                if way == "collect":
                    del producer, consumer
                    gc.collect()
                    os._exit(4)
                # The producer's thread does not exist here and never drops its references, which
                # nanobind would report.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                sys.exit(4)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code == 4, (way, code)
        assert torch.equal(consumer.pull(manifest)["x"], PAYLOAD["x"])
        assert producer.wait_released("a", 10)
        print("alive", producer.statistics().publications)
        consumer.close()
        producer.close()
        """,
        library,
    )
    assert out == "alive 1\n"


def test_a_dataloader_may_fork_beside_an_open_pool():
    """uccl-project/uccl#895, openucx/ucx#11573: workers of a DataLoader died."""
    out = run(
        """
        warnings.simplefilter("ignore")
        with Producer("4MiB", **OPTIONS) as producer, Consumer("4MiB", **OPTIONS) as consumer:
            consumer.pull(producer.publish("a", PAYLOAD))
            loader = torch.utils.data.DataLoader(range(64), batch_size=8, num_workers=2,
                                                 multiprocessing_context="fork")
            print(sum(int(batch.sum()) for batch in loader))
            assert torch.equal(consumer.pull(producer.publish("b", PAYLOAD))["x"], PAYLOAD["x"])
        """
    )
    assert out == f"{sum(range(64))}\n"


def test_idling_costs_next_to_nothing(library):
    out = run(
        """
        OPTIONS["access"] = "served"
        with Producer("4MiB", **OPTIONS) as producer, Consumer("4MiB", **OPTIONS) as consumer:
            consumer.pull(producer.publish("a", PAYLOAD))
            producer.publish("b", PAYLOAD)
            time.sleep(1)
            before = time.process_time()
            time.sleep(3)
            print(time.process_time() - before)
        """,
        library,
    )
    assert float(out) < 0.06, "more than 2 % of a core for a producer and a consumer"


def test_eight_threads_share_one_producer_and_one_consumer(library, access):
    """sgl-project/sglang#28897, ai-dynamo/nixl#1501, #636: several threads broke an assertion in UCX."""
    out = run(
        f"""
        from concurrent.futures import ThreadPoolExecutor
        torch.set_num_threads(1)
        producer = Producer("8MiB", access={access!r}, **OPTIONS)
        consumer = Consumer("2MiB", access={access!r}, **OPTIONS)
        def work(worker):
            for turn in range(150):
                size = (16 << 10, 2_424_832 // 8, 1)[turn % 3]
                x = torch.full((size,), worker * 1000 + turn, dtype=torch.int32)
                manifest = producer.publish(f"{{worker}}-{{turn}}", {{"x": x}}, timeout=60)
                if turn % 4 == 3:
                    with consumer.borrow(manifest) as borrowed:
                        assert torch.equal(borrowed["x"], x)
                else:
                    assert torch.equal(consumer.pull(manifest)["x"], x)
        with ThreadPoolExecutor(8) as threads:
            for done in [threads.submit(work, worker) for worker in range(8)]:
                done.result()
        deadline = time.monotonic() + 10
        while producer.statistics().live and time.monotonic() < deadline:
            time.sleep(0.01)
        one, other = producer.statistics(), consumer.statistics()
        print(one.publications, one.released, one.allocated_nbytes, other.pulls, other.allocated_nbytes)
        consumer.close()
        producer.close()
        """,
        library,
    )
    assert out == "1200 1200 0 1200 0\n"


def test_memory_does_not_grow_with_pulls(access):
    out = run(
        f"""
        import resource
        producer = Producer("16MiB", access={access!r}, **OPTIONS)
        consumer = Consumer("16MiB", access={access!r}, **OPTIONS)
        def rss():
            with open("/proc/self/statm") as statm:
                return int(statm.read().split()[1]) * resource.getpagesize()
        def pulls(count):
            for turn in range(count):
                consumer.pull(producer.publish(f"{{turn}}", PAYLOAD, timeout=10))
        pulls(200)
        before = rss()
        pulls(1000)
        print((rss() - before) >> 20)
        consumer.close()
        producer.close()
        """
    )
    assert int(out) < 16


def test_pulls_into_fresh_memory_register_nothing(library, access):
    """vllm-project/vllm#32181, ai-dynamo/nixl#1210: UCX's cache of registrations grew with each place."""
    out = run(
        f"""
        import collections, resource
        from tensorferry import _transport
        create, registered = _transport.MemoryRegion.create, []
        def counting(*args):
            registered.append(args)
            return create(*args)
        _transport.MemoryRegion.create = counting
        producer = Producer("16MiB", access={access!r}, **OPTIONS)
        consumer = Consumer("16MiB", access={access!r}, **OPTIONS)
        def rss():
            with open("/proc/self/statm") as statm:
                return int(statm.read().split()[1]) * resource.getpagesize()
        kept, places = collections.deque(maxlen=24), set()  # so that memory is not at once the next result's
        def pulls(count):
            for turn in range(count):
                kept.append(consumer.pull(producer.publish(f"{{turn}}", PAYLOAD, timeout=10))["x"])
                places.add(kept[-1].data_ptr())
        pulls(200)
        before, first = rss(), len(registered)
        pulls(2000)
        print((rss() - before) >> 20, len(registered) - first, first, len(places))
        consumer.close()
        producer.close()
        """,
        library,
    )
    grown, later, first, places = map(int, out.split())
    assert grown < 64
    assert later == 0
    assert first > 0, "the spy saw nothing"
    assert places > 20


def test_closing_before_any_consumer_came_is_quick_and_leaves_nothing(library, access):
    """ai-dynamo/dynamo#12759: the end waited for ever for a reader that never came, and buffers leaked."""
    out = run(
        f"""
        descriptors = lambda: len(os.listdir("/proc/self/fd"))
        with Producer("16MiB", access={access!r}, **OPTIONS) as producer:  # what UCX opens once
            pass
        del producer
        gc.collect()
        before = descriptors()
        producer = Producer("16MiB", access={access!r}, **OPTIONS)
        producer.publish("a", PAYLOAD, lease=600)
        started = time.monotonic()
        producer.close(timeout=1)
        seconds, live = time.monotonic() - started, producer.statistics().live
        del producer
        gc.collect()
        print(seconds, descriptors() - before, live)
        """,
        library,
    )
    seconds, descriptors, live = out.split()
    assert float(seconds) < 3
    assert (descriptors, live) == ("0", "0")


def test_closing_frees_the_memory_of_both_pools():
    """Also while the closed objects are still around."""
    out = run(
        """
        import psutil
        used = lambda: psutil.Process().memory_full_info().uss >> 20
        before = used()
        producer = Producer("256MiB", access="served", **OPTIONS)
        consumer = Consumer("256MiB", **OPTIONS)
        manifest = producer.publish("a", {"x": torch.ones(200 << 20, dtype=torch.uint8)})
        with consumer.borrow(manifest):  # a pull might land in its results, and leave the pool untouched
            open_ = used()
        producer.close()
        consumer.close()
        print(open_ - before > 300, used() - before < 100)
        print(producer.statistics().pool_nbytes >> 20, consumer.statistics().pool_nbytes >> 20)
        """
    )
    assert out.split() == ["True", "True", "256", "256"]
