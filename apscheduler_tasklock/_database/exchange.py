"""Requests to the database that travel together, on one connection.

A request that comes while nothing is under way goes at once, alone, in its own thread. Requests
that come while a statement is under way wait; then the oldest goes, and with it, in one statement,
all of its kind, as databases commit in groups. Whoever's request is the oldest sends for all, and
hands the connection on as soon as its own answer is there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import psycopg

from apscheduler_tasklock._database.background import BackgroundThreads
from apscheduler_tasklock._database.deadline import Deadline
from apscheduler_tasklock._database.errors import ConflictError, NoConnectionError, NotSentError
from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock._database.pool import Pool
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError

Answer = TypeVar("Answer")

logger = logger_of(__name__)

# How many requests travel together at most.
MOST_TOGETHER = 256
# A sender that has had the connection for so many times the limit of one answer has vanished.
OVERDUE = 12
# For how many times that limit a request waits for its turn. That others are sent is no sign of an
# outage: on a database that answers late, they take turns.
TURN = 9
# Seconds after which what waits looks whether who sends has vanished, or claiming was stopped. In a
# burst hundreds wait on a machine, and each look takes the interpreter away from who works.
LOOK_INTERVAL = 0.5


class Request(Generic[Answer]):
    """Something to ask of the database.

    :cvar kind: requests of one kind can travel together; ``None`` if it always goes alone
    :ivar task_name: no two requests for one task travel together: the second is decided after the
        first
    :ivar in_doubt: whether the database may have carried it out without an answer having come
    """

    kind: type[Request[Any]] | None = None
    task_name: str = ""
    in_doubt: bool = False

    def send(self, cursor: Any) -> Answer | TaskLockError:
        """Ask alone, on a cursor in autocommit mode; return the answer, or why it was not asked."""
        raise NotImplementedError

    @property
    def goes_alone(self) -> bool:
        """Whether this one cannot travel with others now."""
        return self.kind is None

    @classmethod
    def send_together(
        cls, cursor: Any, requests: Sequence[Any]
    ) -> Sequence[Answer | TaskLockError]:
        """Ask for several of this kind; return their answers, or why one is to be asked again."""
        raise NotImplementedError

    def note_failure(self, error: BaseException) -> None:
        """Note that it was sent and failed, or that nobody waited for its answer. Must not wait."""


class Call(Request[Answer]):
    """A request that always goes alone.

    :param function: asks on a cursor
    """

    def __init__(self, function: Callable[[Any], Answer]) -> None:
        self._function = function

    def send(self, cursor: Any) -> Answer:
        """Call the function."""
        return self._function(cursor)


@dataclass(frozen=True)
class Outcome(Generic[Answer]):
    """What became of a request: an answer, or an error."""

    answer: Answer | None = None
    error: BaseException | None = None

    def result(self) -> Answer:
        """Return the answer, or raise the error."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                # The traceback refers to this frame, and so, in a circle, to the error.
                del self
        return self.answer  # type: ignore[return-value]  # what the request answers may be None


