"""Event loops for tests in which a loop ends with pending tasks."""

import asyncio


def abandoned_loop() -> asyncio.AbstractEventLoop:
    """Return a loop that logs nothing about pending tasks."""
    loop = asyncio.new_event_loop()
    say_nothing_of_pending_tasks(loop)
    return loop


def say_nothing_of_pending_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Keep errors of a loop out of the log from here on.

    asyncio logs an error for each pending task when the garbage collector finds it. That may be in
    another test, which checks its own log.
    """
    loop.set_exception_handler(lambda loop, context: None)
