"""The reader of due jobs, which puts their run times into the executors' queues.

A *look* is a read of due jobs, with all work that follows from the read until the next look.
A read locks nothing and writes nothing, so several replicas may read the same due job. Each of
these replicas claims the job's run time when one of its workers is free. One claim is granted, and
its statement also moves the job to its next run time. So no run time is lost if a replica dies
between its read and its claim, or if its claim is refused.

When to look is decided in the replica's thread, which hears of everything that matters for it. The
look itself runs the jobs' own code: it imports their functions, and asks their triggers. So each
look is a call in another thread, which may hang. A look whose job hangs is over; the next look
leaves that job out, and is a call in a new thread.

APScheduler's own loop does none of this, so that no database error can end that loop, and no event
loop waits for the database.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from math import inf
from typing import Any, TypeVar
from uuid import uuid4

from apscheduler_tasklock._application import ApplicationThread, call_application
from apscheduler_tasklock._database.rejections import ENDED_JOBS, JOB_STORE
from apscheduler_tasklock._lock.job_rows import DueRow, JobRow
from apscheduler_tasklock._lock.protocol_messages import JobMove
from apscheduler_tasklock._lock.user import ReplicaUser
from apscheduler_tasklock._runs.missed_runs import IN_PAUSE, late, unclaimed
from apscheduler_tasklock._runs.skipped_jobs import SkippedJobsLog
from apscheduler_tasklock._runs.submission import FAILED, DueRun
from apscheduler_tasklock._runs.trigger_times import few_steps
from apscheduler_tasklock._shutdown import WITHDRAWING_LIMIT, Shutdown
from apscheduler_tasklock._values import cut, logger_of
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockOptionError,
    TaskLockSchemaError,
)
from apscheduler_tasklock.executor import StoredRuns
from apscheduler_tasklock.jobstore.bad_rows import (
    FLOOD,
    MOST_SKIPPED,
    Backoff,
    Flood,
    is_slow,
    load_function,
)
from apscheduler_tasklock.jobstore.definition import Definition, JobCodec
from apscheduler_tasklock.jobstore.next_run_time import (
    Due,
    due_run,
    misfires_from,
    passed_run_times,
)
from apscheduler_tasklock.jobstore.scheduler_inside import DueJob, SchedulerInside
from apscheduler_tasklock.jobstore.trust import UntrustedError
from apscheduler_tasklock.status import MissCause

logger = logger_of(__name__)

Answer = TypeVar("Answer")

NAME = "tasklock-store"
# Limits the due jobs that are read for each free worker. Other replicas claim some of them.
READ_PER_WORKER = 3
# Limits the due jobs of one read, and the jobs that one statement moves to their next run times.
MOST_READ = 256
# Limits the characters of a trigger as JSON that is looked at in a flood of bad rows. To make a
# trigger of a thousand parts takes longer than to find out that a small one does not end.
LARGEST_SIFTED = 10_000
# The shortest pause, in seconds, between two looks for due jobs: SHORTEST_INTERVAL if a change of a
# job called for the second look, SHORTEST_PAUSE in all other cases.
SHORTEST_INTERVAL, SHORTEST_PAUSE = 0.05, 0.005
# The shortest pause between two ordinary looks of a replica, in seconds for each live replica, so
# that all replicas together look at most 20 times a second.
INTERVAL_OF_EACH = 0.05
# Delays the look for a due job by so many seconds, because a look a moment too early finds nothing.
MARGIN = 0.002
# LOOKING limits how many replicas look for a job when it is due, on average. The other replicas
# look at least OTHERS_LOOK_AFTER seconds later, in case the job is still due then.
LOOKING, OTHERS_LOOK_AFTER = 3, 0.5
# The first pause and the longest pause until a refused job is read again, in seconds.
FIRST_REFUSED, LONGEST_REFUSED = 0.05, 1.0
# Limits the seconds between two checks, in which dead runs are found and ended jobs are deleted.
CHECK_INTERVAL = 5.0
# The error of a job with task_lock: False.
NO_LOCK = (
    "task_lock: False makes no sense in a TaskLockJobStore, whose jobs run on one replica each, by "
    "their locks. Leave it out, or put the job into each replica's memory store"
)
# The seconds until this replica checks again whether a stopped or paused scheduler runs.
NOT_RUNNING_INTERVAL = 0.2


def look_delay(replicas: int, chance: Callable[[], float]) -> float:
    """Return how many seconds after a job's due time a replica looks for it.

    Some replicas look at once. The others look later, and find the job if the first ones had no
    free worker.

    :param replicas: number of live replicas
    :param chance: returns a random number from 0 to 1
    """
    if chance() * replicas < LOOKING:
        return MARGIN
    return OTHERS_LOOK_AFTER + chance() * replicas * INTERVAL_OF_EACH


@dataclass(frozen=True)
class _Prepared:
    """A due run time whose job can run here.

    :ivar task_name: the job's task; ``None`` if locks are off
    :ivar cause: why it is not run: it is a misfire, fell into a pause of its task, or is passed
        over; ``None``: it is run
    :ivar reason: why it is not run, in words, by the first run time that is missed for it
    """

    job: DueJob
    due: DueRun
    executor: StoredRuns
    task_name: str | None
    cause: MissCause | None
    reason: Callable[[datetime], str]


class _Look:
    """One look for due jobs: when it was, and what it found.

    :param executors: the executors by alias
    :param now: the database's time
    :param received: when the database's time was received, on the monotonic clock
    :ivar again_at: when submitted jobs are due again, on the monotonic clock
    :ivar moving: run times that are not run, because they are missed or fell into a pause. Their
        jobs are moved to their next run times.
    :ivar has_bad: whether a job that was read cannot run here
    """

    def __init__(self, executors: Mapping[str, StoredRuns], now: datetime, received: float) -> None:
        self.executors = executors
        self.now = now
        self.received = received
        self.again_at: list[float] = []
        self.moving: list[_Prepared] = []
        self.has_bad = False

    @property
    def is_slow(self) -> bool:
        """Whether the look has lasted so long since its read that it is to end."""
        return is_slow(self.received)

    def monotonic(self, moment: datetime) -> float:
        """Convert a moment of the database's clock to the monotonic clock."""
        # Timestamps are used, because Python subtracts two datetimes of one zone by local times.
        return self.received - (self.now.timestamp() - moment.timestamp())


