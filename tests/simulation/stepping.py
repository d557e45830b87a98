"""The thread of a replica without a database: it steps queues."""

from __future__ import annotations

from math import inf
from typing import Any

from apscheduler_tasklock._database.thread import ReplicaThread
from tests.simulation.world import Inbox, Process, World


class SteppingThread(ReplicaThread):
    """Stands in for a replica's thread where nothing is sent: it steps queues, and no more."""

    def __init__(self, world: World, process: Process) -> None:
        # Nothing of the real thread is used but its steps.
        self._inbox: Any = Inbox(world)
        self._stepped = {}
        self._steps_at = inf
        self._came = []
        self._calls = []
        world.start(process, self._go_on, daemon=True)

    @property
    def is_live(self) -> bool:
        return True

    def start(self) -> None:
        pass

    def wake(self) -> None:
        self._inbox.wake()

    def _put(self, message: Any, *, wakes: bool = True) -> None:
        self._inbox.put(message)

    def wait_for(self, event: Any, seconds: float) -> None:
        pass

    def _go_on(self) -> None:
        while True:
            self._attend((), inf)
