"""Operators' changes of tasks and replicas, beside the reads."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg.errors import (
    LockNotAvailable,
)
from sqlalchemy import Table

from apscheduler_tasklock._database.outage import as_unavailable
from apscheduler_tasklock._database.rejections import Rejections
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._database.wire import class_row, dict_row
from apscheduler_tasklock._lock.job_rows import next_version
from apscheduler_tasklock._lock.json_columns import (
    IS_PAUSE,
    json_elements_of,
)
from apscheduler_tasklock._lock.patterns import (
    escaped,
    is_pattern,
    like_of,
)
from apscheduler_tasklock._lock.protocol import HISTORY, history_beside
from apscheduler_tasklock._lock.reads import (
    ALARMS_SINCE,
    LISTED_PAUSES,
    NO_LONGER_ALARMS,
    PAUSE_COLUMNS,
    PAUSE_SINCE,
    PAUSE_UNTIL,
    PAUSES,
    Reads,
    part_of_transaction,
)
from apscheduler_tasklock._lock.statements import (
    ALIVE_FOR,
    ALL_TASKS,
    DUE_IN_PAUSE,
    IS_ALIVE,
    IS_FIRST,
    IS_HEARD,
    IS_PAUSED,
    IS_PAUSED_IN_ANY_WAY,
    IS_RETRY_PENDING,
    IS_TASK,
    JUST_BEFORE,
    NEVER,
    ROW_COLUMNS,
    History,
    RecordingStatement,
    Statement,
    again,
    listed_pauses,
    pauses_of_all,
    probe,
)
from apscheduler_tasklock._lock.statements.deaths import IS_FIRST_FAILURE
from apscheduler_tasklock._values import LONGEST_MESSAGE
from apscheduler_tasklock.errors import (
    TaskLockNotFoundError,
    TaskLockOptionError,
    TaskLockStateError,
)
from apscheduler_tasklock.schema.check import check_writable
from apscheduler_tasklock.schema.table import (
    LATEST,
)
from apscheduler_tasklock.status import (
    Freed,
    Pause,
    PauseChange,
    RunRequest,
    TaskState,
    TaskStatus,
)

# Whether a replica has a task. The schema of ``@>`` is given, so that PostgreSQL does not find
# another ``@>`` for text[] first.
_HAS_TASK = "tasks OPERATOR(pg_catalog.@>) ARRAY[%(task)s::text]"
# The reason in the entry of a resumption; null unless the pauses of others were taken out, too.
_WITH_OTHERS = "CASE WHEN %(force)s::boolean THEN 'with the pauses of others' END"
# Limits the pauses that have not ended: those of each task, and those of all tasks.
_MOST_PAUSES = 20
# Whether an operator has asked for a manual run that has not begun.
_IS_OPEN = "lock.request_id IS NOT NULL AND lock.request_until > now()"


class Operations(Reads):
    """The statements of operators for one task lock table, run on a cursor of a ``Wire``.

    :param table: the task lock table
    :param rejections: notes that the database rejects the read of the replicas. The answer then
        leaves out what only they could tell
    :param history: how many runs of each task the run history keeps; 0: none
    :param read_limit: limits the seconds of a read in the server
    """

    def __init__(
        self,
        table: Table,
        rejections: Rejections | None = None,
        history: int = HISTORY,
        read_limit: float = Timings.longest_answer,
    ) -> None:
        super().__init__(table, rejections, read_limit)
        name, runs = self._name, history_beside(table, history)
        self._pause = RecordingStatement(_pause, name, runs)
        self._resume = RecordingStatement(_resume, name, runs)
        self._add_all = Statement(_add_all(name))
        self._pause_all = RecordingStatement(_pause_all, name, runs)
        self._resume_all = RecordingStatement(_resume_all, name, runs)
        ask = partial(_request_run, replicas=self._replicas)
        self._request_run = RecordingStatement(ask, name, runs)
        self._free = RecordingStatement(_free, name, runs)
        self._acknowledge = RecordingStatement(_acknowledge, name, runs)
        free_and_move = partial(_free, jobs=self._jobs_name)
        self._free_and_move = RecordingStatement(free_and_move, name, runs)
        self._end_retry = RecordingStatement(_end_retry, name, runs)
        end_and_move = partial(_end_retry, jobs=self._jobs_name)
        self._end_retry_and_move = RecordingStatement(end_and_move, name, runs)
        self._forget_replicas = Statement(f"""
            WITH matching AS (
                SELECT replica_id, {IS_ALIVE} OR {IS_HEARD} AS alive FROM {self._replicas}
                WHERE replica_id = %(pattern)s OR replica_id LIKE %(like)s
            ), forgotten AS (
                DELETE FROM {self._replicas}
                WHERE replica_id IN (SELECT replica_id FROM matching WHERE NOT alive)
                RETURNING replica_id
            )
            SELECT replica_id, replica_id IN (TABLE forgotten) AS forgotten FROM matching
            ORDER BY replica_id
        """)
        self._forget = Statement(f"""
            WITH forgotten AS (
                DELETE FROM {name} AS lock WHERE task_name = %(task)s AND {IS_TASK}
                    AND (finished_at IS NOT NULL OR locked_until <= now())
                    AND NOT EXISTS (SELECT FROM {self._replicas}
                                    WHERE {IS_ALIVE} AND {_HAS_TASK})
                RETURNING task_name
            ), runs AS (
                DELETE FROM {self._runs} WHERE task_name IN (SELECT task_name FROM forgotten)
            )
            SELECT task_name FROM forgotten
        """)

    def check_writes(self, cursor: Any) -> None:
        """Send a write that changes no row, to find out whether it is confirmed.

        A role that may only read the tasks, such as a monitor's, does not tell by its own settings
        whether the replicas can write. It sends a write that needs no right on the table.

        :raises TaskLockDatabaseError: the database takes no writes
        :raises psycopg.Error: the write got no answer, or failed for another reason
        """
        may_write = check_writable(cursor, self._table)
        try:
            cursor.execute(probe(self._table if may_write else None))
        except psycopg.Error as error:
            if as_unavailable(error) is not None:
                raise
            # The database rejects the write, which the replicas' own requests tell better.

    def pause(
        self,
        cursor: Any,
        patterns: Sequence[str],
        seconds: float | None,
        by: str,
        reason: str | None,
        action_id: UUID | None = None,
    ) -> list[PauseChange]:
        """Pause tasks. When the call returns, the tasks are paused.

        :param patterns: names, or globs if no task has exactly that name
        :param action_id: the action's id. If it is sent again with the same id, it is not done
            again. By default it is a new one, as in the other methods
        :return: what has become of each task's pauses
        :raises TaskLockNotFoundError: a pattern matches no task; in that case no task is paused
        :raises TaskLockStateError: a task has too many pauses; in that case no task is paused
        """
        wanted = {"seconds": seconds, "by": by, "reason": reason}
        rows = self._change_many(cursor, self._pause, patterns, wanted, action_id)
        full = [row["name"] for row in rows if row["is_full"]]
        if full:
            raise TaskLockStateError(
                f"task {full[0]!r} is not paused again: it has {_MOST_PAUSES} pauses, which are "
                "the most that a task can have; resume it first"
            )
        return _pause_changes(rows)

    def resume(
        self,
        cursor: Any,
        patterns: Sequence[str],
        by: str,
        action_id: UUID | None = None,
        *,
        force: bool = False,
    ) -> list[PauseChange]:
        """Take out one's own pauses of tasks.

        :param patterns: names, or globs if no task has exactly that name
        :param force: whether the pauses of all others are taken out, too
        :return: what has become of each task's pauses
        :raises TaskLockNotFoundError: a pattern matches no task; in that case no task is resumed
        """
        wanted = {"by": by, "force": force}
        return _pause_changes(self._change_many(cursor, self._resume, patterns, wanted, action_id))

    def pause_all(
        self,
        cursor: Any,
        namespace: str,
        seconds: float | None,
        by: str,
        reason: str | None,
        action_id: UUID,
        lock_timeout: float,
        *,
        is_in_doubt: bool = False,
    ) -> Pause | bool:
        """Pause all tasks whose names begin with ``namespace``.

        The table is locked first, so that the claims that are under way end before the pause is
        written. Otherwise such a claim would not see the pause, and could be granted after it. When
        the pause is committed, the table is locked a second time, because transactions may be
        serializable by default. In that case a claim that has waited for the first lock does not
        see the pause, either. The second lock waits until such claims are over.

        :param lock_timeout: limits the seconds of the wait for the lock. All claims wait meanwhile.
        :param is_in_doubt: whether the call was sent before, and its answer was lost
        :return: the pause; or, if other sessions have kept the table locked, whether the pause is
            written all the same
        :raises TaskLockStateError: there are too many pauses of all tasks
        """
        wanted = {
            "namespace": namespace,
            "before": _first_after(namespace),
            "seconds": seconds,
            "by": by,
            "reason": reason,
            "pause_id": str(action_id),
            "action_id": action_id,
        }
        cursor.row_factory = dict_row
        is_written = False
        try:
            _with_entries(
                self._pause_all,
                lambda each: self._run_under_lock(cursor, lock_timeout, each, wanted),
            )
            [row] = cursor.fetchall()
            is_written = True
            self._run_under_lock(cursor, lock_timeout)
        except LockNotAvailable:
            if is_in_doubt and not is_written:
                raise  # because the pause may be written all the same
            return is_written
        if not row["has_room"]:
            raise TaskLockStateError(
                f"the tasks are not paused again: there are {_MOST_PAUSES} pauses of all tasks, "
                "which are the most that there can be; resume them first"
            )
        return Pause(by, row["since"], row["until"], reason, namespace)

    def _run_under_lock(
        self,
        cursor: Any,
        lock_timeout: float,
        statement: Statement | None = None,
        wanted: dict[str, Any] | None = None,
    ) -> None:
        """Lock the task lock table, and run a statement while no claim is under way.

        The transaction is sent as a whole. Otherwise its session would keep the table locked as
        long as it waits for a client that is slow, or away.
        """
        wire, table = cursor.wire, self._name.replace("%%", "%")
        if wire is None:
            cursor.execute()  # raises, because there is no database
        statements: list[tuple[str | bytes, Sequence[object]]] = [
            ("BEGIN", ()),
            (f"SET LOCAL lock_timeout = {max(1, round(1000 * lock_timeout))}", ()),
            (f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE", ()),
        ]
        if statement is not None:
            for each in (self._add_all, statement):
                statements.append((each.query, each.arguments(wanted or {})))
        statements.append(("COMMIT", ()))
        try:
            results = wire.together(statements)
        finally:
            wire.undo()
        cursor.read(results[-2])

    def resume_all(
        self,
        cursor: Any,
        namespace: str,
        by: str,
        action_id: UUID | None = None,
        *,
        force: bool = False,
    ) -> PauseChange:
        """Take out one's own pauses of all tasks of a namespace.

        :param force: whether the pauses of all others are taken out, too
        :return: which pauses have ended, and which are left, also those of other namespaces
        """
        cursor.row_factory = dict_row
        wanted = {"namespace": namespace, "by": by, "force": force}
        wanted["action_id"] = action_id or uuid4()
        rows = self._run_recording(cursor, self._resume_all, **wanted).fetchall()
        ended: list[Pause] = []
        left: list[Pause] = []
        is_again = False
        for row in rows:
            is_again = row.pop("is_again")
            ends = row.pop("ends")
            if row.pop("is_there"):
                (ended if ends else left).append(Pause(**row))
        was_paused = is_again or bool(ended or left)
        return PauseChange(f"{namespace}*", tuple(ended), tuple(left), was_paused, bool(left))

    def request_run(
        self,
        cursor: Any,
        task: str,
        by: str,
        seconds: float,
        *,
        action_id: UUID | None = None,
        is_here: bool = False,
    ) -> RunRequest:
        """Ask for a manual run, unless one was asked for and has not begun; return the request.

        :param action_id: the id of a new request
        :param is_here: whether the caller's own replica has the task. So it can begin the run, also
            if it has not yet reported in its row that it has the task.
        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: no live replica has the task, or only ``hold`` uses it
        """
        cursor.row_factory = class_row(RunRequest)
        wanted = {
            "task": task,
            "by": by,
            "seconds": seconds,
            "action_id": action_id or uuid4(),
            "is_here": is_here,
        }
        found = self._run_recording(cursor, self._request_run, **wanted)
        request: RunRequest | None = found.fetchone()
        if request is None:
            self._check_there(cursor, [task])
            raise TaskLockStateError(
                f"task {task!r} cannot have a manual run: no live replica has it, not "
                "counting those that stop (a task that only `hold` uses has no replica)",
                remedy="see `apscheduler-tasklock replicas`",
                on_page="the page Replicas has those that are alive",
            )
        return request

    def free(
        self,
        cursor: Any,
        task: str,
        token: int,
        by: str,
        action_id: UUID | None = None,
        *,
        force: bool,
        run_again: bool,
        was_due_at: datetime | None = None,
        due_at: datetime | None = None,
    ) -> Freed:
        """Finish a run in place of its holder, or see to it that a failed run is not retried.

        If the task's due time has passed, the next one is written, because the run of that time
        is skipped. If ``run_again`` is set, the task stays due.

        :param was_due_at: the due time from which ``due_at`` was computed
        :param due_at: the next due time by the task's schedule; ``None``: it is not known, so that
            the task is due after a period
        :return: the freed run, and what the task's row has been left with
        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: the task's last run has another token, is finished, or may be
            alive and ``force`` is not set; or ``run_again`` is set, and the run is a manual run
        """
        cursor.row_factory = dict_row
        wanted = {
            "task": task,
            "token": token,
            "by": by,
            "force": force,
            "run_again": run_again,
            "channel": self._channel,
            "action_id": action_id or uuid4(),
            "was_due_at": was_due_at,
            "due_at": due_at,
        }
        statements = (self._free, self._end_retry)
        if run_again and self._has_jobs(cursor):
            statements = (self._free_and_move, self._end_retry_and_move)
        for each in statements:
            row = self._run_recording(cursor, each, **wanted).fetchone()
            if row is not None:
                return Freed(**row, run_again=run_again)
        self._check_there(cursor, [task])
        [now] = self.tasks(cursor, [escaped(task)], 1)
        raise _not_freed(now, token, run_again=run_again)

    def acknowledge(
        self,
        cursor: Any,
        task: str,
        token: int,
        by: str,
        until: datetime | None = None,
        action_id: UUID | None = None,
    ) -> bool:
        """Note that an operator knows of a failure, a cut or a miss, so that it alarms no more.

        :param token: the token of the last run that the operator was shown
        :param until: until when later ones alarm no more, either; ``None``: they alarm
        :return: whether it was not acknowledged before
        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: the task's last run has another token, or there is nothing to
            acknowledge
        """
        cursor.row_factory = dict_row
        wanted = {"task": task, "token": token, "by": by, "until": until}
        wanted["action_id"] = action_id or uuid4()
        if self._run_recording(cursor, self._acknowledge, **wanted).fetchone() is None:
            self._check_there(cursor, [task])
            [now] = self.tasks(cursor, [escaped(task)], 1)
            if now.acknowledged and now.token == token:
                return False
            why = "it has no failure, no cut, and no miss"
            if now.failures or now.cut_for is not None or now.missed_at is not None:
                why = f"its last run has the token {now.token}"
            raise TaskLockStateError(f"nothing of task {task!r} is acknowledged: {why}")
        return True

    def _has_jobs(self, cursor: Any) -> bool:
        """Return whether there is a table of stored jobs."""
        there = Statement("SELECT to_regclass(%(jobs)s) IS NOT NULL AS there")
        [row] = self._all(cursor, there, jobs=self._jobs_name.replace("%%", "%"))
        return bool(row["there"])

    def forget(self, cursor: Any, task: str, *, is_in_doubt: bool = False) -> bool:
        """Delete a task's row and its history.

        :param is_in_doubt: whether the call was sent before, and its answer was lost
        :return: whether this call has deleted the row. Otherwise the row is not there, and nothing
            tells whether the call has deleted it that was sent before.
        :raises TaskLockNotFoundError: the task has no row
        :raises TaskLockStateError: the task runs, or a live replica has it
        """
        if self._run(cursor, self._forget, task=task).fetchone() is None:
            try:
                self._check_there(cursor, [task])
            except TaskLockNotFoundError:
                if not is_in_doubt:
                    raise
                # So that the deletion is confirmed, of whomever it is.
                self.confirm(cursor)
                return False
            raise TaskLockStateError(
                f"task {task!r} is not forgotten: it is running, or a replica that is alive has it"
            )
        return True

    def confirm(self, cursor: Any) -> None:
        """Send a write, after which all is confirmed that the connection has read before."""
        cursor.execute(probe(self._table))

    def forget_replicas(self, cursor: Any, pattern: str, *, is_in_doubt: bool = False) -> list[str]:
        """Delete the rows of the replicas that match a pattern, unless they are alive.

        :param is_in_doubt: whether the call was sent before, and its answer was lost
        :return: the ids of the forgotten replicas; none if the call was sent before, no other
            replica matches, and nothing tells whether it has deleted some
        :raises TaskLockNotFoundError: no replica matches
        :raises TaskLockStateError: each one that matches is alive
        """
        cursor.row_factory = dict_row
        like = like_of(pattern) if is_pattern(pattern) else None
        rows = self._run(cursor, self._forget_replicas, pattern=pattern, like=like).fetchall()
        if not rows:
            if not is_in_doubt:
                raise TaskLockNotFoundError([pattern], "replica")
            self.confirm(cursor)
            return []
        forgotten = [row["replica_id"] for row in rows if row["forgotten"]]
        if not forgotten:
            raise TaskLockStateError(
                f"replica {rows[0]['replica_id']!r} is not forgotten: it has given a sign of life "
                f"in the last {ALIVE_FOR:.0f} s"
            )
        return forgotten

    def _change_many(
        self,
        cursor: Any,
        statement: RecordingStatement,
        patterns: Sequence[str],
        wanted: dict[str, Any],
        action_id: UUID | None,
    ) -> list[dict[str, Any]]:
        """Change the tasks that match patterns; return their rows, in the order of their names.

        Each task has a row from before the change, and one from after it if it was changed.
        """
        action_id = action_id or uuid4()
        wanted = {**wanted, "action_id": action_id, "pause_id": str(action_id)}
        cursor.row_factory = dict_row
        # A name without * and ? matches only itself.
        likes = [like_of(each) if is_pattern(each) else None for each in patterns]
        chosen = {"patterns": list(patterns), "likes": likes}
        rows = self._run_recording(cursor, statement, **chosen, **wanted).fetchall()
        missing = [row["name"] for row in rows if not row["is_there"]]
        if missing or (patterns and not rows):  # without rows: the tasks were deleted meanwhile
            raise TaskLockNotFoundError(missing or patterns)
        return sorted(rows, key=lambda row: str(row["name"]))

    def _run_recording(self, cursor: Any, statement: RecordingStatement, **wanted: object) -> Any:
        """Run a statement with its history entries, or without them if they are rejected."""

        def run(each: Statement) -> Any:
            # If the caller has begun a transaction, it goes on after an error.
            with part_of_transaction(cursor):
                return self._run(cursor, each, **wanted)

        return _with_entries(statement, run)


def _pause(name: str, history: History | None = None) -> str:
    """Return the statement that pauses tasks."""
    is_own = """(pause ->> 'by'::text = %(by)s::text
                 AND pause ->> 'why'::text IS NOT DISTINCT FROM %(reason)s::text)"""
    end = "now() + %(seconds)s::float8 * interval '1 second'"
    found = f"""
        SELECT own.*, is_again OR others_count < {_MOST_PAUSES} AS has_room,
               NOT is_again AS is_written,
               CASE WHEN NOT is_endless THEN GREATEST(own_until, {end}) END AS until
        FROM (SELECT pg_catalog.jsonb_agg(pause ORDER BY place)
                         FILTER (WHERE NOT {is_own}) AS others,
                     count(*) FILTER (WHERE NOT {is_own}) AS others_count,
                     LEAST(now(), min({PAUSE_SINCE}) FILTER (WHERE {is_own})) AS since,
                     max({PAUSE_UNTIL}) FILTER (WHERE {is_own}) AS own_until,
                     %(seconds)s::float8 IS NULL OR COALESCE(
                         bool_or({PAUSE_UNTIL} IS NULL) FILTER (WHERE {is_own}), false)
                         AS is_endless,
                     COALESCE(bool_or(pause ->> 'id'::text = %(pause_id)s::text), false) AS is_again
              FROM {PAUSES}) AS own
    """
    pause = """pg_catalog.jsonb_build_object('id', %(pause_id)s::text, 'by', %(by)s::text,
                                  'why', %(reason)s::text, 'since', extract(epoch FROM since),
                                  'until', extract(epoch FROM until))"""
    assignments = f"""
        pauses = CASE WHEN is_again THEN lock.pauses
                      ELSE COALESCE(others, '[]') OPERATOR(pg_catalog.||) {pause} END,
        paused_at = COALESCE(CASE WHEN {IS_PAUSED} OR {DUE_IN_PAUSE} THEN paused_at END, now()),
        paused_until = CASE WHEN is_again THEN paused_until
                            WHEN until IS NOT NULL
                                 AND NOT ({IS_PAUSED} AND lock.paused_until IS NULL)
                            THEN GREATEST(CASE WHEN {IS_PAUSED} THEN lock.paused_until END, until)
                       END,
        recorded_actions = recorded_actions
            + CASE WHEN is_written THEN {int(history is not None)} ELSE 0 END
    """
    rows = "changed AS run WHERE run.is_written"
    written = {"until": "run.until", "reason": "%(reason)s::text"}
    entry = history.action("paused", rows, **written) if history else ""
    return _change_of_many(name, found, assignments, entry, history)


def _resume(name: str, history: History | None = None) -> str:
    """Return the statement that takes out pauses of tasks.

    If no pause is left, the task's pause ends now and is kept in the row, so that no run makes up
    for the run times in it. If the row is paused and its list of pauses is empty, anybody may end
    the pause.
    """
    is_own = "(%(force)s::boolean OR pause ->> 'by'::text = %(by)s::text)"
    found = f"""
        SELECT others.*, {IS_PAUSED} AND (has_own OR pauses IS NULL) AS is_written,
               true AS has_room
        FROM (SELECT pg_catalog.jsonb_agg(pause ORDER BY place)
                         FILTER (WHERE NOT {is_own}) AS pauses,
                     COALESCE(bool_or({is_own}), false) AS has_own,
                     max({PAUSE_UNTIL}) FILTER (WHERE NOT {is_own}) AS until,
                     bool_or({PAUSE_UNTIL} IS NULL) FILTER (WHERE NOT {is_own}) AS is_endless
              FROM {PAUSES}) AS others
    """
    assignments = f"""
        pauses = found.pauses,
        paused_until = CASE WHEN NOT is_written THEN lock.paused_until
                            WHEN found.pauses IS NULL THEN now()
                            WHEN NOT is_endless THEN until END,
        recorded_actions = recorded_actions
            + CASE WHEN is_written THEN {int(history is not None)} ELSE 0 END
    """
    rows = "changed AS run WHERE run.is_written"
    entry = history.action("resumed", rows, reason=_WITH_OTHERS) if history else ""
    return _change_of_many(name, found, assignments, entry, history)


def _acknowledge(name: str, history: History | None = None) -> str:
    """Return the statement that notes that an operator knows of a failure, a cut or a miss.

    The token is that of the last run, which may still go on. Until a given time, later ones are
    known as well, because the row then has that time as the time of the acknowledged one.
    """
    until = "%(until)s::timestamptz"
    # Whether regular misses of a recurring task are found is told by its history, which is not read
    # here, so that each miss may be acknowledged.
    missed_at = "CASE WHEN NOT lock.one_off THEN lock.missed_at END"
    entry = history.action("acknowledged", "known AS run", until) if history else ""
    return f"""
        WITH {pauses_of_all(name)}, {listed_pauses(name)}, {again(history, _IS_OF_TASK)}, known AS (
            UPDATE {name} AS lock SET
                acknowledged_at = GREATEST({ALARMS_SINCE}, {missed_at}, {until}),
                recorded_actions = recorded_actions + {int(history is not None)}
            WHERE task_name = %(task)s AND {IS_TASK}
                  AND ({until} > now()
                       OR (NOT {NO_LONGER_ALARMS} AND {ALARMS_SINCE} IS NOT NULL)
                       OR {missed_at} > COALESCE(lock.acknowledged_at, {NEVER}))
                  AND token = %(token)s::bigint AND {IS_FIRST}
            RETURNING *
        ){f", entry AS ({entry})" if entry else ""}
        SELECT task_name FROM known UNION ALL SELECT task_name FROM again
    """


# The task of an action's entry.
_IS_OF_TASK = "= %(task)s::text"
# The pauses of all tasks that have not ended, or have ended less than a day ago. Ended ones are
# kept, so that no run makes up for the run times in them.
_KEPT_PAUSES = f"""{json_elements_of("lock.pauses")} WITH ORDINALITY AS each (pause, place)
                   WHERE CASE WHEN {IS_PAUSE}
                              THEN COALESCE({PAUSE_UNTIL} > now() - interval '1 day', true)
                              ELSE false END"""
_PAUSE_LASTS = f"COALESCE({PAUSE_UNTIL} > now(), true)"


def _add_all(name: str) -> str:
    """Return the statement that adds the row of the pauses of all tasks. It is no task's row."""
    return f"""
        INSERT INTO {name} AS lock ({ROW_COLUMNS}, finished_at)
        SELECT {ALL_TASKS}, {NEVER}, {NEVER}, {NEVER}, {NEVER}, {NEVER}, '', gen_random_uuid(), 0,
               0, 0, false, false, '', false, NULL, NULL, NULL, false, NULL, NULL, NULL, {NEVER}
        ON CONFLICT DO NOTHING
    """


