# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import torch

from tensorferry.cli import demo_stages
from tensorferry.cli.demo_channel import Channel, ChannelLostError
from tensorferry.cli.demo_report import Report
from tensorferry.cli.demo_stages import WINDOW, Receiver, Sender, Settings
from tensorferry.consumer import Consumer
from tensorferry.errors import ProtocolError, TransferError
from tensorferry.producer import Producer

Make = Callable[..., object]


class Stages:
    """Two stages over the fake backend, joined by a channel."""

    def __init__(self, producer: Producer, consumer: Consumer) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.channel = Channel(socket.create_connection(listener.getsockname()))
            self.other = Channel(listener.accept()[0])
        settings = Settings(torch.device("cpu"), "auto", {}, 20, 1)
        settings.producer = lambda name: producer  # type: ignore[method-assign]
        settings.consumer = lambda name: consumer  # type: ignore[method-assign]
        self.sender = Sender(settings, "hop", self.channel)
        self.receiver = Receiver(settings, "stage", self.other)
        self.producer = producer

    def send(self, index: int) -> None:
        self.sender.send(Report(index, "a ferry", index), {"x": torch.full((3,), index)})


@pytest.fixture
def stages(make_producer: Make, make_consumer: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stages]:
    monkeypatch.setattr(demo_stages, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(demo_stages, "_GRACE_SECONDS", 0.1)
    made = Stages(make_producer(), make_consumer())  # type: ignore[arg-type]
    with made.channel, made.other:
        yield made


def test_reports_grow_by_what_was_measured(stages: Stages):
    stages.send(4)
    report, tensors = next(iter(stages.receiver))
    assert torch.equal(tensors["x"], torch.full((3,), 4))
    assert (report.index, report.prompt, report.seed) == (4, "a ferry", 4)
    hop = report.hops[0]
    assert (hop.name, hop.tensors, hop.bytes) == ("hop", 1, 24)
    assert hop.manifest > 0
    assert hop.publish > 0
    assert hop.wire + hop.landing > 0
    assert hop.access in ("served", "rdma", "mapped")


def test_a_stage_is_never_far_ahead_of_the_next(stages: Stages, threads: ThreadPoolExecutor):
    many = WINDOW + 5

    def send_all() -> None:
        for index in range(many):
            stages.send(index)
        stages.sender.end()

    sending = threads.submit(send_all)
    received = []
    for report, _ in stages.receiver:
        received.append(report.index)
        assert stages.producer.statistics().live <= WINDOW
        assert stages.producer.statistics().publications <= report.index + 1 + WINDOW
    sending.result(10)
    assert received == list(range(many))
    assert stages.producer.statistics().expired == 0


def test_the_window_is_kept_while_nothing_is_taken(stages: Stages, threads: ThreadPoolExecutor, wait_for):
    sending = threads.submit(lambda: [stages.send(index) for index in range(WINDOW + 1)])
    wait_for(lambda: stages.producer.statistics().publications == WINDOW)
    assert not sending.done()
    next(iter(stages.receiver))
    sending.result(10)


def test_a_next_stage_that_left_without_taking_all_is_an_error(stages: Stages):
    stages.send(0)
    stages.other.__exit__(None, None, None)
    with pytest.raises(ChannelLostError):
        stages.sender.end()


def test_a_stage_before_that_died_is_not_the_fault_of_the_pull(stages: Stages):
    stages.send(0)
    stages.producer.close()
    stages.channel.__exit__(None, None, None)
    with pytest.raises(ChannelLostError):
        next(iter(stages.receiver))


def test_a_failed_pull_from_a_stage_that_lives_is_a_failure_of_its_own(stages: Stages):
    stages.send(0)
    stages.producer.close()
    with pytest.raises(TransferError):
        next(iter(stages.receiver))


def test_a_next_stage_that_took_all_may_leave(stages: Stages):
    stages.send(0)
    next(iter(stages.receiver))
    stages.channel.send({"end": True})
    assert list(stages.receiver) == []
    stages.other.__exit__(None, None, None)
    stages.sender._wait_until_held(0)


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"manifest": b"x"},
        {"manifest": "x", "report": asdict(Report(0, "", 0))},
        {"manifest": b"x", "report": asdict(Report(0, "", 0))},
    ],
    ids=["empty", "no report", "text", "no hop"],
)
def test_other_messages_are_protocol_errors(stages: Stages, message: dict[str, object]):
    stages.channel.send(message)
    with pytest.raises(ProtocolError):
        next(iter(stages.receiver))
