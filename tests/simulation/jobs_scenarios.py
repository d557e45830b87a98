"""Scenarios of replicas with both sides, and the promises that each of their runs must keep."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any
from uuid import UUID

from apscheduler_tasklock._runs.queue import PATIENCE
from apscheduler_tasklock.events import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
)
from apscheduler_tasklock.testing import rule
from tests.simulation.faults import is_stubborn
from tests.simulation.jobs_side import Job, JobsReplica, SimulatedRun
from tests.simulation.ledger import Promise, Wanted
from tests.simulation.plain import missed_by_plain
from tests.simulation.scenarios import POLL_INTERVAL, Scenario, Story, Task
from tests.simulation.world import BEGIN, Process
from tests.support.waist import Registration

# Limits the delay of a manual run beyond a look and one run, in seconds. It is short because at
# least one worker is kept for manual runs and takeovers.
MANUAL_SLACK = 1.0
# Limits by how many seconds a run begins later than in a plain pool, because of the claims of the
# runs before it.
A_FEW_CLAIMS = 0.02
# The events of which one tells that a run under a lock is over.
OVER = (EVENT_TASK_LOCK_RELEASED, EVENT_TASK_LOCK_LOST, EVENT_TASK_LOCK_ERROR)
# The ends of a run that has not begun.
NOT_BEGUN = frozenset({"missed", "refused", "failed", "withdrawn", "not taken", "lost"})


@dataclass(frozen=True)
class JobsScenario(Scenario):
    """A scenario of replicas with a pool of workers.

    :ivar workers: the workers of each replica; ``None``: no limit
    :ivar is_shared: whether the application itself uses the pool, or runs without a lock do not
        wait for runs that claim
    :ivar is_paused: whether a process is paused for some time
    :ivar misses_exactly: whether the missed run times must be the same as with plain APScheduler;
        else they may be fewer
    """

    workers: int | None = 2
    is_shared: bool = False
    is_paused: bool = False
    misses_exactly: bool = False

    @property
    def jobs(self) -> Sequence[Job]:
        """The scenario's jobs."""
        return [task for task in self.tasks if isinstance(task, Job)]


