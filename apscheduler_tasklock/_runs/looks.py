"""The times of the looks: every few seconds a replica reads the rows of its tasks.

The replica's thread begins a look when the look is due, and sends its statements. The code between
two statements runs in the application's thread, because it calls job stores and triggers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from math import inf

from apscheduler.schedulers.base import STATE_RUNNING, STATE_STOPPED

from apscheduler_tasklock._application import call_application, relieve_application
from apscheduler_tasklock._database.sequences import Statements
from apscheduler_tasklock._lock.user import ReplicaUser
from apscheduler_tasklock._runs.known_tasks import KnownTasks
from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)

# The least number of looks that begin in each lease of a job with failover.
LOOKS_PER_LEASE = 3
# The shortest pause between two looks, in seconds.
SHORTEST_INTERVAL = 0.2
# Limits the looks of all replicas together to 20 a second. Between two looks, each replica pauses
# for these seconds times the number of live replicas, or longer.
INTERVAL_OF_EACH = 0.05
# Seconds between two checks whether the scheduler runs, after its start or in a pause.
STARTING_INTERVAL = 0.2


class Looks:
    """Begins a look after each interval, and at once after :meth:`wake`.

    The replica's thread calls :meth:`begin`. Any thread may call the other methods.

    :param user: the executor as a user of its replica
    :param known: the tasks of this replica
    :param look: makes one look
    :param scheduler_state: returns the scheduler's state
    :param interval: limits the seconds between two looks, except if there are many replicas
    :ivar number: the number of the current look, or of the last look if there is no current one
    :ivar hangs: whether the current look has waited too long for the application's code, and no
        single job is known to be the cause
    """

    def __init__(
        self,
        user: ReplicaUser,
        known: KnownTasks,
        look: Callable[[], Statements[None]],
        scheduler_state: Callable[[], int],
        interval: float,
    ) -> None:
        self._user = user
        self._known = known
        self._look = look
        self._scheduler_state = scheduler_state
        self._interval = interval
        self._longest_turn = user.settings.timings.longest_turn
        self._due_at = inf  # on the monotonic clock
        self._is_looking = False
        self._is_woken = False
        self._closed = False
        self._calls = 0
        self.number = 0
        self.hangs = False

    @property
    def interval(self) -> float:
        """Seconds between two looks, before jitter."""
        of_fleet = INTERVAL_OF_EACH * self._user.outage.live_replicas
        return max(of_fleet, min(self._interval, self._known.shortest_lease / LOOKS_PER_LEASE))

    @property
    def is_over(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def closed(self) -> bool:
        """Whether looks do nothing any more, because of :meth:`close` or a stopped scheduler."""
        return self._closed or self._scheduler_state() == STATE_STOPPED

    @property
    def due_at(self) -> float:
        """When the next look is due, or when to check whether the current one hangs."""
        return inf if self._closed else self._due_at

    def start(self) -> None:
        """Begin the first look as soon as the scheduler runs. Called while the scheduler starts."""
        self._due_at = time.monotonic() + STARTING_INTERVAL
        self._user.thread.add_recurring(self)

    def close(self) -> None:
        """Begin no look any more."""
        self._closed = True

    def wake(self) -> None:
        """Begin a look now. If a look is under way, begin the next one right after it."""
        if self._due_at < inf or self._is_looking:
            self._user.thread.call(self._note_wake)

    def _note_wake(self) -> None:
        self._is_woken = True
        if not self._is_looking:
            self._due_at = time.monotonic()

    def begin(self, now: float) -> None:
        """Begin a look, or abandon the current look if it hangs."""
        if self._is_looking:
            self._abandon(now)
        elif self._scheduler_state() != STATE_RUNNING:
            # The scheduler is paused, or not started yet. The first look after the pause or the
            # start finds the runs that have died meanwhile.
            self._due_at = now + STARTING_INTERVAL
        else:
            self.number += 1
            self._is_looking, self._is_woken, self._due_at = True, False, inf
            number = self.number
            self._user.database.begin_all(
                self._look(),
                partial(self._call, number),
                lambda: self._user.thread.call(partial(self._end, number)),
            )

    def _call(self, number: int, function: Callable[[], object]) -> None:
        """Call the code between two statements in the application's thread."""
        if number == self.number and not self._closed:
            self._due_at = time.monotonic() + self._longest_turn
            self._calls += 1
            call_application(partial(self._call_there, number, self._calls, function))

    def _call_there(self, number: int, call: int, function: Callable[[], object]) -> None:
        try:
            if number == self.number and not self._closed:
                function()
        finally:
            self._user.thread.call(partial(self._note_called, number, call))

    def _note_called(self, number: int, call: int) -> None:
        # The next call may have begun already, because the database may have answered the statement
        # that this call has sent.
        if number == self.number and self._is_looking and call == self._calls:
            self.hangs = False
            # No check is needed while the look waits for the database, because the database's
            # thread limits that wait.
            self._due_at = inf

    def _end(self, number: int) -> None:
        if number == self.number:
            # `_due_at` is set before `_is_looking`, because `wake` in another thread does nothing
            # if no look is due and none is under way.
            self._due_at = time.monotonic() + (0.0 if self._is_woken else self._pause())
            self._is_looking = False

    def _pause(self) -> float:
        # With jitter, so that replicas that have started at the same moment do not all look at the
        # same moment.
        return max(SHORTEST_INTERVAL, self.interval * random.uniform(0.9, 1.0))  # noqa: S311  # no secret

    def _abandon(self, now: float) -> None:
        """Abandon a look that hangs in a job's code, and begin a new one without that job."""
        relieve_application(self._longest_turn / 2)
        key = self._known.leave_out(self._longest_turn)
        # Without a key, the cause is not one job: a job store lists its jobs, or many jobs take
        # long together, or an older look still keeps the application's thread busy.
        if key is None:
            self._due_at = now + self._longest_turn / 2
            if not self.hangs:
                self.hangs = True
                logger.warning(
                    "A look at the tasks has waited for %g s for code of the application, such as "
                    "a job store that lists its jobs; until that code returns, dead runs and "
                    "manual runs wait",
                    self._longest_turn,
                )
            return
        logger.warning(
            "Job %r: in a look, a call of its trigger, its job store or its executor has not "
            "returned for %g s; until the call returns, the job's dead runs and manual runs wait",
            key[0],
            self._longest_turn,
        )
        self.number += 1
        self._is_looking, self._due_at = False, now
