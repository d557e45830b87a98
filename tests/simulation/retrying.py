"""Jobs that fail and are run again, on replicas with both sides on a virtual clock.

The library runs the jobs, and decides how long a retry waits. What finds the failed runs is a short
form of the library's looks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta, timezone
from functools import partial
from math import inf
from typing import Any

from apscheduler.triggers.date import DateTrigger

from apscheduler_tasklock._lock.claims import Claimed
from apscheduler_tasklock._lock.outcomes import RunOutcome
from apscheduler_tasklock._runs.run import RunKind
from apscheduler_tasklock.errors import LONGEST_RETRY_DELAY
from apscheduler_tasklock.lock import HeldLock
from apscheduler_tasklock.options import ONE_OFF_MIN_LOCK, LockOptions
from apscheduler_tasklock.testing import rule
from tests.simulation import ledger
from tests.simulation.faults import CLAIM_TIMEOUT, SLOW, Planned, is_stubborn
from tests.simulation.jobs_scenarios import JobsStory, submit_all
from tests.simulation.jobs_side import Job, JobsReplica, SimulatedRun
from tests.simulation.leading import LeaderReplica, LeaderScenario, LeaderStory
from tests.simulation.scenarios import (
    MOST_TAKEOVERS,
    POLL_INTERVAL,
    TRIFLES,
    Task,
    kill_at,
)
from tests.simulation.world import BEGIN, START, Process, replaced
from tests.support.waist import ClaimRequest, TaskRow

# The largest factor by which a retry's delay is longer than the options say.
JITTER = 1.1
# Limits the seconds in which a retry that is due has begun, after at most a trifle.
BEGINS_WITHIN = POLL_INTERVAL + 2 * CLAIM_TIMEOUT + 1.0
# Limits the seconds by which a replica's clock is ahead.
MOST_SKEW = 1.0
# Limits the seconds from a run's end until its release has arrived.
LATEST_RELEASE = 300.0


@dataclass(frozen=True)
class RetryJob(Job):
    """A job that fails now and then.

    :ivar options: how often it is run again, and when
    :ivar fails: by run time: how many attempts at it fail
    :ivar opens: whether a failed run opens its window, as with ``on_failure="release"``
    :ivar one_off: whether the job has one run time only
    :ivar fates: what befalls its runs in turn, in place of ``fails``: ``D``: the replica dies in
        the run; ``F``: the run fails
    :ivar without: the replicas on which the job has no retries
    """

    options: LockOptions = field(default_factory=LockOptions)
    fails: Mapping[float, int] = field(default_factory=dict)
    opens: bool = False
    one_off: bool = False
    fates: str = ""
    without: str = ""

    def claim_of(self, window: float) -> ClaimRequest:
        """Return the claim of a run time."""
        request = super().claim_of(window)
        if not self.one_off:
            return request
        return replace(request, one_off=True, is_last=True, next_in=None, min_lock=ONE_OFF_MIN_LOCK)

    @property
    def trigger(self) -> Any:
        """The trigger, which gives one run time to a one-off job."""
        if not self.one_off:
            return super().trigger
        return DateTrigger(START + timedelta(seconds=self.windows[0]), timezone.utc)

    def options_on(self, process: Process) -> LockOptions:
        """Return the options that a replica has."""
        retries = 0 if process.name in self.without else self.options.retries
        after = "release" if self.opens else "keep"
        return replace(self.options, retries=retries, failover=self.failover, on_failure=after)

    @property
    def retries(self) -> int:
        """How often a run is run again at most."""
        return self.options.retries or 0

    def due_after(self, window: float) -> float:
        """When the run time after another one is due, in seconds from the beginning."""
        return inf if self.one_off else window + self.period


@dataclass(frozen=True)
class RetryScenario(LeaderScenario):
    """A scenario of jobs that fail.

    :ivar leads: whether the replicas are in leader mode
    :ivar has_faults: whether faults are injected
    :ivar held_up: the begin and the end of an operator's pause, in seconds from the beginning
    """

    replicas: int = 2
    leads: bool = False
    has_faults: bool = True
    held_up: tuple[float, float] = (inf, inf)

    @property
    def retry_jobs(self) -> Sequence[RetryJob]:
        """The scenario's jobs."""
        return [task for task in self.tasks if isinstance(task, RetryJob)]


