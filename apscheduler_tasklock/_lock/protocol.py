"""The lock protocol: what a replica asks of the database, and what it makes of the answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg.rows import class_row, dict_row
from sqlalchemy import Table

from apscheduler_tasklock._lock import statements
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.schema.table import quoted_name

# How often a claim looks for its row, which others may insert and delete meanwhile.
MOST_LOOKS = 10

# Seconds that a statement waits in the server for a row that somebody has locked. It keeps the
# replica's connection for so long; the wait of a commit for a disk is shorter as a rule.
LOCK_TIMEOUT = 0.03

# A text has characters that the database's encoding lacks: psycopg says so, or the server.
_ENCODING_ERRORS = (
    UnicodeError,
    psycopg.errors.UntranslatableCharacter,
    psycopg.errors.CharacterNotInRepertoire,
)


class Ending(Enum):
    """How a claim is ended."""

    KEEP = "released, its window taken"
    OPEN = "released, its window open again"
    HAND_OVER = "handed over: its window is run again by another replica"


@dataclass(frozen=True)
class ClaimRequest:
    """What a job or ``hold`` asks for: one run time of one task.

    :ivar task_name: the task's name
    :ivar min_lock: seconds from the run time until which its window lasts
    :ivar max_lock: seconds after which the run has to have ended
    :ivar run_time: the nominal run time, with a time zone; ``None`` for now
    :ivar exact: whether every replica computes the same run time
    :ivar lease: seconds after which a holder that does not renew counts as dead; ``None``: the
        maximum lock
    :ivar failover: whether the window is to be run again if its holder dies
    :ivar runs: what is run, so that nobody runs something else in its place: the function and, of
        a one-off job, its run date; ``""`` for ``hold``
    :ivar one_off: whether no other run time follows, so that the row can be deleted one day
    :ivar claim_id: made for this request; asking twice with it claims once
    :ivar keep_window_if_in_doubt: whether the window stays taken if the claim was sent and never
        answered, although the database may have granted it
    """

    task_name: str
    min_lock: float
    max_lock: float
    run_time: datetime | None = None
    exact: bool = False
    lease: float | None = None
    failover: bool = False
    runs: str = ""
    one_off: bool = False
    claim_id: UUID = field(default_factory=uuid4)
    keep_window_if_in_doubt: bool = False

    @property
    def ending_in_doubt(self) -> Ending:
        """How the claim is ended if it was sent and never answered."""
        if self.keep_window_if_in_doubt:
            return Ending.KEEP
        # Nobody takes a hold over: there is no job to run.
        return Ending.HAND_OVER if self.runs else Ending.OPEN

    def parameters(self, lag: float) -> dict[str, object]:
        """Return the parameters of its statement.

        :param lag: seconds since the run time, by the replica's clock; never below 0
        """
        return {
            "task_name": self.task_name,
            "claim_id": self.claim_id,
            "lag": lag,
            "run_time": self.run_time if self.exact else None,
            # psycopg prepares a statement anew for integers of each size.
            "min_lock": float(self.min_lock),
            "max_lock": float(self.max_lock),
            "lease": None if self.lease is None else float(self.lease),
            "failover": self.failover,
            "runs": self.runs,
            "one_off": self.one_off,
        }


@dataclass(frozen=True)
class TakeoverRequest:
    """A dead holder's run that is to be run again.

    :ivar task_name: the task's name
    :ivar dead_claim_id: the claim of the dead holder; no other is taken over
    :ivar dead_holder: shown in logs
    :ivar lease: seconds after which a holder that does not renew counts as dead; ``None``: the end
        of the maximum lock of the run that died, which a takeover keeps
    :ivar failover: whether the window is to be run again if this holder dies as well
    :ivar claim_id: made for this request; asking twice with it claims once
    """

    task_name: str
    dead_claim_id: UUID
    dead_holder: str
    lease: float | None = None
    failover: bool = True
    claim_id: UUID = field(default_factory=uuid4)

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of its statement."""
        return {
            "task_name": self.task_name,
            "claim_id": self.claim_id,
            "dead_claim_id": self.dead_claim_id,
            "lease": None if self.lease is None else float(self.lease),
            "failover": self.failover,
        }