def _pause_all(name: str, history: History | None = None) -> str:
    """Return the statement that pauses all tasks of a namespace."""
    is_own = f"""({_PAUSE_LASTS} AND pause ->> 'by'::text = %(by)s::text
                  AND pause ->> 'namespace'::text = %(namespace)s::text
                  AND pause ->> 'why'::text IS NOT DISTINCT FROM %(reason)s::text)"""
    end = "now() + %(seconds)s::float8 * interval '1 second'"
    pause = """pg_catalog.jsonb_build_object('id', %(pause_id)s::text, 'by', %(by)s::text,
        'why', %(reason)s::text, 'namespace', %(namespace)s::text, 'before', %(before)s::text,
        'since', extract(epoch FROM since), 'until', extract(epoch FROM until))"""
    return f"""
        WITH {again(history, _IS_OF_ALL)}, found AS (
            SELECT own.*, is_again OR lasting < {_MOST_PAUSES} AS has_room,
                   CASE WHEN NOT is_endless THEN GREATEST(own_until, {end}) END AS until
            FROM {name} AS lock, LATERAL (
                SELECT pg_catalog.jsonb_agg(pause ORDER BY place)
                           FILTER (WHERE NOT {is_own}) AS others,
                       count(*) FILTER (WHERE {_PAUSE_LASTS} AND NOT {is_own}) AS lasting,
                       LEAST(now(), min({PAUSE_SINCE}) FILTER (WHERE {is_own})) AS since,
                       max({PAUSE_UNTIL}) FILTER (WHERE {is_own}) AS own_until,
                       %(seconds)s::float8 IS NULL OR COALESCE(
                           bool_or({PAUSE_UNTIL} IS NULL) FILTER (WHERE {is_own}), false)
                           AS is_endless,
                       COALESCE(bool_or(pause ->> 'id'::text = %(pause_id)s::text), false)
                           OR NOT {IS_FIRST} AS is_again
                FROM {_KEPT_PAUSES}) AS own
            WHERE lock.task_name = {ALL_TASKS}
        ), changed AS (
            UPDATE {name} AS lock SET
                pauses = COALESCE(others, '[]') OPERATOR(pg_catalog.||) {pause},
                recorded_actions = recorded_actions + {int(history is not None)}
            FROM found WHERE lock.task_name = {ALL_TASKS} AND has_room AND NOT is_again
            RETURNING lock.*, found.until
        ){_action_of_all(history, "paused", until="run.until", reason="%(reason)s::text")}
        SELECT has_room, since, CASE WHEN is_again THEN own_until ELSE until END AS until FROM found
    """


