"""What becomes of a run that was refused because of another one, its own window being new."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Outlook(enum.Enum):
    """What becomes of a kept run now."""

    WAITS = "waits"  # for the run in its way, or another one since
    ASKED_AGAIN = "asked again"
    REFUSED = "refused"  # for good


@dataclass(frozen=True)
class InTheWay:
    """The run because of which another one is kept.

    :ivar token: its fencing token
    :ivar came_first: whether it is one of the schedule that began before the kept run was due. Then
        it stands rightly against the kept run, as an instance that is still running does in
        APScheduler, unless it dies. A manual run, or a retry, never does.
    """

    token: int
    came_first: bool

    def outlook(self, *, token: int, finished: bool, dead: bool, deaths: int) -> Outlook:
        """Tell what becomes of the kept run, from what a look at the task's row says.

        :param token: of the task's last run
        :param finished: whether that was released, or given up
        :param dead: whether it was not, and its lease has ended
        :param deaths: how often in a row a run of the task has died; 0 after a release
        """
        if not (finished or dead):
            return Outlook.WAITS
        was_released = finished and deaths == 0
        if self.came_first and was_released and token == self.token:
            return Outlook.REFUSED
        return Outlook.ASKED_AGAIN
