"""Waits for a condition, in place of sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(
    condition: Callable[[], Any],
    timeout: float = 60.0,
    *,
    instead: Callable[[], object] = lambda: "",
) -> Any:
    """Poll until the condition holds, and return it; fail after a generous deadline.

    :param instead: returns what the failure tells of what there was instead
    """
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"did not come true in {timeout} s; {instead()}")
        time.sleep(0.01)
    return result
