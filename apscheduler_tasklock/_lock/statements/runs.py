"""What becomes of a run that was granted: it is renewed, read, and released or handed over."""

from __future__ import annotations

from collections.abc import Mapping

from apscheduler_tasklock._lock.statements.history import History
from apscheduler_tasklock._lock.statements.parts import (
    DUE_IN_PAUSE,
    IS_PAUSED,
    JUST_BEFORE,
    SAFELY,
    SHORTEST_WAIT,
    STANDS,
    asked_columns,
    asked_parameters,
    due_after,
    json_rows,
)

# What a release asks for, and the types.
_RELEASE_TYPES = {
    "task_name": "text",
    "claim_id": "uuid",
    "keep_window": "boolean",
    "hand_over": "boolean",
    "token": "bigint",
    "outcome": "text",
    "error_type": "text",
    "error": "text",
    "last_outcome": "text",
    "next_in": "float8",
    "is_last": "boolean",
}


class _Release:
    """The parts of a release's statement. One that is sent twice changes nothing the second time.

    :param asked: what is asked for, by name
    :param history: where the run's entry is written
    """

    def __init__(self, asked: Mapping[str, str], history: History | None) -> None:
        outcome = asked["outcome"]
        self._history = history
        # A release can open the window again.
        window_until = f"""CASE WHEN {asked["keep_window"]} OR lock.finished_at IS NOT NULL
                                THEN lock.window_until
                                ELSE lock.window_start - {JUST_BEFORE} END"""
        # A run time that came while a run by hand went on follows it, and is due then. One that was
        # overdue before, or came in a pause, stays what it is.
        follows = """(lock.kind = 'manual' AND lock.finished_at IS NULL AND lock.due_at <= now()
                      AND lock.overdue_at > lock.started_at
                      AND COALESCE(lock.due_at >= lock.paused_until, lock.paused_at IS NULL))"""
        # A job that ran past its next run time has another one by now.
        # A run by hand moves one only if it makes up for it: it was overdue, and the run went well.
        is_past = f"""(lock.due_at <= now()
                       AND ({asked["is_last"]} OR {asked["next_in"]} IS NOT NULL)
                       AND (lock.kind IS DISTINCT FROM 'manual'
                            OR (lock.overdue_at <= lock.started_at AND {outcome} = 'ok')))"""
        due = due_after(asked, "now()")
        is_first = "lock.finished_at IS NULL"
        failed = f"{outcome} IN ('error', 'overran')"
        has_entry = f"{outcome} <> ''" if history else "false"
        recorded = f"lock.recorded + CASE WHEN {{first}} AND {has_entry} THEN 1 ELSE 0 END"
        self.changes = f"""
            finished_at = COALESCE(lock.finished_at, now()),
            window_until = {window_until},
            locked_until = GREATEST(now(), {window_until}),
            deaths = 0,
            handovers = 0,
            handed_over = false,
            recorded = {recorded.format(first=is_first)},
            succeeded_at = CASE WHEN {is_first} AND {outcome} = 'ok' THEN now()
                                ELSE lock.succeeded_at END,
            failed_at = CASE WHEN {is_first} AND {failed} THEN now() ELSE lock.failed_at END,
            failures = CASE WHEN {is_first} AND {outcome} = 'ok' THEN 0
                            WHEN {is_first} AND {failed} THEN lock.failures + 1
                            ELSE lock.failures END,
            last_outcome = CASE WHEN {is_first} THEN {asked["last_outcome"]}
                                ELSE lock.last_outcome END,
            error_type = CASE WHEN {is_first} AND ({outcome} = 'ok' OR {failed})
                              THEN {asked["error_type"]} ELSE lock.error_type END,
            overdue_at = CASE WHEN {follows} THEN now()
                                   + GREATEST(lock.overdue_at - lock.due_at, {SHORTEST_WAIT})
                              WHEN {is_past} THEN {due} + (lock.overdue_at - lock.due_at)
                              ELSE lock.overdue_at END,
            due_at = CASE WHEN {follows} THEN now() WHEN {is_past} THEN {due}
                          ELSE lock.due_at END,
            is_last = CASE WHEN {is_past} THEN {asked["is_last"]} ELSE lock.is_last END
        """
        # It was cancelled since it outlived its maximum lock, so that nobody runs its window again.
        overran = f"(NOT lock.handed_over AND {outcome} = 'overran')"
        # What its holder has handed over stays handed over, also if the holder is then found dead.
        self.hand_over = f"""
            locked_until = LEAST(lock.locked_until, now()),
            recorded = {recorded.format(first="NOT lock.handed_over")},
            last_outcome = {asked["last_outcome"]},
            failures = lock.failures + CASE WHEN {overran} THEN 1 ELSE 0 END,
            failed_at = CASE WHEN {overran} THEN now() ELSE lock.failed_at END,
            error_type = CASE WHEN {overran} THEN NULL ELSE lock.error_type END,
            handed_over = true
        """
        self.ended = f"""lock.task_name, lock.claim_id, lock.token, lock.window_start,
                         lock.started_at, lock.finished_at, lock.locked_by, lock.kind,
                         lock.recorded, lock.locked_until, {outcome} AS outcome,
                         {asked["error_type"]} AS error_type, {asked["error"]} AS error"""

    @property
    def entry(self) -> str:
        """The part of a WITH clause that writes the entries of what ended."""
        if self._history is None:
            return ""
        # Not of one that was released before: then its row counts the entry of another.
        is_first = "(run.finished_at IS NULL OR run.finished_at = now())"
        rows = f"ended AS run WHERE run.outcome <> '' AND {is_first}"
        entry = self._history.entry(rows, error_type="run.error_type", error="run.error")
        return f", entry AS ({entry})"

    def overtaken(self, late: str) -> str:
        """Return the part that corrects the entries of runs that were not as dead as they seemed.

        :param late: a FROM clause and a condition, with their tasks and tokens as ``late``
        """
        if self._history is None:
            return ""
        return f""", overtaken AS (
            UPDATE {self._history.table} AS run SET outcome = 'overtaken', ended_at = now()
            FROM {late} AND run.task_name = late.task_name AND run.token = late.token
                 AND run.outcome IN ('died', 'freed')
        )"""


