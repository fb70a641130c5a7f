# SPDX-License-Identifier: Apache-2.0
"""Arguments that producers and consumers share, checked once and in one way."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import Any

import torch

from tensorferry.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", re.ASCII)
_FOREVER = 1e9  # seconds: longer waits overflow the clocks of some systems


class Deadline:
    """A point in time that all phases of one call share."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.end = time.monotonic() + timeout

    def remaining(self) -> float:
        """Return the seconds that are left, never less than 0."""
        return max(0.0, self.end - time.monotonic())


def as_nbytes(size: int | str, what: str) -> int:
    """Return a number of bytes that was given as a number or as text.

    Args:
        size: Bytes, or text such as ``"4GiB"``, ``"512MB"`` or ``"64 KiB"``: KiB, MiB, GiB
            and TiB are powers of 1024, kB, MB, GB and TB powers of 1000.
        what: What messages call it.

    Raises:
        UsageError: It is neither, or not a positive whole number of bytes.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise UsageError(f"{what} is a number of bytes or text like '4GiB' or '512MB', not {size!r}")
        exact = float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
        if exact != int(exact):
            raise UsageError(f"{what} {size!r} is not a whole number of bytes")
        nbytes = int(exact)
    elif isinstance(size, int) and not isinstance(size, bool):
        nbytes = size
    else:
        raise UsageError(f"{what} is a number of bytes or text like '4GiB', not {type(size).__name__}")
    if not 0 < nbytes < 1 << 62:
        raise UsageError(f"{what} is a positive number of bytes, not {nbytes}")
    return nbytes


def as_seconds(value: float, what: str, *, positive: bool = False) -> float:
    """Return a number of seconds as a float.

    Args:
        value: Seconds; infinity is cut to some decades unless ``positive``.
        what: What messages call it.
        positive: Whether it must be finite and above 0.

    Raises:
        UsageError: It is no number, not a number, negative, or not as ``positive`` demands.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{what} is a number of seconds, not {type(value).__name__}")
    if math.isnan(value) or value < 0 or (positive and not 0 < value <= _FOREVER):
        kind = (
            f"positive number of seconds up to {_FOREVER:.0e}" if positive else "number of seconds from 0 up"
        )
        raise UsageError(f"{what} is a {kind}, not {value!r}")
    return min(float(value), _FOREVER)


def as_choice(value: str, allowed: tuple[str, ...], what: str) -> str:
    """Return a word that is one of ``allowed``.

    Raises:
        UsageError: It is not; the message lists those that are.
    """
    if value not in allowed:
        raise UsageError(f"{what} is one of {', '.join(map(repr, allowed))}, not {value!r}")
    return value


def as_options(options: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of a backend's options.

    Raises:
        UsageError: They are not a mapping from text to text.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise UsageError(f"backend_options is a mapping, not {type(options).__name__}")
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"backend_options maps str to str, but has {name!r}: {value!r}")
    return dict(options)


def as_name(name: str | None) -> str | None:
    """Return the name of a producer or consumer.

    Raises:
        UsageError: It is not valid text of at most 4096 bytes.
    """
    if name is None:
        return None
    if not isinstance(name, str):
        raise UsageError(f"name is a str, not {type(name).__name__}")
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"the name {name!r} is not valid Unicode") from error
    if nbytes > 4096:
        raise UsageError(f"the name has {nbytes} bytes, the limit is 4096")
    return name


def as_device(device: Any) -> torch.device:
    """Return a CPU or CUDA device with its index: ``"cuda"`` is the current device.

    Raises:
        UsageError: It is no such device, or cannot be used on this machine.
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{device!r} is not a device: {_first_line(error)}") from error
    if place.type == "cpu":
        return torch.device("cpu")
    if place.type != "cuda":
        raise UsageError(f"tensors are on the CPU or on a CUDA device, not on {str(place)!r}")
    try:
        count = torch.cuda.device_count()
        index = torch.cuda.current_device() if place.index is None else place.index
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"the device {str(place)!r} cannot be used: {_first_line(error)}") from error
    if index >= count:
        raise UsageError(f"the device {str(place)!r} is not there; torch sees {count} CUDA devices")
    return torch.device("cuda", index)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
