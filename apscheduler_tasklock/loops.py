"""Where a wrapped executor works: on an event loop or reactor, or in any thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from apscheduler_tasklock.reports import Dispatch


def dispatcher(inner: Any, dispatch: Dispatch, *, awaited: bool) -> Dispatch:
    """Return what dispatches lock events where the executor dispatches the job's own.

    If that is an event loop, the listeners may rely on it.

    :param awaited: whether the job is a coroutine
    """
    loop = getattr(inner, "_eventloop", None)
    if loop is None and awaited:
        loop = _tornado_loop(inner)
    return dispatch if loop is None else partial(_dispatch_on, loop, dispatch)


def call_as_scheduler(inner: Any, function: Callable[[], None]) -> None:
    """Call a function where the scheduler submits jobs to this executor, from another thread.

    :raises RuntimeError: the event loop is closed
    """
    loop = getattr(inner, "_eventloop", None) or _tornado_loop(inner)
    reactor = getattr(inner, "_reactor", None)
    if loop is not None:
        loop.call_soon_threadsafe(function)
    elif reactor is not None:
        reactor.callFromThread(function)
    else:
        function()


def _tornado_loop(inner: Any) -> Any:
    return getattr(getattr(inner, "_ioloop", None), "asyncio_loop", None)


def _dispatch_on(loop: asyncio.AbstractEventLoop, dispatch: Dispatch, event: Any) -> None:
    try:
        loop.call_soon_threadsafe(dispatch, event)
    except RuntimeError:  # the loop is closed
        dispatch(event)
