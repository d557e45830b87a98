"""Forked children: each replaces what it inherits of locks, threads and connections."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Inherited(Protocol):
    """Something of which a forked child must not use its parent's state."""

    def replace_in_child(self) -> None:
        """Make anew what was inherited. Called in a forked child, before anything else."""


_inherited: WeakSet[Inherited] = WeakSet()


def replace_in_each_child(inherited: Inherited) -> None:
    """Let ``replace_in_child`` be called in each child that is forked from now on.

    At the fork, and not when the child first uses the object: a lock may be held at that moment by
    a thread that the child does not have, and would never be released; and two threads of the child
    that found at the same time that they are in a child would both replace it.
    """
    _inherited.add(inherited)


def _replace_all() -> None:
    for inherited in list(_inherited):
        inherited.replace_in_child()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_replace_all)
