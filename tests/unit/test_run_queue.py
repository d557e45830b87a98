"""The queue decides which runs are asked for, given to a worker, missed, deferred, withdrawn."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apscheduler_tasklock._runs.deferred_runs import Outlook
from apscheduler_tasklock._runs.queue import (
    MOST_ASKED,
    PATIENCE,
    AllBusy,
    RunQueue,
    ToDo,
)
from apscheduler_tasklock._runs.run import QueuedRun, RunKind, State, Token
from tests.support.waist import ClaimOutcome, RunOfTest, step_of

GRANTED, REFUSED, DEFERRED = ClaimOutcome.GRANTED, ClaimOutcome.REFUSED, ClaimOutcome.DEFERRED
ASKED_AGAIN = Outlook.ASKED_AGAIN


def run_of(
    name: str = "a", came: float = 0.0, kind: RunKind = RunKind.SCHEDULE, **more: Any
) -> QueuedRun:
    return RunOfTest(kind, name, (name, "default"), due_at=came, came=came, **more)


def work_of(run: QueuedRun) -> Any:
    assert isinstance(run, RunOfTest)
    return run.work


def runs(count: int, **more: Any) -> list[QueuedRun]:
    return [run_of(f"task {number:03}", **more) for number in range(count)]


def backlog_of(count: int, name: str = "a", **more: Any) -> list[QueuedRun]:
    backlog = [run_of(name, **more) for _ in range(count)]
    for run, following in pairwise(backlog):
        run.following = following
    return backlog


class Steps:
    """A queue with so many workers.

    :param in_a_fleet: whether a claim was refused, because other replicas claim the same runs
    """

    def __init__(self, workers: int | None = 10, *, in_a_fleet: bool = False) -> None:
        self.queue = RunQueue(lambda pause: pause)
        self.workers = workers
        self.now = 100.0
        if in_a_fleet:
            self.answer(self.step(came=[run_of("of another replica")]), lambda _run: REFUSED)

    def step(self, **inputs: Any) -> ToDo:
        return step_of(self.queue, self.now, self.workers, **inputs)

    def answer(self, step: ToDo, outcome: Callable[[QueuedRun], ClaimOutcome]) -> ToDo:
        answers = [(run, outcome(run)) for ask in step.asks for run in ask.runs]
        return self.step(answered=answers)

    def grant(self, step: ToDo) -> ToDo:
        """Grant as many as may be."""
        granted = {run for ask in step.asks for run in ask.runs[: ask.most]}
        return self.answer(step, lambda run: GRANTED if run in granted else ClaimOutcome.BEYOND)

    def begin(self, came: Sequence[QueuedRun]) -> ToDo:
        """Let these be granted and begin; return what was done after they came."""
        step = self.grant(self.step(came=came))
        self.step(begun=step.given)
        return step

    def free(self, *over: QueuedRun, took: float = 0.0) -> ToDo:
        return self.step(freed=[(run, took) for run in over])


def names(found: Sequence[QueuedRun]) -> list[str]:
    return [run.task_name for run in found]


def asked(step: ToDo) -> list[tuple[list[str], int | None]]:
    return [(names(ask.runs), ask.most) for ask in step.asks]


class TestAsking:
    def test_a_run_is_claimed_before_it_is_given(self) -> None:
        steps, run = Steps(), run_of()
        step = steps.step(came=[run])
        assert (asked(step), step.given) == ([(["a"], 1)], [])
        step = steps.answer(step, lambda _run: GRANTED)
        assert (step.asks, step.given) == ([], [run])
        assert run.state is State.GIVEN

    def test_a_run_that_was_granted_right_before_a_stop_is_withdrawn(self) -> None:
        steps, run = Steps(), run_of()
        steps.step(came=[run])
        steps.queue.answered(run, GRANTED, steps.now)
        step = steps.step(stopped=True)
        assert (step.given, step.withdrawn) == ([], [run])

    def test_a_refused_run_never_takes_a_worker(self) -> None:
        steps, run = Steps(), run_of()
        step = steps.answer(steps.step(came=[run]), lambda _run: REFUSED)
        assert (step.given, step.refused) == ([], [(run, REFUSED)])
        assert steps.queue.is_idle

    def test_one_ask_is_under_way_at_a_time(self) -> None:
        steps = Steps()
        first = steps.step(came=[run_of("a")])
        assert steps.step(came=[run_of("b")]).asks == []
        assert asked(steps.answer(first, lambda _run: REFUSED)) == [(["b"], 1)]

    def test_as_many_are_asked_for_as_workers_are_free_while_none_is_refused(self) -> None:
        steps = Steps(workers=3)
        step = steps.begin(runs(20))
        assert names(step.given) == names(runs(3))
        assert asked(steps.free(*step.given[:2])) == [(names(runs(5)[3:]), 2)]

    def test_in_a_fleet_more_are_asked_for_than_there_are_workers_and_no_more_are_granted(
        self,
    ) -> None:
        steps = Steps(workers=2, in_a_fleet=True)
        step = steps.step(came=runs(20))
        assert asked(step) == [(names(runs(16)), 2)]
        step = steps.grant(step)
        assert names(step.given) == names(runs(2))
        assert step.asks == []

    def test_twice_as_many_are_asked_for_while_all_are_refused(self) -> None:
        steps = Steps(workers=1)
        step = steps.step(came=runs(2000))
        sizes = []
        while step.asks:
            sizes.append(len(step.asks[0].runs))
            step = steps.answer(step, lambda _run: REFUSED)
        assert sizes[:7] == [1, 16, 32, 64, 128, 256, 256]
        assert max(sizes) == MOST_ASKED
        assert sum(sizes) == 2000

    def test_after_a_grant_fewer_are_asked_for_again(self) -> None:
        steps = Steps(workers=1)
        step = steps.answer(steps.step(came=runs(200)), lambda _run: REFUSED)
        assert len(step.asks[0].runs) == 16
        step = steps.grant(step)
        steps.step(begun=step.given)
        assert len(steps.free(*step.given).asks[0].runs) == 1

    def test_a_later_run_time_does_not_overtake_its_jobs_backlog(self) -> None:
        steps, (first, second) = Steps(workers=3), backlog_of(2)
        steps.begin([first])
        later = run_of(first.task_name, steps.now)
        assert steps.step(came=[later]).asks == []
        assert steps.free(first).asks[0].runs == [second]

    def test_instances_of_a_job_without_a_lock_go_on_beside_its_backlog(self) -> None:
        steps, (first, second) = Steps(workers=3), backlog_of(2)
        first.claims = second.claims = False
        assert steps.step(came=[first]).given == [first]
        steps.step(begun=[first])
        later = run_of(first.task_name, steps.now, claims=False)
        assert steps.step(came=[later]).given == [later]

    def test_what_was_beyond_the_limit_keeps_its_place(self) -> None:
        steps = Steps(workers=1, in_a_fleet=True)
        step = steps.begin([run_of("a", 1.0), run_of("b", 2.0)])
        step = steps.step(came=[run_of("c", 3.0)], freed=[(step.given[0], 0.0)])
        assert asked(step) == [(["b"], 1)]

    def test_what_was_beyond_the_limit_goes_before_those_that_came_with_it_after_it(self) -> None:
        steps = Steps(workers=1, in_a_fleet=True)
        step = steps.begin(runs(20))
        step = steps.free(*step.given)
        assert names(step.asks[0].runs) == ["task 001"]

    def test_a_backlog_goes_before_those_that_came_with_it_after_it(self) -> None:
        # As in a plain pool, whose worker goes through all of it.
        steps = Steps(workers=1)
        first, second = backlog_of(2, "b")
        step = steps.begin([run_of("a"), first, run_of("c")])
        step = steps.grant(steps.free(*step.given))
        steps.step(begun=step.given)
        assert (step.given, steps.free(first).asks[0].runs[0]) == ([first], second)

    def test_a_locked_row_is_asked_for_again_after_a_pause_that_grows(self) -> None:
        steps, run = Steps(), run_of()
        step = steps.step(came=[run])
        pauses = []
        for _ in range(4):
            step = steps.answer(step, lambda _run: ClaimOutcome.LOCKED)
            assert step.asks == []
            pauses.append(round(step.wakes_at - steps.now, 3))
            steps.now = step.wakes_at
            step = steps.step()
            assert asked(step) == [(["a"], 1)]
        assert pauses == [0.01, 0.02, 0.04, 0.08]

    def test_without_a_limit_of_workers_all_manual_runs_are_asked_for_beside_others(self) -> None:
        manual = [run_of(name, kind=RunKind.MANUAL) for name in "ab"]
        step = Steps(workers=None).step(came=[*manual, run_of("c")])
        assert asked(step) == [(["a", "b"], None), (["c"], None)]

    def test_claims_without_an_answer_are_asked_for_again_together_and_first(self) -> None:
        """They may be granted, and the limit of an ask counts those that it has."""
        steps = Steps(workers=4)
        step = steps.step(came=runs(4))
        steps.step(came=[run_of("later", 50.0)])
        unlocked = run_of("unlocked", claims=False)
        step = steps.answer(step, lambda _run: ClaimOutcome.UNANSWERED)
        assert step.asks == []
        assert steps.step(came=[unlocked]).given == [unlocked]
        steps.step(begun=[unlocked])
        steps.now = step.wakes_at
        assert asked(steps.step()) == [([*names(runs(4)), "later"], 3)]

    def test_a_manual_run_gets_no_worker_of_a_run_without_an_answer(self) -> None:
        """Else two workers could have three locks."""
        steps, manual = Steps(workers=2), run_of("manual", kind=RunKind.MANUAL)
        step = steps.answer(steps.step(came=runs(2)), lambda _run: ClaimOutcome.UNANSWERED)
        steps.now = step.wakes_at
        step = steps.step(came=[manual])
        assert asked(step) == [(names(runs(2)), 2)]
        assert asked(steps.answer(step, lambda _run: REFUSED)) == [(["manual"], 1)]

    def test_other_runs_are_asked_for_beside_one_without_an_answer(self) -> None:
        """Else they would wait for workers that are free, until that claim has failed."""
        steps = Steps(workers=4)
        step = steps.answer(steps.step(came=runs(1)), lambda _run: ClaimOutcome.UNANSWERED)
        steps.now = step.wakes_at
        more = [run_of("manual", kind=RunKind.MANUAL), run_of("scheduled", 50.0)]
        step = steps.step(came=more)
        assert asked(step) == [(["manual"], 1), (["task 000", "scheduled"], 2)]

    def test_an_answer_to_one_ask_does_not_end_the_doubt_of_another(self) -> None:
        steps = Steps(workers=2)
        manual, scheduled = run_of("manual", kind=RunKind.MANUAL), run_of("scheduled")
        step = steps.step(came=[manual, scheduled])
        step = steps.answer(step, lambda _run: ClaimOutcome.UNANSWERED)
        steps.now, steps.workers = step.wakes_at, 1
        step = steps.step()
        assert asked(step) == [(["manual"], 1)]
        steps.step(came=[run_of("second", kind=RunKind.MANUAL)])
        assert asked(steps.answer(step, lambda _run: REFUSED)) == [(["scheduled"], 1)]

    def test_a_takeover_without_an_answer_keeps_its_worker_beside_many_without_one(self) -> None:
        steps = Steps(workers=2, in_a_fleet=True)
        step = steps.step(came=[*runs(4), run_of("dead", kind=RunKind.TAKEOVER)])
        first = asked(step)
        assert first == [(["dead"], 1), (names(runs(4)), 1)]
        step = steps.answer(step, lambda _run: ClaimOutcome.UNANSWERED)
        steps.now = step.wakes_at
        assert asked(steps.step()) == first

    def test_all_manual_runs_without_an_answer_are_asked_for_before_any_other_run(self) -> None:
        """Else two workers could have three locks."""
        steps = Steps(workers=2)
        manual = [run_of(name, kind=RunKind.MANUAL) for name in ("first", "second")]
        step = steps.step(came=manual)
        assert asked(step) == [(["first", "second"], 2)]
        step = steps.answer(step, lambda _run: ClaimOutcome.UNANSWERED)
        steps.now = step.wakes_at
        unlocked = run_of("unlocked", claims=False)
        more = [run_of("third", kind=RunKind.MANUAL), run_of("scheduled"), unlocked]
        step = steps.step(came=more)
        assert (asked(step), step.given) == ([(["first", "second"], 2)], [])
        assert asked(steps.answer(step, lambda _run: REFUSED)) == [
            (["third"], 1),
            (["scheduled"], 1),
        ]

    def test_all_runs_without_an_answer_are_asked_for_again_with_fewer_workers(self) -> None:
        """Those that no ask has count toward no limit."""
        steps = Steps(workers=8, in_a_fleet=True)
        step = steps.step(came=runs(32))
        assert asked(step) == [(names(runs(32)), 8)]
        steps.answer(step, lambda _run: ClaimOutcome.UNANSWERED)
        steps.now += 60
        steps.workers = 1
        assert asked(steps.step()) == [(names(runs(32)), 1)]

    def test_manual_runs_without_an_answer_are_asked_for_together_if_workers_have_gone(
        self,
    ) -> None:
        steps = Steps(workers=2)
        step = steps.step(came=[run_of(name, kind=RunKind.MANUAL) for name in "ab"])
        step = steps.answer(step, lambda _run: ClaimOutcome.UNANSWERED)
        steps.now, steps.workers = step.wakes_at, 1
        assert asked(steps.step()) == [(["a", "b"], 2)]

    def test_a_large_ask_without_an_answer_is_as_large_when_it_is_asked_again(self) -> None:
        """Any of its claims may be granted."""
        steps = Steps(workers=1)
        step = steps.step(came=runs(100))
        for _ in range(2):
            step = steps.answer(step, lambda _run: REFUSED)
        large = names(step.asks[0].runs)
        assert len(large) > 16
        step = steps.answer(step, lambda _run: ClaimOutcome.UNANSWERED)
        steps.now = step.wakes_at
        assert names(steps.step().asks[0].runs)[: len(large)] == large

    @pytest.mark.parametrize("is_answered_first", [True, False])
    def test_its_size_is_kept_if_an_ask_of_another_kind_is_answered(
        self, is_answered_first: bool
    ) -> None:
        steps = Steps(workers=8)
        manual = run_of("manual", kind=RunKind.MANUAL)
        step = steps.step(came=runs(200))
        refused = [(run, REFUSED) for run in step.asks[0].runs]
        of_one, of_many = steps.step(answered=refused, came=[manual]).asks
        assert of_one.runs == [manual]
        answers = [[(manual, GRANTED)], [(run, ClaimOutcome.UNANSWERED) for run in of_many.runs]]
        for each in answers if is_answered_first else reversed(answers):
            step = steps.step(answered=each)
        steps.now = step.wakes_at
        [again] = steps.step(begun=[manual]).asks
        assert again.runs[: len(of_many.runs)] == of_many.runs

    def test_asks_without_an_answer_come_at_growing_pauses(self) -> None:
        """Else the last ones before a claim's timeout would come one right after the other."""
        steps, pauses = Steps(), []
        step = steps.step(came=runs(1))
        for _ in range(4):
            step = steps.answer(step, lambda _run: ClaimOutcome.UNANSWERED)
            pauses.append(round(step.wakes_at - steps.now, 3))
            steps.now = step.wakes_at
            step = steps.step()
        assert pauses == [0.01, 0.02, 0.04, 0.08]
        steps.answer(step, lambda _run: REFUSED)
        step = steps.answer(steps.step(came=runs(1)), lambda _run: ClaimOutcome.UNANSWERED)
        assert round(step.wakes_at - steps.now, 3) == 0.01

    def test_a_locked_row_holds_up_nobody_else(self) -> None:
        steps = Steps(workers=1, in_a_fleet=True)
        step = steps.step(came=[run_of("a", 1.0), run_of("b", 2.0)])
        step = steps.answer(
            step, lambda run: ClaimOutcome.LOCKED if run.task_name == "a" else ClaimOutcome.GRANTED
        )
        assert names(step.given) == ["b"]

    def test_no_run_of_a_task_overtakes_one_whose_row_was_locked(self) -> None:
        steps = Steps()
        first, second = run_of("a", 1.0), run_of("a", 2.0)
        step = steps.answer(steps.step(came=[first]), lambda _run: ClaimOutcome.LOCKED)
        assert steps.step(came=[second]).asks == []
        steps.now = step.wakes_at
        assert steps.step().asks[0].runs == [first]

    def test_two_runs_of_one_task_are_not_asked_for_together(self) -> None:
        steps = Steps()
        first, second = run_of("a"), run_of("a")
        step = steps.step(came=[first, second])
        assert step.asks[0].runs == [first]
        assert steps.answer(step, lambda _run: REFUSED).asks[0].runs == [second]

    def test_without_a_limit_of_workers_all_may_be_granted(self) -> None:
        steps = Steps(workers=None)
        step = steps.step(came=runs(300))
        assert [(len(ask.runs), ask.most) for ask in step.asks] == [(MOST_ASKED, None)]
        step = steps.answer(step, lambda _run: GRANTED)
        assert (len(step.given), len(step.asks[0].runs)) == (256, 44)

    def test_nothing_is_asked_for_while_something_given_has_not_begun(self) -> None:
        # Its pool has other work, of the application or of another executor.
        steps = Steps(workers=2)
        step = steps.grant(steps.step(came=[run_of("a")]))
        assert steps.step(came=[run_of("b")]).asks == []
        assert asked(steps.step(begun=step.given)) == [(["b"], 1)]

    def test_nothing_is_asked_for_a_while_after_the_executor_raised(self) -> None:
        steps, run = Steps(), run_of("a")
        steps.grant(steps.step(came=[run]))
        step = steps.step(not_given=[run], came=[run_of("b")])
        assert (run.state, step.asks) == (State.OVER, [])
        steps.now = step.wakes_at
        assert asked(steps.step()) == [(["b"], 1)]


