"""What the failover finds on a real server, and what it makes of it, with made-up jobs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from math import inf
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_MISSED, EVENT_JOB_SUBMITTED
from apscheduler.schedulers.base import STATE_PAUSED, STATE_RUNNING, STATE_STOPPED
from apscheduler.triggers.interval import IntervalTrigger
from sqlalchemy.engine import make_url

from apscheduler_tasklock import EVENT_TASK_LOCK_GRANTED
from apscheduler_tasklock._database.sqlstates import ConflictError
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._lock.outcomes import MOST_HANDOVERS, RunOutcome, WindowAfter
from apscheduler_tasklock._lock.replica import LockSettings
from apscheduler_tasklock._runs.deferred_runs import DeferredRuns, InTheWay, Outlook
from apscheduler_tasklock._runs.executor_jobs import what_runs
from apscheduler_tasklock._runs.known_tasks import KnownTasks
from apscheduler_tasklock._runs.registration import Registrar
from apscheduler_tasklock._runs.run import JobKey, QueuedRun, RunKind
from apscheduler_tasklock._runs.submission import Submission
from apscheduler_tasklock._runs.watch import Watch
from apscheduler_tasklock.options import DEFAULTS, LockOptions
from tests.support.commands import PATIENT
from tests.support.polling import eventually
from tests.support.schedulers import Replica
from tests.support.waist import (
    Claim,
    ClaimAnswer,
    ClaimRequest,
    ClosedDeadRun,
    EndLease,
    GiveUp,
    LockClient,
    Message,
    ReadTasks,
    Registration,
    ReleaseRequest,
    TaskRow,
    statements_of,
)

Connection = psycopg.Connection[Any]

NOW = datetime(2025, 6, 6, 10, tzinfo=timezone.utc)
DAILY = IntervalTrigger(days=1, start_date=NOW, timezone=timezone.utc)
FAILOVER = LockOptions(lease=30, failover=True).over(DEFAULTS, "test")


@dataclass
class Job:
    """As much of a job as is looked at."""

    id: str
    coalesce: bool = False


def submission(
    task: str, run_time: datetime = NOW, *, options: LockOptions = FAILOVER, **more: Any
) -> Submission:
    job = Job(task, more.pop("coalesce", False))
    made = Submission(job, "default", DAILY, [run_time], task, options, False, "", runs="function")
    return replace(made, **more)


@dataclass
class FakeJobs:
    """The jobs of a scheduler, each of which is called like its task.

    :ivar names: the tasks
    :ivar options: of all of them
    :ivar runs: what they run
    :ivar lease: of all of them
    :ivar submitted: what was submitted
    :ivar busy: how often nothing can be submitted
    """

    names: list[str] = field(default_factory=list)
    options: LockOptions = FAILOVER
    runs: str = "function"
    lease: float | None = None
    submitted: list[Submission] = field(default_factory=list)
    busy: int = 0

    def list_tasks(self) -> Sequence[tuple[str, JobKey, float | None]]:
        return [(name, (name, "default"), self.lease) for name in self.names]

    def submission_for(self, key: JobKey, dead: TaskRow) -> Submission | None:
        if key[0] not in self.names or dead.runs != self.runs:
            return None
        return submission(key[0], dead.window_start, options=self.options, dead_run=dead)

    def requested(self, key: JobKey, task_name: str, request_id: UUID) -> Submission | None:
        """Nothing is asked for by hand."""

    def standby_for(
        self, key: JobKey, state: TaskRow, due_at: datetime, late_by: float
    ) -> Submission | None:
        """Nothing is run in another replica's place."""

    def registration(self, key: JobKey) -> Registration | None:
        """Nothing is registered."""

    def submit(self, submission: Submission, not_now: Callable[[], None]) -> None:
        if self.busy:
            self.busy -= 1
            not_now()
        else:
            self.submitted.append(submission)

    def of(self, task: str) -> list[Submission]:
        return [one for one in self.submitted if one.task_name == task]


