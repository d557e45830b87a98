"""A replica's thread alone, and requests that delay it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from threading import Event, Thread
from typing import Any

from apscheduler_tasklock import TaskLockError
from apscheduler_tasklock._database.awaited_request import AwaitedCall, AwaitedRequest
from apscheduler_tasklock._database.connection import attempt_limit, host_count, turn_limit
from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock._database.session import Session, opener
from apscheduler_tasklock._database.thread import Renewing, ReplicaThread
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._shutdown import Closing
from tests.support.internals import waiting_in
from tests.support.polling import eventually
from tests.support.waist import as_url

NAME = "a replica's thread"

# A statement that a function sends, or a request of another kind, which is sent once.
Wanted = Callable[[Any], Any] | AwaitedRequest[Any, Any]


def timed(wanted: Wanted, closing: Closing, **times: float) -> AwaitedRequest[Any, Any]:
    """Return the request of what is wanted, with these times."""
    if callable(wanted):
        return AwaitedCall(wanted, closing, came=time.monotonic(), **times)
    wanted.closing = closing
    wanted.came = wanted.by = wanted.not_before = time.monotonic()
    for name, value in times.items():
        setattr(wanted, name, value)
    return wanted


class NothingToRenew:
    """The renewals of a thread that renews nothing."""

    due_at = urgent_at = inf

    def request(self, _now: float) -> None: ...


class Setup:
    """A replica's thread, with a request that can keep its connection in use.

    :param database: a URL, an engine, or a session in place of one
    """

    def __init__(
        self,
        database: Any,
        timeout: float = 60.0,
        renewing: Renewing | None = None,
        timings: Timings | None = None,
    ) -> None:
        self.closing = Closing()
        self.turn_limit = turn_limit(timeout)
        attempt = attempt_limit(timeout, (timings or Timings()).longest_answer)
        self.outage = Outage("here", attempt)
        self.session: Session = (
            database
            if isinstance(database, Session)
            else Session(
                opener(database, attempt=attempt, application_name=NAME),
                attempt,
                self.outage.idle_connection_ended,
                hosts=host_count(as_url(database)),
            )
        )
        self.database = ReplicaThread(
            self.session,
            self.outage,
            lambda error: TaskLockError(f"rejected: {error.sqlstate}"),
            self.closing,
            renewing or NothingToRenew(),
            timings,
        )

    def ask(
        self,
        wanted: Wanted,
        turn_within: float | None = None,
        closing: Closing | None = None,
    ) -> Any:
        until = time.monotonic() + (turn_within or self.turn_limit)
        return self.database.get(self.request(wanted, closing, turn_until=until))

    def request(self, wanted: Wanted, closing: Closing | None = None, **times: float) -> Any:
        closing = closing or self.closing
        if callable(wanted):
            return AwaitedCall(wanted, closing, **{"came": time.monotonic(), **times})
        return timed(wanted, closing, **times)

    def ask_all(self, requests: Sequence[Wanted]) -> list[InThread]:
        """Ask for each request in its own thread, while the connection is in use."""
        with self.in_use():
            asked = []
            for number, request in enumerate(requests):
                asked.append(InThread(self, request))
                eventually(lambda number=number: self.waiting() == number + 1)
        return [each.ended() for each in asked]

    def waiting(self) -> int:
        return waiting_in(self.database)

    def in_use(self) -> InUse:
        return InUse(self)

    def close(self) -> None:
        self.closing.stop()
        self.database.close(0.0)


class InThread(Thread):
    """A thread that asks for a request."""

    def __init__(self, setup: Setup, request: Wanted, closing: Closing | None = None) -> None:
        super().__init__(daemon=True)
        self.setup = setup
        self.request: Any = request
        self.closing = closing
        self.answer: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self.setup.ask(self.request, closing=self.closing)
        except BaseException as error:  # noqa: BLE001  # the test checks it
            self.error = error

    def ended(self) -> InThread:
        self.join(60)
        assert not self.is_alive()
        return self


class InUse:
    """A context in which another request keeps the connection in use."""

    def __init__(self, setup: Setup) -> None:
        self.has_it, self.go_on = Event(), Event()

        def hold(_cursor: Any) -> None:
            self.has_it.set()
            assert self.go_on.wait(60)

        self.asked = InThread(setup, hold)

    def __enter__(self) -> InUse:
        assert self.has_it.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self.asked.ended()
