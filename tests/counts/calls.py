"""How many calls of Python a job takes, counted in processes of their own."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import psycopg

from apscheduler_tasklock import upgrade
from tests.counts.program import ROUNDS, Counts
from tests.support.postgres import Server, start_server

KINDS = ("lone", "burst", "stored")
# Seconds between the starts of two processes, so that they do not all start together.
APART = 1.2


def versions() -> dict[str, str]:
    """Return what the number of calls depends on, beside the library."""
    return {
        "cpython": platform.python_version(),
        "psycopg": version("psycopg"),
        "psycopg_in": "Python" if psycopg.pq.__impl__ == "python" else "C",
        "apscheduler": version("apscheduler"),
        "sqlalchemy": version("sqlalchemy"),
    }


def counted(*, plain: bool = False) -> dict[str, Counts]:
    """Return the median count of each kind of job.

    :param plain: whether to count APScheduler without the library
    """
    # A process has several bursts, one of any other kind has one round. Bursts come first, because
    # they take longest; most of them are there when no other process starts any more. How many
    # claims travel together depends on the load a little, and what a burst takes depends on that.
    starts = [["burst"]] + [["lone"], ["stored"]] * ROUNDS
    if plain:
        starts = [["burst", "--plain"]] + [["lone", "--plain"]] * ROUNDS
    else:  # CPU time without the counting, which takes as much of it
        starts += [[kind, "--bare"] for kind in KINDS]
    server = start_server(None, None)
    with (
        server.close,
        server.database() as tables,
        ThreadPoolExecutor(len(starts)) as threads,
    ):
        upgrade(tables)
        template = str(psycopg.conninfo.conninfo_to_dict(tables)["dbname"])
        begin = time.monotonic()
        waiting = [
            threads.submit(_run, server, template, begin + APART * number, arguments)
            for number, arguments in enumerate(starts)
        ]
        found = [each.result() for each in waiting]
    medians = {}
    for kind in KINDS:
        rounds, bare = (
            [
                each
                for (name, *options), counts in zip(starts, found, strict=True)
                if name == kind and ("--bare" in options) is is_bare
                for each in counts
            ]
            for is_bare in (False, True)
        )
        if rounds:
            medians[kind] = _median(rounds) | ({"cpu_ms": _median(bare)["cpu_ms"]} if bare else {})
    return medians


def _median(rounds: list[Counts]) -> Counts:
    return {what: statistics.median(each[what] for each in rounds) for what in rounds[0]}


def _run(server: Server, template: str, at: float, arguments: list[str]) -> list[Counts]:
    time.sleep(max(0.0, at - time.monotonic()))
    kind, *options = arguments
    with server.database(template) as url:
        command = [sys.executable, "-m", "tests.counts.program", kind, url, *options]
        finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    rounds = [json.loads(line) for line in finished.stdout.splitlines()]
    if finished.returncode:
        raise SystemExit(f"counting failed: {' '.join(command)}")
    return rounds