def _resume_all(name: str, history: History | None = None) -> str:
    """Return the statement that takes out pauses of all tasks of a namespace.

    The pauses end now and are kept, so that no run makes up for the run times in them.
    """
    is_own = f"""({_PAUSE_LASTS} AND pause ->> 'namespace'::text = %(namespace)s::text
                  AND (%(force)s::boolean OR pause ->> 'by'::text = %(by)s::text))"""
    ended = """pause OPERATOR(pg_catalog.||)
               pg_catalog.jsonb_build_object('until', extract(epoch FROM now()))"""
    return f"""
        WITH {again(history, _IS_OF_ALL)}, locked AS (
            SELECT lock.* FROM {name} AS lock WHERE task_name = {ALL_TASKS} FOR NO KEY UPDATE
        ), found AS (
            SELECT own.* FROM locked AS lock, LATERAL (
                SELECT pg_catalog.jsonb_agg(
                           CASE WHEN {is_own} THEN {ended} ELSE pause END ORDER BY place)
                           AS pauses,
                       COALESCE(bool_or({is_own}), false) AS has_own
                FROM {_KEPT_PAUSES}) AS own
        ), changed AS (
            UPDATE {name} AS lock SET
                pauses = found.pauses,
                recorded_actions = recorded_actions + {int(history is not None)}
            FROM found WHERE lock.task_name = {ALL_TASKS} AND has_own AND {IS_FIRST}
            RETURNING lock.*
        ){_action_of_all(history, "resumed", reason=_WITH_OTHERS)}
        SELECT NOT {IS_FIRST} AS is_again, there.namespace, there.by, there.since, there.until,
               there.reason, there.is_own AND {IS_FIRST} AS ends,
               there.place IS NOT NULL AS is_there
        FROM (VALUES (true)) AS one LEFT JOIN (
            SELECT pause ->> 'namespace'::text AS namespace, pause ->> 'by'::text AS by,
                   {PAUSE_SINCE} AS since, {PAUSE_UNTIL} AS until,
                   pause ->> 'why'::text AS reason, {is_own} AS is_own, place
            FROM locked AS lock, {_KEPT_PAUSES} AND {_PAUSE_LASTS}
        ) AS there ON true ORDER BY there.namespace, there.place
    """


