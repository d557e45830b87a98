"""The job store that all replicas share, on each kind of scheduler and executor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, EVENT_JOB_MISSED

from tests.executors.conftest import Jobs
from tests.support.hosts import Host
from tests.support.polling import eventually
from tests.support.programs import need_qt
from tests.support.stored_jobs import StoreReplica

MakeStore = Callable[..., StoreReplica]


@pytest.fixture
def make_store(host: Host, database_url: str) -> Iterator[MakeStore]:
    """Make and start a replica with the job store on the host; it is shut down after the test."""
    with ExitStack() as closing:

        def make(**options: Any) -> StoreReplica:
            replica = StoreReplica(database_url, host=host, **host.executor, **options)
            replica.start()
            closing.callback(replica.shutdown)
            return replica

        yield make


def test_of_two_replicas_one_runs_the_job_under_its_lock(
    make_store: MakeStore, host: Host, job: Jobs
) -> None:
    replicas = [make_store(), make_store()]
    now = datetime.now(timezone.utc)
    replicas[0].scheduler.add_job(job("token"), "date", run_date=now, id="job")
    replicas[0].scheduler.add_job(
        job("token"), "interval", hours=1, next_run_time=now, id="again", misfire_grace_time=None
    )
    for job_id in ("job", "again"):

        def executed(job_id: str = job_id) -> list[Any]:
            return [e for r in replicas for e in r.of(job_id) if e.code == EVENT_JOB_EXECUTED]

        [event] = eventually(executed)
        token, _ = event.retval
        assert token > 0
    eventually(lambda: [j.id for j in replicas[1].scheduler.get_jobs()] == ["again"])


def test_what_is_missed_and_what_fails_is_told(
    make_store: MakeStore, host: Host, job: Jobs
) -> None:
    replica = make_store(job_defaults={})
    late = datetime.now(timezone.utc) - timedelta(minutes=5)
    replica.scheduler.add_job(job("token"), "date", run_date=late, id="job", misfire_grace_time=60)
    replica.one(EVENT_JOB_MISSED)
    replica.scheduler.add_job(job("fail"), "date", run_date=late, id="fails")
    assert str(replica.one(EVENT_JOB_ERROR, "fails").exception) == "on purpose"
    eventually(lambda: replica.scheduler.get_jobs() == [])


QT = """
import os
from datetime import datetime, timezone
from PySide6.QtCore import QCoreApplication
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.schedulers.qt import QtScheduler
from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore

application = QCoreApplication([])
url = os.environ["DATABASE_URL"]
scheduler = QtScheduler(
    jobstores={"default": TaskLockJobStore(url, functions=["tests."])},
    executors={"default": TaskLockExecutor(url)},
    timezone="UTC",
)
scheduler.add_listener(lambda event: application.quit(), EVENT_JOB_EXECUTED)
due = {"run_date": datetime.now(timezone.utc), "misfire_grace_time": None}
scheduler.add_job("tests.executors.jobs:token", "date", id="a", **due)
scheduler.start()
application.exec()
scheduler.shutdown()
print("ran")
"""


def test_on_qt(database_url: str, checkout: Path) -> None:
    need_qt()
    finished = subprocess.run(
        [sys.executable, "-c", QT],
        cwd=checkout,
        env={**os.environ, "DATABASE_URL": database_url, "QT_QPA_PLATFORM": "offscreen"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == "ran"
    assert "QObject" not in finished.stderr
