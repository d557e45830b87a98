"""The one look: what the rows of a replica's tasks call for.

It reads them with one statement, and goes through those that were found.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from math import inf
from typing import Protocol
from uuid import UUID

from apscheduler_tasklock._database.errors import ConflictError
from apscheduler_tasklock._database.rejections import LOOKS, OLD_ROWS
from apscheduler_tasklock._database.steps import Steps
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.messages import RunState
from apscheduler_tasklock._scheduler.known import KnownTasks
from apscheduler_tasklock._scheduler.looks import Looks
from apscheduler_tasklock._scheduler.registration import Registrar
from apscheduler_tasklock._scheduler.submission import Blocked, JobKey, Submission
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError, TaskLockSchemaError

logger = logger_of(__name__)

# Seconds after an interval job's due time after which another replica runs it: longer than clocks
# and full workers make it late as a rule.
STANDBY_AFTER = 2.0
# Seconds for which rows of one-off jobs are kept after they are over; and from one deletion of such
# rows to the next.
RETENTION = 7 * 24 * 3600.0
PRUNE_INTERVAL = 3600.0


class Jobs(Protocol):
    """The scheduler's jobs on one executor, as a look needs them."""

    def list_tasks(self) -> Iterable[tuple[str, JobKey, float | None]]:
        """Give all jobs: their tasks, keys and leases. Asks the job stores."""

    def submission_for(self, key: JobKey, dead: RunState) -> Submission | None:
        """Return what runs a dead run's window again, if the job is there and is still the same."""

    def renewed(self, submission: Submission) -> Submission | None:
        """Return a refused submission with the job as it is now, if it is still to run."""

    def requested(self, key: JobKey, task_name: str, request_id: UUID) -> Submission | None:
        """Return what runs a job by hand, if it is there."""

    def standby_for(
        self, key: JobKey, state: RunState, due_at: datetime, late_by: float
    ) -> Submission | None:
        """Return what runs a task in another replica's place, if its job is there and due."""

    def submit(self, submission: Submission, not_now: Callable[[], None]) -> None:
        """Submit it, where the scheduler does. ``not_now`` is called if that cannot be now."""


