"""Hosts of executors: each runs one kind of scheduler and its event loop."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from typing import Any, ClassVar

from apscheduler.executors.base import BaseExecutor, run_job
from apscheduler.schedulers.background import BackgroundScheduler

from tests.support.event_loops import say_nothing_of_pending_tasks
from tests.support.internals import pool_of
from tests.support.polling import eventually


class Host:
    """Runs background schedulers.

    :ivar executor: the arguments that make the task lock executor wrap the host's executor
    :ivar coroutines: whether the wrapped executor awaits coroutine jobs
    :ivar inline: whether a job runs before ``submit_job`` returns
    """

    executor: ClassVar[dict[str, Any]] = {}
    coroutines = False
    inline = False

    def make_scheduler(self, **options: Any) -> Any:
        return BackgroundScheduler(timezone=timezone.utc, **options)

    def start(self, scheduler: Any) -> None:
        scheduler.start()

    def shutdown(self, scheduler: Any, *, wait: bool) -> None:
        scheduler.shutdown(wait=wait)
        eventually(lambda: not scheduler.running)

    def submit_late(self, executor: Any, job: Any) -> None:
        """Submit a job to an executor that is being shut down.

        A scheduler whose thread is within a pass does the same. The pool may reject the job.
        """
        with suppress(RuntimeError):
            executor.submit_job(job, [datetime.now(timezone.utc)])

    def close(self) -> None:
        """Stop the host's event loop and threads."""


class ThreadPool(Host):
    executor: ClassVar[dict[str, Any]] = {"executor": "threadpool", "max_workers": 4}


class ProcessPool(Host):
    def submit_late(self, executor: Any, job: Any) -> None:
        # Wait until the pool rejects jobs, because a job that it accepts would still run.
        eventually(lambda: pool_of(executor)._shutdown_thread)
        super().submit_late(executor, job)


class SpawnPool(ProcessPool):
    executor: ClassVar[dict[str, Any]] = {
        "executor": "processpool",
        "max_workers": 1,
        "pool_kwargs": {"mp_context": multiprocessing.get_context("spawn")},
    }


class ForkPool(ProcessPool):
    executor: ClassVar[dict[str, Any]] = {
        "executor": "processpool",
        "max_workers": 1,
        "pool_kwargs": {"mp_context": multiprocessing.get_context("fork")},
    }


class Debug(Host):
    executor: ClassVar[dict[str, Any]] = {"executor": "debug"}
    inline = True


class ThreadPerJobExecutor(BaseExecutor):
    """A third party's executor, written from APScheduler's documentation."""

    def __init__(self) -> None:
        super().__init__()
        self._threads: list[threading.Thread] = []
        self.submitted: list[tuple[str, Any]] = []

    def _do_submit_job(self, job: Any, run_times: Any) -> None:
        self.submitted.append((job.func_ref, job.trigger))

        def work() -> None:
            try:
                events = run_job(job, job._jobstore_alias, run_times, self._logger.name)
            except BaseException as error:  # noqa: BLE001  # as in APScheduler's own executors
                self._run_job_error(job.id, error, error.__traceback__)
            else:
                self._run_job_success(job.id, events)

        thread = threading.Thread(target=work)
        self._threads.append(thread)
        thread.start()

    def shutdown(self, wait: bool = True) -> None:
        for thread in self._threads if wait else ():
            thread.join()


class ThirdParty(Host):
    @property
    def executor(self) -> dict[str, Any]:
        return {"executor": ThreadPerJobExecutor()}


class AsyncIO(Host):
    """AsyncIOSchedulers on a loop in a thread of its own."""

    coroutines = True

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="loop")
        self._thread.start()

    def make_scheduler(self, **options: Any) -> Any:
        from apscheduler.schedulers.asyncio import AsyncIOScheduler

        return AsyncIOScheduler(event_loop=self.loop, timezone=timezone.utc, **options)

    def start(self, scheduler: Any) -> None:
        # The scheduler forgets its loop when it is shut down.
        scheduler._eventloop = self.loop
        self.on_loop(scheduler.start)

    def submit_late(self, executor: Any, job: Any) -> None:
        self.on_loop(partial(super().submit_late, executor, job))

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        say_nothing_of_pending_tasks(self.loop)
        self.loop.close()

    def on_loop(self, call: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)


class Tornado(AsyncIO):
    def make_scheduler(self, **options: Any) -> Any:
        from apscheduler.schedulers.tornado import TornadoScheduler
        from tornado.ioloop import IOLoop

        io_loop = self.on_loop(IOLoop.current)
        return TornadoScheduler(io_loop=io_loop, timezone=timezone.utc, **options)

    def start(self, scheduler: Any) -> None:
        self.on_loop(scheduler.start)


class Twisted(Host):
    """TwistedSchedulers on the reactor, which a process can start only once."""

    def __init__(self) -> None:
        from twisted.internet import reactor

        self.reactor: Any = reactor
        if not self.reactor.running:
            run = self.reactor.run
            threading.Thread(target=run, args=(False,), name="reactor", daemon=True).start()
            eventually(lambda: self.reactor.running)

    def make_scheduler(self, **options: Any) -> Any:
        from apscheduler.schedulers.twisted import TwistedScheduler

        return TwistedScheduler(timezone=timezone.utc, **options)

    def submit_late(self, executor: Any, job: Any) -> None:
        from twisted.internet.threads import blockingCallFromThread

        # In the reactor's thread, as the scheduler does. The pool starts a worker from the thread
        # that submits. A worker is a daemon only if that thread is one, and else the process hangs.
        blockingCallFromThread(self.reactor, super().submit_late, executor, job)


class Gevent(Host):
    """GeventSchedulers, in a process whose blocking calls gevent has patched."""

    def make_scheduler(self, **options: Any) -> Any:
        from apscheduler.schedulers.gevent import GeventScheduler

        return GeventScheduler(timezone=timezone.utc, **options)


HOSTS: dict[str, type[Host]] = {
    "threadpool": ThreadPool,
    "spawn": SpawnPool,
    "fork": ForkPool,
    "debug": Debug,
    "third-party": ThirdParty,
    "asyncio": AsyncIO,
    "tornado": Tornado,
    "twisted": Twisted,
    "gevent": Gevent,
}
