"""What tasks and replicas are called."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import NAMESPACE_DNS, UUID, uuid5
from zoneinfo import ZoneInfo

import pytest
import pytz
from apscheduler.jobstores.base import BaseJobStore
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger
from dateutil import tz

from apscheduler_tasklock import task_lock
from apscheduler_tasklock._lock.settings import make_replica_id
from apscheduler_tasklock._runs.job_functions import function_reference
from apscheduler_tasklock._runs.task_names import (
    UnnamedTask,
    is_unnamed,
    reject_duplicate_unnamed,
)
from apscheduler_tasklock._values import LONGEST_NAME
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.options import check_name

try:
    from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
except ImportError:  # APScheduler 3.10 has none
    CalendarIntervalTrigger = None

WHERE = "job 'clean-up'"
SOME_UUID4 = UUID("c803534d-15b6-4d1e-9c45-e4ff20a9b3ea")


def module_function() -> None: ...


class Service:
    def method(self) -> None: ...

    @classmethod
    def class_method(cls) -> None: ...

    @staticmethod
    def static_method() -> None: ...

    def __call__(self) -> None: ...


def added_job(function: Any = module_function, **options: Any) -> Any:
    """Return a job as APScheduler itself makes it."""
    return BackgroundScheduler(timezone="UTC").add_job(function, "interval", hours=1, **options)


# Task names


@pytest.mark.parametrize(
    "name",
    [
        "sync-prices",
        " ",
        "with \"double\" and 'single' quotes",
        "x'; DROP TABLE task_lock; --",
        "100 % {braces} %s %(name)s \\ backslash",
        "line\nbreak\ttab",
        "Ünïcödé 名前 🦊",
        "\ud7ff\ue000\U0010ffff",
        "a" * LONGEST_NAME,
        "🦊" * (LONGEST_NAME // 4),
    ],
)
def test_name_that_postgresql_can_store_is_kept(name: str) -> None:
    assert check_name(name, WHERE) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "the name is empty"),
        ("a" * 1001, "has 1001 bytes in UTF-8, and at most 1000 are allowed"),
        ("a" + "🦊" * 250, "has 1001 bytes in UTF-8, and at most 1000 are allowed"),
        ("ä" * 501, "has 1002 bytes in UTF-8, and at most 1000 are allowed"),
        ("a\0b", "'a\\x00b' has a NUL character"),
        ("\0", "has a NUL character"),
        ("a\ud800", "'a\\ud800' has a lone surrogate"),
        ("\udfff", "has a lone surrogate"),
    ],
)
def test_name_that_postgresql_cannot_store_is_refused(name: str, message: str) -> None:
    with pytest.raises(TaskLockOptionError) as refused:
        check_name(name, WHERE)
    assert str(refused.value).startswith(f"{WHERE}: the name ")
    assert message in str(refused.value)
    str(refused.value).encode()  # it can be logged


# Jobs without an id


@pytest.mark.parametrize("_again", range(20))
def test_id_that_apscheduler_makes_is_none(_again: int) -> None:
    assert is_unnamed(added_job(), MemoryJobStore())


@pytest.mark.parametrize(
    "job_id",
    [
        "0" * 32,
        "e5a03e6ce57811f1ab0802fc00000001",
        uuid5(NAMESPACE_DNS, "clean-up").hex,
        "ABCDEF" + SOME_UUID4.hex[6:],
        "d41d8cd98f00b204e9800998ecf8427e",  # an MD5 digest, as of the empty text
    ],
)
def test_any_32_hexadecimal_digits_are_no_id(job_id: str) -> None:
    assert is_unnamed(added_job(id=job_id), MemoryJobStore())


@pytest.mark.parametrize(
    "job_id",
    [
        "clean-up",
        str(SOME_UUID4),
        SOME_UUID4.hex[:-1],
        SOME_UUID4.hex + "0",
        SOME_UUID4.hex + "\n",
        "g" + SOME_UUID4.hex[1:],
        "\u0661" * 32,
        f"job-{SOME_UUID4.hex}",
    ],
)
def test_id_that_was_given_is_one(job_id: str) -> None:
    assert not is_unnamed(added_job(id=job_id), MemoryJobStore())


@pytest.mark.parametrize("jobstore", [SimpleNamespace(), None, BaseJobStore])
def test_random_id_in_a_persistent_store_is_one(jobstore: Any) -> None:
    assert not is_unnamed(added_job(), jobstore)


def test_memory_store_of_an_application_is_one() -> None:
    class OwnStore(MemoryJobStore):
        pass

    assert is_unnamed(added_job(), OwnStore())


HERE = __name__


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        pytest.param(module_function, f"{HERE}:module_function", id="function"),
        pytest.param(Service.class_method, f"{HERE}:Service.class_method", id="class-method"),
        pytest.param(Service.static_method, f"{HERE}:Service.static_method", id="static-method"),
        pytest.param(Service().method, f"{HERE}:Service.method", id="method"),
        pytest.param(lambda: None, f"{HERE}:<lambda>", id="lambda"),
        pytest.param(Service(), f"{HERE}:Service", id="callable-object"),
        pytest.param(functools.partial(module_function), f"{HERE}:module_function", id="partial"),
        pytest.param(
            functools.partial(functools.partial(Service().method)),
            f"{HERE}:Service.method",
            id="partial-of-partial-of-method",
        ),
        pytest.param("os:getcwd", "os:getcwd", id="text"),
    ],
)
def test_function_reference_is_the_same_on_every_replica(function: Any, reference: str) -> None:
    assert function_reference(added_job(function)) == reference


def test_local_function_has_a_reference() -> None:
    def local() -> None: ...

    where = "test_local_function_has_a_reference.<locals>.local"
    assert function_reference(added_job(local)) == f"{HERE}:{where}"


@pytest.mark.parametrize(
    ("file", "spec", "name"),
    [
        pytest.param("app.py", None, "app", id="script"),
        pytest.param("app", None, "app", id="without-ending"),
        pytest.param("app__main__.py", None, "app__main__", id="odd-name"),
        pytest.param("pk/app.py", None, "pk.app", id="in-a-package"),
        pytest.param("pk/__main__.py", None, "pk", id="package"),
        pytest.param("folder/app.py", None, "app", id="in-a-folder"),
        pytest.param("folder/__main__.py", "__main__", "__main__", id="folder"),
        pytest.param("pk/app.py", "pk.app", "pk.app", id="module"),
        pytest.param("pk/__main__.py", "pk.__main__", "pk", id="module-package"),
        pytest.param("folder/app.py", "folder.app", "folder.app", id="module-without-init"),
        pytest.param(None, None, "__main__", id="no-file"),
    ],
)
@pytest.mark.parametrize("main", ["__main__", "__mp_main__"])
def test_a_function_of_main_is_named_by_the_module_that_was_started(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    main: str,
    file: str | None,
    spec: str | None,
    name: str,
) -> None:
    (tmp_path / "pk").mkdir()
    (tmp_path / "pk" / "__init__.py").touch()
    module = ModuleType(main)
    module.__file__ = None if file is None else str(tmp_path / file)
    module.__spec__ = None if spec is None else ModuleSpec(spec, None)
    monkeypatch.setitem(sys.modules, main, module)

    def function() -> None: ...

    function.__module__, function.__qualname__ = main, "function"
    expected = f"{name}:function"
    assert function_reference(added_job(function)) == expected
    assert function_reference(added_job(functools.partial(function))) == expected


def job_of(trigger: Any = None, function: Any = module_function, **options: Any) -> Any:
    """Return a job as APScheduler itself makes it, every hour by default."""
    return BackgroundScheduler(timezone="UTC").add_job(
        function, trigger or IntervalTrigger(hours=1), **options
    )


def name_of(*job: Any, **options: Any) -> str:
    return UnnamedTask.of(job_of(*job, **options)).name


def takes(*args: Any, **kwargs: Any) -> None: ...


def name_with(*args: Any, **kwargs: Any) -> str:
    return name_of(function=takes, args=args, kwargs=kwargs)


class OwnTrigger(BaseTrigger):
    def __init__(self, secret: object = None) -> None:
        self.secret = secret

    def get_next_fire_time(self, _previous: Any, _now: Any) -> None: ...


class OwnCron(CronTrigger):
    pass


def utc(*fields: int) -> datetime:
    year, month, day, *time = fields
    return datetime(year, month, day, *time, tzinfo=timezone.utc)


def test_name_is_function_and_16_hexadecimal_digits() -> None:
    assert re.fullmatch(rf"{HERE}:module_function-[0-9a-f]{{16}}", name_of())


def test_name_is_pinned() -> None:
    """Another hash on some replicas, as in a rolling deployment, would run each job twice."""
    cron = CronTrigger(hour=3, day_of_week="mon-fri", jitter=5, timezone="Europe/Berlin")
    each = OrTrigger([cron, DateTrigger(utc(2030, 1, 1)), IntervalTrigger(hours=1)])
    job = job_of(each, "os:getcwd")
    job.args, job.kwargs = (1, 1.0, True, None, "é", {2, 1}), {"a": {"b": [UUID(int=1)]}}
    assert UnnamedTask.of(job).name == "os:getcwd-aac8fb3a576bb8b4"


@pytest.mark.parametrize(
    ("one", "same"),
    [
        pytest.param(
            lambda: IntervalTrigger(hours=1),
            lambda: IntervalTrigger(minutes=60, timezone="Asia/Tokyo"),
            id="default-start",
        ),
        pytest.param(
            lambda: IntervalTrigger(
                hours=1, start_date="2030-01-01 09:00:00", timezone="Asia/Tokyo"
            ),
            lambda: IntervalTrigger(hours=1, start_date=utc(2030, 1, 1)),
            id="start-in-another-zone",
        ),
        pytest.param(
            lambda: CalendarIntervalTrigger(months=1, hour=3, start_date="2024-02-29"),
            lambda: CalendarIntervalTrigger(months=1, hour=3, timezone="Asia/Tokyo"),
            marks=pytest.mark.skipif(
                CalendarIntervalTrigger is None,
                reason="APScheduler 3.10 has no calendar interval trigger",
            ),
            id="calendar-start",
        ),
        pytest.param(
            lambda: DateTrigger("2030-01-01 09:00:00", timezone="Asia/Tokyo"),
            lambda: DateTrigger(utc(2030, 1, 1)),
            id="date-in-another-zone",
        ),
        pytest.param(
            lambda: CronTrigger(hour="3", minute=0, timezone="Asia/Tokyo"),
            lambda: CronTrigger.from_crontab("0 3 * * *", timezone="UTC"),
            id="cron-written-in-another-way",
        ),
        pytest.param(
            lambda: CronTrigger(hour=3, start_date=utc(2030, 1, 1), timezone=pytz.utc),
            lambda: CronTrigger(hour=3, start_date="2030-01-01", timezone=ZoneInfo("Etc/UTC")),
            id="zone-of-pytz",
        ),
        pytest.param(
            lambda: DateTrigger(pytz.timezone("Europe/Berlin").localize(datetime(2030, 7, 1, 2))),
            lambda: DateTrigger(datetime(2030, 7, 1, tzinfo=tz.tzutc())),
            id="date-of-pytz",
        ),
        pytest.param(
            lambda: OrTrigger([CronTrigger(hour=3), CronTrigger(hour=4)]),
            lambda: OrTrigger([CronTrigger(hour=4), CronTrigger(hour=3)]),
            id="parts-in-another-order",
        ),
        pytest.param(lambda: OwnTrigger("a"), lambda: OwnTrigger("b"), id="custom"),
        pytest.param(lambda: OwnCron(hour=1), lambda: OwnCron(hour=2), id="subclass"),
        pytest.param(
            lambda: CronTrigger(jitter=None), lambda: CronTrigger(jitter=0), id="no-jitter"
        ),
    ],
)
def test_what_a_replica_makes_up_itself_is_not_in_the_name(
    one: Callable[[], Any], same: Callable[[], Any]
) -> None:
    assert name_of(one()) == name_of(same())


def test_each_trigger_has_a_name_of_its_own() -> None:
    hourly = {"hours": 1, "timezone": "UTC"}
    cron = CronTrigger(hour=3)
    triggers = [
        IntervalTrigger(**hourly),
        IntervalTrigger(hours=2),
        IntervalTrigger(**hourly, start_date="2030-01-01"),
        IntervalTrigger(**hourly, start_date="2030-01-02"),
        IntervalTrigger(**hourly, end_date="2030-01-01"),
        IntervalTrigger(**hourly, jitter=1),
        CronTrigger(),
        cron,
        CronTrigger(minute=3),
        CronTrigger(hour=3, start_date="2030-01-01"),
        CronTrigger(hour=3, end_date="2030-01-01"),
        CronTrigger(hour=3, day="1st mon"),
        CronTrigger(hour=3, day="last"),
        CronTrigger(hour=3, day="1-31/2"),
        CronTrigger(hour=3, jitter=1),
        DateTrigger("2030-01-01"),
        DateTrigger("2030-01-02"),
        AndTrigger([cron]),
        OrTrigger([cron]),
        OrTrigger([cron, cron]),
        OrTrigger([cron], jitter=1),
        OrTrigger([OrTrigger([cron])]),
        OwnTrigger(),
        OwnCron(hour=3),
    ]
    if CalendarIntervalTrigger is not None:
        calendar = [{"days": 7}, {"weeks": 1}, {"days": 7, "second": 1}]
        calendar.append({"days": 7, "end_date": "2999-01-01"})
        triggers += [CalendarIntervalTrigger(**fields) for fields in calendar]
    assert len({name_of(trigger) for trigger in triggers}) == len(triggers)


@pytest.mark.parametrize("trigger", [CronTrigger(jitter=60), IntervalTrigger(hours=1, jitter=60)])
def test_name_stays_when_the_trigger_was_asked(trigger: Any) -> None:
    before = name_of(trigger)
    trigger.get_next_fire_time(None, utc(2030, 1, 1))
    assert name_of(trigger) == before


ZONE = timezone(timedelta(hours=9))


@pytest.mark.parametrize(
    ("one", "same"),
    [
        (({"b": 1, "a": 2},), ({"a": 2, "b": 1},)),
        (({"x", "y", "z"},), (frozenset("zyx"),)),
        (([1, [2]],), ((1, (2,)),)),
        ((datetime(2030, 1, 1, 9, tzinfo=ZONE),), (utc(2030, 1, 1),)),
        ((datetime(2030, 1, 1, tzinfo=pytz.utc),), (datetime(2030, 1, 1, tzinfo=tz.UTC),)),
        ((datetime(2030, 1, 1, tzinfo=ZoneInfo("UTC")),), (utc(2030, 1, 1),)),
        ((time(3, tzinfo=pytz.utc),), (time(3, tzinfo=timezone.utc),)),
        ((time(3, tzinfo=ZONE),), (time(3, tzinfo=tz.tzoffset("JST", 32400)),)),
    ],
)
def test_equal_arguments_give_one_name(one: Any, same: Any) -> None:
    assert name_with(*one) == name_with(*same)


def test_the_arguments_of_a_partial_are_arguments() -> None:
    inner = functools.partial(takes, 1, a=1)
    one = name_of(None, functools.partial(inner, 2, b=1), args=[3], kwargs={"b": 2})
    assert one == name_with(1, 2, 3, a=1, b=2)


def test_lock_options_are_no_arguments() -> None:
    assert name_with(1, task_lock={"max_factor": 7}) == name_with(1)


TOLD_APART: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((None,), {}),
    ((1,), {}),
    ((True,), {}),
    ((1.0,), {}),
    (("1",), {}),
    ((Decimal(1),), {}),
    ((10**5000,), {}),
    ((float("nan"),), {}),
    ((float("-inf"),), {}),
    (([],), {}),
    (({},), {}),
    ((set(),), {}),
    (([[]],), {}),
    ((1, 2), {}),
    (([1, 2],), {}),
    (({1, 2},), {}),
    (({1, 2.0},), {}),
    (({"set": [1, 2]},), {}),
    (({"a": 1},), {}),
    ((), {"a": 1}),
    ((), {"a": {"a": 1}}),
    (("",), {}),
    (("\ud83d\ude00",), {}),
    (("😀",), {}),
    (("\ud800",), {}),
    (("?",), {}),
    ((date(2030, 1, 1),), {}),
    (("2030-01-01",), {}),
    ((datetime(2030, 1, 1),), {}),
    ((utc(2030, 1, 1),), {}),
    ((utc(2030, 1, 1, 0, 0, 0, 1),), {}),
    ((datetime.max.replace(tzinfo=timezone(timedelta(hours=-9))),), {}),
    ((time(3),), {}),
    ((timedelta(1),), {}),
    ((timedelta(microseconds=1),), {}),
    ((UUID(int=1),), {}),
    ((str(UUID(int=1)),), {}),
]


def test_each_argument_gives_a_name_of_its_own() -> None:
    jobs = [job_of(None, takes, args=args, kwargs=kwargs) for args, kwargs in TOLD_APART]
    tasks = [UnnamedTask.of(job) for job in jobs]
    assert all(task.has_arguments for task in tasks)
    assert len({task.name for task in tasks}) == len(TOLD_APART)


class Kind(IntEnum):
    ONE = 1


class Text(str):
    __slots__ = ()


CYCLE: list[Any] = [1]
CYCLE += [CYCLE, CYCLE]
DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]

OTHER_ARGUMENTS = [
    object(),
    Service(),
    Kind.ONE,
    Text("1"),
    b"1",
    module_function,
    [object()],
    {1: 1},
    {"a": {object()}},
    CYCLE,
    DEEP,
]


@pytest.mark.parametrize("value", OTHER_ARGUMENTS, ids=lambda value: type(value).__name__)
def test_with_any_other_argument_the_name_is_function_and_trigger(value: Any) -> None:
    task = UnnamedTask.of(job_of(None, takes, args=[1, value]))
    other = UnnamedTask.of(job_of(None, takes, kwargs={"x": object()}))
    assert task == other
    assert not task.has_arguments
    assert task.name != name_with()
    assert task.name != name_of(CronTrigger(hour=3), takes, args=[value])


def test_arguments_that_are_no_sequence_have_no_canonical_form() -> None:
    job = added_job()
    job.modify(args=iter([]))
    assert not UnnamedTask.of(job).has_arguments


def jobs_for_other_processes() -> list[Any]:
    """Return jobs as each replica adds them."""
    triggers = [
        CronTrigger(hour=3, day="last", jitter=60),
        IntervalTrigger(hours=1),
        IntervalTrigger(hours=1, start_date=utc(2030, 1, 1)),
        AndTrigger([CronTrigger(hour=3), CronTrigger(day=1, hour=3)]),
        OrTrigger([IntervalTrigger(hours=1), DateTrigger(), OwnTrigger()]),
    ]
    if CalendarIntervalTrigger is not None:
        monthly = CalendarIntervalTrigger(months=1, hour=3)
        triggers += [monthly, AndTrigger([CronTrigger(hour=3), monthly])]
    words = ["alpha", "beta", "gamma", "delta"]
    kwargs = {"words": set(words), "nested": dict.fromkeys(set(words), frozenset(words))}
    arguments = [{"args": words}, {"kwargs": kwargs}, {"args": [object()]}]
    jobs = [(takes, trigger, given) for trigger in triggers for given in arguments]
    one_off = DateTrigger(utc(2030, 1, 1))
    jobs += [(takes, one_off, given) for given in arguments[:2]]
    # A set in a function's code is in another order in each process.
    jobs.append((lambda word: word in {"alpha", "beta", "gamma"}, one_off, {"args": ["alpha"]}))
    return [
        BackgroundScheduler().add_job(function, trigger, **given)
        for function, trigger, given in jobs
    ]


def print_names() -> None:
    """Print what another process compares with."""
    print(datetime.now().astimezone().date())
    print(json.dumps([UnnamedTask.of(job).name for job in jobs_for_other_processes()]))


def test_names_are_the_same_in_processes_with_other_hashes_zones_and_dates() -> None:
    """There is always another date on the one side of the date line than on the other."""
    printed = [
        subprocess.run(
            [sys.executable, "-c", f"from {__name__} import print_names; print_names()"],
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": zone},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for seed, zone in [("1", "Pacific/Kiritimati"), ("2", "Etc/GMT+12")]
    ]
    (today, names), (yesterday, same) = printed
    assert today != yesterday
    assert names == same
    assert len(set(json.loads(names))) == len(jobs_for_other_processes())


# Duplicates


def rejection(job: Any, other: Any) -> str:
    task = UnnamedTask.of(job)
    assert UnnamedTask.of(other) == task
    with pytest.raises(TaskLockOptionError) as rejected:
        reject_duplicate_unnamed(job, other, task)
    return str(rejected.value)


SECRET = "hunter2"


class Opaque:
    def __repr__(self) -> str:
        return SECRET


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(job_of, id="function"),
        pytest.param(lambda: job_of(None, Service().method), id="method"),
        pytest.param(lambda: job_of(None, functools.partial(takes, SECRET)), id="partial"),
        pytest.param(lambda: job_of(None, takes, kwargs={"a": SECRET}), id="keyword"),
        pytest.param(lambda: job_of(None, takes, args=[Opaque()]), id="other-argument"),
    ],
)
def test_duplicates_are_rejected_with_both_ids_function_and_remedy(
    make: Callable[[], Any],
) -> None:
    job, other = make(), make()
    message = rejection(job, other)
    for part in (job.id, other.id, function_reference(job), "give each an id in add_job(..., id="):
        assert part in message
    assert SECRET not in message


# One-off jobs


DATE = utc(2030, 1, 1)


class OwnDate(DateTrigger):
    pass


SERVICE = Service()


class UnboundProxy:
    """Stands for an object of a request, as Flask's `current_app` does, outside of one."""

    def __getattr__(self, _name: str) -> Any:
        raise RuntimeError("working outside of a request")

    def __call__(self) -> None: ...


