"""The rows of the night's moments, what was told at them, and the ledger, as one file.

A row that does not change from one moment to the next is kept once. At a moment of the recording
the rows are put into a database whose clock stands still at that moment.
"""

from __future__ import annotations

import json
import lzma
import re
import sys
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from apscheduler_tasklock.demo.history import Event

TABLES = ("task_lock", "task_lock_run", "task_lock_replica", "task_lock_job")
FILE = Path(__file__).parent / "recorded.json.xz"
ROOT = Path(__file__).parents[2]

# Limits the bytes of the recording in the repository.
LARGEST = 300_000

Rows = dict[str, list[dict[str, Any]]]


@dataclass
class Moment:
    """What the database had at a moment of the night.

    :ivar name: what had happened
    :ivar now: the database's time
    :ivar rows: the rows by their tables
    :ivar told: what the commands and the pages told at that time; a recording leaves it out
    """

    name: str
    now: datetime
    rows: Rows
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def at(self) -> float:
        """The database's time in seconds."""
        return self.now.timestamp()


@dataclass
class Night:
    """What is known of a night.

    :ivar begin: when it began, in seconds
    """

    begin: float
    events: list[Event]
    moments: list[Moment]

    def moment(self, name: str) -> Moment:
        """Return the moment of a name."""
        return next(each for each in self.moments if each.name == name)

    def save(self, path: Path) -> None:
        """Write the night to a file, without what was told."""
        rows: dict[str, tuple[str, Any, list[int]]] = {}
        for place, moment in enumerate(self.moments):
            for table, found in moment.rows.items():
                for row in found:
                    text = json.dumps([table, row], sort_keys=True)
                    rows.setdefault(text, (table, row, []))[2].append(place)
        kept = {
            "begin": self.begin,
            "moments": [[each.name, each.now.isoformat()] for each in self.moments],
            "events": [json.loads(event.line) for event in self.events],
            # Neighbours are alike, which makes the file small.
            "rows": sorted(rows.values(), key=lambda each: json.dumps(each[:2], sort_keys=True)),
        }
        text = json.dumps(kept, separators=(",", ":"))
        for folder in (str(ROOT), sys.prefix, sys.base_prefix):  # of tracebacks
            text = text.replace(folder, "/srv/shop")
        path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))

    @classmethod
    def load(cls, path: Path = FILE) -> Night:
        """Return the night of a file."""
        kept = json.loads(lzma.decompress(path.read_bytes()))
        moments = [
            Moment(name, datetime.fromisoformat(now), {table: [] for table in TABLES})
            for name, now in kept["moments"]
        ]
        for table, row, places in kept["rows"]:
            for place in places:
                moments[place].rows[table].append(row)
        return cls(kept["begin"], [Event(**event) for event in kept["events"]], moments)


def read_rows(connection: psycopg.Connection[Any]) -> tuple[datetime, Rows]:
    """Return the database's time and all rows, as they are at one time."""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        connection.execute("SET LOCAL timezone = 'UTC'")
        # The first statement of the transaction decides which rows the others see.
        found = connection.execute("SELECT clock_timestamp()").fetchone()
        assert found is not None
        rows = {
            table: [row for [row] in connection.execute(f"SELECT to_jsonb(t) FROM {table} AS t")]
            for table in TABLES
        }
    for replica in rows["task_lock_replica"]:  # whose hosts are this machine
        replica["host"] = replica["replica_id"].partition(":")[0]
    return found[0], rows


_CLOCK = """
    CREATE SCHEMA still;
    CREATE TABLE still.clock (time timestamptz);
    CREATE FUNCTION still.now() RETURNS timestamptz STABLE LANGUAGE sql
        AS 'SELECT time FROM still.clock';
    GRANT USAGE ON SCHEMA still TO PUBLIC;
    GRANT SELECT ON still.clock TO PUBLIC;
"""


def stop_clock(connection: psycopg.Connection[Any]) -> None:
    """Give a database a clock that stands still, in sessions that begin from now on.

    A schema before ``pg_catalog`` in the search path wins, so the ``now()`` of the shipped
    statements is this one.
    """
    connection.execute(_CLOCK)
    path = "ALTER DATABASE {} SET search_path = still, pg_catalog, public"
    connection.execute(sql.SQL(path).format(sql.Identifier(connection.info.dbname)))


