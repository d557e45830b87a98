"""The costs of run history and due times, for a claim and a release."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Any, ClassVar
from uuid import UUID

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider

from apscheduler_tasklock import upgrade
from apscheduler_tasklock._lock.outcomes import NOT_BEGUN, RunOutcome
from apscheduler_tasklock._runs.otel import OpenTelemetryRun
from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock.demo.server import EmbeddedServer
from apscheduler_tasklock.lock import HeldLock
from benchmarks.speed.contenders import MAX_LOCK, Contender, OnPsycopg
from benchmarks.speed.counters import Count
from benchmarks.speed.counts import IN_A_ROW, LOGGED, count
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.history_size import SCHEDULE
from benchmarks.speed.report import Goal, Section, median, microseconds, p99, table
from benchmarks.speed.rounds import OPERATIONS, Samples, measure
from tests.support.waist import (
    HISTORY,
    Claim,
    ClaimAnswer,
    ClaimRequest,
    Refusal,
    ReleaseRequest,
    protocol_of,
    raw_cursor,
)

# Runs before the first that is measured, so that it overwrites the oldest entry of its task.
WARM_UP = 2 * HISTORY
MOST = 1.25

TASK = "measured"


class WithHistory(OnPsycopg):
    """The statements that ship, with all that they write for operators."""

    name = "with all of it"
    history: ClassVar[int] = HISTORY
    asked: ClassVar[dict[str, Any]] = {"schedule": SCHEDULE, "next_in": 60.0}
    end: ClassVar[RunOutcome] = RunOutcome(outcome="ok")

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._protocol = protocol_of("bench", history=self.history)

    @classmethod
    def prepare(cls, url: str) -> None:
        upgrade(url)

    def ask(self, task: str) -> ClaimAnswer:
        """Send a claim's statement."""
        request = ClaimRequest(task, 0.0, MAX_LOCK, runs="benchmark:job", **self.asked)
        return self._protocol.execute(raw_cursor(self.connection), Claim(request))

    def claim(self, task: str) -> Any:
        task = f"{self.name} {task}"
        answer = self.ask(task)
        return (task, answer.claim_id, answer.token) if answer.granted else None

    def release(self, held: tuple[str, UUID, int]) -> None:
        task, claim_id, token = held
        request = ReleaseRequest(task, claim_id, self.end, token)
        assert self._protocol.execute(raw_cursor(self.connection), request) is not None


class WithTelemetry(WithHistory):
    """All of it, and OpenTelemetry's metrics and spans, whose SDK keeps and sends nothing."""

    name = "and OpenTelemetry"

    def claim(self, task: str) -> Any:
        task = f"{self.name} {task}"
        run = OpenTelemetryRun(_submission(task))
        wanted_at = time.monotonic()
        answer = self.ask(task)
        held = _held_lock(task, answer) if answer.granted else None
        run.claimed(wanted_at, held or Refusal.of(answer))
        return held and (held, run)

    def release(self, held: Any) -> None:
        lock, run = held
        with run.running(lock, time.time()):
            pass  # the job
        super().release((lock.name, lock.claim_id, lock.token))
        run.ended(self.end)


class WithoutHistory(WithHistory):
    """The same without: the lock alone."""

    name = "without"
    history = 0
    asked: ClassVar[dict[str, Any]] = {}
    end = NOT_BEGUN


KINDS: list[type[Contender]] = [WithHistory, WithTelemetry, WithoutHistory]


def _submission(task: str) -> Submission:
    return Submission(
        job=None,
        jobstore="default",
        trigger=None,
        run_times=[],
        task_name=task,
        options=None,
        run_unlocked=False,
        logger_name="",
    )


def _held_lock(task: str, answer: ClaimAnswer) -> HeldLock:
    now = datetime.now(timezone.utc)
    return HeldLock(
        name=task,
        token=answer.token,
        claim_id=answer.claim_id,
        run_time=now,
        window_start=answer.window_start,
        locked_until=answer.locked_until,
        run_until=answer.run_until,
        ends_at=0.0,
        extender=lambda *_: False,
    )


