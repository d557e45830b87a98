"""Registration: a replica tells which tasks it has, and when they are due."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from apscheduler_tasklock._database.rejections import LIST_OF_JOBS, REGISTRATIONS
from apscheduler_tasklock._database.steps import Steps
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.jobs import StoredTask
from apscheduler_tasklock._lock.messages import Registration, RunState
from apscheduler_tasklock._scheduler.known import KnownTasks
from apscheduler_tasklock._scheduler.notices import JobNotices
from apscheduler_tasklock._scheduler.submission import JobKey
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError

logger = logger_of(__name__)

# Limits the seconds of a look in which the jobs of a shared job store are asked for, one by one.
# Who can write that store's table can write any number of rows, and other work waits for the look.
ASK_FOR = 1.0


@dataclass(eq=False)
class _Change:
    """That a job was added or has changed.

    :ivar moved: whether it is due anew
    """

    moved: bool


class Registrar:
    """Registers the tasks of a scheduler's jobs when it starts, and when they change.

    It is part of each look, and all of it but :meth:`note` is called there.

    :param locks: the task locks of this replica
    :param known: the tasks
    :param registration: returns what is to be told of a job; ``None`` if nothing is, as of one-off
        jobs. Asks its job store.
    :param has_next_run: tells whether a job that comes again is there, and not paused
    :param is_registered_when_added: tells of a job store, by its alias, whether its jobs' tasks
        are registered by whoever adds or changes them, and not by each replica that starts
    :param stored_tasks: returns, by the alias of each such job store, what returns its tasks by
        job; that asks it
    :param timings: has the interval between two looks at those job stores
    :param notices: tells of jobs whose tasks cannot be registered
    :ivar has_more: whether there was no time for all jobs, so that the next look is to come soon
    """

    def __init__(
        self,
        locks: LockClient,
        known: KnownTasks,
        registration: Callable[[JobKey], Registration | None],
        has_next_run: Callable[[JobKey], bool],
        is_registered_when_added: Callable[[str], bool] = lambda _jobstore: False,
        stored_tasks: Callable[[], Mapping[str, Callable[[], Mapping[JobKey, StoredTask]]]] = dict,
        timings: Timings | None = None,
        notices: JobNotices | None = None,
    ) -> None:
        self._locks = locks
        self._known = known
        self._registration = registration
        self._has_next_run = has_next_run
        self._is_stored_in = is_registered_when_added
        self._stored_tasks = stored_tasks
        self._interval = (timings or Timings()).report_interval
        self._notices = notices or JobNotices()
        self._lock = threading.Lock()
        self._changed: dict[JobKey, _Change] = {}  # what is to be registered
        self._is_first = True
        self._list_stored_at = 0.0  # on the monotonic clock
        self._with_row: deque[str] = deque()  # the tasks that have a row
        self._expected: set[str] = set()  # those of them whose rows this look asks for
        self.has_more = False

    def note(self, key: JobKey, *, moved: bool = False) -> None:
        """Register a job's task at the next look: it was added, or has changed.

        :param moved: whether the job has changed while its scheduler ran, so that it is due anew
        """
        with self._lock:
            earlier = self._changed.get(key)
            self._changed[key] = _Change(moved or (earlier is not None and earlier.moved))

    def expecting(self) -> Collection[str]:
        """Return one task that has a row, another one at each look.

        Its row is missing if the table was made anew, or an older state of it restored.
        """
        self._with_row.rotate(-1)
        self._expected = {self._with_row[0]} if self._with_row else set()
        return self._expected

    def register(self, states: Sequence[RunState], *, has_listed: bool) -> Steps[None]:
        """Register what has changed, or is due and nobody knows when next.

        :param states: the rows that a look has found
        :param has_listed: whether all jobs are known by now
        :raises TaskLockDatabaseError: the database is unavailable
        """
        self._look_for_missing(states)
        self._note_due(states)
        with self._lock:
            changed = dict(self._changed)
        if self._is_first:
            for key in self._known.job_keys():
                if not self._is_stored(key):
                    changed.setdefault(key, _Change(moved=False))
        yield from self._register(changed)
        self._is_first = not has_listed

    def _note_due(self, states: Sequence[RunState]) -> None:
        """Register what came due in a pause that is over."""
        for state in states:
            if state.due_in_pause and not state.paused:
                for key in self._known.keys_of(state.task_name):
                    self.note(key)

    def _look_for_missing(self, states: Sequence[RunState]) -> None:
        """Register all tasks again if one of them has lost its row."""
        missing = self._expected - {state.task_name for state in states}
        if not missing:
            return
        logger.info(
            "Task %r: its row is gone; registering all tasks of this replica again", min(missing)
        )
        self._with_row.clear()  # those that are registered have one again
        for key in self._known.job_keys():
            self.note(key)

    def differs(self, state: RunState) -> bool:
        """Tell whether a row has another schedule than our job; then ours is registered again.

        As in a rolling deployment, after a replica of the old version ran the task once more.
        """
        if self._locks.rejections.has(REGISTRATIONS):
            return False
        # Of a shared job store no replica has an older version, and rows may be any number.
        keys = [key for key in self._known.keys_of(state.task_name) if not self._is_stored(key)]
        asking = self._known.asking(keys)
        ours = [found for key in asking if (found := self._registration(key)) is not None]
        differs = bool(ours) and all(each.schedule != state.schedule for each in ours)
        if differs:
            for key in keys:
                self.note(key)
        return differs

    def has_due(self, state: RunState) -> bool:
        """Tell whether a job of a task is there, and not paused in its scheduler.

        Another replica may have removed or paused it, where they share a job store.
        """
        keys = self._known.keys_of(state.task_name)
        return any(self._has_next_run(key) for key in self._known.asking(keys))

    def _register(self, changed: Mapping[JobKey, _Change]) -> Steps[None]:
        """Register these jobs' tasks. What cannot be done now is left for the next look."""
        tasks, seen = self._registrations(changed)
        if tasks or self._locks.rejections.has(REGISTRATIONS):
            registered = yield from self._locks.register(tasks)
            for task_name in [each.task_name for each in registered if each.again]:
                for key in self._known.keys_of(task_name):
                    self.note(key, moved=key in changed and changed[key].moved)
            found = {each.task_name for each in registered if not each.again}
            self._with_row.extend(sorted(found.difference(self._with_row)))
        with self._lock:
            for key in seen:
                if self._changed.get(key) is changed[key]:  # and was not noted again meanwhile
                    del self._changed[key]

    def _registrations(
        self, changed: Mapping[JobKey, _Change]
    ) -> tuple[list[Registration], list[JobKey]]:
        """Return what is to be told of these jobs' tasks, and the jobs that were asked for it.

        Those of shared job stores are asked for some time.
        """
        tasks, seen = {}, []  # of two jobs that are one task, one tells of it
        self.has_more = False
        began, stored_last = time.monotonic(), sorted(changed, key=self._is_stored)
        for key in self._known.asking(stored_last):
            if self._is_stored(key) and time.monotonic() - began > ASK_FOR:
                self.has_more = True
                break
            try:
                found = self._registration(key)
            except TaskLockDatabaseError:
                raise
            except Exception as error:  # noqa: BLE001  # of one job, as of its job store
                found = None
                self._notices.tell(
                    key[0],
                    logger,
                    logging.ERROR,
                    "Job %r: its task could not be registered",
                    key[0],
                    error=error,
                )
            seen.append(key)
            if found is not None:
                tasks[found.task_name] = replace(found, moved=changed[key].moved)
        return list(tasks.values()), seen

    def _is_stored(self, key: JobKey) -> bool:
        return self._is_stored_in(key[1])

    def list_stored(self) -> None:
        """Look at the tasks of a job store that all replicas share, whoever has added the job.

        As often as a replica gives a sign of life. Who adds, pauses or moves a job registers that,
        unless its scheduler does not run, or has no executor for it.

        :raises TaskLockDatabaseError: the database is unavailable
        """
        if time.monotonic() < self._list_stored_at:
            return
        failed: TaskLockError | None = None
        for alias, list_tasks in self._stored_tasks().items():
            known = {key for key in self._known.job_keys() if key[1] == alias}
            try:
                self._list_one_store(known, list_tasks())
            except TaskLockDatabaseError:
                raise
            except TaskLockError as error:
                failed = failed or error
        if failed is not None:
            self._locks.rejections.begin(LIST_OF_JOBS, failed, quiet=True)  # the job store tells it
            return
        self._locks.rejections.end(LIST_OF_JOBS)
        self._list_stored_at = time.monotonic() + self._interval

    def _list_one_store(
        self, known: Collection[JobKey], stored: Mapping[JobKey, StoredTask]
    ) -> None:
        for key in set(known) - stored.keys():
            self._known.forget(key)
        for key, task in stored.items():
            if not self._known.has(task.task_name, key):
                self._known.add(task.task_name, key, None)
            if task.is_stale:
                self.note(key, moved=True)
