"""Texts, times and durations as an operator reads them."""

from __future__ import annotations

import re
from datetime import datetime

from apscheduler_tasklock._lock.words import printable, rounded


def one_cell(text: str) -> str:
    """Return a printable text without two spaces in a row, which end a cell; ``-`` if it is empty.

    A space that follows another one, or that the text begins or ends with, is written as an escape.
    """
    return re.sub(r"(?<= ) |^ | $", r"\\x20", printable(text)) or "-"


def local_time(moment: datetime) -> str:
    """Return a time as this machine's clock shows it: without the date if that is today's.

    The zone's name is added to a time that the clock shows twice, because it goes back.
    """
    here = moment.astimezone()
    is_today = here.date() == datetime.now().astimezone().date()
    shown = f"{here:%H:%M:%S}" if is_today else f"{here:%Y-%m-%d %H:%M:%S}"
    return f"{shown} {here:%Z}" if _is_shown_twice(here.replace(tzinfo=None)) else shown


def _is_shown_twice(plain: datetime) -> bool:
    """Return whether this machine's clock shows a time twice."""
    try:
        return plain.replace(fold=0).astimezone() != plain.replace(fold=1).astimezone()
    except (ValueError, OverflowError):  # at the first and the last times that there are
        return False


def plain_seconds(seconds: float) -> str:
    """Return a duration in seconds, rounded as ``seconds_in_words`` does, as in ``5400s``."""
    return f"{rounded(seconds):.15g}s"
