"""The database's clock: an upper bound of its time, and its steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

# Limits the times that a row can have; see ``schema/table.py``.
EARLIEST = datetime(1, 1, 2, tzinfo=timezone.utc)
LATEST = datetime(9999, 12, 30, tzinfo=timezone.utc)

# Limits the drift between two clocks, as a share of the time.
DRIFT = 0.001

# Limits the seconds by which the database's clock may deviate from the replica's monotonic clock
# without being reported as stepped.
SMALLEST_STEP = 1.0


class DatabaseClock:
    """An upper bound of the database's time, learnt from earlier answers.

    A claim says by how many seconds it is later than its run time, and the database subtracts these
    seconds from its own time to get the run time. If the replica is paused after it has computed
    the seconds, or the statement is delayed, the run time would look newer than it is, and its
    window could be run twice. The bound prevents this, because the database uses the bound instead
    of its own time if its own time is later.

    The bound counts on the monotonic clock, so that the replica's wall clock may be set at any
    time.

    :param clock_stepped: called with the seconds of a step of the database's clock, for example
        after a failover to a server with another clock
    """

    def __init__(self, clock_stepped: Callable[[float], None] = lambda _seconds: None) -> None:
        self._clock_stepped = clock_stepped
        self._reading: tuple[float, datetime] | None = None
        self._last: tuple[float, float, datetime] | None = None
        self._lock = threading.Lock()

    def latest(self, at: float) -> datetime | None:
        """Return the latest time that the database's clock can have had at a moment.

        :param at: the moment, read from :func:`time.monotonic`
        :return: an aware datetime; ``None`` before the first answer
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
        """Learn the database's time from an answer.

        :param sent: when the statement was sent, from :func:`time.monotonic`
        :param answered: when the answer had come, from :func:`time.monotonic`
        :param database_time: the database's time between the two
        :param bound: the result of :meth:`latest` when the statement was sent
        :return: whether that bound held. If not, a clock has jumped (after a failover to a server
            with another clock, or on a suspended machine), and a claim that was decided on the
            bound must be decided again.
        """
        with self._lock:
            known, latest_then = self._latest(sent), self._latest(answered)
            broken = latest_then is not None and database_time > latest_then
            if known is None or broken or database_time < known:
                self._reading = (sent, database_time)
            step = self._step(sent, answered, database_time)
            self._last = (sent, answered, database_time)
        if step:
            self._clock_stepped(step)
        # Compare with the bound that was sent, because another thread's answer may have corrected
        # the bound of this clock meanwhile.
        return bound is None or database_time <= bound + _at_most(answered - sent)

    def note(self, sent: float, database_time: datetime) -> None:
        """Note the database's time from an answer that has come now, and needs no bound.

        :param sent: when the statement was sent, from :func:`time.monotonic`
        """
        answered = time.monotonic()
        self.learn(sent=sent, answered=answered, database_time=database_time, bound=None)

    def _step(self, sent: float, answered: float, database_time: datetime) -> float:
        """Return the seconds by which the clock has stepped since the last answer; 0: no step."""
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
    """Return the most that the database's clock can count in so many monotonic seconds."""
    return timedelta(seconds=seconds + abs(seconds) * DRIFT)


def storable(moment: datetime | None) -> datetime | None:
    """Return the nearest time that a row can have. ``None`` stays ``None``."""
    return None if moment is None else max(EARLIEST, min(moment, LATEST))


def later(moment: datetime, seconds: float) -> datetime:
    """Return a time so many seconds later, but at most the latest time that Python has."""
    try:
        return moment + timedelta(seconds=seconds)
    except OverflowError:
        return datetime.max.replace(tzinfo=timezone.utc)
