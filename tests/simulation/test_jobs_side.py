"""Replicas with both sides on a virtual clock: bursts, overloads, histories, mistakes.

The README beside this module says what these tests find, and what they cannot find.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.simulation import faults
from tests.simulation.faults import Planned
from tests.simulation.jobs_scenarios import (
    BURSTS,
    SCENARIOS,
    JobsScenario,
    JobsStory,
    history,
    late_manual_runs,
    overload,
    submit_all,
)
from tests.simulation.jobs_side import Job
from tests.simulation.scenarios import check
from tests.simulation.world import BEGIN, GoesRoundError, replaced
from tests.support.queue_mutations import QUEUE_MUTATIONS

pytestmark = pytest.mark.usefixtures("simulation")

# Limits the seeds in `make test`.
SEEDS_IN_SHORT = 60
# The seeds in `make simulate`, for a share of 1 of all pairs of faults.
SEEDS = 20_000
# The seconds that an answer takes in a stall of the database.
STALLS = (0.3, 1.5)
LATENCIES = {"overload": 0.0, "stall": STALLS[1]}


@pytest.mark.parametrize("scenario", BURSTS, ids=lambda scenario: scenario.name)
def test_in_a_burst_nothing_is_lost_and_nothing_missed(scenario: JobsScenario) -> None:
    story = JobsStory(scenario)
    assert not story.found, story.found
    assert Counter(run.task for run in story.ledger.runs) == Counter(
        job.name for job in scenario.jobs
    )


class TestMissed:
    """Misfires of a single replica."""

    def test_an_overload_misses_what_plain_apscheduler_misses(self) -> None:
        self.check_overloads(range(SEEDS_IN_SHORT))

    def test_a_stall_of_the_database_misses_nothing_before_plain_apscheduler_does(self) -> None:
        self.check_stalls(range(SEEDS_IN_SHORT))

    @pytest.mark.simulate
    @pytest.mark.timeout(7200)
    def test_many_overloads_and_stalls(self, request: pytest.FixtureRequest) -> None:
        seeds = range(int(SEEDS * request.config.getoption("--pairs")))
        self.check_overloads(seeds)
        self.check_stalls(seeds)

    def check_overloads(self, seeds: range) -> None:
        with replaced((faults, "LATENCY", 0.0)):
            stories = [JobsStory(overload(seed)) for seed in seeds]
        assert any("missed" in run.ends for story in stories for run in story.all_runs)
        check([story for story in stories if story.found], f"{len(stories)} overloads")

    def check_stalls(self, seeds: range) -> None:
        wrong = []
        for seed in seeds:
            stalled = replace(overload(seed), misses_exactly=False)
            with replaced((faults, "LATENCY", STALLS[seed % len(STALLS)])):
                story = JobsStory(stalled)
            if story.found:
                wrong.append(story)
        check(wrong, f"{len(seeds)} stalls")


class TestHistories:
    def test_what_is_promised_is_kept_in_random_histories(self) -> None:
        self.check_histories(range(SEEDS_IN_SHORT))

    def test_a_history_goes_the_same_way_again(self) -> None:
        assert str(history(7)) == str(history(7))

    @pytest.mark.simulate
    @pytest.mark.timeout(7200)
    def test_many_histories(self, request: pytest.FixtureRequest) -> None:
        self.check_histories(range(int(SEEDS * request.config.getoption("--pairs"))))

    def check_histories(self, seeds: range) -> None:
        wrong = [story for seed in seeds if (story := history(seed)).found]
        check(wrong, f"{len(seeds)} histories")


def _locked_for_long(story: JobsStory) -> None:
    submit_all(story)
    story.database.locked_until["l"] = BEGIN + 15.0


def test_a_run_whose_row_was_locked_for_longer_than_its_grace_time_is_no_misfire() -> None:
    """The only worker was free for it in time, and got another run meanwhile."""
    jobs = [Job("l", (10.0,), grace=1.0), Job("other", (10.5,), takes=6.0)]
    scenario = JobsScenario(
        "locked for long", jobs, _locked_for_long, replicas=1, workers=1, known=("l",)
    )
    story = JobsStory(scenario)
    check([story] if story.found else [], "stories")
    assert [run.task for run in story.ledger.runs] == ["other", "l"]


def _released_late(story: JobsStory) -> None:
    """Let one replica run a window, and its release arrive after the next run time of another."""
    first, second = story.runners
    [job] = story.jobs_scenario.jobs
    first.submit_at(10.0, job, [10.0])
    second.submit_at(20.2, job, [20.0])
    story.world.call_at(BEGIN + 11.0, lambda: setattr(first.process, "cut_until", BEGIN + 25.0))


def test_a_run_time_is_run_although_the_run_before_it_was_released_later() -> None:
    """That run had ended before. So plain APScheduler would not have skipped the run time."""
    job = Job("r", (10.0, 20.0), takes=2.0, lease=60.0)
    story = JobsStory(JobsScenario("released late", [job], _released_late))
    check([story] if story.found else [], "stories")
    first, second = story.ledger.runs
    assert (first.due, second.due) == (10.0, 20.0)
    assert second.begun - BEGIN > 25.0


@pytest.mark.simulate
@pytest.mark.parametrize("mistake", QUEUE_MUTATIONS)
def test_a_mistake_in_the_queue_is_found(mistake: str) -> None:
    where, mutated = QUEUE_MUTATIONS[mistake]
    stories = list(_plans(where))
    with mutated():
        assert any(_goes_wrong(scenario, planned) for scenario, planned in stories)


def _plans(where: str) -> Iterator[tuple[JobsScenario, tuple[Planned, ...]]]:
    """Yield the stories in which a mistake is looked for: without a fault, then with each."""
    if where in LATENCIES:
        for seed in range(SEEDS_IN_SHORT):
            yield replace(overload(seed), misses_exactly=where == "overload"), ()
        return
    [scenario] = [each for each in (*SCENARIOS, *BURSTS) if each.name == where]
    yield scenario, ()
    for planned in JobsStory(scenario).singles:
        yield scenario, (planned,)


def _goes_wrong(scenario: JobsScenario, planned: tuple[Planned, ...]) -> bool:
    kind = "" if not scenario.name.startswith("overload") else "stall"
    if scenario.misses_exactly:
        kind = "overload"
    try:
        with replaced((faults, "LATENCY", LATENCIES.get(kind, faults.LATENCY))):
            story = JobsStory(scenario, planned)
        return bool(story.found or (not planned and late_manual_runs(story)))
    except GoesRoundError:
        return True