def release(table: str, history: History | None = None) -> str:
    """Return the statement that ends a claim whose run has ended."""
    release = _Release(asked_parameters(_RELEASE_TYPES), history)
    mine = "task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid"
    late = """(SELECT %(task_name)s::text AS task_name, %(token)s::bigint AS token) AS late
              WHERE NOT EXISTS (SELECT FROM ended)"""
    return f"""
        WITH ended AS (
            UPDATE {table} AS lock SET {release.changes} WHERE {mine} AND {SAFELY}
            RETURNING {release.ended}
        ){release.entry}{release.overtaken(late)}
        SELECT locked_until, now() AS database_time FROM ended
    """


def hand_over(table: str, history: History | None = None) -> str:
    """Return the statement that ends the lease of a run, so that another replica runs its window.

    Its holder has cut it short, or never begun it.
    """
    release = _Release(asked_parameters(_RELEASE_TYPES), history)
    mine = "task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid AND finished_at IS NULL"
    return f"""
        WITH ended AS (
            UPDATE {table} AS lock SET {release.hand_over} WHERE {mine} AND {SAFELY}
            RETURNING {release.ended}
        ){release.entry}
        SELECT locked_until, now() AS database_time FROM ended
    """


def release_many(table: str, history: History | None = None) -> str:
    """Return the statement that ends many claims, in the order of their tasks' names.

    Some of them may be handed over, as :func:`hand_over` does. It returns the claims that stood.
    One whose row somebody else has locked is passed over: it comes without an end.
    PostgreSQL takes what has ended for a single row, and would join it as such: 200 times 200 rows
    took a third of the statement's time. Names to be ``NOT IN`` are looked up in a hash table.
    """
    release = _Release(asked_columns(_RELEASE_TYPES), history)
    found = "(lock.finished_at IS NULL OR NOT asked.hand_over)"

    def update(changes: str, which: str) -> str:
        return f"""UPDATE {table} AS lock SET {changes} FROM asked JOIN free USING (task_name)
                   WHERE lock.task_name = free.task_name AND {which} AND {SAFELY}
                   RETURNING {release.ended}"""

    released = update(release.changes, "NOT asked.hand_over")
    handed_over = update(release.hand_over, "asked.hand_over")
    late = f"""(SELECT task_name, token FROM asked
                WHERE NOT hand_over AND NOT EXISTS (
                    SELECT FROM {table} JOIN asked AS own USING (task_name, claim_id)
                    WHERE task_name = asked.task_name)
                OFFSET 0) AS late WHERE true"""
    return f"""
        WITH asked AS (SELECT * FROM {json_rows(_RELEASE_TYPES)}), free AS (
            SELECT lock.task_name FROM {table} AS lock JOIN asked USING (task_name, claim_id)
            WHERE {found}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), released AS ({released}), handed_over AS ({handed_over}),
        ended AS (SELECT * FROM released UNION ALL SELECT * FROM handed_over)
        {release.entry}{release.overtaken(late)}
        SELECT claim_id AS asked_claim_id, locked_until, now() AS database_time FROM ended
        UNION ALL
        SELECT claim_id, NULL, now()
        FROM asked JOIN {table} AS lock USING (task_name, claim_id)
        WHERE {found} AND task_name NOT IN (SELECT task_name FROM ended)
    """


