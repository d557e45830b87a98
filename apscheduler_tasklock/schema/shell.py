"""Quotes words of shell commands in messages."""

from __future__ import annotations

import shlex

from apscheduler_tasklock.schema.table import DEFAULT_TABLE


def word(text: str) -> str:
    """Return a text as one word of a POSIX shell, in printable characters.

    Characters that a terminal or an interactive shell would interpret are written as bytes. A text
    with such characters loses the line breaks at its end.
    """
    if text.isprintable():
        return shlex.quote(text)
    escaped = "".join(c if c.isprintable() and c not in "'\\!" else _bytes_of(c) for c in text)
    return f"\"$(printf %b '{escaped}')\""


def table_options(schema: str | None, table: str = DEFAULT_TABLE) -> list[str]:
    """Return the options that name a task lock table; default names need none."""
    given = {"--schema": schema, "--table": None if table == DEFAULT_TABLE else table}
    return [_option(name, value) for name, value in given.items() if value is not None]


def _option(name: str, value: str) -> str:
    separator = "=" if value.startswith("-") else " "  # so that the value is not read as an option
    return f"{name}{separator}{word(value)}"


def _bytes_of(character: str) -> str:
    return "".join(f"\\0{byte:03o}" for byte in character.encode(errors="surrogateescape"))
