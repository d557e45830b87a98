"""``TaskLocks``: a task's lock around any code, without APScheduler."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from inspect import isclass, iscoroutinefunction
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.connection import attempt_limit
from apscheduler_tasklock._database.jitter import jittered
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.database import Database
from apscheduler_tasklock._lock.forking import replace_in_each_child
from apscheduler_tasklock._lock.job_changes import JobChanges
from apscheduler_tasklock._lock.operations import Operations, check_lengths, operator_here
from apscheduler_tasklock._lock.outcomes import OUTCOMES, RunOutcome
from apscheduler_tasklock._lock.patterns import is_pattern, like_of, unmatched
from apscheduler_tasklock._lock.protocol_messages import ClaimRequest, Refusal
from apscheduler_tasklock._lock.reads import MOST_WATCHED
from apscheduler_tasklock._lock.releases import Released
from apscheduler_tasklock._lock.settings import lock_settings
from apscheduler_tasklock._lock.user import ReplicaUser, user_or_stand_in
from apscheduler_tasklock._returned import check_returned, why_no_call_runs
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock._words.findings import (
    NO_REPLICA_AFTER,
    WatchedRows,
    unread,
    with_findings,
)
from apscheduler_tasklock._words.next_run_times import next_run_times
from apscheduler_tasklock._words.stories import story_of
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockNotFoundError,
    TaskLockOptionError,
    TaskLockRefusedError,
    TaskLockSchemaError,
    TaskLockStateError,
    raised_at_the_call,
)
from apscheduler_tasklock.lock import HeldLock, holding
from apscheduler_tasklock.options import (
    DEFAULT,
    Default,
    LockOptions,
    check_name,
    parse_positive_seconds,
    parse_seconds,
    parse_token,
)
from apscheduler_tasklock.schema.table import DEFAULT_TABLE
from apscheduler_tasklock.status import (
    JOB_ORDERS,
    KINDS,
    ORDERS,
    RUN_ORDERS,
    Durations,
    Finding,
    Freed,
    JobMoved,
    JobState,
    JobStatus,
    Lanes,
    Misses,
    Overview,
    Pause,
    PauseChange,
    ReplicaStatus,
    Run,
    RunRequest,
    Silence,
    Story,
    TaskState,
    TaskStatus,
)

logger = logger_of(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")

# The pause between two claims of a hold, in seconds, while its claims are refused because of a run
# whose lease has ended.
PAUSE = 0.3

# Limits the seconds that `pause_all` waits for each of its two locks of the table, and how often it
# tries to get them. All claims and releases wait during such a wait, so the wait is short, and the
# break after it is longer.
LONGEST_TABLE_WAIT = 0.5
TABLE_ATTEMPTS = 10
TABLE_BREAK = 1.0
_TABLE_LOCKED = (
    "The task lock table is locked by other sessions; to pause all tasks is tried again, for some "
    "15 seconds"
)

LOST = (
    "Task %r: its lock is lost (token %s), and another replica may have the task. Either the lock "
    "could not be renewed in time, or the code under it took longer than max_lock; in the second "
    "case, raise max_lock"
)


class TaskLocks:
    """One replica's task locks in one database. Safe to share between threads.

    It is a context manager, sync or async, which closes the task locks when it is left.

    Each parameter means the same as that of :class:`TaskLockExecutor`.

    :raises TaskLockOptionError: the task lock cannot use ``database``, or another parameter is
        invalid
    """

    timings: ClassVar[Timings] = Timings()

    @raised_at_the_call
    def __init__(
        self,
        database: str | URL | Engine | None = None,
        *,
        replica_id: str | None = None,
        claim_timeout: float = 10.0,
        schema: str | None = None,
        table: str = DEFAULT_TABLE,
        history: int = 100,
        redact: Callable[[BaseException], str | None] | None = None,
        tracebacks: bool = False,
        release: str | None = None,
    ) -> None:
        settings = lock_settings(
            database,
            type(self).__name__,
            replica_id=replica_id,
            claim_timeout=claim_timeout,
            schema=schema,
            table=table,
            history=history,
            redact=redact,
            tracebacks=tracebacks,
            release=release,
        )
        self._user = ReplicaUser(replace(settings, timings=self.timings))
        self._operations = Operations(
            self._user.table,
            self._user.rejections,
            settings.history,
            attempt_limit(settings.claim_timeout, self.timings.longest_answer),
        )
        replace_in_each_child(self)

    def _replace_in_child(self) -> None:
        """Use a new user of a replica with a connection of its own. Called in a forked child."""
        self._user = self._user.for_child()

    @property
    def replica_id(self) -> str:
        """The replica's id, shown in logs."""
        return self._user.replica_id

    def __enter__(self) -> TaskLocks:
        """Return the task locks, which are closed when the block is left."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> TaskLocks:
        """Return the task locks, which are closed when the block is left."""
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    @raised_at_the_call
    def check(self) -> None:
        """Check that all tables except the job store's exist, are new enough, and may be used.

        :raises TaskLockSchemaError: a table or a right is missing, or a table is too old; the
            message names all that is missing
        :raises TaskLockDatabaseError: the database is unavailable
        """
        user_or_stand_in(self._user).rights.check()

    def database_time(self) -> datetime:
        """Return the time by the database's clock, by which all rows are to be judged.

        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        return self._operate(lambda operations, cursor: operations.database_time(cursor))

    def check_writes(self) -> None:
        """Check that a write is confirmed now, by a statement that changes no row.

        A database may answer reads while it takes no writes: a standby, a read-only server, or a
        server whose commits wait for a synchronous standby. No replica can run a job meanwhile.

        :raises TaskLockDatabaseError: the database takes no writes, or is unavailable
        """
        self._operate(lambda operations, cursor: operations.check_writes(cursor))

    def doctor(self, *, namespace: str = "") -> list[Finding]:
        """Check the set-up: the connection, the server, the tables, their rights, the replicas.

        The checks are those of ``apscheduler-tasklock doctor``. They have a connection of their
        own, which they close, and wait for each answer for 5 seconds at most. They write a row into
        each table, and roll it back. If the database is unavailable, that is a finding.

        :param namespace: what the names of the tasks begin with, for a role that may only write
            the rows of such tasks
        :return: the findings, at least one for each check; none of them has a password
        :raises TaskLockOptionError: the namespace is invalid
        """
        if namespace:
            check_name(namespace, "doctor()")
        # Imported here, because a replica that only runs jobs does not need Alembic.
        from apscheduler_tasklock._doctor.checks import examine

        user = user_or_stand_in(self._user)
        if user.settings.stand_in is not None:
            # Raises, because there is no database.
            user.database.ask(lambda cursor: cursor.execute())
        return list(examine(user.settings.database, user.table, namespace))

    @raised_at_the_call
    def hold(
        self,
        name: str,
        *,
        min_lock: float | timedelta,
        max_lock: float | timedelta,
        lease: float | timedelta | Default | None = DEFAULT,
        wait: float | timedelta = 0,
    ) -> Hold:
        """Return a context manager, sync or async, and decorator that holds a task's lock.

        When the context manager is entered, it returns the :class:`HeldLock`, which is also
        ``current_lock()``.

        :param name: the task's name
        :param min_lock: how long all other claims of the task are refused after this claim, also
            after its release; seconds or ``timedelta``, 0 or more
        :param max_lock: how long after its claim the lock ends in any case; seconds or
            ``timedelta``, above 0
        :param lease: the time without a renewal after which the holder counts as dead; seconds or
            ``timedelta``, 1 or more; by default 60 s or a third of ``max_lock``, whichever is
            shorter, and ``max_lock`` itself if that third is below 15 s; ``None``: ``max_lock``
        :param wait: how long to claim again while the task runs elsewhere; seconds or
            ``timedelta``, 0 or more. It is claimed again when the lock of that run ends, and every
            5 s at least. Waiting holds get the lock in any order. A task that was just run or is
            paused is refused at once.
        :raises TaskLockOptionError: a parameter is invalid
        :raises TaskLockRefusedError: when the hold is entered: the task runs elsewhere, was just
            run, or is paused; or the task locks were closed while the hold waited
        :raises TaskLockError: when the hold is entered: the database is unavailable, or rejects the
            statement
        """
        where = f"hold({name!r})"
        given = {"min_lock": min_lock, "max_lock": max_lock, "lease": lease}
        options = LockOptions.parse(given, where)
        least, most = options.lock_times(period=0)
        lease_seconds = options.lease_within(most)

        def request() -> ClaimRequest:
            return ClaimRequest(name, least, most, lease=lease_seconds)

        check_name(name, where)
        if isinstance(wait, str):
            raise TaskLockOptionError(f"{where}: wait must be seconds or a timedelta, not {wait!r}")
        return Hold(lambda: self._user, name, request, parse_seconds(wait, "wait", where))

    def tasks(
        self,
        *patterns: str,
        states: Collection[TaskState] = (),
        order: str = "name",
        limit: int | None = None,
        offset: int = 0,
        one_offs: bool = True,
    ) -> list[TaskStatus]:
        """Return the tasks that have a row, in the order of their names, or in another order.

        If the replicas' table cannot be read, one INFO line says so, and no task is ``gone``.

        :param patterns: names, in which ``*`` and ``?`` stand for characters; none: all tasks
        :param states: only tasks with one of these states; empty: all tasks
        :param order: ``"name"``; ``"due"``: the soonest due time first, and tasks without one last;
            ``"started"``: the last run that began last first, and tasks that never ran last;
            ``"duration"``: the last run that took longest first; ``"failures"``: the most failures
            in a row first; or ``"urgency"``: the worst state first, and tasks that are well last.
            Equal tasks are in the order of their names.
        :param limit: how many, at most; ``None``: all
        :param offset: how many of the first tasks are left out, for the next page
        :param one_offs: whether the rows of one-off jobs are returned, too, of which there may be
            very many
        :raises TaskLockOptionError: there is no such state or order, or ``limit`` or ``offset`` is
            no whole number of 0 or more
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        _check_numbers("tasks", limit=limit, offset=offset)
        _check_word("tasks", "order", order, ORDERS)
        chosen = _states("tasks", states)
        like = [like_of(pattern) for pattern in patterns] or None
        return self._operate(
            lambda operations, cursor: operations.tasks(
                cursor,
                like,
                limit,
                states=chosen,
                order=order,
                offset=offset,
                one_offs=one_offs,
            )
        )

    def overview(
        self,
        *patterns: str,
        limit: int = 20,
        namespace: str = "",
        no_replica_after: float | None = NO_REPLICA_AFTER,
        expect_replicas: int = 0,
    ) -> Overview:
        """Return what an operator sees at a glance, and the findings on it.

        The tasks are read in one statement, and then the replicas, the missed run times and the
        overdue stored jobs. Of the run history, only that of tasks with misses is read, and the
        deaths that tell which replicas have died. If the replicas' table cannot be read, one INFO
        line says so, no task is ``gone``, and no replicas are counted. Without rights on the jobs'
        table, which a monitor of an application without the job store may lack, nothing is found
        of stored jobs.

        :param patterns: names of tasks, in which ``*`` and ``?`` stand for characters; none: all
            tasks. The replicas and the pauses of all tasks are told in any case.
        :param limit: how many tasks each list has, at most
        :param namespace: what the names of the tasks begin with, for stored jobs that no replica
            has claimed so far, which may lack a task's name. Such a job counts as the task
            ``namespace`` + its id.
        :param no_replica_after: seconds without a sign of life after which it is critical that no
            replica of a namespace is alive, 90 or more; ``None``: it is never more than a warning
        :param expect_replicas: how many replicas of these tasks have to be alive; fewer are a
            warning
        :raises TaskLockOptionError: ``limit`` is no whole number of 0 or more
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        _check_numbers("overview", limit=limit, expect_replicas=expect_replicas)
        _check_patterns("overview", patterns)
        like = {like_of(pattern): pattern for pattern in patterns}
        read = self._operate(
            lambda operations, cursor: operations.overview(cursor, list(like) or None, limit)
        )
        fleet: Sequence[ReplicaStatus] | None = None
        silences: Sequence[Silence] = ()
        with suppress(TaskLockSchemaError):
            silences = self._operate(
                lambda operations, cursor: operations.silences(cursor, list(like) or None)
            )
            fleet = self._operate(
                lambda operations, cursor: operations.fleet(cursor, list(like) or None)
            )
        misses: Sequence[Misses] | None = None
        with suppress(TaskLockSchemaError):
            misses = self._operate(
                lambda operations, cursor: operations.misses(cursor, list(like) or None)
            )
        jobs, unread = self._overdue_jobs(patterns, namespace)
        having: Mapping[str, Sequence[str]] | None = None if jobs else {}
        named = [job.task for job in jobs.values() if job.task is not None]
        if jobs and fleet is not None:
            having = self._operate(lambda operations, cursor: operations.having(cursor, named))
        has_tasks = bool(jobs) or any(read.overview.counts.values())
        missing = unmatched([like[pattern] for pattern in read.unmatched], jobs)
        rows = WatchedRows(
            read.overview.now,
            read.watched,
            read.more,
            replicas=fleet,
            silences=silences,
            misses=misses,
            no_replica_after=no_replica_after,
            expect_replicas=expect_replicas,
            jobs=jobs,
            having=having,
            pauses_of_all=read.pauses_of_all,
            all_paused=read.overview.paused if read.all_paused else (),
            is_empty=not has_tasks and not patterns and not self._has_jobs(),
            unmatched=missing,
            unread=unread,
        )
        return with_findings(read.overview, rows)

    def _has_jobs(self) -> bool:
        """Return whether the job store has a job. False without the right to see it."""
        with suppress(TaskLockError):
            return bool(self.jobs(limit=1))
        return False

    def _overdue_jobs(
        self, patterns: Sequence[str], namespace: str
    ) -> tuple[dict[str, JobStatus], list[str]]:
        """Return the overdue stored jobs by their tasks' names, and why they are not known."""
        try:
            overdue = self.jobs(overdue=True, limit=MOST_WATCHED)
        except TaskLockSchemaError:
            return {}, []
        except TaskLockError:  # its text may have a secret of an engine's creator
            return {}, ["the stored jobs cannot be read: see the log, or `jobs`"]
        found: dict[str, JobStatus] = {}
        for job in overdue:
            name = job.task or f"{namespace}{job.id}"
            if not patterns or len(unmatched(patterns, [name])) < len(patterns):
                found.setdefault(name, job)
        return found, []

    def runs(
        self,
        *patterns: str,
        outcome: str | Collection[str] | None = None,
        kind: str | None = None,
        replica: str | None = None,
        error: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        order: str = "newest",
        limit: int = 100,
        offset: int = 0,
    ) -> list[Run]:
        """Return finished runs, missed run times, and what operators did, the newest first.

        Missed run times are in their place by the first of them, not by the time of their note.

        For each task the history keeps ``history`` runs that ended well, as many that did not, 20
        entries of missed run times, and 20 of what operators did, in each case the newest ones. So
        runs that did not end well may go back farther than the others.

        :param patterns: names of tasks, in which ``*`` and ``?`` stand for characters
        :param outcome: only entries with this outcome, or with one of these; :class:`Run` has a
            list of outcomes. ``"freed"`` is that of runs; what operators did needs the kind, too
        :param kind: only entries of this kind, such as ``"operator"``; :class:`Run` has a list
        :param replica: only entries of the replica of this id
        :param error: only runs whose error has this text in its class or its message, in capital
            or small letters
        :param since: only runs that began at this time or later, and entries of missed run times of
            which the last one was due then or later; aware
        :param until: only runs that began before this time, and missed run times of which the first
            one was due before it; aware
        :param order: ``"newest"``; ``"name"``: by the tasks' names; or ``"duration"``: the run that
            took longest first, and entries that are no runs last. Equal ones come newest first.
        :param limit: how many, at most
        :param offset: how many of the first are left out, for the next page. Runs that end between
            the reads of two pages move the others on.
        :raises TaskLockOptionError: there is no such outcome, kind or order, a time has no zone, or
            ``limit`` or ``offset`` is no whole number of 0 or more
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        outcomes = (outcome,) if isinstance(outcome, str) else outcome
        for each in outcomes or ():
            _check_word("runs", "outcome", each, OUTCOMES)
        if kind is not None:
            _check_word("runs", "kind", kind, KINDS)
        _check_word("runs", "order", order, RUN_ORDERS)
        _check_zone("runs", since=since, until=until)
        _check_numbers("runs", limit=limit, offset=offset)
        is_name = len(patterns) == 1 and not is_pattern(patterns[0])
        like = [like_of(pattern) for pattern in patterns] or None

        def read(operations: Operations, cursor: Any) -> list[Run]:
            wanted: dict[str, Any] = {
                "outcomes": outcomes,
                "kind": kind,
                "replica": replica,
                "error": error,
                "since": since,
                "until": until,
                "order": order,
                "limit": limit,
                "offset": offset,
            }
            if is_name:
                return operations.runs(cursor, patterns[0], **wanted)
            return operations.runs(cursor, like=like, **wanted)

        return self._operate(read)

    def recent_runs(self, *names: str, limit: int = 60) -> dict[str, list[Run]]:
        """Return the newest runs and missed run times of tasks, by the tasks' names.

        What operators did is left out. Each list has the newest first. The list of a task without
        runs is empty.

        :param names: names of tasks, in which ``*`` and ``?`` are ordinary characters
        :param limit: how many of each task, at most
        :raises TaskLockOptionError: a name is no text, or ``limit`` is no whole number of 0 or more
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        _check_patterns("recent_runs", names)
        _check_numbers("recent_runs", limit=limit)
        return self._operate(
            lambda operations, cursor: operations.recent_runs(cursor, names, limit)
        )

    def lanes(
        self,
        since: datetime,
        until: datetime,
        *patterns: str,
        by: str = "task",
        parts: int = 500,
        limit: int = 50,
        offset: int = 0,
    ) -> Lanes:
        """Return what the run history has of a span of time, a lane for each task or replica.

        On a lane are the runs of which a part is in the span, also those that go on, and the missed
        run times in it. Lanes with runs that take too long or are dead come first, then those with
        runs that failed, then those with missed run times. A task of which nothing in the span is
        kept has an empty lane, with its ``known_since``.

        :param since: the beginning of the span; aware
        :param until: its end, which is no longer part of it; aware
        :param patterns: names of tasks, in which ``*`` and ``?`` stand for characters; none: all
            tasks
        :param by: ``"task"`` or ``"replica"``
        :param parts: into how many parts of the same length the span is divided, at most 10,000.
            Entries of one outcome that are shorter than a part, and begin in the same part, are
            one.
        :param limit: how many lanes, at most. There may be fewer if they have many entries.
        :param offset: how many of the first lanes are left out
        :raises TaskLockOptionError: a time has no zone, ``since`` is not before ``until``, there is
            no such ``by``, or a number is out of range
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        _check_zone("lanes", since=since, until=until)
        _check_patterns("lanes", patterns)
        _check_word("lanes", "by", by, ("task", "replica"))
        _check_numbers("lanes", parts=parts, limit=limit, offset=offset)
        if not 1 <= parts <= 10_000:
            raise TaskLockOptionError(f"lanes: parts must be 1 to 10,000, not {parts}")
        if since >= until:
            raise TaskLockOptionError(
                f"lanes: since ({since}) must be before until ({until}); swap them, or give a "
                "longer span"
            )
        span: dict[str, Any] = {"since": since, "until": until, "by": by, "parts": parts}
        like = [like_of(pattern) for pattern in patterns] or None
        return self._operate(
            lambda operations, cursor: operations.lanes(
                cursor, like, **span, limit=limit, offset=offset
            )
        )

    def usual_durations(self, *patterns: str) -> dict[str, float]:
        """Return how long tasks usually run, by their names: a median in seconds.

        The median is that of the runs in the history that ended well. A task without such runs is
        left out.

        :param patterns: names, in which ``*`` and ``?`` stand for characters; none: all tasks
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        return self._operate(
            lambda operations, cursor: operations.usual_durations(cursor, patterns)
        )

    def durations(self, name: str) -> Durations:
        """Return how long a task's runs took in the last day, and in the week before.

        These are the runs in the history that ended well. How far back the history reaches depends
        on the option ``history`` and on how often the task runs.

        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        return self._operate(lambda operations, cursor: operations.durations(cursor, name))

    def why(self, name: str, at: datetime | None = None) -> Story:
        """Return what is known of a task around a moment, such as why it did not run.

        The story is about the last run time until that moment: who ran it, when, and how it ended,
        or why no replica ran it. The story also has what operators did around that run time.

        :param at: the moment, with a zone; ``None``: now
        :raises TaskLockOptionError: ``at`` has no zone, or is in the future
        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        _check_zone("why", at=at)
        return story_of(*self._operate(lambda operations, cursor: operations.why(cursor, name, at)))

    def replicas(self) -> list[ReplicaStatus]:
        """Return the replicas, in the order of their starts.

        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        return self._operate(lambda operations, cursor: operations.replicas(cursor))

    def jobs(
        self,
        *patterns: str,
        overdue: bool = False,
        order: str = "due",
        limit: int | None = None,
        offset: int = 0,
    ) -> list[JobStatus]:
        """Return the jobs of the job store by their next run times; jobs without one come last.

        Jobs are returned as they are stored. No function is imported, no signature is checked, and
        nothing is unpickled.

        :param patterns: ids, in which ``*`` and ``?`` stand for characters; none: all jobs
        :param overdue: whether to return only the jobs that no replica has claimed in time
        :param order: ``"due"``: by their next run times; or ``"name"``: by their ids
        :param limit: how many, at most; ``None``: all
        :param offset: how many of the first jobs are left out, for the next page
        :raises TaskLockOptionError: there is no such order, or ``limit`` or ``offset`` is no whole
            number of 0 or more
        :raises TaskLockSchemaError: the jobs' table is missing; the message names the remedy
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        _check_numbers("jobs", limit=limit, offset=offset)
        _check_word("jobs", "order", order, JOB_ORDERS)
        like = [like_of(pattern) for pattern in patterns] or None
        return self._operate(
            lambda operations, cursor: operations.jobs(
                cursor, like, limit, overdue=overdue, order=order, offset=offset
            )
        )

    def job_arguments(self, job_id: str) -> dict[str, Any]:
        """Return the arguments with which a job of the job store is called, by their names.

        The values are returned as they are stored, as JSON-like data: a value of a type that JSON
        lacks is a dict whose key ``$`` has the name of the type. Nothing is unpickled, and the
        row's signature is not checked. The lock's options, ``task_lock``, are left out.

        :return: positional arguments as ``"args[0]"`` and so on, and then keyword arguments, sorted
        :raises TaskLockNotFoundError: there is no such job
        :raises TaskLockStateError: the arguments are pickled, or cannot be read
        :raises TaskLockSchemaError: the jobs' table is missing; the message names the remedy
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        if "\0" in job_id:  # PostgreSQL's texts have no NUL
            raise TaskLockNotFoundError([job_id], "job")
        return self._operate(lambda operations, cursor: operations.job_arguments(cursor, job_id))

    def pause(
        self,
        *patterns: str,
        duration: float | timedelta | None = None,
        by: str | None = None,
        reason: str | None = None,
    ) -> list[PauseChange]:
        """Pause tasks on all replicas. When the call returns, the tasks are paused.

        No claim of a paused task is granted, except for a manual run. A run that has begun is not
        stopped. Run times that fall into the pause are not run after the pause. Tasks whose rows
        are added after this call are not paused, even if their names match.

        Pauses do not replace each other: a task is paused until the last of its pauses has ended or
        was taken out. Another pause by the same operator for the same reason makes the first one
        longer, never shorter.

        :param patterns: names, in which ``*`` and ``?`` stand for characters if no task has
            exactly that name
        :param duration: seconds or ``timedelta``; ``None``: until :meth:`resume`
        :param by: the operator's name, shown to others; by default this process's user and host
        :param reason: the reason, shown to others
        :return: what has become of each task's pauses, in the order of the names
        :raises TaskLockOptionError: ``by`` or ``reason`` has more than 4,000 characters, or a
            pattern is no text
        :raises TaskLockNotFoundError: a pattern matches no task; in that case no task is paused
        :raises TaskLockStateError: a task has 20 pauses already; in that case no task is paused
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        seconds = None
        if duration is not None:
            seconds = parse_positive_seconds(duration, "duration", "pause()")
        check_lengths("pause()", by=by, reason=reason)
        _check_patterns("pause()", patterns)
        action_id, name = uuid4(), by or operator_here()
        return self._act(
            "the pause was made",
            lambda cursor: self._operations.pause(
                cursor, patterns, seconds, name, reason or None, action_id
            ),
        )

    def resume(
        self, *patterns: str, by: str | None = None, force: bool = False
    ) -> list[PauseChange]:
        """Take the operator's own pauses of tasks out. The pauses of others stay.

        A task is resumed when no pause is left, of it alone or of all tasks.

        :param patterns: names, in which ``*`` and ``?`` stand for characters if no task has
            exactly that name
        :param by: the operator's name, as :meth:`pause` was given it; by default this process's
            user and host
        :param force: whether the pauses of all others are taken out, too
        :return: what has become of each task's pauses, in the order of the names
        :raises TaskLockOptionError: ``by`` has more than 4,000 characters, or a pattern is no text
        :raises TaskLockNotFoundError: a pattern matches no task; in that case no task is resumed
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        check_lengths("resume()", by=by)
        _check_patterns("resume()", patterns)
        action_id, name = uuid4(), by or operator_here()
        return self._act(
            "the pauses were ended",
            lambda cursor: self._operations.resume(cursor, patterns, name, action_id, force=force),
        )

    def pause_all(
        self,
        *,
        duration: float | timedelta | None,
        namespace: str = "",
        by: str | None = None,
        reason: str | None = None,
    ) -> Pause:
        """Pause all tasks on all replicas. When the call returns, they are paused.

        Tasks that appear later are paused, too, and no stored job that is due is run. The pause
        does not apply to ``hold``, to manual runs, and to jobs without a lock, which are those with
        ``task_lock: False`` and a replica's own one-off jobs without an id. While the database is
        unavailable, the pause does not apply to replicas with ``on_database_error="run"``.

        The call locks the table twice, and so waits for the claims that are under way. It waits for
        half a second at most for each lock, and tries 10 times. While it waits, all other claims,
        renewals and releases wait, too.

        :param duration: seconds or ``timedelta``; ``None``: until :meth:`resume_all`
        :param namespace: what the names of the tasks begin with; ends with an ASCII character, such
            as a colon; by default all tasks are paused
        :param by: the operator's name, shown to others; by default this process's user and host
        :param reason: the reason, shown to others
        :return: the pause. If the operator has paused the same tasks for the same reason before,
            that pause becomes longer.
        :raises TaskLockOptionError: ``by`` or ``reason`` has more than 4,000 characters, or the
            namespace is invalid
        :raises TaskLockStateError: there are 20 pauses of all tasks already
        :raises TaskLockError: the database is unavailable, rejects the statement, or other sessions
            keep the table locked
        """
        where = "pause_all()"
        seconds = None
        if duration is not None:
            seconds = parse_positive_seconds(duration, "duration", where)
        check_lengths(where, by=by, reason=reason)
        if namespace:
            check_name(namespace, where)
            if namespace[-1] >= "\x7f":
                raise TaskLockOptionError(
                    f"{where}: namespace must end with an ASCII character, such as a colon, not "
                    f"{namespace!r}"
                )
        action_id, name = uuid4(), by or operator_here()
        limit = min(LONGEST_TABLE_WAIT, self._user.settings.claim_timeout / 5)
        is_written = False
        for attempt in range(TABLE_ATTEMPTS):
            if attempt:
                _wait_for_table(attempt)
            made = self._database.act(
                lambda cursor, in_doubt: self._operations.pause_all(
                    cursor,
                    namespace,
                    seconds,
                    name,
                    reason or None,
                    action_id,
                    limit,
                    is_in_doubt=in_doubt,
                ),
                "the pause was made",
            )
            if isinstance(made, Pause):
                return made
            is_written = is_written or made
        what = "not all tasks are paused"
        if is_written:
            what = "all tasks are paused, but claims that were under way may still be granted"
        raise TaskLockError(
            f"{what}: other sessions keep the task lock table locked; "
            "`apscheduler-tasklock doctor` names them. End them, and try again"
        )

    def resume_all(
        self, *, namespace: str = "", by: str | None = None, force: bool = False
    ) -> PauseChange:
        """Take the operator's own pauses of all tasks out. The pauses of single tasks stay.

        :param namespace: the namespace that :meth:`pause_all` was given
        :param by: the operator's name, as :meth:`pause_all` was given it; by default this process's
            user and host
        :param force: whether the pauses of all others are taken out, too
        :return: which of these pauses have ended, and which pauses of all tasks are left that apply
            to some tasks of that namespace
        :raises TaskLockOptionError: ``by`` has more than 4,000 characters, or the namespace is
            invalid
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        check_lengths("resume_all()", by=by)
        if namespace:
            check_name(namespace, "resume_all()")
        action_id, name = uuid4(), by or operator_here()
        change = self._act(
            "the pauses were ended",
            lambda cursor: self._operations.resume_all(
                cursor, namespace, name, action_id, force=force
            ),
        )
        left = tuple(
            each
            for each in change.left
            if namespace.startswith(each.namespace or "")
            or (each.namespace or "").startswith(namespace)
        )
        return replace(change, left=left, is_paused=bool(left))

    def pauses_of_all(self) -> list[Pause]:
        """Return the pauses of all tasks that have not ended; see :meth:`pause_all`.

        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        return self._operate(lambda operations, cursor: operations.pauses_of_all(cursor))

    def request_run(
        self,
        name: str,
        *,
        by: str | None = None,
        expires: float | timedelta = timedelta(hours=1),
    ) -> RunRequest:
        """Ask for a manual run: one run of a task, now, on one of the replicas that have it.

        Another call before the manual run has begun does not ask for a second manual run. A manual
        run begins also while the task is paused. If the task is running, the manual run begins
        after that run. A manual run does not change the schedule.

        :param by: the operator's name, shown to others; by default this process's user and host
        :param expires: seconds or ``timedelta`` after which the manual run is not begun any more
        :raises TaskLockOptionError: ``by`` has more than 4,000 characters
        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: no live replica has the task
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        seconds = parse_positive_seconds(expires, "expires", "request_run()")
        check_lengths("request_run()", by=by)
        action_id, operator = uuid4(), by or operator_here()
        return self._act(
            "a run was asked for",
            lambda cursor: self._operations.request_run(
                cursor, name, operator, seconds, action_id=action_id
            ),
        )

    def free(
        self,
        name: str,
        token: int | str,
        *,
        force: bool = False,
        run_again: bool = False,
        by: str | None = None,
    ) -> Freed:
        """Finish a run in place of its holder, which is dead or hangs.

        A holder that is alive finds at its next renewal that its lock is lost. The next renewal may
        come only after a third of the lease, and until it comes the holder's run may overlap with
        the next run.

        The run's window stays, unless ``run_again`` is set. If the next run time has passed
        meanwhile, it is skipped, and the task is due at the one after it.

        :param token: the run's fencing token, as a number or a string. With another token nothing
            is done, so that no newer run is finished.
        :param force: whether to finish the run even if its lease has not ended, although its holder
            may be alive
        :param run_again: whether to open the run's window again, so that its run time can be run
            again. A job of the job store becomes due again at once, for that run time.
        :param by: the operator's name, shown to others; by default this process's user and host
        :return: the run, and what the task's row has been left with
        :raises TaskLockOptionError: the token is no whole number, or ``by`` has more than 4,000
            characters
        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: the task's last run has another token, is finished, or may be
            alive and ``force`` is not set; or ``run_again`` is set, and the run is a manual run
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        parsed = parse_token(token, f"free({name!r:.200})")
        check_lengths("free()", by=by)
        action_id, operator = uuid4(), by or operator_here()
        was_due_at = due_at = None
        for task in self.tasks(name):
            if task.name == name and not run_again:
                now = datetime.now(timezone.utc)
                was_due_at, due_at = task.due_at, next(iter(next_run_times(task, now)), None)
        return self._act(
            "the task was freed",
            lambda cursor: self._operations.free(
                cursor,
                name,
                parsed,
                operator,
                action_id,
                force=force,
                run_again=run_again,
                was_due_at=was_due_at,
                due_at=due_at,
            ),
        )

    def ack(
        self,
        name: str,
        token: int | str,
        *,
        by: str | None = None,
        until: datetime | None = None,
    ) -> bool:
        """Acknowledge a failure, a cut or misses, so that they alarm no more.

        A later one alarms again, unless ``until`` is given. What was acknowledged already is not
        changed. A task that is overdue, dead or runs for too long alarms all the same.

        :param token: the token of the last run, from ``TaskStatus.token``, so that a failure which
            the operator was not shown is not acknowledged
        :param by: the operator's name, shown to others; by default this process's user and host
        :param until: a time until which later failures, cuts and misses alarm no more, either, also
            if there is none so far; aware
        :return: whether it was not acknowledged before
        :raises TaskLockOptionError: ``by`` has more than 4,000 characters, ``token`` is invalid, or
            ``until`` has no zone
        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: the task's last run has another token, or there is nothing to
            acknowledge
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        parsed = parse_token(token, f"ack({name!r:.200})")
        check_lengths("ack()", by=by)
        _check_zone("ack()", until=until)
        action_id, operator = uuid4(), by or operator_here()
        return self._act(
            "the failure was acknowledged",
            lambda cursor: self._operations.acknowledge(
                cursor, name, parsed, operator, until, action_id
            ),
        )

    def forget(self, name: str) -> bool:
        """Delete the row and the history of a task that no longer exists.

        The database's role needs the right ``DELETE``.

        :return: whether the call has deleted the row. Otherwise the answer of its first statement
            was lost, the row is not there any more, and nothing tells who has deleted it.
        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: the task runs, or a live replica has it
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        return self._database.act(
            lambda cursor, in_doubt: self._operations.forget(cursor, name, is_in_doubt=in_doubt),
            "the task was forgotten",
        )

    def forget_replicas(self, pattern: str) -> list[str]:
        """Delete the rows of replicas that will not come back, such as those in a copied database.

        No replica is then expected because of them; a replica that comes back reports itself again.
        Replicas that are alive stay. The database's role needs the right ``DELETE``.

        :param pattern: a replica's id, in which ``*`` and ``?`` stand for characters
        :return: the ids of the forgotten replicas. There are none if the answer of the first
            statement was lost, no replica matches any more, and nothing tells who has deleted them.
        :raises TaskLockNotFoundError: no replica matches
        :raises TaskLockStateError: each one that matches is alive
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        _check_patterns("forget_replicas", [pattern])
        return self._database.act(
            lambda cursor, in_doubt: self._operations.forget_replicas(
                cursor, pattern, is_in_doubt=in_doubt
            ),
            "the replicas were forgotten",
        )

    def pause_job(self, job_id: str, *, by: str | None = None) -> JobMoved:
        """Pause a job of the job store, as APScheduler's ``pause_job`` does, on all replicas.

        When the call returns, no run time of the job is claimed until somebody resumes the job. A
        run that has begun is not stopped. A paused job is not changed.

        :param by: the operator's name, shown to others; by default this process's user and host
        :raises TaskLockOptionError: ``by`` has more than 4,000 characters
        :raises TaskLockNotFoundError: there is no such job
        :raises TaskLockStateError: the job has ended, and is kept until its last run is over
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        return self._job_changes(by).pause(job_id)

    def resume_job(self, job_id: str, *, by: str | None = None) -> JobMoved:
        """Resume a job of the job store. A job that is not paused is not changed.

        Its next run time is the trigger's first run time from now on, by the database's clock. A
        one-off job whose date has passed runs at once. The job's function is not imported, and the
        row's signature is not checked. This call needs APScheduler.

        :param by: the operator's name, shown to others; by default this process's user and host
        :return: the job as it has been left
        :raises TaskLockOptionError: ``by`` has more than 4,000 characters
        :raises TaskLockNotFoundError: there is no such job
        :raises TaskLockStateError: the job has ended; or its trigger is pickled, cannot be read, or
            has no further run time, so that only :meth:`move_job` gives the job a run time
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        # Imported here, because the other operations work without APScheduler.
        from apscheduler_tasklock.jobstore.next_run_time import resumed_run_time

        return self._job_changes(by).resume(job_id, resumed_run_time)

    def run_job(
        self,
        job_id: str,
        *,
        by: str | None = None,
        expires: float | timedelta = timedelta(hours=1),
    ) -> RunRequest | None:
        """Let one replica run a job of the job store once, now. The schedule does not change.

        A recurring job's task gets a manual run, as by :meth:`request_run`, also while the job is
        paused. A one-off job is due now in place of its date, also if it was paused.

        :param by: as in :meth:`request_run`
        :param expires: as in :meth:`request_run`
        :return: the request for the manual run; ``None``: the job is a one-off job
        :raises TaskLockOptionError: ``by`` has more than 4,000 characters
        :raises TaskLockNotFoundError: there is no such job
        :raises TaskLockStateError: the job has ended, its row cannot be read, or no live replica
            has it or can import its function. The message says which; see
            ``JobStatus.why_not_run``
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        found = () if "\0" in job_id else self.jobs(job_id)  # PostgreSQL's texts have no NUL
        job = next((job for job in found if job.id == job_id), None)
        if job is None:
            raise TaskLockNotFoundError([job_id], "job")
        if job.why_not_run is not None:
            raise _not_run(job)
        if job.is_one_off or job.state in (JobState.RETRYING, JobState.ENDED):
            self._job_changes(by).make_due(job_id)
            return None
        try:
            return self.request_run(job.task or "", by=by, expires=expires)
        except TaskLockNotFoundError:  # the task's row was deleted meanwhile
            raise _not_run(replace(job, task=None)) from None

    def move_job(self, job_id: str, to: datetime, *, by: str | None = None) -> JobMoved:
        """Set the next run time of a job of the job store. A paused job is resumed.

        As after APScheduler's ``modify_job(job_id, next_run_time=to)``, the following run times
        come from the trigger, and those of an interval count from ``to``.

        :param to: the time, with a zone. If it has passed, the job is due at once.
        :param by: the operator's name, shown to others; by default this process's user and host
        :raises TaskLockOptionError: ``to`` has no zone, or ``by`` has more than 4,000 characters
        :raises TaskLockNotFoundError: there is no such job
        :raises TaskLockStateError: the job has ended, and is kept until its last run is over
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        _check_zone("move_job", to=to)
        return self._job_changes(by).move(job_id, to)

    def remove_job(self, job_id: str, *, by: str | None = None) -> bool:
        """Remove a job of the job store. No run time of the job is claimed after this call.

        :param by: the operator's name, shown to others; by default this process's user and host
        :return: whether the call has removed the job. Otherwise the answer of its first statement
            was lost, the job is not there any more, and nothing tells who has removed it.
        :raises TaskLockOptionError: ``by`` has more than 4,000 characters
        :raises TaskLockNotFoundError: there is no such job
        :raises TaskLockStateError: the job has ended, and is kept until its last run is over
        :raises TaskLockError: the database is unavailable, or rejects the statement
        """
        return self._job_changes(by).remove(job_id)

    def _job_changes(self, by: str | None) -> JobChanges:
        check_lengths("a change of a job", by=by)
        return JobChanges(self._database, by or operator_here())

    @property
    def _database(self) -> Database:
        """The database, or in a test that of a stand-in."""
        return user_or_stand_in(self._user).database

    def _operate(self, operation: Callable[[Operations, Any], Result]) -> Result:
        return self._database.ask(
            lambda cursor: operation(self._operations, cursor), goes_first=True
        )

    def _act(self, whether: str, action: Callable[[Any], Result]) -> Result:
        """Carry out an action, which has an id of its own, so that it can be sent again.

        :param whether: what may have been done, in words
        """
        # Its own entries tell whether it was done before.
        return self._database.act(lambda cursor, in_doubt: action(cursor), whether)

    def close(self) -> None:
        """Stop claiming, send the pending releases, and close the connection.

        While the database is unavailable, the releases are tried for 3 seconds. If an event loop
        runs in the calling thread, another thread sends the releases, and the process waits for
        that thread before it ends. A lock that is still held after this call can be released, on a
        new connection that is closed after the release.
        """
        self._user.close()


