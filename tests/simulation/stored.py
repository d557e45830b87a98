"""Stored jobs on a virtual clock: the real reader of due jobs, queue and client; rows in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from math import inf
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from apscheduler.triggers.interval import IntervalTrigger
from psycopg.types.range import Range

from apscheduler_tasklock._lock.job_rows import DueRow, DueRows, JobRow
from apscheduler_tasklock._runs.submission import DueRun
from apscheduler_tasklock.jobstore import bad_rows, due
from apscheduler_tasklock.jobstore.due import DueJobs
from apscheduler_tasklock.testing import rule
from tests.simulation.jobs_scenarios import JobsScenario, JobsStory
from tests.simulation.jobs_side import Job, JobsReplica
from tests.simulation.world import BEGIN, CLOCK, START, Chance, Process, replaced
from tests.support.waist import (
    ClaimAnswer,
    ClaimRequest,
    ClaimTimes,
    JobMove,
    MemoryProtocol,
    MemoryTaskLocks,
    StoredClaims,
)

ALIAS = "default"
# Seconds after which readers begin to look, and for which a story goes on at least.
READS_FROM, GOES_ON = 2.0, 130.0


@dataclass(frozen=True)
class Stored:
    """A job's row.

    :ivar change_id: of the user's last change
    :ivar run_at: its next run time
    :ivar last: the run time that was claimed last
    """

    job: Job
    change_id: UUID
    run_at: datetime | None
    last: datetime | None = None

    @property
    def trigger(self) -> IntervalTrigger:
        first, last = (START + timedelta(seconds=self.job.windows[n]) for n in (0, -1))
        length = self.job.period
        return IntervalTrigger(
            seconds=length, start_date=first, end_date=last, timezone=timezone.utc
        )


class StoredLocks(MemoryTaskLocks):
    """Rows of tasks, and of stored jobs."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(now)
        self.time = now
        self.jobs: dict[str, Stored] = {}
        self.pauses: list[Range[datetime]] = []  # of all tasks
        self.skipped: set[tuple[str, float]] = set()  # jobs, and windows that are not run
        self._changes = 0

    def protocol(self, replica_id: str) -> MemoryProtocol:
        return StoredProtocol(self, replica_id)

    def change(self, job_id: str, **changes: Any) -> None:
        """Change a job, as a user does."""
        self._changes += 1
        change_id = UUID(int=self._changes)
        self.jobs[job_id] = replace(self.jobs[job_id], change_id=change_id, **changes)

    def fenced(self, move: JobMove) -> bool:
        job = self.jobs.get(move.job_id)
        return job is not None and (job.run_at, job.change_id) == (move.found, move.change_id)

    def may_be_claimed(self, job: Stored, *, stable: bool) -> bool:
        row, now = self.rows.get(job.job.name), self.time()
        if any(now in pause for pause in self.pauses):
            return False
        if row is None:
            return True
        is_own = row.kind == "manual" or row.window_start == job.last
        is_run_again = (row.handed_over or row.failover) and is_own
        stands = not row.finished and row.run_until > now
        stands = stands and (not (row.handed_over or stable) or is_run_again)
        return not (row.is_running(now) or stands or row.is_paused(now))

    def note_skipped(self, move: JobMove, row: rule.Row) -> None:
        """Note run times that came while the job's own run went on: only the latest runs."""
        job, over = self.jobs[move.job_id].job, row.finished_at or row.locked_until
        for window in job.windows:
            at = START + timedelta(seconds=window)
            if move.found <= at < move.run_time and at <= over:
                self.skipped.add((job.name, window))

    # ---- the statements ------------------------------------------------------------------------

    def now(self, _cursor: Any) -> datetime:
        return self.time()

    def dead_runs(self, _cursor: Any) -> list[Any]:
        return []

    def sweep(self, _cursor: Any) -> int:
        return 0

    def read_due(
        self,
        _cursor: Any,
        most: Mapping[str, int],
        *,
        stable: bool,
        not_these: Sequence[str],
        **_options: Any,
    ) -> DueRows:
        now = self.time()
        ahead = [job.run_at for job in self.jobs.values() if job.run_at and job.run_at > now]
        found = [
            self._due_row(job_id, job)
            for job_id, job in sorted(self.jobs.items())
            if job.run_at is not None
            and job.run_at <= now
            and job_id not in not_these
            and self.may_be_claimed(job, stable=stable)
        ]
        next_in = (min(ahead) - now).total_seconds() if ahead else None
        return DueRows(found[: most[ALIAS]], next_in, now)

    def _due_row(self, job_id: str, job: Stored) -> DueRow:
        row = self.rows.get(job.job.name)
        over = None if row is None else min(row.finished_at or row.locked_until, self.time())
        func = f"job of {job.job.name}"
        trigger = {"type": "date" if len(job.job.windows) == 1 else "interval"}
        job_row = JobRow(
            *(job_id, func, trigger, None, None, ALIAS, None, None, 1),
            *(job.run_at, job.last, False, job.job.name, "here"),
        )
        since = None if row is None else row.started_at
        pauses = [pause for pause in self.pauses if pause.lower <= self.time()]
        return DueRow(job_row, job.change_id, START, pauses, since, over, runs_again=False)

    def move_on(self, _cursor: Any, moves: Iterable[JobMove], **_options: Any) -> set[str]:
        moved = [move for move in moves if self.fenced(move)]
        for move in moved:
            self.jobs[move.job_id] = replace(self.jobs[move.job_id], run_at=move.following)
        return {move.job_id for move in moved}


