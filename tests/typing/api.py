"""The public names as an application uses them. mypy checks this file; nothing runs it.

Each ``type: ignore`` is a mistake that mypy has to find: ``warn_unused_ignores`` reports it if not.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from typing import Any

from alembic import context
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from sqlalchemy import Connection, create_engine
from sqlalchemy.engine import URL

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ALL,
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_REFUSED,
    EVENT_TASK_LOCK_RELEASED,
    HeldLock,
    JobState,
    JobStatus,
    LaneEntry,
    Lanes,
    Overview,
    Run,
    RunRequest,
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockEvent,
    TaskLockExecutor,
    TaskLockJobStore,
    TaskLockOptionError,
    TaskLocks,
    TaskLockSchemaError,
    TaskState,
    TaskStatus,
    current_lock,
    downgrade,
    include_name,
    migrate,
    task_lock,
    upgrade,
)
from apscheduler_tasklock.flask import TaskLockScheduler
from apscheduler_tasklock.status import Story, Verdict
from apscheduler_tasklock.testing import held_lock, in_memory_locks, unlocked

DATABASE = "postgresql://app@db/app"

# The job store.

TaskLockJobStore(DATABASE, functions=["myapp."])
TaskLockJobStore(
    URL.create("postgresql"),
    secret=["new" * 8, b"old" * 8],
    serializer="pickle",
    schema="jobs",
    table="locks",
    poll_interval=timedelta(seconds=2),
    replica_id="worker-1",
)
TaskLockJobStore(DATABASE, serializer="yaml", secret="s" * 16)  # type: ignore[arg-type]

# The executor.

TaskLockExecutor(DATABASE)
TaskLockExecutor(URL.create("postgresql"), "processpool", max_workers=4)
TaskLockExecutor(
    create_engine("postgresql+psycopg://app@db/app"),
    ThreadPoolExecutor(5),
    min_factor=0.5,
    max_factor=2,
    lease=timedelta(seconds=30),
    failover=True,
    max_takeovers=5,
    poll_interval=timedelta(seconds=2),
    period=timedelta(minutes=5),
    jobs={"sync-prices": {"max_factor": 3}, "warm-cache": False},
    namespace="shop/",
    on_database_error="run",
    claim_timeout=5,
    schema="jobs",
    table="locks",
    replica_id="web-1",
    enabled=True,
)
TaskLockExecutor(DATABASE, lease=None)
TaskLockExecutor(DATABASE, lock="marked")
# As a configuration file spells them.
TaskLockExecutor(
    DATABASE,
    min_factor="0.5",
    max_factor="2",
    lease="30",
    failover="true",
    max_takeovers="5",
    poll_interval="2",
    period="300",
    claim_timeout="5",
    enabled="false",
    max_workers="20",
)
TaskLockExecutor(DATABASE, failover=30)  # type: ignore[arg-type]
TaskLockExecutor(DATABASE, lock="none")  # type: ignore[arg-type]
TaskLockExecutor(DATABASE, max_takeovers=None)  # type: ignore[arg-type]
TaskLockExecutor(DATABASE, on_database_error="ignore")  # type: ignore[arg-type]
TaskLockExecutor(5)  # type: ignore[arg-type]

scheduler = BackgroundScheduler(executors={"default": TaskLockExecutor(DATABASE)})


# The decorator keeps the function's type.


@task_lock
def bare(first: int) -> str:
    return str(first)


@task_lock(
    name="sync",
    min_factor=0.5,
    max_lock=timedelta(minutes=10),
    period=300,
    lease=30,
    failover=True,
    max_takeovers=5,
    cancel_on_lost=True,
    on_failure="release",
)
def with_options(first: int, *, second: str = "") -> str:
    return second * first


@task_lock(max_factor=2, min_lock=1.5, lease=None)
async def coroutine(first: int) -> str:
    return str(first)


@task_lock(False)
def on_every_replica() -> None: ...


class Service:
    @task_lock(max_factor=2)
    def method(self, first: int) -> str:
        return str(first)

    @staticmethod
    @task_lock
    def static(first: int) -> str:
        return str(first)


text: str = bare(1)
text = with_options(1, second="a")
text = Service().method(1)
text = Service.static(1)
bare("1")  # type: ignore[arg-type]
with_options(1, third="")  # type: ignore[call-arg]


async def awaits() -> str:
    return await coroutine(1)


task_lock(max_facto=2)  # type: ignore[call-overload]
task_lock(failover=30)  # type: ignore[call-overload]
task_lock(on_failure="ignore")  # type: ignore[call-overload]
task_lock(True)  # type: ignore[call-overload]


# The lock inside a job.


def job() -> None:
    lock: HeldLock | None = current_lock()
    if lock is None:
        return
    name: str = lock.name
    token: int = lock.token
    run_time: datetime | None = lock.run_time
    until: datetime = lock.locked_until
    left: float = lock.seconds_left
    lost: bool = lock.lost
    lock.extend(30)
    lock.extend(timedelta(minutes=1))
    lock.extend("30")  # type: ignore[arg-type]
    lock.locked_until = until  # type: ignore[misc]
    lock.lost = False  # type: ignore[misc]
    again: bool = lock.is_takeover
    dead_holder: str | None = lock.dead_holder
    print(name, token, run_time, left, lost, again, dead_holder)


# The same lock outside a scheduler.

locks = TaskLocks(DATABASE, replica_id="script")


def waiting_jobs() -> list[str]:
    found: list[JobStatus] = locks.jobs("reminder-*", limit=5)
    locks.jobs(["reminder-*"])  # type: ignore[arg-type]
    return [job.id for job in found if job.state is JobState.WAITING]


def names_of_arguments(job_id: str) -> list[str]:
    [job] = locks.jobs(job_id)
    names: tuple[str, ...] = job.argument_names
    arguments: dict[str, Any] = locks.job_arguments(job_id)
    return [name for name in names if name in arguments]


def what_is_seen_at_a_glance(since: datetime, until: datetime) -> int:
    late: list[TaskStatus] = locks.tasks("a*", states={TaskState.LATE}, order="due", offset=10)
    locks.tasks(states=TaskState.LATE)  # type: ignore[arg-type]
    overview: Overview = locks.overview("a*", limit=5)
    strips: dict[str, list[Run]] = locks.recent_runs("a", "b", limit=60)
    page: list[Run] = locks.runs("a", limit=10, offset=10)
    night: Lanes = locks.lanes(since, until, "a*", by="replica", limit=10)
    first: LaneEntry = night.lanes[0].entries[0]
    locks.lanes("02:00", until)  # type: ignore[arg-type]
    print(late, strips, page, first)
    return overview.counts[TaskState.FAILING]


def why_it_did_not_run() -> str | None:
    story: Story = locks.why("nightly")
    locks.why("nightly", at="02:00")  # type: ignore[arg-type]
    return story.miss.reason if story.verdict is Verdict.MISSED and story.miss else None


def steer_a_job() -> None:
    locks.pause_job("nightly")
    due: datetime | None = locks.resume_job("nightly").next_run_time
    asked: RunRequest | None = locks.run_job("nightly", by="alice", expires=60)
    assert due is not None
    locks.move_job("nightly", due + timedelta(hours=1))
    locks.move_job("nightly", "02:00")  # type: ignore[arg-type]
    locks.remove_job("nightly")
    print(asked)


def script() -> None:
    with locks.hold("import", min_lock=0, max_lock=timedelta(hours=1)) as lock:
        held: HeldLock = lock
    with locks.hold("import", min_lock=0, max_lock=3600, lease=None):
        print(held)
    with locks.hold("import", min_lock=0, max_lock=3600, lease=timedelta(seconds=30)):
        pass


@locks.hold("export", min_lock=0, max_lock=3600, lease=30)
def export(first: int) -> str:
    return str(first)


@locks.hold("export", min_lock=0, max_lock=3600)
async def export_async(first: int) -> str:
    return str(first)


async def async_script() -> str:
    async with locks.hold("import", min_lock=0, max_lock=60) as lock:
        print(lock.name)
    return await export_async(1)


text = export(1)


# Events.


def listener(event: TaskLockEvent) -> None:
    name: str = event.task_name
    run_time: datetime = event.scheduled_run_time
    holder: str | None = event.holder
    until: datetime | None = event.locked_until
    token: int | None = event.token
    reason: str | None = event.reason
    exception: BaseException | None = event.exception
    print(name, run_time, holder, until, token, reason, exception)


mask: int = (
    EVENT_TASK_LOCK_GRANTED
    | EVENT_TASK_LOCK_REFUSED
    | EVENT_TASK_LOCK_RELEASED
    | EVENT_TASK_LOCK_LOST
    | EVENT_TASK_LOCK_ERROR
)
assert mask == EVENT_TASK_LOCK_ALL
scheduler.add_listener(listener, mask)


# Errors.

try:
    scheduler.start()
except TaskLockOptionError as error:
    as_value_error: ValueError = error
except (TaskLockSchemaError, TaskLockDatabaseError) as error:
    as_base: TaskLockError = error


# Migrations.


def deploy(connection: Connection) -> None:
    upgrade(DATABASE)
    upgrade(URL.create("postgresql"), schema="jobs", table="locks", revision="head")
    downgrade(DATABASE, schema="jobs", table="locks", revision="base")
    migrate(connection)
    migrate(connection, schema="jobs", table="locks", revision="base")
    migrate(DATABASE)  # type: ignore[arg-type]


# Tests of an application.


@held_lock("report", token=7)
def test_function() -> None:
    lock = current_lock()
    print(lock and lock.lost)


@unlocked()
def test_scheduler() -> None:
    with in_memory_locks(), held_lock(run_time=datetime.now(), lost=True, max_lock=60) as lock:
        held: HeldLock = lock
        print(held)
    held_lock(token="7")  # type: ignore[arg-type]


def configure_alembic() -> None:
    context.configure(include_name=include_name)
    context.configure(include_name=partial(include_name, schema="jobs", table="locks"))


# Flask's extension.

flask_scheduler = TaskLockScheduler()


@flask_scheduler.task("cron", minute="*/5")
def tidied(days: int) -> str:
    return f"{days} days"


how_long: str = tidied(3)
tidied("3")  # type: ignore[arg-type]  # the decorator keeps the types