@dataclass(frozen=True)
class ReadTimes:
    """What a claim is decided on besides its request, read right before it is sent.

    :ivar lag: seconds since the run time, by the replica's clock; never below 0
    :ivar latest: the latest time that the database's clock can have had then
    :ivar stable: whether the rows can be believed. If not, as after an outage, a run whose lease
        has ended may be going on, and stands against the claim.
    """

    lag: float = 0.0
    latest: datetime | None = None
    stable: bool = True


@dataclass(frozen=True)
class ClaimAnswer:
    """The task's row after a claim.

    :ivar granted: whether the claim stands and the job may run
    :ivar running: whether a run is going on, granted or not
    :ivar new_window: whether the window asked for was new, and was not granted
    :ivar unfinished: whether the last claim was never released: it is running, or its holder died
    :ivar waits: whether a dead run stands against the claim: its window is run again first, or the
        rows cannot be believed yet
    :ivar window_start: start of the last claim's window
    :ivar holder: replica of the last claim
    :ivar token: fencing token of the last claim
    :ivar locked_until: database time until which the last claim holds the task
    :ivar run_until: database time at which its maximum lock ends
    :ivar database_time: when this was decided
    :ivar claim_id: what a release of the last claim has to match on
    """

    granted: bool
    running: bool
    new_window: bool
    unfinished: bool
    waits: bool
    window_start: datetime
    holder: str
    token: int
    locked_until: datetime
    run_until: datetime
    database_time: datetime
    claim_id: UUID

    @property
    def looks_free(self) -> bool:
        """Whether nothing stands against the claim that was not granted.

        Then another claim has won while the statement was on its way, or has the row locked; and
        this is the row as it was before.
        """
        return self.new_window and not (self.running or self.granted or self.waits)

    def looks_dead(self, claim_id: UUID) -> bool:
        """Tell whether this claim is still the last one, and could be taken over.

        Then another replica is about to take it over, or has the row locked; and this is the row as
        it was before.
        """
        is_dead = self.unfinished and not (self.granted or self.running)
        return is_dead and self.claim_id == claim_id and self.database_time < self.run_until


@dataclass(frozen=True)
class Refusal:
    """A claim that another replica's claim, or an earlier run of the window, stood against.

    :ivar holder: replica of the last claim
    :ivar token: its fencing token
    :ivar locked_until: database time until which the task is held
    :ivar reason: ``"running"`` or ``"window"``
    :ivar renewed: whether its holder renews the claim, and so was alive less than a lease ago
    :ivar blocked: whether a run that is still going on, or whose holder died, stands against a
        window that is new
    :ivar unfinished: whether the last run was not released: it is going on, or its holder died
    :ivar waits: whether it is a run whose lease has ended: its window is run again first, or it
        is not yet sure that its holder died
    :ivar window_start: start of that run's window, in database time
    """

    holder: str
    token: int
    locked_until: datetime
    reason: str
    renewed: bool
    blocked: bool
    unfinished: bool
    waits: bool
    window_start: datetime

    @classmethod
    def of(cls, answer: ClaimAnswer) -> Refusal:
        """Return what an answer says that grants nothing."""
        standing = answer.running or answer.waits
        return cls(
            holder=answer.holder,
            token=answer.token,
            locked_until=answer.locked_until,
            reason="running" if standing else "window",
            renewed=answer.running and answer.locked_until < answer.run_until,
            blocked=standing and answer.new_window,
            unfinished=answer.unfinished,
            waits=answer.waits,
            window_start=answer.window_start,
        )


@dataclass(frozen=True)
class ReleaseAnswer:
    """The task's row after a release that found its claim.

    :ivar locked_until: database time at which the task's window ends
    :ivar database_time: when it was released
    """

    locked_until: datetime
    database_time: datetime


@dataclass(frozen=True)
class Renewal:
    """A claim that is to stand for another lease.

    :ivar lease: seconds, from the renewal on
    """

    task_name: str
    claim_id: UUID
    lease: float


@dataclass(frozen=True)
class LockTimes:
    """When a claim ends, after it was renewed or extended.

    :ivar locked_until: database time at which its lease ends; ``None`` if it could not be renewed,
        since somebody has locked the row
    :ivar run_until: database time at which its maximum lock ends
    :ivar database_time: when this was decided
    """

    locked_until: datetime | None
    run_until: datetime
    database_time: datetime


