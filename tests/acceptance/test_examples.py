"""Each example runs as it stands, in several processes, and each window once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.polling import eventually


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
            eventually(lambda: len(log.read_text().splitlines()) >= 4)
        finally:
            for replica in replicas:
                replica.send_signal(signal.SIGKILL)
                replica.wait()
    runs = [line.rpartition(" ")[2] for line in log.read_text().splitlines()]
    assert runs == [str(number + 1) for number in range(len(runs))], log.read_text()