@dataclass(frozen=True)
class Grant:
    """A claim that was granted.

    :ivar window: the run time that was asked for, in seconds from the beginning
    :ivar granted: the run time in the answer, in seconds from the beginning
    :ivar at: when it was granted by the database's clock, in seconds from the beginning
    """

    task: str
    kind: RunKind
    window: float
    granted: float
    attempt: int
    token: int
    at: float

    def __str__(self) -> str:
        return f"{self.kind.value} {self.task} {self.window:g} attempt {self.attempt}"


class RetryReplica(JobsReplica):
    """A replica that runs failed runs again."""

    @property
    def _retry_story(self) -> RetryStory:
        assert isinstance(self._story, RetryStory)
        return self._story

    # ---- the end of a run ------------------------------------------------------------------------

    def _call_function(self, run: SimulatedRun) -> None:
        super()._call_function(run)
        if self._befalls(run) == "D":
            self.process.killed_at = self.world.now
            self.world.note(self.process.name, "   dies in its run")
            self.world.sleep(inf)

    def _befalls(self, run: SimulatedRun) -> str:
        job = run.scenario_job
        assert isinstance(job, RetryJob)
        begun = sum(each.task == job.name for each in self._story.ledger.runs)
        return job.fates[(begun - 1) % len(job.fates)] if job.fates else ""

    def _fails(self, run: SimulatedRun, held: HeldLock) -> bool:
        job, window = run.scenario_job, run.window
        assert isinstance(job, RetryJob)
        fails = bool(self._befalls(run)) or held.attempt <= job.fails.get(window, 0)
        if fails:
            at = self.world.now - BEGIN
            self._retry_story.failures.append((job.name, window, held.attempt, at))
        return fails

    def _opens(self, run: SimulatedRun, outcome: RunOutcome) -> bool:
        """Return whether a failed run opens its window: only if it is not run again."""
        job, now = run.scenario_job, self.world.now - BEGIN
        assert isinstance(job, RetryJob)
        retry_at = inf if outcome.retry_in is None else now + outcome.retry_in
        return super()._opens(run, outcome) and retry_at >= job.due_after(run.window)

    # ---- the claims ------------------------------------------------------------------------------

    def note_answer(self, run: Any, claimed: Claimed | Exception) -> None:
        super().note_answer(run, claimed)
        if isinstance(claimed, HeldLock):
            self._retry_story.grants.append(self._grant_of(run, claimed))

    def _grant_of(self, run: SimulatedRun, held: HeldLock) -> Grant:
        assert held.window_start is not None
        # The maximum lock of a takeover is that of the dead run.
        max_lock = getattr(run.request(), "max_lock", inf)
        at = (held.run_until - START).total_seconds() - max_lock
        granted = (held.window_start - START).total_seconds()
        return Grant(run.task_name, run.kind, run.window, granted, held.attempt, held.token, at)

    # ---- the look at the rows --------------------------------------------------------------------

    def _act_on(self, state: TaskRow, task: Task) -> None:
        super()._act_on(state, task)
        assert isinstance(task, RetryJob)
        is_left = task.options_on(self.process).delay_after(state.attempt) is not None
        is_new = not self._is_under_way(state.claim_id)
        if state.retry_at is not None and self.stopped_at == inf and is_left and is_new:
            self._submit(replace(self._again(task, state), failed_run=state))


class LeaderRetryReplica(RetryReplica, LeaderReplica):
    """A replica in leader mode that runs failed runs again."""


