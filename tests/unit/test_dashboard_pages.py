"""What the dashboard's pages and their JSON twins show of what is read of rows."""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock._runs.task_names import canonical_schedule
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError, TaskLockNotFoundError
from apscheduler_tasklock.status import (
    Durations,
    Finding,
    JobState,
    Lane,
    Lanes,
    Misses,
    Pause,
    ReplicaState,
    ReplicaStatus,
    RunningRun,
    Spread,
    TaskState,
)
from tests.support.asgi_client import TestClient
from tests.support.pages import Known, Reader, app, lanes
from tests.support.rows import (
    NOW,
    READ,
    action_read,
    job_status,
    miss_read,
    replica_status,
    run_read,
    seconds,
    task_status,
)

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this machine be in Berlin."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def reader(*, namespace: str = "", zone: tzinfo | None = timezone.utc, **known: Any) -> Reader:
    """Return somebody who looks at the pages of these rows."""
    return Reader(Known(**known), namespace, zone)


def ago(minutes: float) -> timedelta:
    return seconds(-60 * minutes)


def span(began: float, ended: float) -> dict[str, timedelta]:
    """Return the times of a run between two times, in minutes ago."""
    return {"scheduled_at": ago(began), "started_at": ago(began), "ended_at": ago(ended)}


def pause_of_all(**changes: Any) -> Pause:
    return replace(Pause("ann", NOW, None, None, ""), **changes)