def run(effort: Effort) -> Section:
    """Compare claims and releases with and without."""
    counted = effort.of(300, 100)
    section = Section(
        "What the history costs",
        f"Claims and releases with all that is written for operators (a history of {HISTORY} "
        "runs that is full, the schedule and the due time, how the run ended), and with "
        "OpenTelemetry, whose SDK drops what it is told, beside the same "
        "statements without: no history, no schedule, no outcome. All are on a plain psycopg "
        f"connection, in a shuffled order within each of {effort.rounds:,} rounds. Statements, WAL "
        f"and transaction ids are counted as in *Statements, round trips, WAL and connections*, "
        f"the latter two over {counted} of each.",
    )
    samples = _measure(effort)
    both = {kind.name: _both(samples, kind) for kind in KINDS}
    counts = {}
    for kind in (WithHistory, WithoutHistory):  # OpenTelemetry sends nothing to the database
        progress(f"counting {kind.name}")
        with EmbeddedServer(LOGGED, loopback=True) as server:
            counts[kind.name] = count(kind, server, counted, WARM_UP)
    section.tables.append(_times(samples, both))
    section.tables.append(_counts(counts))
    section.goals = _goals(both, counts[WithHistory.name])
    return section


def _measure(effort: Effort) -> Samples:
    with EmbeddedServer(loopback=True) as server:
        WithHistory.prepare(server.url)
        trace.set_tracer_provider(TracerProvider())
        metrics.set_meter_provider(MeterProvider())
        contenders = [kind(server.url) for kind in KINDS]
        try:
            for contender in contenders:
                for _ in range(WARM_UP):
                    contender.release(contender.claim(TASK))
            progress(f"{effort.rounds} rounds")
            return measure(contenders, TASK, effort.rounds, effort.rng())
        finally:
            for contender in contenders:
                contender.close()


def _both(samples: Samples, kind: type[Contender]) -> list[float]:
    """Return the seconds of claim and release together, round by round."""
    claims, releases = samples[kind.name, "granted"], samples[kind.name, "release"]
    return [claim + release for claim, release in zip(claims, releases, strict=True)]


def _times(samples: Samples, both: dict[str, list[float]]) -> str:
    header, rows = [""], []
    for what in (*OPERATIONS, "claim + release"):
        header += [what, "p99"]
    for kind in KINDS:
        series = [*(samples[kind.name, what] for what in OPERATIONS), both[kind.name]]
        cells = [microseconds(of(taken)) for taken in series for of in (median, p99)]
        rows.append([kind.name, *cells])
    return table(header, rows)


def _counts(counts: dict[str, dict[str, Count]]) -> str:
    rows = []
    for name, by_operation in counts.items():
        for what in (*OPERATIONS, IN_A_ROW):
            found = by_operation[what]
            statements = "" if what == IN_A_ROW else f"{found.statements:g}"
            numbers = [f"{found.wal:,.1f}", f"{found.transactions:.2g}"]
            rows.append([name if what == OPERATIONS[0] else "", what, statements, *numbers])
        rows.append(["", "claim + release", "", f"{_wal(by_operation):,.1f}", ""])
    return table(["", "operation", "statements", "WAL bytes", "transaction ids"], rows)


def _wal(by_operation: dict[str, Count]) -> float:
    return by_operation["granted"].wal + by_operation["release"].wal


def _cost(what: str, kind: type[Contender], both: dict[str, list[float]]) -> Goal:
    times = median(both[kind.name]) / median(both[WithoutHistory.name])
    goal = f"at most {MOST} x the same without"
    return Goal(f"claim + release {what}", goal, f"{times:.2f} x", times <= MOST)


def _goals(both: dict[str, list[float]], counts: dict[str, Count]) -> list[Goal]:
    costs = [
        _cost("with history, due time and outcome", WithHistory, both),
        _cost("with all of that and OpenTelemetry", WithTelemetry, both),
    ]
    each = counts["granted"].statements, counts["release"].statements
    sent = Goal(
        "claim and release with history",
        "1 statement each",
        f"{each[0]:g} and {each[1]:g}",
        each == (1, 1),
    )
    refused = counts[IN_A_ROW]
    nothing = Goal(
        "refused again, with history",
        "0 bytes of WAL, 0 transaction ids",
        f"{refused.wal:.3g} bytes, {refused.transactions:g}",
        refused.wal == refused.transactions == 0,
    )
    return [*costs, sent, nothing]
