"""The cost of a batch of one, beside the statement for one claim.

A statement has one form, the batch, unless a batch of one costs more than 1.1 times as much.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed.contenders import MAX_LOCK, Contender
from benchmarks.speed.effort import Effort
from benchmarks.speed.history import WithHistory
from benchmarks.speed.report import Section, median, microseconds, table
from benchmarks.speed.rounds import OPERATIONS, measure
from tests.support.waist import (
    IN_TIME,
    ClaimAnswer,
    ClaimRequest,
    Claims,
    ReleaseRequest,
    Releases,
    raw_cursor,
)

MOST = 1.1


class Alone(WithHistory):
    """The statements for one claim."""

    name = "alone"


class BatchOfOne(WithHistory):
    """The statements for many claims, with one."""

    name = "a batch of one"

    def ask(self, task: str) -> ClaimAnswer:
        """Send a claim's statement, or a first claim's."""
        request = ClaimRequest(task, 0.0, MAX_LOCK, runs="benchmark:job", **self.asked)
        cursor, asked = raw_cursor(self.connection), Claims([request], [0.0], IN_TIME)
        answers = self._protocol.execute(cursor, asked)
        answers = answers or self._protocol.execute(cursor, replace(asked, are_first=True))
        return answers[request.claim_id]

    def release(self, held: tuple[str, UUID, int]) -> None:
        task, claim_id, token = held
        request = ReleaseRequest(task, claim_id, self.end, token)
        answers = self._protocol.execute(raw_cursor(self.connection), Releases([request]))
        assert answers[claim_id] is not None


KINDS: list[type[Contender]] = [Alone, BatchOfOne]


def run(effort: Effort) -> Section:
    """Compare both forms of claims and releases."""
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
    rows = []
    for operation in OPERATIONS:
        alone, batch = (median(samples[kind.name, operation]) for kind in KINDS)
        forms = "both" if batch / alone > MOST else "the batch"
        row = [operation, microseconds(alone), microseconds(batch), f"{batch / alone:.2f}", forms]
        rows.append(row)
    return Section(
        "Statements for one, and batches of one",
        f"Medians of {effort.rounds:,} rounds, with `fsync` off. A statement has one form, the "
        f"batch, unless a batch of one costs more than {MOST} times as much.",
        [table(["", "alone", "a batch of one", "ratio", "forms to have"], rows)],
    )