class _Entry(Generic[Answer]):
    """A request on its way.

    :ivar turn_within: seconds within which it must be its turn
    :ivar on_done: gets its outcome, if no thread waits for it
    :ivar turn: under which its thread has to send, if it is its turn
    :ivar sender: to whom it was given
    :ivar sent: whether it may have reached the database
    :ivar is_told: whether ``on_done`` was called
    """

    def __init__(
        self,
        request: Request[Answer],
        deadline: Deadline,
        turn_within: float,
        on_done: Callable[[Outcome[Answer]], None] | None = None,
    ) -> None:
        self.request = request
        self.deadline = deadline
        self.turn_within = turn_within
        self.on_done = on_done
        self.since = time.monotonic()
        self.thread = None if on_done else threading.current_thread()
        self.turn: _Sender | None = None
        self.sender: _Sender | None = None
        self.sent = False
        self.is_told = False
        self.outcome: Outcome[Answer] | None = None
        self._told: threading.Lock | None = None

    @property
    def sends(self) -> bool:
        """Whether it is its turn, and its thread has to send."""
        return self.turn is not None

    @property
    def is_late(self) -> bool:
        """Whether it waits for its turn no longer."""
        return self._turn_left <= 0

    @property
    def _turn_left(self) -> float:
        """Seconds for which it waits for its turn."""
        left = self.since + self.turn_within - time.monotonic()
        return min(left, self.deadline.seconds_left)

    @property
    def is_over(self) -> bool:
        """Whether it is not to be sent: it is late, or was left behind by who was interrupted."""
        return self.outcome is not None or self.is_late

    def fail(self, error: Exception, cause: BaseException | None = None) -> None:
        """Note why there is no answer, unless there is one."""
        if self.outcome is None:
            if self.sent:
                self.request.note_failure(cause or error)
            self.outcome = Outcome(error=error)

    def must_wait(self) -> None:
        """Make it ready to wait, before others know of it."""
        # One lock, where an event has three: a burst makes and wakes hundreds.
        self._told = threading.Lock()
        self._told.acquire()

    def wait(self) -> bool:
        """Wait until it is told something, or until it is time to look; return whether it was."""
        assert self._told is not None
        left = LOOK_INTERVAL if self.sender else max(0.01, self._turn_left)
        return self._told.acquire(timeout=min(left, LOOK_INTERVAL))

    def tell(self) -> None:
        """Wake its thread."""
        if self._told is not None:
            with suppress(RuntimeError):  # it was told before
                self._told.release()


@dataclass(eq=False)
class _Sender:
    """Who has the connection.

    :ivar thread: in which it sends, if that is known
    :ivar over_at: when it has vanished, if it still has it then, on the monotonic clock
    :ivar batch: what it sends
    :ivar connects_at: when it asked for a connection, on the monotonic clock, unless it has it
    :ivar connected_after: seconds that it took to get one
    """

    thread: threading.Thread | None
    over_at: float
    connects_at: float | None = None
    connected_after: float = 0.0
    batch: list[_Entry[Any]] = field(default_factory=list)

    @property
    def without_connection(self) -> float:
        """Seconds for which it waited for a connection, or waits for it."""
        if self.connects_at is None:
            return self.connected_after
        return time.monotonic() - self.connects_at

    def note_connected(self) -> None:
        """Note that it has a connection."""
        self.connected_after, self.connects_at = self.without_connection, None

    @property
    def vanished(self) -> bool:
        """Whether it will never hand the connection on."""
        is_dead = self.thread is not None and not self.thread.is_alive()
        return is_dead or time.monotonic() > self.over_at


