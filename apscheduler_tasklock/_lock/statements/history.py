"""The run history, as the statements that close a run write it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class History:
    """The run history's table: a ring of slots for each task, of which the oldest is overwritten.

    So it keeps its size by itself: an entry is updated in place, and nothing has to be deleted.
    The task's row counts its entries, which says the slot of the next one.

    :ivar table: the table's name, quoted
    :ivar slots: how many runs of each task are kept; 1 or more
    """

    table: str
    slots: int

    def entry(self, rows: str, **columns: str) -> str:
        """Return the INSERT of entries.

        :param rows: a FROM clause, where ``run`` is the row of the run that is closed
        :param columns: how it ended, and ``recorded``, where they are not columns of ``run``
        """
        values = {
            "task_name": "run.task_name",
            "slot": f"(({columns.pop('recorded', 'run.recorded')}) - 1) % {self.slots}",
            "token": "run.token",
            "scheduled_at": "CASE WHEN run.kind IN ('hold', 'manual') THEN NULL "
            "ELSE run.window_start END",
            "started_at": "run.started_at",
            "ended_at": "now()",
            "replica": "run.locked_by",
            "kind": "COALESCE(run.kind, 'schedule')",
            "outcome": "run.outcome",
            "error_type": "NULL",
            "error": "NULL",
            **columns,
        }
        overwritten = ", ".join(f"{name} = excluded.{name}" for name in values)
        return f"""
            INSERT INTO {self.table} ({", ".join(values)})
            SELECT {", ".join(values.values())} FROM {rows}
            ON CONFLICT (task_name, slot) DO UPDATE SET {overwritten}
        """

    def death(self, table: str) -> str:
        """Return the INSERT of the entry of a run whose holder died, as a claim follows it.

        The row as it was before is the run's only if it was still unfinished when it was changed:
        then the claim has noted an outcome in the row.
        """
        return self.entry(
            f"""{table} AS run JOIN claimed USING (task_name)
                WHERE claimed.new_outcome IS NOT NULL AND claimed.new_token = run.token + 1""",
            recorded="claimed.new_recorded",
            ended_at="run.locked_until",
            outcome="claimed.new_outcome",
        )


def death_entry(history: History | None, table: str) -> str:
    """Return the part of a WITH clause that writes the entry of a run whose holder died."""
    return f", death AS ({history.death(table)})" if history else ""
