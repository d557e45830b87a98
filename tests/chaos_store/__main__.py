"""Random faults on replicas that share a job store, and whether they were survived."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psycopg

from apscheduler_tasklock import upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.chaos.application import monotonic_offset
from tests.chaos.fleet import find_faketime
from tests.chaos_store.checker import check
from tests.chaos_store.guard import WATCHES
from tests.chaos_store.ledger import Ledger
from tests.chaos_store.replica import FIXED, FLOATING, PAUSED, PERIOD, STEADY, STEPS, VERSIONS
from tests.chaos_store.slot import Slot, newcomers

OK, FAULTS, NO_CHAOS = 0, 1, 2

# Seconds from one action of a user to the next, and from one fault to the next.
USE, FAULT = (0.05, 0.4), (0.5, 2.5)
# Seconds for which a process is stopped, which is shorter or longer than a lease; and for which
# answers are lost, which is longer than a claim is tried, and shorter than its lease.
STOPPED, MUTE = (0.5, 7.0), 2.4
# Seconds from one restart to the next: while a version is rolled out; and while replicas of two
# versions crash in turn, which is less than any interval of a job.
ROLLING, CRASHING = 1.5, 1.2
# How many such crashes there are; and seconds until the next crashes or the next version, so that
# replicas which take over live for some seconds.
CRASHES, CALM = 6, 3.0
# Seconds by which the machine's clock may be set meanwhile without any harm to the verdict.
CLOCK_SET = 0.02
# Seconds at the end without faults, in which all jobs have to be caught up with.
PEACE = 90.0


class Monkey:
    """Makes users' changes and replicas' faults at random moments of a seed."""

    def __init__(self, rng: random.Random, slots: list[Slot], server: EmbeddedServer) -> None:
        self.done: Counter[str] = Counter()
        self._rng = rng
        self._slots = slots
        self._server = server
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._numbers = iter(range(1_000_000))
        self._doomed: list[str] = []
        self._next_use = self._next_fault = self._rolled_at = time.monotonic()
        self._faults: list[Callable[[Slot], None]] = [
            *[self._kill] * 2,
            *[self._kill_at_step] * 3,
            *[self._stop] * 2,
            *[self._mute] * 4,
            self._cut,
            *[self._new_version] * 3,
            self._crash_loops,
            self._server_restart,
        ]

    def act(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        for at, what in [one for one in self._later if one[0] <= now]:
            self._later.remove((at, what))
            what()
        if now >= self._next_use:
            self._next_use = now + self._rng.uniform(*USE)
            self._use(self._rng.choice(self._slots))
        if now >= self._next_fault:
            self._next_fault = now + self._rng.uniform(*FAULT)
            fault, slot = self._rng.choice(self._faults), self._rng.choice(self._slots)
            if now >= self._rolled_at or fault not in (self._new_version, self._crash_loops):
                self.done[fault.__name__.strip("_").replace("_", " ")] += 1
                fault(slot)
        for slot in self._slots:
            if slot.muted_at is not None and now > slot.muted_at + MUTE:
                self.done["claim without an answer"] += 1
                slot.unmute()
            if slot.process.poll() is not None:  # after a kill at a step, or for a new version
                slot.start()

    def end(self) -> None:
        """Let everything through and go on; jobs that were paused stay so."""
        for slot in self._slots:
            slot.go_on()
            slot.unmute()

    def _use(self, slot: Slot) -> None:
        number = next(self._numbers)
        dice = self._rng.random()
        if dice < 0.6:
            # By this machine's clock, because the replica's own may be wrong.
            at, takes = time.time() + self._rng.uniform(0, 3), self._rng.uniform(0.05, 1)
            slot.tell("add", f"once-{number}", at=at, takes=takes)
        elif dice < 0.8:
            slot.tell("rename", self._rng.choice(STEADY))
        elif dice < 0.9:
            slot.tell(self._rng.choice(["pause", "resume"]), self._rng.choice(PAUSED))
        elif len(self._doomed) < 3:
            self._doomed.append(f"doomed-{number}")
            slot.tell("add recurring", self._doomed[-1])
        else:
            slot.tell("remove", self._doomed.pop(0))

    def _kill(self, slot: Slot) -> None:
        slot.replace()

    def _kill_at_step(self, slot: Slot) -> None:
        slot.tell("die", self._rng.choice([*STEPS, "running"]))

    def _stop(self, slot: Slot) -> None:
        if slot.stopped_at is None:
            slot.stop()
            self._in(self._rng.uniform(*STOPPED), slot.go_on)

    def _mute(self, slot: Slot) -> None:
        slot.mute()

    def _cut(self, slot: Slot) -> None:
        slot.proxy.cut_all()

    def _new_version(self, slot: Slot) -> None:
        """Replace all replicas in turn by those of another version.

        It is the version that this replica does not have, so that each version comes back.
        """
        version = _other(slot.version)
        for number, one in enumerate(self._slots):
            self._in(number * ROLLING, partial(self._roll, one, version))
        self._rolled_at = time.monotonic() + len(self._slots) * ROLLING + CALM

    def _roll(self, slot: Slot, version: int) -> None:
        slot.version = version
        slot.process.terminate()

    def _crash_loops(self, slot: Slot) -> None:
        """Two replicas of two versions die and come back in turn, and declare their jobs."""
        number = self._slots.index(slot)
        other = self._slots[(number + 1) % len(self._slots)]
        other.version = _other(slot.version)
        for turn in range(CRASHES):
            self._in(turn * CRASHING, [slot, other][turn % 2].replace)
        self._rolled_at = time.monotonic() + CRASHES * CRASHING + CALM

    def _server_restart(self, _slot: Slot) -> None:
        self._server.stop(self._rng.choice([signal.SIGINT, signal.SIGQUIT]))
        self._server.start()

    def _in(self, seconds: float, what: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, what))


def _other(version: int) -> int:
    """Return the other version of the application."""
    return next(one for one in VERSIONS if one != version)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chaos; return the exit status: 1 if something was found."""
    options = _parser().parse_args(arguments)
    skewed = not options.no_faketime
    if skewed and find_faketime() is None:
        print(
            "faketime is not installed: apt-get install faketime, or --no-faketime", file=sys.stderr
        )
        return NO_CHAOS
    seed = random.randrange(1_000_000) if options.seed is None else options.seed  # noqa: S311  # no secret
    repeat = f"--seed {seed} --seconds {options.seconds:g} --replicas {options.replicas}"
    repeat += " --no-faketime" if options.no_faketime else ""
    print(f"Chaos of the job store: {repeat}", flush=True)
    with ExitStack() as stack:
        folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(folder / "ledger.jsonl")
        server = stack.enter_context(EmbeddedServer({"max_connections": "100"}, loopback=True))
        upgrade(server.url)
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(WATCHES)
        offset = -monotonic_offset()
        slots: list[Slot] = []
        for number in range(options.replicas):
            comers = newcomers(seed, number, skewed=skewed)
            slots.append(Slot(number, server.url, folder, ledger, comers))
            stack.callback(slots[-1].close)
        monkey = Monkey(random.Random(seed), slots, server)  # noqa: S311  # seeded
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            monkey.act()
            time.sleep(0.02)
        monkey.end()
        stalled = _wait_for_peace(ledger, slots)
        events = ledger.read()
        said = "".join(path.read_text() for path in sorted(folder.glob("replica-*.log")))
        if abs(-monotonic_offset() - offset) > CLOCK_SET:
            print("The machine's clock was set meanwhile: there is no verdict.", file=sys.stderr)
            return NO_CHAOS
        findings = [*stalled, *check(events, server.log, said, offset)]
    kinds = Counter(event.kind for event in events)
    kinds["takeover"] = sum(event.kind == "begin" and event.takeover for event in events)
    kinds["failed change"] = sum(bool(event.error) for event in events)
    for what in (kinds, monkey.done):
        print(", ".join(f"{count} x {kind}" for kind, count in sorted(what.items())))
    for finding in findings[:20]:
        print(finding)
    print(f"{len(findings)} findings" if findings else "no findings")
    return FAULTS if findings else OK


