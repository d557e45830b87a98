"""Stand-ins for the database in the tests of an application.

A stand-in decides on claims in memory. While a stand-in is set, each ``LockClient`` sends its
requests to the stand-in. Nothing connects to a database, and no tables are checked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Protocol, TypeVar
from uuid import UUID

from apscheduler_tasklock._lock.forking import replace_in_each_child
from apscheduler_tasklock._lock.protocol_messages import (
    ClaimAnswer,
    ClaimRequest,
    ClosedRun,
    LockTimes,
    MissNote,
    ReadTimes,
    Registered,
    Registration,
    ReleaseAnswer,
    ReleaseRequest,
    Renewal,
    RerunRequest,
    RunState,
    ScheduleNote,
)
from apscheduler_tasklock.status import RunningRun


class LockProtocol(Protocol):
    """The methods of a replica's protocol, which a stand-in must have.

    :class:`TaskLockProtocol` has them for the database. A stand-in's methods get a cursor, too, on
    which nothing can be executed.
    """

    def claim(self, cursor: Any, request: ClaimRequest, times: ReadTimes = ...) -> ClaimAnswer:
        """Claim a task for one run time."""

    def claim_and_move(
        self, cursor: Any, requests: Sequence[ClaimRequest], times: ReadTimes, most: int
    ) -> dict[UUID, ClaimAnswer]:
        """Claim the tasks of several stored jobs, and move the jobs to later run times."""

    def claim_many(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
        most: int | None = None,
    ) -> dict[UUID, ClaimAnswer]:
        """Claim several tasks. A task without a row has no answer."""

    def first_claim_many(
        self,
        cursor: Any,
        requests: Sequence[ClaimRequest],
        lags: Sequence[float],
        times: ReadTimes,
        most: int | None = None,
    ) -> dict[UUID, ClaimAnswer]:
        """Claim several tasks without a row. A task with a row has no answer, or looks free."""

    def rerun(
        self, cursor: Any, requests: Sequence[RerunRequest], times: ReadTimes = ...
    ) -> dict[UUID, ClaimAnswer]:
        """Claim several takeovers, retries and manual runs."""

    def release(self, cursor: Any, request: ReleaseRequest) -> ReleaseAnswer | None:
        """Release a claim."""

    def release_many(
        self, cursor: Any, requests: Sequence[ReleaseRequest]
    ) -> dict[UUID, ReleaseAnswer | None]:
        """Release several claims."""

    def end_lease(
        self, cursor: Any, task_name: str, claim_id: UUID, holders: Sequence[str]
    ) -> ReleaseAnswer | None:
        """End the lease of a run whose holder is known to be dead."""

    def give_up(self, cursor: Any, task_name: str, claim_id: UUID) -> ClosedRun | None:
        """Give up a dead run."""

    def extend(
        self, cursor: Any, task_name: str, claim_id: UUID, by: float, lease: float | None
    ) -> LockTimes | None:
        """Move the end of a claim's maximum lock."""

    def renew(self, cursor: Any, renewals: Sequence[Renewal]) -> dict[UUID, LockTimes]:
        """Renew claims."""

    def read(
        self, cursor: Any, task_names: Sequence[str], always: Sequence[str] = ()
    ) -> tuple[list[RunState], datetime]:
        """Return the rows of tasks that need an action, and the database's time."""

    def register(self, cursor: Any, tasks: Sequence[Registration]) -> list[Registered]:
        """Register the tasks of a replica."""

    def report_replica(
        self,
        cursor: Any,
        host: str,
        version: str,
        tasks: Sequence[str],
        started_at: datetime | None = None,
        rejected: Sequence[str] = (),
        running: Sequence[RunningRun] = (),
        leader_namespace: str | None = None,
    ) -> tuple[datetime, int]:
        """Report this replica as alive, with its tasks."""

    def retire(self, cursor: Any, successor_of: Sequence[str], dropped: Sequence[str]) -> None:
        """Retire removed tasks that no live replica has, so that they are not overdue."""

    def lead(self, cursor: Any, row: str, leader_id: str, lease: float) -> bool:
        """Lead the replicas of a namespace, unless another replica does."""

    def resign(self, cursor: Any, row: str, leader_id: str) -> None:
        """Give the leadership up."""

    def stop_replica(self, cursor: Any, running: Sequence[RunningRun] = ()) -> None:
        """Report that this replica stops, and which of its runs still go on."""

    def remove_replicas(self, cursor: Any, age: float) -> None:
        """Delete replicas without a sign of life for ``age`` seconds."""

    def shorten_history(self, cursor: Any, task_names: Sequence[str]) -> None:
        """Delete these tasks' entries that the run history keeps no longer."""

    def note_misses(self, cursor: Any, notes: Sequence[MissNote], sent_at: datetime) -> set[str]:
        """Write entries of missed run times; return the tasks whose notes are to be sent again."""

    def note_reschedulings(self, cursor: Any, notes: Sequence[ScheduleNote]) -> set[str]:
        """Write entries of changed schedules; return the tasks whose notes are to be sent again."""

    def prune(self, cursor: Any, age: float) -> int:
        """Delete the rows of one-off jobs that ended at least ``age`` seconds ago."""


class StandIn(Protocol):
    """Decides on claims in place of the database."""

    def protocol(self, replica_id: str) -> LockProtocol:
        """Return the protocol of a replica."""


class Client(Protocol):
    """A client that sends requests to a stand-in, and has to be closed."""

    def close(self, *, blocking: bool = False) -> None:
        """Stop claiming. A lock that is held can still be released."""

    def for_child(self) -> Any:
        """Return a client for a forked child."""


Made = TypeVar("Made", bound=Client)


class Standing:
    """A stand-in that is set in this process, and its clients.

    :ivar stand_in: the stand-in
    """

    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in
        self._clients: dict[Hashable, Client] = {}
        self._lock = threading.Lock()
        replace_in_each_child(self)

    def client(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the stand-in's client that is used in place of one client of the database.

        :param key: identifies the client of the database
        :param make: makes the stand-in's client, when its key is first asked for
        """
        with self._lock:
            found: Any = self._clients.get(key)
            if found is None:
                found = self._clients[key] = make()
            made: Made = found
            return made

    def _replace_in_child(self) -> None:
        """Replace the clients. Called in a forked child."""
        self._lock = threading.Lock()
        self._clients = {key: client.for_child() for key, client in self._clients.items()}

    def close(self) -> None:
        """Close the clients."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close(blocking=True)


_standing: list[Standing] = []


def current_standing() -> Standing | None:
    """Return the stand-in that is set in this process; ``None``: the database is used."""
    return _standing[-1] if _standing else None


@contextmanager
def standing_in(stand_in: StandIn) -> Iterator[None]:
    """Set a stand-in for the database in this process, for all of its threads.

    An executor that is started while the stand-in is set uses the stand-in until its shutdown.
    """
    standing = Standing(stand_in)
    _standing.append(standing)
    try:
        yield
    finally:
        _standing.remove(standing)
        standing.close()
