"""One replica: ``python -m tests.chaos.replica NAME [--loop]``.

It begins when its settings come from standard input, a line of JSON; see ``settings.py``. It runs a
background scheduler until standard input ends, or a scheduler on an event loop until SIGTERM. What
happens goes to standard output, a line of JSON per event: it is not lost when the replica is
killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from apscheduler.events import EVENT_JOB_MISSED, EVENT_JOB_SUBMITTED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    TaskLockEvent,
    TaskLockExecutor,
    current_lock,
    task_lock,
)
from tests.chaos.application import Application
from tests.chaos.history import FAR
from tests.chaos.settings import Settings
from tests.chaos.tasks import CLAIM_TIMEOUT, POLL_INTERVAL, TASKS, ChaosTask, OneOff

# Seconds from one sign of life of the main thread to the next, and by how much one may be late.
_BEAT, _STALL = 0.1, 0.3

# A line longer than what a pipe takes at once could be mixed with another thread's.
_LONGEST_DETAIL = 500

# Seconds until a job is due that got the id of one that is due before.
_MUCH_LATER = 3600.0


class ExpectedError(Exception):
    """What a job raises now and then."""


class Errors(logging.Handler):
    """Tells of lines that are logged as errors. No fault here should lead to one."""

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__(logging.ERROR)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.name}: {record.getMessage()}"
        if record.exc_info:
            text += f": {record.exc_info[1]!r}"
        self._tell("erred", detail=text[:_LONGEST_DETAIL])


def unexpected(record: logging.LogRecord) -> bool:
    """Tell whether a line in the log is about something else than a job that is to fail.

    Of coroutines that a graceful stop cancels, APScheduler says so.
    """
    expected = (ExpectedError, asyncio.CancelledError)
    return not (record.exc_info and isinstance(record.exc_info[1], expected))


class Work:
    """A run of a job: it works, tells whether the lock still is held, and writes with its token."""

    def __init__(self, task: ChaosTask) -> None:
        lock = current_lock()
        assert lock is not None
        assert lock.run_time is not None
        self._task = task
        self._lock = lock
        self._dice = random.Random(f"{task.name} {lock.token}")  # noqa: S311  # repeatable
        self._end = time.monotonic() + self._dice.uniform(*task.takes)
        due = replica.on_monotonic_clock(lock.run_time, exact=task.exact)
        name = "" if lock.name == task.name else lock.name
        self._tell("begin", due=due, takeover=lock.is_takeover, detail=name)

    def __enter__(self) -> Work:
        return self

    def __exit__(
        self, error: type[BaseException] | None, _value: Any, _trace: TracebackType | None
    ) -> None:
        is_cut = error is not None and issubclass(error, asyncio.CancelledError)
        self._tell("cut" if is_cut else "end")

    @property
    def left(self) -> float:
        """Seconds until the job is done."""
        return self._end - time.monotonic()

    def write(self) -> None:
        """Write to the resource, except where there would be too many that do."""
        if not self._task.once:
            replica.application.write(self._task.name, self._lock.token)
        self._tell("holds")

    def fail_at_times(self) -> None:
        """Raise, if the job is one that does."""
        if self._task.raises and self._dice.random() < 1 / 3:
            raise ExpectedError

    def _tell(self, kind: str, **details: Any) -> None:
        # The clock first. A lock that is lost stays so: one that is not lost afterwards was held at
        # that moment, however long this process is stopped in between.
        at = time.monotonic()
        lock = self._lock
        replica.tell(kind, at, task=self._task.name, token=lock.token, lost=lock.lost, **details)


class Replica:
    """The scheduler and its jobs."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.application = Application(settings.application, name)
        self._name = name
        self._settings = settings
        self._scheduler: Any = None
        one_offs = json.loads(Path(settings.one_offs).read_text())
        self._one_offs = {one_off["id"]: OneOff(**one_off) for one_off in one_offs}
        self._tasks = {task.name: task for task in TASKS}
        self._tasks |= {one_off.id: one_off.task for one_off in self._one_offs.values()}

    def live(self) -> None:
        """Run the scheduler until the replica is told to end."""
        logging.getLogger().addHandler(Errors(self.tell))
        _pause(self._settings.start_after)
        match self._settings.loop:
            case "":
                scheduler = self._make(BackgroundScheduler)
                scheduler.start()
                self._tell_ready()
                self._wait_for_the_end()
                scheduler.shutdown(wait=True)
            case "left":
                asyncio.new_event_loop().run_until_complete(self._serve())
            case _:
                asyncio.run(self._serve())

    async def _serve(self) -> None:
        """Do as a server whose lifespan starts the scheduler and shuts it down."""
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
        scheduler = self._make(AsyncIOScheduler)
        scheduler.start()
        self._tell_ready()
        before = time.monotonic()
        while not told.is_set():
            await asyncio.sleep(_BEAT)
            before = self._tell_stall(before)
        scheduler.shutdown()
        # It is shut down by a callback of the loop. Servers wait for the task of the lifespan.
        await asyncio.sleep(0)
        if self._settings.loop == "signal":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def _make(self, kind: type[Any]) -> Any:
        options = {} if self._settings.loop else {"max_workers": 20}
        executor = TaskLockExecutor(
            self._settings.locks,
            claim_timeout=CLAIM_TIMEOUT,
            poll_interval=POLL_INTERVAL,
            replica_id=self._name,
            **options,
        )
        scheduler = self._scheduler = kind(executors={"default": executor}, timezone="UTC")
        scheduler.add_listener(self._tell_fire, EVENT_JOB_SUBMITTED)
        scheduler.add_listener(self._tell_misfire, EVENT_JOB_MISSED)
        scheduler.add_listener(self._tell_skip, EVENT_TASK_LOCK_ERROR)
        for task in TASKS:
            self._add(scheduler, task)
        for one_off in self._one_offs.values():
            self._add_one_off(scheduler, one_off)
        return scheduler

    def _add(self, scheduler: Any, task: ChaosTask) -> None:
        if task.exact and self._settings.far:
            return
        if task.exact:
            trigger: Any = CronTrigger(second=f"*/{task.period:.0f}", timezone="UTC")
        else:
            start = datetime.now(timezone.utc) + timedelta(seconds=0.5)
            trigger = IntervalTrigger(seconds=int(task.period), start_date=start)
        self._add_job(scheduler, task, trigger, misfire_grace_time=None, **task.job)

    def _add_one_off(self, scheduler: Any, one_off: OneOff) -> None:
        run_time = datetime.fromtimestamp(
            int(one_off.at - self._settings.clock_offset), timezone.utc
        )
        if one_off.cron:
            trigger: Any = CronTrigger(
                minute=run_time.minute, second=run_time.second, timezone="UTC"
            )
        elif run_time > datetime.now(timezone.utc):
            trigger = DateTrigger(run_time)
        else:
            return  # who joins later does not know of it
        if not self._settings.far:
            # With APScheduler's own misfire grace time, of a second.
            self._add_job(scheduler, one_off.task, trigger)

    def _add_job(self, scheduler: Any, task: ChaosTask, trigger: Any, **options: Any) -> None:
        lock = dict(task.options)
        if task.cancels and self._settings.loop:
            lock["cancel_on_lost"] = True
        kwargs = {"key": task.name, "task_lock": lock}
        scheduler.add_job(work, trigger, id=task.name, kwargs=kwargs, **options)

    def task_of(self, key: str) -> ChaosTask:
        """Return the task that a job is to run."""
        return self._tasks[key]

    def tell_early(self, key: str) -> None:
        """Tell that a job runs that is not due for long."""
        self.tell("early", task=key)

    def _tell_ready(self) -> None:
        self.tell("ready", detail=FAR if self._settings.far else "")

    def _tell_fire(self, event: Any) -> None:
        task = self._tasks[event.job_id]
        if len(event.scheduled_run_times) == 1:  # of a backlog, most are rightly refused
            due = self.on_monotonic_clock(event.scheduled_run_times[0], exact=task.exact)
            self.tell("fire", task=event.job_id, due=due)
        one_off = self._one_offs.get(event.job_id)
        if one_off is not None and one_off.replaced:
            self._replace(one_off)

    def _replace(self, one_off: OneOff) -> None:
        """Add a job of much later under the id of one that was submitted."""
        # The scheduler tells this before it removes the job, and holds its lock meanwhile.
        threading.Timer(0.3, self._add_later, [one_off]).start()

    def _add_later(self, one_off: OneOff) -> None:
        kwargs = {"key": one_off.id, "early": True, "task_lock": one_off.task.options}
        later = datetime.now(timezone.utc) + timedelta(seconds=_MUCH_LATER)
        self._scheduler.add_job(work, "date", run_date=later, id=one_off.id, kwargs=kwargs)

    def _tell_misfire(self, event: Any) -> None:
        due = self.on_monotonic_clock(event.scheduled_run_time, exact=False)
        self.tell("misfired", task=event.job_id, due=due)

    def _tell_skip(self, event: TaskLockEvent) -> None:
        if event.token is not None:  # a release that failed, and is pending
            return
        exact = self._tasks[event.job_id].exact
        due = self.on_monotonic_clock(event.scheduled_run_time, exact=exact)
        self.tell("skipped", task=event.job_id, due=due, detail=str(event.exception)[:100])

    def tell(self, kind: str, at: float | None = None, **details: Any) -> None:
        """Write an event to standard output."""
        tell(self._name, kind, at, **details)

    def on_monotonic_clock(self, run_time: datetime, *, exact: bool) -> float:
        """Return a run time on the machine's monotonic clock.

        :param exact: whether all replicas mean the same moment by it, which is that of the server's
            clock; else it is that of the replica's own, whose skew cancels out
        """
        if exact:
            return run_time.timestamp() + self._settings.clock_offset
        return run_time.timestamp() - time.time() + time.monotonic()

    def _wait_for_the_end(self) -> None:
        before = time.monotonic()
        while not select.select([0], [], [], _BEAT)[0]:
            before = self._tell_stall(before)

    def _tell_stall(self, before: float) -> float:
        """Tell if the main thread did not work since then as it should; return the time."""
        now = time.monotonic()
        if now - before > _BEAT + _STALL:
            self.tell("stalled", before, until=now)
        return now


