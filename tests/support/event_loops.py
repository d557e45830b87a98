"""Event loops of tests that end one with tasks pending."""

import asyncio


def abandoned_loop() -> asyncio.AbstractEventLoop:
    """Return a loop that says nothing of tasks that are pending for ever."""
    loop = asyncio.new_event_loop()
    say_nothing_of_pending_tasks(loop)
    return loop


def say_nothing_of_pending_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Keep errors of the loop out of the log from here on.

    asyncio logs one for each pending task when the garbage collector finds it, which may be while
    another test looks at what was logged.
    """
    loop.set_exception_handler(lambda loop, context: None)
