"""Shutdown: all limits of its waits, and when claiming was stopped."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from math import inf

# All limits of a shutdown, in seconds.
#
# Limits the whole shutdown of a scheduler's executors and job stores, without the time in which the
# shutdown waits for running jobs.
SHUTDOWN_LIMIT = 4.8
# Limit an attempt to send a request after claiming was stopped. The second, longer limit is that of
# releases, because a release should also reach a database that answers late.
ATTEMPT_LIMIT = 1.5
RELEASE_LIMIT = 3.0
# Limits the request that cancels an unanswered statement. Each attempt keeps these seconds free for
# this request at its end.
CANCEL_LIMIT = 0.5
# Limits the wait until the queues have withdrawn the runs that have not begun.
WITHDRAWING_LIMIT = 1.0
# Limits the last part of a shutdown, in which failed releases are sent once more. An executor or
# job store also leaves so many seconds to each one that is shut down after it, but at most half of
# SHUTDOWN_LIMIT to all of these together.
LAST_SECONDS = 1.0
# The shortest time for pending releases, however long the shutdown's earlier parts took.
SHORTEST_CLOSING = 0.7
# The shortest wait for the application's own code, such as its log handlers.
SHORTEST_FLUSH = 0.2
# Limits the wait for a log line that is being written.
LAST_LINE_LIMIT = 1.0
# Limits how long pending releases are sent while the database is unavailable.
PENDING_LIMIT = 3.0
# Limits the wait for pending releases at the interpreter's end without a shutdown.
ENDING_LIMIT = 3.0


class Closing:
    """Says whether requests are to end, because claiming is stopped, or because of a close.

    A signal handler may call :meth:`stop` at any line, so there is no lock.

    :ivar stopped: whether the requests are to end
    """

    def __init__(self) -> None:
        self.stopped = False
        self._stopped_at = inf

    def stop(self, at: float | None = None) -> None:
        """Let the requests end soon. Another call changes nothing, or lets them end sooner.

        :param at: from when on they are to end, on the monotonic clock; by default from now on
        """
        self._stopped_at = min(self._stopped_at, time.monotonic() if at is None else at)
        self.stopped = True

    def over_at(self, since: float, limit: float) -> float:
        """Return when a request is over, on the monotonic clock; ``inf`` before a stop.

        :param since: when the request came, or its attempt began, on the monotonic clock
        :param limit: limits it once there was a stop, in seconds
        """
        return max(self._stopped_at, since) + limit


# The `Closing` of requests that a stop does not end: renewals and extensions of what still runs,
# and the request that gives the leadership up. It is never stopped.
NO_STOP = Closing()


class Shutdown:
    """The time of a scheduler's shutdown, which its executors and job stores share.

    Executors and job stores are shut down one after the other, so each has to leave some time for
    the next ones.

    :param users: how many executors and job stores the scheduler has
    """

    def __init__(self, users: int = 1) -> None:
        self._since = time.monotonic()
        self._users = users

    @property
    def over_at(self) -> float:
        """When the shutdown of the current executor or job store is to be over; monotonic clock."""
        for_others = min(LAST_SECONDS * (self._users - 1), SHUTDOWN_LIMIT / 2)
        return self._since + SHUTDOWN_LIMIT - for_others

    @property
    def last_at(self) -> float:
        """When the last part begins, on the monotonic clock. Failed releases are sent in it."""
        return self.over_at - LAST_SECONDS

    @property
    def seconds_left(self) -> float:
        """The seconds until the last part begins."""
        return max(0.0, self.last_at - time.monotonic())

    def note_waited(self, seconds: float) -> None:
        """Extend the limit by so many seconds, because the shutdown has waited for running jobs."""
        self._since += seconds

    @property
    def has_others(self) -> bool:
        """Whether other executors or job stores are shut down after the current one."""
        return self._users > 1

    def leave(self) -> None:
        """Note that the current executor or job store is shut down."""
        self._users -= 1


def off_the_loop(function: Callable[[], None]) -> None:
    """Call a function that waits, but not in a thread whose event loop would wait, too.

    If an event loop runs in this thread, a new thread makes the call. Otherwise this thread does.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        function()
    else:
        threading.Thread(target=function, name="tasklock-close").start()
