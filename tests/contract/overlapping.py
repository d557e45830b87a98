"""The lock's statements, sent as the library sends them, and the rows that they find.

A statement is made for a side, of which there are two: each is a replica, with claims of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cache, partial
from typing import Any, TypeAlias
from uuid import NAMESPACE_OID, UUID, uuid5

import psycopg

from apscheduler_tasklock._database.sqlstates import RowLockedError
from apscheduler_tasklock._lock.operations import Operations
from apscheduler_tasklock._lock.outcomes import RunOutcome, WindowAfter
from apscheduler_tasklock.errors import TaskLockNotFoundError, TaskLockStateError
from apscheduler_tasklock.schema.table import task_lock_table
from tests.support.rows import DEAD, HANDED_OVER, add_job, add_replica, add_run, add_task
from tests.support.waist import (
    LOCK_TIMEOUT,
    ClaimRequest,
    EndLease,
    Extend,
    GiveUp,
    JobMove,
    Message,
    PruneOneOffs,
    ReadTasks,
    Registration,
    Registrations,
    ReleaseRequest,
    RemoveReplicas,
    Renewal,
    Renewals,
    RerunRequest,
    Retire,
    ShortenHistory,
    Statements,
    Stop,
    attempt,
    believing,
    manual_run_of,
    protocol_of,
    release_to_send,
    send_together,
    takeover_of,
)

# By the database's clock, which stands still. It is ahead of this machine's, so that no run time is
# late.
NOW = datetime(2100, 1, 1, tzinfo=timezone.utc)
TASKS = ("a", "m", "z")
# In place of an answer: the library sends it again after a pause.
AGAIN = "to be sent again"

# Sends a statement for some tasks, and returns their answers.
Send: TypeAlias = Callable[[Any, Sequence[str]], dict[str, Any]]


def uuid_of(*words: str) -> UUID:
    return uuid5(NAMESPACE_OID, " ".join(words))


def last_claim(task: str) -> UUID:
    """Return the claim that a task's row has before the statements."""
    return uuid_of("before", task)


def requested(task: str) -> UUID:
    """Return the request for a run of a task."""
    return uuid_of("request", task)


@cache
def made_once(name: str, lock_timeout: float) -> tuple[Any, Operations]:
    """Return what a side sends by. To make it takes longer than to send all that is sent."""
    return protocol_of(name, lock_timeout=lock_timeout), Operations(task_lock_table())


@dataclass
class Side:
    """One of the two who send, with the claims that are its own."""

    name: str
    lock_timeout: float = LOCK_TIMEOUT
    protocol: Any = field(init=False)
    operations: Operations = field(init=False)
    context: Any = field(init=False)

    def __post_init__(self) -> None:
        self.protocol, self.operations = made_once(self.name, self.lock_timeout)
        self.context = believing(self.protocol)

    def on(self, cursor: Any) -> Statements:
        """Return what this side sends on a cursor."""
        return Statements(self.protocol, lambda: cursor)

    def claim_id(self, task: str) -> UUID:
        return uuid_of(self.name, task)

    def in_order(self, tasks: Sequence[str]) -> list[str]:
        """Return tasks in this side's order, which is the opposite of the other's."""
        return sorted(tasks, reverse=self.name != "one")


def _claim_of(side: Side, task: str, **stored: Any) -> ClaimRequest:
    return ClaimRequest(
        task,
        min_lock=50,
        max_lock=300,
        run_time=NOW,
        exact=True,
        lease=30,
        failover=True,
        runs="job",
        schedule='"each minute"',
        next_in=60,
        claim_id=side.claim_id(task),
        **stored,
    )


def _attempt(request: Callable[[Side, str], Any]) -> Callable[[Side], Send]:
    """Return what claims tasks one by one, until each claim is decided."""

    def make(side: Side) -> Send:
        attempts = {task: attempt(request(side, task), side.context) for task in TASKS}

        def send(cursor: Any, tasks: Sequence[str]) -> dict[str, Any]:
            [task] = tasks
            try:
                return {task: _decided(attempts[task].send(cursor))}
            except RowLockedError:  # its answer tells of a row that another session is changing
                return {task: AGAIN}

        return send

    return make