class _LookIsOverError(Exception):
    """Ends a look whose job has hung, because another look has begun in its place."""


class DueJobs:
    """Reads due jobs, and has their run times claimed and run.

    The replica's thread steps it, and begins its looks, one at a time. While a look goes on, the
    look alone changes what is noted of jobs and of the next look; else the replica's thread does.

    :param user: the job store as a user of its replica
    :param scheduler: the scheduler of the job store
    :param alias: the alias of the job store
    :param codec: reads the rows
    :param interval: seconds between two ordinary looks. Many live replicas make this time longer.
    :param notices: log lines about jobs that cannot run here
    :ivar messages: to :meth:`step`: run times that are over; ``None`` only wakes it
    :ivar wakes_at: when :meth:`step` is due, on the monotonic clock
    """

    def __init__(
        self,
        user: ReplicaUser,
        scheduler: SchedulerInside,
        alias: str,
        codec: JobCodec,
        interval: float,
        notices: SkippedJobsLog,
    ) -> None:
        self._user = user
        self._rows = user.database.jobs
        self._scheduler = scheduler
        self._alias = alias
        self._codec = codec
        self._interval = interval
        self.messages: list[DueRun | None] = []
        self.wakes_at = inf
        self._closed = False
        # Other threads ask for a look: soon, or at once.
        self._is_called = self._is_urgent = False
        self._has_ended = threading.Event()  # set while no look goes on
        self._has_ended.set()
        self._next_at = 0.0  # when to look, on the monotonic clock
        self._looked_at = 0.0
        self._check_runs_at = 0.0
        # When the scheduler began to run, on the monotonic clock.
        self._running_since: float | None = None
        self._rejected: TaskLockError | None = None  # why the database rejects claims
        self._has_more = False  # whether more jobs may be due than were read
        self._newest_first = False  # whether the next read begins with the jobs that came due last
        self._growth = 1  # multiplies the next read's size while no job that is read is run
        self._queued: dict[str, DueRun] = {}  # by job id
        self._refused: dict[str, tuple[float, float]] = {}  # end and length of each job's pause
        self._again_at: dict[str, float] = {}  # when jobs that have run here are due again
        self._missing = Backoff()  # functions' references and modules that cannot be imported
        self._bad = Backoff()  # ids of jobs whose rows cannot run here
        self._has_warned_of_executors = False
        self._flood: Flood | None = None
        self._began = 0.0  # when the read of the current row began, on the monotonic clock
        self._notices = notices
        self._looks = ApplicationThread(NAME, keeps_out=True)
        self._longest_turn = user.settings.timings.longest_turn
        # By job id: since when the job's own code runs in the look that goes on. Whoever removes
        # the entry first decides whether the look goes on or is over.
        self._own_code: dict[str, float] = {}
        self._hanging: set[str] = set()  # ids of jobs whose own code has not returned yet

    def start(self) -> None:
        """Begin to look.

        :raises RuntimeError: no thread can be started
        """
        self._user.thread.start()
        self.wake()

    def close(self, shutdown: Shutdown) -> None:
        """Begin no further look, and wait for the last one within the limits of a shutdown."""
        self._closed = True
        self._user.stop_claiming()  # which ends a look's wait for the database
        self._user.thread.post(self, None)
        self._has_ended.wait(min(WITHDRAWING_LIMIT, shutdown.seconds_left))

    def wake(self) -> None:
        """Ask for a look soon, because a change may have made a job due. Does not wait."""
        self._is_called = True
        self._user.thread.post(self, None)

    # ---- called by the queues, in any thread -----------------------------------------------------

    def is_wanted(self, _due: DueRun) -> bool:
        """Return whether a run time that was read is still to be claimed here."""
        is_wanted = self._scheduler.is_running and not self._scheduler.is_abandoned
        return is_wanted and not self._closed

    def note_over(self, due: DueRun) -> None:
        """Note that a run time is over here: it was run, or another replica has claimed it."""
        self._user.thread.post(self, due)

    def _note_room(self) -> None:
        """Ask for a look at once if more jobs may be due than were read. A worker is free now."""
        if self._has_more and self._rejected is None:
            self._is_urgent = True
            self._user.thread.post(self, None)

    # ---- when to look: in the replica's thread ---------------------------------------------------

    def step(self) -> None:
        """Take the messages, and begin a look if it is time."""
        now = time.monotonic()
        if not (self._has_ended.is_set() or self._end_if_stuck(now)):  # messages wait for its end
            next_at = min(self._own_code.values(), default=now) + self._longest_turn
            self.wakes_at = inf if self._closed else next_at
            return
        # A run time that is over by now may be due again, as after a change of its job. Without
        # this its job would count as queued, and wait for the ordinary look.
        self._note_outcomes()
        self.wakes_at = inf if self._closed else self._look_at
        if self.wakes_at <= now:
            self._is_called = self._is_urgent = False
            self._looked_at = now
            self.wakes_at = now + self._longest_turn
            self._has_ended.clear()
            self._looks.call(self._look_safely)

    @property
    def _look_at(self) -> float:
        """When to look next, on the monotonic clock."""
        soonest = self._looked_at + SHORTEST_PAUSE
        look_at = soonest if self._is_urgent else max(self._next_at, soonest)
        return min(look_at, self._looked_at + SHORTEST_INTERVAL) if self._is_called else look_at

    def _end_if_stuck(self, now: float) -> bool:
        """Return whether the look that goes on is over, because its job hangs; note that job."""
        self._looks.start()  # if no thread could be started when the look began
        if not self._own_code:
            # The look waits for the database, or for a thread, because as many hang as may. A look
            # that only waits for the database goes on, in the thread that it has.
            self._looks.relieve(self._longest_turn)
        for job_id, since in list(self._own_code.items()):
            if now < since + self._longest_turn:
                continue
            self._hanging.add(job_id)
            if self._own_code.pop(job_id, None) is None:  # it has returned at this moment
                self._hanging.discard(job_id)
                continue
            self._has_ended.set()
            self._looks.relieve(0.0)
            self._look_in(0)
            # Other jobs that hang may be due before the others, or after them.
            self._newest_first = not self._newest_first
            logger.warning(
                "Job %r: the import of its function, or its trigger, has not returned for %g s; "
                "until it returns, the job is left to other replicas",
                job_id,
                self._longest_turn,
            )
            return True
        return False

    def _look_in(self, seconds: float) -> None:
        self._next_at = time.monotonic() + seconds

    def _look_by(self, moment: float) -> None:
        self._next_at = min(self._next_at, moment)

    def _note_outcomes(self) -> None:
        """Note the outcomes of the run times that are over here."""
        now = time.monotonic()
        messages, self.messages = self.messages, []
        for due in messages:
            if due is None:
                continue
            job_id = due.move.job_id
            if self._queued.get(job_id) is due:
                del self._queued[job_id]
            self._note_outcome(due, now)
            if self._flood is not None:
                self._flood.note(job_id, is_bad=False)
            if self._has_more and self._rejected is None:
                self._look_by(now)

    def _note_outcome(self, due: DueRun, now: float) -> None:
        """Note the outcome of a run time, and when its job may be due again."""
        if due.rejected is not None:
            self._rejected = due.rejected
            self._user.rejections.begin(JOB_STORE, due.rejected)
            return
        if due.refused != FAILED:
            self._rejected = None
        if due.refused is None:
            # Usually the job has run here, so this replica looks for the job when it is due again.
            self._refused.pop(due.move.job_id, None)
            self._again_at[due.move.job_id] = due.again_at
            self._look_by(max(now, due.again_at + MARGIN))
        elif due.refused != "withdrawn":
            self._skip_refused(due.move.job_id, now)

    def _skip_refused(self, job_id: str, now: float) -> None:
        """Skip a job for a moment, because it was read as due and could not be claimed."""
        _, before = self._refused.get(job_id, (0.0, 0.0))
        pause = min(LONGEST_REFUSED, max(FIRST_REFUSED, 2 * before))
        self._refused[job_id] = now + pause, pause
        self._look_by(now + pause)

    def _plan(self, next_in: float | None, look: _Look) -> None:
        """Plan the next look: after the ordinary pause, or earlier if a job is due earlier.

        :param next_in: seconds from the read until the next job is due; ``None`` if there is none
        """
        now = time.monotonic()
        replicas = max(1, self._user.outage.live_replicas)
        # next_at may be in the past, because the next job may have come due during this look. A
        # submitted job that is due again by now is left out, because a look follows its run.
        next_at = inf if next_in is None else look.received + next_in
        due_at = min([next_at, *(moment for moment in look.again_at if moment > now)])
        pause = max(self._interval, replicas * INTERVAL_OF_EACH)
        self._next_at = min(now + pause, due_at + look_delay(replicas, random.random))
        self._again_at = {k: at for k, at in self._again_at.items() if now < at < now + pause}
        self._look_by(min(self._again_at.values(), default=inf) + MARGIN)
        self._look_by(min([until for until, _ in self._refused.values() if until > now] or [inf]))
        if self._flood is not None:
            self._look_by(now + self._flood.rest)

    # ---- a look, in a thread that may hang -------------------------------------------------------

    def _look_safely(self) -> None:
        """Look, whatever happens, and have the next look planned."""
        is_over = False
        try:
            if not self._closed:
                self._look()
                if self._rejected is None:
                    self._user.rejections.end(JOB_STORE)
        except _LookIsOverError:
            is_over = self._is_called = True  # because the job that has hung can run here now
        except TaskLockDatabaseError:  # logged as an outage
            self._look_in(self._interval * random.uniform(0.8, 1.2))  # noqa: S311  # no secret
        except TaskLockError as error:
            self._look_in(self._interval)
            self._user.rejections.begin(JOB_STORE, error)
        except BaseException:  # whatever it is, looks go on
            self._look_in(self._interval)
            logger.exception("The job store could not be looked at; trying again")
        finally:
            if not is_over:
                self._has_ended.set()
            self._user.thread.post(self, None)

    def _look(self) -> None:
        """Check dead runs from time to time, and read due jobs if workers are free."""
        if self._scheduler.is_abandoned:
            self._abandon()
            return
        if not self._scheduler.is_running:
            self._running_since = None
            self._look_in(NOT_RUNNING_INTERVAL)
            self._notices.sum_up()
            return
        if self._running_since is None:
            self._running_since = time.monotonic()
        if time.monotonic() >= self._check_runs_at:
            self._check_runs()
        executors = self._scheduler.stored_runs
        self._warn_without_executors(executors)
        executors = {k: each for k, each in executors.items() if not each.begins_nothing}
        most = {alias: self._most(alias, executor) for alias, executor in executors.items()}
        if any(most.values()):
            self._read_due(executors, most)
            if self._flood is not None:  # last, because a row that hangs ends the look
                self._sift(self._flood, [alias for alias, count in most.items() if count])
        else:  # a worker that becomes free asks for a look
            self._has_more = True
            self._look_in(self._interval)

    def _abandon(self) -> None:
        """Stop, because the scheduler's event loop was closed."""
        self._closed = True
        logger.warning(
            "The job store %r runs no more jobs here, because the event loop of its scheduler was "
            "closed. Call the scheduler's shutdown() before the loop is closed",
            self._alias,
        )

    def _warn_without_executors(self, executors: Mapping[str, Any]) -> None:
        if executors or self._has_warned_of_executors:
            return
        self._has_warned_of_executors = True
        logger.warning(
            "The job store %r runs no jobs here, because no executor of this scheduler is a "
            "TaskLockExecutor on the same database and table",
            self._alias,
        )

    def _most(self, alias: str, executor: StoredRuns) -> int:
        """Return how many due jobs to read for an executor."""
        executor.call_if_there_is_room(self._note_room)
        if self._rejected is not None:  # read one job, to see whether its claim is rejected, too
            return int(executor.room >= 1)
        room = executor.room
        if room == inf:
            room = MOST_READ - sum(each.executor == alias for each in self._queued.values())
        elif executor.claims:  # because other replicas claim some of the jobs
            room *= READ_PER_WORKER
        return 0 if room < 1 else min(MOST_READ, int(room) * self._growth)

    def _read_due(self, executors: Mapping[str, StoredRuns], most: dict[str, int]) -> None:
        """Read due jobs, and submit their run times. Move a job on if its run time is not run."""
        not_here = self._missing.names()[-MOST_SKIPPED:]
        now = time.monotonic()
        self._refused = {k: v for k, v in self._refused.items() if v[0] > now - LONGEST_REFUSED}
        refused = [job_id for job_id, (until, _) in self._refused.items() if until > now]
        flood = self._flood
        found = self._user.database.ask(
            partial(
                self._rows.read_due,
                most=most,
                stable=self._user.outage.stable,
                not_here=not_here,
                not_these=[
                    *self._queued,
                    *self._bad.names()[-MOST_SKIPPED:],
                    *refused,
                    *self._hanging,
                ],
                since=flood.since if flood else None,
                among=list(flood.good) if flood else [],
                newest_first=self._newest_first,
            )
        )
        look = _Look(executors, found.database_time, time.monotonic())
        got = Counter(each.row.executor for each in found.jobs)
        self._has_more = any(got[alias] >= count for alias, count in most.items())
        self._sort_out(found.jobs, look)
        is_cut = look.is_slow
        # Any number of rows that take long may have come due before the others, or after them.
        self._newest_first = is_cut and not self._newest_first
        self._plan(found.next_in, look)
        has_moved = self._move_on(look.moving)
        is_in_vain = self._has_more and look.moving and not look.again_at
        self._growth = min(MOST_READ, self._growth * 2) if is_in_vain else 1
        if self._rejected is not None:
            self._look_in(self._user.settings.timings.rejected_interval)
            if isinstance(self._rejected, TaskLockSchemaError) and not found.jobs:
                # Others may have claimed all that was due, so no claim of this replica would show
                # that it is permitted again.
                self._user.rights.check(jobs=True)
                self._rejected = None
            return
        # The read may have left out other due jobs, and a slow look leaves some that were read.
        if look.has_bad or has_moved or is_cut:
            self._look_in(0)
        names = len(self._missing.names()) + len(self._bad.names())
        if flood is None and ((is_cut and look.has_bad) or names > FLOOD):
            self._flood = Flood(found.database_time)
            self._look_in(0)
        elif not look.has_bad and (flood is None or flood.rest):
            self._notices.sum_up()  # because no further bad row was found

    def _sift(self, flood: Flood, executors: list[str]) -> None:
        """Read pages of due rows while many of them are bad."""
        not_here = self._missing.names()[-MOST_SKIPPED:]

        def read(until: datetime, after: tuple[datetime, str] | None) -> list[JobRow]:
            due = partial(self._rows.due, until=until, after=after, not_here=not_here)
            stable = self._user.outage.stable
            return self._user.database.ask(partial(due, executors=executors, stable=stable))

        now = self._user.database.ask(self._rows.now)
        received = time.monotonic()
        flood.sift(
            now,
            read,
            lambda row: self._run_own_code(row.id, lambda: self._is_good(row, now, received)),
        )
        if flood.is_over:
            self._flood = None

    def _is_good(self, row: JobRow, now: datetime, received: float) -> bool:
        """Return whether a row of a flood can run here.

        A row with a large trigger, or one that takes many steps, waits until the flood is over, or
        until it is due again, so that the other rows are reached soon.
        """
        if len(json.dumps(row.trigger)) > LARGEST_SIFTED:
            return False
        with few_steps():
            return self._is_good_in_few_steps(row, now, received)

    def _is_good_in_few_steps(self, row: JobRow, now: datetime, received: float) -> bool:
        attributes = self._read(row)
        if attributes is None:
            return False
        found = DueRow(row, uuid4(), now, (), None, None, runs_again=False)
        try:
            due = self._due(found, attributes, _Look({}, now, received))
            job = self._scheduler.make_due(attributes, due.run_time)
            self._task_of(job, self._scheduler.stored_runs[row.executor])
        except BaseException as error:  # noqa: BLE001  # any error concerns this job alone
            self._skip_bad(row, error)
            return False
        return True

    def _sort_out(self, found: Sequence[DueRow], look: _Look) -> None:
        """Submit the run times that were read, and note the run times that are not to be run."""
        for row in found:
            if self._closed:  # because a job's import may last longer than the shutdown
                return
            executor = look.executors[row.row.executor]
            if executor.begins_nothing:  # the executor was removed or drained meanwhile
                continue
            prepared = self._run_own_code(row.row.id, partial(self._prepared, row, executor, look))
            if prepared is not None:
                self._submit(prepared, look)
            else:
                look.has_bad = True
                if self._flood is not None:
                    self._flood.note(row.row.id, is_bad=True)
            if look.is_slow:
                return  # so that jobs that have come due meanwhile do not wait for all of these

    def _run_own_code(self, job_id: str, do: Callable[[], Answer]) -> Answer | None:
        """Return what a job's own code returns; ``None`` if the job hangs, or cannot run here.

        :raises _LookIsOverError: it has not returned in time
        """
        if job_id in self._hanging:
            return None
        self._own_code[job_id] = time.monotonic()
        try:
            returned = do()
        finally:
            if self._own_code.pop(job_id, None) is None:
                self._hanging.discard(job_id)
                raise _LookIsOverError
        if returned is None:
            self._skip_refused(job_id, time.monotonic())
        return returned

    def _prepared(self, found: DueRow, executor: StoredRuns, look: _Look) -> _Prepared | None:
        """Return the due run time of a job; ``None`` if the job cannot run here."""
        row = found.row
        attributes = self._read(row)
        if attributes is None:
            return None
        try:
            due = self._due(found, attributes, look)
            self._log_earlier(row, due, attributes)
            due_run = self._due_run(found, due, attributes["trigger"], look)
            cause, reason = self._cause(row, due, attributes, look)
            # An executor that does not claim would let APScheduler check the grace time again, by
            # this machine's clock. Remove the grace time, because the database's clock has decided.
            if not executor.claims:
                attributes["misfire_grace_time"] = None
            job = self._scheduler.make_due(attributes, due.run_time)
            task_name = self._task_of(job, executor)
        except BaseException as error:  # noqa: BLE001  # any error concerns this job alone
            self._skip_bad(row, error)
            return None
        self._bad.clear(row.id)
        self._notices.forget(row.id)
        return _Prepared(job, due_run, executor, task_name, cause, reason)

    @staticmethod
    def _cause(
        row: JobRow, due: Due, attributes: Mapping[str, Any], look: _Look
    ) -> tuple[MissCause | None, Callable[[datetime], str]]:
        """Return why a due run time is not run; see :class:`_Prepared`."""
        grace = attributes["misfire_grace_time"]
        if due.in_pause and not Definition.of(row).is_one_off:
            return MissCause.PAUSED, lambda _first: IN_PAUSE
        if not due.is_passed and due.is_missed(grace):
            words = late(look.now.timestamp() - due.due_at.timestamp(), grace)
            return MissCause.MISFIRE, lambda first: f"{words}: {unclaimed(first, look.now)}"
        cause = MissCause.UNASKED if due.is_passed else None
        return cause, lambda first: unclaimed(first, look.now)

    def _submit(self, prepared: _Prepared, look: _Look) -> None:
        """Submit a run time to its executor, or note that it is not run."""
        if prepared.cause is not None:
            look.moving.append(prepared)
            return
        look.again_at.append(prepared.due.again_at)
        job, due, executor = prepared.job, prepared.due, prepared.executor
        if prepared.task_name is None:
            self._run_without_lock(executor, job, due.move)
            return
        self._queued[job.id] = due
        try:
            executor.submit_stored(job, self._alias, due)
        except Exception as error:  # noqa: BLE001  # the executor was removed, or no thread can start
            self._queued.pop(job.id, None)
            self._skip_refused(job.id, time.monotonic())
            logger.debug("Job %r: not run here: %s", job.id, error)

    def _run_without_lock(self, executor: StoredRuns, job: DueJob, move: JobMove) -> None:
        """Run a job without a lock.

        The job is moved to its next run time first, so that no other replica runs it, too.
        """
        if self._user.database.ask(partial(self._rows.move_on, moves=[move], run=True)):
            executor.run_stored(job, self._alias, move.run_time)

    def _move_on(self, moving: Sequence[_Prepared]) -> bool:
        """Move jobs to their next run times without a run; return whether any job was moved."""
        if not moving:
            return False
        moves = [each.due.move for each in moving]
        moved = self._user.database.ask(partial(self._rows.move_on, moves=moves))
        for each in moving:
            if each.job.id not in moved:  # another session has locked or changed the job
                self._skip_refused(each.job.id, time.monotonic())
                continue
            run_time = each.due.move.run_time
            told = (each.job, self._alias, each.due)
            assert each.cause is not None
            missed = partial(each.due.missed, each.cause, each.reason)
            call_application(partial(each.executor.note_missed, *told, missed))
            if each.cause is MissCause.PAUSED:
                logger.info(
                    "Job %r: skipped its run time %s, because it fell into a pause",
                    each.job.id,
                    run_time,
                )
            elif each.cause is MissCause.MISFIRE:
                call_application(partial(each.executor.report_missed, *told))
        return bool(moved)

    def _check_runs(self) -> None:
        """Have executors check the dead runs of stored jobs, and delete ended jobs."""
        self._check_runs_at = time.monotonic() + CHECK_INTERVAL * random.uniform(0.8, 1.0)  # noqa: S311  # no secret
        self._user.database.ask_all(self._user.rights.look())
        executors = self._scheduler.stored_runs
        for dead in self._user.database.ask(self._rows.dead_runs):
            executor = executors.get(dead.executor)
            if executor is not None and executor.claims:
                executor.look_after(dead.task_name, dead.job_id, self._alias)
        try:
            self._user.database.ask(self._rows.sweep)
        except TaskLockDatabaseError:
            raise
        except TaskLockError as error:  # no reason to stop: ended jobs only stay in the table
            self._user.rejections.begin(ENDED_JOBS, error)
        else:
            self._user.rejections.end(ENDED_JOBS)

    # ---- from a row to a job and its run time ----------------------------------------------------

    def _read(self, row: JobRow) -> dict[str, Any] | None:
        """Return a job's attributes; ``None`` if the job cannot run here."""
        self._began = time.monotonic()
        try:
            definition = self._codec.verified(row)
            attributes = self._codec.decode(definition)
        except BaseException as error:  # noqa: BLE001  # a row can hold anything
            self._skip_bad(row, error)
            return None
        if self._missing.has(row.func):
            return None
        try:
            function = load_function(self._codec, definition, self._missing)
        except UntrustedError as error:
            self._skip_bad(row, error)
            self._missing.add(row.func)  # so that all jobs that call this function are skipped
            return None
        except BaseException as error:  # noqa: BLE001  # an import can raise anything
            self._missing.add(row.func)
            self._notices.log(
                row.func,
                logger,
                logging.WARNING,
                "Job %r is left to other replicas, and tried again later, because its function %r "
                "cannot be imported here: %s: %s",
                row.id,
                row.func,
                type(error).__name__,
                cut(error),
            )
            return None
        self._missing.clear(row.func)
        self._notices.forget(row.func)
        return {"id": row.id, "func": function, "func_ref": row.func, **attributes}

    def _skip_bad(self, row: JobRow, error: BaseException) -> None:
        self._bad.add(row.id, time.monotonic() - self._began)
        self._notices.log(
            row.id,
            logger,
            logging.ERROR,
            "Job %r is not run on this replica: %s",
            row.id,
            cut(error),
        )

    def _task_of(self, job: DueJob, executor: StoredRuns) -> str | None:
        """Return the task of a job; ``None`` if locks are off here.

        :raises TaskLockOptionError: the job has no lock, or invalid options
        """
        if not executor.claims:
            return None
        task_name: str | None = executor.check_stored_job(job, self._alias)
        if task_name is None:
            raise TaskLockOptionError(NO_LOCK)
        return task_name

    def _due(self, found: DueRow, attributes: dict[str, Any], look: _Look) -> Due:
        """Return which run time of a job is due.

        :raises Exception: a trigger can raise anything
        """
        trigger = attributes["trigger"]
        zone = getattr(trigger, "timezone", None) or self._scheduler.timezone
        since = self._running_since or look.received
        return due_run(
            found,
            trigger,
            look.now.astimezone(zone),
            coalesce=attributes["coalesce"],
            grace=attributes["misfire_grace_time"],
            running_since=look.now - timedelta(seconds=look.received - since),
        )

    def _due_run(self, found: DueRow, due: Due, trigger: Any, look: _Look) -> DueRun:
        """Return a due run time in the form that its executor's queue takes.

        :raises Exception: a trigger can raise anything
        """
        row, passed = found.row, None
        assert row.next_run_time is not None
        if due.run_time != row.next_run_time:
            passed = partial(passed_run_times, found, trigger, due.run_time, look.now)
        return DueRun(
            self,
            row.executor,
            JobMove(row.id, found.change_id, row.next_run_time, due.run_time, due.following),
            due_at=look.monotonic(due.due_at),
            came=look.monotonic(due.came),
            again_at=inf if due.following is None else look.monotonic(due.following),
            misfires_from=misfires_from(found, trigger, due.run_time),
            passed=passed,
        )

    def _log_earlier(self, row: JobRow, due: Due, attributes: dict[str, Any]) -> None:
        """Log that the run times before the due one are missed."""
        assert row.next_run_time is not None
        if due.run_time != row.next_run_time and not attributes["coalesce"]:
            logger.warning(
                "Job %r: its run times from %s on and before %s are missed",
                row.id,
                row.next_run_time.astimezone(due.run_time.tzinfo),
                due.run_time,
            )
