"""One finding of `flashduet doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, how it stands, and what to do about it (empty when nothing)."""

    area: str
    name: str
    status: Status
    detail: str
    fix: str = ""
