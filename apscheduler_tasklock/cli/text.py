"""Texts, times and durations as an operator reads them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from datetime import datetime
from difflib import get_close_matches

from apscheduler_tasklock._lock.words import printable, rounded


def one_cell(text: str) -> str:
    """Return a printable text without two spaces in a row, which end a cell; ``-`` if it is empty.

    A space that follows another one, or that the text begins or ends with, is written as an escape.
    """
    return re.sub(r"(?<= ) |^ | $", r"\\x20", printable(text)) or "-"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question for the known word that is most like a misspelled one; ``""`` if none is.

    The question goes behind a message.
    """
    found = get_close_matches(word, sorted(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def wrapped(text: str, width: int) -> str:
    """Return a text whose paragraphs are wrapped. Lines that begin with a space are kept."""
    lines: list[str] = []
    paragraph: list[str] = []
    for line in [*text.strip().splitlines(), ""]:
        if line and not line.startswith(" "):
            paragraph.append(line)
            continue
        lines += textwrap.wrap(
            " ".join(paragraph), width, break_long_words=False, break_on_hyphens=False
        )
        lines.append(line)
        paragraph.clear()
    return "\n".join(lines).rstrip()


def local(moment: datetime) -> datetime:
    """Return a time in this machine's zone, or as it is if Python has no such time there."""
    try:
        return moment.astimezone()
    except (ValueError, OverflowError):  # one of the first or the last times that there are
        return moment


def local_time(moment: datetime) -> str:
    """Return a time in this machine's zone, with the zone's name, and without today's date."""
    here = local(moment)
    return f"{_without_zone(here)} {here:%Z}"


def time_in_cell(moment: datetime) -> str:
    """Return a time as :func:`local_time` does, but without the name that this zone has now.

    That name stands in the head of the column.
    """
    here = local(moment)
    return _without_zone(here) if here.tzname() == zone_now() else local_time(moment)


def zone_now() -> str:
    """Return the name that this machine's zone has now."""
    return f"{datetime.now().astimezone():%Z}"


def _without_zone(here: datetime) -> str:
    is_today = here.date() == datetime.now().astimezone().date()
    return f"{here:%H:%M:%S}" if is_today else f"{here:%Y-%m-%d %H:%M:%S}"


def plain_seconds(seconds: float) -> str:
    """Return a duration in seconds, rounded as ``seconds_in_words`` does, as in ``5400s``."""
    return f"{rounded(seconds):.15g}s"
