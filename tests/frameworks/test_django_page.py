"""What docs/how-to/django.md shows is run as it stands there, as the files of a project."""

from __future__ import annotations

import re
import shlex
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock.demo.server import free_port
from tests.support.django_project import DjangoProject, database_settings
from tests.support.polling import eventually
from tests.support.postgres import Server

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

PERIOD = ("minutes=5", "seconds=1")

# The sections with files or commands, each of which a test below uses.
SECTIONS = [
    "Start",
    "Settings",
    "The tables",
    "Several databases",
    "The command runscheduler",
    "The command tasklock",
    "Jobs that use the ORM",
    "In the server's workers",
    "gunicorn",
    "Preloading",
    "uvicorn",
    "The development server",
    "Tests",
]


class Page:
    """The page's files and commands, by the headings that they stand under."""

    def __init__(self, text: str) -> None:
        parts = re.split(r"^#+ ([^\n]+)\n", _without_comments(text), flags=re.M)
        self._sections = dict(zip(parts[1::2], parts[2::2], strict=True))

    def headings(self) -> list[str]:
        """Return the headings of sections with files or commands."""
        return [name for name, text in self._sections.items() if "```" in text]

    def files(self, heading: str) -> list[tuple[str, str]]:
        """Return the files of a section, with their paths, which their first lines tell."""
        blocks = re.findall(r"^```python\n(.*?)^```", self._sections[heading], re.S | re.M)
        named = [re.match(r"#! (\S+)\n", block) for block in blocks]
        assert all(named), heading
        return [(found[1], block) for found, block in zip(named, blocks, strict=True) if found]

    def commands(self, heading: str) -> list[list[str]]:
        """Return the commands of a section, as words."""
        blocks = re.findall(r"^```console\n(.*?)^```", self._sections[heading], re.S | re.M)
        lines = [line for block in blocks for line in block.splitlines()]
        assert all(line.startswith("$ ") for line in lines)
        return [shlex.split(line.removeprefix("$ ")) for line in lines]


def _without_comments(text: str) -> str:
    """Return a page in which comments of code do not look like headings."""
    return re.sub(
        r"^```.*?^```", lambda block: block[0].replace("\n# ", "\n#! "), text, flags=re.S | re.M
    )


@pytest.fixture(scope="session")
def page(checkout: Path) -> Page:
    return Page((checkout / "docs" / "how-to" / "django.md").read_text())


@pytest.fixture
def site(tmp_path: Path, checkout: Path, empty_database_url: str) -> DjangoProject:
    """A project as `startproject` makes it, with its database, and nothing of ours."""
    project = DjangoProject(tmp_path / "site", checkout)
    project.configure(f'DATABASES["default"] = {database_settings(empty_database_url)!r}')
    return project


