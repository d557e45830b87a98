"""How many replicas of a fleet look for a stored job when it is due."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from apscheduler_tasklock.jobstore.due import (
    INTERVAL_OF_EACH,
    LOOKING,
    MARGIN,
    OTHERS_LOOK_AFTER,
    look_delay,
)

FLEETS = [1, 2, 3, 4, 10, 60, 500]


def looks(replicas: int, times: int) -> list[list[float]]:
    """Return after how many seconds each replica looks, for so many due times."""
    rng = random.Random(replicas)  # noqa: S311  # no secret
    return [[look_delay(replicas, rng.random) for _ in range(replicas)] for _ in range(times)]


@pytest.mark.parametrize("replicas", FLEETS)
def test_some_three_look_at_once(replicas: int) -> None:
    at_once = [each.count(MARGIN) for each in looks(replicas, 2000)]
    assert fmean(at_once) == pytest.approx(min(replicas, LOOKING), rel=0.1)


@pytest.mark.parametrize("replicas", FLEETS)
def test_the_others_look_when_it_should_have_been_run_and_not_all_together(replicas: int) -> None:
    """By then 20 of them look in a second at most, as in ordinary looks."""
    for each in looks(replicas, 20):
        others = [after for after in each if after != MARGIN]
        assert all(after >= OTHERS_LOOK_AFTER for after in others)
        assert max(each) <= OTHERS_LOOK_AFTER + replicas * INTERVAL_OF_EACH


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_in_a_small_fleet_all_look_at_once(replicas: int) -> None:
    assert all(set(each) == {MARGIN} for each in looks(replicas, 100))
