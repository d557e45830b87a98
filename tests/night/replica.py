"""One replica of the night: ``tests.night.replica.main``, in a process of its own.

``NIGHT`` has its :class:`Settings` as JSON. It writes ``loaded`` into the ledger, and waits for a
line on standard input: the begin of the night. It stops in good order on SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from apscheduler.events import EVENT_JOB_SUBMITTED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore, current_lock, task_lock
from apscheduler_tasklock.demo.history import Event
from apscheduler_tasklock.events import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_GRANTED,
    EVENT_TASK_LOCK_LOST,
    EVENT_TASK_LOCK_RELEASED,
    TaskLockEvent,
)
from tests.night.plan import (
    BATCH,
    BY_TASK,
    GRACE,
    LEADER_LEASE,
    LEASE,
    NAMESPACE,
    POLL_INTERVAL,
    STORE,
    NightJob,
    jobs_of,
)

_KINDS = {
    EVENT_TASK_LOCK_GRANTED: "claimed",
    EVENT_TASK_LOCK_RELEASED: "released",
    EVENT_TASK_LOCK_LOST: "lost",
    EVENT_TASK_LOCK_ERROR: "error",
}
_TICK = 0.05


class UpstreamError(Exception):
    """What a job raises when it is told to."""


@dataclass(frozen=True)
class Settings:
    """What a replica is.

    :ivar folder: has the ledger, and the files that tell jobs to hang or to fail
    :ivar adds: whether it adds the stored jobs
    """

    name: str
    application: str
    release: str
    url: str
    folder: str
    adds: bool = False


def settings_of_process() -> Settings:
    """Return the settings of this process's replica."""
    return Settings(**json.loads(os.environ["NIGHT"]))


def note(kind: str, **details: Any) -> None:
    """Write an event into the ledger, which several processes append to."""
    settings = settings_of_process()
    line = Event(time.time(), kind, settings.name, **details).line
    ledger = os.open(Path(settings.folder, "ledger.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(ledger, line.encode())
    finally:
        os.close(ledger)


# ---- jobs ----------------------------------------------------------------------------------------


def _begin(task: str) -> int:
    lock = current_lock()
    assert lock is not None
    due = None if lock.run_time is None else lock.run_time.timestamp()
    detail = f"attempt {lock.attempt}"
    note("begin", task=task, token=lock.token, due=due, takeover=lock.is_takeover, detail=detail)
    return lock.token


def _is_told(what: str, task: str) -> bool:
    """Return whether the conductor has told a task's run to hang or to fail."""
    return Path(settings_of_process().folder, what, task.replace("/", "+")).exists()


def _end(task: str, token: int) -> None:
    lock = current_lock()
    assert lock is not None
    if lock.attempt == 1 and _is_told("fail", task):
        note("end", task=task, token=token, error="UpstreamError")
        raise UpstreamError("HTTP 503")
    note("end", task=task, token=token)


def _hangs(task: str) -> bool:
    """Return whether this run is the one that hangs: the first that takes the file."""
    try:
        Path(settings_of_process().folder, "hang", task.replace("/", "+")).unlink()
    except FileNotFoundError:
        return False
    return True


@task_lock
def work(task: str) -> None:
    """Take as long as the job is said to take."""
    token = _begin(task)
    ends_at = time.monotonic() + BY_TASK[task].takes
    while time.monotonic() < ends_at:
        time.sleep(_TICK)
    if _hangs(task):
        note("hangs", task=task, token=token)
        while not _is_told("wake", task):
            time.sleep(_TICK)
    _end(task, token)


@task_lock
async def work_async(task: str) -> None:
    """The same on an event loop, where a stop cancels it."""
    token = _begin(task)
    try:
        await asyncio.sleep(BY_TASK[task].takes)
    except asyncio.CancelledError:
        note("cut", task=task, token=token)
        raise
    _end(task, token)


# ---- the scheduler -------------------------------------------------------------------------------


def _executor(settings: Settings, **options: Any) -> TaskLockExecutor:
    return TaskLockExecutor(
        settings.url,
        lease=LEASE,
        poll_interval=POLL_INTERVAL,
        namespace=NAMESPACE[settings.application],
        replica_id=settings.name,
        claim_timeout=3,
        tracebacks=True,
        **options,
    )


def _add(scheduler: Any, job: NightJob, begin: datetime, release: str) -> None:
    if job.every is None and job.made_trigger(begin, release).run_date < datetime.now(timezone.utc):
        return  # because it was a job of the replicas that lived then
    scheduler.add_job(
        "tests.night.replica:work" if job.application != BATCH else work_async,
        job.made_trigger(begin, release),
        args=[job.task],
        id=job.name,
        kwargs={"task_lock": {"grace": GRACE, **job.lock}},
        jobstore=STORE if job.in_store else "default",
        replace_existing=job.in_store,
        **{"misfire_grace_time": None, "coalesce": True, **job.options},
    )


def _watch(scheduler: Any) -> None:
    def of_lock(event: TaskLockEvent) -> None:
        due = event.scheduled_run_time.timestamp() if event.scheduled_run_time else None
        detail = event.outcome or event.reason or ""
        note(
            _KINDS[event.code],
            task=event.task_name,
            token=event.token or 0,
            due=due,
            detail=detail,
            error=str(event.exception or event.error or "")[:200],
        )

    def of_submission(event: Any) -> None:
        for due in event.scheduled_run_times:
            note("submitted", task=event.job_id, due=due.timestamp())

    scheduler.add_listener(
        of_lock,
        EVENT_TASK_LOCK_GRANTED
        | EVENT_TASK_LOCK_RELEASED
        | EVENT_TASK_LOCK_LOST
        | EVENT_TASK_LOCK_ERROR,
    )
    scheduler.add_listener(of_submission, EVENT_JOB_SUBMITTED)


def _fill(scheduler: Any, settings: Settings, begin: datetime) -> None:
    _watch(scheduler)
    for job in jobs_of(settings.application, settings.release):
        if not job.in_store or settings.adds:
            _add(scheduler, job, begin, settings.release)


def _run_shop(settings: Settings, begin: datetime) -> None:
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    scheduler = BackgroundScheduler(
        executors={"default": _executor(settings, max_workers=12)},
        jobstores={
            STORE: TaskLockJobStore(
                settings.url, functions=["tests.night."], replica_id=settings.name, poll_interval=1
            )
        },
        timezone="UTC",
    )
    scheduler.start(paused=True)
    _fill(scheduler, settings, begin)
    scheduler.resume()
    note("ready")
    while not stopped.wait(_TICK):
        pass
    note("stopping")
    scheduler.shutdown(wait=True)


async def _run_batch(settings: Settings, begin: datetime) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    executor = _executor(settings, leader=True, leader_lease=LEADER_LEASE)
    scheduler = AsyncIOScheduler(executors={"default": executor}, timezone="UTC")
    scheduler.start(paused=True)
    _fill(scheduler, settings, begin)
    scheduler.resume()
    note("ready")
    leads = False
    while not stopped.is_set():
        await asyncio.sleep(_TICK)
        if executor.is_leader != leads:
            leads = executor.is_leader
            note("leads" if leads else "follows")
    note("stopping")
    scheduler.shutdown()
    await asyncio.sleep(0)


def main() -> None:
    """Run the replica until it is told to stop."""
    settings = settings_of_process()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
    note("loaded")
    line = sys.stdin.readline()
    if not line:
        return
    begin = datetime.fromtimestamp(float(line), timezone.utc)
    if settings.application == BATCH:
        asyncio.run(_run_batch(settings, begin))
    else:
        _run_shop(settings, begin)
    note("stopped")
