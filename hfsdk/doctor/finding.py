"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass

OK, MISSING, NOTE = "ok", "missing", "note"


@dataclass(frozen=True)
class DoctorLine:
    """One line of the report."""

    topic: str
    name: str
    state: str
    text: str
