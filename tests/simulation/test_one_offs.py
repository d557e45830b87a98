"""One-off jobs: without an id each is its replica's own, unless all replicas can name it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.date import DateTrigger

from apscheduler_tasklock import EVENT_TASK_LOCK_REFUSED, EVENT_TASK_LOCK_RELEASED, task_lock
from tests.simulation.replicas import SimulatedReplicas, at, simulated

# A whole second that has passed when the jobs are added.
BEFORE = at(1)


def takes(*_args: Any, **_kwargs: Any) -> None: ...


def alike() -> None: ...


def other() -> None: ...


@task_lock(max_factor=3, failover=True)
def decorated() -> None: ...


@task_lock
def marked() -> None: ...


class Mailer:
    def send(self) -> None: ...

    @classmethod
    def send_all(cls) -> None: ...

    def __call__(self) -> None: ...


def made_for(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Decorate a function as many do: what is returned is called the same."""

    def call() -> Any:
        return function(*names)

    call.__qualname__, call.__module__ = function.__qualname__, function.__module__
    return call


def _for_city(city: str) -> Callable[..., Any]:
    def call(_city: str = city) -> None: ...

    call.__qualname__ = "for_city"
    return call


# A module that defines one function again and again; it has the last one.
CITIES = [for_city := _for_city(city) for city in ("Paris", "Rome", "Oslo")]


def calls(function: Callable[[], Any]) -> Callable[[], Any]:
    """Decorate a function as `create_app()` does, where nothing has a name of its module."""

    @functools.wraps(function)
    def call() -> Any:
        return function()

    return call


class OwnDate(DateTrigger):
    pass


def whole_second(run_date: datetime = BEFORE, **options: Any) -> dict[str, Any]:
    """Return the arguments of a one-off job whose date is a whole second."""
    return {"func": takes, "trigger": "date", "run_date": run_date, **options}


def add(simulation: SimulatedReplicas, *jobs: dict[str, Any], name: str = "replica-1") -> list[str]:
    """Add jobs to a replica, let some seconds pass, and return the ids of the jobs."""
    scheduler = simulation[name].scheduler
    added = [scheduler.add_job(**{"misfire_grace_time": None, **job}) for job in jobs]
    simulation.advance(seconds=3.7)
    return [job.id for job in added]


def after(minutes: float, replicas: int = 1, **options: Any) -> SimulatedReplicas:
    """Return replicas after so many minutes, at a time that is no whole second."""
    simulation = simulated(replicas=replicas, **options)
    simulation.advance(minutes=minutes, seconds=0.123)
    return simulation


def refusals(simulation: SimulatedReplicas) -> int:
    codes = [event.code for replica in simulation for event in replica.events]
    return codes.count(EVENT_TASK_LOCK_REFUSED)


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= level]


