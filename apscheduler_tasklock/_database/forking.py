"""Forked children: what they inherit of their parent's locks, threads and connections, and drop."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Inherited(Protocol):
    """Something of which a forked child must not use its parent's state."""

    def begin_anew(self) -> None:
        """Start without what was inherited. Called in a forked child, before anything else."""


_inherited: WeakSet[Inherited] = WeakSet()


def begins_anew_in_a_fork(inherited: Inherited) -> None:
    """Let ``begin_anew`` be called in each child that is forked from now on.

    At the fork, and not when the child first uses the object: a lock may be held at that moment by
    a thread that the child does not have, and would never be let go; and two threads of the child
    that found at the same time that they are in a child would both begin anew.
    """
    _inherited.add(inherited)


def _begin_all_anew() -> None:
    for inherited in list(_inherited):
        inherited.begin_anew()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_begin_all_anew)
