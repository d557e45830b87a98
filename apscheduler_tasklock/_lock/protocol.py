"""The lock protocol: what a replica asks of the database, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import psycopg
from psycopg.rows import class_row, dict_row, tuple_row
from sqlalchemy import Table

from apscheduler_tasklock._database.errors import one_line
from apscheduler_tasklock._lock import statements
from apscheduler_tasklock._lock.statements import History
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.schema.table import job_table, quoted_name, replica_table, run_table

logger = logging.getLogger(__name__)

# How often a claim looks for its row, which others may insert and delete meanwhile.
MOST_LOOKS = 10

# Seconds that a statement waits in the server for a row that somebody has locked. It keeps the
# replica's connection for so long; the wait of a commit for a disk is shorter as a rule.
LOCK_TIMEOUT = 0.03

# How many characters of an exception's message the run history keeps.
LONGEST_ERROR = 500

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
class RunEnd:
    """How a run ended: what becomes of its window, and what the row and the run history tell of it.

    :ivar ending: what becomes of its window
    :ivar outcome: ``"ok"``, ``"error"`` or ``"cancelled"``; ``""`` for one that never began
    :ivar error_type: the exception's class
    :ivar error: what it says, made fit to be stored
    :ivar next_in: seconds until the next run time, if that of the claim has passed
    :ivar is_last: whether no run time follows
    """

    ending: Ending = Ending.KEEP
    outcome: str = ""
    error_type: str | None = None
    error: str | None = None
    next_in: float | None = None
    is_last: bool = False

    @classmethod
    def of(
        cls,
        exception: BaseException | None,
        ending: Ending = Ending.KEEP,
        redact: Callable[[BaseException], str | None] = str,
    ) -> RunEnd:
        """Return the end of a run that this exception has left, or none.

        :param redact: returns what is stored of the exception's message
        """
        if exception is None:
            return cls(ending, "ok")
        if isinstance(exception, (asyncio.CancelledError, GeneratorExit)):
            return cls(ending, "cancelled")
        return cls(ending, "error", _class_of(exception), _message_of(exception, redact))


# Of a claim whose run never began.
NOT_BEGUN = RunEnd()


@dataclass(frozen=True)
class ReleaseRequest:
    """A claim that is to be ended.

    :ivar task_name: the task's name
    :ivar claim_id: the claim; no other is ended
    :ivar end: how its run ended
    :ivar token: of the claim, if it is known
    """

    task_name: str
    claim_id: UUID
    end: RunEnd = NOT_BEGUN
    token: int | None = None

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of its statement."""
        end = self.end
        return {
            "task_name": self.task_name,
            "claim_id": self.claim_id,
            "keep_window": end.ending is Ending.KEEP,
            "hand_over": end.ending is Ending.HAND_OVER,
            "token": self.token,
            "outcome": end.outcome,
            "error_type": end.error_type,
            "error": end.error,
            "next_in": end.next_in,
            "is_last": end.is_last,
        }


