"""One-off jobs: without an id each is its replica's own, unless all replicas can name it."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.triggers.date import DateTrigger
from sqlalchemy import Engine

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockJobStore,
    current_lock,
    task_lock,
)
from tests.support.commands import PATIENT
from tests.support.internals import deferred_run_times
from tests.support.outages import Job
from tests.support.polling import eventually
from tests.support.pool_jobs import wait_for
from tests.support.schedulers import Replica

MakeReplica = Callable[..., Replica]
Connection = psycopg.Connection[Any]

OWN = [EVENT_JOB_EXECUTED]
LOCKED = [EVENT_TASK_LOCK_GRANTED, EVENT_JOB_EXECUTED, EVENT_TASK_LOCK_RELEASED]


@pytest.fixture
def make_replica(make_replica: MakeReplica) -> MakeReplica:
    """Make and start a replica. It waits for its connection with patience, else it warns."""

    def make(**options: Any) -> Replica:
        return make_replica(**{"claim_timeout": 180, "timings": PATIENT, **options})

    return make


def ago(seconds: float, **fields: Any) -> datetime:
    """Return a moment before now, on a whole second unless ``microsecond`` says otherwise."""
    moment = datetime.now(timezone.utc) - timedelta(seconds=seconds)
    return moment.replace(**{"microsecond": 0, **fields})


def on_a_whole_second(**options: Any) -> dict[str, Any]:
    """Return the arguments of a one-off job that is due, whose date is a whole second."""
    return {"trigger": "date", "run_date": ago(1), "misfire_grace_time": None, **options}


def names(connection: Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT task_name FROM task_lock").fetchall()]


def windows(connection: Connection) -> dict[str, timedelta]:
    statement = "SELECT task_name, window_until - window_start FROM task_lock"
    return dict(connection.execute(statement).fetchall())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def lock_name(*_args: Any, **_kwargs: Any) -> str | None:
    """Return the name of the lock that this job holds."""
    lock = current_lock()
    return None if lock is None else lock.name


def takes_one(_value: Any) -> str | None:
    return lock_name()


def alike() -> str | None:
    return lock_name()


@task_lock(max_factor=3, failover=True)
def decorated() -> str | None:
    return lock_name()


@task_lock
def marked() -> str | None:
    return lock_name()


class Mailer:
    def send(self) -> str | None:
        return lock_name()

    @classmethod
    def send_all(cls) -> str | None:
        return lock_name()

    def __call__(self) -> str | None:
        return lock_name()


def made_for(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Decorate a function as many do: what is returned is called the same."""

    def call() -> Any:
        return function(*names)

    call.__qualname__, call.__module__ = function.__qualname__, function.__module__
    return call


def _for_city(city: str) -> Callable[..., Any]:
    def call(_city: str = city) -> str | None:
        return lock_name()

    call.__qualname__ = "for_city"
    return call


# A module that defines one function again and again; it has the last one.
CITIES = [for_city := _for_city(city) for city in ("Paris", "Rome", "Oslo")]


def calls(function: Callable[[], Any]) -> Callable[[], Any]:
    """Decorate a function as `create_app()` does, where nothing has a name of its module."""

    @functools.wraps(function)
    def call() -> Any:
        return function()

    return call


class OwnDate(DateTrigger):
    pass


def ended(replica: Replica, *jobs: Any) -> list[Any]:
    """Wait until each job has run, and return what each has returned."""
    events = [replica.one(EVENT_JOB_EXECUTED, job.id) for job in jobs]
    replica.idle()
    return [event.retval for event in events]