@dataclass
class RetryStory(JobsStory):
    """One execution of a scenario of jobs that fail.

    :ivar grants: the claims that were granted
    :ivar failures: the failed attempts: task, run time, number and end, in seconds from the
        beginning
    :ivar was_held_up: whether an operator has paused the task
    """

    grants: list[Grant] = field(default_factory=list)
    failures: list[tuple[str, float, int, float]] = field(default_factory=list)
    was_held_up: bool = False

    def _make_replica(self, process: Process, poll_from: float) -> Any:
        return RetryReplica(self, process, poll_from, self.retry_scenario.workers)

    @property
    def retry_scenario(self) -> RetryScenario:
        """The story's scenario."""
        assert isinstance(self.scenario, RetryScenario)
        return self.scenario

    @property
    def singles(self) -> list[Planned]:
        """Every fault at every place, but for some that are not about retries.

        A replica that was paused in an outage does not notice it: it believes the rows when it goes
        on, and so takes over what ended in the outage. A claim that is held up again and again may
        be granted when its window was opened since, and nobody releases it.
        """
        scenario = self.retry_scenario
        has_open_windows = any(job.opens for job in scenario.retry_jobs)
        return [
            each
            for each in super().singles
            if scenario.has_faults
            and not (scenario.is_paused and "outage" in each.fault)
            and not (has_open_windows and is_stubborn(each.fault))
        ]

    @property
    def _is_over(self) -> bool:
        now, ahead = self.world.database_time(), self.world.database_ahead
        is_late = self.world.now >= BEGIN + self.scenario.lasts - min(0.0, ahead)
        is_pending = any(row.is_retry_pending(now) for row in self._rows)
        return (is_late or not is_pending) and super()._is_over

    @property
    def _promise(self) -> ledger.Promise:
        promise = super()._promise
        has_died = any(process.is_dead for process in self.world.processes)
        return replace(promise, costly=promise.costly or has_died)

    def _is_stood_against(self, job: Job, window: float) -> bool:
        """Return whether a first attempt at an earlier run time went on at this time.

        A run time that comes while a retry goes on is run after it.
        """
        firsts = [run for run in self.ledger.runs if run.attempt == 1]
        with replaced((self.ledger, "runs", firsts)):
            return super()._is_stood_against(job, window)

    # ---- what must hold --------------------------------------------------------------------------

    def _judged(self) -> list[str]:
        found = super()._judged()
        for job in self.retry_scenario.retry_jobs:
            found += self._wrong_attempts(job)
            found += self._wrong_grants(job)
            found += self._lost_retries(job)
            found += self._too_many_deaths(job)
            found += self._miscounted(job)
            found += self._far_away(job)
        return found

    def _runs_of(self, job: Job, window: float) -> list[ledger.Run]:
        found = [run for run in self.ledger.runs if (run.task, run.due) == (job.name, window)]
        return sorted(found, key=lambda run: run.begun)

    def _wrong_attempts(self, job: RetryJob) -> list[str]:
        """Return the attempts that do not follow a failed one, or are one too many."""
        found = []
        for window in job.windows:
            runs = self._runs_of(job, window)
            for run in runs:
                if run.attempt > job.retries + 1:
                    found.append(f"one attempt too many: {run}")
                if run.attempt > 1 and not any(
                    each.attempt == run.attempt - 1 and each.failed and each.over <= run.begun
                    for each in runs
                ):
                    found.append(f"a retry of nothing: {run}")
        return found

    def _wrong_grants(self, job: RetryJob) -> list[str]:
        """Return the retries that were granted too late, or of another run time."""
        of_job = [grant for grant in self.grants if grant.task == job.name]
        found = []
        for grant in of_job:
            if grant.kind is not RunKind.RETRY:
                continue
            # A slow answer makes a replica wrong by as much about the database's clock.
            slack = SLOW if "slow database" in self.plan.injected else 0.0
            if grant.at >= self._due_after(job, grant) + slack:
                found.append(f"a retry after the next run time was due: {grant}")
            since, until = self.retry_scenario.held_up
            if self.was_held_up and since < grant.at < until:
                found.append(f"a retry in a pause: {grant}")
            if abs(grant.granted - grant.window) > MOST_SKEW:
                found.append(f"a retry of another run time: {grant}, of {grant.granted:g}")
            if any(
                each.token < grant.token and each.window > grant.window
                for each in of_job
                if each.kind is RunKind.SCHEDULE
            ):
                found.append(f"a retry after a later run time: {grant}")
        return found

    def _due_after(self, job: RetryJob, retry: Grant) -> float:
        """Return when the run time after a retry is due, in seconds from the beginning.

        Run times that came due in the first attempt were skipped, as APScheduler skips them.
        """
        ends = [
            at
            for task, window, attempt, at in self.failures
            if (task, window, attempt) == (job.name, retry.window, 1) and at <= retry.at
        ]
        # If the database's clock was set while the job ran, its times are not those of the runs.
        is_stepped = any(each.startswith("step") for each in self.plan.injected)
        if job.one_off or is_stepped or not ends:
            return inf
        # The replica's clock may be ahead.
        passed = (max(ends) + MOST_SKEW - retry.window) // job.period
        return retry.window + (passed + 1) * job.period

    def _lost_retries(self, job: RetryJob) -> list[str]:
        """Return the last attempts at run times after which another one is missing."""
        found = []
        for window in job.windows:
            runs = self._runs_of(job, window)
            if not runs or runs[-1].lost or not self._must_go_on(job, window, runs[-1]):
                continue
            if runs[-1].failed and runs[-1].attempt <= job.retries:
                found.append(f"never run again: {runs[-1]}")
            if runs[-1].ended is None and job.failover and len(_dead(runs)) <= MOST_TAKEOVERS:
                found.append(f"left dead: {runs[-1]}")
        return found

    def _must_go_on(self, job: RetryJob, window: float, last: ledger.Run) -> bool:
        """Return whether nothing excuses that a run time has no further attempt."""
        promise = self._promise
        alive = [
            replica
            for replica in self.runners
            if not replica.process.is_dead
            and replica.stopped_at == inf
            and replica.process.name not in job.without
        ]
        if not alive or promise.hopeless or last.replica in job.without:
            return False
        if not job.failover and promise.costly:
            return False
        if not job.one_off and not self._is_calm:
            return False
        delay = JITTER * (job.options.delay_after(last.attempt) or 0.0)
        row = self.database.rows.rows[job.name]
        is_pending = row.is_retry_pending(self.world.database_time())
        latest = min(BEGIN + job.due_after(window), self.world.now if is_pending else inf)
        return last.over + delay + BEGINS_WITHIN < latest

    @property
    def _is_calm(self) -> bool:
        """Whether nothing went wrong but trifles, so that retries were not delayed for long."""
        rough = ("kill", "step")
        return all(
            each in TRIFLES and not each.startswith(rough) for each in self.plan.injected
        ) and not any(each.is_dead or each.paused_until > BEGIN for each in self.world.processes)

    def _too_many_deaths(self, job: RetryJob) -> list[str]:
        """Return the run times that killed more replicas than the option ``max_takeovers`` allows.

        A replica that a fault has killed is one more.
        """
        return [
            f"{len(dead)} replicas have died: {job.name} {window:g}"
            for window in job.windows
            if len(dead := _dead(self._runs_of(job, window)))
            > MOST_TAKEOVERS + 1 + len(self.planned)
        ]

    def _miscounted(self, job: RetryJob) -> list[str]:
        """Return the job's failures in its row, if they are not those of its run times."""
        runs = [run for run in self.ledger.runs if run.task == job.name]
        row = self.database.rows.rows.get(job.name)
        if not self._is_calm or row is None or any(run.lost for run in runs):
            return []
        count = 0
        for run in sorted(runs, key=lambda run: run.begun):
            count = count + (run.attempt == 1) if run.failed else 0
        return [f"miscounted: {row.failures} failures, not {count}"] * (row.failures != count)

    def _far_away(self, job: RetryJob) -> list[str]:
        """Return the retry that is to begin in more than a day."""
        row = self.database.rows.rows.get(job.name)
        if row is None or row.retry_at is None or row.retry_of != row.claim_id:
            return []
        assert row.finished_at is not None
        seconds = (row.retry_at - row.finished_at).total_seconds()
        is_far = seconds > LONGEST_RETRY_DELAY + LATEST_RELEASE
        return [f"far away: {job.name} is run again in {seconds:g} s"] * is_far


