"""What steps the queues of replicas in a world."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from apscheduler_tasklock._database.thread import ReplicaThread
from apscheduler_tasklock._runs.driven_queue import DrivenQueue
from apscheduler_tasklock._runs.run import QueuedRun
from tests.simulation.world import Inbox, Process, VirtualEvent, World
from tests.support.waist import ClaimOutcome


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


class SimulatedQueue(DrivenQueue):
    """The real queue, which notes what fails in it.

    :ivar failures: the errors, which the library would log
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.failures: list[BaseException] = []

    @property
    def is_idle(self) -> bool:
        """Whether no run waits, is asked for, or goes on."""
        return self.runs.is_idle and not self.messages

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        super().call(self._noting, function, *arguments)

    def answered(self, run: QueuedRun, outcome: ClaimOutcome) -> None:
        self._noting(super().answered, run, outcome)

    def _noting(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            function(*arguments)
        except Exception as error:
            self.failures.append(error)
            raise

    def stop(self) -> Any:
        """Let no run begin any more."""
        self.call(self.runs.stop)
        return VirtualEvent()
