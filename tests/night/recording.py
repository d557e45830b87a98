"""The rows of the night's moments, what was told at them, and the ledger, as one file.

A row that does not change from one moment to the next is kept once. At a moment of the recording
the rows are put into a database whose clock stands still at that moment.
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from apscheduler_tasklock.demo.history import Event

TABLES = ("task_lock", "task_lock_run", "task_lock_replica", "task_lock_job")
FILE = Path(__file__).parent / "recorded.json.xz"

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
