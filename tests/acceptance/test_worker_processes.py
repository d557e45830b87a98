"""Process pools whose workers are killed, stopped or replaced in mid-job."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import ReplicaProcess, Rows
from tests.support.polling import eventually

StartReplica = Callable[..., ReplicaProcess]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.nightly,
]

TASKS = ("killed", "one", "two")
SOON = 20.0


def daily(task: str, folder: Path) -> dict[str, Any]:
    """Return a job that a replica fires when it starts, and then every day."""
    own = folder / task
    own.mkdir(exist_ok=True)
    return {
        "id": task,
        "function": "work",
        "kwargs": {"folder": str(own)},
        "trigger": "interval",
        "days": 1,
        "next_run_time": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S}",
    }


def pool(max_workers: int, **pool_kwargs: Any) -> dict[str, Any]:
    return {"max_workers": max_workers, "pool_kwargs": pool_kwargs}


def let_end(folder: Path, task: str, token: int) -> None:
    (folder / task / str(token)).touch()


def gone(pid: int) -> bool:
    """Tell whether a process has ended, waited for or not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("task", [TASKS[0], TASKS[-1]])
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_killed_worker_leaves_no_task_locked(
    start_replica: StartReplica, rows: Rows, tmp_path: Path, method: str, task: str
) -> None:
    """Its maximum lock is five days, and its replica lives and knows. The pool ends the others.

    A pool of Python's does not notice by itself that one is dead which it has started last.
    """
    replica = start_replica(
        executor="processpool",
        options={"lease": None, **pool(3, mp_context=method)},
        jobs=[daily(task, tmp_path) for task in TASKS],
    )
    eventually(lambda: len(replica.runs) == len(TASKS))
    os.kill(replica.pids[task], signal.SIGKILL)
    for each in TASKS:
        eventually(lambda each=each: rows[each]["free"], SOON)
    assert replica.exit_code is None


def test_the_windows_of_a_killed_worker_and_of_its_siblings_are_run_again_after_their_deaths(
    start_replica: StartReplica, rows: Rows, tmp_path: Path
) -> None:
    options = {"lease": None, "failover": True, "poll_interval": 0.5, "claim_timeout": 3}
    jobs = [daily(task, tmp_path) for task in TASKS]
    workers = pool(3, mp_context="fork")
    holder = start_replica(executor="processpool", options={**options, **workers}, jobs=jobs)
    eventually(lambda: len(holder.runs) == len(TASKS))
    first = {task: rows[task]["token"] for task in TASKS}
    pids = holder.pids
    other = start_replica(options=options, jobs=jobs)
    for task in TASKS:
        other.says(f"refused {task}")

    def runs_again(task: str) -> bool:
        """Tell whether a task's window is run a second time; never beside its first run."""
        row = rows[task]
        again = row["token"] > first[task] and row["finished_at"] is None
        assert not again or gone(pids[task])
        return again

    def all_ended() -> bool:
        for task in TASKS:
            runs_again(task)
            let_end(tmp_path, task, rows[task]["token"])
        return all(rows[task]["finished_at"] for task in TASKS)

    os.kill(pids["killed"], signal.SIGKILL)
    eventually(lambda: all(runs_again(task) for task in TASKS), SOON)
    eventually(all_ended, SOON)
    again = holder.runs[len(TASKS) :] + other.runs  # the holder has another pool by now
    assert [run.how for run in again] == ["again"] * len(TASKS)
    assert all(rows[task]["token"] > first[task] for task in TASKS)