class TestOverview:
    def test_without_tasks_it_says_that_none_has_registered(self) -> None:
        words = reader().words("/")
        assert "no task was ever registered here: is this the right database?" in words
        assert "All is well" not in words
        assert "Nothing runs." in words
        assert "Nothing failed, and nothing was missed." in words

    def test_all_is_well_with_the_number_of_tasks_and_replicas(self) -> None:
        shown = reader(tasks_=[task_status("a")], replicas_=[replica_status("web-1")])
        assert "All is well. 1 task, 1 replica alive." in shown.words("/")

    def test_notes_need_no_attention(self) -> None:
        notes = [replica_status("web-1", stopping_since=ago(1)), replica_status("web-2")]
        words = reader(tasks_=[task_status("a")], replicas_=notes).words("/")
        assert "All is well. 1 task, 2 replicas alive. 1 replica stops" in words
        assert "Worth knowing" in words
        assert "Needs attention" not in words
        ill = reader(tasks_=[task_status("a", **READ["late"])], replicas_=notes).words("/")
        assert "All is well" not in ill
        assert "Needs attention" in ill

    def test_a_replica_that_stops_is_listed_as_that(self) -> None:
        gone = {"state": ReplicaState.DIED, "stopping_since": ago(3), "seen_at": ago(2)}
        known = [
            replica_status("web-1", stopping_since=ago(1)),
            replica_status("web-2"),
            replica_status("web-3", **gone),
        ]
        words = reader(replicas_=known).words("/replicas")
        assert re.search("web-1 host alive stopping .* web-2 host alive 1.0", words)
        assert re.search("web-3 host died while it was stopping", words)

    def test_releases_are_beside_their_replicas_if_any_is_known(self) -> None:
        known = [replica_status("web-1", release="build-77"), replica_status("web-2")]
        assert "release" not in reader(replicas_=known[1:]).words("/replicas")
        words = reader(replicas_=known).words("/replicas")
        assert "library release started" in words
        assert "1.0 build-77" in words

    def test_regular_misses_are_acknowledged_on_their_tasks_page(self) -> None:
        missed = Misses("a", 3, 3, NOW + ago(3), NOW + ago(1), None)
        known = Known([task_status("a"), task_status("b")], misses=[missed])
        shown = Reader(known)
        assert '<a href="task?name=a">1 task missed a run time</a>' in shown.html("/")
        operator = Reader(known, may_operate=True)
        pages = [operator.html(f"/task?name={name}") for name in "ab"]
        assert ["action=ack" in page for page in pages] == [True, False]

    def test_each_thing_that_is_not_well_is_a_link(self) -> None:
        kinds = (("a", "failing"), ("b", "overdue"), ("c", "overdue"))
        shown = reader(tasks_=[task_status(name, **READ[kind]) for name, kind in kinds])
        text = shown.html("/")
        assert '<a href="#findings">2 tasks are overdue</a>' in text
        assert '<a href="task?name=a">1 task is failing</a>' in text
        assert "All is well" not in text
        assert "a failing warning 12:00:00 3 times, the last with ValueError" in shown.words("/")

    def test_stored_jobs_that_no_replica_claims_are_a_link(self) -> None:
        """They may have no task, so that nothing else on the page has them."""
        overdue = {"state": JobState.OVERDUE, "next_run_time": ago(5)}
        jobs = [
            job_status("unclaimed", **overdue),
            job_status("claimed", task="web:claimed", **overdue),
            job_status("waits"),
        ]
        shown = reader(jobs_=jobs)
        assert '<a class="name" href="job?id=unclaimed">unclaimed</a>' in shown.html("/")
        assert "why?name=" not in shown.html("/")  # such a task may have no row to tell of
        findings = shown.twin("/")["overview"]["findings"]
        assert {each["task"] for each in findings} == {"unclaimed", "web:claimed"}
        other = reader(jobs_=jobs, namespace="shop:")
        assert '<a href="job?id=unclaimed">1 task is overdue</a>' in other.html("/")

    @pytest.mark.parametrize(
        ("row", "said"),
        [
            ("failing", "3 times, the last with ValueError"),
            ("died", "2 times, the last died with its holder"),
            ("overran", "has overrun its maximum lock"),
        ],
    )
    def test_a_failure_is_told_also_without_an_exception(self, row: str, said: str) -> None:
        text = reader(tasks_=[task_status("a", **READ[row])]).words("/")
        assert said in text
        assert "None" not in text

    def test_a_pause_of_all_tasks_is_in_the_first_line(self) -> None:
        pause = pause_of_all(until=NOW + timedelta(hours=1), reason="the database moves")
        words = reader(tasks_=[task_status("a")], pauses=(pause,)).words("/")
        says = "all tasks paused by ann since 12:00:00 until 13:00:00"
        assert f"All is well. 1 task, 0 replicas alive. {says} (the database moves)" in words

    def test_the_last_hour_has_a_lane_for_each_replica_and_one_for_nobody(self) -> None:
        running = {**READ["running"], "holder": "web-3", "started_at": ago(1)}
        again = {"replica": "web-2", "kind": "takeover"}
        shown = reader(
            tasks_=[task_status("now", **running)],
            runs_=[
                run_read(task="a", token=1, replica="web-1", **span(30, 29)),
                run_read(task="a", token=2, **again, **span(20, 18)),
                run_read(task="a", token=3, replica="web-2", outcome="error", **span(10, 9)),
                run_read(task="a", token=4, replica="old", **span(130, 129)),
                miss_read(task="a", scheduled_at=ago(40)),
            ],
        )
        assert lanes(shown.html("/")) == {
            "web-1": ["ok"],
            "web-2": ["again", "bad"],
            "web-3": ["running"],
            "nobody": ["missed"],
        }
        assert lanes(shown.html("/?by=task")) == {
            "a": ["again", "bad", "missed", "ok"],
            "now": ["running"],
        }

    def test_failures_and_misses_of_the_last_day_come_with_their_reasons(self) -> None:
        error = {"outcome": "error", "error_type": "KeyError", "error": "no price"}
        late = {"cause": "misfire", "reason": "late by 3 s"}
        shown = reader(
            tasks_=[task_status("a")],
            runs_=[
                run_read(task="a", token=1, **error, **span(600, 599)),
                run_read(task="a", token=2, outcome="error", error="long ago", **span(3000, 2999)),
                run_read(task="a", token=3, outcome="died", **span(700, 699)),
                run_read(task="a", token=4, **error, **span(800, 799)),
                run_read(task="b", token=1, outcome="died", **span(800, 799)),
                miss_read(task="c", **late),
                miss_read(task="paused"),
            ],
        )
        words = shown.words("/")
        assert "KeyError: no price and 1 more" in words
        assert "its replica died, or could not reach the database" in words
        assert "at most 1 min" in words
        assert ": late by 3 s why?" in words
        assert "long ago" not in words
        # A death is not hidden by what came after it.
        assert words.count("its replica died, or could not reach the database") == 2
        # Operators know of their pauses, which the lanes show.
        assert "the task was paused" not in words
        assert [each["task"] for each in shown.twin("/")["troubles"]] == [
            *("c", "a", "a", "a", "b")
        ]

    def test_misses_are_counted_by_their_run_times(self) -> None:
        misses = [miss_read(task="a", cause="database", run_times=n) for n in (2, 3, 4)]
        assert "and 7 more run times" in reader(runs_=misses).words("/")

    @pytest.mark.parametrize(
        ("healed", "says"),
        [
            ((), " and 1 more"),
            ((1,), " and 1 more; 1 of 2 succeeded at a retry"),
            ((1, 2), " and 1 more; all succeeded at a retry"),
        ],
    )
    def test_failures_that_a_retry_has_healed_are_told_as_that(
        self, healed: tuple[int, ...], says: str
    ) -> None:
        times = {at: span(10 * at, 10 * at - 1) for at in (1, 2)}
        failed = [
            run_read(task="a", token=at, outcome="error", **span_) for at, span_ in times.items()
        ]
        retries = [run_read(task="a", token=at + 9, kind="retry", **times[at]) for at in healed]
        told = reader(runs_=[*failed, *retries]).words("/")
        assert f"{says} read at" in told

    def test_a_run_that_has_outlived_its_lock_is_told_with_its_own_replica(self) -> None:
        stuck = RunningRun("a", 7, "web-3", NOW + ago(15), lost=True)
        too_long = {**READ["too long"], "holder": "web-4", "token": 9, "stuck": (stuck,)}
        shown = reader(tasks_=[task_status("a", **too_long)])
        words = shown.words("/")
        assert "1 task runs too long" in words
        assert "since 11:45:00 on web-3" in words  # as all times of a page
        assert "Runs now task for on a too long 15 min web-3 a 1 min web-4" in words
        running = shown.twin("/")["overview"]["running"]
        names = ("state", "holder", "token", "started_at", "finished_at")
        assert [tuple(each[name] for name in names) for each in running] == [
            ("too long", "web-3", 7, "2026-01-31T11:45:00Z", None),
            ("running", "web-4", 9, "2026-01-31T11:59:00Z", None),
        ]
        # A freed one, which nobody has run since: the row has the end of the freed run.
        freed = {**READ["freed"], "state": TaskState.TOO_LONG, "token": 9, "stuck": (stuck,)}
        [run] = reader(tasks_=[task_status("a", **freed)]).twin("/")["overview"]["running"]
        assert (run["holder"], run["token"], run["finished_at"]) == ("web-3", 7, None)

    def test_a_run_of_a_silent_replica_is_not_told_as_running(self) -> None:
        shown = reader(tasks_=[task_status("a", **READ["holder silent"])])
        words = shown.words("/")
        assert "Runs now task for on a holder silent at most 1 min two" in words
        assert "holder silent 1" in words
        text = shown.html("/")
        assert lanes(text) == {"two": ["other"]}
        assert "its replica has died or is silent, and nobody knows whether it goes on" in text
        words = shown.words("/task?name=a")
        row = "at most 1 min so far holder silent two nobody knows whether it goes on, token 7"
        assert row in words
        assert "green" not in words
        assert "a holder silent" in shown.words("/tasks")
        assert "at most 1 min" in shown.words("/tasks")

    def test_what_runs_and_what_is_due(self) -> None:
        runs = {**READ["running"], "holder": "web-1", "started_at": ago(3), "took": 180.0}
        due = {"due_at": ago(-4), "overdue_at": ago(-6)}
        words = reader(tasks_=[task_status("a", **runs), task_status("b", **due)]).words("/")
        assert "Runs now task for on a 3 min web-1" in words
        assert re.search(r"Due next .* b 12:04:00 in 4 min", words)

    @pytest.mark.parametrize(("number", "is_said"), [(20, False), (22, True)])
    def test_a_list_says_how_many_tasks_are_not_in_it(self, number: int, is_said: bool) -> None:
        tasks = [
            task_status(f"{kind}-{place:02}", **READ[kind])
            for place in range(number)
            for kind in ("running", "failing")
        ]
        text = reader(tasks_=tasks).words("/")
        assert ("and 2 more: tasks that run" in text) is is_said
        assert ("and 2 more: tasks, the worst first" in text) is is_said
        assert ("more: " in text) is is_said

    def test_each_run_that_goes_on_is_drawn(self) -> None:
        others = {**READ["running"], "started_at": ago(2)}
        tasks = [task_status(f"other-{number:02}", **others) for number in range(25)]
        shown = reader(tasks_=[*tasks, task_status("wanted", **READ["running"])])
        assert lanes(shown.html("/timeline?q=wanted&by=task")) == {"wanted": ["running"]}
        assert len(shapes(shown.html("/?by=task"))) == 26
        assert len(shapes(shown.html("/"))) == 26

    def test_a_run_that_hangs_is_not_hidden_by_those_beside_it(self) -> None:
        """It outlived its lock, so that the history has an entry of it, and others run since."""
        stuck = RunningRun("hangs", 7, "web-3", NOW + ago(55), lost=True)
        hangs = {**READ["too long"], "holder": "web-4", "token": 9, "stuck": (stuck,)}
        again = {"replica": "web-3", "outcome": "ok"}
        shown = reader(
            tasks_=[task_status("hangs", **{**hangs, "finished_at": ago(1)})],
            runs_=[
                run_read(task="hangs", token=7, replica="web-3", outcome="overran", **span(55, 50)),
                *(
                    run_read(task="quick", token=n, **again, **span(54 - n, 53.99 - n))
                    for n in range(50)
                ),
            ],
        )
        for path, lane in (("/", "web-3"), ("/?by=task", "hangs")):
            text = shown.html(path)
            assert next(iter(lanes(text))) == lane, path  # trouble comes first
            [(_, x, width)] = [each for each in shapes(text) if each[0] == "stuck"]
            assert x == pytest.approx(100 * 5 / 60, abs=0.01)
            assert x + width == pytest.approx(100, abs=0.02)
            assert "hangs since 11:05:00, goes on for longer than it may" in text


