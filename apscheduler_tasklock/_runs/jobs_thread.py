"""The jobs' thread: it steps the queues of runs, and carries out their decisions.

Other threads send it messages. The thread never waits for the database, a lock of the scheduler, or
a listener. Events and log records go to the application's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from typing import Protocol

from apscheduler_tasklock._application import keep_application_out
from apscheduler_tasklock._runs.deferred_runs import Outlook
from apscheduler_tasklock._runs.queue import AllBusy, Ask, QueueInputs, RunQueue, ToDo
from apscheduler_tasklock._runs.run import ClaimOutcome, QueuedRun
from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)

NAME = "tasklock-jobs"
# Seconds without work after which the thread ends. The next message starts it again.
LINGER = 5.0
# Limits the seconds between two steps while runs wait, because a pool may get more workers without
# a message.
LONGEST_WAIT = 0.5
# Seconds after which a step of the thread is reported as stuck.
STUCK = 30.0

# A message to the thread: a function that adds to the inputs of the next step.
Message = Callable[[QueueInputs], object]
# Returns how many workers there are now; ``None``: there is no limit of workers.
CountWorkers = Callable[[], int | None]


class Carrier(Protocol):
    """Carries out a queue's decisions. The jobs' thread calls the methods, and no method waits."""

    @property
    def is_ending(self) -> bool:
        """Whether the interpreter has begun to end, so that no run begins any more."""

    def ask(self, ask: Ask) -> None:
        """Ask the database for the claims of runs."""

    def give(self, run: QueuedRun) -> None:
        """Give a run to the executor."""

    def end_refused(self, run: QueuedRun, outcome: ClaimOutcome) -> None:
        """End a run that was refused, or could not be claimed."""

    def withdraw(self, run: QueuedRun) -> None:
        """End a run that has not begun, and hand over its window if it was granted."""

    def wake_look(self) -> None:
        """Bring the next look at the tasks' rows forward, so that deferred runs are decided on."""

    def report_all_busy(self, all_busy: AllBusy) -> None:
        """Log that all workers have been busy for long."""

    def look(self) -> float:
        """Check for events that send no message, such as the death of a worker process.

        :return: seconds after which to check again; ``inf``: no check is needed
        """


class DrivenQueue:
    """A queue of runs in the jobs' thread, with the messages to the queue.

    :ivar thread: the jobs' thread, which steps the queue
    :ivar messages: the messages that were sent since the last step
    :ivar wakes_at: when to step again if no message comes before; on the monotonic clock
    :ivar note_room: called in the jobs' thread when there is room for more runs than before. Must
        not wait.
    """

    def __init__(
        self, thread: JobsThread, runs: RunQueue, workers: CountWorkers, carrier: Carrier
    ) -> None:
        self.thread = thread
        self.runs = runs
        self.workers = workers
        self.carrier = carrier
        self.messages: list[Message] = []
        self.wakes_at = inf
        self.note_room: Callable[[], object] = lambda: None
        self._room: float | None = None

    @property
    def room(self) -> float:
        """How many more runs can get a worker, as of the last step. Safe in any thread."""
        if self._room is None:
            workers = self.workers()
            return inf if workers is None else workers
        return self._room

    def update_room(self) -> None:
        """Note the room after a step, and call ``note_room`` if the room has become larger."""
        before, self._room = self._room, self.runs.room
        if before is not None and self._room > before:
            self.note_room()

    # ---- messages to the queue, from any thread; none of these methods waits ---------------------

    def came(self, run: QueuedRun) -> None:
        """Tell the queue that a run was submitted."""
        self.thread.post(self, lambda inputs: inputs.came.append(run))

    def answered(self, run: QueuedRun, outcome: ClaimOutcome) -> None:
        """Tell the queue the outcome of the claim of a run that was asked for."""
        self.thread.post(self, lambda inputs: inputs.answered.append((run, outcome)))

    def begun(self, run: QueuedRun) -> None:
        """Tell the queue that a worker has begun a run."""
        self.thread.post(self, lambda inputs: inputs.begun.append(run))

    def freed(self, run: QueuedRun, took: float) -> None:
        """Tell the queue that the worker of a run is free, and the seconds that the run took."""
        self.thread.post(self, lambda inputs: inputs.freed.append((run, took)))

    def failed(self, run: QueuedRun) -> None:
        """Tell the queue that the executor did not take a run."""
        self.thread.post(self, lambda inputs: inputs.failed.append(run))

    def found(self, run: QueuedRun, outlook: Outlook, as_of: float) -> None:
        """Tell the queue the outlook of a deferred run, found by a look that began at ``as_of``."""
        self.thread.post(self, lambda inputs: inputs.found.append((run, outlook, as_of)))

    def call(self, function: Message) -> None:
        """Let the jobs' thread call a function before the queue's next step."""
        self.thread.post(self, function)


