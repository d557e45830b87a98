"""Everything that two or three replicas and a user can do with one stored job, in any order.

The model has one job, which is due twice, the row of its task, and replicas that read, claim, run,
die, lose answers, and take over. Each action is one statement, or what happens to it on its way.
:func:`explore` goes through all states that can be reached, and so through all interleavings:
:attr:`Explored.paths` has their number. What is wrong is found by a ledger of what has begun and
ended, which knows nothing of the rows.

Time goes by in ticks. A claim is waited for within one. Its lease lasts for more than one and less
than two, and living holders renew theirs with each tick. The job is due at tick 0 and at tick 1.
An outage lasts for a lease. After it the rows are not believed until living holders have renewed.
What is late by a tick or more may count as missed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

LAST_RUN_TIME = 1
LAST_TICK = 2
LEASE = 2
# A job that is not the user's own, but a manual run.
MANUAL = -2
# How many steps it takes at most until all is done that can be done within a tick.
MOST_STEPS = 100
# What is not done by that.
IDLE = ("tick", "outage")

# A claim's id: its replica, and the number of its claims.
ClaimId = tuple[int, int]


class Fence(NamedTuple):
    """What was read of a job: the user's last change, and its next run time."""

    change: int
    run_time: int
    version: int


class Job(NamedTuple):
    """The job's row.

    :ivar added: of the user's call that has set its next run time
    :ivar change: of the user's last change
    :ivar last: the run time that was claimed last
    :ivar version: how many changes users have made of it; 1 when it is added
    """

    added: int
    change: int
    next: int | None
    last: int | None = None
    ended: bool = False
    version: int = 1


class Lock(NamedTuple):
    """The task's row.

    :ivar lease: the tick at which the lease has ended
    :ivar manual: the number of the manual run; ``None``: it is a run time of the job
    """

    claim: ClaimId
    run_time: int
    lease: int
    finished: bool = False
    handed_over: bool = False
    manual: int | None = None


class Replica(NamedTuple):
    """A replica, and what it knows.

    :ivar phase: ``idle``; ``read``; ``doubt``: its claim was sent, and no answer came; ``refused``:
        likewise, and it was refused when it was sent again;
        ``refused``: when it was sent again, so that the first try may be granted yet; ``runs``;
        ``ended``: its release is to be sent; ``dead``
    :ivar claims: how many claims it has made
    :ivar not_after: the tick after which nobody waits for its claim
    :ivar able: whether it has the job's executor and its function
    """

    phase: str = "idle"
    fence: Fence | None = None
    claims: int = 0
    not_after: int = 0
    able: bool = True

    @property
    def alive(self) -> bool:
        return self.phase != "dead"


class Flying(NamedTuple):
    """A claim's statement that is held up on its way."""

    claim: ClaimId
    fence: Fence
    not_after: int


class World(NamedTuple):
    """All that there is.

    :ivar faults: how many may still happen
    :ivar changes: how many a user may still make; the number of the next one
    :ivar paused: whether the task is paused
    :ivar believed: whether replicas believe the rows, as they do but after an outage
    :ivar claimed: the run time that was claimed last, with the job that was added
    :ivar begun: the run times that have begun, each with the job that was added
    :ivar ended: those that have ended
    :ivar missed: those that were missed
    """

    replicas: tuple[Replica, ...]
    faults: int
    user: int
    clock: int = 0
    job: Job | None = Job(0, 0, 0)
    lock: Lock | None = None
    flying: tuple[Flying, ...] = ()
    change: int = 1
    paused: bool = False
    believed: bool = True
    claimed: tuple[int, int] | None = None
    begun: frozenset[tuple[int, int]] = frozenset()
    ended: frozenset[tuple[int, int]] = frozenset()
    missed: frozenset[tuple[int, int]] = frozenset()
    runs: tuple[tuple[ClaimId, tuple[int, int]], ...] = ()


class Step(NamedTuple):
    """One action: what, by whom, and what it has answered."""

    name: str
    replica: int
    answer: str


