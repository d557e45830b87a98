"""Texts, times and durations as an operator reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone

from apscheduler_tasklock._lock.words import printable, rounded


def unreadable_in_words(columns: Sequence[str]) -> str:
    """Return which columns of a row cannot be read; ``""`` for none."""
    return f"cannot be read: {', '.join(columns)}" if columns else ""


def one_cell(text: str) -> str:
    """Return a printable text without two spaces in a row, which end a cell; ``-`` if it is empty.

    A space that follows another one, or that the text begins or ends with, is written as an escape.
    """
    return re.sub(r"(?<= ) |^ | $", r"\\x20", printable(text)) or "-"


def rfc3339(moment: datetime, timespec: str = "auto") -> str:
    """Return a time in UTC, as in ``2026-01-01T03:00:00Z``.

    :param timespec: as for ``datetime.isoformat``
    """
    try:
        moment = moment.astimezone(timezone.utc)
    except OverflowError:  # in the last hours of the year 9999
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.isoformat(timespec=timespec).replace("+00:00", "Z")


def local_time(moment: datetime) -> str:
    """Return a time as this machine's clock shows it: without the date if that is today's."""
    here = moment.astimezone()
    is_today = here.date() == datetime.now().astimezone().date()
    return f"{here:%H:%M:%S}" if is_today else f"{here:%Y-%m-%d %H:%M:%S}"


def plain_seconds(seconds: float) -> str:
    """Return a duration in seconds, rounded as ``seconds_in_words`` does, as in ``5400s``."""
    return f"{rounded(seconds):.15g}s"
