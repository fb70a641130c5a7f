# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
import struct
import threading

import pytest

from tensorferry.cli import demo_channel
from tensorferry.errors import ProtocolError, UsageError


def pair() -> tuple[demo_channel.Channel, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    return demo_channel.Channel(here), there


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host:1", ("host", 1)),
        ("127.0.0.1:65535", ("127.0.0.1", 65535)),
        ("[::1]:80", ("::1", 80)),
        ("[2605:340::1]:16051", ("2605:340::1", 16051)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]):
    """kvcache-ai/Mooncake#470, vllm-project/vllm-ascend#4103: addresses of IPv6 were cut at a colon."""
    assert demo_channel.parse_address(text) == address


@pytest.mark.parametrize("text", ["host", "host:", ":80", "::1:80", "host:-1", "host:70000", "host:x", ""])
def test_addresses_of_another_form_are_refused(text: str):
    with pytest.raises(UsageError):
        demo_channel.parse_address(text)


def test_messages_cross_whole():
    listener = demo_channel.listen("127.0.0.1:0")
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    message = {"manifest": bytes(500_000), "report": {"hops": [1, 2.5, None, "x"]}}
    received = []

    def serve() -> None:
        with demo_channel.accept(listener, 10) as channel:
            received.append(channel.receive())

    thread = threading.Thread(target=serve)
    thread.start()
    with demo_channel.connect(address, 10) as channel:
        channel.send(message)
    thread.join(10)
    assert received == [message]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 1 << 31),
        struct.pack(">I", 100) + b"short",
        struct.pack(">I", (1 << 20) + 1) + b"x",
        struct.pack(">I", 1) + b"\xc1",
        struct.pack(">I", 1) + b"\x01",
        struct.pack(">I", 6) + b"\xdd\xff\xff\xff\xff\x00",
        struct.pack(">I", 5000) + b"\x91" * 5000,
        b"\x00",
        b"",
    ],
    ids=[
        "huge",
        "too long by one",
        "cut",
        "no msgpack",
        "no map",
        "huge array",
        "deep",
        "no length",
        "closed",
    ],
)
def test_what_is_no_message_is_a_protocol_error(data: bytes):
    channel, peer = pair()
    with channel:
        peer.sendall(data)
        peer.close()
        with pytest.raises(ProtocolError):
            channel.receive()


def test_nobody_there_is_an_error_within_the_time():
    with pytest.raises(UsageError, match="no stage listens"):
        demo_channel.connect("127.0.0.1:1", 0.3)
    with pytest.raises(UsageError, match="nobody connected"):
        demo_channel.accept(demo_channel.listen("127.0.0.1:0"), 0.1)


def test_a_stream_that_ends_too_early_is_a_lost_channel():
    channel, peer = pair()
    peer.close()
    with channel, pytest.raises(demo_channel.ChannelLostError):
        channel.receive()


def test_what_is_too_long_is_not_sent():
    channel, peer = pair()
    with channel, peer, pytest.raises(UsageError, match="limit"):
        channel.send({"manifest": bytes(demo_channel.MAX_MESSAGE_NBYTES)})


def test_sending_to_a_peer_that_is_gone_is_a_lost_channel():
    channel, peer = pair()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    with channel:
        assert channel.left_by_peer(5.0)
        with pytest.raises(demo_channel.ChannelLostError):
            channel.send({"manifest": b""})


def test_a_channel_knows_that_its_peer_left_also_with_data_unread():
    channel, peer = pair()
    with channel, peer:
        assert not channel.left_by_peer()
        peer.sendall(b"x")
        assert not channel.left_by_peer(0.01)
        peer.shutdown(socket.SHUT_WR)
        assert channel.left_by_peer(5.0)
