"""The tasks of the chaos: what the replicas schedule, and what the checker knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# The library's default factors.
MIN_FACTOR, MAX_FACTOR = 0.9, 5.0

# Short, so that replicas soon do as usual again after an outage; see checker.py.
CLAIM_TIMEOUT = 3.0


@dataclass(frozen=True)
class ChaosTask:
    """A job that every replica schedules.

    :ivar name: id of the job, and so the task's name
    :ivar period: seconds from one run time to the next
    :ivar takes: seconds that a run takes, at least and at most
    :ivar failover: its lease; ``None`` for none: its windows are started at most once
    :ivar cron: whether its run times are those of a cron expression, by the replica's own clock;
        else an interval that counts from the replica's start
    :ivar raises: whether one run in three raises, which opens its window again
    :ivar job: further arguments of ``add_job``
    """

    name: str
    period: float
    takes: tuple[float, float]
    failover: float | None
    cron: bool = False
    raises: bool = False
    job: dict[str, Any] = field(default_factory=dict)

    @property
    def window(self) -> float:
        """Seconds from a run time on that it owns: the minimum lock."""
        return MIN_FACTOR * self.period

    @property
    def options(self) -> dict[str, Any]:
        """The job's own options of the task lock."""
        on_failure = "release" if self.raises else "keep"
        return {"failover": self.failover or 0, "on_failure": on_failure}


TASKS = (
    ChaosTask("tick-2s", 2, (0.2, 0.8), 3, job={"coalesce": False, "max_instances": 3}),
    ChaosTask("cron-5s", 5, (0.5, 2.5), 2, cron=True, job={"max_instances": 2}),
    # Longer than its period.
    ChaosTask("long-3s", 3, (3.5, 4.5), 2, job={"max_instances": 1}),
    ChaosTask("flaky-4s", 4, (0.2, 1.0), 2, raises=True, job={"max_instances": 2}),
    ChaosTask("once-3s", 3, (0.5, 1.5), None, job={"max_instances": 2}),
)
