"""Leaders: the statements with which a replica leads the replicas of its namespace, or gives it up.

Who leads stands in a row of the task lock table whose name no task can have. The row has a lease,
as a task's row has. Leadership says only which replica asks for claims first. Who is granted a
claim is decided by the rows of the tasks alone.
"""

from __future__ import annotations

from apscheduler_tasklock._lock.statements.conditions import BRIEFLY, NEVER, ROW_COLUMNS
from apscheduler_tasklock.options import LONGEST_LEADER_LEASE

# The beginning of the name of a leader's row. The rest of the name is the namespace. No task's name
# begins with U+0001.
LEADER = "\x01leader:"
# Whether a row is that of a leader, and its namespace: the SQL of LEADER.
IS_LEADER = "starts_with(lock.task_name, chr(1) || 'leader:'::text)"
LEADER_NAMESPACE = f"pg_catalog.substr(lock.task_name, {len(LEADER) + 1})"

_IS_OWN = "lock.locked_by = %(leader_id)s"
# Whether a leader's lease goes on. A longer one than any option allows counts as over, because a
# row that somebody has written until the year 9999 would keep all replicas from leading.
LEADS = f"""(lock.finished_at IS NULL AND lock.locked_until > now()
             AND lock.locked_until
                 <= now() + {LONGEST_LEADER_LEASE}::float8 * interval '1 second')"""
_IS_OVER = f"(NOT {LEADS})"


def lead(table: str) -> str:
    """Return the statement that makes a replica the leader, or goes on with its leadership.

    The statement returns a row if the replica leads. It changes nothing if another replica leads.
    """
    until = "now() + %(lease)s * interval '1 second'"
    return f"""
        WITH led AS (
            UPDATE {table} AS lock SET
                started_at = CASE WHEN {_IS_OWN} AND NOT {_IS_OVER} THEN lock.started_at
                                  ELSE now() END,
                locked_by = %(leader_id)s, locked_until = {until}, run_until = {until},
                finished_at = NULL
            WHERE task_name = %(task_name)s AND ({_IS_OWN} OR {_IS_OVER}) AND {BRIEFLY}
            RETURNING lock.task_name
        ), first AS (
            INSERT INTO {table} AS lock ({ROW_COLUMNS})
            SELECT %(task_name)s, now(), {until}, {until}, {NEVER}, {NEVER}, %(leader_id)s,
                   gen_random_uuid(), 0, 0, 0, false, false, '', false, NULL, NULL, NULL, false,
                   NULL, NULL, NULL
            WHERE NOT EXISTS (SELECT FROM {table} WHERE task_name = %(task_name)s)
            ON CONFLICT DO NOTHING
            RETURNING lock.task_name
        )
        SELECT task_name FROM led UNION ALL SELECT task_name FROM first
    """


def resign(table: str) -> str:
    """Return the statement with which a leader gives its leadership up."""
    return f"""
        UPDATE {table} AS lock SET finished_at = now(), locked_until = LEAST(locked_until, now())
        WHERE task_name = %(task_name)s AND {_IS_OWN} AND finished_at IS NULL AND {BRIEFLY}
    """
