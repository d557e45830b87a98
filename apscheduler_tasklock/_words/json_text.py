"""JSON: what operators read, for programs. Times are RFC 3339, and durations numbers of seconds."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import Any
from uuid import UUID

from apscheduler_tasklock._lock.words import rfc3339
from apscheduler_tasklock.status import Run


def as_json(data: Any, indent: int | None = None) -> str:
    """Return data as JSON: times as RFC 3339, durations as numbers of seconds."""
    # DEL is the only control character that json.dumps() does not escape. Only texts can have DEL.
    return json.dumps(data, default=_jsonable, indent=indent).replace("\x7f", "\\u007f")


def _jsonable(value: Any) -> Any:
    if isinstance(value, datetime):
        return rfc3339(value)
    if isinstance(value, UUID):
        return str(value)
    return {**asdict(value), "took": value.took} if isinstance(value, Run) else asdict(value)
