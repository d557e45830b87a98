"""The waist: the one module through which tests reach the lock below its public names.

A request goes in, and its answer comes out. Which method of a protocol carries the request, alone
or in a batch, to rows in PostgreSQL or in memory, is known here only, so that the protocol can
change without the tests. `python -m tests.waist` checks that no further test goes around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from math import inf
from typing import Any
from unittest.mock import patch
from uuid import UUID, uuid4

import psycopg

from apscheduler_tasklock._database.connection import raw_cursor
from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock._database.session import NoCursor, Session
from apscheduler_tasklock._database.sqlstates import RowLockedError
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._doctor.remedies import end_of, reset_of, set_by
from apscheduler_tasklock._lock import claim_attempts
from apscheduler_tasklock._lock.claim_attempts import (
    AnyAttempt,
    BeyondLimitError,
    ClaimAttempt,
    ClaimContext,
    Decision,
    RerunAttempt,
    StoredAttempt,
)
from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.database_clock import DatabaseClock
from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock._lock.outcomes import NOT_BEGUN, RunOutcome, WindowAfter
from apscheduler_tasklock._lock.patterns import like_of
from apscheduler_tasklock._lock.protocol import HISTORY, LOCK_TIMEOUT, TaskLockProtocol
from apscheduler_tasklock._lock.protocol_messages import (
    IN_TIME,
    ClaimAnswer,
    ClaimRequest,
    ClosedRun,
    JobMove,
    LockTimes,
    MissedTimes,
    MissNote,
    ReadTimes,
    Refusal,
    Registered,
    Registration,
    ReleaseAnswer,
    ReleaseRequest,
    Renewal,
    RerunRequest,
    RunState,
    ScheduleNote,
)
from apscheduler_tasklock._lock.replica import LockSettings
from apscheduler_tasklock._lock.statements.history import ACTIONS as ACTION_SLOTS
from apscheduler_tasklock._lock.test_doubles import LockProtocol, standing_in
from apscheduler_tasklock._lock.words import printable
from apscheduler_tasklock._words.actions import UNNOTED
from apscheduler_tasklock._words.findings import (
    FINDING_KINDS,
    NO_REPLICA_AFTER,
    SEVERITIES,
    WatchedRows,
    findings_of,
    severity_of,
    with_findings,
)
from apscheduler_tasklock._words.gauges import rows_of, text_of
from apscheduler_tasklock._words.headlines import headline_of, open_runs
from apscheduler_tasklock._words.lanes import entries_in_words, lane_in_words
from apscheduler_tasklock._words.replicas import (
    fate_of,
    of_each_application,
    replica_headline,
    runs_nothing_in_words,
    tasks_of_one,
)
from apscheduler_tasklock.schema.table import DEFAULT_TABLE, task_lock_table
from apscheduler_tasklock.status import Pause, RunningRun
from apscheduler_tasklock.testing import rule
from apscheduler_tasklock.testing.in_memory import MemoryProtocol, MemoryTaskLocks

__all__ = [
    "ACTION_SLOTS",
    "FINDING_KINDS",
    "HISTORY",
    "IN_TIME",
    "LOCK_TIMEOUT",
    "NOT_BEGUN",
    "NO_REPLICA_AFTER",
    "SEVERITIES",
    "UNNOTED",
    "AnyAttempt",
    "Ask",
    "BeyondLimitError",
    "ClaimAnswer",
    "ClaimRequest",
    "Decision",
    "JobMove",
    "LockClient",
    "LockProtocol",
    "LockSettings",
    "LockTimes",
    "Memory",
    "MemoryProtocol",
    "MemoryTaskLocks",
    "MissNote",
    "MissedTimes",
    "OnTheWay",
    "Pauser",
    "ReadTimes",
    "Refusal",
    "Registered",
    "Registration",
    "ReleaseAnswer",
    "ReleaseRequest",
    "Renewal",
    "Replica",
    "RerunRequest",
    "RowLockedError",
    "Rows",
    "RunOutcome",
    "RunState",
    "ScheduleNote",
    "Sent",
    "Statements",
    "Timings",
    "WatchedRows",
    "WindowAfter",
    "attempt",
    "believing",
    "end_of",
    "entries_in_words",
    "fate_of",
    "findings_of",
    "headline_of",
    "hear_of_probes",
    "intercept_claims",
    "is_takeover",
    "lane_in_words",
    "manual_run_of",
    "method_of",
    "of_each_application",
    "open_runs",
    "printable",
    "protocol_of",
    "replica_headline",
    "reset_of",
    "retry_of",
    "rows_of",
    "runs_nothing_in_words",
    "send_together",
    "set_by",
    "severity_of",
    "standing_in",
    "statements_of",
    "takeover_of",
    "tasks_of_one",
    "text_of",
    "with_findings",
    "with_late_takeovers",
]


def takeover_of(
    task: str,
    dead_claim_id: UUID,
    dead_holder: str = "dead",
    lease: float | None = None,
    failover: bool = True,
    claim_id: UUID | None = None,
) -> RerunRequest:
    """Return the request to run a dead run again."""
    return RerunRequest(
        "takeover",
        task,
        dead_claim_id,
        600.0,
        lease,
        failover,
        claim_id=claim_id or uuid4(),
        dead_holder=dead_holder,
    )


# The requests to run a failed run again, and to begin what an operator has asked for.
retry_of = partial(RerunRequest, "retry")
manual_run_of = partial(RerunRequest, "manual")


@dataclass
class Memory:
    """Rows in memory, with a clock that stands still until it is set."""

    time: datetime = datetime(2026, 1, 1, tzinfo=timezone.utc)
    locks: MemoryTaskLocks = field(init=False)

    def __post_init__(self) -> None:
        self.locks = MemoryTaskLocks(lambda: self.time)


# Where the rows are.
Rows = psycopg.Connection[Any] | Memory


def protocol_of(
    name: str,
    connection: Any = None,
    *,
    lock_timeout: float = LOCK_TIMEOUT,
    history: int = HISTORY,
    table: str = DEFAULT_TABLE,
    schema: str | None = None,
    release: str | None = None,
) -> LockProtocol:
    """Return what sends a replica's statements, or decides by the rule on rows in memory."""
    if isinstance(connection, Memory):
        protocol: LockProtocol = connection.locks.protocol(name)
        return protocol
    return TaskLockProtocol(
        task_lock_table(table, schema), name, lock_timeout, history, release=release
    )


