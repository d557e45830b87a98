"""Prepared statements behind a pooler, which may drop them behind the library's back."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import psycopg
import pytest

from apscheduler_tasklock._lock.outcomes import RunOutcome
from tests.support.claims import held
from tests.support.polling import eventually
from tests.support.proxy import Proxy, as_a_pooler
from tests.support.waist import LockClient


@pytest.mark.direct("nothing is prepared on a connection that leads through a pooler")
def test_the_run_history_goes_on_after_prepared_statements_are_lost(
    make_locks: Callable[..., LockClient],
    connection: psycopg.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    locks = make_locks()
    for number in range(8):
        locks.release(held(locks, f"task {number}"))
    lock = held(locks, "last")
    [(names,)] = locks.ask(
        lambda cursor: cursor.execute("SELECT count(*) FROM pg_prepared_statements").fetchall()
    )
    assert names > 0  # or nothing can be lost
    locks.ask(lambda cursor: cursor.execute("DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$"))
    locks.release(lock, RunOutcome(outcome="ok"))
    recorded = "SELECT true FROM task_lock_run WHERE task_name = 'last'"
    eventually(lambda: connection.execute(recorded).fetchone(), 20)
    assert "No run history is written" not in caplog.text


@pytest.mark.direct("the proxy takes a pooler's place")
def test_through_a_pooler_nothing_is_prepared(
    make_locks: Callable[..., LockClient], proxy: Proxy
) -> None:
    """Some poolers do not know prepared statements, and lend a session to several clients."""
    sent: list[bytes] = []

    def note(data: bytes) -> bytes:
        sent.append(data)
        return data

    proxy.to_server, proxy.to_client = note, as_a_pooler
    locks = make_locks(proxy.url)
    for number in range(3):
        locks.release(held(locks, f"task {number}"))
    assert not re.search(rb"(tasklock_[0-9a-f]{8}|_pg3)_\d", b"".join(sent))