def _dead(runs: Sequence[ledger.Run]) -> list[ledger.Run]:
    return [run for run in runs if run.ended is None]


@dataclass
class LeaderRetryStory(RetryStory, LeaderStory):
    """One execution of a scenario in leader mode."""

    def _make_replica(self, process: Process, poll_from: float) -> Any:
        return LeaderRetryReplica(self, process, poll_from, self.retry_scenario.workers)


def story_of(scenario: RetryScenario, planned: tuple[Planned, ...] = ()) -> RetryStory:
    """Go through a scenario, with planned faults."""
    return (LeaderRetryStory if scenario.leads else RetryStory)(scenario, planned)


# ---- the scenarios -------------------------------------------------------------------------------


def failing(
    *windows: float, retries: int, delay: float = 3.0, backoff: float = 2.0, **more: Any
) -> list[Task]:
    """Return a job that fails."""
    options = LockOptions(retries=retries, retry_delay=delay, retry_backoff=backoff)
    return [RetryJob("r", windows, options=options, **{"takes": 1.0, "period": 50.0, **more})]


def one_off(retries: int, fails: int, **more: Any) -> list[Task]:
    """Return a one-off job that fails so many times."""
    return failing(10.0, retries=retries, fails={10.0: fails}, one_off=True, **more)


