"""Objects that a function returns before its work has run, such as a coroutine or a generator.

Nobody awaits or iterates over what a job or a held function returns. So its work would never run,
or would run without the lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from inspect import isasyncgenfunction, isgeneratorfunction
from types import FunctionType
from typing import Any

from apscheduler_tasklock.errors import TaskLockOptionError


@contextmanager
def _with() -> Iterator[None]:
    yield


@asynccontextmanager
async def _async_with() -> AsyncIterator[None]:
    yield


_examples: tuple[Any, ...] = (_with, _async_with)
# What the functions return that the decorators of `contextlib` make. All that one of these
# decorators makes have the same code.
_MADE_BY = {example.__code__: type(example()) for example in _examples}
_With, _AsyncWith = _MADE_BY.values()

_ITERATE = "which nobody iterates over; iterate over it inside the function, as in list(...)"
_AWAIT = (
    "which nobody awaits; await it inside the function, with `async def`, for which a job needs an "
    "AsyncIOScheduler"
)
# Each type of these objects, in words, and what to do instead. An iterator of another type, such as
# a file or a cursor, is a result like others.
_TYPES: tuple[tuple[type, str, str], ...] = (
    (
        _With,
        "a context manager",
        "which nobody enters; enter it inside the function, by `with`",
    ),
    (
        _AsyncWith,
        "an async context manager",
        "which nobody enters; enter it inside the function, by `async with`",
    ),
    (Generator, "a generator", _ITERATE),
    (
        AsyncGenerator,
        "an async generator",
        "which nobody iterates over; iterate over it inside the function, by `async for`",
    ),
    (map, "a map object", _ITERATE),
    (filter, "a filter object", _ITERATE),
    (zip, "a zip object", _ITERATE),
    (Coroutine, "a coroutine", _AWAIT),
    (Awaitable, "an awaitable {}", _AWAIT),
)


def why_not_run(returned: type) -> str | None:
    """Say what a returned object is whose work has not run, and what to do instead.

    :param returned: the object's type. Only the type counts, because an object of the
        application's may do harm when it is asked for anything.
    :return: the object of a sentence; ``None``: the object is a plain result
    """
    for kind, words, remedy in _TYPES:
        if issubclass(returned, kind):
            return f"{words.format(returned.__qualname__)}, {remedy}"
    return None


def why_no_call_runs(function: Any) -> str | None:
    """Say what each call of a function returns in place of running its work, if that is to be seen.

    A coroutine function is left out, because some executors await it.

    :return: as :func:`why_not_run`
    """
    if isasyncgenfunction(function):
        return why_not_run(AsyncGenerator)
    if isgeneratorfunction(function):
        return why_not_run(Generator)
    if isinstance(function, type):
        return why_not_run(function)
    made = _MADE_BY.get(function.__code__) if isinstance(function, FunctionType) else None
    return None if made is None else why_not_run(made)


def check_returned(returned: Any, where: str) -> Any:
    """Return what a function has returned, if it is a plain result.

    Otherwise a coroutine or generator is closed, and a task is cancelled.

    :param where: names the function, for the message
    :raises TaskLockOptionError: the work of the returned object has not run. Such a run is not
        retried, because each attempt would end in the same way.
    """
    why = None if returned is None else why_not_run(type(returned))
    if why is None:
        return returned
    with suppress(Exception):  # whatever the application's own code raises
        _end(returned)
    raise TaskLockOptionError(f"{where} has returned {why}")


def _end(returned: Any) -> None:
    if isinstance(returned, (Coroutine, Generator)):
        returned.close()
    elif isinstance(returned, asyncio.Future):
        loop = returned.get_loop()
        try:
            is_here = asyncio.get_running_loop() is loop
        except RuntimeError:  # no event loop runs in this thread
            is_here = False
        if is_here:  # at once, so that a task does not begin
            returned.cancel()
        else:
            loop.call_soon_threadsafe(returned.cancel)