class Hold:
    """A hold: a context manager, sync or async, that holds a task's lock once.

    As a decorator it holds the lock once for each call. ``TaskLocks.hold`` makes it.

    :param user: returns the user, which a forked child replaces
    :param request: returns a new request for each claim
    :param wait: limits how long it is claimed again while the task runs elsewhere, in seconds
    """

    def __init__(
        self,
        user: Callable[[], ReplicaUser],
        name: str,
        request: Callable[[], ClaimRequest],
        wait: float = 0.0,
    ) -> None:
        self._get_user = user
        self._name = name
        self._request = request
        self._wait = wait
        self._stands_in: ReplicaUser | None = None
        self._entered = False
        self._held: HeldLock | None = None
        self._context = ExitStack()

    def __enter__(self) -> HeldLock:
        with self._entering():
            return self._make_current(self._claim())

    def __exit__(
        self,
        _type: object = None,
        exception: BaseException | None = None,
        _traceback: object = None,
    ) -> None:
        held = self._leave()
        self._release(held, self._outcome_after(held, exception))

    async def __aenter__(self) -> HeldLock:
        with self._entering():
            held = await self._claim_async()
            held.runs_on(asyncio.get_running_loop())
            return self._make_current(held)

    async def __aexit__(
        self,
        _type: object = None,
        exception: BaseException | None = None,
        _traceback: object = None,
    ) -> None:
        held = self._leave()
        if held.inherited:
            return
        is_unknown = held.has_lost_callback
        release = self._user.locks.begin_release(held, self._outcome_after(held, exception))
        if isinstance(exception, GeneratorExit):
            return  # a coroutine that is being closed cannot wait
        try:
            # The release is sent also if this coroutine is cancelled.
            released = await release.result()
        except TaskLockError as error:
            self._log_failure(held, error)
        else:
            self._log_lost(held, released, is_unknown=is_unknown)

    def __call__(self, function: Function) -> Function:
        """Hold the lock around each call of a function or coroutine function.

        A call must not return an object whose work runs after the call, and so without the lock: a
        coroutine, another awaitable, a generator, ``map``, ``filter``, ``zip``, a context manager
        of ``contextlib``'s decorators, or a future. A call that does so raises a
        :class:`TaskLockOptionError`, and the returned object is cancelled or closed.

        :raises TaskLockOptionError: the function is a class, or each of its calls returns such an
            object
        """
        name = getattr(function, "__qualname__", repr(function))
        if isclass(function) or why_no_call_runs(function) is not None:
            raise TaskLockOptionError(
                f"hold({self._name!r}) cannot decorate {name}, whose body runs after the call; "
                "hold the lock inside it"
            )

        def checked(result: Any) -> Any:
            # By type alone, because a proxy may do anything when it is asked for its class.
            if issubclass(type(result), concurrent.futures.Future):
                result.cancel()
                raise TaskLockOptionError(
                    f"{where} has returned a future, which runs after the call; return its result"
                )
            return check_returned(result, where)

        where = f"hold({self._name!r}): {name}"
        if iscoroutinefunction(function) or iscoroutinefunction(_call_of(function)):

            @functools.wraps(function)
            async def held_coroutine(*args: Any, **kwargs: Any) -> Any:
                async with self._new():
                    return checked(await function(*args, **kwargs))

            return held_coroutine  # type: ignore[return-value]  # it has the same signature

        @functools.wraps(function)
        def held(*args: Any, **kwargs: Any) -> Any:
            with self._new():
                return checked(function(*args, **kwargs))

        return held  # type: ignore[return-value]  # it has the same signature

    def _new(self) -> Hold:
        return Hold(self._get_user, self._name, self._request, self._wait)

    def _entering(self) -> ExitStack:
        """Return a context in which the hold is entered.

        If an exception leaves the context, the hold is not entered, and can be entered again.
        """
        if self._entered:
            raise TaskLockError(f"this hold of task {self._name!r} is entered already")
        self._entered = True
        own = self._get_user()
        # A test may have set a stand-in for the database. Keep the stand-in's user until the
        # release, even if the test removes the stand-in before, because only the stand-in can
        # release a lock that it has granted.
        now = user_or_stand_in(own)
        self._stands_in = None if now is own else now
        entering = ExitStack()
        entering.push(self._not_entered)
        return entering

    def _not_entered(self, _type: object, exception: object, _traceback: object) -> None:
        self._entered = exception is None

    @property
    def _user(self) -> ReplicaUser:
        return self._stands_in or self._get_user()

    def _claim(self) -> HeldLock:
        """Claim the lock, and return it. Claim again as :meth:`_pause_after` says."""
        user, since = self._user, time.monotonic()
        claimed = user.locks.claim(self._request())
        while (pause := self._pause_after(claimed, since)) > 0 and not user.wait(pause):
            claimed = user.locks.claim(self._request())
        return self._granted(claimed)

    async def _claim_async(self) -> HeldLock:
        """Do the same as :meth:`_claim` in a coroutine."""
        user, since = self._user, time.monotonic()
        claimed = await user.locks.begin_claim(self._request()).result()
        while (pause := self._pause_after(claimed, since)) > 0:
            ask_at = time.monotonic() + pause
            while not user.closed and (left := ask_at - time.monotonic()) > 0:
                await asyncio.sleep(min(left, PAUSE))
            if user.closed:
                break
            claimed = await user.locks.begin_claim(self._request()).result()
        return self._granted(claimed)

    def _pause_after(self, claimed: HeldLock | Refusal | None, since: float) -> float:
        """Return the seconds after which to claim again; 0: not again.

        The hold is claimed again while a run whose lease has ended is in its way, because that run
        is run again first, or because its holder may still renew after a start or an outage; and if
        another run began after this call and is over with its lock, while this claim was on its
        way; that for ``claim_timeout``, because a row that somebody has edited may look so for
        ever. It is also claimed again while the task runs and ``wait`` has not passed.

        :param since: when the hold was first claimed, on the monotonic clock
        """
        if not isinstance(claimed, Refusal):
            return 0
        settings, took = self._user.settings, time.monotonic() - since
        looks_over = claimed.reason == "window" and claimed.locked_for <= 0
        if claimed.waits or (looks_over and took < settings.claim_timeout):
            return PAUSE
        left = self._wait - took if claimed.reason == "running" else 0
        longest = jittered(settings.timings.hold_interval)
        return max(0, min(left, claimed.locked_for, longest))

    def _granted(self, claimed: HeldLock | Refusal | None) -> HeldLock:
        assert claimed is not None
        if not isinstance(claimed, HeldLock):
            raise TaskLockRefusedError(
                self._name, claimed.holder, claimed.locked_until, claimed.reason
            )
        return claimed

    def _make_current(self, held: HeldLock) -> HeldLock:
        self._held = held
        held.on_lost(partial(logger.warning, LOST, held.name, held.token))
        self._context.enter_context(holding(held))
        return held

    def _leave(self) -> HeldLock:
        held, self._held = self._held, None
        assert held is not None
        self._entered = False
        self._context.close()
        return held

    def _outcome_after(self, held: HeldLock, exception: BaseException | None) -> RunOutcome:
        settings = self._user.settings
        return RunOutcome.of(
            exception,
            redact=settings.redact,
            overran=held.seconds_left == 0,
            tracebacks=settings.tracebacks,
        )

    def _release(self, held: HeldLock, end: RunOutcome) -> None:
        if held.inherited:
            return
        is_unknown = held.has_lost_callback
        try:
            released = self._user.locks.release(held, end)
        except TaskLockError as error:
            self._log_failure(held, error)
        else:
            self._log_lost(held, released, is_unknown=is_unknown)

    @staticmethod
    def _log_failure(held: HeldLock, error: TaskLockError) -> None:
        if isinstance(error, TaskLockDatabaseError):
            return  # the outage is logged already, and the release is pending
        logger.error(
            "Task %r: its lock could not be released; the release is tried again until the lock "
            "ends by itself: %s",
            held.name,
            error,
        )

    @staticmethod
    def _log_lost(held: HeldLock, released: Released | None, *, is_unknown: bool) -> None:
        if released is None and is_unknown:
            logger.warning(LOST, held.name, held.token)