class TestTasks:
    def test_a_task_has_its_state_schedule_and_last_runs(self) -> None:
        schedule = json.loads(canonical_schedule(IntervalTrigger(minutes=5)) or "")
        runs = [
            run_read(task="a", token=1, **span(20, 19)),
            run_read(task="a", token=2, outcome="error", **span(10, 9)),
        ]
        failing = {**READ["failing"], "schedule": schedule}
        shown = reader(tasks_=[task_status("a", **failing)], runs_=runs)
        words = shown.words("/tasks")
        assert re.search("a failing [0-9: -]+ 2 s [0-9: -]* 3 every 5 min", words)
        assert 'aria-label="2 runs, 1 failed"' in shown.html("/tasks")

    def test_a_run_that_hangs_is_shown_in_place_of_newer_ones(self) -> None:
        stuck = RunningRun("a", 7, "web-3", NOW + ago(15), lost=True)
        newer = {**READ["too long"], "token": 9, "took": 2.0, "finished_at": ago(1)}
        words = reader(tasks_=[task_status("a", **{**newer, "stuck": (stuck,)})]).words("/tasks")
        assert re.search("a too long 11:45:00 15 min 12:04:00", words)

    @pytest.mark.parametrize(
        ("query", "names"),
        [
            ("", ["shop:b", "c", "a"]),
            ("order=urgency", ["shop:b", "c", "a"]),
            ("order=no+such+order", ["shop:b", "c", "a"]),
            ("order=name", ["a", "c", "shop:b"]),
            ("order=due", ["c", "a", "shop:b"]),
            ("order=duration", ["shop:b", "a", "c"]),
            ("order=failures", ["shop:b", "a", "c"]),
            ("state=ok,new&order=name", ["a", "c"]),
            ("state=ok&state=new&order=name", ["a", "c"]),
            ("q=shop", ["shop:b"]),
            ("q=s*b", ["shop:b"]),
            ("q=?&order=name", ["a", "c"]),
            ("state=new", ["c"]),
            ("state=no+such+state", ["shop:b", "c", "a"]),
            ("q=shop&state=ok", []),
        ],
    )
    def test_they_are_filtered_and_ordered(self, query: str, names: list[str]) -> None:
        kinds = (("a", 2, "ok"), ("shop:b", 3, "failing"), ("c", 1, "new"))
        tasks = [
            task_status(
                name,
                **{
                    **READ[kind],
                    "took": due,
                    "due_at": ago(-due),
                    "overdue_at": ago(-due - 9),
                },
            )
            for name, due, kind in kinds
        ]
        found = reader(tasks_=tasks).twin(f"/tasks?{query}")["tasks"]
        assert [task["name"] for task in found] == names

    def test_they_come_in_parts(self) -> None:
        shown = reader(tasks_=[task_status(f"t{number:03}") for number in range(120)])
        parts = [shown.twin(f"/tasks?order=name&page={part}") for part in (1, 2, 3, 4)]
        assert [(len(part["tasks"]), part["more"]) for part in parts] == [
            (50, True),
            (50, True),
            (20, False),
            (0, False),
        ]
        text = shown.html("/tasks?order=name&page=2&q=t")
        assert 'href="?order=name&amp;q=t&amp;page=1"' in text
        assert 'href="?order=name&amp;q=t&amp;page=3"' in text

    def test_an_order_keeps_the_filter_and_begins_with_the_first_part(self) -> None:
        shown = reader(tasks_=[task_status(f"t{number:03}") for number in range(60)])
        text = shown.html("/tasks?q=t&state=ok&state=failing&order=name&page=2&done=pause")
        assert 'href="?q=t&amp;state=ok&amp;state=failing&amp;order=failures"' in text
        assert (
            'aria-sort="ascending"><a href="?q=t&amp;state=ok&amp;state=failing&amp;order=name"'
            in text
        )
        assert 'href="?q=t&amp;state=ok&amp;state=failing&amp;order=name&amp;page=1"' in text

    def test_a_long_name_is_whole_in_the_page_and_its_title(self) -> None:
        name = "billing-worker-7d9f8bc6c4-a2x9k:1"
        text = reader(tasks_=[task_status(name)]).html("/tasks")
        assert (
            f'<span class="cut" title="{name}"><span>{name[:-8]}</span><span>{name[-8:]}</span>'
            in text
        )

    def test_nothing_that_matches_is_not_taken_for_no_tasks(self) -> None:
        shown = reader(tasks_=[task_status("a")])
        assert "No task matches." in shown.words("/tasks?q=nothing")


