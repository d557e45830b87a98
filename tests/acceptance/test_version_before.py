"""Replicas of the release before this version, beside new ones: a rolling deployment."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import datetime, timedelta
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from apscheduler_tasklock import TaskLocks
from apscheduler_tasklock.schema.migrations import upgrade
from tests.acceptance.conftest import ReplicaProcess, Run
from tests.distribution.release import version_in
from tests.released import RELEASES
from tests.support.polling import eventually
from tests.support.programs import UnavailableError, skip_or_fail

pytestmark = pytest.mark.nightly

EVERY_SECOND = {
    "function": "sleep",
    "kwargs": {"takes": 0},  # so that it does not run any more when the next one claims it
    "trigger": "cron",
    "second": "*",
    "coalesce": False,
    "max_instances": 10,
}

Start = Callable[..., ReplicaProcess]


@pytest.fixture(scope="module")
def release(checkout: Path) -> str:
    """The tag of the newest release before this commit, which may have a tag of its own."""
    if shutil.which("git") is None:
        skip_or_fail(UnavailableError("releases are tags in the history, and git is not installed"))
    command = ["git", "describe", "--tags", "--abbrev=0", "--match=v[0-9]*", "HEAD^"]
    found = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    if found.returncode:
        version = version_in((checkout / "pyproject.toml").read_text())
        if set(RELEASES) - {version}:
            skip_or_fail(UnavailableError("the history has no tag of a release: git fetch --tags"))
        pytest.skip("there is no release before this version")
    return found.stdout.strip()


@pytest.fixture(scope="module")
def old_checkout(release: str, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as it was released, from its history."""
    archive = subprocess.run(
        ["git", "archive", release], cwd=checkout, capture_output=True, check=True
    )
    folder = tmp_path_factory.mktemp("version before")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


@pytest.fixture
def start(
    old_checkout: Path, checkout: Path, empty_database_url: str, tmp_path: Path
) -> Iterator[Start]:
    """Start replicas of both versions; the tables are of the old one."""
    subprocess.run(
        [sys.executable, "-m", "apscheduler_tasklock.cli", "upgrade"],
        cwd=old_checkout,
        env={**os.environ, "TASKLOCK_DATABASE_URL": empty_database_url},
        check=True,
    )
    with ExitStack() as ending:
        number = iter(range(100))

        def start(*, old: bool, **job: Any) -> ReplicaProcess:
            log = tmp_path / f"replica {next(number)}.log"
            folder = old_checkout if old else checkout
            replica = ReplicaProcess(log, empty_database_url, folder, job)
            ending.callback(replica.end)
            return replica

        yield start


def runs(*replicas: ReplicaProcess) -> list[Run]:
    return sorted((run for replica in replicas for run in replica.runs), key=lambda run: run.token)


def has_run(replica: ReplicaProcess, times: int) -> Callable[[], bool]:
    """Return whether a replica has begun so many runs more than now."""
    before = len(replica.runs)
    return lambda: len(replica.runs) >= before + times


def gaps(found: list[Run]) -> set[timedelta]:
    """Return how far apart the run times are."""
    times = (datetime.strptime(run.run_time, "%H:%M:%S") for run in found)
    return {(later - earlier) % timedelta(days=1) for earlier, later in pairwise(times)}


def test_a_deployment_with_its_migration_runs_each_window_once(
    start: Start, empty_database_url: str
) -> None:
    old = [start(old=True, **EVERY_SECOND) for _ in range(2)]
    eventually(lambda: len(runs(*old)) >= 2)
    upgrade(empty_database_url)
    new = [start(old=False, **EVERY_SECOND) for _ in range(2)]
    # Each in its turn is alone, or else which replica is granted is a matter of chance.
    eventually(lambda: len(runs(*new)) >= 1 or all("refused" in " ".join(n.said) for n in new))
    for replica in old:
        replica.stop()
    eventually(has_run(new[0], 1))
    new[1].stop()
    eventually(has_run(new[0], 2))

    # As when the deployment is rolled back.
    again = start(old=True, **EVERY_SECOND)
    again.says("refused")
    new[0].stop()
    eventually(has_run(again, 2))
    again.stop()

    with closing(TaskLocks(empty_database_url)) as operator:
        assert len(operator.replicas()) == len((*old, *new, again))
    found = runs(*old, *new, again)
    assert gaps(found) == {timedelta(seconds=1)}
    for replica in (*old, *new, again):
        assert not [line for line in replica.said if line.startswith(("ERROR", "CRITICAL"))]


@pytest.mark.parametrize("old_dies", [True, False], ids=["old to new", "new to old"])
def test_a_window_of_a_killed_holder_is_run_by_a_replica_of_the_other_version(
    start: Start, empty_database_url: str, tmp_path: Path, old_dies: bool
) -> None:
    upgrade(empty_database_url)
    job: dict[str, Any] = {
        "function": "work",
        "kwargs": {"folder": str(tmp_path)},
        "trigger": "cron",
        "second": "*/10",
        "options": {"failover": True, "lease": 3, "poll_interval": 0.5},
    }
    holder = start(old=old_dies, **job)
    eventually(lambda: holder.runs)
    [first] = holder.runs
    heir = start(old=not old_dies, **job)
    heir.says("refused")
    holder.signal(signal.SIGKILL)
    eventually(lambda: heir.runs)
    again = heir.runs[0]
    assert (again.run_time, again.how) == (first.run_time, "again")
    (tmp_path / str(again.token)).touch()
    heir.says(f"ends {again.token} held")
    with closing(TaskLocks(empty_database_url)) as operator:
        assert len(operator.tasks()) == 1
        ended = eventually(lambda: operator.runs() if len(operator.runs()) > 1 else None)
        assert [(run.token, run.outcome) for run in ended[-2:]] == [
            (again.token, "ok"),
            (first.token, "died"),
        ]