# The name in the entry of an action with all tasks of a namespace.
_NAME_OF_ALL = f"{ALL_TASKS} || %(namespace)s::text"
_IS_OF_ALL = f"= {_NAME_OF_ALL}"


def _action_of_all(history: History | None, what: str, **more: str) -> str:
    """Return the part of a WITH clause that writes what was done with all tasks of a namespace."""
    if history is None:
        return ""
    name = _NAME_OF_ALL
    return f", entry AS ({history.action(what, 'changed AS run', task_name=name, **more)})"


def _request_run(name: str, history: History | None = None, *, replicas: str) -> str:
    """Return the statement that asks for a manual run.

    :param replicas: the quoted name of the replicas' table, for a template
    """
    entry, entries, requested_before, still_has = "", int(history is not None), "", ""
    if history is not None:
        # A replica lists the tasks of stored jobs once in a while, so its row may have the task of
        # a job that was removed since.
        still_has = f"""AND seen_at > ALL (
                    SELECT entry.started_at FROM {history.table} AS entry
                    WHERE entry.task_name = %(task)s AND entry.ring = 'actions'
                          AND entry.outcome = 'job-removed')"""
        # The run may have begun since, and have a token of its own, which is later than that of
        # the request. A token is at least the time of its claim.
        requested_before = f"""
        UNION ALL
        SELECT again.action_id, again.task_name,
               CASE WHEN lock.started_at <= again.started_at THEN lock.token
                    ELSE (extract(epoch FROM again.started_at) * 1000.0)::bigint - 1 END,
               again.by, again.started_at, again.until, true
        FROM again JOIN {name} AS lock USING (task_name)"""
        # An open request of before keeps its time.
        asked = """requested AS run
                   WHERE run.request_id = %(action_id)s::uuid AND run.requested_at = now()"""
        entry = f", entry AS ({history.action('run', asked, until='run.request_until')})"
    return f"""
        WITH {again(history, _IS_OF_TASK)}, requested AS (
            UPDATE {name} AS lock SET
                request_id = CASE WHEN {_IS_OPEN} THEN lock.request_id
                                  ELSE %(action_id)s::uuid END,
                requested_by = CASE WHEN {_IS_OPEN} THEN lock.requested_by ELSE %(by)s END,
                requested_at = CASE WHEN {_IS_OPEN} THEN lock.requested_at ELSE now() END,
                request_until = CASE WHEN {_IS_OPEN} THEN lock.request_until
                    ELSE now() + %(seconds)s::float8 * interval '1 second' END,
                recorded_actions = recorded_actions
                    + CASE WHEN {_IS_OPEN} THEN 0 ELSE {entries} END
            WHERE task_name = %(task)s AND runs <> '' AND (%(is_here)s::boolean OR EXISTS (
                SELECT FROM {replicas} WHERE {IS_ALIVE} AND {_HAS_TASK} {still_has}))
                AND {IS_FIRST}
            RETURNING *
        ){entry}
        SELECT request_id, task_name AS task, token, requested_by, requested_at,
               request_until AS until, request_id = %(action_id)s::uuid AS is_new
        FROM requested{requested_before}
    """