@dataclass
class JobsStory(Story):
    """One execution of a scenario.

    :ivar wrong: the mistakes that were found on the way
    """

    wrong: list[str] = field(default_factory=list)

    @property
    def runners(self) -> Sequence[JobsReplica]:
        """The story's replicas."""
        return self.replicas

    @property
    def jobs_scenario(self) -> JobsScenario:
        """The story's scenario."""
        assert isinstance(self.scenario, JobsScenario)
        return self.scenario

    @property
    def all_runs(self) -> Sequence[SimulatedRun]:
        """The runs that came to any replica."""
        return [run for replica in self.runners for run in replica.all_runs]

    def _make_replica(self, process: Process, poll_from: float) -> JobsReplica:
        return JobsReplica(self, process, poll_from, self.jobs_scenario.workers)

    def ask_for_manual_run(self, job: Job, at: float) -> None:
        """Let an operator ask for a manual run at a time."""

        def ask() -> None:
            rows = self.database.rows.rows
            request_id = UUID(int=int(at * 1000), version=4)
            now = self.world.database_time()
            rows[job.name] = rule.request_run(rows[job.name], request_id, "operator", 1_000.0, now)

        self.world.call_at(BEGIN + at, ask)

    def _let_be_known(self, name: str) -> None:
        task = Registration(name, "", None, 60.0, 0.0, f"job of {name}")
        now = self.world.database_time()
        decision = rule.register(None, task, UUID(int=len(self.database.rows.rows)), now)
        assert decision.row is not None
        self.database.rows.rows[name] = decision.row

    def _judged(self) -> list[str]:
        found = super()._judged() + list(dict.fromkeys(self.wrong))
        for replica in self.runners:
            found += self._wrong_runs(replica)
            found += self._wrongly_missed(replica)
            found += self._waited_for_the_database(replica)
            found += _wrong_events(replica)
            if not replica.process.is_dead and any(replica.active.instances.values()):
                left = dict(replica.active.instances)
                found.append(f"instances left on {replica.process.name}: {left}")
        return found + [f"failed: {error!r}" for error in self.world.failures]

    def _wrong_runs(self, replica: JobsReplica) -> list[str]:
        found = []
        for run in replica.all_runs:
            has_one_end = len(run.ends) == 1 and run.ends != [""]
            if not (has_one_end or (replica.process.is_dead and not run.ends)):
                found.append(f"lost: {run}")
            if len(run.called_at) > 1 or (run.called_at and NOT_BEGUN.intersection(run.ends)):
                found.append(f"begun, and ended twice: {run}")
            if run.scenario_job.claims and run.called_at and run.taken_at > replica.stopped_at:
                found.append(f"begun after the stop: {run}")
        if not (replica.process.is_dead or replica.runs.is_idle):
            found.append(f"its queue has something left: {replica.process.name}")
        return found

    def _waited_for_the_database(self, replica: JobsReplica) -> list[str]:
        """Return the runs without a lock that waited although the only worker was free."""
        if self.jobs_scenario.workers != 1 or replica.process.paused_until > BEGIN:
            return []
        found = []
        for run in replica.all_runs:
            if not run.scenario_job.claims and run.called_at:
                began = run.called_at[0]
                busy = sum(
                    max(0.0, min(began, each.ended_at) - max(run.came, each.taken_at))
                    for each in replica.all_runs
                    if each is not run and each.called_at
                )
                if began - run.came - busy > 2 * PATIENCE:
                    found.append(f"waited for the database, without a lock: {run}")
        return found

    def _wrongly_missed(self, replica: JobsReplica) -> list[str]:
        """Return the run times whose misses no plain APScheduler explains."""
        if any(run.kind.goes_first for run in replica.all_runs):
            return []  # plain APScheduler has no such runs, which occupy workers
        missed = {
            (run.task_name, round(run.due_at, 6))
            for run in replica.all_runs
            if "missed" in run.ends
        }
        pauses = replica.process.pauses
        # A run begins here a few milliseconds later than in a plain pool, because of its claim. A
        # pause that begins within them may hold up another run than there.
        earlier = [(since - A_FEW_CLAIMS, until) for since, until in pauses]
        found = [self._unlike_plain(replica, missed, each) for each in (pauses, earlier)]
        wrong = found[0] if all(found) else set()
        return [
            f"missed, unlike plain APScheduler: {job} {due - BEGIN:g} on {replica.process.name}"
            for job, due in sorted(wrong)
        ]

    def _unlike_plain(
        self,
        replica: JobsReplica,
        missed: set[tuple[str, float]],
        pauses: Sequence[tuple[float, float]],
    ) -> set[tuple[str, float]]:
        """Return the run times that only this replica or only plain APScheduler misses."""
        submitted, workers = replica.submitted, self.jobs_scenario.workers
        plain = {
            (job, round(run_time, 6))
            for job, run_time in missed_by_plain(submitted, workers, pauses)
        }
        if self.jobs_scenario.misses_exactly:
            return missed ^ plain
        # A run here that a plain pool would miss delays the runs after it.
        places = {
            (each.job, round(due, 6)): place
            for place, each in enumerate(sorted(submitted, key=lambda each: each.at))
            for due in each.run_times
        }
        first = min((places[each] for each in plain), default=inf)
        return {each for each in missed if places[each] < first}

    @property
    def _promise(self) -> Promise:
        promise = super()._promise
        return replace(promise, needless=promise.needless and not self.jobs_scenario.is_paused)

    def _held_by_nobody(self) -> list[str]:
        """Return the tasks that are claimed at the end, although a replica could take them over."""
        goes_on = any(
            not replica.process.is_dead and replica.stopped_at == inf for replica in self.runners
        )
        rows = self.database.rows.rows
        handed_over = {name for name, row in rows.items() if row.handed_over}
        found = super()._held_by_nobody()
        return [each for each in found if goes_on or not any(f" {n}," in each for n in handed_over)]

    @property
    def _wanted(self) -> Sequence[Wanted]:
        """The windows that must be run, each with the replicas that neither stop nor miss it."""
        wanted = []
        for job in self.jobs_scenario.jobs:
            for window in job.windows:
                gone = [
                    replica.process
                    for replica in self.runners
                    if replica.stopped_at < inf or self._has_missed(replica, job, window)
                ]
                left = [process for process in self.world.processes if process not in gone]
                # A replica that missed the window runs a later one, after which nobody runs it.
                is_overtaken = any(self._has_missed(each, job, window) for each in self.runners)
                is_overtaken = is_overtaken and any(
                    run.task == job.name and run.due > window for run in self.ledger.runs
                )
                is_excused = is_overtaken or self._is_stood_against(job, window)
                if job.claims and left and not is_excused:
                    wanted.append(Wanted(job.name, window, left))
        return wanted

    def _has_missed(self, replica: JobsReplica, job: Job, window: float) -> bool:
        return any(
            (run.scenario_job, run.window, run.ends) == (job, window, ["missed"])
            for run in replica.all_runs
        )

    def _is_stood_against(self, job: Job, window: float) -> bool:
        """Return whether a run of an earlier window that reached its end went on at this time."""
        return any(
            run.task == job.name
            and run.due < window
            and run.asked < BEGIN + window < run.over
            and run.ended is not None
            for run in self.ledger.runs
        )


