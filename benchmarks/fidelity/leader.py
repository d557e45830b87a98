"""A replica's part in leader mode: the library's own decisions, in travelled time.

What stands in for others is the client, which sends the statements that ship on the travelling
connection, and the run, of which a look needs only when it was due.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

from apscheduler_tasklock._database.sequences import Statement, ask_here
from apscheduler_tasklock._runs.deferred_runs import LastRun, Outlook
from apscheduler_tasklock._runs.leadership import FollowerRun, Leadership
from benchmarks.fidelity.rules import TASK, TIMINGS, TaskLockWithLeader
from benchmarks.fidelity.trace import Fire
from tests.support.waist import LockProtocol, Message, ReadTasks


class LeaderClient:
    """Sends what the leadership asks for, and has no outages."""

    outage = SimpleNamespace(reason=None)
    settings = SimpleNamespace(timings=TIMINGS)

    def __init__(self, replica_id: str, protocol: LockProtocol, cursor: Callable[[], Any]) -> None:
        self.replica_id = replica_id
        self.database = self
        self._protocol = protocol
        self._cursor = cursor

    def carrying_out(self, message: Message[Any]) -> Statement:
        """Return the statement that carries out a message."""
        return partial(self._protocol.execute, message=message)

    def begin_despite_stop(self, message: Message[Any]) -> None:
        """Send a message, such as that the leadership is given up."""
        self._protocol.execute(self._cursor(), message)


class Member:
    """A replica in leader mode.

    :ivar kept: the last run time that a follower keeps, because APScheduler coalesces
    :ivar looked_at: when its last look was, in seconds since the beginning
    """

    def __init__(self, rule: TaskLockWithLeader, replica_id: str) -> None:
        self._rule = rule
        self._protocol = rule.protocol_of(replica_id)
        self.looked_at = -inf
        locks: Any = LeaderClient(replica_id, self._protocol, rule.cursor)
        self._leadership = Leadership(
            locks,
            "",
            rule.leader_lease,
            lambda: rule.poll_interval,
            clock=lambda: self.looked_at,
        )
        self.kept: Fire | None = None

    @property
    def leads(self) -> bool:
        """Whether this replica leads, as its last look has found it."""
        return self._leadership.leads

    def renew(self, now: float) -> None:
        """Go on with the leadership, as the leader's look does."""
        self.looked_at = now
        ask_here(self._leadership.take_or_renew(None), self._ask)

    def resign(self) -> None:
        """Give the leadership up, for good."""
        self._leadership.close()

    def look(self, now: float) -> Outlook:
        """Take the leadership if it is free; return what becomes of the kept run time."""
        self.looked_at = now
        names = [self._leadership.row, TASK]
        states, _ = self._protocol.execute(self._rule.cursor(), ReadTasks(names, names))
        rows = {state.task_name: state for state in states}
        ask_here(self._leadership.take_or_renew(rows.get(self._leadership.row)), self._ask)
        if self.kept is None:
            return Outlook.WAITS
        run: Any = SimpleNamespace(due_at=self.kept.time)
        following = FollowerRun(self._leadership, run, partial(self._rule.request, self.kept))
        row = rows.get(TASK)
        if row is None:
            return following.outlook(LastRun(0, finished=False, dead=True, deaths=1, as_of=now))
        return following.outlook(
            LastRun(row.token, row.finished, row.dead, row.deaths, as_of=now, row=row)
        )

    def _ask(self, statement: Statement) -> Any:
        return statement(self._rule.cursor())
