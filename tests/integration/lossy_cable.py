# SPDX-License-Identifier: Apache-2.0
"""A cable that loses and delays packets, where the kernel has no ``netem``: two TUN devices and a process.

Run as a program it makes a device in each of two network namespaces and carries packets between
them.  A line ``LOSS SECONDS`` on its standard input sets the share that is lost and the delay of the
rest; it ends with its standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import sys
import time

DEVICE = "tfwire"

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 1500  # of such a device


def tun(network: str) -> int:
    """Make a device in a namespace; return the descriptor that stands for its cable."""
    with open(f"/run/netns/{network}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def carry(one: int, other: int) -> None:
    """Carry packets until the standard input ends."""
    rng = random.Random(1)
    loss, delay = 0.0, 0.0
    ends = {one: other, other: one}
    waiting: list[tuple[float, int, int, bytes]] = []
    order = itertools.count()
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([0, one, other], [], [], pause)
        if 0 in ready:
            line = os.read(0, 1000)
            if not line:
                return
            loss, delay = map(float, line.split()[-2:])
            os.write(1, b"set\n")
        now = time.monotonic()
        for end in set(ready) - {0}:
            packet = os.read(end, _MTU + 100)
            if rng.random() >= loss:
                heapq.heappush(waiting, (now + delay, next(order), ends[end], packet))
        while waiting and waiting[0][0] <= now:
            _, _, end, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # the device is down, or its queue full: lost
                os.write(end, packet)


if __name__ == "__main__":
    devices = [tun(network) for network in sys.argv[1:3]]
    os.write(1, b"made\n")
    carry(*devices)
