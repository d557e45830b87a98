"""``@task_lock``: lock options on the job function itself."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import FunctionType
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

    The result has the name and the signature of the function. It drops the reserved key before it
    calls the function, also in a direct call, as that of Flask-APScheduler's ``run_job``, which
    runs without a lock. Persistent job stores and process pools find it by its name. A coroutine
    function, a method or a class method stays one.

    A function that its module has under its name already, as in
    ``nightly = task_lock(max_factor=2)(reports.send)``, is returned itself, because job stores and
    process pools would find it, and not the result. A direct call of it does not drop the key. It
    has one set of options: for another one decorate ``functools.partial(reports.send)``.

    Use it as ``@task_lock``, ``@task_lock(max_factor=2)``, or ``@task_lock(False)`` for a function
    whose jobs run on every replica. For the options see
    :class:`~apscheduler_tasklock.options.LockOptions`.

    :raises TaskLockOptionError: an option is unknown or impossible, or the function has a parameter
        ``task_lock``, or other options under its name
    """
    if callable(options) or isinstance(options, classmethod):
        return _decorated(options, named)
    if not (options is None or (options is False and not named)):
        raise TaskLockOptionError(
            "@task_lock takes options by their names, as in @task_lock(max_factor=2), or False "
            f"alone, not {options!r}"
        )

    def decorate(function: Function) -> Any:
        return _decorated(function, False if options is False else named)

    return decorate


def function_options(function: Callable[..., Any]) -> LockOptions | Literal[False] | None:
    """Return what ``@task_lock`` gave a function, method, callable object or partial of one."""
    while (marked := getattr(function, _FUNCTION_ATTRIBUTE, None)) is None and isinstance(
        function, partial
    ):
        function = function.func
    if marked is None:
        marked = getattr(getattr(function, "__call__", None), _FUNCTION_ATTRIBUTE, None)  # noqa: B004  # its mark, not whether there is one
    return marked


def is_found_by_name(function: Any) -> bool:
    """Tell whether a function or class is what its module has under its name now."""
    module = sys.modules.get(str(getattr(function, "__module__", None)))
    first, *rest = str(getattr(function, "__qualname__", "")).split(".")
    found: Any = getattr(module, "__dict__", {}).get(first)  # calls no __getattr__ of the module
    for name in rest:
        found = getattr(found, name, None)
    return found is function


def _decorated(function: Any, options: Any) -> Any:
    """Return what stands for the function under its name.

    The function itself has the options, too, for a decorator below that has kept it, and for a
    caller who throws the result away.
    """
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(_decorated(function.__func__, options))
    where = f"@task_lock on {getattr(function, '__qualname__', function)!s}"
    marked = parse_job_options(options, where)
    before = function_options(function)
    has_name = is_found_by_name(function)
    if has_name and before not in (None, marked):
        raise TaskLockOptionError(
            f"{where}: it has other options already, and is one function for all who find it by "
            "its name; decorate functools.partial(...) of it, or give the options to its job, as "
            'in kwargs={"task_lock": {...}}'
        )
    setattr(function, _FUNCTION_ATTRIBUTE, marked)
    if before is None:
        _accept_reserved_key(function, where)
    return function if has_name else _without_reserved_key(function)


def _accept_reserved_key(function: Any, where: str) -> None:
    """Make APScheduler's check of job kwargs pass the reserved key."""
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
    """Return what calls the function without the reserved key, and looks like it.

    Executors take the key out of a job's kwargs, but others who call a job's function do not. A
    callable object or a partial is returned as it is, because a function in its place would be
    another kind of thing; so is a generator function, because it is no job.
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
    # As APScheduler sees it: a wrapper may pass its function arguments that a job does not have.
    return inspect.signature(function, follow_wrapped=False)
