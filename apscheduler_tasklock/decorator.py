"""``@task_lock``: lock options on the job function itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar, overload

from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.options import (
    DEFAULT,
    RESERVED_KEY,
    Default,
    LockOptions,
    parse_job_options,
)

_FUNCTION_ATTRIBUTE = "__task_lock__"

Seconds = float | timedelta
Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def task_lock(options: Function, /) -> Function: ...


@overload
def task_lock(options: Literal[False], /) -> Callable[[Function], Function]: ...


@overload
def task_lock(
    *,
    name: str | None = None,
    min_factor: float | None = None,
    max_factor: float | None = None,
    min_lock: Seconds | None = None,
    max_lock: Seconds | None = None,
    period: Seconds | None = None,
    lease: Seconds | Default | None = DEFAULT,
    failover: bool | None = None,
    max_takeovers: int | None = None,
    cancel_on_lost: bool | None = None,
    on_failure: Literal["keep", "release"] | None = None,
    grace: Seconds | None = None,
    max_runtime: Seconds | None = None,
) -> Callable[[Function], Function]: ...


def task_lock(options: Any = None, /, **named: Any) -> Any:
    """Give a job function lock options, and let it take ``kwargs={"task_lock": {...}}``.

    The function itself is returned, not a wrapper, so that persistent job stores can import it.
    Use it as ``@task_lock``, ``@task_lock(max_factor=2)``, or ``@task_lock(False)`` for a function
    whose jobs run on every replica. For the options see
    :class:`~apscheduler_tasklock.options.LockOptions`.

    :raises TaskLockOptionError: an option is unknown or impossible
    """
    if callable(options) or isinstance(options, classmethod):
        _mark(options, named)
        return options
    if not (options is None or (options is False and not named)):
        raise TaskLockOptionError(
            "@task_lock takes options by their names, as in @task_lock(max_factor=2), or False "
            f"alone, not {options!r}"
        )

    def decorate(function: Function) -> Function:
        _mark(function, False if options is False else named)
        return function

    return decorate


def function_options(function: Callable[..., Any]) -> LockOptions | Literal[False] | None:
    """Return what ``@task_lock`` gave a function, method, callable object or partial of one."""
    while isinstance(function, partial):
        function = function.func
    marked = getattr(function, _FUNCTION_ATTRIBUTE, None)
    if marked is None:
        marked = getattr(getattr(function, "__call__", None), _FUNCTION_ATTRIBUTE, None)  # noqa: B004  # its mark, not whether there is one
    return marked


def _mark(function: Any, options: Any) -> None:
    target = function.__func__ if isinstance(function, (classmethod, staticmethod)) else function
    where = f"@task_lock on {getattr(target, '__qualname__', target)!s}"
    marked_before = hasattr(target, _FUNCTION_ATTRIBUTE)
    setattr(target, _FUNCTION_ATTRIBUTE, parse_job_options(options, where))
    if not marked_before:
        _accept_reserved_key(target, where)


def _accept_reserved_key(function: Any, where: str) -> None:
    """Make APScheduler's check of job kwargs pass the reserved key, which is taken out later."""
    # As APScheduler sees it: a wrapper may pass its function arguments that a job does not have.
    signature = inspect.signature(function, follow_wrapped=False)
    parameters = list(signature.parameters.values())
    if RESERVED_KEY in signature.parameters:
        raise TaskLockOptionError(
            f"{where}: the function has a parameter {RESERVED_KEY!r} of its own, which would never "
            "be passed; rename it, or use current_lock() to reach the lock"
        )
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    reserved = inspect.Parameter(RESERVED_KEY, inspect.Parameter.KEYWORD_ONLY, default=None)
    function.__signature__ = signature.replace(parameters=[*parameters, reserved])
