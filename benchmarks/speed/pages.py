"""How long the dashboard's pages take in a large installation, and how large they are."""

from __future__ import annotations

import time
from dataclasses import dataclass
from urllib.parse import quote

from starlette.testclient import TestClient

from apscheduler_tasklock import TaskLocks
from apscheduler_tasklock.dashboard.access import read_only
from apscheduler_tasklock.dashboard.app import Dashboard
from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.filled import SETTINGS, fill, name
from benchmarks.speed.report import Goal, Section, median, milliseconds, table

RUNS = 100
# The goals: seconds in the database and in all, and bytes; and those of pages with lanes, which
# read all entries of the history, and have an element for each that is drawn.
MOST_READ, MOST_IN_ALL, MOST_BYTES = 0.2, 0.3, 200_000
WITH_LANES = 1.0, 2.0, 2_000_000


@dataclass(frozen=True)
class Page:
    """Medians of a page: seconds of its reads, seconds in all, and its bytes."""

    read: float
    in_all: float
    size: float

    def cells(self) -> list[str]:
        """Return them for a table."""
        return [milliseconds(self.read), milliseconds(self.in_all), f"{self.size / 1000:.0f} KB"]


def run(effort: Effort) -> Section:
    """Ask for each page, by viewers who share nothing."""
    tasks, replicas, often = effort.of((10_000, 64, 10), (1000, 8, 3))
    section = Section(
        "The dashboard's pages",
        f"{tasks:,} tasks with {RUNS} runs in the history each, and {replicas} replicas that have "
        f"all of them. Each page is the first of a dashboard, so that no read is shared; {often} "
        "times, and the times are medians. Read: from the calls of TaskLocks to the objects that "
        "they return. In all: from the request to the page, in one process.",
    )
    rows = []
    with EmbeddedServer(SETTINGS, loopback=True) as server:
        progress(f"filling the tables with {tasks * RUNS:,} runs")
        fill(server, tasks, RUNS, replicas)
        for path in _paths(tasks):
            progress(path)
            page = measure(server.url, path, often)
            rows.append([path, *page.cells()])
            section.goals += _goals(path, page)
    section.tables.append(table(["page", "read", "in all", "size"], rows))
    return section


def _paths(tasks: int) -> list[str]:
    one = quote(name(tasks // 2))
    return [
        *("/", "/?by=task", "/tasks", "/tasks?order=name&page=20", f"/task?name={one}"),
        *(f"/why?name={one}", "/runs", "/runs?outcome=bad", "/timeline", "/timeline?hours=24"),
        *("/timeline?by=task", "/replicas", "/jobs", "/setup"),
    ]


def measure(url: str, path: str, often: int) -> Page:
    """Measure a page."""
    read, in_all, sizes = [], [], []
    for _ in range(often):
        locks = TaskLocks(url, claim_timeout=60)
        with TestClient(Dashboard(locks, "", read_only, None).app()) as client:
            locks.check()  # opens the connection
            begun = time.perf_counter()
            answer = client.get(path)
            in_all.append(time.perf_counter() - begun)
            assert answer.status_code == 200, answer.text
            sizes.append(len(answer.content))
            beginning, _, parameters = path.partition("?")
            twin = f"{beginning if beginning != '/' else '/overview'}.json?{parameters}"
            read.append(client.get(twin).json()["took"])
    return Page(median(read), median(in_all), median(sizes))


def _goals(path: str, page: Page) -> list[Goal]:
    has_lanes = path.partition("?")[0] in ("/", "/timeline")
    most = WITH_LANES if has_lanes else (MOST_READ, MOST_IN_ALL, MOST_BYTES)
    read, in_all, size = page.cells()
    most_read, most_in_all, most_bytes = most
    return [
        Goal(f"page {path}: read", f"under {most_read * 1000:.0f} ms", read, page.read < most_read),
        Goal(
            f"page {path}: in all",
            f"under {most_in_all * 1000:.0f} ms",
            in_all,
            page.in_all < most_in_all,
        ),
        Goal(f"page {path}: size", f"under {most_bytes // 1000} KB", size, page.size < most_bytes),
    ]