class TestShares:
    def test_manual_runs_have_half_of_the_workers_beside_the_schedule(self) -> None:
        steps = Steps(workers=4)
        manual = [run_of(f"m{number}", 5.0, RunKind.MANUAL) for number in range(4)]
        step = steps.step(came=[*runs(4), *manual])
        assert [(ask.runs[0].kind, ask.most) for ask in step.asks] == [
            (RunKind.MANUAL, 2),
            (RunKind.SCHEDULE, 2),
        ]

    def test_a_single_worker_is_for_those_that_somebody_waits_for(self) -> None:
        step = Steps(workers=1).step(came=[run_of("a"), run_of("m", 5.0, RunKind.MANUAL)])
        assert asked(step) == [(["m"], 1)]

    def test_alone_they_have_all(self) -> None:
        step = Steps(workers=4).step(came=runs(4, kind=RunKind.TAKEOVER))
        assert [ask.most for ask in step.asks] == [4]

    def test_what_they_do_not_need_is_the_schedules(self) -> None:
        step = Steps(workers=4).step(came=[*runs(4), run_of("m", 5.0, RunKind.MANUAL)])
        assert [(ask.runs[0].kind, ask.most) for ask in step.asks] == [
            (RunKind.MANUAL, 1),
            (RunKind.SCHEDULE, 3),
        ]

    def test_a_retry_stands_among_the_others_by_its_own_time(self) -> None:
        steps = Steps(workers=1)
        [busy] = steps.begin([run_of("busy")]).given
        steps.step(came=[run_of("earlier", came=102.0), run_of("later", came=104.0)])
        steps.step(came=[run_of("retry", came=105.0, kind=RunKind.RETRY, retry_at=103.0)])
        waiting, found = steps.free(busy), []
        for _ in range(3):
            step = steps.grant(waiting)
            found += names(step.given)
            steps.step(begun=step.given)
            waiting = steps.free(*step.given)
        assert found == ["earlier", "retry", "later"]

    def test_stored_and_scheduled_runs_share_by_the_time_when_they_came(self) -> None:
        stored = [run_of(f"s{number}", number, RunKind.STORED) for number in (1.0, 2.0, 9.0)]
        scheduled = [run_of(f"t{number}", number) for number in (3.0, 4.0)]
        step = Steps(workers=3, in_a_fleet=True).step(came=[*stored, *scheduled])
        assert asked(step) == [(["s1.0", "s2.0", "s9.0"], 2), (["t3.0", "t4.0"], 1)]


