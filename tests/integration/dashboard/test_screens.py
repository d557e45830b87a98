"""What the dashboard's pages and their JSON twins show, from rows as replicas write them."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest
from apscheduler.triggers.interval import IntervalTrigger
from psycopg import sql

from apscheduler_tasklock._runs.task_names import canonical_schedule
from apscheduler_tasklock.dashboard import Access, dashboard
from tests.integration.dashboard.conftest import Open
from tests.support.asgi_client import TestClient
from tests.support.polling import eventually
from tests.support.rows import (
    DIED,
    FAILING,
    NEW,
    OVERDUE,
    OVERRAN,
    PAUSED,
    RETRYING,
    RUNNING,
    add_action,
    add_job,
    add_miss,
    add_replica,
    add_run,
    add_task,
)

Connection = psycopg.Connection[Any]


@pytest.fixture
def client(database_url: str) -> Iterator[TestClient]:
    with TestClient(dashboard(database_url), "http://127.0.0.1") as client:
        yield client


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this machine be in Berlin."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def ago(minutes: float) -> str:
    return f"now() - interval '{minutes} min'"


def span(began: float, ended: float) -> dict[str, str]:
    """Return the times of a run between two times, in minutes ago."""
    return {"scheduled_at": ago(began), "started_at": ago(began), "ended_at": ago(ended)}


def page(client: TestClient, path: str) -> str:
    """Return a page without its tags, in which one space stands for each stretch of white space."""
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    words = re.sub(r"<style.*?</style>|<title>.*?</title>|<[^>]*>", " ", answer.text, flags=re.S)
    return re.sub(r"\s+", " ", words)


def lanes(client: TestClient, path: str) -> dict[str, list[str]]:
    """Return the classes of the shapes and shades on each lane of a page."""
    found = re.findall(
        r'aria-label="([^"]*): [^"]*">(.*?)</svg>', client.get(path).text, flags=re.S
    )
    return {name: sorted(set(re.findall(r'rect class="(\w+)"', svg))) for name, svg in found}


class TestOverview:
    def test_without_tasks_it_says_that_none_has_registered(self, client: TestClient) -> None:
        words = page(client, "/")
        assert "All is well. No replica has registered a task so far." in words
        assert "Nothing runs." in words
        assert "Nothing failed, and nothing was missed." in words

    def test_all_is_well_with_the_number_of_tasks_and_replicas(
        self, client: TestClient, connection: Connection
    ) -> None:
        add_task(connection, "a")
        add_replica(connection, "web-1", ["a"])
        assert "All is well. 1 task, 1 replica alive." in page(client, "/")

    def test_each_thing_that_is_not_well_is_a_link(
        self, client: TestClient, connection: Connection
    ) -> None:
        for name, columns in (("a", FAILING), ("b", OVERDUE), ("c", OVERDUE)):
            add_task(connection, name, **columns)
        text = client.get("/").text
        assert '<a href="tasks?state=overdue">2 tasks are overdue</a>' in text
        assert '<a href="tasks?state=failing">1 task is failing</a>' in text
        assert '<a href="replicas">no replica is alive</a>' in text
        assert "All is well" not in text
        assert "3 in a row, the last with ValueError" in page(client, "/")

    def test_stored_jobs_that_no_replica_claims_are_a_link(
        self, client: TestClient, database_url: str, connection: Connection
    ) -> None:
        """They may have no task, so that nothing else on the page has them."""
        due = {"next_run_time": ago(5), "changed_at": ago(60)}
        add_job(connection, "unclaimed", **due)
        add_job(connection, "claimed", task_name="'web:claimed'", **due)
        add_job(connection, "waits")
        assert '<a href="jobs">2 stored jobs are overdue</a>' in client.get("/").text
        assert client.get("/overview.json").json()["overdue_jobs"] == 2
        with TestClient(dashboard(database_url, namespace="shop:"), "http://127.0.0.1") as other:
            assert '<a href="jobs">1 stored job is overdue</a>' in other.get("/").text

    @pytest.mark.parametrize(
        ("row", "said"),
        [
            (FAILING, "3 in a row, the last with ValueError"),
            (DIED, "2 in a row, the last died with its holder"),
            (OVERRAN, "1 in a row, the last has overrun its maximum lock"),
            (RETRYING, "failed (ValueError), its retry is due at"),
        ],
    )
    def test_a_failure_is_told_also_without_an_exception(
        self, row: dict[str, str], said: str, client: TestClient, connection: Connection
    ) -> None:
        add_task(connection, "a", **row)
        text = page(client, "/")
        assert said in text
        assert "None" not in text

    def test_a_pause_of_all_tasks_is_in_the_first_line(
        self, client: TestClient, connection: Connection, make_task_locks: Any
    ) -> None:
        add_task(connection, "a")
        make_task_locks().pause_all(duration=3600, by="ann", reason="the database moves")
        words = page(client, "/")
        assert "all tasks: paused by ann until " in words
        assert "(the database moves)" in words

    def test_the_last_hour_has_a_lane_for_each_replica_and_one_for_nobody(
        self, client: TestClient, connection: Connection
    ) -> None:
        add_task(
            connection,
            "now",
            **{**RUNNING, "locked_by": "'web-3'", "started_at": ago(1)},
        )
        add_run(connection, "a", 1, replica="'web-1'", **span(30, 29))
        add_run(connection, "a", 2, replica="'web-2'", kind="'takeover'", **span(20, 18))
        add_run(connection, "a", 3, replica="'web-2'", outcome="'error'", **span(10, 9))
        add_run(connection, "a", 4, replica="'old'", **span(130, 129))
        add_miss(connection, "a", 1, scheduled_at=ago(40))
        assert lanes(client, "/") == {
            "web-1": ["ok"],
            "web-2": ["again", "bad"],
            "web-3": ["running"],
            "nobody": ["missed"],
        }
        assert lanes(client, "/?by=task") == {
            "a": ["again", "bad", "missed", "ok"],
            "now": ["running"],
        }

    def test_failures_and_misses_of_the_last_day_come_with_their_reasons(
        self, client: TestClient, connection: Connection
    ) -> None:
        add_task(connection, "a")
        add_run(
            connection,
            "a",
            1,
            outcome="'error'",
            error_type="'KeyError'",
            error="'no price'",
            **span(600, 599),
        )
        add_run(connection, "a", 2, outcome="'error'", error="'long ago'", **span(3000, 2999))
        add_run(connection, "a", 3, outcome="'died'", **span(700, 699))
        add_run(connection, "b", 1, outcome="'died'", **span(800, 799))
        add_miss(connection, "c", 1, cause="'misfire'", reason="'late by 3 s'")
        add_miss(connection, "paused", 1)
        words = page(client, "/")
        assert "KeyError: no price and 1 more" in words
        assert "its replica died, or could not reach the database" in words
        assert "at most 1 min" in words
        assert ": late by 3 s why?" in words
        assert "long ago" not in words
        # Operators know of their pauses, which the lanes show.
        assert "the task was paused" not in words
        assert [each["task"] for each in client.get("/overview.json").json()["troubles"]] == [
            *("c", "a", "a", "b"),
        ]

    def test_a_run_that_has_outlived_its_lock_is_told_with_its_own_replica(
        self, client: TestClient, connection: Connection
    ) -> None:
        add_task(connection, "a", **{**RUNNING, "locked_by": "'web-4'", "token": "9"})
        add_replica(
            connection,
            "web-3",
            ["a"],
            running="""jsonb_build_array(jsonb_build_object('task', 'a', 'token', 7, 'lost', true,
                'since', extract(epoch FROM now() - interval '15 min')))""",
        )
        words = page(client, "/")
        assert "1 task runs too long" in words
        assert "still goes on: on web-3 since" in words
        assert re.search(r"Runs now .* a too long 15 min web-3 a [\d.]+ \w+ web-4", words)

    def test_what_runs_and_what_is_due(self, client: TestClient, connection: Connection) -> None:
        add_task(connection, "a", **{**RUNNING, "locked_by": "'web-1'", "started_at": ago(3)})
        due = {"due_at": "now() + interval '4 min'", "overdue_at": "now() + interval '6 min'"}
        add_task(connection, "b", **due)
        words = page(client, "/")
        assert re.search(r"Runs now task for on a 3 min( \d s)? web-1", words)
        assert re.search(r"Due next .* b [\d:]+ in (4 min|3 min 5\d s)", words)

    @pytest.mark.parametrize(("number", "is_said"), [(20, False), (22, True)])
    def test_a_list_says_how_many_tasks_are_not_in_it(
        self, number: int, is_said: bool, client: TestClient, connection: Connection
    ) -> None:
        for place in range(number):
            add_task(connection, f"runs-{place:02}", **RUNNING)
            add_task(connection, f"fails-{place:02}", **FAILING)
        text = page(client, "/")
        assert ("and 2 more: tasks that run" in text) is is_said
        assert ("and 2 more: tasks, the worst first" in text) is is_said
        assert ("more: " in text) is is_said

    def test_of_runs_that_go_on_those_of_the_filter_are_drawn(
        self, client: TestClient, connection: Connection
    ) -> None:
        for number in range(25):
            add_task(connection, f"other-{number:02}", **{**RUNNING, "started_at": ago(2)})
        add_task(connection, "wanted", **RUNNING)
        text = client.get("/timeline?q=wanted&by=task").text
        assert text.count('rect class="running"') == 1
        assert "wanted since" in text
        assert "more runs go on" not in text
        assert "6 more runs go on than are drawn" in client.get("/timeline?by=task").text


class TestTasks:
    def test_a_task_has_its_state_schedule_and_last_runs(
        self, client: TestClient, connection: Connection
    ) -> None:
        schedule = sql.Literal(canonical_schedule(IntervalTrigger(minutes=5))).as_string(None)
        add_task(connection, "a", schedule=schedule, **FAILING)
        add_run(connection, "a", 1, **span(20, 19))
        add_run(connection, "a", 2, outcome="'error'", **span(10, 9))
        words = page(client, "/tasks")
        assert "a failing 3 failures in a row" in words
        assert "every 5 min" in words
        assert 'aria-label="2 runs, 1 failed"' in client.get("/tasks").text

    @pytest.mark.parametrize(
        ("query", "names"),
        [
            ("", ["shop:b", "c", "a"]),
            ("order=urgency", ["shop:b", "c", "a"]),
            ("order=no+such+order", ["shop:b", "c", "a"]),
            ("order=name", ["a", "c", "shop:b"]),
            ("order=due", ["c", "a", "shop:b"]),
            ("q=shop", ["shop:b"]),
            ("q=s*b", ["shop:b"]),
            ("q=?&order=name", ["a", "c"]),
            ("state=new", ["c"]),
            ("state=no+such+state", ["shop:b", "c", "a"]),
            ("q=shop&state=ok", []),
        ],
    )
    def test_they_are_filtered_and_ordered(
        self, client: TestClient, connection: Connection, query: str, names: list[str]
    ) -> None:
        for name, minutes, columns in (("a", 2, {}), ("shop:b", 3, FAILING), ("c", 1, NEW)):
            due = f"now() + interval '{minutes} min'"
            add_task(
                connection, name, due_at=due, overdue_at=f"{due} + interval '9 min'", **columns
            )
        found = client.get(f"/tasks.json?{query}").json()
        assert [task["name"] for task in found["tasks"]] == names

    def test_they_come_in_parts(self, client: TestClient, connection: Connection) -> None:
        for number in range(120):
            add_task(connection, f"t{number:03}")
        parts = [client.get(f"/tasks.json?order=name&page={part}").json() for part in (1, 2, 3, 4)]
        assert [(len(part["tasks"]), part["more"]) for part in parts] == [
            (50, True),
            (50, True),
            (20, False),
            (0, False),
        ]
        text = client.get("/tasks?order=name&page=2&q=t").text
        assert 'href="?order=name&amp;page=1&amp;q=t"' in text
        assert 'href="?order=name&amp;page=3&amp;q=t"' in text

    def test_nothing_that_matches_is_not_taken_for_no_tasks(
        self, client: TestClient, connection: Connection
    ) -> None:
        add_task(connection, "a")
        assert "No task matches." in page(client, "/tasks?q=nothing")


class TestTask:
    def test_it_has_facts_runs_misses_and_what_operators_did(
        self, client: TestClient, connection: Connection
    ) -> None:
        add_task(connection, "a/b ?#", **FAILING)
        add_replica(connection, "web-1", ["a/b ?#"])
        for token in range(1, 8):
            add_run(connection, "a/b ?#", token, **span(10 * token, 10 * token - 1))
        add_run(
            connection, "a/b ?#", 9, outcome="'error'", traceback="'File \"a.py\"'", **span(5, 4)
        )
        add_miss(connection, "a/b ?#", 1)
        add_action(connection, "a/b ?#", 1)
        words = page(client, "/task?name=a%2Fb%20%3F%23")
        assert "a/b ?# failing" in words
        assert "replicas web-1" in words
        assert "The last 8 runs, the newest at the right. The upper edge is 1 min." in words
        assert "Eight of ten runs that ended well took 1 min to 1 min, the band." in words
        assert "traceback File &#34;a.py&#34;" in words
        assert ": the task was paused why?" in words
        assert "paused by ann@ops" in words
        twin = client.get("/task.json?name=a%2Fb%20%3F%23").json()
        assert [len(twin[each]) for each in ("runs", "misses", "actions")] == [8, 1, 1]

    def test_an_unknown_task_is_404(self, client: TestClient) -> None:
        answer = client.get("/task?name=none")
        assert answer.status_code == 404
        assert "none" in answer.text
        assert client.get("/task.json?name=none").status_code == 404

    def test_a_name_is_no_pattern(self, client: TestClient, connection: Connection) -> None:
        for name in ("a*", "ab"):
            add_task(connection, name)
            add_run(connection, name, 1, **span(5, 4))
        twin = client.get("/task.json?name=a*").json()
        assert (twin["task"]["name"], [run["task"] for run in twin["runs"]]) == ("a*", ["a*"])


def test_why_tells_the_story_of_a_moment(client: TestClient, connection: Connection) -> None:
    add_task(connection, "a", started_at=ago(100), window_start=ago(100), window_until=ago(99))
    add_miss(connection, "a", 1)
    at = connection.execute("SELECT now() - interval '30 min'").fetchone()
    assert at is not None
    words = page(client, f"/why?name=a&at={at[0].timestamp()}")
    assert "missed" in words
    assert "the task was paused" in words
    twin = client.get(f"/why.json?name=a&at={at[0].timestamp()}").json()
    assert twin["story"]["verdict"] == "missed"


class TestRuns:
    @pytest.mark.parametrize(
        ("query", "tokens"),
        [
            ("", [3, None, 2, 1]),
            ("outcome=error", [2]),
            ("outcome=bad", [None, 2]),
            ("outcome=missed", [None]),
            ("kind=takeover", [3]),
            ("replica=web-2", [2]),
            ("q=b", [3]),
            ("since={since}", [3]),
            ("until={since}", [None, 2, 1]),
        ],
    )
    def test_they_are_filtered(
        self,
        client: TestClient,
        connection: Connection,
        query: str,
        tokens: list[int | None],
    ) -> None:
        add_run(connection, "a", 1, replica="'web-1'", **span(90, 89))
        add_run(connection, "a", 2, replica="'web-2'", outcome="'error'", **span(80, 79))
        add_run(connection, "b", 3, replica="'web-1'", kind="'takeover'", **span(10, 9))
        add_miss(connection, "a", 1)
        row = connection.execute("SELECT now() - interval '20 min'").fetchone()
        assert row is not None
        query = query.format(since=row[0].timestamp())
        found = client.get(f"/runs.json?{query}").json()["runs"]
        assert [run["token"] for run in found] == tokens

    def test_many_that_began_together_come_in_parts(
        self, client: TestClient, connection: Connection
    ) -> None:
        for number in range(120):
            add_run(connection, f"t{number}", 1, started_at="'2026-01-01'")
        parts = [client.get(f"/runs.json?page={part}").json() for part in (1, 2, 3)]
        names = [run["task"] for part in parts for run in part["runs"]]
        assert len(names) == len(set(names)) == 120
        assert [part["more"] for part in parts] == [True, True, False]


def test_lists_of_long_texts_are_short_and_a_run_by_itself_has_all_of_its_own(
    client: TestClient, connection: Connection
) -> None:
    add_task(connection, "job", **FAILING)
    for number in range(1, 101):
        began_at = f"now() - interval '{number} min'"
        add_run(
            connection,
            "job",
            number,
            started_at=began_at,
            outcome="'error'",
            error="repeat('long text ', 50)",
            traceback=f"'begin of {number}' || repeat(' line', 780) || ' end of {number}'",
        )
    for slot in range(20):
        add_action(connection, "job", slot, reason="repeat('why ', 900)")
        add_miss(connection, "job", slot, reason="repeat('why ', 900)")
    for path in ("/runs", "/task?name=job", "/why?name=job"):
        assert len(client.get(path).content) < 200_000, path
    text = client.get("/runs?kind=schedule&outcome=error").text
    assert "begin of 50<" not in text
    assert " end of 50<" in text
    assert "why " * 800 not in client.get("/runs").text
    assert "why " * 800 in client.get("/runs?kind=operator").text  # 20 of them
    by_itself = [html.unescape(link) for link in re.findall('href="(runs[?]q=[^"]+)"', text)]
    assert len(by_itself) == 50
    alone = client.get(f"/{by_itself[49]}").text
    assert "begin of 50 line" in alone
    assert " end of 50<" in alone
    assert alone.count("<summary>") == 1


def test_drawings_keep_no_tracebacks_and_short_texts(
    client: TestClient, connection: Connection
) -> None:
    name = "n" * 1_000
    add_task(connection, name)
    failed = {"outcome": "'error'", "error": "repeat('e', 4000)", "traceback": "repeat('t', 4000)"}
    add_run(connection, name, 1, **failed)
    add_run(connection, name, 2, **failed)
    add_action(connection, name, 1, reason="repeat('r', 4000)")
    found = client.get("/timeline.json").json()["entries"]
    found += client.get("/tasks.json").json()["runs"][name]
    errors = [run["error"] for run in found if run["outcome"] == "error"]
    assert len(errors) == 4
    assert max(map(len, errors)) < 350
    assert not [run for run in found if run["traceback"]]
    for path in ("/", "/timeline", "/timeline?by=task"):
        titles = re.findall("<rect[^>]*><title>([^<]*)</title>", client.get(path).text)
        assert titles
        assert max(map(len, titles)) < 600, path
    assert "t" * 4000 in client.get(f"/task?name={name}").text


class TestTimeline:
    def test_a_pause_and_an_outage_are_shaded(
        self, client: TestClient, connection: Connection
    ) -> None:
        for name in ("a", "b"):
            add_task(connection, name)
            add_run(connection, name, 1, **span(50, 49))
        add_action(connection, "a", 1, started_at=ago(40), until=ago(30))
        add_miss(connection, "b", 1, cause="'database'", scheduled_at=ago(20))
        assert lanes(client, "/timeline?by=task") == {
            "a": ["ok", "outage", "pause"],
            "b": ["missed", "ok", "outage"],
        }

    def test_a_pause_of_a_namespace_is_behind_the_lanes_of_its_tasks(
        self, client: TestClient, connection: Connection, make_task_locks: Any
    ) -> None:
        for name in ("shop:a", "shop:b", "other"):
            add_run(connection, name, 1, **span(50, 49))
        make_task_locks().pause_all(duration=None, namespace="shop:", by="ann")
        assert lanes(client, "/timeline?by=task") == {
            "shop:a": ["ok", "pause"],
            "shop:b": ["ok", "pause"],
            "other": ["ok"],
        }
        assert lanes(client, "/timeline") == {"one": ["ok"]}

    def test_a_pause_of_all_tasks_is_behind_all_lanes(
        self, client: TestClient, connection: Connection, make_task_locks: Any
    ) -> None:
        add_run(connection, "a", 1, **span(50, 49))
        make_task_locks().pause_all(duration=None, by="ann")
        assert lanes(client, "/timeline?by=task") == {"a": ["ok", "pause"]}
        assert lanes(client, "/timeline") == {"one": ["ok", "pause"]}

    def test_a_pause_ends_when_it_is_resumed(
        self, client: TestClient, connection: Connection
    ) -> None:
        add_run(connection, "a", 1, **span(50, 49))
        add_action(connection, "a", 1, started_at=ago(40), until="NULL::timestamptz")
        add_action(connection, "a", 2, outcome="'resumed'", started_at=ago(10))
        text = client.get("/timeline?by=task").text
        [width] = re.findall(r'class="pause" x="[\d.]+%" width="([\d.]+)%"', text)
        assert float(width) == pytest.approx(50, abs=0.5)

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
    def test_the_span(self, client: TestClient, query: str, hours: float) -> None:
        found = client.get(f"/timeline.json?{query}").json()
        assert _hours(found["since"], found["until"]) == pytest.approx(hours)

    @pytest.mark.parametrize(
        ("night", "hours"), [("2026-03-28", 11), ("2026-06-28", 12), ("2026-10-24", 13)]
    )
    @pytest.mark.parametrize("is_of_machine", [True, False])
    @pytest.mark.usefixtures("berlin")
    def test_a_night_in_which_the_clocks_change_is_as_long_as_it_is(
        self,
        night: str,
        hours: float,
        is_of_machine: bool,
        open_dashboard: Open,
        connection: Connection,
    ) -> None:
        end = f"'{night} 20:00 Europe/Berlin'::timestamptz + interval '{hours} h'"
        span = {"started_at": f"{end} - interval '1 h'", "ended_at": f"{end} - interval '30 min'"}
        add_run(connection, "a", 1, **span)
        browser = open_dashboard(zone=None if is_of_machine else ZoneInfo("Europe/Berlin"))
        found = browser.get(f"/timeline.json?night={night}").json()
        assert _hours(found["since"], found["until"]) == pytest.approx(hours)
        text = browser.get(f"/timeline?night={night}").text
        assert ">20:00:00</time> to" in text.replace(f"{night} ", "")
        assert "08:00:00</time></h2>" in text
        [(x, width)] = re.findall(r'class="ok" x="([\d.]+)%" width="([\d.]+)%"', text)
        assert float(x) == pytest.approx(100 * (hours - 1) / hours, abs=0.02)
        assert float(width) == pytest.approx(50 / hours, abs=0.02)

    def test_it_shows_the_chosen_tasks_alone(
        self, client: TestClient, connection: Connection
    ) -> None:
        for name in ("shop", "other"):
            add_task(connection, name, **{**RUNNING, "started_at": ago(3)})
        assert lanes(client, "/timeline?by=task&q=shop") == {"shop": ["running"]}

    def test_an_outage_is_one_shade(self, client: TestClient, connection: Connection) -> None:
        for name, minutes in (("a", 20), ("b", 19.5), ("c", 40)):
            add_miss(connection, name, 1, cause="'database'", scheduled_at=ago(minutes))
        text = client.get("/timeline").text
        assert text.count('class="outage"') == 2  # on the one lane, of nobody

    def test_the_form_keeps_the_span(self, client: TestClient) -> None:
        text = client.get("/timeline?hours=6").text
        assert '<input type="hidden" name="hours" value="6">' in text
        assert re.search(
            r'<a href="timeline\?night=\d{4}-\d\d-\d\d&amp;by=replica">last night<', text
        )

    def test_the_spans_beside_it_are_links(self, client: TestClient) -> None:
        text = client.get("/timeline?night=2026-01-31&by=task&q=a%26b").text
        for name in ("earlier", "later", "closer", "wider"):
            assert re.search(
                rf'href="timeline\?since=\d+&amp;until=\d+&amp;by=task&amp;q=a%26b">{name}<', text
            )
        assert ">later<" not in client.get("/timeline").text


def _hours(since: str, until: str) -> float:
    begin, end = (datetime.fromisoformat(each.replace("Z", "+00:00")) for each in (since, until))
    return (end - begin).total_seconds() / 3600


def test_replicas_tell_what_each_holds_and_which_leads(
    client: TestClient, connection: Connection
) -> None:
    add_task(connection, "a", **{**RUNNING, "locked_by": "'web-1'"})
    add_replica(connection, "web-1", ["a"])
    add_replica(connection, "gone", [], seen_at=ago(3000))
    words = page(client, "/replicas")
    assert "web-1" in words
    assert "alive" in words
    assert "a since" in words
    assert "leads" not in words
    assert "1 older replica has given no sign of life for a day." in words


def test_the_replica_that_leads_is_told(client: TestClient, make_replica: Any) -> None:
    replica = make_replica(replica_id="web-1", leader=True)
    replica.scheduler.add_job(print, "interval", hours=1, id="a")
    eventually(lambda: replica.executor.is_leader)
    # It may lead before its row of signs of life is written.
    eventually(lambda: re.search(r"web-1 .*alive leads", page(client, "/replicas")))


class TestJobs:
    def test_they_tell_the_names_of_arguments_and_not_their_values(
        self, client: TestClient, connection: Connection
    ) -> None:
        add_job(connection, "job-1")
        words = page(client, "/jobs")
        assert "job-1" in words
        assert "args[0]" in words
        assert "Remove" not in words

    def test_the_values_of_arguments_are_for_operators(
        self, client: TestClient, database_url: str, connection: Connection
    ) -> None:
        add_job(connection, "job-1", arguments="""'{"args": ["x<y"], "kwargs": {"k": 7}}'""")
        words = page(client, "/job?id=job-1")
        assert "args[0], k" in words
        assert "The values are for operators." in words
        assert "x&lt;y" not in words
        assert client.get("/job.json?id=job-1").json()["arguments"] is None
        app = dashboard(database_url, authorize=lambda _: Access("operate", "ann"))
        with TestClient(app, "http://127.0.0.1") as operator:
            words = page(operator, "/job?id=job-1")
            assert "args[0] &#34;x&lt;y&#34; k 7" in words
            assert operator.get("/job.json?id=job-1").json()["arguments"] == {
                "args[0]": "x<y",
                "k": 7,
            }

    def test_an_unknown_job_is_404(self, client: TestClient) -> None:
        assert client.get("/job?id=none").status_code == 404
        assert client.get("/job").status_code == 404

    def test_without_jobs_it_says_where_those_in_memory_are(self, client: TestClient) -> None:
        assert "Jobs in memory are on the page Tasks" in page(client, "/jobs")


def test_the_set_up_shows_what_the_doctor_finds(client: TestClient) -> None:
    words = page(client, "/setup")
    assert "connection to " in words
    findings = client.get("/setup.json").json()["findings"]
    assert {"what", "level", "says", "remedy"} == set(findings[0])


def test_only_the_tasks_of_the_namespace_are_shown(
    database_url: str, connection: Connection
) -> None:
    add_task(connection, "shop:a", **FAILING)
    add_task(connection, "other:b", **OVERDUE)
    add_task(connection, "shop:c", **PAUSED)
    for name in ("shop:a", "other:b"):
        add_run(connection, name, 1, outcome="'error'", **span(5, 4))
    with TestClient(dashboard(database_url, namespace="shop:"), "http://127.0.0.1") as client:
        for path in ("/", "/tasks", "/runs", "/timeline?by=task", "/tasks?q=b"):
            assert "other:b" not in client.get(path).text
        assert "shop:a" in page(client, "/tasks?q=a")
        assert client.get("/task?name=other:b").status_code == 404
        assert client.get("/why?name=other:b").status_code == 404
