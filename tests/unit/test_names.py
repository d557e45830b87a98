"""What tasks and replicas are called."""

from __future__ import annotations

import functools
import os
import re
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import NAMESPACE_DNS, UUID, uuid5

import pytest
from apscheduler.jobstores.base import BaseJobStore
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.names import (
    LONGEST_NAME,
    check_name,
    function_reference,
    is_anonymous,
    make_replica_id,
    refuse_twins,
)

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
def test_id_that_apscheduler_makes_is_anonymous(_again: int) -> None:
    assert is_anonymous(added_job(), MemoryJobStore())


@pytest.mark.parametrize(
    "job_id",
    [
        "clean-up",
        "0" * 32,
        str(SOME_UUID4),
        "e5a03e6ce57811f1ab0802fc00000001",
        uuid5(NAMESPACE_DNS, "clean-up").hex,
        "ABCDEF" + SOME_UUID4.hex[6:],
        SOME_UUID4.hex[:-1],
        SOME_UUID4.hex + "0",
        SOME_UUID4.hex + "\n",
        f"job-{SOME_UUID4.hex}",
        "d41d8cd98f00b204e9800998ecf8427e",  # an MD5 digest, as of the empty text
    ],
)
def test_id_that_was_given_is_not_anonymous(job_id: str) -> None:
    assert not is_anonymous(added_job(id=job_id), MemoryJobStore())


@pytest.mark.parametrize("jobstore", [SimpleNamespace(), None, BaseJobStore])
def test_random_id_in_a_persistent_store_is_not_anonymous(jobstore: Any) -> None:
    assert not is_anonymous(added_job(), jobstore)


def test_memory_store_of_an_application_is_one() -> None:
    class OwnStore(MemoryJobStore):
        pass

    assert is_anonymous(added_job(), OwnStore())


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
    ("function", "same"),
    [
        (module_function, module_function),
        (Service().method, Service().method),
        (functools.partial(print, 1), functools.partial(print, 2)),
        (module_function, functools.partial(module_function)),
    ],
)
def test_twins_are_refused_with_both_ids_and_what_to_do(
    function: Callable[..., Any], same: Callable[..., Any]
) -> None:
    job, twin = added_job(function), added_job(same)
    with pytest.raises(TaskLockOptionError) as refused:
        refuse_twins(job, [added_job(Service()), twin])
    for part in (job.id, twin.id, function_reference(job), "add_job(..., id=...)"):
        assert part in str(refused.value)


def test_job_is_no_twin_of_itself_or_of_other_functions() -> None:
    job = added_job()
    refuse_twins(job, [job, added_job(Service().method), added_job(lambda: None)])
    refuse_twins(job, [])


# Replicas


def test_replica_id_is_host_process_and_random_part() -> None:
    host, process, rest = make_replica_id().rsplit(":", 2)
    assert (host, process) == (socket.gethostname(), str(os.getpid()))
    assert re.fullmatch("[0-9a-f]{8}", rest)


def test_replica_ids_of_one_process_differ() -> None:
    assert len({make_replica_id() for _ in range(100)}) == 100