def codes(replica: Replica, *jobs: Any) -> list[list[int]]:
    """Wait until each job was run or refused, and return what was told of each."""
    for job in jobs:
        eventually(lambda job=job: replica.of(job.id))
    replica.idle()
    return [replica.codes(job.id) for job in jobs]


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(dict, id="now"),
        pytest.param(
            lambda: {"run_date": datetime.now() + timedelta(milliseconds=50)}, id="a-moment-later"
        ),
        pytest.param(lambda: {"id": uuid4().hex}, id="uuid4-as-id"),
        pytest.param(lambda: {"args": [object()]}, id="object"),
        pytest.param(lambda: {**on_a_whole_second(), "args": [object()]}, id="object-and-date"),
        pytest.param(lambda: {**on_a_whole_second(), "args": [Mailer()]}, id="customer-and-date"),
    ],
)
def test_one_job_added_again_and_again_without_an_id_runs_each_time(
    make_replica: MakeReplica,
    connection: Connection,
    caplog: pytest.LogCaptureFixture,
    given: Callable[[], dict[str, Any]],
) -> None:
    replica = make_replica()
    jobs = []
    for _ in range(3):
        options = {"args": ["x"], "misfire_grace_time": None, **given()}
        jobs.append(replica.scheduler.add_job(takes_one, **options))
        ended(replica, jobs[-1])
    assert ended(replica, *jobs) == [None] * 3
    assert codes(replica, *jobs) == [OWN] * 3
    assert names(connection) == []
    assert warnings(caplog) == []


def different() -> list[dict[str, Any]]:
    """Return one-off jobs of one date that differ in something, as applications add them."""
    functions: list[Any] = [
        alike,
        lambda: lock_name("one"),
        lambda: lock_name("other"),
        *(lambda n=n: lock_name(n) for n in range(2)),
        *(made_for(takes_one, name) for name in ("a", "b")),
        *CITIES,
        *(task_lock(lambda n=n: lock_name(n)) for n in range(2)),
        *(calls(lambda n=n: lock_name(n)) for n in range(2)),
        partial(takes_one, 1),
        partial(takes_one, 2),
        partial(takes_one, object()),
        partial(takes_one, object()),
        Mailer().send,
        Mailer().send,
        Mailer.send_all,
        Mailer(),
        Mailer(),
    ]
    jobs: list[dict[str, Any]] = [{"func": function} for function in functions]
    jobs += [{"func": takes_one, "args": [value]} for value in (3, "3", [3], {"a": 3})]
    jobs += [{"func": takes_one, "kwargs": {"_value": value}} for value in (3, Mailer())]
    date = ago(1)
    each = [{"trigger": "date", "run_date": date, **job} for job in jobs]
    return [
        *each,
        {"func": alike, "trigger": "date", "run_date": ago(2)},
        {"func": alike, "trigger": "date", "run_date": ago(1, microsecond=1)},
        {"func": alike, "trigger": "date", "run_date": ago(1, microsecond=2)},
        {"func": alike, "trigger": OwnDate(date)},
        {"func": alike, "trigger": OwnDate(ago(3))},
        {"func": alike},
    ]


