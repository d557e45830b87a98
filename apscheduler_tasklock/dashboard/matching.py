"""The filter of the list of tasks, and what an operator does with all tasks that match it.

The names are not in the form that confirms it, because there may be thousands. The form has the
filter, how many matched, and a digest of their names. If other tasks match when it is sent, it asks
again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apscheduler_tasklock.dashboard.queries import Query, patterns_of
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.status import TaskState

# Limits the tasks that one statement changes. Each takes it about a millisecond.
MOST_MATCHING = 2_000


@dataclass(frozen=True)
class TaskFilter:
    """Which tasks are listed.

    :ivar text: a part of their names, or a pattern; ``None``: any
    :ivar states: their states; empty: any
    """

    text: str | None
    states: tuple[TaskState, ...]

    @classmethod
    def of(cls, query: Query) -> TaskFilter:
        """Return the filter of an address or a form."""
        states = query.several("state", [each.value for each in TaskState])
        return cls(query.text("q"), tuple(map(TaskState, states)))

    def patterns(self, namespace: str) -> tuple[str, ...]:
        """Return the patterns of the names, within a namespace."""
        return patterns_of(namespace, self.text)

    @property
    def fields(self) -> dict[str, str]:
        """The filter as the parameters of an address or a form."""
        fields = {"q": self.text or "", "state": ",".join(each.value for each in self.states)}
        return {name: text for name, text in fields.items() if text}

    def names(self, locks: TaskLocks, namespace: str) -> tuple[str, ...]:
        """Return the names of all tasks that match.

        :raises TaskLockOptionError: there is none, or there are too many to change them at once
        """
        found = locks.tasks(*self.patterns(namespace), states=self.states, limit=MOST_MATCHING + 1)
        if not 1 <= len(found) <= MOST_MATCHING:
            number = f"more than {MOST_MATCHING:,} tasks match" if found else "no task matches"
            raise TaskLockOptionError(f"{number} the filter; choose another one")
        return tuple(task.name for task in found)


@dataclass(frozen=True)
class Shown:
    """The tasks that an operator was shown as those that match.

    :ivar number: how many they were
    :ivar digest: of their names
    """

    number: int
    digest: str

    @classmethod
    def of(cls, names: Sequence[str]) -> Shown:
        """Return what a form has of the tasks that it shows."""
        text = json.dumps(sorted(names)).encode()
        return cls(len(names), hashlib.sha256(text).hexdigest())

    @classmethod
    def in_form(cls, fields: Query) -> Shown:
        """Return what the form had that was sent."""
        return cls(fields.number("number", 0, 0, MOST_MATCHING), fields.text("digest") or "")

    @property
    def fields(self) -> Mapping[str, str]:
        """The parameters of a form."""
        return {"number": str(self.number), "digest": self.digest}