class Rows:
    """The rows that other replicas have made."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._statements = statements_of("another", connection)

    def running(self, task: str, *, runs: str = "function", failover: bool = True) -> ClaimAnswer:
        """Claim the task's window of now, for ten minutes without a renewal."""
        answer = self._statements.ask(
            Claim(
                ClaimRequest(
                    task,
                    min_lock=0.0,
                    max_lock=3600.0,
                    lease=600.0,
                    runs=runs,
                    failover=failover,
                ),
            )
        )
        assert answer.granted
        return answer

    def die(self, task: str, *, handed_over: bool = False) -> None:
        """End the lease of the task's run, as time does after its holder's death."""
        claim_id = self.state(task).claim_id
        if handed_over:
            handing_over = ReleaseRequest(task, claim_id, RunOutcome(WindowAfter.HAND_OVER))
            assert self._statements.ask(handing_over) is not None
        else:
            holders = ["another"]
            assert self._statements.ask(EndLease(task, claim_id, holders)) is not None

    def dead(self, task: str, **claim: Any) -> UUID:
        claim_id = self.running(task, **claim).claim_id
        self.die(task)
        return claim_id

    def end(self, task: str) -> None:
        claim_id = self.state(task).claim_id
        self._statements.ask(ReleaseRequest(task, claim_id))

    def set(self, task: str, **columns: Any) -> None:
        changes = ", ".join(f"{column} = %s" for column in columns)
        self._connection.execute(
            f"UPDATE task_lock SET {changes} WHERE task_name = %s", [*columns.values(), task]
        )

    def state(self, task: str) -> TaskRow:
        states, _ = self._statements.ask(ReadTasks([task], [task]))
        return states[0]


class Found:
    """A failover, its jobs, and what came of them."""

    def __init__(
        self, locks: LockClient, rows: Rows, interval: float = 0.2, **options: Any
    ) -> None:
        self._rows = rows
        self.state = STATE_RUNNING
        self.asked = 0
        self.jobs = FakeJobs()
        self.given_up: list[tuple[str, JobKey, str]] = []
        self.known = KnownTasks()
        self.deferred = DeferredRuns()
        registrar = Registrar(locks, self.known, self.jobs.registration, lambda _key: False)
        watched = (locks, self.known, self.jobs, self.deferred, registrar, self._state, interval)
        self.watch = Watch(*watched, self._give_up, **options)
        self._markers = 0

    def _state(self) -> int:
        self.asked += 1
        return self.state

    def _give_up(self, dead: TaskRow, closed: ClosedDeadRun, key: JobKey, reason: str) -> None:
        assert closed.token == dead.token
        self.given_up.append((dead.task_name, key, reason))

    def keep(self, run: ClaimAnswer, job: str = "task") -> list[Outlook]:
        """Keep a run because of this one, which began before it; return what becomes of it."""
        decided: list[Outlook] = []
        deferred = QueuedRun(RunKind.SCHEDULE, "task", (job, "default"), 0.0, 0.0)

        def decide(outlook: Outlook, _as_of: float) -> None:
            if outlook is not Outlook.WAITS:
                decided.append(outlook)

        self.deferred.add(deferred, InTheWay(run.token, came_first=True), decide)
        return decided

    def start(self, *names: str) -> None:
        self.jobs.names.extend(names)
        self.watch.start()

    def look(self) -> None:
        """Wait until all rows as they are now have been looked at.

        A dead run of another task, which a look finds, was read by the same statement.
        """
        self._markers += 1
        marker = f"marker {self._markers}"
        dead = self._rows.dead(marker)
        self._rows.set(marker, handed_over=True)  # believed at any time
        self.jobs.names.append(marker)
        self.known.add(marker, (marker, "default"), None)
        [found] = eventually(lambda: self.jobs.of(marker))
        assert found.dead_run is not None
        assert found.dead_run.claim_id == dead
        # It acts on one row after the other, in whatever order.
        self.looks_on()

    def looks_on(self) -> None:
        """Wait until it has begun more looks, or would have if the scheduler ran."""
        before = self.asked

        def has_gone_on() -> bool:
            self.watch.looks.wake()
            return self.asked > before + 5

        eventually(has_gone_on)


def patient(database: Any) -> LockSettings:
    """Return the settings of a replica that only connects once a slow machine lets it."""
    return LockSettings(database, "replica", claim_timeout=180, timings=PATIENT)


@pytest.fixture
def rows(connection: Connection) -> Rows:
    return Rows(connection)


