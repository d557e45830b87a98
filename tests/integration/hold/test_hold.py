"""TaskLocks.hold: the lock around code outside APScheduler."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg import sql

from apscheduler_tasklock import (
    TaskLockError,
    TaskLockOptionError,
    TaskLockRefusedError,
    TaskLocks,
    current_lock,
)
from tests.support.claims import LaterThan
from tests.support.commands import PATIENT
from tests.support.interrupting import press_ctrl_c
from tests.support.polling import eventually
from tests.support.proxy import Gate, Proxy
from tests.support.roles import role

MakeLocks = Callable[..., TaskLocks]
TIMES: dict[str, Any] = {"min_lock": 0, "max_lock": timedelta(minutes=1)}


def finished(connection: psycopg.Connection[Any]) -> bool:
    return connection.execute("SELECT FROM task_lock WHERE finished_at IS NOT NULL").rowcount == 1


def test_it_is_held_inside_and_released_after(
    make_task_locks: MakeLocks, connection: psycopg.Connection[Any]
) -> None:
    with make_task_locks().hold("import", **TIMES) as lock:
        assert current_lock() is lock
        assert (lock.name, lock.run_time) == ("import", None)
        assert not finished(connection)
    assert current_lock() is None
    assert finished(connection)


def test_a_second_holder_is_refused_and_told_by_whom(make_task_locks: MakeLocks) -> None:
    one, other = make_task_locks(replica_id="one"), make_task_locks()
    with one.hold("import", **TIMES) as lock:
        with pytest.raises(TaskLockRefusedError, match="'import' is running on 'one'") as refused:
            other.hold("import", **TIMES).__enter__()
        assert refused.value.holder == "one"
        assert refused.value.locked_until == lock.locked_until
    with other.hold("import", min_lock=60, max_lock=60):
        pass
    with pytest.raises(TaskLockRefusedError, match="was just run by"):
        one.hold("import", min_lock=60, max_lock=60).__enter__()


def test_of_two_that_are_nested_the_inner_one_is_extended(
    make_task_locks: MakeLocks, connection: psycopg.Connection[Any]
) -> None:
    locks = make_task_locks()
    query = "SELECT run_until FROM task_lock ORDER BY task_name"
    with locks.hold("a", **TIMES), locks.hold("b", **TIMES):
        before = connection.execute(query).fetchall()
        lock = current_lock()
        assert lock is not None
        for _ in range(2):
            lock.extend(30)
        after = connection.execute(query).fetchall()
    assert [later - earlier for (earlier,), (later,) in zip(before, after, strict=True)] == [
        timedelta(),
        timedelta(seconds=60),
    ]


def test_the_bodys_exception_comes_through_and_the_lock_is_released(
    make_task_locks: MakeLocks, connection: psycopg.Connection[Any]
) -> None:
    with pytest.raises(ZeroDivisionError), make_task_locks().hold("import", **TIMES):
        1 / 0  # noqa: B018  # raises
    assert finished(connection)


def test_the_history_has_how_it_ended_and_what_redact_leaves_of_its_error(
    make_task_locks: MakeLocks,
) -> None:
    locks = make_task_locks(redact=lambda error: f"redacted {len(str(error))}")
    with locks.hold("import", **TIMES):
        pass
    with pytest.raises(ValueError, match="secret"), locks.hold("import", **TIMES):
        raise ValueError("secret")
    assert [(run.kind, run.outcome, run.error) for run in locks.runs("import")] == [
        ("hold", "error", "redacted 6"),
        ("hold", "ok", None),
    ]


def test_a_failing_release_does_not_replace_the_bodys_exception(
    make_task_locks: MakeLocks, proxy: Proxy, connection: psycopg.Connection[Any]
) -> None:
    @make_task_locks(proxy.url).hold("import", **TIMES)
    def work() -> None:
        proxy.accepting = False
        proxy.cut_all()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    proxy.accepting = True
    eventually(lambda: finished(connection))


def test_it_is_released_when_it_is_left_in_another_context(
    make_task_locks: MakeLocks, connection: psycopg.Connection[Any]
) -> None:
    """As web frameworks do with a dependency that yields."""
    hold = make_task_locks().hold("import", **TIMES)
    copy_context().run(hold.__enter__)
    copy_context().run(hold.__exit__, None, None, None)
    assert finished(connection)


@pytest.mark.parametrize("lease", [None, 60])
@pytest.mark.parametrize("extends", [False, True])
def test_what_was_lost_meanwhile_is_told_once(
    make_task_locks: MakeLocks,
    connection: psycopg.Connection[Any],
    caplog: pytest.LogCaptureFixture,
    lease: int | None,
    extends: bool,
) -> None:
    """As by a process that was paused, and ends before its next renewal would have found out."""
    with make_task_locks().hold("import", min_lock=0, max_lock=600, lease=lease) as lock:
        connection.execute("UPDATE task_lock SET claim_id = gen_random_uuid()")
        if extends:
            with pytest.raises(TaskLockError, match="cannot be extended"):
                lock.extend(60)
    assert caplog.text.count(f"'import': its lock is lost (token {lock.token})") == 1


def test_as_a_decorator_it_is_held_for_each_call(make_task_locks: MakeLocks) -> None:
    @make_task_locks().hold("import", **TIMES)
    def work(number: int) -> tuple[int, int]:
        lock = current_lock()
        assert lock is not None
        return number, lock.token

    (first, token), second = work(7), work(8)
    assert (first, second) == (7, (8, LaterThan(token)))
    assert work.__name__ == "work"


def test_it_does_not_decorate_what_runs_after_the_call(make_task_locks: MakeLocks) -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    class Class: ...

    async def coroutine() -> None: ...

    def returns(function: Callable[..., Any]) -> Any:
        return function()

    for function in (generator, async_generator, Class, contextmanager(generator)):
        with pytest.raises(TaskLockOptionError, match="runs after the call"):
            make_task_locks().hold("import", **TIMES)(function)
    with ThreadPoolExecutor(1) as pool:
        gate = threading.Event()
        pool.submit(gate.wait)
        queued: list[Any] = []

        def submits() -> Any:
            queued.append(pool.submit(print))
            return queued[0]

        told = {
            coroutine: "a coroutine",
            generator: "a generator",
            async_generator: "an async generator",
            partial(map, str, [1]): "a map object",
            contextmanager(generator): "a context manager",
            submits: "a future",
        }
        for returned, what in told.items():
            with pytest.raises(TaskLockOptionError, match=f"has returned {what}, which"):
                make_task_locks().hold("import", **TIMES)(partial(returns, returned))()
        assert queued[0].cancelled()
        gate.set()


def test_closed_when_its_block_is_left(database_url: str) -> None:
    with TaskLocks(database_url) as locks, locks.hold("import", **TIMES) as lock:
        assert lock.name == "import"
    with pytest.raises(TaskLockError, match="closed"):
        locks.hold("import", **TIMES).__enter__()


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_claim_is_given_back(
    make_task_locks: MakeLocks, proxy: Proxy, gate: Gate, connection: psycopg.Connection[Any]
) -> None:
    """Ctrl-C comes while the answer is under way; the database has granted it."""
    locks = make_task_locks(proxy.url, PATIENT, claim_timeout=180)
    with locks.hold("import", **TIMES):  # so that it has a row, and the next claim is one statement
        pass
    gate.shut()

    def interrupt() -> None:
        eventually(lambda: not finished(connection))
        press_ctrl_c()

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        locks.hold("import", **TIMES).__enter__()
    interrupting.join()
    gate.open()
    eventually(lambda: finished(connection))


def test_as_a_decorator_it_keeps_threads_apart(make_task_locks: MakeLocks) -> None:
    inside, go_on = threading.Event(), threading.Event()

    @make_task_locks().hold("import", **TIMES)
    def work() -> None:
        inside.set()
        assert go_on.wait(60)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(work)
        assert inside.wait(60)
        with pytest.raises(TaskLockRefusedError):
            work()
        go_on.set()
        first.result(60)


def test_one_hold_is_not_entered_twice_at_once(make_task_locks: MakeLocks) -> None:
    hold = make_task_locks().hold("import", **TIMES)
    with hold as lock:
        with pytest.raises(TaskLockError, match="entered already"):
            hold.__enter__()
        assert not lock.lost
    with hold:  # one after the other is fine
        pass


def test_a_lock_that_was_released_is_lost(make_task_locks: MakeLocks) -> None:
    with make_task_locks().hold("import", **TIMES) as lock:
        assert not lock.lost
    assert lock.lost


def test_closed_locks_are_not_held_any_more(
    make_task_locks: MakeLocks, proxy: Proxy, connection: psycopg.Connection[Any]
) -> None:
    locks = make_task_locks(proxy.url)
    with locks.hold("import", **TIMES):
        locks.close()
    eventually(lambda: finished(connection))
    eventually(lambda: not proxy.connected)
    accepted = proxy.accepted
    with pytest.raises(TaskLockError, match="'import' is not claimed: these locks are closed"):
        locks.hold("import", **TIMES).__enter__()
    with pytest.raises(TaskLockError, match="these locks are closed"):
        asyncio.run(locks.hold("import", **TIMES).__aenter__())
    assert proxy.accepted == accepted


@pytest.mark.parametrize(
    ("name", "times", "says"),
    [
        ("", TIMES, "name is empty"),
        ("a\0", TIMES, "NUL"),
        ("a", {"min_lock": 2, "max_lock": 1}, r"min_lock \(2\) must not be above max_lock \(1\)"),
        ("a", {"min_lock": -1, "max_lock": 1}, "min_lock must be"),
        ("a", {"min_lock": 0, "max_lock": 0}, "max_lock must be seconds or a timedelta, above 0"),
        ("a", {**TIMES, "wait": -1}, "wait must be seconds or a timedelta, from 0 to"),
        ("a", {**TIMES, "wait": timedelta(seconds=-1)}, "wait must be seconds"),
        ("a", {**TIMES, "wait": math.nan}, "wait must be seconds"),
        ("a", {**TIMES, "wait": math.inf}, "wait must be seconds"),
        ("a", {**TIMES, "wait": True}, "wait must be seconds"),
        ("a", {**TIMES, "wait": None}, "wait must be seconds"),
        ("a", {**TIMES, "wait": "5"}, "wait must be seconds"),
    ],
)
def test_impossible_holds_are_refused(
    make_task_locks: MakeLocks, name: str, times: dict[str, Any], says: str
) -> None:
    with pytest.raises(TaskLockOptionError, match=says):
        make_task_locks().hold(name, **times)


@pytest.mark.usefixtures("unhurried_stop")
@pytest.mark.direct("the pooler keeps connections for a role, and has no login for it")
def test_a_release_that_is_refused_is_told_in_one_line(
    make_task_locks: MakeLocks,
    database_url: str,
    connection: psycopg.Connection[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with role(database_url) as (name, url):
        user = sql.Identifier(name)
        rights = "GRANT SELECT, INSERT, UPDATE ON task_lock, task_lock_run TO {}"
        connection.execute(sql.SQL(rights).format(user))
        locks = make_task_locks(url, replace(PATIENT, closing_timeout=600.0), claim_timeout=180)
        with locks.hold("import", **TIMES):
            connection.execute(sql.SQL("REVOKE UPDATE ON task_lock FROM {}").format(user))
        [record] = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert "Task 'import': its lock could not be released" in record.getMessage()
        assert record.exc_info is None
        connection.execute(sql.SQL("GRANT UPDATE ON task_lock TO {}").format(user))
        locks.close()
        assert finished(connection)