def _killed(story: Any, at: float) -> None:
    submit_all(story)
    kill_at(story, at)


def _stopped(story: Any, at: float) -> None:
    submit_all(story)
    story.replicas[0].stop_at(at)


def _paused(story: Any, at: float, seconds: float) -> None:
    """Pause the first replica, as SIGSTOP does."""
    submit_all(story)
    process = story.replicas[0].process

    def pause() -> None:
        process.pause(story.world.now, seconds)
        story.world.note(process.name, f"   is stopped for {seconds:g} s")

    story.world.call_at(BEGIN + at, pause)


def _held_up(story: Any) -> None:
    """Let an operator pause the tasks whose runs have failed."""
    submit_all(story)
    since, until = story.scenario.held_up

    def pause() -> None:
        rows, now = story.database.rows.rows, story.world.database_time()
        for name, row in rows.items():
            if row.finished:  # else a run time that comes late would fall into the pause
                rows[name] = rule.pause(row, until - since, now, "operator")
                story.was_held_up = True

    story.world.call_at(BEGIN + since, pause)


def _late_on_the_last(story: Any, at: float) -> None:
    """Let the last replica come to its run times late, as after a restart."""
    *others, last = story.replicas
    for job in story.scenario.jobs:
        for n, replica in enumerate(others):
            for window in job.windows:
                replica.submit_at(window + 0.3 * n, job, [window])
        last.submit_at(at, job, job.windows)


