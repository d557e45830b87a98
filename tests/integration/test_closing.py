"""What waits for the database when claiming is stopped, and what goes on as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine

from apscheduler_tasklock import TaskLockDatabaseError, TaskLocks
from apscheduler_tasklock._database.database import Database, parse_url
from apscheduler_tasklock._database.deadline import Closing, Deadline
from apscheduler_tasklock._database.pool import MOST_CONNECTIONS
from apscheduler_tasklock._lock.claim import WantedClaim
from tests.support.polling import eventually
from tests.support.proxy import Gate, Proxy

MakeLocks = Callable[..., TaskLocks]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def engine(proxy: Proxy) -> Iterator[Engine]:
    """An application's own engine."""
    engine = create_engine(parse_url(proxy.url), pool_size=1, max_overflow=0)
    yield engine
    engine.dispose()


def answered(database: Database) -> bool:
    with database.cursor() as cursor:
        return bool(cursor.execute("SELECT true").fetchone()[0])


def is_connecting() -> bool:
    return any(thread.name == "tasklock-connect" for thread in threading.enumerate())


def gave_up(call: Future[Any]) -> bool:
    return isinstance(call.exception(60), TaskLockDatabaseError)


@pytest.mark.direct("it counts the library's connections in the server")
def test_a_connection_that_is_opened_too_late_is_closed(
    gate: Gate, proxy: Proxy, pool: ThreadPoolExecutor, connection: psycopg.Connection[Any]
) -> None:
    closing = Closing()
    database = Database(proxy.url, timeout=60, application_name="late", closing=closing)
    gate.shut()
    opening = [pool.submit(answered, database) for _ in range(MOST_CONNECTIONS)]
    assert gate.reached.wait(60)
    closing.stop()
    assert all(gave_up(call) for call in opening)
    assert is_connecting()
    gate.open()
    eventually(lambda: not is_connecting())
    query = "SELECT FROM pg_stat_activity WHERE application_name = 'late'"
    eventually(lambda: connection.execute(query).fetchall() == [])
    closing.reopen()
    assert answered(database)
    database.close()


def test_a_connection_that_an_application_lends_too_late_goes_back_to_it(
    engine: Engine, pool: ThreadPoolExecutor
) -> None:
    closing = Closing()
    database = Database(engine, timeout=60, application_name="", closing=closing)
    with engine.connect():
        waiting = pool.submit(answered, database)
        eventually(is_connecting)
        closing.stop()
        assert gave_up(waiting)
    eventually(lambda: not is_connecting())
    with engine.connect():
        pass


def test_a_wait_for_a_free_connection_ends(proxy: Proxy, pool: ThreadPoolExecutor) -> None:
    closing = Closing()
    database = Database(proxy.url, timeout=3600, application_name="", closing=closing)
    in_use = [database.cursor() for _ in range(MOST_CONNECTIONS)]
    for cursor in in_use:
        cursor.__enter__()
    waiting = pool.submit(answered, database)
    closing.stop()
    assert gave_up(waiting)
    for cursor in in_use:
        cursor.__exit__(None, None, None)
    assert answered(database)
    database.close()


def test_a_connection_of_its_own_for_renewals_waits_on(
    gate: Gate, proxy: Proxy, pool: ThreadPoolExecutor
) -> None:
    closing = Closing()
    database = Database(proxy.url, timeout=180, application_name="", closing=closing)
    renewing = database.separate()
    assert answered(renewing)
    assert answered(database)
    gate.shut()
    closing.stop()
    renewal = pool.submit(answered, renewing)
    assert gave_up(pool.submit(answered, database))
    assert not renewal.done()
    gate.open()
    assert renewal.result(60)
    database.close()
    renewing.close()


def test_an_answer_on_an_applications_connection_is_not_waited_for_for_ever(
    make_locks: MakeLocks, engine: Engine, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    locks = make_locks(engine, claim_timeout=1)
    locks.check()
    gate.shut()
    assert gave_up(pool.submit(locks.claim, WantedClaim("task", 0, 60)))
    gate.open()
    locks.close()


@pytest.mark.parametrize("statement", ["SELECT 1", "SELECT 1 / 0"])
def test_an_applications_connection_is_as_it_was_after_its_use(
    engine: Engine, statement: str
) -> None:
    with engine.connect() as connection:
        lent = connection.connection.driver_connection
    before = dict(vars(lent))
    database = Database(engine, timeout=60, application_name="", closing=Closing())
    with suppress(psycopg.Error), database.cursor() as cursor:
        assert cursor.connection is lent
        assert vars(lent).keys() > before.keys()
        cursor.execute(statement)
    assert vars(lent).keys() == before.keys()
    if not lent.closed:
        assert lent.autocommit is False
        assert lent.prepare_threshold == 5


def test_what_interrupts_a_wait_for_a_connection_leaves_none_behind() -> None:
    closing, discarded = Closing(), threading.Event()
    go_on = threading.Event()

    class InterruptedDeadline(Deadline):
        @property
        def seconds_left(self) -> float:
            raise KeyboardInterrupt

    def connect() -> str:
        go_on.wait(60)
        return "connection"

    with pytest.raises(KeyboardInterrupt):
        InterruptedDeadline(closing).call(connect, lambda _: discarded.set())
    assert not discarded.is_set()
    go_on.set()
    assert discarded.wait(60)


def test_a_connection_is_opened_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the interpreter ends, from Python 3.12 on, while the last jobs are released."""

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", fail)
    assert Deadline(Closing()).call(lambda: "connection", lambda _: None) == "connection"
