"""Whose windows are run again, and whose are not, after a holder was killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.acceptance.conftest import ReplicaProcess, Rows
from tests.support.polling import eventually
from tests.support.proxy import proxy_to

pytestmark = pytest.mark.nightly

StartReplica = Callable[..., ReplicaProcess]

LEASE = 2
# The shorter a claim may wait, the sooner a replica that has just started believes what it reads.
OPTIONS = {"lease": LEASE, "failover": True, "poll_interval": 1, "claim_timeout": 3}
SOON = 25.0


def moment(**later: float) -> str:
    return f"{datetime.now(timezone.utc) + timedelta(**later):%Y-%m-%d %H:%M:%S}"


def daily(function: str = "hang", task: str = "job", **job: Any) -> dict[str, Any]:
    """Return a job that a replica fires when it starts, if not said otherwise, and then daily."""
    label = {} if function in ("work", "kill_own_process") else {"kwargs": {"label": "first"}}
    fires = {"trigger": "interval", "days": 1, "next_run_time": moment()}
    return {"id": task, "function": function, **label, **fires, **job}


def one_off(task: str) -> dict[str, Any]:
    fires = {"trigger": "date", "run_date": moment()}
    return {"id": task, "function": "hang", "kwargs": {"label": "first"}, **fires}


def without(key: str, job: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in job.items() if name != key}


def long_dead(rows: Rows, task: str = "job") -> bool:
    """Tell whether a lease has ended some polls ago."""
    row = rows[task]
    return bool(row["now"] > row["locked_until"] + timedelta(seconds=2))


def test_a_replica_that_was_never_refused_runs_a_killed_holders_windows(
    start_replica: StartReplica, rows: Rows
) -> None:
    """One of them was refused to a replica that a deployment replaced; all fire hours later."""
    tasks = ("refused", "not refused")
    own_start = {**without("next_run_time", daily(task=tasks[1])), "start_date": moment(hours=7)}
    holder = start_replica(options=OPTIONS, jobs=[daily(task=task) for task in tasks])
    eventually(lambda: len(holder.runs) == len(tasks))
    old = start_replica(options=OPTIONS, **daily(task=tasks[0]))
    old.says("refused refused running")
    tomorrow = daily(task=tasks[0], next_run_time=moment(hours=12))
    new = start_replica(options=OPTIONS, jobs=[tomorrow, own_start])
    new.says("INFO Scheduler started")
    third = start_replica(options=OPTIONS, jobs=[tomorrow, own_start])
    third.says("INFO Scheduler started")
    old.stop()
    assert (old.exit_code, old.runs) == (0, [])
    died = [rows[task] for task in tasks]
    holder.signal(signal.SIGKILL)
    eventually(lambda: len(new.runs + third.runs) == len(tasks), SOON)
    assert [run.how for run in new.runs + third.runs] == ["again"] * len(tasks)
    for before in died:
        told = f"released {before['task_name']} died {before['locked_by']}"
        eventually(lambda told=told: told in new.said + third.said)
        assert (new.said + third.said).count(told) == 1
    for before in died:
        after = rows[before["task_name"]]
        for column in ("window_start", "window_until"):
            assert after[column] == before[column]


def test_a_replica_that_starts_after_the_holder_was_killed_runs_its_window(
    start_replica: StartReplica,
) -> None:
    holder = start_replica(options=OPTIONS, **daily())
    holder.says("runs")
    holder.signal(signal.SIGKILL)
    new = start_replica(options=OPTIONS, **daily(next_run_time=moment(hours=12)))
    new.says("runs", SOON)
    assert [run.how for run in new.runs] == ["again"]


def test_a_job_that_was_added_under_a_dead_runs_id_does_not_run_early(
    start_replica: StartReplica, rows: Rows
) -> None:
    replaced = [daily(task="function"), daily(task="trigger"), one_off("run date")]
    jobs = [*replaced, daily(task="control")]
    holder = start_replica(options=OPTIONS, jobs=jobs)
    eventually(lambda: len(holder.runs) == len(jobs))
    other = start_replica(options=OPTIONS, jobs=jobs)
    for job in jobs:
        other.says(f"refused {job['id']} running")
    for task in ("function", "trigger"):
        other.call("remove_job", task)
    other.says("removed run date")  # by the scheduler, as it fired
    in_a_month = {"trigger": "date", "run_date": moment(days=30), "kwargs": {"label": "second"}}
    for task in ("function", "trigger", "run date"):
        function = "hang_too" if task == "function" else "hang"
        other.call("add_job", {"id": task, "function": function, **in_a_month})
    died = rows["control"]["token"]
    holder.signal(signal.SIGKILL)
    # What it runs again of the other job shows when it looks for dead runs.
    eventually(lambda: rows["control"]["token"] > died, SOON)
    looked = rows["control"]["now"]
    eventually(lambda: rows["control"]["now"] > looked + timedelta(seconds=2))
    assert "label second" not in other.said
    assert not {"function", "trigger"} & set(other.pids)


def test_a_paused_scheduler_runs_a_killed_holders_window_when_it_is_resumed(
    start_replica: StartReplica, rows: Rows
) -> None:
    holder = start_replica(options=OPTIONS, **daily())
    holder.says("runs")
    other = start_replica(options=OPTIONS, **daily())
    other.says("refused job running")
    other.call("pause")
    holder.signal(signal.SIGKILL)
    eventually(lambda: long_dead(rows), SOON)
    assert other.runs == []
    other.call("resume")
    other.says("runs", SOON)
    assert [run.how for run in other.runs] == ["again"]


@pytest.mark.direct("the proxy leads to the server")
@pytest.mark.parametrize("executor", [None, "processpool"])
def test_a_job_that_ended_in_an_outage_is_not_run_again_by_a_replica_that_starts_after_it(
    start_replica: StartReplica,
    rows: Rows,
    direct_url: str,
    connection: psycopg.Connection[Any],
    tmp_path: Path,
    executor: str | None,
) -> None:
    job = daily("work", kwargs={"folder": str(tmp_path)})
    # The recovery grace grows with the fleet: the machine may be busy.
    connection.execute(
        "INSERT INTO task_lock_replica (replica_id, host, version, started_at, seen_at, tasks)"
        " SELECT 'replica ' || n, 'host', '1.0', now(), now() + interval '1 h', '{}'"
        " FROM generate_series(1, 2000) AS n"
    )
    with proxy_to(direct_url) as proxy:
        holder = start_replica(database=proxy.url, options=OPTIONS, **job)
        holder.says("runs")
        [run] = holder.runs
        proxy.accepting = False
        proxy.cut_all()
        Path(tmp_path, str(run.token)).touch()
        holder.says(f"ends {run.token}")
        eventually(lambda: rows["job"]["free"])
        new = start_replica(
            executor=executor, options=OPTIONS, **{**job, "next_run_time": moment()}
        )
        # Its link is back first, and the holder's a moment later.
        seen = ("refused", "granted", "runs")
        eventually(lambda: [line for line in new.said if line.startswith(seen)])
        assert new.runs == []
        proxy.accepting = True
        eventually(lambda: rows["job"]["finished_at"])
    assert new.runs == []
    assert rows["job"]["token"] == run.token


@pytest.mark.timeout(180)
def test_a_job_that_kills_its_process_is_given_up_after_three_takeovers(
    start_replica: StartReplica, rows: Rows
) -> None:
    options = {**OPTIONS, "lease": 1, "poll_interval": 0.5}
    # All wait for the last to be ready.
    job = daily("kill_own_process", next_run_time=moment(seconds=6))
    replicas = [start_replica(options=options, **job) for _ in range(6)]

    def died() -> list[ReplicaProcess]:
        return [replica for replica in replicas if replica.exit_code is not None]

    def errors() -> list[str]:
        living = [replica for replica in replicas if replica not in died()]
        return [line for replica in living for line in replica.said if line.startswith("ERROR")]

    eventually(lambda: errors() or len(died()) == len(replicas))
    assert [replica.exit_code for replica in died()] == [-signal.SIGKILL] * 4
    assert sorted(run.how for replica in replicas for run in replica.runs) == [
        *(["again"] * 3),
        "first",
    ]
    assert rows["job"]["finished_at"] is not None
    assert len(errors()) == 1
    assert "'job'" in errors()[0]
