"""The stories that the demo can tell: which jobs there are, and what befalls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from apscheduler_tasklock.demo import conductor, jobs, shared_conductor, shared_jobs, views
from apscheduler_tasklock.demo.fleet import Event, Fleet
from apscheduler_tasklock.demo.jobs import DemoTask
from apscheduler_tasklock.demo.ledger import Ledger
from apscheduler_tasklock.demo.verdict import Verdict


class Conducts(Protocol):
    """What happens to the replicas while they run."""

    def busy(self, elapsed: float) -> bool:
        """Tell whether something is under way that the demo should wait for."""

    def act(self, elapsed: float) -> None:
        """Do what is due, so many seconds after the start."""

    def take_in(self, event: Event) -> None:
        """Take in what a replica told."""

    def fault(self) -> str | None:
        """Return what should have happened and did not."""


class Story(Protocol):
    """One of the stories.

    :ivar tasks: its tasks, three of them
    :ivar replica: the module that its replicas run
    :ivar marked: the kind of event that takes no time and is drawn
    :ivar what_they_do: the replicas, in a few words
    """

    tasks: Sequence[DemoTask]
    replica: str
    marked: str
    what_they_do: str

    def check(self, replicas: int, seconds: float) -> None:
        """Raise :class:`TaskLockOptionError` if it cannot be told so."""

    def describe_plan(self, replicas: int, seconds: float) -> str:
        """Return what will happen."""

    def conductor(self, ledger: Ledger, fleet: Fleet, seconds: float) -> Conducts:
        """Return what makes it happen."""

    def describe_outcome(self, verdicts: Sequence[Verdict], fires: int) -> str:
        """Return what has come of it."""


class WithoutStore(Story):
    """All replicas schedule the same jobs, and each is run by one of them."""

    tasks = jobs.TASKS
    replica = "apscheduler_tasklock.demo.replica"
    marked = "refused"
    what_they_do = "which all schedule the same jobs"

    def check(self, replicas: int, seconds: float) -> None:
        """Let it be of any length."""

    def describe_plan(self, replicas: int, seconds: float) -> str:
        """Return whether a replica will be killed."""
        return conductor.describe_plan(replicas, seconds)

    def conductor(self, ledger: Ledger, fleet: Fleet, seconds: float) -> Conducts:
        """Return the one that kills a replica and starts a new one."""
        return conductor.Conductor(ledger, fleet, seconds)

    def describe_outcome(self, verdicts: Sequence[Verdict], fires: int) -> str:
        """Compare with what would have been without the lock."""
        return views.compare_with_no_lock(verdicts, fires)


class SharedStore(Story):
    """All replicas share a job store, and one of them adds the jobs."""

    tasks = shared_jobs.TASKS
    replica = "apscheduler_tasklock.demo.shared_replica"
    marked = "added"
    what_they_do = "which share one job store; replica 1 will add these jobs"

    def check(self, replicas: int, seconds: float) -> None:
        """Refuse a length that has no room for it."""
        shared_conductor.check(replicas, seconds)

    def describe_plan(self, replicas: int, seconds: float) -> str:
        """Return who will be killed."""
        return shared_conductor.PLAN

    def conductor(self, ledger: Ledger, fleet: Fleet, seconds: float) -> Conducts:
        """Return the one that has jobs added and removed, and kills a replica between."""
        return shared_conductor.SharedConductor(ledger, fleet, seconds)

    def describe_outcome(self, verdicts: Sequence[Verdict], fires: int) -> str:
        """Return how often the jobs ran."""
        return views.describe_shared(verdicts)
