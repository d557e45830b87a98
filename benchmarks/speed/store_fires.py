"""Which statements a fire of a stored job takes, in a small fleet and in a large one."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from apscheduler_tasklock import upgrade
from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed.counts import LOGGED
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.report import Goal, Section, table
from benchmarks.speed.store_replica import WORKERS, Begun, job, make_scheduler, store_replicas

# Processes, schedulers in each, and seconds from one run time to the next: of a small fleet, and of
# a large one, each of whose replicas looks every 3 s. Looks that fall together with a run time then
# do not so with the next one.
FLEETS = ((3, 1, 1.0), (4, 15, 4.3))
# Seconds after which each replica of a fleet knows how many there are: a sign of life and some.
KNOWN_AFTER = 35.0
# Seconds after a run time that count to its fire. All that is done for it is done by then.
FIRE = 0.15
# How many statements the replica sends that runs the job, and how many looks others.
BY_RUNNER, BY_OTHERS = 3.0, 3.0

LOOK, CLAIM, RELEASE = "look for due jobs", "claim", "release"
# How statements begin, and what they are.
_STARTS = {
    "WITH here AS": LOOK,
    "WITH asked AS": CLAIM,
    "WITH ended AS": RELEASE,
    "WITH begun AS MATERIALIZED": "look for dead runs of the store",
    "SELECT job.id AS job_id": "look at the recurring tasks",
    "SELECT task_name, claim_id": "look for dead runs of known tasks",
    "DELETE FROM task_lock_job": "deletion of ended jobs",
    "WITH pruned AS": "deletion of old tasks",
}
_SETTINGS = {**LOGGED, "max_connections": "200", "log_line_prefix": "at %n by %a: "}
_LINE = re.compile(
    r"^at ([0-9.]+) by (.*?): LOG:  (?:statement|execute [^:]+): (.*(?:\n[ \t].*)*)", re.MULTILINE
)


@dataclass(frozen=True)
class Sent:
    """A statement, as the server's log has it.

    :ivar at: when, in seconds since 1970
    :ivar by: name of the connection
    :ivar what: which statement it is
    """

    at: float
    by: str
    what: str


@dataclass(frozen=True)
class Fire:
    """What was sent at a run time.

    :ivar by_runner: looks for due jobs, claims and releases of the replica that ran the job
    :ivar looks: for due jobs, by others
    :ivar claims: by others
    """

    by_runner: int
    looks: int
    claims: int


def fires_in_fleets(effort: Effort, section: Section) -> None:
    """Count the statements of fires in both fleets."""
    rows = []
    for processes, schedulers, period in FLEETS:
        replicas = processes * schedulers
        count = effort.of(60, 20)
        progress(f"{count} fires of a job that is due every {period:g} s, {replicas} replicas")
        sent, due = _fires(processes, schedulers, period, count)
        fires = [fire for at in due if (fire := _fire(sent, at)) is not None]
        ordinary = _ordinary_looks(sent, due, period) * FIRE
        by_runner, looks, claims = (
            sum(getattr(fire, name) for fire in fires) / len(fires)
            for name in ("by_runner", "looks", "claims")
        )
        whole = [each for each in sent if due[0] <= each.at < due[-1]]
        each = len(whole) / (len(due) - 1)
        rows.append(
            [
                f"{replicas} replicas",
                f"{by_runner:.2f}",
                f"{looks - ordinary:.2f}",
                f"{claims:.2f}",
                f"{ordinary / FIRE:.1f}",
                f"{each:.1f}",
            ]
        )
        section.goals += [
            Goal(
                f"statements of a fire by the replica that runs it, {replicas} replicas",
                f"{BY_RUNNER:g}",
                f"{by_runner:.2f}",
                round(by_runner, 1) <= BY_RUNNER,
            ),
            Goal(
                f"looks of others when a job is due, {replicas} replicas",
                f"at most {BY_OTHERS:g}, on average",
                f"{looks - ordinary:.2f}",
                looks - ordinary <= BY_OTHERS,
            ),
        ]
        if schedulers == 1:
            what = Counter(each.what for each in whole)
            kinds = [[n, f"{c / (len(due) - 1):.2f}"] for n, c in what.most_common()]
            section.tables.append(table([f"statement, {replicas} replicas", "of a fire"], kinds))
    header = ["a fire", "by the runner", "due-time looks of others", "claims of others"]
    section.tables.append(
        table([*header, "ordinary looks a second", "all, from fire to fire"], rows)
    )


def _fires(
    processes: int, schedulers: int, period: float, count: int
) -> tuple[list[Sent], list[float]]:
    """Let a job be due so often; return what was sent, and when it was due."""
    with EmbeddedServer(_SETTINGS, loopback=True) as server:
        upgrade(server.url)
        with store_replicas(server.url, processes, schedulers) as replicas:
            begun = Begun(replicas)
            time.sleep(KNOWN_AFTER)
            first = math.ceil(time.time() + period)
            scheduler = make_scheduler(server.url)
            scheduler.start()
            scheduler.add_job(
                job,
                "interval",
                seconds=period,
                start_date=datetime.fromtimestamp(first, timezone.utc),
                id="job",
                executor=WORKERS,
            )
            scheduler.shutdown()  # it is not one of them
            begun.wait(count + 1)
            log = server.log
    sent = [Sent(float(at), by, _kind(text)) for at, by, text in _LINE.findall(log)]
    return sent, [float(first + period * n) for n in range(1, count)]


def _fire(sent: Sequence[Sent], due: float) -> Fire | None:
    """Return what was sent at a run time; ``None`` if the job did not run within that time."""
    those = [each for each in sent if due <= each.at < due + FIRE]
    runners = {each.by for each in those if each.what == RELEASE}
    if len(runners) != 1:
        return None
    others = Counter(each.what for each in those if each.by not in runners)
    own = [each for each in those if each.by in runners and each.what in (LOOK, CLAIM, RELEASE)]
    return Fire(len(own), others[LOOK], others[CLAIM])


def _ordinary_looks(sent: Sequence[Sent], due: Sequence[float], period: float) -> float:
    """Return how many looks there are in a second between the run times."""
    between = [each for each in sent for at in due if at - period / 3 <= each.at < at - 0.05]
    looks = sum(each.what == LOOK for each in between)
    return looks / (len(due) * (period / 3 - 0.05))


def _kind(text: str) -> str:
    """Return which statement it is, by its first words."""
    words = " ".join(text.split())
    known = [name for start, name in _STARTS.items() if words.startswith(start)]
    return known[0] if known else f"`{words[:40]}`"
