"""Statements: how they are sent, and how the rows of their answers are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any
from uuid import UUID

from sqlalchemy import Table

from apscheduler_tasklock._lock.statements.history import History
from apscheduler_tasklock.schema.table import quoted_name


@lru_cache(maxsize=512)  # each client of a replica has the same 100 statements
def _numbered(template: str) -> tuple[str, Sequence[str]]:
    """Return a template's text with numbered placeholders, and their names in that order."""
    names: list[str] = []

    def number(found: re.Match[str]) -> str:
        name = found[1]
        if name is None:
            return "%"
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}"

    # Only line breaks, with the spaces around them, become one space. Spaces in a quoted name stay.
    one_line = re.sub(r"\s*\n\s*", " ", template.strip())
    return re.sub(r"%%|%\((\w+)\)s", number, one_line), tuple(names)


class Statement:
    """A statement for a ``psycopg.RawCursor``.

    Its named parameters are numbered once, here. Otherwise psycopg would parse a statement of more
    than 4,096 characters each time that it is sent, which takes as long as the round trip.

    :param template: the text with psycopg's named placeholders
    :param answers: the named tuple of a row, with fields named like columns; ``None``: rows are not
        read as named tuples
    :ivar text: the text with numbered placeholders
    :ivar query: the query to send
    """

    def __init__(self, template: str, answers: Any = None) -> None:
        self.answers = answers
        self._columns: list[str] = []
        self._read: Callable[[Sequence[Any]], Any] | None = None
        self.text, self._names = _numbered(template)
        # Send bytes if all is ASCII, because psycopg encodes a text and hashes the result each time
        # that it is sent, while bytes keep their hash.
        self.query = self.text.encode() if self.text.isascii() else self.text

    def arguments(self, parameters: Mapping[str, object]) -> list[object]:
        """Return the values of the statement's parameters, in their order."""
        return [parameters[name] for name in self._names]

    def one(self, cursor: Any) -> Any:
        """Return the cursor's row as a named tuple; ``None``: there is no row."""
        row = cursor.fetchone()
        return None if row is None else self._reader(cursor)(row)

    def by_claim_id(self, cursor: Any) -> dict[UUID, Any]:
        """Return the cursor's rows as named tuples, by the claim ids of the requests."""
        rows = cursor.fetchall()
        if not rows:
            return {}
        read, claim_id = self._reader(cursor), self._columns.index("asked_claim_id")
        return {row[claim_id]: read(row) for row in rows}

    def _reader(self, cursor: Any) -> Callable[[Sequence[Any]], Any]:
        """Return the function that makes a named tuple of a row.

        The function is made once, at the first row, because it would take time to look up the names
        of the columns with each answer, as psycopg's own row factory does.
        """
        if self._read is None:
            kind = self.answers
            self._columns = [column.name for column in cursor.description]
            fields = [name for name in kind._fields if name in self._columns]
            pick = itemgetter(*(self._columns.index(name) for name in fields))
            # Fields without a column come last, and have defaults.
            self._read = lambda row: kind(*pick(row))
        return self._read


class RecordingStatement(Statement):
    """A statement in two forms, with and without an entry in the run history.

    :param make: returns the statement's text, for a table, or for a table and a history
    :param is_batch: whether the statement is for many requests
    """

    def __init__(
        self,
        make: Callable[..., str],
        table: str,
        history: History | None,
        answers: Any = None,
        *,
        is_batch: bool = False,
    ) -> None:
        super().__init__(make(table), answers)
        self.recording = Statement(make(table, history)) if history else None
        self.is_batch = is_batch


def for_template(table: Table) -> str:
    """Return a table's quoted name with ``%`` doubled, for a template of :class:`Statement`."""
    return quoted_name(table).replace("%", "%%")