# A first attempt of replica A ends at 11, and A's look at 16 finds the retry, that of B at 17.7.
Act = Callable[[Any], None]
_KILLED_BETWEEN: Act = partial(_killed, at=13.0)
_KILLED_IN_RETRY: Act = partial(_killed, at=17.0)
_LONG: dict[str, Any] = {"takes": 4.0, "delay": 1.0}
_INTO_THE_NEXT: dict[str, Any] = {
    "period": 20.0,
    "takes": 7.0,
    "delay": 7.0,
    "retries": 2,
    "fails": {10.0: 1, 20.0: 1, 30.0: 1, 40.0: 1},
}
_AT_ONCE: dict[str, Any] = {
    "period": 3.0,
    "takes": 0.1,
    "delay": 0.0,
    "retries": 1,
    "fails": {10.0: 9, 13.0: 9, 16.0: 9},
}

SCENARIOS = (
    RetryScenario(
        "retries", failing(10.0, 60.0, retries=2, fails={10.0: 2}), submit_all, looks=(13.0, 19.0)
    ),
    RetryScenario(
        "every attempt fails", failing(10.0, 60.0, retries=1, fails={10.0: 9, 60.0: 9}), submit_all
    ),
    RetryScenario("a one-off", one_off(2, 2), submit_all, replicas=3),
    RetryScenario("a one-off always fails", one_off(1, 9), submit_all),
    RetryScenario("a one-off with failover", one_off(2, 2, failover=True), submit_all),
    RetryScenario("killed before the retry", one_off(2, 2), _KILLED_BETWEEN, looks=(13.0, 19.0)),
    RetryScenario(
        "killed in the retry", one_off(2, 2, failover=True, **_LONG), _KILLED_IN_RETRY, replicas=3
    ),
    RetryScenario("killed in the retry, no failover", one_off(2, 2, **_LONG), _KILLED_IN_RETRY),
    RetryScenario(
        "stopped before the retry", one_off(2, 2, failover=True), partial(_stopped, at=13.0)
    ),
    RetryScenario(
        "stopped in the retry", one_off(2, 2, failover=True, **_LONG), partial(_stopped, at=17.0)
    ),
    RetryScenario(
        "paused before the retry",
        one_off(2, 2, failover=True),
        partial(_paused, at=13.0, seconds=30.0),
        is_paused=True,
    ),
    RetryScenario(
        "paused in the retry",
        one_off(2, 2, failover=True, **_LONG),
        partial(_paused, at=17.0, seconds=40.0),
        is_paused=True,
    ),
    RetryScenario("an operator's pause", one_off(2, 2), _held_up, held_up=(13.0, 25.0)),
    RetryScenario(
        "the only worker is busy",
        [*one_off(2, 2, failover=True), RetryJob("s", (12.0, 30.0), takes=9.0, period=18.0)],
        submit_all,
        replicas=1,
        workers=1,
    ),
    RetryScenario(
        "the window is opened",
        failing(10.0, period=1_000.0, retries=2, fails={10.0: 9}, opens=True),
        partial(_late_on_the_last, at=13.0),
        replicas=3,
    ),
    RetryScenario(
        "the window is opened at once, because the delay is too long",
        failing(10.0, period=20.0, delay=30.0, retries=2, fails={10.0: 1}, opens=True),
        partial(_late_on_the_last, at=13.0),
        replicas=3,
    ),
    RetryScenario(
        "the next run time comes in the retry", failing(10.0, 30.0, **_INTO_THE_NEXT), submit_all
    ),
    RetryScenario(
        "the next run time comes in the retry, failover",
        failing(10.0, 30.0, failover=True, **_INTO_THE_NEXT),
        submit_all,
        replicas=3,
    ),
    RetryScenario(
        "the next run time comes before the look",
        failing(10.0, period=10.0, delay=8.0, retries=1, fails={10.0: 1}),
        submit_all,
    ),
    RetryScenario(
        "every ten seconds",
        failing(10.0, 20.0, 30.0, period=10.0, retries=2, fails={10.0: 9, 20.0: 9, 30.0: 1}),
        submit_all,
    ),
    RetryScenario(
        "every ten seconds, and a delay of thirty",
        failing(10.0, 20.0, 30.0, period=10.0, delay=30.0, retries=2, fails={10.0: 1, 20.0: 1}),
        submit_all,
    ),
    RetryScenario(
        "every three seconds, at once", failing(10.0, 13.0, 16.0, **_AT_ONCE), submit_all
    ),
    RetryScenario(
        "no retries on the second",
        failing(10.0, 60.0, retries=2, fails={10.0: 2, 60.0: 2}, without="B"),
        submit_all,
    ),
    RetryScenario(
        "a poisonous job",
        failing(10.0, period=1_000.0, retries=9, failover=True, fates="DDF"),
        submit_all,
        replicas=6,
        has_faults=False,
        lasts=300.0,
    ),
    RetryScenario(
        "a delay that grows",
        one_off(9, 9, delay=9.0, backoff=100.0),
        submit_all,
        has_faults=False,
        lasts=1_100.0,
    ),
    RetryScenario(
        "a leader",
        failing(20.0, 70.0, retries=2, fails={20.0: 2, 70.0: 1}),
        submit_all,
        replicas=3,
        leads=True,
    ),
    RetryScenario(
        "the leader is killed before the retry",
        failing(20.0, 70.0, retries=2, fails={20.0: 2}, failover=True),
        partial(_killed, at=23.0),
        replicas=3,
        leads=True,
    ),
    RetryScenario(
        "the next run time comes in the leader's retry",
        failing(20.0, 40.0, **_INTO_THE_NEXT),
        submit_all,
        replicas=3,
        leads=True,
    ),
)


