# SPDX-License-Identifier: Apache-2.0
"""The benchmark's channel: length-prefixed bytes, or msgpack maps, over a plain tcp socket."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import msgpack

from tensorferry.errors import ProtocolError

MAX_NBYTES = 256 << 20
_LENGTH = struct.Struct(">I")
_CHUNK = 1 << 16


class LinkLostError(ProtocolError):
    """The other side closed the link or died; what it said about the reason comes from itself."""


class Link:
    """Messages to and from one process; closed at the end of a ``with`` block.

    Args:
        connection: A connected tcp socket, closed with the link.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the socket's descriptor, for ``select``."""
        return self._socket.fileno()

    @property
    def host(self) -> str:
        """This side's address."""
        return str(self._socket.getsockname()[0])

    @property
    def peer(self) -> str:
        """The other side's address."""
        return str(self._socket.getpeername()[0])

    def settimeout(self, seconds: float | None) -> None:
        """Bound what follows: a call that takes longer raises ``TimeoutError``, and ends the link's use."""
        self._socket.settimeout(seconds)

    def send(self, data: bytes) -> None:
        """Send one message.

        Raises:
            LinkLostError: The other side is gone.
        """
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except TimeoutError:
            raise
        except OSError as error:
            raise LinkLostError(f"the other side is gone: {error}") from error

    def receive(self) -> bytes:
        """Wait for one message.

        Raises:
            LinkLostError: The other side is gone.
            ProtocolError: It announced more than a message may have.
        """
        self._fill(_LENGTH.size)
        (nbytes,) = _LENGTH.unpack_from(self._received)
        if nbytes > MAX_NBYTES:
            raise ProtocolError(f"a message of {nbytes} bytes; the limit is {MAX_NBYTES}")
        end = _LENGTH.size + nbytes
        self._fill(end)
        message = bytes(memoryview(self._received)[_LENGTH.size : end])
        del self._received[:end]
        return message

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a map of plain values.

        Raises:
            LinkLostError: The other side is gone.
        """
        self.send(msgpack.packb(message))

    def hear(self) -> dict[str, Any]:
        """Wait for a map of plain values.

        Raises:
            LinkLostError: The other side is gone.
            ProtocolError: It sent something else.
        """
        data = self.receive()
        try:
            message = msgpack.unpackb(data)
        except (ValueError, msgpack.UnpackException) as error:
            raise ProtocolError(f"a message that cannot be decoded: {error}") from error
        if not isinstance(message, dict):
            raise ProtocolError(f"a message that is a {type(message).__name__}, not a map")
        return message

    def close(self) -> None:
        """Close the socket; the other side learns of it."""
        self._socket.close()

    def _fill(self, nbytes: int) -> None:
        while len(self._received) < nbytes:
            try:
                part = self._socket.recv(max(_CHUNK, nbytes - len(self._received)))
            except TimeoutError:
                raise
            except OSError as error:
                raise LinkLostError(f"the other side is gone: {error}") from error
            if not part:
                raise LinkLostError("the other side is gone")
            self._received += part
