"""The one thread that owns the connection: what is asked of the database goes through it."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Protocol, TypeAlias, TypeVar
from weakref import WeakSet

import psycopg

from apscheduler_tasklock._application import flush_application, keep_application_out
from apscheduler_tasklock._database.asked import Asked, wake_loops
from apscheduler_tasklock._database.connection import SHORTEST_ANSWER, NoAnswerError, turn_limit
from apscheduler_tasklock._database.deadline import RELEASE_LIMIT, Closing, Deadline
from apscheduler_tasklock._database.errors import ConflictError, NotSentError
from apscheduler_tasklock._database.listening import Listening
from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock._database.rejections import Rejections
from apscheduler_tasklock._database.requests import Outcome, Request
from apscheduler_tasklock._database.session import Session
from apscheduler_tasklock._database.side import DatabaseSide, Step, Ticket
from apscheduler_tasklock._database.timings import Timings, jittered
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError

Answer = TypeVar("Answer")
Result = TypeVar("Result")

logger = logger_of(__name__)

# What the thread is sent: a request, or a function to call.
_Message: TypeAlias = "Ticket[Any] | Callable[[], object]"

NAME = "tasklock-database"
# Seconds for which the thread waits for something to do before it ends. The next request starts it.
LINGER = 5.0
# Seconds after which the thread goes on that has failed.
PAUSE_AFTER_FAILURE = 0.1
# Seconds after which the thread looks at what waits, which may have another deadline by then.
LONGEST_WAIT = 0.5
# For how many times the limit of a connection and an answer it may be late, or in one turn, before
# it counts as stuck. Far more than any turn takes: a probe that fails has the process restarted.
STUCK = 10
# Seconds that an interpreter that ends without a shutdown waits for what is on its way.
ENDING_LIMIT = 3.0
# Seconds that whoever starts the thread waits until it works, on a machine that is very busy.
STARTING_LIMIT = 0.5
# The key of who works.
WORKER = "works"


class Renewing(Protocol):
    """What is renewed in the database's thread, before all else."""

    @property
    def due_at(self) -> float:
        """When something is due to be renewed, on the monotonic clock; ``inf``: nothing is."""

    @property
    def urgent_at(self) -> float:
        """When a renewal has to be sent at the latest; ``inf``: never."""

    def ticket(self, now: float) -> Ticket[Any] | None:
        """Return the renewal of what is due, if it has to be sent."""


class Recurring(Protocol):
    """What is done in the database's thread every now and then, as the look at the rows."""

    @property
    def due_at(self) -> float:
        """When it is due, on the monotonic clock; ``inf``: never. It changes in the thread only."""

    @property
    def is_over(self) -> bool:
        """Whether it is never due any more."""

    def begin(self, now: float) -> None:
        """Begin it, and be due later. Must not wait."""


