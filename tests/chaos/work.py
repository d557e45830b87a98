"""What jobs do, and tell: in a thread, on an event loop, or in a worker process of a pool."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from apscheduler_tasklock import current_lock, task_lock
from tests.chaos.history import POOL
from tests.chaos.settings import Settings
from tests.chaos.tasks import TASKS, ChaosTask, OneOff


class ExpectedError(Exception):
    """What a job raises now and then."""


class Workplace:
    """What this process knows of its replica and of the tasks.

    :ivar worker: the process's id, if it is a worker of a pool
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.worker = os.getpid() if multiprocessing.parent_process() else 0
        self._name = name
        self._settings = settings
        one_offs = json.loads(Path(settings.one_offs).read_text())
        self.one_offs = {one_off["id"]: OneOff(**one_off) for one_off in one_offs}
        self.tasks = {task.name: task for task in TASKS}
        self.tasks |= {one_off.id: one_off.task for one_off in self.one_offs.values()}

    def tell(
        self, kind: str, at: float | None = None, task: ChaosTask | None = None, **details: Any
    ) -> None:
        """Write an event to standard output; one of a task is told by the part that runs it."""
        name = self._name
        if task is not None:
            details["task"] = task.name
            name += POOL * self.is_pooled(task)
        if self.worker:
            details["worker"] = self.worker
        tell(name, kind, at, **details)

    def is_pooled(self, task: ChaosTask) -> bool:
        """Tell whether this replica runs a task in a pool beside its other tasks."""
        return task.pooled and self._settings.apart

    def on_monotonic_clock(self, run_time: datetime, *, exact: bool) -> float:
        """Return a run time on the machine's monotonic clock.

        :param exact: whether all replicas mean the same moment by it, which is that of the server's
            clock; else it is that of the replica's own, whose skew cancels out
        """
        if exact:
            return run_time.timestamp() + self._settings.clock_offset
        return run_time.timestamp() - time.time() + time.monotonic()


_settled: list[Workplace] = []

# On this signal a process writes the stacks of its threads into its log.
SHOW_STACKS = signal.SIGUSR1


def settle(name: str, settings: Settings) -> Workplace:
    """Let the jobs in this process be those of a replica, or of its pool."""
    faulthandler.register(SHOW_STACKS)
    _settled[:] = [here] = [Workplace(name, settings)]
    if here.worker:
        tell(name + POOL, "worker started", worker=here.worker)
    return here


def tell(name: str, kind: str, at: float | None = None, **details: Any) -> None:
    """Write an event of a replica to standard output."""
    at = time.monotonic() if at is None else at
    line = json.dumps({"at": at, "kind": kind, "replica": name, **details}) + "\n"
    os.write(1, line.encode())  # in a single call: jobs run in several threads and processes


def pause(seconds: float) -> None:
    """Wait for so long."""
    # Not time.sleep(): libfaketime takes its absolute time for one of the wall clock.
    threading.Event().wait(max(0.0, seconds))


class Work:
    """A run of a job: it works, and tells whether its lock still is held."""

    def __init__(self, here: Workplace, task: ChaosTask) -> None:
        lock = current_lock()
        assert lock is not None
        assert lock.run_time is not None
        self._here = here
        self._task = task
        self._lock = lock
        self._dice = random.Random(f"{task.name} {lock.token}")  # noqa: S311  # repeatable
        self._end = time.monotonic() + self._dice.uniform(*task.takes)
        due = here.on_monotonic_clock(lock.run_time, exact=task.exact)
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

    def tell_lock(self) -> None:
        """Tell whether the lock still is held."""
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
        self._here.tell(kind, at, self._task, token=lock.token, lost=lock.lost, **details)


def _work(key: str, early: bool) -> Work | None:
    [here] = _settled
    task = here.tasks[key]
    if early:
        here.tell("early", task=task)
        return None
    return Work(here, task)


def _do(run: Work | None) -> None:
    if run is None:
        return
    with run:
        while run.left > 0:
            run.tell_lock()
            pause(min(0.1, run.left))
        run.fail_at_times()


@task_lock
def get_ready() -> None:
    """Occupy a worker process for long enough that the next job starts another one."""
    pause(0.3)


@task_lock
def pooled_work(key: str, early: bool = False) -> None:
    """Do a job's work in a worker process; in a thread where a replica has no pool of them."""
    _do(_work(key, early))


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
                run.tell_lock()
                await asyncio.sleep(min(0.1, max(0.0, run.left)))
            run.fail_at_times()

else:

    @task_lock
    def work(key: str, early: bool = False) -> None:
        """Do a job's work in a thread."""
        _do(_work(key, early))