class TestUnlockedRuns:
    def test_it_is_given_in_its_turn_without_a_claim(self) -> None:
        steps = Steps(workers=2)
        step = steps.step(came=[run_of("a", 1.0), run_of("u", 2.0, claims=False)])
        assert (asked(step), names(step.given)) == ([(["a"], 1)], ["u"])

    def test_those_before_it_have_their_workers_first(self) -> None:
        steps = Steps(workers=1)
        step = steps.step(came=[run_of("a", 1.0), run_of("u", 2.0, claims=False)])
        assert (asked(step), step.given) == ([(["a"], 1)], [])
        step = steps.answer(step, lambda _run: REFUSED)
        assert names(step.given) == ["u"]

    def test_it_waits_for_no_database(self) -> None:
        steps = Steps(workers=1)
        waits, unlocked = run_of("a", 1.0), run_of("u", 2.0, claims=False)
        step = steps.step(came=[waits, unlocked])
        assert step.wakes_at == steps.now + PATIENCE
        steps.now = step.wakes_at
        assert steps.step().given == [unlocked]
        # What is granted then is the next one of that worker.
        assert steps.answer(step, lambda _run: GRANTED).given == [waits]
        assert steps.step(came=[run_of("b")]).asks == []
        assert asked(steps.free(unlocked, waits)) == [(["b"], 1)]

    def test_what_is_to_run_all_the_same_without_an_answer_is_given_in_its_turn(self) -> None:
        steps, some = Steps(workers=1, in_a_fleet=True), runs(2)
        step = steps.answer(steps.step(came=some), lambda _run: ClaimOutcome.UNLOCKED)
        assert (step.given, step.asks) == (some[:1], [])
        assert steps.free(some[0]).given == some[1:]

    def test_at_a_stop_it_goes_to_the_executor(self) -> None:
        steps = Steps(workers=1)
        unlocked = runs(3, claims=False)
        assert steps.step(came=unlocked).given == unlocked[:1]
        assert steps.step(stopped=True).given == unlocked[1:]