def _wrong_events(replica: JobsReplica) -> list[str]:
    """Return what is wrong with the events of a replica's runs.

    Nothing is told twice of a claim. A run that began under a lock is told as granted, and as over.
    """
    if replica.process.is_dead:
        return []
    told = Counter(
        (event.task_name, event.token, event.code)
        for event in replica.events
        # The token of a refusal is that of the run in the way.
        if event.token is not None and event.code != EVENT_TASK_LOCK_REFUSED
    )
    name = replica.process.name
    found = [f"told {n} times on {name}: {event}" for event, n in told.items() if n > 1]
    for run in replica.all_runs:
        if run.entry is not None and run.held is not None:
            of_run = {code for *of, code in told if of == [run.task_name, run.held.token]}
            if EVENT_TASK_LOCK_GRANTED not in of_run:
                found.append(f"not told as granted: {run}")
            if not of_run.intersection(OVER):
                found.append(f"not told as over: {run}")
    return found


def late_manual_runs(story: JobsStory) -> list[str]:
    """Return the manual runs that waited for too long in a story without faults."""
    longest = max(job.takes for job in story.jobs_scenario.jobs)
    limit = POLL_INTERVAL + longest + MANUAL_SLACK
    begun = {(run.task, run.due): run.begun - BEGIN for run in story.ledger.runs}
    return [
        f"late: manual run {job.name} {window}, begun at {begun.get((job.name, window))}"
        for job in story.jobs_scenario.jobs
        if job.is_manual
        for window in job.windows
        if begun.get((job.name, window), inf) > window + limit
    ]


# ---- the scenarios -------------------------------------------------------------------------------


def jobs(names: str, *windows: float, **more: Any) -> list[Task]:
    """Return a job for each letter."""
    return [Job(name, windows, **more) for name in names]


def submit_all(story: Any, *, apart: float = 0.3, only: str = "") -> None:
    """Let each replica submit each window when it is due, a little later than the last replica."""
    for n, replica in enumerate(story.replicas):
        for job in story.scenario.jobs:
            if not (job.is_manual or (only and replica.process.name not in only)):
                for window in job.windows:
                    replica.submit_at(window + apart * n, job, [window])


def _together(story: Any) -> None:
    submit_all(story, apart=0.0)


def _backlogs(story: Any) -> None:
    for job in story.scenario.jobs:
        for n, replica in enumerate(story.replicas):
            # The replicas come back at different times, one of them during another one's run.
            replica.submit_at(35.0 + 1.3 * n, job, job.windows)


def _stopped(story: Any, at: float, *, closes: bool = True) -> None:
    submit_all(story, apart=0.05)
    story.replicas[0].stop_at(at, closes=closes)


def _locked(story: Any) -> None:
    submit_all(story)
    for job in story.scenario.jobs:
        story.database.locked_until[job.name] = BEGIN + 10.2


def _manual(story: Any) -> None:
    submit_all(story)
    for job in story.scenario.jobs:
        if job.is_manual:
            for window in job.windows:
                story.ask_for_manual_run(job, window)


def _failover(story: Any) -> None:
    """Kill a replica whose run is to be taken over by one that is busy with its schedule."""
    first, second = story.replicas
    for job in story.scenario.jobs:
        for window in job.windows:
            if job.failover:
                first.submit_at(window, job, [window])
            second.submit_at(window + 0.3, job, [window])

    def kill() -> None:
        first.process.killed_at = first.process.killed_at or story.world.now

    story.world.call_at(BEGIN + 13.0, kill)


def _shared(story: Any) -> None:
    submit_all(story)
    for replica in story.replicas[:1]:
        replica.start(partial(replica.pool.occupy, 8.0, 2), 9.9)


def _raises(story: Any, *, queues: bool) -> None:
    submit_all(story)
    pool = story.replicas[0].pool
    pool.queues_all_the_same = queues

    def raise_now() -> None:
        pool.raises_until = story.world.now + 3.0

    story.world.call_at(BEGIN + 9.9, raise_now)


