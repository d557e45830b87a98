"""The scenarios of replicas with both sides, without a fault and with each fault at each place."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.simulation import jobs_scenarios, leading, retrying
from tests.simulation.faults import Planned
from tests.simulation.jobs_scenarios import JobsScenario, JobsStory, late_manual_runs
from tests.simulation.leading import LeaderStory, unlike_a_led_fleet
from tests.simulation.retrying import story_of
from tests.simulation.scenarios import check

pytestmark = pytest.mark.usefixtures("simulation")

SEED = 32


def _nothing(_story: JobsStory) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Kind:
    """A kind of scenario.

    :ivar scenarios: the scenarios
    :ivar story: goes through a scenario, with the faults that are planned
    :ivar most_singles: limits the singles of a scenario in `make test`
    :ivar also_wrong: returns what else is wrong with a story without a fault
    """

    scenarios: Sequence[JobsScenario]
    story: Callable[..., JobsStory]
    most_singles: int
    also_wrong: Callable[[Any], Sequence[str]] = _nothing


KINDS = {
    "jobs": Kind(jobs_scenarios.SCENARIOS, JobsStory, 4, late_manual_runs),
    "leader mode": Kind(leading.SCENARIOS, LeaderStory, 6, unlike_a_led_fleet),
    "retries": Kind(retrying.SCENARIOS, story_of, 3),
}
CASES = [
    pytest.param(kind, scenario, id=f"{name}: {scenario.name}")
    for name, kind in KINDS.items()
    for scenario in kind.scenarios
]
# A thing that is drawn, or a clock that is real, is the same in all scenarios of a kind.
TWICE = [
    pytest.param(*case.values, id=case.id, marks=() if n % 8 == 0 else pytest.mark.nightly)
    for n, case in enumerate(CASES)
]


def check_singles(kind: Kind, scenario: JobsScenario, singles: Sequence[Planned]) -> None:
    wrong = [story for each in singles if (story := kind.story(scenario, (each,))).found]
    check(wrong, f"{len(singles)} stories (seed {SEED})")


@pytest.mark.parametrize(("kind", "scenario"), CASES)
class TestScenarios:
    def test_nothing_goes_wrong_without_a_fault(self, kind: Kind, scenario: JobsScenario) -> None:
        story = kind.story(scenario)
        assert not story.found, story
        assert not kind.also_wrong(story), story
        assert story.ledger.runs

    def test_some_faults_at_some_places_keep_what_is_promised(
        self, kind: Kind, scenario: JobsScenario
    ) -> None:
        chance = random.Random(f"{SEED} {scenario.name}")  # noqa: S311  # no secret
        singles = kind.story(scenario).singles
        some = chance.sample(singles, min(kind.most_singles, len(singles)))
        check_singles(kind, scenario, some)

    @pytest.mark.simulate
    @pytest.mark.timeout(7200)
    def test_every_fault_at_every_place_keeps_what_is_promised(
        self, kind: Kind, scenario: JobsScenario
    ) -> None:
        check_singles(kind, scenario, kind.story(scenario).singles)


@pytest.mark.parametrize(("kind", "scenario"), TWICE)
def test_it_goes_the_same_way_again(kind: Kind, scenario: JobsScenario) -> None:
    for planned in [(), *((each,) for each in kind.story(scenario).singles[::300])]:
        assert str(kind.story(scenario, planned)) == str(kind.story(scenario, planned))
