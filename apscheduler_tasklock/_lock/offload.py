"""Claims and releases of coroutines: their requests queue without a thread each."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from apscheduler_tasklock._database.background import BackgroundThreads
from apscheduler_tasklock._database.deadline import ATTEMPT_LIMIT, Closing, Deadline
from apscheduler_tasklock._database.errors import RowLockedError
from apscheduler_tasklock._database.exchange import Exchange, Outcome, Request
from apscheduler_tasklock._database.retry import BACKOFF, LOCKED_BACKOFF, jittered
from apscheduler_tasklock._lock.completion import Completion, result_of
from apscheduler_tasklock._lock.lifetime import InProgress
from apscheduler_tasklock._values import logger_of
from apscheduler_tasklock.errors import TaskLockDatabaseError

Result = TypeVar("Result")

logger = logger_of(__name__)

# How many releases are tried again at a time while the database does not answer as it should, and
# how many claims are given up.
THREADS = 5


class Operation(Generic[Result]):
    """What a coroutine wants to be done with the database, and waits for.

    :ivar limit: seconds that its request may take once claiming is stopped
    """

    limit: float = ATTEMPT_LIMIT

    def prepare(self) -> Request[Any] | None:
        """Return the request to begin with; ``None`` if there is none.

        Called in a thread, since a custom trigger may take long.
        """
        raise NotImplementedError

    def finish(self, outcome: Outcome[Any] | None) -> Result:
        """Do the rest, in a thread. It may wait for the database if there was no plain answer.

        :param outcome: what became of the request
        """
        raise NotImplementedError

    def waits_after(self, _answer: Any) -> bool:
        """Whether ``finish`` waits for the database although there is this answer."""
        return False


class _Call(Operation[Result]):
    """A function that may wait for the database, and that sends what it wants by itself."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function

    def prepare(self) -> None:
        return None

    def finish(self, _outcome: Outcome[Any] | None) -> Result:
        return self._function()


class ThreadOffload:
    """Does what coroutines want of the database, without a thread for each of them.

    The thread that sends prepares as well, and one finishes what was plainly answered. Claims that
    failed are sent again together, after a pause; a few threads try releases again. What was begun
    is brought to its end, also when the coroutine that waits for it is cancelled, or left behind on
    a loop that has ended.

    :param exchange: sends the requests
    :param background: the thread that sends
    :param finishing: the one that tells of answers, and finishes what was plainly answered
    :param closing: says when claiming is stopped
    :param claiming: counts the claims that are not decided, or are given back
    :param claim_timeout: seconds for which a claim is tried
    """

    def __init__(
        self,
        exchange: Exchange,
        background: BackgroundThreads,
        finishing: BackgroundThreads,
        closing: Closing,
        claiming: InProgress,
        claim_timeout: float,
    ) -> None:
        self._claim_timeout = claim_timeout
        self._exchange = exchange
        self._background = background
        self._closing = closing
        self._claiming = claiming
        self._finishing = finishing
        self._pausing = BackgroundThreads(1, "tasklock-pausing")
        self._claims = BackgroundThreads(THREADS, "tasklock-claims")
        # Of their own, so that they do not queue behind claims.
        self._releases = BackgroundThreads(THREADS, "tasklock-ends")
        # A coroutine may be closed by the garbage collector wherever the lock is held.
        self._lock = threading.RLock()
        self._begun: deque[_Running[Any]] = deque()
        self._decided: list[tuple[_Running[Any], Outcome[Any]]] = []
        self._failed: list[tuple[_Running[Any], Request[Any], Outcome[Any]]] = []

    def close(self) -> None:
        """End the threads."""
        for threads in (
            self._background,
            self._finishing,
            self._pausing,
            self._claims,
            self._releases,
        ):
            threads.close()

    async def claim(self, claim: Operation[Result], give_back: Callable[[Result], Any]) -> Result:
        """Wait until a claim is decided.

        :param give_back: called in a thread with what ``claim`` returned, if nobody waits for it
            any more by then
        """
        running = _Running(claim, self._claims, asyncio.get_running_loop(), give_back)
        running.tried_until = time.monotonic() + self._claim_timeout
        self._claiming.begin()
        running.when_done(self._claiming.end)
        self._begin(running)
        try:
            return await result_of(running)
        except (asyncio.CancelledError, GeneratorExit):
            if running.abandon():
                self._releases.run(partial(give_back, running.result()))
            raise

    def release(self, release: Operation[Result]) -> Completion[Result]:
        """Begin a release; return what becomes of it. It does not wait for claims."""
        running: _Running[Result] = _Running(release, self._releases)
        self._begin(running)
        return running

    def call(self, function: Callable[[], Result]) -> Completion[Result]:
        """Call a function that may wait for the database in a thread."""
        running: _Running[Result] = _Running(_Call(function), self._releases)
        self._releases.run(partial(running.finish, None))
        return running

    def _begin(self, running: _Running[Any]) -> None:
        with self._lock:
            self._begun.append(running)
            is_first = len(self._begun) == 1
        if is_first:
            self._background.run(self._send)

    def _send(self) -> None:
        """Prepare what was begun, and send it together."""
        with self._lock:
            batch, self._begun = self._begun, deque()
        for limit in {running.operation.limit for running in batch}:
            ready = [
                (running, request)
                for running in batch
                if running.operation.limit == limit
                and (request := self._prepared(running)) is not None
            ]
            if ready:
                self._submit([request for _, request in ready], [each for each, _ in ready], limit)

    def _submit(
        self, requests: list[Request[Any]], running: list[_Running[Any]], limit: float
    ) -> None:
        self._exchange.submit(
            requests,
            Deadline(self._closing, limit=limit),
            [partial(self._answered, *each) for each in zip(running, requests, strict=True)],
        )

    def _prepared(self, running: _Running[Any]) -> Request[Any] | None:
        """Return the request to begin with; without one, it is finished."""
        if running.is_abandoned:  # before anything was sent
            running.fail(asyncio.CancelledError())
            return None
        try:
            request = running.operation.prepare()
        except BaseException as error:  # noqa: BLE001  # for who waits, whatever it is
            running.fail(error)
            return None
        if request is None:
            running.threads.run(partial(running.finish, None))
        return request

    def _answered(
        self, running: _Running[Any], request: Request[Any], outcome: Outcome[Any]
    ) -> None:
        """Finish what was answered in one thread; what was not, in one that may wait."""
        if isinstance(outcome.error, TaskLockDatabaseError) and self._may_ask_again:
            pause = running.pause_after(outcome.error)
            if pause is not None:
                self._ask_later(running, request, outcome, pause)
                return
        may_wait = outcome.error is not None or running.operation.waits_after(outcome.answer)
        if may_wait or running.is_abandoned:
            running.threads.run(partial(running.finish, outcome))
            return
        with self._lock:
            self._decided.append((running, outcome))
            is_first = len(self._decided) == 1
        if is_first:
            self._finishing.run(self._finish)

    @property
    def _may_ask_again(self) -> bool:
        """Whether claims are sent again in the background, which has no threads at the end."""
        return not (self._closing.stopped or self._pausing.is_ending)

    def _finish(self) -> None:
        """Finish what was plainly answered."""
        with self._lock:
            decided, self._decided = self._decided, []
        for running, outcome in decided:
            try:
                running.finish(outcome)
            except Exception:  # the others are to be finished all the same
                logger.exception("What a coroutine waited for could not be finished")

    def _ask_later(
        self, running: _Running[Any], request: Request[Any], outcome: Outcome[Any], pause: float
    ) -> None:
        """Ask for a claim again after a pause, together with others that failed."""
        with self._lock:
            self._failed.append((running, request, outcome))
            is_first = len(self._failed) == 1
        if is_first:
            self._pausing.run(partial(self._ask_again_after, pause))

    def _ask_again_after(self, pause: float) -> None:
        """Pause, and ask again together for all claims that have failed meanwhile."""
        self._closing.wait(pause)
        with self._lock:
            failed, self._failed = self._failed, []
        asked = []
        for running, request, outcome in failed:
            if self._closing.stopped:
                running.threads.run(partial(running.finish, outcome))
            elif running.is_abandoned and not request.in_doubt:
                running.fail(asyncio.CancelledError())
            else:  # what is granted and nobody wants any more is given back
                asked.append((running, request))
        if asked:
            limit = asked[0][0].operation.limit  # they are claims and takeovers
            self._submit([request for _, request in asked], [each for each, _ in asked], limit)


