"""``TaskLocks``: the same lock around any code, outside APScheduler."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import getpass
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timedelta
from functools import partial
from inspect import (
    isasyncgen,
    isasyncgenfunction,
    isawaitable,
    isclass,
    iscoroutine,
    iscoroutinefunction,
    isgenerator,
    isgeneratorfunction,
)
from typing import Any, TypeVar

from sqlalchemy import Engine
from sqlalchemy.engine import URL

from apscheduler_tasklock._lock.client import LockClient, Released, client_now
from apscheduler_tasklock._lock.forking import replace_in_each_child
from apscheduler_tasklock._lock.messages import ClaimRequest, Refusal, RunEnd
from apscheduler_tasklock._lock.operations import Operations, like_of
from apscheduler_tasklock._lock.replica import LockSettings
from apscheduler_tasklock._values import LONGEST_MESSAGE, logger_of
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockOptionError,
    TaskLockRefusedError,
)
from apscheduler_tasklock.lock import HeldLock, holding
from apscheduler_tasklock.options import (
    DEFAULT,
    Default,
    LockOptions,
    check_name,
    parse_count,
    parse_positive_seconds,
    parse_token,
)
from apscheduler_tasklock.schema.table import DEFAULT_TABLE
from apscheduler_tasklock.status import (
    OUTCOMES,
    JobStatus,
    ReplicaStatus,
    Run,
    RunRequest,
    TaskStatus,
)

logger = logger_of(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")

# Seconds for which a claim may be tried, at most. Whoever wants more has mistaken the unit.
LONGEST_CLAIM = 24 * 3600.0

# How many runs of a task the history keeps at most: reading them all is to stay quick.
LONGEST_HISTORY = 10_000

# Seconds after which it is looked again whether a run that seems dead is.
PAUSE = 0.3

LOST = (
    "Task %r: its lock is lost (token %s), and another replica may hold it. Either it could not be "
    "renewed in time, or what held it outlived max_lock; if so, raise that above what it takes"
)


def lock_settings(
    database: str | URL | Engine,
    *,
    replica_id: str | None = None,
    claim_timeout: float = 10.0,
    schema: str | None = None,
    table: str = DEFAULT_TABLE,
    history: int | str = 100,
    redact: Callable[[BaseException], str | None] | None = None,
) -> LockSettings:
    """Return checked settings; for the parameters see :class:`TaskLocks`.

    :raises TaskLockOptionError: one of them is invalid
    """
    is_named = bool(replica_id)
    replica_id = check_name(replica_id or make_replica_id(), "replica_id")
    if not 0 < claim_timeout <= LONGEST_CLAIM:
        raise TaskLockOptionError(
            f"claim_timeout must be above 0 and at most a day, not {claim_timeout!r} seconds"
        )
    if redact is not None and not callable(redact):
        raise TaskLockOptionError(f"redact must be a function of an exception, not {redact!r}")
    kept = parse_count(history, "history", "the run history")
    if kept > LONGEST_HISTORY:
        raise TaskLockOptionError(f"history must be at most {LONGEST_HISTORY}, not {history!r}")
    return LockSettings(
        database,
        replica_id,
        claim_timeout,
        schema,
        table,
        kept,
        redact or str,
        is_named=is_named,
    )


def make_replica_id() -> str:
    """Return an id for this replica: host, process, and a random part.

    Containers share host names and process ids more often than one would think.
    """
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


class TaskLocks:
    """The task locks of one database, as one replica uses them. Safe to share between threads.

    A context manager, sync or async, which closes them when it is left.

    :param database: a URL, or an SQLAlchemy engine with the psycopg driver: a connection is opened
        as the engine opens its own, and its pool is not used
    :param schema: schema of the task lock table; ``None`` leaves it to the ``search_path``
    :param table: name of the task lock table
    :param replica_id: who claims, shown in logs; by default host, process and a random part
    :param claim_timeout: seconds for which a claim is tried while the database is unavailable
    :param history: how many runs of each task the run history keeps, up to 10,000; 0: none
    :param redact: returns what the run history keeps of an exception's message, or ``None``
    :raises TaskLockOptionError: ``database`` is not one that the task lock can use, or another
        parameter is impossible
    """

    def __init__(
        self,
        database: str | URL | Engine,
        *,
        replica_id: str | None = None,
        claim_timeout: float = 10.0,
        schema: str | None = None,
        table: str = DEFAULT_TABLE,
        history: int = 100,
        redact: Callable[[BaseException], str | None] | None = None,
    ) -> None:
        settings = lock_settings(
            database,
            replica_id=replica_id,
            claim_timeout=claim_timeout,
            schema=schema,
            table=table,
            history=history,
            redact=redact,
        )
        self._client = LockClient(settings)
        self._operations = Operations(self._client.table, self._client.rejections)
        replace_in_each_child(self)

    def replace_in_child(self) -> None:
        """Use connections and threads of its own. Called in a forked child."""
        self._client = self._client.for_child()

    @property
    def replica_id(self) -> str:
        """Who claims, shown in logs."""
        return self._client.replica_id

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

    def check(self) -> None:
        """Make sure that the tables are there, new enough, and permitted: but that of stored jobs.

        :raises TaskLockSchemaError: they are not; the message names all that is missing
        :raises TaskLockDatabaseError: the database is unavailable
        """
        client_now(self._client).check()

    def hold(
        self,
        name: str,
        *,
        min_lock: float | timedelta,
        max_lock: float | timedelta,
        lease: float | timedelta | Default | None = DEFAULT,
    ) -> Hold:
        """Return a context manager, sync or async, and decorator that holds a task's lock.

        Entered, it gives the :class:`HeldLock`, which is also ``current_lock()``.

        :param name: the task's name
        :param min_lock: seconds or ``timedelta``, 0 or more, from the claim on, during which the
            task is refused to everybody, also after it was released
        :param max_lock: seconds or ``timedelta``, above 0, after which the lock ends, whether or
            not its holder lives
        :param lease: seconds or ``timedelta``, 1 or more, after which a holder that does not
            renew its claim counts as dead; by default 60 s or a third of ``max_lock``, whichever is
            shorter, and ``max_lock`` itself if that third is below 15 s; ``None``: ``max_lock``
        :raises TaskLockOptionError: one of them is impossible
        :raises TaskLockRefusedError: when entered: the task runs elsewhere, or was just run
        :raises TaskLockError: when entered: the database is unavailable, or rejects that
        """
        where = f"hold({name!r})"
        given = {"min_lock": min_lock, "max_lock": max_lock, "lease": lease}
        options = LockOptions.parse(given, where)
        least, most = options.lock_times(period=0)
        lease_seconds = options.lease_within(most)

        def request() -> ClaimRequest:
            return ClaimRequest(name, least, most, lease=lease_seconds)

        check_name(name, where)
        return Hold(lambda: self._client, name, request)

    def tasks(self, *patterns: str, limit: int | None = None) -> list[TaskStatus]:
        """Return the tasks that have a row, in the order of their names.

        Where the replicas' table cannot be read, one INFO line says so, and no task is ``gone``.

        :param patterns: names, in which ``*`` and ``?`` stand for characters; none: all tasks
        :param limit: how many, at most
        :raises TaskLockError: the database is unavailable, or rejects that
        """
        like = [like_of(pattern) for pattern in patterns] or None
        return self._operate(lambda operations, cursor: operations.tasks(cursor, like, limit))

    def runs(
        self,
        *patterns: str,
        outcome: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
    ) -> list[Run]:
        """Return runs that are over, the newest first.

        :param patterns: names of tasks, in which ``*`` and ``?`` stand for characters
        :param outcome: only those with this outcome: one of :class:`Run`'s
        :param since: only those that began then or later; aware
        :param until: only those that began before then; aware
        :param limit: how many, at most
        :raises TaskLockOptionError: there is no such outcome, or a time has no zone
        :raises TaskLockError: the database is unavailable, or rejects that
        """
        if outcome not in (None, *OUTCOMES):
            raise TaskLockOptionError(
                f"runs: there is no outcome {outcome!r}; give one of {', '.join(OUTCOMES)}"
            )
        for name, moment in (("since", since), ("until", until)):
            if moment is not None and moment.utcoffset() is None:
                raise TaskLockOptionError(
                    f"runs: {name} must be a time with a zone, not {moment!r}; "
                    f"{name}.astimezone() gives it this machine's"
                )
        is_name = len(patterns) == 1 and not set("*?") & set(patterns[0])
        like = [like_of(pattern) for pattern in patterns] or None

        def read(operations: Operations, cursor: Any) -> list[Run]:
            wanted: dict[str, Any] = {
                "outcome": outcome,
                "since": since,
                "until": until,
                "limit": limit,
            }
            if is_name:
                return operations.runs(cursor, patterns[0], **wanted)
            return operations.runs(cursor, like=like, **wanted)

        return self._operate(read)

    def replicas(self) -> list[ReplicaStatus]:
        """Return the replicas, those that started first before the others.

        :raises TaskLockError: the database is unavailable, or rejects that
        """
        return self._operate(lambda operations, cursor: operations.replicas(cursor))

    def jobs(self, *patterns: str, limit: int | None = None) -> list[JobStatus]:
        """Return the jobs of the job store by their next run times; those without one last.

        They are read as they are stored. No function is imported, no signature is checked, and
        nothing is unpickled.

        :param patterns: ids, in which ``*`` and ``?`` stand for characters; none: all jobs
        :param limit: how many, at most
        :raises TaskLockSchemaError: the jobs' table is missing; the message names the remedy
        :raises TaskLockError: the database is unavailable, or rejects that
        """
        like = [like_of(pattern) for pattern in patterns] or None
        return self._operate(lambda operations, cursor: operations.jobs(cursor, like, limit))

    def pause(
        self,
        *patterns: str,
        duration: float | timedelta | None = None,
        by: str | None = None,
        reason: str | None = None,
    ) -> list[str]:
        """Pause tasks on all replicas: once this has returned, not one more claim is granted.

        A run that goes on ends by itself. Run times that fall into the pause are not made up for.
        Tasks that appear later are not paused, whether or not they match.

        :param patterns: names, in which ``*`` and ``?`` stand for characters where no task has
            exactly that name
        :param duration: seconds or ``timedelta``; ``None``: until :meth:`resume`
        :param by: who, shown to others; by default this process's user and host
        :param reason: why, shown to others
        :return: the names of the tasks, in order
        :raises TaskLockOptionError: ``by`` or ``reason`` has more than 4,000 characters
        :raises TaskLockNotFoundError: no task matches one of the patterns; then none is paused
        :raises TaskLockError: the database is unavailable, or rejects that
        """
        seconds = None
        if duration is not None:
            seconds = parse_positive_seconds(duration, "duration", "pause()")
        _check_told("pause()", by=by, reason=reason)
        return self._operate(
            lambda operations, cursor: operations.pause(
                cursor, patterns, seconds, by or _operator(), reason
            )
        )

    def resume(self, *patterns: str) -> list[str]:
        """End the pause of tasks. Those that are not paused stay as they are.

        :param patterns: names, in which ``*`` and ``?`` stand for characters where no task has
            exactly that name
        :return: the names of those that were paused, in order
        :raises TaskLockNotFoundError: no task matches one of the patterns; then none is resumed
        :raises TaskLockError: the database is unavailable, or rejects that
        """
        return self._operate(lambda operations, cursor: operations.resume(cursor, patterns))

    def request_run(
        self,
        name: str,
        *,
        by: str | None = None,
        expires: float | timedelta = timedelta(hours=1),
    ) -> RunRequest:
        """Ask for one run of a task, now, on one of the replicas that have it.

        However often it is asked while the request is open, the task runs once. It runs also while
        it is paused; if it is running, after that run. Its schedule does not change.

        :param by: who, shown to others; by default this process's user and host
        :param expires: seconds or ``timedelta`` after which nobody begins it any more
        :raises TaskLockOptionError: ``by`` has more than 4,000 characters
        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: no replica that is alive has it
        :raises TaskLockError: the database is unavailable, or rejects that
        """
        seconds = parse_positive_seconds(expires, "expires", "request_run()")
        _check_told("request_run()", by=by)
        return self._operate(
            lambda operations, cursor: operations.request_run(
                cursor, name, by or _operator(), seconds
            )
        )

    def free(self, name: str, token: int, *, force: bool = False, run_again: bool = False) -> None:
        """End a claim in the place of its holder, which is dead or hangs.

        A holder that is alive is told at its next renewal that its lock is lost; its run may
        overlap with the next for a third of its lease.

        :param token: of the run that is to be ended, so that no newer one is; also as a string
        :param force: also if its lease has not ended, so that its holder may be alive
        :param run_again: whether its window is opened, so that the run time can be run again. A
            job of the job store is due again at that run time, at once.
        :raises TaskLockOptionError: the token is no whole number
        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: its last run is another one, or has ended; or it may be alive;
            or it is to be run again, and was asked for by hand
        :raises TaskLockError: the database is unavailable, or rejects that
        """
        slots = self._client.settings.history
        parsed = parse_token(token, f"free({name!r:.200})")
        self._operate(
            lambda operations, cursor: operations.free(
                cursor, name, parsed, force=force, run_again=run_again, slots=slots
            )
        )

    def forget(self, name: str) -> None:
        """Delete the row and the history of a task that no longer exists. Needs ``DELETE``.

        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: it runs, or a replica that is alive has it
        :raises TaskLockError: the database is unavailable, or rejects that
        """
        self._operate(lambda operations, cursor: operations.forget(cursor, name))

    def _operate(self, operation: Callable[[Operations, Any], Result]) -> Result:
        client = client_now(self._client)
        return client.ask(lambda cursor: operation(self._operations, cursor))

    def close(self) -> None:
        """Claim nothing more, send pending releases, and close the idle connection.

        While the database is unavailable, these are tried for 3 seconds. On an event loop a thread
        does that, which the process waits for when it ends. What is held can still be released, on
        a connection that is closed after it.
        """
        self._client.close()


class Hold:
    """A task lock to hold once: a context manager, sync or async. As a decorator, once per call.

    Made by ``TaskLocks.hold``.

    :param client: returns the task locks, which a forked child replaces
    :param request: returns what is claimed each time
    """

    def __init__(
        self, client: Callable[[], LockClient], name: str, request: Callable[[], ClaimRequest]
    ) -> None:
        self._get_client = client
        self._name = name
        self._request = request
        self._stands_in: LockClient | None = None
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
        self._release(held, self._end_after(held, exception))

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
        release = self._client.begin_release(held, self._end_after(held, exception))
        if isinstance(exception, GeneratorExit):
            return  # it is closed, as with its event loop, and cannot wait
        try:
            # It goes on when this is cancelled.
            released = await self._client.released_async(held, release)
        except TaskLockError as error:
            self._tell_failure(held, error)
        else:
            self._tell_lost(held, released, is_unknown=is_unknown)

    def __call__(self, function: Function) -> Function:
        """Hold the lock around each call of a function or coroutine function.

        What a call returns must not run later, without the lock: no coroutine, task, future or
        generator. Such a call raises a :class:`TaskLockOptionError`, and a task or future that it
        has begun is cancelled.

        :raises TaskLockOptionError: a call of it only makes something that runs later
        """
        if isclass(function) or isgeneratorfunction(function) or isasyncgenfunction(function):
            raise self._runs_later(function)
        if iscoroutinefunction(function) or iscoroutinefunction(_call_of(function)):

            @functools.wraps(function)
            async def held_coroutine(*args: Any, **kwargs: Any) -> Any:
                async with self._new():
                    return self._result(function, await function(*args, **kwargs))

            return held_coroutine  # type: ignore[return-value]  # it has the same signature

        @functools.wraps(function)
        def held(*args: Any, **kwargs: Any) -> Any:
            with self._new():
                return self._result(function, function(*args, **kwargs))

        return held  # type: ignore[return-value]  # it has the same signature

    def _result(self, function: Callable[..., Any], result: Any) -> Any:
        """Return what a call has returned, if that is not what runs later."""
        if isinstance(result, (asyncio.Future, concurrent.futures.Future)):
            result.cancel()
        elif iscoroutine(result) or isgenerator(result):
            result.close()
        elif not (isawaitable(result) or isasyncgen(result)):
            return result
        raise self._runs_later(function)

    def _runs_later(self, function: Callable[..., Any]) -> TaskLockOptionError:
        name = getattr(function, "__qualname__", repr(function))
        return TaskLockOptionError(
            f"hold({self._name!r}) cannot decorate {name}, whose body runs after the call; hold "
            "the lock inside it"
        )

    def _new(self) -> Hold:
        return Hold(self._get_client, self._name, self._request)

    def _entering(self) -> ExitStack:
        """Return a context in which this is entered; it is not if an exception leaves it."""
        if self._entered:
            raise TaskLockError(f"this hold of task {self._name!r} is entered already")
        self._entered = True
        own = self._get_client()
        # What a stand-in has granted is released there, also after it has stood in.
        now = client_now(own)
        self._stands_in = None if now is own else now
        entering = ExitStack()
        entering.push(self._not_entered)
        return entering

    def _not_entered(self, _type: object, exception: object, _traceback: object) -> None:
        self._entered = exception is None

    @property
    def _client(self) -> LockClient:
        return self._stands_in or self._get_client()

    def _claim(self) -> HeldLock:
        """Return the lock, maybe after a while.

        A run whose lease has ended counts as dead only after a while, in which it may be renewed
        or released: right after an outage, and in a process that has just started.
        """
        client = self._client
        claimed = client.claim(self._request())
        while isinstance(claimed, Refusal) and claimed.waits and not client.wait(PAUSE):
            claimed = client.claim(self._request())
        return self._granted(claimed)

    async def _claim_async(self) -> HeldLock:
        """Do the same in a coroutine."""
        client = self._client
        claimed = await client.begin_claim(self._request()).result()
        while isinstance(claimed, Refusal) and claimed.waits and not client.closed:
            await asyncio.sleep(PAUSE)
            claimed = await client.begin_claim(self._request()).result()
        return self._granted(claimed)

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

    def _end_after(self, held: HeldLock, exception: BaseException | None) -> RunEnd:
        redact = self._client.settings.redact
        return RunEnd.of(exception, redact=redact, overran=held.seconds_left == 0)

    def _release(self, held: HeldLock, end: RunEnd) -> None:
        if held.inherited:
            return
        is_unknown = held.has_lost_callback
        try:
            released = self._client.release(held, end)
        except TaskLockError as error:
            self._tell_failure(held, error)
        else:
            self._tell_lost(held, released, is_unknown=is_unknown)

    @staticmethod
    def _tell_failure(held: HeldLock, error: TaskLockError) -> None:
        if isinstance(error, TaskLockDatabaseError):
            return  # logged as an outage; the release is pending
        logger.error(
            "Task %r: its lock could not be released, and is tried again until it ends by itself: "
            "%s",
            held.name,
            error,
        )

    @staticmethod
    def _tell_lost(held: HeldLock, released: Released | None, *, is_unknown: bool) -> None:
        if released is None and is_unknown:
            logger.warning(LOST, held.name, held.token)


def _check_told(where: str, **told: str | None) -> None:
    """Make sure that what operators are shown of somebody's call is not too long.

    :raises TaskLockOptionError: it is
    """
    for name, text in told.items():
        if text is not None and len(text) > LONGEST_MESSAGE:
            raise TaskLockOptionError(
                f"{where}: {name} has {len(text):,} characters, and at most {LONGEST_MESSAGE:,} "
                "are allowed"
            )


def _operator() -> str:
    """Return who operates, for others to see."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


def _call_of(function: Callable[..., Any]) -> Any:
    """Return what a call of an object runs."""
    return getattr(function, "__call__", None)  # noqa: B004  # what it is, not whether there is one