class TestLateness:
    def test_a_late_run_is_given_as_a_missed_one_and_not_claimed(self) -> None:
        steps = Steps()
        late, other = run_of("a", grace=1.0), run_of("b", grace=1.0)
        late.came, other.came = 1.5, 0.5
        step = steps.step(came=[late, other])
        assert (names(step.given), asked(step)) == (["a"], [(["b"], 1)])
        assert (late.is_missed, other.is_missed) == (True, False)

    def test_the_time_of_an_ask_is_no_lateness(self) -> None:
        steps, run = Steps(workers=1), run_of("b", 100.5, grace=1.0)
        (first,) = steps.begin([run_of("a", 100.0)]).given
        steps.now = 130.0  # the database did not answer
        step = steps.step(came=[run], freed=[(first, 0.1)])
        assert asked(step) == [(["b"], 1)]

    def test_the_time_of_the_runs_before_it_is(self) -> None:
        steps, run = Steps(workers=1), run_of("b", 100.5, grace=1.0)
        (first,) = steps.begin([run_of("a", 100.0)]).given
        step = steps.step(came=[run], freed=[(first, 2.0)])
        assert (step.given, run.is_missed) == ([run], True)

    def test_the_run_times_of_a_backlog_come_one_after_the_other(self) -> None:
        steps = Steps(workers=5)
        first, second = backlog_of(2, came=100.0, grace=1.0)
        steps.begin([first])
        step = steps.free(first, took=2.0)
        assert (step.given, second.is_missed) == ([second], True)

    def test_a_run_is_not_late_for_one_that_came_later_and_was_missed_at_once(self) -> None:
        steps = Steps(workers=1)
        step = steps.step(came=[run_of("a", 100.0)])
        waits, late = run_of("b", 101.0, grace=1.0), run_of("c", 90.0, grace=1.0)
        late.came = steps.now = 105.0
        assert steps.step(came=[waits, late]).given == [late]
        steps.step(begun=[late])
        assert asked(
            steps.step(freed=[(late, 0.0)], answered=[(step.asks[0].runs[0], REFUSED)])
        ) == [(["b"], 1)]

    def test_a_backlog_is_not_late_for_those_that_had_its_worker_since_it_waited(self) -> None:
        # A worker of a plain pool would have gone on with it.
        steps = Steps(workers=2)
        first, second = backlog_of(2, "b", came=100.0, grace=1.0)
        x, y = run_of("x", 104.0), run_of("y", 105.0)
        step = steps.step(came=[first, x])
        steps.now = 110.0
        steps.answer(step, lambda run: GRANTED if run is first else ClaimOutcome.BEYOND)
        step = steps.step(begun=[first])
        assert asked(steps.step(freed=[(first, 0.1)], came=[y])) == []
        steps.step(answered=[(x, GRANTED)])
        step = steps.step(begun=[x])
        assert asked(step) == [(["b"], 1)]
        step = steps.answer(step, lambda _run: ClaimOutcome.LOCKED)
        steps.answer(step, lambda _run: GRANTED)
        steps.step(begun=[y], freed=[(y, 0.0)])
        steps.now = 111.0
        assert asked(steps.step()) == [(["b"], 1)]
        assert not second.is_missed

    def test_a_backlog_is_not_late_for_those_that_the_database_has_let_begin_beside_it(
        self,
    ) -> None:
        # A worker of a plain pool would have begun it after the short run before it.
        steps = Steps(workers=2)
        short, long = run_of("short", 100.0), run_of("long", 100.0)
        steps.begin([short, long])
        before, (first, second) = run_of("a", 101.0), backlog_of(2, "b", came=101.0, grace=1.0)
        steps.now = 110.0
        step = steps.step(came=[before, first], freed=[(short, 0.5), (long, 4.0)])
        given = steps.grant(step).given
        assert given == [before, first]
        steps.step(begun=given)
        assert asked(steps.free(*given, took=0.1)) == [(["b"], 1)]
        assert not second.is_missed

    def test_who_waits_for_the_database_is_not_late_for_those_without_a_lock_that_go_meanwhile(
        self,
    ) -> None:
        steps = Steps(workers=3, in_a_fleet=True)
        waiting = [run_of(f"t{n}", 100.0, grace=2.0) for n in range(10)]
        step = steps.step(came=waiting)
        for second in range(101, 107):  # the database does not answer
            steps.now = float(second)
            came = [run_of(f"x{second}{n}", steps.now, claims=False) for n in range(3)]
            given = steps.step(came=came).given
            assert given == came
            steps.step(begun=given)
            steps.free(*given, took=0.9)
        step = steps.answer(
            step, lambda run: GRANTED if run in waiting[:3] else ClaimOutcome.BEYOND
        )
        assert step.given == waiting[:3]
        steps.step(begun=step.given)
        assert asked(steps.free(*step.given, took=0.1)) == [(names(waiting[3:6]), 3)]

    def test_who_waits_for_a_locked_row_is_not_late_for_those_that_go_meanwhile(self) -> None:
        steps = Steps(workers=1)
        run = run_of("a", 100.0, grace=1.0)
        steps.answer(steps.step(came=[run]), lambda _run: ClaimOutcome.LOCKED)
        later = run_of("b", 105.0)
        steps.now = 100.005
        steps.begin([later])
        steps.now = 110.0
        assert asked(steps.free(later, took=5.0)) == [(["a"], 1)]

    def test_who_is_deferred_is_not_late_for_that(self) -> None:
        steps = Steps()
        first, second = backlog_of(2, came=100.0, grace=1.0)
        steps.answer(steps.step(came=[first]), lambda _run: DEFERRED)
        steps.now = 150.0
        step = steps.step(found=[(first, ASKED_AGAIN, 0.0)])
        assert step.asks[0].runs == [first]
        assert asked(steps.answer(step, lambda _run: REFUSED)) == [(["a"], 1)]
        assert not second.is_missed


