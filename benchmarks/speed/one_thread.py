"""Claims and releases before and after one thread owned the connection."""

from __future__ import annotations

from contextlib import ExitStack

from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed import one_thread_process
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.one_thread_process import CLAIMS, THREADS
from benchmarks.speed.report import Goal, Section, median, microseconds, milliseconds, table
from benchmarks.speed.versions import (
    BEFORE_ONE_THREAD,
    NOW,
    VersionProcess,
    library_before,
    running,
)

# What is measured, in words; how its time is written; and how many times as long as before it may
# take, if that is a goal.
MEASURES = {
    "hold": ("a claim and its release, one thread", microseconds, 1.2),
    "refused": ("a claim that is refused", microseconds, 1.2),
    "beside_work": ("a claim and its release, beside a thread that works", microseconds, None),
    "threads": (f"{CLAIMS} claims and releases, {THREADS} threads", milliseconds, 1.0),
    "coroutines": (f"{CLAIMS} claims and releases, as many coroutines", milliseconds, 0.85),
}
VERSIONS = ("before", "now")

# The seconds of each round, by what is measured and the version.
Times = dict[tuple[str, str], list[float]]


def run(effort: Effort) -> Section:
    """Measure both versions in turn."""
    rounds = effort.of(15, 5)
    section = Section(
        "One thread for the database, before and after",
        f"*Before* is the library of commit {BEFORE_ONE_THREAD}, in which the threads that asked "
        "took turns on the connection. Each version is a process of its own, with `TaskLocks` on "
        f"one server. The versions take turns, in a shuffled order; the median of {rounds} rounds, "
        "and of the ratios within them.",
    )
    with (
        EmbeddedServer(loopback=True) as server,
        library_before(BEFORE_ONE_THREAD) as before,
        ExitStack() as stack,
    ):
        processes: dict[str, VersionProcess] = {}
        for version, folder in zip(VERSIONS, (before, NOW), strict=True):
            if folder is not None:
                process = running(one_thread_process, folder, server.url, version)
                processes[version] = stack.enter_context(process)
                processes[version].wait_until_loaded()
        times = _measure(processes, rounds, effort)
    if before is None:
        section.tables.append(
            f"**Not measured: the version before. Commit {BEFORE_ONE_THREAD} is not in this "
            "folder's git history, so there are no ratios.**"
        )
    section.tables.append(_table(times))
    section.goals = [_goal(what, times) for what, (_, _, most) in MEASURES.items() if most]
    return section


def _measure(processes: dict[str, VersionProcess], rounds: int, effort: Effort) -> Times:
    times: Times = {(what, version): [] for what in MEASURES for version in processes}
    rng = effort.rng()
    for number in range(-1, rounds):
        for what in MEASURES:
            for version in rng.sample(list(processes), len(processes)):
                processes[version].tell(what)
                seconds = float(processes[version].answer())
                if number >= 0:  # the first one is to warm up
                    times[what, version].append(seconds)
        progress(f"round {number + 1} of {rounds}")
    return times


def _ratio(what: str, times: Times) -> float | None:
    """Return how many times as long it takes as before, if that was measured."""
    before = times.get((what, "before"))
    if before is None:
        return None
    pairs = zip(before, times[what, "now"], strict=True)
    return median([later / earlier for earlier, later in pairs])


def _table(times: Times) -> str:
    rows = []
    for what, (words, written, _) in MEASURES.items():
        ratio = _ratio(what, times)
        each = [times.get((what, version)) for version in VERSIONS]
        told = ["-" if found is None else written(median(found)) for found in each]
        rows.append([words, *told, "-" if ratio is None else f"{ratio:.2f}"])
    return table(["", *VERSIONS, "x before"], rows)


def _goal(what: str, times: Times) -> Goal:
    words, _, most = MEASURES[what]
    assert most is not None
    ratio = _ratio(what, times)
    return Goal(
        words,
        f"at most {most:g} x as long as before",
        "no version before" if ratio is None else f"{ratio:.2f} x",
        None if ratio is None else ratio <= most,
    )