# What a replica may do next: what, the world afterwards, and the answer.
Ways = Iterator[tuple[str, World, str]]


def become(world: World, number: int, **changes: Any) -> World:
    """Return the world in which a replica has changed."""
    replicas = list(world.replicas)
    replicas[number] = replicas[number]._replace(**changes)
    return world._replace(replicas=tuple(replicas))


class WrongError(Exception):
    """Something was lost, or has begun twice."""


# What the condition of the read and of the claim is made of; the last is the read's alone, as only
# the replica knows it.
RUNS, DEATHS, BELIEF, PAUSES, ABLE = "runs", "deaths", "belief", "pauses", "able"
ALL = frozenset({RUNS, DEATHS, BELIEF, PAUSES, ABLE})


@dataclass(frozen=True)
class Rule:
    """What the statements decide on, and what replicas do. Each mutation has one part less."""

    looks_for_own_id: bool = True
    own_id_goes_first: bool = True
    fence_has_run_time: bool = True
    fence_has_change: bool = True
    fence_has_version: bool = False
    claim_minds: frozenset[str] = ALL
    read_minds: frozenset[str] = ALL
    move_is_fenced: bool = True
    has_not_after: bool = True
    hands_over: bool = True
    failover: bool = True

    def claim(self, world: World, claim: ClaimId, fence: Fence) -> tuple[World, str]:
        """Claim and move: return the rows afterwards, and the answer."""
        job, lock = world.job, world.lock
        is_own = lock is not None and lock.claim == claim
        is_fenced = self.is_fenced(job, fence)
        was_granted = self.looks_for_own_id and is_own and self.stands(lock)
        if was_granted and (is_fenced or self.own_id_goes_first):
            return world, "granted"
        if job is None or not is_fenced:
            return world, "withdrawn"
        if is_own or not self.may_be_claimed(world, self.claim_minds):
            return world, "refused"
        if job.change != fence.change:
            raise WrongError("what is run was changed, and the user's call has returned")
        if world.paused:
            raise WrongError("what is run was paused, and the operator's call has returned")
        job = self.moved(job, fence)._replace(last=fence.run_time)
        lock = Lock(claim, fence.run_time, world.clock + LEASE)
        claimed = (job.added, fence.run_time)
        return world._replace(job=job, lock=lock, claimed=claimed), "granted"

    def move_on(self, world: World, fence: Fence) -> tuple[World, str]:
        """Move past a run time that is missed: return the rows afterwards, and the answer."""
        job = world.job
        if job is None or (self.move_is_fenced and not self.is_fenced(job, fence)):
            return world, "withdrawn"
        run = (job.added, fence.run_time)
        if run in world.begun:
            raise WrongError(f"run time {fence.run_time} has begun, and counts as missed")
        missed = world.missed | {run}
        return world._replace(job=self.moved(job, fence), missed=missed), "moved"

    def moved(self, job: Job, fence: Fence) -> Job:
        following = fence.run_time + 1 if fence.run_time < LAST_RUN_TIME else None
        return job._replace(next=following, ended=following is None)

    def is_fenced(self, job: Job | None, fence: Fence) -> bool:
        return (
            job is not None
            and job.next is not None
            and (not self.fence_has_run_time or job.next == fence.run_time)
            and (not self.fence_has_change or job.change == fence.change)
            and (not self.fence_has_version or job.version == fence.version)
        )

    def stands(self, lock: Lock | None) -> bool:
        return lock is not None and not (lock.finished or lock.handed_over)

    def is_dead(self, world: World) -> bool:
        lock = world.lock
        return lock is not None and not lock.finished and lock.lease <= world.clock

    def is_doubted(self, world: World) -> bool:
        """Tell whether nobody can be sure of a death."""
        return self.is_dead(world) and self.stands(world.lock) and not world.believed

    def is_run_again(self, world: World) -> bool:
        """Tell whether a dead run is to be run again, and is the job's own or a manual one."""
        lock, job = world.lock, world.job
        if lock is None or job is None or not self.is_dead(world):
            return False
        is_own = lock.manual is not None or job.last == lock.run_time
        return (self.failover or lock.handed_over) and is_own

    def may_be_claimed(self, world: World, minds: frozenset[str]) -> bool:
        lock = world.lock
        if PAUSES in minds and world.paused:
            return False
        if lock is None or lock.finished:
            return True
        if not self.is_dead(world):
            return RUNS not in minds
        if BELIEF in minds and self.is_doubted(world):
            return False
        return not (DEATHS in minds and self.is_run_again(world))

    def read(self, world: World, replica: Replica) -> Fence | None:
        job = world.job
        if job is None or job.next is None or job.next > world.clock:
            return None
        if ABLE in self.read_minds and not replica.able:
            return None
        if not self.may_be_claimed(world, self.read_minds):
            return None
        return Fence(job.change, job.next, job.version)

    def hand_over(self, world: World, claim: ClaimId) -> World:
        lock = world.lock
        if lock is None or lock.claim != claim or not self.stands(lock):
            return world
        return world._replace(lock=lock._replace(handed_over=True, lease=world.clock))

    # ---- what may happen -----------------------------------------------------------------------

    def steps(self, world: World) -> Iterator[tuple[Step, World]]:
        """Yield all that may happen next."""
        for number, replica in self.who_may_act(world):
            for name, after, answer in self.by_replica(world, number, replica):
                yield Step(name, number, answer), after
        for flying in world.flying:
            arrived, answer = self.arrive(world, flying)
            yield Step("arrives", flying.claim[0], answer), arrived
        if not any(self.is_urgent(world, replica) for replica in world.replicas):
            yield from self.by_time(world)
        if world.user:
            for name, changed in self.by_user(world):
                yield Step(name, -1, ""), changed

    def who_may_act(self, world: World) -> Iterator[tuple[int, Replica]]:
        """Yield those that live. Of those alike, that have done nothing yet, the first acts."""
        new: set[Replica] = set()
        for number, replica in enumerate(world.replicas):
            if replica.alive and replica not in new:
                yield number, replica
            if not replica.claims:
                new.add(replica)

    def by_time(self, world: World) -> Iterator[tuple[Step, World]]:
        if not world.believed:
            yield Step("recover", -1, ""), self.renewed(world)._replace(believed=True)
        elif world.clock < LAST_TICK:
            yield Step("tick", -1, ""), self.tick(world)
            if world.faults and world.lock is not None:
                after = world._replace(clock=world.clock + LEASE, believed=False)
                yield Step("outage", -1, ""), after._replace(faults=world.faults - 1)

    def by_replica(self, world: World, number: int, replica: Replica) -> Ways:
        phases = {
            "idle": self.by_idle,
            "read": self.by_reader,
            "doubt": self.by_doubtful,
            "refused": self.by_refused,
            "runs": self.by_runner,
            "ended": self.by_releaser,
        }
        yield from phases[replica.phase](world, number, replica)
        left = sum(each.alive and each.able for each in world.replicas)
        if world.faults and (left > 1 or not replica.able):
            dead = become(world, number, phase="dead", fence=None)
            yield "die", dead._replace(faults=world.faults - 1), ""

    def by_idle(self, world: World, number: int, replica: Replica) -> Ways:
        fence, claims = self.read(world, replica), replica.claims + 1
        if fence is not None:
            read = become(world, number, phase="read", fence=fence, claims=claims)
            yield "read", read, f"{fence.run_time}"
        lock, mine = world.lock, (number, claims)
        if lock is None or not replica.able:
            return
        after = become(world, number, phase="runs", claims=claims)
        taken = lock._replace(claim=mine, lease=world.clock + LEASE)
        if self.is_run_again(world) and self.may_take_over(world):
            after = after._replace(lock=taken._replace(handed_over=False))
            run = world.claimed if lock.manual is None else (MANUAL, lock.manual)
            assert run is not None
            yield "take over", self.begin(after, mine, run), "granted"
        elif world.user and lock.finished and world.job is not None:
            after = after._replace(user=world.user - 1, change=world.change + 1)
            after = after._replace(lock=taken._replace(finished=False, manual=world.change))
            yield "run by hand", self.begin(after, mine, (MANUAL, world.change)), "granted"

    def by_reader(self, world: World, number: int, replica: Replica) -> Ways:
        claim, fence = (number, replica.claims), replica.fence
        assert fence is not None
        after, answer = self.claim(world, claim, fence)
        yield "claim", self.hear(after, claim, fence, answer), answer
        if world.clock > fence.run_time:
            moved, told = self.move_on(world, fence)
            yield "move on", become(moved, number, phase="idle", fence=None), told
        if not world.faults:
            return
        doubt = {"phase": "doubt", "not_after": world.clock}
        faults = world.faults - 1
        yield "claim, answer lost", become(after, number, **doubt)._replace(faults=faults), answer
        flying = (*world.flying, Flying(claim, fence, world.clock))
        held_up = become(world, number, **doubt)
        yield "claim, held up", held_up._replace(flying=flying, faults=faults), ""

    def by_doubtful(self, world: World, number: int, replica: Replica) -> Ways:
        claim, fence = (number, replica.claims), replica.fence
        assert fence is not None
        if world.clock > replica.not_after:
            yield from self.by_refused(world, number, replica)
            return
        after, answer = self.claim(world, claim, fence)
        heard = self.hear(after, claim, fence, answer)
        if answer != "granted":
            if after.lock is not None and after.lock.claim == claim and self.stands(after.lock):
                raise WrongError("its own claim is in its way")
            heard = become(after, number, phase="refused")
        yield "ask again", heard, answer

    def by_refused(self, world: World, number: int, replica: Replica) -> Ways:
        if world.clock > replica.not_after:
            claim = (number, replica.claims)
            handed = self.hand_over(world, claim) if self.hands_over else world
            yield "hand over", become(handed, number, phase="idle", fence=None), ""

    def by_runner(self, world: World, number: int, replica: Replica) -> Ways:
        run = dict(world.runs)[number, replica.claims]
        yield "end", become(world._replace(ended=world.ended | {run}), number, phase="ended"), ""

    def by_releaser(self, world: World, number: int, replica: Replica) -> Ways:
        lock = world.lock
        if lock is not None and lock.claim == (number, replica.claims) and self.stands(lock):
            world = world._replace(lock=lock._replace(finished=True))
        yield "release", become(world, number, phase="idle"), ""

    def hear(self, world: World, claim: ClaimId, fence: Fence, answer: str) -> World:
        if answer != "granted":
            return become(world, claim[0], phase="idle", fence=None)
        assert world.claimed is not None
        run = world.claimed
        if run in world.begun:
            raise WrongError(f"run time {fence.run_time} has begun twice")
        return self.begin(become(world, claim[0], phase="runs"), claim, run)

    def begin(self, world: World, claim: ClaimId, run: tuple[int, int]) -> World:
        running = [n for n, each in enumerate(world.replicas) if each.phase == "runs"]
        if running != [claim[0]]:
            raise WrongError("two runs of the task go on at once")
        if run in world.missed:
            raise WrongError(f"run time {run[1]} has begun, and counts as missed")
        return world._replace(begun=world.begun | {run}, runs=(*world.runs, (claim, run)))

    def may_take_over(self, world: World) -> bool:
        """Tell whether the job is there, and not paused. One that has ended is."""
        if world.paused or self.is_doubted(world):
            return False
        return world.job is not None and (world.job.next is not None or world.job.ended)

    def arrive(self, world: World, flying: Flying) -> tuple[World, str]:
        rest = tuple(each for each in world.flying if each != flying)
        world = world._replace(flying=rest)
        if self.has_not_after and world.clock > flying.not_after:
            return world, "late"
        return self.claim(world, flying.claim, flying.fence)

    def is_urgent(self, world: World, replica: Replica) -> bool:
        """Tell whether a replica acts within this tick: it hands over what nobody waits for."""
        return replica.phase in ("doubt", "refused") and world.clock > replica.not_after

    def tick(self, world: World) -> World:
        return self.renewed(world._replace(clock=world.clock + 1))

    def renewed(self, world: World) -> World:
        lock = world.lock
        if self.stands(lock):
            assert lock is not None
            replica = world.replicas[lock.claim[0]]
            if replica.phase in ("runs", "ended") and replica.claims == lock.claim[1]:
                world = world._replace(lock=lock._replace(lease=world.clock + LEASE))
        return world

    def by_user(self, world: World) -> Iterator[tuple[str, World]]:
        job, number = world.job, world.change
        world = world._replace(user=world.user - 1, change=number + 1)
        if world.lock is not None:
            name = "resume task" if world.paused else "pause task"
            yield name, world._replace(paused=not world.paused)
        if job is None:
            yield "add", world._replace(job=Job(number, number, world.clock))
        elif not job.ended:
            job = job._replace(version=job.version + 1)
            yield "rename", world._replace(job=job._replace(change=number))
            if job.next is None:
                changed = job._replace(added=number, change=number, next=world.clock)
                yield "resume", world._replace(job=changed)
            else:
                yield "pause", world._replace(job=job._replace(change=number, next=None))
            yield "remove", world._replace(job=None)

    # ---- what must come of it ------------------------------------------------------------------

    def check_end(self, world: World) -> None:
        """Let all go on without faults, and look whether something was lost."""
        world = world._replace(faults=0, user=0)
        if not world.believed:
            world = self.renewed(world)._replace(believed=True)
        for _ in range(4):  # after which nothing waits for a lease, or for the end of a claim
            world = self.tick(self.settle(world))
        job = world.job
        if job is None or world.paused or (job.next is None and not job.ended):
            return  # removed, or paused
        if not job.ended:
            raise WrongError(f"run time {job.next} is never run")
        if not (self.failover or all(replica.alive for replica in world.replicas)):
            return  # what dies without failover is not run again
        runs = {(job.added, run_time) for run_time in range(LAST_RUN_TIME + 1)}
        if job.change:
            runs &= {world.claimed} if world.claimed else set()
        self.check_lost(world, runs)

    def check_lost(self, world: World, runs: set[tuple[int, int]]) -> None:
        if lost := runs - world.begun - world.missed:
            raise WrongError(f"{lost} has never begun")
        manual = {run for run in world.begun if run[0] == MANUAL}
        if lost := (runs - world.missed | manual) - world.ended:
            raise WrongError(f"{lost} was begun, and nobody has ended it")

    def settle(self, world: World) -> World:
        """Do all that can be done within a tick."""
        for _ in range(MOST_STEPS):
            ways = [after for step, after in self.steps(world) if step.name not in IDLE]
            if not ways:
                return world
            world = ways[0]
        raise WrongError("what is read is refused, over and over")

    def check_reads(self, world: World) -> None:
        """Look whether a claim right after a read is granted; else it is read over and over."""
        for replica in world.replicas:
            fence = self.read(world, replica)
            if fence is None or not replica.alive:
                continue
            if not (replica.able and self.claim(world, (-1, 0), fence)[1] == "granted"):
                raise WrongError("what is read is refused, over and over")


