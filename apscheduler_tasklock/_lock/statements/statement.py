"""Statements: how they are sent, and how the rows of their answers are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

from sqlalchemy import Table

from apscheduler_tasklock._lock.parameters import Parameters
from apscheduler_tasklock._lock.statements.history import History
from apscheduler_tasklock.schema.table import quoted_name


@lru_cache(maxsize=512)  # each user of a replica has the same 100 statements
def _numbered(template: str, types: tuple[tuple[str, str], ...]) -> tuple[str, Sequence[str]]:
    """Return a template's text with numbered placeholders, and their names in that order."""
    names: list[str] = []
    sql_types = dict(types)

    def number(found: re.Match[str]) -> str:
        name, cast = found.groups()
        if name is None:
            return "%"
        if name not in names:
            names.append(name)
        if not cast and name in sql_types:
            cast = f"::{sql_types[name]}"
        return f"${names.index(name) + 1}{cast}"

    # Only line breaks, with the spaces around them, become one space. Spaces in a quoted name stay.
    one_line = re.sub(r"\s*\n\s*", " ", template.strip())
    return re.sub(r"%%|%\((\w+)\)s((?:::)?)", number, one_line), tuple(names)


class Statement:
    """A statement for a ``psycopg.RawCursor``.

    Its named parameters are numbered once, here. Otherwise psycopg would parse a statement of more
    than 4,096 characters each time that it is sent, which takes as long as the round trip.

    :param template: the text with psycopg's named placeholders
    :param answers: the named tuple of a row, with fields named like columns; ``None``: rows are not
        read as named tuples
    :param request: the class of the parameters; a placeholder without a cast gets the type of its
        parameter
    :ivar form: the form of the statement that is sent as a rule
    :ivar is_batch: whether the statement is for many requests
    :ivar text: the text with numbered placeholders
    :ivar query: the query to send
    :ivar arguments: returns the values of the statement's parameters, in their order
    """

    def __init__(
        self, template: str, answers: Any = None, request: type[Parameters] = Parameters
    ) -> None:
        self.answers = answers
        self.form = self
        self.is_batch = False
        self.text, self._names = _numbered(template, tuple(request.types.items()))
        # Send bytes if all is ASCII, because psycopg encodes a text and hashes the result each time
        # that it is sent, while bytes keep their hash.
        self.query = self.text.encode() if self.text.isascii() else self.text
        self.arguments: Callable[[Mapping[str, object]], Sequence[object]]
        if len(self._names) > 1:
            self.arguments = itemgetter(*self._names)
        else:
            self.arguments = lambda parameters: [parameters[name] for name in self._names]
        # The columns are looked up once, at the first answer, because that takes time.
        self._columns: list[str] = []
        self._pick: Callable[[Sequence[Any]], tuple[Any, ...]] = tuple
        self._defaults: tuple[Any, ...] = ()
        # Makes the named tuple from its values, without a call of Python's.
        self._make: Callable[[tuple[Any, ...]], Any] = partial(tuple.__new__, answers)

    def one(self, cursor: Any) -> Any:
        """Return the cursor's row as a named tuple; ``None``: there is no row."""
        row = cursor.fetchone()
        if row is None:
            return None
        if not self._columns:
            self._read_columns(cursor)
        return self._make(self._pick(row) + self._defaults)

    def by_column(self, cursor: Any, name: str) -> dict[Any, Any]:
        """Return the cursor's rows as named tuples, by the values of a column."""
        rows = cursor.fetchall()
        if not self._columns:
            self._read_columns(cursor)
        make, pick, key = self._make, self._pick, self._columns.index(name)
        return {row[key]: make(pick(row) + self._defaults) for row in rows}

    def _read_columns(self, cursor: Any) -> None:
        self._columns = cursor.columns
        fields = [name for name in self.answers._fields if name in self._columns]
        self._pick = itemgetter(*map(self._columns.index, fields))
        # Fields without a column come last, and have defaults.
        missing = self.answers._fields[len(fields) :]
        self._defaults = tuple(self.answers._field_defaults[name] for name in missing)


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
        request: type[Parameters] = Parameters,
        *,
        is_batch: bool = False,
    ) -> None:
        super().__init__(make(table), answers, request)
        self.recording = Statement(make(table, history), None, request) if history else None
        self.form = self.recording or self
        self.is_batch = is_batch


def for_template(table: Table) -> str:
    """Return a table's quoted name with ``%`` doubled, for a template of :class:`Statement`."""
    return quoted_name(table).replace("%", "%%")
