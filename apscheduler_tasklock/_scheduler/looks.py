"""When a replica looks at the rows of its tasks: every few seconds.

The database's thread begins a look when it is due, and sends what it asks. What comes between two
statements is called in the application's thread, because job stores and triggers are asked there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from math import inf

from apscheduler.schedulers.base import STATE_RUNNING, STATE_STOPPED

from apscheduler_tasklock._application import call_application, relieve_application
from apscheduler_tasklock._database.steps import Steps
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._scheduler.known import KnownTasks
from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)

# Limits from below how often rows are looked at during one lease.
LOOKS_PER_LEASE = 3
# Limits from below the seconds between two looks.
SHORTEST_INTERVAL = 0.2
# Limits from below the seconds between two looks in a large fleet, for each replica that is alive:
# all of them together look 20 times a second at most.
INTERVAL_OF_EACH = 0.05
# Seconds after which it is tried again whether the scheduler runs by now.
STARTING_INTERVAL = 0.2


class Looks:
    """Lets a replica look at its interval, and at once if it is woken.

    The database's thread calls all but :meth:`start`, :meth:`close` and :meth:`wake`.

    :param locks: the task locks of this replica
    :param known: its tasks
    :param look: looks once
    :param state: returns the scheduler's state
    :param interval: seconds between two looks, at most, but in a large fleet
    :param timings: has how long a look waits for the application's own code
    :ivar number: of the look that is under way, or of the last one
    :ivar hangs: whether the look that is under way waits for code of no single job
    """

    def __init__(
        self,
        locks: LockClient,
        known: KnownTasks,
        look: Callable[[], Steps[None]],
        state: Callable[[], int],
        interval: float,
        timings: Timings | None = None,
    ) -> None:
        self._locks = locks
        self._known = known
        self._look = look
        self._state = state
        self._interval = interval
        self._longest_turn = (timings or Timings()).longest_turn
        self._due_at = inf  # on the monotonic clock
        self._is_looking = False
        self._is_woken = False
        self._closed = False
        self.number = 0
        self.hangs = False

    @property
    def interval(self) -> float:
        """Seconds between two looks, but for their jitter."""
        of_fleet = INTERVAL_OF_EACH * self._locks.outage.live_replicas
        return max(of_fleet, min(self._interval, self._known.shortest_lease / LOOKS_PER_LEASE))

    @property
    def is_over(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def closed(self) -> bool:
        """Whether nothing is acted on any more."""
        return self._closed or self._state() == STATE_STOPPED

    @property
    def due_at(self) -> float:
        """When the next look is due, or it is to be seen whether the last one goes on."""
        return inf if self._closed else self._due_at

    def start(self) -> None:
        """Begin to look, once the scheduler runs, which has begun to start."""
        self._due_at = time.monotonic() + STARTING_INTERVAL
        self._locks.add_recurring(self)

    def close(self) -> None:
        """Look no more."""
        self._closed = True

    def wake(self) -> None:
        """Look now, or once more after the look that is under way."""
        if self._due_at < inf or self._is_looking:
            self._locks.call(self._note_wake)

    def _note_wake(self) -> None:
        self._is_woken = True
        if not self._is_looking:
            self._due_at = time.monotonic()

    def begin(self, now: float) -> None:
        """Begin a look, or leave one that does not go on."""
        if self._is_looking:
            self._leave(now)
        elif self._state() != STATE_RUNNING:
            # Paused, or not started yet. What died meanwhile is found afterwards.
            self._due_at = now + STARTING_INTERVAL
        else:
            self.number += 1
            self._is_looking, self._is_woken, self._due_at = True, False, inf
            number = self.number
            self._locks.run_steps(
                self._look(),
                partial(self._call, number),
                lambda: self._locks.call(partial(self._end, number)),
            )

    def _call(self, number: int, function: Callable[[], object]) -> None:
        """Let what comes between two statements be called where the application's code is."""
        if number == self.number and not self._closed:
            self._due_at = time.monotonic() + self._longest_turn
            call_application(partial(self._call_there, number, function))

    def _call_there(self, number: int, function: Callable[[], object]) -> None:
        try:
            if number == self.number and not self._closed:
                function()
        finally:
            self._locks.call(partial(self._note_called, number))

    def _note_called(self, number: int) -> None:
        if number == self.number and self._is_looking:
            self.hangs = False
            self._due_at = inf  # it waits for the database, which has limits of its own

    def _end(self, number: int) -> None:
        if number == self.number:
            # Whoever wakes it has to find one of the two at any moment.
            self._due_at = time.monotonic() + (0.0 if self._is_woken else self._pause())
            self._is_looking = False

    def _pause(self) -> float:
        # With jitter: all replicas of a deployment have started at the same moment.
        return max(SHORTEST_INTERVAL, self.interval * random.uniform(0.9, 1.0))  # noqa: S311  # no secret

    def _leave(self, now: float) -> None:
        """Look anew without the job whose code has not come back."""
        relieve_application(self._longest_turn / 2)
        key = self._known.leave_out(self._longest_turn)
        if key is None:  # a job store that lists its jobs, very many jobs, or another look's code
            self._due_at = now + self._longest_turn / 2
            if not self.hangs:
                self.hangs = True
                logger.warning(
                    "A look at the tasks has not come back for %g s, as from a job store that is "
                    "asked for its jobs; until it does, dead runs and what is asked for by hand "
                    "wait",
                    self._longest_turn,
                )
            return
        logger.warning(
            "Job %r: its trigger, its job store or its executor has not come back for %g s in a "
            "look; until it does, the job's dead runs and what is asked for by hand wait",
            key[0],
            self._longest_turn,
        )
        self.number += 1
        self._is_looking, self._due_at = False, now
