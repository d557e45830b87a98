"""The lock protocol: sends the statements of a replica, and reads their answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import accumulate, product
from math import ceil
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row, dict_row, tuple_row
from sqlalchemy import Table

from apscheduler_tasklock._database.connection import raw_cursor
from apscheduler_tasklock._database.encoding import lacking, unstorable
from apscheduler_tasklock._database.outage import as_unavailable
from apscheduler_tasklock._database.rejections import OLD_HISTORY, RUN_HISTORY, Rejections
from apscheduler_tasklock._database.sqlstates import one_line
from apscheduler_tasklock._lock import statements
from apscheduler_tasklock._lock.outcomes import END_TEXTS, WindowAfter
from apscheduler_tasklock._lock.protocol_messages import (
    IN_TIME,
    ClaimAnswer,
    ClaimRequest,
    ClosedRun,
    LockTimes,
    MissNote,
    ReadTimes,
    Registered,
    Registration,
    ReleaseAnswer,
    ReleaseRequest,
    Renewal,
    RerunRequest,
    RunState,
    ScheduleNote,
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
from apscheduler_tasklock.status import RunningRun

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


def _reported(running: Sequence[RunningRun]) -> str:
    return json.dumps([run.reported for run in running])


def history_beside(table: Table, runs: int) -> History | None:
    """Return the run history of a task lock table.

    :param runs: how many runs of each task the history keeps; 0: there is no history
    """
    return History(for_template(run_table(table)), runs) if runs else None


class TaskLockProtocol:
    """The statements for one task lock table, run on a cursor of ``raw_cursor``.

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
        self._table = table
        self._rejections = rejections or Rejections()
        self._has_warned = False
        self._own: dict[str, object] = {
            "replica_id": replica_id,
            "release": release,
            "keep_one_offs": ceil(keep_one_offs),
            "lock_timeout": f"{max(1, round(lock_timeout * 1000))}ms",
        }
        self._claim = RecordingStatement(statements.claim, name, runs, ClaimAnswer)
        self._claim_many = RecordingStatement(
            statements.claim_many, name, runs, ClaimAnswer, is_batch=True
        )
        self._claim_some = RecordingStatement(
            partial(statements.claim_many, limited=True), name, runs, ClaimAnswer, is_batch=True
        )
        self._first_claim_many = Statement(statements.first_claim_many(name), ClaimAnswer)
        self._first_claim_some = Statement(
            statements.first_claim_many(name, limited=True), ClaimAnswer
        )
        self._reruns = {
            kind: RecordingStatement(
                partial(statements.rerun, kind=kind), name, runs, ClaimAnswer, is_batch=True
            )
            for kind in ("takeover", "retry", "manual")
        }
        self._release = RecordingStatement(statements.release, name, runs, ReleaseAnswer)
        self._hand_over = RecordingStatement(statements.hand_over, name, runs, ReleaseAnswer)
        self._release_many = RecordingStatement(
            statements.release_many, name, runs, ReleaseAnswer, is_batch=True
        )
        self._correct_history = RecordingStatement(statements.correct_history, name, runs)
        self._end_lease = Statement(statements.end_lease(name), ReleaseAnswer)
        self._give_up = RecordingStatement(statements.give_up, name, runs)
        self._extend = Statement(statements.extend(name))
        self._renew = Statement(statements.renew(name))
        self._read = Statement(statements.read(name))
        self._shorten_history = Statement(statements.shorten_history(runs)) if runs else None
        self._note_misses = Statement(statements.note_misses(name, runs)) if runs else None
        self._note_reschedulings = (
            Statement(statements.note_reschedulings(name, runs)) if runs else None
        )
        self._add_one_offs = Statement(statements.add_one_offs(name))
        self._register = Statement(statements.register(name))
        jobs = for_template(job_table(table))
        self._claim_and_move = RecordingStatement(
            partial(statements.claim_and_move, jobs=jobs), name, runs, ClaimAnswer, is_batch=True
        )
        replicas = for_template(replica_table(table))
        self._report_replica = Statement(statements.report_replica(replicas))
        self._stop_replica = Statement(statements.stop_replica(replicas))
        self._lead = Statement(statements.lead(name))
        self._resign = Statement(statements.resign(name))
        self._retire = Statement(statements.retire(name, replicas))
        self._remove_replicas = Statement(statements.remove_replicas(replicas))
        self._prune = RecordingStatement(partial(statements.prune, replicas=replicas), name, runs)

    def claim(
        self,
        cursor: Any,
        request: ClaimRequest,
        times: ReadTimes = IN_TIME,
    ) -> ClaimAnswer:
        """Claim a task for one run time. A refused claim writes nothing.

        :return: the task's row, or an empty one if the task still has no row. If the row looks free
            although the claim is not granted, the claim is to be sent again: other replicas claim
            the task over and over, or the claim came after its ``not_after``.
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
            # If the row looks free, the statement has waited for another claim, which was granted,
            # and the answer has the row from before that claim. So claim again.
            if not answer.looks_free or answer.stays_refused(request, times):
                return answer
        if found is not None:
            return found
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
        """Claim several tasks, each for one run time and each only once in the batch.

        :param lags: the lag of each request, in place of the one in ``times``
        :param most: limits how many claims are granted, in this order; ``None``: no limit
        :return: the answers by the claim ids of the requests. A claim of a task without a row has
            no answer, see :meth:`first_claim_many`. If a row looks free, the claim is to be sent
            again: another session has the row locked, or earlier claims have reached the limit.
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
        """Claim several tasks that have no row. See :meth:`claim_many`.

        :return: the answers by the claim ids of the requests. If a row looks free, the claim is to
            be sent again: the task has a row by now, the claim came after its ``not_after``, or
            earlier claims have reached the limit.
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
        """Claim the tasks of stored jobs, each only once, and move the jobs to later run times.

        :param requests: the requests, each with its ``move``
        :param most: limits how many claims are granted, in this order
        :return: the answers by the claim ids of the requests. If a row looks free, the claim is to
            be sent again: another session has the job or the task locked, or earlier claims have
            reached the limit.
        """
        asked = (
            {**request.parameters(0.0), **request.move.parameters, "position": position}
            for position, request in enumerate(requests)
            if request.move is not None
        )
        limits = {"most": most, "count": len(requests)}
        parameters = {**statements.many(asked), **times.parameters, **limits}
        return self._answers(cursor, self._claim_and_move, parameters)

    def rerun(
        self, cursor: Any, requests: Sequence[RerunRequest], times: ReadTimes = IN_TIME
    ) -> dict[UUID, ClaimAnswer]:
        """Claim several takeovers, or retries, or manual runs, each of another task.

        :return: the answers by the claim ids of the requests. A task without a row has no answer.
            If a row looks free, the claim is to be sent again: another session has the row locked,
            or the claim came after its ``not_after``.
        """
        parameters = {**statements.many(map(vars, requests)), **times.parameters}
        return self._answers(cursor, self._reruns[requests[0].kind], parameters)

    def release(self, cursor: Any, request: ReleaseRequest) -> ReleaseAnswer | None:
        """Release a claim. Return ``None`` if the claim no longer stood.

        In that case the task's row does not change. If the run was noted as dead or freed, its
        entry in the run history is corrected by a second statement. A caller that gets an error
        has to send the release again.
        """
        hands_over = request.end.window is WindowAfter.HAND_OVER
        statement = self._hand_over if hands_over else self._release
        cursor.row_factory = tuple_row
        query = self._query(statement, request.parameters)
        try:  # the same as in `_execute`, which is not called, because a call takes time
            cursor.execute(*query)
        except (psycopg.DatabaseError, UnicodeError) as error:
            self._execute_without_history(cursor, statement, request.parameters, error)
        else:
            self._note_taken(statement, query[0])
        answer: ReleaseAnswer | None = statement.one(cursor)
        if answer is None or answer.is_late:
            self._correct(cursor, [request])
        return answer

    def release_many(
        self, cursor: Any, requests: Sequence[ReleaseRequest]
    ) -> dict[UUID, ReleaseAnswer | None]:
        """Release several claims, each of another task.

        :return: the answers of the claims that stood, by claim id. ``None``: another session has
            the row locked, and the release is to be sent again.
        """
        asked = statements.many(request.parameters for request in requests)
        cursor.row_factory = tuple_row
        self._execute(cursor, self._release_many, asked)
        answers = self._release_many.by_claim_id(cursor)
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
                each[name] = storable_reason(cursor.connection, str(each[name]))
        if asked and self._correct_history.recording:
            self._execute(cursor, self._correct_history, statements.many(asked))

    def end_lease(
        self, cursor: Any, task_name: str, claim_id: UUID, holders: Sequence[str]
    ) -> ReleaseAnswer | None:
        """End the lease of a run that is known to be dead.

        :param holders: the replicas that may have claimed the run
        :return: the task's row; ``None`` if the claim no longer stood
        """
        parameters = {"task_name": task_name, "claim_id": claim_id, "holders": list(holders)}
        cursor.row_factory = tuple_row
        self._execute(cursor, self._end_lease, parameters)
        answer: ReleaseAnswer | None = self._end_lease.one(cursor)
        return answer

    def give_up(self, cursor: Any, task_name: str, claim_id: UUID) -> ClosedRun | None:
        """Give up a dead run; return the run if this call has finished it, else ``None``."""
        parameters = {"task_name": task_name, "claim_id": claim_id}
        cursor.row_factory = tuple_row
        row = self._execute(cursor, self._give_up, parameters).fetchone()
        return None if row is None else ClosedRun(**row[0])

    def extend(
        self, cursor: Any, task_name: str, claim_id: UUID, by: float, lease: float | None
    ) -> LockTimes | None:
        """Move the end of a maximum lock. Return ``None`` if the claim no longer stands.

        :param by: by how many seconds to move it
        """
        parameters = {"task_name": task_name, "claim_id": claim_id, "by": by, "lease": lease}
        cursor.row_factory = class_row(LockTimes)
        times: LockTimes | None
        times = self._execute(cursor, self._extend, parameters).fetchone()
        return times

    def renew(self, cursor: Any, renewals: Sequence[Renewal]) -> dict[UUID, LockTimes]:
        """Renew claims.

        :return: the new ends of the claims, by claim id. A missing claim no longer stands.
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
        """Return the rows of tasks that need an action, such as a takeover.

        Also return the database's time.

        :param always: the tasks whose rows are returned in any case
        :raises TaskLockDatabaseError: the server is read-only. Its rows are not used, because
            holders cannot renew their leases there, and a standby's rows may be old.
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
        """Return the rows of the tasks, without rows that PostgreSQL cannot compute with."""
        always = list(set(always).intersection(task_names))
        parameters = {"task_names": task_names, "always": always}
        try:
            return self._rows(cursor, self._read, parameters)
        except _ERROR_OF_ONE:
            # The error is not logged here, because the claims of the job log it.
            if len(task_names) == 1:
                return self._read_rows(cursor, [], [])
            half = len(task_names) // 2
            rows = self._read_rows(cursor, task_names[:half], always)
            return rows + self._read_rows(cursor, task_names[half:], always)

    def register(self, cursor: Any, tasks: Sequence[Registration]) -> list[Registered]:
        """Register the tasks of a replica, each once; return an answer for each.

        A task whose name cannot be stored has no answer, and an error is logged.
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
            # Log at the level INFO, because the claims of the job log an error.
            if len(tasks) == 1:
                logger.info("Task %r is not registered: %s", tasks[0].task_name, one_line(error))
                return []
            half = len(tasks) // 2
            first = self._register_stored(cursor, tasks[:half])
            return first + self._register_stored(cursor, tasks[half:])
        found = {row["task_name"]: Registered(**row) for row in rows}
        # A task is missing in the rows if another replica has inserted the task's row in the same
        # moment. Such a task is to be registered again.
        return [
            found.get(task.task_name) or Registered(task.task_name, again=True) for task in tasks
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
        leader_namespace: str | None = None,
    ) -> tuple[datetime, int]:
        """Report this replica as alive, with its tasks.

        :param started_at: the start that the first call returned; ``None`` in the first call
        :param rejected: the replica's rejected work, with the remedies
        :param running: the replica's runs that go on
        :param leader_namespace: the namespace in which the replica leads or follows; ``None``: it
            is not in leader mode
        :return: when the replica started, and how many replicas are alive
        """
        connection = cursor.connection
        parameters = {
            "host": host,
            "version": version,
            "tasks": self._fitting([name for name in tasks if not lacking(connection, name)]),
            "rejected": [ascii(text) if lacking(connection, text) else text for text in rejected],
            "started_at": started_at,
            "running": _reported(running),
            "leader_namespace": leader_namespace,
        }
        cursor.row_factory = dict_row
        row = self._execute(cursor, self._report_replica, parameters).fetchone()
        return row["started_at"], row["live"]

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

    def retire(self, cursor: Any, successor_of: Sequence[str], dropped: Sequence[str]) -> None:
        """Retire removed tasks that no live replica has, so that they are not overdue.

        :param successor_of: this replica's tasks; empty until this replica has all of its jobs. If
            a stopped replica had one of these tasks, this replica counts as its successor: those of
            the stopped replica's tasks that no live replica has were removed.
        :param dropped: the tasks whose jobs were removed on this replica
        """
        tasks = {"tasks": list(successor_of), "dropped": list(dropped)}
        self._execute(cursor, self._retire, tasks)

    def lead(self, cursor: Any, row: str, leader_id: str, lease: float) -> bool:
        """Lead the replicas of a namespace, unless another replica does; return whether it leads.

        :param row: the name of the leader's row
        :param leader_id: the id with which this replica leads
        :param lease: seconds after which another replica may lead
        """
        parameters = {"row": row, "leader_id": leader_id, "lease": float(lease)}
        return self._execute(cursor, self._lead, parameters).fetchone() is not None

    def resign(self, cursor: Any, row: str, leader_id: str) -> None:
        """Give the leadership up, if this replica leads."""
        self._execute(cursor, self._resign, {"row": row, "leader_id": leader_id})

    def stop_replica(self, cursor: Any, running: Sequence[RunningRun] = ()) -> None:
        """Report that this replica stops, and which of its runs still go on."""
        self._execute(cursor, self._stop_replica, {"running": _reported(running)})

    def remove_replicas(self, cursor: Any, age: float) -> None:
        """Delete replicas without a sign of life for ``age`` seconds."""
        self._execute(cursor, self._remove_replicas, {"age": age})

    def shorten_history(self, cursor: Any, task_names: Sequence[str]) -> None:
        """Delete these tasks' entries that the run history keeps no longer."""
        if self._shorten_history is not None:
            self._execute(cursor, self._shorten_history, {"names": list(task_names)})

    def note_misses(self, cursor: Any, notes: Sequence[MissNote], sent_at: datetime) -> set[str]:
        """Write entries of run times that no replica has run into the run history.

        :param notes: the notes, each of another task
        :param sent_at: the current time by this replica's clock
        :return: the tasks whose notes are to be sent again, because another session has changed or
            locked their rows, or because a note has run times before and after a run
        """
        if self._note_misses is None:
            return set()
        connection = cursor.connection
        asked = [note.parameters for note in notes if not lacking(connection, note.task_name)]
        for note in asked:
            note["reason"] = storable_reason(connection, str(note["reason"]))
        parameters = {**statements.many(asked), "sent_at": sent_at}
        if any(note["one_off"] for note in asked):
            self._execute(cursor, self._add_one_offs, parameters)
        return {row["task_name"] for row in self._rows(cursor, self._note_misses, parameters)}

    def note_reschedulings(self, cursor: Any, notes: Sequence[ScheduleNote]) -> set[str]:
        """Write entries of changed schedules into the run history.

        :param notes: the notes, each of another task
        :return: the tasks whose notes are to be sent again, because another session has their rows
            locked
        """
        if self._note_reschedulings is None:
            return set()
        connection = cursor.connection
        asked = statements.many(
            {**vars(note), "reason": storable_reason(connection, note.reason)}
            for note in notes
            if not lacking(connection, note.task_name)
        )
        return {row["task_name"] for row in self._rows(cursor, self._note_reschedulings, asked)}

    def prune(self, cursor: Any, age: float) -> int:
        """Delete the rows of one-off jobs that ended long ago; return how many were deleted.

        :param age: a row is deleted only if its job ended at least so many seconds ago; a live
            replica, the row's maximum lock and its job's grace may ask for more
        """
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
        """Return the query to send, and the values of its parameters."""
        if (
            isinstance(statement, RecordingStatement)
            and statement.recording
            and not self._rejections.is_left_out(self._history_of(statement))
        ):
            statement = statement.recording
        return statement.query, statement.arguments({**self._own, **parameters})

    def _history_of(self, statement: Statement) -> str:
        """Return the kind of work to which a statement's write to the run history belongs."""
        return OLD_HISTORY if statement is self._prune else RUN_HISTORY

    def _note_taken(self, statement: Statement, query: str | bytes) -> None:
        """Note that PostgreSQL has taken an entry of the run history, if the statement had one.

        A claim writes an entry only if it finds a dead run, so its success says nothing.
        """
        writes = statement in (self._release, self._release_many, self._prune)
        if self._rejections.any and writes and query is not statement.query:
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
        if (
            not (isinstance(statement, RecordingStatement) and statement.recording)
            or self._rejections.is_left_out(self._history_of(statement))
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
                return cursor.execute(*self._query(statement, parameters))
        done = cursor.execute(statement.query, statement.arguments({**self._own, **parameters}))
        what = self._history_of(statement)
        note_rejected_history(cursor, self._table, self._rejections, what, error)
        return done

    def _answers(
        self, cursor: Any, statement: Statement, parameters: Mapping[str, object]
    ) -> dict[UUID, ClaimAnswer]:
        """Return the answers to several claims or takeovers, by the claim ids of the requests."""
        cursor.row_factory = tuple_row
        self._execute(cursor, statement, parameters)
        return statement.by_claim_id(cursor)

    def _rows(
        self, cursor: Any, statement: Statement, parameters: Mapping[str, object]
    ) -> list[dict[str, Any]]:
        cursor.row_factory = dict_row
        rows: list[dict[str, Any]] = self._execute(cursor, statement, parameters).fetchall()
        return rows


def storable_reason(connection: Any, reason: str) -> str:
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
        beside = raw_cursor(cursor.connection)
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
