"""The waist: the one module through which tests reach the lock below its public names.

A request goes in, and its answer comes out. Which method of a protocol carries the request, alone
or in a batch, to rows in PostgreSQL or in memory, is known here only, so that the protocol can
change without the tests. `python -m tests.waist` checks that no further test goes around.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import UUID, uuid4

import psycopg
from psycopg.rows import scalar_row
from sqlalchemy.engine import make_url

from apscheduler_tasklock import _application
from apscheduler_tasklock._database.connection import connector
from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock._database.plain_future import PlainFuture
from apscheduler_tasklock._database.rejections import Rejections
from apscheduler_tasklock._database.session import NoCursor, Session
from apscheduler_tasklock._database.sqlstates import RowLockedError
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._database.url import as_url
from apscheduler_tasklock._database.wire import (
    NoAnswerError,
    Wire,
    class_row,
    dict_row,
    wait_for,
)
from apscheduler_tasklock._doctor.remedies import end_of, reset_of, set_by
from apscheduler_tasklock._lock import claim_attempts, database_clock, held_locks, rights, user
from apscheduler_tasklock._lock import database as user_database
from apscheduler_tasklock._lock.always_granted import Unlocked
from apscheduler_tasklock._lock.claim_attempts import (
    AnyAttempt,
    ClaimAttempt,
    ClaimContext,
    GrantLimitError,
    RerunClaimAttempt,
    StoredClaimAttempt,
    TimedAnswer,
)
from apscheduler_tasklock._lock.database import Database
from apscheduler_tasklock._lock.database_clock import DatabaseClock
from apscheduler_tasklock._lock.held_locks import HeldLocks
from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock._lock.outcomes import NOT_BEGUN, ClaimOutcome, RunOutcome, WindowAfter
from apscheduler_tasklock._lock.parameters import Parameters, Unsent, sent
from apscheduler_tasklock._lock.patterns import like_of
from apscheduler_tasklock._lock.protocol import HISTORY, LOCK_TIMEOUT, TaskLockStatements
from apscheduler_tasklock._lock.protocol_messages import (
    IN_TIME,
    Answer,
    Claim,
    ClaimAnswer,
    ClaimRequest,
    Claims,
    ClaimTimes,
    ClosedDeadRun,
    EndLease,
    Extend,
    GiveUp,
    JobMove,
    Lead,
    LockEnds,
    LockProtocol,
    Message,
    MissedTimes,
    MissNote,
    MissNotes,
    PruneOneOffs,
    ReadTasks,
    Refusal,
    Registered,
    Registration,
    Registrations,
    ReleaseAnswer,
    ReleaseRequest,
    Releases,
    RemoveReplicas,
    Renewal,
    Renewals,
    RerunRequest,
    Reruns,
    Resign,
    Retire,
    ScheduleNote,
    ScheduleNotes,
    ShortenHistory,
    SignOfLife,
    Stop,
    StoredClaims,
    TaskRow,
)
from apscheduler_tasklock._lock.releases import Release, Released
from apscheduler_tasklock._lock.replica import LockSettings
from apscheduler_tasklock._lock.replica import Replica as LockReplica
from apscheduler_tasklock._lock.statements.history import ACTIONS as ACTION_SLOTS
from apscheduler_tasklock._lock.test_doubles import use_stand_in
from apscheduler_tasklock._lock.user import ReplicaUser
from apscheduler_tasklock._lock.words import printable
from apscheduler_tasklock._runs import executor_run, executor_runs, misfires, missed_runs
from apscheduler_tasklock._runs.active_submissions import ActiveSubmissions
from apscheduler_tasklock._runs.adapter import call_on_its_loop, intercept_reports
from apscheduler_tasklock._runs.blocked_tasks import BlockedTasks
from apscheduler_tasklock._runs.deferred_runs import Outlook
from apscheduler_tasklock._runs.executor_run import ExecutorRun
from apscheduler_tasklock._runs.executor_runs import ExecutorParts, ExecutorRuns
from apscheduler_tasklock._runs.known_tasks import KnownTasks
from apscheduler_tasklock._runs.leadership import Leadership
from apscheduler_tasklock._runs.queue import RunQueue, ToDo
from apscheduler_tasklock._runs.registration import send_registrations
from apscheduler_tasklock._runs.reports import Notifier
from apscheduler_tasklock._runs.run import JobKey, QueuedRun
from apscheduler_tasklock._runs.submission import Submission, new_claim_ids
from apscheduler_tasklock._shutdown import Closing
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
from apscheduler_tasklock._words.headlines import headline_of
from apscheduler_tasklock._words.lanes import entries_in_words, lane_in_words
from apscheduler_tasklock._words.replicas import (
    fate_of,
    of_each_application,
    replica_headline,
    runs_nothing_in_words,
    tasks_of_one,
)
from apscheduler_tasklock._words.tasks import open_runs
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
    "ActiveSubmissions",
    "AnyAttempt",
    "Ask",
    "BlockedTasks",
    "Claim",
    "ClaimAnswer",
    "ClaimContext",
    "ClaimOutcome",
    "ClaimRequest",
    "ClaimTimes",
    "Claims",
    "ClosedDeadRun",
    "Closing",
    "Database",
    "EndLease",
    "ExecutorParts",
    "ExecutorRun",
    "ExecutorRuns",
    "Extend",
    "GiveUp",
    "GrantLimitError",
    "HeldLocks",
    "JobKey",
    "JobMove",
    "KnownTasks",
    "Lead",
    "Leadership",
    "LockClient",
    "LockEnds",
    "LockProtocol",
    "LockReplica",
    "LockSettings",
    "Memory",
    "MemoryProtocol",
    "MemoryTaskLocks",
    "Message",
    "MissNote",
    "MissNotes",
    "MissedTimes",
    "NoAnswerError",
    "Notifier",
    "OnTheWay",
    "Outage",
    "Parameters",
    "Pauser",
    "PlainFuture",
    "PruneOneOffs",
    "ReadTasks",
    "Refusal",
    "Registered",
    "Registration",
    "Registrations",
    "ReleaseAnswer",
    "ReleaseRequest",
    "Released",
    "Releases",
    "RemoveReplicas",
    "Renewal",
    "Renewals",
    "Replica",
    "RerunRequest",
    "Reruns",
    "Resign",
    "Retire",
    "RowLockedError",
    "Rows",
    "RunOutcome",
    "ScheduleNote",
    "ScheduleNotes",
    "Sent",
    "ShortenHistory",
    "SignOfLife",
    "Statements",
    "Stop",
    "StoredClaims",
    "Submission",
    "TaskRow",
    "TimedAnswer",
    "Timings",
    "Unlocked",
    "Unsent",
    "WatchedRows",
    "WindowAfter",
    "Wire",
    "as_url",
    "attempt",
    "believing",
    "call_on_its_loop",
    "class_row",
    "database_clock",
    "dict_row",
    "end_of",
    "entries_in_words",
    "executor_run",
    "executor_runs",
    "fate_of",
    "findings_of",
    "headline_of",
    "hear_of_probes",
    "held_locks",
    "intercept_claims",
    "intercept_reports",
    "is_takeover",
    "lane_in_words",
    "let_hang",
    "limit",
    "manual_run_of",
    "met",
    "misfires",
    "missed_runs",
    "new_claim_ids",
    "of_each_application",
    "open_runs",
    "printable",
    "protocol_of",
    "raw_cursor",
    "release_to_send",
    "replica_headline",
    "reset_of",
    "retry_of",
    "rights",
    "rows_of",
    "runs_nothing_in_words",
    "send_registrations",
    "send_together",
    "sent",
    "set_by",
    "severity_of",
    "statements_of",
    "step_of",
    "takeover_of",
    "tasks_of_one",
    "text_of",
    "use_stand_in",
    "user",
    "user_database",
    "wait_for",
    "wire_to",
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
    return TaskLockStatements(
        task_lock_table(table, schema), name, lock_timeout, history, release=release
    )


class Statements:
    """The one door of one replica: a message goes in, its answer comes out.

    :param protocol: as from :func:`protocol_of`
    :param cursor: returns the cursor that the statements are sent on
    """

    def __init__(self, protocol: LockProtocol, cursor: Callable[[], Any] = NoCursor) -> None:
        self.protocol = protocol
        self._cursor = cursor

    @property
    def cursor(self) -> Any:
        return self._cursor()

    def ask(self, message: Message[Answer]) -> Answer:
        return self.protocol.execute(self.cursor, message)

    def rerun(self, request: RerunRequest, times: ClaimTimes = IN_TIME) -> ClaimAnswer | None:
        """Claim the run that a task's row shows, if the row still shows it."""
        return self.ask(Reruns([request], times)).get(request.claim_id)

    def alive(
        self,
        tasks: Sequence[str],
        started_at: datetime | None = None,
        running: Sequence[RunningRun] = (),
        **more: Any,
    ) -> tuple[datetime, int]:
        """Send a sign of life."""
        return self.ask(SignOfLife("host", "1.0", tasks, started_at, runs=running, **more))


