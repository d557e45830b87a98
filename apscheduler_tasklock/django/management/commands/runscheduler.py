"""``manage.py runscheduler``: runs the project's scheduler in the foreground."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from apscheduler.events import EVENT_SCHEDULER_SHUTDOWN, EVENT_SCHEDULER_STARTED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.blocking import BlockingScheduler
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from apscheduler_tasklock.django.configuration import configuration
from apscheduler_tasklock.django.scheduler import SETTING, make_scheduler
from apscheduler_tasklock.draining import drain, task_lock_executors
from apscheduler_tasklock.errors import TaskLockError, TaskLockSchemaError

# Limits the seconds between two checks of the scheduler's health. After two failed checks in a row,
# the scheduler is reported as dead.
LOOK_INTERVAL = 5.0

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Command(BaseCommand):
    """Runs the scheduler until a signal asks it to stop."""

    help = (
        f"Runs the scheduler that {SETTING} names, until SIGTERM or Ctrl-C. Then running jobs "
        "finish, and their locks are released. A second signal ends the process at once."
    )

    def handle(self, **_options: Any) -> None:
        """Run the scheduler.

        :raises CommandError: the scheduler cannot be started, or has died
        """
        # A SimpleQueue, because a signal handler can safely put into it at any moment.
        self._ends: SimpleQueue[BaseException | str] = SimpleQueue()
        self._signalled = False
        try:
            scheduler = make_scheduler()
        except (ImproperlyConfigured, ImportError) as error:
            raise CommandError(str(error)) from error
        run = self._way_to_run(scheduler)
        before = {which: signal.signal(which, self._on_signal) for which in _SIGNALS}
        try:
            run(scheduler)
        except TaskLockSchemaError as error:
            raise CommandError(f"{error}; or with: manage.py migrate") from error
        except TaskLockError as error:
            raise CommandError(str(error)) from error
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)
        self._say("The scheduler has stopped.")

    def _way_to_run(self, scheduler: Any) -> Callable[[Any], None]:
        if isinstance(scheduler, AsyncIOScheduler):
            return lambda scheduler: asyncio.run(self._run_asyncio(scheduler))
        if isinstance(scheduler, BackgroundScheduler):
            return self._run_background
        if isinstance(scheduler, BlockingScheduler):
            return self._run_blocking
        raise CommandError(
            f"{SETTING}: runscheduler runs a BackgroundScheduler, a BlockingScheduler or an "
            f"AsyncIOScheduler, not a {type(scheduler).__name__}; run that in a program of its own"
        )

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._signalled:
            # os._exit, because the first process of a container ignores a signal's default action.
            os._exit(128 + number)
        self._signalled = True
        self._ends.put(signal.Signals(number).name)

    def _run_background(self, scheduler: Any) -> None:
        self._listen(scheduler)
        scheduler.start()
        self._wait(scheduler)
        _shut_down(scheduler)

    def _run_blocking(self, scheduler: Any) -> None:
        """Run the scheduler in a thread, so that the main thread can handle signals."""
        started: SimpleQueue[BaseException | None] = SimpleQueue()

        def run() -> None:
            try:
                scheduler.start()
            except BaseException as error:  # noqa: BLE001  # raised again in the main thread
                started.put(error)
                self._ends.put(error)

        scheduler.add_listener(lambda _event: started.put(None), EVENT_SCHEDULER_STARTED)
        self._listen(scheduler)
        thread = threading.Thread(target=run, name="tasklock runscheduler", daemon=True)
        thread.start()
        error = started.get()
        if error is not None:
            raise error
        self._wait(scheduler)
        _shut_down(scheduler)
        thread.join()

    async def _run_asyncio(self, scheduler: Any) -> None:
        self._listen(scheduler)
        ended = asyncio.Event()
        scheduler.add_listener(lambda _event: ended.set(), EVENT_SCHEDULER_SHUTDOWN)
        scheduler.start()
        await asyncio.to_thread(self._wait, scheduler)
        if scheduler.running:
            await asyncio.to_thread(drain, scheduler)
            scheduler.shutdown()
            await ended.wait()

    def _listen(self, scheduler: Any) -> None:
        """End the command when something else shuts the scheduler down, such as a job."""
        scheduler.add_listener(lambda _event: self._ends.put("shutdown"), EVENT_SCHEDULER_SHUTDOWN)

    def _wait(self, scheduler: Any) -> None:
        """Wait until there is a reason to stop.

        :raises CommandError: the scheduler has died
        """
        self._say(f"The scheduler {configuration().scheduler} runs. SIGTERM or Ctrl-C stops it.")
        dead_looks = 0
        while True:
            try:
                end = self._ends.get(timeout=LOOK_INTERVAL)
            except Empty:
                is_live = all(e.health().live for e in task_lock_executors(scheduler))
                dead_looks = 0 if is_live else dead_looks + 1
                if dead_looks > 1:
                    raise CommandError(
                        "the scheduler is dead: one of its threads has ended or hangs"
                    ) from None
                continue
            if isinstance(end, BaseException):
                raise end
            self._say(f"{end}: waiting for running jobs. Another signal ends the process at once.")
            return

    def _say(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()


def _shut_down(scheduler: Any) -> None:
    if scheduler.running:
        drain(scheduler)
        scheduler.shutdown()
