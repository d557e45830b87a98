"""A history, sorted by what it tells of: runs, claims, fires, and the replicas' troubles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from tests.chaos.history import Event


@dataclass
class Run:
    """A job that ran, as it told itself.

    :ivar due: its run time
    :ivar begun: when it began
    :ivar believed: when it last asked whether its lock was lost, and was told no; ``None``: never
    :ivar ended: when it ended; ``None`` if it did not live so long
    """

    task: str
    replica: str
    token: int
    due: float
    takeover: bool
    begun: float
    believed: float | None = None
    ended: float | None = None

    def __str__(self) -> str:
        how = "takeover" if self.takeover else "run"
        return f"{how} of token {self.token} on {self.replica}, begun {self.begun:.3f}"


@dataclass
class Claim:
    """A claim, as the task lock table shows it.

    :ivar at: when it was granted
    :ivar window: where its window starts
    :ivar renewed: when it was last renewed, or granted
    :ivar until: when it ends if it is not renewed again
    :ivar released: when it was; ``None`` if never
    :ivar kept: whether its window stayed taken then
    """

    task: str
    replica: str
    token: int
    at: float
    window: float
    renewed: float
    until: float
    released: float | None = None
    kept: bool = True

    def stands(self, at: float) -> bool:
        """Tell whether it is granted, and neither released nor ended."""
        return self.at <= at < min(self.until, inf if self.released is None else self.released)

    def is_dead(self, at: float) -> bool:
        """Tell whether it has ended without a release."""
        return self.until <= at and (self.released is None or self.released > at)

    def __str__(self) -> str:
        return f"claim of token {self.token} by {self.replica}, granted {self.at:.3f}"


@dataclass(frozen=True)
class Stretch:
    """A stretch of time."""

    begun: float
    ended: float

    def shared_with(self, begun: float, ended: float) -> float:
        """Return how many seconds it has in common with another one."""
        return max(0.0, min(self.ended, ended) - max(self.begun, begun))


# A replica that is stopped or dead; that does not reach the server; whose connections broke at a
# moment, which it should survive.
PROCESS, PATH, BLIP = "P", "N", "B"
UNABLE, ANY = PROCESS + PATH, PROCESS + PATH + BLIP


@dataclass(frozen=True)
class Trouble(Stretch):
    """When a replica could not do as usual.

    :ivar kind: one of the letters above
    """

    kind: str


class Records:
    """A history, sorted.

    :param events: in any order, but for the rows of tables, which are in the order of the tables
    :ivar runs: by task, in the order in which they began
    :ivar claims: by task, in the order in which they were granted
    :ivar claim_of: the last claim with a token, by task and token
    :ivar writes: accepted ones, by task, in the order of acceptance
    :ivar fires: of the replicas' schedulers
    :ivar lives: by replica, from the start of its scheduler until it ends or is told to
    :ivar skips: fires whose claims were given up, because the database was away
    :ivar died: replicas that ended on their own
    :ivar errors: what they logged as errors
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.runs: dict[str, list[Run]] = defaultdict(list)
        self.claims: dict[str, list[Claim]] = defaultdict(list)
        self.claim_of: dict[str, dict[int, Claim]] = defaultdict(dict)
        self.writes: dict[str, list[Event]] = defaultdict(list)
        self.fires: list[Event] = []
        self.lives: dict[str, Stretch] = {}
        self.skips: list[Event] = []
        self.died = [event for event in events if event.kind == "died"]
        self.errors = [event for event in events if event.kind == "erred"]
        self._open: dict[tuple[str, str, int], Run] = {}
        # Stable: of one moment, what was written first happened first.
        ordered = sorted(events, key=lambda event: event.at)
        for event in ordered:
            self._take_in(event)
        for event in events:  # not by time: a row's time is from before it waited for its turn
            if event.kind == "written":
                self.writes[event.task].append(event)
            elif event.kind in ("claimed", "renewed", "released"):
                self._take_in_claim(event)
        self._live(ordered)
        self._troubles = _troubles(ordered, self.lives)

    def troubles(self, replica: str, kinds: str = UNABLE) -> Iterator[Trouble]:
        """Yield when a replica was not able to do as usual."""
        for trouble in self._troubles[replica]:
            if trouble.kind in kinds:
                yield trouble

    def well(self, replica: str, begun: float, ended: float, kinds: str = UNABLE) -> bool:
        """Tell whether a replica lived, and had no such trouble, in a stretch of time."""
        life = self.lives.get(replica)
        if life is None or begun < life.begun or ended > life.ended:
            return False
        return not any(
            trouble.begun <= ended and begun <= trouble.ended
            for trouble in self.troubles(replica, kinds)
        )

    def _take_in(self, event: Event) -> None:
        if event.kind == "fire":
            self.fires.append(event)
        elif event.kind == "skipped":
            self.skips.append(event)
        elif event.kind in ("begin", "holds", "end"):
            self._take_in_run(event)

    def _take_in_claim(self, event: Event) -> None:
        assert event.until is not None
        if event.kind == "claimed":
            assert event.due is not None
            claim = Claim(
                event.task, event.replica, event.token, event.at, event.due, event.at, event.until
            )
            self.claims[event.task].append(claim)
            self.claim_of[event.task][event.token] = claim
            return
        claim = self.claim_of[event.task][event.token]
        if event.kind == "renewed":
            claim.renewed, claim.until = event.at, event.until
        else:
            claim.released, claim.kept = event.at, event.kept

    def _take_in_run(self, event: Event) -> None:
        key = (event.task, event.replica, event.token)
        if event.kind == "begin":
            due = event.at if event.due is None else event.due
            run = Run(event.task, event.replica, event.token, due, event.takeover, event.at)
            self._open[key] = run
            self.runs[event.task].append(run)
        run = self._open[key]
        if not event.lost:
            run.believed = event.at
        if event.kind == "end":
            run.ended = event.at

    def _live(self, ordered: Sequence[Event]) -> None:
        ready = {event.replica: event.at for event in ordered if event.kind == "ready"}
        closing = [event.at for event in ordered if event.kind == "closing"]
        last = ordered[-1].at if ordered else 0.0
        gone = {
            event.replica: event.at
            for event in reversed(ordered)
            if event.kind in ("killed", "leaving", "died")
        }
        for replica, begun in ready.items():
            ended = min(gone.get(replica, inf), *closing, last)
            self.lives[replica] = Stretch(begun, ended)


_LASTING = {
    "killed": ("", PROCESS),
    "stopped": ("continued", PROCESS),
    "hung": ("freed", PATH),
    "down": ("up", PATH),
}


def _troubles(ordered: Sequence[Event], lives: dict[str, Stretch]) -> dict[str, list[Trouble]]:
    found: dict[str, list[Trouble]] = defaultdict(list)
    for number, event in enumerate(ordered):
        if event.kind == "stalled":
            assert event.until is not None
            trouble = Trouble(event.at, event.until, PROCESS)
        elif event.kind in _LASTING:
            end, kind = _LASTING[event.kind]
            trouble = Trouble(event.at, _end(ordered[number:], end), kind)
        elif event.kind in ("cut", "terminated"):
            trouble = Trouble(event.at, event.at, BLIP)
        else:
            continue
        for replica in [event.replica] if event.replica else list(lives):
            found[replica].append(trouble)
    return found


def _end(events: Sequence[Event], kind: str) -> float:
    """Return when what the first event began was over."""
    replica = events[0].replica
    ends = (event.at for event in events if (event.kind, event.replica) == (kind, replica))
    return next(ends, inf)