class TestKept:
    def test_a_deferred_run_is_asked_for_again_once_the_other_has_ended(self) -> None:
        steps, run = Steps(), run_of()
        step = steps.answer(steps.step(came=[run]), lambda _run: DEFERRED)
        assert (step.asks, step.refused, run.state) == ([], [], State.DEFERRED)
        assert steps.step().asks == []
        assert steps.queue.is_idle
        assert steps.step(found=[(run, ASKED_AGAIN, 0.0)]).asks[0].runs == [run]

    def test_its_backlog_waits_with_it(self) -> None:
        steps, backlog = Steps(), backlog_of(2)
        steps.answer(steps.step(came=backlog[:1]), lambda _run: DEFERRED)
        step = steps.step(found=[(backlog[0], ASKED_AGAIN, 0.0)])
        assert step.asks[0].runs == backlog[:1]
        assert steps.answer(step, lambda _run: REFUSED).asks[0].runs == backlog[1:]

    def test_if_it_is_refused_for_good_its_backlog_goes_on(self) -> None:
        steps, backlog = Steps(), backlog_of(2)
        steps.answer(steps.step(came=backlog[:1]), lambda _run: DEFERRED)
        step = steps.step(found=[(backlog[0], Outlook.REFUSED, 0.0)])
        assert step.refused == [(backlog[0], REFUSED)]
        assert step.asks[0].runs == backlog[1:]

    def test_it_takes_no_worker(self) -> None:
        steps = Steps(workers=1)
        steps.answer(steps.step(came=[run_of("a")]), lambda _run: DEFERRED)
        assert asked(steps.step(came=[run_of("b")])) == [(["b"], 1)]

    def test_it_is_dropped_with_what_follows(self) -> None:
        steps, backlog = Steps(), backlog_of(3)
        steps.answer(steps.step(came=backlog[:1]), lambda _run: DEFERRED)
        step = steps.step(found=[(backlog[0], Outlook.DROPPED, 0.0)])
        assert step.refused == [(run, REFUSED) for run in backlog]
        assert step.asks == steps.step(stopped=True).withdrawn == []

    def test_a_later_run_time_waits_for_a_look_at_what_is_in_the_way_of_an_earlier_one(
        self,
    ) -> None:
        steps, deferred = Steps(), run_of(came=100.0)
        steps.answer(steps.step(came=[deferred]), lambda _run: DEFERRED)
        later = run_of(came=110.0)
        step = steps.step(came=[later])
        assert (step.asks, step.is_look_due) == ([], True)
        # A look that began before it came tells nothing of what it would be asked for.
        step = steps.step(found=[(deferred, Outlook.WAITS, 109.0)])
        assert (step.asks, step.is_look_due) == ([], False)
        step = steps.step(found=[(deferred, Outlook.WAITS, 111.0)])
        assert step.asks[0].runs == [later]

    def test_a_look_from_before_a_worker_was_free_does_not_let_a_later_run_time_go(self) -> None:
        steps, deferred = Steps(workers=1), run_of(came=100.0)
        steps.answer(steps.step(came=[deferred]), lambda _run: DEFERRED)
        [busy] = steps.begin([run_of("b", came=101.0)]).given
        later = run_of(came=110.0)
        steps.step(came=[later])
        steps.now = 111.0
        step = steps.step(found=[(deferred, Outlook.WAITS, 111.0)])
        assert (step.asks, step.is_look_due) == ([], False)
        # The run in the way may have ended since that look.
        steps.now = 120.0
        step = steps.free(busy)
        assert (step.asks, step.is_look_due) == ([], True)
        assert steps.step(found=[(deferred, ASKED_AGAIN, 120.0)]).asks[0].runs == [deferred]

    def test_a_look_with_a_worker_free_lets_a_later_run_time_go(self) -> None:
        steps, deferred = Steps(workers=1), run_of(came=100.0)
        steps.answer(steps.step(came=[deferred]), lambda _run: DEFERRED)
        [busy] = steps.begin([run_of("b", came=101.0)]).given
        later = run_of(came=110.0)
        steps.step(came=[later])
        steps.now = 120.0
        steps.free(busy)
        assert steps.step(found=[(deferred, Outlook.WAITS, 120.0)]).asks[0].runs == [later]

    def test_a_later_run_time_goes_after_an_earlier_one_that_is_asked_for_again(self) -> None:
        steps, deferred, later = Steps(), run_of(came=100.0), run_of(came=110.0)
        steps.answer(steps.step(came=[deferred]), lambda _run: DEFERRED)
        steps.step(came=[later])
        step = steps.step(found=[(deferred, ASKED_AGAIN, 111.0)])
        assert step.asks[0].runs == [deferred]
        assert steps.answer(step, lambda _run: REFUSED).asks[0].runs == [later]

    def test_what_was_withdrawn_meanwhile_is_not_asked_for(self) -> None:
        steps, run = Steps(), run_of()
        steps.answer(steps.step(came=[run]), lambda _run: DEFERRED)
        assert steps.step(stopped=True).withdrawn == [run]
        assert steps.step(found=[(run, ASKED_AGAIN, 0.0)]).asks == []