class TestTask:
    def test_it_has_facts_runs_misses_and_what_operators_did(self) -> None:
        name = "a/b ?#"
        failed = {"outcome": "error", "traceback": 'File "a.py"', **span(5, 4)}
        runs = [
            run_read(task=name, token=token, **span(10 * token, 10 * token - 1))
            for token in range(1, 8)
        ]
        shown = reader(
            tasks_=[task_status(name, **READ["failing"])],
            replicas_=[replica_status("web-1", tasks=(name,))],
            runs_=[
                *runs,
                run_read(task=name, token=9, **failed),
                miss_read(task=name),
                action_read(task=name),
            ],
        )
        words = shown.words("/task?name=a%2Fb%20%3F%23")
        assert "a/b ?# failing" in words
        assert "replicas web-1" in words
        assert "The last 8 runs, the newest at the right." in words
        assert "traceback File &#34;a.py&#34;" in words
        assert ": the task was paused why?" in words
        assert "paused by ann@ops" in words
        twin = shown.twin("/task?name=a%2Fb%20%3F%23")
        assert [len(twin[each]) for each in ("runs", "misses", "actions")] == [8, 1, 1]

    def test_of_a_run_that_hangs_it_begins_with_the_run(self) -> None:
        """Also if the task has no other run: in the sentence, in the chart and in the list."""
        hangs = {**READ["too long"], "holder": "web-2", "started_at": ago(90), "took": 5400.0}
        alone = reader(tasks_=[task_status("a", **hangs)], usual={"a": 35.0})
        words = alone.words("/task?name=a")
        says = "Running too long: since 10:30:00 on web-2, for 1 h 30 min (usually 35 s). "
        assert f"{says}What to do: if it hangs, restart the replica." in words
        assert "The only run; what goes on is green." in words
        assert "10:30:00 1 h 30 min so far too long web-2 goes on, token 7" in words
        [run] = alone.twin("/task?name=a")["going_on"]
        assert (run["run"]["replica"], run["state"]) == ("web-2", "too long")

    def test_a_run_that_goes_on_without_its_lock_is_one_run_in_the_chart(self) -> None:
        """The history has its entry already, because another replica has run the task since."""
        hangs = RunningRun("a", 6, "web-2", NOW + ago(90), lost=True)
        stuck = task_status("a", **READ["too long"], stuck=(hangs,))
        overran = run_read(task="a", token=6, outcome="overran", **span(90, 80))
        shown = reader(tasks_=[stuck], runs_=[overran])
        assert "The last 2 runs, the newest at the right" in shown.words("/task?name=a")

    def test_its_chart_has_axes_usual_durations_and_changes(self) -> None:
        runs = [
            run_read(task="a", token=n, release="1.1" if n < 3 else "1.0", **span(10 * n, 9 * n))
            for n in range(1, 8)
        ]
        change = action_read(task="a", outcome="rescheduled", reason="x to y", started_at=ago(35))
        spreads = {"a": Durations(Spread(7, 240.0, 400.0), None, NOW + ago(70))}
        shown = reader(tasks_=[task_status("a")], runs_=[*runs, change], spreads=spreads)
        words = shown.words("/task?name=a")
        assert "How long it took 10 min 5 min 0 10:50:00 11:50:00" in words
        kept = "7 runs that ended well, kept since 10:50:00"
        assert f"In the last day: median 4 min, 95th percentile 6 min 40 s ({kept})" in words
        assert "In the week before: no run that ended well is kept" in words
        assert (
            "schedule changed at 11:25:00: x to y release changed at 11:40:00: 1.0 to 1.1" in words
        )
        text = shown.html("/task?name=a")
        assert re.findall('class="level ([a-z_ ]+)"', text) == ["median last_day", "most last_day"]
        assert text.count('class="change"') == 2

    def test_the_pause_of_its_stored_job_is_in_the_sentence(self) -> None:
        pause = Pause("ann", NOW + ago(5), None, None, job="mail")
        paused = {"state": TaskState.PAUSED, "pauses": (pause,), "due_at": None, "overdue_at": None}
        shown = reader(tasks_=[task_status("a", **paused)])
        said = "stored job 'mail' paused by ann since 11:55:00 until resumed"
        for path in ("/", "/tasks", "/task?name=a"):
            assert said in shown.words(path).replace("&#39;", "'")
        operator = Reader(Known(tasks_=[task_status("a", **paused)]), may_operate=True)
        assert "confirm?action=job-resume&amp;name=mail" in operator.html("/task?name=a")

    def test_a_name_is_no_pattern(self) -> None:
        names = ("a*", "ab")
        shown = reader(
            tasks_=[task_status(name) for name in names],
            runs_=[run_read(task=name, **span(5, 4)) for name in names],
        )
        twin = shown.twin("/task?name=a*")
        assert (twin["task"]["name"], [run["task"] for run in twin["runs"]]) == ("a*", ["a*"])


def test_why_tells_the_story_of_a_moment() -> None:
    past = {"started_at": ago(100), "scheduled_at": ago(100), "window_until": ago(99)}
    shown = reader(tasks_=[task_status("a", **past)], runs_=[miss_read(task="a")])
    path = f"/why?name=a&at={(NOW + ago(30)).timestamp()}"
    words = shown.words(path)
    assert "missed" in words
    assert "the task was paused" in words
    assert shown.twin(path)["story"]["verdict"] == "missed"


class TestRuns:
    @pytest.mark.parametrize(
        ("query", "tokens"),
        [
            ("", [3, None, 2, 1]),
            ("outcome=error", [2]),
            ("outcome=bad", [None, 2]),
            ("outcome=missed", [None]),
            ("outcome=missed&outcome=ok", [3, None, 1]),
            ("outcome=missed,error&replica=web-2", [2]),
            ("outcome=nothing", [3, None, 2, 1]),
            ("error=NO+PRICE", [2]),
            ("error=keyerror", [2]),
            ("order=name", [None, 2, 1, 3]),
            ("order=duration", [1, 3, 2, None]),
            ("kind=takeover", [3]),
            ("replica=web-2", [2]),
            ("q=b", [3]),
            ("since={since}", [3]),
            ("until={since}", [None, 2, 1]),
        ],
    )
    def test_they_are_filtered_and_ordered(self, query: str, tokens: list[int | None]) -> None:
        failed = {"outcome": "error", "error_type": "KeyError", "error": "no price"}
        shown = reader(
            runs_=[
                run_read(task="a", token=1, replica="web-1", **span(90, 80)),
                run_read(task="a", token=2, replica="web-2", **failed, **span(80, 79)),
                run_read(task="b", token=3, replica="web-1", kind="takeover", **span(10, 8)),
                miss_read(task="a"),
            ]
        )
        query = query.format(since=(NOW + ago(20)).timestamp())
        found = shown.twin(f"/runs?{query}")["runs"]
        assert [run["token"] for run in found] == tokens

    def test_a_form_and_its_pages_keep_all_that_was_chosen(self) -> None:
        shown = reader(runs_=[run_read(task=f"t{n}", error="no price") for n in range(120)])
        chosen = "outcome=ok&outcome=died&error=price&replica=one&order=name"
        text = shown.html(f"/runs?{chosen}&page=2")
        for page in (1, 3):
            assert f'href="?{chosen}&page={page}"'.replace("&", "&amp;") in text
        assert re.findall('value="([^"]+)" checked', text) == ["ok", "died"]
        assert 'name="error" value="price"' in text
        assert 'selected value="name"' in text

    def test_many_that_began_together_come_in_parts(self) -> None:
        began = datetime(2026, 1, 1, tzinfo=timezone.utc)
        shown = reader(runs_=[run_read(task=f"t{n}", started_at=began) for n in range(120)])
        parts = [shown.twin(f"/runs?page={part}") for part in (1, 2, 3)]
        names = [run["task"] for part in parts for run in part["runs"]]
        assert len(names) == len(set(names)) == 120
        assert [part["more"] for part in parts] == [True, True, False]


def test_lists_of_long_texts_are_short_and_a_run_by_itself_has_all_of_its_own() -> None:
    runs = [
        run_read(
            task="job",
            token=number,
            started_at=ago(number),
            outcome="error",
            error="long text " * 50,
            traceback=f"begin of {number}{' line' * 780} end of {number}",
        )
        for number in range(1, 101)
    ]
    reason = "why " * 900
    for _ in range(20):
        missed = miss_read(task="job", reason=reason, started_at=ago(50.5))
        runs += [action_read(task="job", reason=reason), missed]
    shown = reader(tasks_=[task_status("job", **READ["failing"])], runs_=runs)
    for path in ("/runs", "/task?name=job", "/why?name=job"):
        assert len(shown.html(path).encode()) < 200_000, path
    text = shown.html("/runs?kind=schedule&outcome=error")
    assert "begin of 50<" not in text
    assert " end of 50<" in text
    assert "why " * 800 not in shown.html("/runs")
    assert "why " * 800 in shown.html("/runs?kind=operator")  # 20 of them
    by_itself = [html.unescape(link) for link in re.findall('href="(runs[?]q=[^"]+)"', text)]
    assert len(by_itself) == 50
    alone = shown.html(f"/{by_itself[49]}")
    assert "begin of 50 line" in alone
    assert " end of 50<" in alone
    assert "long text " * 49 in alone
    assert alone.count("<summary>traceback") == 1