class Statements:
    """The requests of one replica, each with its answer.

    :param protocol: as from :func:`protocol_of`
    :param cursor: returns the cursor that the statements are sent on
    """

    def __init__(self, protocol: Any, cursor: Callable[[], Any] = NoCursor) -> None:
        self.protocol = protocol
        self._cursor = cursor

    @property
    def cursor(self) -> Any:
        return self._cursor()

    def claim(self, request: ClaimRequest, times: ReadTimes = IN_TIME) -> ClaimAnswer:
        answer: ClaimAnswer = self.protocol.claim(self.cursor, request, times)
        return answer

    def claim_many(
        self,
        requests: Sequence[ClaimRequest],
        times: ReadTimes = IN_TIME,
        most: int | None = None,
        *,
        lags: Sequence[float] | None = None,
        first: bool = False,
    ) -> dict[UUID, ClaimAnswer]:
        """Claim tasks together.

        :param lags: as of the times of each request; by default nothing is late
        :param first: whether the tasks have no rows; else those without rows have no answer
        """
        send = self.protocol.first_claim_many if first else self.protocol.claim_many
        lags = [0.0] * len(requests) if lags is None else lags
        answers: dict[UUID, ClaimAnswer] = send(self.cursor, requests, lags, times, most)
        return answers

    def rerun(self, request: RerunRequest, times: ReadTimes = IN_TIME) -> ClaimAnswer | None:
        """Claim the run that a task's row shows, if the row still shows it."""
        return self.rerun_many([request], times).get(request.claim_id)

    def rerun_many(
        self, requests: Sequence[RerunRequest], times: ReadTimes = IN_TIME
    ) -> dict[UUID, ClaimAnswer]:
        answers: dict[UUID, ClaimAnswer] = self.protocol.rerun(self.cursor, requests, times)
        return answers

    def move(
        self, requests: Sequence[ClaimRequest], times: ReadTimes = IN_TIME, most: int = 9
    ) -> dict[UUID, ClaimAnswer]:
        """Claim the tasks of stored jobs, and move the jobs on."""
        answers: dict[UUID, ClaimAnswer] = self.protocol.claim_and_move(
            self.cursor, requests, times, most
        )
        return answers

    def release(self, request: ReleaseRequest) -> ReleaseAnswer | None:
        answer: ReleaseAnswer | None = self.protocol.release(self.cursor, request)
        return answer

    def release_many(self, requests: Sequence[ReleaseRequest]) -> dict[UUID, ReleaseAnswer | None]:
        answers: dict[UUID, ReleaseAnswer | None] = self.protocol.release_many(
            self.cursor, requests
        )
        return answers

    def end_lease(self, task: str, claim_id: UUID, holders: Sequence[str]) -> ReleaseAnswer | None:
        answer: ReleaseAnswer | None = self.protocol.end_lease(self.cursor, task, claim_id, holders)
        return answer

    def give_up(self, task: str, claim_id: UUID) -> ClosedRun | None:
        closed: ClosedRun | None = self.protocol.give_up(self.cursor, task, claim_id)
        return closed

    def renew(self, renewals: Sequence[Renewal]) -> dict[UUID, LockTimes]:
        times: dict[UUID, LockTimes] = self.protocol.renew(self.cursor, renewals)
        return times

    def extend(self, task: str, claim_id: UUID, by: float, lease: float | None) -> LockTimes | None:
        times: LockTimes | None = self.protocol.extend(self.cursor, task, claim_id, by, lease)
        return times

    def read(
        self, tasks: Sequence[str], always: Sequence[str] = ()
    ) -> tuple[list[RunState], datetime]:
        states: tuple[list[RunState], datetime] = self.protocol.read(self.cursor, tasks, always)
        return states

    def register(self, tasks: Sequence[Registration]) -> list[Registered]:
        registered: list[Registered] = self.protocol.register(self.cursor, tasks)
        return registered

    def alive(
        self, tasks: Sequence[str], started_at: datetime | None = None, **more: Any
    ) -> tuple[datetime, int]:
        """Send a sign of life."""
        host, version = "host", "1.0"
        seen: tuple[datetime, int] = self.protocol.report_replica(
            self.cursor, host, version, tasks, started_at, **more
        )
        return seen

    def stops(self, running: Sequence[RunningRun] = ()) -> None:
        self.protocol.stop_replica(self.cursor, running)

    def retire(self, successor_of: Sequence[str], dropped: Sequence[str]) -> None:
        self.protocol.retire(self.cursor, successor_of, dropped)

    def remove_replicas(self, age: float) -> None:
        self.protocol.remove_replicas(self.cursor, age)

    def lead(self, row: str, leader_id: str, lease: float) -> bool:
        return bool(self.protocol.lead(self.cursor, row, leader_id, lease))

    def resign(self, row: str, leader_id: str) -> None:
        self.protocol.resign(self.cursor, row, leader_id)

    def note(
        self, notes: Sequence[MissNote] | Sequence[ScheduleNote], sent_at: datetime | None = None
    ) -> set[str]:
        """Write into the history what was missed, or which schedules have changed.

        :return: the tasks whose notes are to be sent again
        """
        again: set[str]
        if sent_at is None:
            again = self.protocol.note_reschedulings(self.cursor, notes)
        else:
            again = self.protocol.note_misses(self.cursor, notes, sent_at)
        return again

    def shorten_history(self, tasks: Sequence[str]) -> None:
        self.protocol.shorten_history(self.cursor, tasks)

    def prune(self, age: float) -> int:
        return int(self.protocol.prune(self.cursor, age))


