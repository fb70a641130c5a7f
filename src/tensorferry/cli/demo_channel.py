# SPDX-License-Identifier: Apache-2.0
"""The demo's channel between stages: length-prefixed msgpack over a plain tcp socket."""

from __future__ import annotations

import select
import socket
import struct
import time
from types import TracebackType
from typing import Any

import msgpack

from tensorferry.errors import ProtocolError, UsageError

MAX_MESSAGE_NBYTES = 1 << 20
_LENGTH = struct.Struct(">I")
_RETRY_SECONDS = 0.1


class ChannelLostError(ProtocolError):
    """The peer closed the channel or died; what it said about the reason is in its own output."""


def parse_address(text: str) -> tuple[str, int]:
    """Split ``host:port``; an IPv6 address stands in brackets.

    Raises:
        UsageError: It has another form.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise UsageError(f"an IPv6 address stands in brackets, as in [::1]:5000: {text!r}")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"an address is host:port, not {text!r}")
    return host, int(port)


class Channel:
    """Messages to and from one peer.

    Args:
        connection: A connected socket, closed with the channel.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            UsageError: The message is too large; nothing was sent.
            ChannelLostError: The peer is gone.
        """
        data = msgpack.packb(message)
        if len(data) > MAX_MESSAGE_NBYTES:
            raise UsageError(f"a message of {len(data)} bytes; the limit is {MAX_MESSAGE_NBYTES}")
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise ChannelLostError(f"the next stage is gone: {error}") from error

    def receive(self) -> dict[str, Any]:
        """Wait for one message.

        Raises:
            ChannelLostError: The peer closed without having said that it is done, or died.
            ProtocolError: It sent what is no message.
        """
        (nbytes,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if nbytes > MAX_MESSAGE_NBYTES:
            raise ProtocolError(f"a message of {nbytes} bytes; the limit is {MAX_MESSAGE_NBYTES}")
        try:
            message = msgpack.unpackb(self._exactly(nbytes))
        except (ValueError, msgpack.UnpackException) as error:
            raise ProtocolError(f"a message that cannot be decoded: {error}") from error
        if not isinstance(message, dict):
            raise ProtocolError(f"a message that is a {type(message).__name__}, not a map")
        return message

    def left_by_peer(self, timeout: float = 0.0) -> bool:
        """Whether the peer closes its end within ``timeout`` seconds, read or unread data aside."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(timeout * 1e3))

    def _exactly(self, nbytes: int) -> bytes:
        received = bytearray()
        while len(received) < nbytes:
            try:
                part = self._socket.recv(nbytes - len(received))
            except OSError as error:
                raise ChannelLostError(f"the stage before is gone: {error}") from error
            if not part:
                raise ChannelLostError("the stage before closed the channel too early")
            received += part
        return bytes(received)


def listen(address: str) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        UsageError: The address has another form, or cannot be listened on.
    """
    host, port = parse_address(address)
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1
        )
    except OSError as error:
        raise UsageError(f"cannot listen on {address}: {error}") from error


def accept(listener: socket.socket, timeout: float) -> Channel:
    """Wait for the one peer.

    Args:
        listener: From :func:`listen`; closed afterwards.
        timeout: Seconds.

    Raises:
        UsageError: Nobody came.
    """
    with listener:
        listener.settimeout(timeout)
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            raise UsageError(f"nobody connected within {timeout:.0f} s") from error
    connection.settimeout(None)
    return Channel(connection)


def connect(address: str, timeout: float) -> Channel:
    """Connect to the next stage, trying again until it listens.

    Args:
        address: ``host:port``.
        timeout: Seconds.

    Raises:
        UsageError: It does not listen within that time.
    """
    target = parse_address(address)
    end = time.monotonic() + timeout
    while True:
        try:
            connection = socket.create_connection(target, timeout=max(0.1, end - time.monotonic()))
        except OSError as error:
            if time.monotonic() >= end:
                raise UsageError(f"no stage listens on {address}: {error}") from error
            time.sleep(_RETRY_SECONDS)
        else:
            connection.settimeout(None)
            return Channel(connection)
