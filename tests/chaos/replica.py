"""One replica: ``python -m tests.chaos.replica NAME [--loop] [--forkserver]``.

It begins when its settings come from standard input, a line of JSON; see ``settings.py``. It runs a
background scheduler until standard input ends or until SIGTERM, or a scheduler on an event loop
until SIGTERM. Some tasks run in worker processes, if it has a pool of them. What happens goes to
standard output, a line of JSON per event: it is not lost when the replica is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from apscheduler.events import EVENT_JOB_EXECUTED, EVENT_JOB_MISSED, EVENT_JOB_SUBMITTED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_tasklock import EVENT_TASK_LOCK_ERROR, TaskLockEvent, TaskLockExecutor
from tests.chaos import work
from tests.chaos.history import FAR, POOL
from tests.chaos.settings import Settings
from tests.chaos.tasks import CLAIM_TIMEOUT, POLL_INTERVAL, POOLED, TASKS, ChaosTask, OneOff

# Seconds between two signs of life of the main thread, and by how much one may be late.
_BEAT, _STALL = 0.1, 0.3

# Seconds that a pool's worker processes may take to start.
_POOL_START = 10.0

# The most characters of a detail, so that a pipe takes each line at once.
_LONGEST_DETAIL = 500
# How many of the innermost places of an error are told.
_FRAMES = 4

# Seconds before it is due at which a one-off job is added at the latest, between two additions, and
# after it was due in which a newcomer still adds it, so that it can take a dead run over.
_AHEAD, _BETWEEN, _KNOWN_FOR = 15.0, 3.0, 120.0

# Seconds until the job is due that replaces another one under its id.
_MUCH_LATER = 3600.0


class Errors(logging.Handler):
    """Writes an event for each line that is logged as an error. No fault should cause one."""

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__(logging.ERROR)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.name}: {record.getMessage()}"
        if record.exc_info:
            frames = traceback.extract_tb(record.exc_info[2])[-_FRAMES:]
            places = [f"{Path(each.filename).name}:{each.lineno}" for each in reversed(frames)]
            text += f": {record.exc_info[1]!r} at {', '.join(places)}"
        self._tell("erred", detail=text[:_LONGEST_DETAIL])


def unexpected(record: logging.LogRecord) -> bool:
    """Tell whether a log line is about another error than that of a job that fails on purpose.

    Of coroutines that a graceful stop cancels, APScheduler says so.
    """
    expected = (work.ExpectedError, asyncio.CancelledError)
    return not (record.exc_info and isinstance(record.exc_info[1], expected))


class Replica:
    """The scheduler and its jobs."""

    def __init__(self, name: str, settings: Settings, told_to_end: threading.Event) -> None:
        self._name = name
        self._settings = settings
        self._scheduler: Any = None
        self._told_to_end = told_to_end
        self._pool_ready = threading.Event()
        self._work = work.settle(name, settings)

    def live(self) -> None:
        """Run the scheduler until the replica is told to end."""
        logging.getLogger().addHandler(Errors(self._work.tell))
        work.pause(self._settings.start_after)
        match self._settings.loop:
            case "":
                scheduler = self._make(BackgroundScheduler)
                scheduler.start()
                self._pool_ready.wait(_POOL_START)
                self._begin(scheduler)
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
        await asyncio.to_thread(self._pool_ready.wait, _POOL_START)
        self._begin(scheduler)
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
        executors = {
            "default": self._executor(**({} if self._settings.loop else {"max_workers": 20}))
        }
        if self._settings.pool:
            pool = {
                "mp_context": multiprocessing.get_context(self._settings.pool),
                "initializer": work.settle,
                "initargs": (self._name, self._settings),
            }
            executors["pool"] = self._executor(
                "processpool", max_workers=len(POOLED), pool_kwargs=pool
            )
        elif self._settings.apart:
            executors["pool"] = self._executor("threadpool")
        scheduler = self._scheduler = kind(executors=executors, timezone="UTC")
        workers_to_start = len(POOLED) if self._settings.pool else 0
        for _ in range(workers_to_start):
            kwargs = {"task_lock": False}
            scheduler.add_job(
                work.get_ready, executor="pool", kwargs=kwargs, misfire_grace_time=None
            )
        started = itertools.count(1)

        def note_start(event: Any) -> None:
            if next(started) == workers_to_start:
                self._pool_ready.set()

        if workers_to_start:
            scheduler.add_listener(note_start, EVENT_JOB_EXECUTED)
        else:
            self._pool_ready.set()
        return scheduler

    def _begin(self, scheduler: Any) -> None:
        """Add the jobs, and tell that the replica is ready."""
        scheduler.add_listener(self._tell_fire, EVENT_JOB_SUBMITTED)
        scheduler.add_listener(self._tell_misfire, EVENT_JOB_MISSED)
        scheduler.add_listener(self._tell_skip, EVENT_TASK_LOCK_ERROR)
        for task in TASKS:
            self._add(scheduler, task)
        waiting = sorted(self._work.one_offs.values(), key=lambda one_off: one_off.at, reverse=True)
        self._add_soon(scheduler, waiting)
        threading.Thread(target=self._add_in_time, args=(scheduler, waiting), daemon=True).start()
        self._tell_self("ready")

    def _add_in_time(self, scheduler: Any, waiting: list[OneOff]) -> None:
        """Add the one-off jobs of the rest of the hour, each some time before it is due."""
        try:
            while waiting:
                work.pause(_BETWEEN)
                self._add_soon(scheduler, waiting)
        except Exception:  # told as an error, because the replica has no further one-off jobs
            logging.getLogger(__name__).exception("No one-off job is added any more")

    def _add_soon(self, scheduler: Any, waiting: list[OneOff]) -> None:
        """Add the one-off jobs that are due soon.

        An hour has thousands of them. To add them all at the start would keep an event loop busy
        for so long that a signal gets lost.

        :param waiting: those that are not added yet, the first ones last
        """
        now = time.monotonic()
        while waiting and waiting[-1].at < now + _AHEAD:
            one_off = waiting.pop()
            if one_off.at > now - _KNOWN_FOR:
                self._add_one_off(scheduler, one_off)

    def _executor(self, *inner: str, **options: Any) -> TaskLockExecutor:
        return TaskLockExecutor(
            self._settings.locks,
            *inner,
            claim_timeout=CLAIM_TIMEOUT,
            poll_interval=POLL_INTERVAL,
            replica_id=self._name,
            **options,
        )

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
            return  # because a replica that joins later does not know the job
        if not self._settings.far:
            # With APScheduler's own misfire grace time, of a second.
            self._add_job(scheduler, one_off.task, trigger)

    def _add_job(self, scheduler: Any, task: ChaosTask, trigger: Any, **options: Any) -> None:
        lock = dict(task.options)
        if task.cancels and self._settings.loop:
            lock["cancel_on_lost"] = True
        kwargs = {"key": task.name, "task_lock": lock}
        if self._work.is_pooled(task):
            options["executor"] = "pool"
        function = work.pooled_work if task.pooled else work.work
        scheduler.add_job(function, trigger, id=task.name, kwargs=kwargs, **options)

    def _tell_self(self, kind: str) -> None:
        detail = FAR if self._settings.far else ""
        work.tell(self._name, kind, detail=detail)
        if self._settings.apart:
            work.tell(self._name + POOL, kind, detail=detail)

    def _tell_fire(self, event: Any) -> None:
        task = self._work.tasks.get(event.job_id)
        if task is None:
            return  # because the event is of a job that started the pool
        if len(event.scheduled_run_times) == 1:  # because most of a backlog are rightly refused
            due = self._work.on_monotonic_clock(event.scheduled_run_times[0], exact=task.exact)
            self._work.tell("fire", task=task, due=due)
        one_off = self._work.one_offs.get(event.job_id)
        if one_off is not None and one_off.replaced:
            self._replace(one_off)

    def _replace(self, one_off: OneOff) -> None:
        """Add a job of much later under the id of one that was submitted."""
        # The scheduler tells this before it removes the job, and holds its lock meanwhile.
        threading.Timer(0.3, self._add_later, [one_off]).start()

    def _add_later(self, one_off: OneOff) -> None:
        kwargs = {"key": one_off.id, "early": True, "task_lock": one_off.task.options}
        later = datetime.now(timezone.utc) + timedelta(seconds=_MUCH_LATER)
        self._scheduler.add_job(work.work, "date", run_date=later, id=one_off.id, kwargs=kwargs)

    def _tell_misfire(self, event: Any) -> None:
        due = self._work.on_monotonic_clock(event.scheduled_run_time, exact=False)
        self._work.tell("misfired", task=self._work.tasks[event.job_id], due=due)

    def _tell_skip(self, event: TaskLockEvent) -> None:
        if event.token is not None:  # a release that failed, and is pending
            return
        task = self._work.tasks[event.job_id]
        due = self._work.on_monotonic_clock(event.scheduled_run_time, exact=task.exact)
        self._work.tell("skipped", task=task, due=due, detail=str(event.exception)[:100])

    def _wait_for_the_end(self) -> None:
        before = time.monotonic()
        while not (self._told_to_end.is_set() or select.select([0], [], [], _BEAT)[0]):
            before = self._tell_stall(before)

    def _tell_stall(self, before: float) -> float:
        """Tell if the main thread did not work since then as it should; return the time."""
        now = time.monotonic()
        if now - before > _BEAT + _STALL:
            work.tell(self._name, "stalled", before, until=now)
        return now


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
    logging.getLogger("apscheduler.executors.default").addFilter(unexpected)
    # So that a forked worker's signals do not wake up the event loop of its parent.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    if "--forkserver" in sys.argv:
        # Preload what this module imports, because it is the main module of worker processes, too.
        ours = ("apscheduler", "apscheduler_tasklock", "tests")
        multiprocessing.set_forkserver_preload(
            sorted(name for name in sys.modules if name.partition(".")[0] in ours)
        )
        forkserver.ensure_running()
    told_to_end = threading.Event()
    if "--loop" not in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    work.tell(sys.argv[1], "loaded")
    # Not by sys.stdin, because that would read further lines into its buffer.
    if told := os.read(0, select.PIPE_BUF):
        replica = Replica(sys.argv[1], Settings(**json.loads(told)), told_to_end)
        replica.live()