def statements_of(name: str, connection: Any, **more: Any) -> Statements:
    """Return what a replica sends on a connection, or asks of rows in memory."""

    def cursor() -> Any:
        return NoCursor() if isinstance(connection, Memory) else raw_cursor(connection)

    return Statements(protocol_of(name, connection, **more), cursor)


class Replica:
    """A replica as the protocol sees one: an id, and a connection with a clock.

    :ivar statements: what the methods send with, for requests that they do not make
    """

    def __init__(self, name: str, connection: Any, lock_timeout: float = 10.0, **more: Any) -> None:
        self.name = name
        self.connection = connection
        self.statements = statements_of(name, connection, lock_timeout=lock_timeout, **more)

    @property
    def cursor(self) -> Any:
        return self.statements.cursor

    def claim(
        self,
        task: str = "task",
        *,
        lag: float = 0.0,
        latest: datetime | None = None,
        stable: bool = True,
        run_time: datetime | None = None,
        min_lock: float = 9.0,
        max_lock: float = 50.0,
        claim_id: UUID | None = None,
        runs: str = "jobs:job",
        **request: Any,
    ) -> tuple[UUID, ClaimAnswer]:
        """Claim as for a job every 10 s, whose run time was ``lag`` seconds ago."""
        claim_id = claim_id or uuid4()
        asked = ClaimRequest(
            task,
            min_lock,
            max_lock,
            run_time=run_time,
            exact=run_time is not None,
            runs=runs,
            claim_id=claim_id,
            **request,
        )
        return claim_id, self.send(asked, ReadTimes(lag, latest, stable))

    def send(self, request: ClaimRequest, times: ReadTimes) -> ClaimAnswer:
        return self.statements.claim(request, times)

    def granted(self, task: str = "task", **request: Any) -> bool:
        return self.claim(task, **request)[1].granted

    def hold(self, task: str = "task", **request: Any) -> tuple[UUID, ClaimAnswer]:
        """Claim as ``hold()`` does, which runs no job that somebody else could run."""
        return self.claim(task, runs="", **request)

    def take_over(
        self,
        dead_claim_id: UUID,
        task: str = "task",
        *,
        claim_id: UUID | None = None,
        lease: float | None = None,
        failover: bool = True,
        stable: bool = True,
    ) -> tuple[UUID, ClaimAnswer | None]:
        claim_id = claim_id or uuid4()
        request = takeover_of(task, dead_claim_id, "dead", lease, failover, claim_id)
        return claim_id, self.statements.rerun(request, ReadTimes(stable=stable))

    def takes_over(self, dead_claim_id: UUID, task: str = "task", **request: Any) -> bool:
        _, answer = self.take_over(dead_claim_id, task, **request)
        return answer is not None and answer.granted

    def run_by_hand(
        self,
        request_id: UUID,
        task: str = "task",
        *,
        stable: bool = True,
        max_lock: float = 300.0,
        **request: Any,
    ) -> tuple[UUID, ClaimAnswer | None]:
        """Claim a run that was asked for by hand."""
        asked = manual_run_of(task, request_id, max_lock, **{"runs": "jobs:job", **request})
        return asked.claim_id, self.statements.rerun(asked, ReadTimes(stable=stable))

    def release(
        self, claim_id: UUID, task: str = "task", *, keep_window: bool = True
    ) -> ReleaseAnswer | None:
        return self.end(
            claim_id, task, window=WindowAfter.KEEP if keep_window else WindowAfter.OPEN
        )

    def end(
        self, claim_id: UUID, task: str = "task", *, token: int | None = None, **end: Any
    ) -> ReleaseAnswer | None:
        """Release, and say how the run ended."""
        return self.statements.release(ReleaseRequest(task, claim_id, RunOutcome(**end), token))

    def claim_many(
        self, *requests: ClaimRequest, most: int | None = None
    ) -> dict[UUID, ClaimAnswer]:
        return self.statements.claim_many(requests, most=most)

    def take_over_many(self, *requests: RerunRequest) -> dict[UUID, ClaimAnswer]:
        return self.statements.rerun_many(requests)

    def release_many(self, requests: Sequence[ReleaseRequest]) -> dict[UUID, ReleaseAnswer | None]:
        return self.statements.release_many(requests)

    def end_lease(
        self, claim_id: UUID, task: str = "task", *, holders: list[str]
    ) -> ReleaseAnswer | None:
        return self.statements.end_lease(task, claim_id, holders)

    def hand_over(
        self, claim_id: UUID, task: str = "task", *, begun: bool = False
    ) -> ReleaseAnswer | None:
        end: dict[str, Any] = {"outcome": "cancelled", "cut": True} if begun else {}
        return self.end(claim_id, task, window=WindowAfter.HAND_OVER, **end)

    def give_up(self, claim_id: UUID, task: str = "task") -> bool:
        return self.statements.give_up(task, claim_id) is not None

    def extend(
        self, claim_id: UUID, by: float, *, lease: float | None = None, task: str = "task"
    ) -> LockTimes | None:
        return self.statements.extend(task, claim_id, by, lease)

    def renew(self, *renewals: Renewal) -> dict[UUID, LockTimes]:
        return self.statements.renew(renewals)

    def renewed(
        self, claim_id: UUID, task: str = "task", *, lease: float = 30, is_last: bool = False
    ) -> bool:
        return claim_id in self.renew(Renewal(task, claim_id, lease, is_last))

    def read(self, *tasks: str, always: tuple[str, ...] = ()) -> dict[str, RunState]:
        states, _ = self.statements.read(tasks, always)
        return {state.task_name: state for state in states}

    def prune(self, age: float) -> int:
        return self.statements.prune(age)


