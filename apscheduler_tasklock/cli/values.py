"""What users write on the command line: durations, times, numbers, states."""

from __future__ import annotations

import argparse
import math
import re
from datetime import datetime, timedelta, timezone

from apscheduler_tasklock.status import TaskState

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

# Whoever wants more has mistaken the unit.
_LONGEST = 100 * 366 * 86400.0

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


def since(text: str) -> datetime:
    """Return an RFC 3339 time, or the time that lies a duration before now, by our own clock.

    :raises argparse.ArgumentTypeError: it is neither
    """
    if _seconds(text) is not None:
        try:
            return datetime.now(timezone.utc) - timedelta(seconds=duration(text))
        except OverflowError as error:
            raise argparse.ArgumentTypeError(f"lies too far back: {text!r}") from error
    try:
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
    except ValueError:  # argparse would name this function in its message
        moment = None
    if moment is None or moment.utcoffset() is None:
        raise argparse.ArgumentTypeError(
            f"must be a time with its zone such as 2026-01-31T03:00:00Z, or {_DURATION}, "
            f"not {text!r}"
        )
    return moment


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
