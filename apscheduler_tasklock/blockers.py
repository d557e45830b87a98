"""Runs that block tasks: each is to be told of once, however many run times it costs."""

from __future__ import annotations


class Blockers:
    """What a replica has told of the runs that block its tasks."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def is_news(self, task_name: str, token: int) -> bool:
        """Tell whether a run that blocks its task is met here for the first time."""
        known, self._known[task_name] = self._known.get(task_name), token
        return known != token
