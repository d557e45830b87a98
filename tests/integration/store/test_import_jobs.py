"""Jobs of APScheduler's ``SQLAlchemyJobStore`` are taken over by the command ``import-jobs``."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.cron import CronTrigger
from sqlalchemy import NullPool, create_engine

from apscheduler_tasklock import JobState, TaskLocks
from apscheduler_tasklock._database.url import parse_url
from tests.support.commands import ROOT, Command, environment, run_process
from tests.support.polling import eventually
from tests.support.stored_jobs import StoreReplica, note, ran

Connection = psycopg.Connection[Any]

LATER = datetime(2100, 1, 1, tzinfo=timezone.utc)
FUNCTIONS = ("--functions", "tests.")


class Old:
    """A scheduler with a ``SQLAlchemyJobStore``, which is never let run anything."""

    def __init__(self, url: str, **options: Any) -> None:
        # APScheduler looks into its stores once more after it has shut them down.
        engine = create_engine(parse_url(url), poolclass=NullPool)
        store = SQLAlchemyJobStore(engine=engine, **options)
        self.scheduler = BackgroundScheduler(jobstores={"default": store}, timezone="Europe/Berlin")
        self.scheduler.start(paused=True)

    def add(self, job_id: str, *trigger: Any, **options: Any) -> Any:
        given = {"args": [job_id], "id": job_id, **options}
        return self.scheduler.add_job(note, *(trigger or ("date",)), **given)


@pytest.fixture
def old(direct_url: str) -> Iterator[Old]:
    old = Old(direct_url)
    yield old
    old.scheduler.remove_all_jobs()  # else those that are due would be run by the shutdown
    old.scheduler.shutdown()


@pytest.fixture
def operator(make_task_locks: Callable[..., TaskLocks]) -> TaskLocks:
    return make_task_locks(replica_id="operator")


@contextmanager
def shown_by(url: str, **store: Any) -> Iterator[StoreReplica]:
    """Start a replica that has the new job store."""
    replica = StoreReplica(url, replica_id="new", store=store)
    replica.start()
    try:
        yield replica
    finally:
        replica.shutdown()


def old_rows(connection: Connection) -> list[Any]:
    return connection.execute("SELECT * FROM apscheduler_jobs ORDER BY id").fetchall()


def test_jobs_keep_what_they_are_their_next_run_times_and_pauses(
    old: Old, command: Command, database_url: str, connection: Connection
) -> None:
    value = {"at": LATER, "ids": [1, Decimal("1.5")]}
    arguments = {"args": ["x"], "kwargs": {"value": value}}
    nightly = CronTrigger(hour=3, minute=30, timezone="America/New_York", jitter=5)
    old.add("cron", nightly, name="Nightly", misfire_grace_time=None, coalesce=False)
    old.add("interval", "interval", minutes=5, end_date="2101-01-01", executor="slow")
    old.add("date", run_date=LATER, **arguments)
    old.add("paused", "interval", hours=1, next_run_time=None)
    old.add("moved", "interval", hours=1, next_run_time=LATER + timedelta(hours=2))
    before, rows = old.scheduler.get_jobs(), old_rows(connection)
    answer = command("import-jobs", *FUNCTIONS)
    assert answer.status == 0, answer
    assert sorted(answer.out.splitlines()) == [
        f"{name}: added" for name in ("cron", "date", "interval", "moved", "paused")
    ]
    assert answer.err == "apscheduler-tasklock: 5 added\n"
    with shown_by(database_url) as replica:
        after = {job.id: job for job in replica.scheduler.get_jobs()}
    assert len(after) == len(before)
    for job in before:
        taken = after[job.id]
        assert str(taken.trigger) == str(job.trigger)
        assert taken.next_run_time == job.next_run_time
        names = ("func", "executor", "args", "kwargs", "name", "coalesce", "max_instances")
        assert {name: getattr(taken, name) for name in names} == {
            name: getattr(job, name) for name in names
        }
    assert str(after["cron"].trigger.timezone) == "America/New_York"
    assert after["cron"].misfire_grace_time is None
    assert after["paused"].next_run_time is None
    assert old_rows(connection) == rows


def test_a_job_that_was_taken_over_runs(old: Old, command: Command, database_url: str) -> None:
    key = f"job-{uuid4().hex[:8]}"
    old.add(
        key, "interval", hours=1, next_run_time=datetime.now(timezone.utc), misfire_grace_time=None
    )
    assert command("import-jobs", *FUNCTIONS).status == 0
    with shown_by(database_url):
        eventually(lambda: len(ran[key]) == 1)


def test_what_is_there_already_is_left_as_it_is(
    old: Old, command: Command, database_url: str, operator: TaskLocks
) -> None:
    for name in ("one", "two"):
        old.add(name, run_date=LATER)
    assert command("import-jobs", *FUNCTIONS).status == 0
    with shown_by(database_url) as replica:
        replica.scheduler.pause_job("one")
    old.add("three", run_date=LATER)
    answer = command("import-jobs", *FUNCTIONS)
    assert answer.status == 0
    assert sorted(answer.out.splitlines()) == [
        "one: there already",
        "three: added",
        "two: there already",
    ]
    assert [job.state for job in operator.jobs("one")] == [JobState.PAUSED]


def test_what_cannot_be_taken_over_is_named_with_the_reason(
    old: Old, command: Command, connection: Connection, operator: TaskLocks
) -> None:
    old.add("tuple", run_date=LATER, args=[("a", "b")])
    old.add("function", run_date=LATER, args=[note])
    old.add("parallel", run_date=LATER, max_instances=3)
    old.add("freed", run_date=LATER, kwargs={"task_lock": {"on_failure": "release"}})
    old.add("gone", run_date=LATER)
    old.add("garbage", run_date=LATER)
    old.add("fine", run_date=LATER)
    [state] = connection.execute("SELECT job_state FROM apscheduler_jobs WHERE id = 'gone'")
    changed = {**pickle.loads(state[0]), "func": "tests.support.stored_jobs:gone"}  # noqa: S301  # our own
    for name, pickled in (("gone", pickle.dumps(changed)), ("garbage", b"no pickle")):
        change = "UPDATE apscheduler_jobs SET job_state = %s WHERE id = %s"
        connection.execute(change, [pickled, name])
    answer = command("import-jobs", *FUNCTIONS)
    assert answer.status == 1
    told = dict(line.split(": ", 1) for line in answer.out.splitlines())
    assert told["fine"] == "added"
    for name, reason in {
        "tuple": "args[0] cannot be stored: a tuple would come back as a list",
        "function": "args[0] cannot be stored: it is a builtins.function",
        "parallel": "max_instances=3 makes no sense",
        "freed": "on_failure='release' makes no sense",
        "gone": "stored_jobs:gone",
        "garbage": "UnpicklingError",
    }.items():
        assert told[name].startswith("not taken over: ")
        assert reason in told[name], told
    assert answer.err == "apscheduler-tasklock: 1 added, 6 not taken over\n"
    assert [job.id for job in operator.jobs()] == ["fine"]


def test_a_function_that_is_not_allowed_is_not_taken_over(
    old: Old, command: Command, operator: TaskLocks
) -> None:
    old.add("job", run_date=LATER)
    answer = command("import-jobs", "--functions", "myapp.", "other")
    assert answer.status == 1
    assert "job: not taken over: the function 'tests.support.stored_jobs:note'" in answer.out
    assert operator.jobs() == []


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
def test_rows_are_signed_with_the_secret_of_a_file(
    old: Old, command: Command, database_url: str, tmp_path: Path, ending: bytes
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret of 16 bytes or more" + ending)
    key = f"job-{uuid4().hex[:8]}"
    old.add(
        key, "interval", hours=1, next_run_time=datetime.now(timezone.utc), misfire_grace_time=None
    )
    answer = command("import-jobs", "--secret-file", str(secret))
    assert answer.status == 0
    assert "a secret of" not in answer.out + answer.err
    with shown_by(database_url, functions=None, secret="a secret of 16 bytes or more"):
        eventually(lambda: len(ran[key]) == 1)


@pytest.mark.nightly
def test_a_job_that_has_run_since_is_not_taken_over_again_unless_asked_for(
    old: Old, command: Command, database_url: str, operator: TaskLocks
) -> None:
    key = f"job-{uuid4().hex[:8]}"
    old.add(key, run_date=datetime.now(timezone.utc) + timedelta(seconds=0.5))
    ended = f"ended-{uuid4().hex[:8]}"
    past = datetime.now(timezone.utc) - timedelta(days=1)
    every_minute = {"minutes": 1, "start_date": past - timedelta(days=1), "end_date": past}
    old.add(ended, "interval", **every_minute, next_run_time=past)
    recurring = f"recurring-{uuid4().hex[:8]}"
    old.add(recurring, "interval", hours=1, next_run_time=past)
    first = command("import-jobs", *FUNCTIONS, "--late")
    assert first.status == 0, first
    with shown_by(database_url):
        eventually(lambda: ran[key])
        eventually(lambda: [job.id for job in operator.jobs()] == [recurring])
    again = command("import-jobs", *FUNCTIONS)
    assert again.status == 1
    for name in (key, ended):
        assert f"{name}: not taken over: its last run time, " in again.out
    assert "with --late" in again.out
    assert f"{recurring}: there already" in again.out
    assert [job.id for job in operator.jobs()] == [recurring]


def test_the_old_table_may_have_another_name_and_schema(
    direct_url: str, command: Command, connection: Connection
) -> None:
    connection.execute('CREATE SCHEMA "Old Jobs"')
    old = Old(direct_url, tablename="My Jobs", tableschema="Old Jobs")
    old.add("job", run_date=LATER)
    old.scheduler.shutdown()
    answer = command("import-jobs", *FUNCTIONS, "--from", "Old Jobs.My Jobs", "--json")
    assert answer.status == 0
    assert answer.json == [{"id": "job", "outcome": "added", "reason": None}]


def test_modules_of_the_current_folder_are_found(
    old: Old, database_url: str, tmp_path: Path, operator: TaskLocks, connection: Connection
) -> None:
    (tmp_path / "shop_jobs.py").write_text("def send(key):\n    pass\n")
    old.add("job", run_date=LATER)
    [state] = connection.execute("SELECT job_state FROM apscheduler_jobs")
    changed = {**pickle.loads(state[0]), "func": "shop_jobs:send"}  # noqa: S301  # our own
    connection.execute("UPDATE apscheduler_jobs SET job_state = %s", [pickle.dumps(changed)])
    script = "import sys; from apscheduler_tasklock.cli import main; sys.exit(main(sys.argv[1:]))"
    (tmp_path / "bin").mkdir()
    # As an installed command, whose own folder is on the path, and not the current one.
    (tmp_path / "bin" / "command").write_text(script)
    done = subprocess.run(
        [sys.executable, "bin/command", "import-jobs", "--functions", "shop_jobs"],
        cwd=tmp_path,
        env=environment(database_url, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "job: added\n"), done.stderr
    assert [job.function for job in operator.jobs()] == ["shop_jobs:send"]


def test_the_help_says_that_pickles_are_run(database_url: str) -> None:
    answer = run_process(environment(database_url), "import-jobs", "--help")
    assert answer.status == 0
    assert "reading a pickle can run any code" in answer.out


class TestErrors:
    def test_no_old_table_is_one_line(self, command: Command) -> None:
        answer = command("import-jobs", *FUNCTIONS, "--from", "nothing")
        assert (answer.status, answer.out) == (1, "")
        assert "the table nothing cannot be read as one of SQLAlchemyJobStore" in answer.err
        assert answer.err.count("\n") == 1

    def test_a_table_of_another_kind_is_one_line(self, command: Command) -> None:
        answer = command("import-jobs", *FUNCTIONS, "--from", "task_lock")
        assert (answer.status, answer.out) == (1, "")
        assert "the table task_lock cannot be read" in answer.err

    def test_a_missing_new_table_names_the_remedy(
        self, old: Old, command: Command, connection: Connection
    ) -> None:
        connection.execute("DROP TABLE task_lock_job")
        answer = command("import-jobs", *FUNCTIONS)
        assert (answer.status, answer.out) == (1, "")
        assert "apscheduler-tasklock upgrade" in answer.err

    def test_it_is_wrong_usage_to_allow_any_function(self, command: Command) -> None:
        answer = command("import-jobs")
        assert (answer.status, answer.out) == (2, "")
        assert "--functions or --secret-file" in answer.err

    def test_a_secret_that_cannot_be_read_or_is_too_short_is_wrong_usage(
        self, command: Command, tmp_path: Path
    ) -> None:
        missing = command("import-jobs", "--secret-file", str(tmp_path / "none"))
        assert missing.status == 2
        assert "--secret-file: " in missing.err
        (tmp_path / "short").write_text("hunter2")
        short = command("import-jobs", "--secret-file", str(tmp_path / "short"))
        assert short.status == 2
        assert "16 bytes" in short.err
        assert "hunter2" not in short.err

    def test_an_empty_table_is_told(self, old: Old, command: Command) -> None:
        answer = command("import-jobs", *FUNCTIONS, "--json")
        assert (answer.status, json.loads(answer.out)) == (0, [])
        assert "the table apscheduler_jobs has no jobs" in answer.err