class Replica(Statements):
    """A replica as the protocol sees one: an id, and a connection with a clock, or rows in memory.

    The methods make messages with values that most tests do not care about.
    """

    def __init__(self, name: str, connection: Any, lock_timeout: float = 10.0, **more: Any) -> None:
        def cursor() -> Any:
            return NoCursor() if isinstance(connection, Memory) else raw_cursor(connection)

        super().__init__(protocol_of(name, connection, lock_timeout=lock_timeout, **more), cursor)
        self.name = name
        self.connection = connection

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
        return claim_id, self.send(asked, ClaimTimes(lag, latest, stable))

    def send(self, request: ClaimRequest, times: ClaimTimes) -> ClaimAnswer:
        return self.ask(Claim(request, times))

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
        return claim_id, self.rerun(request, ClaimTimes(stable=stable))

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
        return asked.claim_id, self.rerun(asked, ClaimTimes(stable=stable))

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
        return self.ask(ReleaseRequest(task, claim_id, RunOutcome(**end), token))

    def claim_many(
        self, *requests: ClaimRequest, most: int | None = None
    ) -> dict[UUID, ClaimAnswer]:
        return self.ask(Claims(requests, [0.0] * len(requests), IN_TIME, most))

    def released(self, request: ReleaseRequest, *, together: bool) -> ReleaseAnswer | None:
        """Release a claim, alone or together with one that nobody has."""
        if not together:
            return self.ask(request)
        nobodys = ReleaseRequest("nobody's", UUID(int=0))
        return self.ask(Releases([nobodys, request])).get(request.claim_id)

    def end_lease(
        self, claim_id: UUID, task: str = "task", *, holders: list[str]
    ) -> ReleaseAnswer | None:
        return self.ask(EndLease(task, claim_id, holders))

    def hand_over(
        self, claim_id: UUID, task: str = "task", *, begun: bool = False
    ) -> ReleaseAnswer | None:
        end: dict[str, Any] = {"outcome": "cancelled", "cut": True} if begun else {}
        return self.end(claim_id, task, window=WindowAfter.HAND_OVER, **end)

    def give_up(self, claim_id: UUID, task: str = "task") -> bool:
        return self.ask(GiveUp(task, claim_id)) is not None

    def extend(
        self, claim_id: UUID, by: float, *, lease: float | None = None, task: str = "task"
    ) -> LockEnds | None:
        return self.ask(Extend(task, claim_id, by, lease))

    def renew(self, *renewals: Renewal) -> dict[UUID, LockEnds]:
        return self.ask(Renewals(renewals))

    def renewed(
        self, claim_id: UUID, task: str = "task", *, lease: float = 30, is_last: bool = False
    ) -> bool:
        return claim_id in self.renew(Renewal(task, claim_id, lease, is_last))

    def read(self, *tasks: str, always: tuple[str, ...] = ()) -> dict[str, TaskRow]:
        states, _ = self.ask(ReadTasks(tasks, always))
        return {state.task_name: state for state in states}

    def prune(self, age: float) -> int:
        return self.ask(PruneOneOffs(age))