class _Running(Completion[Result]):
    """An operation under way, of which nobody may want to know any more when it is done.

    :param threads: in which it may wait for the database
    :ivar tried_until: until when it is sent again with others, on the monotonic clock; ``None`` if
        it is not a claim
    """

    def __init__(
        self,
        operation: Operation[Result],
        threads: BackgroundThreads,
        loop: asyncio.AbstractEventLoop | None = None,
        give_back: Callable[[Result], Any] | None = None,
    ) -> None:
        super().__init__()
        self.operation = operation
        self.threads = threads
        self.loop = loop
        self.tried_until: float | None = None
        self._failures = 0
        self._give_back = give_back
        self._abandoned = False

    def finish(self, outcome: Outcome[Any] | None) -> None:
        """Do the rest; give back what was got if nobody waits for it."""
        try:
            result = self.operation.finish(outcome)
        except BaseException as error:  # noqa: BLE001  # for who waits, whatever it is
            self.fail(error)
            return
        with self._lock:
            is_unwanted = self._abandoned or (self.loop is not None and self.loop.is_closed())
            if not is_unwanted:
                self._note(result, None)
        if is_unwanted:
            try:
                if self._give_back is not None:
                    self._give_back(result)
            except Exception:  # nothing may end a thread unseen
                logger.exception("What a coroutine did not wait for could not be given back")
        self.succeed(result)

    def pause_after(self, error: TaskLockDatabaseError) -> float | None:
        """Return the seconds after which it is sent again; ``None`` if it is not."""
        if self.tried_until is None:
            return None
        left = self.tried_until - time.monotonic()
        if left <= 0:
            return None
        # A row is locked as a rule by another replica's claim that is being committed.
        backoff = LOCKED_BACKOFF if isinstance(error, RowLockedError) else BACKOFF
        pause = jittered(backoff[min(self._failures, len(backoff) - 1)])
        self._failures += 1
        return min(pause, left)

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody wants to know what becomes of it."""
        return self._abandoned

    def abandon(self) -> bool:
        """Want the result no more; return whether the caller has to give it back: it is there."""
        with self._lock:
            self._abandoned = True
            return self.has_succeeded
