"""An exchange of requests by itself, and what holds it up."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event, Thread
from typing import Any

from apscheduler_tasklock import TaskLockError
from apscheduler_tasklock._database.background import BackgroundThreads
from apscheduler_tasklock._database.connection import attempt_limit
from apscheduler_tasklock._database.deadline import Closing, Deadline
from apscheduler_tasklock._database.exchange import Call, Exchange, Request
from apscheduler_tasklock._database.outage import Outage
from apscheduler_tasklock._database.pool import Pool, make_pool
from tests.support.polling import eventually

NAME = "an exchange"


class Setup:
    """An exchange on a pool, and what there is to hold it up."""

    def __init__(self, database: Any, timeout: float = 60.0) -> None:
        self.closing = Closing()
        self.outage = Outage("here", attempt_limit(timeout))
        self.background = BackgroundThreads(1, "background")
        self.telling = BackgroundThreads(1, "telling")
        self.pool: Pool = make_pool(
            database,
            timeout=timeout,
            application_name=NAME,
            closing=self.closing,
            ended=self.outage.idle_connection_ended,
        )
        self.exchange = Exchange(
            self.pool,
            self.outage,
            lambda error: TaskLockError(f"rejected: {error.sqlstate}"),
            self.background,
            self.telling,
        )

    def ask(
        self,
        request: Request[Any],
        turn_within: float | None = None,
        deadline: Deadline | None = None,
    ) -> Any:
        return self.exchange.ask(request, deadline or Deadline(self.closing), turn_within)

    def ask_all(self, requests: Sequence[Request[Any]]) -> list[Asked]:
        """Ask for each in a thread of its own, while the connection is in use."""
        with self.in_use():
            asked = []
            for number, request in enumerate(requests):
                asked.append(Asked(self, request))
                eventually(lambda number=number: self.waiting() == number + 1)
        return [each.ended() for each in asked]

    def waiting(self) -> int:
        return self.exchange.waiting

    def in_use(self) -> InUse:
        return InUse(self)

    def close(self) -> None:
        self.pool.close()
        self.background.close()
        self.telling.close()


class Asked(Thread):
    """A request in a thread."""

    def __init__(
        self, setup: Setup, request: Request[Any], deadline: Deadline | None = None
    ) -> None:
        super().__init__(daemon=True)
        self.setup = setup
        self.request = request
        self.deadline = deadline
        self.answer: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self.setup.ask(self.request, deadline=self.deadline)
        except BaseException as error:  # noqa: BLE001  # for the test to look at
            self.error = error

    def ended(self) -> Asked:
        self.join(60)
        assert not self.is_alive()
        return self


class InUse:
    """The connection, in use by another request until the end of the context."""

    def __init__(self, setup: Setup) -> None:
        self.has_it, self.go_on = Event(), Event()

        def hold(_cursor: Any) -> None:
            self.has_it.set()
            assert self.go_on.wait(60)

        self.asked = Asked(setup, Call(hold))

    def __enter__(self) -> InUse:
        assert self.has_it.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self.asked.ended()


class LateConnection:
    """Makes the next connection come late, as where a name server does not answer.

    :ivar begun: set when somebody waits for it
    :ivar go_on: lets it come
    """

    def __init__(self, setup: Setup) -> None:
        self.begun, self.go_on = Event(), Event()
        self._pool = setup.pool
        self._acquire = setup.pool.acquire
        setup.pool.acquire = self._acquire_late

    def _acquire_late(self, deadline: Deadline) -> Any:
        self._pool.acquire = self._acquire
        self.begun.set()
        assert self.go_on.wait(60)
        return self._acquire(deadline)