def raw_cursor(connection: psycopg.Connection[Any]) -> Any:
    """Return a cursor as the library's, on a connection.

    The connection keeps its wire, so that what comes again is prepared, as in the library.
    """
    wire = vars(connection).get("wire")
    if wire is None:
        wire = vars(connection)["wire"] = Wire(connection, 600.0)
        # Where psycopg has prepared anything, it deallocates all with a rollback.
        connection.prepare_threshold = None
        if connection.autocommit:  # else the question would begin a transaction
            asked = connection.cursor(row_factory=scalar_row).execute("SELECT pg_backend_pid()")
            wire.is_direct = asked.fetchone() == connection.info.backend_pid
    return wire.cursor()


def let_hang(monkeypatch: Any, most: int) -> None:
    """Let at most so many threads of the application's code hang, in place of ten."""
    monkeypatch.setattr(_application, "MOST_HANGING", most)


def wire_to(url: str, seconds: float) -> Wire:
    """Return the wire of a new connection.

    :param seconds: limits the wait for each answer
    """
    return connector(make_url(url), seconds, "a wire")(0, inf)


def limit(wire: Wire, seconds: float, until: float = inf) -> None:
    """Limit the wait for each answer from now on.

    :param until: when all waits end, on the monotonic clock
    """
    wire.seconds, wire.over_at = seconds, lambda: until


