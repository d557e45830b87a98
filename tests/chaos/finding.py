"""A finding of the checker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something that must not have happened.

    :ivar fault: the kind of fault
    :ivar at: when, on the machine's monotonic clock
    :ivar text: which runs, and when
    """

    fault: str
    task: str
    at: float
    text: str

    def __str__(self) -> str:
        where = f"{self.task}: " if self.task else ""
        return f"{self.fault} at {self.at:.3f}: {where}{self.text}"
