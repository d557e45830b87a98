"""How times and durations are written: for programs, for a terminal, or for a page."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol


class Formats(Protocol):
    """Writes the times and the durations that stand in words."""

    def moment(self, moment: datetime | None) -> str:
        """Return a time; ``""`` for none."""

    def seconds(self, seconds: float | None) -> str:
        """Return a duration; ``""`` for none."""