class TestWithoutALock:
    @pytest.mark.parametrize(
        "given",
        [
            pytest.param(lambda _now: {}, id="now"),
            pytest.param(
                lambda now: {"trigger": "date", "run_date": now + timedelta(milliseconds=50)},
                id="a-moment-later",
            ),
            pytest.param(lambda _now: {"id": uuid4().hex}, id="uuid4-as-id"),
            pytest.param(lambda _now: {"args": [object()]}, id="object"),
            pytest.param(lambda _now: whole_second(args=[object()]), id="object-and-date"),
            pytest.param(lambda _now: whole_second(args=[Mailer()]), id="customer-and-date"),
        ],
    )
    def test_one_job_added_again_and_again_runs_each_time(
        self, caplog: pytest.LogCaptureFixture, given: Callable[[datetime], dict[str, Any]]
    ) -> None:
        simulation = after(2)
        for _ in range(3):
            add(simulation, {"func": takes, "args": ["x"], **given(simulation.now)})
        assert [run.token for run in simulation.runs] == [None] * 3
        assert lines(caplog) == []

    @pytest.mark.parametrize(
        ("job", "told"),
        [
            pytest.param(
                {"func": takes, "kwargs": {"task_lock": {"failover": True, "max_lock": 60}}},
                "failover, max_lock",
                id="kwargs",
            ),
            pytest.param({"func": decorated}, "failover, max_factor", id="decorator"),
            pytest.param(
                {"func": takes, "kwargs": {"task_lock": {"lease": None}}}, "lease", id="lease"
            ),
        ],
    )
    def test_options_that_it_cannot_have_are_told_of_once(
        self, caplog: pytest.LogCaptureFixture, job: dict[str, Any], told: str
    ) -> None:
        simulation = after(2)
        for _ in range(2):
            add(simulation, job)
        assert [run.token for run in simulation.runs] == [None] * 2
        [warning] = lines(caplog)
        assert f"its lock options ({told}) have no effect" in warning
        assert "its date has fractions of a second" in warning
        assert "Give it an id in add_job(..., id=...), or the option 'name'" in warning

    @pytest.mark.parametrize(
        "job",
        [
            pytest.param({"func": marked}, id="mark"),
            pytest.param({"func": takes, "kwargs": {"task_lock": {}}}, id="empty"),
            pytest.param({"func": takes, "kwargs": {"task_lock": False}}, id="no-lock"),
        ],
    )
    def test_without_options_of_its_own_nothing_is_told_of_it(
        self, caplog: pytest.LogCaptureFixture, job: dict[str, Any]
    ) -> None:
        simulation = after(2, failover=True, max_factor=3)
        add(simulation, job)
        assert [run.token for run in simulation.runs] == [None]
        assert lines(caplog) == []

    def test_that_it_runs_without_a_lock_is_told_once_for_a_function(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "apscheduler_tasklock")
        args = {"args": ["hunter2"]}
        ids = add(after(2), *({"func": each, **args} for each in (takes, print, takes)))
        told = [r for r in caplog.records if "run here, without a lock" in r.getMessage()]
        assert sorted(r.levelname for r in told) == ["DEBUG", "INFO", "INFO"]
        assert set(ids) == {r.getMessage().split()[1] for r in told}
        assert all("as on each replica that adds it" in r.getMessage() for r in told)
        assert ["takes" in r.getMessage() for r in told if r.levelno == logging.DEBUG] == [True]
        assert "hunter2" not in caplog.text


def different() -> list[dict[str, Any]]:
    """Return one-off jobs of one date that differ in something, as applications add them."""
    functions: list[Any] = [
        alike,
        lambda: takes("one"),
        lambda: takes("other"),
        *(lambda n=n: takes(n) for n in range(2)),
        *(made_for(takes, name) for name in ("a", "b")),
        *CITIES,
        *(task_lock(lambda n=n: takes(n)) for n in range(2)),
        *(calls(lambda n=n: takes(n)) for n in range(2)),
        partial(takes, 1),
        partial(takes, 2),
        partial(takes, object()),
        partial(takes, object()),
        Mailer().send,
        Mailer().send,
        Mailer.send_all,
        Mailer(),
        Mailer(),
    ]
    return [
        *({"func": function} for function in functions),
        *({"args": [value]} for value in (3, "3", [3], {"a": 3})),
        *({"kwargs": {"_value": value}} for value in (3, Mailer())),
        {"func": alike, "run_date": at(2)},
        {"func": alike, "run_date": BEFORE + timedelta(microseconds=1)},
        {"func": alike, "run_date": BEFORE + timedelta(microseconds=2)},
        {"func": alike, "trigger": OwnDate(BEFORE)},
        {"func": alike, "trigger": OwnDate(at(3))},
    ]


