"""Servers that say no, full ones and read-only ones; and one that is restarted."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from psycopg import sql
from sqlalchemy.engine import make_url

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockDatabaseError,
    upgrade,
)
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.support.claims import LaterThan, die, held, row
from tests.support.outages import (
    BACK,
    HOURLY,
    RUNS,
    UNAVAILABLE,
    Job,
    refused,
    said,
    said_by_its_end,
    why_unavailable,
)
from tests.support.polling import eventually
from tests.support.proxy import proxy_to
from tests.support.schedulers import Replica
from tests.support.waist import LockClient

pytestmark = pytest.mark.direct("the pooler keeps connections for a role, and has no login for it")

MakeReplica = Callable[..., Replica]
Connection = psycopg.Connection[Any]


@dataclass
class Role:
    """The application's role, which the server may say no to.

    :ivar url: of the test's database, as this role
    """

    url: str
    name: str
    connection: Connection

    def set(self, statement: str) -> None:
        """Change the role, and end its connections, since most settings are for new ones."""
        role = sql.Identifier(self.name)
        self.connection.execute(sql.SQL(statement).format(role))  # type: ignore[arg-type]  # a literal of a test
        self.connection.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = %s",
            [self.name],
        )


@pytest.fixture
def role(direct_url: str, connection: Connection) -> Iterator[Role]:
    name = f"app_{secrets.token_hex(6)}"
    found = Role("", name, connection)
    found.set("CREATE ROLE {} LOGIN PASSWORD 'secret'")
    found.set("GRANT SELECT, INSERT, UPDATE ON task_lock, task_lock_run, task_lock_replica TO {}")
    url = make_url(direct_url).set(username=name, password="secret")
    found.url = url.render_as_string(hide_password=False)
    yield found
    found.set("DROP OWNED BY {}")
    found.set("DROP ROLE {}")


@pytest.fixture(params=["full", "read-only"])
def refusal(request: pytest.FixtureRequest) -> tuple[str, str]:
    """What makes the server say no, and what ends that."""
    if request.param == "full":
        return "ALTER ROLE {} CONNECTION LIMIT 0", "ALTER ROLE {} CONNECTION LIMIT -1"
    return (
        "ALTER ROLE {} SET default_transaction_read_only = on",
        "ALTER ROLE {} RESET default_transaction_read_only",
    )


def says_no(replica: Replica) -> bool:
    """Whether it was the server's refusal that kept the replica, not only the broken connection."""
    reason = why_unavailable(replica) or ""
    return "too many connections" in reason or "read-only" in reason


def test_a_claim_that_the_server_cannot_take_is_made_when_it_can(
    role: Role,
    refusal: tuple[str, str],
    make_replica: MakeReplica,
    caplog: pytest.LogCaptureFixture,
    job: Job,
) -> None:
    caplog.set_level(logging.INFO)
    job.go_on.set()
    replica = make_replica(role.url, claim_timeout=60)
    role.set(refusal[0])
    replica.run_once(job.run)
    eventually(lambda: says_no(replica))
    role.set(refusal[1])
    replica.one(EVENT_JOB_EXECUTED)
    replica.idle()
    assert replica.codes() == [
        EVENT_TASK_LOCK_GRANTED,
        EVENT_JOB_EXECUTED,
        EVENT_TASK_LOCK_RELEASED,
    ]
    assert (job.runs, row(role.connection)["token"]) == (
        1,
        replica.one(EVENT_TASK_LOCK_GRANTED).token,
    )
    said = said_by_its_end(caplog)
    assert said[:2] == [UNAVAILABLE, BACK]
    # The end of the refusal ends the sessions, also one that the replica has opened just before.
    assert said[2:] in ([], [UNAVAILABLE, BACK])


