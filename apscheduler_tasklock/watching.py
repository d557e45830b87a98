"""Watching runs that refused this replica, to run their windows again if their holders die."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.forking import begins_anew_in_a_fork
from apscheduler_tasklock.messages import RunState
from apscheduler_tasklock.submission import Watch

logger = logging.getLogger(__name__)

# Seconds after the end of a lease at which it is looked whether it was renewed. Leases that end in
# between are looked at with the same statement.
MARGIN = 0.3
# Seconds after which something that could not be done is tried again.
RETRY_INTERVAL = 1.0

Read = Callable[[Sequence[str]], "list[RunState]"]


@dataclass(eq=False)
class _Watched:
    watch: Watch
    run_times: list[datetime]
    due: float  # when to look at it, on the monotonic clock


class Watcher:
    """Waits for the ends of running claims' leases; where the holder died, runs the window again.

    It reads once per lease, all that it watches with one statement. One thread, which starts with
    the first watched run and is gone after the last.

    :param read: returns the last runs of tasks; raises ``TaskLockDatabaseError`` if the database
        is away
    :param settled: tells whether the database has been there long enough to believe its rows
    :param run_again: submits the run times again of a watched run whose holder died
    """

    def __init__(
        self,
        read: Read,
        settled: Callable[[], bool],
        run_again: Callable[[Watch], None],
    ) -> None:
        self._read = read
        self._settled = settled
        self._run_again = run_again
        self._closed = False
        self.begin_anew()
        begins_anew_in_a_fork(self)

    def begin_anew(self) -> None:
        """Watch nothing. In a forked child there is no scheduler to run anything."""
        self._changed = threading.Condition()
        self._watched: list[_Watched] = []
        self._refused = False
        self._thread: threading.Thread | None = None

    def add(self, watch: Watch) -> None:
        """Watch a run from now on, until it ends, unless this is closed."""
        due = time.monotonic() + watch.seconds_left + MARGIN
        with self._changed:
            if self._closed:  # refused while a shutdown waited for it
                return
            for watched in self._watched:
                if _same(watched.watch, watch):
                    _wait_too(watched.run_times, watch)
                    if watch.submission.last:  # the scheduler has dropped the job meanwhile
                        watched.watch = watch
                    return
            self._watched.append(_Watched(watch, list(watch.submission.run_times), due))
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="tasklock-watch", daemon=True)
                # Where threads are limited, it fails, and the next one tries again.
                thread.start()
                self._thread = thread
            self._changed.notify_all()

    def open(self) -> None:
        """Watch again after :meth:`close`."""
        with self._changed:
            self._closed = False

    def close(self) -> None:
        """Watch nothing any more."""
        with self._changed:
            self._closed = True
            self._watched = []
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._watched and (pause := self._next_due() - time.monotonic()) > 0:
                    self._changed.wait(pause)
                if not self._watched:
                    self._thread = None
                    break
                batch = list(self._watched)
            try:
                self._look_at(batch)
            except TaskLockError as error:
                self._tell_refusal(error)
                _put_off(batch)
            except Exception:  # nothing may end this thread unseen
                logger.exception("Runs of other replicas could not be watched; trying again")
                _put_off(batch)

    def _tell_refusal(self, error: TaskLockError) -> None:
        """Warn once, until a read succeeds. That the database is away is logged as an outage."""
        if not isinstance(error, TaskLockDatabaseError) and not self._refused:
            self._refused = True
            logger.warning("Runs of other replicas could not be watched; trying again: %s", error)

    def _next_due(self) -> float:
        return min(watched.due for watched in self._watched)

    def _look_at(self, batch: Sequence[_Watched]) -> None:
        names = sorted({watched.watch.submission.task_name for watched in batch})
        states = {state.task_name: state for state in self._read(names)}
        answered = time.monotonic()
        self._refused = False
        for watched in batch:
            state = states.get(watched.watch.submission.task_name)
            if state is None or state.finished or state.window_start != watched.watch.window_start:
                self._forget(watched)
            elif not state.dead:
                left = (state.locked_until - state.database_time).total_seconds()
                watched.due = answered + left + MARGIN
            elif not self._settled():
                watched.due = answered + RETRY_INTERVAL
            else:
                # First, since it is watched anew if somebody else gets it.
                self._forget(watched)
                self._run_again(self._taken_over(watched, state))

    def _taken_over(self, watched: _Watched, state: RunState) -> Watch:
        with self._changed:
            run_times = tuple(watched.run_times)
        submission = replace(watched.watch.submission, run_times=run_times, taken_over=state)
        return replace(watched.watch, submission=submission)

    def _forget(self, watched: _Watched) -> None:
        with self._changed:
            self._watched = [other for other in self._watched if other is not watched]


def _same(one: Watch, other: Watch) -> bool:
    """Tell whether two refused submissions of one job wait for the same run."""
    mine, others = one.submission, other.submission
    return (
        (mine.job.id, mine.jobstore, mine.task_name)
        == (others.job.id, others.jobstore, others.task_name)
    ) and one.window_start == other.window_start


def _wait_too(run_times: list[datetime], watch: Watch) -> None:
    """Let later run times wait as well. Where APScheduler would coalesce them, only the last."""
    later = [time for time in watch.submission.run_times if time not in run_times]
    run_times.extend(later)
    if watch.submission.job.coalesce:
        del run_times[1:-1]


def _put_off(batch: Sequence[_Watched]) -> None:
    for watched in batch:
        watched.due = time.monotonic() + RETRY_INTERVAL
