"""Replicas with both sides on a virtual clock: faults at every place, bursts, overloads, histories.

What it does and does not see is in the README beside this.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from tests.simulation import faults
from tests.simulation.faults import Planned
from tests.simulation.jobs_scenarios import (
    BURSTS,
    SCENARIOS,
    JobsScenario,
    JobsStory,
    late_manual_runs,
    overload,
)
from tests.simulation.side import simulating
from tests.simulation.world import replaced

SEED = 32
# The share of all singles, and how many seeds, that `make test` has time for.
SHARE_IN_SHORT = 0.1
SEEDS_IN_SHORT = 60
# For `make simulate`: how many seeds for each share of all pairs of faults.
SEEDS = 20_000
# How many stories that went wrong are told in full.
MOST_TOLD = 3
# Seconds that a database takes to answer in a stall.
STALLS = (0.3, 1.5)


@pytest.fixture(autouse=True)
def simulation() -> Iterator[None]:
    # What is logged here is true of no real database, and is much.
    logging.disable(logging.CRITICAL)
    try:
        with simulating():
            yield
    finally:
        logging.disable(logging.NOTSET)


def check(stories: Sequence[JobsStory], what: str) -> None:
    if stories:
        kinds = Counter(found.split(":")[0] for story in stories for found in story.found)
        full = "\n\n".join(str(story) for story in stories[:MOST_TOLD])
        pytest.fail(f"{len(stories)} of {what} went wrong: {dict(kinds)}\n\n{full}")


def went_wrong(
    scenario: JobsScenario, planned: Sequence[tuple[Planned, ...]]
) -> Sequence[JobsStory]:
    return [story for each in planned if (story := JobsStory(scenario, each)).found]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
class TestScenarios:
    def test_nothing_goes_wrong_without_a_fault(self, scenario: JobsScenario) -> None:
        story = JobsStory(scenario)
        assert not story.found, story
        assert not late_manual_runs(story), story
        assert story.ledger.runs

    def test_it_goes_the_same_way_again(self, scenario: JobsScenario) -> None:
        for planned in JobsStory(scenario).singles[::100]:
            first, second = JobsStory(scenario, (planned,)), JobsStory(scenario, (planned,))
            assert str(first) == str(second)

    def test_some_faults_at_some_places_keep_what_is_promised(self, scenario: JobsScenario) -> None:
        chance = random.Random(f"{SEED} {scenario.name}")  # noqa: S311  # no secret
        singles = [
            (each,) for each in JobsStory(scenario).singles if chance.random() < SHARE_IN_SHORT
        ]
        check(went_wrong(scenario, singles), f"{len(singles)} stories")

    @pytest.mark.simulate
    def test_every_fault_at_every_place_keeps_what_is_promised(
        self, scenario: JobsScenario
    ) -> None:
        singles = [(each,) for each in JobsStory(scenario).singles]
        check(went_wrong(scenario, singles), f"{len(singles)} stories")


@pytest.mark.parametrize("scenario", BURSTS, ids=lambda scenario: scenario.name)
def test_in_a_burst_nothing_is_lost_and_nothing_missed(scenario: JobsScenario) -> None:
    story = JobsStory(scenario)
    assert not story.found, story.found
    assert Counter(run.task for run in story.ledger.runs) == Counter(
        job.name for job in scenario.jobs
    )


class TestMissed:
    """Of one replica, whose claims nobody else stands against."""

    def test_an_overload_misses_what_plain_apscheduler_misses(self) -> None:
        self.check_overloads(range(SEEDS_IN_SHORT))

    def test_a_stall_of_the_database_misses_nothing_before_plain_apscheduler_does(self) -> None:
        self.check_stalls(range(SEEDS_IN_SHORT))

    @pytest.mark.simulate
    @pytest.mark.timeout(7200)
    def test_many_overloads_and_stalls(self, request: pytest.FixtureRequest) -> None:
        seeds = range(int(SEEDS * request.config.getoption("--pairs")))
        self.check_overloads(seeds)
        self.check_stalls(seeds)

    def check_overloads(self, seeds: range) -> None:
        with replaced((faults, "LATENCY", 0.0)):
            stories = [JobsStory(overload(seed)) for seed in seeds]
        assert any("missed" in fate.ends for story in stories for fate in story.fates)
        check([story for story in stories if story.found], f"{len(stories)} overloads")

    def check_stalls(self, seeds: range) -> None:
        wrong = []
        for seed in seeds:
            stalled = replace(overload(seed), misses_exactly=False)
            with replaced((faults, "LATENCY", STALLS[seed % len(STALLS)])):
                story = JobsStory(stalled)
            if story.found:
                wrong.append(story)
        check(wrong, f"{len(seeds)} stalls")