def test_drawings_keep_no_tracebacks_and_short_texts() -> None:
    name = "n" * 1_000
    failed = {"task": name, "outcome": "error", "error": "e" * 4000, "traceback": "t" * 4000}
    shown = reader(
        tasks_=[task_status(name)],
        runs_=[
            run_read(token=1, **failed),
            run_read(token=2, **failed),
            action_read(task=name, reason="r" * 4000),
        ],
    )
    found = [each["run"] for lane in shown.twin("/timeline")["lanes"] for each in lane["entries"]]
    found += shown.twin("/tasks")["runs"][name]
    errors = [run["error"] for run in found if run["outcome"] == "error"]
    assert len(errors) == 4
    assert max(map(len, errors)) < 350
    assert not [run for run in found if run["traceback"]]
    for path in ("/", "/timeline", "/timeline?by=task"):
        titles = re.findall("<title>([^<]*)</title>", shown.html(path).partition("<body")[2])
        assert titles
        assert max(map(len, titles)) < 600, path
    assert "t" * 4000 in shown.html(f"/task?name={name}")


class TestTimeline:
    def test_a_pause_and_an_outage_are_shaded(self) -> None:
        shown = reader(
            tasks_=[task_status(name) for name in ("a", "b")],
            runs_=[
                *(run_read(task=name, **span(50, 49)) for name in ("a", "b")),
                action_read(task="a", started_at=ago(40), until=ago(30)),
                miss_read(task="b", cause="database", scheduled_at=ago(20)),
            ],
        )
        assert lanes(shown.html("/timeline?by=task")) == {
            "a": ["ok", "outage", "pause"],
            "b": ["missed", "ok", "outage"],
        }

    def test_a_pause_of_a_namespace_is_behind_the_lanes_of_its_tasks(self) -> None:
        names = ("shop:a", "shop:b", "other")
        pause = action_read(task="shop:*", started_at=ago(1), until=None)
        shown = reader(runs_=[pause, *(run_read(task=name, **span(50, 49)) for name in names)])
        assert lanes(shown.html("/timeline?by=task")) == {
            "shop:a": ["ok", "pause"],
            "shop:b": ["ok", "pause"],
            "other": ["ok"],
        }
        assert lanes(shown.html("/timeline")) == {"one": ["ok"]}

    def test_a_pause_of_all_tasks_is_behind_all_lanes(self) -> None:
        pause = action_read(task="*", started_at=ago(1), until=None)
        shown = reader(runs_=[pause, run_read(task="a", **span(50, 49))])
        assert lanes(shown.html("/timeline?by=task")) == {"a": ["ok", "pause"]}
        assert lanes(shown.html("/timeline")) == {"one": ["ok", "pause"]}

    def test_a_pause_ends_when_it_is_resumed(self) -> None:
        shown = reader(
            runs_=[
                run_read(task="a", **span(50, 49)),
                action_read(task="a", started_at=ago(40), until=None),
                action_read(task="a", outcome="resumed", started_at=ago(10), ended_at=ago(10)),
            ]
        )
        text = shown.html("/timeline?by=task")
        assert re.findall(r'class="pause" x="[\d.]+%" width="([\d.]+)%"', text) == ["50.0"]

    @pytest.mark.parametrize(
        ("query", "hours"),
        [
            ("", 1),
            ("hours=6", 6),
            ("night=2026-01-31", 12),
            ("since=2026-01-31T03:00&until=2026-01-31T05:00", 2),
            ("until=2026-01-31T05:00", 1),
            ("since=2026-01-31T05:00&until=2026-01-31T03:00", 1),
        ],
    )
    def test_the_span(self, query: str, hours: float) -> None:
        found = reader().twin(f"/timeline?{query}")
        assert _hours(found["since"], found["until"]) == hours

    @pytest.mark.parametrize(
        ("night", "hours"), [("2026-03-28", 11), ("2026-06-28", 12), ("2026-10-24", 13)]
    )
    @pytest.mark.parametrize("is_of_machine", [True, False])
    @pytest.mark.usefixtures("berlin")
    def test_a_night_in_which_the_clocks_change_is_as_long_as_it_is(
        self, night: str, hours: float, is_of_machine: bool
    ) -> None:
        begin = datetime.fromisoformat(f"{night}T20:00").replace(tzinfo=BERLIN)
        end = begin.astimezone(timezone.utc) + timedelta(hours=hours)
        times = {
            "started_at": end - timedelta(hours=1),
            "ended_at": end - timedelta(minutes=30),
        }
        zone = None if is_of_machine else BERLIN
        shown = reader(zone=zone, runs_=[run_read(task="a", **times)], now=end + timedelta(days=9))
        found = shown.twin(f"/timeline?night={night}")
        assert _hours(found["since"], found["until"]) == hours
        text = shown.html(f"/timeline?night={night}")
        assert ">20:00:00</time> to" in text.replace(f"{night} ", "")
        assert "08:00:00</time></h2>" in text
        [(x, width)] = re.findall(r'class="ok" x="([\d.]+)%" width="([\d.]+)%"', text)
        assert float(x) == pytest.approx(100 * (hours - 1) / hours, abs=0.02)
        assert float(width) == pytest.approx(50 / hours, abs=0.02)

    @pytest.mark.parametrize(
        ("until", "left", "right"), [(0, 75.0, 100), (-30, 25.0, 50), (5, 83.33, 100)]
    )
    def test_a_run_that_goes_on_reaches_the_present(
        self, until: float, left: float, right: float
    ) -> None:
        shown = reader(tasks_=[task_status("a", **{**READ["running"], "started_at": ago(15)})])
        text = shown.html(f"/timeline?until={(NOW + ago(until)).timestamp():.0f}")
        [(name, x, width)] = shapes(text)
        assert (name, x, x + width) == ("running", left, pytest.approx(right, abs=0.02))

    def test_it_shows_the_chosen_tasks_alone(self) -> None:
        running = {**READ["running"], "started_at": ago(3)}
        shown = reader(tasks_=[task_status(name, **running) for name in ("shop", "other")])
        assert lanes(shown.html("/timeline?by=task&q=shop")) == {"shop": ["running"]}

    def test_an_outage_is_one_shade(self) -> None:
        misses = [
            miss_read(task=name, cause="database", scheduled_at=ago(minutes))
            for name, minutes in (("a", 20), ("b", 19.5), ("c", 40))
        ]
        text = reader(runs_=misses).html("/timeline")
        assert text.count("the database did not answer") == 2  # on the one lane, of nobody

    def test_what_is_not_known_is_hatched_and_not_shown_as_nothing(self) -> None:
        """Left of where the history begins, also of a task of which nothing is kept any more."""
        shown = reader(
            tasks_=[task_status(name) for name in ("often", "gone", "whole")],
            runs_=[run_read(task=name, **span(20, 19)) for name in ("often", "whole")],
            known_since={"often": NOW + ago(45), "gone": NOW + ago(3)},
        )
        text = shown.html("/timeline?by=task")
        assert lanes(text) == {
            "often": ["ok", "unknown"],
            "whole": ["ok"],
            "gone": ["unknown"],
        }
        hatched = r'class="unknown" x="([\d.]+)%" width="([\d.]+)%"'
        assert re.findall(hatched, text) == [("0.0", "25.0"), ("0.0", "95.0")]
        assert "not kept: runs of the task before 11:15:00" in text
        assert text.count(">not kept</text>") == 2
        twin = shown.twin("/timeline?by=task")
        known = {lane["name"]: (lane["known_since"], lane["left_out"]) for lane in twin["lanes"]}
        assert known == {
            "often": ("2026-01-31T11:15:00Z", 0),
            "gone": ("2026-01-31T11:57:00Z", 0),
            "whole": (None, 0),
        }
        # Any replica may have run what is not kept.
        text = shown.html("/timeline")
        assert lanes(text) == {"one": ["ok", "unknown"]}
        assert "not kept: runs of some of the tasks before 11:57:00" in text
        assert "Before 11:57:00 the history has not every run." in shown.words(
            "/timeline?hours=1&until=2026-01-31T09:00"
        )

    def test_what_is_left_out_is_hatched_with_its_number(self) -> None:
        lane = Lane("a", NOW + ago(50), 7, NOW + ago(20))
        known = Known(answers={"lanes": Lanes(NOW, (lane,), 1)})
        text = Reader(known).html("/timeline?by=task")
        assert re.findall(r'class="unknown" x="([\d.]+)%" width="([\d.]+)%"', text) == [
            ("0.0", "16.67"),
            ("16.67", "50.0"),
        ]
        assert "not kept here: 7 more runs that ended well until 11:40:00" in text

    def test_lanes_come_in_parts_those_with_trouble_first(self) -> None:
        runs = [run_read(task=f"t{number:03}", **span(20, 19)) for number in range(120)]
        bad = [
            run_read(task="t110", token=2, outcome="died", **span(40, 39)),
            miss_read(task="t090", cause="misfire", scheduled_at=ago(10)),
            miss_read(task="t080", scheduled_at=ago(10)),  # of a pause, which an operator knows
        ]
        stuck = {**READ["too long"], "started_at": ago(50)}
        shown = reader(runs_=[*runs, *bad], tasks_=[task_status("t100", **stuck)])
        first = list(lanes(shown.html("/timeline?by=task")))
        assert (first[:4], len(first)) == (["t100", "t110", "t090", "t000"], 50)
        text = shown.html("/timeline?by=task&from=50")
        assert "tasks 51 to 100 of 120; those with trouble come first" in text
        assert 'href="?by=task&amp;from=0"' in text
        assert 'href="?by=task&amp;from=100"' in text
        last = lanes(shown.html("/timeline?by=task&from=100"))
        assert len({*first, *lanes(text), *last}) == 120
        assert len(lanes(shown.html("/timeline?by=task&from=500"))) == 0
        assert "and 70 more tasks" in shown.words("/?by=task")

    def test_a_shape_is_a_link_to_its_run(self) -> None:
        failed = run_read(task="a/b #", token=3, outcome="error", **span(20, 10))
        beside = run_read(task="a/b #", token=4, **span(20.1, 10))
        longer = run_read(task="a/b # and more", token=5, **span(20, 10))
        several = [run_read(task="c", **span(n / 1000, 0)) for n in range(1, 10)]
        shown = reader(
            runs_=[failed, beside, longer, *several],
            tasks_=[task_status("d", **{**READ["running"], "started_at": ago(3)})],
        )
        for by in ("task", "replica"):
            text = shown.html(f"/timeline?by={by}")
            links = re.findall('<a href="(runs[?]name=a[^"]*)"', text)
            listed = [shown.twin(f"/{html.unescape(link)}")["runs"] for link in links]
            assert sorted(each["token"] for [each] in listed) == [3, 4, 5]
            assert '<a href="task?name=d"' in text
            [link] = re.findall('<a href="(runs[?][^"]*)"[^>]*><title>c [^<]*: 9 runs', text)
            assert len(shown.twin(f"/{html.unescape(link)}")["runs"]) == 9
        # A missed run time is listed at its time, however late it was noted.
        missed = miss_read(task="m", scheduled_at=ago(40), started_at=ago(20), ended_at=ago(20))
        shown_too = reader(runs_=[missed])
        [at_it] = re.findall('<a href="(runs[?]name=m[^"]*)"', shown_too.html("/timeline?by=task"))
        assert len(shown_too.twin(f"/{html.unescape(at_it)}")["runs"]) == 1
        assert "11:20:00" in shown_too.words(f"/{html.unescape(at_it)}")
        # The fields of the list have what the address says.
        text = shown.html(f"/{html.unescape(link)}")
        assert 'name="since" value="2026-01-31T11:59:59"' in text
        assert 'placeholder="part of a name, or a*b"' in text

    def test_one_shape_of_a_lane_is_a_stop_of_the_tabulator_and_that_is_the_worst(self) -> None:
        outcomes = {n: "error" if n == 5 else "ok" for n in range(20)}
        runs = [
            run_read(task="a", token=n, outcome=how, **span(50 - n, 49.5 - n))
            for n, how in outcomes.items()
        ]
        text = reader(runs_=runs).html("/timeline")
        [(_, rest)] = re.findall(r'<a href="runs[^"]*"(>)<title>([^<]*)', text)
        assert rest.startswith("a 11:15:00, error")
        assert text.count('tabindex="-1"') == 19 + text.count('id="content" tabindex="-1"')

    def test_the_form_keeps_the_span(self) -> None:
        text = reader().html("/timeline?hours=6")
        assert '<input type="hidden" name="hours" value="6">' in text
        assert '<a href="timeline?night=2026-01-30&amp;by=replica">last night<' in text

    def test_the_spans_beside_it_are_links(self) -> None:
        shown = reader(now=NOW + timedelta(days=1))
        text = shown.html("/timeline?night=2026-01-30&by=task&q=a%26b")
        for name in ("earlier", "later", "closer", "wider"):
            assert re.search(
                rf'href="timeline\?since=\d+&amp;until=\d+&amp;by=task&amp;q=a%26b">{name}<', text
            )
        assert ">later<" not in shown.html("/timeline")