class Exchange:
    """Sends requests on one connection, those that wait together.

    :param pool: where the connection comes from
    :param outage: is told when the database is unavailable, and when it is back
    :param explain: returns what to raise for a failure that another attempt would not overcome
    :param background: sends requests that no thread waits for. Who sends must never wait for a
        turn, which may be the next one of its own.
    :param telling: calls who wants their outcome, while the next ones are sent
    """

    def __init__(
        self,
        pool: Pool,
        outage: Outage,
        explain: Callable[[psycopg.Error], TaskLockError],
        background: BackgroundThreads,
        telling: BackgroundThreads,
    ) -> None:
        self._pool = pool
        self._outage = outage
        self._explain = explain
        self._background = background
        self._telling = telling
        self._lock = threading.Lock()
        self._waiting: deque[_Entry[Any]] = deque()
        self._sender: _Sender | None = None
        self._vanished: list[_Sender] = []

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return len(self._waiting)

    @property
    def in_use(self) -> bool:
        """Whether a request is under way."""
        return self._sender is not None

    def ask(
        self, request: Request[Answer], deadline: Deadline, turn_within: float | None = None
    ) -> Answer:
        """Send a request, and wait for its answer.

        :param deadline: when nothing is waited for any more
        :param turn_within: seconds within which it must be its turn; by default some times the
            limit of an answer
        :raises NotSentError: it was not; nothing was sent
        :raises TaskLockDatabaseError: the database is unavailable
        :raises TaskLockError: it rejects the request; the message names the remedy
        """
        turn_within = turn_within or TURN * self._pool.attempt
        entry: _Entry[Answer] = _Entry(request, deadline, turn_within)
        try:
            with self._lock:
                if self._sender is None:
                    self._give_turn(entry)
                else:  # if who sends has vanished, one that waits finds that out
                    entry.must_wait()
                    self._waiting.append(entry)
            if entry.sends or self._wait(entry):
                self._send(entry)
        finally:
            self._end_turn(entry)
        assert entry.outcome is not None
        return entry.outcome.result()

    def submit(
        self,
        requests: Sequence[Request[Answer]],
        deadline: Deadline,
        on_done: Sequence[Callable[[Outcome[Answer]], None]],
        turn_within: float | None = None,
    ) -> None:
        """Send requests that no thread waits for. Returns at once.

        :param on_done: each gets the outcome of its request, in a background thread
        :param turn_within: as of :meth:`ask`
        """
        turn_within = turn_within or TURN * self._pool.attempt
        entries = [
            _Entry(request, deadline, turn_within, done)
            for request, done in zip(requests, on_done, strict=True)
        ]
        with self._lock:
            self._waiting.extend(entries)
            is_free = self._is_free()
            if is_free:
                self._sender = self._new_sender()
        if is_free:
            self._hand_on()

    def _wait(self, entry: _Entry[Any]) -> bool:
        """Wait for an answer, or until it is this one's turn to send; return whether it is."""
        try:
            while not entry.wait():
                with self._lock:
                    if self._is_given_up(entry):
                        break
        except BaseException as error:  # Ctrl-C, or a greenlet that is killed
            with self._lock:
                if entry in self._waiting:
                    self._waiting.remove(entry)
                elif entry.sent:
                    entry.request.note_failure(error)  # also if it was answered just now
                else:
                    entry.fail(_interrupted(error), error)  # and is not sent
            raise
        return entry.sends

    def _is_given_up(self, entry: _Entry[Any]) -> bool:
        """Tell whether a request need not wait on: its time is over, or its sender has vanished."""
        if entry.sends or entry.outcome is not None:
            return True
        if entry.sender is not None:
            if entry.sender is not self._sender or entry.sender.vanished:
                entry.fail(_has_vanished())
            return entry.outcome is not None
        if self._is_free():
            self._waiting.remove(entry)
            self._give_turn(entry)
        elif entry.is_late:
            self._waiting.remove(entry)
            entry.fail(self._why_late(entry))
        return entry.sends or entry.outcome is not None

    def _why_late(self, entry: _Entry[Any]) -> NotSentError:
        """Return the error of a request whose turn did not come."""
        sender = self._sender
        if sender is not None and sender.without_connection > self._pool.attempt:
            return no_connection(entry.since)
        return no_turn(entry.since)

    def _give_turn(self, entry: _Entry[Any]) -> None:
        """Let this thread send a request. Who interrupts it here, does so before or after both."""
        turn = self._new_sender()
        self._sender = entry.turn = turn

    def _end_turn(self, entry: _Entry[Any]) -> None:
        """Hand the connection on, wherever a request's turn has ended or was interrupted."""
        turn = entry.turn
        if turn is None:
            return
        if self._sender is turn:  # else somebody has taken it for vanished
            self._hand_on()
        with self._lock:
            for other in turn.batch:
                if other.outcome is None:
                    other.fail(_has_vanished())
        self._tell(turn.batch)

    def _is_free(self) -> bool:
        """Tell whether nobody has the connection, or who has it will never hand it on."""
        sender = self._sender
        return sender is None or sender.vanished

    def _new_sender(self) -> _Sender:
        """Return this thread as who has the connection, in place of who had it."""
        if self._sender is not None and self._sender.vanished:
            self._vanished.append(self._sender)
        limit = OVERDUE * self._pool.attempt
        return _Sender(threading.current_thread(), time.monotonic() + limit)

    def _send(self, entry: _Entry[Any]) -> None:
        """Send a request and what travels with it."""
        with self._turn(entry) as turn:
            batch = turn.batch
            deadline = Deadline.latest([other.deadline for other in batch])
            groups = [list(batch)]
            for group in groups:
                begun = opened_at = time.monotonic()
                pooled = None
                try:
                    _check_turn(deadline, entry.since)
                    turn.connects_at = time.monotonic()
                    pooled = self._pool.acquire(deadline)
                    turn.note_connected()
                    opened_at = pooled.opened_at
                    with self._pool.cursor(pooled, deadline) as cursor:
                        group[:] = self._begin_sending(group)
                        requests = [other.request for other in group]
                        answers: Sequence[Any] = []
                        if len(group) == 1:
                            answers = [requests[0].send(cursor)]
                        elif group:
                            answers = requests[0].send_together(cursor, requests)
                except Exception as error:  # noqa: BLE001  # for who asked, whatever it is
                    is_rejected = pooled and isinstance(error, (psycopg.Error, UnicodeError))
                    if len(group) > 1 and is_rejected:
                        groups.extend(_one_by_one(group))  # one task's mistake is its own
                    else:
                        self._fail(group, error, opened_at)
                else:
                    self._outage.end(begun)
                    for other, answer in zip(group, answers, strict=True):
                        other.outcome = other.outcome or _outcome(answer)

    def _begin_sending(self, group: Sequence[_Entry[Any]]) -> list[_Entry[Any]]:
        """Note which requests are sent now: those that have not been given up meanwhile."""
        with self._lock:
            wanted = [entry for entry in group if entry.outcome is None]
            for entry in wanted:
                entry.sent = True
        return wanted

    @contextmanager
    def _turn(self, entry: _Entry[Any]) -> Iterator[_Sender]:
        """Give who sends a request, and what travels with it."""
        with self._lock:
            self._give_turn(entry)
            sender = entry.turn
            assert sender is not None
            self._gather(entry, sender)
            vanished, self._vanished = self._vanished, []
        for lost in vanished:
            self._abandon(lost)
        try:
            yield sender
        except BaseException as error:
            for other in sender.batch:
                if other.outcome is None:
                    other.fail(_interrupted(error), error)
            raise

    def _abandon(self, vanished: _Sender) -> None:
        """Tell those that no thread waits for that their sender will never answer."""
        with self._lock:
            abandoned = [each for each in vanished.batch if each.on_done]
            for entry in abandoned:
                entry.fail(_has_vanished())
        self._tell(abandoned)

    def _gather(self, entry: _Entry[Any], sender: _Sender) -> None:
        """Take those out of the queue that travel with this one.

        Each is its sender's before it leaves the queue: this may be interrupted.
        """
        batch, tasks = sender.batch, {entry.request.task_name}
        entry.sender = sender
        batch.append(entry)
        if self._waiting and not entry.request.goes_alone:
            left: deque[_Entry[Any]] = deque()
            for other in self._waiting:
                request = other.request
                if (
                    request.kind is entry.request.kind
                    and len(batch) < MOST_TOGETHER
                    and request.task_name not in tasks
                    and not request.goes_alone
                    and other.outcome is None
                    and other.deadline.seconds_left > 0
                ):
                    tasks.add(request.task_name)
                    batch.append(other)
                    other.sender = sender
                else:
                    left.append(other)
                    if request.task_name:  # as a release that waits, and the next claim
                        tasks.add(request.task_name)
            self._waiting = left

    def _fail(self, group: Sequence[_Entry[Any]], error: Exception, opened_at: float) -> None:
        """Note why requests that travelled together have no answer."""
        cause = error.__cause__ or error
        if isinstance(error, TaskLockDatabaseError):
            if not isinstance(error, (ConflictError, NotSentError)):
                self._outage.begin(error, opened_at)
        elif isinstance(error, psycopg.Error):
            # The message has what PostgreSQL said; its own traceback would only hide it.
            error = self._explain(error)
        elif not isinstance(error, TaskLockError):
            error = TaskLockError(f"the task lock database failed: {error!r}")
            error.__cause__ = cause
        for entry in group:
            # Each thread raises one of its own.
            own = error if len(group) == 1 else type(error)(*error.args)
            own.__cause__ = error.__cause__
            entry.fail(own, cause)

    def _hand_on(self) -> None:
        """Give the connection to whose request is the oldest."""
        late: list[_Entry[Any]] = []
        with self._lock:
            while self._waiting and self._waiting[0].is_over:
                entry = self._waiting.popleft()
                entry.fail(self._why_late(entry))
                late.append(entry)
            oldest = self._waiting.popleft() if self._waiting else None
            self._sender = None
            if oldest is not None:
                limit = OVERDUE * self._pool.attempt
                turn = _Sender(oldest.thread, time.monotonic() + limit)
                self._sender = oldest.turn = turn
        if oldest is not None:
            if oldest.on_done is None:
                oldest.tell()
            else:
                self._background.run(partial(self._send_in_background, oldest))
        # Last: where no thread can be started, they may ask again right here, and need a turn.
        self._tell(late)

    def _send_in_background(self, entry: _Entry[Any]) -> None:
        """Send a request that no thread waits for, unless the background was busy for too long."""
        try:
            if not entry.is_late:
                self._send(entry)
        finally:
            with self._lock:
                entry.fail(no_turn(entry.since))  # if it was not sent
            self._end_turn(entry)
            self._tell([entry])  # which is in no batch then

    def _tell(self, batch: Sequence[_Entry[Any]]) -> None:
        """Let those know that sent nothing themselves."""
        callbacks = []
        with self._lock:
            for entry in batch:
                if entry.on_done and entry.outcome is not None and not entry.is_told:
                    entry.is_told = True
                    callbacks.append(partial(entry.on_done, entry.outcome))
        for entry in batch:
            entry.tell()
        if callbacks:
            self._telling.run(partial(_call_all, callbacks))