class TestStop:
    def test_what_waits_is_withdrawn_with_its_backlog(self) -> None:
        steps = Steps(workers=1)
        (running,) = steps.begin([run_of("b")]).given
        backlog = backlog_of(2)
        steps.step(came=backlog[:1])
        assert steps.step(stopped=True).withdrawn == backlog
        assert steps.queue.is_idle  # what runs needs nothing of it until it ends
        steps.free(running)
        assert steps.queue.is_idle

    @pytest.mark.parametrize(
        "outcome",
        [GRANTED, DEFERRED, ClaimOutcome.LOCKED, ClaimOutcome.UNANSWERED, ClaimOutcome.BEYOND],
    )
    def test_what_is_answered_then_is_withdrawn(self, outcome: ClaimOutcome) -> None:
        steps, run = Steps(), run_of()
        step = steps.step(came=[run])
        assert steps.step(stopped=True).withdrawn == []
        step = steps.answer(step, lambda _run: outcome)
        assert (step.withdrawn, step.given) == ([run], [])
        assert steps.queue.is_idle

    def test_what_comes_then_is_withdrawn(self) -> None:
        steps, run = Steps(), run_of()
        steps.step(stopped=True)
        assert steps.step(came=[run]).withdrawn == [run]


def test_a_token_is_taken_once() -> None:
    token = Token()
    assert [token.take(), token.take()] == [True, False]