# ---- random histories ----------------------------------------------------------------------------


def history(seed: int) -> RetryStory:
    """Return a random history of jobs that fail, with at most one fault."""
    chance = random.Random(f"retries {seed}")  # noqa: S311  # no secret
    replicas, failover, leads = chance.choice((1, 2, 2, 3)), chance.random() < 0.5, seed % 4 == 0
    first = 20.0 if leads else 10.0
    act = _random_act(chance, first) if replicas > 1 else submit_all
    scenario = RetryScenario(
        f"history of retries {seed}",
        [_random_job(f"{n}", chance, first, failover) for n in range(chance.randint(1, 3))],
        act,
        replicas=replicas,
        leads=leads,
        workers=chance.choice((1, 2, None)),
        is_paused=getattr(act, "func", None) is _paused,
        lasts=500.0,
    )
    # Without stubborn faults, as in the histories of `jobs_scenarios.py`.
    singles = [each for each in story_of(scenario).singles if not is_stubborn(each.fault)]
    planned = chance.sample(singles, min(len(singles), chance.choice((0, 1, 1))))
    return story_of(scenario, tuple(planned))


def _random_job(name: str, chance: random.Random, first: float, failover: bool) -> RetryJob:
    period, count = chance.choice((10.0, 15.0, 20.0, 50.0)), chance.choice((1, 1, 2, 3))
    windows = tuple(first + period * n for n in range(count))
    return RetryJob(
        name,
        windows,
        period=period,
        takes=chance.choice((0.1, 1.0, 4.0, 7.0)),
        failover=failover,
        one_off=count == 1 and chance.random() < 0.7,
        options=LockOptions(
            retries=chance.choice((0, 1, 2, 3)),
            retry_delay=chance.choice((0.0, 1.0, 3.0, 8.0, 30.0)),
            retry_backoff=chance.choice((1.0, 2.0)),
        ),
        fails={window: chance.choice((0, 1, 2, 9)) for window in windows},
    )


def _random_act(chance: random.Random, first: float) -> Act:
    at = first + chance.choice((1.5, 3.0, 6.0, 7.0, 12.0))
    paused = partial(_paused, at=at, seconds=chance.choice((5.0, 30.0)))
    acts: list[Act] = [submit_all, partial(_killed, at=at), partial(_stopped, at=at), paused]
    return chance.choice(acts)