class StoredProtocol(MemoryProtocol):
    """The statements for the lock, and the claim of stored jobs."""

    def __init__(self, locks: StoredLocks, replica_id: str) -> None:
        super().__init__(locks, replica_id)
        self._stored = locks
        self._name = replica_id

    def execute(self, cursor: Any, message: Any) -> Any:
        return (
            self._claim_and_move(message)
            if isinstance(message, StoredClaims)
            else super().execute(cursor, message)
        )

    def _claim_and_move(self, asked: StoredClaims) -> dict[UUID, ClaimAnswer]:
        """Claim run times of stored jobs, and move the jobs on."""
        answers: dict[UUID, ClaimAnswer] = {}
        for request in asked.requests:
            granted = sum(answer.granted for answer in answers.values())
            room = granted < asked.most
            answers[request.claim_id] = self._claim_stored(request, asked.times, room)
        return answers

    def _claim_stored(self, request: ClaimRequest, times: ClaimTimes, room: bool) -> ClaimAnswer:
        locks, move, now = self._stored, request.move, self._stored.time()
        assert move is not None
        row, is_fenced = locks.rows.get(request.task_name), locks.fenced(move)
        asked = rule.DatedClaim.of(request, times, now)
        is_own = row is not None and row.claim_id == request.claim_id
        may = is_fenced and room and asked.wanted and not is_own
        if may and locks.may_be_claimed(locks.jobs[move.job_id], stable=times.stable):
            if row is not None:
                locks.note_skipped(move, row)
                never = {"window_start": rule.NEVER, "window_until": rule.NEVER}
                row = replace(row, finished_at=row.finished_at or now, **never)
            decision = rule.claim(row, request, times, self._name, now)
            assert decision.answer.granted
            assert decision.row is not None
            locks.rows[request.task_name] = decision.row
            locks.jobs[move.job_id] = replace(
                locks.jobs[move.job_id], run_at=move.following, last=move.run_time
            )
            return decision.answer
        if row is None:
            late = replace(times, not_after=datetime.min.replace(tzinfo=timezone.utc))
            answer = rule.claim(None, request, late, self._name, now).answer
            return answer._replace(withdrawn=not is_fenced)
        found = asked.found(row)
        job = locks.jobs.get(move.job_id)
        waits = job is not None and not (
            row.is_running(now) or locks.may_be_claimed(job, stable=times.stable)
        )
        is_withdrawn = not (is_fenced or found.granted)
        return found._replace(new_window=not found.granted, waits=waits, withdrawn=is_withdrawn)


