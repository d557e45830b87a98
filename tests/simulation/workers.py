"""A simulated pool of workers, as the wrapped executor has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from tests.simulation.world import Process, World


class PoolError(Exception):
    """The pool did not take something, or says so."""


class Pool:
    """Workers that take what is given to them, one after the other.

    :param count: how many workers there are; ``None``: as many as there is work
    :ivar queued: how much waits for a worker
    :ivar raises_until: until when giving it something raises an error, on the virtual clock
    :ivar queues_all_the_same: whether what it raised for was queued before that
    """

    def __init__(self, world: World, process: Process, count: int | None) -> None:
        self.count = count
        self.raises_until = -inf
        self.queues_all_the_same = False
        self._world = world
        self._process = process
        self._busy = 0
        self._starting = 0  # of those that are busy: who has not taken anything yet
        self._queue: deque[Callable[[], object]] = deque()

    @property
    def queued(self) -> int:
        return len(self._queue) - self._starting

    @property
    def is_idle(self) -> bool:
        """Whether no worker is busy, and nothing waits for one."""
        return not (self._busy or self._queue)

    def submit(self, work: Callable[[], object]) -> None:
        """Let a worker call a function when it is free.

        :raises PoolError: it could not be taken
        """
        raises = self._world.now < self.raises_until
        if not raises or self.queues_all_the_same:
            self._queue.append(work)
            self._begin_next()
        if raises:
            if self.queues_all_the_same:
                self._world.sleep(0.001)  # the thread is interrupted, and a worker goes on
            raise PoolError("the pool does not take anything")

    def occupy(self, seconds: float, workers: int = 1) -> None:
        """Let the application itself give it work, for so many workers."""
        for _ in range(workers):
            self._queue.append(lambda: self._world.sleep(seconds))
            self._begin_next()

    def _begin_next(self) -> None:
        if self.queued > 0 and (self.count is None or self._busy < self.count):
            self._busy += 1
            self._starting += 1
            self._world.start(self._process, self._work)

    def _work(self) -> None:
        self._starting -= 1
        while self._queue:
            self._queue.popleft()()
        self._busy -= 1
