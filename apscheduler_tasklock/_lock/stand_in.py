"""What may stand in for the database in the tests of an application.

A stand-in decides on claims in memory. While one stands, every ``LockClient`` that is asked for
sends it what it would send to the database; nothing is connected to, and nothing is checked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Protocol, TypeVar
from uuid import UUID

from apscheduler_tasklock._lock.forking import replace_in_each_child
from apscheduler_tasklock._lock.messages import (
    ClaimAnswer,
    ClaimRequest,
    LockTimes,
    ManualRequest,
    ReadTimes,
    Registered,
    Registration,
    ReleaseAnswer,
    ReleaseRequest,
    Renewal,
    RunState,
    TakeoverRequest,
)
from apscheduler_tasklock.status import RunningRun


class LockProtocol(Protocol):
    """What a replica asks of what decides on claims; see :class:`TaskLockProtocol`.

    A stand-in's methods get a cursor as well, on which nothing can be executed.
    """

    def claim(self, cursor: Any, request: ClaimRequest, times: ReadTimes = ...) -> ClaimAnswer:
        """Try to take the task for one run time."""

    def claim_handed_out(
        self, cursor: Any, request: ClaimRequest, *, stable: bool
    ) -> ClaimAnswer | None:
        """Try to take the task of a job of the job store."""

    def claim_many(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
        most: int | None = None,
    ) -> dict[UUID, ClaimAnswer]:
        """Try to take so many tasks. Those without a row are missing in what it returns."""

    def first_claim_many(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
        most: int | None = None,
    ) -> dict[UUID, ClaimAnswer]:
        """Try to take so many tasks without a row. Those with one are missing, or look free."""

    def find_taken(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
    ) -> dict[UUID, ClaimAnswer]:
        """Tell which of many claims would be refused, since their windows are taken."""

    def claim_requested(
        self,
        cursor: Any,
        request: ManualRequest,
        *,
        stable: bool,
        not_after: datetime | None = None,
    ) -> ClaimAnswer | None:
        """Try to begin a run that was asked for by hand."""

    def take_over_many(
        self,
        cursor: Any,
        requests: Sequence[TakeoverRequest],
        times: ReadTimes = ...,
    ) -> dict[UUID, ClaimAnswer]:
        """Try to take over many claims."""

    def release(self, cursor: Any, request: ReleaseRequest) -> ReleaseAnswer | None:
        """End a claim."""

    def release_many(
        self, cursor: Any, requests: Sequence[ReleaseRequest]
    ) -> dict[UUID, ReleaseAnswer | None]:
        """End many claims."""

    def end_lease(
        self, cursor: Any, task_name: str, claim_id: UUID, holders: Sequence[str]
    ) -> ReleaseAnswer | None:
        """End the lease of a run whose holder is known to be dead."""

    def give_up(self, cursor: Any, task_name: str, claim_id: UUID) -> bool:
        """Finish a dead run that is not to be run again."""

    def extend(
        self, cursor: Any, task_name: str, claim_id: UUID, by: float, lease: float | None
    ) -> LockTimes | None:
        """Move the end of a claim's maximum lock."""

    def renew(self, cursor: Any, renewals: Sequence[Renewal]) -> dict[UUID, LockTimes]:
        """Let claims stand for another lease each."""

    def read(
        self, cursor: Any, task_names: Sequence[str], always: Sequence[str] = ()
    ) -> tuple[list[RunState], datetime]:
        """Return which of these tasks call for something, and the time."""

    def register(self, cursor: Any, tasks: Sequence[Registration]) -> list[Registered]:
        """Tell of the tasks that a replica has."""

    def report_replica(
        self,
        cursor: Any,
        host: str,
        version: str,
        tasks: Sequence[str],
        started_at: datetime | None = None,
        rejected: Sequence[str] = (),
        running: Sequence[RunningRun] = (),
    ) -> tuple[datetime, int]:
        """Say that this replica is alive, and which tasks it has."""

    def retire(self, cursor: Any, successor_of: Sequence[str], dropped: Sequence[str]) -> None:
        """Let nobody wait any more for tasks that no replica has, if they were removed."""

    def stop_replica(self, cursor: Any, running: Sequence[RunningRun] = ()) -> None:
        """Say that this replica stops, and what it still runs."""

    def remove_replicas(self, cursor: Any, age: float) -> None:
        """Delete the replicas that were last seen so many seconds ago."""

    def shorten_history(self, cursor: Any, task_names: Sequence[str]) -> None:
        """Delete what is left of these tasks' history from when it was longer than now."""

    def prune(self, cursor: Any, age: float) -> int:
        """Delete rows of one-off jobs that were over so many seconds ago."""


class StandIn(Protocol):
    """What decides in place of the database."""

    def protocol(self, replica_id: str) -> LockProtocol:
        """Return what a replica asks."""


class Client(Protocol):
    """What sends requests to a stand-in, as far as it has to be closed again."""

    def close(self, *, blocking: bool = False) -> None:
        """Claim nothing more. What is held can still be released."""

    def for_child(self) -> Any:
        """Return the same in a forked child."""


Made = TypeVar("Made", bound=Client)


class Standing:
    """A stand-in for as long as it stands.

    :ivar stand_in: what decides
    """

    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in
        self._clients: dict[Hashable, Client] = {}
        self._lock = threading.Lock()
        replace_in_each_child(self)

    def client(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the client that claims in the place of one which was made without a stand-in."""
        with self._lock:
            found: Any = self._clients.get(key)
            if found is None:
                found = self._clients[key] = make()
            made: Made = found
            return made

    def replace_in_child(self) -> None:
        """Use threads of its own. Called in a forked child."""
        self._lock = threading.Lock()
        self._clients = {key: client.for_child() for key, client in self._clients.items()}

    def close(self) -> None:
        """Close these clients."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close(blocking=True)


_standing: list[Standing] = []


def current_standing() -> Standing | None:
    """Return what stands in for the database now in this process, or ``None``."""
    return _standing[-1] if _standing else None


@contextmanager
def standing_in(stand_in: StandIn) -> Iterator[None]:
    """Let something stand in for the database in this process, in all of its threads.

    An executor that was started within goes on with it until it is shut down.
    """
    standing = Standing(stand_in)
    _standing.append(standing)
    try:
        yield
    finally:
        _standing.remove(standing)
        standing.close()
