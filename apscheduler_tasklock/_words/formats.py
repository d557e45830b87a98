"""How times and durations are written: for programs, for a terminal, or for a page."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Protocol

# The times in words that are made for all readers: in findings those of programs, and in reasons
# those of people.
_IN_UTC = re.compile(r"\b(\d{4}-[01]\d-[0-3]\d)[T ]([0-2]\d:[0-5]\d:[0-5]\d)(?:Z| UTC)\b", re.ASCII)


class Formats(Protocol):
    """Writes the times and the durations that stand in words."""

    def moment(self, moment: datetime | None) -> str:
        """Return a time; ``""`` for none."""

    def seconds(self, seconds: float | None) -> str:
        """Return a duration; ``""`` for none."""


def for_reader(words: str, formats: Formats) -> str:
    """Return words with their times in UTC as the reader's other times are written."""

    def moment_of(found: re.Match[str]) -> str:
        try:
            return formats.moment(datetime.fromisoformat(f"{found[1]}T{found[2]}+00:00"))
        except (ValueError, OverflowError):  # in a text that anybody may have written
            return found[0]

    return _IN_UTC.sub(moment_of, words)
