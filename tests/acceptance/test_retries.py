"""Retries by real processes, which are killed, stopped and replaced in between."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import ReplicaProcess
from tests.support.polling import eventually

pytestmark = pytest.mark.nightly

StartReplica = Callable[..., ReplicaProcess]
Fleet = Sequence[ReplicaProcess]


@pytest.fixture
def start_fleet(start_replica: StartReplica, tmp_path: Path) -> Callable[..., list[ReplicaProcess]]:
    """Start three replicas with a job that is due in some seconds, and fails at first."""

    def start(attempt: int = 2, **options: Any) -> list[ReplicaProcess]:
        run_date = datetime.now(timezone.utc) + timedelta(seconds=5)
        retried = {"retries": 3, "retry_delay": 6, "retry_backoff": 1, "poll_interval": 0.5}
        job = {
            "function": "fail_until",
            "kwargs": {"attempt": attempt, "folder": str(tmp_path)},
            "trigger": "date",
            "run_date": run_date.isoformat(),
            "options": {**retried, **options},
        }
        return [start_replica(**job) for _ in range(3)]

    return start


def attempts(fleet: Fleet) -> list[tuple[int, int]]:
    """Return the attempts that have begun, and which replica has begun each, by their tokens."""
    begun = []
    for number, replica in enumerate(fleet):
        said = [int(line.split()[1]) for line in replica.said if line.startswith("attempt ")]
        begun += [
            (run.token, attempt, number) for run, attempt in zip(replica.runs, said, strict=False)
        ]
    return [(attempt, number) for _, attempt, number in sorted(begun)]


def wait_for_attempts(fleet: Fleet, count: int) -> list[tuple[int, int]]:
    eventually(lambda: len(attempts(fleet)) >= count)
    return attempts(fleet)


def let_it_end(fleet: Fleet, folder: Path) -> None:
    last = max(run.token for replica in fleet for run in replica.runs)
    (folder / str(last)).touch()
    eventually(lambda: any(f"ends {last} held" in replica.said for replica in fleet))


def test_a_replica_that_is_killed_between_the_attempts(
    start_fleet: Callable[..., list[ReplicaProcess]], tmp_path: Path
) -> None:
    fleet = start_fleet()
    [(_, first)] = wait_for_attempts(fleet, 1)
    fleet[first].says("INFO Task 'job': attempt 1 at the run time")
    fleet[first].signal(signal.SIGKILL)

    begun = wait_for_attempts(fleet, 2)
    let_it_end(fleet, tmp_path)

    assert [attempt for attempt, _ in begun] == [1, 2]
    assert begun[1][1] != first


def test_a_replica_that_is_killed_during_a_retry(
    start_fleet: Callable[..., list[ReplicaProcess]], tmp_path: Path
) -> None:
    """Failover runs that attempt again, under its number."""
    fleet = start_fleet(failover=True, lease=2)
    second = wait_for_attempts(fleet, 2)[1][1]
    fleet[second].signal(signal.SIGKILL)

    begun = wait_for_attempts(fleet, 3)
    let_it_end(fleet, tmp_path)

    assert [attempt for attempt, _ in begun] == [1, 2, 2]
    assert begun[2][1] != second


def test_without_failover_a_replica_that_is_killed_during_a_retry_ends_the_retries(
    start_fleet: Callable[..., list[ReplicaProcess]], rows: Any
) -> None:
    fleet = start_fleet(lease=2)
    second = wait_for_attempts(fleet, 2)[1][1]
    fleet[second].signal(signal.SIGKILL)

    eventually(lambda: rows["job"]["free"])
    looked_at = rows["job"]["now"] + timedelta(seconds=4)
    eventually(lambda: rows["job"]["now"] > looked_at)
    assert [attempt for attempt, _ in attempts(fleet)] == [1, 2]


def test_all_replicas_are_replaced_between_the_attempts(
    start_fleet: Callable[..., list[ReplicaProcess]], start_replica: StartReplica, tmp_path: Path
) -> None:
    """Of a one-off job nobody knows any more then, so this one has a following run time."""
    soon = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(seconds=12)
    job = {
        "function": "fail_until",
        "kwargs": {"attempt": 3, "folder": str(tmp_path)},
        "trigger": "interval",
        "minutes": 10,
        "start_date": soon.isoformat(),
        "options": {"retries": 3, "retry_delay": 4, "retry_backoff": 1, "poll_interval": 0.5},
    }
    old = [start_replica(**job) for _ in range(2)]
    wait_for_attempts(old, 1)
    new = [start_replica(**job) for _ in range(2)]
    for each in old:
        each.stop()

    begun = wait_for_attempts([*old, *new], 3)
    let_it_end([*old, *new], tmp_path)

    assert [attempt for attempt, _ in begun] == [1, 2, 3]
