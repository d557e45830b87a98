"""Outages that a proxy makes, a job that runs through them, and their log lines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from apscheduler_tasklock import EVENT_TASK_LOCK_REFUSED, current_lock
from apscheduler_tasklock.lock import HeldLock
from tests.support.polling import eventually
from tests.support.proxy import Proxy, pass_on
from tests.support.schedulers import Replica

UNAVAILABLE = "The task lock database is unavailable"
BACK = "The task lock database is back"

# The lock times of an hourly job.
HOURLY = {"min_lock": 3240, "max_lock": 18000}
# The function reference of `Job.run`, which a takeover compares.
RUNS = f"{__name__}:Job.run"


class Job:
    """A job that runs until its gate is opened, and counts its runs.

    :ivar lock: the lock of its last run; ``None``: it has none
    """

    def __init__(self) -> None:
        self.runs = 0
        self.lock: HeldLock | None = None
        self.begun, self.go_on = threading.Event(), threading.Event()

    def run(self) -> None:
        self.runs += 1
        self.lock = current_lock()
        self.begun.set()
        assert self.go_on.wait(60)


def refuse(proxy: Proxy) -> None:
    """Reject connections, like a server that is down."""
    proxy.accepting = False
    proxy.cut_all()


def swallow(proxy: Proxy) -> None:
    """Swallow all data, like a network that loses all packets."""
    proxy.to_client = proxy.to_server = lambda _data: b""


def restore(proxy: Proxy) -> None:
    proxy.to_client = proxy.to_server = pass_on
    proxy.accepting = True


def why_unavailable(replica: Replica) -> str | None:
    """Return why the database is unavailable, as the replica knows it."""
    found: str | None = replica.executor.user.outage.reason
    return found


def count_looks(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Return a list that grows with each answered look of a replica for dead runs."""
    looks: list[Sequence[str]] = []
    database = replica.executor.user.database
    reading = database.reading

    def count(names: Sequence[str], always: Sequence[str] = ()) -> Any:
        read = reading(names, always)

        def counted(cursor: Any) -> Any:
            found = read(cursor)
            looks.append(names)
            return found

        return counted

    monkeypatch.setattr(database, "reading", count)
    return looks


def until_looked(looks: Sequence[object]) -> None:
    """Wait for some more looks, so that the findings of the first one were handled."""
    before = len(looks)
    # The first look may be under way already.
    eventually(lambda: len(looks) > before + 2)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines about the database."""
    told = [record.getMessage().split(" (")[0] for record in caplog.records]
    return [message for message in told if message in (UNAVAILABLE, BACK)]


def said_by_its_end(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Wait for the log line of the outage's end, and return the log lines about the database."""
    eventually(lambda: BACK in said(caplog))
    return said(caplog)


def refused(
    make_replica: Callable[..., Replica], job: Job, *urls: str, **options: Any
) -> list[Replica]:
    """Return a replica that runs the job, and a refused one that could take the run over."""
    replicas = []
    for url, name in zip(urls, ("holder", "other"), strict=True):
        replica = make_replica(url, replica_id=name, claim_timeout=3, **options)
        replica.run_once(job.run)
        assert job.begun.wait(60)
        replicas.append(replica)
    replicas[1].one(EVENT_TASK_LOCK_REFUSED)
    return replicas
