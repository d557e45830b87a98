"""The two stories that the demo tells: which jobs there are, and what happens to the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apscheduler_tasklock.demo import conductor, jobs, shared_conductor, shared_jobs, views
from apscheduler_tasklock.demo.account import DemoTask
from apscheduler_tasklock.demo.fleet import Fleet
from apscheduler_tasklock.demo.ledger import Ledger
from apscheduler_tasklock.demo.verdict import Verdict

Conductor = conductor.Conductor | shared_conductor.SharedConductor


@dataclass(frozen=True)
class Story:
    """One of the stories.

    :ivar tasks: its three tasks
    :ivar replica: the module that its replicas run
    :ivar marked: the kind of event that is drawn as a mark, because it takes no time
    :ivar what_they_do: what the replicas do, in a few words
    :ivar conductor: makes the conductor of a demo of so many seconds
    :ivar plan: returns what will happen, for so many replicas and seconds
    :ivar outcome: returns the result in words, from the verdicts and the number of fires
    """

    tasks: Sequence[DemoTask]
    replica: str
    marked: str
    what_they_do: str
    conductor: Callable[[Ledger, Fleet, float], Conductor]
    plan: Callable[[int, float], str]
    outcome: Callable[[Sequence[Verdict], int], str]


WITHOUT_STORE = Story(
    tasks=jobs.TASKS,
    replica="apscheduler_tasklock.demo.replica",
    marked="refused",
    what_they_do="which all schedule the same jobs",
    conductor=conductor.Conductor,
    plan=conductor.describe_plan,
    outcome=views.compare_with_no_lock,
)
SHARED_STORE = Story(
    tasks=shared_jobs.TASKS,
    replica="apscheduler_tasklock.demo.shared_replica",
    marked="added",
    what_they_do="which share one job store; replica 1 will add these jobs",
    conductor=shared_conductor.SharedConductor,
    plan=shared_conductor.describe_plan,
    outcome=views.describe_shared,
)