@dataclass(frozen=True)
class RunState:
    """The last run of a task, as its row tells of it.

    :ivar finished: whether it was released
    :ivar dead: whether it was not, and its lease has ended
    :ivar expired: whether its maximum lock has ended
    :ivar failover: whether its holder wanted it to be run again
    :ivar deaths: how many holders died since a run of the task ended
    :ivar handovers: how many holders handed this window over
    :ivar handed_over: whether its holder has handed it over, so that nobody need wait
    :ivar runs: what it runs, as of :class:`ClaimRequest`
    :ivar window_start: start of its window
    :ivar holder: who runs it, or ran it
    :ivar database_time: when this was read
    """

    task_name: str
    claim_id: UUID
    token: int
    finished: bool
    dead: bool
    expired: bool
    failover: bool
    deaths: int
    handovers: int
    handed_over: bool
    runs: str
    window_start: datetime
    holder: str
    database_time: datetime


class Statement:
    """A statement of ours, for a ``psycopg.RawCursor``.

    Its named parameters are numbered here, once. Else psycopg takes a statement of more than 4,096
    characters apart each time that it is sent, which costs as much as the round trip.

    :param template: with psycopg's named placeholders
    """

    def __init__(self, template: str) -> None:
        self._names: list[str] = []
        self._text = re.sub(r"%%|%\((\w+)\)s", self._numbered, " ".join(template.split()))

    def _numbered(self, found: re.Match[str]) -> str:
        name = found[1]
        if name is None:
            return "%"
        if name not in self._names:
            self._names.append(name)
        return f"${self._names.index(name) + 1}"

    def execute(self, cursor: Any, parameters: Mapping[str, object]) -> Any:
        """Run it, with those of the parameters that it has; return the cursor."""
        return cursor.execute(self._text, [parameters[name] for name in self._names])