class Watch:
    """Looks at the rows of a scheduler's tasks, and does what they call for.

    - A dead run whose window is to be run again is taken over, whether or not this replica was
      refused because of it. A run time that was refused because of it, and whose own window is new,
      is run after that, or at once where there is no failover.
    - Runs that were asked for by hand are submitted by each replica that has the task.
    - An interval job counts from the start of its replica. When the replica that ran it is gone, it
      would lose up to a whole period; so another one runs it as of its due time.
    - Tasks that are overdue are told, each once until it runs.
    - Tasks that have changed are registered.

    What was submitted claims like any other run; one replica is granted it.

    :param locks: the task locks of this replica
    :param known: its tasks
    :param jobs: the scheduler's jobs
    :param registrar: registers tasks
    :param state: returns the scheduler's state
    :param interval: seconds between two looks, at most
    :param given_up: told of a dead run that is not run again any more, and why
    :param tell_overdue: told of a task that is overdue
    :param looked: called at the end of each look; gets whether all jobs are known
    :param prune_interval: seconds between two deletions of rows that are over
    :param timings: of the looks
    :ivar looks: when it looks
    :ivar has_looked: whether a look has succeeded
    :ivar overdue: the tasks that are overdue, as of the last look
    """

    def __init__(
        self,
        locks: LockClient,
        known: KnownTasks,
        jobs: Jobs,
        registrar: Registrar,
        state: Callable[[], int],
        interval: float,
        given_up: Callable[[RunState, JobKey, str], None],
        tell_overdue: Callable[[RunState], None] | None = None,
        looked: Callable[[bool], None] = lambda _has_listed: None,
        prune_interval: float = PRUNE_INTERVAL,
        timings: Timings | None = None,
    ) -> None:
        self._locks = locks
        self._known = known
        self._jobs = jobs
        self._registrar = registrar
        self._given_up = given_up
        self._tell_overdue = tell_overdue or _warn
        self._looked = looked
        self._prune_interval = prune_interval
        self._prune_at = inf  # on the monotonic clock
        self.looks = Looks(locks, known, self._look_safely, state, interval, timings)
        # Of looks, which the application's thread calls.
        self._has_listed = False
        self._told: set[str] = set()  # those that are overdue, of which it was told
        self._begun: dict[str, datetime] = {}  # the due time that was last seen to, by task
        self.has_looked = False
        self.overdue: tuple[str, ...] = ()
        # Of looks and of workers.
        self._changed = threading.Lock()
        self._blocked: dict[str, list[Blocked]] = defaultdict(list)
        # Refused ones after which the scheduler has dropped the job, as it does with one-off jobs.
        self._last: dict[str, Submission] = {}
        self._submitted: set[UUID] = set()  # dead runs and requests that are seen to

    def start(self) -> None:
        """Begin to look."""
        # With jitter: all replicas of a deployment have started at the same moment.
        first = random.uniform(0, min(60.0, self._prune_interval))  # noqa: S311  # no secret
        self._prune_at = time.monotonic() + first
        self.looks.start()

    @property
    def closed(self) -> bool:
        """Whether nothing is acted on any more."""
        return self.looks.closed

    def _look_safely(self) -> Steps[None]:
        try:
            yield from self.look()
            if time.monotonic() > self._prune_at:
                self._prune_at = time.monotonic() + self._prune_interval
                yield from self._prune()
            if self._registrar.has_more:
                self.looks.wake()
        except TaskLockDatabaseError:
            pass  # logged as an outage
        except Exception:  # nothing may end the looks unseen
            logger.exception("The tasks could not be looked at; trying again")

    def look(self) -> Steps[None]:
        """Look once.

        What the database rejects keeps nothing else from being done, and is tried again at the next
        look.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        rejected: list[TaskLockError] = []
        with _noting(rejected):
            yield from self._locks.look_at_rights()
        with _noting(rejected):
            self._list_once()
        with _noting(rejected):
            yield from self._look_at_rows(rejected)
        with _noting(rejected):
            self._registrar.list_stored()
        with _noting(rejected):
            self._looked(self._has_listed)
        if rejected:
            self._locks.rejections.begin(LOOKS, rejected[0])
        else:
            self._locks.rejections.end(LOOKS)

    def _list_once(self) -> None:
        """Know all jobs. If a job store fails, the others' are known, and the next look asks it."""
        if not self._has_listed:
            for task_name, key, lease in self._jobs.list_tasks():
                self._known.add(task_name, key, lease)
            self._has_listed = True

    def _look_at_rows(self, rejected: list[TaskLockError]) -> Steps[None]:
        number, waiting = self.looks.number, self._waiting()
        asked_for = sorted({*waiting, *self._registrar.expecting()})
        names = sorted({*self._known.names(), *asked_for})
        states: list[RunState] = []
        if names:
            states = yield self._locks.reading(names, asked_for)
        self.has_looked = True
        with _noting(rejected):
            yield from self._registrar.register(states, has_listed=self._has_listed)
        self.overdue = tuple(state.task_name for state in states if state.overdue)
        self._told.intersection_update(self.overdue)
        for state in states:
            if self.closed or number != self.looks.number:
                return
            yield from self._do_what_is_called_for(state)
        for name in waiting - {state.task_name for state in states}:  # its row is gone
            self._last.pop(name, None)

    def _do_what_is_called_for(self, state: RunState) -> Steps[None]:
        with self._one_task(state, "its dead run"):
            yield from self._see_to_dead_run(state)
        with self._one_task(state, "its run by hand"):
            self._run_by_hand(state)
        with self._one_task(state, "it"):
            self._stand_in(state)
        with self._one_task(state, "it"):
            self._see_to_overdue(state)

    @property
    def is_watching(self) -> bool:
        """Whether the row of a task is wanted whatever its state."""
        return bool(self._waiting())

    def _waiting(self) -> set[str]:
        """Return the tasks whose rows are wanted whatever their state."""
        with self._changed:
            return {*self._blocked, *self._last}

    # Dead runs, and what was refused because of a run.

    def add(self, blocked: Blocked) -> None:
        """Keep a run time that was refused because of a run that had not ended."""
        submission = blocked.submission
        is_last = submission.is_last  # a custom trigger's own code, maybe
        if self.closed:
            return
        with self._changed:
            if is_last:
                self._last[submission.task_name] = submission
            if blocked.is_new:
                waiting = self._blocked[submission.task_name]
                if submission.job.coalesce:
                    # As APScheduler has it, which runs the last one only.
                    waiting[:] = [b for b in waiting if b.submission.job.id != submission.job.id]
                waiting.append(blocked)
        if blocked.waits:
            self.looks.wake()

    def ended(self, submission: Submission) -> None:
        """Note that a submission is over. If it was not granted, it is tried again."""
        if submission.dead_run is None and not submission.is_manual:
            return
        with self._changed:
            if submission.dead_run is not None:
                self._submitted.discard(submission.dead_run.claim_id)
            if submission.request_id is not None:
                self._submitted.discard(submission.request_id)
            is_waited_for = submission.task_name in self._blocked
        if is_waited_for:  # what had to wait for it is due now
            self.looks.wake()

    def _see_to_dead_run(self, state: RunState) -> Steps[None]:
        """Run a dead run's window again, and what had to wait for a task's last run."""
        if state.finished:
            self._last.pop(state.task_name, None)
            # A run that ended stood rightly against what was due meanwhile; one that was given up
            # did not, and counts as another death.
            gave_up = state.deaths > 0
            self._submit_blocked(state, lambda b: gave_up or b.follows or b.token != state.token)
            return
        if state.paused:  # what died waits for the end of the pause
            return
        believed = state.dead and (state.handed_over or self._locks.stable)
        if believed and not (yield from self._run_again(state)):
            self._submit_blocked(state, lambda _blocked: True)

    def _submit_blocked(self, state: RunState, is_to_run: Callable[[Blocked], bool]) -> None:
        """Submit run times again that a task's last run no longer stands against."""
        with self._changed:
            waiting = self._blocked.pop(state.task_name, [])
        together: dict[JobKey, list[Blocked]] = defaultdict(list)
        for blocked in waiting:
            if is_to_run(blocked):
                together[blocked.submission.key].append(blocked)
        try:
            for key in self._known.asking(list(together)):
                # In one submission: side by side, they would refuse each other.
                blocked_ones = together.pop(key)
                run_times = sorted(time for b in blocked_ones for time in b.submission.run_times)
                submission = replace(blocked_ones[-1].submission, run_times=tuple(run_times))
                renewed = self._jobs.renewed(submission)
                if renewed is not None:
                    again = replace(renewed, exempt_from_misfire=True)
                    self._jobs.submit(again, partial(self._add_again, blocked_ones))
        finally:
            # Those of jobs that are left out, or come after one whose code has raised.
            for blocked_ones in together.values():
                self._add_again(blocked_ones)

    def _add_again(self, blocked_ones: Sequence[Blocked]) -> None:
        for blocked in blocked_ones:
            self.add(replace(blocked, waits=False))

    def _run_again(self, state: RunState) -> Steps[bool]:
        """See to a dead run's window; tell whether it comes before other windows of the task."""
        if not state.is_run_again(failover=True):
            return False
        found = self._find_job(state)
        if found is None:
            return False
        key, submission = found
        if not state.is_run_again(failover=submission.failover):
            return False
        assert submission.options is not None
        reason = state.reason_to_give_up(submission.options.max_takeovers)
        if reason is not None:
            if (yield self._locks.giving_up(state)):
                self._given_up(state, key, reason)
            self._submit_blocked(state, lambda _blocked: True)
            return True
        for _ in self._known.asking([key]):
            if self._is_new(state.claim_id):
                self._submit(submission, state.claim_id)
        return True

    def _find_job(self, state: RunState) -> tuple[JobKey, Submission] | None:
        """Return the job that runs the same as a dead run, and what runs its window again."""
        with self._changed:
            last = self._last.get(state.task_name)
        if last is not None and last.runs == state.runs:
            return last.key, last.for_dead_run(state)
        for key in self._keys_of(state):
            found = self._jobs.submission_for(key, state)
            if found is not None:
                return key, found
        return None

    def _keys_of(self, state: RunState) -> Iterator[JobKey]:
        """Give the jobs that are a row's task, each to be asked for."""
        return self._known.asking(self._known.keys_of(state.task_name))

    def _submit(self, submission: Submission, seen_to: UUID) -> None:
        self._jobs.submit(submission, partial(self._not_submitted, seen_to))

    def _is_new(self, seen_to: UUID) -> bool:
        """Tell whether a dead run or a request is not seen to yet; from now on it is."""
        with self._changed:
            is_new = seen_to not in self._submitted
            self._submitted.add(seen_to)
        return is_new

    def _not_submitted(self, seen_to: UUID) -> None:
        with self._changed:
            self._submitted.discard(seen_to)

    # Runs that were asked for by hand.

    def _run_by_hand(self, state: RunState) -> None:
        """Submit what was asked for, if the task does not run."""
        request_id = state.request_id
        if request_id is None or not (state.finished or state.dead) or self.closed:
            return
        if not self._is_new(request_id):
            return
        submission = None
        try:
            for key in self._keys_of(state):
                submission = self._jobs.requested(key, state.task_name, request_id)
                if submission is not None:
                    self._submit(submission, request_id)
                    break
        finally:
            if submission is None:
                self._not_submitted(request_id)

    # Run times that nobody has run.

    def _stand_in(self, state: RunState) -> None:
        """Run what is due and waits for a replica that does not come."""
        # Right after an outage each replica is about to run its own.
        if state.due_at is None or state.due_in_pause or not self._locks.stable:
            return
        late_by = (state.database_time - state.due_at).total_seconds()
        if late_by < STANDBY_AFTER or self._begun.get(state.task_name) == state.due_at:
            return
        for key in self._keys_of(state):
            submission = self._jobs.standby_for(key, state, state.due_at, late_by)
            if submission is not None:
                self._begun[state.task_name] = state.due_at
                logger.debug("Task %r: due since %.1f s, run here", state.task_name, late_by)
                self._jobs.submit(submission, lambda: None)
                return

    def _see_to_overdue(self, state: RunState) -> None:
        """Tell of a task that is overdue since this look."""
        if not state.overdue or state.task_name in self._told:
            return
        if self._registrar.has_due(state) and not self._registrar.differs(state):
            self._told.add(state.task_name)
            self._tell_overdue(state)

    # Rows that are over.

    def _prune(self) -> Steps[None]:
        """Delete rows of one-off jobs that are over, if this role may."""
        try:
            while (yield self._locks.pruning(RETENTION)):
                pass  # it deletes so many at a time
        except TaskLockDatabaseError:
            raise
        except TaskLockError as error:
            self._locks.rejections.begin(OLD_ROWS, error, quiet=True)
        else:
            self._locks.rejections.end(OLD_ROWS)

    @contextmanager
    def _one_task(self, state: RunState, what: str) -> Iterator[None]:
        """Let what goes wrong with one task, as in its job store, concern no other.

        :param what: that could not be seen to, for the log line
        """
        try:
            yield
        except ConflictError as error:  # somebody has locked its row
            logger.debug("Task %r: %s could not be seen to: %s", state.task_name, what, error)
        except TaskLockDatabaseError:
            raise
        except TaskLockSchemaError as error:  # the next look tells which right is missing
            self._locks.rejections.suspect()
            logger.debug("Task %r: %s could not be seen to: %s", state.task_name, what, error)
        except Exception:
            logger.exception("Task %r: %s could not be seen to", state.task_name, what)


@contextmanager
def _noting(rejected: list[TaskLockError]) -> Iterator[None]:
    """Add to these what the database rejects. Whatever else is raised is logged.

    It ends nothing but its own part of a look, unless the database is unavailable. The next look
    tries again, also what another session was in the way of.
    """
    try:
        yield
    except ConflictError as error:
        logger.debug("Part of a look was not done, because of another session: %s", error)
    except TaskLockDatabaseError:
        raise
    except TaskLockError as error:
        rejected.append(error)
    except Exception:
        logger.exception("The tasks could not be looked at; trying again")


def _warn(state: RunState) -> None:
    logger.warning(
        "Task %r is overdue: it was due at %s, and no replica has run it since (the last was %r, "
        "token %s)",
        state.task_name,
        state.due_at,
        state.holder or "none",
        state.token,
    )
