"""The cost of the condition that looks at the pauses of all tasks, in claims."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from apscheduler_tasklock._lock.statements.conditions import (
    asked_parameters,
    paused_with_all,
    pauses_of_all,
)
from apscheduler_tasklock._lock.statements.statement import Statement
from apscheduler_tasklock.demo.server import EmbeddedServer
from apscheduler_tasklock.schema.table import quoted_name, task_lock_table
from benchmarks.speed.contenders import Contender
from benchmarks.speed.effort import Effort
from benchmarks.speed.history import WithHistory
from benchmarks.speed.report import Goal, Section, median, microseconds, table
from benchmarks.speed.rounds import OPERATIONS, measure, ratio
from tests.support.waist import ClaimRequest

MOST = 1.05

_IN_CLAIMS = paused_with_all(asked_parameters(ClaimRequest)["task_name"], "asked.fired")
_QUERY = pauses_of_all(quoted_name(task_lock_table()))


@contextmanager
def _without_condition() -> Iterator[None]:
    """Let statements that are made in the context have no condition on the pauses of all tasks."""
    as_it_is = Statement.__init__

    def init(self: Statement, template: str, *more: Any) -> None:
        bare = template.replace(f"WITH {_QUERY},", "WITH").replace(_IN_CLAIMS, "false")
        # Other statements, such as those for many claims, stay as they are.
        as_it_is(self, template if "pauses_of_all" in bare else bare, *more)

    with patch.object(Statement, "__init__", init):
        yield


class With(WithHistory):
    """The statements that ship."""

    name = "with the condition"


class Without(WithHistory):
    """The same statements without the condition."""

    name = "without it"

    def __init__(self, url: str) -> None:
        with _without_condition():
            super().__init__(url)
        # So that a change of the condition does not compare the statements with themselves.
        protocol: Any = self._protocol
        claim = protocol._claim.recording  # no public name has it
        assert claim is not None
        assert "pauses_of_all" not in claim.text


KINDS: list[type[Contender]] = [With, Without]


def run(effort: Effort) -> Section:
    """Compare claims with and without the condition. Releases have none, and show the noise."""
    # Without a disk to wait for, which would hide what the statements cost.
    with EmbeddedServer({"fsync": "off"}, loopback=True) as server:
        for kind in KINDS:
            kind.prepare(server.url)
        contenders: list[Any] = [kind(server.url) for kind in KINDS]
        try:
            samples = measure(contenders, "task", effort.rounds, effort.rng())
        finally:
            for contender in contenders:
                contender.close()
    rows, goals = [], []
    for operation in OPERATIONS:
        costs = [median(samples[kind.name, operation]) for kind in KINDS]
        times = ratio(samples, (With.name, operation), (Without.name, operation))
        rows.append([operation, *map(microseconds, costs), f"{times:.3f}"])
        if operation == "release":
            continue
        goals.append(
            Goal(
                f"{operation}, with the condition on pauses of all tasks",
                f"at most {MOST} x without it",
                f"{times:.3f} x",
                times <= MOST,
            )
        )
    return Section(
        "The condition on pauses of all tasks",
        f"Medians of {effort.rounds:,} rounds, with `fsync` off, while nothing is paused. The "
        "ratios are taken within rounds and their median given. A release has no such condition.",
        [table(["", With.name, Without.name, "ratio"], rows)],
        goals,
    )
