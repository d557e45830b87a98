"""Words: texts, times and durations as an operator reads them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def printable(text: str) -> str:
    """Return a text with its control characters written as escapes.

    A task's name may have any characters. Without the escapes it could move a terminal's cursor,
    set the window's title, or be shown from right to left.
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def seconds_in_words(seconds: float) -> str:
    """Return a duration in its two largest units, as in ``1 h 30 min``."""
    if seconds < 0:
        return f"-{seconds_in_words(-seconds)}"
    if rounded(seconds) < 10:
        return f"{rounded(seconds):g} s"
    left, words = round(seconds), list[str]()
    for size, unit in _UNITS:
        count, left = divmod(left, size)
        if count:
            words.append(f"{count} {unit}")
        if words and (not left or len(words) == 2):
            break
    return " ".join(words)


def rounded(seconds: float) -> float:
    """Return a duration rounded to seconds; to tenths below 10 s, to milliseconds below 1 s."""
    size = abs(seconds)
    return round(seconds, 3 if size < 1 else 1 if size < 10 else 0)


def rfc3339(moment: datetime, timespec: str = "auto") -> str:
    """Return a time in UTC, as in ``2026-01-01T03:00:00Z``.

    :param timespec: as for ``datetime.isoformat``
    """
    try:
        moment = moment.astimezone(timezone.utc)
    except OverflowError:  # in the last hours of the year 9999
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.isoformat(timespec=timespec).replace("+00:00", "Z")


def unreadable_in_words(columns: Sequence[str]) -> str:
    """Return which columns of a row cannot be read; ``""`` for none."""
    return f"cannot be read: {', '.join(columns)}" if columns else ""
