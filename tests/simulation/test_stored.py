"""Stored jobs on a virtual clock: the real reader, queue and client, and faults at every place."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from psycopg.types.range import Range

from apscheduler_tasklock.jobstore.due import DueJobs
from tests.simulation.faults import FAULTS, STEPS, Planned
from tests.simulation.jobs_scenarios import JobsScenario
from tests.simulation.jobs_side import Job
from tests.simulation.scenarios import check
from tests.simulation.stored import (
    SCENARIOS,
    StoredLocks,
    StoredStory,
    simulating_store,
    stored_jobs,
)
from tests.simulation.world import BEGIN, START, replaced

pytestmark = pytest.mark.usefixtures("simulation", "store")

SEED = 33
SINGLES_IN_SHORT = 10
# Faults at looks, of which there are many, are injected around the first run time only.
LOOKS = ("read", "read_due", "dead_runs", "sweep")
FIRST_LOOKS = (9.9, 10.1)


@pytest.fixture
def store() -> Iterator[None]:
    with simulating_store():
        yield


def singles(story: StoredStory) -> list[tuple[Planned, ...]]:
    """Return each fault at each statement and step of a story of which nothing went wrong."""
    since, until = FIRST_LOOKS
    return [
        (Planned(place.number, fault),)
        for place in story.plan.places
        if place.group not in LOOKS or (place.group == "read_due" and since < place.at < until)
        for fault in (STEPS if place.carry_out is None else FAULTS)
    ]


def went_wrong(scenario: JobsScenario, planned: Sequence[tuple[Planned, ...]]) -> list[StoredStory]:
    return [story for each in planned if (story := StoredStory(scenario, each)).found]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
class TestScenarios:
    def test_each_run_time_is_run_once_without_a_fault(self, scenario: JobsScenario) -> None:
        story = StoredStory(scenario)
        check([story] if story.found else [], scenario.name)
        ran = sorted((run.task, run.due) for run in story.ledger.runs)
        assert ran == sorted((job.name, at) for job in scenario.jobs for at in job.windows)

    def test_nothing_is_lost_or_doubled_with_a_fault(self, scenario: JobsScenario) -> None:
        planned = singles(StoredStory(scenario))
        chance = random.Random(SEED)  # noqa: S311  # no secret
        check(went_wrong(scenario, chance.sample(planned, SINGLES_IN_SHORT)), "stories")

    @pytest.mark.simulate
    @pytest.mark.timeout(7200)
    def test_nothing_is_lost_or_doubled_with_each_fault(self, scenario: JobsScenario) -> None:
        check(went_wrong(scenario, singles(StoredStory(scenario))), "stories")

    @pytest.mark.parametrize("before", [0.0, 0.0007])
    def test_a_users_change_between_read_and_claim_holds(
        self, scenario: JobsScenario, before: float
    ) -> None:
        """Such as a pause: nothing is claimed after it. A rename loses nothing."""
        claims = [each.at for each in StoredStory(scenario).plan.places if each.group == "claim"]
        [name, *_] = [job.name for job in scenario.jobs]
        for at in claims[::6]:
            renamed = StoredStory(replace(scenario, act=partial(_changed, scenario, at + before)))
            check([renamed] if renamed.found else [], "renames")
            pause = partial(_changed, scenario, at + before, run_at=None)
            paused = StoredStory(replace(scenario, act=pause))
            changed_at = BEGIN + at + before
            runs = [run for run in paused.ledger.runs if run.task == name]
            late = [str(run) for run in runs if run.asked > changed_at]
            assert not late, f"{late} at {at}"


def test_of_the_run_times_that_came_while_the_job_ran_the_last_one_is_run() -> None:
    job = Job("long", (10.0, 20.0, 30.0, 40.0), takes=25.0, failover=True)
    story = StoredStory(JobsScenario("long", [job], stored_jobs))
    check([story] if story.found else [], "stories")
    assert [run.due for run in story.ledger.runs] == [10.0, 30.0, 40.0]


def test_of_the_run_times_in_a_run_none_is_after_the_end_date() -> None:
    job = Job("ends", (10.0, 20.0), takes=35.0, failover=True)
    story = StoredStory(JobsScenario("ends", [job], stored_jobs, replicas=1))
    assert [run.due for run in story.ledger.runs] == [10.0, 20.0]


def _late(story: Any) -> None:
    """Let the readers begin at 25 s, as the schedulers of a fleet that was away."""
    stored_jobs(story, reads_from=25.0)


@pytest.mark.parametrize(
    ("grace", "windows"),
    [(None, [10.0, 20.0, 30.0]), (16.0, [10.0, 20.0, 30.0]), (6.0, [20.0, 30.0]), (1.0, [30.0])],
)
def test_what_came_due_while_no_scheduler_ran_is_run_within_its_grace_time(
    grace: float | None, windows: list[float]
) -> None:
    job = Job("late", (10.0, 20.0, 30.0), takes=0.1, grace=grace)
    story = StoredStory(JobsScenario("late", [job], _late, replicas=1))
    assert [run.due for run in story.ledger.runs] == windows


def _paused(reads_from: float, story: Any) -> None:
    stored_jobs(story, reads_from)
    since, until = (START + timedelta(seconds=at) for at in (15.0, 55.0))
    story.stored.pauses.append(Range(since, until))


@pytest.mark.parametrize("reads_from", [2.0, 40.0])
@pytest.mark.parametrize(
    ("due_at", "windows"),
    [
        ((20.0, 30.0, 60.0), [60.0]),  # recurring ones are skipped in a pause
        ((20.0,), [20.0]),  # a one-off is run when it ends, however short its grace time is
    ],
)
def test_what_came_due_in_a_pause(
    due_at: tuple[float, ...], windows: list[float], reads_from: float
) -> None:
    job = Job("pauses", due_at, takes=0.1, grace=1.0)
    act = partial(_paused, reads_from)
    story = StoredStory(JobsScenario("paused", [job], act, replicas=1))
    assert [run.due for run in story.ledger.runs] == windows
    assert story.ledger.runs[-1].begun - BEGIN >= 55.0


def _scheduler_paused(story: Any) -> None:
    """Pause the scheduler while a job that was read waits for the only worker."""
    stored_jobs(story)
    [replica] = story.replicas
    for at, is_paused in ((15.0, True), (60.0, False)):
        story.world.call_at(BEGIN + at, partial(setattr, replica, "is_paused", is_paused))


def test_a_job_that_was_read_before_its_scheduler_was_paused_is_not_run_in_the_pause() -> None:
    jobs = [Job(name, (10.0,), takes=20.0) for name in "ij"]
    scenario = JobsScenario("paused scheduler", jobs, _scheduler_paused, replicas=1, workers=1)
    first, second = StoredStory(scenario).ledger.runs
    assert first.begun - BEGIN < 15.0
    assert 60.0 <= second.begun - BEGIN < 62.0


class TestLooks:
    """When a replica looks for due jobs."""

    @pytest.mark.parametrize(("replicas", "looks"), [(1, 100), (20, 100), (400, 5)])
    def test_a_fleet_makes_at_most_20_ordinary_looks_a_second(
        self, replicas: int, looks: int
    ) -> None:
        """So each replica makes one in a second, or in as many as 20 looks of each take."""
        job = Job("far", (110.0,))
        act = partial(_in_a_fleet, replicas)
        story = StoredStory(JobsScenario("alone", [job], act, replicas=1))
        looked = [place.at for place in story.plan.places if place.group == "read_due"]
        # The first looks are left out, because the fleet's size is known after them.
        assert sum(5 <= at < 105 for at in looked) == pytest.approx(looks, abs=1)

    @pytest.mark.parametrize(("replicas", "at_once"), [(1, 40), (3, 40), (60, 2), (400, 0)])
    def test_of_a_fleet_some_three_look_for_a_due_job_at_once(
        self, replicas: int, at_once: int
    ) -> None:
        """The others look later, unless the job has run here the last time."""
        due_at = [10.0 + 2.5 * n for n in range(40)]
        jobs = [Job(f"{n:02}", (at,), takes=0.01) for n, at in enumerate(due_at)]
        act = partial(_in_a_fleet, replicas)
        story = StoredStory(JobsScenario("alone", jobs, act, replicas=1, workers=None))
        looked = [place.at for place in story.plan.places if place.group == "read_due"]
        soon = sum(any(at < look < at + 0.1 for look in looked) for at in due_at)
        assert soon == pytest.approx(at_once, abs=4)

    def test_a_refused_job_is_read_again_after_50_ms_and_then_more_and_more_rarely(self) -> None:
        """Up to once a second, so that it is run soon after the reason is gone."""
        attempts: list[float] = []
        act = partial(_refusing, attempts, 20.0)
        story = StoredStory(JobsScenario("refused", [Job("r", (10.0,))], act, replicas=1))
        check([story] if story.found else [], "stories")
        pauses = [after - before for before, after in pairwise(attempts)]
        assert pauses[:5] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8], abs=0.02)
        assert pauses[5:] == pytest.approx([1.0] * len(pauses[5:]), abs=0.02)
        [run] = story.ledger.runs
        assert 20.0 <= run.begun - BEGIN < 21.1

    def test_a_job_that_is_changed_again_and_again_runs_right_after_the_last_change(self) -> None:
        """A claim that finds a changed job is no refusal: the job is read again at once."""
        changed: list[float] = []
        act = partial(_changing, changed, 6)
        story = StoredStory(JobsScenario("changed", [Job("c", (10.0,))], act, replicas=1))
        check([story] if story.found else [], "stories")
        assert len(changed) == 6
        [run] = story.ledger.runs
        assert run.begun - changed[-1] < 0.1


def _in_a_fleet(replicas: int, story: Any) -> None:
    """Let a replica know of so many live replicas."""
    stored_jobs(story)
    [replica] = story.replicas
    story.world.call_at(
        BEGIN + 1.0, lambda: setattr(replica.user.outage, "live_replicas", replicas)
    )


def _refusing(attempts: list[float], until: float, story: Any) -> None:
    """Let a replica's executor take no job until a time, as if no thread could be started."""
    stored_jobs(story)
    [replica] = story.replicas
    submit = replica.submit_stored

    def submit_stored(*arguments: Any) -> None:
        attempts.append(story.world.now)
        if story.world.now < BEGIN + until:
            raise RuntimeError("can't start new thread")
        submit(*arguments)

    replica.submit_stored = submit_stored


