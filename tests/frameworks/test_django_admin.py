"""Tasks and runs in Django's admin: what is shown, to whom, and what the actions do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from apscheduler_tasklock import TaskLocks
from tests.frameworks.conftest import APP, MakeProject
from tests.support import hostile, rows
from tests.support.django_project import DjangoProject, database_settings
from tests.support.postgres import Server

# Each starts several processes, which load Django.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

TASKS = "/admin/apscheduler_tasklock/task/"
RUNS = "/admin/apscheduler_tasklock/run/"
REPLICAS = "/admin/apscheduler_tasklock/replica/"
JOBS = "/admin/apscheduler_tasklock/job/"

Request = tuple[str, str, dict[str, Any]]


@pytest.fixture(scope="session")
def migrated(
    server: Server, template: str, tmp_path_factory: pytest.TempPathFactory, checkout: Path
) -> Iterator[str]:
    """Name of a database with the tables of a project, which each test gets a copy of."""
    with server.database(template) as url:
        project = DjangoProject(tmp_path_factory.mktemp("migrated") / "site", checkout)
        databases = {"default": database_settings(url)}
        project.configure(f"DATABASES = {databases!r}\n{APP}")
        project.manage("migrate")
        yield str(conninfo_to_dict(url)["dbname"])


@pytest.fixture
def direct_url(server: Server, migrated: str) -> Iterator[str]:
    """In place of a database that has the task locks' tables alone."""
    with server.database(migrated) as url:
        yield url


@pytest.fixture
def site(make_project: MakeProject, database_url: str) -> DjangoProject:
    """A project whose database has been migrated."""
    return make_project(database_url)


@pytest.fixture
def add(connection: psycopg.Connection[Any]) -> Callable[..., None]:
    """Add a task, with a replica that is alive and has it."""

    def add(name: str, **changes: str) -> None:
        rows.add_task(connection, name, **changes)
        rows.add_replica(connection, f"replica of {name}", [name])

    return add


def action(which: str, /, *tasks: str, **more: Any) -> Request:
    return "post", TASKS, {"action": which, "_selected_action": list(tasks), **more}


# Since when a pause is.
SINCE = r" since \S+ \S+(?= until)"


def cells(page: str, task: str) -> str:
    """Return the row of a task, as text in which columns are apart by `|`."""
    [row] = [row for row in re.findall(r"<tr>.*?</tr>", page, re.S) if f">{task}<" in row]
    found = re.findall(r"<t[dh] class=\"field-[^>]*>(.*?)</t[dh]>", row, re.S)
    return " | ".join(re.sub(r"<[^>]+>", "", cell).strip() for cell in found)


def test_the_list_of_tasks_says_what_each_is_doing(
    site: DjangoProject, add: Callable[..., None], connection: psycopg.Connection[Any]
) -> None:
    add("fine")
    rows.add_run(connection, "fine", 1, ended_at="now() - interval '55 s'")
    add("running", **rows.RUNNING)
    add("dead", **rows.DEAD)
    add("paused", **rows.PAUSED)
    add("fails", **rows.FAILING)
    add("retried", **rows.RETRYING)
    add("new", **rows.NEW)
    add("was cut", **rows.CUT)
    add("handed over", **rows.HANDED_OVER)
    add("took long", **rows.OVERRAN)
    add("over", due_at="NULL", is_last="true")
    add("wild*")
    add("wilder")
    [(status, page, _)] = site.browse(("get", TASKS, {}))
    assert status == 200
    moment = r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}"
    fine = (
        rf"fine \| ok \| every 5 min \| {moment} on one"
        rf" \| ok, took 2 s \(usually 5 s\) \| {moment}"
    )
    assert re.fullmatch(fine, cells(page, "fine"))
    assert cells(page, "running").startswith("running | running | ")
    assert " | not over, so far 1 min" in cells(page, "running")
    assert cells(page, "dead").startswith("dead | dead | ")
    assert " | died, took at most 2 s | " in cells(page, "dead")
    paused = rf"paused \| paused; paused by me@here since {moment} until resumed \(closed\) \| "
    assert re.match(paused, cells(page, "paused"))
    assert " | ValueError (3 in a row), took 2 s | " in cells(page, "fails")
    again = rf"retried \| retrying: attempt 2 failed; its retry is due at {moment} \| every 5 min"
    assert re.match(again, cells(page, "retried"))
    assert " | ValueError, took 2 s | " in cells(page, "retried")
    assert cells(page, "new").startswith("new | new | every 5 min | - | - | ")
    assert cells(page, "was cut").startswith("was cut | cut | ")
    assert " | cut, took 2 s | " in cells(page, "was cut")
    assert cells(page, "handed over").startswith("handed over | cut | ")
    assert cells(page, "took long").startswith("took long | failing | ")
    assert " | overran, took over 2 s | " in cells(page, "took long")
    assert cells(page, "over").endswith(" on one | ok, took 2 s | -")
    assert cells(page, "wild*").startswith("wild* | ok | ")
    assert cells(page, "wilder").startswith("wilder | ok | ")


