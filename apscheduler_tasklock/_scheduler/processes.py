"""The runs of a pool of processes: claimed, renewed and released in the parent.

What is given to the pool counts as begun when the pool pickles it for a worker process: from then
on nobody can tell whether that has begun it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from math import inf
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR

from apscheduler_tasklock._application import call_application
from apscheduler_tasklock._lock.releases import ReleaseTicket
from apscheduler_tasklock._runs.run import Run
from apscheduler_tasklock._scheduler.adapter import RunId, worker_processes
from apscheduler_tasklock._scheduler.runs import Owner, Runs
from apscheduler_tasklock._scheduler.submission import (
    ALWAYS_MISSED,
    GivenJob,
    RunTimes,
)
from apscheduler_tasklock._scheduler.workers import JobInWorker, LockInWorker, RunTimesInWorker
from apscheduler_tasklock.lock import HeldLock

# Seconds after which it is looked again whether the processes of a broken pool are dead.
DEATH_INTERVAL = 0.05
# Seconds for which the report of a run waits until its listeners have heard that it was granted.
TOLD_WITHIN = 1.0


@dataclass(eq=False)
class _Giving:
    """What is known of a run that was given to a pool of processes.

    :ivar processes: of the pool that it was given to, by their ids, as they are at any time
    :ivar context: in which the run is measured
    :ivar measuring: ends that
    :ivar is_told: set when its listeners have heard that it was granted
    :ivar began_at: when it began, on the monotonic clock
    """

    processes: Mapping[int, Any] | None = None
    context: Context = field(default_factory=copy_context)
    measuring: ExitStack = field(default_factory=ExitStack)
    is_told: threading.Event = field(default_factory=threading.Event)
    began_at: float = 0.0


class ProcessRuns(Runs):
    """The runs of one executor that runs jobs in a pool of processes."""

    def __init__(self, inner: Any, owner: Owner) -> None:
        super().__init__(inner, owner)
        # Those of broken pools, and the processes that may still run them. The thread has it.
        self._dying: list[tuple[Run, Mapping[int, Any]]] = []

    # ---- in the thread ---------------------------------------------------------------------------

    def _give_to_inner(self, run: Run) -> None:
        giving = run.what.giving = _Giving()
        super()._give_to_inner(run)
        # Not before: an executor replaces a broken pool when it is given something.
        giving.processes = worker_processes(self._inner)

    def _for_inner(self, run: Run) -> tuple[GivenJob, RunTimes]:
        run_time = run.what.attempt.run_time
        begin = partial(self._begin, run)
        return _JobForWorker(run), _RunTimesForWorker(run_time, begin, run)

    def look(self) -> float:
        """End the leases of runs whose processes are dead."""
        left = []
        for run, processes in self._dying:
            if any(_lives(process) for process in processes.values()):
                left.append((run, processes))
            else:
                self._end_lease(run)
        self._dying = left
        return DEATH_INTERVAL if left else inf

    def _end_lease(self, run: Run) -> None:
        ticket = run.what.attempt.begin_end_of_lease()
        if ticket is not None:
            # Called once, so that no callback keeps what refers to it.
            tells = [partial(self._tell_dead, run, ticket)]
            ticket.future.add_done_callback(lambda _future: call_application(tells.pop()))

    def _tell_dead(self, run: Run, ticket: ReleaseTicket) -> None:
        run.what.attempt.report_end_of_lease(ticket)
        self._owner.note_worker_died()

    # ---- where the pool pickles, and reports -----------------------------------------------------

    def _may_begin(self, run: Run) -> bool:
        if not super()._may_begin(run):
            return False
        giving: _Giving = run.what.giving
        giving.began_at = time.monotonic()
        giving.context.run(giving.measuring.enter_context, run.what.attempt.holding())
        return True

    def _tell_granted(self, run: Run) -> None:
        # A listener may shut the pool down, which waits for this thread then.
        call_application(run.what.attempt.tell_granted)
        call_application(run.what.giving.is_told.set)

    def events_of(self, run: Run, events: list[Any]) -> list[Any]:
        """Begin to release a run that has these events of APScheduler's, and return them."""
        work = run.what
        if work.goes_on:
            self._stop_measuring(run)
            work.giving.is_told.wait(TOLD_WITHIN)
            if events:
                [event] = events
                work.took = getattr(event.job_id, "took", work.took)
                raised = event.exception if event.code == EVENT_JOB_ERROR else None
                work.release = work.attempt.begin_end_of(raised)
            else:  # its lock was lost on the way to its worker
                work.release = work.attempt.begin_give_up_lost()
        return super().events_of(run, events)

    def failed(self, run: Run, error: BaseException) -> None:
        """Note why a run was not run to its end, or why that is not known."""
        work = run.what
        if work.goes_on is None:
            # It could not be pickled, or the pool is broken, and its turn had not come.
            if run.token.take():
                work.release = work.attempt.begin_give_back()
        elif work.goes_on:
            self._stop_measuring(run)
            if isinstance(error, BrokenExecutor):
                processes = work.giving.processes
                if processes is None:
                    processes = worker_processes(self._inner)
                dying = run, dict(processes)
                work.line.post(lambda _inputs: self._dying.append(dying))
            else:  # what it has returned, or raised, could not be pickled
                work.release = work.attempt.begin_end_of(error)

    def _stop_measuring(self, run: Run) -> None:
        giving: _Giving = run.what.giving
        run.what.took = time.monotonic() - giving.began_at
        giving.context.run(giving.measuring.close)


class _JobForWorker(GivenJob):
    """The job as a pool of processes gets it; pickled, it is what a worker process is to see."""

    def __init__(self, run: Run) -> None:
        submission = run.what.submission
        super().__init__(
            submission,
            RunId(submission.job.id, run),
            submission.job.func,
            ALWAYS_MISSED if run.is_missed else None,
        )
        self._run = run

    def __reduce__(self) -> tuple[Any, ...]:
        return JobInWorker, (self._job, self.misfire_grace_time, _lock_of(self._run))


class _RunTimesForWorker(RunTimes):
    """The run time of a given job. To pickle it is to begin the run."""

    def __init__(self, run_time: datetime, begin: Callable[[], bool], run: Run) -> None:
        super().__init__(run_time, begin)
        self._run = run

    def __reduce__(self) -> tuple[Any, ...]:
        run_times, lock = [*iter(self)], _lock_of(self._run)
        if lock is None or not run_times:
            return list, (run_times,)
        return RunTimesInWorker, (run_times[0], lock)


def _lock_of(run: Run) -> LockInWorker | None:
    """Return what a run's worker is told of its lock."""
    work = run.what
    held: HeldLock | None = work.attempt.held
    if held is None:
        return None
    return LockInWorker.of(held, work.locks.settings, failover=work.submission.failover)


def _lives(process: Any) -> bool:
    try:
        return bool(process.is_alive())
    except ValueError:  # closed: it was waited for
        return False
