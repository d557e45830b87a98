"""Which database a Django project's task locks are in, and what is said of wrong settings."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.frameworks.conftest import MakeProject
from tests.support.django_project import DjangoProject, database_settings

# Each starts several processes, which load Django.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

# Prints what libpq would be given for each of several entries of DATABASES, and for the text that
# `manage.py tasklock` makes of it.
PARAMETERS = """
from django.db import connections
from apscheduler_tasklock._database.connection import connect_parameters
from apscheduler_tasklock._database.url import parse_url
from apscheduler_tasklock.django import database_url
found = {}
for alias in connections.settings:
    if alias != "default":
        url = parse_url(database_url(alias))
        text = url.render_as_string(hide_password=False)
        found[alias] = connect_parameters(url), connect_parameters(parse_url(text))
answer(found)
"""

POSTGRESQL = {"ENGINE": "django.db.backends.postgresql", "NAME": "shop"}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "name_only": ({}, {"dbname": "shop"}),
    "all": (
        {"USER": "app", "PASSWORD": "p@ss:w/o %rd", "HOST": "db", "PORT": "5433"},
        {"user": "app", "password": "p@ss:w/o %rd", "host": "db", "port": 5433},
    ),
    "number_as_port": ({"HOST": "db", "PORT": 5433}, {"host": "db", "port": 5433}),
    "socket": ({"HOST": "/var/run/pg"}, {"host": "/var/run/pg"}),
    "several_hosts": (
        {"HOST": "one,two", "PORT": "5432,5433"},
        {"host": "one,two", "port": "5432,5433", "target_session_attrs": "read-write"},
    ),
    "one_port_for_several_hosts": (
        {"HOST": "one,two", "PORT": "5433"},
        {"host": "one,two", "port": "5433,5433"},
    ),
    "libpq": (
        {
            "OPTIONS": {
                "sslmode": "verify-full",
                "sslrootcert": "/etc/ca.pem",
                "passfile": "/run/pgpass",
                "connect_timeout": 7,
                "options": "-c search_path=jobs",
            }
        },
        {
            "sslmode": "verify-full",
            "sslrootcert": "/etc/ca.pem",
            "passfile": "/run/pgpass",
            "connect_timeout": "7",
            "options": "-c search_path=jobs",
        },
    ),
    "service": ({"NAME": "", "OPTIONS": {"service": "shop"}}, {"service": "shop"}),
    "djangos_own": (
        {"OPTIONS": {"server_side_binding": True, "isolation_level": 3, "assume_role": "app role"}},
        {"options": r"-c role=app\ role"},
    ),
}


def test_the_connection_has_what_the_settings_say(make_project: MakeProject) -> None:
    project = make_project()
    entries = {alias: {**POSTGRESQL, **given} for alias, (given, _) in CASES.items()}
    project.configure(f"DATABASES |= {entries!r}")
    found = project.ask(PARAMETERS)
    for alias, (_, expected) in CASES.items():
        given, given_by_text = found[alias]
        assert given.items() >= expected.items(), alias
        assert not {"cursor_factory", "context", "pool", "isolation_level"} & set(given)
        assert given_by_text == given, alias


def test_a_role_is_assumed_as_by_django(
    make_project: MakeProject, database_url: str, connection: psycopg.Connection[Any]
) -> None:
    role = sql.Identifier("the 'app")
    connection.execute(sql.SQL("CREATE ROLE {}").format(role))
    try:
        project = make_project(database_url)
        options = {**database_settings(database_url)["OPTIONS"], "assume_role": "the 'app"}
        project.configure(f'DATABASES["default"]["OPTIONS"] = {options!r}')
        said = project.manage("check", "--database", "default")
        assert "may not use the tables task_lock" in said
        assert "migrate" not in said
        rights = "GRANT SELECT, INSERT, UPDATE ON task_lock, task_lock_run, task_lock_replica TO {}"
        connection.execute(sql.SQL(rights).format(role))
        assert "no issues" in project.manage("check", "--database", "default")
    finally:
        connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
        connection.execute(sql.SQL("DROP ROLE {}").format(role))


SQLITE = 'DATABASES["default"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": "site.sqlite3"}'
SCHEDULING = """
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler_tasklock.django import DjangoTaskLockExecutor
scheduler = BackgroundScheduler(executors={"default": DjangoTaskLockExecutor()})
"""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (SQLITE, "E002) the task lock needs PostgreSQL, and the database 'default' has the ENGINE"),
        ('TASKLOCK_DATABASE = "job"', "E001) TASKLOCK_DATABASE must be an alias of settings.DATAB"),
        ('TASKLOCK_TABLE = ""', "E001) TASKLOCK_ settings: table must be a name, not ''"),
        ('TASKLOCK_ENABLED = "maybe"', "E001) TASKLOCK_ settings: settings: TASKLOCK_ENABLED must"),
        ("TASKLOCK_SCHEDULER = 5", "E001) TASKLOCK_SCHEDULER must be a dotted path such as"),
        ('TASKLOCK_SCHEDULER = "project.nothing.scheduler"', "E003) TASKLOCK_SCHEDULER: project.n"),
        ('TASKLOCK_SCHEDULER = "project.scheduling.other"', "E003) TASKLOCK_SCHEDULER: project.sc"),
        ('TASKLOCK_SCHEDULER = "project.settings.BASE_DIR"', "E003) TASKLOCK_SCHEDULER: project."),
    ],
)
def test_the_check_names_the_setting_that_is_wrong(
    settings: str, said: str, make_project: MakeProject
) -> None:
    project = make_project()
    project.configure(f'DATABASES = {{"default": {POSTGRESQL!r}}}\n{settings}')
    project.write("project/scheduling.py", SCHEDULING)
    finished = project.finished("manage.py", "check")
    assert finished.returncode == 1
    assert f"apscheduler_tasklock.{said}" in finished.stderr, finished.stderr
    assert "Traceback" not in finished.stderr


def test_the_check_names_a_scheduler_that_its_module_starts(
    make_project: MakeProject, database_url: str
) -> None:
    project = make_project(database_url)
    project.write("project/scheduling.py", f"{SCHEDULING}\nscheduler.start()\n")
    project.configure('TASKLOCK_SCHEDULER = "project.scheduling.scheduler"')
    finished = project.finished("manage.py", "check")
    assert "project.scheduling.scheduler runs already" in finished.stderr


def test_the_check_of_the_database_names_what_creates_or_upgrades_the_tables(
    project: DjangoProject,
) -> None:
    said = project.manage("check", "--database", "default")
    assert (
        "apscheduler_tasklock.W001) the tables task_lock, task_lock_run, task_lock_replica do not"
        in said
    )
    assert "HINT: `manage.py migrate` creates the tables, and brings them up to date" in said
    project.manage("migrate")
    assert "no issues" in project.manage("check", "--database", "default")
    assert "no issues" in project.manage("check")


def test_the_check_of_a_database_that_is_away_says_so_and_no_password(
    make_project: MakeProject,
) -> None:
    project = make_project("postgresql://app:hush@127.0.0.1:1/shop")
    assert "no issues" in project.manage("check")
    said = project.manage("check", "--database", "default")
    assert "apscheduler_tasklock.W001)" in said
    assert "hush" not in said


def test_without_locks_jobs_run_where_there_is_no_postgresql(make_project: MakeProject) -> None:
    project = make_project()
    project.configure(f"{SQLITE}\nTASKLOCK_ENABLED = False")
    project.configure('TASKLOCK_SCHEDULER = "project.scheduling.scheduler"')
    project.write("project/scheduling.py", SCHEDULING)
    project.manage("migrate")
    assert "no issues" in project.manage("check", "--database", "default")
    ran = """
import threading
from project.scheduling import scheduler
ran = threading.Event()
scheduler.start()
scheduler.add_job(ran.set, misfire_grace_time=None)
answer(ran.wait(60))
scheduler.shutdown()
"""
    assert project.ask(ran)


def test_an_executor_without_a_postgresql_is_refused(make_project: MakeProject) -> None:
    project = make_project()
    project.configure(SQLITE)
    project.write("project/scheduling.py", SCHEDULING)
    finished = project.finished("manage.py", "shell", "-c", "import project.scheduling")
    assert finished.returncode == 1
    assert "ImproperlyConfigured: the task lock needs PostgreSQL" in finished.stderr
