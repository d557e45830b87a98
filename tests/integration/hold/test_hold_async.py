"""TaskLocks.hold in coroutines, which are cancelled at any point."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock import (
    HeldLock,
    TaskLockError,
    TaskLockOptionError,
    TaskLockRefusedError,
    TaskLocks,
    current_lock,
)
from apscheduler_tasklock._database.timings import Timings
from tests.support.event_loops import abandoned_loop
from tests.support.internals import pools_lock
from tests.support.polling import eventually
from tests.support.proxy import Gate, Proxy

MakeLocks = Callable[..., TaskLocks]
TIMES: dict[str, Any] = {"min_lock": 60, "max_lock": 600}


def finished(connection: psycopg.Connection[Any]) -> bool:
    return connection.execute("SELECT FROM task_lock WHERE finished_at IS NOT NULL").rowcount == 1


@pytest.fixture
def locks(make_task_locks: MakeLocks, proxy: Proxy) -> TaskLocks:
    locks = make_task_locks(proxy.url)
    locks.check()
    return locks


def free(locks: TaskLocks) -> bool:
    """Tell whether the task's window is open."""
    try:
        with locks.hold("import", **TIMES):
            return True
    except TaskLockRefusedError:
        return False


def test_it_works_for_coroutines(
    make_task_locks: MakeLocks, connection: psycopg.Connection[Any]
) -> None:
    locks = make_task_locks()

    @locks.hold("decorated", **TIMES)
    async def work() -> HeldLock | None:
        await asyncio.sleep(0)
        return await asyncio.create_task(child())

    async def child() -> HeldLock | None:
        return current_lock()

    async def main() -> None:
        lock = await work()
        assert lock is not None
        assert lock.name == "decorated"
        async with locks.hold("import", min_lock=0, max_lock=60) as held:
            assert current_lock() is held
            with pytest.raises(TaskLockRefusedError):
                await locks.hold("import", min_lock=0, max_lock=60).__aenter__()
        assert current_lock() is None

    asyncio.run(main())
    assert connection.execute("SELECT FROM task_lock WHERE finished_at IS NULL").rowcount == 0


def test_what_returns_a_task_is_an_error_and_the_task_is_cancelled(
    make_task_locks: MakeLocks,
) -> None:
    async def later() -> None:
        await asyncio.sleep(3600)

    tasks: list[asyncio.Task[None]] = []

    def begins() -> asyncio.Task[None]:
        tasks.append(asyncio.create_task(later()))
        return tasks[-1]

    async def returns() -> asyncio.Task[None]:
        return begins()

    async def main() -> None:
        locks = make_task_locks()
        with pytest.raises(TaskLockOptionError, match="begins has returned an awaitable Task"):
            locks.hold("one", **TIMES)(begins)()
        with pytest.raises(TaskLockOptionError, match="returns has returned an awaitable Task"):
            await locks.hold("other", **TIMES)(returns)()
        await asyncio.wait(tasks)
        assert [task.cancelled() for task in tasks] == [True, True]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_closed_when_its_async_block_is_left(database_url: str) -> None:
    async def main() -> None:
        async with TaskLocks(database_url) as locks, locks.hold("import", **TIMES) as lock:
            assert lock.name == "import"
        with pytest.raises(TaskLockError, match="closed"):
            await locks.hold("import", **TIMES).__aenter__()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_object_whose_call_is_a_coroutine_is_held(make_task_locks: MakeLocks) -> None:
    class Work:
        async def __call__(self) -> HeldLock | None:
            await asyncio.sleep(0)
            return current_lock()

    lock = asyncio.run(make_task_locks().hold("import", **TIMES)(Work())())  # type: ignore[misc]  # Any
    assert lock is not None


def test_as_a_decorator_it_keeps_coroutines_apart(make_task_locks: MakeLocks) -> None:
    async def main() -> None:
        inside, go_on = asyncio.Event(), asyncio.Event()

        @make_task_locks().hold("import", **TIMES)
        async def work() -> None:
            inside.set()
            await go_on.wait()

        first = asyncio.create_task(work())
        await inside.wait()
        with pytest.raises(TaskLockRefusedError):
            await work()
        go_on.set()
        await first

    asyncio.run(asyncio.wait_for(main(), 60))


def test_cancelled_during_its_claim_it_leaves_no_lock_and_an_open_window(
    locks: TaskLocks, gate: Gate, connection: psycopg.Connection[Any]
) -> None:
    async def main() -> None:
        gate.shut()
        hold = locks.hold("import", **TIMES)
        entering = asyncio.create_task(hold.__aenter__())
        await gate.until_reached()
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        gate.open()
        while not finished(connection):
            await asyncio.sleep(0.01)
        async with hold:  # it was not entered, and its window is open
            pass

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_end_of_the_loop_during_its_claim_leaves_no_lock(
    locks: TaskLocks, gate: Gate, connection: psycopg.Connection[Any]
) -> None:
    """Every task there is, is cancelled; and nobody is there when the answer comes."""

    async def main() -> None:
        gate.shut()
        hold = locks.hold("import", **TIMES)
        main.task = asyncio.create_task(hold.__aenter__())  # type: ignore[attr-defined]  # kept alive
        await gate.until_reached()

    asyncio.run(main())
    gate.open()
    eventually(lambda: finished(connection))
    eventually(lambda: free(locks))


