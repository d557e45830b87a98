"""Python in the documentation runs on a real PostgreSQL, as it stands there."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import apscheduler_tasklock
from tests.support.snippets import (
    ROOT,
    RUN_AS_A_WHOLE,
    Snippet,
    as_module,
    missing_names,
    snippets,
)

# Pages whose code is run elsewhere: here it is only looked at.
RUN_ELSEWHERE = {
    **RUN_AS_A_WHOLE,
    "docs/metrics.md": "tests/acceptance/test_metrics_docs.py: a server that serves for ever",
    "docs/how-to/from-django-apscheduler.md": "it needs a Django project and another library",
}

# Blocks that cannot be run, by a line of theirs.
NOT_RUN = {
    "context.configure(..., include_name=include_name)": "a line of an env.py, whose other "
    "arguments it leaves out; examples/own_alembic has a whole one",
}

# What stands for a name that a block uses and leaves to the reader.
GIVEN = {
    "BackgroundScheduler": "from apscheduler.schedulers.background import BackgroundScheduler",
    "BlockingScheduler": "from apscheduler.schedulers.blocking import BlockingScheduler",
    "CheckIns": "from apscheduler_tasklock.checkins import CheckIns",
    "CronTrigger": "from apscheduler.triggers.cron import CronTrigger",
    "ProcessPoolExecutor": "from apscheduler.executors.pool import ProcessPoolExecutor",
    "prometheus_text": "from apscheduler_tasklock.metrics import prometheus_text",
    "app": "import flask as _flask\napp = _flask.Flask('app')\n"
    "app.config['TASKLOCK_DATABASE_URL'] = DATABASE_URL or 'postgresql://app:secret@localhost/app'",
    "at": "import datetime as _datetime\nat = _datetime.datetime.now(_datetime.timezone.utc)",
    "asyncio": "import asyncio",
    # Stand for libraries that are no tools of this project.
    **{
        name: f"from typing import Any as _Any\nfrom unittest.mock import MagicMock as _Mock\n"
        f"{name}: _Any = _Mock()"
        for name in ("celery", "crontab", "redis", "redis_lock")
    },
    "socket": "import socket",
    "clean_up": "from apscheduler_tasklock import task_lock as _lock\n@_lock\n"
    "def clean_up() -> None: ...",
    "engine": "import sqlalchemy as _sqlalchemy\n"
    "engine = _sqlalchemy.create_engine(DATABASE_URL.replace('://', '+psycopg://'))",
    "fcntl": "import fcntl",
    "handle": "async def handle(message: object) -> None: ...",
    "import_prices": "def import_prices(token: int) -> None: ...",
    "inbox": "from typing import Any\ndef inbox() -> Any: ...",
    "make_scheduler": "from apscheduler.schedulers.asyncio import AsyncIOScheduler as _Asyncio\n"
    "def make_scheduler() -> _Asyncio: return _Asyncio()",
    "os": "import os",
    "poll_inbox": "async def poll_inbox() -> None: ...",
    "release_lock": "def release_lock(name: str) -> None: ...",
    "render_report": "def render_report() -> None: ...",
    "send_message": "def send_message(text: str) -> None: ...",
    "send_reminder": "from myapp.jobs import send_reminder",
    "set_up_telemetry": "def set_up_telemetry() -> None: ...",
    "sync_prices": "def sync_prices() -> None: ...",
    "take_lock": "def take_lock(name: str, seconds: float) -> bool: return True",
    "text": "from sqlalchemy import text",
    "url": "url = DATABASE_URL",
    "user_id": "user_id = 7",
    "work": "def work() -> None: ...",
    # Of the library, with the types that calls are checked against.
    "executor": "from apscheduler_tasklock import TaskLockExecutor as _Executor\n"
    "executor = _Executor(DATABASE_URL)",
    "locks": "from apscheduler_tasklock import TaskLocks as _Locks\nlocks = _Locks(DATABASE_URL)",
    "scheduler": "from apscheduler.schedulers.background import BackgroundScheduler as _Scheduler\n"
    "from apscheduler_tasklock import TaskLockExecutor as _Default\n"
    "scheduler = _Scheduler(executors={'default': _Default(DATABASE_URL)})",
    **{name: f"from apscheduler_tasklock import {name}" for name in apscheduler_tasklock.__all__},
}

# What has to be so before a block, by a line of it.
BEFORE = {
    **dict.fromkeys(
        (
            "from starlette.middleware.sessions import SessionMiddleware",
            "from flask import Flask, session",
        ),
        "import os\nos.environ['SESSION_SECRET'] = 'secret'",
    ),
    "scheduler.start()  # a BlockingScheduler": """
        import os
        from apscheduler.schedulers.blocking import BlockingScheduler
        from apscheduler_tasklock import TaskLockExecutor
        scheduler = BlockingScheduler(executors={"default": TaskLockExecutor(DATABASE_URL)})
        import threading
        import time
        def is_waiting() -> bool:
            frame = sys._current_frames()[threading.main_thread().ident]
            calls = [frame, frame.f_back, frame.f_back and frame.f_back.f_back]
            names = [call.f_code.co_name for call in calls if call]
            return names == ["wait", "wait", "_main_loop"]
        def stop() -> None:
            # APScheduler logs a signal that interrupts a job's submission, and goes on.
            while not is_waiting():
                time.sleep(0.01)
            # Python does not notice a signal that comes right before the main thread waits.
            while is_waiting():
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)
        scheduler.add_job(stop, id="stop", misfire_grace_time=None)
        """,
    "executor.drain(timeout=50)": """
        from apscheduler.schedulers.background import BackgroundScheduler
        from apscheduler_tasklock import TaskLockExecutor
        executor = TaskLockExecutor(DATABASE_URL)
        scheduler = BackgroundScheduler(executors={"default": executor})
        scheduler.start()
        """,
    'executor.run_now("report", by="ann")  # the id of the job, and who asks': """
        from apscheduler.schedulers.background import BackgroundScheduler
        from apscheduler_tasklock import TaskLockExecutor
        def report() -> None: ...
        executor = TaskLockExecutor(DATABASE_URL)
        scheduler = BackgroundScheduler(executors={"default": executor})
        scheduler.add_job(report, "cron", year=2999, id="report")
        scheduler.start()
        """,
    # A task whose holder is dead, one that is gone, and a replica that can run the first.
    'for task in locks.tasks("report*"):': """
        import psycopg
        from apscheduler.schedulers.background import BackgroundScheduler
        from apscheduler_tasklock import TaskLockExecutor, TaskLocks
        def report() -> None: ...
        _replica = BackgroundScheduler(executors={"default": TaskLockExecutor(DATABASE_URL)})
        _replica.add_job(report, "cron", year=2999, id="report")
        _replica.start()
        _before = TaskLocks(DATABASE_URL)
        with _before.hold("report-of-last-year", min_lock=0, max_lock=60): ...
        while not _before.tasks("report"): ...
        _before.close()
        with psycopg.connect(DATABASE_URL) as _connection:
            _connection.execute("UPDATE task_lock SET token = 1795300160006, finished_at = NULL,"
                " locked_until = now() - interval '1 day' WHERE task_name = 'report'")
        """,
    # The stored jobs, and a replica that has their tasks.
    'for job in locks.jobs("import-*"):': """
        from apscheduler.schedulers.background import BackgroundScheduler
        from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore, TaskLocks
        from myapp.jobs import send_reminder
        _replica = BackgroundScheduler(
            jobstores={"default": TaskLockJobStore(DATABASE_URL, functions=["myapp."])},
            executors={"default": TaskLockExecutor(DATABASE_URL)},
        )
        _replica.start()
        for _id in ("import-prices", "reminder-7", "nightly"):
            _replica.add_job(send_reminder, "cron", month=1, day=1, args=[7], id=_id)
        _before = TaskLocks(DATABASE_URL)
        while len(_before.tasks()) < 3: ...
        _before.close()
        """,
}

# Ends what a block has started, as the end of an application would.
AFTER = """
from apscheduler.schedulers.base import BaseScheduler
from apscheduler_tasklock import TaskLocks
for value in list(globals().values()):
    if isinstance(value, BaseScheduler) and value.running:
        value.shutdown()
    elif isinstance(value, TaskLocks):
        value.close()