def test_a_claim_that_the_server_does_not_take_in_time_is_skipped(
    role: Role,
    refusal: tuple[str, str],
    make_replica: MakeReplica,
    caplog: pytest.LogCaptureFixture,
    job: Job,
) -> None:
    caplog.set_level(logging.INFO)
    job.go_on.set()
    # Longer than a slow machine stops: the next claim has no more time than this one.
    replica = make_replica(role.url, claim_timeout=6)
    role.set(refusal[0])
    replica.run_once(job.run)
    failed = replica.one(EVENT_TASK_LOCK_ERROR)
    assert isinstance(failed.exception, TaskLockDatabaseError)
    replica.idle()
    role.set(refusal[1])
    replica.run_once(job.run, job_id="next")
    replica.one(EVENT_JOB_EXECUTED, "next")
    replica.idle()
    assert replica.codes() == [EVENT_TASK_LOCK_ERROR]
    assert job.runs == 1
    assert said_by_its_end(caplog) == [UNAVAILABLE, BACK]


def test_a_release_that_the_server_cannot_take_is_pending_until_it_can(
    role: Role,
    refusal: tuple[str, str],
    make_replica: MakeReplica,
    caplog: pytest.LogCaptureFixture,
    job: Job,
) -> None:
    caplog.set_level(logging.INFO)
    timings = Timings(longest_answer=1.0)
    replica = make_replica(role.url, claim_timeout=60, lease=600, failover=True, timings=timings)
    replica.run_once(job.run)
    assert job.begun.wait(60)
    role.set(refusal[0])
    job.go_on.set()
    replica.one(EVENT_JOB_EXECUTED)
    replica.idle()
    eventually(lambda: says_no(replica))
    role.set(refusal[1])
    eventually(lambda: row(role.connection)["finished_at"])
    assert (job.runs, row(role.connection)["token"]) == (
        1,
        replica.one(EVENT_TASK_LOCK_GRANTED).token,
    )
    assert said_by_its_end(caplog) == [UNAVAILABLE, BACK]


@pytest.mark.nightly
def test_a_dead_run_is_taken_over_when_the_server_can_be_written_again(
    role: Role,
    make_replica: MakeReplica,
    make_locks: Callable[..., LockClient],
    caplog: pytest.LogCaptureFixture,
    job: Job,
) -> None:
    """It can be read all the time, which does not make the outage many short ones."""
    caplog.set_level(logging.INFO)
    job.go_on.set()
    dead = make_locks(replica_id="dead")
    lock = held(dead, "job", **HOURLY, lease=600, failover=True, runs=RUNS)
    die(dead, lock)
    probes = 0

    def count(_number: int, _to_server: bool, data: bytes) -> bytes:
        nonlocal probes
        probes += b"pg_logical_emit_message" in data
        return data

    with proxy_to(role.url) as proxy:
        proxy.tap = count
        # At once, so that what looks dead would be claimed while the server is read-only.
        at_once = Timings(recovery_grace=-1.0)
        replica = make_replica(
            proxy.url, claim_timeout=0.5, lease=1, failover=True, timings=at_once
        )
        replica.run_once(job.run)
        replica.one(EVENT_TASK_LOCK_REFUSED)
        role.set("ALTER ROLE {} SET default_transaction_read_only = on")
        # Not before: it would be taken over while the server can be written.
        role.connection.execute("UPDATE task_lock SET locked_until = now()")
        before = probes
        eventually(lambda: probes > before + 4)
        role.set("ALTER ROLE {} RESET default_transaction_read_only")
        replica.one(EVENT_JOB_EXECUTED)
        replica.idle()
        replica.shutdown()
    assert (job.runs, row(role.connection)["token"]) == (1, LaterThan(lock.token))
    told = replica.of()
    [died] = [event for event in told if getattr(event, "outcome", None) == "died"]
    assert died.token == lock.token
    codes = [event.code for event in told if event is not died]
    assert codes[:2] == [EVENT_TASK_LOCK_REFUSED, EVENT_TASK_LOCK_GRANTED]
    assert said_by_its_end(caplog) == [UNAVAILABLE, BACK]


