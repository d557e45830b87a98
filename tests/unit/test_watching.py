"""What is watched, what becomes of it, and when it is looked at again.

What the database says of the runs is given; tests/integration reads it from a real server.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone

import pytest

from apscheduler_tasklock import TaskLockDatabaseError, watching
from apscheduler_tasklock.messages import RunState
from apscheduler_tasklock.submission import Submission, Watch
from apscheduler_tasklock.watching import Watcher
from tests.polling import eventually

NOW = datetime(2025, 6, 6, 10, tzinfo=timezone.utc)
TIMES = [NOW + timedelta(minutes=number) for number in range(4)]
DEAD = RunState("task", False, True, NOW, "dead", NOW, NOW)
LONG = 3600.0


@dataclass
class Job:
    """As much of a job as is looked at."""

    id: str = "job"
    coalesce: bool = False


def watch(job: Job, *run_times: datetime, window: datetime = NOW, last: bool = False) -> Watch:
    submission = Submission(job, "default", None, run_times, "task", None, False, "", last=last)
    return Watch(submission, window, 0.0)


class Watching:
    """A watcher, what its database says, and what it ran again.

    :ivar state: the last run, an error of the database, or nothing
    :ivar settled: set when the watcher may believe it
    """

    def __init__(self) -> None:
        self.state: RunState | Exception | None = DEAD
        self.settled = threading.Event()
        self.ran: list[Watch] = []
        self.watcher = Watcher(self._read, self.settled.is_set, self.ran.append)

    def _read(self, names: Sequence[str]) -> list[RunState]:
        assert list(names) == ["task"]
        if isinstance(self.state, Exception):
            raise self.state
        return [] if self.state is None else [self.state]

    def run_times(self) -> list[list[datetime]]:
        """Let the dead be believed, wait until nothing is watched, and return what was run."""
        self.settled.set()
        self.wait()
        return [list(watch.submission.run_times) for watch in self.ran]

    def wait(self) -> None:
        eventually(lambda: self.watcher._thread is None)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watching]:
    monkeypatch.setattr(watching, "MARGIN", 0.0)
    monkeypatch.setattr(watching, "RETRY_INTERVAL", 0.01)
    watched = Watching()
    yield watched
    watched.watcher.close()


@pytest.mark.parametrize(("coalesce", "expected"), [(False, TIMES), (True, [TIMES[0], TIMES[-1]])])
def test_run_times_that_wait_for_one_run_are_run_again_at_once(
    watched: Watching, coalesce: bool, expected: list[datetime]
) -> None:
    for run_time in [*TIMES, TIMES[0]]:
        watched.watcher.add(watch(Job(coalesce=coalesce), run_time))
    assert watched.run_times() == [expected]
    assert watched.ran[0].submission.taken_over == DEAD


def test_it_is_known_that_the_scheduler_dropped_the_job_meanwhile(watched: Watching) -> None:
    for number in range(3):
        watched.watcher.add(watch(Job(), TIMES[number], last=number == 1))
    assert watched.run_times() == [TIMES[:3]]
    assert watched.ran[0].submission.last


def test_two_jobs_of_one_task_are_watched_apart(watched: Watching) -> None:
    for job_id in ("one", "other"):
        watched.watcher.add(watch(Job(job_id), NOW))
    assert watched.run_times() == [[NOW], [NOW]]
    assert sorted(ran.submission.job.id for ran in watched.ran) == ["one", "other"]


def test_what_cannot_be_run_yet_is_watched_on(watched: Watching) -> None:
    tries: list[Watch] = []

    def run_again(watch: Watch) -> None:
        tries.append(watch)
        if len(tries) == 1:
            watched.watcher.add(watch)

    watched.watcher._run_again = run_again
    watched.watcher.add(watch(Job(), NOW))
    watched.settled.set()
    watched.wait()
    assert [list(tried.submission.run_times) for tried in tries] == [[NOW], [NOW]]


def test_the_end_that_comes_first_is_waited_for(watched: Watching) -> None:
    watched.settled.set()
    watched.watcher.add(replace(watch(Job("later"), NOW), seconds_left=LONG))
    watched.watcher.add(watch(Job(), NOW))
    assert watched.run_times() == [[NOW], [NOW]]  # with one look, since both runs are dead


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(None, id="no-row"),
        pytest.param(replace(DEAD, finished=True), id="finished"),
        pytest.param(replace(DEAD, window_start=TIMES[1]), id="a-later-window"),
    ],
)
def test_what_has_ended_is_forgotten(watched: Watching, state: RunState | None) -> None:
    watched.state = state
    watched.watcher.add(watch(Job(), NOW))
    assert watched.run_times() == []


def test_an_earlier_window_is_watched_apart_and_forgotten(watched: Watching) -> None:
    watched.watcher.add(watch(Job(), TIMES[0], window=NOW - timedelta(minutes=1)))
    watched.watcher.add(watch(Job(), TIMES[1]))
    assert watched.run_times() == [[TIMES[1]]]


@pytest.mark.parametrize(
    ("state", "look_again"),
    [
        pytest.param(
            replace(DEAD, dead=False, locked_until=NOW + timedelta(hours=2)),
            2 * LONG,
            id="alive",
        ),
        pytest.param(DEAD, LONG, id="not-settled"),
        pytest.param(TaskLockDatabaseError("away"), LONG, id="away"),
        pytest.param(ZeroDivisionError(), LONG, id="failed"),
    ],
)
def test_it_is_looked_at_again_later(
    watched: Watching,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    state: RunState | Exception,
    look_again: float,
) -> None:
    monkeypatch.setattr(watching, "RETRY_INTERVAL", LONG)
    watched.state = state
    begun = time.monotonic()
    watched.watcher.add(watch(Job(), NOW))
    due: Callable[[], float] = watched.watcher._next_due
    eventually(lambda: due() >= begun + look_again)
    assert due() < begun + look_again + LONG
    failed = isinstance(state, ZeroDivisionError)
    assert [r.levelno for r in caplog.records] == ([logging.ERROR] if failed else [])
    assert watched.ran == []


def test_a_closed_watcher_watches_nothing_until_it_is_opened(watched: Watching) -> None:
    watched.watcher.add(watch(Job(), TIMES[0]))
    watched.watcher.close()
    watched.watcher.add(watch(Job(), TIMES[1]))
    watched.wait()
    watched.watcher.open()
    watched.watcher.add(watch(Job(), TIMES[2]))
    assert watched.run_times() == [[TIMES[2]]]