def test_the_lists_have_their_style_sheet(site: DjangoProject, add: Callable[..., None]) -> None:
    add("one")
    sheet = "apscheduler_tasklock/admin.css"
    urls = (TASKS, RUNS, REPLICAS, JOBS, f"{TASKS}one/change/")
    for status, page, _ in site.browse(*(("get", url, {}) for url in urls)):
        assert status == 200
        assert re.search(rf'<link href="[^"]*{sheet}"', page)
    assert f"/django/static/{sheet}" in site.manage("findstatic", sheet)


def test_tasks_are_found_by_name_and_state(site: DjangoProject, add: Callable[..., None]) -> None:
    add("fine")
    add("killed", **rows.DEAD)
    by_state, by_name, by_due = site.browse(
        ("get", TASKS, {"state": "dead"}), ("get", TASKS, {"q": "fin"}), ("get", TASKS, {"o": "6"})
    )
    assert ">killed</" in by_state[1]
    assert ">fine</" not in by_state[1]
    assert ">fine</" in by_name[1]
    assert ">killed</" not in by_name[1]
    assert by_due[0] == 200


def test_the_list_of_runs_shows_the_history(
    site: DjangoProject, add: Callable[..., None], connection: psycopg.Connection[Any]
) -> None:
    add("report")
    rows.add_run(connection, "report", 1)
    rows.add_run(connection, "report", 2, outcome="'error'", error="'no paper'")
    rows.add_run(connection, "other", 1, kind="'retry'", attempt="3")
    every, errors, of_one = site.browse(
        ("get", RUNS, {}),
        ("get", RUNS, {"outcome": "error"}),
        ("get", RUNS, {"task_name__exact": "report"}),
    )
    assert [page[0] for page in (every, errors, of_one)] == [200] * 3
    assert "3 runs" in every[1]
    assert re.search(r"field-details[^>]*>\(attempt 3\)<", every[1])
    assert "no paper" in errors[1]
    assert "1 run\n" in errors[1]
    assert "2 runs" in of_one[1]


def test_a_traceback_is_in_the_list_of_runs_and_escaped(
    site: DjangoProject, add: Callable[..., None], connection: psycopg.Connection[Any]
) -> None:
    add("report")
    kept = "'  File \"<x>\", line 1, in report'"
    rows.add_run(connection, "report", 1, outcome="'error'", traceback=kept)
    rows.add_run(connection, "report", 2)
    retried = "'2026-01-01 03:00Z'"
    rows.add_run(connection, "report", 3, outcome="'error'", attempt="2", retry_at=retried)
    rows.add_action(connection, "report", 1)
    [(_, page, _)] = site.browse(("get", RUNS, {}))
    assert page.count("<summary>traceback</summary>") == 1
    assert "File &quot;&lt;x&gt;&quot;, line 1, in report</pre>" in page
    assert re.search(r"\(attempt 2, to be retried at 2026-01-01 [:\d]+\)", page)
    assert "by ann@ops until 2" in page


