"""How a flood of due rows that cannot run is read, on a clock that is moved by hand."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from apscheduler_tasklock.jobstore import bad_rows
from apscheduler_tasklock.jobstore.bad_rows import Flood

START = datetime(2026, 3, 1, tzinfo=timezone.utc)


@pytest.mark.parametrize(("rows", "takes"), [(200, 0.5), (7000, 0.01), (12_000, 0.005)])
def test_a_good_row_behind_more_than_a_minute_of_bad_ones_is_found(
    monkeypatch: pytest.MonkeyPatch, rows: int, takes: float
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(bad_rows, "time", SimpleNamespace(monotonic=lambda: clock.now))
    due: list[Any] = [
        SimpleNamespace(id=f"{n:05}", next_run_time=START + timedelta(seconds=n))
        for n in range(rows)
    ]
    due.append(SimpleNamespace(id="good", next_run_time=START + timedelta(seconds=rows)))

    def read(_until: datetime, after: tuple[datetime, str] | None) -> list[Any]:
        begin = 0 if after is None else int((after[0] - START).total_seconds()) + 1
        return due[begin : begin + 500]

    def is_good(row: Any) -> bool:
        clock.now += takes
        return bool(row.id == "good")

    flood = Flood(START)
    while not flood.good and clock.now < 3600:
        flood.sift(START + timedelta(days=1), read, is_good)
        clock.now += 0.1
    assert list(flood.good) == ["good"]