@pytest.mark.nightly
@pytest.mark.own_server
@pytest.mark.parametrize(
    "lasts", ["within the lease", pytest.param("beyond it", marks=pytest.mark.nightly)]
)
def test_a_restart_of_the_server_under_a_job(
    make_replica: MakeReplica, caplog: pytest.LogCaptureFixture, job: Job, lasts: str
) -> None:
    caplog.set_level(logging.INFO)
    beyond = lasts == "beyond it"
    with EmbeddedServer(loopback=True) as server:
        upgrade(server.url)
        options: dict[str, Any] = {"lease": 2 if beyond else 30, "failover": True}
        holder, other = refused(make_replica, job, server.url, server.url, **options)
        held_until = time.monotonic() + (2.5 if beyond else 0)
        server.stop()
        eventually(lambda: time.monotonic() > held_until)
        server.start()
        job.go_on.set()
        holder.one(EVENT_JOB_EXECUTED)
        with psycopg.connect(server.url, autocommit=True) as connection:
            eventually(lambda: row(connection)["finished_at"])
            eventually(lambda: other.executor.user.outage.stable)
            token = holder.one(EVENT_TASK_LOCK_GRANTED).token
            assert (job.runs, row(connection)["token"]) == (1, token)
        for replica in (holder, other):
            assert EVENT_TASK_LOCK_LOST not in replica.codes()
            replica.run_once(lambda: None, job_id=replica.executor.user.replica_id)
            replica.one(EVENT_JOB_EXECUTED, replica.executor.user.replica_id)
            replica.shutdown()
    told = said(caplog)
    # One outage for each of the two, if it asked for anything meanwhile.
    if beyond:
        assert told.count(UNAVAILABLE) == 2
    assert told.count(UNAVAILABLE) == told.count(BACK) <= 2


@pytest.mark.skipif(
    not psycopg.capabilities.has_cancel_safe(), reason="libpq cannot cancel within a limit"
)
@pytest.mark.parametrize("setting", ["", "SET statement_timeout = '300ms'"], ids=["ours", "role's"])
@pytest.mark.parametrize("waits", [False, True], ids=["locked", "behind one that waits"])
def test_a_table_that_a_session_has_locked_is_told_with_that_session(
    role: Role,
    direct_url: str,
    make_replica: MakeReplica,
    caplog: pytest.LogCaptureFixture,
    job: Job,
    setting: str,
    waits: bool,
) -> None:
    caplog.set_level(logging.INFO)
    job.go_on.set()
    if setting:
        role.set(f"ALTER ROLE {{}} {setting}")
    timings = Timings(unlocked_after=1.0, longest_answer=1.0)
    replica = make_replica(role.url, claim_timeout=60, poll_interval=0.3, timings=timings)
    replica.run_once(job.run)
    replica.one(EVENT_JOB_EXECUTED)
    with (
        psycopg.connect(direct_url, application_name="reader") as reader,
        closing(psycopg.connect(direct_url, application_name="an operator's psql")) as other,
    ):
        if waits:
            reader.execute("SELECT FROM task_lock")
            other.pgconn.send_query(b"ALTER TABLE task_lock ADD COLUMN odd integer")
        else:
            other.execute("LOCK TABLE task_lock")
        pid = other.info.backend_pid
        eventually(lambda: "A task lock table is locked" in caplog.text)
        [told] = [r.getMessage() for r in caplog.records if "table is locked (" in r.getMessage()]
        does = "waits for" if waits else "has"
        remedy = f"SELECT pg_terminate_backend({pid})"
        assert f"pid {pid} (an operator's psql) {does} AccessExclusiveLock on task_lock" in told
        assert f"let it end its transaction, or run: {remedy}" in told
        eventually(lambda: any(remedy in each for each in replica.executor.health().degraded))
        role.connection.execute(remedy)
        reader.rollback()
    eventually(lambda: "The task lock tables are no longer locked" in caplog.text)
    # A busy server may not have told at once who has it locked.
    assert "is unavailable" not in caplog.text.partition("A task lock table is locked")[2]
    replica.shutdown()