def _free(name: str, history: History | None = None, *, jobs: str | None = None) -> str:
    """Return the statement that finishes a run in place of its holder.

    The run counts as a failure, because nobody knows that it ended well.

    :param jobs: the quoted name of the jobs' table, for a template, if the run's stored job becomes
        due again at the same run time
    """
    more, entries = [], int(history is not None)
    if history is not None:
        freed = history.entry("freed AS run", outcome="'freed'")
        more += [f"entry AS ({freed})", f"action AS ({history.action('freed', 'freed AS run')})"]
    if jobs is not None:
        more.append(_moved(jobs))
    # When the task is due, whose due time has passed.
    due_at = f"""LEAST({LATEST}, CASE
        WHEN %(run_again)s::boolean OR lock.due_at > now() THEN lock.due_at
        WHEN lock.due_at = %(was_due_at)s::timestamptz AND %(due_at)s::timestamptz > now()
             THEN %(due_at)s::timestamptz
        WHEN lock.due_at IS NOT NULL
             THEN now() + GREATEST(lock.due_at - lock.window_start, interval '0') END)"""
    is_due = "lock.due_at IS NOT NULL"
    return f"""
        WITH {again(history, _IS_OF_TASK)}, freed AS (
            UPDATE {name} AS lock SET
                finished_at = now(), claim_id = gen_random_uuid(), handed_over = false,
                last_outcome = 'freed', locked_until = now(),
                failures = failures + CASE WHEN {IS_FIRST_FAILURE} THEN 1 ELSE 0 END,
                failed_at = LEAST(lock.locked_until, now()), error_type = NULL,
                recorded_failures = recorded_failures + {entries},
                recorded_actions = recorded_actions + {entries},
                deaths = 0, handovers = 0,
                due_at = CASE WHEN {is_due} THEN {due_at} END,
                overdue_at = CASE WHEN {is_due} THEN LEAST(
                    {LATEST}, {due_at} + (lock.overdue_at - lock.due_at)) END,
                window_until = CASE WHEN %(run_again)s::boolean
                                    THEN window_start - {JUST_BEFORE} ELSE window_until END
            WHERE task_name = %(task)s AND token = %(token)s AND finished_at IS NULL
                  AND (locked_until <= now() OR %(force)s::boolean)
                  AND NOT (%(run_again)s::boolean AND kind IS NOT DISTINCT FROM 'manual')
                  AND {IS_FIRST}
            RETURNING *
        ){"".join(f", {part}" for part in more)}
        {_what_is_freed(name, history, notifies=jobs is not None)}
    """


