"""The runs of a pool of processes. The parent process claims, renews and releases them.

A run counts as begun when the pool pickles it for a worker process, because after that the parent
cannot know whether the worker has begun the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from math import inf
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR

from apscheduler_tasklock._application import call_application
from apscheduler_tasklock._database.thread import ReplicaThread
from apscheduler_tasklock._lock.releases import Release
from apscheduler_tasklock._runs.adapter import (
    JobIdWithRun,
    let_notice_deaths,
    worker_processes,
)
from apscheduler_tasklock._runs.executor_run import ExecutorRun
from apscheduler_tasklock._runs.executor_runs import ExecutorParts, ExecutorRuns
from apscheduler_tasklock._runs.given_job import GivenJob, RunTimes
from apscheduler_tasklock._runs.misfires import ALWAYS_MISSED
from apscheduler_tasklock._runs.worker_process import JobInWorker, LockInWorker, RunTimesInWorker
from apscheduler_tasklock.lock import HeldLock

# Limits the seconds for which a process of a broken pool may live. The pool sends SIGTERM to its
# processes when it breaks, and a process may ignore that.
LONGEST_LIFE = 5.0
# Seconds between two checks whether all processes of a broken pool are dead.
DEATH_INTERVAL = 0.05
# Seconds between two checks whether a process of a busy pool is dead.
LIFE_INTERVAL = 0.5


@dataclass(eq=False)
class _Giving:
    """The data of a run that was given to a pool of processes: ``ExecutorRun.giving``.

    :ivar processes: the pool's own mapping of its processes, by their ids
    :ivar context: the context in which telemetry measures the run
    :ivar measuring: ends telemetry's measurement when it is closed
    :ivar is_grant_reported: set when listeners have got the event that the run was granted
    :ivar began_at: when the run began, on the monotonic clock
    """

    processes: Mapping[int, Any] | None = None
    context: Context = field(default_factory=copy_context)
    measuring: ExitStack = field(default_factory=ExitStack)
    is_grant_reported: threading.Event = field(default_factory=threading.Event)
    began_at: float = 0.0


class ProcessRuns(ExecutorRuns):
    """The runs of an executor that runs jobs in a pool of processes."""

    def __init__(self, inner: Any, parts: ExecutorParts, thread: ReplicaThread) -> None:
        super().__init__(inner, parts, thread)
        # Runs of broken pools, each with the processes of its pool, one of which may still run the
        # job, and when they are killed, on the monotonic clock. Only the replica's thread uses this
        # list.
        self._dying: list[tuple[ExecutorRun, Mapping[int, Any], float]] = []

    # ---- in the thread that gives ----------------------------------------------------------------

    def _give_to_inner(self, run: ExecutorRun) -> None:
        giving = run.giving = _Giving()
        super()._give_to_inner(run)
        # Read after the run was given, because the executor replaces a broken pool when it is given
        # a job.
        giving.processes = worker_processes(self._inner)

    def _for_inner(self, run: ExecutorRun) -> tuple[GivenJob, RunTimes]:
        run_time = run.run_time
        begin = partial(self._begin, run)
        return _JobForWorker(run), _RunTimesForWorker(run_time, begin, run)

    # ---- in the replica's thread -----------------------------------------------------------------

    def check_given(self) -> float:
        """Hand over runs that begin too late, and end the leases of runs with dead processes.

        The processes of a broken pool are killed if they live for too long.

        :return: seconds after which to check again; ``inf``: no check is needed
        """
        next_in = min(super().check_given(), self._look_at_pool())
        left = []
        for run, processes, kill_at in self._dying:
            living = [process for process in list(processes.values()) if _lives(process)]
            if time.monotonic() >= kill_at:
                for process in living:
                    with suppress(OSError, ValueError):  # it has ended, or is another user's
                        process.kill()
            if living:
                left.append((run, processes, kill_at))
            else:
                self._end_lease(run)
        self._dying = left
        return min(next_in, DEATH_INTERVAL) if left else next_in

    def _note_broken(self, run: ExecutorRun, processes: Mapping[int, Any]) -> None:
        """Note a run of a broken pool, one of whose processes may still run the job."""
        self._dying.append((run, processes, time.monotonic() + LONGEST_LIFE))

    def _look_at_pool(self) -> float:
        """Let the pool notice that one of its processes is dead.

        If the pool started that process while the pool's own thread waited for results, the pool's
        own thread notices the death only when the pool is given work or gets a result.

        :return: seconds after which to check again; ``inf``: no check is needed
        """
        processes = worker_processes(self._inner)
        givings = (run.giving for run in list(self._given))
        if not any(giving is not None and giving.processes is processes for giving in givings):
            return inf
        if not all(_lives(process) for process in list(processes.values())):
            self._giver.call_also_here(partial(let_notice_deaths, self._inner))
        return LIFE_INTERVAL

    def _end_lease(self, run: ExecutorRun) -> None:
        release = run.begin_lease_end()
        if release is not None:
            # The callback takes the report out of a list, so that after the call the callback does
            # not refer to the report. Otherwise the callback, the report and the release would be a
            # reference cycle.
            reports = [partial(self._report_dead, run, release)]
            release.future.add_done_callback(lambda _future: call_application(reports.pop()))

    def _report_dead(self, run: ExecutorRun, release: Release) -> None:
        run.report_lease_end(release)
        self._parts.presence.report_alive()

    # ---- in the pool's own threads, where it pickles and reports ---------------------------------

    def _may_begin(self, run: ExecutorRun) -> bool:
        if not super()._may_begin(run):
            return False
        giving: _Giving = run.giving
        giving.began_at = time.monotonic()
        giving.context.run(giving.measuring.enter_context, run.holding())
        return True

    def _report_granted(self, run: ExecutorRun) -> None:
        # Called in the application's thread, because the current thread is the pool's own. If a
        # listener shut the pool down here, the pool would wait for its own thread, for ever.
        call_application(partial(super()._report_granted, run))
        call_application(run.giving.is_grant_reported.set)

    def events_of(self, run: ExecutorRun, events: list[Any]) -> list[Any]:
        """Begin to release a run that has ended, and return the events to report.

        :param events: APScheduler's events of the run
        """
        if run.runs_job:
            self._stop_measuring(run)
            if events:
                [event] = events
                run.took = getattr(event.job_id, "took", run.took)
                raised = event.exception if event.code == EVENT_JOB_ERROR else None
                in_worker = getattr(event.job_id, "raised", ())
                run.begin_release(raised, in_worker=in_worker)
            else:  # the worker has not begun the job: its lock had ended, or the parent seemed dead
                run.begin_hand_over_lost()
        events = super().events_of(run, events)
        if not run.runs_job or run.giving.is_grant_reported.is_set():
            return events
        # The application's thread has not dispatched the event of the grant yet, and these events
        # must come after it. So the application's thread dispatches them, too. The current thread
        # is the pool's own, and must not wait.
        for event in events:
            event.job_id = str(event.job_id)
            call_application(partial(self._parts.adapter.dispatch, event))
        return []

    def failed(self, run: ExecutorRun, error: BaseException) -> None:
        """Note the error with which the pool has reported a run, instead of events."""
        if run.runs_job is None:
            super().failed(run, error)
            if run.token.take():  # the pool broke before it pickled the run
                run.begin_hand_over()
        elif run.runs_job:
            self._stop_measuring(run)
            if isinstance(error, BrokenExecutor):
                processes = run.giving.processes
                if processes is None:
                    processes = worker_processes(self._inner)
                run.queue.call(self._note_broken, run, processes)
            else:  # the job's result or exception could not be pickled
                run.begin_release(error)

    def _stop_measuring(self, run: ExecutorRun) -> None:
        giving: _Giving = run.giving
        run.took = time.monotonic() - giving.began_at
        giving.context.run(giving.measuring.close)


class _JobForWorker(GivenJob):
    """Stands in for a job that is given to a pool of processes. Pickled as ``JobInWorker``."""

    def __init__(self, run: ExecutorRun) -> None:
        submission = run.submission
        super().__init__(
            submission,
            JobIdWithRun(submission.job.id, run),
            submission.job.func,
            ALWAYS_MISSED if run.is_missed else None,
        )
        self._run = run

    def __reduce__(self) -> tuple[Any, ...]:
        return JobInWorker, (self._job, self.misfire_grace_time, _lock_of(self._run))


class _RunTimesForWorker(RunTimes):
    """A list with a given job's run time. The run begins when the pool pickles the list."""

    def __init__(self, run_time: datetime, begin: Callable[[], bool], run: ExecutorRun) -> None:
        super().__init__(run_time, begin)
        self._run = run

    def __reduce__(self) -> tuple[Any, ...]:
        run_times, lock = [*iter(self)], _lock_of(self._run)
        if lock is None or not run_times:
            return list, (run_times,)
        return RunTimesInWorker, (run_times[0], lock)


def _lock_of(run: ExecutorRun) -> LockInWorker | None:
    """Return a run's lock, in the form in which its worker process gets it."""
    held: HeldLock | None = run.held
    if held is None:
        return None
    return LockInWorker.of(held, run.locks.settings, failover=run.submission.failover)


def _lives(process: Any) -> bool:
    try:
        return bool(process.is_alive())
    except ValueError:  # the process object is closed, so the process has ended
        return False
