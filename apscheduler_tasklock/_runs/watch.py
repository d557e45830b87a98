"""The look: it reads the rows of a replica's tasks that need something, such as a takeover.

One statement reads these rows. Then the look does for each row what the row needs.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from math import inf
from uuid import UUID

from apscheduler_tasklock._database.rejections import LOOKS, OLD_ROWS
from apscheduler_tasklock._database.sequences import Statements
from apscheduler_tasklock._database.sqlstates import ConflictError
from apscheduler_tasklock._lock.protocol_messages import (
    ClosedDeadRun,
    GiveUp,
    PruneOneOffs,
    TaskRow,
)
from apscheduler_tasklock._lock.statements.retention import PRUNE_INTERVAL
from apscheduler_tasklock._lock.user import ReplicaUser
from apscheduler_tasklock._runs.deferred_runs import DeferredRuns, LastRun
from apscheduler_tasklock._runs.executor_jobs import ExecutorJobs
from apscheduler_tasklock._runs.known_tasks import KnownTasks
from apscheduler_tasklock._runs.leadership import Leadership
from apscheduler_tasklock._runs.looks import Looks
from apscheduler_tasklock._runs.missed_runs import MissedRuns
from apscheduler_tasklock._runs.registration import Registrar
from apscheduler_tasklock._runs.run import JobKey
from apscheduler_tasklock._runs.standby import seconds_late
from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError, TaskLockSchemaError

logger = logger_of(__name__)


class Watch:
    """Makes the looks: reads the rows of a scheduler's tasks, and does what each row needs.

    - A dead run that has failover, or was handed over, is submitted again, as a takeover.
    - Deferred runs are decided on when the run in their way is over. If that run died and has
      failover, its takeover comes first.
    - A failed run whose retry is due is submitted again, by every replica that has the task.
    - A manual run is submitted, by every replica that has the task.
    - A run time of an interval job that another replica has missed is submitted; see ``standby``.
    - An overdue task is logged, once until it runs.
    - The task of a changed job is registered.
    - Run times that this replica has missed are noted in the run history.

    Submitted runs are claimed like any other run, so that one replica is granted each of them.

    :param user: the executor as a user of its replica
    :param known: the tasks of this replica
    :param jobs: the scheduler's jobs
    :param deferred: the deferred runs
    :param registrar: registers tasks
    :param scheduler_state: returns the scheduler's state
    :param interval: limits the seconds between two looks
    :param given_up: reports a dead run that is given up, as it was closed, and why
    :param report_overdue: reports an overdue task
    :param note_look: called at the end of each look; gets whether the jobs of all job stores are
        known
    :param missed: the run times that this replica has missed; ``None``: none are remembered
    :param leadership: who asks first; ``None``: there is no leader mode
    :param prune_interval: seconds between two deletions of old rows
    :ivar looks: decides when the next look is due
    :ivar has_looked: whether a look has succeeded
    :ivar overdue: the tasks that are overdue, as of the last look
    """

    def __init__(
        self,
        user: ReplicaUser,
        known: KnownTasks,
        jobs: ExecutorJobs,
        deferred: DeferredRuns,
        registrar: Registrar,
        scheduler_state: Callable[[], int],
        interval: float,
        given_up: Callable[[TaskRow, ClosedDeadRun, JobKey, str], None],
        report_overdue: Callable[[TaskRow], None] | None = None,
        note_look: Callable[[bool], None] = lambda _has_listed: None,
        missed: MissedRuns | None = None,
        leadership: Leadership | None = None,
        prune_interval: float = PRUNE_INTERVAL,
    ) -> None:
        self._user = user
        self._known = known
        self._jobs = jobs
        self._deferred = deferred
        self._registrar = registrar
        self._given_up = given_up
        self._report_overdue_task = report_overdue or self._warn_overdue
        self._note_look = note_look
        self._missed = missed
        self._leadership = leadership
        self._prune_interval = prune_interval
        self._prune_at = inf  # on the monotonic clock
        self.looks = Looks(user, known, self._look_safely, scheduler_state, interval)
        # Only looks use these, in the application's thread.
        self._has_listed = False  # whether the jobs of all job stores are known
        self._as_of = 0.0  # when the last look began, on the monotonic clock
        self._logged: set[str] = set()  # overdue tasks that were logged
        self._begun: dict[str, datetime] = {}  # by task: the due time of its last standby run
        self.has_looked = False
        self.overdue: tuple[str, ...] = ()
        # Looks and other threads use these.
        self._changed = threading.Lock()
        # By task: a run that was its job's last. The scheduler has dropped the job, so the job is
        # kept here. If the task's last run turns out to be dead, this job can take it over, and if
        # it fails, this job can run it again.
        # The number is when it was noted, on the monotonic clock.
        self._last: dict[str, tuple[Submission, float]] = {}
        self._submitted: set[UUID] = set()  # ids of dead, failed and manual runs, once submitted
        self._expecting: set[str] = set()  # tasks of which this replica was asked for a manual run

    def start(self) -> None:
        """Begin the looks, as soon as the scheduler runs."""
        # With jitter, so that replicas that have started at the same moment do not all delete old
        # rows at the same moment.
        first = random.uniform(0, min(60.0, self._prune_interval))  # noqa: S311  # no secret
        self._prune_at = time.monotonic() + first
        self.looks.start()

    def _look_safely(self) -> Statements[None]:
        try:
            yield from self.look()
            if time.monotonic() > self._prune_at:
                self._prune_at = time.monotonic() + self._prune_interval
                yield from self._prune()
            if self._registrar.has_more:
                self.looks.wake()
        except TaskLockDatabaseError:  # logged as an outage
            if self._leadership is not None:
                self._ask_for_kept_runs()
        except Exception:  # so that an error is logged and does not end the looks
            logger.exception("The tasks could not be looked at; trying again")

    def look(self) -> Statements[None]:
        """Make one look.

        If the database rejects a part of the look, the other parts go on, and the next look tries
        the rejected part again.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        rejected: list[TaskLockError] = []
        with _noting(rejected):
            yield from self._user.rights.look()
        with _noting(rejected):
            self._list_once()
        # Before the rows, so that a stored job's task that has no row is registered before its
        # missed run times are noted.
        with _noting(rejected):
            self._registrar.list_stored()
        with _noting(rejected):
            yield from self._look_at_rows(rejected)
        if self._missed is not None:
            with _noting(rejected):
                yield from self._missed.tell()
        with _noting(rejected):
            self._note_look(self._has_listed)
        if rejected:
            self._user.rejections.begin(LOOKS, rejected[0])
        else:
            self._user.rejections.end(LOOKS)

    def _list_once(self) -> None:
        """List the jobs of all job stores, unless an earlier look has listed them all."""
        if not self._has_listed:
            for task_name, key, lease in self._jobs.list_tasks():
                self._known.add(task_name, key, lease)
            self._has_listed = True

    def _look_at_rows(self, rejected: list[TaskLockError]) -> Statements[None]:
        number, waiting = self.looks.number, self._waiting()
        leader = [] if self._leadership is None else [self._leadership.row]
        asked_for = sorted({*waiting, *self._registrar.expecting(), *leader})
        names = sorted({*self._known.names(), *asked_for})
        states: list[TaskRow] = []
        self._as_of = time.monotonic()
        if names:
            states = yield from self._read(names, asked_for)
        is_first, self.has_looked = not self.has_looked, True
        if self._leadership is not None:
            rows = [state for state in states if state.task_name == self._leadership.row]
            states = [state for state in states if state.task_name != self._leadership.row]
            with _noting(rejected):
                yield from self._leadership.take_or_renew(rows[0] if rows else None)
        with _noting(rejected):
            yield from self._registrar.register(states, has_listed=self._has_listed)
        self.overdue = tuple(state.task_name for state in states if state.overdue)
        self._logged.intersection_update(self.overdue)
        for state in states:
            if self.looks.closed or number != self.looks.number:
                return
            yield from self._do_what_is_called_for(state)
        if is_first:  # after all other work, because this calls the triggers of many jobs
            self._note_unasked(states)
        for name in waiting - {state.task_name for state in states}:  # its row is gone
            self._drop_last(name)
            with _noting(rejected):
                gone = LastRun(0, finished=False, dead=True, deaths=1, as_of=self._as_of)
                self._decide(name, gone)

    def _read(self, names: Sequence[str], asked_for: Sequence[str]) -> Statements[list[TaskRow]]:
        try:
            states: list[TaskRow] = yield self._user.database.reading(names, asked_for)
        except TaskLockDatabaseError:
            raise
        except TaskLockError:
            if self._leadership is not None:
                self._leadership.note_rejected()
                if not self._leadership.follows:
                    self._ask_for_kept_runs()
            raise
        return states

    def _do_what_is_called_for(self, state: TaskRow) -> Statements[None]:
        is_deferred = self._deferred.has(state.task_name)
        with self._one_task(state.task_name, "its dead run"):
            yield from self._handle_dead_run(state)
        with self._one_task(state.task_name, "its retry"):
            self._retry(state)
        with self._one_task(state.task_name, "its manual run"):
            self.run_manual(state)
        with self._one_task(state.task_name, "whether another replica has missed its run time"):
            if not is_deferred:  # because the deferred run is decided on above
                self._stand_in(state)
        with self._one_task(state.task_name, "whether it is overdue"):
            self._report_overdue(state)

    def _note_unasked(self, states: Sequence[TaskRow]) -> None:
        """Note the run times that passed while no replica was there, at the first look."""
        if self._missed is None:
            return
        for state in states:
            if state.due_at is None or state.due_in_pause:
                continue
            for key in self._keys_of(state):
                with suppress(Exception):  # a custom trigger's own code may raise anything
                    now = state.database_time
                    found = self._jobs.unasked(key, state.task_name, state.due_at, now)
                    if found is not None:
                        self._missed.note_unasked(*found, now)

    @property
    def is_watching(self) -> bool:
        """Whether there are tasks whose rows each look has to read, whatever their state."""
        return bool(self._waiting())

    def _waiting(self) -> set[str]:
        """Return the tasks whose rows each look has to read, whatever their state.

        These tasks have deferred runs, or a refused run whose job the scheduler has dropped.
        """
        with self._changed:
            return {*self._deferred.task_names, *self._last}

    # Dead runs and deferred runs.

    def note_unfinished(self, submission: Submission, may_be_over: bool) -> None:
        """Note a run time while the task's last run is unfinished, or may be retried.

        :param may_be_over: whether the last run may be over or dead, so that a look is due now
        """
        # Computed before the lock is taken, because `is_last` calls the trigger, which may be the
        # application's own code.
        is_last = submission.is_last
        if self.looks.closed:
            return
        if is_last:
            with self._changed:
                self._last[submission.task_name] = submission, time.monotonic()
        if may_be_over:
            self.looks.wake()

    def ended(self, submission: Submission) -> None:
        """Note that a submission is over. From now on a look may submit its run once more."""
        if submission.cause is not None:
            self._not_submitted(submission.cause)
        with self._changed:
            is_expecting = submission.task_name in self._expecting
            self._expecting.discard(submission.task_name)
        if is_expecting or self._deferred.has(submission.task_name):
            self.looks.wake()

    def _handle_dead_run(self, state: TaskRow) -> Statements[None]:
        """Take over a task's last run if it is dead, and decide on the task's deferred runs."""
        if state.finished:
            if not state.retry_pending:
                self._drop_last(state.task_name)
            self._decide_deferred(state, state.deaths)
            return
        # A dead run is not taken over while its task is paused. Right after an outage, only a run
        # that was handed over is taken over, because any other holder may still renew its lease.
        believed = not state.paused and state.dead
        believed = believed and (state.handed_over or self._user.outage.stable)
        is_run_again = believed and (yield from self._run_again(state))
        self._decide_deferred(state, state.deaths, goes_on=not believed or is_run_again)

    def _decide_deferred(self, state: TaskRow, deaths: int, *, goes_on: bool = False) -> None:
        """Decide on the runs that are deferred because of a task's last run.

        :param goes_on: whether the deferred runs go on waiting, for that run or for its takeover
        """
        is_over, is_dead = state.finished and not goes_on, state.dead and not goes_on
        last = LastRun(state.token, is_over, is_dead, deaths, self._as_of, state)
        self._decide(state.task_name, last)

    def _ask_for_kept_runs(self) -> None:
        """Let a follower ask for the runs that it defers, because no look can read the rows.

        From now on these runs are treated as without leader mode: in an outage they are skipped
        when their claims have got no answer, and otherwise when their claims are rejected. Runs
        that are deferred because of another run go on waiting.
        """
        for name in self._deferred.task_names:
            with self._one_task(name, "its deferred runs"):
                self._decide(name, LastRun(0, finished=False, dead=False, deaths=0))

    def _decide(self, task_name: str, last: LastRun) -> None:
        for key in self._known.asking(self._deferred.jobs_of(task_name)):
            self._deferred.decide(task_name, key, last)

    def _run_again(self, state: TaskRow) -> Statements[bool]:
        """Take over or give up a dead run, if it has failover or was handed over.

        :return: ``True`` if the caller has no deferred runs to decide on, because they were decided
            on here or have to wait for the takeover; ``False`` if it is to decide on them
        """
        if not state.is_run_again(failover=True):
            return False
        found = self._find_job(state)
        if found is None:
            return False
        key, submission = found
        if not state.is_run_again(failover=submission.failover):
            # The row still says that the run has failover, so that the job's next run would have to
            # wait until the dead run's maximum lock ends.
            if submission.is_stored:
                yield from self._give_up(state, key, "failover is off for its job by now")
            return False
        assert submission.options is not None
        reason = state.reason_to_give_up(submission.options.max_takeovers)
        if reason is not None:
            yield from self._give_up(state, key, reason)
            self._decide_deferred(state, state.deaths + 1)
            return True
        for _ in self._known.asking([key]):
            if self._is_new(state.claim_id):
                self._submit(submission, state.claim_id)
        return True

    def _give_up(self, state: TaskRow, key: JobKey, reason: str) -> Statements[None]:
        closed: ClosedDeadRun | None = yield self._user.database.carrying_out(
            GiveUp(state.task_name, state.claim_id)
        )
        if closed is not None:
            self._given_up(state, closed, key, reason)

    def _find_job(self, state: TaskRow) -> tuple[JobKey, Submission] | None:
        """Return a job that can take over a dead run, and the takeover; ``None`` if no job can."""
        last = self._last_of(state)
        if last is not None:
            return last.key, replace(last, dead_run=state)
        for key in self._keys_of(state):
            found = self._jobs.submission_for(key, state)
            if found is not None:
                return key, found
        return None

    def _last_of(self, state: TaskRow) -> Submission | None:
        """Return the last run of a job that the scheduler has dropped, if it is this run's job."""
        with self._changed:
            last, _ = self._last.get(state.task_name, (None, 0.0))
        return last if last is not None and last.runs == state.runs else None

    def _drop_last(self, task_name: str) -> None:
        """Forget a job's last run, unless it was noted after the look has read the rows."""
        with self._changed:
            _, noted_at = self._last.get(task_name, (None, inf))
            if noted_at < self._as_of:
                del self._last[task_name]

    def _keys_of(self, state: TaskRow) -> Iterator[JobKey]:
        """Yield the jobs of a row's task. The caller may call each job's store and trigger."""
        return self._known.asking(self._known.keys_of(state.task_name))

    def _submit(self, submission: Submission, cause: UUID) -> None:
        self._jobs.submit(submission, partial(self._not_submitted, cause))

    def _is_new(self, cause: UUID) -> bool:
        """Note that a run is submitted; return whether it was not submitted before.

        :param cause: the claim id of the dead or failed run, or the id of the manual run
        """
        with self._changed:
            is_new = cause not in self._submitted
            self._submitted.add(cause)
        return is_new

    def _not_submitted(self, cause: UUID) -> None:
        with self._changed:
            self._submitted.discard(cause)

    # Retries and manual runs.

    def _retry(self, state: TaskRow) -> None:
        """Submit the retry of a failed run, if its time has come."""
        if state.retry_at is not None and not self.looks.closed:
            self._submit_once(state.claim_id, self._retries_of(state))

    def _retries_of(self, state: TaskRow) -> Iterator[Submission]:
        for key in self._keys_of(state):
            found = self._jobs.retry_of(key, state)
            if found is not None and found.may_retry_after(state.attempt):
                yield found
        last = self._last_of(state)
        if last is None or last.key in self._known.job_keys():
            return
        if last.may_retry_after(state.attempt):
            for _ in self._known.asking([last.key]):
                yield replace(last, failed_run=state)

    def expect_manual(self, task_name: str) -> None:
        """Let a look follow the next end of a run of this task here, for a manual run.

        Any thread may call this.
        """
        with self._changed:
            self._expecting.add(task_name)

    def run_manual(self, state: TaskRow, keys: Iterable[JobKey] | None = None) -> None:
        """Submit the manual run that was asked for, if there is one and the task is not running.

        Any thread may call this if it gives the jobs.

        :param keys: the jobs that may be run; by default those of the row's task
        """
        request_id = state.request_id
        if request_id is not None and (state.finished or state.dead) and not self.looks.closed:
            keys = self._keys_of(state) if keys is None else keys
            self._submit_once(request_id, self._manual_runs_of(state, request_id, keys))

    def _manual_runs_of(
        self, state: TaskRow, request_id: UUID, keys: Iterable[JobKey]
    ) -> Iterator[Submission]:
        for key in keys:
            found = self._jobs.requested(key, state.task_name, request_id)
            if found is not None:
                yield found

    def _submit_once(self, cause: UUID, found: Iterator[Submission]) -> None:
        """Submit a run by the first job that can run it, unless that was done and is not over.

        :param cause: as in :meth:`_is_new`
        :param found: yields the submissions, while their jobs' code is asked, which the submission
            calls, too
        """
        if not self._is_new(cause):
            return
        submission = None
        try:
            for submission in found:
                self._submit(submission, cause)
                break
        finally:
            if submission is None:
                self._not_submitted(cause)

    # Run times that no replica has run.

    def _stand_in(self, state: TaskRow) -> None:
        """Submit a standby run of a due task, if the replica with this run time does not run it."""
        late_by = seconds_late(state, stable=self._user.outage.stable)
        if late_by is None or self._begun.get(state.task_name) == state.due_at:
            return
        assert state.due_at is not None
        for key in self._keys_of(state):
            submission = self._jobs.standby_for(key, state, state.due_at, late_by)
            if submission is not None:
                self._begun[state.task_name] = state.due_at
                logger.debug("Task %r: due for %.1f s, so run here", state.task_name, late_by)
                self._jobs.submit(submission, lambda: None)
                return

    def _report_overdue(self, state: TaskRow) -> None:
        """Report an overdue task, once until it runs."""
        if not state.overdue or state.task_name in self._logged:
            return
        is_meant = self._registrar.has_due(state) and not self._registrar.differs(state)
        # Right after a start or an outage, replicas still run what came due before.
        if is_meant and self._user.outage.stable:
            self._logged.add(state.task_name)
            self._report_overdue_task(state)

    def _warn_overdue(self, state: TaskRow) -> None:
        logger.warning(
            "Task %r is overdue: it was due at %s, and no replica has run it since (the last was "
            "%r, token %s). What is known of it: %s",
            state.task_name,
            state.due_at,
            state.holder or "none",
            state.token,
            self._user.replica.command_line("why", task=state.task_name),
        )

    # Old rows.

    def _prune(self) -> Statements[None]:
        """Delete old rows of one-off jobs, if the database role has the right."""
        try:
            prune = PruneOneOffs(self._user.settings.keep_one_offs)
            while (yield self._user.database.carrying_out(prune)):
                pass  # each statement deletes a limited number of rows
        except TaskLockDatabaseError:
            raise
        except TaskLockError as error:
            self._user.rejections.begin(OLD_ROWS, error, quiet=True)
        else:
            self._user.rejections.end(OLD_ROWS)

    @contextmanager
    def _one_task(self, task_name: str, what: str) -> Iterator[None]:
        """Log an error of the block, so that the other tasks are checked.

        :param task_name: the task that the block checks
        :param what: what the block checks, for the log line
        """
        try:
            yield
        except ConflictError as error:  # another session has the row locked
            logger.debug("Task %r: could not check %s: %s", task_name, what, error)
        except TaskLockDatabaseError:
            raise
        except TaskLockSchemaError as error:  # the next look finds which right is missing
            self._user.rejections.suspected = True
            logger.debug("Task %r: could not check %s: %s", task_name, what, error)
        except Exception:
            logger.exception(
                "Task %r: could not check %s; trying again at the next look", task_name, what
            )


@contextmanager
def _noting(rejected: list[TaskLockError]) -> Iterator[None]:
    """Collect the rejections of a part of a look, and log its other errors.

    So the other parts of the look go on, and the next look tries this part again. Only if the
    database is unavailable, the error ends the look.

    :param rejected: the list to which errors of rejected statements are added
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