@dataclass(frozen=True)
class HandOut:
    """A run time of a job of the job store, handed out to this replica for a short time.

    :ivar job_id: the job
    :ivar handed_id: of this hand-out, which is the fence of all that is done with it
    :ivar run_time: the run time, with a time zone
    :ivar following: the run time after it; ``None`` if there is none
    :ivar due_at: when it was due, on the monotonic clock, by the database's clock
    :ivar is_late_by_nature: whether it is late, and yet no misfire: it was handed out in time
        before, to a replica that has not run it; or it came due while its task ran by hand
    """

    job_id: str
    handed_id: UUID
    run_time: datetime
    following: datetime | None
    due_at: float
    is_late_by_nature: bool = False

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of a statement that moves its job on."""
        return {
            "job_id": self.job_id,
            "handed_id": self.handed_id,
            "following": self.following,
        }


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
    :ivar schedule: the trigger in canonical form; ``None`` for ``hold``
    :ivar next_in: seconds from the run time to the next one; ``None`` if nobody knows
    :ivar is_last: whether no run time follows
    :ivar grace: seconds after the next run time after which it counts as overdue
    :ivar max_runtime: seconds after which the run takes too long; ``None``: the maximum lock
    :ivar claim_id: made for this request; asking twice with it claims once
    :ivar keep_window_if_in_doubt: whether the window stays taken if the claim was sent and never
        answered, although the database may have granted it
    :ivar hand_out: of a job of the job store, which the claim moves to its next run time
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
    schedule: str | None = None
    next_in: float | None = None
    is_last: bool = False
    grace: float = 60.0
    max_runtime: float | None = None
    claim_id: UUID = field(default_factory=uuid4)
    keep_window_if_in_doubt: bool = False
    hand_out: HandOut | None = None

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
        parameters = self.window_parameters(lag)
        parameters |= {
            "max_lock": float(self.max_lock),
            "lease": None if self.lease is None else float(self.lease),
            "one_off": self.one_off,
            "schedule": self.schedule,
            "next_in": None if self.next_in is None else float(self.next_in),
            "is_last": self.is_last,
            "grace": float(self.grace),
            "max_runtime": None if self.max_runtime is None else float(self.max_runtime),
        }
        return parameters

    def window_parameters(self, lag: float) -> dict[str, object]:
        """Return those parameters that say whether its window is taken; see :meth:`parameters`."""
        return {
            "task_name": self.task_name,
            "claim_id": self.claim_id,
            "lag": lag,
            "run_time": self.run_time if self.exact else None,
            # psycopg prepares a statement anew for integers of each size.
            "min_lock": float(self.min_lock),
            "failover": self.failover,
            "runs": self.runs,
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


class ClaimAnswer(NamedTuple):
    """The task's row after a claim.

    :ivar granted: whether the claim stands and the job may run
    :ivar running: whether a run is going on, granted or not
    :ivar new_window: whether the window asked for was new, and was not granted
    :ivar unfinished: whether the last claim was never released: it is running, or its holder died
    :ivar waits: whether a dead run stands against the claim: its window is run again first, or the
        rows cannot be believed yet
    :ivar paused: whether the task is paused, or was when the run time was due
    :ivar window_start: start of the last claim's window
    :ivar holder: replica of the last claim
    :ivar token: fencing token of the last claim
    :ivar locked_until: database time until which the last claim holds the task
    :ivar run_until: database time at which its maximum lock ends
    :ivar database_time: when this was decided
    :ivar claim_id: what a release of the last claim has to match on
    :ivar manual: whether the last run was asked for by hand, or runs one again that was
    :ivar was_overdue: whether somebody had told before that the task is overdue
    :ivar withdrawn: of a run time that was handed out, whether it is so no more
    """

    granted: bool
    running: bool
    new_window: bool
    unfinished: bool
    waits: bool
    paused: bool
    window_start: datetime
    holder: str
    token: int
    locked_until: datetime
    run_until: datetime
    database_time: datetime
    claim_id: UUID
    manual: bool = False
    was_overdue: bool = False
    withdrawn: bool = False

    @property
    def looks_free(self) -> bool:
        """Whether nothing stands against the claim that was not granted.

        Then another claim has won while the statement was on its way, or has the row locked; and
        this is the row as it was before.
        """
        stands_against = self.running or self.granted or self.waits or self.paused
        return self.new_window and not (stands_against or self.withdrawn)

    @property
    def follows_death(self) -> bool:
        """Whether nothing stands against the claim but that the last run's holder died.

        If it did: it may have handed its run over, and another claim have won.
        """
        return self.unfinished and self.looks_free

    def looks_dead(self, claim_id: UUID) -> bool:
        """Tell whether this claim is still the last one, and could be taken over.

        Then another replica is about to take it over, or has the row locked; and this is the row as
        it was before.
        """
        is_dead = self.unfinished and not (self.granted or self.running or self.paused)
        return is_dead and self.claim_id == claim_id and self.database_time < self.run_until


@dataclass(frozen=True)
class Refusal:
    """A claim that another replica's claim, or an earlier run of the window, stood against.

    :ivar holder: replica of the last claim
    :ivar token: its fencing token
    :ivar locked_until: database time until which the task is held
    :ivar reason: ``"paused"``, ``"running"``, ``"window"``, or ``"withdrawn"`` for a run time that
        is handed out no more
    :ivar renewed: whether its holder renews the claim, and so was alive less than a lease ago
    :ivar blocked: whether a run that is still going on, or whose holder died, stands against a
        window that is new
    :ivar unfinished: whether the last run was not released: it is going on, or its holder died
    :ivar waits: whether it is a run whose lease has ended: its window is run again first, or it
        is not yet sure that its holder died
    :ivar window_start: start of that run's window, in database time
    :ivar manual: whether it was asked for by hand
    :ivar taken: whether the window was claimed before, and not opened again
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
    manual: bool = False
    taken: bool = False

    @classmethod
    def of(cls, answer: ClaimAnswer) -> Refusal:
        """Return what an answer says that grants nothing."""
        standing = answer.running or answer.waits
        reason = "paused" if answer.paused else "running" if standing else "window"
        if answer.withdrawn:
            reason = "withdrawn"
        return cls(
            holder=answer.holder,
            token=answer.token,
            locked_until=answer.locked_until,
            reason=reason,
            renewed=answer.running and answer.locked_until < answer.run_until,
            blocked=standing and answer.new_window and not answer.paused,
            unfinished=answer.unfinished,
            waits=answer.waits,
            window_start=answer.window_start,
            manual=answer.running and answer.manual,
            taken=not (answer.new_window or answer.withdrawn),
        )


