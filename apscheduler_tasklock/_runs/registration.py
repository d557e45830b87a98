"""Registration: a replica writes the schedules and due times of its tasks into their rows."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from apscheduler_tasklock._database.outbox import MOST_TOGETHER
from apscheduler_tasklock._database.rejections import LIST_OF_JOBS, REGISTRATIONS
from apscheduler_tasklock._database.sequences import Statements
from apscheduler_tasklock._lock.job_rows import StoredTask
from apscheduler_tasklock._lock.protocol_messages import (
    Registered,
    Registration,
    Registrations,
    TaskRow,
)
from apscheduler_tasklock._lock.user import ReplicaUser
from apscheduler_tasklock._runs.known_tasks import KnownTasks
from apscheduler_tasklock._runs.run import JobKey
from apscheduler_tasklock._runs.skipped_jobs import SkippedJobsLog
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockSchemaError,
)

logger = logger_of(__name__)

# Limits the seconds in which a look reads jobs of a shared job store one by one to register their
# tasks, because the store may have any number of rows, and other work waits for the look.
ASK_FOR = 1.0


@dataclass(eq=False)
class _ChangedJob:
    """A note that a job was added or has changed.

    :ivar moved: whether the due time in the task's row is to be replaced
    """

    moved: bool


class Registrar:
    """Registers the tasks of a scheduler's jobs when the scheduler starts, and when jobs change.

    Looks call all methods but :meth:`note`, which any thread may call.

    :param user: the executor as a user of its replica
    :param known: the tasks of this replica
    :param registration: reads a job from its job store, and returns the registration of its task;
        ``None`` if the task is not registered, such as that of a one-off job
    :param has_next_run: returns whether a job exists, is a recurring job, and is not paused
    :param is_shared: returns whether a job store, by its alias, is a shared job store. Tasks of
        such a store are registered when a job is added or changed, and not when a replica starts.
    :param stored_tasks: returns, by the alias of each shared job store, a function that reads the
        store's tasks and returns them by job
    :param notices: logs jobs whose tasks cannot be registered
    :param note_rescheduled: called with each registration that has changed a task's schedule
    :param forget: called with each job of this replica that is no longer in its shared job store,
        because another replica has removed or ended it
    :ivar has_more: whether a look had no time to register all changed jobs, so that the next look
        is to begin at once
    """

    def __init__(
        self,
        user: ReplicaUser,
        known: KnownTasks,
        registration: Callable[[JobKey], Registration | None],
        has_next_run: Callable[[JobKey], bool],
        is_shared: Callable[[str], bool] = lambda _jobstore: False,
        stored_tasks: Callable[[], Mapping[str, Callable[[], Mapping[JobKey, StoredTask]]]] = dict,
        notices: SkippedJobsLog | None = None,
        note_rescheduled: Callable[[Registration, Registered], None] = lambda *_: None,
        forget: Callable[[JobKey], None] = lambda _key: None,
    ) -> None:
        self._user = user
        self._known = known
        self._registration = registration
        self._has_next_run = has_next_run
        self._is_shared = is_shared
        self._stored_tasks = stored_tasks
        self._interval = user.settings.timings.report_interval
        self._notices = notices or SkippedJobsLog()
        self._note_rescheduled = note_rescheduled
        self._forget = forget
        self._lock = threading.Lock()
        self._changed: dict[JobKey, _ChangedJob] = {}  # jobs whose tasks are to be registered
        self._is_first = True
        self._list_stored_at = 0.0  # on the monotonic clock
        self._with_row: deque[str] = deque()  # tasks that are known to have a row
        self._expected: set[str] = set()  # tasks whose rows the current look must find
        self.has_more = False

    def note(self, key: JobKey, *, moved: bool = False) -> None:
        """Register a job's task at the next look, because the job was added or has changed.

        :param moved: whether the job has changed while its scheduler ran, so that the due time in
            the task's row is to be replaced
        """
        with self._lock:
            earlier = self._changed.get(key)
            self._changed[key] = _ChangedJob(moved or (earlier is not None and earlier.moved))

    def expecting(self) -> Collection[str]:
        """Return one task that must have a row; another one at each look.

        If the look does not find the row, the table was made anew, or an older state of the table
        was restored. Empty if no task is known to have a row.
        """
        self._with_row.rotate(-1)
        self._expected = {self._with_row[0]} if self._with_row else set()
        return self._expected

    def register(self, states: Sequence[TaskRow], *, has_listed: bool) -> Statements[None]:
        """Register the tasks of changed jobs, and tasks whose rows need a due time.

        At the first look, and until the jobs of all job stores are known, the tasks of all known
        jobs are registered, except those of shared job stores.

        :param states: the rows that a look has found
        :param has_listed: whether the jobs of all job stores are known
        :raises TaskLockDatabaseError: the database is unavailable
        """
        self._look_for_missing(states)
        self._note_due(states)
        with self._lock:
            changed = dict(self._changed)
        if self._is_first:
            for key in self._known.job_keys():
                if not self._is_stored(key):
                    changed.setdefault(key, _ChangedJob(moved=False))
        yield from self._register(changed)
        self._is_first = not has_listed

    def _note_due(self, states: Sequence[TaskRow]) -> None:
        """Let tasks be registered that came due in a pause, if that pause is over."""
        for state in states:
            if state.due_in_pause and not state.paused:
                for key in self._known.keys_of(state.task_name):
                    self.note(key)

    def _look_for_missing(self, states: Sequence[TaskRow]) -> None:
        """Let the tasks of all jobs be registered again, if a task has lost its row."""
        missing = self._expected - {state.task_name for state in states}
        if not missing:
            return
        logger.info(
            "Task %r: its row is gone; registering all tasks of this replica again", min(missing)
        )
        self._with_row.clear()  # `_register` adds the registered tasks again
        for key in self._known.job_keys():
            self.note(key)

    def differs(self, state: TaskRow) -> bool:
        """Return whether a row's schedule differs from the schedule of the job on this replica.

        If the schedules differ, the next look registers the task again. They differ in a rolling
        deployment, in which a replica of the old version may write the old schedule once more.
        """
        if self._user.rejections.has(REGISTRATIONS):
            return False
        # Jobs of a shared job store are not compared, because all replicas read the same schedule
        # from the store, and the store may have many jobs.
        keys = [key for key in self._known.keys_of(state.task_name) if not self._is_stored(key)]
        asking = self._known.asking(keys)
        ours = [found for key in asking if (found := self._registration(key)) is not None]
        differs = bool(ours) and all(each.schedule != state.schedule for each in ours)
        if differs:
            for key in keys:
                self.note(key)
        return differs

    def has_due(self, state: TaskRow) -> bool:
        """Return whether a task has a recurring job that exists and is not paused.

        Each job is read, because another replica may have removed or paused a job of a shared job
        store.
        """
        keys = self._known.keys_of(state.task_name)
        return any(self._has_next_run(key) for key in self._known.asking(keys))

    def _register(self, changed: Mapping[JobKey, _ChangedJob]) -> Statements[None]:
        """Register the tasks of changed jobs; note the jobs again if the answer says ``again``."""
        tasks, seen = self._registrations(changed)
        if tasks or self._user.rejections.has(REGISTRATIONS):
            registered = yield from send_registrations(self._user, tasks)
            for task_name in [each.task_name for each in registered if each.again]:
                for key in self._known.keys_of(task_name):
                    self.note(key, moved=key in changed and changed[key].moved)
            asked = {task.task_name: task for task in tasks}
            for each in registered:
                # With two jobs, the row may have had the other job's schedule.
                is_of_one = len(self._known.keys_of(each.task_name)) == 1
                if each.was_schedule is not None and is_of_one:
                    self._note_rescheduled(asked[each.task_name], each)
            found = {each.task_name for each in registered if not each.again}
            self._with_row.extend(sorted(found.difference(self._with_row)))
        with self._lock:
            for key in seen:
                if self._changed.get(key) is changed[key]:  # so the job was not noted again
                    del self._changed[key]

    def _registrations(
        self, changed: Mapping[JobKey, _ChangedJob]
    ) -> tuple[list[Registration], list[JobKey]]:
        """Return the registrations of changed jobs' tasks, and the jobs that were read for them.

        Jobs of shared job stores are read for ``ASK_FOR`` seconds at most.
        """
        tasks, seen = {}, []  # by task, because a task with two jobs has one registration
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
            except Exception as error:  # noqa: BLE001  # whatever one job's store or trigger raises
                found = None
                self._notices.log(
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
        return self._is_shared(key[1])

    def list_stored(self) -> None:
        """List the tasks of the shared job stores, as often as a replica sends a sign of life.

        A replica that adds or changes a stored job registers the job's task itself, if its
        scheduler runs and has the job's executor. Otherwise the row of the task is stale. The list
        shows which rows are stale, so that this replica registers their tasks.

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
            # Quiet, because the job store itself logs the rejection.
            self._user.rejections.begin(LIST_OF_JOBS, failed, quiet=True)
            return
        self._user.rejections.end(LIST_OF_JOBS)
        self._list_stored_at = time.monotonic() + self._interval

    def _list_one_store(
        self, known: Collection[JobKey], stored: Mapping[JobKey, StoredTask]
    ) -> None:
        for key in set(known) - stored.keys():
            self._known.forget(key)
            self._forget(key)
        for key, task in stored.items():
            self._known.add(task.task_name, key, None)
            if task.is_stale:
                self.note(key, moved=True)


