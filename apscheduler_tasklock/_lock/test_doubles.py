"""Stand-ins for the database in the tests of an application.

A stand-in decides on claims in memory. While a stand-in is set, each ``ReplicaUser`` sends its
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
    """A stand-in that is set in this process, and its users.

    :ivar stand_in: the stand-in
    """

    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in
        self._users: dict[Hashable, Any] = {}
        self._lock = threading.Lock()
        replace_in_each_child(self)

    def user(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the stand-in's user that is used in place of one user of the database.

        :param key: identifies the user of the database
        :param make: makes the stand-in's user, when its key is first asked for
        """
        with self._lock:
            if key not in self._users:
                self._users[key] = make()
            made: Made = self._users[key]
            return made

    def _replace_in_child(self) -> None:
        """Replace the users. Called in a forked child."""
        self._lock = threading.Lock()
        self._users = {key: user.for_child() for key, user in self._users.items()}

    def close(self) -> None:
        """Close the users."""
        with self._lock:
            users, self._users = list(self._users.values()), {}
        for user in users:
            user.close(blocking=True)


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
