"""Failover between real processes, whose holder is killed or paused by real signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from tests.acceptance.conftest import ReplicaProcess
from tests.support.claims import AHEAD
from tests.support.polling import eventually

pytestmark = pytest.mark.nightly

StartReplica = Callable[..., ReplicaProcess]
Connection = psycopg.Connection[Any]

PERIOD = 10  # seconds; time for a takeover, also on a slow machine
LEASE = 2
GETTING_READY = 3  # seconds until the first fire, for processes that run to have the job by then


class Run(NamedTuple):
    """A run that a replica printed.

    :ivar token: from 1 on: how often the task had been claimed by then
    """

    replica: int
    run_time: str
    token: int
    how: str
    pid: int


class Replicas:
    """Replicas that fire at the same moments."""

    def __init__(self, start: StartReplica, connection: Connection, folder: Path) -> None:
        self._start = start
        self._connection = connection
        self._folder = folder
        self.processes: list[ReplicaProcess] = []

    def start(self, *, function: str = "work", once: bool = False, **job: Any) -> None:
        """Start three. Their job works until it is let end."""
        lock = {"lease": LEASE, "failover": True, **job.pop("task_lock", {})}
        kwargs = {"folder": str(self._folder), "task_lock": lock}
        job = {"function": function, "kwargs": kwargs, **job}
        if once:  # a single fire waits for who is late
            single = {"trigger": "date", "run_date": in_seconds(0)}
            self.processes += [self._start(**single, **job) for _ in range(3)]
            return
        self.processes += [self._start() for _ in range(3)]
        for process in self.processes:  # who is late for the first fire is not refused
            process.call("get_jobs")
        every = {"trigger": "interval", "seconds": PERIOD, "start_date": in_seconds(GETTING_READY)}
        for process in self.processes:
            process.call("add_job", {**every, **job})

    def let_end(self, token: int) -> None:
        (self._folder / str(self.real(token))).touch()

    def real(self, token: int) -> int:
        """Return the token of the claim with this number."""
        return AHEAD + token

    @property
    def runs(self) -> list[Run]:
        """All runs, in the order of their tokens."""
        found = []
        for number, process in enumerate(self.processes):
            for line in process.said:
                if line.startswith("runs"):
                    _, run_time, token, how, pid = line.split()
                    found.append(Run(number, run_time, int(token), how, int(pid)))
        numbered = [run._replace(token=run.token - AHEAD) for run in found]
        return sorted(numbered, key=lambda run: run.token)

    def run(self, token: int) -> Run:
        """Wait for the run with this token."""
        return eventually(lambda: [run for run in self.runs if run.token == token])[0]

    def row(self) -> dict[str, Any]:
        cursor = self._connection.cursor(row_factory=psycopg.rows.dict_row)
        found = cursor.execute("SELECT * FROM task_lock WHERE task_name = 'job'").fetchone()
        assert found is not None
        return found

    def but(self, number: int) -> list[ReplicaProcess]:
        return [process for other, process in enumerate(self.processes) if other != number]

    def said(self, what: str) -> list[str]:
        """Return all lines that have this in them."""
        return [line for process in self.processes for line in process.said if what in line]


@pytest.fixture
def replicas(
    start_replica: StartReplica,
    connection: Connection,
    tmp_path: Path,
    known_task: Callable[[str], None],
) -> Replicas:
    known_task("job")
    return Replicas(start_replica, connection, tmp_path)


def in_seconds(seconds: int) -> str:
    return f"{datetime.now(timezone.utc) + timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S}"


def later(run_time: str, seconds: int) -> str:
    """Return a time of day so many seconds later, also beyond midnight."""
    moment = datetime.strptime(run_time, "%H:%M:%S").replace(tzinfo=timezone.utc)
    return str((moment + timedelta(seconds=seconds)).time())


def outcomes(runs: list[Run]) -> list[tuple[str, int, str]]:
    return [(run.run_time, run.token, run.how) for run in runs]


def test_one_other_replica_runs_the_window_of_a_killed_holder_again(replicas: Replicas) -> None:
    replicas.start()
    first = replicas.run(1)
    for other in replicas.but(first.replica):
        other.says("refused")
    died = replicas.row()
    replicas.processes[first.replica].signal(signal.SIGKILL)
    again = replicas.run(2)
    taken_over = replicas.row()
    for token in (2, 3):
        replicas.let_end(token)
    following = replicas.run(3)

    next_time = later(first.run_time, PERIOD)
    assert outcomes(replicas.runs) == [
        (first.run_time, 1, "first"),
        (first.run_time, 2, "again"),
        (next_time, 3, "first"),
    ]
    assert first.replica not in (again.replica, following.replica)
    for column in ("window_start", "window_until"):
        assert taken_over[column] == died[column]
    assert taken_over["started_at"] >= died["locked_until"]
    lines = replicas.said("since its holder")
    assert len(lines) == 1
    assert lines[0].startswith("INFO Task 'job': runs the window of")
    holder = f"{died['locked_by']!r} (token {replicas.real(1)})"
    assert f"(token {replicas.real(2)}), since its holder {holder} neither renewed" in lines[0]
    assert len(replicas.said("granted job takeover")) == 1


def test_a_pools_worker_keeps_its_lock_and_is_taken_over_when_it_dies(replicas: Replicas) -> None:
    replicas.start(executor="processpool", once=True, task_lock={"lease": 1})
    first = replicas.run(1)
    holder = replicas.processes[first.replica]
    assert first.pid != holder.pid
    for other in replicas.but(first.replica):
        other.says("refused")
    kept = timedelta(seconds=3)  # leases
    eventually(lambda: replicas.row()["locked_until"] - replicas.row()["started_at"] > kept)
    assert outcomes(replicas.runs) == [(first.run_time, 1, "first")]

    holder.signal(signal.SIGKILL)
    os.kill(first.pid, signal.SIGKILL)
    again = replicas.run(2)
    replicas.let_end(2)
    eventually(lambda: replicas.row()["finished_at"])
    assert outcomes(replicas.runs) == [(first.run_time, 1, "first"), (first.run_time, 2, "again")]
    assert again.replica != first.replica


def test_a_one_off_job_of_a_killed_holder_runs_again_though_its_job_store_dropped_it(
    replicas: Replicas,
) -> None:
    replicas.start(once=True)
    first = replicas.run(1)
    others = replicas.but(first.replica)
    for other in others:
        other.says("removed")
        other.says("refused")
    replicas.processes[first.replica].signal(signal.SIGKILL)
    again = replicas.run(2)
    replicas.let_end(2)
    eventually(lambda: replicas.row()["finished_at"])
    assert outcomes(replicas.runs) == [(first.run_time, 1, "first"), (first.run_time, 2, "again")]
    assert again.replica != first.replica


def test_nothing_runs_again_of_a_holder_that_is_killed_after_its_run(replicas: Replicas) -> None:
    replicas.start(task_lock={"lease": 1})
    first = replicas.run(1)
    replicas.let_end(1)
    eventually(lambda: replicas.row()["finished_at"])
    replicas.processes[first.replica].signal(signal.SIGKILL)
    replicas.run(2)
    replicas.let_end(2)
    assert outcomes(replicas.runs) == [
        (first.run_time, 1, "first"),
        (later(first.run_time, PERIOD), 2, "first"),
    ]
    assert not replicas.said("takeover")


def paused_past_its_lease(replicas: Replicas) -> tuple[ReplicaProcess, dict[str, Any]]:
    """Pause the holder until another replica has taken over; return it, resumed, and the row."""
    first = replicas.run(1)
    holder = replicas.processes[first.replica]
    for other in replicas.but(first.replica):
        other.says("refused")
    holder.signal(signal.SIGSTOP)
    again = replicas.run(2)
    assert (again.how, again.replica != first.replica) == ("again", True)
    row = replicas.row()
    holder.signal(signal.SIGCONT)
    return holder, row


def test_a_holder_paused_past_its_lease_hears_of_it_once_and_leaves_its_heirs_row_alone(
    replicas: Replicas,
) -> None:
    replicas.start(once=True)
    holder, heirs = paused_past_its_lease(replicas)
    holder.says("lost")
    replicas.let_end(1)
    holder.says(f"ends {replicas.real(1)} lost")
    holder.says("executed")  # which comes after the release
    row = replicas.row()
    unchanged = ("token", "claim_id", "locked_by", "window_start", "window_until", "finished_at")
    assert [row[column] for column in unchanged] == [heirs[column] for column in unchanged]
    assert row["finished_at"] is None
    assert len([line for line in holder.said if line.startswith("lost job")]) == 1
    warnings = [line for line in holder.said if line.startswith("WARNING")]
    warnings = [line for line in warnings if "its lease of" not in line]  # which is short
    assert len(warnings) == 1
    assert f"is lost (token {replicas.real(1)})" in warnings[0]

    replicas.let_end(2)
    eventually(lambda: replicas.row()["finished_at"])
    assert len(replicas.runs) == 2
    assert len(replicas.said("lost job")) == 1


def test_a_coroutine_of_a_holder_paused_past_its_lease_is_cancelled(replicas: Replicas) -> None:
    replicas.start(
        function="work_async", executor="asyncio", once=True, task_lock={"cancel_on_lost": True}
    )
    holder, heirs = paused_past_its_lease(replicas)
    holder.says("lost")
    holder.says(f"cancelled {replicas.real(1)}")
    replicas.let_end(2)
    eventually(lambda: replicas.row()["finished_at"])
    row = replicas.row()
    assert (row["token"], row["claim_id"]) == (replicas.real(2), heirs["claim_id"])
    assert len(replicas.runs) == 2
    assert len(replicas.said("lost job")) == 1