@pytest.fixture
def locks(database_url: str) -> Iterator[LockClient]:
    """Locks of a replica that has seen the database for long enough."""
    with closing(LockClient(patient(database_url))) as locks:
        locks.check()
        locks.outage.believe()
        yield locks


@pytest.fixture
def found(locks: LockClient, rows: Rows) -> Iterator[Found]:
    found = Found(locks, rows)
    yield found
    found.watch.looks.close()


# Dead runs


def test_a_dead_run_is_found_at_the_first_look(found: Found, rows: Rows) -> None:
    dead = rows.dead("task")
    found.start("task")
    eventually(lambda: found.jobs.submitted)
    [again] = found.jobs.submitted
    assert again.dead_run is not None
    assert (again.task_name, again.dead_run.claim_id) == ("task", dead)


def test_a_conflict_of_a_registration_keeps_nothing_else_from_a_look(
    found: Found, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def conflict(_self: Registrar, _states: Sequence[TaskRow], *, has_listed: bool) -> Any:
        raise ConflictError("could not serialize access")

    monkeypatch.setattr(Registrar, "register", conflict)
    rows.dead("task")
    found.start("task")
    eventually(lambda: found.jobs.of("task"))


def test_a_dead_run_is_found_at_a_later_look(found: Found, rows: Rows) -> None:
    rows.running("task")
    found.start("task")
    found.look()
    assert not found.jobs.of("task")
    rows.die("task")
    eventually(lambda: found.jobs.of("task"))


@pytest.mark.parametrize("listed", [True, False])
def test_it_looks_several_times_in_the_shortest_lease(
    locks: LockClient, rows: Rows, listed: bool
) -> None:
    found = Found(locks, rows, interval=3600)
    found.jobs.lease = 1.0 if listed else None
    found.start("task")
    with closing(found.watch.looks):
        if not listed:
            found.known.add("task", ("task", "default"), 1.0)
        found.look()
        rows.dead("task")
        eventually(lambda: found.jobs.of("task"))


def test_the_executor_knows_the_leases_of_its_jobs_before_they_fire(
    database_url: str, rows: Rows
) -> None:
    replica = Replica(database_url, lease=1, failover=True, poll_interval=3600)
    replica.scheduler.add_job(print, "interval", days=1, id="first")
    replica.start()
    try:
        replica.executor.user.rights.check()
        replica.executor.user.outage.believe()
        for job_id in ("first", "later"):
            if job_id == "later":
                replica.scheduler.add_job(print, "interval", days=1, id=job_id)
            rows.dead(job_id, runs="builtins:print")
            replica.one(EVENT_TASK_LOCK_GRANTED, job_id)
    finally:
        replica.shutdown()


def test_a_job_that_is_known_later_is_looked_at(found: Found, rows: Rows) -> None:
    found.start()
    rows.dead("task")
    found.look()
    assert not found.jobs.of("task")
    found.jobs.names.append("task")
    found.known.add("task", ("task", "default"), None)
    eventually(lambda: found.jobs.of("task"))


@pytest.mark.parametrize(
    ("lease", "replicas", "seconds"),
    [(None, 0, 5.0), (3.0, 0, 1.0), (None, 60, 5.0), (None, 200, 10.0), (3.0, 100, 5.0)],
)
def test_looks_are_further_apart_in_a_large_fleet(
    locks: LockClient, rows: Rows, lease: float | None, replicas: int, seconds: float
) -> None:
    found = Found(locks, rows, interval=5.0)
    found.known.add("task", ("task", "default"), lease)
    locks.outage.live_replicas = replicas
    assert found.watch.looks.interval == seconds


def test_a_job_whose_own_code_hangs_is_left_out_until_that_comes_back(
    database_url: str,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as a trigger of the application's, or the job store that is asked for the job."""
    go_on, hung = threading.Event(), threading.Event()
    timings = Timings(longest_turn=0.5)
    with closing(LockClient(LockSettings(database_url, "replica", timings=timings))) as locks:
        locks.check()
        locks.outage.believe()
        found = Found(locks, rows)
        find = found.jobs.submission_for

        def hang(key: JobKey, dead: TaskRow) -> Submission | None:
            if key[0] == "hangs":
                hung.set()
                assert go_on.wait(60)
            return find(key, dead)

        monkeypatch.setattr(found.jobs, "submission_for", hang)
        rows.dead("hangs")
        found.start("hangs", "task")
        assert hung.wait(60)
        rows.dead("task")
        eventually(lambda: found.jobs.of("task"))
        found.look()
        hanging = "Job 'hangs': in a look, a call of its trigger, its job store or its"
        # Once: on a busy machine, other code may be slow as well.
        eventually(lambda: [m.startswith(hanging) for m in caplog.messages].count(True) == 1)
        assert not found.jobs.of("hangs")
        go_on.set()
        eventually(lambda: found.jobs.of("hangs"))
        found.look()
        assert len(found.jobs.of("hangs")) == 1
        found.watch.looks.close()


def test_a_job_that_is_forgotten_is_not_looked_at(found: Found, rows: Rows) -> None:
    found.start("task")
    found.look()
    found.known.forget(("task", "default"))
    rows.dead("task")
    found.look()
    assert not found.jobs.of("task")


def test_a_dead_run_is_submitted_once(found: Found, rows: Rows) -> None:
    rows.dead("task")
    found.start("task")
    found.look()
    found.look()
    assert len(found.jobs.of("task")) == 1


def test_a_dead_run_is_submitted_anew_when_its_submission_came_to_nothing(
    found: Found, rows: Rows
) -> None:
    rows.dead("task")
    found.start("task")
    eventually(lambda: found.jobs.of("task"))
    found.watch.ended(found.jobs.of("task")[0])
    eventually(lambda: len(found.jobs.of("task")) == 2)


def test_a_dead_run_waits_until_it_can_be_submitted(found: Found, rows: Rows) -> None:
    rows.dead("task")
    found.jobs.busy = 3
    found.start("task")
    eventually(lambda: found.jobs.of("task"))
    assert found.jobs.busy == 0


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"failover": False}, FAILOVER),
        ({"failover": True}, LockOptions(failover=False).over(FAILOVER, "test")),
        ({"runs": "another function"}, FAILOVER),
        ({"runs": ""}, FAILOVER),  # a hold, and no job
    ],
)
def test_a_dead_run_is_run_again_only_if_both_sides_agree(
    found: Found, rows: Rows, row: dict[str, Any], options: LockOptions
) -> None:
    rows.dead("task", **row)
    found.jobs.options = options
    found.start("task")
    found.look()
    assert not found.jobs.of("task")
    assert not rows.state("task").finished