class ReleaseAnswer(NamedTuple):
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
    :ivar manual: whether it was asked for by hand, so that its window is another run's
    :ivar request_id: of a run that was asked for by hand, and has not begun
    :ivar schedule: its trigger in canonical form, if somebody has told it
    :ivar due_at: when it was due, if that has passed and it neither runs nor is paused
    :ivar overdue: whether its grace time has passed as well
    :ivar told_overdue: whether somebody has told that
    :ivar paused: whether it is paused
    :ivar due_in_pause: whether it was due in a pause, and so nobody knows when it is
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
    manual: bool = False
    request_id: UUID | None = None
    schedule: str | None = None
    due_at: datetime | None = None
    overdue: bool = False
    told_overdue: bool = False
    paused: bool = False
    due_in_pause: bool = False


@dataclass(frozen=True)
class Overdue:
    """A task that was due, and that nobody has run since.

    :ivar due_at: when it was due
    :ivar holder: who ran it last; ``""`` if nobody has
    :ivar token: of that run
    """

    due_at: datetime
    holder: str
    token: int


@dataclass(frozen=True)
class ManualRequest:
    """A run that was asked for by hand, as a replica claims it.

    :ivar task_name: the task's name
    :ivar request_id: which was read in its row
    :ivar max_lock: seconds after which the run has to have ended
    :ivar lease: as of :class:`ClaimRequest`, like what follows
    """

    task_name: str
    request_id: UUID
    max_lock: float
    lease: float | None = None
    failover: bool = False
    runs: str = ""
    max_runtime: float | None = None
    claim_id: UUID = field(default_factory=uuid4)

    def parameters(self, *, stable: bool) -> dict[str, object]:
        """Return the parameters of its statement."""
        return {**vars(self), "stable": stable}


@dataclass(frozen=True)
class Registration:
    """A task that a replica has, as its scheduler knows it.

    :ivar task_name: the task's name
    :ivar schedule: its trigger in canonical form
    :ivar next_in: seconds until its next run time; ``None`` if it is paused in its scheduler
    :ivar grace: seconds after that after which it counts as overdue
    :ivar moved: whether the job has changed while its scheduler ran, so that it is due anew
    :ivar least_gap: seconds that two of its run times have to be apart, whatever the windows
    :ivar runs: what it runs, as of :class:`ClaimRequest`
    :ivar period: seconds from its next run time to the one after it; ``None`` if nobody knows
    """

    task_name: str
    schedule: str
    next_in: float | None
    grace: float
    least_gap: float
    runs: str
    moved: bool = False
    period: float | None = None


