"""Commands for an operator, ready to be pasted into a shell."""

from __future__ import annotations

import shlex

from apscheduler_tasklock.schema.table import DEFAULT_TABLE

PROGRAM = "apscheduler-tasklock"


def command_line(
    command: str, *options: str, task: str, schema: str | None = None, table: str = DEFAULT_TABLE
) -> str:
    """Return the command line that does something to a task, in one printable line.

    :param options: of the command, as ``"--force"``
    :param task: the task's full name
    :param schema: of the task lock table; ``None`` where the connection's search path has it
    """
    words = [PROGRAM, command]
    if schema is not None:
        words += ["--schema", _quoted(schema)]
    if table != DEFAULT_TABLE:
        words += ["--table", _quoted(table)]
    words += options
    if task.startswith("-"):
        words.append("--")
    return " ".join([*words, _quoted(task)])


def _quoted(text: str) -> str:
    """Return a text as one word of a shell; of bash and its like, if it has control characters."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = (c if c.isprintable() and c not in "'\\" else f"\\U{ord(c):08X}" for c in text)
    return f"$'{''.join(escaped)}'"
