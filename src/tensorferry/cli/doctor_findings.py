# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of one thing."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "note", "warn", "fail"]


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        area: What it is about, for example ``"UCX"``.
        level: ``fail`` is what keeps tensorferry from working here, ``warn`` what makes it slow or will
            surprise somebody, ``note`` a fact that may matter.
        text: What was found.
        cure: What to do; empty where nothing is to be done.
    """

    area: str
    level: Level
    text: str
    cure: str = ""
