"""What a thread does for a coroutine: its completion, and calls on event loops."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from typing import Any

import pytest

from apscheduler_tasklock._lock.completion import Completion, result_of
from apscheduler_tasklock._lock.loops import call_on

pytestmark = pytest.mark.inside

PATIENCE = 60.0


def in_thread(function: Any) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_coroutine_gets_what_a_thread_has_done() -> None:
    completion: Completion[str] = Completion()

    async def wait() -> str:
        threading.Thread(target=completion.succeed, args=("done",)).start()
        return await asyncio.wait_for(result_of(completion), PATIENCE)

    assert asyncio.run(wait()) == "done"


def test_a_coroutine_gets_what_was_done_before_it_waits() -> None:
    completion: Completion[str] = Completion()
    completion.succeed("done")
    assert asyncio.run(asyncio.wait_for(result_of(completion), PATIENCE)) == "done"


def test_what_a_thread_raised_is_raised_where_it_is_waited_for() -> None:
    completion: Completion[None] = Completion()

    async def wait() -> None:
        threading.Thread(target=completion.fail, args=(ZeroDivisionError("x"),)).start()
        await asyncio.wait_for(result_of(completion), PATIENCE)

    with pytest.raises(ZeroDivisionError, match="x"):
        asyncio.run(wait())
    assert not completion.has_succeeded


def test_only_the_first_outcome_counts() -> None:
    completion: Completion[int] = Completion()
    completion.succeed(1)
    completion.succeed(2)
    completion.fail(ValueError())
    assert completion.has_succeeded
    assert completion.result() == 1


def test_all_who_want_to_know_are_called_once() -> None:
    completion: Completion[int] = Completion()
    called: list[str] = []
    completion.when_done(lambda: called.append("before"))
    completion.when_done(lambda: called.append("before as well"))
    in_thread(lambda: completion.succeed(1))
    completion.when_done(lambda: called.append("after"))
    completion.succeed(2)
    assert called == ["before", "before as well", "after"]


def test_who_raises_when_told_keeps_no_other_from_being_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    completion: Completion[int] = Completion()
    called: list[str] = []

    def fail() -> None:
        raise ZeroDivisionError

    completion.when_done(fail)
    completion.when_done(lambda: called.append("told"))
    completion.succeed(1)
    assert called == ["told"]
    assert "could not be told" in caplog.text


def test_a_thread_waits_for_so_long_at_most() -> None:
    completion: Completion[int] = Completion()
    assert not completion.wait(0.01)
    threading.Thread(target=completion.succeed, args=(1,)).start()
    assert completion.wait(PATIENCE)


def test_what_a_thread_does_goes_on_if_who_waits_is_cancelled() -> None:
    completion: Completion[int] = Completion()

    async def cancel() -> None:
        task = asyncio.create_task(result_of(completion))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        in_thread(lambda: completion.succeed(1))
        await asyncio.sleep(0)  # the loop is told of it, and nobody waits

    told: list[Any] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, what: told.append(what))
        await cancel()
        await asyncio.sleep(0)

    asyncio.run(watched())
    assert completion.result() == 1
    assert told == []


def test_a_loop_that_is_closed_does_not_keep_a_thread_from_its_work() -> None:
    completion: Completion[int] = Completion()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(result_of(completion))
    loop.run_until_complete(asyncio.sleep(0))
    waiting.cancel()
    loop.run_until_complete(asyncio.gather(waiting, return_exceptions=True))
    loop.close()
    completion.succeed(1)
    assert completion.result() == 1


# Calls on event loops


def test_what_one_call_raises_or_sets_is_no_other_calls() -> None:
    """They are listeners of the application, as a rule, of which it may have several."""
    seen: list[str | None] = []
    told: list[dict[str, Any]] = []
    variable: ContextVar[str | None] = ContextVar("variable", default=None)

    def look_and_set() -> None:
        seen.append(variable.get())
        variable.set("somebody else's")
        raise ZeroDivisionError

    async def calls() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, what: told.append(what))
        for _ in range(3):
            call_on(loop, look_and_set)
        while len(seen) < 3:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(calls(), PATIENCE))
    assert seen == [None, None, None]
    assert [type(what["exception"]) for what in told] == [ZeroDivisionError] * 3


def test_a_call_that_exits_the_program_keeps_no_other_from_a_loop_that_goes_on() -> None:
    called: list[str] = []

    def leave() -> None:
        raise SystemExit(3)

    loop = asyncio.new_event_loop()
    try:
        call_on(loop, leave)
        call_on(loop, lambda: called.append("later"))
        with pytest.raises(SystemExit):
            loop.run_forever()
        assert called == []
        loop.run_until_complete(asyncio.sleep(0))
        assert called == ["later"]
    finally:
        loop.close()


def test_calls_from_threads_come_in_their_order() -> None:
    called: list[int] = []

    async def calls() -> None:
        loop = asyncio.get_running_loop()

        def call_all() -> None:
            for number in range(1000):
                call_on(loop, lambda number=number: called.append(number))  # type: ignore[misc]

        threading.Thread(target=call_all).start()
        while len(called) < 1000:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(calls(), PATIENCE))
    assert called == list(range(1000))