def test_nothing_is_looked_for_while_the_scheduler_is_paused(found: Found, rows: Rows) -> None:
    rows.dead("task")
    found.state = STATE_PAUSED
    found.start("task")
    found.looks_on()
    assert not found.jobs.submitted
    found.state = STATE_RUNNING
    eventually(lambda: found.jobs.of("task"))


def test_nothing_is_taken_over_once_the_scheduler_is_stopped(found: Found, rows: Rows) -> None:
    found.start("task")
    found.look()
    found.state = STATE_STOPPED
    rows.dead("task")
    found.looks_on()
    assert not found.jobs.of("task")


def test_nothing_is_taken_over_after_the_end(found: Found, rows: Rows) -> None:
    found.start("task")
    found.look()
    found.watch.looks.close()
    rows.dead("task")
    assert found.watch.looks.due_at == inf
    found.watch.note_unfinished(submission("task", one_off=True), True)
    assert not found.jobs.of("task")
    assert not found.watch.is_watching


def test_a_run_that_was_handed_over_is_believed_at_once_and_a_dead_one_is_not(
    database_url: str, rows: Rows
) -> None:
    rows.dead("dead")
    rows.running("handed over", failover=False)
    rows.die("handed over", handed_over=True)
    # A replica that has just started, and waits for the recovery grace.
    timings = Timings(recovery_grace=60.0)
    with closing(LockClient(LockSettings(database_url, "replica", timings=timings))) as locks:
        found = Found(locks, rows)
        found.start("dead", "handed over")
        eventually(lambda: found.jobs.of("handed over"))
        found.look()
        assert not locks.stable
        assert not found.jobs.of("dead")
        locks.outage.believe()
        eventually(lambda: found.jobs.of("dead"))
        found.watch.looks.close()


