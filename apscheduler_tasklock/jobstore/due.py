"""The thread that asks for due jobs, and what was handed out to this replica.

APScheduler's own loop only takes from memory what this thread has put there, so no database error
reaches it, and no event loop waits.

A hand-out begins with the fetch. Until the job's run time is claimed or missed, it is renewed with
all others. If its worker has not begun by then, it is given back after some seconds, once; sooner,
if its executor is drained, since its worker will not claim it any more.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

from apscheduler_tasklock._database.rejections import ENDED_JOBS, JOB_STORE
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.jobs import HAND_OUT, Fetched, HandedOutRow, JobRow
from apscheduler_tasklock._lock.messages import HandOut
from apscheduler_tasklock._scheduler.adapter import accepts_nothing_more
from apscheduler_tasklock._scheduler.lateness import is_later_than
from apscheduler_tasklock._scheduler.notices import JobNotices
from apscheduler_tasklock._scheduler.submission import ALWAYS_MISSED
from apscheduler_tasklock._values import cut, logger_of, shown
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError, TaskLockOptionError
from apscheduler_tasklock.executor import TaskLockExecutor
from apscheduler_tasklock.jobstore.bad_rows import (
    FLOOD,
    MOST_LEFT_OUT,
    SIFT_FOR,
    Backoff,
    Flood,
)
from apscheduler_tasklock.jobstore.definition import Definition, JobCodec
from apscheduler_tasklock.jobstore.inside import (
    HandedOutJob,
    SchedulerInside,
    free_workers,
    running_jobs,
)
from apscheduler_tasklock.jobstore.runtimes import due_run_time
from apscheduler_tasklock.jobstore.trust import UntrustedError

logger = logger_of(__name__)

# Seconds between two looks, at least.
SHORTEST_INTERVAL = 0.05
# Seconds after which a hand-out is renewed.
RENEW_AFTER = HAND_OUT / 3
# Seconds between two looks for dead runs, and two deletions of jobs that have ended.
TEND_INTERVAL = 5.0
# Seconds after a job is due until it is looked for: a look a moment before would find nothing.
MARGIN = 0.002
# Seconds for which it is remembered that a job was here.
MEMORY = 600.0
# Why a job with task_lock: False is not run.
NO_LOCK = (
    "task_lock: False makes no sense in a TaskLockJobStore, whose jobs run on one replica each, by "
    "their locks. Leave it out, or put the job into each replica's memory store"
)
# Seconds after which a scheduler that does not run is looked at again.
NOT_RUNNING_INTERVAL = 0.2


@dataclass
class _Out:
    """A hand-out to this replica that is not known to be over.

    :ivar run_time: in seconds since 1970
    :ivar since: when it was handed out, on the monotonic clock
    :ivar renewed_at: when it was renewed last
    :ivar keeps: whether it is kept while it is queued: it was given back before
    :ivar taken: whether the scheduler has it
    """

    job_id: str
    executor: str
    run_time: float
    since: float
    renewed_at: float
    keeps: bool
    taken: bool = False


class DueJobs:
    """Asks for due jobs, and has those that were handed out to this replica.

    :param locks: the job store's connection
    :param scheduler: which runs them
    :param alias: of the job store
    :param codec: reads the rows
    :param interval: seconds between two looks, at most
    :param notices: tells of jobs that are left alone
    """

    def __init__(
        self,
        locks: LockClient,
        scheduler: SchedulerInside,
        alias: str,
        codec: JobCodec,
        interval: float,
        notices: JobNotices,
    ) -> None:
        self._locks = locks
        self._rows = locks.jobs
        self._give_back_after = locks.settings.timings.give_back_after
        self._scheduler = scheduler
        self._alias = alias
        self._codec = codec
        self._interval = interval
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._woken = threading.Event()  # also by the database's thread, which waits for nobody
        self._next_at = 0.0  # when to look, on the monotonic clock
        self._looked_at = 0.0
        self._tend_at = 0.0
        self._has_more = False  # whether jobs may be due for which no worker was free
        self._ready: list[HandedOutJob] = []
        self._out: dict[UUID, _Out] = {}
        self._not_taken: set[UUID] = set()
        self._given_back: dict[str, float] = {}  # the run times, by job, in seconds since 1970
        self._left_to_others: dict[str, float] = {}  # until when, on the monotonic clock
        self._following: dict[str, float] = {}  # of what runs here, on the monotonic clock
        self._missing = Backoff()  # references of functions, and modules
        self._bad = Backoff()  # ids of jobs
        self._has_told_of_executors = False
        self._flood: Flood | None = None  # of due rows that cannot be run here
        self._began = 0.0  # when the row was begun that is read, on the monotonic clock
        self._notices = notices
        self._thread = threading.Thread(target=self._work, name="tasklock-jobs", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more, and give back what has not begun. Waits for the thread, up to a second."""
        self._closed.set()
        self._woken.set()
        self._locks.stop_claiming()  # which ends what it waits for
        self._thread.join(timeout=1.0)
        try:
            self._give_back(list(self._out))
        except TaskLockError as error:  # the hand-outs end by themselves
            logger.debug("Hand-outs are not given back: %s", error)

    def wake(self) -> None:
        """Look now: something may be due that was not. Does not wait."""
        self._woken.set()

    def take(self) -> list[HandedOutJob]:
        """Return what is to be run now. The scheduler calls it; it asks nobody."""
        with self._lock:
            ready, self._ready = self._ready, []
            executors = self._scheduler.executors
            standing = [job for job in ready if self._stands(job)]
            # APScheduler would remove a job whose executor was removed: for all replicas. One that
            # was handed out is given back.
            here = [job for job in standing if job.executor in executors]
            for job in here:
                if job.hand_out is not None:
                    self._out[job.hand_out.handed_id].taken = True
        for job in standing:
            if job.executor not in executors and job.hand_out is None:
                logger.error(
                    "Job %r: its run time %s is not run, since its executor %r was removed",
                    job.id,
                    job.run_time,
                    job.executor,
                )
        return sorted(here, key=lambda job: job.run_time.timestamp())

    def _stands(self, job: HandedOutJob) -> bool:
        return job.hand_out is None or job.hand_out.handed_id in self._out

    @property
    def has_ready(self) -> bool:
        """Whether there is something to run now."""
        return bool(self._ready)

    def job_begun(self, job_id: str) -> None:
        """Note that a hand-out of a job was claimed, or cannot be any more.

        One that the scheduler does not have yet is another one: events can be late.
        """
        with self._lock:
            for handed_id, out in list(self._out.items()):
                if out.job_id == job_id and out.taken:
                    del self._out[handed_id]

    def job_ended(self, job_id: str) -> None:
        """Note that a job's run is over: a worker is free, and it may be due again already."""
        self.job_begun(job_id)
        now = time.monotonic()
        with self._lock:
            following = self._following.get(job_id)
            if following is not None and not now < following < now + self._interval:
                del self._following[job_id]  # an ordinary look comes before it
        if self._has_more or (following is not None and following <= now):
            self.wake()

    def _is_ready(self, handed_id: UUID) -> bool:
        return any(job.hand_out and job.hand_out.handed_id == handed_id for job in self._ready)

    def _work(self) -> None:
        while self._wait():
            try:
                self._look()
                self._locks.rejections.end(JOB_STORE)
            except TaskLockDatabaseError:  # logged as an outage
                self._look_in(self._interval * random.uniform(0.8, 1.2))  # noqa: S311  # no secret
            except TaskLockError as error:
                self._look_in(self._interval)
                self._locks.rejections.begin(JOB_STORE, error)
            except (Exception, SystemExit):  # nothing may end this thread unseen
                self._look_in(self._interval)
                logger.exception("The job store could not be looked at; trying again")

    def _wait(self) -> bool:
        """Wait until it is time to look; return whether it is, or else all is over."""
        self._woken.wait(max(0.0, self._next_at - time.monotonic()))
        too_soon = self._looked_at + SHORTEST_INTERVAL - time.monotonic()
        if too_soon > 0:
            self._closed.wait(too_soon)
        self._woken.clear()
        self._looked_at = time.monotonic()
        return not self._closed.is_set()

    def _look_in(self, seconds: float) -> None:
        self._next_at = time.monotonic() + seconds

    def _look(self) -> None:
        """Tend what is handed out, and ask for more."""
        if self._scheduler.is_abandoned:
            self._abandon()
            return
        is_running = self._scheduler.is_running
        self._tend_hand_outs(is_running=is_running)
        if not is_running:
            self._look_in(NOT_RUNNING_INTERVAL)
            self._notices.sum_up()
            return
        if time.monotonic() >= self._tend_at:
            self._tend_runs()
        executors = self._scheduler.executors
        self._tell_of_executors(executors)
        free = {
            alias: self._free(alias, executor)
            for alias, executor in executors.items()
            if not is_drained(executor)
        }
        running = set().union(*(running_jobs(executor) for executor in executors.values()))
        not_here = self._missing.names()[-MOST_LEFT_OUT:]
        bad = self._bad.names()[-MOST_LEFT_OUT:]
        flood = self._flood
        has_free = any(free.values())
        if flood is not None and has_free:
            self._sift(flood, list(free), not_here)
        fetched = self._locks.ask(
            partial(
                self._rows.fetch,
                free=free,
                not_here=not_here,
                not_these=[*running, *bad, *self._others_jobs()],
                since=flood.since if flood else None,
                among=list(flood.good) if flood else [],
            )
        )
        received = time.monotonic()
        got = Counter(found.row.executor for found in fetched.jobs)
        # Also where all workers are busy: whoever ends is to wake this thread.
        self._has_more = any(got[alias] >= count for alias, count in free.items())
        self._look_in(self._pause(fetched, has_free=has_free))
        is_bad = True
        try:
            is_bad = self._prepare(fetched, received)
            is_slow = is_bad and time.monotonic() - received > SIFT_FOR
        finally:  # whatever becomes of the rest of them
            if self._ready:
                self._scheduler.wake()
        self._look_for_following()
        names = len(self._missing.names()) + len(self._bad.names())
        if flood is None and (is_slow or names > FLOOD):
            self._flood = Flood(fetched.database_time)
            self._look_in(0)
        elif not is_bad and (flood is None or flood.rest):
            self._notices.sum_up()  # all that is bad now was found

    def _abandon(self) -> None:
        """Give back what has not begun, and look no more."""
        self._give_back(self._waiting_hand_outs())
        self._closed.set()
        logger.warning(
            "The job store %r takes no more jobs, because the event loop of its scheduler was "
            "closed. Call the scheduler's shutdown() before the loop is closed",
            self._alias,
        )

    def _tell_of_executors(self, executors: Mapping[str, Any]) -> None:
        if executors or self._has_told_of_executors:
            return
        self._has_told_of_executors = True
        logger.warning(
            "The job store %r runs no jobs here, because no executor of this scheduler is a "
            "TaskLockExecutor beside it",
            self._alias,
        )

    def _sift(self, flood: Flood, executors: list[str], not_here: list[str]) -> None:
        """Read what is due while many rows of it are bad."""

        def read(until: datetime, after: tuple[datetime, str] | None) -> list[JobRow]:
            due = partial(self._rows.due, until=until, after=after, not_here=not_here)
            return self._locks.ask(partial(due, executors=executors))

        now = self._locks.ask(self._rows.now)
        received = time.monotonic()
        flood.sift(now, read, lambda row: self._is_good(row, now, received))
        if flood.is_over:
            self._flood = None

    def _is_good(self, row: JobRow, now: datetime, received: float) -> bool:
        """Tell whether a row can be run here that was not handed out."""
        attributes = self._read(row)
        if attributes is None:
            return False
        found = HandedOutRow(row, uuid4(), first_late_by=None, paused_until=None)
        try:
            hand_out = self._hand_out(found, attributes, now, received)
            self._claims(self._made(found, attributes, hand_out))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # as of one that was handed out
            self._leave_alone(row, error)
            return False
        return True

    def _prepare(self, fetched: Fetched, received: float) -> bool:
        """Make the scheduler's jobs of what was handed out; tell whether some cannot be run here.

        Each is ready on its own account: some run without a lock, and have been moved on already.
        """
        renewed_at = received
        unused: list[UUID] = []
        for number, found in enumerate(fetched.jobs):
            if time.monotonic() - renewed_at > RENEW_AFTER:  # imports can take long
                self._scheduler.wake()
                waiting = [each.handed_id for each in fetched.jobs[number:]]
                renewed_at = time.monotonic()
                self._renew([*self._waiting_hand_outs(), *waiting])
            if unused and time.monotonic() - received > SIFT_FOR:  # good ones are kept waiting
                unused += [each.handed_id for each in fetched.jobs[number:]]
                self._look_in(0)
                break
            attributes = self._read(found.row)
            job = None
            if attributes is None:
                unused.append(found.handed_id)
            else:
                job = self._prepared(found, attributes, fetched.database_time, received, unused)
            if self._flood is not None:
                self._flood.note(found.row.id, is_bad=found.handed_id in unused)
            if job is None:  # there may be others that can run in its place
                self._look_in(0)
            else:
                with self._lock:
                    self._ready.append(job)
        self._give_back(unused)
        return bool(unused)

    def _waiting_hand_outs(self) -> list[UUID]:
        with self._lock:
            return list(self._out)

    def _others_jobs(self) -> list[str]:
        """Return the jobs that others are to have, since here they did not begin."""
        now = time.monotonic()
        left = {job_id: end for job_id, end in self._left_to_others.items() if end > now}
        self._left_to_others = left
        return list(left)

    def _pause(self, fetched: Fetched, *, has_free: bool) -> float:
        pause = self._interval
        if fetched.next_in is not None:
            pause = min(pause, fetched.next_in + MARGIN)
        if self._flood is not None and has_free:
            pause = min(pause, self._flood.rest)
        return min(pause, RENEW_AFTER) if self._out or fetched.jobs else pause

    def _look_for_following(self) -> None:
        """Look when a job is due again that runs here, or has run here.

        Its row did not say so when it was read, because the claim moves it on.
        """
        now = time.monotonic()
        with self._lock:
            coming = [moment for moment in self._following.values() if moment > now]
        self._next_at = min([self._next_at, *(moment + MARGIN for moment in coming)])

    def _free(self, alias: str, executor: Any) -> int:
        """Return how many jobs an executor's workers can begin now."""
        submitted = running_jobs(executor)
        with self._lock:
            waiting = {job.id for job in self._ready if job.executor == alias}
            outs = {out.job_id for out in self._out.values() if out.executor == alias}
        return max(0, free_workers(executor) - len((waiting | outs) - submitted))

    # ---- what was handed out -------------------------------------------------------------------

    def _tend_hand_outs(self, *, is_running: bool) -> None:
        """Renew what waits for a worker, and give back what does for too long."""
        now = time.monotonic()
        with self._lock:
            outs = dict(self._out)
            running = set(self._not_taken)  # as another scheduler's job in this process
            back = set(running)
            for handed_id, out in outs.items():
                is_old = now - out.since > self._give_back_after
                if (
                    (is_old and not (out.keeps and self._is_queued(out)))
                    or (not is_running and self._is_ready(handed_id))
                    or self._is_drained(out.executor)
                ):
                    back.add(handed_id)
        self._renew([h for h in outs if h not in back and now - outs[h].renewed_at > RENEW_AFTER])
        for handed_id in back:
            known = outs.get(handed_id)
            if known is None:  # to give it back has failed before
                continue
            self._given_back[known.job_id] = known.run_time
            if now - known.since > self._give_back_after:  # others are to have it
                self._left_to_others[known.job_id] = now + self._give_back_after
        self._give_back(list(running), waits=True)
        with self._lock:
            self._not_taken -= running
        self._give_back(list(back - running))

    def _is_drained(self, alias: str) -> bool:
        executor = self._scheduler.executors.get(alias)
        return executor is not None and is_drained(executor)

    def _is_queued(self, out: _Out) -> bool:
        """Tell whether an executor still has the job of a hand-out."""
        executor = self._scheduler.executors.get(out.executor)
        return executor is not None and out.job_id in running_jobs(executor)

    def _renew(self, handed_ids: list[UUID]) -> None:
        if not handed_ids:
            return
        standing = self._locks.ask(partial(self._rows.renew, handed_ids=handed_ids))
        now = time.monotonic()
        with self._lock:
            for handed_id in handed_ids:
                if handed_id not in standing:  # claimed, settled, changed or removed
                    self._out.pop(handed_id, None)
                elif handed_id in self._out:
                    self._out[handed_id].renewed_at = now

    def _give_back(self, handed_ids: list[UUID], *, waits: bool = False) -> None:
        """End hand-outs; what their executors have queued is fenced off.

        :param waits: whether they wait for the end of a run
        """
        with self._lock:
            for handed_id in handed_ids:
                self._out.pop(handed_id, None)
            self._ready = [job for job in self._ready if self._stands(job)]
        if handed_ids:
            give_back = partial(self._rows.give_back, handed_ids=handed_ids, waits=waits)
            self._locks.ask(give_back)

    def _note_not_taken(self, handed_id: UUID) -> None:
        """Note that an executor did not take a job, since it runs there already."""
        with self._lock:
            self._not_taken.add(handed_id)

    def _tend_runs(self) -> None:
        """Have dead runs seen to, and delete jobs that have ended."""
        self._tend_at = time.monotonic() + TEND_INTERVAL * random.uniform(0.8, 1.0)  # noqa: S311  # no secret
        self._locks.look_at_rights()
        executors = self._scheduler.executors
        for dead in self._locks.ask(self._rows.dead_runs):
            executor = executors.get(dead.executor)
            if executor is not None and executor.takes_hand_outs:
                executor.look_after(dead.task_name, dead.job_id, self._alias)
        self._forget_old()
        try:
            self._locks.ask(self._rows.sweep)
        except TaskLockDatabaseError:
            raise
        except TaskLockError as error:  # no reason to run no jobs
            self._locks.rejections.begin(ENDED_JOBS, error)
        else:
            self._locks.rejections.end(ENDED_JOBS)

    def _forget_old(self) -> None:
        """Forget what concerns jobs that other replicas run by now."""
        now, wall = time.monotonic(), time.time()
        with self._lock:
            self._following = {k: at for k, at in self._following.items() if at > now - MEMORY}
            self._given_back = {k: at for k, at in self._given_back.items() if at > wall - MEMORY}

    # ---- what is made of a row -----------------------------------------------------------------

    def _prepared(
        self,
        found: HandedOutRow,
        attributes: dict[str, Any],
        now: datetime,
        received: float,
        unused: list[UUID],
    ) -> HandedOutJob | None:
        """Return what the scheduler gets for a job, or ``None`` if it is not run now.

        :param now: the database's time
        :param received: when that was told, on the monotonic clock
        :param unused: gets the hand-out if the job cannot be run here
        """
        row = found.row
        try:
            prepared = self._due(found, attributes, now, received)
        except TaskLockDatabaseError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  # of one job; the others are not to suffer
            self._leave_alone(row, error)
            unused.append(found.handed_id)
            return None
        self._bad.clear(row.id)
        self._notices.forget(row.id)
        return prepared

    def _read(self, row: JobRow) -> dict[str, Any] | None:
        """Return a job's attributes; ``None`` if it cannot be run here."""
        self._began = time.monotonic()
        try:
            definition = self._codec.verified(row)
            attributes = self._codec.decode(definition)
        except Exception as error:  # noqa: BLE001  # whatever somebody has written into the row
            self._leave_alone(row, error)
            return None
        if self._missing.has(row.func):
            return None
        try:
            function = self._load(definition)
        except UntrustedError as error:
            self._leave_alone(row, error)
            self._missing.add(row.func)  # and all jobs that call it
            return None
        except Exception as error:  # noqa: BLE001  # whatever an import raises
            self._missing.add(row.func)
            self._notices.tell(
                row.func,
                logger,
                logging.WARNING,
                "Job %r is left to other replicas, and tried again: its function %r cannot be "
                "imported here: %s: %s",
                row.id,
                row.func,
                type(error).__name__,
                cut(error),
            )
            return None
        self._missing.clear(row.func)
        self._notices.forget(row.func)
        return {"id": row.id, "func": function, "func_ref": row.func, **attributes}

    def _load(self, definition: Definition) -> Any:
        """Return a job's function; a module is not imported again right after that has failed."""
        module = definition.func.partition(":")[0]
        if self._missing.has(module):
            raise ImportError(f"the import of {shown(module)} failed a moment ago")
        try:
            function = self._codec.load_function(definition)
        except UntrustedError:
            raise
        except Exception:
            if sys.modules.get(module) is None:
                self._missing.add(module)
            raise
        self._missing.clear(module)
        return function

    def _leave_alone(self, row: JobRow, error: BaseException) -> None:
        self._bad.add(row.id, time.monotonic() - self._began)
        self._notices.tell(
            row.id,
            logger,
            logging.ERROR,
            "Job %r is not run here, and left alone: %s",
            row.id,
            cut(error),
        )

    def _due(
        self, found: HandedOutRow, attributes: dict[str, Any], now: datetime, received: float
    ) -> HandedOutJob | None:
        """Return the job for its run time; ``None`` if that is settled unrun."""
        if (
            self._closed.is_set()
        ):  # the answer came then, or an import took longer than a shutdown waits
            with suppress(TaskLockError):  # or else the hand-out ends by itself
                self._give_back([found.handed_id])
            return None
        row, first = found.row, found.row.next_run_time
        assert first is not None
        hand_out = self._hand_out(found, attributes, now, received)
        run_time, following = hand_out.run_time, hand_out.following
        if run_time != first and not attributes["coalesce"]:
            logger.warning(
                "Job %r: its run times from %s on, before %s, are missed too",
                row.id,
                first.astimezone(run_time.tzinfo),
                run_time,
            )
        in_pause = found.paused_until is not None and run_time < found.paused_until
        if in_pause and not Definition.of(row).is_one_off:
            self._locks.ask(partial(self._rows.settle, hand_out=hand_out))
            logger.info("Job %r: its run time %s fell into a pause", row.id, run_time)
            return None
        job = self._made(found, attributes, hand_out)
        if self._claims(job):
            moment = run_time.timestamp()
            keeps = self._given_back.pop(row.id, None) == moment
            with self._lock:
                if following is not None:
                    due_in = following.timestamp() - now.timestamp()
                    self._following[row.id] = received + due_in
                self._out[found.handed_id] = _Out(
                    row.id, row.executor, moment, received, received, keeps
                )
            return job
        make = partial(self._scheduler.make_handed_out, run_time=run_time)
        return self._without_lock(hand_out, attributes, make)

    def _made(
        self, found: HandedOutRow, attributes: dict[str, Any], hand_out: HandOut
    ) -> HandedOutJob:
        """Return a job as the scheduler gets it whose run time is to be claimed."""
        not_taken = partial(self._note_not_taken, found.handed_id)
        return self._scheduler.make_handed_out(
            attributes, hand_out.run_time, hand_out=hand_out, not_taken=not_taken
        )

    def _hand_out(
        self, found: HandedOutRow, attributes: dict[str, Any], now: datetime, received: float
    ) -> HandOut:
        """Return a hand-out with the run time that it is for, and the one that follows.

        :raises Exception: whatever a trigger raises
        """
        row, trigger = found.row, attributes["trigger"]
        assert row.next_run_time is not None
        zone = getattr(trigger, "timezone", None) or self._scheduler.timezone
        first, local_now = row.next_run_time.astimezone(zone), now.astimezone(zone)
        grace = attributes["misfire_grace_time"]
        is_late_by_nature = _is_late_by_nature(found, grace)
        ends = [first]
        if found.paused_until is not None:
            ends.append(min(now, found.paused_until).astimezone(zone))
        if grace is not None and not is_late_by_nature:
            ends.append(local_now - timedelta(seconds=grace))
        run_time, following = due_run_time(
            trigger,
            first,
            local_now,
            coalesce=attributes["coalesce"],
            missed_before=max(ends, key=datetime.timestamp),
        )
        return HandOut(
            row.id,
            found.handed_id,
            run_time,
            following,
            # By timestamps: two datetimes of one zone subtract to what its clocks show.
            due_at=received - (now.timestamp() - run_time.timestamp()),
            is_late_by_nature=is_late_by_nature,
        )

    def _claims(self, job: HandedOutJob) -> bool:
        """Tell whether the job's executor will claim its run time; else locks are off there.

        :raises TaskLockOptionError: the job can have no lock
        """
        executor = self._scheduler.executors[job.executor]
        if not executor.takes_hand_outs:
            return False
        if executor.check_stored_job(job, self._alias) is None:
            raise TaskLockOptionError(NO_LOCK)
        return True

    def _without_lock(
        self,
        hand_out: HandOut,
        attributes: dict[str, Any],
        make: Callable[..., HandedOutJob],
    ) -> HandedOutJob | None:
        """Move a job on that runs without a lock: at most once, on this replica."""
        grace = attributes["misfire_grace_time"]
        missed = not hand_out.is_late_by_nature and is_later_than(
            hand_out.due_at, grace, time.monotonic()
        )
        settle = partial(self._rows.settle, hand_out=hand_out, runs=not missed)
        if not self._locks.ask(settle):
            return None
        # The scheduler's executor is to say what is missed, by the database's clock.
        grace = ALWAYS_MISSED if missed else None
        late = {**attributes, "misfire_grace_time": grace}
        return make(late, hand_out=None, not_taken=lambda: None)


def is_drained(executor: TaskLockExecutor) -> bool:
    """Tell whether an executor begins nothing any more.

    As before its container is stopped, or while the interpreter ends and waits for running jobs.
    """
    return executor.locks.closed or accepts_nothing_more(executor.inner)


def _is_late_by_nature(found: HandedOutRow, grace: float | None) -> bool:
    """Tell whether a run time was handed out in time before."""
    return found.first_late_by is not None and (grace is None or found.first_late_by <= grace)
