"""``@task_lock`` on everything that APScheduler takes for a job function."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from apscheduler.util import (
    check_callable_args,
    iscoroutinefunction_partial,
    obj_to_ref,
    ref_to_obj,
)

from apscheduler_tasklock import TaskLockOptionError, task_lock
from apscheduler_tasklock.decorator import function_options
from apscheduler_tasklock.options import LockOptions

TWICE = LockOptions(max_factor=2)
RESERVED = {"task_lock": {"max_factor": 3}}


@task_lock
def bare() -> str:
    return "bare"


@task_lock(max_factor=2)
def with_options(first: int, second: int = 2, *, third: int = 3) -> tuple[int, int, int]:
    return first, second, third


@task_lock(False)
def without_lock() -> None: ...


@task_lock(max_factor=2)
async def coroutine(first: int) -> int:
    return first


class Service:
    @task_lock(max_factor=2)
    def method(self, first: int) -> int:
        return first

    @task_lock(max_factor=2)
    @classmethod
    def class_method_inside(cls, first: int) -> int:
        return first

    @classmethod
    @task_lock(max_factor=2)
    def class_method_outside(cls, first: int) -> int:
        return first

    @task_lock(max_factor=2)
    @staticmethod
    def static_method_inside(first: int) -> int:
        return first

    @staticmethod
    @task_lock(max_factor=2)
    def static_method_outside(first: int) -> int:
        return first

    @task_lock(max_factor=2)
    def __call__(self, first: int) -> int:
        return first


class BareMethods:
    @task_lock
    @classmethod
    def class_method(cls) -> str:
        return "class"

    @task_lock
    @staticmethod
    def static_method() -> str:
        return "static"


def one_argument() -> list[Any]:
    """Return job functions of every kind; each takes one number and returns it."""
    service = Service()
    kinds = {
        "method": service.method,
        "class-method-inside": Service.class_method_inside,
        "class-method-outside": Service.class_method_outside,
        "class-method-of-instance": service.class_method_inside,
        "static-method-inside": Service.static_method_inside,
        "static-method-outside": service.static_method_outside,
        "callable-object": service,
        "partial-of-method": functools.partial(service.method),
        "partial-of-partial": functools.partial(functools.partial(Service.class_method_inside)),
    }
    return [pytest.param(function, id=kind) for kind, function in kinds.items()]


# Options


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (bare, LockOptions()),
        (with_options, TWICE),
        (without_lock, False),
        (coroutine, TWICE),
        (functools.partial(coroutine, 1), TWICE),
        (functools.partial(without_lock), False),
        (BareMethods.class_method, LockOptions()),
        (BareMethods.static_method, LockOptions()),
        (print, None),
        (lambda: None, None),
        (functools.partial(print), None),
        (object(), None),
    ],
)
def test_options_are_found_on_the_function(function: Any, options: Any) -> None:
    assert function_options(function) == options


@pytest.mark.parametrize("function", one_argument())
def test_options_are_found_on_every_kind_of_callable(function: Any) -> None:
    assert function_options(function) == TWICE


def test_every_option_may_be_given() -> None:
    def job() -> None: ...

    task_lock(
        name="job",
        min_lock="5",
        max_lock=timedelta(minutes=1),
        period=60,
        on_failure="release",
    )(job)
    assert function_options(job) == LockOptions(
        name="job", min_lock=5, max_lock=60, period=60, on_failure="release"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_facto": 2}, r"@task_lock on .*\.job: unknown task lock option 'max_facto'"),
        ({"max_factor": -1}, r"@task_lock on .*\.job: max_factor must be a number above 0"),
        ({"min_lock": 2, "max_lock": 1}, r"@task_lock on .*\.job: min_lock \(2\) must not be"),
    ],
)
def test_impossible_options_name_the_function(options: Any, message: str) -> None:
    def job() -> None: ...

    with pytest.raises(TaskLockOptionError, match=message):
        task_lock(**options)(job)


@pytest.mark.parametrize(
    ("given", "named"),
    [({"max_factor": 2}, {}), (True, {}), (0, {}), ("name", {}), (False, {"max_factor": 2})],
)
def test_options_without_their_names_are_refused(given: Any, named: dict[str, Any]) -> None:
    with pytest.raises(TaskLockOptionError, match=r"@task_lock\(max_factor=2\), or False"):
        task_lock(given, **named)


def test_function_and_options_may_be_given_in_one_call() -> None:
    def job() -> None: ...

    assert function_options(task_lock(job, max_factor=2)) == TWICE


def test_outer_decorator_replaces_the_inner_one() -> None:
    @task_lock(max_factor=2)
    @task_lock(False)
    def job() -> None: ...

    assert function_options(job) == TWICE
    check_callable_args(job, (), RESERVED)


# A direct call, as of Flask-APScheduler's `run_job`


@pytest.mark.parametrize("function", one_argument())
@pytest.mark.parametrize("options", [{"max_factor": 3}, False, None])
def test_a_direct_call_takes_the_reserved_key_out(function: Any, options: Any) -> None:
    assert function(5, task_lock=options) == 5
    assert function(first=5, task_lock=options) == 5


def test_a_direct_call_of_a_function_takes_the_reserved_key_out() -> None:
    assert bare(**RESERVED) == "bare"  # type: ignore[call-arg]  # its type is that of the function
    assert with_options(1, third=5, **RESERVED) == (1, 2, 5)  # type: ignore[arg-type]  # the same
    assert (BareMethods.class_method(**RESERVED), BareMethods.static_method(**RESERVED)) == (
        "class",
        "static",
    )


def test_a_direct_call_of_a_coroutine_function_takes_the_reserved_key_out() -> None:
    assert asyncio.run(coroutine(5, **RESERVED)) == 5  # type: ignore[arg-type]  # the same


def test_a_direct_call_passes_other_keywords_on() -> None:
    @task_lock
    def job(**others: Any) -> dict[str, Any]:
        return others

    assert job(other=1, **RESERVED) == {"other": 1}


def test_a_function_that_was_decorated_twice_takes_the_reserved_key_out() -> None:
    @task_lock(max_factor=2)
    @task_lock
    def job(first: int) -> int:
        return first

    assert job(5, **RESERVED) == 5  # type: ignore[arg-type]  # the same


def test_a_call_with_other_arguments_fails_as_ever() -> None:
    with pytest.raises(TypeError, match=r"bare\(\) got an unexpected keyword argument 'task_lok'"):
        bare(task_lok=1)  # type: ignore[call-arg]  # on purpose


# The function stays what it is for all who use it by its name


@pytest.mark.parametrize(
    "decorate", [task_lock, task_lock(), task_lock(max_factor=2), task_lock(False)]
)
def test_what_is_returned_looks_like_the_function(decorate: Callable[[Any], Any]) -> None:
    def job(first: int, *, second: int = 2) -> int:
        """Return both."""
        return first + second

    job.its_own = 1  # type: ignore[attr-defined]  # as other decorators do
    made = decorate(job)
    assert (made.__name__, made.__qualname__, made.__module__, made.__doc__) == (
        job.__name__,
        job.__qualname__,
        job.__module__,
        job.__doc__,
    )
    assert made.its_own == 1
    assert list(inspect.signature(made).parameters) == ["first", "second", "task_lock"]
    assert inspect.getsource(made) == inspect.getsource(job)
    assert isinstance(decorate(classmethod(job)), classmethod)
    assert isinstance(decorate(staticmethod(job)), staticmethod)


@pytest.mark.parametrize("decorate", [task_lock, task_lock(max_factor=2)])
def test_the_function_itself_has_the_options_too(decorate: Callable[[Any], Any]) -> None:
    """A decorator below may have kept it, and a call's result may be thrown away."""

    def job() -> None: ...

    assert function_options(decorate(job)) == function_options(job) is not None
    check_callable_args(job, (), RESERVED)