def _attempts(request: Callable[[Side, str], Any], **more: Any) -> Callable[[Side], Send]:
    """Return what claims tasks together."""

    def make(side: Side) -> Send:
        attempts = {task: attempt(request(side, task), side.context) for task in TASKS}

        def send(cursor: Any, tasks: Sequence[str]) -> dict[str, Any]:
            tasks = side.in_order(tasks)
            decisions = send_together(cursor, [attempts[task] for task in tasks], **more)
            return dict(zip(tasks, map(_decided, decisions), strict=True))

        return send

    return make


def _decided(decision: Any) -> Any:
    if isinstance(decision, RowLockedError):
        return AGAIN
    if isinstance(decision, Exception):
        raise decision
    return decision.answer


def _takeover(side: Side, task: str) -> RerunRequest:
    return takeover_of(task, last_claim(task), "before", 30, claim_id=side.claim_id(task))


def _manual(side: Side, task: str) -> RerunRequest:
    request = requested(task)
    return manual_run_of(task, request, 300, 30, runs="job", claim_id=side.claim_id(task))


def _due(side: Side, task: str) -> ClaimRequest:
    following = NOW + timedelta(seconds=60)
    return _claim_of(side, task, move=JobMove(task, uuid_of("added"), NOW, NOW, following))


def _ending(task: str, window: WindowAfter, claim_id: UUID) -> ReleaseRequest:
    outcome = "cancelled" if window is WindowAfter.HAND_OVER else "ok"
    return ReleaseRequest(task, claim_id, RunOutcome(window, outcome), token=7)


def _release(window: WindowAfter) -> Callable[[Side], Send]:
    def make(side: Side) -> Send:
        def send(cursor: Any, tasks: Sequence[str]) -> dict[str, Any]:
            [task] = tasks
            request = _ending(task, window, last_claim(task))
            return {task: release_to_send(side.protocol, request).send(cursor)}

        return send

    return make


def _releases(side: Side) -> Send:
    """Release one task, and hand the others over."""

    def send(cursor: Any, tasks: Sequence[str]) -> dict[str, Any]:
        tasks = side.in_order(tasks)
        kinds = [WindowAfter.KEEP if task == "a" else WindowAfter.HAND_OVER for task in tasks]
        requests = [_ending(*each, last_claim(each[0])) for each in zip(tasks, kinds, strict=True)]
        releases = [release_to_send(side.protocol, each) for each in requests]
        answers = releases[0].send_together(cursor, releases)
        locked = (AGAIN if isinstance(each, RowLockedError) else each for each in answers)
        return dict(zip(tasks, locked, strict=True))

    return send


def _release_in_doubt(side: Side) -> Send:
    """Hand over the other side's claim, which stays while it finds nothing."""

    def send(cursor: Any, tasks: Sequence[str]) -> dict[str, Any]:
        [task] = tasks
        request = ReleaseRequest(task, uuid_of("one", task), RunOutcome(WindowAfter.HAND_OVER))
        return {task: release_to_send(side.protocol, request).send(cursor) or AGAIN}

    return send


def _renewal(side: Side) -> Send:
    def send(cursor: Any, tasks: Sequence[str]) -> dict[str, Any]:
        renewals = [Renewal(task, last_claim(task), 40.0) for task in side.in_order(tasks)]
        found = side.on(cursor).ask(Renewals(renewals))
        answers = {task: found.get(last_claim(task)) for task in tasks}
        passed_over = (task for task, each in answers.items() if each and not each.locked_until)
        return {**answers, **dict.fromkeys(passed_over, AGAIN)}

    return send


def _registration(side: Side) -> Send:
    def send(cursor: Any, tasks: Sequence[str]) -> dict[str, Any]:
        # Both sides are of one version, and their jobs have a new schedule.
        told = [
            Registration(task, '"each two minutes"', 90.0, 60.0, 30.0, "job", period=120.0)
            for task in side.in_order(tasks)
        ]
        found = {each.task_name: each for each in side.on(cursor).ask(Registrations(told))}
        return {task: AGAIN if each.again else each for task, each in found.items()}

    return send