def extend(table: str) -> str:
    """Return the statement that moves the end of a running claim's maximum lock."""
    return f"""
        UPDATE {table} AS lock SET
            run_until = run_until + %(by)s::float8 * interval '1 second', overran = false,
            locked_until = GREATEST(locked_until, LEAST(
                now() + %(lease)s::float8 * interval '1 second',
                run_until + %(by)s::float8 * interval '1 second'))
        WHERE task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid AND {STANDS}
          AND {SAFELY}
        RETURNING locked_until, run_until, now() AS database_time
    """


def renew(table: str) -> str:
    """Return the statement that renews all that a replica holds, and says what of it stands.

    A lease that has ended is revived, as long as nobody has taken the run over: during an outage
    nobody could renew, and the run goes on. A row that somebody has locked is passed over, and
    comes without an end: else one of them would keep all the others waiting until their leases end.

    The last renewal before the maximum lock ends notes that the holder still lived then. Without a
    lease it is the only one.
    """
    return f"""
        WITH asked AS (
            SELECT * FROM unnest(%(task_names)s::text[], %(claim_ids)s::uuid[],
                                 %(leases)s::float8[], %(last)s::boolean[])
                          AS renewal (task_name, claim_id, lease, overruns)
        ), free AS (
            SELECT lock.task_name, lease, overruns
            FROM {table} AS lock JOIN asked USING (task_name, claim_id)
            WHERE {STANDS}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), renewed AS (
            UPDATE {table} AS lock SET
                locked_until = GREATEST(
                    locked_until, LEAST(now() + lease * interval '1 second', run_until)),
                overran = overruns
            FROM free WHERE lock.task_name = free.task_name
            RETURNING lock.claim_id, lock.locked_until AS renewed_until
        )
        SELECT claim_id, renewed_until AS locked_until, lock.run_until, now() AS database_time
        FROM {table} AS lock JOIN asked USING (task_name, claim_id)
             LEFT JOIN renewed USING (claim_id)
        WHERE {STANDS}
    """


def read(table: str) -> str:
    """Return the statement that reads the last runs of tasks: the dead ones, and some tasks' all.

    A row without a task has the server's own state, also where there is no other row.
    """
    not_paused = f"due_at < now() AND NOT {IS_PAUSED}"
    is_due = f"finished_at IS NOT NULL AND {not_paused}"
    # A run that died and is not run again stands against no later one.
    died = "(locked_until <= now() AND NOT failover AND NOT handed_over)"
    is_over = f"(finished_at IS NOT NULL OR {died})"
    return f"""
        SELECT task_name, claim_id, token, finished_at IS NOT NULL AS finished,
               finished_at IS NULL AND locked_until <= now() AS dead,
               run_until <= now() AS expired, failover, deaths, handovers, handed_over, runs,
               window_start, locked_by AS holder, now() AS database_time, read_only,
               COALESCE(kind = 'manual', false) AS manual,
               CASE WHEN request_until > now() THEN request_id END AS request_id, schedule,
               CASE WHEN {is_over} AND {not_paused} THEN due_at END AS due_at,
               COALESCE({is_due} AND window_start < due_at AND overdue_at < now()
                        AND NOT {DUE_IN_PAUSE}, false) AS overdue,
               {IS_PAUSED} AS paused,
               {DUE_IN_PAUSE} AS due_in_pause
        FROM (SELECT current_setting('transaction_read_only')::boolean AS read_only) AS server
        LEFT JOIN {table} AS lock ON task_name = ANY(%(task_names)s::text[])
            AND ((finished_at IS NULL AND locked_until <= now())
                 OR ({is_due}) OR request_until > now()
                 OR task_name = ANY(%(always)s::text[]))
    """