def shapes(text: str) -> list[tuple[str, float, float]]:
    """Return the class, the left edge and the width of each shape of a page, as it is drawn."""
    found = re.findall(
        r'</title><rect class="(\w+)" x="([\d.]+)%" width="([\d.]+)%" y="[\d.]+" height="\d+"/>',
        text,
    )
    return [(name, float(x), float(width)) for name, x, width in found]


def _hours(since: str, until: str) -> float:
    begin, end = (datetime.fromisoformat(each.replace("Z", "+00:00")) for each in (since, until))
    return (end - begin).total_seconds() / 3600


def test_replicas_tell_what_each_holds_and_which_leads() -> None:
    run = RunningRun("a", 7, "web-1", NOW + ago(1))
    shown = reader(
        tasks_=[task_status("a", **{**READ["running"], "holder": "web-1"})],
        replicas_=[
            replica_status("web-1", tasks=("a",), running=(run,)),
            replica_status("gone", seen_at=ago(3000), state=ReplicaState.SILENT),
        ],
    )
    words = shown.words("/replicas")
    assert "web-1" in words
    assert "alive" in words
    assert "a since" in words
    assert "leads" not in words
    assert "1 older replica has given no sign of life for a day." in words


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("", ["web-2", "web-1", "web-3"]),
        ("order=name", ["web-1", "web-2", "web-3"]),
        ("q=web-?&order=state", ["web-2", "web-1", "web-3"]),
        ("q=3", ["web-3"]),
        ("q=nothing", []),
    ],
)
def test_replicas_are_filtered_and_ordered(query: str, names: list[str]) -> None:
    silent = {"state": ReplicaState.SILENT, "seen_at": ago(5)}
    replicas = [
        replica_status("web-1"),
        replica_status("web-2", started_at=ago(100)),
        replica_status("web-3", **silent),
    ]
    shown = reader(replicas_=replicas)
    assert [each["replica_id"] for each in shown.twin(f"/replicas?{query}")["replicas"]] == names
    assert ("No replica matches." in shown.words(f"/replicas?{query}")) is (not names)