def _single(ask: Callable[[Side, Any, str], Any]) -> Callable[[Side], Send]:
    """Return what asks for one task; a mistake that is reported is an answer."""

    def make(side: Side) -> Send:
        def send(cursor: Any, tasks: Sequence[str]) -> dict[str, Any]:
            [task] = tasks
            try:
                return {task: ask(side, cursor, task)}
            except (TaskLockNotFoundError, TaskLockStateError) as error:
                return {task: type(error)}

        return send

    return make


def _together(ask: Callable[[Side, Any, list[str]], Any]) -> Callable[[Side], Send]:
    """Return what asks for tasks in one statement that has no answer for each."""

    def make(side: Side) -> Send:
        def send(cursor: Any, tasks: Sequence[str]) -> dict[str, Any]:
            try:
                ask(side, cursor, side.in_order(tasks))
            except TaskLockNotFoundError as error:
                return dict.fromkeys(tasks, type(error))
            return dict.fromkeys(tasks)

        return send

    return make


def _single_message(make: Callable[[str], Message[Any]]) -> Callable[[Side], Send]:
    return _single(lambda side, cursor, task: side.on(cursor).ask(make(task)))


def _message(make: Callable[[list[str]], Message[Any]]) -> Callable[[Side], Send]:
    return _together(lambda side, cursor, tasks: side.on(cursor).ask(make(tasks)))


def _give_up(side: Side, cursor: Any, task: str) -> Any:
    if side.on(cursor).ask(GiveUp(task, last_claim(task))):
        return True
    states, _ = side.on(cursor).ask(ReadTasks([task]))  # as with the next look
    is_dead = any(each.dead and each.claim_id == last_claim(task) for each in states)
    return AGAIN if is_dead else False


def _sign_of_life(side: Side, cursor: Any, tasks: list[str]) -> None:
    side.on(cursor).alive(sorted(tasks), NOW)


def _pause(side: Side, cursor: Any, tasks: list[str]) -> None:
    side.operations.pause(cursor, tasks, 60.0, "me", "closed")


def _free(side: Side, cursor: Any, task: str, *, run_again: bool) -> None:
    side.operations.free(cursor, task, 7, "me", force=True, run_again=run_again)


@dataclass(frozen=True)
class Statement:
    """A statement of the lock.

    :ivar make: returns what sends it for a side
    :ivar writes_in: the situations in which it writes, alone
    :ivar many: whether it is for many tasks at once
    :ivar passes_over: whether it leaves out a row that another session has locked
    :ivar patient: whether it waits for a locked row as long as for any answer
    """

    make: Callable[[Side], Send]
    writes_in: tuple[str, ...] = ()
    many: bool = False
    passes_over: bool = False
    patient: bool = False


MANY = {"many": True, "passes_over": True}
OPERATORS = {"patient": True}

