"""Process pools whose workers are killed, stopped or replaced in mid-job."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import ReplicaProcess, Rows
from tests.support.polling import eventually
from tests.support.proxy import Proxy, proxy_to

StartReplica = Callable[..., ReplicaProcess]

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.slow]

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


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_killed_worker_leaves_no_task_locked(
    start_replica: StartReplica, rows: Rows, tmp_path: Path, method: str
) -> None:
    """Its maximum lock is five days, and its replica lives and knows."""
    replica = start_replica(
        executor="processpool",
        options={"lease": None, **pool(3, mp_context=method)},
        jobs=[daily(task, tmp_path) for task in TASKS],
    )
    eventually(lambda: len(replica.runs) == len(TASKS))
    os.kill(replica.pids["killed"], signal.SIGKILL)
    for task in TASKS[1:]:
        let_end(tmp_path, task, rows[task]["token"])
    for task in TASKS:
        eventually(lambda task=task: rows[task]["free"], SOON)
    assert replica.exit_code is None


def test_a_killed_workers_window_is_run_again_and_its_siblings_never_twice_at_once(
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
    eventually(lambda: {task: runs_again(task) for task in TASKS}["killed"], SOON)
    eventually(all_ended, SOON)


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


@pytest.mark.parametrize(
    ("method", "which"),
    [("spawn", signal.SIGTERM), ("spawn", signal.SIGINT), ("fork", signal.SIGTERM)],
)
def test_a_signal_to_the_group_lets_workers_end_their_jobs_and_release(
    start_replica: StartReplica, rows: Rows, tmp_path: Path, method: str, which: signal.Signals
) -> None:
    replica = start_replica(
        executor="processpool",
        options=pool(2, mp_context=method),
        jobs=[daily(task, tmp_path) for task in TASKS[1:]],
    )
    eventually(lambda: len(replica.runs) == len(TASKS[1:]))
    # While APScheduler submits jobs, it catches whatever a signal raises. This waits for its lock.
    replica.call("get_jobs")
    replica.signal_group(which)
    replica.says("stopping")
    for run in replica.runs:
        assert not gone(run.pid)
    for task in TASKS[1:]:
        let_end(tmp_path, task, rows[task]["token"])
    eventually(lambda: replica.exit_code is not None, SOON)
    assert replica.exit_code == 0
    for task in TASKS[1:]:
        assert rows[task]["finished_at"] is not None
    assert sorted(line for line in replica.said if line.startswith("ends")) == sorted(
        f"ends {run.token} held" for run in replica.runs
    )


@pytest.fixture
def proxy(direct_url: str) -> Iterator[Proxy]:
    with proxy_to(direct_url) as proxy:
        yield proxy


@pytest.mark.direct("the proxy leads to the server")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="max_tasks_per_child is new in 3.11")
def test_a_release_that_a_replaced_worker_could_not_send_is_sent(
    start_replica: StartReplica, proxy: Proxy, rows: Rows, tmp_path: Path
) -> None:
    one_job_each = pool(1, mp_context="spawn", max_tasks_per_child=1)
    replica = start_replica(
        executor="processpool",
        database=proxy.url,
        options={"lease": None, "claim_timeout": 1, **one_job_each},
        jobs=[daily("job", tmp_path)],
    )
    replica.says("runs")
    [run] = replica.runs
    proxy.accepting = False
    proxy.cut_all()
    let_end(tmp_path, "job", run.token)
    replica.says("ends")
    # Its worker has nothing more to do: what it knew, the replica's own process has to know.
    replica.says("executed job", SOON)
    eventually(lambda: gone(run.pid), SOON)
    assert rows["job"]["finished_at"] is None
    proxy.accepting = True
    eventually(lambda: rows["job"]["finished_at"], SOON)