def _paused(at: float, seconds: float) -> Callable[[Any], None]:
    """Return a beginning after which the first process is paused at a time, for so long."""

    def begin(story: Any) -> None:
        submit_all(story)
        process = story.replicas[0].process
        story.world.call_at(BEGIN + at, lambda: process.pause(story.world.now, seconds))

    return begin


# For a moment between a claim and the begin of its run.
_begins_late = _paused(10.003, 12.0)
# In its run, for longer than a lease, so that another one takes it over.
_lost = _paused(17.0, 40.0)


SCENARIOS = (
    JobsScenario("jobs", jobs("pqr", 10.0, 20.0, takes=1.0), submit_all),
    JobsScenario("at once", jobs("pqr", 10.0), _together, replicas=3, workers=1),
    JobsScenario("without a limit", jobs("pqrs", 10.0), _together, workers=None),
    JobsScenario(
        "backlogs",
        jobs("b", 10.0, 20.0, 30.0, takes=2.0, failover=True),
        _backlogs,
        replicas=3,
    ),
    JobsScenario(
        "backlogs, no failover", jobs("b", 10.0, 20.0, 30.0, takes=2.0), _backlogs, workers=1
    ),
    JobsScenario(
        "stop", jobs("xyz", 10.0, takes=4.0), partial(_stopped, at=12.0), workers=1, lasts=150.0
    ),
    JobsScenario("stop while asked", jobs("xy", 10.0), partial(_stopped, at=10.0015), workers=1),
    JobsScenario(
        "the queue stops",
        jobs("xyz", 10.0),
        partial(_stopped, at=10.0015, closes=False),
        workers=1,
    ),
    JobsScenario(
        "stop, and backlogs",
        [Job("x", (9.0,), takes=4.0), Job("b", (10.0, 10.5), period=0.5, takes=1.0)],
        partial(_stopped, at=12.0),
        workers=1,
    ),
    JobsScenario(
        "manual",
        [*jobs("abcdnopqrstuvwxy", 10.0, takes=4.0), *jobs("m", 10.1, takes=4.0, is_manual=True)],
        _manual,
        known=("m",),
    ),
    JobsScenario(
        "takeover",
        [Job("f", (10.0,), takes=10.0, failover=True), *jobs("pqrstu", 11.0, takes=8.0)],
        _failover,
    ),
    JobsScenario("full", jobs("pqrs", 10.0, takes=4.0), submit_all, workers=1),
    JobsScenario("shared", jobs("pqr", 10.0, 20.0), _shared, is_shared=True),
    JobsScenario("raises", jobs("pq", 10.0), partial(_raises, queues=False)),
    JobsScenario("raises, and queues", jobs("pq", 10.0), partial(_raises, queues=True)),
    JobsScenario(
        "begins late", jobs("pq", 10.0, takes=1.0, failover=True), _begins_late, is_paused=True
    ),
    JobsScenario(
        "loses its lock",
        jobs("l", 10.0, period=100.0, takes=50.0, failover=True),
        _lost,
        is_paused=True,
    ),
    JobsScenario(
        "unlocked",
        [*jobs("pq", 10.0, takes=1.0), Job("u", (10.0,), takes=1.0, claims=False)],
        submit_all,
        workers=1,
        is_shared=True,
    ),
    JobsScenario("close together", [Job("c", (10.0, 10.02), period=0.02, takes=0.005)], submit_all),
    JobsScenario(
        "locked rows",
        jobs("cde", 10.0, 10.06, 10.12, period=0.06, takes=0.005),
        _locked,
        replicas=1,
        workers=None,
    ),
)


# ---- bursts, and misfires in them ----------------------------------------------------------------


def _burst(story: Any) -> None:
    """Submit the jobs in one pass of each replica, in their order."""
    for n, replica in enumerate(story.replicas):
        for job in story.scenario.jobs:
            for window in job.windows:
                replica.submit_at(window + 0.001 * n + replica.process.skew, job, [window])


def _late_database(story: Any) -> None:
    _burst(story)
    story.world.call_at(BEGIN + 9.0, lambda: setattr(story.world, "slow_until", BEGIN + 20.0))


def many(count: int, *windows: float, **more: Any) -> list[Task]:
    """Return so many jobs."""
    return [Job(f"{n:03}", windows, **more) for n in range(count)]


