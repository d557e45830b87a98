"""Lock options in a persistent job store, with its pickled jobs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore

from apscheduler_tasklock import task_lock
from tests.support.polling import eventually
from tests.support.schedulers import Replica

pytestmark = pytest.mark.direct("APScheduler's job store prepares statements of its own")

Connection = psycopg.Connection[Any]
SOON = timedelta(0)


def takes_anything(**_: Any) -> None: ...


@task_lock(min_factor=0.5)
def decorated() -> None: ...


def min_lock(connection: Connection, task: str = "job") -> timedelta | None:
    found = connection.execute(
        "SELECT window_until - window_start FROM task_lock WHERE task_name = %s", [task]
    ).fetchone()
    return found[0] if found else None


@pytest.fixture
def replica(database_url: str) -> Iterator[Replica]:
    """A replica whose jobs are pickled into the test's database."""
    store = SQLAlchemyJobStore(database_url.replace("postgresql://", "postgresql+psycopg://"))
    replica = Replica(database_url)
    replica.scheduler.add_jobstore(store)
    replica.start()
    yield replica
    replica.shutdown()
    store.engine.dispose()


def fire(replica: Replica, job_id: str = "job") -> None:
    """Let the stored job fire now, and wait for it."""
    replica.events.clear()
    replica.scheduler.modify_job(job_id, next_run_time=datetime.now(timezone.utc))
    replica.one(EVENT_JOB_EXECUTED, job_id)
    replica.idle()


def test_options_in_kwargs_survive_pickling_modify_reschedule_and_replace(
    replica: Replica, connection: Connection
) -> None:
    stored: dict[str, Any] = {"id": "job", "misfire_grace_time": None, "replace_existing": True}
    replica.scheduler.add_job(
        takes_anything, "interval", hours=1, kwargs={"task_lock": {"min_factor": 0.25}}, **stored
    )
    fire(replica)
    assert min_lock(connection) == timedelta(minutes=15)

    connection.execute("DELETE FROM task_lock")
    replica.scheduler.reschedule_job("job", trigger="interval", hours=2)
    fire(replica)
    assert min_lock(connection) == timedelta(minutes=30)

    connection.execute("DELETE FROM task_lock")
    replica.scheduler.modify_job("job", kwargs={"task_lock": {"min_lock": 77}})
    fire(replica)
    assert min_lock(connection) == timedelta(seconds=77)

    connection.execute("DELETE FROM task_lock")
    replica.scheduler.add_job(
        takes_anything, "interval", hours=1, kwargs={"task_lock": {"min_lock": 88}}, **stored
    )
    fire(replica)
    assert min_lock(connection) == timedelta(seconds=88)


def test_a_decorated_function_is_found_by_its_reference(
    replica: Replica, connection: Connection
) -> None:
    replica.scheduler.add_job(decorated, "interval", hours=1, id="job", misfire_grace_time=None)
    fire(replica)
    assert min_lock(connection) == timedelta(minutes=30)


def test_a_job_added_without_an_id_keeps_the_one_it_got(
    replica: Replica, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """All replicas see it under that id, so its task has it as its name."""
    job = replica.scheduler.add_job(takes_anything, "interval", hours=1, misfire_grace_time=None)
    fire(replica, job.id)
    assert eventually(lambda: min_lock(connection, job.id))
    assert "without an id" not in caplog.text


def test_a_job_without_an_id_starts_beside_a_new_persistent_store(
    database_url: str, connection: Connection
) -> None:
    """Its namesakes are looked for in memory only; the other store's table is not there yet."""
    store = SQLAlchemyJobStore(database_url.replace("postgresql://", "postgresql+psycopg://"))
    replica = Replica(database_url)
    replica.scheduler.add_jobstore(store, "db")
    every = {"seconds": 1, "misfire_grace_time": None}
    job = replica.scheduler.add_job(takes_anything, "interval", **every)
    replica.start()
    eventually(lambda: EVENT_JOB_EXECUTED in replica.codes(job.id))
    replica.shutdown()
    store.engine.dispose()
    names = connection.execute("SELECT task_name FROM task_lock WHERE kind IS NOT NULL").fetchall()
    assert len(names) == 1
    assert names[0][0].startswith(f"{__name__}:takes_anything-")