def test_the_replica_that_leads_is_told() -> None:
    leads = replica_status("web-1", leader_namespace="", leads=True)
    follows = replica_status("web-2", leader_namespace="")
    words = reader(replicas_=[leads, follows]).words("/replicas")
    assert re.search(r"web-1 .*alive leads", words)
    assert not re.search(r"web-2 .*alive leads", words)


class TestJobs:
    def test_they_tell_the_names_of_arguments_and_not_their_values(self) -> None:
        words = reader(jobs_=[job_status("job-1")]).words("/jobs")
        assert "job-1" in words
        assert "args[0]" in words
        assert "Remove" not in words

    def test_the_values_of_arguments_are_for_operators(self) -> None:
        arguments = {"args[0]": "x<y", "k": 7}
        known = Known(
            jobs_=[job_status("job-1", argument_names=tuple(arguments))],
            arguments={"job-1": arguments},
        )
        shown = Reader(known)
        words = shown.words("/job?id=job-1")
        assert "args[0], k" in words
        assert "The values are for operators." in words
        assert "x&lt;y" not in words
        assert shown.twin("/job?id=job-1")["arguments"] is None
        operator = Reader(known, may_operate=True)
        assert "args[0] &#34;x&lt;y&#34; k 7" in operator.words("/job?id=job-1")
        assert operator.twin("/job?id=job-1")["arguments"] == arguments

    @pytest.mark.parametrize(
        ("replicas", "why"),
        [
            ([], "none is alive"),
            ([replica_status("web-1", stopping_since=ago(1))], "each live one stops"),
            ([replica_status("web-1")], "no live one lists it"),
            ([replica_status("web-1", tasks=("sent",))], "web-1 lists it, but does not claim it"),
        ],
    )
    def test_why_no_replica_claims_an_overdue_one_is_told_as_on_the_overview(
        self, replicas: list[ReplicaStatus], why: str
    ) -> None:
        overdue = {"state": JobState.OVERDUE, "next_run_time": ago(5), "task": "sent"}
        shown = reader(jobs_=[job_status("job-1", **overdue)], replicas_=replicas)
        for page in ("/jobs", "/job?id=job-1"):
            assert f"no replica claims it: {why}" in shown.words(page)
        assert f"that no replica claims: {why}" in shown.words("/")

    @pytest.mark.parametrize("has_task", [False, True])
    def test_a_task_that_has_no_page_yet_is_no_link(self, has_task: bool) -> None:
        shown = reader(jobs_=[job_status("job-1", task="sent", has_task=has_task)])
        for page in ("/jobs", "/job?id=job-1"):
            assert "sent" in shown.words(page)
            assert ('href="task?name=sent"' in shown.html(page)) is has_task

    def test_they_are_ordered_and_come_in_parts(self) -> None:
        jobs = [job_status(f"job-{n:03}", next_run_time=ago(-200 + n)) for n in range(60)]
        shown = reader(jobs_=jobs)
        for order, first, other in (("due", 59, 0), ("name", 0, 59)):
            parts = [shown.twin(f"/jobs?order={order}&page={page}") for page in (1, 2)]
            ids = [job["id"] for part in parts for job in part["jobs"]]
            assert (ids[0], ids[-1], len(ids)) == (f"job-{first:03}", f"job-{other:03}", 60)
            assert [part["more"] for part in parts] == [True, False]

    def test_without_jobs_it_says_where_those_in_memory_are(self) -> None:
        assert "Jobs in memory are on the page Tasks" in reader().words("/jobs")


def test_the_set_up_shows_what_the_doctor_finds() -> None:
    shown = reader(findings=[Finding("connection", "ok", "connection to a server")])
    assert "connection to " in shown.words("/setup")
    [finding] = shown.twin("/setup")["findings"]
    assert {"what", "level", "says", "remedy"} <= set(finding)


def test_only_the_tasks_of_the_namespace_are_shown() -> None:
    kinds = (("shop:a", "failing"), ("other:b", "overdue"), ("shop:c", "paused"))
    shown = reader(
        namespace="shop:",
        tasks_=[task_status(name, **READ[kind]) for name, kind in kinds],
        runs_=[run_read(task=n, outcome="error", **span(5, 4)) for n in ("shop:a", "other:b")],
    )
    for path in ("/", "/tasks", "/runs", "/timeline?by=task", "/tasks?q=b"):
        assert "other:b" not in shown.html(path)
    assert "shop:a" in shown.words("/tasks?q=a")
    for path in ("/task?name=other:b", "/why?name=other:b"):
        with pytest.raises(TaskLockNotFoundError):
            shown.html(path)


def test_a_state_is_counted_once() -> None:
    """A stored job that is overdue may lack a task, so that the states of tasks count one fewer."""
    late = job_status("a", state=JobState.OVERDUE, next_run_time=seconds(-400))
    page = reader(tasks_=[task_status("b", **READ["overdue"])], jobs_=[late]).words("/")
    assert "2 tasks are overdue" in page
    assert "overdue 1" not in page


def test_more_paused_tasks_than_are_listed_are_counted() -> None:
    names = [f"task-{number:02}" for number in range(26)]
    page = reader(tasks_=[task_status(name, **READ["failing, paused"]) for name in names]).words(
        "/"
    )
    listed = sum(f" {name} " in page for name in names)
    assert ("paused 26" in page, f"and {26 - listed} more: paused tasks" in page) == (True, True)


def test_times_of_a_page_count_to_its_read() -> None:
    """What is due later than the read may have run since."""
    seen_by = Reader(Known(tasks_=[task_status("mail", due_at=seconds(3))]))  # type: ignore[arg-type]
    assert "12:00:03 in 3 s" in seen_by.words("/")
    seen_by.seconds += 4
    assert "12:00:03 in 3 s" in seen_by.words("/")


def test_a_page_tells_when_it_was_read() -> None:
    assert "read at 12:00:00, which took" in reader().words("/")


