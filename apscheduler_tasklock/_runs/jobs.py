"""The thread of the jobs' side: around the steps of its queues, with one inbox.

It never waits: not for the database, not for a lock of the scheduler's, not for a listener. What
it has to say, log records too, goes to the thread for the application's code.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Protocol

from apscheduler_tasklock._application import keep_application_out
from apscheduler_tasklock._runs.queue import Ask, Full, Inputs, RunQueue
from apscheduler_tasklock._runs.run import Run, Verdict
from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)

NAME = "tasklock-jobs"
# Seconds for which the thread waits for something to do before it ends. The next message starts it.
LINGER = 5.0
# Seconds after which it looks again at what waits: a pool may have got more workers by then.
LONGEST_WAIT = 0.5
# Seconds after which one step counts as stuck. Far more than any takes.
STUCK = 30.0

# What the thread is sent: a function that adds to what has happened.
Message = Callable[[Inputs], object]
# Returns how many workers there are now; ``None``: as many as there are runs.
Workers = Callable[[], int | None]


class Carrier(Protocol):
    """What carries out the queue's decisions, in the thread. Nothing of it waits."""

    @property
    def is_ending(self) -> bool:
        """Whether the interpreter has begun to end, so that nothing more is begun."""

    def ask(self, ask: Ask) -> None:
        """Ask the database for runs."""

    def give(self, run: Run) -> None:
        """Give a run to the executor."""

    def end_refused(self, run: Run, verdict: Verdict) -> None:
        """End a run that was refused, or could not be asked for."""

    def withdraw(self, run: Run) -> None:
        """End a run that is not begun, and hand over what it has got."""

    def tell_full(self, full: Full) -> None:
        """Tell that all workers have been busy for long."""

    def look(self) -> float:
        """Look for what nobody tells.

        :return: seconds after which to look again; ``inf``: there is nothing to look for
        """


class Line:
    """A queue of runs, as the thread drives it.

    :ivar thread: drives it
    :ivar came: what has happened since its last step
    :ivar wakes_at: when to step again, if nothing happens before; on the monotonic clock
    """

    def __init__(
        self, thread: JobsThread, runs: RunQueue, workers: Workers, carrier: Carrier
    ) -> None:
        self.thread = thread
        self.runs = runs
        self.workers = workers
        self.carrier = carrier
        self.came: list[Message] = []
        self.wakes_at = inf

    def post(self, message: Message) -> None:
        """Let the queue know that something has happened. Never waits."""
        self.thread.post(self, message)


class JobsThread:
    """Drives queues of runs in one thread, which starts with the first message."""

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._inbox: queue.SimpleQueue[tuple[Line, Message]] = queue.SimpleQueue()
        # Reentrant: the garbage collector may close anything anywhere, and that may post.
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stepping = threading.RLock()
        self._carried_out: list[threading.Event] = []
        self._is_stopped = False
        self._step_began = inf  # on the monotonic clock

    def add(self, runs: RunQueue, workers: Workers, carrier: Carrier) -> Line:
        """Let the thread drive one more queue.

        :param runs: decides
        :param workers: returns how many workers there are now for what it decides
        :param carrier: carries that out
        """
        line = Line(self, runs, workers, carrier)
        self._lines.append(line)
        return line

    @property
    def is_live(self) -> bool:
        """Whether it goes on: it is not stuck, and it runs where something is to be done."""
        if self._thread is None and self._inbox.qsize():
            return False
        return time.monotonic() < self._step_began + STUCK

    def start(self) -> None:
        """Start the thread, unless there is one.

        :raises RuntimeError: none can be started
        """
        with self._starting:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._work, name=NAME, daemon=True)
            try:
                self._thread.start()
            except BaseException:
                # By Ctrl-C it may have been started all the same, and then finds that out.
                self._thread = None
                raise

    def post(self, line: Line, message: Message) -> None:
        """Let a queue know that something has happened. Never waits."""
        self._inbox.put((line, message))
        with suppress(RuntimeError):  # threads are limited, or the interpreter ends
            self.start()

    def stop(self, seconds: float) -> None:
        """Let nothing be begun any more; wait until what waited is withdrawn, for so long at most.

        Where no thread can be started, that is done here.
        """
        is_done = threading.Event()

        def stop(inputs: Inputs) -> None:
            inputs.stopped = True

        def note_done(_inputs: Inputs) -> None:
            self._is_stopped = True
            self._carried_out.append(is_done)

        for line in self._lines:
            self.post(line, stop)
        self.post(self._lines[-1], note_done)
        if self._thread is threading.current_thread():
            return  # which is about to do it
        if self._thread is None:
            self._step()
        is_done.wait(seconds)

    def _work(self) -> None:
        with self._starting:
            self._thread = self._thread or threading.current_thread()
            if self._thread is not threading.current_thread():
                return
        keep_application_out()
        try:
            while self._waited():
                self._step()
        finally:
            with self._starting:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _waited(self) -> bool:
        """Wait for something to do; tell whether the thread goes on."""
        now = time.monotonic()
        is_idle = all(line.runs.is_idle and line.wakes_at == inf for line in self._lines)
        linger = 0.0 if self._is_stopped else LINGER
        wakes_at = min(line.wakes_at for line in self._lines)
        seconds = linger if is_idle else min(wakes_at - now, LONGEST_WAIT)
        with suppress(queue.Empty):
            line, message = self._inbox.get(timeout=max(0.0, seconds))
            line.came.append(message)
            return True
        if not is_idle:
            return True
        with self._starting:
            if self._inbox.qsize():
                return True
            self._thread = None
            return False

    def _step(self) -> None:
        """Take in what has happened, and carry out what is to be done."""
        self._step_began = time.monotonic()
        try:
            with self._stepping:
                self._step_once()
        finally:
            self._step_began = inf

    def _step_once(self) -> None:
        with suppress(queue.Empty):
            while True:
                line, message = self._inbox.get_nowait()
                line.came.append(message)
        done: list[threading.Event] = []
        try:
            for line in self._lines:
                try:
                    self._step_line(line)
                except Exception:  # nothing may end this thread unseen
                    logger.exception("The task lock's jobs thread failed, and goes on")
        finally:
            done, self._carried_out = self._carried_out, done
            for event in done:
                event.set()

    def _step_line(self, line: Line) -> None:
        carrier = line.carrier
        inputs = Inputs(workers=line.workers(), stopped=carrier.is_ending)
        messages, line.came = line.came, []
        for message in messages:
            try:
                message(inputs)
            except Exception:
                logger.exception("The task lock's jobs thread failed, and goes on")
        step = line.runs.step(time.monotonic(), inputs)
        line.wakes_at = step.wakes_at
        for ask in step.asks:
            carrier.ask(ask)
        for run in step.given:
            carrier.give(run)
        for run, verdict in step.refused:
            carrier.end_refused(run, verdict)
        for run in (*step.dropped, *step.withdrawn):
            carrier.withdraw(run)
        if step.full is not None:
            carrier.tell_full(step.full)
        line.wakes_at = min(line.wakes_at, time.monotonic() + carrier.look())