def test_all_different_ones_run(
    make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_replica()
    replica.scheduler.pause()
    jobs = [replica.scheduler.add_job(**{"misfire_grace_time": None, **job}) for job in different()]
    replica.scheduler.resume()
    ended(replica, *jobs)
    assert warnings(caplog) == []


def test_ones_that_are_added_before_the_start_run(make_replica: MakeReplica) -> None:
    replica = make_replica(start=False)
    jobs = [
        replica.scheduler.add_job(takes_one, args=["x"], misfire_grace_time=None) for _ in range(3)
    ]
    replica.scheduler.start()
    assert ended(replica, *jobs) == [None] * 3


@pytest.mark.parametrize(
    "job",
    [
        pytest.param({"func": alike}, id="function"),
        pytest.param({"func": f"{__name__}:alike"}, id="text"),
        pytest.param({"func": takes_one, "args": ["x"]}, id="argument"),
        pytest.param({"func": partial(takes_one, {"a": [1, None]})}, id="partial"),
        pytest.param({"func": Mailer.send_all}, id="class-method"),
        pytest.param({"func": lambda: lock_name()}, id="lambda"),  # noqa: PLW0108  # it is the case
        pytest.param({"func": lambda n=1: lock_name(n)}, id="lambda-with-default"),
        pytest.param({"func": decorated}, id="decorated"),
        pytest.param({"func": task_lock(lambda: lock_name(1))}, id="decorated-lambda"),
        pytest.param({"func": calls(alike)}, id="nested"),
        pytest.param({"func": CITIES[0]}, id="defined-anew"),
        pytest.param({"func": alike, "timezone": "UTC"}, id="zone"),
    ],
)
def test_the_same_one_on_a_whole_second_is_one_task_on_all_replicas(
    make_replica: MakeReplica,
    connection: Connection,
    caplog: pytest.LogCaptureFixture,
    job: dict[str, Any],
) -> None:
    date = ago(1)
    told = []
    for zone in ("Asia/Tokyo", "UTC"):
        replica = make_replica()
        local = date.astimezone(ZoneInfo(zone))
        added = replica.scheduler.add_job(**on_a_whole_second(**job, run_date=local))
        told += codes(replica, added)
    assert told == [LOCKED, [EVENT_TASK_LOCK_REFUSED]]
    assert len(names(connection)) == 1
    assert warnings(caplog) == []


def test_a_whole_second_is_run_once_however_late_it_is_asked_for(
    make_replica: MakeReplica, connection: Connection
) -> None:
    told = []
    day_before = ago(86400)
    for _ in range(2):
        replica = make_replica()
        job = replica.scheduler.add_job(alike, **on_a_whole_second(run_date=day_before))
        told += codes(replica, job)
    assert told == [LOCKED, [EVENT_TASK_LOCK_REFUSED]]
    assert list(windows(connection).values()) == [timedelta(seconds=60)]


def test_two_that_are_alike_in_one_scheduler_run_once_with_a_warning(
    make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_replica()
    replica.scheduler.pause()
    date = ago(1)
    jobs = [replica.scheduler.add_job(alike, **on_a_whole_second(run_date=date)) for _ in range(2)]
    replica.scheduler.resume()
    assert sorted(codes(replica, *jobs)) == sorted([LOCKED, [EVENT_TASK_LOCK_REFUSED]])
    [warning] = warnings(caplog)
    assert all(job.id in warning for job in jobs)
    assert "Give each an id" in warning
    assert "another id" not in warning


@pytest.mark.parametrize(
    "options", [{"name": "mail"}, {"name": "mail", "failover": True}], ids=["name", "and-more"]
)
def test_one_with_a_name_has_a_lock(
    make_replica: MakeReplica, connection: Connection, options: dict[str, Any]
) -> None:
    replica = make_replica()
    job = replica.scheduler.add_job(
        lock_name, kwargs={"task_lock": options}, misfire_grace_time=None
    )
    assert ended(replica, job) == ["mail"]
    assert names(connection) == ["mail"]


@pytest.mark.parametrize(
    ("function", "kwargs", "told"),
    [
        pytest.param(
            lock_name,
            {"task_lock": {"failover": True, "max_lock": 60}},
            "failover, max_lock",
            id="kwargs",
        ),
        pytest.param(decorated, {}, "failover, max_factor", id="decorator"),
        pytest.param(lock_name, {"task_lock": {"lease": None}}, "lease", id="lease"),
    ],
)
def test_options_that_a_job_without_a_lock_cannot_have_are_told_of_once(
    make_replica: MakeReplica,
    connection: Connection,
    caplog: pytest.LogCaptureFixture,
    function: Any,
    kwargs: Any,
    told: str,
) -> None:
    replica = make_replica()
    for _ in range(2):
        job = replica.scheduler.add_job(function, kwargs=kwargs, misfire_grace_time=None)
        assert ended(replica, job) == [None]
    [warning] = warnings(caplog)
    assert f"its lock options ({told}) have no effect" in warning
    assert "its date has fractions of a second" in warning
    assert "Give it an id in add_job(..., id=...), or the option 'name'" in warning
    assert names(connection) == []


@pytest.mark.parametrize(
    ("function", "kwargs"),
    [
        pytest.param(marked, {}, id="mark"),
        pytest.param(lock_name, {"task_lock": {}}, id="empty"),
        pytest.param(lock_name, {"task_lock": False}, id="no-lock"),
    ],
)
def test_without_options_of_its_own_nothing_is_told_of_it(
    make_replica: MakeReplica, caplog: pytest.LogCaptureFixture, function: Any, kwargs: Any
) -> None:
    replica = make_replica(failover=True, max_factor=3)
    job = replica.scheduler.add_job(function, kwargs=kwargs, misfire_grace_time=None)
    assert ended(replica, job) == [None]
    assert warnings(caplog) == []


def test_that_it_runs_without_a_lock_is_told_once_for_a_function(
    make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "apscheduler_tasklock")
    replica = make_replica()
    jobs = [
        replica.scheduler.add_job(function, args=["hunter2"], misfire_grace_time=None)
        for function in (takes_one, lock_name, takes_one)
    ]
    ended(replica, *jobs)
    told = [r for r in caplog.records if "run here, without a lock" in r.getMessage()]
    assert sorted(r.levelname for r in told) == ["DEBUG", "INFO", "INFO"]
    assert {job.id for job in jobs} == {r.getMessage().split()[1] for r in told}
    assert all("as on each replica that adds it" in r.getMessage() for r in told)
    assert ["takes_one" in r.getMessage() for r in told if r.levelno == logging.DEBUG] == [True]
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("executor", ["threadpool", "processpool"])
def test_ones_that_wait_for_a_worker_at_a_shutdown_run(
    make_replica: MakeReplica, tmp_path: Path, executor: str
) -> None:
    """No other replica could run them."""
    go_on = tmp_path / "go on"
    replica = make_replica(executor=executor, max_workers=1)
    jobs = [
        replica.scheduler.add_job(function, args=[str(go_on)], misfire_grace_time=None)
        for function in (wait_for, *[takes_one] * 4)
    ]
    replica.finish_pass()
    eventually(lambda: replica.scheduler.get_jobs() == [])
    stopping = threading.Thread(target=replica.scheduler.shutdown)
    stopping.start()
    eventually(lambda: replica.executor.locks.closed)
    go_on.touch()
    stopping.join(60)
    ended(replica, *jobs)


# Job stores


def test_in_a_persistent_store_it_is_a_task_of_its_id(
    engine: Engine, make_replica: MakeReplica
) -> None:
    replica = make_replica(start=False)
    replica.scheduler.add_jobstore(SQLAlchemyJobStore(engine=engine), "stored")
    replica.scheduler.start()
    jobs = [
        replica.scheduler.add_job(takes_one, args=["x"], jobstore="stored", misfire_grace_time=None)
        for _ in range(3)
    ]
    for job in jobs:
        eventually(lambda job=job: replica.of(job.id))
    assert ended(replica, *jobs) == [f"stored:{job.id}" for job in jobs]


def test_in_the_shared_store_each_runs_once_on_one_of_the_replicas(
    make_replica: MakeReplica, database_url: str
) -> None:
    replicas = []
    for _ in range(2):
        replica = make_replica(start=False)
        store = TaskLockJobStore(database_url, functions=[__name__], poll_interval=0.1)
        replica.scheduler.add_jobstore(store)
        replica.scheduler.start()
        replicas.append(replica)
    jobs = [replicas[0].scheduler.add_job(takes_one, args=["x"]) for _ in range(3)]

    def runs(job: Any) -> list[Any]:
        return [
            event.retval
            for replica in replicas
            for event in replica.of(job.id)
            if event.code == EVENT_JOB_EXECUTED
        ]

    for job in jobs:
        assert eventually(partial(runs, job)) == [job.id]


# Lock times


@pytest.mark.parametrize(
    ("executor", "job", "window"),
    [
        pytest.param({}, {}, 60, id="default"),
        pytest.param({"period": 7200}, {}, 60, id="period"),
        pytest.param({"max_factor": 2}, {"max_factor": 0.5}, 60, id="max-factor"),
        pytest.param({}, {"max_lock": 30}, 60, id="max-lock"),
        pytest.param({"min_factor": 0.9}, {}, 3240, id="executor"),
        pytest.param({"min_factor": "0.9"}, {}, 3240, id="configuration-file"),
        pytest.param({"jobs": {"job": {"min_lock": 5}}}, {}, 5, id="jobs"),
        pytest.param({}, {"min_factor": 0.5}, 1800, id="kwargs-factor"),
        pytest.param({"min_factor": 0.9}, {"min_lock": 7}, 7, id="kwargs-time"),
    ],
)
def test_its_minimum_lock_is_a_minute_unless_one_is_given(
    make_replica: MakeReplica,
    connection: Connection,
    executor: dict[str, Any],
    job: dict[str, Any],
    window: float,
) -> None:
    replica = make_replica(**executor)
    added = replica.scheduler.add_job(
        lock_name, id="job", kwargs={"task_lock": job}, misfire_grace_time=None
    )
    ended(replica, added)
    assert windows(connection) == {"job": timedelta(seconds=window)}


def test_its_maximum_lock_comes_from_the_option_period(
    make_replica: MakeReplica, connection: Connection
) -> None:
    replica = make_replica(period=7200)
    ended(replica, replica.scheduler.add_job(alike, id="job", misfire_grace_time=None))
    [(longest,)] = connection.execute("SELECT run_until - started_at FROM task_lock").fetchall()
    assert longest == timedelta(seconds=5 * 7200)


def test_an_id_that_is_used_again_a_minute_later_runs_again(make_replica: MakeReplica) -> None:
    replica = make_replica()
    for before, told in ((90, 3), (29, 6), (5, 7)):
        moment = ago(before, microsecond=500_000)
        replica.scheduler.add_job(alike, "date", run_date=moment, id="job", misfire_grace_time=None)
        eventually(lambda told=told: len(replica.of()) == told)
        replica.idle()
    assert replica.codes() == [*LOCKED, *LOCKED, EVENT_TASK_LOCK_REFUSED]


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        pytest.param({}, "Give the job another id, or a shorter min_lock", id="id"),
        pytest.param(
            {"name": "mail"}, "Give the job another name, or a shorter min_lock", id="name"
        ),
    ],
)
def test_one_that_is_refused_for_its_window_names_a_remedy_that_there_is(
    make_replica: MakeReplica,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    remedy: str,
) -> None:
    replica = make_replica()
    kwargs = {"task_lock": options}
    for told in (3, 4, 5):
        replica.scheduler.add_job(lock_name, id="job", kwargs=kwargs, misfire_grace_time=None)
        eventually(lambda told=told: len(replica.of()) == told)
        replica.idle()
        replica.finish_pass()  # until it has removed the job
    assert replica.codes() == [*LOCKED, *[EVENT_TASK_LOCK_REFUSED] * 2]
    [warning] = warnings(caplog)
    assert remedy in warning
    assert "skipped the run time" in warning