def statements_of(name: str, connection: Any) -> Replica:
    """Return another replica that is no scheduler's, and waits for rows as one of those."""
    return Replica(name, connection, LOCK_TIMEOUT)


# ---- claims that are sent until they are decided -----------------------------------------------


def believing(protocol: Any) -> ClaimContext:
    """Return what the claims of a replica share that has seen the database for long enough."""
    outage = Outage("here")
    outage.believe()
    return ClaimContext(protocol, DatabaseClock(), outage, 10.0)


def attempt(request: ClaimRequest | RerunRequest, context: ClaimContext) -> AnyAttempt:
    """Return a claim that is sent until its answer can be used."""
    if isinstance(request, RerunRequest):
        return RerunClaimAttempt(request, context)
    return (StoredClaimAttempt if request.move else ClaimAttempt)(request, context)


def release_to_send(protocol: Any, message: ReleaseRequest) -> Release:
    """Return the request of a release, which is sent as the test says."""
    replica: Any = SimpleNamespace(
        settings=SimpleNamespace(timings=Timings()), releasing=Closing(), rejections=Rejections()
    )
    return Release(replica, protocol, message, inf)


class LockClient(ReplicaUser):
    """A user of a replica that claims without a scheduler, with what tests ask of it in one object.

    The library has these methods in the user's ``locks``, ``database`` and ``rights``.
    """

    def __init__(self, settings: LockSettings, replica: Any = None) -> None:
        super().__init__(settings, replica)
        self.note_methods()

    def note_methods(self) -> None:
        """Take over the methods of the user's parts, also after a test has replaced one."""
        self.attempt = self.locks.attempt
        self.begin_claim = self.locks.begin_claim
        self.begin_claims = self.locks.begin_claims
        self.begin_release = self.locks.begin_release
        self.claim = self.locks.claim
        self.extend = self.locks.extend
        self.release = self.locks.release
        self.renew_now = self.locks.renew_now
        self.wait_for_claims = self.locks.wait_for_claims
        self.what_runs = self.locks.what_runs
        self.withdraw = self.locks.withdraw
        self.ask = self.database.ask
        self.ask_all = self.database.ask_all
        self.carrying_out = self.database.carrying_out
        self.jobs = self.database.jobs
        self.reading = self.database.reading
        self.check = self.rights.check

    @property
    def stable(self) -> bool:
        """Whether the database is available, and the rows are believed."""
        return self.outage.stable


def send_together(cursor: Any, attempts: Sequence[Any], **more: Any) -> list[Any]:
    """Send claims of one kind in one statement; return the decision or error of each."""
    if not attempts:
        return []
    decided: list[Any] = type(attempts[0]).send_together(cursor, attempts, **more)
    return decided


def is_takeover(wanted: object) -> bool:
    """Return whether a claim is to take over a dead run."""
    return isinstance(wanted, RerunClaimAttempt) and wanted.request.kind == "takeover"


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


def met(
    kind: type[Message[Any]], meet: Callable[[Any, Callable[[], Any]], Any]
) -> tuple[type[Any], str, Any]:
    """Return what to patch, so that a function meets each message of a kind on its way.

    :param meet: gets the message, and what carries it out; its result is the answer
    :return: a class, its attribute's name, and the new attribute
    """
    execute = TaskLockStatements.execute

    def met_here(protocol: Any, cursor: Any, message: Any) -> Any:
        carry_out = partial(execute, protocol, cursor, message)
        return meet(message, carry_out) if isinstance(message, kind) else carry_out()

    return TaskLockStatements, "execute", met_here


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