class JobsThread:
    """Drives queues of runs in one thread, which starts with the first message."""

    def __init__(self) -> None:
        self._queues: list[DrivenQueue] = []
        self._inbox: SimpleQueue[tuple[DrivenQueue, Message]] = SimpleQueue()
        # Reentrant, because the garbage collector may run while the lock is held, and may finalize
        # an object that posts a message.
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stepping = threading.RLock()
        self._carried_out: list[threading.Event] = []
        self._is_stopped = False
        self._step_began = inf  # on the monotonic clock

    def add(self, runs: RunQueue, workers: CountWorkers, carrier: Carrier) -> DrivenQueue:
        """Add a queue that the thread steps.

        :param runs: the queue, which decides
        :param workers: returns how many workers there are now, both free and busy
        :param carrier: carries out the decisions
        """
        queue = DrivenQueue(self, runs, workers, carrier)
        self._queues.append(queue)
        return queue

    @property
    def is_live(self) -> bool:
        """Whether the thread is not stuck in a step, and runs if messages wait for it."""
        if self._thread is None and self._inbox.qsize():
            return False
        return time.monotonic() < self._step_began + STUCK

    def start(self) -> None:
        """Start the thread, unless it runs already.

        :raises RuntimeError: no thread can be started
        """
        with self._starting:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._work, name=NAME, daemon=True)
            try:
                self._thread.start()
            except BaseException:
                # If the error is a Ctrl-C, the thread may run although `start` has raised. Then
                # `_work`, which runs in the thread, sets `_thread` again.
                self._thread = None
                raise

    def post(self, queue: DrivenQueue, message: Message) -> None:
        """Send a message to a queue. Never waits."""
        self._inbox.put((queue, message))
        with suppress(RuntimeError):  # no thread can be started, or the interpreter ends
            self.start()

    def stop(self, seconds: float) -> None:
        """Let no run begin any more, and wait until the waiting runs are withdrawn.

        If no thread can be started, the calling thread withdraws the runs.

        :param seconds: limits the wait
        """
        is_done = threading.Event()

        def stop(inputs: QueueInputs) -> None:
            inputs.stopped = True

        def note_done(_inputs: QueueInputs) -> None:
            self._is_stopped = True
            self._carried_out.append(is_done)

        for queue in self._queues:
            self.post(queue, stop)
        self.post(self._queues[-1], note_done)
        if self._thread is threading.current_thread():
            return  # because this thread would wait for its own next step
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
        """Wait for a message, or until a step is due; return whether the thread goes on."""
        is_idle = all(queue.runs.is_idle and queue.wakes_at == inf for queue in self._queues)
        linger = 0.0 if self._is_stopped else LINGER
        due_in = min(queue.wakes_at for queue in self._queues) - time.monotonic()
        seconds = linger if is_idle else min(due_in, LONGEST_WAIT)
        with suppress(Empty):
            queue, message = self._inbox.get(timeout=max(0.0, seconds))
            queue.messages.append(message)
            return True
        if not is_idle:
            return True
        with self._starting:
            if self._inbox.qsize():
                return True
            self._thread = None
            return False

    def _step(self) -> None:
        """Step all queues once, and carry out their decisions."""
        self._step_began = time.monotonic()
        try:
            with self._stepping:
                self._step_once()
        finally:
            self._step_began = inf

    def _step_once(self) -> None:
        with suppress(Empty):
            while True:  # until it is empty, as in the database's thread
                queue, message = self._inbox.get_nowait()
                queue.messages.append(message)
        queues = [q for q in self._queues if q.messages or q.wakes_at <= time.monotonic()]
        try:
            for queue in queues:
                try:
                    self._step_queue(queue)
                except Exception:  # so that an error is logged and does not end this thread
                    logger.exception("The task lock's jobs thread failed, and goes on")
                    queue.wakes_at = time.monotonic() + LONGEST_WAIT
        finally:
            done, self._carried_out = self._carried_out, []
            for event in done:
                event.set()

    def _step_queue(self, queue: DrivenQueue) -> None:
        carrier = queue.carrier
        inputs = QueueInputs(workers=queue.workers(), stopped=carrier.is_ending)
        messages, queue.messages = queue.messages, []
        for message in messages:
            try:
                message(inputs)
            except Exception:
                logger.exception("The task lock's jobs thread failed, and goes on")
        todo = queue.runs.step(time.monotonic(), inputs)
        queue.wakes_at = todo.wakes_at
        _carry_out(todo, carrier)
        longest = carrier.look() if queue.runs.is_idle else min(carrier.look(), LONGEST_WAIT)
        queue.wakes_at = min(queue.wakes_at, time.monotonic() + longest)
        queue.update_room()


def _carry_out(todo: ToDo, carrier: Carrier) -> None:
    """Carry out the decisions of a queue's step."""
    for ask in todo.asks:
        carrier.ask(ask)
    for run in todo.given:
        carrier.give(run)
    for run, outcome in todo.refused:
        carrier.end_refused(run, outcome)
    for run in todo.withdrawn:
        carrier.withdraw(run)
    if todo.is_look_due:
        carrier.wake_look()
    if todo.all_busy is not None:
        carrier.report_all_busy(todo.all_busy)