@dataclass
class Explored:
    """What was gone through.

    :ivar states: how many states
    :ivar paths: how many ways there are from the beginning to a state where nothing can happen
    """

    states: int
    paths: int


def begin(replicas: int, faults: int, user: int, unable: int = 0) -> World:
    """Return the world in the beginning.

    :param unable: how many replicas there are besides that cannot run the job
    """
    able = [n < replicas for n in range(replicas + unable)]
    return World(tuple(Replica(able=each) for each in able), faults, user)


def explore(rule: Rule, beginning: World) -> Explored:
    """Go through all interleavings.

    :raises WrongError: something was lost or doubled
    """
    known: dict[World, int] = {}
    stack: list[tuple[World, list[World] | None]] = [(beginning, None)]
    while stack:
        world, following = stack.pop()
        if following is None:
            if world in known:
                continue
            rule.check_reads(world)
            following = [after for _, after in rule.steps(world)]
            stack.append((world, following))
            stack.extend((after, None) for after in following if after not in known)
        elif world not in known:
            known[world] = sum(known[after] for after in following) or 1
            if not following:
                rule.check_end(world)
    return Explored(len(known), known[beginning])


def way_to(
    rule: Rule, mutated: Rule, beginning: World, names: frozenset[str]
) -> tuple[list[tuple[Step, World, World]], list[tuple[Step, World, World]]]:
    """Return the shortest way to where a mutation makes a difference, and what is done there.

    :param names: of the steps that are taken, but for those in which it makes a difference
    """
    came: dict[World, tuple[Step, World] | None] = {beginning: None}
    waiting = deque([beginning])
    while waiting:
        world = waiting.popleft()
        steps = list(rule.steps(world))
        if (differs := differing(mutated, world, steps)) is not None:
            return _way(came, world), [(step, world, after) for step, after in differs]
        for step, after in steps:
            if step.name in names and after not in came:
                came[after] = step, world
                waiting.append(after)
    raise AssertionError("it makes no difference")