class Statement:
    """A statement of ours, for a ``psycopg.RawCursor``.

    Its named parameters are numbered here, once. Else psycopg takes a statement of more than 4,096
    characters apart each time that it is sent, which costs as much as the round trip.

    :param template: with psycopg's named placeholders
    :param answers: the named tuple that each of its rows becomes, if they do: its fields are named
        as the columns
    :ivar text: with numbered placeholders
    :ivar query: what is sent
    """

    def __init__(self, template: str, answers: Any = None) -> None:
        self.answers = answers
        self._names: list[str] = []
        self._columns: list[str] = []
        self._read: Callable[[Sequence[Any]], Any] | None = None
        self.text = re.sub(r"%%|%\((\w+)\)s", self._numbered, " ".join(template.split()))
        # As bytes, which are the same in each encoding: psycopg looks a statement up by its hash,
        # which bytes keep; a text is encoded anew each time, and all of it is hashed.
        self.query = self.text.encode() if self.text.isascii() else self.text

    def _numbered(self, found: re.Match[str]) -> str:
        name = found[1]
        if name is None:
            return "%"
        if name not in self._names:
            self._names.append(name)
        return f"${self._names.index(name) + 1}"

    def arguments(self, parameters: Mapping[str, object]) -> list[object]:
        """Return those of the parameters that it has, in order."""
        return [parameters[name] for name in self._names]

    def one(self, cursor: Any) -> Any:
        """Return the row that a cursor has got for it, as a named tuple; ``None``: it has none."""
        row = cursor.fetchone()
        return None if row is None else self._reader(cursor)(row)

    def by_claim_id(self, cursor: Any) -> dict[UUID, Any]:
        """Return the rows that a cursor has got for it, by the claims that were asked for."""
        rows = cursor.fetchall()
        if not rows:
            return {}
        read, claim_id = self._reader(cursor), self._columns.index("asked_claim_id")
        return {row[claim_id]: read(row) for row in rows}

    def _reader(self, cursor: Any) -> Callable[[Sequence[Any]], Any]:
        """Return what makes a named tuple of a row. It is made with the first one.

        psycopg's own would look for the names of the columns with each answer.
        """
        if self._read is None:
            kind = self.answers
            self._columns = [column.name for column in cursor.description]
            fields = [name for name in kind._fields if name in self._columns]
            pick = itemgetter(*(self._columns.index(name) for name in fields))
            # Those that it lacks come last, and have defaults.
            self._read = lambda row: kind(*pick(row))
        return self._read


class RecordingStatement(Statement):
    """A statement that writes run history as well, and the same one without that.

    :param make: returns the statement's text for a table, and for a history as well
    :param is_batch: whether it is for many requests
    """

    def __init__(
        self,
        make: Callable[..., str],
        table: str,
        history: History | None,
        answers: Any = None,
        *,
        is_batch: bool = False,
    ) -> None:
        super().__init__(make(table), answers)
        self.recording = Statement(make(table, history)) if history else None
        self.is_batch = is_batch


@dataclass(frozen=True)
class HistorySettings:
    """Which runs the run history keeps.

    :ivar runs: how many of each task; 0: none
    :ivar errors_only: whether runs that ended well are left out
    """

    runs: int = 100
    errors_only: bool = False

    def of(self, table: Table) -> History | None:
        """Return where the history beside a task lock table is written."""
        if not self.runs:
            return None
        return History(for_template(run_table(table)), self.runs, self.errors_only)


HISTORY = HistorySettings()


