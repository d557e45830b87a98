"""The run of `make test-foreign`, on small suites: it finds what it is for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apscheduler
import pytest

from tests.foreign import __main__ as foreign
from tests.foreign.suites import Difference, LeftOut, Suite
from tests.support.postgres import Server

# Its executors name their own classes, so that none can be put in their place.
pytestmark = [
    pytest.mark.nightly,  # each runs pytest in a process of its own
    pytest.mark.skipif(
        apscheduler.version.startswith("3.10"), reason="the suites are those of APScheduler 3.11"
    ),
]

# With the scheduler's default executor, and with one that the test makes.
RUNS_JOBS = """
from datetime import datetime, timezone

import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler

@pytest.mark.parametrize("executors", [{}, {"default": ThreadPoolExecutor(1)}])
def test_a_job_runs(executors):
    ran = []
    scheduler = BackgroundScheduler(executors=executors, timezone=timezone.utc)
    scheduler.add_listener(ran.append, EVENT_JOB_EXECUTED)
    now = datetime.now(timezone.utc)
    scheduler.add_job(int, "interval", hours=1, id="job", next_run_time=now)
    scheduler.start()
    scheduler.shutdown()
    assert [event.retval for event in ran] == [0]
"""

# With a job store as the suite's fixture makes it: given no scheduler, on a file that is removed.
STORES_JOBS = """
from datetime import datetime, timezone

import pytest
from apscheduler.schedulers.base import BaseScheduler
from apscheduler.jobstores import sqlalchemy

def work(): ...

@pytest.fixture
def store(tmp_path):
    file = tmp_path / "jobs.sqlite"
    store = sqlalchemy.SQLAlchemyJobStore(url=f"sqlite:///{file}")
    store.start(None, "sqlalchemy")
    yield store
    store.shutdown()
    file.unlink()

class Scheduler(BaseScheduler):
    def shutdown(self, wait=True): ...
    def wakeup(self): ...

def add(store):
    scheduler = Scheduler(timezone=timezone.utc)
    job = scheduler.add_job(work, "date", run_date=datetime(2013, 1, 1), id="job")
    job._modify(next_run_time=job.trigger.run_date, **DEFAULTS)
    store.add_job(job)

DEFAULTS = {"misfire_grace_time": 1, "coalesce": True, "max_instances": 1}
NOW = datetime(2014, 1, 1, tzinfo=timezone.utc)

@pytest.mark.parametrize("kind", ["sqlalchemy"])
def test_a_job_is_due(store, kind):
    assert store.get_next_run_time() is None
    add(store)
    assert [job.id for job in store.get_due_jobs(NOW)] == ["job"]
    assert store.get_next_run_time() == datetime(2013, 1, 1, tzinfo=timezone.utc)

@pytest.mark.parametrize("kind", ["sqlalchemy"])
def test_a_job_is_found(store, kind):
    add(store)
    assert [job.id for job in store.get_all_jobs()] == ["job"]

@pytest.mark.parametrize("kind", ["memory"])
def test_that_is_of_another_store(kind): assert 1 == 2
"""


def listed(test: str) -> Difference:
    return Difference((f"test_it.py::{test}",), "assert 1 == 2", "a reason", "a/page.md")


@pytest.fixture
def passes(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Run a suite of one module."""

    def passes(
        tests: str,
        *differences: Difference,
        left_out: tuple[LeftOut, ...] = (),
        **options: Any,
    ) -> bool:
        (tmp_path / "tests").mkdir()
        (tmp_path / "tests/test_it.py").write_text(tests)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        monkeypatch.setattr(foreign, "unpacked", lambda _project, _cache: tmp_path)
        executors = frozenset({"ThreadPoolExecutor"})
        given = {"sdist": "some-suite==1", **options}
        suite = Suite(
            tests=("test_it.py",),
            executors=executors,
            differences=differences,
            left_out=left_out,
            **given,
        )
        return foreign.passes(suite, server, [])

    return passes