def test_missed_run_times_and_what_was_done_with_all_tasks_are_in_the_list_of_runs(
    site: DjangoProject,
    add: Callable[..., None],
    connection: psycopg.Connection[Any],
    database_url: str,
) -> None:
    add("one")
    rows.add_miss(connection, "one", 0, run_times="3")
    locks = TaskLocks(database_url)
    locks.pause_all(duration=None, namespace="shop:", by="ann", reason="a move")
    locks.close()
    status, page, _ = site.browse(("get", RUNS, {}))[0]
    text = unescape(page)
    assert status == 200
    assert re.search(r"3 run times from [-: \d]+ to [-: \d]+: the task was paused", text)
    assert re.search(r"field-task[^>]*>shop:\*<", text)
    assert "by ann until resumed (a move)" in text
    [page] = site.browse(("get", TASKS, {}))
    assert "1 task" in page[1]  # the row of the pauses is none


def test_without_its_history_the_page_of_a_task_shows_the_rest(
    site: DjangoProject, add: Callable[..., None], connection: psycopg.Connection[Any]
) -> None:
    add("report", runs="'shop.jobs:report'")
    connection.execute("ALTER TABLE task_lock_run RENAME TO elsewhere")
    [(status, page, told)] = site.browse(("get", f"{TASKS}report/change/", {}))
    assert (status, "shop.jobs:report" in page) == (200, True)
    assert "Last runs" not in page
    assert any(text.startswith("The runs cannot be read: ") for _, text in told)


def test_a_missed_run_time_that_was_run_later_is_not_listed(
    site: DjangoProject, add: Callable[..., None], connection: psycopg.Connection[Any]
) -> None:
    when = "timestamptz '2026-01-31 02:00Z'"
    add("in-history")
    rows.add_run(connection, "in-history", 1, scheduled_at=when)
    add("in-row", window_start=when)
    date = """'{"run":null,"type":"date"}'"""
    add("one-off", window_start=f"{when} + interval '1 s'", one_off="true", schedule=date)
    add("not-run")
    add("several")
    for task in ("in-history", "in-row", "one-off", "not-run"):
        rows.add_miss(connection, task, 0, scheduled_at=when)
    rows.add_run(connection, "several", 1, scheduled_at=when)
    rows.add_miss(connection, "several", 0, scheduled_at=when, run_times="2")
    listed, page = site.browse(
        ("get", RUNS, {"outcome": "missed"}), ("get", f"{TASKS}in-history/change/", {})
    )
    assert re.findall(r"field-task[^>]*>([^<]+)<", listed[1]) in (
        ["not-run", "several"],
        ["several", "not-run"],
    )
    assert "<td>ok</td>" in page[1]
    assert "<td>missed</td>" not in page[1]


def test_the_page_of_a_task_has_its_replicas_and_its_last_runs(
    site: DjangoProject, add: Callable[..., None], connection: psycopg.Connection[Any]
) -> None:
    add("report", runs="'shop.jobs:report'")
    add("other")
    for token in range(1, 31):
        began = f"now() - interval '1 h' + {token} * interval '1 s'"
        ended = f"{began} + {token} * interval '1 s'"
        rows.add_run(connection, "report", token, started_at=began, ended_at=ended)
    rows.add_run(connection, "other", 1, replica="'of another task'")
    request = ("get", f"{TASKS}report/change/", {})
    [(status, page, _)] = site.browse(request)
    assert status == 200
    for told in ("shop.jobs:report", "every 5 min", "replica of report (alive)"):
        assert told in page
    took = re.findall(r"<td>([0-9.]+ s)</td><td>ok</td><td>schedule</td>", page)
    assert took == [f"{token} s" for token in range(30, 10, -1)]
    assert "of another task" not in page
    [(status, page, _)] = site.browse(request, user="bob", permissions=["view_task"])
    assert status == 200
    assert "Last runs" not in page