class TaskLockProtocol:
    """The statements for one task lock table, run on a cursor as of ``raw_cursor``.

    :param replica_id: who asks, shown in logs
    :param lock_timeout: seconds that a statement waits in the server for a row that somebody has
        locked
    """

    def __init__(
        self, table: Table, replica_id: str = "", lock_timeout: float = LOCK_TIMEOUT
    ) -> None:
        # Quoted for PostgreSQL by SQLAlchemy. Its Core is not used to send the statements: that
        # adds about as much time again as a whole refused claim takes.
        name = quoted_name(table).replace("%", "%%")  # psycopg's placeholders begin with it
        self._own: dict[str, object] = {
            "replica_id": replica_id,
            "lock_timeout": f"{max(1, round(lock_timeout * 1000))}ms",
        }
        self._claim = Statement(statements.claim(name))
        self._claim_many = Statement(statements.claim_many(name))
        self._first_claim = Statement(statements.first_claim(name))
        self._first_claim_many = Statement(statements.first_claim_many(name))
        self._look = Statement(statements.look(name))
        self._take_over = Statement(statements.take_over(name))
        self._take_over_many = Statement(statements.take_over_many(name))
        self._look_after_takeover = Statement(statements.look_after_takeover(name))
        self._release = Statement(statements.release(name))
        self._release_many = Statement(statements.release_many(name))
        self._end_lease = Statement(statements.end_lease(name))
        self._give_up = Statement(statements.give_up(name))
        self._extend = Statement(statements.extend(name))
        self._renew = Statement(statements.renew(name))
        self._read = Statement(statements.read(name))
        self._prune = Statement(statements.prune(name))

    def claim(
        self,
        cursor: Any,
        request: ClaimRequest,
        times: ReadTimes = ReadTimes(),  # frozen
    ) -> ClaimAnswer:
        """Try to take the task for one run time. A refused claim writes nothing.

        :raises TaskLockError: the task's row can be neither read nor inserted
        """
        parameters = {
            **request.parameters(times.lag),
            "latest": times.latest,
            "stable": times.stable,
        }
        cursor.row_factory = class_row(ClaimAnswer)
        for _ in range(MOST_LOOKS):
            answer: ClaimAnswer | None = self._execute(cursor, self._claim, parameters).fetchone()
            if answer is None:
                # There is no row yet; or there is one since, and the claim goes on with that.
                answer = self._execute(cursor, self._first_claim, parameters).fetchone()
            elif answer.looks_free:
                # Another claim won while this statement waited for it. Look at what it made of the
                # row.
                answer = self._execute(cursor, self._look, parameters).fetchone()
            if answer is not None:
                return answer
        raise TaskLockError(
            f"task {request.task_name!r}: its row can be neither read nor inserted, although "
            "PostgreSQL reports no error; is there a policy or a trigger on the task lock table?"
        )

    def claim_many(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
    ) -> dict[UUID, ClaimAnswer]:
        """Try to take many tasks, each for one run time and each only once in the batch.

        :param lags: of each request, in place of the one in ``times``
        :return: the answers by the ids of the requests. One that is missing has no row: see
            :meth:`first_claim_many`. One that looks free is to be asked again: somebody else has
            its row locked.
        """
        return self._claims(cursor, self._claim_many, requests, lags, times)

    def first_claim_many(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
    ) -> dict[UUID, ClaimAnswer]:
        """Try to take many tasks that have no row. See :meth:`claim_many`.

        :return: the answers of those that were granted. One that is missing is to be asked again:
            it has a row by now.
        """
        return self._claims(cursor, self._first_claim_many, requests, lags, times)

    def _claims(
        self,
        cursor: Any,
        statement: Statement,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
    ) -> dict[UUID, ClaimAnswer]:
        asked = (r.parameters(lag) for r, lag in zip(requests, lags, strict=True))
        parameters = {
            **statements.many(asked),
            "latest": times.latest,
            "stable": times.stable,
        }
        return self._answers(cursor, statement, parameters)

    def take_over(self, cursor: Any, request: TakeoverRequest) -> ClaimAnswer | None:
        """Try to take over the claim of a dead holder. ``None``: the task has no row any more."""
        parameters = request.parameters
        cursor.row_factory = class_row(ClaimAnswer)
        answer: ClaimAnswer | None = self._execute(cursor, self._take_over, parameters).fetchone()
        if answer is not None and not answer.granted:
            # Maybe as it was before another replica took it over; see claim().
            answer = self._execute(cursor, self._look_after_takeover, parameters).fetchone()
        return answer

    def take_over_many(
        self, cursor: Any, requests: Sequence[TakeoverRequest]
    ) -> dict[UUID, ClaimAnswer]:
        """Try to take over many claims, each of another task.

        :return: the answers by the ids of the requests. One that is missing has no row any more.
            One that looks dead as before is to be asked again: somebody else has its row locked.
        """
        asked = statements.many(request.parameters for request in requests)
        return self._answers(cursor, self._take_over_many, asked)

    def release(
        self, cursor: Any, task_name: str, claim_id: UUID, ending: Ending = Ending.KEEP
    ) -> ReleaseAnswer | None:
        """End a claim. ``None`` means that it no longer stood, and that nothing was changed."""
        if ending is Ending.HAND_OVER:
            return self.end_lease(cursor, task_name, claim_id, handed_over=True)
        parameters = _release_parameters(task_name, claim_id, ending)
        cursor.row_factory = class_row(ReleaseAnswer)
        answer: ReleaseAnswer | None
        answer = self._execute(cursor, self._release, parameters).fetchone()
        return answer

    def release_many(
        self, cursor: Any, releases: Sequence[tuple[str, UUID, Ending]]
    ) -> dict[UUID, ReleaseAnswer | None]:
        """End many claims, each of another task.

        :param releases: task, claim and ending of each
        :return: the answers of the claims that stood, by claim id. ``None``: somebody else has the
            row locked; it is to be sent again.
        """
        asked = statements.many(_release_parameters(*each) for each in releases)
        rows = self._rows(cursor, self._release_many, asked)
        return {
            row.pop("asked_claim_id"): ReleaseAnswer(**row) if row["locked_until"] else None
            for row in rows
        }

    def end_lease(
        self,
        cursor: Any,
        task_name: str,
        claim_id: UUID,
        *,
        handed_over: bool,
        holders: Sequence[str] | None = None,
    ) -> ReleaseAnswer | None:
        """End the lease of a run that did not end, and will not.

        :param handed_over: whether its holder hands it over; else it counts as dead
        :param holders: only if one of these holds it
        :return: the task's row, or ``None`` if the claim no longer stood
        """
        parameters = {
            "task_name": task_name,
            "claim_id": claim_id,
            "handed_over": handed_over,
            "holders": None if holders is None else list(holders),
        }
        cursor.row_factory = class_row(ReleaseAnswer)
        answer: ReleaseAnswer | None
        answer = self._execute(cursor, self._end_lease, parameters).fetchone()
        return answer

    def give_up(self, cursor: Any, task_name: str, claim_id: UUID) -> bool:
        """Finish a dead run that is not to be run again; tell whether this replica did."""
        parameters = {"task_name": task_name, "claim_id": claim_id}
        return bool(self._execute(cursor, self._give_up, parameters).rowcount)

    def extend(
        self, cursor: Any, task_name: str, claim_id: UUID, by: float, lease: float | None
    ) -> LockTimes | None:
        """Move the end of a claim's maximum lock by seconds. ``None``: it stands no more."""
        parameters = {"task_name": task_name, "claim_id": claim_id, "by": by, "lease": lease}
        cursor.row_factory = class_row(LockTimes)
        times: LockTimes | None
        times = self._execute(cursor, self._extend, parameters).fetchone()
        return times

    def renew(self, cursor: Any, renewals: Sequence[Renewal]) -> dict[UUID, LockTimes]:
        """Let claims stand for another lease each.

        :return: when each of them ends now, by claim id. One that is missing stands no more.
        """
        parameters = {
            "task_names": [renewal.task_name for renewal in renewals],
            "claim_ids": [renewal.claim_id for renewal in renewals],
            "leases": [float(renewal.lease) for renewal in renewals],
        }
        rows = self._rows(cursor, self._renew, parameters)
        return {row.pop("claim_id"): LockTimes(**row) for row in rows}

    def read(
        self, cursor: Any, task_names: Sequence[str], always: Sequence[str] = ()
    ) -> tuple[list[RunState], datetime]:
        """Return which of these tasks have a dead run, and the database's time.

        :param always: tasks whose last run is returned whatever its state
        :raises TaskLockDatabaseError: the server is read-only. While nobody can renew or release,
            a run that looks dead need not be; and what a standby shows may be old.
        """
        rows = self._read_rows(cursor, list(task_names), list(always))
        are_read_only = [row.pop("read_only") for row in rows]
        if any(are_read_only):
            raise TaskLockDatabaseError("the server is read-only")
        states = [RunState(**row) for row in rows if row["task_name"] is not None]
        return states, rows[0]["database_time"]

    def _read_rows(
        self, cursor: Any, task_names: list[str], always: list[str]
    ) -> list[dict[str, Any]]:
        """Return the rows of the tasks whose names the database's encoding has."""
        always = list(set(always).intersection(task_names))
        parameters = {"task_names": task_names, "always": always}
        try:
            return self._rows(cursor, self._read, parameters)
        except _ENCODING_ERRORS:
            # What has such a name has no row. The claims of its job say so.
            if len(task_names) == 1:
                return self._read_rows(cursor, [], [])
            half = len(task_names) // 2
            rows = self._read_rows(cursor, task_names[:half], always)
            return rows + self._read_rows(cursor, task_names[half:], always)

    def prune(self, cursor: Any, age: float) -> int:
        """Delete rows of one-off jobs that were over so many seconds ago; return how many."""
        return int(self._execute(cursor, self._prune, {"age": age}).rowcount)

    def _execute(self, cursor: Any, statement: Statement, parameters: Mapping[str, object]) -> Any:
        return statement.execute(cursor, {**self._own, **parameters})

    def _answers(
        self, cursor: Any, statement: Statement, parameters: Mapping[str, object]
    ) -> dict[UUID, ClaimAnswer]:
        """Return the answers to many claims or takeovers, by the ids of the requests."""
        rows = self._rows(cursor, statement, parameters)
        return {row.pop("asked_claim_id"): ClaimAnswer(**row) for row in rows}

    def _rows(
        self, cursor: Any, statement: Statement, parameters: Mapping[str, object]
    ) -> list[dict[str, Any]]:
        cursor.row_factory = dict_row
        rows: list[dict[str, Any]] = self._execute(cursor, statement, parameters).fetchall()
        return rows


def _release_parameters(task_name: str, claim_id: UUID, ending: Ending) -> dict[str, object]:
    return {
        "task_name": task_name,
        "claim_id": claim_id,
        "keep_window": ending is Ending.KEEP,
        "hand_over": ending is Ending.HAND_OVER,
    }