def test_workers_may_become_more_and_fewer() -> None:
    steps = Steps(workers=1)
    (first,) = steps.begin(runs(5)).given
    steps.workers = 3
    step = steps.grant(steps.step())
    assert len(step.given) == 2
    steps.workers = 1
    assert steps.step(begun=step.given, freed=[(first, 0.0)]).asks == []
    assert len(steps.free(*step.given).asks[0].runs) == 1


# ---- against a plain pool ------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    came: float
    takes: float
    grace: float | None


jobs_of_a_day = st.lists(
    st.builds(
        Job,
        came=st.integers(0, 20).map(float),
        takes=st.integers(0, 6).map(float),
        grace=st.none() | st.integers(0, 8).map(lambda grace: grace + 0.5),
    ),
    max_size=25,
).map(lambda jobs: sorted(jobs, key=lambda job: job.came))


def missed_by_a_pool(jobs: Sequence[Job], workers: int) -> set[int]:
    """Return which of these a pool would miss that begins each as soon as a worker is free."""
    free_at = [0.0] * workers
    missed = set()
    for number, job in enumerate(jobs):
        begins = max(job.came, heapq.heappop(free_at))
        if job.grace is not None and begins - job.came > job.grace:
            missed.add(number)
            heapq.heappush(free_at, begins)
        else:
            heapq.heappush(free_at, begins + job.takes)
    return missed