def _call_all(callbacks: Sequence[Callable[[], None]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:  # nothing may end a background thread unseen
            logger.exception("The answer of a task lock statement could not be used")


def _one_by_one(rejected: Sequence[_Entry[Any]]) -> list[list[_Entry[Any]]]:
    """Return those that were rejected together, each by itself.

    What was granted before the statement that failed notes that itself.
    """
    for entry in rejected:
        entry.sent = False
    return [[entry] for entry in rejected]


def _outcome(answer: Any) -> Outcome[Any]:
    if isinstance(answer, TaskLockError):
        return Outcome(error=answer)
    return Outcome(answer)


def _has_vanished() -> TaskLockDatabaseError:
    return TaskLockDatabaseError("the thread that sent it has vanished")


def _check_turn(deadline: Deadline, since: float) -> None:
    """Raise an error if there is no time left for any of those that travel together."""
    if deadline.seconds_left <= 0:
        raise no_turn(since)


def no_turn(since: float) -> NotSentError:
    """Return the error of a request whose turn did not come.

    :param since: when it came, on the monotonic clock
    """
    waited = time.monotonic() - since
    return NotSentError(f"its turn on the connection did not come within {waited:.1f} sec")


def no_connection(since: float) -> NoConnectionError:
    """Return the error of a request whose turn did not come, since no connection did.

    :param since: when it came, on the monotonic clock
    """
    waited = time.monotonic() - since
    return NoConnectionError(f"no connection came within {waited:.1f} sec; are all in use?")


def _interrupted(error: BaseException) -> TaskLockDatabaseError:
    return TaskLockDatabaseError(f"the thread that asked was interrupted: {type(error).__name__}")
