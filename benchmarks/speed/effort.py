"""How much is measured: a full run for RESULTS.md, or a quick run."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    :ivar quick: whether this is the short form
    :ivar rounds: how often each operation of the hot path is measured
    :ivar seed: for the order within the rounds
    """

    quick: bool
    rounds: int
    seed: int

    def of(self, full: T, quick: T) -> T:
        """Return the first value for a full run, the second for a quick one."""
        return quick if self.quick else full

    def rng(self) -> random.Random:
        """Return random numbers that are the same in each run with this seed."""
        return random.Random(self.seed)  # noqa: S311  # an order, no secret


def progress(text: str) -> None:
    """Write to standard error how far the run has come."""
    print(f"  .. {text}", file=sys.stderr, flush=True)
