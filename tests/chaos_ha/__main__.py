"""Real replicas on a database that fails over, and whether they did what is promised."""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from apscheduler_tasklock.demo.history import Event
from apscheduler_tasklock.demo.judge import Breach
from apscheduler_tasklock.demo.server import die_with_parent
from tests.chaos.fleet import find_faketime
from tests.chaos_ha.cases import CASES, Case, Scene
from tests.chaos_ha.checker import Told, check
from tests.chaos_ha.cluster import Cluster, first_write, write
from tests.chaos_ha.replica import TASKS, command
from tests.chaos_store.ledger import Ledger

OK, FAULTS, NO_CHAOS = 0, 1, 2

REPLICAS = 3
# Seconds for which replicas may take to begin all tasks, and to end; and of calm at the end.
_START, _END, _CALM = 60.0, 30.0, 2.0
# Seconds for which a late task is waited for, so that the finding says how late it was.
_MUCH_LATER = 20.0
# Seconds for a doctor.
_EXAMINATION = 90.0


class Play:
    """One case, on a cluster and replicas of its own."""

    def __init__(self, case: Case, rng: random.Random, route: str, folder: Path) -> None:
        self._case = case
        self._rng = rng
        self._route = route
        self._folder = folder
        self._ledger = Ledger(folder / "ledger.jsonl")
        self._replicas: dict[str, subprocess.Popen[bytes]] = {}
        self._doctors: list[subprocess.Popen[str]] = []

    def run(self) -> list[Breach]:
        """Let the case happen; return what must not have happened."""
        with ExitStack() as closing:
            cluster = closing.enter_context(Cluster(self._route, self._case.skew))
            closing.callback(self._kill)
            for number in range(REPLICAS):
                self._start(f"r{number + 1}", cluster.url)
            self._wait_for_runs(time.monotonic(), _START)
            scene = Scene(cluster, self._rng, self._note_event, self._ask_doctor)
            for url in self._case.story(scene):
                self._live_on(url)
            doctors = [doctor.communicate(timeout=_EXAMINATION)[0] for doctor in self._doctors]
            self._stop()
        logs = {name: self._log(name).read_text() for name in self._replicas}
        case = self._case
        for number, said in enumerate(doctors):
            (self._folder / f"doctor-{number}.txt").write_text(said)
        return check(Told(self._ledger.read(), logs, doctors, case.loses_commits, case.waiting))

    def summary(self) -> str:
        """Return how soon each task ran after each time at which writes were possible."""
        events = self._ledger.read()
        begun = {task.name: [e.at for e in events if _begins(e, task.name)] for task in TASKS}
        parts = [f"{sum(map(len, begun.values()))} runs"]
        for possible in (event for event in events if event.kind == "possible"):
            first = [
                min((at for at in begun[task.name] if at > possible.at), default=None)
                for task in TASKS
            ]
            shown = ["never" if at is None else f"{at - possible.at:.1f} s" for at in first]
            parts.append(f"next runs after {', '.join(shown)}")
        return "; ".join(parts)

    def _start(self, name: str, url: str) -> None:
        with self._log(name).open("wb") as log:
            self._replicas[name] = subprocess.Popen(
                [*die_with_parent("KILL"), *command(name, self._ledger.path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "DATABASE_URL": url},
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _note_event(self, what: str) -> None:
        self._ledger.write("event", detail=what)

    def _ask_doctor(self, url: str) -> None:
        module = [sys.executable, "-m", "apscheduler_tasklock", "doctor", "--database", url]
        self._doctors.append(
            subprocess.Popen(
                [*die_with_parent("KILL"), *module],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )

    def _live_on(self, url: str) -> None:
        """Wait until writes are possible, and then until each task has run."""
        possible = first_write(url)
        slowest = self._wait_for_runs(possible, _MUCH_LATER, url)
        self._ledger.write("possible", possible, until=slowest)

    def _wait_for_runs(self, since: float, within: float, url: str = "") -> float:
        """Wait until each task has begun a run; return how long the slowest plain write took."""
        slowest = 0.0
        until = time.monotonic() + within
        awaited = {task.name for task in TASKS if not (url and task.name in self._case.waiting)}
        while time.monotonic() < until:
            time.sleep(0.3)
            if url:
                begun, confirmed = write(url)
                slowest = max(slowest, confirmed - begun)
            events = self._ledger.read()
            if all(any(_begins(e, name) and e.at > since for e in events) for name in awaited):
                break
        return slowest

    def _stop(self) -> None:
        """Let the replicas run in peace, and end in order."""
        time.sleep(_CALM)
        for name, process in self._replicas.items():
            if process.poll() is not None:
                self._ledger.write("died", replica=name, detail=f"status {process.returncode}")
            process.send_signal(signal.SIGTERM)
        until = time.monotonic() + _END
        for name, process in self._replicas.items():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._ledger.write("died", replica=name, detail="it did not end")

    def _kill(self) -> None:
        processes: list[subprocess.Popen[Any]] = [*self._replicas.values(), *self._doctors]
        for process in processes:
            process.kill()
            process.wait()


def _begins(event: Event, task: str) -> bool:
    return event.kind == "begin" and event.task == task


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the cases; return the exit status: 1 if something was found."""
    options = _parser().parse_args(arguments)
    chosen = list(options.cases or CASES)
    if find_faketime() is None:
        left_out = [name for name in chosen if CASES[name].skew]
        chosen = [name for name in chosen if name not in left_out]
        if left_out:
            print(f"faketime is not installed, so left out: {', '.join(left_out)}", flush=True)
    seed = random.randrange(1_000_000) if options.seed is None else options.seed  # noqa: S311  # no secret
    repeat = f"--seed {seed} --seconds {options.seconds:g} --cases {' '.join(chosen)}"
    print(f"Chaos of a database that fails over: {repeat}", flush=True)
    rng = random.Random(seed)  # noqa: S311  # seeded
    # So that SIGTERM stops the servers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    end = time.monotonic() + options.seconds
    findings = 0
    with ExitStack() as stack:
        folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        # Each case comes once, and then any of them as long as there is time.
        turn = 0
        while turn < len(chosen) or time.monotonic() < end:
            name = chosen[turn] if turn < len(chosen) else rng.choice(chosen)
            turn += 1
            route = rng.choice(CASES[name].routes)
            here = folder / f"{turn}-{name}"
            here.mkdir(parents=True)
            begun = time.monotonic()
            play = Play(CASES[name], random.Random(rng.random()), route, here)  # noqa: S311  # seeded
            found = play.run()
            findings += len(found)
            took = time.monotonic() - begun
            print(f"{name} ({route}, {took:.0f} s): {play.summary()}", flush=True)
            for finding in found[:10]:
                print(f"  {finding}", flush=True)
    print(f"{findings} findings" if findings else "no findings")
    return FAULTS if findings else OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos_ha", description=__doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        default=300.0,
        help="for which cases are begun, after each of them came once (%(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, help="of what happens (by default another one each time)"
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), help="by default all")
    parser.add_argument("--keep", metavar="FOLDER", help="keep ledgers, logs and doctors there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