def test_replicas_and_stored_jobs_are_listed(
    site: DjangoProject, add: Callable[..., None], connection: psycopg.Connection[Any]
) -> None:
    add("sync", **{**rows.RUNNING, "locked_by": "'replica of sync'"})
    rows.add_replica(connection, "silent", seen_at="now() - interval '1 h'", release="'1.4'")
    rows.add_job(connection, "invoice-*", arguments="""'{"args": ["hunter2"]}'::jsonb""")
    replicas, jobs, job, replica = site.browse(
        ("get", REPLICAS, {}),
        ("get", JOBS, {}),
        ("get", f"{JOBS}invoice-*/change/", {}),
        ("get", f"{REPLICAS}silent/change/", {}),
    )
    of_sync = cells(replicas[1], "replica of sync").split(" | ")
    assert of_sync[:4] == ["replica of sync", "alive", "host", "1.0"]
    assert of_sync[7] == "1"
    assert of_sync[8].startswith("sync since 2")
    assert cells(replicas[1], "silent").startswith("silent | silent | host | 1.0 | 1.4 | ")
    told = "invoice-* | waiting | tests.support.stored_jobs:note | every 1 h | 2"
    assert cells(jobs[1], "invoice-*").startswith(told)
    assert [page[0] for page in (job, replica)] == [200, 200]
    assert "hunter2" not in jobs[1] + job[1]
    listed = site.browse(("get", REPLICAS, {}), ("get", JOBS, {}), user="bob", permissions=[])
    assert [status for status, _, _ in listed] == [403, 403]


def test_the_actions_pause_resume_and_request_a_run_in_the_users_name(
    site: DjangoProject, add: Callable[..., None], connection: psycopg.Connection[Any]
) -> None:
    add("one")
    add("other")
    state = """SELECT task_name, pauses -> 0 ->> 'by', requested_by FROM task_lock
               ORDER BY task_name"""
    _, _, told = site.browse(action("pause", "one", "other"))[0]
    assert told == [
        ["success", "Task 'one': paused until it is resumed"],
        ["success", "Task 'other': paused until it is resumed"],
    ]
    assert connection.execute(state).fetchall() == [
        ("one", "alice", None),
        ("other", "alice", None),
    ]
    resumed, requested = site.browse(action("resume", "one"), action("run_now", "other"))
    assert resumed[2] == [["success", "Task 'one': resumed"]]
    assert requested[2] == [["success", "Task 'other': a run is asked for"]]
    assert connection.execute(state).fetchall() == [
        ("one", None, None),
        ("other", "alice", "alice"),
    ]
    logged = "SELECT object_id, change_message FROM django_admin_log ORDER BY id"
    assert connection.execute(logged).fetchall() == [
        ("one", "paused until it is resumed"),
        ("other", "paused until it is resumed"),
        ("one", "resumed"),
        ("other", "a run is asked for"),
    ]
    [page] = site.browse(("get", RUNS, {"kind": "operator"}))
    assert "4 runs" in page[1]
    assert len(re.findall(r"field-details[^>]*>by alice(?: until [^<(]+)?</td>", page[1])) == 4


def test_what_the_library_refuses_is_shown(
    site: DjangoProject, add: Callable[..., None], connection: psycopg.Connection[Any]
) -> None:
    add("one")
    rows.add_task(connection, "orphan")
    _, _, told = site.browse(action("run_now", "orphan", "one"))[0]
    [wrong] = [text for level, text in told if level == "error"]
    assert "orphan" in wrong
    assert "the page Replicas has those that are alive" in wrong
    assert ["success", "Task 'one': a run is asked for"] in told
    connection.execute("ALTER TABLE task_lock RENAME COLUMN overdue_at TO too_late_at")
    status, page, told = site.browse(("get", TASKS, {}))[0]
    assert status == 200
    assert "bring them up to date with: apscheduler-tasklock upgrade" in page