def _what_is_freed(name: str, history: History | None, *, notifies: bool) -> str:
    """Return the query of a run that a statement has freed, now or when it was sent before.

    :param notifies: whether replicas are notified, because a stored job is due again
    """
    columns = f"""task_name AS task, token, locked_by AS holder, started_at AS since,
               CASE WHEN window_start <> {NEVER} THEN GREATEST(window_until, window_start) END
                   AS window_until, due_at, overdue_at"""
    if history is None:
        before = ""
    else:
        before = f"""
        UNION ALL SELECT {columns} FROM {name} AS lock
        WHERE task_name IN (SELECT task_name FROM again)"""
    notified = " WHERE pg_notify(%(channel)s, '') IS NOT NULL" if notifies else ""
    return f"SELECT {columns} FROM freed{notified}{before}"


def _moved(jobs: str) -> str:
    """Return the part that lets the stored job of a freed run become due again.

    The job gets a new ``changed_id``, so that a replica that has read the job before cannot claim
    it. A paused job stays paused.
    """
    return f"""moved AS (
            UPDATE {jobs} AS job SET
                next_run_time = last_run_time, ended = false, version = {next_version("version")},
                changed_id = gen_random_uuid()
            FROM freed
            WHERE job.task_name = freed.task_name AND last_run_time = freed.window_start
                  AND (ended OR next_run_time IS NOT NULL)
        )"""