def test_a_page_whose_reads_take_too_long_reads_the_rest_when_it_is_refreshed() -> None:
    class Slow(Known):
        def overview(self, *patterns: str, **options: Any) -> Any:
            seen_by.seconds += 30
            return super().overview(*patterns, **options)

    runs = [run_read(task="mail", outcome="error", error_type="OSError", **span(5, 4))]
    seen_by = Reader(Slow(tasks_=[task_status("mail")], runs_=runs))  # type: ignore[arg-type]
    page = seen_by.words("/")
    assert "A part of this page could not be read. The other reads of this page have" in page
    assert "OSError" not in page
    seen_by.seconds += 10
    page = seen_by.words("/")
    assert "could not be read" not in page
    assert "OSError" in page
    seen_by.seconds += 3600  # what was read before is shown, and no gap
    page = seen_by.words("/")
    assert "could not be read" not in page
    assert "OSError" in page


def test_a_page_tells_how_old_it_is_in_the_first_moments_of_an_outage() -> None:
    """What was read a moment ago is not read again yet, and the rest cannot be."""

    class Away(Known):
        away = False

        def runs(self, *patterns: str, **options: Any) -> Any:
            if self.away:
                raise TaskLockDatabaseError("the server closed the connection")
            return super().runs(*patterns, **options)

    known = Away(tasks_=[task_status("mail")])
    seen_by = Reader(known)  # type: ignore[arg-type]
    seen_by.words("/runs")
    seen_by.seconds += 60
    seen_by.words("/tasks")
    known.away = True
    page = seen_by.words("/runs")
    assert "could not be read. the server closed the connection. Some of what it shows was " in page
    assert "was read 1 min ago." in page


def test_a_page_tells_one_moment_also_if_a_part_was_read_later() -> None:
    """What another page has read a moment ago is newer than the overview that viewers share."""

    class Counted(Known):
        read = 0

        def overview(self, *patterns: str, **options: Any) -> Any:
            self.read += 1
            return super().overview(*patterns, **options)

    known = Counted(tasks_=[task_status("mail", **READ["running"])])
    seen_by = Reader(known)  # type: ignore[arg-type]
    seen_by.words("/tasks")
    seen_by.seconds += 3
    known.tasks_ = [task_status("mail")]  # its run has ended
    assert "Nothing runs." in seen_by.words("/")
    assert known.read == 2
    seen_by.seconds += 0.5
    seen_by.words("/runs")
    assert known.read == 2


class Away(Known):
    """Its database is away if it is said to be."""

    away = False

    def overview(self, *patterns: str, **options: Any) -> Any:
        if self.away:
            raise TaskLockDatabaseError("the server closed the connection")
        return super().overview(*patterns, **options)


def test_lanes_of_an_outage_are_not_known_from_their_read_on() -> None:
    known = Away(tasks_=[task_status("mail", **{**READ["running"], "started_at": ago(15)})])
    seen_by = Reader(known)  # type: ignore[arg-type]
    seen_by.html("/timeline?by=task")
    seen_by.seconds += 900
    known.now = NOW + timedelta(minutes=15)
    seen_by.words("/tasks")
    known.away = True
    seen_by.seconds += 9
    text = seen_by.html("/timeline?by=task")
    assert "12:15:00</time></h2>" in text
    hatched = r'class="unknown" x="([\d.]+)%" width="([\d.]+)%"[^>]*><title>([^<]*)'
    assert re.findall(hatched, text) == [("75.0", "25.0", "not known: this was read at 12:00:00")]
    [(name, x, width)] = shapes(text)
    assert (name, x, x + width) == ("running", 50.0, 75.0)
    assert ">not known</text>" in text


def test_a_replicas_page_of_an_outage_is_of_one_read() -> None:
    run = RunningRun("a", 7, "web-1", NOW + ago(1))
    replica = replica_status("web-1", tasks=("a",), running=(run,))
    idle = replica_status("web-2")
    known = Away(tasks_=[task_status("a", **READ["running"])], replicas_=[replica, idle])
    seen_by = Reader(known)  # type: ignore[arg-type]
    for name in ("web-1", "web-2"):
        seen_by.words(f"/replica?id={name}")
    seen_by.seconds += 180
    known.now = NOW + timedelta(minutes=3)
    late = RunningRun("b", 8, "web-1", NOW + timedelta(minutes=2.9))
    known.replicas_ = [replace(replica, running=(run, late)), replace(idle, seen_at=known.now)]
    seen_by.words("/replicas")
    known.away = True
    seen_by.seconds += 9
    words = seen_by.words("/replica?id=web-1")
    assert "This page shows what was read 3 min 9 s ago." in words
    assert "a 11:59:00 1 min it is not run again" in words
    assert "b 12:02:54" not in words
    words = seen_by.words("/replica?id=web-2")
    assert "This page shows what was read 3 min 9 s ago." in words
    assert "its last sign of life was at 12:00:00" in words


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"tasks": ("a",), "state": ReplicaState.STOPPED}, "Nothing any more."),
        ({"tasks": ("a",), "state": ReplicaState.DIED}, "Nothing any more."),
        ({"tasks": ("a",), "state": ReplicaState.SILENT}, "No other live replica has this task: a"),
        ({"tasks": ("b",)}, "Nothing: other live replicas have each of its tasks."),
        ({}, "It has no tasks."),
    ],
)
def test_what_only_a_replica_can_run(columns: dict[str, Any], says: str) -> None:
    replicas = [replica_status("web-1", **columns), replica_status("web-2", tasks=("b",))]
    words = reader(tasks_=[task_status("a")], replicas_=replicas).words("/replica?id=web-1")
    assert f"What only it can run {says} " in words


TOO_SLOW = TaskLockError("the read is too slow: the server has ended it after 3.0 s")


def test_a_part_that_is_too_slow_leaves_a_gap() -> None:
    class Slow(Known):
        def lanes(self, *_patterns: str, **_options: Any) -> Any:
            raise TOO_SLOW

    runs = [run_read(task="mail", outcome="error", error_type="OSError", **span(5, 4))]
    page = Reader(Slow(tasks_=[task_status("mail")], runs_=runs)).words("/")
    assert "A part of this page could not be read. the read is too slow: the server has" in page
    assert "OSError" in page


def test_an_overview_that_is_too_slow_is_told_as_that() -> None:
    class Slow(Known):
        def overview(self, *_patterns: str, **_options: Any) -> Any:
            raise TOO_SLOW

    answer = TestClient(app(Slow())).get("/")
    assert answer.status_code == 503
    assert "The database has rejected this, or took too long" in answer.text
    assert "the read is too slow" in answer.text
    assert "could not be asked" not in answer.text


def test_the_state_of_a_task_is_in_each_list() -> None:
    """Which state a task has is read of the database; here, that a page shows that one."""
    for kind, columns in READ.items():
        task = task_status("a", **columns)
        listed = reader(tasks_=[task]).words("/tasks")
        assert f" a {task.state.value} " in listed, kind
        # A state that the first line tells is not counted again.
        words, state = reader(tasks_=[task]).words("/"), task.state.value
        assert re.search(f"1 task [a-z ]*{state}", words) or f"{state} 1" in words, kind