def nested(value: Any = None) -> Callable[[], Any]:
    def function() -> Any:
        return value

    return function


def nested_coroutine() -> Any:
    async def coroutine() -> None: ...

    return coroutine


def recursive() -> Callable[[], Any]:
    def one() -> Any:
        return other, one

    def other() -> Any:
        return one, other

    return one


def _carrying(value: Any) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(value, *args, **kwargs)

        return call

    return decorate


@_carrying(object())
def with_objects(_value: Any, _default: Any = SERVICE) -> None: ...


class Parent:
    @classmethod
    def run(cls) -> None: ...


class Child(Parent):
    pass


def one_off(function: Any = module_function, trigger: Any = None, **options: Any) -> UnnamedTask:
    return UnnamedTask.of(job_of(trigger or DateTrigger(DATE), function, **options))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(lambda: one_off(trigger=DateTrigger()), "fractions of a second", id="now"),
        pytest.param(
            lambda: one_off(trigger=OwnDate(DATE)),
            "its trigger is of the class OwnDate",
            id="class",
        ),
        pytest.param(
            lambda: one_off(takes, args=[object()]), "its arguments cannot be compared", id="object"
        ),
        *(
            pytest.param(
                lambda function=function: one_off(function), "its function belongs to", id=name
            )
            for name, function in {
                "method": Service().method,
                "callable-object": Service(),
                "list-method": [].clear,
                "partial-of-method": functools.partial(Service().method),
                "captures-an-object": nested(object()),
                "captures-a-method": nested(Service().method),
                "captures-a-proxy": nested(UnboundProxy()),
                "captures-a-partial": nested(functools.partial(takes, 1)),
                "captures-what-captures-an-object": nested(nested(object())),
                "captures-a-long-chain": functools.reduce(
                    lambda made, _: nested(made), range(100), nested()
                ),
                "decorated": task_lock(nested(object())),
                "default-object": lambda value=SERVICE: value,
            }.items()
        ),
    ],
)
def test_a_one_off_that_no_other_replica_can_compare_has_no_name(
    make: Callable[[], UnnamedTask], reason: str
) -> None:
    task = make()
    assert task.name == ""
    assert task.own_because is not None
    assert reason in task.own_because


