"""Manual runs: when one may begin. The statement is in ``reruns``.

A manual run may begin in a pause. While a run goes on, no manual run is granted. If a dead run is
to be run again, the manual run waits for the takeover.

In two cases the manual run does not wait: if the task is paused, or if the operator's request and
the end of the lease are both longer ago than a takeover needs. In the second case it is possible
that no replica can run the dead run any more, for example after a deployment.
"""

from __future__ import annotations

from apscheduler_tasklock._lock.statements.conditions import IS_PAUSED_IN_ANY_WAY, SHORTEST_WAIT

_NOBODY_TAKES_OVER = f"""({IS_PAUSED_IN_ANY_WAY} OR
    GREATEST(lock.requested_at, lock.locked_until) + {SHORTEST_WAIT} <= now())"""
# Whether the manual run may begin.
MAY_RUN_MANUALLY = f"""(
    lock.request_id = asked.cause AND lock.request_until > now()
    AND (lock.finished_at IS NOT NULL OR (
        lock.locked_until <= now() AND %(stable)s::boolean
        AND (lock.run_until <= now() OR NOT (lock.failover OR lock.handed_over)
             OR {_NOBODY_TAKES_OVER}))))"""