def differing(
    mutated: Rule, world: World, steps: list[tuple[Step, World]]
) -> list[tuple[Step, World]] | None:
    """Return the steps in which a mutation makes a difference; ``None``: in nothing at all."""
    try:
        others = {step for step, _ in mutated.steps(world)}
    except WrongError:
        others = set()
    differs = [(step, after) for step, after in steps if step not in others]
    return differs if differs or others - {step for step, _ in steps} else None


def _way(
    came: dict[World, tuple[Step, World] | None], world: World
) -> list[tuple[Step, World, World]]:
    way = []
    while (last := came[world]) is not None:
        way.append((last[0], last[1], world))
        world = last[1]
    return way[::-1]


@dataclass(frozen=True)
class Mutation:
    """A rule that has one part less, and how many faults and changes it takes to see that."""

    rule: Rule
    faults: int = 1
    user: int = 1


def _unminded(which: str, part: str, **more: Any) -> Rule:
    return Rule(**{f"{which}_minds": ALL - {part}}, **more)


# What each part is there for. Without failover nobody takes over what was forgotten.
MUTATIONS = {
    "a claim's own id is not looked for": Mutation(Rule(looks_for_own_id=False, failover=False)),
    "the fence goes before a claim's own id": Mutation(
        Rule(own_id_goes_first=False, failover=False)
    ),
    "the fence has no run time": Mutation(Rule(fence_has_run_time=False)),
    "the fence has no change": Mutation(Rule(fence_has_change=False)),
    "the fence has the version in place of the change": Mutation(
        Rule(fence_has_change=False, fence_has_version=True), faults=0, user=2
    ),
    "what is missed is moved on without a fence": Mutation(Rule(move_is_fenced=False)),
    "a claim can be granted when nobody waits for it": Mutation(
        Rule(has_not_after=False, failover=False)
    ),
    "a claim is not handed over": Mutation(Rule(hands_over=False, failover=False)),
    "the read does not mind runs": Mutation(_unminded("read", RUNS, failover=False)),
    "the read does not mind deaths": Mutation(_unminded("read", DEATHS)),
    "the read does not mind doubts": Mutation(_unminded("read", BELIEF, failover=False)),
    "the read does not mind pauses": Mutation(_unminded("read", PAUSES)),
    "the read does not mind what cannot be run here": Mutation(_unminded("read", ABLE)),
    "the claim does not mind runs": Mutation(_unminded("claim", RUNS, failover=False)),
    "the claim does not mind doubts": Mutation(_unminded("claim", BELIEF, failover=False)),
    "the claim does not mind pauses": Mutation(_unminded("claim", PAUSES)),
}
# This one takes long to be seen.
RARE = {"the claim does not mind deaths": Mutation(_unminded("claim", DEATHS), faults=2)}
