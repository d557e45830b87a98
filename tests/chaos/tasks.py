"""The tasks of the chaos: what the replicas schedule, and what the checker knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# The library's default, and the options that are the same for all.
MIN_FACTOR = 0.9
POLL_INTERVAL = 1.0

# A third of it is what the library waits for one answer: longer than answers are late in a stall.
CLAIM_TIMEOUT = 7.0

# Seconds from one run time to the next of a task that runs once in a run of the chaos.
FAR_APART = 3600.0


@dataclass(frozen=True)
class ChaosTask:
    """A job that every replica schedules.

    :ivar name: id of the job, and so the task's name
    :ivar period: seconds from one run time to the next
    :ivar takes: seconds that a run takes, at least and at most
    :ivar failover: whether a dead holder's window is run again
    :ivar lease: seconds after its last sign of life for which a holder counts as alive
    :ivar max_lock: seconds; ``None`` for the library's default
    :ivar exact: whether all replicas compute the same run times, by their own clocks; else an
        interval that counts from the replica's start
    :ivar raises: whether one run in three raises, which opens its window again
    :ivar cancels: whether a coroutine that has lost its lock is cancelled
    :ivar once: whether it is due once in a run of the chaos, or never
    :ivar pooled: whether it runs in a worker process, on a replica that has a pool of them
    :ivar job: further arguments of ``add_job``
    """

    name: str
    period: float
    takes: tuple[float, float]
    failover: bool
    lease: float
    max_lock: float | None = None
    exact: bool = False
    raises: bool = False
    cancels: bool = False
    once: bool = False
    pooled: bool = False
    job: dict[str, Any] = field(default_factory=dict)

    @property
    def window(self) -> float:
        """Seconds from a run time on that it owns: the minimum lock."""
        return MIN_FACTOR * self.period

    @property
    def options(self) -> dict[str, Any]:
        """The job's own options of the task lock."""
        options: dict[str, Any] = {"failover": self.failover, "lease": self.lease}
        if self.raises:
            options["on_failure"] = "release"
        if self.max_lock is not None:
            options["max_lock"] = self.max_lock
        return options


TASKS = (
    ChaosTask("tick-2s", 2, (0.2, 0.8), True, 3, 40, job={"coalesce": False, "max_instances": 3}),
    ChaosTask("cron-5s", 5, (0.5, 2.5), True, 3, 40, exact=True, job={"max_instances": 2}),
    # Longer than its period.
    ChaosTask("long-3s", 3, (3.5, 4.5), True, 3, 40, cancels=True, job={"max_instances": 1}),
    ChaosTask("flaky-4s", 4, (0.2, 1.0), True, 3, 40, raises=True, job={"max_instances": 2}),
    ChaosTask("once-3s", 3, (0.5, 1.5), False, 5, job={"max_instances": 2}),
    # At times longer than their periods. The one's lease ends while its run goes on if its replica
    # is stopped; the other's ends long after a dead worker's task has to be free.
    ChaosTask("pool-3s", 3, (2.0, 5.0), True, 3, 40, pooled=True, job={"max_instances": 1}),
    ChaosTask("pool-4s", 4, (1.5, 5.0), True, 12, 40, pooled=True, job={"max_instances": 1}),
    ChaosTask("pool-once-4s", 4, (0.5, 2.5), False, 6, pooled=True, job={"max_instances": 1}),
)
POOLED = tuple(task.name for task in TASKS if task.pooled)


@dataclass(frozen=True)
class OneOff:
    """A job that is due once in a run of the chaos.

    :ivar id: of the job
    :ivar at: when it is due, in seconds from the start; of the history, on the monotonic clock
    :ivar takes: seconds that it takes
    :ivar failover: whether a dead holder's run is run again
    :ivar cron: whether it has a cron trigger, and newcomers after its run time have it too; else
        a date trigger
    :ivar replaced: whether the replicas, once they have submitted it, add a job under its id that
        is due an hour later
    :ivar lease: seconds
    """

    id: str
    at: float
    takes: float
    failover: bool
    cron: bool = False
    replaced: bool = False
    lease: float = 3.0

    @property
    def task(self) -> ChaosTask:
        """What the checker has to know of it."""
        return ChaosTask(
            self.id,
            FAR_APART,
            (self.takes, self.takes),
            self.failover,
            lease=self.lease,
            max_lock=60,
            exact=True,
            once=True,
        )
