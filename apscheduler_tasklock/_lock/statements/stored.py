"""Stored jobs: which due ones may be claimed, and the claim that moves them on.

There are no windows here. Each run time exists once, in its job's row, and whoever claims it takes
the task's lock and moves ``next_run_time`` in one statement. The fence is ``next_run_time`` as it
was read, and the id of the user's last change.
"""

from __future__ import annotations

from apscheduler_tasklock._lock.statements.answers import (
    DECIDED_FREE,
    DECIDED_GRANTED,
    NO_ROW,
    RETURNED,
    ROW_FOUND,
    made_or_found,
    made_or_missing,
    select_list,
)
from apscheduler_tasklock._lock.statements.claims import CLAIM_TYPES, FOUND, Claim
from apscheduler_tasklock._lock.statements.history import History, death_entry
from apscheduler_tasklock._lock.statements.parts import (
    IS_PAUSED,
    IS_WANTED,
    NEVER,
    NOT_RUNNING,
    ROW_COLUMNS,
    SAFELY,
    STANDS,
    asked_columns,
    json_rows,
)

# The id of the last change that a user has made of a job: its `version` begins anew when a job is
# added again.
CHANGE_ID = "COALESCE(job.changed_id, job.added_id)"

# What a claim of a stored job has besides; and all that moves a job on without a claim.
_FENCE_TYPES = {
    "job_id": "text",
    "change_id": "uuid",
    "found": "timestamptz",
    "following": "timestamptz",
}
_MOVE_TYPES = {
    **_FENCE_TYPES,
    "run_time": "timestamptz",
    "task_name": "text",
    "runs": "boolean",
}
_TYPES = {**CLAIM_TYPES, **_FENCE_TYPES, "position": "int"}

# The job is as it was read. One that has ended has no next run time.
_FENCE = f"""job.id = asked.job_id AND job.next_run_time = asked.found
             AND {CHANGE_ID} = asked.change_id"""

# A dead run that stands against the next one: the job's own, which is run again first; or one of
# whose death nobody can be sure. Past its maximum lock it stands against nothing. Nobody runs the
# dead run again of another function, or of a job that was under this id before.
_DEAD_RUN_STANDS = """(
    lock.finished_at IS NULL AND lock.run_until > now() AND (
        NOT (lock.handed_over OR %(stable)s::boolean)
        OR ((lock.handed_over OR lock.failover)
            AND (lock.kind IS NOT DISTINCT FROM 'manual'
                 OR lock.window_start IS NOT DISTINCT FROM job.last_run_time)
            AND (lock.runs = job.func OR starts_with(lock.runs, job.func || ' at ')))
    )
)"""

# Whether a task that has a row may be claimed for its job. The read of due jobs has this condition,
# and so has the claim: what one of them passes and the other refuses would be read over and over.
# It is of the two rows alone, because whoever reads does not know yet what it would ask for.
MAY_BE_CLAIMED = f"({NOT_RUNNING} AND NOT {_DEAD_RUN_STANDS} AND NOT {IS_PAUSED})"


class _StoredClaim(Claim):
    """The parts of the claim of a stored job: its run time has no window."""

    def __init__(self) -> None:
        super().__init__(asked_columns(CLAIM_TYPES))
        self.may_claim = f"{MAY_BE_CLAIMED} AND NOT {self.own}"
        self.granted_before = f"({self.own} AND {STANDS})"
        self.found_state = f"""LATERAL (SELECT {self.granted_before} AS granted,
                                       {NOT_RUNNING} AS idle,
                                       {_DEAD_RUN_STANDS} AS waits,
                                       {IS_PAUSED} AS paused)
                               AS found"""


_CLAIM = _StoredClaim()


