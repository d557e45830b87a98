"""Which events a run has, and in which order, on each executor: one table.

``EVENT_JOB_SUBMITTED`` is told by the scheduler when it is through with what is due. So it comes
once, before or after the others.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from apscheduler.events import (
    EVENT_JOB_ERROR,
    EVENT_JOB_EXECUTED,
    EVENT_JOB_MISSED,
    EVENT_JOB_SUBMITTED,
)

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLocks,
)
from tests.support.hosts import Host
from tests.support.polling import eventually
from tests.support.schedulers import Replica

MakeReplica = Callable[..., Replica]
Jobs = Callable[[str], Callable[..., Any]]

# What becomes of a run: the events that it has, in their order.
EVENTS = {
    "granted, and executed": [
        EVENT_TASK_LOCK_GRANTED,
        EVENT_JOB_EXECUTED,
        EVENT_TASK_LOCK_RELEASED,
    ],
    "granted, and raises": [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_ERROR, EVENT_TASK_LOCK_RELEASED],
    "refused": [EVENT_TASK_LOCK_REFUSED],
    "missed": [EVENT_JOB_MISSED],
    "withdrawn at a shutdown": [],
}
LATE = timedelta(minutes=1)


def executed(replica: Replica, job: Jobs) -> Replica:
    replica.run_once(job("token"))
    return replica


def raises(replica: Replica, job: Jobs) -> Replica:
    replica.run_once(job("fail"))
    return replica


def missed(replica: Replica, job: Jobs) -> Replica:
    late = datetime.now(timezone.utc) - LATE
    replica.run_once(job("token"), next_run_time=late, misfire_grace_time=LATE.seconds // 2)
    return replica


RUNS = {
    "granted, and executed": executed,
    "granted, and raises": raises,
    "refused": executed,
    "missed": missed,
}


def told(replica: Replica) -> list[int]:
    """Return the codes of a job's own events and of its lock's, as they were told."""
    return [event.code for event in replica.of()]


def submissions(replica: Replica) -> int:
    events = list(replica.events)
    return sum(e.code == EVENT_JOB_SUBMITTED and e.job_id == "job" for e in events)


@pytest.mark.parametrize("becomes", RUNS)
def test_a_run_has_its_events_in_their_order(
    make_replica: MakeReplica, job: Jobs, becomes: str
) -> None:
    if becomes == "refused":
        executed(make_replica(), job).one(EVENT_TASK_LOCK_RELEASED)
    replica = RUNS[becomes](make_replica(), job)
    eventually(lambda: len(told(replica)) == len(EVENTS[becomes]) and submissions(replica))
    replica.shutdown()
    assert told(replica) == EVENTS[becomes]
    assert submissions(replica) == 1


@pytest.mark.parametrize(
    ("becomes", "outcome", "error"),
    [
        ("granted, and executed", "ok", None),
        ("granted, and raises", "error", "ValueError: on purpose"),
    ],
)
def test_its_release_tells_what_the_history_has(
    make_replica: MakeReplica,
    job: Jobs,
    database_url: str,
    becomes: str,
    outcome: str,
    error: str | None,
) -> None:
    released = RUNS[becomes](make_replica(), job).one(EVENT_TASK_LOCK_RELEASED)
    with TaskLocks(database_url) as locks:
        [run] = locks.runs("job")
    assert (released.outcome, released.error) == (outcome, error)
    assert run.outcome == outcome
    # The replica counts from when it sent its claim, and the history from when that was granted.
    assert released.took >= run.took


def test_a_run_that_is_withdrawn_at_a_shutdown_has_none(
    host: Host,
    make_replica: MakeReplica,
    job: Jobs,
    known_task: Callable[[str], None],
    direct_url: str,
) -> None:
    """It waits for its claim, since somebody has its row locked."""
    if host.inline:
        pytest.skip("its scheduler waits in the submission, and the shutdown for the scheduler")
    known_task("job")
    replica = make_replica(claim_timeout=180)
    with psycopg.connect(direct_url) as blocker:
        blocker.execute("SELECT FROM task_lock WHERE task_name = 'job' FOR UPDATE")
        replica.run_once(job("token"))
        eventually(lambda: submissions(replica))
        replica.shutdown()
    assert told(replica) == EVENTS["withdrawn at a shutdown"]
    assert submissions(replica) == 1


def test_each_run_of_a_backlog_has_its_events_and_ends_before_the_next_one_begins(
    make_replica: MakeReplica, job: Jobs
) -> None:
    replica = make_replica()
    start = datetime.now(timezone.utc) - timedelta(seconds=2500)
    replica.run_once(
        job("token"),
        hours=0,
        seconds=1000,
        start_date=start,
        next_run_time=start,
        coalesce=False,
    )
    run, number = EVENTS["granted, and executed"], 3
    eventually(lambda: len(told(replica)) == number * len(run))
    run_times = [start + timedelta(seconds=1000) * n for n in range(number)]
    for run_time in run_times:
        of_one = [e.code for e in replica.of() if e.scheduled_run_time == run_time]
        assert of_one == run
    # A release is told when it has arrived, and the next run may have begun by then.
    others = [code for code in told(replica) if code != EVENT_TASK_LOCK_RELEASED]
    assert others == [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED] * number
    assert submissions(replica) == 1