def _not_run(job: JobStatus) -> TaskLockStateError:
    """Return the error that says why a stored job is not run now."""
    remedy = on_page = ""
    if not job.is_one_off and job.task is None:
        remedy = "`apscheduler-tasklock jobs move ID --to now` makes it due, and moves its schedule"
        on_page = "move the job to make it due, which moves its schedule"
    elif job.state is not JobState.UNREADABLE:
        remedy = "see `apscheduler-tasklock replicas`, and their logs"
        on_page = "the page Replicas has those that are alive; their logs say what is missing"
    why = f"job {job.id!r} cannot be run now: {job.why_not_run}"
    return TaskLockStateError(why, remedy=remedy, on_page=on_page)


def _check_zone(where: str, **moments: datetime | None) -> None:
    """Check that the times of an operator's call have a zone.

    :raises TaskLockOptionError: a time has none
    """
    for name, moment in moments.items():
        if moment is not None and moment.utcoffset() is None:
            raise TaskLockOptionError(
                f"{where}: {name} must be a time with a zone, not {moment!r}; "
                f"{name}.astimezone() gives it this machine's"
            )


def _check_numbers(where: str, **numbers: int | None) -> None:
    """Check how many rows an operator's call asks for.

    :raises TaskLockOptionError: a number is no whole number, or below 0
    """
    for name, number in numbers.items():
        is_whole = isinstance(number, int) and not isinstance(number, bool)
        if number is not None and not (is_whole and number >= 0):
            raise TaskLockOptionError(
                f"{where}: {name} must be a whole number, 0 or more, not {number!r}"
            )