def test_jobs_run_under_claims_and_what_is_listed_fails_or_is_left_out(
    passes: Callable[..., bool], capfd: pytest.CaptureFixture[str]
) -> None:
    tests = (
        RUNS_JOBS
        + """
def test_that_is_different(): assert 1 == 2

def test_that_cannot_be_run(): assert 1 == 3
"""
    )
    left_out = (LeftOut("test_it.py::test_that_cannot*", "a reason"),)
    assert passes(tests, listed("test_that_is*"), left_out=left_out)
    said = capfd.readouterr().out
    assert "2 passed, 1 deselected, 1 xfailed" in said
    assert "{'ThreadPoolExecutor': 2}; runs under a claim: 2" in said


def test_what_is_not_as_it_is_listed_fails(
    passes: Callable[..., bool], capfd: pytest.CaptureFixture[str]
) -> None:
    tests = """
def test_unlisted(): assert 1 == 2

def test_same(): ...

def test_another_way(): raise ValueError("3")

def test_set_up(nothing): ...
"""
    assert not passes(tests, *map(listed, ("test_same", "test_another_way", "test_set_up")))
    said = capfd.readouterr().out
    assert "3 failed, 1 error" in said
    assert "[XPASS(strict)] a reason" in said
    assert "in its call, and not with 'assert 1 == 2':" in said
    assert "in its setup, and not with 'assert 1 == 2':" in said


def test_a_listed_test_has_to_be_there(
    passes: Callable[..., bool], capfd: pytest.CaptureFixture[str]
) -> None:
    assert not passes("def test_it(): ...", listed("test_gone"))
    assert "lists tests that are not there: ['test_it.py::test_gone']" in capfd.readouterr().err


def test_a_suite_has_to_give_each_executor_a_job_and_claim_a_task(
    passes: Callable[..., bool], capfd: pytest.CaptureFixture[str]
) -> None:
    assert not passes("def test_nothing(): ...")
    said = capfd.readouterr().out
    assert "1 passed" in said
    assert "no task was claimed" in said
    assert "no job was given to ThreadPoolExecutor" in said


STORE = {"store": {"functions": ["test_it.work"]}, "only": "*sqlalchemy*"}


def test_jobs_are_kept_by_the_job_store_and_none_is_due(
    passes: Callable[..., bool], capfd: pytest.CaptureFixture[str]
) -> None:
    none_due = Difference(("test_it.py::test_a_job_is_due[*",), r"assert \[\] == \['job'\]", "", "")
    assert passes(STORES_JOBS, none_due, **STORE)
    said = capfd.readouterr().out
    assert "1 passed, 1 deselected, 1 xfailed" in said
    assert "jobs found in the database: 2" in said


def test_what_a_replica_reads_can_stand_for_what_is_due(
    passes: Callable[..., bool], capfd: pytest.CaptureFixture[str]
) -> None:
    assert passes(STORES_JOBS, due=True, **STORE)
    assert "2 passed, 1 deselected" in capfd.readouterr().out


def test_a_suite_of_job_stores_has_to_leave_a_job_in_the_database() -> None:
    suite = Suite("apscheduler==3.11.3", (), **STORE)
    used = {"apscheduler": "3.11.3", "submitted": {}}
    assert foreign.was_used(suite, "", {**used, "stored": 1})
    assert not foreign.was_used(suite, "", {**used, "stored": 0})


def test_a_suite_has_to_run_with_the_apscheduler_that_it_is_of(
    capfd: pytest.CaptureFixture[str],
) -> None:
    used = {"apscheduler": "3.11.3", "submitted": {}, "stored": 1}
    assert not foreign.was_used(Suite("apscheduler==3.10.4", (), **STORE), "", used)
    assert "of apscheduler==3.10.4 were run with APScheduler 3.11.3" in capfd.readouterr().out
