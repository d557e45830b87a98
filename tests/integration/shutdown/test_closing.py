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

from apscheduler_tasklock import TaskLockDatabaseError
from apscheduler_tasklock._database.abandoned_call import call_within
from apscheduler_tasklock._database.url import parse_url
from apscheduler_tasklock._shutdown import Closing
from tests.support.commands import PATIENT
from tests.support.exchanges import NAME, Setup
from tests.support.polling import eventually
from tests.support.proxy import Gate, Proxy
from tests.support.waist import ClaimRequest, LockClient

MakeLocks = Callable[..., LockClient]
MakeSetup = Callable[..., Setup]


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


def answered(setup: Setup) -> bool:
    answer: tuple[bool] = setup.ask(lambda cursor: cursor.execute("SELECT true").fetchone())
    return answer[0]


def is_connecting() -> bool:
    return any(thread.name == "tasklock-connect" for thread in threading.enumerate())


def gave_up(call: Future[Any]) -> bool:
    return isinstance(call.exception(60), TaskLockDatabaseError)


@pytest.mark.direct("it counts the library's connections in the server")
def test_a_connection_that_is_opened_too_late_is_closed(
    make_setup: MakeSetup,
    gate: Gate,
    proxy: Proxy,
    pool: ThreadPoolExecutor,
    connection: psycopg.Connection[Any],
) -> None:
    setup = make_setup(proxy.url, 180.0, timings=PATIENT)
    gate.shut()
    opening = [pool.submit(answered, setup) for _ in range(3)]
    assert gate.reached.wait(60)
    setup.closing.stop()
    assert all(gave_up(call) for call in opening)
    assert is_connecting()
    gate.open()
    eventually(lambda: not is_connecting())
    query = "SELECT FROM pg_stat_activity WHERE application_name = %s"
    eventually(lambda: connection.execute(query, [NAME]).fetchall() == [])


def test_what_goes_on_during_a_shutdown_waits_on(
    make_setup: MakeSetup, gate: Gate, proxy: Proxy, pool: ThreadPoolExecutor
) -> None:
    setup = make_setup(proxy.url, timeout=180, timings=PATIENT)
    assert answered(setup)
    gate.shut()

    def select(cursor: Any) -> Any:
        return cursor.execute("SELECT true").fetchone()

    renewal = pool.submit(setup.ask, select, None, Closing())
    assert gate.reached.wait(60)
    setup.closing.stop()
    assert gave_up(pool.submit(answered, setup))
    assert not renewal.done()
    gate.open()
    assert renewal.result(60)


def test_an_answer_on_an_applications_connection_is_not_waited_for_for_ever(
    make_locks: MakeLocks, engine: Engine, gate: Gate, pool: ThreadPoolExecutor
) -> None:
    locks = make_locks(engine, claim_timeout=1)

    def is_connected() -> bool:
        with suppress(TaskLockDatabaseError):  # a slow machine needs longer than a second
            locks.check()
            return True
        return False

    eventually(is_connected)
    gate.shut()
    assert gave_up(pool.submit(locks.claim, ClaimRequest("task", 0, 60)))
    gate.open()
    locks.close()


def test_what_interrupts_a_wait_for_a_connection_leaves_none_behind() -> None:
    discarded, go_on = threading.Event(), threading.Event()

    def interrupt() -> float:
        raise KeyboardInterrupt

    def connect() -> str:
        go_on.wait(60)
        return "connection"

    with pytest.raises(KeyboardInterrupt):
        call_within(60.0, connect, lambda _: discarded.set(), interrupt)
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
    assert call_within(60.0, lambda: "connection", lambda _: None) == "connection"