def test_freeing_asks_first_and_frees_the_run_that_was_shown(
    site: DjangoProject, add: Callable[..., None], connection: psycopg.Connection[Any]
) -> None:
    add("dead", **rows.DEAD)
    add("alive", **rows.RUNNING)
    finished = "SELECT task_name FROM task_lock WHERE finished_at IS NOT NULL ORDER BY 1"
    status, page, _ = site.browse(action("free", "dead", "alive"))[0]
    assert status == 200
    assert 'name="token" value="7"' in page
    assert connection.execute(finished).fetchall() == []
    confirmed = {"name": ["alive", "dead"], "token": ["7", "7"], "confirmed": "Free"}
    _, _, told = site.browse(action("free", "dead", "alive", **confirmed))[0]
    assert any(
        level == "success" and text.startswith("Task 'dead': freed: token 7, held by one since ")
        for level, text in told
    )
    [refused] = [text for level, text in told if level == "error"]
    box = "also if the holder may be alive"
    assert box in page
    assert "task 'alive' (token 7) is not freed: its holder" in refused
    assert f'tick the box "{box}"' in refused
    assert connection.execute(finished).fetchall() == [("dead",)]
    # Another run than that which was shown stays.
    stale = {"name": ["alive"], "token": ["6"], "confirmed": "Free", "force": "on"}
    newest = {"name": ["alive"], "token": ["7"], "confirmed": "Free", "force": "on"}
    refused_stale, freed = site.browse(
        action("free", "alive", **stale), action("free", "alive", **newest)
    )
    assert [level for level, _ in refused_stale[2]] == ["error"]
    [[level, text]] = freed[2]
    assert (level, text.partition(", ")[0]) == ("success", "Task 'alive': freed: token 7")


def test_permissions_decide_who_sees_and_who_operates(
    site: DjangoProject, add: Callable[..., None], connection: psycopg.Connection[Any]
) -> None:
    add("one")
    requests = [("get", TASKS, {}), ("get", RUNS, {}), action("pause", "one")]
    paused = "SELECT pauses -> 0 ->> 'by' FROM task_lock"

    def statuses(*permissions: str) -> list[int]:
        pages = site.browse(*requests, user="bob", permissions=permissions)
        return [status for status, _, _ in pages]

    assert statuses() == [403, 403, 403]
    assert statuses("view_task", "view_run")[:2] == [200, 200]
    assert connection.execute(paused).fetchall() == [(None,)]
    assert statuses("change_task") == [200, 403, 200]
    assert connection.execute(paused).fetchall() == [("bob",)]


def test_nothing_is_added_changed_or_deleted_in_a_form(
    site: DjangoProject, add: Callable[..., None], connection: psycopg.Connection[Any]
) -> None:
    add("one")
    pages = site.browse(
        ("post", f"{TASKS}add/", {"task_name": "two"}),
        ("post", f"{TASKS}one/change/", {"locked_by": "me"}),
        ("post", f"{TASKS}one/delete/", {"post": "yes"}),
        action("delete_selected", "one", post="yes"),
        ("post", f"{RUNS}add/", {}),
    )
    assert [status for status, _, _ in pages] == [403, 403, 403, 200, 403]
    assert connection.execute("SELECT locked_by FROM task_lock").fetchall() == [("one",)]


def test_a_run_has_no_page_of_its_own(
    site: DjangoProject, add: Callable[..., None], connection: psycopg.Connection[Any]
) -> None:
    add("one")
    rows.add_run(connection, "one", 1)
    rows.add_run(connection, "one", 2)
    pages = site.browse(("get", f"{RUNS}one/change/", {}), ("get", f"{RUNS}one/history/", {}))
    assert [status for status, _, _ in pages] == [200, 200]  # the admin's first page, with a word
    assert all("exist. Perhaps it was deleted" in str(told) for _, _, told in pages)


def test_there_are_no_lists_where_locks_are_off(make_project: MakeProject) -> None:
    project = make_project()
    project.configure("TASKLOCK_ENABLED = False")
    project.manage("migrate")
    assert project.browse(("get", TASKS, {}))[0][0] == 404


def test_the_lists_are_of_the_database_of_the_task_locks(
    make_project: MakeProject, empty_database_url: str, database_url: str, add: Callable[..., None]
) -> None:
    project = make_project(empty_database_url, jobs=database_url)
    project.configure('TASKLOCK_DATABASE = "jobs"')
    project.manage("migrate")
    add("elsewhere")
    listed, paused = project.browse(("get", TASKS, {}), action("pause", "elsewhere"))
    assert cells(listed[1], "elsewhere").startswith("elsewhere | ok | ")
    assert paused[2] == [["success", "Task 'elsewhere': paused until it is resumed"]]


