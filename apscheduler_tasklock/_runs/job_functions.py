"""Job functions: their references, their identities, and whether a call runs a function's body."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from inspect import iscoroutinefunction as is_coroutine_function
from inspect import unwrap
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from apscheduler.util import iscoroutinefunction_partial

from apscheduler_tasklock._returned import why_no_call_runs
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


def check_body_runs(function: Any, where: str, *, awaiting: str | None = None) -> None:
    """Make sure that a call of a job's function runs the function's body.

    :param where: names the job, for messages
    :param awaiting: the name of the executor's class, if the executor does not await coroutines;
        else ``None``
    :raises TaskLockOptionError: the call only makes an object, such as a generator, whose work
        nobody runs
    """
    function = unwrapped(function)
    if iscoroutinefunction_partial(function):
        if awaiting is not None:
            raise TaskLockOptionError(
                f"{where}: its function is a coroutine, which {awaiting} does not await; use an "
                "AsyncIOScheduler, or a plain function"
            )
        return
    called = function
    if not isinstance(function, (FunctionType, MethodType, BuiltinFunctionType, type)):
        called = getattr(function, "__call__", None)  # noqa: B004  # the method itself is needed
        if is_coroutine_function(called):
            raise TaskLockOptionError(
                f"{where}: its function is {type(function).__qualname__}.__call__, which is a "
                "coroutine, and APScheduler takes the object for a plain function, so that nobody "
                "would await it; pass that method itself, as in add_job(job.__call__, ...)"
            )
    if why := why_no_call_runs(called):
        raise TaskLockOptionError(f"{where}: its function returns {why}")
