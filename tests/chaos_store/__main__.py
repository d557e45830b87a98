"""Random faults on replicas that share a job store, and whether they were survived."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psycopg

from apscheduler_tasklock import upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer
from tests.chaos_store.checker import check
from tests.chaos_store.ledger import Ledger
from tests.chaos_store.replica import PAUSED, PERIOD, STEADY, STEPS, command
from tests.support.proxy import Proxy, pass_on
from tests.support.stored_jobs import GUARD

OK, FAULTS = 0, 1

# Seconds from one thing that users do to the next, and from one fault to the next.
USE, FAULT = (0.05, 0.4), (0.5, 2.5)
# Seconds for which a process is stopped, shorter and longer than a hand-out; and for which answers
# are lost: longer than a claim is tried, and so short that its lease has not ended by then.
STOPPED, MUTE = (0.5, 7.0), 2.4
# Seconds of peace at the end, in which all has to be caught up with.
PEACE = 90.0


class Slot:
    """A place for one replica after the other, with a proxy before the database."""

    def __init__(self, number: int, url: str, folder: Path, ledger: Ledger) -> None:
        self.proxy = Proxy(url)
        self.generation = 0
        self.stopped_at: float | None = None
        self.muted_at: float | None = None
        self._number = number
        self._folder = folder
        self._ledger = ledger
        self.start()

    def start(self) -> None:
        """Start a replica."""
        self.generation += 1
        self.name = f"replica-{self._number}.{self.generation}"
        with (self._folder / f"{self.name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                command(self.name, str(self._ledger.path)),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                env={**os.environ, "DATABASE_URL": self.proxy.url},
            )

    def tell(self, kind: str, key: str, **details: float) -> None:
        """Let the replica do something, if it lives."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"kind": kind, "key": key, **details}) + "\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        """Stop the process, as a container is frozen."""
        self.stopped_at = time.monotonic()
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        if self.stopped_at is not None:
            self._ledger.write("stop", self.stopped_at, replica=self.name, until=time.monotonic())
            self.stopped_at = None
            self.process.send_signal(signal.SIGCONT)

    def replace(self) -> None:
        """Kill the replica, and start a new one."""
        self.go_on()
        self.process.kill()
        self.process.wait()
        self.start()

    def mute(self) -> None:
        """Lose the answer to the next claim, and all after it."""
        name = self.name.encode()

        def watch(data: bytes) -> bytes:
            names_job = any(part in data for part in (b"steady-", b"once-"))
            # A look names jobs too, and a user's change.
            is_other = any(part in data for part in (b'"free"', b"misfire"))
            if name in data and names_job and not is_other:
                self.proxy.to_client = lambda _data: b""
                self.muted_at = self.muted_at or time.monotonic()
            return data

        self.proxy.to_server = watch

    def unmute(self) -> None:
        """Let answers through again, on new connections."""
        self.muted_at = None
        self.proxy.to_server = self.proxy.to_client = pass_on
        self.proxy.cut_all()

    def close(self) -> None:
        """End the replica and the proxy."""
        self.go_on()
        self.process.kill()
        self.process.wait()
        self.proxy.close()


class Monkey:
    """Does what users do, and what befalls replicas, at random moments of a seed."""

    def __init__(self, rng: random.Random, slots: list[Slot], server: EmbeddedServer) -> None:
        self.done: Counter[str] = Counter()
        self._rng = rng
        self._slots = slots
        self._server = server
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._numbers = iter(range(1_000_000))
        self._doomed: list[str] = []
        self._next_use = self._next_fault = time.monotonic()
        self._faults: list[Callable[[Slot], None]] = [
            *[self._kill] * 2,
            *[self._kill_at_step] * 3,
            *[self._stop] * 2,
            *[self._mute] * 4,
            self._cut,
            self._restart,
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
            fault = self._rng.choice(self._faults)
            self.done[fault.__name__.strip("_").replace("_", " ")] += 1
            fault(self._rng.choice(self._slots))
        for slot in self._slots:
            if slot.muted_at is not None and now > slot.muted_at + MUTE:
                self.done["claim without an answer"] += 1
                slot.unmute()
            if slot.process.poll() is not None:  # at a step
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
            after, takes = self._rng.uniform(0, 3), self._rng.uniform(0.05, 1)
            slot.tell("add", f"once-{number}", after=after, takes=takes)
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

    def _restart(self, _slot: Slot) -> None:
        """A rolling restart: one replica after the other ends in order."""
        for number, slot in enumerate(self._slots):
            self._in(number * 1.5, slot.process.terminate)

    def _server_restart(self, _slot: Slot) -> None:
        self._server.stop(self._rng.choice([signal.SIGINT, signal.SIGQUIT]))
        self._server.start()

    def _in(self, seconds: float, what: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, what))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chaos; return the exit status: 1 if something was found."""
    options = _parser().parse_args(arguments)
    seed = random.randrange(1_000_000) if options.seed is None else options.seed  # noqa: S311  # no secret
    repeat = f"--seed {seed} --seconds {options.seconds:g} --replicas {options.replicas}"
    print(f"Chaos of the job store: {repeat}", flush=True)
    with ExitStack() as stack:
        folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(folder / "ledger.jsonl")
        server = stack.enter_context(EmbeddedServer({"max_connections": "100"}))
        upgrade(server.url)
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(GUARD)
        slots = []
        for number in range(options.replicas):
            slots.append(Slot(number, server.url, folder, ledger))
            stack.callback(slots[-1].close)
        monkey = Monkey(random.Random(seed), slots, server)  # noqa: S311  # seeded
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            monkey.act()
            time.sleep(0.02)
        monkey.end()
        stalled = _wait_for_peace(ledger, slots)
        entries = ledger.read()
        said = "".join(path.read_text() for path in sorted(folder.glob("replica-*.log")))
        findings = [*stalled, *check(entries, server.log, said)]
    kinds = Counter(entry.kind for entry in entries)
    kinds["takeover"] = sum(entry.kind == "begin" and entry.is_takeover for entry in entries)
    kinds["failed change"] = sum(bool(entry.error) for entry in entries)
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
        entries = ledger.read()
        ended = {entry.key: entry.run_time for entry in entries if entry.kind == "end"}
        behind = [key for key in STEADY if ended.get(key, 0.0) < time.time() - 2 * PERIOD - 1]
        behind += [e.key for e in entries if e.kind == "add" and not e.error and e.key not in ended]
    return [f"{key}: is not up to date after {PEACE:g} s of peace" for key in behind]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos_store", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of faults (%(default)s)")
    parser.add_argument(
        "--seed", type=int, help="of what happens (by default another one each time)"
    )
    parser.add_argument("--replicas", type=int, default=3, help="at a time (%(default)s)")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the ledger and the logs there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
