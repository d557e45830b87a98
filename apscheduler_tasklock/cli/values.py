"""What users write on the command line: durations, times, numbers, states."""

from __future__ import annotations

import argparse
import math
import re
import time
from datetime import date, datetime, timedelta, timezone
from datetime import time as day_time

from apscheduler_tasklock._lock.outcomes import OUTCOMES
from apscheduler_tasklock._lock.patterns import is_pattern
from apscheduler_tasklock.status import TaskState

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

# Limits the seconds of a duration. A longer duration probably has a wrong unit.
_LONGEST = 100 * 366 * 86400.0

_AGO = re.compile(r"([0-9.]+ ?[smhd])(?: ago)?", re.IGNORECASE)

_AHEAD = re.compile(r"(?:in )?([0-9.]+ ?[smhd])", re.IGNORECASE)

_POINT = re.compile(
    r"(?P<now>now)"
    r"|(?:(?P<day>today|yesterday|tomorrow)|(?P<date>[0-9]{4}-[0-9]{2}-[0-9]{2}))?"
    r"(?:(?:(?<=.)[t ])?(?P<time>[0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?)"
    r"(?: ?(?P<zone>z|utc|[a-z]{2,5}|[+-][0-9]{2}(?::?[0-9]{2})?))?)?"
)

_DAYS = {
    "yesterday": timedelta(days=-1),
    "today": timedelta(0),
    "tomorrow": timedelta(days=1),
}

_MOMENT = (
    "a time such as 02:00, yesterday, 'yesterday 22:00', 2026-01-31, '2026-01-31 03:00' or "
    "2026-01-31T03:00:00Z, or a duration ago such as 90s, 15m, 2h or 1d"
)

_MOMENT_AHEAD = (
    "a time in the future such as 02:00, now, tomorrow, 'tomorrow 04:00', '2026-01-31 03:00' or "
    "2026-01-31T03:00:00Z, or a duration from now such as 90s, 15m, 2h or 'in 1d'"
)

_DURATION = "seconds, or a duration such as 90s, 15m, 2h or 1d"


def duration(text: str) -> float:
    """Return the seconds of ``90``, ``90s``, ``15m``, ``2h`` or ``1d``.

    :raises argparse.ArgumentTypeError: the text is no duration, not above 0, or above 100 years
    """
    seconds = _seconds(text)
    if seconds is None:
        raise argparse.ArgumentTypeError(f"must be {_DURATION}, not {text!r}")
    if not 0 < seconds <= _LONGEST:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 100 years, not {text!r}")
    return seconds


def duration_or_never(text: str) -> float | None:
    """Return the seconds of a duration such as ``5m``; ``None`` for ``never``.

    :raises argparse.ArgumentTypeError: the text is neither
    """
    return None if text == "never" else duration(text)


def moment(text: str, now: datetime | None = None) -> datetime:
    """Return the time of a text: a time, or a duration before now.

    A time without a zone is in this machine's zone. A time of day without a day means its last
    occurrence before now. A day without a time of day means the beginning of the day. Where the
    clocks go back, a time that they show twice means the last one before now.

    :param now: by default this machine's time
    :raises argparse.ArgumentTypeError: the text is no time, or the clocks go forward over it
    """
    found = _AGO.fullmatch(text.strip())
    try:
        now = now or datetime.now(timezone.utc)
        told = now - _length(found[1]) if found else _point(text.strip(), now)
        told = told and _local(told)
    except (ValueError, OverflowError):  # because argparse's own message would name this function
        told = None
    if told is None:
        raise argparse.ArgumentTypeError(f"must be {_MOMENT}, not {text!r}")
    return told


def moment_ahead(text: str, now: datetime | None = None) -> datetime:
    """Return the time of a text: a time that has not passed, or a duration from now.

    The text is read as by :func:`moment`, but a time of day without a day means its next
    occurrence, and a time that the clocks show twice the next one.

    :param now: by default this machine's time
    :raises argparse.ArgumentTypeError: the text is no time, or the clocks go forward over it, or
        the time has passed
    """
    found = _AHEAD.fullmatch(text.strip())
    now = now or datetime.now(timezone.utc)
    try:
        told = now + _length(found[1]) if found else _point(text.strip(), now, ahead=True)
        told = told and _local(told)
    except (ValueError, OverflowError):  # because argparse's own message would name this function
        told = None
    if told is None or told < now:
        raise argparse.ArgumentTypeError(f"must be {_MOMENT_AHEAD}, not {text!r}")
    return told


def _local(moment: datetime) -> datetime:
    """Return a time in this machine's zone.

    :raises OverflowError: Python has no such time there, or none in UTC
    """
    return moment.astimezone(timezone.utc).astimezone()


def _length(text: str) -> timedelta:
    return timedelta(seconds=duration(text.replace(" ", "").lower()))


