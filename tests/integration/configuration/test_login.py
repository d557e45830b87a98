"""Where a login comes from besides the URL: libpq's variables and files. None of it is shown."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from psycopg import sql
from sqlalchemy.engine import make_url

from apscheduler_tasklock.cli import main
from tests.support import pool_jobs
from tests.support.commands import Answer
from tests.support.roles import PASSWORD, role
from tests.support.schedulers import Replica

Connection = psycopg.Connection[Any]

TABLES = "task_lock, task_lock_run, task_lock_replica, task_lock_job"


@pytest.fixture
def login(
    direct_url: str, connection: Connection, request: pytest.FixtureRequest, tmp_path: Path
) -> Any:
    """A URL without user and password, and what libpq then finds them in."""
    with role(direct_url) as (name, _):
        grant = f"GRANT SELECT, INSERT, UPDATE, DELETE ON {TABLES} TO {{}}"
        connection.execute(sql.SQL(grant).format(sql.Identifier(name)))
        # The server lets everybody in without a password, so that one is only seen to be kept.
        url = make_url(direct_url)
        place = f"host={url.host}\nport={url.port}\ndbname={url.database}\n"
        service = tmp_path / "services.conf"
        service.write_text(f"[tasklock]\n{place}user={name}\npassword={PASSWORD}\n")
        passwords = tmp_path / "pgpass"
        passwords.write_text(f"*:*:*:*:{PASSWORD}\n")
        passwords.chmod(0o600)
        bare = url._replace(username=None, password=None).render_as_string(hide_password=False)
        yield (
            {
                "PGPASSWORD": (bare, {"PGUSER": name, "PGPASSWORD": PASSWORD}),
                "PGPASSFILE": (bare, {"PGUSER": name, "PGPASSFILE": str(passwords)}),
                "PGSERVICE": (
                    "postgresql://",
                    {"PGSERVICE": "tasklock", "PGSERVICEFILE": str(service)},
                ),
                "service": (
                    "postgresql://?service=tasklock",
                    {"PGSERVICEFILE": str(service)},
                ),
            }[request.param],
            name,
        )


WAYS = pytest.mark.parametrize(
    "login", ["PGPASSWORD", "PGPASSFILE", "PGSERVICE", "service"], indirect=True
)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """Run the command line with these variables in its environment."""

    def run(url: str, variables: dict[str, str], *arguments: str) -> Answer:
        for name, value in {"TASKLOCK_DATABASE_URL": url, **variables}.items():
            monkeypatch.setenv(name, value)
        status = main(list(arguments))
        printed = capsys.readouterr()
        return Answer(status, printed.out, printed.err)

    return run


@WAYS
@pytest.mark.direct("the pooler has no login for the role")
def test_a_login_from_the_environment_is_used_and_not_shown(
    login: Any, run: Callable[..., Answer]
) -> None:
    (url, variables), name = login
    for command in (["status"], ["doctor", "--json"]):
        answer = run(url, variables, *command)
        assert answer.status == 0, answer
        assert PASSWORD not in answer.out + answer.err
    refused = run(url, variables, "downgrade", "--yes")
    assert refused.status == 1
    assert f'role "{name}"' in refused.err
    assert PASSWORD not in refused.out + refused.err


@WAYS
@pytest.mark.direct("the pooler has no login for the role")
def test_a_login_from_the_environment_is_not_in_an_error(
    login: Any, run: Callable[..., Answer]
) -> None:
    (url, variables), _ = login
    away = {**variables, "PGPORT": "1", "PGHOST": "127.0.0.1"}
    if "service" in url or "PGSERVICE" in variables:
        file = Path(variables["PGSERVICEFILE"])
        lines = file.read_text().splitlines()
        file.write_text("\n".join("port=1" if "port=" in line else line for line in lines))
    else:
        url = "postgresql:///nowhere"
    for command in (["doctor", "--json"], ["upgrade"]):
        answer = run(url, away, *command)
        assert answer.status != 0
        assert PASSWORD not in answer.out + answer.err


def arguments_of(pid: int) -> str:
    """Return what the list of processes shows of one."""
    return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.direct("the pooler has no login for the role")
def test_a_password_is_in_no_list_of_processes(
    direct_url: str, connection: Connection, make_replica: Callable[..., Replica]
) -> None:
    """Worker processes of a pool get the URL through a pipe, and not as an argument."""
    with role(direct_url) as (name, url):
        grant = f"GRANT SELECT, INSERT, UPDATE, DELETE ON {TABLES} TO {{}}"
        connection.execute(sql.SQL(grant).format(sql.Identifier(name)))
        spawn = {"mp_context": multiprocessing.get_context("spawn")}
        replica = make_replica(url, executor="processpool", max_workers=1, pool_kwargs=spawn)
        replica.run_once(pool_jobs.lock_and_process)
        *_, pid, _ = replica.one(EVENT_JOB_EXECUTED).retval
        assert "python" in arguments_of(pid)
        assert PASSWORD not in arguments_of(pid)
        applications = connection.execute(
            "SELECT application_name || query FROM pg_stat_activity WHERE usename = %s", [name]
        ).fetchall()
        assert applications
        assert PASSWORD not in str(applications)
        replica.shutdown()