def test_a_job_that_kills_its_worker_is_given_up_after_three_takeovers(
    start_replica: StartReplica, rows: Rows, tmp_path: Path
) -> None:
    """The replicas live and free its task each time, which counts as a death all the same."""
    job = {**daily("job", tmp_path), "function": "kill_own_process", "kwargs": {}}
    options = {"lease": None, "failover": True, "poll_interval": 0.5, "claim_timeout": 3, **pool(1)}
    replicas = [
        start_replica(executor="processpool", options=options, jobs=[job]) for _ in range(2)
    ]

    def given_up() -> list[str]:
        lines = [line for replica in replicas for line in replica.said]
        return [line for line in lines if line.startswith("ERROR") and "given up" in line]

    eventually(lambda: (row := rows.get("job")) and row["finished_at"], 2 * SOON)
    eventually(given_up)
    assert sorted(run.how for replica in replicas for run in replica.runs) == [
        *(["again"] * 3),
        "first",
    ]
    assert [replica.exit_code for replica in replicas] == [None, None]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_signal_to_the_parent_alone_lets_workers_end_their_jobs(
    start_replica: StartReplica, rows: Rows, tmp_path: Path, method: str
) -> None:
    """As systemd's KillMode=mixed sends it."""
    replica = start_replica(
        executor="processpool",
        options=pool(2, mp_context=method),
        jobs=[daily(task, tmp_path) for task in TASKS[1:]],
    )
    eventually(lambda: len(replica.runs) == len(TASKS[1:]))
    # While APScheduler submits jobs, it catches whatever a signal raises. This waits for its lock.
    replica.call("get_jobs")
    replica.signal(signal.SIGTERM)
    replica.says("stopping")
    for task in TASKS[1:]:
        let_end(tmp_path, task, rows[task]["token"])
    eventually(lambda: replica.exit_code is not None, SOON)
    assert replica.exit_code == 0
    for task in TASKS[1:]:
        assert rows[task]["finished_at"] is not None
    assert sorted(line for line in replica.said if line.startswith("ends")) == sorted(
        f"ends {run.token} held" for run in replica.runs
    )


def test_a_signal_to_the_group_ends_workers_and_their_windows_are_run_again(
    start_replica: StartReplica, rows: Rows, tmp_path: Path
) -> None:
    """As plain APScheduler's; the parent ends their leases, which would last for a day."""
    options = {"lease": 86400, "failover": True, "poll_interval": 0.5, "claim_timeout": 3}
    jobs = [daily(task, tmp_path) for task in TASKS[1:]]
    replica = start_replica(
        executor="processpool", options={**options, **pool(2, mp_context="spawn")}, jobs=jobs
    )
    eventually(lambda: len(replica.runs) == len(TASKS[1:]))
    other = start_replica(options=options, jobs=jobs)
    for task in TASKS[1:]:
        other.says(f"refused {task}")
    replica.call("get_jobs")
    replica.signal_group(signal.SIGTERM)
    eventually(lambda: replica.exit_code is not None, SOON)
    assert replica.exit_code == 0
    eventually(lambda: len(other.runs) == len(TASKS[1:]), SOON)
    assert {run.how for run in other.runs} == {"again"}


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_workers_of_a_killed_parent_end_and_their_windows_are_run_once_more(
    start_replica: StartReplica, rows: Rows, tmp_path: Path, method: str
) -> None:
    """A forked one keeps the parent's sentinel of the one before it open."""
    options = {"lease": 2, "failover": True, "poll_interval": 0.5, "claim_timeout": 3}
    jobs = [daily(task, tmp_path) for task in TASKS[1:]]
    replica = start_replica(
        executor="processpool", options={**options, **pool(2, mp_context=method)}, jobs=jobs
    )
    eventually(lambda: len(replica.runs) == len(TASKS[1:]))
    pids = list(replica.pids.values())
    other = start_replica(options=options, jobs=jobs)
    for task in TASKS[1:]:
        other.says(f"refused {task}")
    replica.signal(signal.SIGKILL)

    def are_run_again() -> bool:
        again = len(other.runs) == len(TASKS[1:])
        assert not other.runs or all(map(gone, pids))
        return again

    eventually(are_run_again, SOON)
    for task in TASKS[1:]:
        let_end(tmp_path, task, rows[task]["token"])
        eventually(lambda task=task: rows[task]["finished_at"], SOON)
    assert {run.how for run in other.runs} == {"again"}


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_without_failover_a_lock_of_a_killed_parent_is_lost_in_its_worker(
    start_replica: StartReplica, tmp_path: Path, method: str
) -> None:
    jobs = [{**daily(task, tmp_path), "function": "until_lost", "kwargs": {}} for task in TASKS[1:]]
    replica = start_replica(executor="processpool", options=pool(2, mp_context=method), jobs=jobs)
    eventually(lambda: len(replica.runs) == len(TASKS[1:]))
    replica.signal(signal.SIGKILL)
    for run in replica.runs:
        replica.says(f"ends {run.token} lost", SOON)
