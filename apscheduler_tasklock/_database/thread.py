"""The replica's thread: it owns the connection, sends all requests, and steps the queues of runs.

The thread never waits for one thing alone. While it waits for an answer, or for a new connection,
it takes messages and steps the queues. Only statements have to wait for each other.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, Protocol, TypeAlias, TypeVar
from weakref import WeakSet

import psycopg

from apscheduler_tasklock._application import flush_application, keep_application_out
from apscheduler_tasklock._database.awaited_request import AwaitedRequest, wake_loops
from apscheduler_tasklock._database.connection import SHORTEST_ANSWER
from apscheduler_tasklock._database.inbox import Inbox
from apscheduler_tasklock._database.jitter import jittered
from apscheduler_tasklock._database.listening import Listening
from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock._database.outbox import Outbox, ToSend
from apscheduler_tasklock._database.rejections import Rejections
from apscheduler_tasklock._database.requests import Call, Outcome, Request
from apscheduler_tasklock._database.session import Session
from apscheduler_tasklock._database.sqlstates import ConflictError, NotSentError, RowLockedError
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._database.wire import NoAnswerError
from apscheduler_tasklock._shutdown import (
    ATTEMPT_LIMIT,
    CANCEL_LIMIT,
    ENDING_LIMIT,
    RELEASE_LIMIT,
    SHORTEST_FLUSH,
    Closing,
)
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError

Answer = TypeVar("Answer")
Result = TypeVar("Result")

logger = logger_of(__name__)

# A message to the thread: a request, a function to call, or a queue of runs and a message to it.
_Message: TypeAlias = "Request[Any] | Callable[[], object] | tuple[Stepped, Any]"

NAME = "tasklock"
# Limits how often the thread fails: the pause after a failure, in seconds.
PAUSE_AFTER_FAILURE = 0.1
# Limits the seconds that the thread sleeps while requests wait, because a stop may have brought
# their ends closer meanwhile.
LONGEST_WAIT = 0.5
# The thread counts as stuck if one turn of its loop, or the wait of due work, lasts longer than so
# many times the limit of a connect and an answer. The number is far above what a turn can take,
# because an application's probe may restart the process of a stuck thread.
STUCK = 10
# The least time between two probes that only show whether an outage is over, in seconds, because
# what operators read meanwhile waits for them.
PROBE_INTERVAL = 5.0
# Limits the seconds that a caller waits for the thread's start, on a very busy machine.
STARTING_LIMIT = 0.5
# The key of the worker in `ReplicaThread._worker`.
WORKER = "works"


class Renewing(Protocol):
    """The renewals, whose requests are sent before all other requests."""

    @property
    def due_at(self) -> float:
        """When the next renewal is due, on the monotonic clock; ``inf``: no renewal is due."""

    @property
    def urgent_at(self) -> float:
        """When a renewal has to be sent at the latest; ``inf``: never."""

    def request(self, now: float) -> Request[Any] | None:
        """Return the request of the due renewals; ``None``: no renewal has to be sent."""


class Recurring(Protocol):
    """Recurring work of the replica's thread, such as the look at the tasks' rows."""

    @property
    def due_at(self) -> float:
        """When the work is due, on the monotonic clock; ``inf``: never.

        Only the replica's thread changes this time.
        """

    @property
    def is_over(self) -> bool:
        """Whether the work has ended for good, so that the thread can forget it."""

    def begin(self, now: float) -> None:
        """Begin the work, and set when it is due again. Must not wait."""


class Stepped(Protocol):
    """What the thread steps at each message to it, and when it is due, such as a queue of runs.

    :ivar messages: the messages since the last step
    :ivar wakes_at: when to step it again if no message comes, on the monotonic clock
    """

    messages: list[Any]
    wakes_at: float

    def step(self) -> None:
        """Take the messages, decide, and carry the decisions out. Must not wait, and not raise."""


class ReplicaThread:
    """The replica's thread, which sends all requests and steps queues. A message starts it.

    The thread never runs the application's code. Opening a connection may run the application's
    code, so each connection is opened in another thread.

    :param session: the connection
    :param outage: notes failed and answered statements
    :param explain: returns the error to raise for an error of psycopg that another attempt would
        not overcome
    :param closing: says whether claiming is stopped
    :param renewing: the renewals, which go before all other requests
    :param timings: the waits of the replica
    """

    def __init__(
        self,
        session: Session,
        outage: Outage,
        explain: Callable[[psycopg.Error], TaskLockError],
        closing: Closing,
        renewing: Renewing,
        timings: Timings | None = None,
    ) -> None:
        self._session = session
        self._timings = timings or Timings()
        self._outage = outage
        self._explain = explain
        self._closing = closing
        self._renewing = renewing
        self._outbox = Outbox(jittered)
        self._inbox: Inbox[_Message] = Inbox()
        # What is stepped: each has a message, or is due at some time.
        self._stepped: dict[Stepped, None] = {}
        self._steps_at = inf  # when the first of them is due, on the monotonic clock
        # When a renewal or recurring work is due, as of the last look; `-inf`: look again.
        self._own_at = -inf
        self._came: list[Request[Any]] = []
        self._batch: list[Request[Any]] = []  # the requests that are being sent
        # When the attempt to send them began, on the monotonic clock, and its limit in seconds once
        # claiming is stopped.
        self._attempt = -inf, inf
        self._answered: list[tuple[Request[Any], Outcome[Any]]] = []
        # Reentrant, because the garbage collector may close a coroutine at any line, and the
        # coroutine then sends a release.
        self._starting = threading.RLock()
        self._pumping = threading.Lock()  # locked while a caller works in the thread's place
        # Has the worker under the key WORKER: the thread, or a marker of a caller that works in the
        # thread's place. `setdefault` is atomic, so it makes only the first of them the worker.
        # `Thread.is_alive` is not used, because Python up to 3.12 counts a thread as ended for good
        # if a signal handler raises in the middle of that call. Then a second thread would start.
        self._worker: dict[str, object] = {}
        self._closed = False
        self._calls: list[Callable[[], object]] = []
        self._probed_at = -inf  # when a probe was sent last, on the monotonic clock
        self._turn_began = inf  # on the monotonic clock; `inf`: the thread waits for a message
        self._pid = os.getpid()
        # The events of waiting callers, each with what says for which requests the caller waits;
        # None: for all.
        self._drained: list[tuple[threading.Event, Callable[[Request[Any]], bool] | None]] = []
        self._listening: Listening | None = None
        self._recurring: list[Recurring] = []
        _all.add(self)

    @property
    def has_thread(self) -> bool:
        """Whether the thread is the worker."""
        return isinstance(self._worker.get(WORKER), threading.Thread)

    @property
    def listens(self) -> bool:
        """Whether the connection listens for notifications now."""
        return self._session.listens

    @property
    def _pumps(self) -> bool:
        """Whether a caller works in the thread's place."""
        return bool(self._worker) and not self.has_thread

    @property
    def is_live(self) -> bool:
        """Whether the thread is not stuck, and no due work has waited too long for it.

        True also while the database is unavailable, and while there is no work.
        """
        since = self._turn_began
        if not self.has_thread:
            due = [request.not_before for request in list(self._outbox.waiting)]
            since = min([since, self._own_due_at, self._steps_at, *due])
        return time.monotonic() < since + STUCK * self._session.limit

    @property
    def _own_due_at(self) -> float:
        """When a renewal or recurring work is due."""
        due_at = self._renewing.due_at
        if not (self._closed or self._outbox.ending):
            for each in list(self._recurring):
                due_at = min(due_at, each.due_at)
        return due_at

    @property
    def _is_idle(self) -> bool:
        """Whether no thread runs, and no message or request waits."""
        return not (self.has_thread or self._inbox.messages or self._outbox.waiting)

    def get(self, asked: AwaitedRequest[Any, Result]) -> Result:
        """Send a request, and wait for its result, in the caller's thread.

        :raises TaskLockError: the request failed
        """
        try:
            self._put(asked)
            return self.result(asked)
        except BaseException:  # Ctrl-C at any line, or a greenlet that is killed
            asked.withdraw()
            raise

    def submit(self, request: Request[Any]) -> None:
        """Send a request without a wait. On an event loop, a coroutine may await its result."""
        if isinstance(request, AwaitedRequest):
            request.wait_on_this_loop()
        self._put(request)

    def result(self, asked: AwaitedRequest[Any, Result], seconds: float | None = None) -> Result:
        """Wait for the result of a request, in the caller's thread.

        :param seconds: limits the wait
        :raises TaskLockDatabaseError: no result came in that time
        :raises TaskLockError: the request failed
        """
        if sys.is_finalizing() and not asked.future.done():
            raise TaskLockError(
                "the interpreter ends and has stopped all threads, so nothing is sent any more"
            )
        if threading.current_thread() is self._worker.get(WORKER):
            raise TaskLockError(
                "code in the task lock's thread cannot wait for a result of that thread"
            )
        if not self._start():
            self._pump(asked.future.done)
        return asked.wait(seconds)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the thread, between two batches. The function must not wait."""
        self._put(function)

    def post(self, stepped: Stepped, message: object, *, wakes: bool = True) -> None:
        """Send a message to what is stepped, such as a queue of runs. Never waits for an answer.

        :param wakes: whether the thread takes it at once; else with the next message, or when
            something is due
        """
        self._put((stepped, message), wakes=wakes)

    def step_soon(self, stepped: Stepped) -> None:
        """Step something before the thread's next wait. Called in the thread."""
        stepped.wakes_at = self._steps_at = -inf
        self._stepped[stepped] = None

    def start(self) -> None:
        """Start the thread, unless it runs already.

        :raises RuntimeError: no thread can be started
        """
        if not (self.has_thread or self._start()):
            raise RuntimeError("no thread can be started")

    def wait_for(self, event: threading.Event, until: float) -> bool:
        """Wait for an event that a message to this thread sets; return whether it is set.

        If no thread can be started, the calling thread does the thread's work.

        :param until: limits the wait, on the monotonic clock
        """
        if not (sys.is_finalizing() or threading.current_thread() is self._worker.get(WORKER)):
            if not self.has_thread:
                self._pump(lambda: event.is_set() or time.monotonic() > until)
            event.wait(max(0.0, until - time.monotonic()))
        return event.is_set()

    def add_recurring(self, recurring: Recurring) -> None:
        """Begin recurring work whenever it is due, until it is over or the thread is closed."""
        self.call(lambda: self._recurring.append(recurring))

    def hurry_releases(self) -> None:
        """Send the waiting releases now."""
        self.call(lambda: self._outbox.hurry_releases(time.monotonic()))

    def listen(
        self,
        channel: str,
        heard: Callable[[], object],
        rejections: Rejections,
    ) -> None:
        """Listen on a channel from now on, if the connection can listen.

        A thread that listens does not end while it has no work.

        :param heard: called in the thread when a notification came, or may have been missed; must
            not wait
        :param rejections: notes a rejected LISTEN
        """
        self.call(
            lambda: self._begin_to_listen(
                Listening(self._session, channel, heard, self._closing, rejections, self._timings)
            )
        )

    def _begin_to_listen(self, listening: Listening) -> None:
        self._end_listening()  # if an earlier call of `listen` has begun it
        if not self._closed:
            self._listening = listening

    def wake(self) -> None:
        """Wake the thread, so that it checks the waiting requests, for example after a stop.

        May be called from a signal handler.
        """
        self._inbox.wake()

    def close(self, until: float) -> None:
        """Wait until no request waits. The thread then ends, and closes the connection.

        A request that comes after this call is still sent, on a new connection that is then closed.

        :param until: limits the wait, on the monotonic clock
        """
        self._closed = True
        self._stop_listening()
        if self._session.is_open or not self._is_idle:
            self._drain(until)

    def end(self, until: float) -> None:
        """Send the waiting requests at the interpreter's end. Only failed releases are sent again.

        :param until: limits the wait, on the monotonic clock
        """
        if self._pid == os.getpid() and not self._is_idle:
            self._outbox.ending = True
            self._stop_listening()
            self._drain(until)

    def stop_listening(self) -> None:
        """End the listening. The connection is closed, and the next request opens another one."""
        self._stop_listening()
        self.call(self._end_listening)

    def _end_listening(self) -> None:
        if self._listening is not None:
            self._close_connection()

    def _stop_listening(self) -> None:
        listening = self._listening  # read once, because the thread may set it to None
        if listening is not None:
            listening.stop()

    def wait_for_requests(self, which: Callable[[Request[Any]], bool], until: float) -> bool:
        """Wait until none of certain requests is left to send; return whether none is.

        :param which: returns whether to wait for a request
        :param until: limits the wait, on the monotonic clock
        """
        return self._is_idle or self._drain(until, which)

    def _drain(self, until: float, which: Callable[[Request[Any]], bool] | None = None) -> bool:
        if sys.is_finalizing():
            return False
        idle = threading.Event()
        self.call(lambda: self._drained.append((idle, which)))
        return self.wait_for(idle, until)

    def _put(self, message: _Message, *, wakes: bool = True) -> None:
        self._inbox.put(message, wakes=wakes)
        if isinstance(self._worker.get(WORKER), threading.Thread):
            return
        # While the interpreter finalizes, no thread runs, so a new thread would never begin.
        if sys.is_finalizing() or self._start():
            return
        if (
            isinstance(message, AwaitedRequest)
            and message.waiter is not None
            and not message.is_release
        ):
            # Work until the request has its result, because no other thread would send the request
            # again after a failure.
            self._pump(message.future.done)
        else:
            self._pump(lambda: not self._has_ready)

    def _pump(self, until: Callable[[], bool]) -> None:
        """Do the thread's work in the caller's thread, because no thread can be started.

        Either threads are limited, or the interpreter ends.
        """
        with self._starting:
            if self._pumping.locked():
                return  # the garbage collector makes this call, in the middle of the work below
            with self._pumping:
                self._pump_alone(until)

    def _pump_alone(self, until: Callable[[], bool]) -> None:
        me = object()
        left = self._worker.get(WORKER)
        if left is not None and not isinstance(left, threading.Thread):
            self._worker.clear()  # left by a caller that was interrupted
        try:
            # If a thread has been started meanwhile, that thread is the worker.
            if self._worker.setdefault(WORKER, me) is me:
                self._begin_to_wait()
                while not until():
                    self._turn()
        finally:
            if self._worker.get(WORKER) is me:
                self._end_waits()
                self._worker.clear()

    @property
    def _has_ready(self) -> bool:
        """Whether there is work that can be done at once."""
        now = time.monotonic()
        is_known = bool(self._answered or self._came or self._calls or self._inbox.messages)
        return is_known or self._steps_at <= now or self._outbox.has_ready(now)

    def _start(self) -> bool:
        """Start the thread, unless there is one; return whether there is one now."""
        if self.has_thread:
            return True
        with self._starting:
            if self._worker:
                return self.has_thread
            begun = threading.Event()
            thread = threading.Thread(target=self._work, args=(begun,), name=NAME, daemon=True)
            # If Ctrl-C interrupts the start, the thread may run nevertheless. In that case it
            # becomes the worker.
            with suppress(RuntimeError):
                thread.start()
                begun.wait(STARTING_LIMIT)  # so that no second thread is started
            return self.has_thread

    def _work(self, begun: threading.Event) -> None:
        """Work until there has been no work for a while.

        The thread must not need the lock ``_starting`` before it works. The caller that starts the
        thread has this lock. A signal handler or the garbage collector may interrupt the caller in
        the middle of :meth:`_start`, and wait there for a result of this thread.
        """
        keep_application_out()
        me = threading.current_thread()
        while self._worker.setdefault(WORKER, me) is me:
            begun.set()
            try:
                self._begin_to_wait()
                while self._turn():
                    pass
            finally:
                self._end_waits()
                self._worker.clear()
            # Check the inbox once more, because a message may have come at this moment. Its sender
            # may have taken this thread for the worker, and so have started no other thread.
            if not self._inbox.messages:
                return
        begun.set()  # there is another worker

    def _begin_to_wait(self) -> None:
        self._inbox.open()
        self._session.wait_with(self._attend, self._inbox.wake, self._over_at)

    def _end_waits(self) -> None:
        self._session.wait_alone()
        self._inbox.close()

    @property
    def _linger(self) -> float:
        """The seconds that the thread waits without work before it ends."""
        if self._closed or self._pumps:
            return 0.0
        return inf if self._session.listens else self._timings.linger

    def _turn(self) -> bool:
        """Do one turn of the thread's loop: send the next batch, or wait for a message.

        Return whether to go on.
        """
        try:
            self._turn_began = time.monotonic()
            self._step_all()
            self._take_own()
            wakes_at = self._step_outbox()
            if self._calls:
                self._make_calls()
                return True
            if self._batch:
                self._answered = self._send(self._batch)
                self._batch = []
                return True
            return self._wait(wakes_at)
        except BaseException as error:  # so that no error ends the thread unseen
            self._note_failure(error)
            if self._pumps and not isinstance(error, Exception):  # Ctrl-C in the caller's thread
                self._turn_began = inf
                raise
            _PAUSE.wait(PAUSE_AFTER_FAILURE)
            return True

    def _step_outbox(self) -> float:
        """Report what the outbox has decided, and keep the next batch; return when it is due."""
        came, self._came = self._came, []
        answered, self._answered = self._answered, []
        # If there are calls, send no batch in this turn. So a call is made after the outbox has
        # taken all earlier requests and answers, and before the next batch is sent.
        sends = not self._calls
        step = self._outbox.step(time.monotonic(), came, answered, sends=sends)
        self._batch = step.batch
        if step.done or step.failed:
            self._report(step)
            self._own_at = -inf  # a report may have made something due
            if not self._batch:
                self._step_all()
        if self._drained:
            self._report_drained()
        return -inf if self._came else step.wakes_at

    def _make_calls(self) -> None:
        self._own_at = -inf  # as after a report
        while self._calls:
            self._calls.pop(0)()

    def _note_failure(self, error: BaseException) -> None:
        """After an error of the thread, let the requests that were being sent fail, as in doubt."""
        with suppress(Exception):  # the error may come from an application's log handler
            logger.exception("The task lock's thread failed, and goes on")
        failed, self._batch = self._batch, []
        for request in failed:
            with suppress(Exception):  # so that each gets its outcome
                request.note_failure(error)
        why = TaskLockError(f"the task lock's thread failed: {error!r}")
        self._answered += [(request, Outcome(error=why)) for request in failed]

    def _wait(self, wakes_at: float) -> bool:
        """Wait for a message, or until the next due time; return whether to go on."""
        if self._inbox.messages or wakes_at == -inf:
            return True
        self._turn_began = inf
        if self._outbox.waiting:
            wakes_at = min(wakes_at, time.monotonic() + LONGEST_WAIT)
        elif self._steps_at > -inf:
            self._note_drained()
        if self._own_at == -inf:
            self._own_at = self._own_due_at
        wakes_at = min(wakes_at, self._own_at, self._steps_at)
        # A caller that works in the thread's place is kept waiting only while a request waits.
        is_over = wakes_at == inf or (self._pumps and not self._outbox.waiting)
        linger = self._linger if is_over else inf
        sockets = self._session.heard_on() if self._session.listens else ()
        if sockets is None:
            return True
        if self._inbox.wait(sockets, min(linger, max(0.0, wakes_at - time.monotonic()))):
            self._session.hear()
        return wakes_at < inf or linger == inf or bool(self._inbox.messages)

    def _note_drained(self) -> None:
        """Note that no request waits."""
        if self._closed:
            self._close_connection()
        drained, self._drained = self._drained, []
        for event, _ in drained:
            event.set()

    def _attend(self, sockets: Sequence[int], seconds: float, *, writes: bool = False) -> bool:
        """Wait until a socket is ready, and step the queues meanwhile; return whether one is.

        Requests wait until the statement that is under way has its answer, and so do functions to
        call, since they may close the connection.

        :param seconds: limits the wait
        :param writes: whether to wait also until one of the sockets can be written to
        """
        until = time.monotonic() + seconds
        while True:
            self._step_all()
            seconds = max(0.0, min(until, self._steps_at) - time.monotonic())
            is_ready = self._inbox.wait(sockets, seconds, writes=writes)
            # Without a socket, a new connection may be there.
            if is_ready or not sockets or time.monotonic() >= until:
                return is_ready

    def _report_drained(self) -> None:
        """Wake each caller that waits for certain requests, if none of these waits."""
        for event, which in list(self._drained):
            if which is not None and not any(map(which, [*self._outbox.waiting, *self._batch])):
                self._drained.remove((event, which))
                event.set()

    def _close_connection(self) -> None:
        self._session.close()
        self._stop_listening()
        self._listening = None

    def _step_all(self) -> None:
        """Take all messages of the inbox, and step the queues that have messages, or are due."""
        if self._inbox.messages:
            self._inbox.take_all(self._take)
        now = time.monotonic()
        if self._steps_at > now:
            return
        for each in list(self._stepped):
            if each.messages or each.wakes_at <= now:
                each.step()
                if each.wakes_at == inf:
                    del self._stepped[each]
        self._steps_at = min([each.wakes_at for each in self._stepped], default=inf)
        if self._inbox.messages:  # such as requests that the queues have sent
            self._inbox.take_all(self._take)

    def _take_own(self) -> None:
        """Take the requests of renewals and listening that are due, and begin recurring work."""
        now = time.monotonic()
        if self._own_at <= now:
            if self._renewing.due_at <= now and (renewal := self._renewing.request(now)):
                self._came.append(renewal)
            self._recurring = [each for each in self._recurring if not each.is_over]
            if not (self._closed or self._outbox.ending):
                for each in self._recurring:
                    if each.due_at <= now:
                        each.begin(now)
            self._own_at = self._own_due_at
        if self._listening is not None:
            self._listening.tell()
            if (request := self._listening.request(now)) is not None:
                self._came.append(request)

    def _take(self, message: _Message) -> None:
        if isinstance(message, Request):
            self._came.append(message)
            try:
                message.taken()
            except Exception:  # because a statement may be under way, which must not fail with it
                with suppress(Exception):  # the error may come from an application's log handler
                    logger.exception("The task lock's thread failed, and goes on")
        elif isinstance(message, tuple):
            stepped, what = message
            stepped.messages.append(what)
            self._stepped[stepped] = None
            self._steps_at = -inf
        else:
            self._calls.append(message)

    def _send(self, batch: list[Request[Any]]) -> list[tuple[Request[Any], Outcome[Any]]]:
        """Send the requests of a batch; return their outcomes."""
        begun = time.monotonic()
        self._attempt = begun, RELEASE_LIMIT if batch[0].is_release else inf
        longest = max([request.answer_within for request in batch])
        attempt = seconds = min(self._session.attempt, longest)
        if batch[0].by > -inf:  # the batch has no renewals, so its answer must not delay any
            urgent = self._renewing.urgent_at - begun
            seconds = max(SHORTEST_ANSWER, min(attempt, urgent))
        try:
            self._prepare(batch, seconds)
        except Exception as error:  # noqa: BLE001  # the senders get any error
            # Their own end, as after a stop of their user, says nothing of the database.
            is_over = batch[-1].over_at <= time.monotonic()
            is_outage = not (is_over or _is_short(error, seconds, attempt))
            outcome = self._failed(error, is_outage=is_outage)
            if not is_over:
                # The other ready requests fail, too, because they would meet the same outage.
                self._report(self._outbox.fail_all(time.monotonic(), outcome))
            return [(request, outcome) for request in batch]
        if self._over_at() <= time.monotonic():  # no time is left for an answer
            late = NotSentError("no time was left to send it")
            return [(request, Outcome(error=late)) for request in batch]
        sent = time.monotonic()
        try:
            answers: Sequence[Any] = self._session.run(partial(_sent, batch), seconds)
        except Exception as error:  # noqa: BLE001  # the senders get any error
            if len(batch) > 1 and isinstance(error, (psycopg.Error, UnicodeError)):
                self._outbox.split(batch)
                return []
            for request in batch:
                request.note_failure(error.__cause__ or error)
            outcome = self._failed(error, is_outage=not _is_short(error, seconds, attempt))
            return [(request, outcome) for request in batch]
        self._note_answers(batch, answers, time.monotonic() - sent)
        return [(request, _outcome(answer)) for request, answer in zip(batch, answers, strict=True)]

    def _over_at(self) -> float:
        """Return when the waits of the attempt under way end. A stop may move that time closer."""
        over_at = self._batch[-1].over_at  # the last request came last, so it ends last
        if self._closing.stopped:
            over_at = min(over_at, self._closing.over_at(*self._attempt) - CANCEL_LIMIT)
        return over_at

    def _note_answers(self, batch: list[Request[Any]], answers: Sequence[Any], took: float) -> None:
        """Note that the database has answered a batch, and whether it has confirmed a write."""
        if batch[0].by == -inf and any(answers[0].values()):
            self._outage.prove(took)  # because renewals that were written are as good as a probe
            return
        self._outage.end(took)
        now = time.monotonic()
        if self._outage.is_probed and now > self._probed_at + PROBE_INTERVAL:
            # Nobody else may have a request before which the probe is sent.
            self._came.append(Call(_no_statement, self._closing, came=now))

    def _prepare(self, batch: list[Request[Any]], seconds: float) -> None:
        """Open the connection for a batch, and find out whether an outage is over.

        Requests that write would be in doubt in an outage, so the probe is sent before them. Of
        renewals each try counts, so they are sent in its place. So are the releases of a shutdown:
        this server may commit them without a standby, and nobody sends them later.

        :param seconds: limits the wait for the probe's answer
        :raises TaskLockDatabaseError: there is no connection, or the outage goes on
        """
        self._session.open()
        if not self._outage.is_probed:
            return
        is_last = batch[0].is_release and (self._closing.stopped or self._outbox.ending)
        if not (is_last or all(request.goes_first for request in batch)):
            sent = self._probed_at = time.monotonic()
            # A stop leaves time for the releases.
            attempt, self._attempt = self._attempt, (sent, ATTEMPT_LIMIT)
            self._session.prove(seconds)
            self._attempt = attempt
            self._outage.prove(time.monotonic() - sent)

    def _failed(self, error: Exception, *, is_outage: bool = True) -> Outcome[Any]:
        """Return the outcome of requests that failed with an error."""
        cause = error.__cause__ or error
        if isinstance(error, TaskLockDatabaseError):
            if is_outage and not isinstance(error, (ConflictError, NotSentError)):
                self._outage.begin(error)
        elif isinstance(error, psycopg.Error):
            # The new error has no psycopg error as its cause, because its message already has
            # PostgreSQL's own text.
            error = self._explain(error)
        elif not isinstance(error, TaskLockError):
            error = TaskLockError(f"the task lock database failed: {error!r}")
            error.__cause__ = cause
        return Outcome(error=error)

    def _report(self, step: ToSend) -> None:
        """Report the outcomes of a step to its requests, and wake the waiting coroutines."""
        reported: list[Request[Any]] = []
        shared = len(step.failed) + len(step.done) > 1
        for request, outcome in step.failed:
            if isinstance(outcome.error, RowLockedError):
                self._outage.note_locked(request.came)
            _report_safely(request, request.fail, _own(outcome) if shared else outcome)
            reported.append(request)
        for request, outcome in step.done:
            _report_safely(request, request.finish, _own(outcome) if shared else outcome)
            reported.append(request)
        wake_loops(reported)


