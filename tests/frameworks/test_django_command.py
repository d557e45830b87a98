"""`manage.py tasklock`: the command line with the project's database."""

from __future__ import annotations

import json

import pytest

from apscheduler_tasklock import TaskLocks, upgrade
from tests.frameworks.conftest import MakeProject
from tests.support.django_project import DjangoProject
from tests.support.postgres import Server

# Each starts several processes, which load Django.
pytestmark = pytest.mark.nightly

RUN_ONCE = """
import threading
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler_tasklock.django import DjangoTaskLockExecutor

scheduler = BackgroundScheduler(executors={"default": DjangoTaskLockExecutor()})
ended = threading.Event()
scheduler.add_listener(lambda event: ended.set(), EVENT_JOB_EXECUTED)
scheduler.add_job(int, id="report", misfire_grace_time=None)
scheduler.start()
answer(ended.wait(60))
scheduler.shutdown()
"""

CALL = """
from io import StringIO
from django.core.management import CommandError, call_command
found = []
for words in (["status", "--json"], ["show", "none"], ["show"], ["show", "--help"]):
    out, err = StringIO(), StringIO()
    try:
        call_command("tasklock", *words, stdout=out, stderr=err)
    except CommandError as error:
        found.append([error.returncode, out.getvalue(), err.getvalue()])
    else:
        found.append([0, out.getvalue(), err.getvalue()])
answer(found)
"""


def status_of(project: DjangoProject, *arguments: str) -> int:
    return project.finished("manage.py", "tasklock", *arguments).returncode


def test_the_command_has_the_database_the_table_and_the_namespace_of_the_project(
    make_project: MakeProject, empty_database_url: str, server: Server
) -> None:
    with server.database() as url:
        upgrade(url, schema="jobs", table="locks")
        project = make_project(empty_database_url, other=url)
        project.configure(
            'TASKLOCK_DATABASE, TASKLOCK_NAMESPACE = "other", "shop:"\n'
            'TASKLOCK_SCHEMA, TASKLOCK_TABLE = "jobs", "locks"'
        )
        assert project.ask(RUN_ONCE) is True
        [run] = json.loads(project.manage("tasklock", "runs", "report", "--json"))
        assert (run["task"], run["outcome"]) == ("shop:report", "ok")
        shown = project.manage("tasklock", "show", "report", "--settings", "project.settings")
        assert "shop:report" in shown
        assert status_of(project, "show", "none") == 3
        assert status_of(project, "show") == 2
        assert status_of(project, "show", "none", "--namespace", "bank:") == 3


def test_a_call_of_the_command_returns_what_it_says_and_ends_in_a_command_error(
    project: DjangoProject, empty_database_url: str
) -> None:
    upgrade(empty_database_url)
    shown, unknown, wrong, helped = project.ask(CALL)
    assert shown == [0, "[]\n", ""]
    assert (unknown[:2], "'none'" in unknown[2]) == ([3, ""], True)
    assert (wrong[:2], "the following arguments are required: TASK" in wrong[2]) == ([2, ""], True)
    assert (helped[0], helped[2]) == (0, "")
    assert helped[1].startswith("usage: manage.py tasklock show [-h]")


def test_the_tables_can_be_created_and_dropped_by_it(
    project: DjangoProject, empty_database_url: str
) -> None:
    assert "is migrated" in project.manage("tasklock", "upgrade")
    locks = TaskLocks(empty_database_url)
    locks.check()
    locks.close()
    assert "is dropped" in project.manage("tasklock", "downgrade", "--yes")


def test_a_help_of_the_command_is_that_of_the_command_line(project: DjangoProject) -> None:
    assert "usage: manage.py tasklock pause" in project.manage("tasklock", "pause", "--help")
    helped = project.manage("tasklock", "jobs", "pause", "--help")
    assert "usage: manage.py tasklock jobs pause" in helped
    for words in (["tasklock", "--help"], ["help", "tasklock"]):
        assert "usage: manage.py tasklock [-h]" in project.manage(*words)


def test_a_database_that_is_not_postgresql_is_named_with_the_status_of_the_command_line(
    make_project: MakeProject,
) -> None:
    project = make_project()
    said = project.finished("manage.py", "tasklock", "status")
    assert said.returncode == 2
    assert "the database 'default' has the ENGINE 'django.db.backends.sqlite3'" in said.stderr
    assert "Traceback" not in said.stderr
    for_monitor = project.finished("manage.py", "tasklock", "check")
    assert for_monitor.returncode == 3
    assert "the task lock needs PostgreSQL" in for_monitor.stdout


def test_without_a_postgresql_the_command_does_what_needs_no_database_of_the_project(
    make_project: MakeProject, database_url: str
) -> None:
    upgrade(database_url, table="locks")
    project = make_project()
    project.configure('TASKLOCK_TABLE = "locks"')
    assert "usage: manage.py tasklock [-h]" in project.manage("tasklock", "--help")
    assert project.manage("tasklock", "--version").startswith("apscheduler-tasklock ")
    assert "CREATE TABLE locks_run" in project.manage("tasklock", "upgrade", "--sql")
    doctor = json.loads(project.manage("tasklock", "doctor", "--database", database_url, "--json"))
    assert "table locks_run" in {finding["what"] for finding in doctor["findings"]}


def test_a_namespace_that_is_no_text_is_an_error_of_the_settings(project: DjangoProject) -> None:
    project.configure("TASKLOCK_NAMESPACE = None")
    said = project.finished("manage.py", "tasklock", "status")
    assert said.returncode == 2
    assert "TASKLOCK_NAMESPACE must be a text, not None" in said.stderr
    assert "usage: manage.py tasklock [-h]" in project.manage("tasklock", "--help")