def send_registrations(
    user: ReplicaUser, tasks: Sequence[Registration]
) -> Statements[list[Registered]]:
    """Register tasks and their schedules.

    :return: an answer for each task. A task that the database rejects is to be registered again. A
        task whose name cannot be stored has no answer.
    :raises TaskLockDatabaseError: the database is unavailable
    """
    registered, rejected = yield from _send_registrations(user, tasks)
    if rejected is None:
        user.rejections.end(REGISTRATIONS)
    else:
        user.rejections.begin(REGISTRATIONS, rejected)
    return registered


def _send_registrations(
    user: ReplicaUser, tasks: Sequence[Registration]
) -> Statements[tuple[list[Registered], TaskLockError | None]]:
    """Register the tasks; return an answer for each, and the last rejection."""
    registered: list[Registered] = []
    rejected: TaskLockError | None = None
    for begin in range(0, len(tasks), MOST_TOGETHER):
        some = tasks[begin : begin + MOST_TOGETHER]
        try:
            registered += yield user.database.carrying_out(Registrations(some))
        except TaskLockDatabaseError:
            raise
        except TaskLockError as error:
            if isinstance(error, TaskLockSchemaError):
                rejected = error
                registered += [Registered(task.task_name, again=True) for task in some]
            elif len(some) > 1:
                # Register each task alone, so that one task's mistake does not affect the
                # others.
                for task in some:
                    one, why = yield from _send_registrations(user, [task])
                    registered, rejected = registered + one, why or rejected
            else:
                rejected = error
                registered.append(Registered(some[0].task_name, again=True))
    return registered, rejected