def show_moment(connection: psycopg.Connection[Any], moment: Moment) -> None:
    """Put a moment's rows into a database in place of those that it has, and set its clock.

    Columns that the recording lacks get their defaults, and columns that it alone has are left out.
    """
    with connection.transaction():
        connection.execute("DELETE FROM still.clock")
        connection.execute("INSERT INTO still.clock VALUES (%s)", [moment.now])
        for table, rows in moment.rows.items():
            connection.execute(f"DELETE FROM {table}")
            found = connection.execute(f"SELECT * FROM {table} LIMIT 0").description or ()
            names = [each.name for each in found if rows and each.name in rows[0]]
            if names:
                listed = sql.SQL(", ").join(map(sql.Identifier, names))
                statement = sql.SQL(
                    "INSERT INTO {table} ({listed}) SELECT {listed} FROM"
                    " jsonb_populate_recordset(NULL::{table}, %s)"
                ).format(table=sql.Identifier(table), listed=listed)
                connection.execute(statement, [Jsonb(rows)])


# ---- a night of hours ----------------------------------------------------------------------------

# How many times longer the stretched night takes, so that seconds are minutes; and when it ends.
FACTOR = 60
ENDS_ON = datetime(2026, 1, 31, 6, tzinfo=timezone.utc)

# The moment that pictures and tests of drawings show.
PICTURED = "operators have been at work"

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00")
# The times of JSON columns that are in seconds, and the replicas' times that stay fresh.
_IN_SECONDS = ("since", "until")
_FRESH = timedelta(seconds=60)


def stretched(night: Night, name: str) -> Moment:
    """Return a moment of the night as if it had gone on for hours, until shortly after six.

    A second becomes a minute, in schedules too, so that drawings show what an operator would see.
    What words in the rows say of seconds is left as it is, and so are leases.
    """
    moment = night.moment(name)
    began = datetime.fromtimestamp(night.begin, timezone.utc)
    # Whole hours earlier, so that round times stay round.
    hours = int((moment.now - began).total_seconds() * FACTOR // 3600)
    stretch = _Stretch(began, ENDS_ON - timedelta(hours=hours))
    rows = {table: [stretch.row(row) for row in found] for table, found in moment.rows.items()}
    now = stretch.moment(moment.now)
    for place, replica in enumerate(moment.rows["task_lock_replica"]):
        unseen = moment.now - datetime.fromisoformat(replica["seen_at"])
        if unseen < _FRESH:
            rows["task_lock_replica"][place]["seen_at"] = (now - unseen).isoformat()
    return Moment(name, now, rows)


@cache
def pictured() -> Moment:
    """Return the moment that pictures and tests of drawings show, of the stretched night."""
    return stretched(Night.load(), PICTURED)


def show_pictured(connection: psycopg.Connection[Any]) -> None:
    """Put that moment into a database, whose clock stands still from now on."""
    stop_clock(connection)
    show_moment(connection, pictured())


@dataclass(frozen=True)
class _Stretch:
    """Moves times.

    :ivar began: the begin of the night
    :ivar begins: the begin of the stretched night
    """

    began: datetime
    begins: datetime

    def moment(self, moment: datetime) -> datetime:
        """Return a time of the stretched night; those before all nights stay."""
        if moment.year < self.began.year:
            return moment
        return self.begins + (moment - self.began) * FACTOR

    def row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row with its times stretched, and its schedule."""
        found: dict[str, Any] = self._value(row)
        for name in ("schedule", "window_schedule"):
            if found.get(name):
                found[name] = json.dumps(_slower(json.loads(found[name])), separators=(",", ":"))
        if "trigger" in found:
            found["trigger"] = _slower(found["trigger"])
        return found

    def _value(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: self._value(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [self._value(each) for each in value]
        if isinstance(value, str):
            return _TIME.sub(
                lambda found: self.moment(datetime.fromisoformat(found[0])).isoformat(), value
            )
        if key in _IN_SECONDS and isinstance(value, (int, float)):
            return self.moment(datetime.fromtimestamp(value, timezone.utc)).timestamp()
        return value


def _slower(schedule: dict[str, Any]) -> dict[str, Any]:
    """Return a schedule whose seconds are minutes."""
    if "parts" in schedule:
        return {**schedule, "parts": [_slower(part) for part in schedule["parts"]]}
    if "fields" in schedule:
        fields = schedule["fields"]
        return {**schedule, "fields": {**fields, "minute": fields["second"], "second": "0"}}
    if schedule["type"] == "interval":
        days, seconds, _ = schedule["length"]
        length = timedelta(days=days, seconds=seconds)
        # An interval of a day stays one: its run times are beyond the night.
        length *= 1 if days else FACTOR
        return {**schedule, "length": [length.days, length.seconds, 0]}
    return schedule
