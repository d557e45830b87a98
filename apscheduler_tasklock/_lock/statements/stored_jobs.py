"""Stored jobs: which due jobs may be claimed, and the claim that moves them on.

Stored jobs have no windows, because each run time exists once, in its job's row. A claim takes the
task's lock, and moves the job on: it sets ``next_run_time`` to the next run time, in the same
statement. A *fence* keeps the statement from moving a job that has changed since it was read:
``next_run_time`` and the id of the user's last change must be as they were read.
"""

from __future__ import annotations

from apscheduler_tasklock._lock.protocol_messages import ClaimRequest, JobMove
from apscheduler_tasklock._lock.statements.claims import FOUND, ClaimParts
from apscheduler_tasklock._lock.statements.columns import (
    DECIDED_FREE,
    DECIDED_GRANTED,
    NO_ROW,
    RETURNED,
    ROW_FOUND,
    ROW_INSERTED,
    made_or_found,
    made_or_missing,
    select_list,
)
from apscheduler_tasklock._lock.statements.conditions import (
    IS_PAUSED,
    IS_WANTED,
    ROW_COLUMNS,
    SAFELY,
    STANDS,
    asked_columns,
    json_rows,
    paused_with_all,
    pauses_of_all,
)
from apscheduler_tasklock._lock.statements.deaths import NOT_RUNNING
from apscheduler_tasklock._lock.statements.history import History, death_entry

# The id of a user's last change of a job. `version` is not used, because it begins anew when a job
# is added again.
CHANGE_ID = "COALESCE(job.changed_id, job.added_id)"

# Whether the job is as it was read. The condition is false for an ended job, because it has no next
# run time.
_FENCE = f"""job.id = asked.job_id AND job.next_run_time = asked.found
             AND {CHANGE_ID} = asked.change_id"""

# Whether a dead run blocks the next run, because the dead run is the job's own and is run
# again first, or because holders still get time to renew. After the end of its maximum lock a dead
# run blocks no run. A dead run of another function, or of an earlier job with this id, is
# not run again.
_DEAD_RUN_STANDS = """(
    lock.finished_at IS NULL AND lock.run_until > now() AND (
        NOT (lock.handed_over OR %(stable)s::boolean)
        OR ((lock.handed_over OR lock.failover)
            AND (lock.kind IS NOT DISTINCT FROM 'manual'
                 OR lock.window_start IS NOT DISTINCT FROM job.last_run_time)
            AND (lock.runs = job.func OR starts_with(lock.runs, job.func || ' at ')))
    )
)"""

# Whether a task with a row may be claimed for its job. The read of due jobs and the claim share
# this condition, because a job that is read and then refused would be read over and over. The
# condition uses only the task's row and the job's, because the read has no request yet.
MAY_BE_CLAIMED = f"({NOT_RUNNING} AND NOT {_DEAD_RUN_STANDS} AND NOT {IS_PAUSED})"


class _StoredClaim(ClaimParts):
    """The parts of the statement that claims stored jobs. Such a claim has no window."""

    def __init__(self) -> None:
        super().__init__(asked_columns(ClaimRequest))
        self.may_claim = f"{MAY_BE_CLAIMED} AND NOT {self.own}"
        self.granted_before = f"({self.own} AND {STANDS})"
        self.found_state = f"""LATERAL (SELECT {self.granted_before} AS granted,
                                       {NOT_RUNNING} AS idle,
                                       {_DEAD_RUN_STANDS} AS waits,
                                       {IS_PAUSED} OR {paused_with_all("asked.task_name")}
                                           AS paused)
                               AS found"""


_CLAIM = _StoredClaim()