BURSTS = (
    JobsScenario("200 jobs of 20 ms", many(200, 10.0, takes=0.02, grace=1.0), _burst, workers=10),
    JobsScenario(
        "40 jobs, the database 2 s late",
        many(40, 10.0, takes=0.01, grace=1.0),
        _late_database,
        replicas=1,
        workers=10,
    ),
    JobsScenario(
        "600 jobs, three replicas",
        many(600, 10.0, takes=0.01, grace=1.0),
        _burst,
        replicas=3,
        workers=10,
    ),
)


def overload(seed: int) -> JobsScenario:
    """Return a random scenario with more work than one replica's workers can do in time.

    Some jobs come as backlogs, and several in one pass.
    """
    chance = random.Random(f"overload {seed}")  # noqa: S311  # no secret
    workers = chance.choice((1, 1, 2, 3, 4))
    scenario_jobs = []
    passes = [chance.randint(40, 80) / 4 for _ in range(chance.choice((1, 3, 10)))]
    for n in range(chance.randint(5, 25)):
        last = chance.choice(passes)
        count = chance.choice((1, 1, 1, 2, 3))
        windows = [last - 0.25 * chance.randint(1, 4) * (count - 1 - k) for k in range(count)]
        takes = chance.choice((0.1, 0.5, 1.0, 2.0, 4.0))
        grace = chance.choice((None, 0.6, 1.1, 2.6, 6.1))
        scenario_jobs.append(
            Job(f"{n:02}", tuple(sorted(set(windows))), 0.2, takes, lease=None, grace=grace)
        )
    return JobsScenario(
        f"overload {seed}",
        scenario_jobs,
        _backlogs_at_their_last,
        replicas=1,
        polls=False,
        workers=workers,
        misses_exactly=True,
        lasts=1_000.0,
    )


def _backlogs_at_their_last(story: Any) -> None:
    for replica in story.replicas:
        for job in story.scenario.jobs:
            replica.submit_at(job.windows[-1], job, job.windows)


def history(seed: int) -> JobsStory:
    """Return a random history of replicas with at most one fault."""
    chance = random.Random(f"history {seed}")  # noqa: S311  # no secret
    replicas, failover = chance.choice((1, 2, 2, 3)), chance.random() < 0.5
    passes = [10.0 + 2.5 * n for n in range(5)]
    scenario_jobs = []
    for n in range(chance.randint(2, 10)):
        count = chance.choice((1, 1, 2, 3))
        first = chance.choice(passes)
        scenario_jobs.append(
            Job(
                f"{n:02}",
                tuple(first + 10.0 * k for k in range(count)),
                takes=chance.choice((0.1, 1.0, 3.0, 6.0)),
                failover=failover,
                grace=chance.choice((None, None, 2.6, 20.0)),
            )
        )
    act = _History(
        backlog_at=chance.choice((None, None, 50.0)),
        stops_at=chance.choice((None, None, 10.0015, 14.0, 21.0)) if replicas > 1 else None,
        occupied_at=chance.choice((None, None, 9.0, 19.0)),
        raises_at=chance.choice((None, None, None, 10.0)),
    )
    scenario = JobsScenario(
        f"history {seed}",
        scenario_jobs,
        act,
        replicas=replicas,
        workers=chance.choice((1, 2, 3, None)),
        is_shared=act.occupied_at is not None,
        lasts=400.0,
        known=tuple(job.name for job in scenario_jobs),
    )
    # Without stubborn faults, because a run whose release cannot arrive for long blocks the next
    # window; see the README.
    singles = [each for each in JobsStory(scenario).singles if not is_stubborn(each.fault)]
    planned = chance.sample(singles, min(len(singles), chance.choice((0, 1, 1))))
    return JobsStory(scenario, tuple(sorted(planned, key=lambda each: each.at)))


@dataclass(frozen=True)
class _History:
    """The events of a history's first replica, with their times.

    :ivar backlog_at: when all run times are submitted together; ``None``: each when it is due
    """

    backlog_at: float | None
    stops_at: float | None
    occupied_at: float | None
    raises_at: float | None

    def __call__(self, story: Any) -> None:
        if self.backlog_at is None:
            submit_all(story, apart=0.1)
        else:
            for n, replica in enumerate(story.replicas):
                for job in story.scenario.jobs:
                    replica.submit_at(self.backlog_at + 1.3 * n, job, job.windows)
        first = story.replicas[0]
        if self.stops_at is not None:
            first.stop_at(self.stops_at)
        if self.occupied_at is not None:
            first.start(partial(first.pool.occupy, 8.0, 2), self.occupied_at)
        if self.raises_at is not None:
            first.pool.raises_until = BEGIN + self.raises_at + 2.0