def tell(name: str, kind: str, at: float | None = None, **details: Any) -> None:
    """Write an event of a replica to standard output."""
    at = time.monotonic() if at is None else at
    line = json.dumps({"at": at, "kind": kind, "replica": name, **details}) + "\n"
    os.write(1, line.encode())  # in a single call: jobs run in several threads


def _pause(seconds: float) -> None:
    # Not time.sleep(): libfaketime takes its absolute time for one of the wall clock.
    threading.Event().wait(max(0.0, seconds))


def _work(key: str, early: bool) -> Work | None:
    if early:
        replica.tell_early(key)
        return None
    return Work(replica.task_of(key))


# One function under one name, as in a fleet that is moved from threads to an event loop: what one
# replica left is taken over by the others.
if "--loop" in sys.argv:

    @task_lock
    async def work(key: str, early: bool = False) -> None:
        """Do a job's work on the event loop."""
        if (run := _work(key, early)) is None:
            return
        with run:
            while run.left > 0:
                await asyncio.to_thread(run.write)
                await asyncio.sleep(min(0.1, max(0.0, run.left)))
            run.fail_at_times()

else:

    @task_lock
    def work(key: str, early: bool = False) -> None:
        """Do a job's work in a thread."""
        if (run := _work(key, early)) is None:
            return
        with run:
            while run.left > 0:
                run.write()
                _pause(min(0.1, run.left))
            run.fail_at_times()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
    logging.getLogger("apscheduler.executors.default").addFilter(unexpected)
    tell(sys.argv[1], "loaded")
    # Not by sys.stdin, which would read on.
    if told := os.read(0, select.PIPE_BUF):
        replica = Replica(sys.argv[1], Settings(**json.loads(told)))
        replica.live()