STATEMENTS = {
    "claim": Statement(_attempt(_claim_of), ("no row", "over", "died for good")),
    "claims": Statement(_attempts(_claim_of), ("no row", "over"), **MANY),
    "claims with a limit": Statement(
        _attempts(_claim_of, most=len(TASKS)), ("no row", "over"), **MANY
    ),
    "takeover": Statement(_attempts(_takeover), ("dead", "handed over"), **MANY),
    "manual run": Statement(_attempts(_manual), ("requested",), **MANY),
    "stored runs": Statement(
        _attempts(_due, most=len(TASKS)), ("no row", "over", "died for good"), **MANY
    ),
    "release": Statement(_release(WindowAfter.KEEP), ("running", "handed over")),
    "release, window open": Statement(_release(WindowAfter.OPEN), ("running",)),
    "hand-over": Statement(_release(WindowAfter.HAND_OVER), ("running", "dead")),
    "releases": Statement(_releases, ("running",), **MANY),
    "release in doubt": Statement(_release_in_doubt),
    "end of a lease": Statement(
        _single_message(lambda task: EndLease(task, last_claim(task), ["before"])), ("running",)
    ),
    "renewal": Statement(_renewal, ("running", "dead"), **MANY),
    "extension": Statement(
        _single_message(lambda task: Extend(task, last_claim(task), 100.0, 30.0)), ("dead",)
    ),
    "look": Statement(
        _single(lambda side, cursor, task: side.on(cursor).ask(ReadTasks(TASKS, TASKS))[0]),
    ),
    "giving up": Statement(_single(_give_up), ("dead", "handed over")),
    "registration": Statement(_registration, ("no row", "over", "running"), **MANY),
    "retirement": Statement(_message(lambda tasks: Retire([], tasks)), ("removed",), **MANY),
    "pruning": Statement(_message(lambda _tasks: PruneOneOffs(3600.0)), ("one-off",), **MANY),
    "shorter history": Statement(_message(ShortenHistory), ("over", "one-off"), many=True),
    "sign of life": Statement(_together(_sign_of_life), ("over",), many=True),
    "stop": Statement(_message(lambda _tasks: Stop()), ("over",), many=True),
    "removal of replicas": Statement(
        _message(lambda _tasks: RemoveReplicas(3600.0)), ("over",), many=True
    ),
    "pause": Statement(_together(_pause), ("over", "dead"), many=True, **OPERATORS),
    "end of a pause": Statement(
        _together(lambda side, cursor, tasks: side.operations.resume(cursor, tasks, "me")),
        ("paused",),
        many=True,
        **OPERATORS,
    ),
    "request": Statement(
        _single(lambda side, cursor, task: side.operations.request_run(cursor, task, "me", 60.0)),
        ("over", "running"),
        **OPERATORS,
    ),
    "freeing": Statement(_single(partial(_free, run_again=False)), ("running",), **OPERATORS),
    "freeing, run again": Statement(
        _single(partial(_free, run_again=True)), ("running",), **OPERATORS
    ),
    "forgetting": Statement(
        _single(lambda side, cursor, task: side.operations.forget(cursor, task)),
        ("removed",),
        **OPERATORS,
    ),
}

# What a task's row says before the statements. The window of the last run is over.
_OVER = {"window_until": "now() - interval '10 s'", "failover": "true"}
SITUATIONS: dict[str, dict[str, str] | None] = {
    "no row": None,
    "over": _OVER,
    "running": {**_OVER, "finished_at": "NULL", "locked_until": "now() + interval '20 s'"},
    "dead": {**_OVER, **DEAD},
    "died for good": {**_OVER, **DEAD, "failover": "false"},
    "handed over": {**_OVER, **HANDED_OVER},
    "requested": {
        **_OVER,
        "request_id": "",
        "requested_by": "'me'",
        "requested_at": "now() - interval '5 s'",
        "request_until": "now() + interval '1 h'",
    },
    "paused": {**_OVER, "paused_at": "now() - interval '5 s'", "paused_until": "NULL"},
    "removed": _OVER,  # no replica has it any more
    "one-off": {
        **_OVER,
        "one_off": "true",
        **dict.fromkeys(("finished_at", "window_until", "run_until"), "now() - interval '1 day'"),
    },
}


def set_up(connection: psycopg.Connection[Any], situation: str) -> None:
    """Write the rows of a situation into empty tables."""
    changes = SITUATIONS[situation]
    for task in TASKS:
        if changes is not None:
            own = {"claim_id": f"'{last_claim(task)}'", "locked_by": "'before'", "recorded": "7"}
            if "request_id" in changes:
                own["request_id"] = f"'{requested(task)}'"
            add_task(connection, task, **{**changes, **own})
        for token in (6, 700):  # the second is beyond the length of the history
            add_run(connection, task, token)
    had = () if situation == "removed" else TASKS
    for name in ("one", "other", "before"):
        add_replica(connection, name, had)
    add_replica(
        connection,
        "long ago",
        TASKS,
        seen_at="now() - interval '1 day'",
        stopped_at="now() - interval '1 day'",
    )
    for task in TASKS:  # of which the last run is the task's
        add_job(
            connection,
            task,
            func="'job'",
            added_id=f"'{uuid_of('added')}'",
            changed_at="now()",
            next_run_time="now()",
            last_run_time="now() - interval '100 s'",
            task_name=f"'{task}'",
        )
    add_job(
        connection,
        "job",
        added_id=f"'{uuid_of('added')}'",
        changed_at="now()",
        next_run_time="now()",
    )
