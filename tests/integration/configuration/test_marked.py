"""``lock="marked"``: only jobs that say so have a lock, and all others run on every replica."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import (
    HeldLock,
    TaskLockExecutor,
    TaskLockOptionError,
    current_lock,
    task_lock,
)
from tests.support.polling import eventually
from tests.support.schedulers import DAILY, NO_DATABASE, Replica
from tests.support.stored_jobs import note, ran, store_replicas

MakeReplica = Callable[..., Replica]


def plain() -> HeldLock | None:
    return current_lock()


def with_kwargs(**_: Any) -> HeldLock | None:
    return current_lock()


@task_lock
def decorated() -> HeldLock | None:
    return current_lock()


@task_lock(max_factor=2)
def with_options() -> HeldLock | None:
    return current_lock()


@task_lock(False)
def without_a_lock() -> HeldLock | None:
    return current_lock()


MARKED: list[Any] = [
    pytest.param(decorated, {}, {}, id="decorator"),
    pytest.param(with_options, {}, {}, id="decorator-with-options"),
    pytest.param(partial(decorated), {}, {}, id="partial"),
    pytest.param(with_kwargs, {"task_lock": {}}, {}, id="kwargs"),
    pytest.param(with_kwargs, {"task_lock": {"lease": 60}}, {}, id="kwargs-with-options"),
    pytest.param(plain, {}, {"job": {}}, id="jobs"),
    pytest.param(plain, {}, {"job": {"max_factor": 2}}, id="jobs-with-options"),
    pytest.param(without_a_lock, {"task_lock": {}}, {}, id="kwargs-over-the-decorator"),
]
UNMARKED: list[Any] = [
    pytest.param(plain, {}, {}, id="nothing"),
    pytest.param(plain, {}, {"another": {}}, id="jobs-of-another"),
    pytest.param(with_kwargs, {"task_lock": None}, {}, id="none"),
    pytest.param(without_a_lock, {}, {}, id="decorator-false"),
    pytest.param(decorated, {"task_lock": False}, {}, id="kwargs-false"),
    pytest.param(decorated, {}, {"job": False}, id="jobs-false"),
]


@pytest.mark.parametrize(("function", "kwargs", "jobs"), MARKED)
def test_a_marked_job_has_a_lock(
    make_replica_in_memory: MakeReplica,
    function: Callable[..., Any],
    kwargs: dict[str, Any],
    jobs: dict[str, Any],
) -> None:
    replica = make_replica_in_memory(lock="marked", jobs=jobs)
    replica.run_once(function, kwargs=kwargs)
    assert isinstance(replica.one(EVENT_JOB_EXECUTED).retval, HeldLock)


@pytest.mark.parametrize(("function", "kwargs", "jobs"), UNMARKED)
def test_any_other_job_runs_on_each_replica_without_one(
    make_replica_in_memory: MakeReplica,
    function: Callable[..., Any],
    kwargs: dict[str, Any],
    jobs: dict[str, Any],
) -> None:
    for _ in range(2):
        replica = make_replica_in_memory(lock="marked", jobs=jobs)
        replica.run_once(function, kwargs=kwargs)
        assert replica.one(EVENT_JOB_EXECUTED).retval is None
        assert replica.codes() == [EVENT_JOB_EXECUTED]


def test_all_jobs_have_one_by_default(make_replica_in_memory: MakeReplica) -> None:
    replica = make_replica_in_memory()
    replica.run_once(plain)
    assert isinstance(replica.one(EVENT_JOB_EXECUTED).retval, HeldLock)


def test_only_marked_jobs_have_a_row_and_operators_see_them_alone(
    make_replica: MakeReplica, connection: psycopg.Connection[Any]
) -> None:
    replica = make_replica(lock="marked", start=False, retries=3)
    for name, function in (("plain", plain), ("decorated", decorated)):
        replica.scheduler.add_job(function, "cron", id=f"{name}-daily", **DAILY)
        replica.run_once(function, job_id=f"{name}-now")
    replica.start()
    for name in ("plain", "decorated"):
        replica.one(EVENT_JOB_EXECUTED, f"{name}-now")
    replica.idle()

    def names() -> set[str]:
        return {name for (name,) in connection.execute("SELECT task_name FROM task_lock")}

    # All tasks of a replica are registered in one statement.
    eventually(lambda: "decorated-daily" in names())
    assert names() == {"decorated-daily", "decorated-now"}


def test_a_job_without_an_id_and_without_a_mark_is_no_warning(
    make_replica_in_memory: MakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_replica_in_memory(lock="marked")
    for _ in range(2):  # with a lock, two that nothing tells apart would be an error
        replica.scheduler.add_job(plain, "interval", hours=1)
    replica.shutdown()
    assert "without an id" not in caplog.text


def test_a_stored_job_always_has_one(database_url: str) -> None:
    with store_replicas(database_url) as make:
        replica = make(lock="marked")
        replica.run_at(note, "unmarked")
        [[_, token, _]] = eventually(lambda: ran["unmarked"])
        assert token is not None
        with pytest.raises(TaskLockOptionError, match="task_lock: False makes no sense"):
            replica.run_at(note, "false", kwargs={"task_lock": False})


@pytest.mark.parametrize("lock", ["none", "", None, True, ["marked"]])
def test_any_other_value_is_an_error_when_the_executor_is_made(lock: Any) -> None:
    with pytest.raises(TaskLockOptionError, match="lock must be 'all' or 'marked', not "):
        TaskLockExecutor(NO_DATABASE, lock=lock)


def test_a_mark_that_is_no_option_is_an_error_and_not_an_unmarked_job(
    make_replica_in_memory: MakeReplica,
) -> None:
    replica = make_replica_in_memory(lock="marked", start=False)
    replica.scheduler.add_job(with_kwargs, "interval", hours=1, kwargs={"task_lock": True})
    with pytest.raises(
        TaskLockOptionError,
        match="for a lock without options of its own, give ",
    ):
        replica.start()


class TestHowManyJobsHaveOne:
    @staticmethod
    def of(replica: Replica) -> tuple[int, int]:
        health = replica.executor.health()
        return health.locked_jobs, health.unlocked_jobs

    def test_the_line_of_the_start_says_it(
        self, make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "apscheduler_tasklock")
        replica = make_replica(lock="marked", start=False)
        for number, function in enumerate((plain, decorated, without_a_lock)):
            replica.scheduler.add_job(function, "cron", id=f"job {number}", **DAILY)
        replica.start()
        [line] = [line for line in caplog.messages if line.startswith("Task locks are on")]
        assert line.endswith("; jobs so far: 1 with a lock, 2 without")

    def test_the_health_follows_the_jobs(self, make_replica_in_memory: MakeReplica) -> None:
        replica = make_replica_in_memory(lock="marked", start=False)
        scheduler = replica.scheduler
        scheduler.add_executor("threadpool", "another")
        scheduler.add_jobstore("memory", "second")
        assert self.of(replica) == (0, 0)
        scheduler.add_job(with_kwargs, "cron", id="changed", **DAILY)
        replica.start()
        assert self.of(replica) == (0, 1)
        scheduler.add_job(decorated, "cron", id="decorated", jobstore="second", **DAILY)
        scheduler.add_job(plain, "cron", id="elsewhere", executor="another", **DAILY)
        assert self.of(replica) == (1, 1)
        scheduler.modify_job("changed", kwargs={"task_lock": {}})
        assert self.of(replica) == (2, 0)
        scheduler.modify_job("changed", executor="another")
        assert self.of(replica) == (1, 0)
        scheduler.modify_job("changed", executor="default")
        scheduler.remove_job("changed")
        assert self.of(replica) == (1, 0)
        for jobstore in ("default", "second"):
            scheduler.add_job(plain, "cron", id="plain", jobstore=jobstore, **DAILY)
        assert self.of(replica) == (1, 2)
        scheduler.remove_all_jobs("second")
        assert self.of(replica) == (0, 1)

    def test_jobs_that_a_shutdown_has_dropped_count_no_more(
        self, make_replica_in_memory: MakeReplica
    ) -> None:
        replica = make_replica_in_memory()
        replica.scheduler.add_job(plain, "cron", **DAILY)
        replica.shutdown()
        replica.start()
        assert self.of(replica) == (0, 0)

    def test_jobs_that_a_store_had_before_count(
        self, make_replica_in_memory: MakeReplica, tmp_path: Any
    ) -> None:
        url = f"sqlite:///{tmp_path}/jobs"
        scheduler = BackgroundScheduler(jobstores={"default": SQLAlchemyJobStore(url)})
        scheduler.start(paused=True)
        for function in (plain, decorated):
            scheduler.add_job(function, "cron", id=function.__name__, **DAILY)
        scheduler.shutdown()
        replica = make_replica_in_memory(lock="marked", start=False)
        replica.scheduler.add_jobstore("sqlalchemy", url=url)
        replica.start()
        eventually(lambda: self.of(replica) == (1, 1))

    def test_none_has_one_where_locks_are_off(self, make_replica_in_memory: MakeReplica) -> None:
        replica = make_replica_in_memory(enabled=False)
        replica.scheduler.add_job(decorated, "cron", **DAILY)
        assert self.of(replica) == (0, 1)
