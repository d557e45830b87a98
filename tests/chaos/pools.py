"""Pools of worker processes: which processes were in each, when it broke, and when all were dead.

A replica has one pool after the other: one of which a process dies is broken, and is replaced when
it is next given something. What its other processes run may go on for a while, and is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from apscheduler_tasklock.demo.history import Event
from tests.chaos.history import END_GROUP, POOL

# The first events of a worker process; and those after which one that was stopped can end.
_FIRST = ("worker started", "begin")
_ENDS_STOP = ("worker continued", "worker killed")


@dataclass
class Pool:
    """A pool.

    :ivar broke: when one of its processes was killed; infinity for never, here and below
    :ivar signalled: when they got SIGTERM with their replica, which may have ended them
    :ivar ended: by the id of a process, when it was dead if it ended as soon as it could: at its
        last event, unless it is stopped
    """

    broke: float = inf
    signalled: float = inf
    ended: dict[int, float] = field(default_factory=dict)

    @property
    def dead(self) -> float:
        """When all of its processes were dead, if it broke and each ended when it could."""
        return max([self.broke, *self.ended.values()])


class Pools:
    """All pools of worker processes in a history.

    :param ordered: the events, in the order of time
    """

    def __init__(self, ordered: Iterable[Event]) -> None:
        self._pools: dict[str, list[Pool]] = defaultdict(lambda: [Pool()])
        self._pool_of: dict[int, Pool] = {}
        for event in ordered:
            self._take_in(event)

    def _take_in(self, event: Event) -> None:
        if event.kind == "leaving" and event.detail == END_GROUP:
            self._pools[event.replica.removesuffix(POOL) + POOL][-1].signalled = event.at
        if event.worker and event.kind in _FIRST and event.worker not in self._pool_of:
            pools = self._pools[event.replica]
            if pools[-1].broke < inf:
                pools.append(Pool())
            self._pool_of[event.worker] = pools[-1]
        if (pool := self._pool_of.get(event.worker)) is None:
            return
        if event.kind == "worker killed":
            pool.broke = min(pool.broke, event.at)
        if event.kind == "worker stopped":
            pool.ended[event.worker] = inf
        elif pool.ended.get(event.worker) != inf or event.kind in _ENDS_STOP:
            pool.ended[event.worker] = event.at

    def broken(self, replica: str, worker: int, since: float) -> Pool:
        """Return the pool of a run if it broke; else one that never breaks.

        :param replica: that part of a replica which is a pool
        :param worker: that runs it; 0 if it was not heard of
        :param since: when it was claimed
        """
        return next((p for p in self._of(replica, worker) if since < p.broke < inf), Pool())

    def may_have_broken(self, replica: str, worker: int, since: float) -> float:
        """Return when the pool of a run broke, also if SIGTERM may have broken it."""
        signals = [pool.signalled for pool in self._of(replica, worker) if pool.signalled > since]
        return min([self.broken(replica, worker, since).broke, *signals])

    def ended(self, worker: int) -> float:
        """Return when a process was dead at the earliest."""
        return self._pool_of[worker].ended[worker] if worker in self._pool_of else -inf

    def _of(self, replica: str, worker: int) -> Sequence[Pool]:
        return [self._pool_of[worker]] if worker in self._pool_of else self._pools.get(replica, [])