def test_cancelled_during_its_release_it_is_released(
    locks: TaskLocks, gate: Gate, connection: psycopg.Connection[Any]
) -> None:
    async def main() -> None:
        async def work() -> None:
            async with locks.hold("import", **TIMES):
                gate.shut()

        working = asyncio.create_task(work())
        await gate.until_reached()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert current_lock() is None
        gate.open()

    asyncio.run(asyncio.wait_for(main(), 60))
    eventually(lambda: finished(connection))


def test_closed_while_its_thread_gives_a_pool_something_it_is_released(
    make_task_locks: MakeLocks, connection: psycopg.Connection[Any]
) -> None:
    """As the garbage collector may do it, wherever it is called, with one of a loop that ended."""
    locks = make_task_locks()
    loop = abandoned_loop()

    async def work() -> None:
        async with locks.hold("import", **TIMES):
            loop.stop()
            await asyncio.Event().wait()

    coroutine = work()
    task = loop.create_task(coroutine)
    loop.run_forever()
    loop.close()

    raised = []

    def close() -> None:
        with pools_lock():
            try:
                coroutine.close()
            except RuntimeError as error:  # as where no loop runs on which it could wait
                raised.append(error)

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    assert not raised
    eventually(lambda: finished(connection))
    del task


class Impatient(TaskLocks):
    """Claims again at once while a task runs."""

    timings = Timings(hold_interval=0.01)


class Doubting(TaskLocks):
    """Does not know whether a holder died, for as long as a test takes on a slow machine."""

    timings = Timings(recovery_grace=600.0)


@pytest.mark.parametrize("is_dead", [True, False])
@pytest.mark.parametrize("holds", [1, 3])
def test_one_that_waits_for_a_dead_run_or_one_that_goes_on_keeps_no_other_waiting(
    make_task_locks: MakeLocks,
    database_url: str,
    connection: psycopg.Connection[Any],
    holds: int,
    is_dead: bool,
) -> None:
    """Right after the start nobody knows whether a holder died, and its claim is asked again."""
    dead = make_task_locks(replica_id="dead")
    with (
        dead.hold("task", min_lock=0, max_lock=600, lease=None),
        Doubting(database_url, claim_timeout=100) as locks,
    ):
        if is_dead:
            connection.execute("UPDATE task_lock SET locked_until = now()")

        async def hold(name: str) -> str:
            async with locks.hold(name, min_lock=0, max_lock=600, wait=0 if is_dead else 600):
                return name

        async def main() -> list[str]:
            waiting = [asyncio.ensure_future(hold("task")) for _ in range(holds)]
            others = await asyncio.gather(*(hold(f"other {n}") for n in range(20)))
            assert not any(each.done() for each in waiting)
            for each in waiting:
                each.cancel()
            await asyncio.wait(waiting)
            return others

        assert asyncio.run(main()) == [f"other {n}" for n in range(20)]


def enter(locks: TaskLocks, form: str) -> None:
    """Hold the lock of the task in one of the forms that there are."""
    hold = locks.hold("import", min_lock=0, max_lock=600, wait=600)

    async def enter_async() -> None:
        async with hold:
            pass

    async def coroutine() -> None:
        pass

    match form:
        case "context manager":
            with hold:
                pass
        case "decorator":
            hold(lambda: None)()
        case "async context manager":
            asyncio.run(enter_async())
        case _:
            asyncio.run(hold(coroutine)())


@pytest.mark.parametrize(
    "form", ["context manager", "decorator", "async context manager", "async decorator"]
)
def test_in_each_form_it_waits_for_the_end_of_a_run(
    make_task_locks: MakeLocks, proxy: Proxy, form: str
) -> None:
    sent = 0

    def count(_number: int, to_server: bool, data: bytes) -> bytes:
        nonlocal sent
        sent += to_server
        return data

    proxy.tap = count
    with Impatient(proxy.url) as locks, ThreadPoolExecutor(1) as pool:
        locks.check()
        with make_task_locks().hold("import", min_lock=0, max_lock=600):
            before = sent
            waiting = pool.submit(enter, locks, form)
            eventually(lambda: sent > before + 4)
            assert not waiting.done()
        waiting.result(60)


def test_closed_while_it_waits_for_a_run_it_is_refused(make_task_locks: MakeLocks) -> None:
    locks = make_task_locks()

    async def main() -> None:
        waiting = asyncio.ensure_future(
            locks.hold("import", min_lock=0, max_lock=600, wait=600).__aenter__()
        )
        async with locks.hold("other", min_lock=0, max_lock=600):
            await asyncio.to_thread(locks.close)
        with pytest.raises(TaskLockRefusedError, match="is running on 'one'"):
            await waiting

    with make_task_locks(replica_id="one").hold("import", min_lock=0, max_lock=600):
        asyncio.run(asyncio.wait_for(main(), 60))
