"""A simulated pool of workers, for the wrapped executor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from tests.simulation.world import Process, World


class PoolError(Exception):
    """The error of a pool that rejects a call, or that reports so by mistake."""


class Pool:
    """A pool of workers that carry out calls in order.

    :param count: the number of workers; ``None``: no limit
    :ivar queued: the number of calls that wait for a worker
    :ivar raises_until: until when ``submit`` raises an error, on the virtual clock
    :ivar queues_all_the_same: whether ``submit`` queues a call although it raises an error
    """

    def __init__(self, world: World, process: Process, count: int | None) -> None:
        self.count = count
        self.raises_until = -inf
        self.queues_all_the_same = False
        self._world = world
        self._process = process
        self._busy = 0
        self._starting = 0  # number of busy workers that have no call yet
        self._queue: deque[Callable[[], object]] = deque()

    @property
    def queued(self) -> int:
        return len(self._queue) - self._starting

    @property
    def is_idle(self) -> bool:
        """Whether no worker is busy, and nothing waits for one."""
        return not (self._busy or self._queue)

    def submit(self, work: Callable[[], object]) -> None:
        """Call a function in a worker, when one is free.

        :raises PoolError: the pool raises errors now
        """
        raises = self._world.now < self.raises_until
        if not raises or self.queues_all_the_same:
            self._queue.append(work)
            self._begin_next()
        if raises:
            if self.queues_all_the_same:
                self._world.sleep(0.001)  # so that a worker can run before the error
            raise PoolError("the pool does not take anything")

    def occupy(self, seconds: float, workers: int = 1) -> None:
        """Occupy so many workers with work of the application itself."""
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
