"""The job store with real processes, which are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from tests.support.polling import eventually
from tests.support.stored_jobs import GUARD

Start = Callable[..., "StoreProcess"]


class StoreProcess:
    """A process of tests/acceptance/stored.py."""

    def __init__(self, log: Path, database_url: str, checkout: Path, settings: Any) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.acceptance.stored"],
                cwd=checkout,
                env={
                    **os.environ,
                    "DATABASE_URL": database_url,
                    "SETTINGS": json.dumps(settings),
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def said(self) -> str:
        return self.log.read_text()

    def started(self) -> StoreProcess:
        eventually(lambda: "Scheduler started" in self.said)
        return self

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Stop it as a container is, without a word."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()


class Ledger:
    """What the jobs wrote down."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        connection.execute(
            "CREATE TABLE ledger (id serial PRIMARY KEY, key text, pid integer,"
            " run_time timestamptz, is_takeover boolean,"
            " began_at timestamptz DEFAULT clock_timestamp(), ended_at timestamptz)"
        )

    def runs(self, key: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until a job has begun so often, and return its runs."""
        return list(eventually(lambda: found if len(found := self.of(key)) >= count else None))

    def of(self, key: str) -> list[dict[str, Any]]:
        cursor = self.connection.cursor(row_factory=dict_row)
        return cursor.execute("SELECT * FROM ledger WHERE key = %s ORDER BY id", [key]).fetchall()


@pytest.fixture
def ledger(connection: psycopg.Connection[Any]) -> Ledger:
    return Ledger(connection)


@pytest.fixture
def start(tmp_path: Path, database_url: str, checkout: Path, ledger: Ledger) -> Iterator[Start]:
    """Start a process with settings; it is killed after the test."""
    with ExitStack() as ending:
        number = iter(range(100))

        def start(**settings: Any) -> StoreProcess:
            log = tmp_path / f"process {next(number)}.log"
            process = StoreProcess(log, database_url, checkout, settings)
            ending.callback(process.end)
            return process

        yield start


def jobs_left(ledger: Ledger) -> int:
    return ledger.connection.execute("SELECT FROM task_lock_job").rowcount


def one_off(key: str, seconds: float = 0.0, **job: Any) -> dict[str, Any]:
    return {"trigger": "date", "in": 0.0, "args": [key, seconds], "id": key, **job}


FAILOVER = {"failover": True, "lease": 2, "poll_interval": 0.5}


def test_a_one_off_job_whose_replica_is_killed_is_run_again_with_failover(
    start: Start, ledger: Ledger
) -> None:
    """It is gone from the store for users by then."""
    first = start(executor=FAILOVER, jobs=[one_off("job", 3)])
    [run] = ledger.runs("job")
    assert run["pid"] == first.pid
    other = start(executor=FAILOVER).started()
    first.kill()
    again = ledger.runs("job", 2)[1]
    assert (again["pid"], again["is_takeover"]) == (other.pid, True)
    eventually(lambda: ledger.of("job")[1]["ended_at"] is not None)
    eventually(lambda: jobs_left(ledger) == 0)
    assert len(ledger.of("job")) == 2


def test_without_failover_it_is_not_run_again(start: Start, ledger: Ledger) -> None:
    settings = {"lease": 2, "poll_interval": 0.5, "min_factor": 0, "max_factor": 0.002}
    first = start(executor=settings, jobs=[one_off("job", 60)])
    ledger.runs("job")
    start(executor=settings).started()
    first.kill()
    # The row is kept until the maximum lock of the run has ended, which is 7.2 s here.
    eventually(lambda: jobs_left(ledger) == 0)
    assert len(ledger.of("job")) == 1


def test_a_recurring_job_whose_replica_is_killed_goes_on_elsewhere(
    start: Start, ledger: Ledger
) -> None:
    job = {
        "trigger": "interval",
        "seconds": 1,
        "args": ["job", 0.2],
        "id": "job",
        "replace_existing": True,
        "misfire_grace_time": None,
    }
    processes = {
        process.pid: process for process in (start(executor=FAILOVER, jobs=[job]) for _ in range(3))
    }
    for process in processes.values():
        process.started()
    for _ in range(2):
        count = len(ledger.runs("job", len(ledger.of("job")) + 1))
        dead = processes.pop(ledger.of("job")[-1]["pid"], None)
        if dead is not None:
            dead.kill()
        ledger.runs("job", count + 1)
    eventually(lambda: ledger.of("job")[-1]["pid"] in processes)
    own = [run["run_time"] for run in ledger.of("job") if not run["is_takeover"]]
    assert len(set(own)) == len(own), "a run time was claimed twice"


def test_a_replica_that_is_stopped_after_the_fetch_loses_nothing_whatever_the_grace_time(
    start: Start, ledger: Ledger
) -> None:
    """Its worker is paused between the hand-out and the claim, or before the fetch."""
    job = {
        "trigger": "interval",
        "hours": 1,
        "args": ["job"],
        "id": "job",
        "misfire_grace_time": 1,
    }
    first = start(jobs=[job]).started()
    eventually(lambda: jobs_left(ledger) == 1)
    first.stop()
    # As it would be if it had been stopped a moment later: due, and handed out to it.
    ledger.connection.execute(
        "UPDATE task_lock_job SET next_run_time = now(), handed_id = gen_random_uuid(),"
        " handed_to = 'first', handed_until = now() + interval '5 seconds'"
    )
    other = start().started()
    [run] = ledger.runs("job")
    assert run["pid"] == other.pid
    assert timedelta(seconds=4) < run["began_at"] - run["run_time"] < timedelta(seconds=30)
    first.go_on()
    row = ledger.connection.execute("SELECT next_run_time FROM task_lock_job").fetchone()
    assert row is not None
    assert row[0] > datetime.now(timezone.utc)
    assert len(ledger.of("job")) == 1


def test_three_processes_that_start_at_once_declare_one_job_each_and_keep_a_pause(
    start: Start, ledger: Ledger
) -> None:
    jobs = [
        {"trigger": "cron", "hour": 3, "args": [name], "id": name, "replace_existing": True}
        for name in ("one", "two", "paused")
    ]
    start(jobs=jobs).started()
    ledger.connection.execute("UPDATE task_lock_job SET next_run_time = NULL WHERE id = 'paused'")
    read = "SELECT id, version, next_run_time FROM task_lock_job ORDER BY id"
    before = ledger.connection.execute(read).fetchall()
    for process in [start(jobs=jobs) for _ in range(3)]:
        process.started()
    assert ledger.connection.execute(read).fetchall() == before
    assert [row[0] for row in before] == ["one", "paused", "two"]


def test_after_all_were_down_it_goes_on_as_one_scheduler_that_restarts(
    start: Start, ledger: Ledger
) -> None:
    again = {"trigger": "interval", "hours": 1, "misfire_grace_time": 1}
    first = start(
        jobs=[
            {**again, "args": ["recurring"], "id": "recurring"},
            one_off("one-off", **{"in": 3600}),
        ]
    ).started()
    eventually(lambda: jobs_left(ledger) == 2)
    first.kill()
    ledger.connection.execute("UPDATE task_lock_job SET next_run_time = now() - interval '1 min'")
    second = start().started()
    ledger.runs("one-off")  # its grace time is none
    eventually(lambda: "was missed by" in second.said)
    assert ledger.of("recurring") == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_whoever_is_killed_no_run_time_is_lost_and_none_begins_twice_but_by_a_takeover(
    start: Start, ledger: Ledger, rng: random.Random
) -> None:
    ledger.connection.execute(GUARD)
    recurring = [f"recurring-{number}" for number in range(4)]
    once = [f"once-{number}" for number in range(120)]
    jobs = [
        {
            "trigger": "interval",
            "seconds": 1,
            "args": [name, 0.1],
            "id": name,
            "replace_existing": True,
            "misfire_grace_time": None,
        }
        for name in recurring
    ]
    executor = {**FAILOVER, "max_takeovers": 100, "max_workers": 5}
    settings = {"executor": executor, "jobs": jobs}
    dated = [one_off(name, 0.2, **{"in": rng.uniform(0, 40)}) for name in once]
    processes = [start(executor=executor, jobs=jobs + dated), start(**settings), start(**settings)]
    for process in processes:
        process.started()
    for _ in range(15):
        victim = rng.randrange(len(processes))
        time.sleep(rng.uniform(1, 3.5))  # the pace of the faults: nothing is waited for
        processes[victim].kill()
        processes[victim] = start(**settings).started()
    eventually(lambda: jobs_left(ledger) == len(recurring), timeout=90)
    eventually(lambda: all(len(ledger.of(name)) > 20 for name in recurring), timeout=90)
    said = "".join(process.said for process in processes)
    assert "falls from" not in said
    for name in once:
        runs = ledger.of(name)
        assert [run for run in runs if run["ended_at"]], f"{name} never ended: {runs}"
        assert len([run for run in runs if not run["is_takeover"]]) <= 1, runs
    for name in recurring:
        own = [run["run_time"] for run in ledger.of(name) if not run["is_takeover"]]
        assert len(set(own)) == len(own), f"a run time of {name} was claimed twice"
