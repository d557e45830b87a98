"""Runs: the statements that renew, extend, read, release and hand over runs."""

from __future__ import annotations

from collections.abc import Mapping

from apscheduler_tasklock._lock.outcomes import CORRECTED, END_TEXTS, RELEASED_FAILURES, in_sql
from apscheduler_tasklock._lock.protocol_messages import ReleaseRequest, Renewal
from apscheduler_tasklock._lock.statements.columns import select_list
from apscheduler_tasklock._lock.statements.conditions import (
    AUDIBLY,
    DUE_IN_ANY_PAUSE,
    DUE_IN_PAUSE,
    IS_PAUSED_IN_ANY_WAY,
    JUST_BEFORE,
    KEPT_TO_BEGIN,
    SAFELY,
    SHORTEST_WAIT,
    STANDS,
    WINDOW_SCHEDULE,
    asked_columns,
    asked_parameters,
    due_after,
    json_rows,
    pauses_of_all,
)
from apscheduler_tasklock._lock.statements.deaths import (
    IS_DEAD,
    IS_FIRST_ATTEMPT,
    IS_FIRST_FAILURE,
)
from apscheduler_tasklock._lock.statements.history import History
from apscheduler_tasklock._lock.statements.retries import IS_RETRY_DUE, IS_RETRY_PENDING


