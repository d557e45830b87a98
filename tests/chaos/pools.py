"""Pools of worker processes: which processes were in each, when it broke, and when all were dead.

A replica has one pool after the other: one of which a process dies is broken, and is replaced when
it is next given something. What its other processes run may go on for a while, and is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from apscheduler_tasklock.demo.history import Event
from tests.chaos.history import END_GROUP, POOL
from tests.chaos.stretch import Stretch

# The first events of a worker process.
_FIRST = ("worker started", "begin")


@dataclass
class _Worker:
    """A worker process.

    :ivar seen: the time of its last event, or of its kill
    :ivar stops: when it was stopped
    """

    seen: float
    stops: list[Stretch] = field(default_factory=list)

    @property
    def dead(self) -> float:
        """When it was dead at the earliest, if it ended as soon as it could."""
        return max([self.seen, *(stop.ended for stop in self.stops)])

    def go_on(self, at: float) -> None:
        """Let it not be stopped any more."""
        if self.stops and self.stops[-1].ended == inf:
            self.stops[-1] = Stretch(self.stops[-1].begun, at)


@dataclass
class _Pool:
    """A pool.

    :ivar workers: its processes, by their ids
    :ivar broke: when one of them was killed; ``None`` if none was
    :ivar signalled: when they got SIGTERM with their replica, which may have ended them
    """

    workers: dict[int, _Worker] = field(default_factory=dict)
    broke: float | None = None
    signalled: float | None = None


class Pools:
    """All pools of worker processes in a history.

    :param ordered: the events, in the order of time
    """

    def __init__(self, ordered: Sequence[Event]) -> None:
        self._pools: dict[str, list[_Pool]] = defaultdict(lambda: [_Pool()])
        self._pool_of: dict[int, _Pool] = {}
        for event in ordered:
            self._take_in(event)

    def _take_in(self, event: Event) -> None:
        if event.kind == "leaving" and event.detail == END_GROUP:
            self._pools[event.replica.removesuffix(POOL) + POOL][-1].signalled = event.at
        if not event.worker:
            return
        if event.kind in _FIRST and event.worker not in self._pool_of:
            self._start(event)
        pool = self._pool_of.get(event.worker)
        if pool is None:
            return
        worker = pool.workers[event.worker]
        match event.kind:
            case "worker killed":
                pool.broke = event.at if pool.broke is None else pool.broke
                worker.seen = event.at
                worker.go_on(event.at)
            case "worker stopped":
                worker.stops.append(Stretch(event.at, inf))
            case "worker continued":
                worker.go_on(event.at)
            case _:
                worker.seen = event.at

    def _start(self, event: Event) -> None:
        pools = self._pools[event.replica]
        if pools[-1].broke is not None:
            pools.append(_Pool())
        pools[-1].workers[event.worker] = _Worker(event.at)
        self._pool_of[event.worker] = pools[-1]

    def broke(self, replica: str, worker: int, since: float) -> float | None:
        """Return when the pool of a run broke, or ``None``.

        :param replica: that part of a replica which is a pool
        :param worker: that runs it; 0 if it was not heard of
        :param since: when it was claimed
        """
        breaks = (pool.broke for pool in self._of(replica, worker) if pool.broke is not None)
        return next((at for at in breaks if at > since), None)

    def may_have_broken(self, replica: str, worker: int, since: float) -> float:
        """Return the same, but also if SIGTERM may have broken it; infinity if it did not break."""
        signals = (pool.signalled for pool in self._of(replica, worker))
        found = [self.broke(replica, worker, since), *signals]
        return min((at for at in found if at is not None and at > since), default=inf)

    def dead(self, replica: str, worker: int, since: float) -> float:
        """Return when all processes of a pool that broke were dead, if each ended when it could."""
        for pool in self._of(replica, worker):
            if pool.broke is not None and pool.broke > since:
                return max([pool.broke, *(one.dead for one in pool.workers.values())])
        return inf

    def stops(self, worker: int) -> Sequence[Stretch]:
        """Return when a process was stopped."""
        pool = self._pool_of.get(worker)
        return [] if pool is None else pool.workers[worker].stops

    def ended(self, worker: int) -> float:
        """Return when a process was dead at the earliest."""
        pool = self._pool_of.get(worker)
        return -inf if pool is None else pool.workers[worker].dead

    def _of(self, replica: str, worker: int) -> Iterator[_Pool]:
        if worker in self._pool_of:
            yield self._pool_of[worker]
        elif replica in self._pools:
            yield from self._pools[replica]
