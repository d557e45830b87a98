"""Job functions: their references, their identities, and whether a call runs a function's body."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import isasyncgen, isasyncgenfunction, iscoroutine, isgeneratorfunction, unwrap
from inspect import iscoroutinefunction as is_coroutine_function
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, JobExecutionEvent
from apscheduler.util import iscoroutinefunction_partial

from apscheduler_tasklock.decorator import is_found_by_name
from apscheduler_tasklock.errors import TaskLockOptionError

# The names of the module with which a process was started. It has the second name in a process that
# `multiprocessing` has spawned.
_MAIN = ("__main__", "__mp_main__")


def unwrapped(function: Any) -> Any:
    """Return the function that a ``functools.partial`` calls, or the given function itself."""
    while isinstance(function, partial):
        function = function.func
    return function


def function_reference(job: Any) -> str:
    """Return the reference of a job's function. The reference is the same on every replica."""
    if job.func_ref:
        module, separator, name = str(job.func_ref).partition(":")
        return f"{_started_module(module)}{separator}{name}"
    return _reference(unwrapped(job.func))


def _reference(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{_started_module(str(getattr(function, '__module__', '')))}:{name}"


def _started_module(module: str) -> str:
    """Return a module's name; for ``__main__``, the name of the module that was started."""
    if module not in _MAIN:
        return module
    main = sys.modules.get(module)
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None and name not in _MAIN:  # started as `python -m package.module`
        return str(name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return "__main__" if file is None else _module_of(os.path.abspath(file)) or "__main__"


@cache
def _module_of(file: str) -> str:
    """Return the module name by which a file would be imported, with the names of its packages."""
    path = Path(file)
    names = [path.stem]
    for folder in path.parents:
        if not (folder / "__init__.py").is_file():
            break
        names.insert(0, folder.name)
    if names[-1] in ("__main__", "__init__"):  # a package or a folder was started
        names.pop()
    return ".".join(names)


@dataclass(frozen=True)
class FunctionIdentity:
    """The identity of a function. The identity is the same on every replica.

    :ivar form: JSON-like data that identify the function, without ``values``
    :ivar values: the values that the function carries: defaults and captured variables
    :ivar has_name: whether the function is in its module under its name. If so, every replica has
        the same function, even if some of the values cannot be compared.
    """

    form: Any
    values: Sequence[Any]
    has_name: bool


def identity_of(function: Any) -> FunctionIdentity | None:
    """Return the identity of a job's function.

    A function or class that is in its module under its name is identified by that name and by the
    defaults of its parameters. The defaults count, because a module's loop may define the function
    several times, with other defaults. Any other function, such as a lambda or a nested function,
    is identified by its code and by the values that it carries.

    :param function: the function, without partials
    :return: ``None`` for anything else, such as the method of an object, because objects cannot be
        compared between replicas
    """
    # Of a class method, the class is a part of the identity, because a subclass that inherits the
    # method has the same function.
    owner = function.__self__ if isinstance(function, MethodType) else function
    references = [_reference(owner), _reference(function)]
    if is_found_by_name(owner):
        names, defaults = _defaults(unwrap(function))
        return FunctionIdentity([references, names], defaults, has_name=True)
    if not isinstance(function, FunctionType):
        return None
    names, defaults = _defaults(function)
    try:
        captured = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a captured variable has no value yet
        return None
    form = [references, names, _code_form(function.__code__)]
    return FunctionIdentity(form, [*defaults, *captured], has_name=False)


def _defaults(function: Any) -> tuple[list[Any], list[Any]]:
    """Return which parameters of a function have defaults, and the defaults."""
    positional = getattr(function, "__defaults__", None) or ()
    named = getattr(function, "__kwdefaults__", None) or {}
    return [len(positional), *named], [*positional, *named.values()]


def _code_form(code: CodeType) -> list[Any]:
    """Return a function's code as JSON-like data, without its file and lines."""
    parameters = [code.co_argcount, code.co_kwonlyargcount, code.co_flags]
    names = [code.co_names, code.co_varnames, code.co_freevars]
    return [code.co_code.hex(), parameters, names, [_constant_form(one) for one in code.co_consts]]


def _constant_form(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        return _code_form(constant)
    if isinstance(constant, frozenset):  # sorted, because its order differs between processes
        return sorted(map(repr, constant))
    return repr(constant)


def check_runs(function: Any, where: str, *, awaiting: str | None = None) -> None:
    """Make sure that a call of a job's function runs the function's body.

    :param where: names the job, for messages
    :param awaiting: the name of the executor's class, if the executor does not await coroutines;
        else ``None``
    :raises TaskLockOptionError: the call only makes a coroutine or a generator, which nobody awaits
        or iterates over
    """
    function = unwrapped(function)
    if iscoroutinefunction_partial(function):
        if awaiting is not None:
            raise TaskLockOptionError(
                f"{where}: its function is a coroutine, which {awaiting} does not await; use an "
                "AsyncIOScheduler, or a plain function"
            )
        return
    called, remedy = function, ""
    if not isinstance(function, (FunctionType, MethodType, BuiltinFunctionType, type)):
        called = getattr(function, "__call__", None)  # noqa: B004  # the method itself is needed
        remedy = "; pass that method itself, as in add_job(job.__call__, ...)"
    of = "" if called is function else f"{type(function).__qualname__}.__call__, which is "
    if is_coroutine_function(called):
        raise TaskLockOptionError(
            f"{where}: its function is {of}a coroutine, and APScheduler takes the object for a "
            f"plain function, so that nobody would await it{remedy}"
        )
    if isasyncgenfunction(called) or isgeneratorfunction(called):
        kind = "an async generator" if isasyncgenfunction(called) else "a generator"
        raise TaskLockOptionError(
            f"{where}: its function is {of}{kind}, whose body runs only while somebody iterates "
            "over it, and no executor does so; pass a function that iterates over it"
        )


def events_of_what_ran(events: Sequence[Any], logger_name: str) -> list[Any]:
    """Return the events of runs, with an error event for each job that only returned a coroutine.

    A job such as ``lambda: fetch()``, where ``fetch`` is a coroutine function, can only be
    recognized by what it returns.

    :param logger_name: name of the executor's logger
    """
    checked = []
    for event in events:
        error = None
        if event.code == EVENT_JOB_EXECUTED:
            error = why_never_run(event.retval, event.job_id)
        if error is None:
            checked.append(event)
            continue
        logging.getLogger(logger_name).error("%s", error)
        checked.append(
            JobExecutionEvent(
                EVENT_JOB_ERROR,
                event.job_id,
                event.jobstore,
                event.scheduled_run_time,
                exception=error,
            )
        )
    return checked


def why_never_run(returned: Any, job_id: str) -> TaskLockOptionError | None:
    """Return an error if a job's function has returned a coroutine or an async generator.

    Nobody would run the returned object. A coroutine is closed here. ``None`` if there is no error.
    """
    kind = _never_run(returned)
    if kind is None:
        return None
    if iscoroutine(returned):
        returned.close()
    return TaskLockOptionError(
        f"job {job_id!r}: its function has returned {kind}, which nobody runs; pass the "
        "coroutine function itself, to a scheduler that awaits it, as AsyncIOScheduler"
    )


def _never_run(returned: Any) -> str | None:
    """Return the kind of a returned object that nobody would run; ``None`` for any other object."""
    if iscoroutine(returned):
        return "a coroutine"
    return "an async generator" if isasyncgen(returned) else None
