"""What a job calls: its reference, what it is compared by, and whether its body runs at all."""

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

# What the module is called that a process was started with; the second name is that in a process
# that multiprocessing has spawned.
_MAIN = ("__main__", "__mp_main__")


def unwrapped(function: Any) -> Any:
    """Return the function that a partial calls."""
    while isinstance(function, partial):
        function = function.func
    return function


def function_reference(job: Any) -> str:
    """Return the reference of a job's function, which is the same on every replica."""
    if job.func_ref:
        module, separator, name = str(job.func_ref).partition(":")
        return f"{_started_module(module)}{separator}{name}"
    return _reference(unwrapped(job.func))


def _reference(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{_started_module(str(getattr(function, '__module__', '')))}:{name}"


def _started_module(module: str) -> str:
    """Return a module's name; of ``__main__`` that of the module that was started."""
    if module not in _MAIN:
        return module
    main = sys.modules.get(module)
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None and name not in _MAIN:  # python -m package.module
        return str(name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return "__main__" if file is None else _module_of(os.path.abspath(file)) or "__main__"


@cache
def _module_of(file: str) -> str:
    """Return under which name a file would be imported: with the packages that it lies in."""
    path = Path(file)
    names = [path.stem]
    for folder in path.parents:
        if not (folder / "__init__.py").is_file():
            break
        names.insert(0, folder.name)
    if names[-1] in ("__main__", "__init__"):  # what a package, or else a folder, runs
        names.pop()
    return ".".join(names)


@dataclass(frozen=True)
class FunctionIdentity:
    """What tells a function from others, the same on every replica.

    :ivar form: JSON-like data
    :ivar values: what the function carries: arguments in all but name, or further functions
    :ivar has_name: whether its module has it under its name, so that every replica has the same
        one, even if some of the values cannot be compared
    """

    form: Any
    values: Sequence[Any]
    has_name: bool


def identity_of(function: Any) -> FunctionIdentity | None:
    """Return what tells a job's function, without its partials, from others.

    A function or class that its module has under its name is compared by that name, and by the
    defaults of its parameters, because a loop of a module may define it again and again. Any other
    function, as a lambda or a nested one, is compared by its code and by all that it carries.

    :return: ``None`` of anything else, such as the method of an object: nothing tells whether
        another replica has the same one
    """
    # A subclass's method is its parent's function.
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
    except ValueError:  # one of them has no value yet
        return None
    form = [references, names, _code_form(function.__code__)]
    return FunctionIdentity(form, [*defaults, *captured], has_name=False)


def _defaults(function: Any) -> tuple[list[Any], list[Any]]:
    """Return what tells which parameters have defaults, and the defaults."""
    positional = getattr(function, "__defaults__", None) or ()
    named = getattr(function, "__kwdefaults__", None) or {}
    return [len(positional), *named], [*positional, *named.values()]


def _code_form(code: CodeType) -> list[Any]:
    """Return a function's code as JSON-like data, without where it stands."""
    parameters = [code.co_argcount, code.co_kwonlyargcount, code.co_flags]
    names = [code.co_names, code.co_varnames, code.co_freevars]
    return [code.co_code.hex(), parameters, names, [_constant_form(one) for one in code.co_consts]]


def _constant_form(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        return _code_form(constant)
    if isinstance(constant, frozenset):  # in another order in each process
        return sorted(map(repr, constant))
    return repr(constant)


def check_runs(function: Any, where: str, *, awaiting: str | None = None) -> None:
    """Make sure that a call of a job's function runs its body.

    :param where: which job's it is, for messages
    :param awaiting: what kind of executor calls it, if that one awaits no coroutines
    :raises TaskLockOptionError: the call only makes an object, which nobody awaits or iterates over
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
        called = getattr(function, "__call__", None)  # noqa: B004  # what it is, not whether there is one
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
            "over it, and no executor does; pass a function that does so"
        )


def events_of_what_ran(events: Sequence[Any], logger_name: str) -> list[Any]:
    """Return the events of runs; those of jobs that have only returned a coroutine are errors.

    No look at a function tells that of it before, as of ``lambda: fetch()``.

    :param logger_name: the executor's logger
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
    """Return why a job's function has failed that has only returned what was to be run, if it has.

    A coroutine is closed.
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
    """Return what a function has returned, if that was to be run and was not."""
    if iscoroutine(returned):
        return "a coroutine"
    return "an async generator" if isasyncgen(returned) else None
