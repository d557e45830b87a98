"""``@task_lock``: gives a job's function its lock options."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import FunctionType
from typing import Any, Literal, TypeVar, overload

from apscheduler_tasklock.errors import TaskLockOptionError, raised_at_the_call
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
    retries: int | None = None,
    retry_delay: Seconds | None = None,
    retry_backoff: float | None = None,
) -> Callable[[Function], Function]: ...


@raised_at_the_call
def task_lock(options: Any = None, /, **named: Any) -> Any:
    """Give a job function lock options, and let its jobs have ``kwargs={"task_lock": {...}}``.

    Use the decorator as ``@task_lock``, ``@task_lock(max_factor=2)``, or ``@task_lock(False)`` for
    a function whose jobs run on every replica. For the options see
    :class:`~apscheduler_tasklock.options.LockOptions`.

    The decorator returns a wrapper with the name and the signature of the function, so that
    persistent job stores and process pools find the wrapper by that name. A coroutine function, a
    method or a class method stays one. The wrapper drops the key ``task_lock`` from the kwargs
    before it calls the function. So application code may call the wrapper with a job's kwargs, as
    Flask-APScheduler's ``run_job`` does. Such a call runs the job without a lock.

    If the function is in its module under its name already, as in
    ``nightly = task_lock(max_factor=2)(reports.send)``, the decorator returns the function itself,
    because job stores and process pools find the function by that name, and not a wrapper. A direct
    call of the function does not drop the key. The function can have one set of options only: for
    other options decorate ``functools.partial(reports.send)``.

    :raises TaskLockOptionError: an option is unknown or impossible, the function has a parameter
        ``task_lock``, or it is in its module and has other options already
    """
    if callable(options) or isinstance(options, classmethod):
        return _decorated(options, named)
    if not (options is None or (options is False and not named)):
        raise TaskLockOptionError(
            "@task_lock takes options by their names, as in @task_lock(max_factor=2), or False "
            f"alone, not {options!r}"
        )

    @raised_at_the_call
    def decorate(function: Function) -> Any:
        return _decorated(function, False if options is False else named)

    return decorate


def function_options(function: Callable[..., Any]) -> LockOptions | Literal[False] | None:
    """Return the options that ``@task_lock`` gave to a callable, or to the function in a partial.

    :return: the options; ``None`` if the callable has none
    """
    while (marked := getattr(function, _FUNCTION_ATTRIBUTE, None)) is None and isinstance(
        function, partial
    ):
        function = function.func
    if marked is None:
        marked = getattr(getattr(function, "__call__", None), _FUNCTION_ATTRIBUTE, None)  # noqa: B004  # reads an attribute of it
    return marked


def is_found_by_name(function: Any) -> bool:
    """Return whether a function or class is in its module under its own name at this moment."""
    module = sys.modules.get(str(getattr(function, "__module__", None)))
    first, *rest = str(getattr(function, "__qualname__", "")).split(".")
    # Read from `__dict__`, so that the module's `__getattr__` is not called.
    found: Any = getattr(module, "__dict__", {}).get(first)
    for name in rest:
        found = getattr(found, name, None)
    return found is function


def _decorated(function: Any, options: Any) -> Any:
    """Return the function with its options, or a wrapper that drops the reserved key.

    The function itself gets the options even if a wrapper is returned, because another decorator
    may have stored the function, or the caller may not use the wrapper.
    """
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(_decorated(function.__func__, options))
    where = f"@task_lock on {getattr(function, '__qualname__', function)!s}"
    marked = parse_job_options(options, where)
    before = function_options(function)
    has_name = is_found_by_name(function)
    if has_name and before not in (None, marked):
        raise TaskLockOptionError(
            f"{where}: the function has other options already, which hold wherever the function is "
            "found by its name; decorate functools.partial(...) of it, or give the options to its "
            'job, as in kwargs={"task_lock": {...}}'
        )
    setattr(function, _FUNCTION_ATTRIBUTE, marked)
    if before is None:
        _accept_reserved_key(function, where)
    return function if has_name else _without_reserved_key(function)


def _accept_reserved_key(function: Any, where: str) -> None:
    """Let APScheduler's check of a job's kwargs accept the reserved key."""
    signature = _signature(function)
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


def _without_reserved_key(function: Any) -> Any:
    """Return a wrapper that drops the reserved key, with the name and signature of a function.

    The wrapper is for direct calls, because a ``TaskLockExecutor`` takes the key out of a job's
    kwargs itself. A callable object or a partial is returned as it is, because a wrapper would be
    another kind of object. A generator function is returned as it is, because it cannot be a job.
    """
    if (
        not isinstance(function, FunctionType)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        return function
    made: Any
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_coroutine(*args: Any, task_lock: Any = None, **kwargs: Any) -> Any:
            return await function(*args, **kwargs)

        made = call_coroutine
    else:

        @functools.wraps(function)
        def call(*args: Any, task_lock: Any = None, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        made = call
    made.__signature__ = _signature(function)
    return made


def _signature(function: Any) -> inspect.Signature:
    # `follow_wrapped=False`, because APScheduler checks a job's arguments against the signature of
    # the outermost wrapper.
    return inspect.signature(function, follow_wrapped=False)
