"""A statement of ours, as it is sent and as its rows are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any
from uuid import UUID

from sqlalchemy import Table

from apscheduler_tasklock._lock.statements.history import History
from apscheduler_tasklock.schema.table import quoted_name


class Statement:
    """A statement of ours, for a ``psycopg.RawCursor``.

    Its named parameters are numbered here, once. Else psycopg takes a statement of more than 4,096
    characters apart each time that it is sent, which costs as much as the round trip.

    :param template: with psycopg's named placeholders
    :param answers: the named tuple that each of its rows becomes, if they do: its fields are named
        as the columns
    :ivar text: with numbered placeholders
    :ivar query: what is sent
    """

    def __init__(self, template: str, answers: Any = None) -> None:
        self.answers = answers
        self._names: list[str] = []
        self._columns: list[str] = []
        self._read: Callable[[Sequence[Any]], Any] | None = None
        # In one line, in which a name keeps its spaces.
        one_line = re.sub(r"\s*\n\s*", " ", template.strip())
        self.text = re.sub(r"%%|%\((\w+)\)s", self._numbered, one_line)
        # As bytes, which are the same in each encoding: psycopg looks a statement up by its hash,
        # which bytes keep; a text is encoded anew each time, and all of it is hashed.
        self.query = self.text.encode() if self.text.isascii() else self.text

    def _numbered(self, found: re.Match[str]) -> str:
        name = found[1]
        if name is None:
            return "%"
        if name not in self._names:
            self._names.append(name)
        return f"${self._names.index(name) + 1}"

    def arguments(self, parameters: Mapping[str, object]) -> list[object]:
        """Return those of the parameters that it has, in order."""
        return [parameters[name] for name in self._names]

    def one(self, cursor: Any) -> Any:
        """Return the row that a cursor has got for it, as a named tuple; ``None``: it has none."""
        row = cursor.fetchone()
        return None if row is None else self._reader(cursor)(row)

    def by_claim_id(self, cursor: Any) -> dict[UUID, Any]:
        """Return the rows that a cursor has got for it, by the claims that were asked for."""
        rows = cursor.fetchall()
        if not rows:
            return {}
        read, claim_id = self._reader(cursor), self._columns.index("asked_claim_id")
        return {row[claim_id]: read(row) for row in rows}

    def _reader(self, cursor: Any) -> Callable[[Sequence[Any]], Any]:
        """Return what makes a named tuple of a row. It is made with the first one.

        psycopg's own would look for the names of the columns with each answer.
        """
        if self._read is None:
            kind = self.answers
            self._columns = [column.name for column in cursor.description]
            fields = [name for name in kind._fields if name in self._columns]
            pick = itemgetter(*(self._columns.index(name) for name in fields))
            # Those that it lacks come last, and have defaults.
            self._read = lambda row: kind(*pick(row))
        return self._read


class RecordingStatement(Statement):
    """A statement that writes run history as well, and the same one without that.

    :param make: returns the statement's text for a table, and for a history as well
    :param is_batch: whether it is for many requests
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
    """Return a table's name for a statement with psycopg's placeholders, which begin with ``%``."""
    return quoted_name(table).replace("%", "%%")
