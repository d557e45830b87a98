"""Registration: a replica tells which tasks it has and when they are due, and that it is alive."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from apscheduler_tasklock._database.rejections import (
    LIST_OF_JOBS,
    OLD_HISTORY,
    OLD_REPLICAS,
    REGISTRATIONS,
    REMOVED_TASKS,
    SIGN_OF_LIFE,
)
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.jobs import StoredTask
from apscheduler_tasklock._lock.messages import Registration, RunState
from apscheduler_tasklock._scheduler.notices import JobNotices
from apscheduler_tasklock._scheduler.poll import Poll
from apscheduler_tasklock._scheduler.submission import JobKey
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.status import RunningRun

logger = logger_of(__name__)

# Seconds for which a replica tells which tasks were removed from it, so that the last one that had
# them knows.
DROPPED_FOR = 600.0
# Seconds of a look in which the jobs of a shared job store are asked for, one by one. Who can write
# that store's table can write any number of rows, and other work waits for the look.
ASK_FOR = 1.0
# Seconds after which a replica that nobody has seen is removed.
REPLICA_RETENTION = 3600.0


class Registrar:
    """Registers the tasks of a scheduler's jobs when it starts, and when they change.

    :param locks: the task locks of this replica
    :param poll: knows the tasks
    :param registration: returns what is to be told of a job; ``None`` if nothing is, as of one-off
        jobs. Asks its job store.
    :param is_registered_when_added: tells of a job store, by its alias, whether its jobs' tasks
        are registered by whoever adds or changes them, and not by each replica that starts
    :param has_next_run: tells whether a job that comes again is there, and not paused
    :param stored_tasks: returns, by the alias of each such job store, what returns its tasks by
        job; that asks it
    :param rejected: returns what the database rejects of this replica's work, for operators; by
        default what these locks know
    :param timings: has the interval between two signs of life
    :param notices: tells of jobs whose tasks cannot be registered
    """

    def __init__(
        self,
        locks: LockClient,
        poll: Poll,
        registration: Callable[[JobKey], Registration | None],
        has_next_run: Callable[[JobKey], bool],
        is_registered_when_added: Callable[[str], bool] = lambda _jobstore: False,
        stored_tasks: Callable[[], Mapping[str, Callable[[], Mapping[JobKey, StoredTask]]]] = dict,
        rejected: Callable[[], Sequence[str]] | None = None,
        timings: Timings | None = None,
        notices: JobNotices | None = None,
    ) -> None:
        self._locks = locks
        self._rejected = rejected or locks.rejections.told
        self._report_interval = (timings or Timings()).report_interval
        self._poll = poll
        self._registration = registration
        self._notices = notices or JobNotices()
        self._has_next_run = has_next_run
        self._is_registered_when_added = is_registered_when_added
        self._stored_tasks = stored_tasks
        self._lock = threading.Lock()
        self._changed: dict[JobKey, bool] = {}  # what is to be registered: is it due anew?
        self._is_first = True
        self._closed = False
        self._is_told_stopped = False  # with nothing that still runs
        self._report_at = 0.0  # on the monotonic clock
        self._has_all_at = 0.0  # likewise: jobs are added after the start, one by one
        self._reported: tuple[Sequence[str], Sequence[str]] = (
            [],
            (),
        )  # tasks, and what is rejected
        self._retires = False  # whether tasks may have been removed that somebody waits for
        self._is_clean = False  # whether what is left of old replicas and histories was deleted
        self._reported_lost: frozenset[int] = frozenset()  # the tokens of what ran without its lock
        # The tasks that this replica had, and until when it says so, on the monotonic clock.
        self._dropped: dict[str, float] = {}
        self._with_row: deque[str] = deque()  # the tasks that have a row
        self._expected: set[str] = set()  # those of them whose rows this look asks for
        poll.add(self)
        poll.add_teller(self._report)
        poll.add_teller(self._notices.sum_up)

    def note(self, key: JobKey, *, moved: bool = False) -> None:
        """Register a job's task at the next look: it was added, or has changed.

        :param moved: whether the job has changed while its scheduler ran, so that it is due anew
        """
        with self._lock:
            self._changed[key] = self._changed.get(key, False) or moved

    def waiting(self) -> Collection[str]:
        """Return one task that has a row, another one at each look.

        Its row is missing if the table was made anew, or an older state of it restored.
        """
        self._with_row.rotate(-1)
        self._expected = {self._with_row[0]} if self._with_row else set()
        return self._expected

    def look(self, states: Sequence[RunState], _waiting: Collection[str]) -> None:
        """Register what has changed, or is due and nobody knows when next."""
        self._look_for_missing(states)
        changed = self._take_changed(states)
        try:
            self._register(changed)
            self._is_first = not self._poll.has_listed
        except TaskLockDatabaseError:
            for key, moved in changed.items():
                self.note(key, moved=moved)
            raise

    def _take_changed(self, states: Sequence[RunState]) -> dict[JobKey, bool]:
        """Return the jobs that are to be registered, and whether each is due anew."""
        with self._lock:
            changed, self._changed = self._changed, {}
        if self._is_first:
            for key in self._poll.job_keys():
                if not self._is_stored(key):
                    changed.setdefault(key, False)
        for state in states:
            if state.due_in_pause and not state.paused:
                for key in self._poll.keys_of(state.task_name):
                    changed.setdefault(key, False)
        return changed

    def _look_for_missing(self, states: Sequence[RunState]) -> None:
        """Register all tasks again if one of them has lost its row."""
        missing = self._expected - {state.task_name for state in states}
        if not missing:
            return
        logger.info(
            "Task %r: its row is gone; registering all tasks of this replica again", min(missing)
        )
        self._with_row.clear()  # those that are registered have one again
        for key in self._poll.job_keys():
            self.note(key)

    def differs(self, state: RunState) -> bool:
        """Tell whether a row has another schedule than our job; then ours is registered again.

        As in a rolling deployment, after a replica of the old version ran the task once more.
        """
        if self._locks.rejections.has(REGISTRATIONS):
            return False
        # Of a shared job store no replica has an older version, and rows may be any number.
        keys = [key for key in self._poll.keys_of(state.task_name) if not self._is_stored(key)]
        ours = [found for key in keys if (found := self._registration(key)) is not None]
        differs = bool(ours) and all(each.schedule != state.schedule for each in ours)
        if differs:
            for key in keys:
                self.note(key)
        return differs

    def has_due(self, state: RunState) -> bool:
        """Tell whether a job of a task is there, and not paused in its scheduler.

        Another replica may have removed or paused it, where they share a job store.
        """
        return any(self._has_next_run(key) for key in self._poll.keys_of(state.task_name))

    def _register(self, changed: Mapping[JobKey, bool]) -> None:
        tasks = self._registrations(changed)
        if not tasks and not self._locks.rejections.has(REGISTRATIONS):
            return
        registered = self._locks.register(tasks)
        for task_name in [each.task_name for each in registered if each.again]:
            for key in self._poll.keys_of(task_name):
                self.note(key, moved=changed.get(key, False))
        found = {each.task_name for each in registered if not each.again}
        self._with_row.extend(sorted(found.difference(self._with_row)))

    def _registrations(self, changed: Mapping[JobKey, bool]) -> list[Registration]:
        """Return what is to be told of these jobs' tasks; of stored jobs, for some time."""
        tasks = {}  # of two jobs that are one task, one tells of it
        began, stored_last = time.monotonic(), sorted(changed, key=self._is_stored)
        for key in stored_last:
            if self._is_stored(key) and time.monotonic() - began > ASK_FOR:
                self.note(key, moved=changed[key])
                self._poll.wake()
                continue
            try:
                found = self._registration(key)
            except TaskLockDatabaseError:
                raise
            except Exception as error:  # noqa: BLE001  # of one job, as of its job store
                self._notices.tell(
                    key[0],
                    logger,
                    logging.ERROR,
                    "Job %r: its task could not be registered",
                    key[0],
                    error=error,
                )
                continue
            if found is not None:
                tasks[found.task_name] = replace(found, moved=changed[key])
        return list(tasks.values())

    def _is_stored(self, key: JobKey) -> bool:
        return self._is_registered_when_added(key[1])

    def _list_stored(self) -> None:
        """Look at the tasks of a job store that all replicas share, whoever has added the job.

        Who adds, pauses or moves a job registers that, unless its scheduler does not run, or has no
        executor for it.
        """
        failed: TaskLockError | None = None
        for alias, list_tasks in self._stored_tasks().items():
            known = {key for key in self._poll.job_keys() if key[1] == alias}
            try:
                self._list_one_store(known, list_tasks())
            except TaskLockDatabaseError:
                raise
            except TaskLockError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _list_one_store(
        self, known: Collection[JobKey], stored: Mapping[JobKey, StoredTask]
    ) -> None:
        for key in set(known) - stored.keys():
            self._poll.forget(key)
        for key, task in stored.items():
            if not self._poll.knows(task.task_name, key):
                self._poll.know(task.task_name, key, None)
            if task.is_stale:
                self.note(key, moved=True)

    def _report(self) -> None:
        """Tell that this replica is alive, and at once if what is told of it has changed."""
        if self._poll.closed or self._closed:
            return
        now = time.monotonic()
        is_due = now >= self._report_at
        if not self._has_all_at:
            self._has_all_at = now + self._report_interval
        if is_due:
            self._try(LIST_OF_JOBS, self._list_stored, quiet=True)  # the job store tells of it
        names, rejected = sorted(set(self._poll.task_names())), self._told_as_rejected()
        running = self._locks.what_runs()
        lost = frozenset(run.token for run in running if run.lost)
        if not is_due and (names, rejected) == self._reported and lost == self._reported_lost:
            if self._retires:
                self._retire(names)
            return
        self._note_dropped(names)
        if not self._try(
            SIGN_OF_LIFE, partial(self._locks.report_replica, _version(), names, rejected, running)
        ):
            return
        # Not before it has succeeded: after an outage nobody waits for the next one.
        self._report_at = time.monotonic() + self._report_interval
        self._reported, self._reported_lost = (names, rejected), lost
        self._retire(names)
        if not self._is_clean:
            self._clean_up()

    def _told_as_rejected(self) -> Sequence[str]:
        # What tells it is the sign of life itself.
        return tuple(each for each in self._rejected() if not each.startswith(f"{SIGN_OF_LIFE}: "))

    def _try(self, what: str, statement: Callable[[], None], *, quiet: bool = False) -> bool:
        """Do something; note whether the database takes it, and tell.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        try:
            statement()
        except TaskLockDatabaseError:
            raise
        except TaskLockError as error:
            self._locks.rejections.begin(what, error, quiet=quiet)
            return False
        self._locks.rejections.end(what)
        return True

    def _note_dropped(self, names: Sequence[str]) -> None:
        now = time.monotonic()
        dropped = {**self._dropped, **dict.fromkeys(self._reported[0], now + DROPPED_FOR)}
        for name in names:
            dropped.pop(name, None)
        self._dropped = {name: until for name, until in dropped.items() if now < until}

    def _retire(self, names: Sequence[str]) -> None:
        """Let nobody wait for tasks that were removed. Rejected, it is done at the next look."""
        self._retires = True
        # Only what has all of its jobs by now knows what a replica before it had, and it has not.
        successor_of = names if time.monotonic() >= self._has_all_at else []
        dropped = list(self._dropped)
        if self._try(REMOVED_TASKS, lambda: self._locks.retire(successor_of, dropped)):
            self._retires = False

    def report_stop(self, running: Sequence[RunningRun]) -> None:
        """Tell that this replica stops, and what it still runs, unless it cannot be told."""
        self._closed = True
        if self._is_told_stopped and not running:
            return
        if self._report_at and self._locks.outage.reason is None:
            try:
                self._locks.stop_replica(running)
                self._is_told_stopped = not running
            except TaskLockError as error:
                logger.debug("This replica counts as alive for a while: %s", error)

    def _clean_up(self) -> None:
        """Remove replicas that nobody has seen for long, and old history, if this role may."""
        shorten = partial(self._locks.shorten_history, self._poll.task_names())
        are_clean = [
            self._try(
                OLD_REPLICAS, partial(self._locks.remove_replicas, REPLICA_RETENTION), quiet=True
            ),
            self._try(OLD_HISTORY, shorten, quiet=True),
        ]
        self._is_clean = all(are_clean)


def _version() -> str:
    try:
        return version("apscheduler-tasklock")
    except PackageNotFoundError:  # run from a folder where it is not installed
        return "(not installed)"
