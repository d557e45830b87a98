"""Retries: when a failed run may be run again. The statement is in ``reruns``."""

from __future__ import annotations

from apscheduler_tasklock._lock.statements.conditions import IS_PAUSED_IN_ANY_WAY

# Limits how long after its time a retry can begin.
LATEST_RETRY = "interval '1 day'"
# Whether the last run is to be retried. Each later claim of the task has another claim id, so that
# it ends this without a write.
IS_RETRY_PENDING = f"""(lock.finished_at IS NOT NULL AND lock.retry_of = lock.claim_id
    AND now() < lock.retry_at + {LATEST_RETRY} AND COALESCE(now() < lock.due_at, true))"""
# Whether the retry can begin now.
IS_RETRY_DUE = f"""({IS_RETRY_PENDING} AND lock.retry_at <= now()
    AND NOT {IS_PAUSED_IN_ANY_WAY})"""
# Whether the failed run may be run again. The claim id decides, and not the number of the attempt,
# because the next run time may have failed as often.
MAY_RETRY = f"(lock.claim_id = asked.cause AND {IS_RETRY_DUE})"
