"""The lock protocol: carries out the messages of a replica by statements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from itertools import accumulate, product
from math import ceil
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import Table

from apscheduler_tasklock._database.encoding import lacking, unstorable
from apscheduler_tasklock._database.outage import as_unavailable
from apscheduler_tasklock._database.rejections import OLD_HISTORY, RUN_HISTORY, Rejections
from apscheduler_tasklock._database.sqlstates import one_line
from apscheduler_tasklock._lock import statements
from apscheduler_tasklock._lock.outcomes import END_TEXTS, WindowAfter
from apscheduler_tasklock._lock.parameters import many, rows_of
from apscheduler_tasklock._lock.protocol_messages import (
    Answer,
    Claim,
    ClaimAnswer,
    Claims,
    ClosedDeadRun,
    EndLease,
    Extend,
    GiveUp,
    Lead,
    LockEnds,
    Message,
    MissNote,
    MissNotes,
    PruneOneOffs,
    ReadTasks,
    Registered,
    Registration,
    Registrations,
    ReleaseAnswer,
    ReleaseRequest,
    Releases,
    RemoveReplicas,
    Renewals,
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
from apscheduler_tasklock._lock.statements import (
    History,
    RecordingStatement,
    Statement,
    for_template,
)
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError, TaskLockSchemaError
from apscheduler_tasklock.options import KEEP_ONE_OFFS
from apscheduler_tasklock.schema.check import explain_missing_rights, find_problem
from apscheduler_tasklock.schema.table import LARGEST_REPLICA, job_table, replica_table, run_table

logger = logger_of(__name__)

# Limits how often a claim looks for its task's row, because other replicas may insert and delete
# the row again and again.
MOST_LOOKS = 10

# Limits the seconds that a statement waits in the server for a locked row, because the replica's
# other requests wait for the connection meanwhile. The limit is long enough for most commits of
# other sessions, which wait for a disk.
LOCK_TIMEOUT = 0.03

# The error of a batch in which one task's row has a value that PostgreSQL cannot compute with, such
# as PostgreSQL's latest time. The batch is split, so that the other tasks are not affected.
_ERROR_OF_ONE = psycopg.DataError

# Limits the bytes of the names of a replica's tasks. The limit is less than half of the limit of a
# replica's row, because some names take twice as many bytes in the row.
LONGEST_TASK_LIST = LARGEST_REPLICA * 2 // 5

# Limits the runs of each task in the run history, unless the option `history` does.
HISTORY = 100


def history_beside(table: Table, runs: int) -> History | None:
    """Return the run history of a task lock table.

    :param runs: how many runs of each task the history keeps; 0: there is no history
    """
    return History(for_template(run_table(table)), runs) if runs else None


class TaskLockStatements:
    """Carries out messages for one task lock table, on a cursor of a ``Wire``.

    :param replica_id: the replica's id
    :param lock_timeout: limits the wait of a statement in the server for a locked row, in seconds
    :param history: how many runs of each task the run history keeps; 0: none
    :param rejections: notes a rejected run history
    :param release: the release of the application that runs here; ``None``: it is not known
    :param keep_one_offs: how long rows of ended one-off jobs are kept, in seconds; reported with
        the signs of life
    """

    def __init__(
        self,
        table: Table,
        replica_id: str = "",
        lock_timeout: float = LOCK_TIMEOUT,
        history: int = HISTORY,
        rejections: Rejections | None = None,
        release: str | None = None,
        keep_one_offs: float = KEEP_ONE_OFFS,
    ) -> None:
        # SQLAlchemy only quotes the names. SQLAlchemy does not send the statements, because its
        # Core alone takes about as long as a whole refused claim.
        name, runs = for_template(table), history_beside(table, history)
        replicas, jobs = for_template(replica_table(table)), for_template(job_table(table))
        self._table = table
        self._rejections = rejections or Rejections()
        self._has_warned = False
        self._own: dict[str, object] = {
            "replica_id": replica_id,
            "release": release,
            "keep_one_offs": ceil(keep_one_offs),
            "lock_timeout": f"{max(1, round(lock_timeout * 1000))}ms",
        }

        def recording(
            make: Callable[..., str],
            message: type[Message[Any]],
            answers: Any = None,
            *,
            is_batch: bool = False,
            **more: Any,
        ) -> RecordingStatement:
            made = partial(make, **more)
            return RecordingStatement(made, name, runs, answers, message, is_batch=is_batch)

        self._claim = recording(statements.claim, Claim, ClaimAnswer)
        # The claims of several tasks, by whether the tasks have no rows, and whether the number of
        # grants is limited.
        self._claims: dict[tuple[bool, bool], Statement] = {}
        for limited in (False, True):
            self._claims[False, limited] = recording(
                statements.claim_many, Claims, ClaimAnswer, is_batch=True, limited=limited
            )
            first = statements.first_claim_many(name, limited=limited)
            self._claims[True, limited] = Statement(first, ClaimAnswer, Claims)
        self._claim_stored = recording(
            statements.claim_and_move, StoredClaims, ClaimAnswer, is_batch=True, jobs=jobs
        )
        self._reruns = {
            kind: recording(statements.rerun, Reruns, ClaimAnswer, is_batch=True, kind=kind)
            for kind in ("takeover", "retry", "manual")
        }
        self._release = recording(statements.release, ReleaseRequest, ReleaseAnswer)
        self._hand_over = recording(statements.hand_over, ReleaseRequest, ReleaseAnswer)
        self._release_many = recording(
            statements.release_many, Releases, ReleaseAnswer, is_batch=True
        )
        self._correct_history = recording(statements.correct_history, Releases)
        self._give_up = recording(statements.give_up, GiveUp)
        self._renew = Statement(statements.renew(name), LockEnds)
        self._read = Statement(statements.read_tasks(name), None, ReadTasks)
        self._note_misses = self._note_reschedulings = None
        if runs:
            self._note_misses = Statement(statements.note_misses(name, runs), None, MissNotes)
            self._note_reschedulings = Statement(statements.note_reschedulings(name, runs))
        self._add_one_offs = Statement(statements.add_one_offs(name))
        self._register = Statement(statements.register(name), Registered)
        self._sign_of_life = Statement(statements.report_replica(replicas), None, SignOfLife)
        self._prune = recording(statements.prune, PruneOneOffs, replicas=replicas)
        # The statements of the messages that need no more than one. The answer is the row of those
        # with ``answers``, and how many rows there are, of the others. Without a history there is
        # nothing to shorten.
        self._alone: dict[type[Message[Any]], Statement | None] = {
            message: Statement(template, answers, message)
            for message, template, answers in (
                (EndLease, statements.end_lease(name), ReleaseAnswer),
                (Extend, statements.extend(name), LockEnds),
                (Lead, statements.lead(name), None),
                (Stop, statements.stop_replica(replicas), None),
                (Retire, statements.retire(name, replicas), None),
                (RemoveReplicas, statements.remove_replicas(replicas), None),
                (Resign, statements.resign(name), None),
            )
        }
        self._alone[PruneOneOffs] = self._prune
        self._alone[ShortenHistory] = (
            Statement(statements.shorten_history(runs), None, ShortenHistory) if runs else None
        )

    def execute(self, cursor: Any, message: Message[Answer]) -> Answer:
        """Carry out a message, and return its answer. See the messages."""
        how = _HOW.get(type(message)) or TaskLockStatements._one_statement
        answer: Answer = how(self, cursor, message)
        return answer

    def _one_statement(self, cursor: Any, message: Message[Any]) -> Any:
        """Carry out a message that needs no more than one statement."""
        statement = self._alone[type(message)]
        if statement is None:
            return 0
        parameters = message.parameters
        for name, kind in message.types.items():
            if kind == "text[]":  # no row has a text that cannot be stored
                parameters[name] = _without_lacking(cursor.connection, parameters[name])
        done = self._execute(cursor, statement, parameters)
        return done.rowcount if statement.answers is None else statement.one(cursor)

    def _claim_one(self, cursor: Any, message: Claim) -> ClaimAnswer:
        request, parameters = message.request, message.parameters
        found: ClaimAnswer | None = None
        for _ in range(MOST_LOOKS):
            self._execute(cursor, self._claim, parameters)
            found = answer = self._claim.one(cursor)
            if found is None:
                # No row yet, so insert it. If another replica was faster, claim its row.
                first = self._claims[True, False]
                answer = self._answers(cursor, first, [parameters], parameters)[request.claim_id]
            assert isinstance(answer, ClaimAnswer)
            # If the row looks free, the statement has waited for another claim, which was granted,
            # and the answer has the row from before that claim. So claim again.
            if not answer.looks_free or answer.stays_refused(request, message.times):
                return answer
        if found is not None:
            return found
        raise TaskLockError(
            f"task {request.task_name!r}: its row can be neither read nor inserted, although "
            "PostgreSQL reports no error; is there a policy or a trigger on the task lock table?"
        )

    def _claim_many(self, cursor: Any, message: Claims) -> dict[UUID, ClaimAnswer]:
        asked = rows_of(message.requests)
        for position, (each, lag) in enumerate(zip(asked, message.lags, strict=True)):
            each.update(lag=lag, position=position)
        statement = self._claims[message.are_first, message.most is not None]
        return self._answers(cursor, statement, asked, message.parameters)

    def _claim_and_move(self, cursor: Any, message: StoredClaims) -> dict[UUID, ClaimAnswer]:
        asked = rows_of(message.requests)
        moves = rows_of(each.move for each in message.requests if each.move is not None)
        for position, (each, move) in enumerate(zip(asked, moves, strict=True)):
            each.update(move, position=position)
        return self._answers(cursor, self._claim_stored, asked, message.parameters)

    def _rerun(self, cursor: Any, message: Reruns) -> dict[UUID, ClaimAnswer]:
        asked = rows_of(message.requests)
        statement = self._reruns[message.requests[0].kind]
        return self._answers(cursor, statement, asked, message.parameters)

    def _release_one(self, cursor: Any, request: ReleaseRequest) -> ReleaseAnswer | None:
        hands_over = request.end.window is WindowAfter.HAND_OVER
        statement = self._hand_over if hands_over else self._release
        self._execute(cursor, statement, request.parameters)
        answer: ReleaseAnswer | None = statement.one(cursor)
        if answer is None or answer.is_late:
            self._correct(cursor, [request])
        return answer

    def _release_together(self, cursor: Any, message: Releases) -> dict[UUID, ReleaseAnswer | None]:
        requests = message.requests
        asked = rows_of(requests)
        answers: dict[UUID, ReleaseAnswer]
        answers = self._answers(cursor, self._release_many, asked, message.parameters)
        in_time = {claim_id for claim_id, answer in answers.items() if not answer.is_late}
        if len(in_time) < len(requests):
            self._correct(cursor, [each for each in requests if each.claim_id not in in_time])
        return {
            claim_id: answer if answer.locked_until else None
            for claim_id, answer in answers.items()
        }

    def _correct(self, cursor: Any, late: Sequence[ReleaseRequest]) -> None:
        """Correct the run history after releases whose runs were closed before.

        A claim in doubt has no token and no entry.
        """
        asked = [
            {**request.parameters, "ended_ago": request.ended_ago and request.ended_ago()}
            for request in late
            if request.token is not None
        ]
        for each, name in product(asked, END_TEXTS):
            if each[name] is not None:
                each[name] = replace_unstorable(cursor.connection, str(each[name]))
        if asked and self._correct_history.recording:
            self._execute(cursor, self._correct_history, many(asked))

    def _give_up_one(self, cursor: Any, message: GiveUp) -> ClosedDeadRun | None:
        row = self._execute(cursor, self._give_up, message.parameters).fetchone()
        return None if row is None else ClosedDeadRun(**row[0])

    def _renew_all(self, cursor: Any, message: Renewals) -> dict[UUID, LockEnds]:
        self._execute(cursor, self._renew, many(rows_of(message.requests)))
        return self._renew.by_column(cursor, "claim_id")

    def _read_states(self, cursor: Any, message: ReadTasks) -> tuple[list[TaskRow], datetime]:
        names = _without_lacking(cursor.connection, message.task_names)
        rows = self._read_rows(cursor, replace(message, task_names=names))
        are_read_only = [row.pop("read_only") for row in rows]
        if any(are_read_only):
            raise TaskLockDatabaseError("the server is read-only")
        states = [TaskRow(**row) for row in rows if row["task_name"] is not None]
        return states, rows[0]["database_time"]

    def _read_rows(self, cursor: Any, message: ReadTasks) -> list[dict[str, Any]]:
        """Return the rows of the tasks, without rows that PostgreSQL cannot compute with."""
        names = message.task_names
        message = replace(message, always=list(set(message.always).intersection(names)))
        try:
            rows = self._execute(cursor, self._read, message.parameters).fetchall()
        except _ERROR_OF_ONE:
            # The error is not logged here, because the claims of the job log it.
            if len(names) == 1:
                return self._read_rows(cursor, ReadTasks(()))
            half = len(names) // 2
            first = self._read_rows(cursor, replace(message, task_names=names[:half]))
            return first + self._read_rows(cursor, replace(message, task_names=names[half:]))
        columns = cursor.columns
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def _register_all(self, cursor: Any, message: Registrations) -> list[Registered]:
        problems = [unstorable(cursor.connection, task.task_name) for task in message.tasks]
        for problem in filter(None, problems):
            logger.error("A job will not run: %s", problem)
        stored = zip(message.tasks, problems, strict=True)
        return self._register_stored(cursor, [task for task, problem in stored if not problem])

    def _register_stored(self, cursor: Any, tasks: Sequence[Registration]) -> list[Registered]:
        if not tasks:
            return []
        try:
            self._execute(cursor, self._register, many(rows_of(tasks)))
        except _ERROR_OF_ONE as error:
            # Log at the level INFO, because the claims of the job log an error.
            if len(tasks) == 1:
                logger.info("Task %r is not registered: %s", tasks[0].task_name, one_line(error))
                return []
            half = len(tasks) // 2
            first = self._register_stored(cursor, tasks[:half])
            return first + self._register_stored(cursor, tasks[half:])
        found: dict[str, Registered] = self._register.by_column(cursor, "task_name")
        # A task is missing in the rows if another replica has inserted the task's row in the same
        # moment. Such a task is to be registered again.
        return [
            found.get(task.task_name) or Registered(task.task_name, again=True) for task in tasks
        ]

    def _report_replica(self, cursor: Any, message: SignOfLife) -> tuple[datetime, int]:
        connection = cursor.connection
        tasks = _without_lacking(connection, message.tasks)
        rejected = [ascii(text) if lacking(connection, text) else text for text in message.rejected]
        message = replace(message, tasks=self._fitting(tasks), rejected=rejected)
        row: tuple[datetime, int]
        row = self._execute(cursor, self._sign_of_life, message.parameters).fetchone()
        return row

    def _fitting(self, names: list[str]) -> list[str]:
        """Return the names that fit into a replica's row, and warn once if some do not fit."""
        sizes = accumulate(len(name.encode()) for name in names)
        count = sum(size <= LONGEST_TASK_LIST for size in sizes)
        if count < len(names) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Of %s tasks of this replica, operators see only %s, because the names are too "
                "long for the replica's row",
                len(names),
                count,
            )
        return names[:count]

    def _note_missed(self, cursor: Any, message: MissNotes) -> set[str]:
        if self._note_misses is None:
            return set()
        sent_at = message.sent_at or datetime.now(timezone.utc)
        parameters = {**_storable_notes(cursor, message.notes), "sent_at": sent_at}
        if any(note.one_off for note in message.notes):
            self._execute(cursor, self._add_one_offs, parameters)
        return {name for (name,) in self._execute(cursor, self._note_misses, parameters)}

    def _note_rescheduled(self, cursor: Any, message: ScheduleNotes) -> set[str]:
        if self._note_reschedulings is None:
            return set()
        asked = _storable_notes(cursor, message.notes)
        return {name for (name,) in self._execute(cursor, self._note_reschedulings, asked)}

    def _answers(
        self,
        cursor: Any,
        statement: Statement,
        asked: Sequence[Mapping[str, object]],
        parameters: Mapping[str, object],
    ) -> dict[UUID, Any]:
        """Return the answers to a batch, by the claim ids of the requests."""
        self._execute(cursor, statement, {**many(asked), **parameters})
        return statement.by_column(cursor, "asked_claim_id")

    def _execute(self, cursor: Any, statement: Statement, parameters: Mapping[str, object]) -> Any:
        parameters = {**self._own, **parameters}
        sent = self._form_now(statement) if self._rejections.any else statement.form
        try:
            done = cursor.execute(sent.query, sent.arguments(parameters))
        except (psycopg.DatabaseError, UnicodeError) as error:
            return self._execute_without_history(cursor, statement, parameters, error)
        if self._rejections.any:
            self._note_taken(statement, sent)
        return done

    def _form_now(self, statement: Statement) -> Statement:
        """Return the form to send: without the entry in the run history while it is left out."""
        is_left_out = self._rejections.is_left_out(self._history_of(statement))
        return statement if is_left_out else statement.form

    def _history_of(self, statement: Statement) -> str:
        """Return the kind of work to which a statement's write to the run history belongs."""
        return OLD_HISTORY if statement is self._prune else RUN_HISTORY

    def _note_taken(self, statement: Statement, sent: Statement) -> None:
        """Note that PostgreSQL has taken an entry of the run history, if the statement had one.

        A claim writes an entry only if it finds a dead run, so its success says nothing.
        """
        writes = statement in (self._release, self._release_many, self._prune)
        if writes and sent is not statement:
            self._rejections.end(self._history_of(statement))

    def _execute_without_history(
        self,
        cursor: Any,
        statement: Statement,
        parameters: Mapping[str, object],
        error: psycopg.DatabaseError | UnicodeError,
    ) -> Any:
        """Send a failed statement again without its entry in the run history.

        The statement is sent again only if the entry may be the reason of the failure.

        :raises psycopg.DatabaseError: the statement failed for another reason
        :raises UnicodeError: the statement failed for another reason
        """
        is_set_up_wrong = isinstance(error, psycopg.ProgrammingError)
        sent = self._form_now(statement)
        if (
            sent is statement
            or as_unavailable(error) is not None
            # A batch with one wrong entry is split, so that the other entries are written.
            or (statement.is_batch and not is_set_up_wrong)
        ):
            raise error
        if isinstance(error, (UnicodeError, psycopg.DataError)) and "error" in parameters:
            parameters = {
                name: _ascii(value) if name in END_TEXTS else value
                for name, value in parameters.items()
            }
            with suppress(psycopg.DatabaseError, UnicodeError):
                return cursor.execute(sent.query, sent.arguments(parameters))
        done = cursor.execute(statement.query, statement.arguments(parameters))
        what = self._history_of(statement)
        note_rejected_history(cursor, self._table, self._rejections, what, error)
        return done


