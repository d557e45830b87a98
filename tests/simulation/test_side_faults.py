"""Every fault at every place of the database's side, on a virtual clock, and some pairs of them.

The README beside this module says what these tests find, and what they cannot find.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from tests.simulation.faults import FAULTS, STEPS, Planned
from tests.simulation.mutations import MUTATIONS
from tests.simulation.scenarios import SCENARIOS, Scenario, Story, check
from tests.simulation.world import GoesRoundError

pytestmark = pytest.mark.usefixtures("simulation")

# Limits the places from the first fault of a pair to the second one.
NEAR = 10
SEED = 31
# The share of all pairs in `make test`.
SHARE_IN_SHORT = 0.0004
# Limits the faults of a scenario in `make test`: about a thirtieth of all.
MOST_SINGLES = 10


# Pairs that broke a promise once, each with the statements at which its faults are.
MENDED = {
    "an answer that tells of no claim is seen when the claim was granted since": (
        "hold",
        ("claim h", Planned(12, "held up 1 s")),
        ("release h", Planned(15, "pause after")),
    ),
    "a long outage goes on after a shorter one of one replica": (
        "backlog",
        ("claim b", Planned(14, "short pause, then worse")),
        ("read b", Planned(15, "long outage")),
    ),
    "a takeover that was granted too late, and is not asked for again, is handed over": (
        "overrun",
        ("claim o", Planned(28, "short pause, then worse")),
        ("rerun o", Planned(39, "pause after")),
    ),
    "a lease that was renewed before the run has ended when the answer is seen": (
        "short lease",
        ("claim s", Planned(6, "short pause, then worse")),
        ("renew s", Planned(9, "pause after")),
    ),
    "the connection that ended an outage breaks in the next one": (
        "short lease",
        ("claim s", Planned(6, "outage")),
        ("renew s", Planned(16, "outage")),
    ),
    "a claim whose answer is late ends by a step of the clock before it": (
        "windows",
        ("claim w", Planned(24, "late")),
        ("read w", Planned(26, "step ahead")),
    ),
    "a lease ends by a step of the clock before the answer that grants it": (
        "lost lock",
        ("claim l", Planned(6, "slow database")),
        ("read l", Planned(8, "step ahead")),
    ),
    "a backlog's first window is overtaken by a replica that is killed": (
        "backlog",
        ("claim b", Planned(12, "rejected")),
        ("release b", Planned(20, "kill before")),
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
class TestScenarios:
    def test_nothing_goes_wrong_without_a_fault(self, scenario: Scenario) -> None:
        story = Story(scenario)
        assert not story.found, story
        assert story.ledger.runs

    def test_it_goes_the_same_way_again(self, scenario: Scenario) -> None:
        for planned in Story(scenario).singles[::50]:
            first, second = Story(scenario, (planned,)), Story(scenario, (planned,))
            assert str(first) == str(second)

    def test_some_faults_at_some_places_keep_what_is_promised(self, scenario: Scenario) -> None:
        chance = random.Random(f"{SEED} {scenario.name}")  # noqa: S311  # no secret
        check_singles(scenario, chance.sample(Story(scenario).singles, MOST_SINGLES))

    @pytest.mark.simulate
    def test_every_fault_at_every_place_keeps_what_is_promised(self, scenario: Scenario) -> None:
        check_singles(scenario, Story(scenario).singles)


def check_singles(scenario: Scenario, singles: Sequence[Planned]) -> None:
    wrong = [story for each in singles if (story := Story(scenario, (each,))).found]
    places = len({each.at for each in singles})
    kinds = f"{len(FAULTS)} or {len(STEPS)} faults"
    check(wrong, f"{len(singles)} stories ({places} places, {kinds}; seed {SEED})")


def test_a_first_claim_of_a_task_that_is_held_up_is_not_granted_when_nobody_waits() -> None:
    [hold] = [each for each in SCENARIOS if each.name == "hold"]
    scenario = replace(hold, known=())
    singles = [
        each for each in Story(scenario).singles if each.fault == "always held up beyond the claim"
    ]
    assert not any(Story(scenario, (each,)).found for each in singles)


def pairs(scenario: Scenario, share: float) -> Iterator[tuple[Planned, Planned]]:
    """Return a share of all pairs of faults, the second one near the first."""
    chance = random.Random(f"{SEED} {scenario.name}")  # noqa: S311  # no secret
    singles = Story(scenario).singles
    for first in singles:
        for second in singles:
            if not first.at < second.at <= first.at + NEAR or chance.random() >= share:
                continue
            if not is_beyond_promise(first.fault, second.fault):
                yield first, second


def is_beyond_promise(first: str, second: str) -> bool:
    """Return whether the documentation excludes the cost of two faults together."""
    faults = (first, second)
    # An exact run time does not count if the clocks differ by more than five minutes.
    if all(each.startswith("step") for each in faults):
        return True
    # A delayed claim expires later on a clock that was set back.
    return "step back" in faults and any("held up" in each for each in faults)


def check_pairs(scenario: Scenario, share: float) -> None:
    count, wrong = 0, []
    for planned in pairs(scenario, share):
        count += 1
        story = Story(scenario, planned)
        if story.found:
            wrong.append(story)
    check(wrong, f"{count} pairs (seed {SEED})")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
class TestPairs:
    def test_some_pairs_of_faults_keep_what_is_promised(self, scenario: Scenario) -> None:
        check_pairs(scenario, SHARE_IN_SHORT)

    @pytest.mark.simulate
    @pytest.mark.timeout(7200)
    def test_many_pairs_of_faults_keep_what_is_promised(
        self, scenario: Scenario, request: pytest.FixtureRequest
    ) -> None:
        check_pairs(scenario, request.config.getoption("--pairs"))


@pytest.mark.parametrize("pair", MENDED)
def test_a_pair_of_faults_that_went_wrong_keeps_what_is_promised(pair: str) -> None:
    name, *places = MENDED[pair]
    [scenario] = [each for each in SCENARIOS if each.name == name]
    story = Story(scenario, tuple(planned for _, planned in places))
    # If this fails, the scenario has changed, and the pair has to be found again.
    assert [story.plan.places[planned.at].what for _, planned in places] == [
        what for what, _ in places
    ], story
    assert not story.found, story


@pytest.mark.simulate
@pytest.mark.parametrize("mistake", MUTATIONS)
def test_a_mistake_in_the_side_is_found(mistake: str) -> None:
    first, mutated = MUTATIONS[mistake]
    [scenario] = [each for each in SCENARIOS if each.name == first]
    singles = Story(scenario).singles
    with mutated():
        assert any(_goes_wrong(scenario, planned) for planned in singles)


def _goes_wrong(scenario: Scenario, planned: Planned) -> bool:
    try:
        return bool(Story(scenario, (planned,)).found)
    except GoesRoundError:
        return True
