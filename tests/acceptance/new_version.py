"""A module that only the new version of an application has; see ``lacks`` in stored.py."""

from __future__ import annotations

from tests.acceptance import stored


def work(key: str, seconds: float = 0.0) -> None:
    """Do the same as ``stored.work``."""
    stored.work(key, seconds)


def work_until_killed(key: str) -> None:
    """Do the same as ``stored.work_until_killed``."""
    stored.work_until_killed(key)
