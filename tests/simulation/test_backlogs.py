"""Compares rules for refused runs with new windows, in all orders of events of backlogs.

Only the rule of ``_runs/deferred_runs.py`` neither loses one of these windows nor runs a window
that APScheduler would skip. It is not perfect: if a run time comes due while a manual run goes on,
5 of 556 ends run a window that APScheduler would skip, because the manual run's token hides the
earlier run.
"""

from __future__ import annotations

import pytest

from tests.simulation.backlogs import Backlogs, Enumeration, Rule, enumerate_all

TWO, THREE = (1, 2), (1, 2, 3)

SMALL = {
    "two run times": Backlogs(([TWO],) * 2),
    "three run times": Backlogs(([THREE],) * 2),
    "three run times, with failover": Backlogs(([THREE],) * 2, failover=True, kills=1),
    "a run time comes due meanwhile": Backlogs(([(1,), (2,)],) * 2, late=(2,)),
    "a manual run in the way": Backlogs(([TWO],) * 2, is_manual=True),
    "two run times on three replicas": Backlogs(([TWO],) * 3),
}
LARGE = {
    "two run times on three replicas, with failover": Backlogs(([TWO],) * 3, failover=True),
    "three run times on three replicas": Backlogs(([THREE],) * 3),
    "two kills": Backlogs(([THREE],) * 3, failover=True, kills=2),
    "a run time comes due meanwhile, with failover": Backlogs(
        ([(1,), (2,)],) * 2, late=(2,), failover=True
    ),
    "a manual run in the way, with failover": Backlogs(([TWO],) * 2, is_manual=True, failover=True),
}
# A later run time is asked for although an earlier one is deferred, if a look found the run in
# their way still going on. If that run ends between the look and the claim, the later run time is
# run first.
OVERTAKEN = Backlogs(([TWO, (3,)],) * 2, late=(3,))
# The mistakes of other rules, each in one of the small backlogs.
WRONG = {
    Rule.GO_ON: ("two run times", "lost"),
    Rule.LEAVE: ("two run times", "lost"),
    Rule.DEFER_DUE: ("a run time comes due meanwhile", "lost"),
    Rule.ASK_AGAIN: (
        "a run time comes due meanwhile",
        "run after what stood rightly against it",
    ),
}


def told(result: Enumeration) -> str:
    ways = [f"{found}: {'; '.join(way)}" for found, way in result.ways.items()]
    return "\n".join([f"{result.ends} ends of {result.states} states: {result.kinds}", *ways])


@pytest.mark.parametrize("name", SMALL)
def test_each_window_of_a_backlog_is_run_once_whatever_happens_next(name: str) -> None:
    result = enumerate_all(SMALL[name], Rule.DEFER)
    assert result.ends > 10
    assert not result.found, told(result)


@pytest.mark.simulate
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", LARGE)
def test_so_it_is_in_larger_ones(name: str) -> None:
    result = enumerate_all(LARGE[name], Rule.DEFER)
    assert not result.found, told(result)


@pytest.mark.simulate
@pytest.mark.timeout(7200)
def test_a_run_time_that_comes_due_meanwhile_may_overtake_a_backlog_and_nothing_else_is_lost() -> (
    None
):
    result = enumerate_all(OVERTAKEN, Rule.DEFER)
    assert result.kinds["overtaken"]
    against = "run after what stood rightly against it"
    assert set(result.kinds) <= {"overtaken", against}, told(result)
    assert result.kinds[against] < 0.05 * result.ends


@pytest.mark.parametrize("rule", WRONG)
def test_another_rule_does_not(rule: Rule) -> None:
    name, wrong = WRONG[rule]
    assert wrong in enumerate_all(SMALL[name], rule).kinds


def test_of_backlogs_that_differ_a_window_is_lost_only_if_a_later_one_was_run_before() -> None:
    result = enumerate_all(Backlogs(([THREE], [(2, 3)])), Rule.DEFER)
    assert set(result.kinds) == {"overtaken"}, told(result)