# What messages are called in traces and plans of faults, if not as their classes.
_NAMES: dict[type[Message[Any]], str] = {
    Claims: "claim_many",
    EndLease: "end_lease",
    GiveUp: "give_up",
    Registrations: "register",
    ReleaseRequest: "release",
    Releases: "release_many",
    PruneOneOffs: "prune",
    ReadTasks: "read",
    RemoveReplicas: "remove_replicas",
    Renewals: "renew",
    Reruns: "rerun",
    ScheduleNotes: "note_reschedulings",
    MissNotes: "note_misses",
    ShortenHistory: "shorten_history",
    SignOfLife: "report_replica",
    Stop: "stop_replica",
    StoredClaims: "claim_and_move",
}


class OnTheWay:
    """A protocol whose messages go through a function on their way to the rows.

    :param send: called in place of each statement; may carry it out, or not
    :param is_locked: says whether another session has a task's row locked
    """

    def __init__(
        self,
        protocol: LockProtocol,
        send: Callable[[Sent], Any],
        is_locked: Callable[[str], bool] = lambda _task: False,
    ) -> None:
        self._protocol = protocol
        self._through = send
        self._is_locked = is_locked

    def execute(self, cursor: Any, message: Message[Any]) -> Any:
        def carry_out() -> Any:
            if isinstance(message, Claim) and self._is_locked(message.request.task_name):
                raise psycopg.errors.LockNotAvailable
            sent = self._pass_over(message) if isinstance(message, Claims) else message
            return self._protocol.execute(cursor, sent)

        name = _NAMES.get(type(message), type(message).__name__.lower())
        group = next((each for each in ("claim", "release") if name.startswith(each)), name)
        if isinstance(message, Claims) and message.are_first:
            name = f"first_{name}"
        return self._through(Sent(name, group, _tasks_of(message), carry_out, cursor))

    def __getattr__(self, name: str) -> Any:
        """Return a statement for the rows of stored jobs."""

        def send(cursor: Any, *arguments: Any, **options: Any) -> Any:
            carry_out = partial(getattr(self._protocol, name), cursor, *arguments, **options)
            return self._through(Sent(name, name, "", carry_out, cursor))

        return send

    def _pass_over(self, claims: Claims) -> Claims:
        """Return claims without those whose rows are locked."""
        pairs = zip(claims.requests, claims.lags, strict=True)
        free = [(each, lag) for each, lag in pairs if not self._is_locked(each.task_name)]
        return replace(claims, requests=[each for each, _ in free], lags=[lag for _, lag in free])


def _tasks_of(message: Any) -> str:
    """Return the tasks of a message, for the trace."""
    if isinstance(message, Claim):
        return message.request.task_name
    for name in ("task_name", "requests", "notes", "tasks", "task_names"):
        asked = getattr(message, name, None)
        if isinstance(asked, str):
            return asked
        if asked is not None and not isinstance(message, Retire):
            return ", ".join(each if isinstance(each, str) else each.task_name for each in asked)
    return ""


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


@dataclass(eq=False)
class RunOfTest(QueuedRun):
    """A run with data that its queue does not know.

    :ivar work: the data
    """

    work: Any = None


def step_of(
    queue: RunQueue,
    now: float,
    workers: int | None,
    *,
    came: Sequence[QueuedRun] = (),
    begun: Sequence[QueuedRun] = (),
    freed: Sequence[tuple[QueuedRun, float]] = (),
    not_given: Sequence[QueuedRun] = (),
    answered: Sequence[tuple[QueuedRun, ClaimOutcome]] = (),
    found: Sequence[tuple[QueuedRun, Outlook, float]] = (),
    stopped: bool = False,
) -> ToDo:
    """Tell a queue what has happened; return what is to be done then."""
    if stopped:
        queue.stop()
    for run in came:
        queue.came(run)
    for run in begun:
        queue.begun(run, now)
    for run, took in freed:
        queue.freed(run, took)
    for run in not_given:
        queue.not_given(run, now)
    for run, outcome in answered:
        queue.answered(run, outcome, now)
    for run, outlook, as_of in found:
        queue.found(run, outlook, as_of, now)
    return queue.next(now, workers)
