"""The three stories that the demo tells: which jobs there are, and what happens to the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from apscheduler_tasklock.demo import (
    conductor,
    jobs,
    replica,
    shared_conductor,
    shared_jobs,
    views,
)
from apscheduler_tasklock.demo.fleet import Fleet
from apscheduler_tasklock.demo.judgement import DemoTask, Judgement
from apscheduler_tasklock.demo.ledger import Ledger

Conductor = conductor.Conductor | shared_conductor.SharedConductor


@dataclass(frozen=True)
class DemoStory:
    """One of the stories.

    :ivar tasks: its three tasks
    :ivar replica: the module that its replicas run, and arguments for it
    :ivar marked: the kind of event that is drawn as a mark, because it takes no time
    :ivar what_they_do: what the replicas do, in a few words
    :ivar conductor: makes the conductor of a demo of so many seconds
    :ivar plan: returns what will happen, for so many replicas and seconds
    :ivar outcome: returns the result in words, from the judgements and the number of fires
    :ivar has_leader: whether the replicas are in leader mode
    """

    tasks: Sequence[DemoTask]
    replica: Sequence[str]
    marked: str
    what_they_do: str
    conductor: Callable[[Ledger, Fleet, float], Conductor]
    plan: Callable[[int, float], str]
    outcome: Callable[[Sequence[Judgement], int], str]
    has_leader: bool = False


WITHOUT_STORE = DemoStory(
    tasks=jobs.TASKS,
    replica=[replica.__name__],
    marked="refused",
    what_they_do="which all schedule the same jobs",
    conductor=conductor.Conductor,
    plan=conductor.describe_plan,
    outcome=views.compare_with_no_lock,
)
LEADER = DemoStory(
    tasks=jobs.tasks(jobs.LEADER_PERIOD),
    replica=[replica.__name__, replica.LEADER_MODE],
    marked="refused",
    what_they_do="which all schedule the same jobs; one of them leads, and asks first",
    conductor=partial(conductor.Conductor, has_leader=True),
    plan=partial(conductor.describe_plan, has_leader=True),
    outcome=partial(views.compare_with_no_lock, has_leader=True),
    has_leader=True,
)
SHARED_STORE = DemoStory(
    tasks=shared_jobs.TASKS,
    replica=["apscheduler_tasklock.demo.shared_replica"],
    marked="added",
    what_they_do="which share one job store; replica 1 will add these jobs",
    conductor=shared_conductor.SharedConductor,
    plan=shared_conductor.describe_plan,
    outcome=views.describe_shared,
)
