"""Rows that cannot run here: when they are tried again, and floods of them.

A few such rows are left out of the look for due jobs by their names. But whoever can write the
table can write any number of them, all due before the good ones. A replica that finds many due rows
bad, or the bad ones of one look slow, therefore reads in pages what is due, without a hand-out:
from the first row to the last, and after a rest again. Meanwhile it is handed out only the jobs
that it has found good there, and those that have come due since.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from apscheduler_tasklock._lock.jobs import JobRow

# Seconds after which something is tried again that failed on account of one job: first and at most.
FIRST_BACKOFF, LONGEST_BACKOFF = 1.0, 60.0
# How many names of such things are remembered, and how many of them are left out by each look.
MOST_REMEMBERED = 1000
MOST_LEFT_OUT = 100
# How many names that are left out make a flood.
FLOOD = 50
# Seconds of a look in which pages of a flood are read, and after which bad rows count as slow; and
# how many good jobs are kept of a flood.
SIFT_FOR = 1.0
MOST_GOOD = 500
# After this many times as long as it took, and seconds at least and at most, a flood is read again.
# A bad row is tried again after so many times as long as that took, at least.
AGAIN_AFTER, SHORTEST_REST, LONGEST_REST = 10, 1.0, 60.0


class Backoff:
    """What cannot be used here now, and when it is tried again: ever later."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, float]] = {}

    def add(self, name: str, took: float = 0.0) -> None:
        """Note a failure.

        :param took: seconds that it took
        """
        until, pause = self._until.get(name, (0.0, 0.0))
        if until <= time.monotonic():  # of several at once, one counts
            longer = min(LONGEST_BACKOFF, max(FIRST_BACKOFF, pause * 2, took * AGAIN_AFTER))
            self._until[name] = (time.monotonic() + longer, longer)
        if len(self._until) > MOST_REMEMBERED:  # names come and go; the first ones begin anew
            self._until.pop(next(iter(self._until)))

    def clear(self, name: str) -> None:
        """Note that it can be used."""
        self._until.pop(name, None)

    def has(self, name: str) -> bool:
        """Tell whether something is left alone for the time being."""
        return self._until.get(name, (0.0, 0.0))[0] > time.monotonic()

    def names(self) -> list[str]:
        """Return what is left alone for the time being."""
        now = time.monotonic()
        return [name for name, (until, _) in list(self._until.items()) if until > now]


class Flood:
    """What is read of what is due while many rows of it are bad.

    :param now: the database's time
    :ivar since: what has come due after it is handed out without having been read before
    :ivar good: ids of what has come due before and was found good
    """

    def __init__(self, now: datetime) -> None:
        self.since = now
        self.good: dict[str, None] = {}
        self._after: tuple[datetime, str] | None = None
        self._bad = self._bad_since = 0
        self._took = 0.0
        self._is_read = False
        self._again_at = time.monotonic() + LONGEST_REST

    @property
    def is_over(self) -> bool:
        """Whether all was read soon, and each of the bad rows can be left out by its name."""
        is_slow = self._took > SIFT_FOR
        return self._is_read and not is_slow and self._bad + self._bad_since <= FLOOD

    @property
    def rest(self) -> float:
        """Seconds until there is more to read."""
        if self._is_read:
            return max(0.0, self._again_at - time.monotonic())
        return LONGEST_REST if self._is_full else 0.0

    @property
    def _is_full(self) -> bool:
        return len(self.good) >= MOST_GOOD

    def note(self, job_id: str, *, is_bad: bool) -> None:
        """Note that a job was handed out."""
        self.good.pop(job_id, None)
        self._bad_since += is_bad

    def sift(
        self,
        now: datetime,
        read: Callable[[datetime, tuple[datetime, str] | None], list[JobRow]],
        is_good: Callable[[JobRow], Any],
    ) -> None:
        """Read on, for some time; or again from the start, or up to now.

        :param now: the database's time
        :param read: returns a page of what has come due up to a time, after a row
        :param is_good: tells whether a row can be run here
        """
        began = time.monotonic()
        self._begin(now)
        was_read = self._is_read
        while not self._is_read and self.rest == 0 and time.monotonic() - began < SIFT_FOR:
            page = read(self.since, self._after)
            for row in page:
                if self._is_full or time.monotonic() - began > SIFT_FOR:
                    break
                if is_good(row):
                    self.good[row.id] = None
                else:
                    self._bad += 1
                assert row.next_run_time is not None
                self._after = row.next_run_time, row.id
            self._is_read = not page
        self._took += time.monotonic() - began
        if self._is_read and not was_read:
            rest = min(LONGEST_REST, max(SHORTEST_REST, self._took * AGAIN_AFTER))
            self._again_at = time.monotonic() + rest

    def _begin(self, now: datetime) -> None:
        """Begin from the start if it is time to, or go on up to now if there are more bad rows."""
        has_ended = self._is_read or self._is_full  # or else what comes late is never read
        if has_ended and time.monotonic() >= self._again_at:
            self._after, self._bad, self._took = None, 0, 0.0
            self._again_at = time.monotonic() + LONGEST_REST
            if self._is_full:  # of what others have, or what is paused by now
                self.good.clear()
        elif self._bad_since <= FLOOD:
            return
        self._is_read, self.since, self._bad_since = False, now, 0
