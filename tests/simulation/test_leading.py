"""Fleets in leader mode: faults at every place while leadership is gained, lost and given up."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.simulation.faults import Planned
from tests.simulation.leading import SCENARIOS, LeaderScenario, LeaderStory, unlike_a_led_fleet
from tests.simulation.test_jobs_side import SEED, check
from tests.support.leader_mutations import LEADER_MUTATIONS

pytestmark = pytest.mark.usefixtures("simulation")

# Limits the singles of a scenario in `make test`.
SINGLES_IN_SHORT = 20


def went_wrong(scenario: LeaderScenario, planned: Sequence[Planned]) -> Sequence[LeaderStory]:
    return [story for each in planned if (story := LeaderStory(scenario, (each,))).found]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
class TestScenarios:
    def test_nothing_goes_wrong_without_a_fault(self, scenario: LeaderScenario) -> None:
        story = LeaderStory(scenario)
        assert not story.found, story
        assert not unlike_a_led_fleet(story), story
        assert story.ledger.runs

    def test_some_faults_at_some_places_keep_what_is_promised(
        self, scenario: LeaderScenario
    ) -> None:
        chance = random.Random(f"{SEED} {scenario.name}")  # noqa: S311  # no secret
        singles = LeaderStory(scenario).singles
        some = chance.sample(singles, min(SINGLES_IN_SHORT, len(singles)))
        check(went_wrong(scenario, some), f"{len(some)} stories (seed {SEED})")

    @pytest.mark.simulate
    @pytest.mark.timeout(7200)
    def test_every_fault_at_every_place_keeps_what_is_promised(
        self, scenario: LeaderScenario
    ) -> None:
        singles = LeaderStory(scenario).singles
        check(went_wrong(scenario, singles), f"{len(singles)} stories")


@pytest.mark.parametrize("mistake", LEADER_MUTATIONS)
def test_a_mistake_in_leader_mode_is_found(mistake: str) -> None:
    where, mutated = LEADER_MUTATIONS[mistake]
    [scenario] = [each for each in SCENARIOS if each.name == where]
    with mutated():
        story = LeaderStory(scenario)
        assert story.found or unlike_a_led_fleet(story)