class TestNamedByAllReplicas:
    def test_all_different_ones_run(self, caplog: pytest.LogCaptureFixture) -> None:
        simulation, jobs = after(4), [whole_second(**each) for each in different()]
        ids = add(simulation, *jobs, {"func": alike})
        assert sorted(run.job_id for run in simulation.runs) == sorted(ids)
        assert lines(caplog) == []

    @pytest.mark.parametrize(
        "job",
        [
            pytest.param({"func": alike}, id="function"),
            pytest.param({"func": f"{__name__}:alike"}, id="text"),
            pytest.param({"args": ["x"]}, id="argument"),
            pytest.param({"func": partial(takes, {"a": [1, None]})}, id="partial"),
            pytest.param({"func": Mailer.send_all}, id="class-method"),
            pytest.param({"func": lambda: takes()}, id="lambda"),  # noqa: PLW0108  # it is the case
            pytest.param({"func": lambda n=1: takes(n)}, id="lambda-with-default"),
            pytest.param({"func": decorated}, id="decorated"),
            pytest.param({"func": task_lock(lambda: takes(1))}, id="decorated-lambda"),
            pytest.param({"func": calls(alike)}, id="nested"),
            pytest.param({"func": CITIES[0]}, id="defined-anew"),
            pytest.param({"func": alike, "timezone": "UTC"}, id="zone"),
        ],
    )
    def test_the_same_one_on_a_whole_second_is_one_task_on_all_replicas(
        self, caplog: pytest.LogCaptureFixture, job: dict[str, Any]
    ) -> None:
        simulation = after(2, 2)
        for name, zone in (("replica-1", "Asia/Tokyo"), ("replica-2", "UTC")):
            add(simulation, whole_second(BEFORE.astimezone(ZoneInfo(zone)), **job), name=name)
        [run] = simulation.runs
        assert run.token is not None
        assert refusals(simulation) == 1
        assert lines(caplog) == []

    def test_a_whole_second_is_run_once_however_late_it_is_asked_for(self) -> None:
        simulation = after(24 * 60, 2)
        for replica in simulation:
            add(simulation, whole_second(), name=replica.name)
        assert (len(simulation.runs), refusals(simulation)) == (1, 1)

    def test_two_that_are_alike_in_one_scheduler_run_once_with_a_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        simulation = after(2)
        ids = add(simulation, whole_second(), whole_second())
        assert (len(simulation.runs), refusals(simulation)) == (1, 1)
        [warning] = lines(caplog)
        assert all(job_id in warning for job_id in ids)
        assert "Give each an id" in warning
        assert "another id" not in warning

    @pytest.mark.parametrize("more", [{}, {"failover": True}], ids=["name", "and-more"])
    def test_one_with_a_name_has_a_lock(self, more: dict[str, Any]) -> None:
        simulation = after(2)
        add(simulation, {"func": takes, "kwargs": {"task_lock": {"name": "mail", **more}}})
        [released] = [
            event
            for event in simulation["replica-1"].events
            if event.code == EVENT_TASK_LOCK_RELEASED
        ]
        assert released.task_name == "mail"


class TestWithAnId:
    """Its minimum lock is a minute."""

    def run(self, simulation: SimulatedReplicas, *, name: str = "replica-1", **job: Any) -> None:
        add(simulation, {"func": takes, "id": "job", "trigger": "date", **job}, name=name)

    def test_an_id_that_is_used_again_a_minute_later_runs_again(self) -> None:
        simulation = after(2)
        for seconds in (0, 61, 85):
            self.run(simulation, run_date=at(0.5) + timedelta(seconds=seconds))
        assert (len(simulation.runs), refusals(simulation)) == (2, 1)

    @pytest.mark.parametrize(
        ("options", "remedy"),
        [
            pytest.param({}, "Give the job another id, or a shorter min_lock", id="id"),
            pytest.param(
                {"name": "mail"}, "Give the job another name, or a shorter min_lock", id="name"
            ),
        ],
    )
    def test_one_that_is_refused_for_its_window_names_a_remedy_that_there_is(
        self, caplog: pytest.LogCaptureFixture, options: dict[str, Any], remedy: str
    ) -> None:
        simulation = after(2)
        for _ in range(3):
            self.run(simulation, kwargs={"task_lock": options})
        assert (len(simulation.runs), refusals(simulation)) == (1, 2)
        [warning] = lines(caplog)
        assert remedy in warning
        assert "skipped the run time" in warning

    def test_one_of_an_id_that_another_replica_used_is_told_of_at_info(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "apscheduler_tasklock")
        simulation = after(2, 2)
        for name, seconds in (("replica-1", 30.5), ("replica-2", 50.5)):
            self.run(simulation, run_date=at(seconds / 60), name=name)
        assert (len(simulation.runs), refusals(simulation)) == (1, 1)
        [line] = [r for r in caplog.records if "skipped the run time" in r.getMessage()]
        assert line.levelno == logging.INFO

    def test_one_that_is_refused_since_another_date_of_its_id_still_runs_is_told_of(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        simulation = after(3, 2, durations={"job": 600})
        self.run(simulation, run_date=at(1))
        self.run(simulation, run_date=at(2.9), name="replica-2")
        [warning] = lines(caplog)
        assert "is not run, because" in warning
        assert "still runs the task" in warning
