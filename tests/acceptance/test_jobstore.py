"""The job store with real processes, which are killed."""

from __future__ import annotations

import json
import os
import random
import re
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

from apscheduler_tasklock.demo.history import JudgedRun
from apscheduler_tasklock.demo.judge import overlaps, repeats
from tests.support.polling import eventually
from tests.support.proxy import proxy_to
from tests.support.stored_jobs import GUARD

Start = Callable[..., "StoreProcess"]

pytestmark = pytest.mark.nightly


class StoreProcess:
    """A process of tests/acceptance/stored.py."""

    def __init__(
        self, log: Path, database_url: str, ledger_url: str, checkout: Path, settings: Any
    ) -> None:
        self.log = log
        self._called = 0
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                # Its jobs find its module under the name that they are stored with.
                [sys.executable, "-c", "from tests.acceptance.stored import main; main()"],
                cwd=checkout,
                env={
                    **os.environ,
                    "DATABASE_URL": database_url,
                    "LEDGER_URL": ledger_url,
                    "SETTINGS": json.dumps(settings),
                },
                stdin=subprocess.PIPE,
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

    def ask(self, method: str, **named: Any) -> None:
        """Let it call a method of its scheduler."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, named]).encode() + b"\n")
        self._process.stdin.flush()
        self._called += 1

    def answers(self) -> list[str]:
        """Wait until it has done all that it was asked, and return what became of that."""
        answers = re.compile(r"^called \w+: (\w+)$", re.MULTILINE)
        eventually(lambda: len(answers.findall(self.said)) == self._called)
        return answers.findall(self.said)

    def call(self, method: str, **named: Any) -> str:
        """Let it call a method of its scheduler, and return what became of that."""
        self.ask(method, **named)
        return self.answers()[-1]

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Stop it as a container is, without a word."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def leave(self) -> None:
        """End its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self.leave()


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

    def history(self, key: str) -> list[JudgedRun]:
        """Return a job's runs for the judge."""
        return [
            JudgedRun(
                key,
                str(run["pid"]),
                run["run_time"].timestamp(),
                run["began_at"].timestamp(),
                run["ended_at"] and run["ended_at"].timestamp(),
                takeover=run["is_takeover"],
            )
            for run in self.of(key)
        ]


@pytest.fixture
def ledger(connection: psycopg.Connection[Any]) -> Ledger:
    return Ledger(connection)


@pytest.fixture
def start(tmp_path: Path, database_url: str, checkout: Path, ledger: Ledger) -> Iterator[Start]:
    """Start a process with settings; it is killed after the test."""
    with ExitStack() as ending:
        number = iter(range(100))

        def start(*, database: str = database_url, **settings: Any) -> StoreProcess:
            log = tmp_path / f"process {next(number)}.log"
            process = StoreProcess(log, database, database_url, checkout, settings)
            ending.callback(process.end)
            return process

        yield start


def jobs_left(ledger: Ledger) -> int:
    return ledger.connection.execute("SELECT FROM task_lock_job").rowcount


def one_off(key: str, seconds: float = 0.0, **job: Any) -> dict[str, Any]:
    return {"trigger": "date", "in": 0.0, "args": [key, seconds], "id": key, **job}


def until_killed(module: str) -> dict[str, Any]:
    """Return a one-off job that works until its replica is killed, and ends at once elsewhere."""
    return one_off("job", func=f"{module}:work_until_killed", args=["job"])


FAILOVER = {"failover": True, "lease": 2, "poll_interval": 0.5}


def test_a_one_off_job_whose_replica_is_killed_is_run_again_with_failover(
    start: Start, ledger: Ledger
) -> None:
    """It is gone from the store for users by then."""
    first = start(executor=FAILOVER, jobs=[until_killed("tests.acceptance.stored")])
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


def test_a_replica_that_is_stopped_when_a_job_is_due_loses_nothing_whatever_the_grace_time(
    start: Start, ledger: Ledger
) -> None:
    """The job is one's that lives, and is late only by the time in which that was not there."""
    job = {
        "trigger": "interval",
        "hours": 1,
        "args": ["job"],
        "id": "job",
        "misfire_grace_time": 1,
    }
    first = start(jobs=[job]).started()
    eventually(lambda: jobs_left(ledger) == 1)
    other = start().started()
    first.stop()
    ledger.connection.execute("UPDATE task_lock_job SET next_run_time = now()")
    [run] = ledger.runs("job")
    assert run["pid"] == other.pid
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


