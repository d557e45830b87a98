"""Forked children: each child replaces the locks, threads and connections that it inherits.

An executor, a job store, a ``TaskLocks``, Flask's extension and a test's stand-in replace their
replica, with its connection and its thread. A held lock stays with the parent.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Inherited(Protocol):
    """An object whose inherited state a forked child must not use."""

    def _replace_in_child(self) -> None:
        """Replace the inherited state. Called in a forked child, before all other code."""


_inherited: WeakSet[Inherited] = WeakSet()


def replace_in_each_child(inherited: Inherited) -> None:
    """Let ``_replace_in_child`` be called in each child that is forked from now on.

    The method is called at the fork, and not at the child's first use of the object, for two
    reasons. First, a thread that the child does not have may own one of the object's locks, which
    would never be released. Second, two threads of the child could both replace the state.
    """
    _inherited.add(inherited)


def _replace_all() -> None:
    for inherited in list(_inherited):
        inherited._replace_in_child()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_replace_all)