"""

URL = "postgresql://app:secret@localhost/app"


def key_in(snippet: Snippet, table: dict[str, str]) -> str | None:
    lines = [line.strip() for line in snippet.text.splitlines()]
    return next((key for key in table if key in lines), None)


def is_run(snippet: Snippet) -> bool:
    return snippet.page not in RUN_ELSEWHERE and key_in(snippet, NOT_RUN) is None


def prelude(snippet: Snippet) -> str:
    """Return what comes before a block: the names that it leaves to the reader."""
    names = missing_names(as_module(snippet))
    given = [GIVEN[name] for name in sorted(names) if name in GIVEN]
    before = BEFORE.get(key_in(snippet, BEFORE) or "", "")
    return "\n".join([*given, textwrap.dedent(before)])


@pytest.fixture
def application(tmp_path: Path) -> Path:
    """A folder with the package that pages call the reader's own."""
    package = tmp_path / "myapp"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "jobs.py").write_text("def send_reminder(user_id: int) -> None: ...\n")
    return tmp_path


@pytest.mark.nightly  # a process for each block
@pytest.mark.parametrize("snippet", [*filter(is_run, snippets("python"))], ids=str)
def test_a_block_runs_as_it_stands(snippet: Snippet, application: Path, direct_url: str) -> None:
    unknown = missing_names(as_module(snippet)) - set(GIVEN)
    assert not unknown, f"GIVEN has nothing for {unknown}"
    code = snippet.text.replace(URL, direct_url)
    program = "\n".join([f"DATABASE_URL = {direct_url!r}", prelude(snippet), code, AFTER])
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=application,
        env={**os.environ, "TASKLOCK_DATABASE_URL": direct_url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr, ran.stderr


def test_what_is_not_run_is_there() -> None:
    found = snippets("python")
    for table in (NOT_RUN, BEFORE):
        assert {key for key in table if not any(key in one.text for one in found)} == set()
    assert {page for page in RUN_ELSEWHERE if not (ROOT / page).exists()} == set()
