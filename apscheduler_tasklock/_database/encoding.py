"""Texts that a database cannot store, because its encoding lacks one of their characters."""

from __future__ import annotations

import codecs
from typing import Any

from apscheduler_tasklock._database.sqlstates import UnstorableNameError


def lacking(connection: Any, text: str) -> str | None:
    """Return the encoding that lacks a character of a text; ``None`` if the text can be stored.

    This also returns ``None`` for an encoding that Python does not know, so that the server
    decides, and for ``SQL_ASCII``, which takes all bytes.

    :param connection: a psycopg connection; ``None`` where there is no database
    """
    if connection is None or text.isascii():
        return None
    for whose in ("client_encoding", "server_encoding"):
        name = connection.info.parameter_status(whose) or ""
        try:
            text.encode(codecs.lookup(_python_name(name)).name)
        except LookupError:
            continue
        except UnicodeEncodeError:
            return name
    return None


def unstorable(connection: Any, task_name: str) -> UnstorableNameError | None:
    """Return the error for a task name that cannot be stored; ``None`` if it can be stored."""
    encoding = lacking(connection, task_name)
    if encoding is None:
        return None
    return UnstorableNameError(
        f"task {task_name!r}: its name has characters that the encoding {encoding} of the database "
        "lacks; choose another name (that of a job is its id, or its option 'name')"
    )


def _python_name(encoding: str) -> str:
    return encoding.replace("WIN", "cp").replace("KOI8", "koi8_")