@pytest.mark.parametrize("kind", ["generator", "async generator"])
def test_generators_which_are_no_jobs_are_left_as_they_are(kind: str) -> None:
    def generator() -> Any:
        yield 1

    async def async_generator() -> Any:
        yield 1

    function: Any = generator if kind == "generator" else async_generator
    assert task_lock(function) is function


def test_function_can_be_called_as_before() -> None:
    assert bare() == "bare"
    assert with_options(1, third=5) == (1, 2, 5)
    assert (BareMethods.class_method(), BareMethods.static_method()) == ("class", "static")


@pytest.mark.parametrize("function", one_argument())
def test_every_kind_of_callable_can_be_called_as_before(function: Callable[[int], int]) -> None:
    assert function(5) == 5


@pytest.mark.parametrize("function", [bare, with_options, without_lock, coroutine])
def test_function_can_be_pickled_and_imported(function: Any) -> None:
    assert pickle.loads(pickle.dumps(function)) is function  # noqa: S301  # pickled right here
    assert ref_to_obj(obj_to_ref(function)) is function


def test_a_function_that_has_its_name_already_can_be_pickled_and_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `nightly = task_lock(max_factor=2)(reports.send)`: pools find it as `reports.send`."""
    module = ModuleType("reports")
    monkeypatch.setitem(sys.modules, "reports", module)
    exec("def send(): ...", vars(module))  # noqa: S102  # written right here
    nightly = task_lock(max_factor=2)(module.send)
    assert pickle.loads(pickle.dumps(nightly)) is nightly  # noqa: S301  # pickled right here
    assert ref_to_obj(obj_to_ref(nightly)) is nightly
    assert function_options(nightly) == TWICE
    check_callable_args(nightly, (), RESERVED)


def test_other_options_for_a_function_that_has_its_name_already_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is one function, so that a job of the first options would get the second ones."""
    module = ModuleType("reports")
    monkeypatch.setitem(sys.modules, "reports", module)
    exec("def send(): ...", vars(module))  # noqa: S102  # written right here
    nightly = task_lock(max_factor=2)(module.send)
    with pytest.raises(TaskLockOptionError, match=r"@task_lock on send: .* options already"):
        task_lock(max_factor=3)(module.send)
    assert function_options(nightly) == TWICE
    assert task_lock(max_factor=2)(module.send) is nightly
    often = task_lock(max_factor=3)(functools.partial(module.send))
    assert (function_options(often), function_options(nightly)) == (
        LockOptions(max_factor=3),
        TWICE,
    )


