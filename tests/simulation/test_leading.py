"""Mistakes in leader mode are found. Its scenarios are gone through in ``test_scenarios.py``."""

from __future__ import annotations

import pytest

from tests.simulation.leading import SCENARIOS, LeaderStory, unlike_a_led_fleet
from tests.support.leader_mutations import LEADER_MUTATIONS

pytestmark = pytest.mark.usefixtures("simulation")


@pytest.mark.simulate
@pytest.mark.parametrize("mistake", LEADER_MUTATIONS)
def test_a_mistake_in_leader_mode_is_found(mistake: str) -> None:
    where, mutated = LEADER_MUTATIONS[mistake]
    [scenario] = [each for each in SCENARIOS if each.name == where]
    with mutated():
        story = LeaderStory(scenario)
        assert story.found or unlike_a_led_fleet(story)
