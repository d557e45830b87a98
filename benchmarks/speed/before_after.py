"""Claims, and jobs that are due, before the way of a run was made shorter and since."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed import before_after_process
from benchmarks.speed.before_after_process import CLAIMS, JOBS, REPLICAS, SHORT, THREADS, WORKERS
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.report import Goal, Section, median, microseconds, milliseconds, table
from benchmarks.speed.versions import BEFORE, NOW, VersionProcess, library_before, running

VERSIONS = ("before", "now")
# Where the server's data is: in memory, so that the time of its disk does not hide the library's.
DATA = Path("/dev/shm")  # noqa: S108  # EmbeddedServer makes a private folder in it
# How many times as long as a bare loop of as many UPDATEs the jobs of one replica may take.
MOST_OF_BARE_LOOP = 3.0

# The seconds of each round, by the name of the measure and the version.
Times = dict[tuple[str, str], list[float]]


@dataclass(frozen=True)
class Measure:
    """Something that is measured.

    :ivar words: its name in the table
    :ivar written: formats its time
    :ivar most: the goal: how many times as long as before it may take; ``None`` for no goal
    """

    words: str
    written: Callable[[float], str]
    most: float | None


# By kind of process, and the name in it.
MEASURES = {
    "claims": {
        "hold": Measure("a claim and its release, one thread", microseconds, 1.03),
        "refused": Measure("a claim that is refused", microseconds, None),
        "beside_work": Measure(
            "a claim and its release, beside a thread that works", microseconds, None
        ),
        "threads": Measure(f"{CLAIMS} claims and releases, {THREADS} threads", milliseconds, None),
        "coroutines": Measure(
            f"{CLAIMS} claims and releases, as many coroutines", milliseconds, 1.03
        ),
    },
    "jobs": {
        "alone": Measure("one job alone, due until begun", milliseconds, 1.03),
        "effort": Measure("one job alone, CPU", milliseconds, 0.5),
        "pool": Measure(f"{JOBS} jobs, 1 replica", milliseconds, 1.03),
        "fleet": Measure(f"{JOBS} jobs, {REPLICAS} replicas", milliseconds, 0.7),
        "bare_loop": Measure(f"a bare loop of {JOBS} UPDATEs", milliseconds, None),
        "short": Measure(
            f"{JOBS} jobs of {SHORT * 1000:g} ms, {REPLICAS} replicas", milliseconds, None
        ),
    },
}


def run(effort: Effort) -> Section:
    """Measure both versions in turn."""
    rounds = effort.of(15, 3)
    section = Section(
        "Before the way of a run was made shorter, and since",
        f"*Before* is the library of commit {BEFORE}, in which two threads carried one run, and "
        "each statement went through a cursor. Each version is a process of its own, on one "
        f"server whose data is {'in memory' if DATA.is_dir() else 'on disk'}: with `TaskLocks`, "
        f"and with {REPLICAS} `BackgroundScheduler`s whose pools have {WORKERS} threads. The time "
        "of jobs is from the moment at which they are due until the last of them has ended, or "
        "was refused. The versions take turns, in a shuffled order; the median of "
        f"{rounds} rounds, and of the ratios within them. *A bare loop* is {JOBS} UPDATEs in "
        "the same process, each its own transaction, one after the other.",
    )
    data_in = DATA if DATA.is_dir() else None
    with EmbeddedServer(data_in=data_in, loopback=True) as server, library_before() as before:
        if before is None:
            section.tables.append(
                f"**Not measured: the version before. Commit {BEFORE} is not in this "
                "folder's git history, so there are no ratios.**"
            )
        for kind, measures in MEASURES.items():
            with ExitStack() as stack:
                processes = {}
                for version, folder in zip(VERSIONS, (before, NOW), strict=True):
                    if folder is not None:
                        arguments = (server.url, f"{kind}_{version}", kind)
                        process = running(before_after_process, folder, *arguments)
                        processes[version] = stack.enter_context(process)
                        processes[version].wait_until_loaded()
                times = _measured(measures, processes, rounds, effort)
            section.tables.append(_table(measures, times))
            section.goals += _goals(measures, times)
            if kind == "jobs":
                _add_bare_loop(section, times)
    return section


def _add_bare_loop(section: Section, times: Times) -> None:
    told = {}
    for version in VERSIONS:
        if ("pool", version) in times:
            pairs = zip(times["pool", version], times["bare_loop", version], strict=True)
            told[version] = median([jobs / loop for jobs, loop in pairs])
    section.tables.append(
        table(
            [f"{JOBS} jobs, 1 replica", "x bare loop"], [[a, f"{b:.2f}"] for a, b in told.items()]
        )
    )
    section.goals.append(
        Goal(
            f"{JOBS} jobs, 1 replica, data {'in memory' if DATA.is_dir() else 'on disk'}",
            f"at most {MOST_OF_BARE_LOOP:g} x a bare loop of UPDATEs",
            f"{told['now']:.2f} x",
            told["now"] <= MOST_OF_BARE_LOOP,
        )
    )


def _measured(
    measures: Mapping[str, Measure],
    processes: Mapping[str, VersionProcess],
    rounds: int,
    effort: Effort,
) -> Times:
    times: Times = {(what, version): [] for what in measures for version in processes}
    rng = effort.rng()
    for number in range(-1, rounds):
        for what in measures:
            for version in rng.sample(list(processes), len(processes)):
                processes[version].tell(what)
                seconds = float(processes[version].answer())
                if number >= 0:  # the first round is to warm up
                    times[what, version].append(seconds)
        progress(f"round {number + 1} of {rounds}")
    return times


def _table(measures: Mapping[str, Measure], times: Times) -> str:
    rows = []
    for what, measure in measures.items():
        ratio = _ratio(what, times)
        each = [times.get((what, version)) for version in VERSIONS]
        told = ["-" if found is None else measure.written(median(found)) for found in each]
        rows.append([measure.words, *told, "-" if ratio is None else f"{ratio:.2f}"])
    return table(["", *VERSIONS, "x before"], rows)


def _goals(measures: Mapping[str, Measure], times: Times) -> list[Goal]:
    goals = []
    for what, measure in measures.items():
        ratio = _ratio(what, times)
        if measure.most is not None:
            goals.append(
                Goal(
                    measure.words,
                    f"at most {measure.most:g} x as long as before",
                    "no version before" if ratio is None else f"{ratio:.2f} x",
                    None if ratio is None else ratio <= measure.most,
                )
            )
    return goals


def _ratio(what: str, times: Times) -> float | None:
    """Return how many times as long it takes as before, if that was measured."""
    before = times.get((what, "before"))
    if before is None:
        return None
    pairs = zip(before, times[what, "now"], strict=True)
    return median([later / earlier for earlier, later in pairs])