def test_a_takeover_occupies_its_worker_like_any_job(database_url: str, rows: Rows) -> None:
    go_on = threading.Event()
    replica = Replica(database_url, max_workers=1, lease=30, failover=True, poll_interval=0.2)
    replica.start()
    try:
        replica.executor.user.outage.believe()
        long = replica.scheduler.add_job(lambda: go_on.wait(60), "interval", days=1, id="long")
        rows.dead("long", runs=what_runs(long))
        replica.one(EVENT_TASK_LOCK_GRANTED, "long")
        seen = len(replica.events)
        replica.run_once(print, misfire_grace_time=1)
        eventually(lambda: EVENT_JOB_SUBMITTED in [e.code for e in replica.events[seen:]])
        submitted = time.monotonic()
        eventually(lambda: time.monotonic() > submitted + 1.5)
        go_on.set()
        replica.one(EVENT_JOB_MISSED)
    finally:
        go_on.set()
        replica.shutdown()


# Giving up


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"deaths": 3}, "4 runs of the task in a row have died with their holders"),
        ({"run_until": NOW}, "its maximum lock has ended"),
        (
            {"handed_over": True, "handovers": MOST_HANDOVERS},
            f"it was handed over {MOST_HANDOVERS} times",
        ),
    ],
)
def test_a_dead_run_is_given_up_and_reported_once(
    found: Found, rows: Rows, row: dict[str, Any], reason: str
) -> None:
    rows.dead("task")
    rows.set("task", **row)
    found.start("task")
    eventually(lambda: rows.state("task").finished)
    found.look()
    assert found.given_up == [("task", ("task", "default"), reason)]
    assert rows.state("task").deaths == row.get("deaths", 0) + 1
    assert not found.jobs.of("task")


@pytest.mark.parametrize(
    ("most", "deaths", "given_up"), [(3, 2, False), (1, 1, True), (1, 0, False), (0, 0, True)]
)
def test_it_is_taken_over_so_many_times(
    found: Found, rows: Rows, most: int, deaths: int, given_up: bool
) -> None:
    found.jobs.options = replace(FAILOVER, max_takeovers=most)
    rows.dead("task")
    rows.set("task", deaths=deaths)
    found.start("task")
    eventually(lambda: found.jobs.of("task") or found.given_up)
    assert bool(found.given_up) == given_up


def slow(locks: LockClient, monkeypatch: pytest.MonkeyPatch) -> LockClient:
    """Let a replica be slow: another one gives the run up that this one has just read."""
    carrying_out = locks.database.carrying_out

    def carried_out_twice(message: Message[Any]) -> Any:
        send = carrying_out(message)
        twice = isinstance(message, GiveUp)
        return lambda cursor: (send(cursor) if twice else None, send(cursor))[1]

    monkeypatch.setattr(locks.database, "carrying_out", carried_out_twice)
    return locks


