# SPDX-License-Identifier: Apache-2.0
"""A network with a loopback device and nothing else, for peers that listen on every interface."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_IFREQ = struct.Struct("16sH22x")


def enter() -> str:
    """Move this thread, and the processes that it starts from now on, into such a network.

    Returns:
        "" or why that is not possible; nothing has changed then.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        error = os.strerror(ctypes.get_errno())
        return f"no namespace of its own ({error}); run it as root, or by `unshare -rn`"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", _IFF_UP | _IFF_RUNNING))
    return ""