@dataclass
class Day:
    """Lives through these jobs, with a database that takes some time to grant all."""

    jobs: Sequence[Job]
    workers: int
    delay: float
    missed: set[int] = field(default_factory=set)
    ran: list[int] = field(default_factory=list)

    def live(self) -> None:
        queue = RunQueue(lambda pause: pause)
        # What happens when: the number breaks ties, in the order in which it was planned.
        planned: list[tuple[float, int, dict[str, Any]]] = []
        count = 0

        def plan(at: float, **inputs: Any) -> None:
            nonlocal count
            count += 1
            heapq.heappush(planned, (at, count, inputs))

        for number, job in enumerate(self.jobs):
            run = run_of(f"job {number}", job.came, grace=job.grace, work=number)
            plan(job.came, came=[run])
        while planned:
            now, _count, inputs = heapq.heappop(planned)
            step = step_of(queue, now, self.workers, **inputs)
            assert not step.withdrawn
            assert not step.refused
            for ask in step.asks:
                some = ask.runs[: ask.most]
                answers = [
                    (run, GRANTED if run in some else ClaimOutcome.BEYOND) for run in ask.runs
                ]
                plan(now + self.delay, answered=answers)
            for run in step.given:
                took = 0.0 if run.is_missed else self.jobs[work_of(run)].takes
                (self.missed.add if run.is_missed else self.ran.append)(work_of(run))
                plan(now, begun=[run])
                plan(now + took, freed=[(run, took)])
            if step.wakes_at < inf:
                plan(step.wakes_at)
        assert queue.is_idle
        assert sorted([*self.missed, *self.ran]) == list(range(len(self.jobs)))


@given(jobs_of_a_day, st.integers(1, 4))
def test_it_misses_what_a_pool_misses(jobs: Sequence[Job], workers: int) -> None:
    day = Day(jobs, workers, delay=0.0)
    day.live()
    assert day.missed == missed_by_a_pool(jobs, workers)


@given(jobs_of_a_day, st.sampled_from([0.01, 0.3, 2.0, 30.0]))
def test_on_one_worker_the_time_of_claims_is_not_seen(jobs: Sequence[Job], delay: float) -> None:
    day = Day(jobs, 1, delay)
    day.live()
    assert day.missed == missed_by_a_pool(jobs, 1)


@given(jobs_of_a_day, st.integers(2, 4), st.sampled_from([0.01, 0.3, 2.0, 30.0]))
def test_the_time_of_claims_makes_nothing_missed(
    jobs: Sequence[Job], workers: int, delay: float
) -> None:
    day = Day(jobs, workers, delay)
    day.live()
    # What runs although a pool would miss it may be in the way of others after it.
    assert min(day.missed, default=inf) >= min(missed_by_a_pool(jobs, workers), default=inf)


class TestFull:
    """That all workers are busy for long is told, now and then."""

    def test_after_ten_seconds_and_then_once_in_ten_minutes(self) -> None:
        steps = Steps(workers=1)
        (running,) = steps.begin([run_of("a")]).given
        waiting = [run_of(name, came=steps.now) for name in "bc"]
        assert steps.step(came=waiting).all_busy is None
        steps.now += 10
        assert steps.step().all_busy is None
        steps.now += 1
        assert steps.step().all_busy == AllBusy(workers=1, waiting=2, longest=11.0)
        steps.now += 599
        assert steps.step().all_busy is None
        steps.now += 2
        assert steps.step().all_busy == AllBusy(workers=1, waiting=2, longest=612.0)
        assert steps.free(running).all_busy is None

    def test_not_of_what_waits_for_the_database(self) -> None:
        steps = Steps(workers=1)
        steps.step(came=[run_of("a", came=steps.now), run_of("b", came=steps.now)])
        steps.now += 60
        assert steps.step().all_busy is None

    def test_of_short_jobs_that_follow_each_other(self) -> None:
        steps = Steps(workers=1)
        step = steps.begin([run_of(name, came=steps.now) for name in "abcd"])
        told = []
        for _ in range(2):
            steps.now += 6
            step = steps.grant(steps.free(*step.given, took=6.0))
            told.append(step.all_busy)
            steps.step(begun=step.given)
        assert told == [None, AllBusy(workers=1, waiting=1, longest=12.0)]

    def test_not_when_the_database_answers_again_after_an_outage(self) -> None:
        steps = Steps(workers=1)
        first = steps.step(came=[run_of(name, came=steps.now) for name in "abc"])
        steps.now += 60
        step = steps.grant(first)
        assert (names(step.given), step.all_busy) == (["a"], None)
        assert steps.step(begun=step.given).all_busy is None
        steps.now += 10
        assert steps.step().all_busy is None
        steps.now += 1
        assert steps.step().all_busy == AllBusy(workers=1, waiting=2, longest=11.0)

    def test_not_of_missed_runs_whose_jobs_the_database_is_to_move_on(self) -> None:
        steps = Steps(workers=1)
        late = QueuedRun(RunKind.STORED, "a", ("a", "default"), due_at=0.0, came=50.0, grace=1.0)
        assert steps.step(came=[late]).given == [late]
        steps.step(came=[run_of("b", came=steps.now)])
        steps.now += 60
        assert steps.step().all_busy is None

    def test_while_other_work_than_the_schedulers_keeps_the_workers_busy(self) -> None:
        steps = Steps(workers=1)
        steps.grant(steps.step(came=[run_of("a"), run_of("b", came=steps.now)]))
        steps.now += 10
        assert steps.step().all_busy is None
        steps.now += 1
        assert steps.step().all_busy == AllBusy(workers=1, waiting=1, longest=11.0)
