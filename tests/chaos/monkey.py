"""The monkey: carries the plan out, and notes what it did and when."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush
from itertools import count

import psycopg

from apscheduler_tasklock.demo.history import Event
from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.chaos import history
from tests.chaos.application import connect
from tests.chaos.fleet import Fleet, Member, Slot
from tests.chaos.history import ALONE, POOL
from tests.chaos.plan import LATE_BY, NEAR_SKEW, POOL_FAULTS, Action, Plan

_TERMINATE = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE application_name = %(name)s
"""

# Seconds before an action at which the processes of its newcomers are started.
AHEAD = 7.0

# Seconds after an action at which newcomers that did not join are let go: the action had no aim.
UNUSED = 45.0

# Seconds for which a fault of a pool waits for a worker that runs something, and between two looks.
_WORKER_WAIT, _WORKER_PAUSE = 4.0, 0.05

# The number of the last events in which it looks for runs that are going on.
_RECENT = 5000


class Monkey:
    """Does one thing after the other, in the thread that started the processes.

    :param history: the events so far, to which it adds its own
    :ivar done: how often it did each kind of action
    """

    def __init__(
        self, plan: Plan, fleet: Fleet, server: EmbeddedServer, history: list[Event]
    ) -> None:
        self.done: Counter[str] = Counter()
        self._fleet = fleet
        self._server = server
        self._history = history
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._plan = plan
        self._first_ones: list[Member] = []
        self._waiting: dict[int, list[Member]] = {}
        self._down = self._slow = False

    def prepare(self) -> None:
        """Start the processes of the first replicas."""
        self._first_ones = [self._fleet.prepare(newcomer) for newcomer in self._plan.first]

    def begin(self, started: float) -> None:
        """Let the first replicas begin, and put the plan on the agenda."""
        for slot, member in zip(self._fleet.slots, self._first_ones, strict=True):
            self._fleet.begin(slot, member)
        for action in self._plan.actions:
            self._later(started + action.at - AHEAD, partial(self._get_ready, action))
            self._later(started + action.at, partial(self._do, action))
            over_at = started + action.at + action.lasts
            self._later(over_at + UNUSED, partial(self._let_go, action))

    def _get_ready(self, action: Action) -> None:
        """Start the processes of those that an action lets join."""
        self._waiting[id(action)] = [self._fleet.prepare(one) for one in action.newcomers]

    def _let_go(self, action: Action) -> None:
        for member in self._waiting.pop(id(action)):
            member.leave()

    def act(self) -> None:
        """Do what is due."""
        while self._agenda and self._agenda[0][0] <= time.monotonic():
            heappop(self._agenda)[2]()

    def _later(self, at: float, what: Callable[[], None]) -> None:
        heappush(self._agenda, (at, next(self._order), what))

    def _after(self, action: Action, what: Callable[[], None]) -> None:
        self._later(time.monotonic() + action.lasts, what)

    def _do(self, action: Action) -> None:
        if action.kind == "mute claim":
            self._mute_claim(action)
            return
        if action.kind == "replace others":
            self._replace_others(action)
            return
        if action.kind in POOL_FAULTS:
            self._act_on_pool(action, time.monotonic() + _WORKER_WAIT)
            return
        self._act_at(action, self._holder_of(action.aim) or self._fleet.slots[action.slot])

    def _act_at(self, action: Action, slot: Slot) -> None:
        member = slot.member
        if member is None or not member.alive or (member.stopped and action.kind != "kill"):
            return  # because it is gone already, or stopped
        if self._act_on(action, slot, member):
            self.done[action.kind] += 1

    def _holder_of(self, task: str) -> Slot | None:
        """Return the slot of the replica that runs a task; ``None`` if no living one does."""
        ended: set[tuple[str, int]] = set()
        for event in reversed(self._history[-_RECENT:]):
            if event.task == task and event.kind in ("end", "cut"):
                ended.add((event.replica, event.token))
            if event.task == task and event.kind == "begin":
                if (event.replica, event.token) in ended:
                    return None
                return self._slot_of(event.replica)
        return None

    def _slot_of(self, replica: str) -> Slot | None:
        """Return where a replica is; ``None`` if it is there no more."""
        name = replica.removesuffix(POOL)
        return next((s for s in self._fleet.slots if s.member and s.member.name == name), None)

    def _running_workers(self) -> Iterator[tuple[Slot, Event]]:
        """Yield the runs that go on in worker processes of living replicas, the latest first."""
        ended: set[tuple[str, str, int]] = set()
        killed: set[int] = set()
        for event in reversed(self._history[-_RECENT:]):
            run = (event.replica, event.task, event.token)
            if event.kind in ("end", "cut"):
                ended.add(run)
            elif event.kind == "worker killed":
                killed.add(event.worker)
            elif (
                event.kind == "begin"
                and event.worker
                and not (run in ended or event.worker in killed)
            ):
                slot = self._slot_of(event.replica)
                if slot and slot.member and slot.member.alive and not slot.member.stopped:
                    yield slot, event

    def _act_on_pool(self, action: Action, until: float) -> None:
        """Do something to the worker process that runs a task, or to its replica.

        If none runs it for long, to another one that runs something.

        :param until: when not to wait for a run any more
        """
        running = list(self._running_workers())
        aimed = [one for one in running if one[1].task == action.aim]
        late = time.monotonic() > until - _WORKER_WAIT / 2
        slot, run = next(iter(aimed or (running if late else [])), (None, None))
        if time.monotonic() < until and run is None:
            again = partial(self._act_on_pool, action, until)
            self._later(time.monotonic() + _WORKER_PAUSE, again)
        elif not action.kind.endswith("worker"):
            self._act_at(action, slot or self._fleet.slots[action.slot])
        elif slot is not None and run is not None:
            self._act_on_worker(action, slot, run)

    def _act_on_worker(self, action: Action, slot: Slot, run: Event) -> None:
        member = slot.member
        assert member is not None
        if action.kind == "kill worker":
            # Noted before the kill, so that what it does until it is gone is no finding.
            self._note_worker("worker killed", run)
            member.signal_worker(run.worker, signal.SIGKILL)
        else:
            self._note_worker("worker stopped", run)
            member.signal_worker(run.worker, signal.SIGSTOP)
            self._after(action, partial(self._continue_worker, member, run))
        self.done[action.kind] += 1

    def _continue_worker(self, member: Member, run: Event) -> None:
        # Noted also if the worker is gone, because then it is not stopped any more.
        member.signal_worker(run.worker, signal.SIGCONT)
        self._note_worker("worker continued", run)

    def _note_worker(self, kind: str, run: Event) -> None:
        self._history.append(Event(time.monotonic(), kind, run.replica, worker=run.worker))

    def _mute_claim(self, action: Action) -> None:
        """Lose the answer of the replica that claims a task first, which has the fastest clock."""
        near = {
            number: slot.member.newcomer.skew
            for number, slot in enumerate(self._fleet.slots)
            if slot.member and slot.member.alive and abs(slot.member.newcomer.skew) <= NEAR_SKEW
        }
        slot = self._fleet.slots[max(near, key=near.__getitem__, default=0)]
        member = slot.member
        if member is not None and not slot.disturbed:
            slot.mute_after_claim(action.aim, lambda: self._note_path("hung", slot, "mute"))
            self.done[action.kind] += 1
            self._after(action, lambda: self._free(slot))

    def _act_on(self, action: Action, slot: Slot, member: Member) -> bool:
        match action.kind:
            case "kill" | "kill parent":
                self._kill(action, slot, member)
            case "leave" | history.END_GROUP:
                self._leave(action, slot, member)
            case "stop" | "stop parent":
                self._note("stopped", member)
                member.signal(signal.SIGSTOP)
                self._after(action, lambda: self._continue(member))
            case "hang" | "swallow" | "mute":
                return self._disturb(action, slot, member)
            case "cut":
                self._note_path("cut off", slot)
                slot.proxy.cut_all()
            case "terminate":
                self._terminate(member)
            case "stall":
                return self._stall(action)
            case _:
                return self._restart(action)
        return True

    def _kill(self, action: Action, slot: Slot, member: Member) -> None:
        # Noted before the kill, so that what it does until it is gone is no finding.
        alone = action.kind == "kill parent"
        self._note("killed", member, ALONE if alone else action.kind)
        member.kill(alone=alone)
        self._after(action, lambda: self._join(slot, action))

    def _leave(self, action: Action, slot: Slot, member: Member) -> None:
        self._note("leaving", member, action.kind)
        member.leave(group=action.kind == history.END_GROUP)
        self._after(action, lambda: self._join(slot, action))

    def _replace_others(self, action: Action) -> None:
        """Replace all replicas that do not run a task, if one runs it."""
        holder = self._holder_of(action.aim)
        for slot in self._fleet.slots if holder else ():
            member = slot.member
            if slot is not holder and member and member.alive and not member.stopped:
                self._leave(action, slot, member)
                self.done["leave"] += 1

    def _join(self, slot: Slot, action: Action) -> None:
        member = self._waiting[id(action)].pop()
        self._fleet.begin(slot, member)
        self.done["join"] += 1
        if slot.disturbed:
            self._note("hung", member, slot.disturbed)

    def _continue(self, member: Member) -> None:
        if member.process.poll() is None:
            member.signal(signal.SIGCONT)
            self._note("continued", member)

    def _disturb(self, action: Action, slot: Slot, member: Member) -> bool:
        if slot.disturbed:
            return False
        self._note_path("hung", slot, action.kind)
        {"hang": slot.hang, "swallow": slot.swallow, "mute": slot.mute}[action.kind]()
        self._after(action, lambda: self._free(slot))
        return True

    def _free(self, slot: Slot) -> None:
        slot.free()
        # The present replica is noted, because a newcomer is behind the same proxy.
        self._note_path("freed", slot)

    def _terminate(self, member: Member) -> None:
        try:
            with connect(self._server.url) as connection:
                self._note("terminated", member)
                connection.execute(_TERMINATE, {"name": f"tasklock {member.name}"})
        except psycopg.OperationalError:
            pass

    def _stall(self, action: Action) -> bool:
        if self._slow:
            return False
        self._event("slowed")
        self._be_late(LATE_BY)
        self._after(action, lambda: self._be_late(0.0))
        # Later by as much as answers are late that are on their way.
        self._later(time.monotonic() + action.lasts + LATE_BY, self._be_quick)
        return True

    def _be_late(self, seconds: float) -> None:
        self._slow = True
        for slot in self._fleet.slots:
            slot.late_by = seconds

    def _be_quick(self) -> None:
        self._slow = False
        self._event("quick")

    def _restart(self, action: Action) -> bool:
        if self._down:
            return False
        self._down = True
        self._event("down", detail=action.kind)
        how = signal.SIGINT if action.kind.endswith("fast") else signal.SIGQUIT
        self._server.stop(how)
        self._after(action, self._start_server)
        return True

    def _start_server(self) -> None:
        self._server.start()
        self._down = False
        self._event("up")

    def _note(self, kind: str, member: Member, detail: str = "") -> None:
        self._event(kind, member.name, detail)

    def _note_path(self, kind: str, slot: Slot, detail: str = "") -> None:
        """Note an event of the path of the replica that is behind a proxy."""
        if slot.member is not None:
            self._note(kind, slot.member, detail)

    def _event(self, kind: str, replica: str = "", detail: str = "") -> None:
        self._history.append(Event(time.monotonic(), kind, replica, detail=detail))