def claim_and_move(table: str, history: History | None = None, *, jobs: str) -> str:
    """Return the statement that claims run times of stored jobs, and moves the jobs on.

    For each granted claim it takes the task's lock, and moves the job to its next run time, or ends
    the job. At most ``most`` claims are granted, in the order of the requests. Claims that an
    earlier try has granted count, too. These claims are found by their ids in the tasks' rows,
    because the earlier try has moved their jobs on.

    A job or a task that another session has locked is passed over, and its answer looks free.
    ``withdrawn`` says that the job has changed since it was read. Each claim has an answer, and a
    refused claim writes nothing.

    ``asked`` has a LIMIT for PostgreSQL's planner, which would expect 100 rows without it, and read
    all jobs: a claim of one job in a thousand took a third longer.

    :param jobs: the jobs' table
    """
    first = {**DECIDED_GRANTED, **ROW_INSERTED}
    paused = {"paused": paused_with_all("asked.task_name")}
    # `came_first` is needed only for a run that is kept after its claim was refused. No run of a
    # stored job is kept, because its job is read again.
    found = {**FOUND, "new_window": "NOT found.granted", "came_first": "false", **ROW_FOUND}
    return f"""
        WITH {pauses_of_all(table)}, asked AS (
            SELECT *, run_time AS fired, run_time AS reckoned
            FROM {json_rows(ClaimRequest, **JobMove.types, position="bigint")} LIMIT %(count)s
        ), fenced AS MATERIALIZED (
            SELECT asked.claim_id, job.func, job.last_run_time
            FROM asked JOIN {jobs} AS job ON {_FENCE}
        ), granted_before AS MATERIALIZED (
            SELECT count(*) AS count FROM {table} AS lock JOIN asked USING (task_name)
            WHERE {_CLAIM.granted_before}
        ), picked AS MATERIALIZED (
            SELECT asked.claim_id, lock.task_name IS NULL AS is_first
            FROM asked JOIN {jobs} AS job ON {_FENCE} LEFT JOIN {table} AS lock
                ON lock.task_name = asked.task_name
            WHERE (lock.task_name IS NULL OR {_CLAIM.may_claim})
                AND NOT {paused_with_all("asked.task_name")} AND {IS_WANTED} AND {SAFELY}
            ORDER BY asked.position
            LIMIT GREATEST(0, %(most)s - (SELECT count FROM granted_before))
            FOR NO KEY UPDATE OF job SKIP LOCKED
        ), free AS (
            SELECT lock.task_name
            FROM picked JOIN asked USING (claim_id) JOIN fenced AS job USING (claim_id)
                JOIN {table} AS lock USING (task_name)
            WHERE {_CLAIM.may_claim}
            FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), claimed AS (
            UPDATE {table} AS lock SET {_CLAIM.changes} FROM asked JOIN free USING (task_name)
            WHERE lock.task_name = free.task_name
            RETURNING {RETURNED}, lock.claim_id AS new_claim_id
        ), first AS (
            INSERT INTO {table} AS lock ({ROW_COLUMNS})
            {_CLAIM.first_row} FROM picked JOIN asked USING (claim_id)
            WHERE picked.is_first ORDER BY asked.task_name
            ON CONFLICT DO NOTHING
            RETURNING {select_list(first)}
        ), moved AS (
            UPDATE {jobs} AS job SET
                next_run_time = asked.following,
                ended = asked.following IS NULL,
                last_run_time = asked.run_time,
                task_name = asked.task_name
            FROM asked JOIN (
                SELECT new_claim_id AS claim_id FROM claimed UNION ALL SELECT claim_id FROM first
            ) AS granted USING (claim_id)
            WHERE job.id = asked.job_id
        ){death_entry(history, table)}
        SELECT asked.claim_id AS asked_claim_id,
               {made_or_found(_CLAIM.made, found)},
               job.claim_id IS NULL AND NOT found.granted AS withdrawn
        FROM asked JOIN {table} AS lock USING (task_name)
            LEFT JOIN claimed ON claimed.new_claim_id = asked.claim_id
            LEFT JOIN fenced AS job ON job.claim_id = asked.claim_id, {_CLAIM.found_state}
        UNION ALL
        SELECT asked.claim_id,
               {made_or_missing("first", {**DECIDED_FREE, **paused, **NO_ROW})},
               job.claim_id IS NULL
        FROM asked LEFT JOIN first ON first.claim_id = asked.claim_id
            LEFT JOIN fenced AS job ON job.claim_id = asked.claim_id
        WHERE NOT EXISTS (SELECT FROM {table} AS lock WHERE lock.task_name = asked.task_name)
    """


def move_on(*, jobs: str) -> str:
    """Return the statement that moves jobs on without a claim, under the same fence.

    The statement is for run times that were missed or fell into a pause, and for run times that run
    without a lock. A job that another session has locked is passed over. The statement returns the
    jobs that were moved on.

    :param jobs: the jobs' table
    """
    return f"""
        WITH asked AS (
            SELECT * FROM {json_rows(JobMove, runs="boolean")}
        ), picked AS MATERIALIZED (
            SELECT job.id FROM asked JOIN {jobs} AS job ON {_FENCE}
            WHERE {SAFELY}
            FOR NO KEY UPDATE OF job SKIP LOCKED
        )
        UPDATE {jobs} AS job SET
            next_run_time = asked.following,
            ended = asked.following IS NULL,
            last_run_time = CASE WHEN asked.runs THEN asked.run_time ELSE job.last_run_time END
        FROM picked JOIN asked ON asked.job_id = picked.id
        WHERE job.id = picked.id
        RETURNING job.id AS job_id
    """
