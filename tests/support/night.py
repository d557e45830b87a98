"""A night of a small fleet, as rows of the tables: for tests of drawings, and for pictures.

The night ends now, at 06:12 by :func:`night_zone`. Three replicas run nine tasks; what goes wrong
is scripted, how long runs take is drawn from a seed.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg

from tests.support.rows import add_action, add_job, add_miss, add_replica, add_run, add_task, paused

# The time of day at which the night is looked at, and how many minutes of it there are.
LOOKED_AT = timedelta(hours=6, minutes=12)
MINUTES = 10 * 60

WEB = ("web-1:4127:9c", "web-2:3980:71", "web-3:4011:e4")
# The process that was started in place of the killed one of web-2.
RESTARTED = "web-2:5230:0b"


@dataclass(frozen=True)
class _Kind:
    """How often a task runs, and how long: seconds, and how far that varies.

    :ivar every: minutes between its run times; ``None``: it runs once, at ``first``
    :ivar first: minutes from the end of the night back to its last run time
    """

    every: int | None
    first: float
    takes: float
    varies: float = 0.25
    grows: float = 0.0


TASKS = {
    "daily-report": _Kind(None, 42, 760),
    "import-orders": _Kind(10, 2, 95, 0.4),
    "mail-queue": _Kind(3, 0.2, 28, 0.7),
    "nightly-backup": _Kind(None, 312, 3100),
    "remind-customers": _Kind(15, 12, 14),
    "search-index": _Kind(30, 12, 420, 0.1, grows=0.9),
    "sync-prices": _Kind(5, 2, 34, 0.4),
    "thumbnails": _Kind(60, 6, 640, 0.2),
}
CLEAN_UP = "clean-up"
# The tasks that run at the end of the night, and where.
GOES_ON = {"thumbnails": WEB[2], "mail-queue": WEB[0]}

# Spans of minutes before the end of the night.
OUTAGES = ((54, 48), (300, 292))
PAUSE_OF_ALL = (16, 11)
PAUSE_OF_CLEAN_UP = (230, 150)
KILLED = 34.5

TRACEBACK = """\
  File "/srv/shop/jobs/prices.py", line 41, in sync_prices
    rates = client.fetch("EUR", timeout=10)
  File "/srv/shop/clients/rates.py", line 88, in fetch
    raise RatesUnavailable(f"HTTP {answer.status}")"""


def night_zone(now: datetime) -> str:
    """Return a ``TZ`` by which it is 06:12 now, and which is called UTC."""
    local = timedelta(hours=now.hour, minutes=now.minute, seconds=now.second)
    ahead = LOOKED_AT - local
    if ahead < timedelta(hours=-12):
        ahead += timedelta(days=1)
    sign, seconds = ("-", ahead) if ahead >= timedelta(0) else ("", -ahead)
    hours, rest = divmod(int(seconds.total_seconds()), 3600)
    # POSIX writes how far a zone is behind.
    return f"UTC{sign}{hours}:{rest // 60:02}:{rest % 60:02}"


def add_night(connection: psycopg.Connection[Any], seed: int = 7) -> datetime:
    """Add the rows of the night, and return the time at which it ends: the database's time."""
    found = connection.execute("SELECT now()").fetchone()
    assert found is not None
    # In whole seconds, so that the times in the pages are always the same.
    end = found[0].astimezone(timezone.utc).replace(microsecond=0)
    night = _Night(connection, end, random.Random(seed))  # noqa: S311  # repeatable
    with connection.transaction():
        night.add()
    return night.end


def _is_in(minute: float, *spans: tuple[float, float]) -> bool:
    return any(until < minute <= since for since, until in spans)


