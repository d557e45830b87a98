"""Waits for a condition, in place of sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(condition: Callable[[], Any], timeout: float = 60.0) -> Any:
    """Poll until the condition holds, and return it; fail after a generous deadline."""
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        assert time.monotonic() < deadline, f"did not come true in {timeout} s"
        time.sleep(0.01)
    return result