_HOW: dict[type[Message[Any]], Callable[[TaskLockStatements, Any, Any], Any]] = {
    Claim: TaskLockStatements._claim_one,
    Claims: TaskLockStatements._claim_many,
    StoredClaims: TaskLockStatements._claim_and_move,
    Reruns: TaskLockStatements._rerun,
    ReleaseRequest: TaskLockStatements._release_one,
    Releases: TaskLockStatements._release_together,
    GiveUp: TaskLockStatements._give_up_one,
    Renewals: TaskLockStatements._renew_all,
    ReadTasks: TaskLockStatements._read_states,
    Registrations: TaskLockStatements._register_all,
    SignOfLife: TaskLockStatements._report_replica,
    MissNotes: TaskLockStatements._note_missed,
    ScheduleNotes: TaskLockStatements._note_rescheduled,
}


def _storable_notes(
    cursor: Any, notes: Iterable[MissNote] | Iterable[ScheduleNote]
) -> dict[str, str]:
    """Return the parameter of notes for the run history, without those that cannot be stored."""
    connection = cursor.connection
    return many(
        {**note.parameters, "reason": replace_unstorable(connection, note.reason)}
        for note in notes
        if not lacking(connection, note.task_name)
    )


def _without_lacking(connection: Any, texts: Iterable[str]) -> list[str]:
    """Return the texts that can be stored."""
    return [text for text in texts if not lacking(connection, text)]