class DatabaseThread:
    """Sends what is asked, in one thread that starts with the first request.

    It never runs an application's code. What opens a connection does, and has a thread of its own.

    :param session: the connection
    :param outage: is told when the database is unavailable, and when it is back
    :param explain: returns what to raise for a failure that another attempt would not overcome
    :param closing: says when claiming was stopped
    :param renewing: what is renewed before all else
    :param turn: seconds within which a request has to be sent, unless it says otherwise
    """

    def __init__(
        self,
        session: Session,
        outage: Outage,
        explain: Callable[[psycopg.Error], TaskLockError],
        closing: Closing,
        renewing: Renewing | None = None,
        turn: float = turn_limit(10.0),
    ) -> None:
        self._session = session
        self._turn_limit = turn
        self._outage = outage
        self._explain = explain
        self._closing = closing
        self._renewing: Renewing = renewing or _Nothing()
        self._side = DatabaseSide(jittered)
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._came: list[Ticket[Any]] = []
        self._batch: list[Ticket[Any]] = []  # what is being sent
        self._answered: list[tuple[Ticket[Any], Outcome[Any]]] = []
        # Reentrant: the garbage collector may close a coroutine anywhere, and its lock is to be
        # released then.
        self._starting = threading.RLock()
        self._pumping = threading.Lock()  # whether somebody does without the thread
        # Who works: the thread, or one that does without it. Whoever is in it first does, which is
        # atomic. `Thread.is_alive` would not do: if a signal handler raises in the middle of it,
        # Python up to 3.12 counts the thread as ended for good, and a second one would be started.
        self._worker: dict[str, object] = {}
        self._closed = False
        self._ending = False
        self._calls: list[Callable[[], object]] = []
        self._turn_began = inf  # on the monotonic clock; ``inf`` while it waits for something to do
        self._pid = os.getpid()
        self._drained: list[
            tuple[threading.Event, object]
        ] = []  # and whose releases; ``None``: all
        self._listening: Listening | None = None
        self._recurring: list[Recurring] = []
        _all.add(self)

    @property
    def waiting(self) -> int:
        """How many requests wait for their first turn."""
        return self._inbox.qsize() + sum(each.error is None for each in list(self._side.waiting))

    @property
    def has_thread(self) -> bool:
        """Whether the thread works, and does not have to be done without."""
        return isinstance(self._worker.get(WORKER), threading.Thread)

    @property
    def _pumps(self) -> bool:
        """Whether somebody does without the thread."""
        return bool(self._worker) and not self.has_thread

    @property
    def is_live(self) -> bool:
        """Whether it goes on: it is not stuck, and it runs where something is due.

        Neither a database that is unavailable nor the want of work makes it false.
        """
        since = self._turn_began
        if not self.has_thread:
            due = [ticket.not_before for ticket in list(self._side.waiting)]
            since = min([since, self._own_due_at, *due])
        return time.monotonic() < since + STUCK * self._session.limit

    @property
    def _own_due_at(self) -> float:
        """When something is due that nobody has to ask for."""
        recurring = [] if self._closed or self._ending else list(self._recurring)
        return min([self._renewing.due_at, *(each.due_at for each in recurring)])

    @property
    def releasing(self) -> set[str]:
        """The tasks whose releases wait. For the thread itself."""
        return {each.request.task_name for each in self._side.waiting if each.is_release}

    @property
    def _is_idle(self) -> bool:
        """Whether nothing is under way, and nothing waits, for all that is known without it."""
        return not (self.has_thread or self._inbox.qsize() or self._side.waiting)

    def ask(
        self,
        request: Request[Answer],
        deadline: Deadline,
        *,
        turn_within: float | None = None,
        tried_for: float | None = None,
        answer_within: float = inf,
    ) -> Answer:
        """Send a request, and wait for its answer.

        :param deadline: when nothing is waited for any more
        :param turn_within: seconds within which it must be its turn; by default as for all
        :param tried_for: seconds for which it is sent again while the database is unavailable
        :param answer_within: seconds within which the answer has to come; by default as for all
        :raises NotSentError: its turn did not come; nothing was sent
        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects the request; the message names the remedy
        """
        now = time.monotonic()
        asked: Asked[Answer, Answer] = Asked(
            request,
            deadline,
            Outcome.result,
            came=now,
            turn_until=now + (turn_within or self._turn_limit),
            tried_until=now + (-1.0 if tried_for is None else tried_for),
            answer_within=answer_within,
        )
        return self.get(asked)

    def get(self, asked: Asked[Any, Result]) -> Result:
        """Send a request, and wait for its result, in a thread.

        :raises TaskLockError: why there is none
        """
        try:
            self._put(asked)
            return self.result(asked)
        except BaseException:  # Ctrl-C at any line, or a greenlet that is killed
            asked.withdraw()
            raise

    def submit(self, ticket: Ticket[Any]) -> None:
        """Send a request, and do not wait for it. On an event loop, a coroutine may await it."""
        if isinstance(ticket, Asked):
            ticket.wait_on_this_loop()
        self._put(ticket)

    def result(self, asked: Asked[Any, Result], seconds: float | None = None) -> Result:
        """Wait for the result of a request, in a thread.

        :param seconds: for how long at most
        :raises TaskLockDatabaseError: there was none in that time
        :raises TaskLockError: why there is none
        """
        if sys.is_finalizing() and not asked.future.done():
            raise TaskLockError("the interpreter has ended all threads, and asks no database more")
        if threading.current_thread() is self._worker.get(WORKER):
            raise TaskLockError("what runs in the task lock's database thread cannot wait for it")
        if not self._start():
            self._pump(asked.future.done)
        return asked.wait(seconds)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the thread, between two requests. It must not wait."""
        self._put(function)

    def add_recurring(self, recurring: Recurring) -> None:
        """Do something whenever it is due, until it is over or the thread is closed."""
        self.call(lambda: self._recurring.append(recurring))

    def hurry_releases(self) -> None:
        """Send the releases that wait now."""
        self.call(lambda: self._side.hurry_releases(time.monotonic()))

    def listen(
        self,
        channel: str,
        heard: Callable[[], object],
        rejections: Rejections,
        timings: Timings,
    ) -> None:
        """Listen on a channel from now on, where the connection can. The thread stays for that.

        :param heard: called in the thread when something was notified, or may have been missed;
            must not wait
        :param rejections: is told if the database rejects it
        :param timings: has the pause after which a connection that broke is opened again
        """
        self.call(
            lambda: self._begin_to_listen(
                Listening(self._session, channel, heard, self._closing, rejections, timings)
            )
        )

    def _begin_to_listen(self, listening: Listening) -> None:
        self._end_listening()  # to an earlier one, that somebody did not end
        if self._closed:
            listening.close()
        else:
            self._listening = listening

    def wake(self) -> None:
        """Let it look at what waits, as after claiming was stopped. From a signal handler, too."""
        if self.has_thread:
            self._send_to_thread(_look)

    def close(self, until: float) -> None:
        """Wait until nothing waits to be sent, and let the thread and the connection end then.

        What comes later is sent all the same, on a connection that is closed after it.

        :param until: when it waits no longer, on the monotonic clock
        """
        self._closed = True
        self._stop_listening()
        if self._session.is_open or not self._is_idle:
            self._drain(until)

    def end(self, until: float) -> None:
        """Send the releases that wait, as the interpreter ends; nothing else is sent again."""
        if self._pid == os.getpid() and not self._is_idle:
            self._ending = True
            self._stop_listening()
            self._drain(until)

    def stop_listening(self) -> None:
        """Listen no more. The connection is closed, and the next request opens another one."""
        self._stop_listening()
        self.call(self._end_listening)

    def _end_listening(self) -> None:
        if self._listening is not None:
            self._close_connection()

    def _stop_listening(self) -> None:
        listening = self._listening  # the thread may be done with it in this moment
        if listening is not None:
            listening.stop()

    def wait_for_releases(self, sender: object, until: float) -> None:
        """Wait until no release of one sender waits to be sent. The thread goes on.

        :param until: when it waits no longer, on the monotonic clock
        """
        if not self._is_idle:
            self._drain(until, sender)

    def _drain(self, until: float, sender: object = None) -> None:
        if sys.is_finalizing():
            return
        idle = threading.Event()
        self.call(lambda: self._drained.append((idle, sender)))
        if not self.has_thread:
            self._pump(lambda: idle.is_set() or time.monotonic() > until)
        idle.wait(max(0.0, until - time.monotonic()))

    def _send_to_thread(self, message: _Message) -> None:
        self._inbox.put(message)
        listening = self._listening  # likewise
        if listening is not None:
            listening.wake()

    def _put(self, message: _Message) -> None:
        self._send_to_thread(message)
        # Then threads stand still wherever they are, and another one would never begin.
        if self.has_thread or sys.is_finalizing() or self._start():
            return
        if isinstance(message, Asked) and message.waiter is not None and not message.is_release:
            self._pump(message.future.done)  # else nobody would send it again
        else:
            self._pump(lambda: not self._has_ready)

    def _pump(self, until: Callable[[], bool]) -> None:
        """Work here, where no thread can be started: they are limited, or the interpreter ends."""
        with self._starting:
            if self._pumping.locked():
                return  # the garbage collector has closed a coroutine in the middle of it
            with self._pumping:
                self._pump_alone(until)

    def _pump_alone(self, until: Callable[[], bool]) -> None:
        me = object()
        left = self._worker.get(WORKER)
        if left is not None and not isinstance(left, threading.Thread):
            self._worker.clear()  # it was left by one who was interrupted
        try:
            # Else a thread has been started all the same.
            if self._worker.setdefault(WORKER, me) is me:
                while not until():
                    self._turn(linger=0.0)
        finally:
            if self._worker.get(WORKER) is me:
                self._worker.clear()

    @property
    def _has_ready(self) -> bool:
        """Whether something can be done at once."""
        is_known = bool(self._answered or self._came or self._calls) or not self._inbox.empty()
        return is_known or self._side.has_ready(time.monotonic())

    def _start(self) -> bool:
        """Start the thread, unless there is one; tell whether there is."""
        if self.has_thread:
            return True
        with self._starting:
            if self._worker:
                return self.has_thread
            begun = threading.Event()
            thread = threading.Thread(target=self._work, args=(begun,), name=NAME, daemon=True)
            # By Ctrl-C it may have been started all the same, and works then.
            with suppress(RuntimeError):
                thread.start()
                begun.wait(STARTING_LIMIT)  # so that no second one is started
            return self.has_thread

    def _work(self, begun: threading.Event) -> None:
        """Do what there is to do, until there has been nothing for a while.

        It takes no lock before it works: whoever has it may be a thread that a signal handler, or
        the garbage collector, has interrupted in the middle of the start, and that waits for this.
        """
        keep_application_out()
        me = threading.current_thread()
        while self._worker.setdefault(WORKER, me) is me:
            begun.set()
            try:
                while self._turn(self._linger):
                    pass
            finally:
                self._worker.clear()
            # What came right before nobody was there, whoever put it may not have noticed.
            if self._inbox.empty():
                return
        begun.set()  # somebody else works

    @property
    def _linger(self) -> float:
        """Seconds for which the thread waits for something to do before it ends."""
        if self._closed:
            return 0.0
        return inf if self._session.listens else LINGER

    def _turn(self, linger: float) -> bool:
        """Send what is next, or wait until there is something; tell whether to go on.

        :param linger: seconds for which to wait while there is nothing to do
        """
        try:
            self._turn_began = time.monotonic()
            self._take_all()
            now = time.monotonic()
            self._take_own(now)
            came, self._came = self._came, []
            answered, self._answered = self._answered, []
            stopped = self._closing.stopped or self._ending
            # A call is made when all that came before it is known, and before more is sent.
            step = self._side.step(now, came, answered, stopped=stopped, sends=not self._calls)
            self._batch = step.batch
            self._tell(step)
            self._tell_drained()
            if self._calls:
                while self._calls:
                    self._calls.pop(0)()
                return True
            if self._batch:
                self._answered = self._send(self._batch)
                self._batch = []
                return True
            return self._wait(min(step.wakes_at, self._own_due_at), linger)
        except BaseException as error:  # nothing may end this thread unseen
            self._note_failure(error)
            if self._pumps and not isinstance(error, Exception):  # Ctrl-C, in a thread of others
                self._turn_began = inf
                raise
            _PAUSE.wait(PAUSE_AFTER_FAILURE)  # rather than fail over and over
            return True

    def _note_failure(self, error: BaseException) -> None:
        """Let what was being sent fail, as in doubt."""
        with suppress(Exception):  # an application's log handler may be what has failed
            logger.exception("The task lock's database thread failed, and goes on")
        failed, self._batch = self._batch, []
        for ticket in failed:
            ticket.request.note_failure(error)
        why = TaskLockError(f"the task lock's database thread failed: {error!r}")
        self._answered += [(ticket, Outcome(error=why)) for ticket in failed]

    def _wait(self, wakes_at: float, linger: float) -> bool:
        """Wait for a message, until it is time to look at most; tell whether to go on."""
        is_idle = wakes_at == inf
        self._turn_began = inf
        if not self._side.waiting and self._inbox.empty():
            if self._closed:
                self._close_connection()
            drained, self._drained = self._drained, []
            for event, _ in drained:
                event.set()
        try:
            seconds = linger if is_idle else wakes_at - time.monotonic()
            if self._side.waiting:
                seconds = min(LONGEST_WAIT, seconds)
            elif self._pumps:
                seconds = 0.0  # whoever does without the thread has their answer by now
            message = self._get(max(0.0, seconds))
        except queue.Empty:
            return not is_idle or linger == inf
        self._take(message)
        return True

    def _get(self, seconds: float) -> _Message:
        """Wait for a message, and for what is notified where that is listened for.

        :raises queue.Empty: there is no message
        """
        if self._listening is None or not self._session.listens:
            return self._inbox.get(timeout=seconds)
        self._listening.wait(seconds, lambda: not self._inbox.empty())
        return self._inbox.get_nowait()

    def _tell_drained(self) -> None:
        """Tell those who wait for their own releases alone."""
        for waits in [each for each in self._drained if each[1] is not None]:
            event, sender = waits
            left = [*self._side.waiting, *self._batch]
            if not any(each.is_release and each.request.sender is sender for each in left):
                self._drained.remove(waits)
                event.set()

    def _close_connection(self) -> None:
        self._session.close()
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.close()

    def _take_all(self) -> None:
        """Take in what has come."""
        with suppress(queue.Empty):
            while True:
                self._take(self._inbox.get_nowait())

    def _take_own(self, now: float) -> None:
        """Take in what is due: a renewal, what begins to listen, and what else recurs."""
        if self._renewing.due_at <= now and (renewal := self._renewing.ticket(now)):
            self._came.append(renewal)
        self._recurring = [each for each in self._recurring if not each.is_over]
        if not (self._closed or self._ending):
            for each in self._recurring:
                if each.due_at <= now:
                    each.begin(now)
        if self._listening is not None:
            self._listening.tell()
            if (ticket := self._listening.ticket(now)) is not None:
                self._came.append(ticket)

    def _take(self, message: _Message) -> None:
        if isinstance(message, Ticket):
            self._came.append(message)
            message.taken()
        else:
            self._calls.append(message)

    def _send(self, batch: list[Ticket[Any]]) -> list[tuple[Ticket[Any], Outcome[Any]]]:
        """Send what travels together; return what became of it."""
        deadline = _latest(batch)
        if batch[0].is_release:
            deadline = deadline.of_attempt(self._closing, RELEASE_LIMIT)
        begun = time.monotonic()
        try:
            self._session.open(deadline)
        except Exception as error:  # noqa: BLE001  # for who asked, whatever it is
            outcome = self._failed(error)
            # Nor would the others that are ready have one.
            step = self._side.fail_all(time.monotonic(), outcome, stopped=self._closing.stopped)
            self._tell(step)
            return [(ticket, outcome) for ticket in batch]
        if deadline.seconds_left <= 0:  # rather than send what there is no time to have answered
            late = NotSentError("no time was left to send it")
            return [(ticket, Outcome(error=late)) for ticket in batch]
        requests = [ticket.request for ticket in batch]
        longest = max(ticket.answer_within for ticket in batch)
        attempt = seconds = min(self._session.attempt, longest)
        if batch[0].by > -inf:  # it is no renewal, which others are not to wait for
            urgent = self._renewing.urgent_at - begun
            seconds = max(SHORTEST_ANSWER, min(attempt, urgent))
        sent = time.monotonic()
        try:
            with self._session.cursor(deadline, seconds) as cursor:
                answers: Sequence[Any] = (
                    [requests[0].send(cursor)]
                    if len(requests) == 1
                    else requests[0].send_together(cursor, requests)
                )
        except Exception as error:  # noqa: BLE001  # for who asked, whatever it is
            if len(batch) > 1 and isinstance(error, (psycopg.Error, UnicodeError)):
                self._side.split(batch)
                return []
            for request in requests:
                request.note_failure(error.__cause__ or error)
            # An answer that was waited for less than others are may be late for no other reason.
            is_short = seconds < attempt and isinstance(error.__cause__, NoAnswerError)
            outcome = self._failed(error, is_outage=not is_short)
            return [(ticket, outcome) for ticket in batch]
        self._outage.end(begun, time.monotonic() - sent)
        return [(ticket, _outcome(answer)) for ticket, answer in zip(batch, answers, strict=True)]

    def _failed(self, error: Exception, *, is_outage: bool = True) -> Outcome[Any]:
        """Return what becomes of requests that failed with an error."""
        cause = error.__cause__ or error
        if isinstance(error, TaskLockDatabaseError):
            if is_outage and not isinstance(error, (ConflictError, NotSentError)):
                self._outage.begin(error)
        elif isinstance(error, psycopg.Error):
            # The message has what PostgreSQL said; its own traceback would only hide it.
            error = self._explain(error)
        elif not isinstance(error, TaskLockError):
            error = TaskLockError(f"the task lock database failed: {error!r}")
            error.__cause__ = cause
        return Outcome(error=error)

    def _tell(self, step: Step) -> None:
        """Tell whoever waits."""
        told: list[Ticket[Any]] = []
        shared = len(step.failed) + len(step.done) > 1
        for ticket, outcome in step.failed:
            _tell_safely(ticket, ticket.fail, _own(outcome) if shared else outcome)
            told.append(ticket)
        for ticket, outcome in step.done:
            _tell_safely(ticket, ticket.finish, _own(outcome) if shared else outcome)
            told.append(ticket)
        wake_loops(told)


class _Nothing:
    """Renews nothing."""

    due_at = urgent_at = inf

    def ticket(self, _now: float) -> None:
        return None


_PAUSE = threading.Event()  # which nobody sets


def _look() -> None:
    pass


def _tell_safely(
    ticket: Ticket[Any], tell: Callable[[Outcome[Any]], object], outcome: Outcome[Any]
) -> None:
    """Tell one that waits; whatever that raises, the others are told."""
    try:
        tell(outcome)
    except Exception as error:
        with suppress(Exception):  # an application's log handler may be what has failed
            logger.exception("The task lock's database thread failed, and goes on")
        ticket.give_up(error)


def _latest(batch: Sequence[Ticket[Any]]) -> Deadline:
    """Return the deadline of what travels together: the last."""
    deadlines = [ticket.deadline for ticket in batch]
    return Deadline.latest([each for each in deadlines if isinstance(each, Deadline)])


def _outcome(answer: Any) -> Outcome[Any]:
    return Outcome(error=answer) if isinstance(answer, TaskLockError) else Outcome(answer)


def _own(outcome: Outcome[Any]) -> Outcome[Any]:
    """Return an outcome whose error is nobody else's: each thread raises one of its own."""
    error = outcome.error
    if not isinstance(error, TaskLockError):
        return outcome
    own = type(error)(*error.args)
    own.__cause__ = error.__cause__
    return Outcome(error=own)


_all: WeakSet[DatabaseThread] = WeakSet()


def _end_all() -> None:
    """Send the releases that are on their way, before the interpreter ends, and log the rest."""
    until = time.monotonic() + ENDING_LIMIT
    for thread in list(_all):
        thread.end(until)
    flush_application(until)


def _end_all_in_child() -> None:
    # Processes of `multiprocessing` call nothing of `atexit`.
    if multiprocessing.parent_process() is not None:
        _end_all()


# Functions of `atexit` are called after the interpreter has waited for threads, whose jobs run on.
atexit.register(_end_all)
threading._register_atexit(_end_all_in_child)  # type: ignore[attr-defined]  # it has no public name
