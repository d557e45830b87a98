"""Each example runs as it stands, in several processes, and each window once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from tests.polling import eventually

PERIOD = 2  # seconds, in the examples


@pytest.mark.parametrize("example", ["threads.py"])
def test_an_example_runs_each_window_on_one_of_three_processes(
    example: str, checkout: Path, database_url: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        replicas = [
            subprocess.Popen(
                [sys.executable, str(checkout / "examples" / example)],
                cwd=tmp_path,
                env={**os.environ, "TASKLOCK_DATABASE_URL": database_url},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for _ in range(3)
        ]
        try:
            eventually(lambda: len(_lines(log)) >= 5)
        finally:
            for replica in replicas:
                replica.send_signal(signal.SIGKILL)
                replica.wait()
    runs = [datetime.fromisoformat(line.partition(" for ")[2]) for line in _lines(log)]
    gaps = [(later - earlier).total_seconds() for earlier, later in pairwise(runs)]
    # The processes start at different moments; the window is 0.9 periods. Run times are measured
    # on arrival in the database, which may take a loaded machine a moment.
    assert min(gaps) > 0.8 * PERIOD, log.read_text()
    assert max(gaps) < 1.2 * PERIOD, log.read_text()


def _lines(log: Path) -> list[str]:
    return log.read_text().splitlines()
