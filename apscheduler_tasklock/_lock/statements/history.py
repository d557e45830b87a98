"""The run history: the entries that are written by the statements that end a run."""

from __future__ import annotations

from dataclasses import dataclass

from apscheduler_tasklock._lock.statements.columns import closed_here, select_list
from apscheduler_tasklock.schema.table import run_table, task_lock_table

_COLUMNS = run_table(task_lock_table()).columns
# The columns that the class ``Run`` lacks, or has by another name.
_PLACE = ("task_name", "ring", "slot", "action_id")
# The columns that are always null in the rings of runs.
_NOT_OF_RUNS = ("by", "until", "reason", "action_id", "cause", "last_scheduled_at", "run_times")
# Limits the entries of what operators did with each task.
ACTIONS = 20


@dataclass(frozen=True)
class History:
    """The run history's table, with rings of slots for each task.

    A new entry overwrites the oldest one of its ring, so that nothing has to be deleted. The task's
    row counts the entries of each ring, so that the next slot is known. A run has one entry. It is
    in the ring ``runs`` if the run ended well, and otherwise in the ring ``failures``, so that the
    many runs of a frequent job do not overwrite the few that failed. What operators did is in the
    ring ``actions``, and the run times that no replica has run are in the ring ``misses``.

    :ivar table: the table's name, quoted
    :ivar slots: how many slots each of the runs' two rings has; 1 or more
    """

    table: str
    slots: int

    def entry(self, rows: str, **columns: str) -> str:
        """Return the INSERT of entries.

        :param rows: a FROM clause, where ``run`` is the task's row of the run that ends
        :param columns: the SQL of columns that are not taken from ``run``. ``recorded`` is no
            column, but the ring's new count of entries. It is given if ``run`` lacks the new
            counts.
        """
        ended_well = f"{columns.get('outcome', 'run.outcome')} = 'ok'"
        count = f"CASE WHEN {ended_well} THEN run.recorded ELSE run.recorded_failures END"
        # Whatever the entry lacks is null, because the older entry in the slot may have it.
        can_be_null = [each.name for each in _COLUMNS if each.nullable]
        values = {
            **{name: "NULL" for name in can_be_null if name not in _NOT_OF_RUNS},
            "task_name": "run.task_name",
            "ring": f"CASE WHEN {ended_well} THEN 'runs' ELSE 'failures' END",
            "slot": f"({columns.pop('recorded', count)} - 1) % {self.slots}",
            "token": "run.token",
            "scheduled_at": "CASE WHEN run.kind IN ('hold', 'manual') THEN NULL "
            "ELSE run.window_start END",
            "started_at": "run.started_at",
            "ended_at": "now()",
            "replica": "run.locked_by",
            "kind": "COALESCE(run.kind, 'schedule')",
            "outcome": "run.outcome",
            "attempt": "run.attempt",
            **columns,
        }
        key = ("task_name", "ring", "slot")
        changed = [name for name in values if name not in key]
        overwritten = ", ".join(f"{name} = excluded.{name}" for name in changed)
        return f"""
            INSERT INTO {self.table} ({", ".join(values)})
            SELECT {", ".join(values.values())} FROM {rows}
            ON CONFLICT ({", ".join(key)}) DO UPDATE SET {overwritten}
        """

    def action(
        self,
        what: str,
        rows: str,
        until: str = "NULL",
        reason: str = "NULL",
        action_id: str = "%(action_id)s::uuid",
        **more: str,
    ) -> str:
        """Return the INSERT of entries of what the operator ``by`` did with tasks.

        :param what: the outcome
        :param rows: a FROM clause, where ``run`` is the task's row, which has counted the entry
        :param until: the SQL of the time until which the action holds
        :param reason: the SQL of the operator's reason
        :param action_id: the SQL of the id under which the action was sent
        :param more: the SQL of further columns
        """
        columns = {
            "ring": "'actions'",
            "slot": f"(run.recorded_actions - 1) % {ACTIONS}",
            "token": "NULL",
            "scheduled_at": "NULL",
            "started_at": "now()",
            "replica": "''",
            "kind": "'operator'",
            "attempt": "NULL",
            "release": "NULL",
            "outcome": f"'{what}'",
            "by": "%(by)s::text",
            "until": until,
            "reason": reason,
            "action_id": action_id,
            **more,
        }
        return self.entry(rows, **columns)

    def death(self, table: str) -> str:
        """Return the INSERT of a dead run's entry, for the claim that has closed the run."""
        return self.entry(
            f"{table} AS run JOIN claimed USING (task_name) WHERE {closed_here('run')}",
            recorded="claimed.new_recorded",
            ended_at="run.locked_until",
            outcome="claimed.new_outcome",
        )


def run_columns(**instead: str) -> str:
    """Return the columns of an entry ``run``, by the names that the class ``Run`` has for them.

    :param instead: the SQL of columns that are not read as they are
    """
    names = [each.name for each in _COLUMNS if each.name not in _PLACE]
    columns = {name: instead.get(name, f"run.{name}") for name in names}
    return select_list({"task": "run.task_name", **columns})


def again(history: History | None, task_name: str) -> str:
    """Return the part of a WITH clause with the entries of an action that was done before.

    An action whose answer was lost is sent again under its id. If it finds its own entries, it
    must do nothing. It writes the entries anew, so that its commit is confirmed only after the
    commit that has made them. A read would also see a commit that no standby has confirmed.

    :param task_name: the SQL of the name of the entries' task; may use ``entry``
    """
    if history is None:
        return "again AS (SELECT NULL::text AS task_name, now() AS started_at WHERE false)"
    return f"""again AS (
            UPDATE {history.table} AS entry SET action_id = entry.action_id
            WHERE entry.task_name {task_name} AND entry.ring = 'actions'
                  AND entry.action_id = %(action_id)s::uuid
            RETURNING entry.*
        )"""


# Whether the action was not done before.
IS_FIRST = "NOT EXISTS (SELECT FROM again)"


def death_entry(history: History | None, table: str) -> str:
    """Return the part of a WITH clause that writes a dead run's entry."""
    return f", death AS ({history.death(table)})" if history else ""