def test_the_page_of_a_task_that_is_never_due_again_is_shown(
    site: DjangoProject, add: Callable[..., None]
) -> None:
    add("over", due_at="NULL", is_last="true")
    # To which the admin's front page links, after an action.
    _, page = site.browse(action("pause", "over"), ("get", f"{TASKS}over/change/", {}))
    assert page[0] == 200
    assert ">over</" in page[1]


def test_hostile_rows_are_listed_as_unreadable_beside_the_others(
    site: DjangoProject, connection: psycopg.Connection[Any]
) -> None:
    cases = hostile.of()
    with connection.transaction():
        hostile.insert_good(connection)
        names = {case: case.insert(connection) for case in cases}
    count = len(hostile.of(hostile.TASKS)) + 1
    tasks = [("get", TASKS, {"p": page}) for page in range(1, 2 + (count - 1) // 50)]
    runs = [("get", RUNS, {})]
    more: list[Request] = [
        ("get", TASKS, {"state": "unreadable"}),
        *(("get", TASKS, {"o": column}) for column in (1, 4, 6)),
        *(("get", RUNS, {"o": column}) for column in (2, 4)),
        *(("get", page, {}) for page in (REPLICAS, JOBS)),
        ("get", RUNS, {"q": "exploded", "outcome": "exploded"}),
        ("get", f"{TASKS}due_at_209999-12-30Z/change/", {}),
        ("get", f"{TASKS}started_at_200001-01-02Z/change/", {}),
        action("free", "due_at 0001-01-02Z", "locked_until 9999-12-30Z", "good task"),
    ]
    pages = site.browse(*tasks, *runs, *more)
    assert [page[0] for page in pages] == [200] * len(pages)
    listed = unescape("".join(page[1] for page in pages[: len(tasks)]))
    assert cells(listed, "good task").startswith("good task | ok | ")
    bad = [case for case in cases if case.table == hostile.TASKS and case.unreadable]
    for case in bad:
        state = cells(listed, names[case]).split(" | ")[1]
        assert state.startswith("unreadable; cannot be read: "), case
    for case in cases:
        if case.table == hostile.TASKS:
            assert f">{names[case]}<" in listed or case.name.startswith("name "), case
    told = unescape("".join(page[1] for page in pages[len(tasks) : len(tasks) + len(runs)]))
    assert cells(told, "good task")
    for case in cases:
        if case.table == hostile.RUNS:
            assert cells(told, names[case]), case


def test_a_filter_or_a_name_that_postgresql_does_not_take_is_an_error_that_says_so(
    site: DjangoProject, add: Callable[..., None]
) -> None:
    add("fine")
    filters = [
        {"task_name__exact": "\0"},
        {"task_name__regex": "((("},
        {"task_name__in": "a,\0"},
    ]
    *filtered, too_large, searched, named, history, chosen, other = site.browse(
        *(("get", TASKS, each) for each in filters),
        ("get", RUNS, {"task_name__exact": "\0"}),
        ("get", RUNS, {"outcome": "a\0"}),
        ("get", TASKS, {"token__exact": "9" * 30}),
        ("get", TASKS, {"q": "\0"}),
        ("get", f"{TASKS}a%00/change/", {}),
        ("get", f"{TASKS}a%00/history/", {}),
        action("pause", "a\0"),
        action("pause", "fine", "a\0"),
    )
    for status, _, told in filtered:
        assert status == 200
        assert told[0][0] == "error"
        assert told[0][1].startswith("These filters cannot be applied: ")
    assert ">fine<" in filtered[0][1], "the list without filters"
    assert [page[0] for page in (too_large, searched, named, history, chosen, other)] == [200] * 6
    for _, _, told in (chosen, other):
        assert told[0][0] == "error"
        assert "These tasks cannot be chosen: " in told[0][1]


def test_a_token_that_is_no_number_frees_nothing(
    site: DjangoProject, add: Callable[..., None]
) -> None:
    add("dead", **rows.DEAD)
    tokens = ["x", "", "1.5", "9" * 30, "9" * 5000, "\0", "7; DROP TABLE"]
    confirmed = {"confirmed": "Free", "name": ["dead"]}
    pages = site.browse(*(action("free", "dead", token=[each], **confirmed) for each in tokens))
    for status, _, told in pages:
        assert status == 200
        assert [level for level, _ in told] == ["error"]
        assert "'dead'" in told[0][1]
        assert "token must be a whole number" in told[0][1]


def test_dumpdata_leaves_the_locks_out(
    site: DjangoProject, add: Callable[..., None], connection: psycopg.Connection[Any]
) -> None:
    add("over", due_at="NULL", is_last="true")
    rows.add_run(connection, "over", 1)
    site.manage("dumpdata", "--output", "all.json")
    models = {row["model"] for row in json.loads((site.folder / "all.json").read_text())}
    assert "auth.permission" in models
    assert not [model for model in models if model.startswith("apscheduler_tasklock.")]


def test_dumpdata_works_where_locks_are_off(make_project: MakeProject) -> None:
    project = make_project()
    project.configure("TASKLOCK_ENABLED = False")
    project.manage("migrate")
    project.manage("dumpdata", "--output", "all.json")


def job_action(which: str, /, *jobs: str, **more: Any) -> Request:
    return "post", JOBS, {"action": which, "_selected_action": list(jobs), **more}


@pytest.fixture
def next_runs(connection: psycopg.Connection[Any]) -> Callable[[], dict[str, Any]]:
    """Return the next run times of the stored jobs, by their ids."""
    query = "SELECT id, next_run_time FROM task_lock_job ORDER BY id"
    return lambda: dict(connection.execute(query).fetchall())


def test_stored_jobs_are_paused_resumed_and_moved(
    site: DjangoProject,
    connection: psycopg.Connection[Any],
    next_runs: Callable[[], dict[str, Any]],
) -> None:
    rows.add_job(connection, "invoice*")
    rows.add_job(connection, "invoices")
    others = next_runs()["invoices"]
    [(_, _, told)] = site.browse(job_action("pause", "invoice*"), user="ann")
    assert told == [["success", "Job 'invoice*': paused until it is resumed"]]
    assert next_runs() == {"invoice*": None, "invoices": others}
    [(_, _, told)] = site.browse(job_action("resume", "invoice*"), user="ann")
    [[level, text]] = told
    assert (level, text.partition(", ")[0]) == ("success", "Job 'invoice*': resumed")
    assert next_runs()["invoice*"] is not None
    asked, wrong, beyond, moved = site.browse(
        job_action("move", "invoice*"),
        job_action("move", "invoice*", confirmed="Move", to="tomorrow"),
        job_action("move", "invoice*", confirmed="Move", to="9999-12-31T23:59-10:00"),
        job_action("move", "invoice*", confirmed="Move", to="2101-03-01 02:00"),
        user="ann",
    )
    assert asked[0] == 200
    assert 'name="to"' in asked[1]
    assert "invoice*" in asked[1]
    assert "invoices" not in asked[1]
    assert wrong[2] == beyond[2] == [["error", "The time must be like 2026-03-01 02:00"]]
    assert 'name="to"' in wrong[1]
    assert moved[2] == [["success", "Job 'invoice*': moved to 2101-03-01 02:00:00"]]
    assert str(next_runs()["invoice*"].year) == "2101"
    assert next_runs()["invoices"] == others


def test_stored_jobs_are_removed_after_a_question(
    site: DjangoProject,
    connection: psycopg.Connection[Any],
    next_runs: Callable[[], dict[str, Any]],
) -> None:
    rows.add_job(connection, "<b>old</b>")
    rows.add_job(connection, "new")
    [(status, page, told)] = site.browse(job_action("remove", "<b>old</b>"))
    assert (status, told) == (200, [])
    assert "&lt;b&gt;old&lt;/b&gt;" in page
    assert sorted(next_runs()) == ["<b>old</b>", "new"]
    [(_, _, told)] = site.browse(job_action("remove", "<b>old</b>", "gone", confirmed="Remove"))
    assert told == [
        ["error", "Job 'gone' is not in the list any more"],
        ["success", "Job '<b>old</b>': removed"],
    ]
    assert sorted(next_runs()) == ["new"]


def test_what_is_not_done_is_told(
    site: DjangoProject,
    add: Callable[..., None],
    connection: psycopg.Connection[Any],
    database_url: str,
) -> None:
    add("paused")
    add("running")
    rows.add_job(connection, "waiting")
    with TaskLocks(database_url) as locks:
        locks.pause("paused", by="ann")
        locks.pause_all(duration=None, by="ann", reason="a move")
        left, not_all, gone, asked = site.browse(
            action("resume", "paused"),
            action("resume_all", "paused"),
            action("pause", "gone"),
            job_action("remove", "gone"),
            user="bob",
        )
        locks.resume_all(by="ann")
    of_all = "Task 'paused': still paused with all tasks by ann until resumed (a move)"
    of_ann = of_all.replace("still", "still paused by ann until resumed;")
    ended = of_all.replace("still", "no longer paused by ann until resumed; still")
    told = [[level, re.sub(SINCE, "", text)] for level, text in (*left[2], *not_all[2])]
    assert told == [["error", of_ann], ["success", ended]]
    assert gone[2] == [["error", "Task 'gone' is not in the list any more"]]
    assert asked[2] == [["error", "Job 'gone' is not in the list any more"]]
    resumed, job = site.browse(
        action("resume", "running"), job_action("resume", "waiting"), user="bob"
    )
    assert resumed[2] == [["error", "Task 'running': was not paused"]]
    assert job[2] == [["error", "Job 'waiting': was not paused"]]
    logged = connection.execute("SELECT object_id, change_message FROM django_admin_log")
    [(name, logged_text)] = logged.fetchall()
    assert (name, re.sub(SINCE, "", logged_text)) == ("paused", ended.partition(": ")[2])


def test_what_an_action_leaves_out_after_an_error_is_told(
    site: DjangoProject, connection: psycopg.Connection[Any]
) -> None:
    for job in ("a", "b", "c"):
        rows.add_job(connection, job)
    with connection.transaction():
        connection.execute("SELECT FROM task_lock_job WHERE id = 'b' FOR UPDATE")
        [(_, _, told)] = site.browse(job_action("pause", "a", "b", "c"))
    done, error, left = told
    assert done == ["success", "Job 'a': paused until it is resumed"]
    assert (error[0], "locked" in error[1]) == ("error", True)
    assert left == ["error", "Not paused: 'b', 'c'"]


def test_a_time_in_an_hour_that_clocks_skip_is_told_as_the_one_that_it_means(
    site: DjangoProject, connection: psycopg.Connection[Any]
) -> None:
    site.configure("TIME_ZONE = 'Europe/Berlin'")
    rows.add_job(connection, "invoice")
    [(_, _, told)] = site.browse(
        job_action("move", "invoice", confirmed="Move", to="2101-03-27 02:30")
    )
    assert told == [["success", "Job 'invoice': moved to 2101-03-27 03:30:00"]]


def test_who_may_only_view_stored_jobs_has_no_actions(
    site: DjangoProject,
    connection: psycopg.Connection[Any],
    next_runs: Callable[[], dict[str, Any]],
) -> None:
    rows.add_job(connection, "invoice")
    before = next_runs()
    viewed, paused = site.browse(
        ("get", JOBS, {}), job_action("pause", "invoice"), user="bob", permissions=["view_job"]
    )
    assert "Pause selected jobs" not in viewed[1]
    assert next_runs() == before
    assert paused[2] != [["success", "Job 'invoice': paused until it is resumed"]]
    [(_, _, told)] = site.browse(
        job_action("pause", "invoice"), user="bob", permissions=["change_job"]
    )
    assert told == [["success", "Job 'invoice': paused until it is resumed"]]


def test_a_recurring_stored_job_is_run_now(
    site: DjangoProject, connection: psycopg.Connection[Any], add: Callable[..., None]
) -> None:
    rows.add_job(connection, "invoice", task_name="'invoice'")
    add("invoice")
    [(_, _, told)] = site.browse(job_action("run_now", "invoice"), user="ann")
    assert told == [["success", "Job 'invoice': a run is asked for"]]
    asked = connection.execute("SELECT requested_by FROM task_lock WHERE task_name = 'invoice'")
    assert asked.fetchone() == ("ann",)
