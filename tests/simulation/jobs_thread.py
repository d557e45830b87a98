"""The thread of the jobs' side, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf
from queue import Empty
from typing import Any

from apscheduler_tasklock._runs.jobs_thread import DrivenQueue, JobsThread
from apscheduler_tasklock._runs.queue import QueueInputs
from tests.simulation.world import Inbox, Process, World


class SimulatedJobsThread(JobsThread):
    """The real jobs' thread, as a thread of a world."""

    def __init__(self, world: World, process: Process) -> None:
        super().__init__()
        self._inbox: Any = Inbox(world)
        self.failures: list[BaseException] = []
        world.start(process, self._go_on, daemon=True)

    @property
    def is_idle(self) -> bool:
        """Whether no run waits, is asked for, or goes on."""
        return all(queue.runs.is_idle for queue in self._queues) and not self._inbox.qsize()

    def start(self) -> None:
        pass

    def post(self, queue: DrivenQueue, message: Callable[[QueueInputs], object]) -> None:
        def take_in(inputs: QueueInputs) -> None:
            try:
                message(inputs)
            except Exception as error:  # the real thread would log it
                self.failures.append(error)
                raise

        super().post(queue, take_in)

    def begin_stop(self) -> None:
        """Let no run begin any more."""

        def stop(inputs: QueueInputs) -> None:
            inputs.stopped = self._is_stopped = True

        for queue in self._queues:
            self.post(queue, stop)

    def _go_on(self) -> None:
        while True:
            if not self._waited():  # the next message starts it again
                # If the inbox is empty, the caller of the stop has read the message and stepped.
                with suppress(Empty):
                    queue, message = self._inbox.get(inf)
                    queue.messages.append(message)
            self._step_once()