def _end_retry(name: str, history: History | None = None, *, jobs: str | None = None) -> str:
    """Return the statement that ends the pending retry of a failed run.

    The row gets a new claim id, as with each later claim of the task, so that no replica retries
    the run.

    :param jobs: as in :func:`_free`
    """
    more = [] if history is None else [f"entry AS ({history.action('freed', 'freed AS run')})"]
    if jobs is not None:
        more.append(_moved(jobs))
    return f"""
        WITH {again(history, _IS_OF_TASK)}, freed AS (
            UPDATE {name} AS lock SET
                claim_id = gen_random_uuid(), deaths = 0, handovers = 0,
                recorded_actions = recorded_actions + {int(history is not None)},
                window_until = CASE WHEN %(run_again)s::boolean
                                    THEN window_start - {JUST_BEFORE} ELSE window_until END
            WHERE task_name = %(task)s AND token = %(token)s AND {IS_RETRY_PENDING}
                  AND {IS_FIRST}
            RETURNING *
        ){"".join(f", {part}" for part in more)}
        {_what_is_freed(name, history, notifies=jobs is not None)}
    """


def _change_of_many(
    name: str, found: str, assignments: str, entry: str, history: History | None
) -> str:
    """Return a statement that changes all tasks that match patterns, or none.

    If a task has exactly the name that a pattern spells, the pattern matches only that task. A
    pattern that matches no task may be mistyped, so the statement changes nothing, and returns that
    pattern as missing. ``found`` is computed in a SELECT after the one that locks the rows, because
    in the same SELECT PostgreSQL would compute it from a row that another session may still change.

    :param name: the quoted name of the task lock table, for a template
    :param found: a SELECT of what is found in the row ``lock``. Its column ``has_room`` says
        whether the row has room for the change. If one row has none, nothing is changed.
        ``is_written`` says whether the run history gets an entry, and ``until`` is the entry's.
    :param assignments: the assignments of the UPDATE
    :param entry: the INSERT of the entries of ``changed`` in the run history; ``""``: none
    :param history: the run history; ``None``: there are no entries
    """
    columns = "task_name, runs, paused_at, paused_until, pauses"
    return f"""
        WITH {pauses_of_all(name)}, {listed_pauses(name)}, given AS (
            SELECT DISTINCT pattern, alike
            FROM unnest(%(patterns)s::text[], %(likes)s::text[]) AS given (pattern, alike)
        ), chosen AS (
            SELECT given.pattern, lock.task_name FROM given JOIN {name} AS lock
            ON {IS_TASK} AND lock.task_name = given.pattern
               OR ({IS_TASK} AND lock.task_name LIKE given.alike
                   AND NOT EXISTS (SELECT FROM {name} AS exact
                                   WHERE exact.task_name = given.pattern))
        ), {again(history, "IN (SELECT chosen.task_name FROM chosen)")}, missing AS (
            SELECT pattern FROM given WHERE pattern NOT IN (SELECT pattern FROM chosen)
        ), locked AS (
            SELECT lock.* FROM {name} AS lock
            WHERE task_name IN (SELECT task_name FROM chosen)
                  AND NOT EXISTS (SELECT FROM missing)
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock
        ), found AS (
            SELECT lock.task_name, found.*
            FROM locked AS lock, LATERAL ({found}) AS found
        ), full_ones AS (
            SELECT task_name FROM found WHERE NOT has_room
        ), changed AS (
            UPDATE {name} AS lock SET {assignments}
            FROM found WHERE lock.task_name = found.task_name
                AND NOT EXISTS (SELECT FROM full_ones) AND {IS_FIRST}
            RETURNING lock.*, found.is_written, found.until
        ){f", entry AS ({entry})" if entry else ""}, told AS (
            SELECT false AS is_after, {columns} FROM locked
            UNION ALL SELECT true, {columns} FROM changed
        )
        SELECT lock.task_name AS name, is_after, {IS_PAUSED_IN_ANY_WAY} AS is_paused, pauses.*,
               true AS is_there, lock.task_name IN (SELECT task_name FROM full_ones) AS is_full,
               lock.task_name IN (SELECT task_name FROM again) AS is_again
        FROM told AS lock, {LISTED_PAUSES}
        UNION ALL
        SELECT pattern, false, false, {", ".join(["NULL"] * len(PAUSE_COLUMNS))},
               false, false, false FROM missing
    """


