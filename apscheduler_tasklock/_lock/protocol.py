"""The lock protocol: what a replica asks of the database, and what it makes of the answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import accumulate
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row, dict_row, tuple_row
from sqlalchemy import Table

from apscheduler_tasklock._database.connection import raw_cursor
from apscheduler_tasklock._database.encoding import lacking, unstorable
from apscheduler_tasklock._database.errors import as_unavailable, one_line
from apscheduler_tasklock._database.rejections import OLD_HISTORY, RUN_HISTORY, Rejections
from apscheduler_tasklock._lock import statements
from apscheduler_tasklock._lock.messages import (
    IN_TIME,
    ClaimAnswer,
    ClaimRequest,
    Ending,
    LockTimes,
    ManualRequest,
    ReadTimes,
    Registered,
    Registration,
    ReleaseAnswer,
    ReleaseRequest,
    Renewal,
    RunState,
    TakeoverRequest,
)
from apscheduler_tasklock._lock.statements import (
    History,
    RecordingStatement,
    Statement,
    for_template,
)
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError, TaskLockSchemaError
from apscheduler_tasklock.schema.check import explain_refusal, find_problem
from apscheduler_tasklock.schema.table import LARGEST_REPLICA, job_table, replica_table, run_table
from apscheduler_tasklock.status import RunningRun

logger = logger_of(__name__)

# How often a claim looks for its row, which others may insert and delete meanwhile.
MOST_LOOKS = 10

# Seconds that a statement waits in the server for a row that somebody has locked. It keeps the
# replica's connection for so long; the wait of a commit for a disk is shorter as a rule.
LOCK_TIMEOUT = 0.03

# The row of one task has a value that nothing can be reckoned with, such as the last time that
# PostgreSQL knows. The others of a batch are not to suffer.
_ERROR_OF_ONE = psycopg.DataError

# The most bytes of the names of a replica's tasks. In the row some take twice as many.
MOST_TOLD = LARGEST_REPLICA * 2 // 5

# How many runs of each task the run history keeps, unless an option says otherwise.
HISTORY = 100


def _reported(running: Sequence[RunningRun]) -> str:
    return json.dumps([run.reported for run in running])


def history_beside(table: Table, runs: int) -> History | None:
    """Return where the history beside a task lock table is written, and how many runs of a task.

    :param runs: 0: no history
    """
    return History(for_template(run_table(table)), runs) if runs else None


class TaskLockProtocol:
    """The statements for one task lock table, run on a cursor as of ``raw_cursor``.

    :param replica_id: who asks, shown in logs
    :param lock_timeout: seconds that a statement waits in the server for a row that somebody has
        locked
    :param history: how many runs of each task the run history keeps; 0: none
    :param rejections: is told if PostgreSQL rejects the history
    """

    def __init__(
        self,
        table: Table,
        replica_id: str = "",
        lock_timeout: float = LOCK_TIMEOUT,
        history: int = HISTORY,
        rejections: Rejections | None = None,
    ) -> None:
        # Quoted for PostgreSQL by SQLAlchemy. Its Core is not used to send the statements: that
        # adds about as much time again as a whole refused claim takes.
        name, runs = for_template(table), history_beside(table, history)
        self._table = table
        self._rejections = rejections or Rejections()
        self._has_told_of_most = False
        self._own: dict[str, object] = {
            "replica_id": replica_id,
            "lock_timeout": f"{max(1, round(lock_timeout * 1000))}ms",
        }
        self._claim = RecordingStatement(statements.claim, name, runs, ClaimAnswer)
        self._claim_many = RecordingStatement(
            statements.claim_many, name, runs, ClaimAnswer, is_batch=True
        )
        self._claim_some = RecordingStatement(
            partial(statements.claim_many, limited=True), name, runs, ClaimAnswer, is_batch=True
        )
        self._find_taken = Statement(statements.find_taken(name), ClaimAnswer)
        self._first_claim_many = Statement(statements.first_claim_many(name), ClaimAnswer)
        self._first_claim_some = Statement(
            statements.first_claim_many(name, limited=True), ClaimAnswer
        )
        self._take_over_many = RecordingStatement(
            statements.take_over_many, name, runs, ClaimAnswer, is_batch=True
        )
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
        jobs = for_template(job_table(table))
        self._claim_and_move = RecordingStatement(
            partial(statements.claim_and_move, jobs=jobs), name, runs, ClaimAnswer, is_batch=True
        )
        self._claim_handed_out = RecordingStatement(
            partial(statements.claim_handed_out, jobs=jobs), name, runs
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
        times: ReadTimes = IN_TIME,
    ) -> ClaimAnswer:
        """Try to take the task for one run time. A refused claim writes nothing.

        :return: the task's row, or what would be in it. One that looks free is to be asked for
            again: others claim it over and over, or it was asked for too late.
        :raises TaskLockError: the task's row can be neither read nor inserted
        """
        asked = request.parameters(times.lag)
        parameters = {**asked, **times.parameters}
        cursor.row_factory = tuple_row
        found: ClaimAnswer | None = None
        for _ in range(MOST_LOOKS):
            self._execute(cursor, self._claim, parameters)
            found = self._claim.one(cursor)
            answer = found
            if answer is None:
                # No row yet, so insert it. If another replica was faster, claim its row.
                first = statements.many([asked])
                self._execute(cursor, self._first_claim_many, first | times.parameters)
                answer = self._first_claim_many.by_claim_id(cursor)[request.claim_id]
            # One that looks free is the row before another claim won, for which this one waited.
            if not answer.looks_free or answer.stays_refused(request, times):
                return answer
        if found is not None:
            return found
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
            if row.pop("was_handed") and row["withdrawn"]:
                continue  # the job was changed while this waited: maybe by this claim, sent before
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
        most: int | None = None,
    ) -> dict[UUID, ClaimAnswer]:
        """Try to take many tasks, each for one run time and each only once in the batch.

        :param lags: of each request, in place of the one in ``times``
        :param most: how many are granted at most, in this order; ``None``: all that may be
        :return: the answers by the ids of the requests. One that is missing has no row: see
            :meth:`first_claim_many`. One that looks free is to be asked again: somebody else has
            its row locked, or others before it were granted.
        """
        asked = (r.parameters(lag) for r, lag in zip(requests, lags, strict=True))
        if most is None:
            return self._claims(cursor, self._claim_many, asked, times)
        return self._claim_limited(cursor, self._claim_some, asked, times, most)

    def first_claim_many(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
        most: int | None = None,
    ) -> dict[UUID, ClaimAnswer]:
        """Try to take many tasks that have no row. See :meth:`claim_many`.

        :return: the answers by the ids of the requests. One that looks free is to be asked again:
            it has a row by now, it was asked for too late, or others before it were granted.
        """
        asked = (r.parameters(lag) for r, lag in zip(requests, lags, strict=True))
        if most is None:
            return self._claims(cursor, self._first_claim_many, asked, times)
        return self._claim_limited(cursor, self._first_claim_some, asked, times, most)

    def _claim_limited(
        self,
        cursor: Any,
        statement: Statement,
        asked: Iterable[Mapping[str, object]],
        times: ReadTimes,
        most: int,
    ) -> dict[UUID, ClaimAnswer]:
        in_order = ({**each, "position": position} for position, each in enumerate(asked))
        parameters = {**statements.many(in_order), **times.parameters, "most": most}
        return self._answers(cursor, statement, parameters)

    def find_taken(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
    ) -> dict[UUID, ClaimAnswer]:
        """Tell which of many claims would be refused, since their windows are taken.

        It changes nothing. See :meth:`claim_many`.

        :return: their answers. One that is missing may be granted, or cannot be asked for, by its
            name or by what is in its row.
        """
        asked = [
            request.window_parameters(lag)
            for request, lag in zip(requests, lags, strict=True)
            if not lacking(cursor.connection, request.task_name)
        ]
        try:
            return self._claims(cursor, self._find_taken, asked, times)
        except _ERROR_OF_ONE:
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
        parameters = {**statements.many(asked), **times.parameters}
        return self._answers(cursor, statement, parameters)

    def claim_and_move(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        times: ReadTimes,
        most: int,
    ) -> dict[UUID, ClaimAnswer]:
        """Try to take the tasks of stored jobs, each only once, and move the jobs on.

        :param requests: each with its ``move``
        :param most: how many are granted at most, in this order
        :return: the answers by the ids of the requests. One that looks free is to be asked again:
            somebody else has its job or its task locked, or others before it were granted.
        """
        asked = (
            {**request.parameters(0.0), **request.move.parameters, "position": position}
            for position, request in enumerate(requests)
            if request.move is not None
        )
        limits = {"most": most, "count": len(requests)}
        parameters = {**statements.many(asked), **times.parameters, **limits}
        return self._answers(cursor, self._claim_and_move, parameters)

    def take_over_many(
        self,
        cursor: Any,
        requests: Sequence[TakeoverRequest],
        times: ReadTimes = IN_TIME,
    ) -> dict[UUID, ClaimAnswer]:
        """Try to take over many claims, each of another task.

        :return: the answers by the ids of the requests. One that is missing has no row any more.
            One that looks dead as before is to be asked again: somebody else has its row locked, or
            it was asked for too late.
        """
        asked = statements.many(request.parameters for request in requests)
        parameters = {**asked, "stable": times.stable, "not_after": times.not_after}
        return self._answers(cursor, self._take_over_many, parameters)

    def release(self, cursor: Any, request: ReleaseRequest) -> ReleaseAnswer | None:
        """End a claim. ``None`` means that it no longer stood, and that nothing was changed."""
        hands_over = request.end.ending is Ending.HAND_OVER
        statement = self._hand_over if hands_over else self._release
        cursor.row_factory = tuple_row
        query = self._query(statement, request.parameters)
        try:  # as in `_execute`, with a frame less
            cursor.execute(*query)
        except (psycopg.DatabaseError, UnicodeError) as error:
            self._execute_without_history(cursor, statement, request.parameters, error)
        else:
            self._note_taken(statement, query[0])
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
            "leases": [None if each.lease is None else float(each.lease) for each in renewals],
            "last": [renewal.is_last for renewal in renewals],
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
        stored = [name for name in task_names if not lacking(cursor.connection, name)]
        rows = self._read_rows(cursor, stored, list(always))
        are_read_only = [row.pop("read_only") for row in rows]
        if any(are_read_only):
            raise TaskLockDatabaseError("the server is read-only")
        states = [RunState(**row) for row in rows if row["task_name"] is not None]
        return states, rows[0]["database_time"]

    def _read_rows(
        self, cursor: Any, task_names: list[str], always: list[str]
    ) -> list[dict[str, Any]]:
        """Return the rows of the tasks, but for those that cannot be asked for."""
        always = list(set(always).intersection(task_names))
        parameters = {"task_names": task_names, "always": always}
        try:
            return self._rows(cursor, self._read, parameters)
        except _ERROR_OF_ONE:
            # The claims of its job say so.
            if len(task_names) == 1:
                return self._read_rows(cursor, [], [])
            half = len(task_names) // 2
            rows = self._read_rows(cursor, task_names[:half], always)
            return rows + self._read_rows(cursor, task_names[half:], always)

    def claim_requested(
        self,
        cursor: Any,
        request: ManualRequest,
        *,
        stable: bool,
        not_after: datetime | None = None,
    ) -> ClaimAnswer | None:
        """Try to begin a run that was asked for by hand. ``None``: the task has no row any more.

        :param stable: as of :class:`ReadTimes`, like what follows
        """
        parameters = {**request.parameters(stable=stable), "not_after": not_after}
        answer: ClaimAnswer | None = None
        for _ in range(MOST_LOOKS):
            cursor.row_factory = tuple_row
            self._execute(cursor, self._claim_requested, parameters)
            answer = self._claim_requested.one(cursor)
            if answer is None or not answer.looks_free:
                break  # or else another claim won while this one waited for its row
        return answer

    def register(self, cursor: Any, tasks: Sequence[Registration]) -> list[Registered]:
        """Tell of the tasks that a replica has; each once. Return what became of each.

        One whose name cannot be stored is missing, and an error is logged.
        """
        problems = [unstorable(cursor.connection, task.task_name) for task in tasks]
        for problem in filter(None, problems):
            logger.error("A job will not run: %s", problem)
        tasks = [task for task, problem in zip(tasks, problems, strict=True) if not problem]
        return self._register_stored(cursor, tasks) if tasks else []

    def _register_stored(self, cursor: Any, tasks: Sequence[Registration]) -> list[Registered]:
        asked = statements.many(vars(task) for task in tasks)
        try:
            rows = self._rows(cursor, self._register, asked)
        except _ERROR_OF_ONE as error:
            # The claims of its job say so, too.
            if len(tasks) == 1:
                logger.info("Task %r is not registered: %s", tasks[0].task_name, one_line(error))
                return []
            half = len(tasks) // 2
            first = self._register_stored(cursor, tasks[:half])
            return first + self._register_stored(cursor, tasks[half:])
        found = {row["task_name"]: Registered(**row) for row in rows}
        # Another replica may have registered one in the same moment: its row is not seen yet.
        return [
            found.get(task.task_name) or Registered(task.task_name, None, again=True)
            for task in tasks
        ]

    def report_replica(
        self,
        cursor: Any,
        host: str,
        version: str,
        tasks: Sequence[str],
        started_at: datetime | None = None,
        rejected: Sequence[str] = (),
        running: Sequence[RunningRun] = (),
    ) -> tuple[datetime, int]:
        """Say that this replica is alive, and which tasks it has.

        :return: when its id started, and how many replicas are alive

        :param started_at: what this returned the first time; ``None`` then
        :param rejected: what the database rejects of its work
        :param running: what runs there
        """
        connection = cursor.connection
        parameters = {
            "host": host,
            "version": version,
            "tasks": self._fitting([name for name in tasks if not lacking(connection, name)]),
            "rejected": [ascii(text) if lacking(connection, text) else text for text in rejected],
            "started_at": started_at,
            "running": _reported(running),
        }
        cursor.row_factory = dict_row
        row = self._execute(cursor, self._report_replica, parameters).fetchone()
        return row["started_at"], row["live"]

    def _fitting(self, names: list[str]) -> list[str]:
        """Return as many names as a replica's row takes, and warn once of the rest."""
        sizes = accumulate(len(name.encode()) for name in names)
        count = sum(size <= MOST_TOLD for size in sizes)
        if count < len(names) and not self._has_told_of_most:
            self._has_told_of_most = True
            logger.warning(
                "Of %s tasks of this replica, operators are told of %s: their names are too long "
                "for its row",
                len(names),
                count,
            )
        return names[:count]

    def retire(self, cursor: Any, successor_of: Sequence[str], dropped: Sequence[str]) -> None:
        """Let nobody wait any more for tasks that no replica has, if they were removed.

        :param successor_of: the tasks that it has, if what a replica before it had, and it has not,
            was removed
        :param dropped: the tasks that it had, and that were removed here
        """
        tasks = {"tasks": list(successor_of), "dropped": list(dropped)}
        self._execute(cursor, self._retire, tasks)

    def stop_replica(self, cursor: Any, running: Sequence[RunningRun] = ()) -> None:
        """Say that this replica stops, and what it still runs."""
        self._execute(cursor, self._stop_replica, {"running": _reported(running)})

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
        query = self._query(statement, parameters)
        try:
            done = cursor.execute(*query)
        except (psycopg.DatabaseError, UnicodeError) as error:
            return self._execute_without_history(cursor, statement, parameters, error)
        self._note_taken(statement, query[0])
        return done

    def _query(
        self, statement: Statement, parameters: Mapping[str, object]
    ) -> tuple[str | bytes, list[object]]:
        """Return what is sent, and the values of its parameters."""
        if (
            isinstance(statement, RecordingStatement)
            and statement.recording
            and not self._rejections.is_left_out(self._history_of(statement))
        ):
            statement = statement.recording
        return statement.query, statement.arguments({**self._own, **parameters})

    def _history_of(self, statement: Statement) -> str:
        """Return what is rejected with a statement's history."""
        return OLD_HISTORY if statement is self._prune else RUN_HISTORY

    def _note_taken(self, statement: Statement, query: str | bytes) -> None:
        """Note that PostgreSQL has taken a statement, maybe with its history."""
        if self._rejections.any and query is not statement.query:
            self._rejections.end(self._history_of(statement))

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
            not (isinstance(statement, RecordingStatement) and statement.recording)
            or self._rejections.is_left_out(self._history_of(statement))
            or as_unavailable(error) is not None
            # A batch is sent again one by one, on account of one entry.
            or (statement.is_batch and not is_set_up_wrong)
        ):
            raise error
        if isinstance(error, (UnicodeError, psycopg.DataError)) and "error" in parameters:
            # What an exception says has characters that the database's encoding lacks.
            parameters = {
                name: _ascii(value) if name in ("error", "error_type") else value
                for name, value in parameters.items()
            }
            with suppress(psycopg.DatabaseError, UnicodeError):
                return cursor.execute(*self._query(statement, parameters))
        done = cursor.execute(statement.query, statement.arguments({**self._own, **parameters}))
        what = self._history_of(statement)
        note_rejected_history(cursor, self._table, self._rejections, what, error)
        return done

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


def _ascii(text: object) -> object:
    """Return a text as every database can store it."""
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
    """Note that what was written or deleted of the run history was rejected, and why.

    :param cursor: that it was sent on
    :param what: as of :meth:`Rejections.begin`
    """
    problem: TaskLockSchemaError | None = None
    told: Exception | str = f"PostgreSQL does not take its entries: {one_line(error)}"
    with suppress(psycopg.Error):  # on a cursor of its own: the other has answers to be read
        beside = raw_cursor(cursor.connection)
        problem = find_problem(beside, task_lock, run_table(task_lock), None)
        if problem is not None:
            told = problem
        elif isinstance(error, psycopg.errors.InsufficientPrivilege):
            told = explain_refusal(beside, error, task_lock, None)
    rejections.begin(
        what,
        told,
        quiet=what == OLD_HISTORY,
        until_taken=problem is None,
        leave_out=isinstance(error, psycopg.ProgrammingError),  # else the entry alone is wrong
    )
