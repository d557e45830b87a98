"""What a replica knows of the database's clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

# The earliest and the latest time of a row: see ``schema/table.py``.
EARLIEST = datetime(1, 1, 2, tzinfo=timezone.utc)
LATEST = datetime(9999, 12, 30, tzinfo=timezone.utc)

# Clocks that count the same second differ by less than this share of it.
DRIFT = 0.001

# Seconds by which the database's clock may be off what it should be, before that counts as a step.
SMALLEST_STEP = 1.0


class DatabaseClock:
    """An upper bound of the database's time, learnt from the answers it gave before.

    A claim says how late it is, and the database subtracts that from its own time. If the
    replica is paused, or its statement held up on the way, between the two readings, the run time
    would look newer than it is, and its window could be run twice. With this bound the database
    sees that its own time has run ahead of the claim's.

    Built on the monotonic clock, so that the replica's own wall clock may be set at any time.

    :param stepped: called when the database's clock has stepped, as in a failover to a server
        with another clock, with the seconds by which it is ahead
    """

    def __init__(self, stepped: Callable[[float], None] = lambda _seconds: None) -> None:
        self._stepped = stepped
        self._reading: tuple[float, datetime] | None = None
        self._last: tuple[float, float, datetime] | None = None
        self._lock = threading.Lock()

    def latest(self, at: float) -> datetime | None:
        """Return the latest time that the database's clock can have had.

        :param at: the moment in question, read from :func:`time.monotonic`
        :return: an aware datetime, or ``None`` before the first answer
        """
        with self._lock:
            return self._latest(at)

    def _latest(self, at: float) -> datetime | None:
        if self._reading is None:
            return None
        since, then = self._reading
        return then + _at_most(at - since)

    def learn(
        self, *, sent: float, answered: float, database_time: datetime, bound: datetime | None
    ) -> bool:
        """Take in an answer that carries the database's time.

        :param sent: when the statement was sent, from :func:`time.monotonic`
        :param answered: when its answer had come, likewise
        :param database_time: the database's time somewhere between the two
        :param bound: what :meth:`latest` said when it was sent
        :return: whether that bound held. If not, one of the clocks has jumped (a failover to a
            server with another clock, a suspended machine), and what was decided on the bound
            must be decided again.
        """
        with self._lock:
            known, latest_then = self._latest(sent), self._latest(answered)
            broken = latest_then is not None and database_time > latest_then
            if known is None or broken or database_time < known:
                self._reading = (sent, database_time)
            step = self._step(sent, answered, database_time)
            self._last = (sent, answered, database_time)
        if step:
            self._stepped(step)
        # Not by the reading known now: another thread's answer may have mended it meanwhile.
        return bound is None or database_time <= bound + _at_most(answered - sent)

    def _step(self, sent: float, answered: float, database_time: datetime) -> float:
        """Return by how many seconds the clock is ahead of what the last answer lets expect."""
        if self._last is None:
            return 0.0
        last_sent, last_answered, last_time = self._last
        passed = (database_time - last_time).total_seconds()
        least, most = sent - last_answered, answered - last_sent
        if passed > most + abs(most) * DRIFT + SMALLEST_STEP:
            return passed - most
        if passed < least - abs(least) * DRIFT - SMALLEST_STEP:
            return passed - least
        return 0.0


def _at_most(seconds: float) -> timedelta:
    """Return the most that the database's clock can count in so many seconds of ours."""
    return timedelta(seconds=seconds + abs(seconds) * DRIFT)


def storable(moment: datetime | None) -> datetime | None:
    """Return a time that a row can have: the nearest one. ``None`` stays ``None``."""
    return None if moment is None else max(EARLIEST, min(moment, LATEST))


def later(moment: datetime, seconds: float) -> datetime:
    """Return a time so many seconds later, or the last one that there is."""
    try:
        return moment + timedelta(seconds=seconds)
    except OverflowError:
        return datetime.max.replace(tzinfo=timezone.utc)
