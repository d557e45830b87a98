"""A queue of runs in the replica's thread, which steps it, and carries out its decisions.

Other threads send it messages. The replica's thread never waits for a lock of the scheduler, or for
a listener. Events and log records go to the application's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from math import inf
from typing import Any, Protocol

from apscheduler_tasklock._database.thread import ReplicaThread
from apscheduler_tasklock._lock.outcomes import ClaimOutcome
from apscheduler_tasklock._runs.deferred_runs import Outlook
from apscheduler_tasklock._runs.queue import AllBusy, Ask, RunQueue, ToDo
from apscheduler_tasklock._runs.run import QueuedRun
from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)

# Limits the seconds between two steps while runs wait, because a pool may get more workers without
# a message.
LONGEST_WAIT = 0.5

# A function to call in the replica's thread, and its arguments.
Message = tuple[Any, ...]
# Returns how many workers there are now; ``None``: there is no limit of workers.
CountWorkers = Callable[[], int | None]


class Carrier(Protocol):
    """Carries out a queue's decisions, in the replica's thread. No method waits.

    The runs are of a class of the carrier's own.
    """

    @property
    def is_ending(self) -> bool:
        """Whether the interpreter has begun to end, so that no run begins any more."""

    def ask(self, ask: Ask) -> None:
        """Ask the database for the claims of runs."""

    def give(self, run: Any) -> None:
        """Give a run to the executor."""

    def end_refused(self, run: Any, outcome: ClaimOutcome) -> None:
        """End a run that was refused, or could not be claimed."""

    def withdraw(self, run: Any) -> None:
        """End a run that has not begun, and hand over its window if it was granted."""

    def wake_look(self) -> None:
        """Bring the next look at the tasks' rows forward, so that deferred runs are decided on."""

    def report_all_busy(self, all_busy: AllBusy) -> None:
        """Log that all workers have been busy for long."""

    def check_given(self) -> float:
        """Check for events that send no message, such as the death of a worker process.

        :return: seconds after which to check again; ``inf``: no check is needed
        """


class DrivenQueue:
    """A queue of runs, with the messages to the queue. The replica's thread steps it.

    :param runs: the queue, which decides
    :param workers: returns how many workers there are now, both free and busy
    :param carrier: carries out the decisions
    :ivar messages: the messages that were sent since the last step
    :ivar wakes_at: when to step again if no message comes before; on the monotonic clock
    :ivar note_room: called in the replica's thread when there is room for more runs than before.
        Must not wait.
    """

    def __init__(
        self, thread: ReplicaThread, runs: RunQueue, workers: CountWorkers, carrier: Carrier
    ) -> None:
        self.thread = thread
        self.runs = runs
        self.workers = workers
        self.carrier = carrier
        self.messages: list[Message] = []
        self.wakes_at = inf
        self.note_room: Callable[[], object] = lambda: None
        self._room: float | None = None
        self._stops: list[threading.Event] = []
        self._is_idle = True

    @property
    def room(self) -> float:
        """How many more runs can get a worker, as of the last step. Safe in any thread."""
        if self._room is None:
            workers = self.workers()
            return inf if workers is None else workers
        return self._room

    # ---- messages to the queue, from any thread; none of these methods waits ---------------------

    def came(self, run: QueuedRun) -> None:
        """Tell the queue that a run was submitted."""
        self.call(self.runs.came, run)

    def begun(self, run: QueuedRun) -> None:
        """Tell the queue that a worker has begun a run.

        The thread is woken only if a run waits. If one comes at this moment, the thread has set
        ``_is_idle`` before it looks into its inbox, where it finds this message.
        """
        run.began_at = time.monotonic()
        self.thread.post(self, (self.runs.begun, run, run.began_at), wakes=False)
        if not self._is_idle:
            self.thread.wake()

    def freed(self, run: QueuedRun, took: float) -> None:
        """Tell the queue that the worker of a run is free, and the seconds that the run took."""
        self.call(self.runs.freed, run, took)

    def not_given(self, run: QueuedRun) -> None:
        """Tell the queue that the executor did not take a run."""
        self.call(self.runs.not_given, run, time.monotonic())

    def found(self, run: QueuedRun, outlook: Outlook, as_of: float) -> None:
        """Tell the queue the outlook of a deferred run, found by a look that began at ``as_of``."""
        self.call(self.runs.found, run, outlook, as_of, time.monotonic())

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Let the replica's thread call a function before the queue's next step."""
        self.thread.post(self, (function, *arguments))

    def stop(self) -> threading.Event:
        """Let no run begin any more.

        :return: set when the waiting runs are withdrawn
        """
        is_done = threading.Event()
        self.call(self._stop, is_done)
        return is_done

    # ---- in the replica's thread -----------------------------------------------------------------

    def _stop(self, is_done: threading.Event) -> None:
        self.runs.stop()
        self._stops.append(is_done)

    def answered(self, run: QueuedRun, outcome: ClaimOutcome) -> None:
        """Take the outcome of the claim of a run that was asked for."""
        self.runs.answered(run, outcome, time.monotonic())
        self.thread.step_soon(self)

    def step(self) -> None:
        """Take the messages, step the queue, and carry its decisions out."""
        carrier = self.carrier
        try:
            if carrier.is_ending:
                self.runs.stop()
            messages, self.messages = self.messages, []
            _call_each(messages)
            todo = self.runs.next(time.monotonic(), self.workers())
            self.wakes_at = todo.wakes_at
            _call_each(_decisions(todo, carrier))
            self._is_idle = self.runs.is_idle
            longest = min(carrier.check_given(), inf if self._is_idle else LONGEST_WAIT)
            self.wakes_at = min(self.wakes_at, time.monotonic() + longest)
            before, self._room = self._room, self.runs.room
            if before is not None and self._room > before:
                self.note_room()
        except Exception:  # so that the thread's other work goes on
            logger.exception("The task lock's thread failed, and goes on")
            self.wakes_at = time.monotonic() + LONGEST_WAIT
        finally:
            stops, self._stops = self._stops, []
            for event in stops:
                event.set()


def _call_each(messages: Iterable[Message]) -> None:
    """Call several functions. An error of one does not keep the others from being called."""
    for function, *arguments in messages:
        try:
            function(*arguments)
        except Exception:
            logger.exception("The task lock's thread failed, and goes on")


def _decisions(todo: ToDo, carrier: Carrier) -> Sequence[Message]:
    """Return the calls that carry out the decisions of a queue's step."""
    calls: list[Message] = []
    calls += zip(repeat(carrier.ask), todo.asks)
    calls += zip(repeat(carrier.give), todo.given)
    for run, outcome in todo.refused:
        calls.append((carrier.end_refused, run, outcome))
    calls += zip(repeat(carrier.withdraw), todo.withdrawn)
    if todo.is_look_due:
        calls.append((carrier.wake_look,))
    if todo.all_busy is not None:
        calls.append((carrier.report_all_busy, todo.all_busy))
    return calls