class _Release:
    """The parts of the statement that releases a claim.

    A release that is sent twice counts its run once.

    :param asked: the SQL of the request's values, by name
    :param history: the run history; ``None``: there is none
    """

    def __init__(self, asked: Mapping[str, str], history: History | None) -> None:
        outcome = asked["outcome"]
        self._history = history
        # The release may arrive long after the end of the run.
        ended = f"GREATEST(lock.started_at, LEAST(now(), {asked['ended_at']}))"
        # Whether a run time became due while a manual run or a retry went on, so that the task is
        # due at the end of that run. A due time that was overdue before that run, or that fell into
        # a pause, does not change.
        follows = f"""((lock.kind = 'manual' OR NOT {IS_FIRST_ATTEMPT})
                      AND lock.finished_at IS NULL AND lock.due_at <= now()
                      AND lock.overdue_at > lock.started_at AND NOT {DUE_IN_PAUSE})"""
        # Whether the next run time has passed while the run went on, so that a later one is due. A
        # manual run moves the due time only if it makes up for an overdue run: the task was overdue
        # when the manual run began, and the outcome is "ok".
        is_past = f"""(lock.due_at <= now()
                       AND ({asked["is_last"]} OR {asked["next_in"]} IS NOT NULL)
                       AND (lock.kind IS DISTINCT FROM 'manual'
                            OR (lock.overdue_at <= lock.started_at AND {outcome} = 'ok')))"""
        due = due_after(asked, ended)
        is_first = "(lock.finished_at IS NULL)"
        failed = f"{outcome} IN {in_sql(RELEASED_FAILURES)}"
        due_at = f"""CASE WHEN {follows} THEN now() WHEN {is_past} THEN {due}
                          ELSE lock.due_at END"""
        # Whether the failed run is run again: only if the retry can begin before the next run time
        # is due.
        retry_at = f"(now() + {asked['retry_in']} * interval '1 second')"
        is_retried = f"""({is_first} AND {asked["retry_in"]} IS NOT NULL
                          AND COALESCE({retry_at} < ({due_at}), true))"""
        # Whether an earlier release of this claim has noted the retry, and its answer was lost.
        is_noted = f"(NOT {is_first} AND COALESCE(lock.retry_of = lock.claim_id, false))"
        # Only the first release of a claim can open the window again, and only if the run is not
        # retried.
        window_until = f"""CASE WHEN {asked["keep_window"]} OR NOT {is_first} OR {is_retried}
                                THEN lock.window_until
                                ELSE lock.window_start - {JUST_BEFORE} END"""

        def counts(is_counted: str) -> str:
            """Return the assignments that count the entry in its ring."""
            if history is None:
                return ""
            return f"""
            recorded = lock.recorded
                + CASE WHEN {is_counted} AND {outcome} = 'ok' THEN 1 ELSE 0 END,
            recorded_failures = lock.recorded_failures
                + CASE WHEN {is_counted} AND {outcome} NOT IN ('', 'ok') THEN 1 ELSE 0 END,"""

        self.changes = f"""
            finished_at = COALESCE(lock.finished_at, {ended}),
            window_until = {window_until},
            locked_until = GREATEST(now(), {window_until}),
            retry_at = CASE WHEN {is_retried} THEN {retry_at} ELSE lock.retry_at END,
            retry_of = CASE WHEN {is_retried} THEN lock.claim_id ELSE lock.retry_of END,
            deaths = CASE WHEN {is_retried} OR {is_noted} THEN lock.deaths ELSE 0 END,
            handovers = 0,
            handed_over = false,{counts(is_first)}
            succeeded_at = CASE WHEN {is_first} AND {outcome} = 'ok' THEN {ended}
                                ELSE lock.succeeded_at END,
            failed_at = CASE WHEN {is_first} AND {failed} THEN {ended} ELSE lock.failed_at END,
            failures = CASE WHEN {is_first} AND {outcome} = 'ok' THEN 0
                            WHEN {is_first} AND {failed} AND {IS_FIRST_FAILURE}
                            THEN lock.failures + 1
                            ELSE lock.failures END,
            last_outcome = CASE WHEN {is_first} OR lock.last_outcome = 'died'
                                THEN {asked["last_outcome"]} ELSE lock.last_outcome END,
            error_type = CASE WHEN {is_first} AND ({outcome} = 'ok' OR {failed})
                              THEN {asked["error_type"]} ELSE lock.error_type END,
            overdue_at = CASE WHEN {follows} THEN now()
                                   + GREATEST(lock.overdue_at - lock.due_at, {SHORTEST_WAIT})
                              WHEN {is_past} THEN {due} + (lock.overdue_at - lock.due_at)
                              ELSE lock.overdue_at END,
            due_at = {due_at},
            is_last = CASE WHEN {is_past} AND NOT {follows} THEN {asked["is_last"]}
                           ELSE lock.is_last END
        """
        # Whether the run was cancelled after its maximum lock, so that its window is not run again.
        overran = f"(NOT lock.handed_over AND {outcome} = 'overran')"
        # The maximum lock of a run that never began counts from now, because the run may have
        # waited for longer than its maximum lock. The run of a one-off job blocks no other run
        # time, so it gets more time.
        is_new = f"({outcome} = '' AND NOT lock.handed_over)"
        max_lock = "(lock.run_until - lock.started_at)"
        one_off = f"CASE WHEN lock.one_off THEN {KEPT_TO_BEGIN} END"
        # A handed-over run stays handed over, also if its holder dies afterwards.
        self.hand_over = f"""
            locked_until = LEAST(lock.locked_until, now()),
            run_until = CASE WHEN {is_new} THEN now() + GREATEST({max_lock}, {one_off})
                             ELSE lock.run_until END,{counts("NOT lock.handed_over")}
            last_outcome = {asked["last_outcome"]},
            failures = lock.failures
                + CASE WHEN {overran} AND {IS_FIRST_FAILURE} THEN 1 ELSE 0 END,
            failed_at = CASE WHEN {overran} THEN now() ELSE lock.failed_at END,
            error_type = CASE WHEN {overran} THEN NULL ELSE lock.error_type END,
            handed_over = true
        """
        self.ended = f"""lock.task_name, lock.claim_id, lock.token, lock.window_start,
                         lock.started_at, lock.finished_at, lock.locked_by, lock.kind,
                         lock.recorded, lock.recorded_failures, lock.locked_until,
                         (lock.finished_at IS NULL OR lock.finished_at = {ended}) AS is_first,
                         {ended} AS ended_at, lock.attempt,
                         CASE WHEN lock.retry_of = lock.claim_id THEN lock.retry_at END AS retry_at,
                         {outcome} AS outcome,
                         {select_list({name: asked[name] for name in END_TEXTS})}"""

    @property
    def entry(self) -> str:
        """The part of a WITH clause that writes the entries of the ended runs."""
        if self._history is None:
            return ""
        # A repeated release writes no entry, because the row's count may be that of another entry
        # by then.
        entry = self._history.entry(
            "ended AS run WHERE run.outcome <> '' AND run.is_first",
            ended_at="run.ended_at",
            retry_at="run.retry_at",
            release="%(release)s::text",
            **{name: f"run.{name}" for name in END_TEXTS},
        )
        return f", entry AS ({entry})"


def release(table: str, history: History | None = None) -> str:
    """Return the statement that releases a claim, and finishes its run.

    A release that is sent again may find that its run is retried already: the claim in the row is
    another one then, and ``retry_of`` still the released one.
    """
    release = _Release(asked_parameters(ReleaseRequest), history)
    mine = "task_name = %(task_name)s AND claim_id = %(claim_id)s"
    return f"""
        WITH ended AS (
            UPDATE {table} AS lock SET {release.changes} WHERE {mine} AND {SAFELY}
            RETURNING {release.ended}
        ){release.entry}
        SELECT locked_until, now() AS database_time, retry_at, NOT is_first AS is_late FROM ended
        UNION ALL
        SELECT GREATEST(now(), window_until), now(), retry_at, false FROM {table}
        WHERE task_name = %(task_name)s AND retry_of = %(claim_id)s
              AND NOT EXISTS (SELECT FROM ended)
    """