def test_one_offs_of_other_functions_have_other_names() -> None:
    functions = [
        module_function,
        Service.static_method,
        Parent.run,
        Child.run,
        os.getcwd,
        dict,
        lambda: 1,
        lambda: 2,
        lambda: module_function,
        lambda: SOME_UUID4,
        lambda: [1 for _ in ()],
        lambda: [2 for _ in ()],
        lambda value=1: value,
        lambda value=2: value,
        lambda *, value=1: value,
        nested(1),
        nested("1"),
        nested([1]),
        nested(module_function),
        nested(Service.static_method),
        nested(Parent.run),
        nested(Child.run),
        nested(Child),
        nested(nested(1)),
        nested(nested(2)),
        nested(lambda: 1),
        task_lock(nested(1)),
        task_lock(nested(2)),
        lambda *value: value,
        lambda **value: value,
        lambda one=0, other=0: (one, other),
        lambda other=0, one=0: (other, one),
        functools.partial(Child.run),
    ]
    tasks = [one_off(function) for function in functions]
    assert [task.own_because for task in tasks] == [None] * len(tasks)
    assert len({task.name for task in tasks}) == len(tasks)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: lambda: 1, id="lambda"),
        pytest.param(lambda: nested({"a": [1]}), id="nested"),
        pytest.param(lambda: functools.partial(takes, 1), id="partial"),
        pytest.param(lambda: nested(module_function), id="nested-with-function"),
        pytest.param(lambda: nested(Child.run), id="nested-with-class-method"),
        pytest.param(lambda: nested(Child), id="nested-with-class"),
        pytest.param(lambda: nested(nested(lambda: 1)), id="nested-thrice"),
        pytest.param(lambda: lambda function=module_function: function(), id="default-function"),
        pytest.param(lambda: task_lock(max_factor=2)(nested(1)), id="decorated"),
        pytest.param(lambda: task_lock(nested_coroutine()), id="decorated-coroutine"),
        pytest.param(recursive, id="recursive"),
    ],
)
def test_the_same_function_made_anew_gives_one_name(make: Callable[[], Any]) -> None:
    assert one_off(make()) == one_off(make())
    assert one_off(make()).name