def _point(text: str, now: datetime, *, ahead: bool = False) -> datetime | None:
    """Return a point in time; ``None`` if the text is no point in time.

    :param now: with a zone
    :param ahead: whether the next one of several times is meant, and not the last one
    :raises ValueError: there is no such day, time or offset
    :raises argparse.ArgumentTypeError: the clocks go forward over the time
    """
    found = _POINT.fullmatch(text.lower())
    if not text or found is None:
        return None
    named = found["zone"] if found["zone"] in {name.lower() for name in time.tzname} else None
    zone = None if named else _zone(found["zone"])
    now = now.astimezone(zone)
    if found["now"]:
        return now
    at = _time_of_day(found["time"]) if found["time"] else None

    def on(day: date) -> datetime:
        told = datetime.combine(day, at or day_time())
        if zone:
            return told.replace(tzinfo=zone)
        here = _here(told, now, ahead=ahead, is_day=at is None)
        if named:  # a time that the clocks show twice has two names
            [here] = {each for each in _both(told) if f"{each:%Z}".lower() == named}
        return here

    if found["date"]:
        return on(date.fromisoformat(found["date"]))
    told = on(now.date() + _DAYS[found["day"] or "today"])
    if found["day"] or (told > now) == ahead:
        return told
    return on(now.date() + timedelta(days=1 if ahead else -1))


def _zone(text: str | None) -> timezone | None:
    """Return the time zone that a text names; ``None`` for this machine's zone."""
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


def _both(told: datetime) -> tuple[datetime, datetime]:
    """Return a time of this machine's clock, with its zone, which is two if it is shown twice."""
    return told.astimezone(), told.replace(fold=1).astimezone()


def _here(told: datetime, now: datetime, *, ahead: bool, is_day: bool) -> datetime:
    """Return a time of this machine's clock, with its zone.

    :param told: without a zone
    :param now: with a zone
    :param ahead: which one is meant of a time that the clock shows twice; see :func:`_point`
    :param is_day: whether the beginning of a day is meant, which comes later where the clocks go
        forward over midnight
    :raises argparse.ArgumentTypeError: the clocks go forward over the time
    """
    first, second = _both(told)
    if first.replace(tzinfo=None, fold=0) == told:
        is_first = first >= now if ahead else second > now
        return first if is_first else second
    # The clocks go forward over this time, between these two.
    before, after = sorted((first, second))
    offset = before.utcoffset()
    while after - before > timedelta(seconds=1):
        middle = (before + (after - before) / 2).replace(microsecond=0).astimezone()
        if middle.utcoffset() == offset:
            before = middle
        else:
            after = middle
    if is_day:
        return after
    raise argparse.ArgumentTypeError(
        f"does not exist here: {told:%Y-%m-%d %H:%M:%S}. The clocks go forward from "
        f"{before:%H:%M:%S %Z} to {after:%H:%M:%S %Z}"
    )


def address(text: str) -> tuple[str, int]:
    """Return the host and the port of ``127.0.0.1:9464``, ``[::1]:9464`` or ``localhost:0``.

    :raises argparse.ArgumentTypeError: the text is no host and port
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise argparse.ArgumentTypeError(f"must be a host and a port, HOST:PORT, not {text!r}")
    return host, int(port)


def at_least_one(text: str) -> int:
    """Return a whole number, 1 or more.

    :raises argparse.ArgumentTypeError: the text is no such number
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, not {text!r}")
    return number


def port(text: str) -> int:
    """Return a port; 0 for any free one.

    :raises argparse.ArgumentTypeError: the text is no port
    """
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"must be a port, 0 to 65535, not {text!r}")
    return number


def demo_seconds(text: str) -> float:
    """Return for how long the demo runs, in seconds.

    :raises argparse.ArgumentTypeError: the text is no number from 1 to 86400
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


def outcomes(text: str) -> list[str]:
    """Return the outcomes of a list such as ``error,died,missed``.

    :raises argparse.ArgumentTypeError: there is no such outcome
    """
    found = [each.strip() for each in text.split(",")]
    for each in found:
        if each not in OUTCOMES:
            known = ", ".join(OUTCOMES)
            raise argparse.ArgumentTypeError(
                f"must be one of {known}, or several with commas between them, not {each!r}"
            )
    return found


def namespace(text: str) -> str:
    """Return a prefix of tasks' names.

    :raises argparse.ArgumentTypeError: the text has ``*`` or ``?``, which patterns use
    """
    if is_pattern(text):
        raise argparse.ArgumentTypeError(f"must be without * and ?, not {text!r}")
    return text


def _seconds(text: str) -> float | None:
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)([smhd]?)", text)
    return float(found[1]) * _UNITS[found[2]] if found else None