# ---- claims that are sent until they are decided -----------------------------------------------


def believing(protocol: Any) -> ClaimContext:
    """Return what the claims of a replica share that has seen the database for long enough."""
    outage = Outage("here")
    outage.believe()
    return ClaimContext(protocol, DatabaseClock(), outage, 10.0)


def attempt(request: ClaimRequest | RerunRequest, context: ClaimContext) -> AnyAttempt:
    """Return a claim that is sent until its answer can be used."""
    if isinstance(request, RerunRequest):
        return RerunAttempt(request, context)
    return (StoredAttempt if request.move else ClaimAttempt)(request, context)


def send_together(cursor: Any, attempts: Sequence[Any], **more: Any) -> list[Any]:
    """Send claims of one kind in one statement; return the decision or error of each."""
    if not attempts:
        return []
    decided: list[Any] = type(attempts[0]).send_together(cursor, attempts, **more)
    return decided


def is_takeover(wanted: object) -> bool:
    """Return whether a claim is to take over a dead run."""
    return isinstance(wanted, RerunAttempt) and wanted.request.kind == "takeover"


def hear_of_probes(heard: Callable[[], object]) -> Callable[[], None]:
    """Let a function hear of each probe that is about to be sent; return what undoes it."""
    prove = Session.prove

    def told(session: Session, *limits: Any) -> None:
        heard()
        prove(session, *limits)

    Session.prove = told  # type: ignore[method-assign]  # a test looks on
    return lambda: setattr(Session, "prove", prove)