def _wait_for_peace(ledger: Ledger, slots: Sequence[Slot]) -> list[str]:
    """Wait until all that was added has run, and all that comes again is up to date."""
    deadline = time.monotonic() + PEACE
    behind: list[str] = ["never looked"]
    while behind and time.monotonic() < deadline:
        time.sleep(0.5)
        for slot in slots:
            if slot.process.poll() is not None:
                slot.start()
        events = ledger.read()
        ended = {event.task: event.due for event in events if event.kind == "end"}
        behind = [key for key in STEADY if ended.get(key, 0.0) < time.time() - 2 * PERIOD - 1]
        lately = time.time() - 2 * max(VERSIONS) - 1
        behind += [key for key in (FIXED, FLOATING) if ended.get(key, 0.0) < lately]
        behind += [
            e.task for e in events if e.kind == "add" and not e.error and e.task not in ended
        ]
    return [f"{key}: is not up to date after {PEACE:g} s of peace" for key in behind]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos_store", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of faults (%(default)s)")
    parser.add_argument(
        "--seed", type=int, help="of what happens (by default another one each time)"
    )
    parser.add_argument("--replicas", type=int, default=3, help="at a time (%(default)s)")
    parser.add_argument("--no-faketime", action="store_true", help="leave the clocks as they are")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the ledger and the logs there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
