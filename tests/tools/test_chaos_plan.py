"""The plan of the chaos: ordinary life comes in every run, also in a short one."""

from __future__ import annotations

import pytest

from tests.chaos.plan import PEACE_AFTER, POOL_FAULTS, draw

# Those of continuous integration, and of `make chaos`.
REPLICAS = 5


@pytest.mark.parametrize("seconds", [45.0, 180.0])
def test_ordinary_life_comes_in_every_run(seconds: float) -> None:
    for seed in range(20):
        _expect_ordinary_life(seed, seconds)


def _expect_ordinary_life(seed: int, seconds: float) -> None:
    plan = draw(seed, seconds, REPLICAS, skewed=True)
    last = seconds - PEACE_AFTER
    done = [action for action in plan.actions if action.at < last]
    kinds = {action.kind for action in done}
    assert "stall" in kinds
    assert kinds & {"restart fast", "restart immediate"}
    assert sum(one_off.at < last for one_off in plan.one_offs) >= 100
    first_on_loops = {slot for slot, newcomer in enumerate(plan.first) if newcomer.loop}
    replaced = {action.slot for action in done if action.kind in ("leave", "kill")}
    assert replaced == set(range(REPLICAS))
    assert set(POOL_FAULTS) <= kinds
    assert first_on_loops & {action.slot for action in done if action.kind == "leave"}


def test_the_same_seed_gives_the_same_plan() -> None:
    assert draw(7, 60.0, REPLICAS, skewed=True) == draw(7, 60.0, REPLICAS, skewed=True)
    assert draw(7, 60.0, REPLICAS, skewed=True) != draw(8, 60.0, REPLICAS, skewed=True)


def test_a_plan_without_skew_leaves_the_clocks_as_they_are() -> None:
    plan = draw(7, 60.0, REPLICAS, skewed=False)
    newcomers = [*plan.first, *(one for action in plan.actions for one in action.newcomers)]
    assert {newcomer.skew for newcomer in newcomers} == {0.0}