# ---- faults ------------------------------------------------------------------------------------

# The attempts of one ask, how many of them are granted at most, and whom to tell.
Ask = Callable[[Sequence[Any], int | None, Callable[[Any], object]], object]


def intercept_claims(locks: Any, intercept: Callable[[Ask], Ask]) -> Callable[[], None]:
    """Let the claims of an executor's jobs go through a function on their way to the database.

    :param intercept: gets what sends an ask, and returns what is called in its place
    :return: undoes it
    """
    begin_claims = locks.begin_claims
    locks.begin_claims = intercept(begin_claims)
    return lambda: setattr(locks, "begin_claims", begin_claims)


# The statements in which a claim, a release and so on can be met: by the verbs of this page.
_METHODS = {
    "rerun": "rerun",
    "move": "claim_and_move",
    "release": "release_many",
    "renew": "renew",
}


def method_of(verb: str) -> tuple[type[Any], str]:
    """Return the class and the method that send a replica's statement, to be patched."""
    return TaskLockProtocol, _METHODS[verb]


@dataclass(frozen=True)
class Sent:
    """A statement on its way to rows in memory.

    :ivar name: which statement it is, for the trace
    :ivar group: the name that all of its forms share
    :ivar tasks: the tasks that it names, for the trace
    :ivar carry_out: carries it out, and returns its answer
    :ivar cursor: the cursor that it is sent on
    """

    name: str
    group: str
    tasks: str
    carry_out: Callable[[], Any]
    cursor: Any


_CLAIMS = ("claim", "claim_many", "first_claim_many", "claim_and_move")
_RELEASES = ("release", "release_many")
# Statements that pass over locked rows.
_PASSING_OVER = ("claim_many", "first_claim_many")


