"""Fleets in leader mode, with both sides on a virtual clock.

Each replica has the real ``Leadership``, and the real ``FollowerRun`` for each run that it defers.
The code around them is a short form of the library's looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._runs.deferred_runs import LastRun
from apscheduler_tasklock._runs.leadership import Leadership
from apscheduler_tasklock._runs.run import RunKind
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.lock import HeldLock
from tests.simulation.faults import Planned, is_stubborn
from tests.simulation.jobs_scenarios import JobsScenario, JobsStory, jobs, submit_all
from tests.simulation.jobs_side import Job, JobsReplica
from tests.simulation.ledger import Wanted
from tests.simulation.scenarios import POLL_INTERVAL, kill_at
from tests.simulation.world import BEGIN, Process
from tests.support.waist import TaskRow

LEADER_LEASE = 15.0
HEAD_START = Timings().head_start
# The seconds in which a look and a claim are done, if nothing goes wrong.
SLACK = 0.5


@dataclass(frozen=True)
class LeaderScenario(JobsScenario):
    """A scenario of a fleet in leader mode.

    :ivar joins: when a replica starts, by its name, in seconds from the beginning. The others start
        at the beginning, the first of them before the others.
    :ivar most_asked: how many claims of run times are sent at most, by all replicas
    :ivar without_a_leader: for how many seconds nobody leads at most
    :ivar is_late: whether run times may be late without a fault
    """

    replicas: int = 3
    most_asked: float = inf
    without_a_leader: float = LEADER_LEASE + POLL_INTERVAL + SLACK
    is_late: bool = False
    joins: Mapping[str, float] = field(default_factory=dict)

    @property
    def period(self) -> float:
        """The shortest period of the jobs."""
        return min(job.period for job in self.jobs)


@dataclass
class LeaderStory(JobsStory):
    """One execution of a scenario in leader mode.

    :ivar led: when a replica has taken or renewed the leadership: the time, and its name
    :ivar asked: when a replica has asked for a scheduled run time: the time, and its name
    """

    led: list[tuple[float, str]] = field(default_factory=list)
    asked: list[tuple[float, str]] = field(default_factory=list)

    def _make_replica(self, process: Process, poll_from: float) -> LeaderReplica:
        assert isinstance(self.scenario, LeaderScenario)
        poll_from = self.scenario.joins.get(process.name, poll_from)
        return LeaderReplica(self, process, poll_from, self.scenario.workers)

    @property
    def singles(self) -> list[Planned]:
        """Every fault at every place, but for those after which a plain fleet loses windows, too.

        Those are releases that cannot arrive for long, and what takes longer than a period.
        """
        assert isinstance(self.scenario, LeaderScenario)
        is_often = self.scenario.period < 3.0
        return [
            each
            for each in super().singles
            if not is_stubborn(each.fault) and (not is_often or each.fault.startswith("kill"))
        ]

    @property
    def _wanted(self) -> Sequence[Wanted]:
        """The windows that must be run. Of run times that are merged only the last one is run."""
        return [each for each in super()._wanted if not self._is_merged(each)]

    def _is_merged(self, wanted: Wanted) -> bool:
        [job] = [each for each in self.jobs_scenario.jobs if each.name == wanted.task]
        return job.coalesce and any(
            run.task == job.name and run.due > wanted.window and run.ended is not None
            for run in self.ledger.runs
        )


class LeaderReplica(JobsReplica):
    """A replica in leader mode."""

    leadership: Leadership

    def __init__(self, story: Any, process: Process, poll_from: float, workers: int | None) -> None:
        super().__init__(story, process, inf, workers)
        self._wakes: list[Callable[[], None]] = []
        self.world.start(process, self._look_often, poll_from, daemon=True)

    def _make_leadership(self) -> Leadership:
        return Leadership(self._client, "", LEADER_LEASE, lambda: POLL_INTERVAL)

    def note_asked(self, run: Any) -> None:
        super().note_asked(run)
        if run.kind is RunKind.SCHEDULE:
            self._leader_story.asked.append((self.world.now - BEGIN, self.process.name))

    @property
    def _leader_story(self) -> LeaderStory:
        assert isinstance(self._story, LeaderStory)
        return self._story

    def _stop(self, *, closes: bool) -> None:
        self.leadership.close()
        super()._stop(closes=closes)

    # ---- the look at the rows --------------------------------------------------------------------

    def wake_look(self) -> None:
        """Bring the next look forward."""
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()

    def _note_ended(self, run: Any, held: HeldLock) -> None:
        if run.task_name in self._deferred_runs.task_names:
            self.wake_look()

    def _look_often(self) -> None:
        while self.stopped_at == inf:
            try:
                self._look_at_rows()
            except TaskLockDatabaseError as error:
                self.world.note(self.process.name, f"   look: {error}")
                for name in self._deferred_runs.task_names:
                    self._decide(name, LastRun(0, finished=False, dead=False, deaths=0))
            except TaskLockError as error:
                self.world.note(self.process.name, f"   look: {error}")
            self.world.wait(self.world.now + POLL_INTERVAL, self._wakes.append)

    def _look_at_rows(self) -> None:
        tasks = {task.name: task for task in self._story.scenario.tasks if task.windows}
        watched = self._deferred_runs.task_names
        self.looked_from = self.world.now
        leader = self.leadership.row
        states = self._client.ask(self._client.reading([*tasks, leader], [*watched, leader]))
        rows = [state for state in states if state.task_name == leader]
        self._lead(rows[0] if rows else None)
        of_tasks = [state for state in states if state.task_name != leader]
        for state in of_tasks:
            self._act_on(state, tasks[state.task_name])
        for name in watched - {state.task_name for state in of_tasks}:
            gone = LastRun(0, finished=False, dead=True, deaths=1, as_of=self.looked_from)
            self._decide(name, gone)

    def _lead(self, row: TaskRow | None) -> None:
        try:
            self._client.ask_all(self.leadership.take_or_renew(row))
        except TaskLockDatabaseError:
            raise
        except TaskLockError as error:
            self.world.note(self.process.name, f"   leads: {error}")
        if self.leadership.leads:
            self._leader_story.led.append((self.world.now - BEGIN, self.process.name))

    def _decide(self, name: str, last: LastRun) -> None:
        for job in self._deferred_runs.jobs_of(name):
            self._deferred_runs.decide(name, job, last)


# ---- what must hold in a story without a fault ---------------------------------------------------


def unlike_a_led_fleet(story: LeaderStory) -> list[str]:
    """Return what is wrong with a story without a fault, beside what is found in each story."""
    scenario = story.scenario
    assert isinstance(scenario, LeaderScenario)
    found = [] if scenario.is_late else _late(story)
    if len(story.asked) > scenario.most_asked:
        found.append(f"{len(story.asked)} claims, of at most {scenario.most_asked:g}")
    last = max(window for job in scenario.jobs for window in job.windows)
    found += [
        f"nobody led from {since:.1f} to {until:.1f}"
        for (since, _), (until, _) in pairwise([(0.0, ""), *story.led, (last, "")])
        if until - since > scenario.without_a_leader
    ]
    return found


def _late(story: LeaderStory) -> list[str]:
    """Return the run times that were not begun within a head start and a look."""
    limit = HEAD_START + POLL_INTERVAL + SLACK
    found = []
    for job in story.jobs_scenario.jobs:
        for window in job.windows:
            begun = [
                run.begun - BEGIN
                for run in story.ledger.runs
                if run.task == job.name
                and (run.due == window or (job.coalesce and run.due > window))
            ]
            if min(begun, default=inf) > window + limit:
                found.append(f"late: {job.name} {window:g}, begun at {begun[:1]}")
    return found


# ---- the scenarios -------------------------------------------------------------------------------


def _killed(story: Any, at: float) -> None:
    submit_all(story)
    kill_at(story, at)


def _stopped(story: Any, at: float) -> None:
    submit_all(story)
    story.replicas[0].stop_at(at)


def _not_on_the_leader(story: Any) -> None:
    submit_all(story, only="BC")


def _backlogs(story: Any) -> None:
    for job in story.scenario.jobs:
        for n, replica in enumerate(story.replicas):
            replica.submit_at(35.0 + 1.3 * n, job, job.windows)


def _paused(story: Any, at: float, seconds: float) -> None:
    """Pause the leader. What came due meanwhile comes as a backlog, before its look is answered."""
    process = story.replicas[0].process
    for n, replica in enumerate(story.replicas):
        for job in story.scenario.jobs:
            missed = [each for each in job.windows if n == 0 and at <= each < at + seconds]
            for window in job.windows:
                if window not in missed:
                    replica.submit_at(window + 0.3 * n, job, [window])
            if missed:
                replica.submit_at(at + seconds + 0.001, job, missed)

    def pause() -> None:
        process.pause(story.world.now, seconds)
        story.world.note(process.name, f"   is stopped for {seconds:g} s")

    story.world.call_at(BEGIN + at, pause)


def _joined(story: Any, act: Callable[[Any], object]) -> None:
    """Let each replica have the run times from its start on."""
    joins = story.scenario.joins
    for n, replica in enumerate(story.replicas):
        for job in story.scenario.jobs:
            for window in job.windows:
                if window > joins.get(replica.process.name, 0.0):
                    replica.submit_at(window + 0.05 * n, job, [window])
    act(story)


def every_second(since: int, until: int, **more: Any) -> list[Any]:
    """Return a job that is due each second."""
    windows = tuple(float(at) for at in range(since, until))
    return [Job("s", windows, period=1.0, takes=0.1, **more)]


SCENARIOS = (
    LeaderScenario(
        "a leader",
        jobs("pqr", 10.0, 20.0, takes=1.0),
        submit_all,
        workers=3,
        looks=(9.0, 18.0),
        most_asked=6,
    ),
    LeaderScenario(
        "the leader is killed",
        jobs("pq", 10.0, 13.0, 20.0, 40.0, takes=1.0, period=3.0, failover=True),
        partial(_killed, at=12.0),
        looks=(11.0, 35.0),
    ),
    LeaderScenario(
        "the leader stops",
        jobs("pq", 10.0, 13.0, 20.0, 30.0, takes=1.0, period=3.0),
        partial(_stopped, at=12.0),
        looks=(10.0, 20.0),
        without_a_leader=2 * POLL_INTERVAL + SLACK,
    ),
    LeaderScenario(
        "a replica stops while it takes the leadership",
        jobs("pq", 10.0, 20.0, takes=1.0),
        partial(_stopped, at=1.0025),
        without_a_leader=LEADER_LEASE,
    ),
    LeaderScenario(
        "the leader stops in a run",
        jobs("pq", 10.0, 20.0, takes=4.0),
        partial(_stopped, at=12.0),
        workers=1,
    ),
    LeaderScenario(
        "the leader is killed in a run",
        [Job("f", (10.0, 40.0), takes=6.0, failover=True), *jobs("p", 20.0, 30.0)],
        partial(_killed, at=13.0),
        looks=(24.0, 38.0),
    ),
    LeaderScenario(
        "the leader is paused",
        jobs("pq", 10.0, 20.0, 35.0, 50.0, takes=1.0, failover=True),
        partial(_paused, at=12.0, seconds=30.0),
        is_paused=True,
        most_asked=10,
    ),
    LeaderScenario(
        "a full leader", [*jobs("p", 10.0, takes=14.0), *jobs("qr", 11.0)], submit_all, workers=1
    ),
    LeaderScenario(
        "a job that the leader does not have", jobs("pq", 10.0, 20.0), _not_on_the_leader
    ),
    LeaderScenario(
        "every second, merged, and the leader does not have it",
        every_second(10, 30, coalesce=True),
        _not_on_the_leader,
    ),
    LeaderScenario("backlogs", jobs("b", 10.0, 20.0, 30.0, failover=True), _backlogs, is_late=True),
    LeaderScenario(
        "every second, and the leader is killed",
        every_second(10, 36),
        partial(_joined, act=partial(kill_at, at=14.5)),
        replicas=2,
        most_asked=26,
    ),
    LeaderScenario(
        "every second, and a replica joins after the leader's death",
        every_second(10, 36),
        partial(_joined, act=partial(kill_at, at=14.5)),
        joins={"C": 16.4},
    ),
    LeaderScenario(
        "every second, and a replica joins after the leader's stop",
        every_second(10, 36),
        partial(_joined, act=lambda story: story.replicas[0].stop_at(14.5)),
        joins={"C": 15.4},
    ),
)