def _check_word(where: str, name: str, given: object, known: Sequence[str]) -> None:
    """Check that an option of an operator's call is one of the known words.

    :raises TaskLockOptionError: it is not
    """
    if given not in known:
        raise TaskLockOptionError(
            f"{where}: there is no {name} {given!r}; give one of {', '.join(known)}"
        )


def _states(where: str, states: Collection[TaskState]) -> list[str] | None:
    """Return the names of states; ``None`` if there are none.

    :raises TaskLockOptionError: there is no such state
    """
    given = [states] if isinstance(states, str) else list(states)
    for state in given:
        _check_word(where, "state", state, [known.value for known in TaskState])
    return [TaskState(state).value for state in given] or None


def _wait_for_table(attempt: int) -> None:
    if attempt == 1:
        logger.warning(_TABLE_LOCKED)
    time.sleep(jittered(TABLE_BREAK))


def _check_patterns(where: str, patterns: Sequence[str]) -> None:
    """Check that the names of tasks are texts, and not for example the length of a pause.

    :raises TaskLockOptionError: a name is no text
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TaskLockOptionError(
                f"{where}: a task's name must be a text, not {pattern!r}; all other options are "
                "given by name, such as duration=60"
            )


def _call_of(function: Callable[..., Any]) -> Any:
    """Return the function that a call of an object runs."""
    return getattr(function, "__call__", None)  # noqa: B004  # needed itself, not only its existence


def find_task(locks: TaskLocks, name: str) -> TaskStatus:
    """Return the task of exactly this name, in which ``*`` and ``?`` are ordinary characters.

    :raises TaskLockNotFoundError: there is no such task
    """
    for task in locks.tasks(name):
        if task.name == name:
            return task
    raise TaskLockNotFoundError([name])


def read_findings(
    locks: TaskLocks, *patterns: str, in_words: Callable[[TaskLockError], str], **options: Any
) -> tuple[Overview, list[Finding]]:
    """Return what ``check`` tells: an overview, and its findings with that of a refused write.

    :param patterns: names of tasks, as for :meth:`TaskLocks.overview`
    :param in_words: returns the words of an error for whoever is told
    :param options: further arguments of :meth:`TaskLocks.overview`
    :raises TaskLockError: the tables are missing, or cannot be read
    """
    overview = locks.overview(*patterns, limit=1, **options)
    if not any(overview.counts.values()):
        locks.check()  # because a policy may hide the rows
    findings = list(overview.findings)
    # At last, because what was read is told all the same.
    try:
        locks.check_writes()
    except TaskLockDatabaseError as error:
        says = f"the database takes no writes: {in_words(error)}"
        findings.append(unread(says))
    return overview, findings