class OnTheWay:
    """A protocol whose statements go through a function on their way to the rows.

    :param send: called in place of each statement; may carry it out, or not
    :param is_locked: says whether another session has a task's row locked
    """

    def __init__(
        self,
        protocol: Any,
        send: Callable[[Sent], Any],
        is_locked: Callable[[str], bool] = lambda _task: False,
    ) -> None:
        self._protocol = protocol
        self._through = send
        self._is_locked = is_locked

    def __getattr__(self, name: str) -> Any:
        return partial(self._send, name)

    def _send(self, name: str, cursor: Any, *arguments: Any, **options: Any) -> Any:
        def carry_out() -> Any:
            if name == "claim" and self._is_locked(arguments[0].task_name):
                raise psycopg.errors.LockNotAvailable
            asked = self._pass_over(arguments) if name in _PASSING_OVER else arguments
            return getattr(self._protocol, name)(cursor, *asked, **options)

        group = "claim" if name in _CLAIMS else "release" if name in _RELEASES else name
        tasks = _tasks_of(arguments or [options.get("tasks", "")])
        return self._through(Sent(name, group, tasks, carry_out, cursor))

    def _pass_over(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments of a batch of claims without the claims whose rows are locked."""
        pairs = zip(arguments[0], arguments[1], strict=True)
        asked = [(each, lag) for each, lag in pairs if not self._is_locked(each.task_name)]
        return [[each for each, _ in asked], [lag for _, lag in asked], *arguments[2:]]


def _tasks_of(arguments: Sequence[Any]) -> str:
    """Return the tasks of a statement, for the trace."""
    if not arguments:
        return ""
    asked: Iterable[Any] = arguments[0]
    if isinstance(asked, str):
        return asked
    if not isinstance(asked, (list, tuple)):
        asked = [asked]
    return ", ".join(each if isinstance(each, str) else each.task_name for each in asked)


class Pauser:
    """Who pauses and resumes a task, and is shown its pauses: by statements, or by the rule."""

    def __init__(self, connection: Rows) -> None:
        self.connection = connection
        self._operations = Operations(task_lock_table())

    def pause(
        self, seconds: float | None, by: str = "me", reason: str | None = None, task: str = "task"
    ) -> None:
        """Pause a task; with ``None``, until it is resumed."""
        pause_id = uuid4()
        if isinstance(self.connection, Memory):
            rows, now = self.connection.locks.rows, self.connection.time
            rows[task] = rule.pause(rows[task], seconds, now, by, reason, str(pause_id))
        else:
            cursor = raw_cursor(self.connection)
            self._operations.pause(cursor, [task], seconds, by, reason, pause_id)

    def resume(self, by: str = "me", *, force: bool = False, task: str = "task") -> bool:
        """Take the operator's pauses out; return whether none is left that paused the task."""
        if isinstance(self.connection, Memory):
            rows, now = self.connection.locks.rows, self.connection.time
            before = rows[task]
            rows[task] = rule.resume(before, now, by, force=force)
            return before.is_paused(now) and not rows[task].is_paused(now)
        [change] = self._operations.resume(raw_cursor(self.connection), [task], by, force=force)
        return change.is_resumed

    def shown(self, task: str = "task") -> tuple[tuple[Pause, ...], datetime | None]:
        """Return the pauses of a task that have not ended, and until when it is paused."""
        if isinstance(self.connection, Memory):
            row, now = self.connection.locks.rows[task], self.connection.time
            pauses = [_pause_of(each) for each in row.pauses or ()]
            lasting = tuple(each for each in pauses if each.until is None or each.until > now)
            return lasting, row.paused_until if row.is_paused(now) else None
        [found] = self._operations.tasks(raw_cursor(self.connection), [like_of(task)])
        return found.pauses, found.paused_until


def _pause_of(stored: dict[str, Any]) -> Pause:
    """Return a pause as operators are shown it."""
    since, until = (
        None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)
        for seconds in (stored["since"], stored["until"])
    )
    assert since is not None
    return Pause(stored["by"], since, until, stored["why"])


def with_late_takeovers() -> AbstractContextManager[object]:
    """Grant takeovers however long their statements take, as they do on a slow machine."""
    return patch.object(claim_attempts, "LONGEST_TAKEOVER", inf)