class _Night:
    def __init__(
        self, connection: psycopg.Connection[Any], end: datetime, rng: random.Random
    ) -> None:
        self.connection = connection
        self.end = end
        self.rng = rng
        self.tokens: dict[str, int] = defaultdict(lambda: rng.randrange(400, 900))
        self.slots: dict[str, int] = defaultdict(int)
        # The last run of each task: how many minutes ago it began, and the seconds that it took.
        self.began: dict[str, float] = {}
        self.took: dict[str, float] = {}

    def at(self, minutes_ago: float) -> str:
        """Return a time of the night as SQL."""
        moment = self.end - timedelta(minutes=minutes_ago)
        return f"'{moment.isoformat()}'::timestamptz"

    def add(self) -> None:
        for task, kind in TASKS.items():
            self.add_runs(task, kind)
        self.add_clean_up()
        self.add_report()
        self.add_actions()
        self.add_tasks()
        self.add_replicas()
        for job, minutes in (("newsletter-may", 48), ("invoice-4711", 7)):
            add_job(
                self.connection,
                job,
                func="'shop.jobs:send'",
                next_run_time=self.at(-minutes),
            )
        self.keep_history()

    def keep_history(self) -> None:
        """Keep as many runs of the most frequent task as replicas do, and count all."""
        counted = "(SELECT count(*) FROM task_lock_run AS run WHERE run.task_name = lock.task_name"
        self.connection.execute(
            f"UPDATE task_lock AS lock SET recorded = {counted} AND ring = 'runs'),"
            f" recorded_failures = {counted} AND ring = 'failures'),"
            f" recorded_misses = {counted} AND ring = 'misses'),"
            " succeeded_at = (SELECT max(ended_at) FROM task_lock_run AS run"
            "                 WHERE run.task_name = lock.task_name AND ring = 'runs')"
        )
        self.connection.execute(
            "DELETE FROM task_lock_run WHERE task_name = 'mail-queue' AND ring = 'runs' AND slot IN"
            " (SELECT slot FROM task_lock_run WHERE task_name = 'mail-queue' AND ring = 'runs'"
            "  ORDER BY ended_at DESC OFFSET 100)"
        )

    def replica(self, minute: float) -> str:
        """Return a replica that was alive at a time."""
        second = WEB[1] if minute > KILLED else RESTARTED
        alive = [WEB[0], WEB[2], second]
        if KILLED - 2 < minute <= KILLED:
            alive.pop()
        return self.rng.choice(alive)

    def run(self, task: str, begins: float, takes: float, **changes: str) -> None:
        """Add a run that has begun so many minutes ago and took so many seconds."""
        self.tokens[task] += 1
        self.began[task], self.took[task] = begins, takes
        scheduled = self.at(begins)
        values = {
            "scheduled_at": scheduled,
            "started_at": self.at(begins - 0.003),
            "ended_at": self.at(begins - takes / 60),
            "replica": f"'{self.replica(begins)}'",
            **changes,
        }
        add_run(self.connection, task, self.tokens[task], **values)

    def missed(self, task: str, since: float, until: float, times: int, **changes: str) -> None:
        self.slots[task] += 1
        values = {
            "scheduled_at": self.at(since),
            "last_scheduled_at": self.at(until),
            "started_at": self.at(until),
            "ended_at": self.at(until),
            "run_times": str(times),
            "replica": f"'{WEB[0]}'",
            **changes,
        }
        add_miss(self.connection, task, self.slots[task], **values)

    def add_runs(self, task: str, kind: _Kind) -> None:
        """Add the runs of a task, and the run times that it has missed."""
        if task == "daily-report":
            return  # see add_report
        count = MINUTES // kind.every if kind.every else 1
        missed: dict[tuple[int, int], list[float]] = defaultdict(list)
        for place in reversed(range(count)):
            minute = kind.first + place * (kind.every or 0)
            span = next((one for one in (*OUTAGES, PAUSE_OF_ALL) if _is_in(minute, one)), None)
            if span is not None:
                missed[span].append(minute)
            elif place or task not in GOES_ON:
                self.add_run_of(task, minute, self.takes(kind, minute))
        for span, times in missed.items():
            cause, reason = ("database", "no connection")
            if span == PAUSE_OF_ALL:
                cause, reason = ("paused", "all tasks were paused")
            self.missed(
                task, times[0], times[-1], len(times), cause=f"'{cause}'", reason=f"'{reason}'"
            )

    def takes(self, kind: _Kind, minute: float) -> float:
        """Return the seconds that a run takes; it has ended by the end of the night."""
        grown = 1 + kind.grows * (1 - minute / MINUTES)
        varied = grown * max(0.2, self.rng.gauss(1, kind.varies if kind.every else 0))
        return min(kind.takes * varied, 50 * minute)

    def add_run_of(self, task: str, minute: float, takes: float) -> None:
        if task == "sync-prices" and minute in {22, 187}:
            failed = {
                "outcome": "'error'",
                "error_type": "'RatesUnavailable'",
                "error": "'HTTP 503'",
                "traceback": f"$tb${TRACEBACK}$tb$",
                "attempt": "1",
                "retry_at": self.at(minute - 1.7),
            }
            self.run(task, minute, 11, **failed)
            self.run(
                task,
                minute - 1.7,
                takes,
                kind="'retry'",
                attempt="2",
                scheduled_at=self.at(minute),
            )
            return
        if task == "import-orders" and minute == 252:
            error = {"error_type": "'TimeoutError'", "error": "'the warehouse did not answer'"}
            self.run(task, minute, 120, outcome="'error'", **error)
            return
        self.run(task, minute, takes)

    def add_clean_up(self) -> None:
        since, until = PAUSE_OF_CLEAN_UP
        for minute in (520, 400, 280):
            self.run(CLEAN_UP, minute, 190)
        self.missed(
            CLEAN_UP,
            160,
            160,
            1,
            cause="'paused'",
            reason="'ann@ops had paused the task (migration of orders)'",
        )
        self.run(CLEAN_UP, 40, 205)
        add_action(
            self.connection,
            CLEAN_UP,
            1,
            started_at=self.at(since),
            ended_at=self.at(since),
            until=self.at(until - 30),
            reason="'migration of orders'",
        )
        add_action(
            self.connection,
            CLEAN_UP,
            2,
            started_at=self.at(until),
            ended_at=self.at(until),
            outcome="'resumed'",
            until="NULL",
            reason="NULL",
        )

    def add_report(self) -> None:
        """Let web-2 be killed in the run of the report, and another replica take it over."""
        begins = TASKS["daily-report"].first
        died = {"outcome": "'died'", "replica": f"'{WEB[1]}'", "ended_at": self.at(KILLED)}
        self.run("daily-report", begins, 0, **died)
        taken = KILLED - 0.9
        self.run(
            "daily-report",
            taken,
            TASKS["daily-report"].takes,
            kind="'takeover'",
            replica=f"'{WEB[0]}'",
            scheduled_at=self.at(begins),
        )

    def add_actions(self) -> None:
        since, until = PAUSE_OF_ALL
        add_action(
            self.connection,
            CLEAN_UP,
            3,
            started_at=self.at(35),
            ended_at=self.at(35),
            until=self.at(-100),
            reason="'the disk is being replaced'",
        )
        all_tasks = "\x01pauses"
        add_action(
            self.connection,
            all_tasks,
            1,
            started_at=self.at(since),
            ended_at=self.at(since),
            until=self.at(until - 20),
            reason="'deploy of 2.8'",
        )
        add_action(
            self.connection,
            all_tasks,
            2,
            started_at=self.at(until),
            ended_at=self.at(until),
            outcome="'resumed'",
            until="NULL",
            reason="NULL",
        )
        add_action(
            self.connection,
            "sync-prices",
            1,
            started_at=self.at(180),
            ended_at=self.at(180),
            outcome="'acknowledged'",
            until="NULL",
            reason="NULL",
        )

    def add_tasks(self) -> None:
        for task in (*TASKS, CLEAN_UP):
            kind = TASKS.get(task)
            every = (kind.every if kind else 120) or 1440
            schedule = json.dumps(
                {
                    "end": None,
                    "jitter": 0.0,
                    "length": [every // 1440, every % 1440 * 60, 0],
                    "start": None,
                    "type": "interval",
                }
            )
            # A run time that was missed since then is followed by the next one all the same.
            due = every - (kind.first if kind else 40.0)
            began = kind.first if kind and task in GOES_ON else self.began[task]
            last = kind.first if kind and kind.every is None else began
            ended = self.at(began - self.took[task] / 60)
            values = {
                "token": str(self.tokens[task] + (task in GOES_ON)),
                "runs": f"'shop.jobs:{task.replace('-', '_')}'",
                "schedule": f"'{schedule}'",
                "started_at": self.at(began),
                "finished_at": ended,
                "locked_until": ended,
                "window_start": self.at(last),
                "window_until": self.at(last - every),
                "succeeded_at": ended,
                "locked_by": f"'{WEB[0]}'",
                "due_at": self.at(-due),
                "overdue_at": self.at(-due - 1),
                "run_until": self.at(last - 4 * every),
            }
            if task in GOES_ON:
                holder = GOES_ON[task]
                values |= {
                    "finished_at": "NULL",
                    "locked_until": self.at(-20),
                    "locked_by": f"'{holder}'",
                }
            if task == CLEAN_UP:
                pause = paused("'ann@ops'", "'the disk is being replaced'", self.at(-100))
                values |= {**pause, "paused_at": self.at(35)}
            add_task(self.connection, task, **values)

    def add_replicas(self) -> None:
        tasks = [*TASKS, CLEAN_UP]
        alive = {"seen_at": "now() + interval '1 h'", "version": "'0.1.0'"}
        for replica in (WEB[0], WEB[2], RESTARTED):
            host = replica.partition(":")[0]
            started = self.at(KILLED - 3 if replica == RESTARTED else MINUTES + 200)
            add_replica(
                self.connection,
                replica,
                tasks,
                **{**alive, "host": f"'{host}'", "started_at": started},
            )
        dead = {"seen_at": self.at(KILLED + 0.4), "host": "'web-2'", "version": "'0.1.0'"}
        add_replica(
            self.connection, WEB[1], tasks, **{**dead, "started_at": self.at(MINUTES + 200)}
        )