def test_one_of_an_id_that_another_replica_used_is_told_of_at_info(
    make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "apscheduler_tasklock")
    for before in (30, 10):
        replica = make_replica()
        moment = ago(before, microsecond=500_000)
        job = replica.scheduler.add_job(
            alike, "date", run_date=moment, id="job", misfire_grace_time=None
        )
        codes(replica, job)
    [line] = [r for r in caplog.records if "skipped the run time" in r.getMessage()]
    assert line.levelno == logging.INFO


def test_one_that_is_refused_since_another_date_of_its_id_still_runs_is_told_of(
    make_replica: MakeReplica, caplog: pytest.LogCaptureFixture, job: Job
) -> None:
    one, other = make_replica(), make_replica()
    options = {"id": "job", "misfire_grace_time": None}
    one.scheduler.add_job(job.run, "date", run_date=ago(90), **options)
    job.begun.wait(60)
    other.scheduler.add_job(alike, "date", run_date=ago(1), **options)
    eventually(lambda: deferred_run_times(other.executor))
    [warning] = warnings(caplog)
    assert "is not run, because" in warning
    assert "still runs the task" in warning


# Whatever runs them


def test_with_locks_off_it_runs(make_replica: MakeReplica, connection: Connection) -> None:
    replica = make_replica(enabled=False)
    jobs = [
        replica.scheduler.add_job(takes_one, args=["x"], misfire_grace_time=None) for _ in range(3)
    ]
    assert ended(replica, *jobs) == [None] * 3
