"""Which schedule stands in a task's row while replicas of two versions run, and jobs change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from apscheduler_tasklock._database.rejections import Rejections
from apscheduler_tasklock._database.sequences import ask_here
from apscheduler_tasklock._runs import registration
from apscheduler_tasklock._runs.known_tasks import KnownTasks
from apscheduler_tasklock._runs.registration import Registrar
from tests.support.waist import (
    Memory,
    ReadTasks,
    Registration,
    Replica,
    TaskRow,
    Timings,
)

HOUR = 3600.0
DAY = 24 * HOUR
KEY = ("task", "default")


class Version(Replica):
    """A replica with a version of the application, whose only job has this schedule.

    :ivar next_in: seconds to the job's next run time; ``None`` while it is paused
    """

    def __init__(self, name: str, rows: Memory, schedule: str, next_in: float | None) -> None:
        super().__init__(name, rows)
        self.schedule, self.next_in = schedule, next_in
        self._rows = rows
        self.rejections = Rejections()
        self.settings = SimpleNamespace(timings=Timings())
        # As much as it asks of them.
        self.database: Any = self
        user: Any = self
        known = KnownTasks()
        known.add("task", KEY, None)
        self._registrar = Registrar(user, known, self._registration, lambda _key: True)

    def _registration(self, _key: Any) -> Registration:
        return Registration("task", self.schedule, self.next_in, 60.0, HOUR, "f", period=DAY)

    def carrying_out(self, message: Any) -> Any:
        return lambda _cursor: self.ask(message)

    def look(self) -> None:
        states = self._states(self._registrar.expecting())
        look_at(self._registrar, states, self.cursor)

    def _states(self, waiting: Collection[str]) -> list[TaskRow]:
        states: list[TaskRow] = self.ask(ReadTasks(["task"], list(waiting)))[0]
        return states

    def change(self, schedule: str, next_in: float | None) -> None:
        """Change the job, as `modify_job`, `reschedule_job` and `pause_job` do."""
        self.schedule, self.next_in = schedule, next_in
        self._registrar.note(KEY, moved=True)

    def run(self) -> None:
        """Run the task now, as a claim and a release do."""
        rows = self._rows.locks.rows
        rows["task"] = replace(
            rows["task"],
            schedule=self.schedule,
            window_schedule=None,
            token=rows["task"].token + 1,
            window_start=self._rows.time,
            window_until=self._rows.time + timedelta(seconds=0.9 * DAY),
        )


def look_at(registrar: Registrar, states: Sequence[TaskRow], cursor: Any) -> None:
    """Register what is to be registered at a look that finds these rows."""
    registering = registrar.register(states, has_listed=True)
    ask_here(registering, lambda statement: statement(cursor))


@pytest.fixture
def rows() -> Memory:
    return Memory()


@pytest.mark.parametrize("has_run", [False, True])
def test_a_job_that_ran_under_another_schedule_and_has_its_own_again_is_due_by_that(
    rows: Memory, has_run: bool
) -> None:
    """All of it between two looks, as of a job that is set to run now, and sets itself back."""
    one = Version("one", rows, "at 16", 6 * HOUR)
    one.look()
    if has_run:
        one.run()
        one.look()
        rows.time += timedelta(days=1)
    one.change("now", 0.0)
    one.run()
    one.change("at 16", 6 * HOUR)
    one.look()
    row = rows.locks.rows["task"]
    assert (row.schedule, row.due_at) == ("at 16", rows.time + timedelta(hours=6))


def test_a_job_that_is_paused_is_not_due_by_the_schedule_of_a_version_that_was_rolled_back(
    rows: Memory,
) -> None:
    old, new = Version("old", rows, "at 16", 6 * HOUR), Version("new", rows, "at 12", 2 * HOUR)
    for each in (old, new, old):
        each.look()
    old.change("at 16", None)
    old.look()
    assert rows.locks.rows["task"].due_at is None


def test_any_number_of_stored_jobs_holds_up_no_look(
    rows: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else has written their rows, which take long and are no tasks."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(registration, "time", SimpleNamespace(monotonic=lambda: clock.now))
    locks: Any = Version("one", rows, "at 16", HOUR)
    asked: list[tuple[str, str]] = []

    def ask(key: tuple[str, str]) -> None:
        asked.append(key)
        clock.now += 0.4

    registrar = Registrar(
        locks, KnownTasks(), ask, lambda _key: True, lambda jobstore: jobstore == "shared"
    )
    stored = [(f"job {number}", "shared") for number in range(7)]
    for key in [*stored, KEY]:
        registrar.note(key)
    look_at(registrar, [], locks.cursor)
    assert asked == [KEY, *stored[:2]]
    assert registrar.has_more
    look_at(registrar, [], locks.cursor)
    look_at(registrar, [], locks.cursor)
    assert {key for key in asked if key != KEY} == set(stored)
    assert len([key for key in asked if key != KEY]) == len(stored)


def test_what_is_known_of_a_stored_job_goes_when_it_is_no_longer_in_its_store(rows: Memory) -> None:
    """Another replica has removed it, so that there is no event here."""
    locks: Any = Version("one", rows, "at 16", HOUR)
    known, gone = KnownTasks(), list[tuple[str, str]]()
    known.add("task", ("job", "shared"), None)
    known.add("task", KEY, None)
    registrar = Registrar(
        locks,
        known,
        lambda _key: None,
        lambda _key: True,
        stored_tasks=lambda: {"shared": dict},
        forget=gone.append,
    )
    registrar.list_stored()
    assert gone == [("job", "shared")]
    assert list(known.job_keys()) == [KEY]
