"""Which text a database can store: the encodings of a connection and of its database."""

from __future__ import annotations

import codecs
from typing import Any

from apscheduler_tasklock._database.errors import UnstorableNameError


def lacking(connection: Any, text: str) -> str | None:
    """Return the encoding that lacks a character of a text; ``None`` if it can be stored.

    One that Python does not know, and ``SQL_ASCII``, which takes all bytes, are left to the server.

    :param connection: of psycopg; ``None`` where there is no database
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
    """Return the error of a task whose name cannot be stored; ``None`` if it can."""
    encoding = lacking(connection, task_name)
    if encoding is None:
        return None
    return UnstorableNameError(
        f"task {task_name!r}: its name has characters that the encoding {encoding} of the database "
        "lacks; choose another one: of a job, its id or its option 'name'"
    )


def _python_name(encoding: str) -> str:
    return encoding.replace("WIN", "cp").replace("KOI8", "koi8_")
