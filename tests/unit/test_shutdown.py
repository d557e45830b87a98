"""The time of a shutdown, which executors and job stores share."""

from __future__ import annotations

import pytest

from apscheduler_tasklock._shutdown import LAST_SECONDS, SHUTDOWN_LIMIT, Shutdown


def test_only_the_wait_for_running_jobs_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("apscheduler_tasklock._shutdown.time.monotonic", lambda: now[0])
    shutdown = Shutdown()
    now[0] += 1.0  # to withdraw what has not begun
    now[0] += 60.0
    shutdown.note_waited(60.0)
    assert shutdown.seconds_left == pytest.approx(SHUTDOWN_LIMIT - LAST_SECONDS - 1.0)
