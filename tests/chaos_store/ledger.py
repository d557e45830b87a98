"""The ledger: lines of a file that jobs and users write, which outlive a killed process."""

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

    :ivar kind: ``begin`` or ``end`` of a run; ``missed`` for a run time that counts as a misfire;
        ``add``, ``rename``, ``pause``, ``resume`` or ``remove`` of a job; ``declare`` before a
        replica declares its jobs and ``declared`` after it; ``stop`` of a replica, and ``gone``
        once it has ended
    :ivar at: when, on the machine's monotonic clock; of a user's change, when it was asked for
    :ivar until: when the change was answered, or when a stopped process went on
    :ivar error: why it failed
    :ivar period: the interval that a replica declares for the jobs that change
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
    period: float = 0.0


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