@pytest.fixture
def connection(empty_database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection to the project's database."""
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        yield connection


Install = Callable[..., None]


@pytest.fixture
def install(page: Page, site: DjangoProject) -> Install:
    """Write the files of the page's sections; settings are added to those that there are."""

    def install(*headings: str) -> None:
        for heading in headings:
            for path, text in page.files(heading):
                if path == "project/settings.py":
                    site.configure(text)
                else:
                    site.write(path, text.replace(*PERIOD))

    return install


def manage(command: list[str]) -> list[str]:
    """Return the arguments for `manage.py` of a command of the page."""
    assert command[:2] == ["python", "manage.py"], command
    return command[2:]


def runs(connection: psycopg.Connection[Any], task: str = "sync-prices") -> list[tuple[Any, ...]]:
    """Return the run times and replicas of a task's runs that ended well."""
    wanted = "SELECT scheduled_at, replica FROM task_lock_run WHERE task_name = %s"
    return connection.execute(f"{wanted} AND outcome = 'ok'", [task]).fetchall()


def replicas(connection: psycopg.Connection[Any]) -> int:
    alive = "SELECT FROM task_lock_replica WHERE stopped_at IS NULL AND cardinality(tasks) > 0"
    return connection.execute(alive).rowcount


def test_each_section_of_the_page_is_tested_below(page: Page) -> None:
    assert page.headings() == SECTIONS
    tests = Path(__file__).read_text().split("def test_each_section", maxsplit=1)[1]
    assert [name for name in SECTIONS if f'"{name}"' not in tests] == []


def test_the_shortest_way_runs_each_job_on_one_of_two(
    page: Page,
    site: DjangoProject,
    install: Install,
    connection: psycopg.Connection[Any],
    tmp_path: Path,
) -> None:
    install("Start")
    pip, migrate, check, run = page.commands("Start")
    assert pip == ["pip", "install", ".[binary,django]"]
    site.manage(*manage(migrate))
    assert "no issues" in site.manage(*manage(check))
    assert manage(run) == ["runscheduler"]
    with site.scheduler(tmp_path / "one") as one, site.scheduler(tmp_path / "other") as other:
        eventually(lambda: replicas(connection) == 2)
        before = len(runs(connection))
        eventually(lambda: len(runs(connection)) >= before + 3)
        for process in (one, other):
            process.terminate()
        assert [process.wait(60) for process in (one, other)] == [0, 0]
    times = [run_time for run_time, _ in runs(connection)]
    assert len(times) == len(set(times))
    site.ask("from shop.jobs import clear_sessions\nanswer(clear_sessions())")


def test_a_lock_is_held_in_the_projects_code(
    site: DjangoProject, install: Install, connection: psycopg.Connection[Any]
) -> None:
    install("Start", "Settings")
    site.manage("migrate")
    site.ask("from shop.reports import write_report\nanswer(write_report())")
    assert len(runs(connection, "report")) == 1


def test_the_tables_are_printed_and_forgotten_and_made_again(
    page: Page, site: DjangoProject, install: Install, connection: psycopg.Connection[Any]
) -> None:
    install("Start")
    [print_sql] = page.commands("The tables")
    assert "CREATE TABLE task_lock (" in site.manage(*manage(print_sql))
    site.manage("migrate")
    connection.execute("DROP TABLE task_lock, task_lock_run, task_lock_replica, task_lock_job")
    connection.execute("DELETE FROM task_lock_alembic_version")
    site.manage("migrate", "--fake", "apscheduler_tasklock", "zero")
    site.manage("migrate")
    assert "no issues" in site.manage("check", "--database", "default")


def test_the_tables_are_in_the_database_that_the_router_chooses(
    page: Page,
    site: DjangoProject,
    install: Install,
    connection: psycopg.Connection[Any],
    server: Server,
) -> None:
    with server.database() as url:
        site.configure(f'DATABASES["jobs"] = {database_settings(url)!r}')
        install("Start", "Several databases")
        for command in page.commands("Several databases"):
            said = site.manage(*manage(command))
        assert "no issues" in said
        found = "SELECT to_regclass('task_lock') IS NOT NULL"
        assert connection.execute(found).fetchone() == (False,)
        with psycopg.connect(url) as other:
            assert other.execute(found).fetchone() == (True,)


def test_the_commands_of_the_command_line_are_for_the_projects_tasks(
    page: Page,
    site: DjangoProject,
    install: Install,
    connection: psycopg.Connection[Any],
    tmp_path: Path,
) -> None:
    install("Start")
    site.manage("migrate")
    with site.scheduler(tmp_path / "log"):
        eventually(lambda: len(runs(connection)) >= 1)
        status, *others = page.commands("The command tasklock")
        assert "sync-prices" in site.manage(*manage(status))
        for command in others:
            site.manage(*manage(command))


@pytest.mark.parametrize(
    ("heading", "task"),
    [("The command runscheduler", "count-sessions"), ("Jobs that use the ORM", "rebuild-index")],
    ids=["asyncio", "processpool"],
)
def test_coroutines_and_worker_processes_run_as_well(
    heading: str,
    task: str,
    site: DjangoProject,
    install: Install,
    connection: psycopg.Connection[Any],
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    install("Start", heading)
    site.manage("migrate")
    with site.scheduler(log) as process:
        eventually(lambda: len(runs(connection, task)) >= 3)
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    assert "Traceback" not in log.read_text(), log.read_text()


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/admin/login/", timeout=20) as page:
            return bool(page.status == 200)
    except OSError:  # while it starts
        return False


@contextmanager
def serving(site: DjangoProject, arguments: list[str], port: int, log: Path) -> Iterator[Any]:
    """Run a server until the end of the block, where it ends in an orderly way."""
    with site.started(*arguments, log=log) as process:
        eventually(lambda: answers(port) or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield process
        process.send_signal(signal.SIGTERM)
        with suppress(ProcessLookupError):
            process.wait(60)
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.mark.parametrize("heading", ["gunicorn", "Preloading", "uvicorn"])
def test_two_workers_of_a_server_share_the_jobs(
    heading: str,
    page: Page,
    site: DjangoProject,
    install: Install,
    connection: psycopg.Connection[Any],
    tmp_path: Path,
) -> None:
    install("Start", heading if heading == "uvicorn" else "In the server's workers")
    wsgi = site.folder / "project" / "wsgi.py"
    if heading == "Preloading":
        install(heading)
        # "Take the last three lines out of wsgi.py": the import, the start, and its end.
        text, _, taken_out = wsgi.read_text().partition("from project.scheduling")
        assert len(taken_out.strip().replace("\n\n", "\n").splitlines()) == 3
        wsgi.write_text(text)
    [command] = page.commands("gunicorn" if heading == "Preloading" else heading)
    port = free_port()
    bind = ["--port", str(port)] if heading == "uvicorn" else ["--bind", f"127.0.0.1:{port}"]
    site.manage("migrate")
    with serving(site, ["-m", *command, *bind], port, tmp_path / "log"):
        eventually(lambda: replicas(connection) == 2)
        before = len(runs(connection))
        eventually(lambda: len(runs(connection)) >= before + 3)
    eventually(lambda: replicas(connection) == 0)
    times = [run_time for run_time, _ in runs(connection)]
    assert len(times) == len(set(times))
    assert connection.execute("SELECT FROM task_lock WHERE finished_at IS NULL").rowcount == 0


def test_the_development_server_runs_jobs_without_the_lock(
    site: DjangoProject, install: Install, connection: psycopg.Connection[Any], tmp_path: Path
) -> None:
    install("Start", "In the server's workers", "The development server")
    site.write(
        "shop/jobs.py",
        "def sync_prices(): print('syncs', flush=True)\ndef clear_sessions(): pass\n",
    )
    site.manage("migrate")
    port, log = free_port(), tmp_path / "log"
    with serving(site, ["manage.py", "runserver", str(port)], port, log):
        eventually(lambda: log.read_text().count("syncs") >= 2)
    assert connection.execute("SELECT FROM task_lock").rowcount == 0


def test_the_tests_of_the_page_pass(page: Page, site: DjangoProject, install: Install) -> None:
    install("Start", "Tests")
    [command] = page.commands("Tests")
    assert "Ran 2 tests" in site.manage(*manage(command))