class TaskLockProtocol:
    """The statements for one task lock table, run on a cursor as of ``raw_cursor``.

    :param replica_id: who asks, shown in logs
    :param lock_timeout: seconds that a statement waits in the server for a row that somebody has
        locked
    :param history: which runs the run history keeps
    """

    def __init__(
        self,
        table: Table,
        replica_id: str = "",
        lock_timeout: float = LOCK_TIMEOUT,
        history: HistorySettings = HISTORY,
    ) -> None:
        # Quoted for PostgreSQL by SQLAlchemy. Its Core is not used to send the statements: that
        # adds about as much time again as a whole refused claim takes.
        name, runs = for_template(table), history.of(table)
        self._run_table = run_table(table)
        self._records = runs is not None
        self._own: dict[str, object] = {
            "replica_id": replica_id,
            "lock_timeout": f"{max(1, round(lock_timeout * 1000))}ms",
        }
        self._claim_after_end = Statement(statements.claim_after_end(name), ClaimAnswer)
        self._claim = RecordingStatement(statements.claim, name, runs, ClaimAnswer)
        self._claim_many_after_end = Statement(statements.claim_many_after_end(name), ClaimAnswer)
        self._claim_many = RecordingStatement(
            statements.claim_many, name, runs, ClaimAnswer, is_batch=True
        )
        self._find_taken = Statement(statements.find_taken(name), ClaimAnswer)
        self._first_claim = Statement(statements.first_claim(name), ClaimAnswer)
        self._first_claim_many = Statement(statements.first_claim_many(name), ClaimAnswer)
        self._look = Statement(statements.look(name), ClaimAnswer)
        self._take_over = RecordingStatement(statements.take_over, name, runs, ClaimAnswer)
        self._take_over_many = RecordingStatement(
            statements.take_over_many, name, runs, ClaimAnswer, is_batch=True
        )
        self._look_after_takeover = Statement(statements.look_after_takeover(name), ClaimAnswer)
        self._release = RecordingStatement(statements.release, name, runs, ReleaseAnswer)
        self._hand_over = RecordingStatement(statements.hand_over, name, runs, ReleaseAnswer)
        self._release_many = RecordingStatement(
            statements.release_many, name, runs, ReleaseAnswer, is_batch=True
        )
        self._end_lease = Statement(statements.end_lease(name), ReleaseAnswer)
        self._give_up = RecordingStatement(statements.give_up, name, runs)
        self._extend = Statement(statements.extend(name))
        self._renew = Statement(statements.renew(name))
        self._read = Statement(statements.read(name))
        self._prune = RecordingStatement(statements.prune, name, runs)
        self._shorten_history = Statement(statements.shorten_history(runs)) if runs else None
        self._claim_requested = RecordingStatement(
            statements.claim_requested, name, runs, ClaimAnswer
        )
        self._register = Statement(statements.register(name))
        self._tell_overdue = Statement(statements.tell_overdue(name))
        self._claim_handed_out = RecordingStatement(
            partial(statements.claim_handed_out, jobs=for_template(job_table(table))), name, runs
        )
        replicas = for_template(replica_table(table))
        self._report_replica = Statement(statements.report_replica(replicas))
        self._stop_replica = Statement(statements.stop_replica(replicas))
        self._retire = Statement(statements.retire(name, replicas))
        self._remove_replicas = Statement(statements.remove_replicas(replicas))

    def claim(
        self,
        cursor: Any,
        request: ClaimRequest,
        times: ReadTimes = ReadTimes(),  # frozen
    ) -> ClaimAnswer:
        """Try to take the task for one run time. A refused claim writes nothing.

        :raises TaskLockError: the task's row can be neither read nor inserted
        """
        parameters = request.parameters(times.lag)
        parameters |= {"latest": times.latest, "stable": times.stable}
        cursor.row_factory = tuple_row
        for _ in range(MOST_LOOKS):
            self._execute(cursor, self._claim_after_end, parameters)
            answer: ClaimAnswer | None = self._claim_after_end.one(cursor)
            if answer is not None and answer.follows_death:
                # Which is noted.
                self._execute(cursor, self._claim, parameters)
                answer = self._claim.one(cursor)
            if answer is None:
                # There is no row yet; or there is one since, and the claim goes on with that.
                self._execute(cursor, self._first_claim, parameters)
                answer = self._first_claim.one(cursor)
            elif answer.looks_free:
                # Another claim won while this statement waited for it. Look at what it made of the
                # row.
                self._execute(cursor, self._look, parameters)
                answer = self._look.one(cursor)
            if answer is not None:
                return answer
        raise TaskLockError(
            f"task {request.task_name!r}: its row can be neither read nor inserted, although "
            "PostgreSQL reports no error; is there a policy or a trigger on the task lock table?"
        )

    def claim_handed_out(
        self, cursor: Any, request: ClaimRequest, *, stable: bool
    ) -> ClaimAnswer | None:
        """Try to take the task of a job for the run time that was handed out, and move the job on.

        :param stable: as of :class:`ReadTimes`
        :return: ``None`` if it is handed out no more, and the task has no row
        :raises TaskLockError: the task's row can be neither read nor inserted
        """
        assert request.hand_out is not None
        parameters = {
            **request.parameters(0.0),
            **request.hand_out.parameters,
            "run_time": request.hand_out.run_time,
            "stable": stable,
        }
        for _ in range(MOST_LOOKS):
            [row] = self._rows(cursor, self._claim_handed_out, parameters)
            if row["granted"] is None:
                if row["withdrawn"]:
                    return None
                continue  # another claim has inserted the task's row meanwhile
            answer = ClaimAnswer(**row)
            if not answer.looks_free:  # or else another claim won while this one waited for it
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
        asked = [r.parameters(lag) for r, lag in zip(requests, lags, strict=True)]
        answers = self._claims(cursor, self._claim_many_after_end, asked, times)
        after_death = [
            parameters
            for request, parameters in zip(requests, asked, strict=True)
            if request.claim_id in answers and answers[request.claim_id].follows_death
        ]
        if after_death:
            answers |= self._claims(cursor, self._claim_many, after_death, times)
        return answers

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
        asked = (r.parameters(lag) for r, lag in zip(requests, lags, strict=True))
        return self._claims(cursor, self._first_claim_many, asked, times)

    def find_taken(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
    ) -> dict[UUID, ClaimAnswer]:
        """Tell which of many claims would be refused, since their windows are taken.

        It changes nothing. See :meth:`claim_many`.

        :return: their answers. One that is missing may be granted, or has a name with characters
            that the database's encoding lacks.
        """
        try:
            asked = (r.window_parameters(lag) for r, lag in zip(requests, lags, strict=True))
            return self._claims(cursor, self._find_taken, asked, times)
        except _ENCODING_ERRORS:
            half = len(requests) // 2
            if not half:
                return {}
            first = self.find_taken(cursor, requests[:half], lags[:half], times)
            return first | self.find_taken(cursor, requests[half:], lags[half:], times)

    def _claims(
        self,
        cursor: Any,
        statement: Statement,
        asked: Iterable[Mapping[str, object]],
        times: ReadTimes,
    ) -> dict[UUID, ClaimAnswer]:
        parameters = {**statements.many(asked), "latest": times.latest, "stable": times.stable}
        return self._answers(cursor, statement, parameters)

    def take_over(self, cursor: Any, request: TakeoverRequest) -> ClaimAnswer | None:
        """Try to take over the claim of a dead holder. ``None``: the task has no row any more."""
        parameters = request.parameters
        cursor.row_factory = tuple_row
        self._execute(cursor, self._take_over, parameters)
        answer: ClaimAnswer | None = self._take_over.one(cursor)
        if answer is not None and not answer.granted:
            # Maybe as it was before another replica took it over; see claim().
            self._execute(cursor, self._look_after_takeover, parameters)
            answer = self._look_after_takeover.one(cursor)
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

    def release(self, cursor: Any, request: ReleaseRequest) -> ReleaseAnswer | None:
        """End a claim. ``None`` means that it no longer stood, and that nothing was changed."""
        hands_over = request.end.ending is Ending.HAND_OVER
        statement = self._hand_over if hands_over else self._release
        cursor.row_factory = tuple_row
        try:  # as in `_execute`, with a frame less
            cursor.execute(*self._query(statement, request.parameters))
        except (psycopg.DatabaseError, UnicodeError) as error:
            self._execute_without_history(cursor, statement, request.parameters, error)
        answer: ReleaseAnswer | None = statement.one(cursor)
        return answer

    def release_many(
        self, cursor: Any, requests: Sequence[ReleaseRequest]
    ) -> dict[UUID, ReleaseAnswer | None]:
        """End many claims, each of another task.

        :return: the answers of the claims that stood, by claim id. ``None``: somebody else has the
            row locked; it is to be sent again.
        """
        asked = statements.many(request.parameters for request in requests)
        cursor.row_factory = tuple_row
        self._execute(cursor, self._release_many, asked)
        answers = self._release_many.by_claim_id(cursor)
        return {
            claim_id: answer if answer.locked_until else None
            for claim_id, answer in answers.items()
        }

    def end_lease(
        self, cursor: Any, task_name: str, claim_id: UUID, holders: Sequence[str]
    ) -> ReleaseAnswer | None:
        """End the lease of a run whose holder, one of these, is known to be dead.

        :return: the task's row, or ``None`` if the claim no longer stood
        """
        parameters = {"task_name": task_name, "claim_id": claim_id, "holders": list(holders)}
        cursor.row_factory = tuple_row
        self._execute(cursor, self._end_lease, parameters)
        answer: ReleaseAnswer | None = self._end_lease.one(cursor)
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

    def claim_requested(
        self, cursor: Any, request: ManualRequest, *, stable: bool
    ) -> ClaimAnswer | None:
        """Try to begin a run that was asked for by hand. ``None``: the task has no row any more."""
        cursor.row_factory = tuple_row
        self._execute(cursor, self._claim_requested, request.parameters(stable=stable))
        answer: ClaimAnswer | None = self._claim_requested.one(cursor)
        return answer

    def register(self, cursor: Any, tasks: Sequence[Registration]) -> list[str]:
        """Tell of the tasks that a replica has; each once.

        :return: those that are to be told again, since somebody has their rows locked
        """
        asked = statements.many({**vars(task), "is_last": False} for task in tasks)
        return [row["task_name"] for row in self._rows(cursor, self._register, asked)]

    def tell_overdue(self, cursor: Any, task_name: str) -> Overdue | None:
        """Take it on to tell that a task is overdue; ``None`` if it is not, or another has."""
        cursor.row_factory = class_row(Overdue)
        told: Overdue | None = self._execute(
            cursor, self._tell_overdue, {"task_name": task_name}
        ).fetchone()
        return told

    def report_replica(
        self,
        cursor: Any,
        host: str,
        version: str,
        tasks: Sequence[str],
        started_at: datetime | None = None,
        dropped: Collection[str] = (),
        *,
        has_all: bool = True,
    ) -> datetime:
        """Say that this replica is alive, and which tasks it has; return when its id started.

        Nobody waits any more for tasks that no replica has, if they were removed.

        :param started_at: what this returned the first time; ``None`` then
        :param dropped: the tasks that it had, and that were removed here
        :param has_all: whether it has had the time to get all of its jobs: what a replica before it
            had, and it has not, was removed then
        """
        parameters = {
            "host": host,
            "version": version,
            "tasks": list(tasks),
            "started_at": started_at,
        }
        cursor.row_factory = dict_row
        row = self._execute(cursor, self._report_replica, parameters).fetchone()
        started: datetime = row["started_at"]
        successor_of = list(tasks) if has_all else []
        self._execute(cursor, self._retire, {"tasks": successor_of, "dropped": list(dropped)})
        return started

    def stop_replica(self, cursor: Any) -> None:
        """Say that this replica stops."""
        self._execute(cursor, self._stop_replica, {})

    def remove_replicas(self, cursor: Any, age: float) -> None:
        """Delete the replicas that were last seen so many seconds ago."""
        self._execute(cursor, self._remove_replicas, {"age": age})

    def shorten_history(self, cursor: Any, task_names: Sequence[str]) -> None:
        """Delete what is left of these tasks' history from when it was longer than now."""
        if self._shorten_history is not None:
            self._execute(cursor, self._shorten_history, {"names": list(task_names)})

    def prune(self, cursor: Any, age: float) -> int:
        """Delete rows of one-off jobs that were over so many seconds ago; return how many."""
        return int(self._execute(cursor, self._prune, {"age": age}).rowcount)

    def _execute(self, cursor: Any, statement: Statement, parameters: Mapping[str, object]) -> Any:
        try:
            return cursor.execute(*self._query(statement, parameters))
        except (psycopg.DatabaseError, UnicodeError) as error:
            return self._execute_without_history(cursor, statement, parameters, error)

    def _query(
        self, statement: Statement, parameters: Mapping[str, object]
    ) -> tuple[str | bytes, list[object]]:
        """Return what is sent, and the values of its parameters."""
        if self._records and isinstance(statement, RecordingStatement) and statement.recording:
            statement = statement.recording
        return statement.query, statement.arguments({**self._own, **parameters})

    def _execute_without_history(
        self,
        cursor: Any,
        statement: Statement,
        parameters: Mapping[str, object],
        error: psycopg.DatabaseError | UnicodeError,
    ) -> Any:
        """Send a statement again that failed by its history; the lock does not depend on that.

        :raises psycopg.DatabaseError: it has another reason
        :raises UnicodeError: likewise
        """
        is_set_up_wrong = isinstance(error, psycopg.ProgrammingError)
        if (
            not (self._records and isinstance(statement, RecordingStatement))
            or isinstance(error, (psycopg.OperationalError, psycopg.InternalError))
            # A batch is sent again one by one, on account of one entry.
            or (statement.is_batch and not is_set_up_wrong)
        ):
            raise error
        # What an exception says may have characters that the database's encoding lacks.
        unsaid = {name: None for name in ("error", "error_type") if name in parameters}
        values = statement.arguments({**self._own, **parameters, **unsaid})
        done = cursor.execute(statement.query, values)
        if isinstance(error, psycopg.ProgrammingError):
            self._stop_recording(error)
        return done

    def _stop_recording(self, error: psycopg.Error) -> None:
        if self._records:
            self._records = False
            logger.info(
                "No run history is written from now on, as PostgreSQL says: %s. If it is missing, "
                "GRANT SELECT, INSERT, UPDATE ON %s to the application's role, and restart",
                one_line(error),
                quoted_name(self._run_table),
            )

    def _answers(
        self, cursor: Any, statement: Statement, parameters: Mapping[str, object]
    ) -> dict[UUID, ClaimAnswer]:
        """Return the answers to many claims or takeovers, by the ids of the requests."""
        cursor.row_factory = tuple_row
        self._execute(cursor, statement, parameters)
        return statement.by_claim_id(cursor)

    def _rows(
        self, cursor: Any, statement: Statement, parameters: Mapping[str, object]
    ) -> list[dict[str, Any]]:
        cursor.row_factory = dict_row
        rows: list[dict[str, Any]] = self._execute(cursor, statement, parameters).fetchall()
        return rows


def _class_of(exception: BaseException) -> str:
    kind = type(exception)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return _fit(module + kind.__qualname__)


def _message_of(
    exception: BaseException, redact: Callable[[BaseException], str | None]
) -> str | None:
    try:
        text = redact(exception)
        return None if text is None else _fit(str(text))
    except BaseException:  # an application's own code, which may exit; the release must not fail
        logger.exception("What %s says is not in the run history", _class_of(exception))
        return None


def _fit(text: str) -> str:
    """Return a text as PostgreSQL can store it: without NUL and surrogates, and not too long."""
    return text[:LONGEST_ERROR].replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def for_template(table: Table) -> str:
    """Return a table's name for a statement with psycopg's placeholders, which begin with ``%``."""
    return quoted_name(table).replace("%", "%%")
