"""Stand-ins for the database in the tests of an application.

A stand-in decides on claims in memory. While a stand-in is set, each ``LockClient`` sends its
requests to the stand-in. Nothing connects to a database, and no tables are checked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from apscheduler_tasklock._lock.forking import replace_in_each_child
from apscheduler_tasklock._lock.protocol_messages import LockProtocol


class StandIn(Protocol):
    """Decides on claims in place of the database."""

    def protocol(self, replica_id: str) -> LockProtocol:
        """Return the protocol of a replica."""


Made = TypeVar("Made")


class ActiveStandIn:
    """A stand-in that is set in this process, and its clients.

    :ivar stand_in: the stand-in
    """

    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in
        self._clients: dict[Hashable, Any] = {}
        self._lock = threading.Lock()
        replace_in_each_child(self)

    def client(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the stand-in's client that is used in place of one client of the database.

        :param key: identifies the client of the database
        :param make: makes the stand-in's client, when its key is first asked for
        """
        with self._lock:
            if key not in self._clients:
                self._clients[key] = make()
            made: Made = self._clients[key]
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


_active: list[ActiveStandIn] = []


def active_stand_in() -> ActiveStandIn | None:
    """Return the stand-in that is set in this process; ``None``: the database is used."""
    return _active[-1] if _active else None


@contextmanager
def use_stand_in(stand_in: StandIn) -> Iterator[None]:
    """Set a stand-in for the database in this process, for all of its threads.

    An executor that is started while the stand-in is set uses the stand-in until its shutdown.
    """
    active = ActiveStandIn(stand_in)
    _active.append(active)
    try:
        yield
    finally:
        _active.remove(active)
        active.close()
