"""Takeovers: when a dead run may be taken over. The statement is in ``reruns``."""

from __future__ import annotations

from apscheduler_tasklock._lock.statements.conditions import IS_PAUSED_IN_ANY_WAY

# Whether a handed-over run had begun. The hand-over of a run that never began is not counted,
# because such a run costs nothing.
HANDED_OVER_BEGUN = "lock.handed_over AND lock.last_outcome IS NOT NULL"
# Whether the holder is still assumed to be alive. After a start or an outage, holders get time to
# renew before a replica believes that they are dead.
IS_DOUBTED = "(lock.finished_at IS NULL AND NOT (lock.handed_over OR %(stable)s::boolean))"
# Whether the dead run may be taken over.
MAY_TAKE_OVER = f"""(
    lock.claim_id = asked.cause AND lock.finished_at IS NULL
    AND lock.locked_until <= now() AND lock.run_until > now() AND NOT {IS_PAUSED_IN_ANY_WAY}
    AND NOT {IS_DOUBTED})"""