def replace_unstorable(connection: Any, reason: str) -> str:
    """Return a reason in characters that this database stores.

    A reason may have names of jobs and replicas that PostgreSQL cannot store.
    """
    reason = reason.encode(errors="replace").decode().replace("\0", "?")
    return str(_ascii(reason)) if lacking(connection, reason) else reason


def _ascii(text: object) -> object:
    """Return a text in a form that each database can store."""
    if not isinstance(text, str):
        return text
    return text.encode("ascii", "replace").decode().replace("\0", "?")


def note_rejected_history(
    cursor: Any,
    task_lock: Table,
    rejections: Rejections,
    what: str,
    error: psycopg.DatabaseError | UnicodeError,
) -> None:
    """Note that a write or a deletion of the run history was rejected, and why.

    :param cursor: the cursor of the rejected statement
    :param what: as in :meth:`Rejections.begin`
    """
    problem: TaskLockSchemaError | None = None
    reason: Exception | str = f"PostgreSQL does not take its entries: {one_line(error)}"
    with suppress(psycopg.Error):  # a second cursor, because the first has answers to be read
        beside = cursor.wire.cursor()
        problem = find_problem(beside, task_lock, run_table(task_lock), None)
        if problem is not None:
            reason = problem
        elif isinstance(error, psycopg.errors.InsufficientPrivilege):
            reason = explain_missing_rights(beside, error, task_lock, None)
    rejections.begin(
        what,
        reason,
        quiet=what == OLD_HISTORY,
        until_taken=problem is None,
        # After an error of another class the next entry is tried, because only this entry is wrong.
        leave_out=isinstance(error, psycopg.ProgrammingError),
    )
