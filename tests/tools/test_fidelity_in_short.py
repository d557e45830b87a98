"""The instrument that compares rules still works with the package, on a trace of four windows."""

from __future__ import annotations

import pytest

from benchmarks.fidelity.clock import TravellingDatabase
from benchmarks.fidelity.rules import TRACE_RULES, Rule
from benchmarks.fidelity.simulation import Simulation
from benchmarks.fidelity.trace import Conditions, Trace

PERIOD = 300.0


@pytest.mark.parametrize("kind", TRACE_RULES, ids=lambda kind: kind.name)
def test_every_rule_runs_each_window_of_a_calm_trace_once(
    kind: type[Rule], database: TravellingDatabase
) -> None:
    trace = Trace(Conditions("calm"), 4, seed=1)
    history = Simulation(trace, kind(database), database).live()

    assert [run.due for run in history.runs] == [0.0, PERIOD, 2 * PERIOD, 3 * PERIOD]