def test_coroutine_function_stays_one() -> None:
    assert inspect.iscoroutinefunction(coroutine)
    assert iscoroutinefunction_partial(functools.partial(coroutine, 1))


# APScheduler's check of a job's arguments


@pytest.mark.parametrize("function", [bare, without_lock, functools.partial(with_options, 1)])
def test_reserved_key_is_accepted(function: Any) -> None:
    check_callable_args(function, (), RESERVED)
    check_callable_args(function, (), {"task_lock": False})
    check_callable_args(function, (), {})


@pytest.mark.parametrize("function", [*one_argument(), with_options, coroutine])
@pytest.mark.parametrize(("args", "kwargs"), [((1,), {}), ((), {"first": 1})])
def test_reserved_key_is_accepted_beside_arguments(
    function: Any, args: tuple[int, ...], kwargs: dict[str, Any]
) -> None:
    check_callable_args(function, args, kwargs | RESERVED)


@pytest.mark.parametrize("function", [*one_argument(), with_options, coroutine])
@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((1,), {"task_lok": {}}, "task_lok"),
        ((), {}, "have not been supplied: first"),
        ((1,), {"first": 1}, "both args and kwargs: first"),
        ((1, 2, 3, {}), {}, "positional arguments is longer"),
    ],
)
def test_other_arguments_are_refused_as_ever(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_callable_args(function, args, kwargs | RESERVED)


def test_reserved_key_is_refused_without_the_decorator() -> None:
    with pytest.raises(ValueError, match="task_lock"):
        check_callable_args(lambda: None, (), RESERVED)


def test_function_with_arbitrary_keywords_keeps_its_signature() -> None:
    def job(first: int, **others: Any) -> None: ...

    before = inspect.signature(job)
    job = task_lock(job)
    assert inspect.signature(job) == before
    check_callable_args(job, (1,), RESERVED)
    with pytest.raises(ValueError, match="have not been supplied: first"):
        check_callable_args(job, (), RESERVED)


def test_wrapper_that_passes_an_argument_of_its_own_keeps_its_signature() -> None:
    def with_session(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function("session", *args, **kwargs)

        return wrapper

    @task_lock
    @with_session
    def outside(session: str) -> str:
        return session

    check_callable_args(outside, (), RESERVED)
    assert outside() == "session"


@pytest.mark.parametrize(
    "job",
    [
        lambda task_lock: None,
        lambda first, *, task_lock=None: None,
        lambda task_lock, /: None,
        lambda *task_lock: None,
    ],
)
def test_function_with_a_task_lock_parameter_is_refused(job: Any) -> None:
    with pytest.raises(TaskLockOptionError, match="parameter 'task_lock' of its own"):
        task_lock(job)
