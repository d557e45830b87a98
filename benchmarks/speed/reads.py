"""How long reads take: in the database alone, and from the call to the objects it returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg

from benchmarks.speed.report import median, milliseconds
from tests.support.waist import raw_cursor

EXPLAIN = b"EXPLAIN (ANALYZE, TIMING OFF, SERIALIZE BINARY, FORMAT JSON) "


@dataclass(frozen=True)
class ReadTime:
    """Medians and the largest, in seconds.

    :ivar found: how many objects it returned
    :ivar planning: in the database
    :ivar execution: in the database, with what it costs to make the rows ready to be sent
    :ivar slowest: the longest execution
    :ivar end_to_end: on one connection, which prepares the statement after a while
    :ivar slowest_end_to_end: the longest of those
    """

    found: int
    planning: float
    execution: float
    slowest: float
    end_to_end: float
    slowest_end_to_end: float

    def cells(self) -> list[str]:
        """Return them for a table under ``HEADER``."""
        times = [self.planning, self.execution, self.slowest]
        times += [self.end_to_end, self.slowest_end_to_end]
        return [f"{self.found:,}", *(milliseconds(seconds) for seconds in times)]


HEADER = ["found", "planned in", "executed in", "slowest", "end to end", "slowest"]


class RecordingCursor:
    """The library's cursor, which knows what was sent last."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor
        self.sent: tuple[bytes, Any] = (b"", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("_cursor", "sent"):
            super().__setattr__(name, value)
        else:
            setattr(self._cursor, name, value)

    def execute(self, query: Any, parameters: Any = ()) -> Any:
        """Send a statement."""
        self.sent = (query.encode() if isinstance(query, str) else query, parameters)
        return self._cursor.execute(query, parameters)


def measure(url: str, read: Callable[[Any], Any], often: int) -> ReadTime:
    """Measure a read.

    :param read: is called with a cursor, sends one statement and returns a list
    """
    taken, plans = [], []
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = RecordingCursor(raw_cursor(connection))
        found = len(read(cursor))  # and from now on what it reads is in memory
        text, arguments = cursor.sent
        for _ in range(often):
            begun = time.perf_counter()
            read(cursor)
            taken.append(time.perf_counter() - begun)
        explaining = psycopg.RawCursor(connection)
        for _ in range(often):
            row = explaining.execute(EXPLAIN + text, arguments).fetchone()
            assert row is not None
            plans.append(row[0][0])
    executed = [plan["Execution Time"] / 1e3 for plan in plans]
    return ReadTime(
        found=found,
        planning=median([plan["Planning Time"] / 1e3 for plan in plans]),
        execution=median(executed),
        slowest=max(executed),
        end_to_end=median(taken),
        slowest_end_to_end=max(taken),
    )