def check_lengths(where: str, **texts: str | None) -> None:
    """Check that the texts of an operator's call, which other operators see, are not too long.

    :raises TaskLockOptionError: a text is too long
    """
    for name, text in texts.items():
        if text is not None and len(text) > LONGEST_MESSAGE:
            raise TaskLockOptionError(
                f"{where}: {name} has {len(text):,} characters, and at most {LONGEST_MESSAGE:,} "
                "are allowed"
            )


def operator_here() -> str:
    """Return the name of the operator, shown to others."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # in a container the user may have no name
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


def _with_entries(statement: RecordingStatement, run: Callable[[Statement], Any]) -> Any:
    """Run a statement with its history entries, or without them if the database rejects them."""
    if statement.recording is not None:
        try:
            return run(statement.recording)
        except psycopg.DatabaseError as error:
            if as_unavailable(error) is not None:
                raise
    return run(statement)


def _first_after(namespace: str) -> str | None:
    """Return the first text, by code points, after all that begin with a namespace."""
    return f"{namespace[:-1]}{chr(ord(namespace[-1]) + 1)}" if namespace else None


def _pause_changes(rows: Sequence[dict[str, Any]]) -> list[PauseChange]:
    """Return what has become of the pauses of tasks, by their rows before and after the change."""
    before, after = (
        {row["name"]: row for row in rows if row["is_after"] == is_after}
        for is_after in (False, True)
    )
    changes = []
    for name, row in before.items():
        there, left = _pauses_of(row), _pauses_of(after.get(name, row))
        ended = tuple(pause for pause in there if pause not in left)
        was_paused, is_paused = row["is_paused"], after.get(name, row)["is_paused"]
        changes.append(PauseChange(name, ended, left, was_paused or row["is_again"], is_paused))
    return changes


def _pauses_of(row: dict[str, Any]) -> tuple[Pause, ...]:
    columns = (row[name] or () for name in PAUSE_COLUMNS)
    return tuple(Pause(*each) for each in zip(*columns, strict=True))


def _not_freed(task: TaskStatus, token: int, *, run_again: bool) -> TaskLockStateError:
    """Return the error that says why a run is not freed."""
    remedy = on_page = ""
    if task.token != token:
        why = f"its last run has the token {task.token}"
    elif task.finished_at is not None:
        why = "its run has ended"
    elif run_again and task.kind == "manual":
        why = "its run is a manual run, which has no window to open again"
        remedy = (
            "free the task without --run-again (`run_again=True`), and then ask for another manual "
            "run with `apscheduler-tasklock run`"
        )
        on_page = "free the task without opening the window, and then run it now"
    else:
        is_silent = task.state is TaskState.HOLDER_SILENT
        how = "has died or is silent" if is_silent else "may be alive"
        until = f"{task.locked_until:%Y-%m-%d %H:%M:%S %Z}"
        why = f"its holder {task.holder!r} {how}, and has the lock until {until}"
        if_so = "if you know that it is dead" if is_silent else "if its run hangs"
        remedy = f"{if_so}, use --force (`force=True`)"
        on_page = f'{if_so}, tick the box "also if the holder may be alive"'
    why = f"task {task.name!r} (token {token}) is not freed: {why}"
    return TaskLockStateError(why, remedy=remedy, on_page=on_page)
