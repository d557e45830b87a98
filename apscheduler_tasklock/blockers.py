"""What stands against run times: each is to be told of once, however many run times it costs."""

from __future__ import annotations

from sqlalchemy import Table

from apscheduler_tasklock.table import quoted_name

# How many run times a run may cost that is renewed, until it is told of: it may merely take long.
PATIENCE = 3


class Blockers:
    """What a replica has told of the runs and windows that cost run times of its tasks."""

    def __init__(self) -> None:
        self._runs: dict[str, tuple[int, int, bool]] = {}
        self._told: set[tuple[str, str]] = set()

    def is_news(self, task_name: str, token: int, *, renewed: bool) -> bool:
        """Count a run time that a run costs, and tell whether it is time to warn of that run."""
        known, count, told = self._runs.get(task_name, (token, 0, False))
        if known != token:
            count, told = 0, False
        news = not told and count + 1 >= (PATIENCE if renewed else 1)
        self._runs[task_name] = (token, count + 1, told or news)
        return news

    def is_first(self, what: str, task_name: str) -> bool:
        """Tell whether this is met here for the first time of this task."""
        news = (what, task_name) not in self._told
        self._told.add((what, task_name))
        return news


def statement_to_free(table: Table, task_name: str, token: int) -> str:
    """Return the SQL by which an operator frees a task whose run hangs, as in the README.

    :param token: of that run, so that no newer one is freed
    """
    frees = "finished_at = now(), locked_until = now(), claim_id = gen_random_uuid()"
    run = f"task_name = {_literal(task_name)} AND token = {token}"
    return f"UPDATE {quoted_name(table)} SET {frees} WHERE {run}"  # noqa: S608  # all is quoted


def _literal(text: str) -> str:
    """Return a text as SQL in one line, whatever is in it."""
    if text.isprintable():
        return "'" + text.replace("'", "''") + "'"
    plain = (c if c.isprintable() and c not in "'\\" else f"\\U{ord(c):08X}" for c in text)
    return f"E'{''.join(plain)}'"
