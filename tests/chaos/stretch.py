"""A stretch of time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stretch:
    """A stretch of time."""

    begun: float
    ended: float

    def shared_with(self, begun: float, ended: float) -> float:
        """Return how many seconds it has in common with another one."""
        return max(0.0, min(self.ended, ended) - max(self.begun, begun))