def hand_over(table: str, history: History | None = None) -> str:
    """Return the statement that hands over a run that its holder has cut, or has never begun.

    The statement ends the lease, so that another replica runs the window.
    """
    release = _Release(asked_parameters(ReleaseRequest), history)
    mine = "task_name = %(task_name)s AND claim_id = %(claim_id)s AND finished_at IS NULL"
    return f"""
        WITH ended AS (
            UPDATE {table} AS lock SET {release.hand_over} WHERE {mine} AND {SAFELY}
            RETURNING {release.ended}
        ){release.entry}
        SELECT locked_until, now() AS database_time, retry_at FROM ended
    """


def release_many(table: str, history: History | None = None) -> str:
    """Return the statement that releases many claims, in the order of their tasks' names.

    Some of the runs may be handed over, as by :func:`hand_over`. The statement returns the claims
    that stood. A claim whose row another session has locked is passed over, and is returned without
    a ``locked_until``. The answer of a release whose run is retried already is as that of
    :func:`release`.

    The last part uses ``NOT IN``, because PostgreSQL looks the names up in a hash table. For a join
    it would expect one row in ``ended`` and compare 200 times 200 rows, which took a third of the
    statement's time.
    """
    release = _Release(asked_columns(ReleaseRequest), history)
    found = "(lock.finished_at IS NULL OR NOT asked.hand_over)"

    def update(changes: str, which: str) -> str:
        return f"""UPDATE {table} AS lock SET {changes} FROM asked JOIN free USING (task_name)
                   WHERE lock.task_name = free.task_name AND {which} AND {SAFELY}
                   RETURNING {release.ended}"""

    released = update(release.changes, "NOT asked.hand_over")
    handed_over = update(release.hand_over, "asked.hand_over")
    return f"""
        WITH asked AS (SELECT * FROM {json_rows(ReleaseRequest)}), free AS (
            SELECT lock.task_name FROM {table} AS lock JOIN asked USING (task_name, claim_id)
            WHERE {found}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), released AS ({released}), handed_over AS ({handed_over}),
        ended AS (SELECT * FROM released UNION ALL SELECT * FROM handed_over)
        {release.entry}
        SELECT claim_id AS asked_claim_id, locked_until, now() AS database_time, retry_at,
               NOT is_first AS is_late
        FROM ended
        UNION ALL
        SELECT asked.claim_id,
               CASE WHEN lock.claim_id <> asked.claim_id
                    THEN GREATEST(now(), lock.window_until) END,
               now(),
               CASE WHEN lock.claim_id <> asked.claim_id THEN lock.retry_at END,
               false
        FROM asked JOIN {table} AS lock USING (task_name)
        WHERE CASE WHEN lock.claim_id = asked.claim_id
                   THEN {found} AND task_name NOT IN (SELECT task_name FROM ended)
                   ELSE lock.retry_of = asked.claim_id AND NOT asked.hand_over END
    """


def correct_history(table: str, history: History | None = None) -> str:
    """Return the statement that corrects the run history after releases that came too late.

    The entry of such a run says that the run died, or that an operator freed its task. If the run
    ended before that claim began which followed it, or before it was freed, the entry gets the
    run's outcome, else ``overtaken``. A claim that never began has no outcome: its entry gets
    ``cancelled``. The entry stays in its ring, so that no count of the task's row changes. Without
    a history the statement does nothing.

    This is a statement of its own, after the release's, because that one may have waited for the
    task's row while another session wrote the entry and committed, and does not see the entry then.
    """
    if history is None:
        return "SELECT"
    # By this server's clock, because the claim that followed may be later than a step of the clock.
    ended_at = "COALESCE(now() - asked.ended_ago * interval '1 second', asked.ended_at, now())"
    # A later claim may have ended meanwhile, so that only its entry shows when it began.
    followed_at = f"""LEAST(
        (SELECT lock.started_at FROM {table} AS lock
         WHERE lock.task_name = run.task_name AND lock.token > run.token),
        (SELECT min(later.started_at) FROM {history.table} AS later
         WHERE later.task_name = run.task_name AND later.token > run.token))"""
    is_overtaken = f"""{ended_at} >= CASE WHEN run.outcome = 'freed' THEN run.ended_at
                                          ELSE {followed_at} END"""
    is_wrong = f"run.ring = 'failures' AND run.outcome IN {in_sql(CORRECTED)}"
    is_own = "late.told = late.outcome"
    texts = ", ".join(f"{name} = CASE WHEN {is_own} THEN late.{name} END" for name in END_TEXTS)
    return f"""
        WITH asked AS (SELECT * FROM {json_rows(ReleaseRequest, ended_ago="float8")}), late AS (
            SELECT asked.*,
                   GREATEST(run.started_at, LEAST(now(), {ended_at})) AS run_ended_at,
                   CASE WHEN asked.outcome = '' THEN 'cancelled'
                        WHEN {is_overtaken} THEN 'overtaken'
                        ELSE asked.outcome END AS told
            FROM asked JOIN {history.table} AS run USING (task_name, token) WHERE {is_wrong}
        )
        UPDATE {history.table} AS run SET
            outcome = late.told, ended_at = late.run_ended_at,
            {texts}
        FROM late
        WHERE run.task_name = late.task_name AND run.token = late.token AND {is_wrong} AND {SAFELY}
    """


