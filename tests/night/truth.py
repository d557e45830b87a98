"""The truth of the night, put together from the ledger that jobs and conductor have written.

Nothing here comes from a row. An event of a run is written after its claim and before its release,
so what the ledger says of a time is certain, but for what happened around that very time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from apscheduler_tasklock.demo.history import Event
from tests.night.plan import BY_TASK


@dataclass(eq=False)
class TrueRun:
    """A run of a job.

    :ivar claimed: when its replica was told that its claim was granted
    :ivar begun: when the job began
    :ivar ended: when the job ended
    :ivar released: when its replica was told that it was released
    :ivar died: when its replica was killed before the run was released
    :ivar how: ``"ok"``, ``"error"`` or ``"cut"``; ``""`` if the job has not ended
    :ivar told: the outcome that the release reported
    :ivar hung: when it was told to hang
    :ivar lost: when its replica was told that its lock is lost
    :ivar freed: when an operator had freed it
    """

    task: str
    replica: str
    token: int
    due: float | None = None
    claimed: float | None = None
    begun: float | None = None
    ended: float | None = None
    released: float | None = None
    died: float | None = None
    how: str = ""
    told: str = ""
    takeover: bool = False
    attempt: int = 1
    hung: float | None = None
    lost: float | None = None
    freed: float | None = None

    @property
    def cut_off(self) -> bool:
        """Whether its replica was told that the lock is lost, or the run hung."""
        return self.lost is not None or self.hung is not None

    @property
    def first_sign(self) -> float:
        """When the ledger knew of it first."""
        return min(at for at in (self.claimed, self.begun, inf) if at is not None)

    @property
    def over(self) -> float:
        """When its job ended or its replica was killed; ``inf`` for neither."""
        return min(at for at in (self.ended, self.died, inf) if at is not None)

    def goes_on(self, at: float) -> bool:
        """Return whether its job went on at a time, as far as the ledger knows."""
        return self.begun is not None and self.begun < at < self.over


@dataclass
class TruePause:
    """A pause of one task, or of all of them: ``"*"``.

    :ivar asked: when it was asked for
    :ivar since: when it was done
    :ivar end_asked: when its end was asked for, or when it ends by itself
    :ivar until: when its end was done
    """

    task: str
    by: str
    reason: str
    asked: float
    since: float
    end_asked: float = inf
    until: float = inf

    def holds(self, at: float) -> bool:
        """Return whether it surely held at a time."""
        return self.since < at < self.end_asked

    def may_hold(self, at: float) -> bool:
        """Return whether it may have held at a time."""
        return self.asked <= at <= self.until


@dataclass
class TrueReplica:
    """A replica.

    :ivar started: when its scheduler was started
    :ivar ready: when its scheduler ran
    :ivar stopping: when it began to stop in good order
    :ivar killed: when it was killed; ``dying``: when that began
    :ivar stopped: when its scheduler had stopped
    """

    name: str
    release: str = ""
    started: float = inf
    ready: float = inf
    terminated: float = inf
    stopping: float = inf
    dying: float = inf
    killed: float = inf
    stopped: float = inf
    led: list[float] = field(default_factory=list)

    def lives(self, at: float) -> bool:
        """Return whether it surely lived at a time, and was not told to stop."""
        return self.ready < at < min(self.terminated, self.dying)

    @property
    def over(self) -> float:
        """When it was no longer there."""
        return min(self.killed, self.stopped)


# The times of a run, by the kinds of events.
_TIMES = {
    "claimed": "claimed",
    "begin": "begun",
    "hangs": "hung",
    "end": "ended",
    "cut": "ended",
    "released": "released",
}


class Truth:
    """What happened in the night."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda event: event.at)
        self.runs: dict[tuple[str, int], TrueRun] = {}
        self.replicas: dict[str, TrueReplica] = {}
        self.pauses: list[TruePause] = []
        self.outages: list[tuple[float, float]] = []
        self.begin = 0.0
        self.done: list[Event] = []
        for event in self.events:
            self._add(event)
        for run in self.runs.values():
            killed = self.replicas[run.replica].killed
            if run.released is None and killed < inf:
                run.died = killed

    def _add(self, event: Event) -> None:
        if event.task in BY_TASK and event.token and event.replica:
            self._add_to_run(event)
        elif event.replica:
            self._add_to_replica(event)
        else:
            self._add_to_all(event)
        self.done.append(event)

    def _add_to_all(self, event: Event) -> None:
        match event.kind:
            case "begin of the night":
                self.begin = float(event.due)
            case "outage":
                self.outages.append((event.at, inf))
            case "outage over":
                self.outages[-1] = self.outages[-1][0], event.at
            case "paused":
                by, _, reason = event.detail.partition(": ")
                asked, lasts = self._asked(event), inf if event.until is None else event.until
                ends = asked + lasts, event.at + lasts
                self.pauses.append(TruePause(event.task, by, reason, asked, event.at, *ends))
            case "freed":
                self.of_task(event.task)[-1].freed = event.at
            case "resumed":
                self._end_pauses(event)

    def _end_pauses(self, event: Event) -> None:
        for pause in self.pauses:
            is_its = (pause.task, pause.by) == (event.task, event.detail)
            if is_its and pause.end_asked > event.at:
                pause.end_asked, pause.until = self._asked(event), event.at

    def _asked(self, event: Event) -> float:
        """Return when something was asked for that was done."""
        return [each.at for each in self.done if each.kind == f"{event.kind} asked"][-1]

    def _add_to_run(self, event: Event) -> None:
        if event.kind not in _TIMES or event.detail in ("died", "overran"):
            self._add_loss(event)
            return
        key = event.task, event.token
        run = self.runs.setdefault(key, TrueRun(event.task, event.replica, event.token))
        if run.replica != event.replica:
            raise AssertionError(f"two replicas have the token {event.token} of {event.task}")
        setattr(run, _TIMES[event.kind], event.at)
        match event.kind:
            case "claimed" if event.detail != "takeover":
                run.due = event.due
            case "begin":
                run.due, run.takeover = event.due, event.takeover
                run.attempt = int(event.detail.removeprefix("attempt "))
            case "end":
                run.how = "error" if event.error else "ok"
            case "cut":
                run.how = "cut"
            case "released":
                run.told = event.detail

    def _add_loss(self, event: Event) -> None:
        """Note that a run has lost its lock, or was found dead by another replica."""
        run = self.runs.get((event.task, event.token))
        is_told = event.kind == "lost" or event.detail in ("died", "overran")
        if is_told and run is not None and run.replica == event.replica:
            run.lost = event.at

    def _add_to_replica(self, event: Event) -> None:
        replica = self.replicas.setdefault(event.replica, TrueReplica(event.replica))
        match event.kind:
            case "started":
                replica.started, replica.release = event.at, event.detail
            case "killing":
                replica.dying = event.at
            case "ready" | "killed" | "stopped" | "stopping" | "terminated":
                setattr(replica, event.kind, event.at)
            case "leads":
                replica.led.append(event.at)

    # ---- questions

    def of_task(self, task: str) -> list[TrueRun]:
        """Return a task's runs by their tokens."""
        found = [run for run in self.runs.values() if run.task == task]
        return sorted(found, key=lambda run: run.token)

    def known_until(self, task: str, token: int) -> list[TrueRun]:
        """Return a task's runs up to that of a token."""
        return [run for run in self.of_task(task) if run.token <= token]

    def pauses_of(self, task: str) -> list[TruePause]:
        """Return a task's pauses, also those of all tasks."""
        return [pause for pause in self.pauses if pause.task in (task, "*")]

    def in_outage(self, since: float, until: float, margin: float = 5.0) -> bool:
        """Return whether the database was away at some time of a span."""
        return any(begin - margin <= until and since <= end + margin for begin, end in self.outages)

    def failures(self, task: str, token: int) -> int:
        """Return how many run times in a row have failed, as of the run of a token.

        A run time counts once, at its first failed attempt. The last run counts if it is over.
        """
        count, failed = 0, set[float | None]()
        for run in self.known_until(task, token):
            if run.how == "ok" and run.released is not None:
                count, failed = 0, set()
            elif run.how == "error" or (run.died is not None and not run.how):
                count += run.due not in failed
                failed.add(run.due)
        return count
