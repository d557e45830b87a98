"""Stored jobs on a virtual clock: the real reader, queue and client, and faults at every place."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from apscheduler_tasklock.jobstore.due import DueJobs
from tests.simulation.faults import FAULTS, STEPS, Planned
from tests.simulation.jobs_scenarios import JobsScenario
from tests.simulation.scenarios import check
from tests.simulation.stored import SCENARIOS, StoredLocks, StoredStory, simulating_store
from tests.simulation.world import BEGIN, START, replaced

pytestmark = pytest.mark.usefixtures("simulation", "store")

SEED = 33
SINGLES_IN_SHORT = 30
# Faults at looks, of which there are many, are injected around the first run time only.
LOOKS = ("read", "read_due", "dead_runs", "sweep")
FIRST_LOOKS = (9.9, 10.1)


@pytest.fixture
def store() -> Iterator[None]:
    with simulating_store():
        yield


def singles(story: StoredStory) -> list[tuple[Planned, ...]]:
    """Return each fault at each statement and step of a story of which nothing went wrong."""
    since, until = FIRST_LOOKS
    return [
        (Planned(place.number, fault),)
        for place in story.plan.places
        if place.group not in LOOKS or (place.group == "read_due" and since < place.at < until)
        for fault in (STEPS if place.carry_out is None else FAULTS)
    ]


def went_wrong(scenario: JobsScenario, planned: Sequence[tuple[Planned, ...]]) -> list[StoredStory]:
    return [story for each in planned if (story := StoredStory(scenario, each)).found]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
class TestScenarios:
    def test_each_run_time_is_run_once_without_a_fault(self, scenario: JobsScenario) -> None:
        story = StoredStory(scenario)
        check([story] if story.found else [], scenario.name)
        ran = sorted((run.task, run.due) for run in story.ledger.runs)
        assert ran == sorted((job.name, at) for job in scenario.jobs for at in job.windows)

    def test_nothing_is_lost_or_doubled_with_a_fault(self, scenario: JobsScenario) -> None:
        planned = singles(StoredStory(scenario))
        chance = random.Random(SEED)  # noqa: S311  # no secret
        check(went_wrong(scenario, chance.sample(planned, SINGLES_IN_SHORT)), "stories")

    @pytest.mark.simulate
    @pytest.mark.timeout(7200)
    def test_nothing_is_lost_or_doubled_with_each_fault(self, scenario: JobsScenario) -> None:
        check(went_wrong(scenario, singles(StoredStory(scenario))), "stories")

    @pytest.mark.parametrize("before", [0.0, 0.0007])
    def test_a_users_change_between_read_and_claim_holds(
        self, scenario: JobsScenario, before: float
    ) -> None:
        """Such as a pause: nothing is claimed after it. A rename loses nothing."""
        claims = [each.at for each in StoredStory(scenario).plan.places if each.group == "claim"]
        [name, *_] = [job.name for job in scenario.jobs]
        for at in claims[::3]:
            renamed = StoredStory(replace(scenario, act=partial(_changed, scenario, at + before)))
            check([renamed] if renamed.found else [], "renames")
            pause = partial(_changed, scenario, at + before, run_at=None)
            paused = StoredStory(replace(scenario, act=pause))
            changed_at = BEGIN + at + before
            runs = [run for run in paused.ledger.runs if run.task == name]
            late = [str(run) for run in runs if run.asked > changed_at]
            assert not late, f"{late} at {at}"


def _changed(scenario: JobsScenario, at: float, story: Any, **changes: Any) -> None:
    """Let a user change the first of the jobs then."""
    scenario.act(story)
    rows: StoredLocks = story.database.rows
    [name, *_] = rows.jobs
    story.world.call_at(BEGIN + at, lambda: rows.change(name, **changes))


def _nothing(*_: object) -> None:
    pass


def test_a_run_that_is_over_and_not_noted_is_found() -> None:
    with replaced((DueJobs, "note_over", _nothing)):
        assert StoredStory(SCENARIOS[0]).found


def test_rows_of_jobs_move_with_the_claim() -> None:
    rows: Any = StoredStory(SCENARIOS[0]).database.rows
    job = rows.jobs["i"]
    assert (job.run_at, job.last) == (None, START + timedelta(seconds=30))
