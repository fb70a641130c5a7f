# SPDX-License-Identifier: Apache-2.0
"""Peak memory of this process, without what it only shares with others."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class Peak:
    """The most private memory that this process uses from now on, above what it uses now.

    The kernel keeps the peak of all resident memory only.  What of it is shared (a pool of another
    process that is mapped) or belongs to files does not shrink, so it is taken off as it is at the end.
    """

    def __init__(self) -> None:
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
        self._before = _field("RssAnon")

    def nbytes(self) -> int:
        """Return the peak in bytes."""
        return _field("VmHWM") - _field("RssFile") - _field("RssShmem") - self._before


def _field(name: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) << 10
    raise OSError(f"{_STATUS} has no {name}")
