"""When claiming was stopped, and how long waits for the database may go on from then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from math import inf
from typing import Any, Generic, TypeVar

from apscheduler_tasklock.errors import TaskLockDatabaseError

Result = TypeVar("Result")
# A time on the monotonic clock, or what returns it.
Until = float | Callable[[], float]

# Seconds within which an attempt is over, once claiming was stopped: a claim, which nobody wants
# any more; and a release, which a database that answers late should get all the same.
ATTEMPT_LIMIT = 1.5
RELEASE_LIMIT = 3.0
# Seconds within which all is over that a shutdown does not have to wait for.
SHUTDOWN_LIMIT = 4.8
# The last of these seconds, for a request to the server to cancel what it was asked.
CANCEL_LIMIT = 0.5
# Seconds after which a wait looks at its deadline again.
WAKE_INTERVAL = 0.1


class Closing:
    """Whether, and since when, claiming is stopped. All waits of one ``TaskLocks`` look at it."""

    def __init__(self) -> None:
        self._stopped_at: float | None = None
        self._event = threading.Event()

    @property
    def stopped(self) -> bool:
        """Whether claiming is stopped."""
        return self._stopped_at is not None

    def is_over(self, limit: float) -> bool:
        """Tell whether claiming was stopped more than so many seconds ago."""
        return self._stopped_at is not None and time.monotonic() > self._stopped_at + limit

    def stop(self) -> None:
        """Stop claiming. Another call changes nothing."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        self._event.set()

    def wait(self, seconds: float) -> bool:
        """Pause, until claiming is stopped at the latest, and return whether it is."""
        return self._event.wait(seconds) or self.stopped

    def over_at(self, since: float, limit: float) -> float:
        """Return when something is over that began at this time, on the monotonic clock.

        :param limit: the seconds that it may take once claiming is stopped
        """
        stopped_at = self._stopped_at
        return inf if stopped_at is None else max(stopped_at, since) + limit


class Deadline:
    """When the waits of one attempt end. It comes closer when claiming is stopped meanwhile.

    :param closing: says whether claiming is stopped; ``None`` for what goes on all the same
    :param until: returns when the attempt is over in any case, on the monotonic clock; or that
        time, if it does not change
    :param limit: the seconds that it may take once claiming is stopped
    """

    def __init__(
        self, closing: Closing | None, until: Until = inf, limit: float = ATTEMPT_LIMIT
    ) -> None:
        self._closing = closing
        self._limit = limit
        self._since = time.monotonic()
        self._until: Callable[[], float] = until if callable(until) else lambda: until

    @property
    def stopped(self) -> bool:
        """Whether claiming is stopped."""
        return self._closing is not None and self._closing.stopped

    @property
    def over_at(self) -> float:
        """When the attempt waits no longer, on the monotonic clock; there is time to cancel it."""
        over_at = self._until()
        if self._closing is not None:
            over_at = min(over_at, self._closing.over_at(self._since, self._limit))
        return over_at - CANCEL_LIMIT

    @property
    def seconds_left(self) -> float:
        """Seconds for which the attempt may wait from now on."""
        return self.over_at - time.monotonic()

    def of_attempt(self, closing: Closing, limit: float) -> Deadline:
        """Return that of one attempt which begins now, of what is tried again until this one.

        :param limit: the seconds that it may take once claiming is stopped
        """
        return Deadline(closing, self._until, limit)

    @classmethod
    def latest(cls, deadlines: Sequence[Deadline]) -> Deadline:
        """Return the one that passes last of several, as of what travels together."""
        return max(deadlines, key=lambda each: (each._until(), each._limit, each._since))

    def call(
        self,
        function: Callable[[], Result],
        discard: Callable[[Result], Any],
        within: float = inf,
        started: Callable[[threading.Thread], object] = lambda _thread: None,
    ) -> Result:
        """Call a function that opens a connection, and give it up at the deadline.

        Nothing can interrupt libpq while it looks a host's name up, nor the listeners of an
        application's engine. So a thread makes the call, and goes on with it when it is given up.

        :param discard: is given what the function returns if nobody waits for it any more
        :param within: seconds after which it is given up in any case
        :param started: gets the thread
        :raises TaskLockDatabaseError: the deadline has passed
        """
        call = AbandonableCall(function, discard)
        thread = threading.Thread(target=call.run, name="tasklock-connect", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # threads are limited, or the interpreter ends and starts none
            return function()
        started(thread)
        given_up_at = time.monotonic() + within
        try:
            while (left := min(self.seconds_left, given_up_at - time.monotonic())) > 0:
                if call.wait(min(left, WAKE_INTERVAL)):
                    break
        except BaseException:
            if not call.give_up():
                call.discard()
            raise
        if call.give_up():
            if self.seconds_left > 0:
                raise TaskLockDatabaseError(f"no connection came within {within:.1f} sec")
            raise _out_of_time()
        return call.result()


class AbandonableCall(Generic[Result]):
    """A call in a thread, which may be given up."""

    def __init__(self, function: Callable[[], Result], discard: Callable[[Result], Any]) -> None:
        self._function = function
        self._discard = discard
        self._future: Future[Result] = Future()

    def run(self) -> None:
        """Call the function, and discard its result if it was given up meanwhile."""
        try:
            result = self._function()
        except BaseException as error:  # noqa: BLE001  # for who waits, whatever it is
            with suppress(InvalidStateError):
                self._future.set_exception(error)
            return
        try:
            self._future.set_result(result)
        except InvalidStateError:
            self._discard(result)

    def wait(self, seconds: float) -> bool:
        """Return whether the function has returned or raised by then."""
        return bool(wait([self._future], seconds).done)

    def give_up(self) -> bool:
        """Want its result no more; return whether there is none yet."""
        return self._future.cancel()

    def discard(self) -> None:
        """Discard the result that there is, if the function did not raise."""
        if self._future.exception() is None:
            self._discard(self._future.result())

    def result(self) -> Result:
        """Return what the function returned, or raise what it raised."""
        try:
            return self._future.result()
        finally:
            # An error's traceback refers to this frame, and so, in a circle, to the error.
            del self


def _out_of_time() -> TaskLockDatabaseError:
    return TaskLockDatabaseError("the database did not answer in time")