def test_of_two_replicas_that_give_a_run_up_one_reports_it(
    database_url: str, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows.dead("task")
    rows.set("task", deaths=3)
    with closing(slow(LockClient(patient(database_url)), monkeypatch)) as locks:
        locks.check()
        locks.outage.believe()
        found = Found(locks, rows)
        found.start("task")
        eventually(lambda: rows.state("task").finished)
        found.look()
        found.watch.looks.close()
    assert not found.given_up
    assert not found.jobs.of("task")


def test_hand_overs_do_not_count_as_deaths(found: Found, rows: Rows) -> None:
    rows.dead("task")
    rows.set("task", handed_over=True, deaths=3, handovers=MOST_HANDOVERS - 1)
    found.start("task")
    eventually(lambda: found.jobs.of("task"))
    assert not found.given_up


# Run times that are deferred because of a run


def test_a_run_time_is_refused_when_the_run_in_its_way_ended(found: Found, rows: Rows) -> None:
    run = rows.running("task")
    found.start("task")
    decided = found.keep(run)
    rows.end("task")
    assert eventually(lambda: decided) == [Outlook.REFUSED]
    assert not found.watch.is_watching


def test_a_run_time_waits_as_long_as_the_run_goes_on(found: Found, rows: Rows) -> None:
    found.start("task")
    decided = found.keep(rows.running("task", failover=False))
    found.look()
    assert not decided
    rows.die("task")
    assert eventually(lambda: decided) == [Outlook.ASKED_AGAIN]


def test_a_run_time_is_asked_for_again_once_when_the_run_in_its_way_died(
    found: Found, rows: Rows
) -> None:
    run = rows.running("task", failover=False)
    rows.die("task")
    found.start("task")
    decided = found.keep(run)
    eventually(lambda: decided)
    found.look()
    assert decided == [Outlook.ASKED_AGAIN]


def test_a_run_time_of_a_job_whose_code_hangs_is_deferred_until_that_comes_back(
    found: Found, rows: Rows
) -> None:
    found.start("task")
    run = rows.running("task", failover=False)
    found.look()
    asking = found.known.asking([("task", "default")])  # as another look that does not come back
    next(asking)
    assert found.known.leave_out(0.0) == ("task", "default")
    decided = found.keep(run)
    rows.die("task")
    found.look()
    assert not decided
    asking.close()  # it has
    eventually(lambda: decided)


def test_a_job_whose_code_raises_costs_no_other_job_of_the_task_its_run_time(
    found: Found, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    def decide(outlook: Outlook, _as_of: float) -> None:
        if outlook is Outlook.WAITS:
            return
        raise LookupError("its trigger's own mistake")

    found.start("task")
    run = rows.running("task", failover=False)
    bad = QueuedRun(RunKind.SCHEDULE, "task", ("bad", "default"), 0.0, 0.0)
    found.deferred.add(bad, InTheWay(run.token, came_first=True), decide)
    decided = found.keep(run, job="good")
    rows.die("task")
    eventually(lambda: decided)
    assert caplog.text.count("LookupError: its trigger's own mistake") == 1


def test_a_run_time_is_asked_for_again_after_the_dead_run_was_run_again(
    found: Found, rows: Rows
) -> None:
    run = rows.running("task")
    rows.die("task")
    found.start("task")
    decided = found.keep(run)
    [again] = eventually(lambda: found.jobs.of("task"))
    found.look()
    assert again.dead_run is not None
    assert not decided

    # It was taken over, and ended.
    rows.set("task", token=run.token + 1, claim_id=uuid4(), locked_until=run.run_until)
    rows.end("task")
    found.watch.ended(again)
    assert eventually(lambda: decided) == [Outlook.ASKED_AGAIN]


def test_a_run_time_is_asked_for_again_after_another_replica_has_run_the_dead_run_again(
    found: Found, rows: Rows
) -> None:
    run = rows.running("task")
    found.start("task")
    decided = found.keep(run)
    rows.set("task", token=run.token + 1, claim_id=uuid4(), locked_by="a third")
    found.look()
    assert not decided  # it goes on
    rows.end("task")
    assert eventually(lambda: decided) == [Outlook.ASKED_AGAIN]


def test_a_run_time_is_asked_for_again_after_the_dead_run_was_given_up_here(
    found: Found, rows: Rows
) -> None:
    run = rows.running("task")
    rows.die("task")
    rows.set("task", deaths=3)
    found.start("task")
    decided = found.keep(run)
    assert eventually(lambda: decided) == [Outlook.ASKED_AGAIN]
    assert found.given_up


def test_a_run_time_is_asked_for_again_after_another_replica_gave_the_dead_run_up(
    found: Found, rows: Rows
) -> None:
    run = rows.running("task")
    found.start("task")
    decided = found.keep(run)
    rows.set("task", finished_at=NOW, deaths=4)
    assert eventually(lambda: decided) == [Outlook.ASKED_AGAIN]
    assert not found.given_up


def test_a_run_time_is_asked_for_again_if_the_row_is_gone(
    found: Found, rows: Rows, connection: Connection
) -> None:
    run = rows.running("task")
    found.start("task")
    decided = found.keep(run)
    connection.execute("DELETE FROM task_lock WHERE task_name = 'task'")
    assert eventually(lambda: decided) == [Outlook.ASKED_AGAIN]


def test_the_end_of_a_run_here_wakes_the_look_only_for_what_is_deferred(
    database_url: str, rows: Rows
) -> None:
    with closing(LockClient(patient(database_url))) as locks:
        locks.outage.believe()
        found = Found(locks, rows, interval=3600.0)
        run = rows.running("task")
        found.start("task")
        eventually(lambda: found.watch.has_looked)
        decided = found.keep(run)
        rows.end("task")
        found.watch.ended(submission("another"))
        assert not decided
        found.watch.ended(submission("task"))
        assert eventually(lambda: decided) == [Outlook.REFUSED]
        found.watch.looks.close()


# One-off jobs, which the scheduler has dropped by then


def test_a_refused_one_off_job_is_kept_until_its_row_is_finished(found: Found, rows: Rows) -> None:
    run = rows.running("task")
    found.start()
    found.watch.note_unfinished(submission("task", one_off=True), False)
    found.look()
    assert not found.jobs.of("task")
    rows.die("task")
    eventually(lambda: found.jobs.of("task"))
    dead = found.jobs.of("task")[0].dead_run
    assert dead is not None
    assert dead.claim_id == run.claim_id


def test_a_refused_one_off_job_whose_run_ended_is_kept_no_longer(found: Found, rows: Rows) -> None:
    rows.running("task")
    found.start()
    found.watch.note_unfinished(submission("task", one_off=True), False)
    rows.end("task")
    found.look()
    rows.dead("task")
    found.look()
    assert not found.jobs.of("task")


def test_a_refused_one_off_job_does_not_run_something_else(found: Found, rows: Rows) -> None:
    rows.running("task", runs="another function")
    found.start()
    found.watch.note_unfinished(submission("task", one_off=True), False)
    rows.die("task")
    found.look()
    assert not found.jobs.of("task")


# Rows of one-off jobs


def test_without_the_right_to_delete_one_line_says_so_and_it_is_tried_again(
    connection: Connection, direct_url: str, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "apscheduler_tasklock")
    role = f"no_delete_{uuid4().hex}"
    tables = "task_lock, task_lock_run, task_lock_replica"
    connection.execute(f"CREATE ROLE {role} LOGIN")
    connection.execute(f"GRANT SELECT, INSERT, UPDATE ON {tables} TO {role}")
    url = make_url(direct_url).set(username=role)
    try:
        with closing(LockClient(patient(url))) as locks:
            found = Found(locks, rows, prune_interval=0.01)
            found.start()
            eventually(lambda: "GRANT DELETE" in caplog.text)
            connection.execute(f"GRANT DELETE ON task_lock, task_lock_run TO {role}")
            eventually(lambda: "No longer rejected" in caplog.text)
            found.watch.looks.close()
    finally:
        connection.execute(f"DROP OWNED BY {role}")
        connection.execute(f"DROP ROLE {role}")
    lines = [r for r in caplog.records if "old rows" in r.getMessage()]
    assert [(line.levelname, "GRANT DELETE" in line.getMessage()) for line in lines] == [
        ("INFO", True),
        ("INFO", False),
    ]


def test_a_listing_that_fails_is_tried_again_at_the_interval(
    found: Found, rows: Rows, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listings: list[float] = []

    def fail() -> Sequence[tuple[str, JobKey, float | None]]:
        listings.append(time.monotonic())
        if len(listings) < 4:
            raise OSError("the job store is unavailable")
        return [("task", ("task", "default"), None)]

    monkeypatch.setattr(found.jobs, "list_tasks", fail)
    rows.dead("task")
    rows.set("task", handed_over=True)
    found.start("task")
    eventually(lambda: found.jobs.of("task"))
    assert len(listings) == 4
    assert caplog.text.count("could not be looked at") == 3
    # The interval is 0.2 s, with jitter.
    assert listings[-1] - listings[0] > 3 * 0.15


def test_what_goes_wrong_with_one_task_concerns_no_other(
    found: Found, rows: Rows, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find = found.jobs.submission_for

    def fail(key: JobKey, dead: TaskRow) -> Submission | None:
        if dead.task_name == "bad":
            raise LookupError("its function is gone")
        return find(key, dead)

    monkeypatch.setattr(found.jobs, "submission_for", fail)
    for name in ("bad", "good"):
        rows.dead(name)
        rows.set(name, handed_over=True)
    found.start("bad", "good")
    eventually(lambda: found.jobs.of("good"))
    eventually(lambda: "Task 'bad': could not check its dead run" in caplog.text)
