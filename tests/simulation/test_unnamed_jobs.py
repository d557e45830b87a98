"""Recurring jobs without an id, and ids in several job stores: which task each of them is."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from apscheduler.events import EVENT_JOB_EXECUTED

from apscheduler_tasklock import EVENT_TASK_LOCK_ERROR, EVENT_TASK_LOCK_GRANTED
from tests.simulation.replicas import SimulatedReplicas, at, simulated
from tests.support.schedulers import ForgetfulStore

HOURLY: dict[str, Any] = {"trigger": "interval", "hours": 1, "next_run_time": at(1)}
WITHOUT_AN_ID = "without an id"


def takes(*_args: Any, **_kwargs: Any) -> None: ...


def tasks(simulation: SimulatedReplicas) -> list[str]:
    """Return the tasks of the runs, in their order."""
    return [
        event.task_name
        for replica in simulation
        for event in replica.events
        if event.code == EVENT_TASK_LOCK_GRANTED
    ]


def test_one_is_named_after_function_trigger_and_arguments_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    simulation = simulated(lambda s: s.add_job(takes, **HOURLY), 2, namespace="app/")
    simulation.advance(minutes=10)
    [name] = tasks(simulation)
    assert re.fullmatch(rf"app/{__name__}:takes-[0-9a-f]{{16}}", name)
    warnings = [m for m in caplog.messages if WITHOUT_AN_ID in m]
    assert len(warnings) == 2  # one on each replica
    assert all(name in warning and "add_job(..., id=...)" in warning for warning in warnings)


def test_a_decorated_one_runs_on_one_replica() -> None:
    def add_jobs(scheduler: Any) -> None:
        @scheduler.scheduled_job(**HOURLY)
        def clean_up() -> None: ...

    simulation = simulated(add_jobs, 3)
    simulation.advance(minutes=10)
    [name] = tasks(simulation)
    assert name.startswith(f"{__name__}:")
    assert ".clean_up-" in name


def test_one_that_was_rescheduled_into_its_last_window_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    simulation = simulated()
    scheduler = simulation["replica-1"].scheduler
    daily = {"trigger": "interval", "days": 1}
    scheduler.add_job(takes, id="job", start_date=at(1), **daily)
    simulation.advance(minutes=2)
    scheduler.reschedule_job("job", start_date=at(3), **daily)
    simulation.advance(minutes=2)
    assert len(simulation.runs) == 1
    [warning] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "modified or rescheduled" in warning


@pytest.mark.parametrize(
    "functions",
    [
        pytest.param((lambda: 1, lambda: 2), id="lambdas"),
        pytest.param((partial(max, 1, 2), partial(max, 1, 2)), id="partials"),
        pytest.param((partial(max, {1: object()}), partial(max, object())), id="objects"),
    ],
)
@pytest.mark.parametrize(
    "trigger", [("interval", {"hours": 1}), ("cron", {"hour": 3})], ids=lambda given: given[0]
)
def test_those_that_nothing_tells_apart_do_not_run(
    caplog: pytest.LogCaptureFixture,
    functions: tuple[Any, Any],
    trigger: tuple[str, dict[str, Any]],
) -> None:
    simulation = simulated()
    [replica] = simulation
    jobs = [
        replica.scheduler.add_job(function, trigger[0], id=uuid4().hex, **trigger[1])
        for function in functions
    ]
    assert f"Job {jobs[1].id!r} will not run" in caplog.text
    assert simulation.advance(hours=3, minutes=30) == []
    assert {event.code for event in replica.events} == {EVENT_TASK_LOCK_ERROR}
    assert {event.job_id for event in replica.events} == {job.id for job in jobs}
    for event in replica.events:
        assert "give each an id" in str(event.exception)
        assert all(job.id in str(event.exception) for job in jobs)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda other: other.remove(), id="removed"),
        pytest.param(lambda other: other.modify(args=[1]), id="modified"),
        pytest.param(lambda other: other.modify(kwargs={"task_lock": False}), id="unlocked"),
        pytest.param(lambda other: other.modify(executor="plain"), id="of-another-executor"),
    ],
)
def test_one_of_two_that_nothing_tells_apart_runs_once_the_other_is_changed_or_gone(
    change: Callable[[Any], None],
) -> None:
    simulation = simulated()
    scheduler = simulation["replica-1"].scheduler
    job, other = (scheduler.add_job(takes, **HOURLY) for _ in range(2))
    change(other)
    simulation.advance(minutes=2)
    assert [run.job_id for run in simulation.runs if run.job_id != other.id] == [job.id]


def test_one_without_a_lock_or_with_a_name_does_not_count() -> None:
    simulation = simulated()
    scheduler = simulation["replica-1"].scheduler
    for kwargs in ({}, {"task_lock": False}, {"task_lock": {"name": "other"}}):
        scheduler.add_job(takes, kwargs=kwargs, **HOURLY)
    simulation.advance(minutes=2)
    assert len(simulation.runs) == 3
    assert len(set(tasks(simulation))) == 2


def test_a_modified_one_is_named_anew(caplog: pytest.LogCaptureFixture) -> None:
    simulation = simulated()
    scheduler = simulation["replica-1"].scheduler
    job, other = (scheduler.add_job(takes, "interval", hours=1, args=[n]) for n in (1, 2))
    job.modify(args=[2])
    assert f"Job {job.id!r} will not run" in caplog.text
    job.reschedule("interval", hours=2)
    for each in (job, other):
        each.modify(next_run_time=at(1))
    simulation.advance(minutes=2)
    assert len(simulation.runs) == len(set(tasks(simulation))) == 2
    warnings = [m for m in caplog.messages if WITHOUT_AN_ID in m and "will not" not in m]
    assert len(set(warnings)) == len(warnings) == 3


class TestJobStores:
    def test_the_same_id_in_two_of_them_is_two_tasks(self) -> None:
        simulation = simulated(namespace="app/")
        scheduler = simulation["replica-1"].scheduler
        scheduler.add_jobstore("memory", "second")
        unnamed, stores = uuid4().hex, ("default", "second")
        for minute, (job_id, jobstore) in enumerate(
            (job_id, jobstore) for job_id in ("clean-up", unnamed) for jobstore in stores
        ):
            due = {**HOURLY, "next_run_time": at(1 + minute)}
            scheduler.add_job(takes, id=job_id, jobstore=jobstore, **due)
        simulation.advance(minutes=10)
        reference = f"{__name__}:takes"
        assert [re.sub("-[0-9a-f]{16}$", "", name) for name in tasks(simulation)] == [
            "app/clean-up",
            "app/second:clean-up",
            f"app/{reference}",
            f"app/second:{reference}",
        ]

    def test_a_job_that_does_not_know_its_custom_store_is_named_after_the_store_all_the_same(
        self,
    ) -> None:
        simulation = simulated()
        scheduler = simulation["replica-1"].scheduler
        scheduler.add_jobstore(ForgetfulStore(), "second")
        scheduler.add_job(int, "interval", hours=1, id="job")
        scheduler.add_job(takes, id="job", jobstore="second", **HOURLY)
        simulation.advance(minutes=2)
        assert tasks(simulation) == ["second:job"]

    def test_a_name_option_stands_alone_in_any_of_them(self) -> None:
        simulation = simulated(jobs={"job": {"name": "tidy"}})
        scheduler = simulation["replica-1"].scheduler
        scheduler.add_jobstore("memory", "second")
        scheduler.add_job(takes, id="job", jobstore="second", **HOURLY)
        executed: list[Any] = []
        scheduler.add_listener(executed.append, EVENT_JOB_EXECUTED)
        simulation.advance(minutes=2)
        assert tasks(simulation) == ["tidy"]
        assert [event.jobstore for event in executed] == ["second"]