_PAUSE = threading.Event()  # never set


def _no_statement(_cursor: Any) -> None:
    pass


def _sent(batch: Sequence[Request[Any]], cursor: Any) -> Sequence[Any]:
    """Send a batch's requests, and return their answers."""
    if len(batch) == 1:
        return [batch[0].send(cursor)]
    return batch[0].send_together(cursor, batch)


def _report_safely(
    request: Request[Any], report: Callable[[Outcome[Any]], object], outcome: Outcome[Any]
) -> None:
    """Report an outcome to a request. If that fails, log it, because others are to follow."""
    try:
        report(outcome)
    except Exception as error:
        with suppress(Exception):  # the error may come from an application's log handler
            logger.exception("The task lock's thread failed, and goes on")
        request.abandon(error)


def _is_short(error: Exception, seconds: float, attempt: float) -> bool:
    """Return whether an answer is missing that an urgent renewal gave little time.

    A missing answer is then no sign of an outage.
    """
    return seconds < attempt and isinstance(error.__cause__, NoAnswerError)


def _outcome(answer: Any) -> Outcome[Any]:
    return Outcome(error=answer) if isinstance(answer, TaskLockError) else Outcome(answer)


def _own(outcome: Outcome[Any]) -> Outcome[Any]:
    """Return the outcome with a copy of its error, because two threads must not raise one error."""
    error = outcome.error
    if not isinstance(error, TaskLockError):
        return outcome
    own = type(error)(*error.args)
    own.__cause__ = error.__cause__
    return Outcome(error=own)


_all: WeakSet[ReplicaThread] = WeakSet()


def _end_all() -> None:
    """Send the waiting requests before the interpreter ends, and flush the log lines."""
    until = time.monotonic() + ENDING_LIMIT
    for thread in list(_all):
        thread.end(until)
    flush_application(max(until, time.monotonic() + SHORTEST_FLUSH))


def _end_all_in_child() -> None:
    # Only processes of `multiprocessing` need this, because they do not call `atexit`'s functions.
    if multiprocessing.parent_process() is not None:
        _end_all()


# Use `atexit`, because its functions are called after the interpreter has waited for the threads
# that run jobs, so the releases of these jobs are sent, too.
atexit.register(_end_all)
threading._register_atexit(_end_all_in_child)  # type: ignore[attr-defined]  # it has no public name
