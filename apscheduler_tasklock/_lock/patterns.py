"""Patterns of tasks' names, with ``*`` and ``?``, and the expressions of SQL for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# The name of the row with the pauses of all tasks: the value of the SQL in ALL_TASKS.
ROW_OF_ALL = "\x01pauses"


def is_pattern(text: str) -> bool:
    """Return whether ``*`` or ``?`` stand for characters in a text."""
    return bool(set("*?") & set(text))


def like_of(pattern: str) -> str:
    """Return the ``LIKE`` pattern of a glob with ``*`` and ``?``."""
    return escaped(pattern).replace("*", "%").replace("?", "_")


def unmatched(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the patterns that none of these names matches."""
    there = list(names)
    exact = set(there)
    return [
        pattern
        for pattern in patterns
        if pattern not in exact and not any(map(_expression(pattern).fullmatch, there))
    ]


def _expression(pattern: str) -> re.Pattern[str]:
    parts = {"*": ".*", "?": "."}
    return re.compile("".join(parts.get(c) or re.escape(c) for c in pattern), re.DOTALL)


def escaped(name: str) -> str:
    """Return the ``LIKE`` pattern that only this name matches."""
    return "".join(f"\\{character}" if character in "\\%_" else character for character in name)


def names_of_all(beginning: str) -> list[str]:
    """Return the names of the history's entries of all tasks of a namespace, for a task's name.

    Each beginning of the name may be a namespace whose tasks were all paused.

    :param beginning: the name of a task, or what the names of some tasks begin with
    """
    return [f"{ROW_OF_ALL}{beginning[:end]}" for end in range(len(beginning) + 1)]


def shown_name(task: str) -> str:
    """Return the name of an entry's task; for an entry of all tasks of a namespace, its pattern."""
    return f"{task.removeprefix(ROW_OF_ALL)}*" if task.startswith(ROW_OF_ALL) else task