def claim_and_move(table: str, history: History | None = None, *, jobs: str) -> str:
    """Return the statement that claims run times of stored jobs, and moves the jobs on.

    It takes the tasks' locks, with a row or without, and moves the jobs to their next run times, or
    ends them: both, or neither. As many are granted as ``most`` says, in the order in which they
    are asked for. It counts those that were granted when the same claims were sent before, and no
    answer came: a claim's own id is looked for first, since its job has moved on by then.

    A job or a task that somebody else has locked is passed over. Its answer is as it was before: it
    looks free. ``withdrawn`` says that the job is not as it was read any more. Each claim has an
    answer, and a refused one writes nothing.

    The limit of what is asked for is for PostgreSQL's planner, which takes it for 100 rows else,
    and reads all jobs to find them: a claim of one job in a thousand took a third longer.

    :param jobs: the jobs' table
    """
    first = {**DECIDED_GRANTED, **ROW_FOUND}
    found = {**FOUND, "new_window": "NOT found.granted", **ROW_FOUND}
    return f"""
        WITH asked AS (
            SELECT *, run_time AS fired FROM {json_rows(_TYPES)} LIMIT %(count)s::bigint
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
            WHERE (lock.task_name IS NULL OR {_CLAIM.may_claim}) AND {IS_WANTED} AND {SAFELY}
            ORDER BY asked.position
            LIMIT GREATEST(0, %(most)s::bigint - (SELECT count FROM granted_before))
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
               {made_or_missing("first", {**DECIDED_FREE, **NO_ROW})},
               job.claim_id IS NULL
        FROM asked LEFT JOIN first ON first.claim_id = asked.claim_id
            LEFT JOIN fenced AS job ON job.claim_id = asked.claim_id
        WHERE NOT EXISTS (SELECT FROM {table} AS lock WHERE lock.task_name = asked.task_name)
    """


def move_on(table: str, history: History | None = None, *, jobs: str) -> str:
    """Return the statement that moves jobs on without a claim, under the same fence.

    It is for run times that were missed or fell into a pause, and for those that run without a
    lock. A job that somebody else has locked is passed over. A job that ends, and whose last run
    time was missed, has an entry in the run history: nobody else tells of it any more. Its task
    gets a row if it has none, which is deleted one day as those of one-off jobs are. It returns the
    jobs that were moved on.

    :param jobs: the jobs' table
    """
    noted = ""
    if history is not None:
        entry = history.entry(
            "(TABLE known UNION ALL TABLE first) AS run JOIN last USING (task_name)",
            scheduled_at="last.run_time",
            started_at="now()",
            replica="%(replica_id)s",
            kind="'schedule'",
            outcome="'missed'",
        )
        noted = f""", last AS (
            SELECT asked.task_name, asked.run_time FROM moved JOIN asked USING (job_id)
            WHERE asked.following IS NULL AND NOT asked.runs
        ), known AS (
            UPDATE {table} AS lock SET token = token + 1, recorded = recorded + 1
            FROM last WHERE lock.task_name = last.task_name AND lock.finished_at IS NOT NULL
            RETURNING lock.task_name, lock.token, lock.recorded
        ), first AS (
            INSERT INTO {table} AS lock ({ROW_COLUMNS}, finished_at, recorded)
            SELECT last.task_name, {NEVER}, {NEVER}, {NEVER}, {NEVER}, {NEVER}, '',
                   gen_random_uuid(), (extract(epoch FROM now()) * 1000.0)::bigint, 0, 0, false,
                   false, '', true, NULL, NULL, NULL, true, NULL, NULL, now(), 1
            FROM last
            WHERE NOT EXISTS (SELECT FROM {table} AS lock WHERE lock.task_name = last.task_name)
            ORDER BY last.task_name
            ON CONFLICT DO NOTHING
            RETURNING lock.task_name, lock.token, lock.recorded
        ), entry AS ({entry})"""
    return f"""
        WITH asked AS (
            SELECT * FROM {json_rows(_MOVE_TYPES)}
        ), picked AS MATERIALIZED (
            SELECT job.id FROM asked JOIN {jobs} AS job ON {_FENCE}
            WHERE {SAFELY}
            FOR NO KEY UPDATE OF job SKIP LOCKED
        ), moved AS (
            UPDATE {jobs} AS job SET
                next_run_time = asked.following,
                ended = asked.following IS NULL,
                last_run_time = CASE WHEN asked.runs THEN asked.run_time
                                     ELSE job.last_run_time END
            FROM picked JOIN asked ON asked.job_id = picked.id
            WHERE job.id = picked.id
            RETURNING job.id AS job_id
        ){noted}
        SELECT job_id FROM moved
    """
