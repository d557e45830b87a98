"""Jobs that fail and are run again: pairs of faults, histories, and mistakes that are found.

Their scenarios are gone through in ``test_scenarios.py``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.simulation.faults import Planned
from tests.simulation.retrying import SCENARIOS, RetryScenario, history, story_of
from tests.simulation.scenarios import check
from tests.simulation.test_jobs_side import SEEDS
from tests.simulation.test_scenarios import SEED
from tests.simulation.test_side_faults import NEAR, is_beyond_promise
from tests.support.retry_mutations import RETRY_MUTATIONS

pytestmark = pytest.mark.usefixtures("simulation")

# Limits the seeds in `make test`.
SEEDS_IN_SHORT = 30
# The pairs of a scenario in `make simulate`, for a share of 1 of all pairs of faults.
MOST_PAIRS = 1_000
# The attempts of some scenarios without a fault, in order.
ATTEMPTS = {
    "retries": [1, 2, 3, 1],
    "every attempt fails": [1, 2, 1, 2],
    "killed before the retry": [1, 2, 3],
    "killed in the retry": [1, 2, 2, 3],  # with a takeover
    "killed in the retry, no failover": [1, 2],
    "stopped before the retry": [1, 2, 3],
    "the window is opened": [1, 2, 3],
    "the window is opened at once, because the delay is too long": [1, 1],
    "the next run time comes in the retry": [1, 2, 1, 2],
    "the next run time comes before the look": [1],
    "every ten seconds": [1, 2, 1, 2, 1, 2],
    "every ten seconds, and a delay of thirty": [1, 1, 1],
    "a poisonous job": [1, 1, 1, 2, 2],
    "a leader": [1, 2, 3, 1, 2],
}


@pytest.mark.simulate
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_pairs_of_faults_keep_what_is_promised(
    scenario: RetryScenario, request: pytest.FixtureRequest
) -> None:
    chance = random.Random(f"{SEED} {scenario.name}")  # noqa: S311  # no secret
    singles, wrong = story_of(scenario).singles, []
    for _ in range(int(MOST_PAIRS * request.config.getoption("--pairs")) if singles else 0):
        first = chance.choice(singles)
        seconds = [
            each
            for each in story_of(scenario, (first,)).singles
            if first.at < each.at <= first.at + NEAR
            and not is_beyond_promise(first.fault, each.fault)
        ]
        story = story_of(scenario, (first, *chance.sample(seconds, min(1, len(seconds)))))
        wrong += [story] * bool(story.found)
    check(wrong, f"pairs (seed {SEED})")


class TestHistories:
    def test_what_is_promised_is_kept_in_random_histories(self) -> None:
        self.check_histories(range(SEEDS_IN_SHORT))

    def test_a_history_goes_the_same_way_again(self) -> None:
        assert str(history(7)) == str(history(7))

    @pytest.mark.simulate
    @pytest.mark.timeout(7200)
    def test_many_histories(self, request: pytest.FixtureRequest) -> None:
        self.check_histories(range(int(SEEDS * request.config.getoption("--pairs"))))

    def check_histories(self, seeds: range) -> None:
        wrong = [story for seed in seeds if (story := history(seed)).found]
        check(wrong, f"{len(seeds)} histories")


@pytest.mark.parametrize("scenario", ATTEMPTS)
def test_the_attempts_of_a_scenario_are_those_that_it_is_about(scenario: str) -> None:
    """Else the scenario may go past what it is to show."""
    [found] = [each for each in SCENARIOS if each.name == scenario]
    assert [run.attempt for run in story_of(found).ledger.runs] == ATTEMPTS[scenario]


def test_a_retry_whose_lease_is_over_when_its_answer_comes_gets_a_new_one() -> None:
    """Its claim is sent again, finds itself, and is not sent again and again."""
    [scenario] = [each for each in SCENARIOS if each.name == "every attempt fails"]
    planned = Planned(43, "no answer"), Planned(46, "step ahead")
    story = story_of(scenario, planned)
    # If this fails, the scenario has changed, and the pair has to be found again.
    assert [story.plan.places[each.at].what for each in planned] == ["rerun r"] * 2, story
    assert not story.found, story


@pytest.mark.simulate
@pytest.mark.parametrize("mistake", RETRY_MUTATIONS)
def test_a_mistake_in_retries_is_found(mistake: str) -> None:
    where, mutated = RETRY_MUTATIONS[mistake]
    [scenario] = [each for each in SCENARIOS if each.name == where]
    stories = list(plans(scenario))
    with mutated():
        assert any(story_of(scenario, planned).found for planned in stories)


def plans(scenario: RetryScenario) -> Iterator[tuple[Planned, ...]]:
    """Yield what is planned in the stories of a scenario: nothing, then each fault."""
    yield ()
    for planned in story_of(scenario).singles:
        yield (planned,)
