"""Claim and release beside bare psycopg, ShedLock's statements and the other libraries."""

from __future__ import annotations

from collections.abc import Sequence

from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed.contenders import (
    Bare,
    Contender,
    Library,
    Protocol,
    ShedLock,
    ShedLockInsert,
)
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.peers import installed_peers
from benchmarks.speed.report import Goal, Section
from benchmarks.speed.rounds import Samples, comparison, measure_threads, ratio

THREADS = 8
OURS: list[type[Contender]] = [Bare, Protocol, Library, ShedLock, ShedLockInsert]
GOALS = {"granted": 1.3, "release": 1.3, "refused": 2.0}


def run(effort: Effort) -> Section:
    """Compare with bare psycopg."""
    section = Section(
        "Claim and release",
        f"Each round claims, is refused and releases once with each of them, in a shuffled order; "
        f"each has a connection of its own, of the same kind. {effort.rounds:,} rounds in one "
        f"thread, {effort.rounds // 4:,} in each of {THREADS}, which are in step: all are at the "
        "same contender. The ratios are taken within rounds and their median given. "
        "*Our statements* are those that ship, on a plain psycopg "
        "connection; *apscheduler-tasklock* is all of the library, with its pool, clock bound and "
        "error handling. ShedLock sends its INSERT for a name that is new to a process, and the "
        "UPDATE from then on.",
    )
    for threads, samples in _measure(OURS, effort, effort.rounds):
        section.tables.append(f"{_count(threads)}:\n\n{comparison(samples, OURS)}")
        section.goals += _goals(samples, _count(threads))
    return section


def run_peers(effort: Effort) -> Section:
    """Compare with the other libraries."""
    found, missing = installed_peers()
    rounds = effort.of(400, 30)
    section = Section(
        "Beside other libraries",
        f"As above, {rounds:,} rounds in one thread and {rounds // 4:,} in each of {THREADS}. "
        "dislock's schedule lock has no release; it stands until the next run time.",
    )
    if missing:
        section.tables.append(
            f"**Not installed, and not measured: {', '.join(missing)}** "
            "(`pip install -r benchmarks/requirements.txt`)."
        )
    kinds: list[type[Contender]] = [Bare, Library, *found]
    for threads, samples in _measure(kinds, effort, rounds):
        section.tables.append(f"{_count(threads)}:\n\n{comparison(samples, kinds)}")
    return section


def _measure(
    kinds: Sequence[type[Contender]], effort: Effort, rounds: int
) -> list[tuple[int, Samples]]:
    rng = effort.rng()
    measured = []
    with EmbeddedServer({"max_connections": "200"}, loopback=True) as server:
        for kind in kinds:
            kind.prepare(server.url)
        for threads, each in ((1, rounds), (THREADS, rounds // 4)):
            progress(f"{each} rounds, {_count(threads)}")
            measured.append((threads, measure_threads(kinds, server.url, threads, each, rng)))
    return measured


def _goals(samples: Samples, where: str) -> list[Goal]:
    goals = []
    for what, most in GOALS.items():
        to = "SELECT 1" if what == "refused" else what
        by = "`SELECT 1`" if what == "refused" else "the bare UPDATE"
        for contender in (Protocol.name, Library.name):
            times = ratio(samples, (contender, what), (Bare.name, to))
            goals.append(
                Goal(
                    f"{what}, {contender}, {where}",
                    f"at most {most} x {by}",
                    f"{times:.2f} x",
                    times <= most,
                )
            )
    return goals


def _count(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"
