"""The worker processes of a process pool: what they are called, their signals, and their deaths."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any

from apscheduler_tasklock._lock.client import LockClient
from apscheduler_tasklock._lock.replica import LockSettings
from apscheduler_tasklock._scheduler.adapter import worker_processes
from apscheduler_tasklock._scheduler.submission import Submission
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError

logger = logger_of(__name__)

# Seconds from a job's end until a signal that it put off ends its worker, unless the pool
# has done that by then, or has given it another job.
DELAY = 1.0

# Seconds after which workers are told again of a shutdown.
SHUTDOWN_INTERVAL = 0.2

# Seconds after which it is looked again which workers are dead.
INTERVAL = 0.5


def worker_id(settings: LockSettings, pid: int | None = None) -> str:
    """Return who holds what a worker process claims, shown in logs."""
    return f"{settings.replica_id} worker {os.getpid() if pid is None else pid}"


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Let no SIGTERM or SIGINT end this process while a job runs in it.

    A terminal and systemd send them to every process of a group. The parent gets them, too, and
    shuts down as it sees fit; its workers have to end their jobs until then. A handler that
    somebody has set for the workers is left alone, but not one that they inherited in a fork.
    """
    received: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number, default in _DEFAULTS.items():
            handler = signal.getsignal(number)
            if handler is not None and handler in (default, _inherited.get(number)):
                before[number] = signal.signal(number, lambda got, _frame: received.append(got))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        # The pool's own way to end a worker, if another one has died.
        if signal.SIGTERM in received:
            later = threading.Timer(DELAY, os.kill, (os.getpid(), signal.SIGTERM))
            later.daemon = True
            later.start()


def hear_of_shutdown(locks: LockClient) -> None:
    """Let this worker process claim nothing more when its parent says so by a signal.

    A worker cannot be told anything else: its pipe has jobs in it that come first.
    """
    if _SHUTDOWN_SIGNAL is None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(_SHUTDOWN_SIGNAL) == signal.SIG_DFL:
        signal.signal(
            _SHUTDOWN_SIGNAL, lambda _number, _frame: locks.stop_claiming_in_a_signal_handler()
        )


@contextmanager
def shutting_down(inner: Any) -> Iterator[None]:
    """Tell the worker processes of a wrapped executor's pool that nothing more is to be claimed."""
    processes = list(worker_processes(inner).values())
    over = threading.Event()

    def tell(number: int) -> None:
        # Again and again: one that has not begun its first job ignores the signal.
        while True:
            for process in processes:
                if _lives(process):
                    with suppress(OSError):
                        os.kill(process.pid, number)
            if over.wait(SHUTDOWN_INTERVAL):
                return

    teller = threading.Thread(
        target=tell, args=[_SHUTDOWN_SIGNAL], name="tasklock-shutdown", daemon=True
    )
    if processes and _SHUTDOWN_SIGNAL is not None:
        # From Python 3.12 on, no thread starts any more while the interpreter ends.
        with suppress(RuntimeError):
            teller.start()
    try:
        yield
    finally:
        over.set()
        if teller.ident is not None:
            teller.join()


_inherited: dict[int, Any] = {}


def _note_inherited() -> None:
    _inherited.update({number: signal.getsignal(number) for number in _DEFAULTS})


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_note_inherited)

# Ignored by those who do not know it.
_SHUTDOWN_SIGNAL = getattr(signal, "SIGURG", None)

_DEFAULTS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}


class LostWorkers:
    """Frees the tasks of worker processes that died, which their parent lives to tell.

    A pool of which one process was killed is broken: none of its runs is heard of again, although
    the other processes end what they run.

    :param locks: the task locks of this replica
    """

    def __init__(self, locks: LockClient) -> None:
        self._locks = locks
        self._changed = threading.Lock()
        self._runs: list[tuple[Mapping[int, Any], Submission]] = []
        self._thread: threading.Thread | None = None

    def add(self, processes: Mapping[int, Any], submission: Submission) -> None:
        """Free what a submission has claimed, as soon as the process is dead that ran it.

        :param processes: those of its pool, by their ids
        """
        with self._changed:
            self._runs.append((dict(processes), submission))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="tasklock-workers", daemon=True
                )
                self._thread.start()

    def _work(self) -> None:
        try:
            while self._free_dead():
                pass
        except Exception:  # nothing may end this thread unseen
            logger.exception("Tasks of dead worker processes could not be freed")
            with self._changed:
                self._thread = None

    def _free_dead(self) -> bool:
        """Free what is known to be dead, and wait for more; tell whether there may be more."""
        with self._changed:
            runs = list(self._runs)
        for run in runs:
            if self._is_done_with(*run):
                with self._changed:
                    self._runs.remove(run)
        with self._changed:
            if not self._runs or self._locks.closed:
                self._runs.clear()
                self._thread = None
                return False
        alive = {p.sentinel for processes, _ in runs for p in processes.values() if _lives(p)}
        if alive:
            wait(alive, INTERVAL)
        else:
            self._locks.wait(INTERVAL)
        return True

    def _is_done_with(self, processes: Mapping[int, Any], submission: Submission) -> bool:
        """End the leases of dead workers; tell whether there is nothing more to be done."""
        dead = [pid for pid, process in processes.items() if not _lives(process)]
        if not dead:
            return not processes
        holders = [worker_id(self._locks.settings, pid) for pid in dead]
        freed = False
        try:
            for claim_id in submission.claim_ids:
                if self._locks.end_lease(submission.task_name, claim_id, holders):
                    freed = True
                    logger.warning(
                        "Task %r: the worker process that ran it is dead; its lock is free",
                        submission.task_name,
                    )
        except TaskLockDatabaseError:
            return False
        except TaskLockError as error:
            logger.warning("Task %r: its lock is not free: %s", submission.task_name, error)
        return freed or len(dead) == len(processes)


def _lives(process: Any) -> bool:
    try:
        return bool(process.is_alive())
    except ValueError:  # closed: it was waited for
        return False