def extend(table: str) -> str:
    """Return the statement that moves the end of a running claim's maximum lock."""
    return f"""
        UPDATE {table} AS lock SET
            run_until = run_until + %(by)s * interval '1 second', overran = false,
            locked_until = GREATEST(locked_until, LEAST(
                now() + %(lease)s * interval '1 second',
                run_until + %(by)s * interval '1 second'))
        WHERE task_name = %(task_name)s AND claim_id = %(claim_id)s AND {STANDS}
          AND {SAFELY}
        RETURNING locked_until, run_until, now() AS database_time
    """


def renew(table: str) -> str:
    """Return the statement that renews claims, and returns the claims that stand.

    A lease that has ended is revived unless the run is taken over, because holders cannot renew
    during an outage, and their runs go on. A row that another session has locked is not
    renewed, so that the other renewals are not delayed. Its ``locked_until`` is returned as null.

    The last renewal before the maximum lock ends sets ``overran`` in the row. It shows that the
    holder was alive then, so a run that is not finished afterwards has overrun, and is not dead. A
    claim without a lease has only this renewal.
    """
    return f"""
        WITH asked AS (
            SELECT * FROM {json_rows(Renewal)}
        ), free AS (
            SELECT lock.task_name, asked.lease, asked.is_last AS overruns
            FROM {table} AS lock JOIN asked USING (task_name, claim_id)
            WHERE {STANDS}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), renewed AS (
            UPDATE {table} AS lock SET
                locked_until = GREATEST(
                    locked_until, LEAST(now() + lease * interval '1 second', run_until)),
                overran = overruns
            FROM free WHERE lock.task_name = free.task_name AND {AUDIBLY}
            RETURNING lock.claim_id, lock.locked_until AS renewed_until
        )
        SELECT claim_id, renewed_until AS locked_until, lock.run_until, now() AS database_time
        FROM {table} AS lock JOIN asked USING (task_name, claim_id)
             LEFT JOIN renewed USING (claim_id)
        WHERE {STANDS}
    """


def read_tasks(table: str) -> str:
    """Return the statement that reads the rows of tasks that need an action of a replica.

    Such a task has a dead run, a due time that has passed, or an open request for a manual run. The
    rows of the tasks in ``always`` are read in any case. If there are no rows to return, the
    statement returns one row with only the server's own state.
    """
    not_paused = f"due_at < now() AND NOT {IS_PAUSED_IN_ANY_WAY}"
    is_due = f"finished_at IS NOT NULL AND {not_paused}"
    # A dead run that is not run again does not block the task's next run.
    died = "(locked_until <= now() AND NOT failover AND NOT handed_over)"
    is_over = f"(finished_at IS NOT NULL OR {died})"
    return f"""
        WITH {pauses_of_all(table)}
        SELECT task_name, claim_id, token, finished_at IS NOT NULL AS finished,
               {IS_DEAD} AS dead,
               run_until <= now() AS expired, failover, deaths, handovers, handed_over, runs,
               window_start, locked_by AS holder, now() AS database_time, read_only,
               COALESCE(kind = 'manual', false) AS manual,
               CASE WHEN request_until > now() THEN request_id END AS request_id, schedule,
               CASE WHEN {is_over} AND {not_paused} THEN due_at END AS due_at,
               COALESCE({is_due} AND window_start < due_at AND overdue_at < now()
                        AND NOT {DUE_IN_ANY_PAUSE}, false) AS overdue,
               {IS_PAUSED_IN_ANY_WAY} AS paused,
               {DUE_IN_ANY_PAUSE} AS due_in_pause,
               window_until, {WINDOW_SCHEDULE} AS window_schedule, locked_until,
               finished_at, attempt, COALESCE({IS_RETRY_PENDING}, false) AS retry_pending,
               CASE WHEN {IS_RETRY_DUE} THEN retry_at END AS retry_at
        FROM (SELECT current_setting('transaction_read_only')::boolean AS read_only) AS server
        LEFT JOIN {table} AS lock ON task_name = ANY(%(task_names)s)
            AND ({IS_DEAD}
                 OR ({is_due}) OR {IS_RETRY_DUE} OR request_until > now()
                 OR task_name = ANY(%(always)s))
    """
