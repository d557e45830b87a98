"""A run time that the application sets inside a window is refused, and an operator can see why.

What the application is told is in ``tests/simulation/test_set_run_times.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from apscheduler_tasklock import EVENT_TASK_LOCK_REFUSED, EVENT_TASK_LOCK_RELEASED, TaskLocks
from apscheduler_tasklock.status import Verdict
from tests.support.commands import Command
from tests.support.polling import eventually
from tests.support.schedulers import Replica


def test_why_tells_it_although_its_window_has_a_run(
    make_replica: Callable[..., Replica],
    make_task_locks: Callable[..., TaskLocks],
    command: Command,
) -> None:
    def misses() -> list[Any]:
        return list(operator.runs("job", outcome="missed"))

    operator, replica = make_task_locks(), make_replica(poll_interval=0.2, replica_id="web-1")
    replica.run_once(print)
    eventually(lambda: EVENT_TASK_LOCK_RELEASED in replica.codes())
    for number in (1, 2):
        replica.scheduler.modify_job("job", next_run_time=datetime.now(timezone.utc))
        eventually(lambda so_far=number: replica.codes().count(EVENT_TASK_LOCK_REFUSED) == so_far)
        replica.idle()
        eventually(lambda so_far=number: sum(miss.run_times or 0 for miss in misses()) == so_far)
    [miss] = misses()  # one entry for one window
    assert (miss.cause, miss.replica) == ("refused", "web-1")
    story = operator.why("job")
    assert (story.verdict, story.miss) == (Verdict.MISSED, miss)
    assert story.before is not None
    assert story.before.outcome == "ok"
    words = command("why", "job").out
    assert "its last run time until then was " in words
    assert ", which was refused" in words
    assert "modify_job or add_job has set it, and it falls into the window of the run time" in words
    assert "no replica ran" not in words
    # It is no run time that anybody has missed.
    assert operator.tasks("job")[0].missed_at is None