def _changing(changed: list[float], times: int, story: Any) -> None:
    """Let a user change a job after each of the first reads, and all replicas hear of it."""
    stored_jobs(story)
    [replica] = story.replicas
    submit = replica.submit_stored

    def submit_stored(*arguments: Any) -> None:
        submit(*arguments)
        if len(changed) < times:
            changed.append(story.world.now)
            story.database.rows.change("c")
            replica.reader.wake()

    replica.submit_stored = submit_stored


def _changed(scenario: JobsScenario, at: float, story: Any, **changes: Any) -> None:
    """Let a user change the first of the jobs then."""
    scenario.act(story)
    rows: StoredLocks = story.database.rows
    [name, *_] = rows.jobs
    story.world.call_at(BEGIN + at, lambda: rows.change(name, **changes))


def _nothing(*_: object) -> None:
    pass


def test_a_run_that_is_over_and_not_noted_is_found() -> None:
    with replaced((DueJobs, "note_over", _nothing)):
        assert StoredStory(SCENARIOS[0]).found


def test_rows_of_jobs_move_with_the_claim() -> None:
    rows: Any = StoredStory(SCENARIOS[0]).database.rows
    job = rows.jobs["i"]
    assert (job.run_at, job.last) == (None, START + timedelta(seconds=30))
