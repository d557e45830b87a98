"""`manage.py runscheduler`: how it starts, what it runs, and how it ends."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.frameworks.conftest import MakeProject
from tests.support.django_project import DjangoProject
from tests.support.polling import eventually

# Each starts several processes, which load Django.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

SCHEDULER = 'TASKLOCK_SCHEDULER = "project.scheduling.scheduler"'

# A job that runs until there is a file.
LONG_JOB = """
import asyncio
import time
from pathlib import Path

from apscheduler.schedulers.{module} import {scheduler}
from apscheduler_tasklock.django import DjangoTaskLockExecutor

def job():
    print("begins", flush=True)
    while not Path("go").exists():
        time.sleep(0.02)
    print("ends", flush=True)

async def coroutine():
    print("begins", flush=True)
    while not Path("go").exists():
        await asyncio.sleep(0.02)
    print("ends", flush=True)

def scheduler():
    made = {scheduler}(executors={{"default": DjangoTaskLockExecutor()}})
    made.add_job({job}, id="job", misfire_grace_time=None)
    return made
"""


def long_job(scheduler: str, module: str, job: str = "job") -> str:
    return LONG_JOB.format(scheduler=scheduler, module=module, job=job)


@pytest.fixture
def ready(make_project: MakeProject, database_url: str) -> DjangoProject:
    """A project whose database has the task locks' tables, and whose scheduler is yet to come."""
    project = make_project(database_url)
    project.configure(SCHEDULER)
    return project


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
@pytest.mark.parametrize(
    "scheduler",
    [
        long_job("BackgroundScheduler", "background"),
        long_job("BlockingScheduler", "blocking"),
        long_job("AsyncIOScheduler", "asyncio"),
        long_job("AsyncIOScheduler", "asyncio", "coroutine"),
    ],
    ids=["background", "blocking", "asyncio", "coroutine"],
)
def test_a_signal_lets_running_jobs_end_and_releases_them(
    scheduler: str,
    which: signal.Signals,
    ready: DjangoProject,
    connection: psycopg.Connection[Any],
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    ready.write("project/scheduling.py", scheduler)
    with ready.scheduler(log) as process:
        eventually(lambda: "begins" in log.read_text())
        process.send_signal(which)
        eventually(lambda: f"{which.name}: waiting for running jobs" in log.read_text())
        (ready.folder / "go").touch()
        assert process.wait(60) == 0, log.read_text()
    lines = log.read_text().splitlines()
    assert lines[-2:] == ["ends", "The scheduler has stopped."]
    assert "Traceback" not in log.read_text()
    held = "SELECT FROM task_lock WHERE finished_at IS NULL"
    assert connection.execute(held).rowcount == 0
    ended = "SELECT outcome FROM task_lock_run WHERE task_name = 'job'"
    assert connection.execute(ended).fetchall() == [("ok",)]


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_a_second_signal_ends_the_process_at_once(
    which: signal.Signals, ready: DjangoProject, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    ready.write("project/scheduling.py", long_job("BackgroundScheduler", "background"))
    with ready.scheduler(log) as process:
        eventually(lambda: "begins" in log.read_text())
        process.send_signal(signal.SIGTERM)
        eventually(lambda: "waiting for running jobs" in log.read_text())
        process.send_signal(which)
        assert process.wait(60) == 128 + which
    assert "ends\n" not in log.read_text()


SHARED_JOB = """
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler_tasklock.django import DjangoTaskLockExecutor

def job():
    pass

scheduler = BackgroundScheduler(executors={"default": DjangoTaskLockExecutor()})
scheduler.add_job(job, "interval", seconds=1, start_date="2026-01-01", id="job")
"""


ONE_OFFS = """
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler_tasklock import current_lock
from apscheduler_tasklock.django import DjangoTaskLockExecutor

class User:
    pass

def mail(user):
    # Whole lines: three threads print at once.
    print(f"mailed {type(user).__name__} {current_lock()}\\n", end="", flush=True)

scheduler = BackgroundScheduler(executors={"default": DjangoTaskLockExecutor()})
for _ in range(3):
    scheduler.add_job(mail, args=[User()], misfire_grace_time=None)
"""


def test_one_offs_without_an_id_all_run(ready: DjangoProject, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ready.write("project/scheduling.py", ONE_OFFS)
    with ready.scheduler(log) as process:
        eventually(lambda: log.read_text().count("mailed User None") == 3)
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


def test_two_share_a_job(
    ready: DjangoProject, connection: psycopg.Connection[Any], tmp_path: Path
) -> None:
    ready.write("project/scheduling.py", SHARED_JOB)

    def run_times() -> list[Any]:
        return connection.execute("SELECT scheduled_at, replica FROM task_lock_run").fetchall()

    logs = [tmp_path / "one", tmp_path / "other"]
    alive = "SELECT FROM task_lock_replica WHERE tasks = '{job}' AND stopped_at IS NULL"
    with ready.scheduler(logs[0]) as one, ready.scheduler(logs[1]) as other:
        eventually(lambda: connection.execute(alive).rowcount == 2)
        before = len(run_times())
        eventually(lambda: len(run_times()) >= before + 4)
        one.terminate()
        assert one.wait(60) == 0
        before = len(run_times())
        eventually(lambda: len(run_times()) >= before + 2)
        other.terminate()
        assert other.wait(60) == 0
    times = [run_time for run_time, _ in run_times()]
    assert len(times) == len(set(times))


DYING = """
from pathlib import Path
from apscheduler.schedulers.{module} import {scheduler}
from apscheduler_tasklock.django import DjangoTaskLockExecutor

class Dying({scheduler}):
    def _process_jobs(self):
        if Path("die").exists():
            raise ValueError("it dies")
        super()._process_jobs()
        return 0.05

scheduler = Dying(executors={{"default": DjangoTaskLockExecutor()}})
"""


@pytest.mark.parametrize(
    ("scheduler", "module", "said"),
    [
        ("BackgroundScheduler", "background", "CommandError: the scheduler is dead"),
        ("BlockingScheduler", "blocking", "ValueError: it dies"),
    ],
)
def test_a_scheduler_that_dies_ends_the_command(
    scheduler: str, module: str, said: str, ready: DjangoProject, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    ready.write("project/scheduling.py", DYING.format(scheduler=scheduler, module=module))
    with ready.scheduler(log) as process:
        (ready.folder / "die").touch()
        assert process.wait(60) == 1, log.read_text()
    assert said in log.read_text()


ODD = """
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.tornado import TornadoScheduler
from apscheduler_tasklock.django import DjangoTaskLockExecutor

def nothing():
    pass

def running():
    scheduler = BackgroundScheduler()
    scheduler.start()
    return scheduler

tornado = TornadoScheduler()
background = BackgroundScheduler(executors={"default": DjangoTaskLockExecutor()})
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (None, "there is no setting TASKLOCK_SCHEDULER; set it to the dotted path"),
        ("nothing", "project.scheduling.nothing() must return a scheduler of APScheduler, not Non"),
        ("running", "project.scheduling.running runs already, so that every command"),
        ("tornado", "runs a BackgroundScheduler, a BlockingScheduler or an AsyncIOScheduler, not"),
        (
            "background",
            "the tables task_lock, task_lock_run, task_lock_replica do not exist in this",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    name: str | None, said: str, project: DjangoProject
) -> None:
    project.write("project/scheduling.py", ODD)
    if name:
        project.configure(f'TASKLOCK_SCHEDULER = "project.scheduling.{name}"')
    line = project.refused("runscheduler")
    assert line.startswith("CommandError: ")
    assert said in line
    if name == "background":
        assert line.endswith("manage.py migrate")


# A job that says whether it finds a connection that was used before, and fails every other time.
CONNECTIONS = """
from itertools import count
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from asgiref.sync import sync_to_async
from django.contrib.sessions.models import Session
from django.db import connections
from apscheduler_tasklock.django import DjangoTaskLockExecutor

numbers = count()
connections_used = []

def use():
    connection = connections["default"]
    connections_used[:] = [connection]
    print(f"fresh: {connection.connection is None}", flush=True)
    Session.objects.count()
    if next(numbers) % 2:
        raise ValueError("it fails")

async def coroutine():
    await sync_to_async(use)()

def background(**options):
    executor = DjangoTaskLockExecutor(max_workers=1, **options)
    scheduler = BackgroundScheduler(executors={"default": executor})
    return add(scheduler, use)

def unlocked():
    return background(enabled=False)

def asyncio():
    scheduler = AsyncIOScheduler(executors={"default": DjangoTaskLockExecutor()})
    return add(scheduler, coroutine)
"""

AGAIN_AND_AGAIN = """
def add(scheduler, job):
    runs = count()

    def begin(event=None):
        for used in connections_used:
            used.close_at = 0  # which Django compares with the time
        scheduler.add_job(job, id=f"job {next(runs)}", misfire_grace_time=None)

    scheduler.add_listener(begin, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
    begin()
    return scheduler
"""

TWICE = """
def add(scheduler, job):
    for number in range(2):
        scheduler.add_job(job, id=f"job {number}", misfire_grace_time=None)
    return scheduler
"""


@pytest.fixture
def connecting(
    make_project: MakeProject, empty_database_url: str, request: pytest.FixtureRequest
) -> DjangoProject:
    """A project whose job uses the ORM; its scheduler is the test's parameter."""
    project = make_project(empty_database_url)
    project.manage("migrate")
    project.configure(f'TASKLOCK_SCHEDULER = "project.scheduling.{request.param}"')
    return project


ways = pytest.mark.parametrize("connecting", ["background", "unlocked", "asyncio"], indirect=True)


@ways
def test_a_job_closes_a_connection_that_became_old_before_it(
    connecting: DjangoProject, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    connecting.write("project/scheduling.py", CONNECTIONS + AGAIN_AND_AGAIN)
    # It is young when a job ends, and is made old before the next one begins.
    connecting.configure('DATABASES["default"]["CONN_MAX_AGE"] = 600')
    with connecting.scheduler(log) as process:
        eventually(lambda: log.read_text().count("fresh: ") >= 6)
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
    assert "fresh: False" not in log.read_text()
    assert "ValueError: it fails" in log.read_text()


@ways
def test_a_job_leaves_no_old_connection_open(
    connecting: DjangoProject, empty_database_url: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    connecting.write("project/scheduling.py", CONNECTIONS + TWICE)
    # Those of the lock have a name.
    others = (
        "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = ''"
        " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )
    with (
        psycopg.connect(empty_database_url, autocommit=True) as connection,
        connecting.scheduler(log) as process,
    ):
        eventually(lambda: log.read_text().count("fresh: ") == 2)
        eventually(lambda: connection.execute(others).rowcount == 0)
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


def test_no_other_command_starts_the_scheduler(
    ready: DjangoProject, connection: psycopg.Connection[Any]
) -> None:
    told = "scheduler.add_listener(lambda event: print('started', flush=True), 1)"
    ready.write("project/scheduling.py", f"{SHARED_JOB}\n{told}\n")
    ready.write(
        "shop/tests.py",
        "from django.test import TestCase\n"
        "from project.scheduling import scheduler\n"
        "class Test(TestCase):\n"
        "    def test_it_stands_still(self):\n"
        "        self.assertFalse(scheduler.running)\n",
    )
    for command in ["check", "migrate", "test"]:
        assert "started" not in ready.manage(command)
    assert "True" in ready.manage(
        "shell", "-c", "from project.scheduling import scheduler; print(not scheduler.running)"
    )
    assert connection.execute("SELECT FROM task_lock_replica").rowcount == 0


TWO_EXECUTORS = """
import threading
import time
from pathlib import Path
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler_tasklock.django import DjangoTaskLockExecutor

came = threading.Event()

def late():
    print("comes too late", flush=True)
    came.set()

def job():
    print("begins", flush=True)
    while not Path("go").exists():
        time.sleep(0.02)
    scheduler.add_job(late, executor="other", misfire_grace_time=None)
    came.wait(2)
    print("ends", flush=True)

executors = {name: DjangoTaskLockExecutor() for name in ("default", "other")}
scheduler = AsyncIOScheduler(executors=executors)
scheduler.add_job(job, id="job", misfire_grace_time=None)
"""


def ends_while_a_job_goes_on(ready: DjangoProject, scheduling: str, log: Path) -> None:
    """End a scheduler while its job waits for the file ``go``, and let the job end."""
    ready.write("project/scheduling.py", scheduling)
    with ready.scheduler(log) as process:
        eventually(lambda: "begins" in log.read_text())
        process.terminate()
        eventually(lambda: "waiting for running jobs" in log.read_text())
        (ready.folder / "go").touch()
        assert process.wait(60) == 0, log.read_text()
    assert "ends\n" in log.read_text()


def test_nothing_begins_on_another_executor_while_jobs_end(
    ready: DjangoProject, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    ends_while_a_job_goes_on(ready, TWO_EXECUTORS, log)
    assert "too late" not in log.read_text()


CALLING = """
import time
from pathlib import Path
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler_tasklock.django import DjangoTaskLockExecutor

def job():
    print("begins", flush=True)
    while not Path("go").exists():
        time.sleep(0.02)
    scheduler.add_job(print, "interval", hours=1, id="print")
    print("ends", flush=True)

scheduler = BackgroundScheduler(executors={"default": DjangoTaskLockExecutor()})
scheduler.add_job(job, id="job", misfire_grace_time=None)
"""


def test_a_job_may_call_the_scheduler_while_it_is_waited_for(
    ready: DjangoProject, tmp_path: Path
) -> None:
    ends_while_a_job_goes_on(ready, CALLING, tmp_path / "log")
