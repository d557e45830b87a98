"""The machine and the versions that a run was measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import psycopg

from apscheduler_tasklock.demo.server import EmbeddedServer


def describe() -> str:
    """Return what the figures depend on, as Markdown."""
    with EmbeddedServer(loopback=True) as server, psycopg.connect(server.url) as connection:
        row = connection.execute(
            "SELECT current_setting('server_version'), current_setting('fsync'),"
            " current_setting('synchronous_commit'), current_setting('data_directory')"
        ).fetchone()
        assert row is not None
        postgres, fsync, commit, data = row
        disk = _file_system(data)
    packages = ", ".join(f"{name} {version(name)}" for name in ("APScheduler", "SQLAlchemy"))
    return (
        f"{os.cpu_count()} cores ({_processor()}), {_memory()} of memory, "
        f"{platform.system()} {_kernel()}; Python {platform.python_version()}, "
        f"psycopg {psycopg.__version__} ({psycopg.pq.__impl__}), {packages}; "
        f"PostgreSQL {postgres} on the same machine over TCP on loopback, fsync {fsync}, "
        f"synchronous_commit {commit}, data on {disk}."
    )


def load_average() -> str:
    """Return the load averages of the last 1, 5 and 15 minutes."""
    return ", ".join(f"{load:.2f}" for load in os.getloadavg())


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _kernel() -> str:
    """Return the kernel's version without the name of its build."""
    return platform.release().partition("-")[0]


def _memory() -> str:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{pages / 2**30:.0f} GiB"


def _file_system(folder: str) -> str:
    mounts = Path("/proc/mounts")
    best = ("", "an unknown file system")
    for line in mounts.read_text().splitlines() if mounts.exists() else []:
        _, point, kind, *_ = line.split()
        if Path(folder).is_relative_to(point) and len(point) > len(best[0]):
            best = (point, kind)
    return best[1]
