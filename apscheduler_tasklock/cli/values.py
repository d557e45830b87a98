"""What users write on the command line: durations, times, numbers, states."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from datetime import time as day_time

from apscheduler_tasklock.status import TaskState

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

# Whoever wants more has mistaken the unit.
_LONGEST = 100 * 366 * 86400.0

_AGO = re.compile(r"([0-9.]+ ?[smhd])(?: ago)?", re.IGNORECASE)

_POINT = re.compile(
    r"(?P<now>now)"
    r"|(?:(?P<day>today|yesterday)|(?P<date>[0-9]{4}-[0-9]{2}-[0-9]{2}))?"
    r"(?:(?:(?<=.)[t ])?(?P<time>[0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?)"
    r"(?: ?(?P<zone>z|utc|[+-][0-9]{2}(?::?[0-9]{2})?))?)?"
)

_MOMENT = (
    "a time such as 02:00, yesterday, 'yesterday 22:00', 2026-01-31, '2026-01-31 03:00' or "
    "2026-01-31T03:00:00Z, or a duration ago such as 90s, 15m, 2h or 1d"
)

_DURATION = "seconds, or a duration such as 90s, 15m, 2h or 1d"


def duration(text: str) -> float:
    """Return the seconds of ``90``, ``90s``, ``15m``, ``2h`` or ``1d``.

    :raises argparse.ArgumentTypeError: it is none of these, not above 0, or above 100 years
    """
    seconds = _seconds(text)
    if seconds is None:
        raise argparse.ArgumentTypeError(f"must be {_DURATION}, not {text!r}")
    if not 0 < seconds <= _LONGEST:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 100 years, not {text!r}")
    return seconds


def moment(text: str, now: datetime | None = None) -> datetime:
    """Return the time that somebody has written: a time, or a duration before now.

    Without a zone it is in this machine's zone; a time of day is the last one that there was, and
    a day its beginning.

    :param now: by default what this machine's clock tells
    :raises argparse.ArgumentTypeError: it is none
    """
    found = _AGO.fullmatch(text.strip())
    try:
        now = now or datetime.now(timezone.utc)
        told = now - _length(found[1]) if found else _point(text.strip(), now)
    except (ValueError, OverflowError):  # argparse would name this function in its message
        told = None
    if told is None:
        raise argparse.ArgumentTypeError(f"must be {_MOMENT}, not {text!r}")
    return told.astimezone()


@dataclass(frozen=True)
class End:
    """The end of a span of time, as somebody has written it.

    :ivar moment: the time that was written, as of :func:`moment`
    :ivar daily: whether it is a time of day alone, as 02:00
    """

    moment: datetime
    daily: bool

    @classmethod
    def of(cls, text: str) -> End:
        """Return what was written.

        :raises argparse.ArgumentTypeError: it is no time
        """
        found = _POINT.fullmatch(text.strip().lower())
        daily = found is not None and bool(found["time"]) and not (found["day"] or found["date"])
        return cls(moment(text), daily)

    def after(self, begin: datetime | None) -> datetime:
        """Return the end of a span that begins then; ``None`` if it has no beginning.

        After 22:00, and also at midnight, 02:00 is still to come: the span goes on until now.
        """
        if begin is not None and self.daily and self.moment <= begin:
            return datetime.now(timezone.utc).astimezone()
        return self.moment


def _length(text: str) -> timedelta:
    return timedelta(seconds=duration(text.replace(" ", "").lower()))


def _point(text: str, now: datetime) -> datetime | None:
    """Return a point in time; ``None`` if it is written as none.

    :param now: aware
    :raises ValueError: there is no such day, time or offset
    """
    found = _POINT.fullmatch(text.lower())
    if not text or found is None:
        return None
    zone = _zone(found["zone"])
    now = now.astimezone(zone)
    if found["now"]:
        return now
    day = now.date()
    if found["day"] == "yesterday":
        day -= timedelta(days=1)
    elif found["date"]:
        day = date.fromisoformat(found["date"])
    at = _time_of_day(found["time"] or "00:00")
    told = _on(day, at, zone)
    if told > now and not found["day"] and not found["date"]:
        told = _on(day - timedelta(days=1), at, zone)
    return told


def _zone(text: str | None) -> timezone | None:
    """Return a zone that was given; ``None`` for this machine's."""
    if not text:
        return None
    if text in ("z", "utc"):
        return timezone.utc
    hours, minutes = int(text[1:3]), int(text[3:].lstrip(":") or 0)
    offset = timedelta(hours=hours, minutes=minutes)
    return timezone(-offset if text[0] == "-" else offset)


def _time_of_day(text: str) -> day_time:
    clock, _, fraction = text.partition(".")
    hour, minute, second = [*map(int, clock.split(":")), 0][:3]
    return day_time(hour, minute, second, int(fraction[:6].ljust(6, "0")))


def _on(day: date, at: day_time, zone: timezone | None) -> datetime:
    told = datetime.combine(day, at)
    # What has no zone is this machine's, whose offset depends on the day.
    return told.replace(tzinfo=zone) if zone else told.astimezone()


def address(text: str) -> tuple[str, int]:
    """Return the host and the port of ``127.0.0.1:9464``, ``[::1]:9464`` or ``localhost:0``.

    :raises argparse.ArgumentTypeError: it is none
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise argparse.ArgumentTypeError(f"must be a host and a port, HOST:PORT, not {text!r}")
    return host, int(port)


def at_least_one(text: str) -> int:
    """Return a whole number, 1 or more.

    :raises argparse.ArgumentTypeError: it is none
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, not {text!r}")
    return number


def demo_seconds(text: str) -> float:
    """Return for how long the demo runs, in seconds.

    :raises argparse.ArgumentTypeError: it is no number from 1 to 86400
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 86400, not {text!r}")
    return seconds


def state(text: str) -> TaskState:
    """Return a state of a task; ``too-long`` may be written with a hyphen.

    :raises argparse.ArgumentTypeError: there is no such state
    """
    try:
        return TaskState(text.replace("-", " "))
    except ValueError:
        known = ", ".join(known.value.replace(" ", "-") for known in TaskState)
        raise argparse.ArgumentTypeError(f"must be one of {known}, not {text!r}") from None


def namespace(text: str) -> str:
    """Return a prefix of tasks' names.

    :raises argparse.ArgumentTypeError: it has characters that stand for others in patterns
    """
    if set("*?") & set(text):
        raise argparse.ArgumentTypeError(f"must be without * and ?, not {text!r}")
    return text


def _seconds(text: str) -> float | None:
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)([smhd]?)", text)
    return float(found[1]) * _UNITS[found[2]] if found else None
