"""The ledger: a history that jobs and users write, which outlives a killed process.

Beside the begins and ends of runs it has ``missed`` for a run time that counts as a misfire;
``add``, ``rename``, ``pause``, ``resume`` or ``remove`` of a job, from when it was asked for until
it was answered; ``stop`` of a replica, until it went on. Times are the machine's monotonic clock's.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apscheduler_tasklock.demo.history import Event, read


@dataclass
class Ledger:
    """The file, to be appended to by many processes."""

    path: Path
    _file: int = field(init=False)

    def __post_init__(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, kind: str, at: float | None = None, **details: Any) -> None:
        """Append a line, in a single call."""
        at = time.monotonic() if at is None else at
        os.write(self._file, Event(at, kind, **details).line.encode())

    def read(self) -> list[Event]:
        """Return all events in the order of their times."""
        return sorted(read(self.path), key=lambda event: event.at)
