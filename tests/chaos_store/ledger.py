"""What the jobs and their users write down: lines of a file, which outlive a killed process."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A line.

    :ivar kind: ``begin`` or ``end`` of a run; ``add``, ``rename``, ``pause``, ``resume`` or
        ``remove`` of a job; ``stop`` and ``kill`` of a replica
    :ivar at: when, on the machine's monotonic clock; of what users do, when it was asked for
    :ivar until: when that was answered, or when a stopped process went on
    :ivar error: why it failed
    """

    kind: str
    at: float
    replica: str = ""
    key: str = ""
    token: int = 0
    run_time: float = 0.0
    is_takeover: bool = False
    until: float = 0.0
    error: str = ""


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
        os.write(self._file, (json.dumps({"kind": kind, "at": at, **details}) + "\n").encode())

    def read(self) -> list[Entry]:
        """Return all lines in the order of their times."""
        lines = self.path.read_text().splitlines()
        return sorted((Entry(**json.loads(line)) for line in lines), key=lambda entry: entry.at)
