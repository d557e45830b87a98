"""Rows whose jobs cannot run here (bad rows): when they are tried again, and floods of them.

A look for due jobs leaves out a few bad rows by their names. But somebody who can write the table
can write any number of bad rows that are due before the good rows, so that a look would find only
bad rows. Many bad rows, or bad rows that make a look slow, are a *flood*.

In a flood a replica reads all due rows in pages, from the first page to the last, and reads them
again after a rest. Until the flood is over, the replica claims only jobs that were good in these
pages, and jobs that came due after the read of the pages had begun.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from apscheduler_tasklock._lock.job_rows import JobRow
from apscheduler_tasklock._values import shown
from apscheduler_tasklock.jobstore.definition import Definition, JobCodec
from apscheduler_tasklock.jobstore.trust import UntrustedError

# The first pause and the longest pause until a bad row or function is tried again, in seconds.
FIRST_BACKOFF, LONGEST_BACKOFF = 1.0, 60.0
# Limits how many names of bad rows, and of functions, are remembered, and how many of each a look
# leaves out.
MOST_REMEMBERED = 1000
MOST_SKIPPED = 100
# More bad rows and functions than this are a flood.
FLOOD = 50
# Limits the seconds in which a look handles rows, so that a thousand rows that take long hold up
# no rows that come due meanwhile. A look that lasts longer and has found a bad row begins a flood.
LOOK_FOR = 1.0
# Limits the good jobs that are remembered in a flood.
MOST_GOOD = 500
# The rest until the pages of a flood are read again is AGAIN_AFTER times as long as the read was,
# but at least SHORTEST_REST and at most LONGEST_REST seconds. The pause of a single bad row is at
# least AGAIN_AFTER times as long as its failed try was, up to LONGEST_BACKOFF.
AGAIN_AFTER, SHORTEST_REST, LONGEST_REST = 10, 1.0, 60.0


def is_slow(began: float) -> bool:
    """Return whether a look has lasted so long that it is to end.

    :param began: when it began to handle rows, on the monotonic clock
    """
    return time.monotonic() - began > LOOK_FOR


class Backoff:
    """Names of bad rows or functions, each with a pause until its next try.

    The pause doubles with each failure.
    """

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, float]] = {}

    def add(self, name: str, took: float = 0.0) -> None:
        """Note a failure.

        :param took: seconds that the failed try took
        """
        until, pause = self._until.get(name, (0.0, 0.0))
        if until <= time.monotonic():  # several failures during one pause count as one
            longer = min(LONGEST_BACKOFF, max(FIRST_BACKOFF, pause * 2, took * AGAIN_AFTER))
            self._until[name] = (time.monotonic() + longer, longer)
        if len(self._until) > MOST_REMEMBERED:  # forget the oldest name
            self._until.pop(next(iter(self._until)))

    def clear(self, name: str) -> None:
        """Forget a name, because its last try succeeded."""
        self._until.pop(name, None)

    def has(self, name: str) -> bool:
        """Return whether a name is in its pause."""
        return self._until.get(name, (0.0, 0.0))[0] > time.monotonic()

    def names(self) -> list[str]:
        """Return the names that are in their pauses."""
        now = time.monotonic()
        return [name for name, (until, _) in self._until.copy().items() if until > now]


def load_function(codec: JobCodec, definition: Definition, missing: Backoff) -> Any:
    """Return a job's function. A module whose import failed is imported again after a pause.

    Otherwise the reading of many jobs would repeat a slow import for each of them.

    :param missing: the modules whose import failed
    :raises UntrustedError: the function is not allowed
    :raises Exception: whatever the import raises
    """
    module = definition.func.partition(":")[0]
    if missing.has(module):
        raise ImportError(f"the import of {shown(module)} failed a moment ago")
    try:
        function = codec.load_function(definition)
    except UntrustedError:
        raise
    except Exception:
        if sys.modules.get(module) is None:
            missing.add(module)
        raise
    missing.clear(module)
    return function


class Flood:
    """The pages that are read while many due rows are bad, and the good jobs in them.

    :param now: the database's time
    :ivar since: jobs that have come due after this time are claimed although no page had them
    :ivar good: ids of the jobs that came due before this time and were found good
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
        """Whether all pages were read quickly, and looks can leave out the few bad rows by name."""
        was_quick = self._took <= LOOK_FOR
        return self._is_read and was_quick and self._bad + self._bad_since <= FLOOD

    @property
    def rest(self) -> float:
        """Seconds until the next page is to be read."""
        if self._is_read:
            return max(0.0, self._again_at - time.monotonic())
        return LONGEST_REST if self._is_full else 0.0

    @property
    def _is_full(self) -> bool:
        return len(self.good) >= MOST_GOOD

    def note(self, job_id: str, *, is_bad: bool) -> None:
        """Note that a replica has claimed a job, or that its row is bad."""
        self.good.pop(job_id, None)
        self._bad_since += is_bad

    def sift(
        self,
        now: datetime,
        read: Callable[[datetime, tuple[datetime, str] | None], list[JobRow]],
        is_good: Callable[[JobRow], Any],
    ) -> None:
        """Read the next pages for a limited time; begin with the first page if the rest is over.

        :param now: the database's time
        :param read: returns the page of rows that are due up to a time, and come after a row
        :param is_good: returns whether a row can run here
        """
        began = time.monotonic()
        self._begin(now)
        was_read = self._is_read
        while not self._is_read and self.rest == 0 and not is_slow(began):
            page = read(self.since, self._after)
            for row in page:
                if self._is_full or is_slow(began):
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
        """Begin anew if the rest is over; extend the read up to now if many new rows are bad."""
        # A read that has not ended goes on, so that it reaches the last pages, too.
        has_ended = self._is_read or self._is_full
        if has_ended and time.monotonic() >= self._again_at:
            self._after, self._bad, self._took = None, 0, 0.0
            self._again_at = time.monotonic() + LONGEST_REST
            # A full list is cleared, because other replicas may have claimed its jobs, or users may
            # have paused them. Such jobs would keep their places in the list for ever.
            if self._is_full:
                self.good.clear()
        elif self._bad_since <= FLOOD:
            return
        self._is_read, self.since, self._bad_since = False, now, 0