@pytest.mark.parametrize("first", ["defined", "added"])
@pytest.mark.parametrize(
    "source",
    [
        "def job(city={n}): ...",
        "def job(*, city={n}): ...",
        "def job(log=object(), city={n}): ...",
        "@task_lock\ndef job(city={n}): ...",
        "@task_lock(max_factor=2)\nasync def job(*, city={n}): ...",
    ],
)
def test_functions_that_a_module_defines_anew_have_names_of_their_own(
    monkeypatch: pytest.MonkeyPatch, source: str, first: str
) -> None:
    """As in a loop. While each is added, the module may have it, or the last one already."""
    module = ModuleType("module")
    monkeypatch.setitem(sys.modules, "module", module)
    vars(module)["task_lock"] = task_lock
    functions, tasks = [], []
    for n in range(3):
        exec(source.format(n=n), vars(module))  # noqa: S102  # written right here
        functions.append(module.job)
        if first == "added":
            tasks.append(one_off(module.job))
    if first == "defined":
        tasks = [one_off(function) for function in functions if "object" not in source]
    assert [task.own_because for task in tasks] == [None] * len(tasks)
    assert len({task.name for task in tasks}) == len(tasks)


def test_functions_of_other_bodies_that_have_lost_their_name_have_names_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As jobs that are all called `_`, added before the scheduler starts or by a decorator."""
    module = ModuleType("module")
    monkeypatch.setitem(sys.modules, "module", module)
    functions = []
    for n in range(3):
        exec(f"def _(): return {n}", vars(module))  # noqa: S102  # written right here
        functions.append(vars(module)["_"])
    tasks = [one_off(function) for function in functions]
    assert [task.own_because for task in tasks] == [None] * 3
    assert len({task.name for task in tasks}) == 3


def test_a_function_of_a_module_may_carry_what_cannot_be_compared() -> None:
    """It is the same on every replica all the same, as its module has one of the name."""
    assert one_off(with_objects) == one_off(f"{HERE}:with_objects")
    assert one_off(with_objects).name


# Replicas


def test_replica_id_is_host_process_and_random_part() -> None:
    host, process, rest = make_replica_id().rsplit(":", 2)
    assert (host, process) == (socket.gethostname(), str(os.getpid()))
    assert re.fullmatch("[0-9a-f]{8}", rest)


def test_replica_ids_of_one_process_differ() -> None:
    assert len({make_replica_id() for _ in range(100)}) == 100
