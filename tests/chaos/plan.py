"""The monkey's plan: what is done to whom and when, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.tasks import TASKS

# Seconds of peace at the start, for all replicas to be there, and at the end, for all that was
# begun to be run again.
PEACE_BEFORE, PEACE_AFTER = 4.0, 9.0

# Seconds from one fault to the next, on average.
PAUSE = 1.3

# How often each fault comes, and how long it lasts, at least and at most.
FAULTS: dict[str, tuple[float, tuple[float, float]]] = {
    "kill": (3, (0.3, 3.0)),  # until another replica joins
    "stop": (4, (0.2, 8.0)),
    "hang": (2, (0.2, 6.0)),  # what is sent arrives late
    "swallow": (2, (0.2, 6.0)),  # what is sent never arrives
    "cut": (3, (0.0, 0.0)),
    "terminate": (2, (0.0, 0.0)),
    "leave": (1, (0.3, 3.0)),  # a graceful end; until another replica joins
    "restart fast": (0.6, (0.0, 4.0)),
    "restart immediate": (0.6, (0.0, 4.0)),
}

LARGEST_SKEW = 180.0
LARGEST_OFFSET = 2.0


@dataclass(frozen=True)
class Newcomer:
    """How a replica starts.

    :ivar offset: seconds by which its schedule is behind
    :ivar skew: seconds by which its clock is ahead
    """

    offset: float
    skew: float


@dataclass(frozen=True)
class Action:
    """A fault.

    :ivar at: seconds from the start
    :ivar aim: whose: the replica that runs this task at that moment
    :ivar slot: if there is none, the one in this place of the fleet; a restart concerns all
    :ivar lasts: seconds
    :ivar newcomer: who joins in place of a replica that goes
    """

    at: float
    kind: str
    aim: str
    slot: int
    lasts: float
    newcomer: Newcomer


@dataclass(frozen=True)
class Plan:
    """All that is random."""

    first: Sequence[Newcomer]
    actions: Sequence[Action]


def draw(seed: int, seconds: float, replicas: int, *, skewed: bool) -> Plan:
    """Draw a plan. The same arguments give the same one.

    :param skewed: whether replicas' clocks differ
    """
    dice = random.Random(seed)  # noqa: S311  # repeatable, not secret
    first = [_newcomer(dice, skewed) for _ in range(replicas)]
    actions = []
    at = PEACE_BEFORE
    while (at := at + dice.expovariate(1 / PAUSE)) < seconds - PEACE_AFTER:
        kinds, weights = list(FAULTS), [weight for weight, _ in FAULTS.values()]
        kind = dice.choices(kinds, weights)[0]
        lasts = min(dice.uniform(*FAULTS[kind][1]), seconds - PEACE_AFTER - at)
        aim, slot = dice.choice(TASKS).name, dice.randrange(replicas)
        actions.append(Action(at, kind, aim, slot, lasts, _newcomer(dice, skewed)))
    return Plan(first, actions)


def _newcomer(dice: random.Random, skewed: bool) -> Newcomer:
    offset, skew = dice.uniform(0, LARGEST_OFFSET), dice.uniform(-LARGEST_SKEW, LARGEST_SKEW)
    right = dice.random() < 0.3
    return Newcomer(round(offset, 3), 0.0 if right or not skewed else round(skew, 3))
