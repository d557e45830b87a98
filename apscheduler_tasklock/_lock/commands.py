"""Commands for an operator, ready to be pasted into a shell."""

from __future__ import annotations

from apscheduler_tasklock.schema.shell import table_options, word
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
    words = [PROGRAM, command, *table_options(schema, table), *options]
    if task.startswith("-"):
        words.append("--")
    if not task.endswith("\n"):
        return " ".join([*words, word(task)])
    # What a shell puts in place of a command has no line breaks at its end.
    return " ".join([f"name={word(task + '.')};", *words, '"${name%.}"'])