class StoreUser:
    """The job store as a user of its replica: the replica's client, but for the jobs' rows."""

    def __init__(self, client: Any, jobs: Any) -> None:
        self._client = client
        self.database = SimpleNamespace(jobs=jobs, ask=client.database.ask, ask_all=lambda _: None)
        self.rights = SimpleNamespace(look=lambda: None)  # there are none in memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class StoredReplica(JobsReplica):
    """A replica with a job store. It is its own scheduler and executor, as its reader sees them."""

    begins_nothing, claims, is_abandoned, timezone = False, True, False, timezone.utc

    def __init__(self, story: Any, process: Process, poll_from: float, workers: int | None) -> None:
        super().__init__(story, process, poll_from, workers)
        self._rows: StoredLocks = story.database.rows
        self.is_paused = False  # whether its scheduler is
        jobs: Any = story.database.on_the_way(process, self._rows)
        self.user: Any = StoreUser(self._client, jobs)
        self.stored_runs = {ALIAS: self}
        told = SimpleNamespace(tell=lambda *_: None, forget=lambda *_: None, sum_up=lambda: None)
        codec = SimpleNamespace(
            verified=lambda row: row, decode=self._decode, load_function=lambda _row: print
        )
        with story.world.acting(process):
            scheduler: Any = self
            self.reader = DueJobs(self.user, scheduler, ALIAS, codec, 1.0, told)  # type: ignore[arg-type]  # stand-ins

    @property
    def is_running(self) -> bool:
        return self.stopped_at == inf and not self.is_paused

    @property
    def room(self) -> float:
        return self.runs.room

    def call_if_there_is_room(self, note_room: Callable[[], object]) -> None:
        self.runs.call_if_there_is_room(note_room)

    def _decode(self, row: JobRow) -> dict[str, Any]:
        stored = self._rows.jobs[row.id]
        grace = stored.job.grace
        return {"trigger": stored.trigger, "misfire_grace_time": grace, "coalesce": False}

    def note_missed(self, *_: Any) -> None:
        """Do nothing, because the rows in memory have no missed run times."""

    def report_missed(self, *_: Any) -> None:
        """Do nothing, because no events are sent."""

    def make_due(self, attributes: dict[str, Any], _run_time: datetime) -> Any:
        return SimpleNamespace(id=attributes["id"])

    def check_stored_job(self, job: Any, _alias: str) -> str:
        return self._rows.jobs[job.id].job.name

    def look_after(self, *_: Any) -> None:
        """Leave it to the replica's own looks."""

    def submit_stored(self, stored: Any, _alias: str, found: DueRun) -> None:
        """Put a run time that was read into the queue."""
        job = self._rows.jobs[stored.id].job
        window = (found.move.run_time - START).total_seconds()
        self._submit(self._submission(job, [window], due=found))


class StoredStory(JobsStory):
    """A scenario of stored jobs as it was once gone through."""

    def _make_replica(self, process: Process, poll_from: float) -> JobsReplica:
        if not isinstance(self.database.rows, StoredLocks):
            self.database.rows = StoredLocks(self.world.database_time)
        return StoredReplica(self, process, poll_from, self.jobs_scenario.workers)

    def _judged(self) -> list[str]:
        """Return what is wrong. A claim that fails is no excuse: the job is read again."""
        ended = {(run.task, run.due) for run in self.ledger.runs if run.ended is not None}
        return super()._judged() + [
            f"never run: {job.name} {window}"
            for job in self.jobs_scenario.jobs
            for window in job.windows
            if (job.name, window) not in ended | self.stored.skipped
        ]

    @property
    def stored(self) -> StoredLocks:
        """Its rows."""
        assert isinstance(self.database.rows, StoredLocks)
        return self.database.rows

    @property
    def _is_over(self) -> bool:
        # Where the database's clock was set back, run times come later by that.
        goes_on = GOES_ON - min(0.0, self.world.database_ahead)
        return self.world.now >= BEGIN + goes_on and super()._is_over


def stored_jobs(story: Any, reads_from: float = READS_FROM) -> None:
    """Let all replicas read the scenario's jobs."""
    rows = story.database.rows
    for n, job in enumerate(story.scenario.jobs):
        first = START + timedelta(seconds=job.windows[0])
        rows.jobs[job.name] = Stored(job, UUID(int=1_000 + n), first)
    for replica in story.replicas:
        story.world.call_at(BEGIN + reads_from, replica.reader.start)


SCENARIOS = (
    JobsScenario(
        "stored",
        [Job("i", (10.0, 20.0, 30.0), failover=True), Job("o", (10.0,), failover=True)],
        stored_jobs,
    ),
    JobsScenario(
        "stored, one worker, three replicas",
        [Job(name, (10.0, 20.0), takes=3.0, failover=True) for name in "ijk"],
        stored_jobs,
        replicas=3,
        workers=1,
    ),
)


# ---- in place of what the reader asks for ------------------------------------------------------


class _Event:
    def __init__(self) -> None:
        self._is_set = False
        self._wakes: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        if not self._is_set:
            CLOCK.world.wait(CLOCK.world.now + timeout, self._wakes.append)
        return self._is_set


class _Looks:
    """In place of the thread of the looks: each look is a thread of the world."""

    def __init__(self, _name: str, **_: object) -> None:
        process = CLOCK.world.current
        assert process is not None
        self._process = process

    def call(self, function: Callable[[], object]) -> None:
        CLOCK.world.start(self._process, function, daemon=True)

    def start(self) -> None:
        """Do nothing, because a thread can be started."""

    def relieve(self, _seconds: float) -> None:
        """Do nothing, because no look hangs."""


@contextmanager
def simulating_store() -> Iterator[None]:
    """Let the reader of due jobs have a world's clock and threads within."""
    with replaced(
        (due, "time", CLOCK),
        (bad_rows, "time", CLOCK),
        (due, "threading", SimpleNamespace(Event=_Event)),
        (due, "random", Chance()),
        (due, "ApplicationThread", _Looks),
        (due, "call_application", lambda function: function()),
    ):
        yield