def each_second(key: str, seconds: float = 0.0, **job: Any) -> dict[str, Any]:
    """Return a job that all processes declare."""
    return {
        "trigger": "interval",
        "seconds": 1,
        "args": [key, seconds],
        "id": key,
        "replace_existing": True,
        "misfire_grace_time": None,
        **job,
    }


def database_now(ledger: Ledger) -> datetime:
    found = ledger.connection.execute("SELECT clock_timestamp()").fetchone()
    assert found is not None
    return datetime.fromtimestamp(found[0].timestamp(), timezone.utc)


def started(ledger: Ledger) -> list[datetime]:
    """Return when the runs of all tasks were claimed."""
    return [row[0] for row in ledger.connection.execute("SELECT started_at FROM task_lock_run")]


class TestEachPromise:
    """A row each of the table of promises in docs/job-store.md; others are above and below."""

    def test_any_replica_can_add_change_pause_and_resume_a_job(
        self, start: Start, ledger: Ledger
    ) -> None:
        one, two, three = (start() for _ in range(3))
        for process in (one, two, three):
            process.started()
        assert one.call("add_job", **one_off("old", **{"in": 3600}, id="job")) == "done"
        assert two.call("modify_job", job_id="job", args=["new"]) == "done"
        assert three.call("pause_job", job_id="job") == "done"
        assert one.call("resume_job", job_id="job") == "done"
        due = {"trigger": "interval", "seconds": 1}
        assert two.call("reschedule_job", job_id="job", **due) == "done"
        ledger.runs("new", 2)
        assert ledger.of("old") == []
        assert three.call("remove_job", job_id="job") == "done"
        assert one.call("remove_job", job_id="job") == "JobLookupError"

    @pytest.mark.parametrize("method", ["pause_job", "remove_job"])
    def test_nothing_is_claimed_once_a_pause_or_a_removal_has_returned(
        self, start: Start, ledger: Ledger, method: str
    ) -> None:
        processes = [start(jobs=[each_second("job")]).started() for _ in range(2)]
        ledger.runs("job", 2)
        assert processes[0].call(method, job_id="job") == "done"
        returned = database_now(ledger)
        eventually(lambda: database_now(ledger) > returned + timedelta(seconds=3))
        assert max(started(ledger)) < returned

    def test_what_is_due_while_its_task_runs_waits_for_the_end(
        self, start: Start, ledger: Ledger
    ) -> None:
        for process in [start(jobs=[each_second("job", 1.7)]) for _ in range(2)]:
            process.started()
        ledger.runs("job", 4)
        assert not list(overlaps(ledger.history("job")))

    @pytest.mark.parametrize(
        ("lacking", "having", "job", "says"),
        [
            (
                {"lacks": ["tests.acceptance.jobs"]},
                {},
                {"func": "tests.acceptance.jobs:touch"},
                "cannot be imported here",
            ),
            ({}, {"executors": {"extra": {}}}, {"executor": "extra"}, ""),
        ],
        ids=["function", "executor"],
    )
    def test_a_function_or_an_executor_that_is_not_here_is_left_to_where_it_is(
        self,
        start: Start,
        ledger: Ledger,
        tmp_path: Path,
        lacking: dict[str, Any],
        having: dict[str, Any],
        job: dict[str, Any],
        says: str,
    ) -> None:
        old, new = start(**lacking).started(), start(**having).started()
        new.stop()
        args = [str(tmp_path / "ran")] if "func" in job else ["job"]
        column = "func" if "func" in job else "executor"
        assert old.call("add_job", **one_off("job", **{"in": 0.0})) == "done"
        ledger.runs("job")
        old.stop()
        new.go_on()
        assert new.call("add_job", **one_off("job", **{"in": 2.0}, args=args, **job)) == "done"
        new.stop()
        old.go_on()
        eventually(lambda: says in old.said)
        due = f"SELECT FROM task_lock_job WHERE {column} = %s AND next_run_time < now()"
        eventually(lambda: ledger.connection.execute(due, [job[column]]).rowcount == 1)
        new.go_on()
        if "func" in job:
            eventually((tmp_path / "ran").exists)
        else:
            assert ledger.runs("job", 2)[1]["pid"] == new.pid
        assert old.said.count("cannot be imported here") == bool(says)

    @pytest.mark.parametrize("executor", ["default", "off"])
    def test_what_comes_due_while_an_interpreter_ends_is_left_to_other_replicas(
        self, start: Start, ledger: Ledger, executor: str
    ) -> None:
        """The interpreter waits for running jobs before ``atexit`` shuts the scheduler down."""
        off = {"off": {"enabled": False}}
        leaving = start(leaves=True, executors=off, jobs=[one_off("busy", 600.0)]).started()
        ledger.runs("busy")
        other = start(executors=off).started()
        assert other.call("pause") == "done"
        leaving.leave()
        eventually(lambda: "the interpreter ends" in leaving.said)
        assert other.call("add_job", **one_off("due", executor=executor)) == "done"
        # Longer than it takes a replica to look.
        due = "SELECT FROM task_lock_job WHERE next_run_time < now() - interval '3 s'"
        eventually(lambda: ledger.connection.execute(due).rowcount)
        assert ledger.of("due") == []
        assert other.call("resume") == "done"
        assert ledger.runs("due")[0]["pid"] == other.pid
        assert "Traceback" not in leaving.said
        assert len(ledger.of("due")) == 1

    def test_a_run_that_died_is_left_to_where_its_function_is(
        self, start: Start, ledger: Ledger
    ) -> None:
        """As in a rolling deployment: the old version finds it first."""
        job = until_killed("tests.acceptance.new_version")
        first = start(executor=FAILOVER, jobs=[job])
        ledger.runs("job")
        old = start(executor=FAILOVER, lacks=["tests.acceptance.new_version"]).started()
        first.kill()
        eventually(lambda: "is left to other replicas" in old.said)
        new = start(executor=FAILOVER).started()
        again = ledger.runs("job", 2)[1]
        assert (again["pid"], again["is_takeover"]) == (new.pid, True)
        eventually(lambda: jobs_left(ledger) == 0)
        assert ledger.of("job")[1]["ended_at"] is not None
        assert len(ledger.of("job")) == 2
        assert old.said.count("is left to other replicas") == 1

    def test_a_database_that_is_away_ends_no_scheduler_and_users_are_told(
        self, start: Start, ledger: Ledger, direct_url: str
    ) -> None:
        with proxy_to(direct_url) as proxy:
            jobs = [each_second("job")]
            processes = [start(database=proxy.url, jobs=jobs).started() for _ in range(2)]
            ledger.runs("job", 2)
            proxy.accepting = False
            proxy.cut_all()
            for process in processes:
                assert process.call("pause_job", job_id="job") == "unavailable"
            count = len(ledger.of("job"))
            proxy.accepting = True
            ledger.runs("job", count + 3)
            for process in processes:
                assert process.call("pause_job", job_id="job") == "done"
                assert "Traceback" not in process.said

    def test_a_job_can_add_and_remove_its_own_id_while_it_runs(
        self, start: Start, ledger: Ledger
    ) -> None:
        for process in (
            start(jobs=[one_off("job", 3, func="tests.acceptance.stored:work_and_add_itself")]),
            start(),
        ):
            process.started()
        ledger.runs("job", 4)
        eventually(lambda: jobs_left(ledger) == 0)
        assert len(ledger.of("job")) == 4

    def test_two_replicas_change_different_attributes_of_one_job_and_both_stay(
        self, start: Start, ledger: Ledger
    ) -> None:
        one, two = start(jobs=[one_off("job", **{"in": 3600})]).started(), start().started()
        for number in range(1, 21):
            one.ask("modify_job", job_id="job", name=f"name {number}")
            two.ask("modify_job", job_id="job", misfire_grace_time=number)
        assert {*one.answers(), *two.answers()} == {"done"}
        row = ledger.connection.execute("SELECT options, version FROM task_lock_job").fetchone()
        assert row is not None
        options, version = row
        assert (options["name"], options["misfire_grace_time"]) == ("name 20", 20)
        assert version == 41

    def test_where_locks_are_off_each_run_time_is_run_at_most_once(
        self, start: Start, ledger: Ledger
    ) -> None:
        keys = [f"job-{number}" for number in range(20)]
        settings = {"executor": {"enabled": False}}
        dated = [one_off(key, **{"in": 3.0}) for key in keys]
        for process in (start(**settings, jobs=dated), start(**settings), start(**settings)):
            process.started()
        eventually(lambda: jobs_left(ledger) == 0)
        for key in keys:
            assert len(ledger.runs(key)) == 1


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
        runs = ledger.history(name)
        assert any(run.ended is not None for run in runs), f"{name} never ended: {runs}"
    for name in [*once, *recurring]:
        own = [run for run in ledger.history(name) if not run.takeover]
        twice = repeats(own, lambda one, other: one.task in once or one.due == other.due)
        assert not list(twice), f"a run time of {name} was claimed twice: {own}"
