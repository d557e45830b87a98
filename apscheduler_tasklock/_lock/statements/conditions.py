"""Conditions and parameters that several statements share."""

from __future__ import annotations

from collections.abc import Mapping

from apscheduler_tasklock._lock.json_columns import IS_PAUSE, json_elements_of, moment_of
from apscheduler_tasklock._lock.parameters import Parameters

# The value of the time columns in the row of a task that has never run.
NEVER = "timestamptz 'epoch'"

# The time that replicas get to act on a row, for example to take over a dead run. After this time a
# statement assumes that no replica will act. Replicas act after a look, so the time is two
# intervals between looks.
SHORTEST_WAIT = "interval '10 seconds'"
# The least time for which a one-off job's run that never began can be begun after its hand-over.
KEPT_TO_BEGIN = "interval '1 hour'"


# Whether a claim stands. It stands also after its lease has ended, until its run is finished or
# handed over, another claim is granted, or its maximum lock ends.
STANDS = "(lock.finished_at IS NULL AND NOT lock.handed_over AND lock.run_until > now())"

# The schedule of the last claim's window. `schedule` alone is not enough, because replicas may have
# registered another schedule since that claim.
WINDOW_SCHEDULE = "COALESCE(lock.window_schedule, lock.schedule)"

# A release opens its window again by setting the window's end to this time before the window's
# start: half the window or a second, whichever is shorter. All claims of this window then find it
# open, although small differences of the clocks make their run times differ. Claims of an earlier
# window do not find it open.
JUST_BEFORE = """GREATEST(interval '1 microsecond', LEAST(interval '1 second',
    (lock.window_until - lock.window_start) / 2::float8))"""

# Makes the commit durable, because a crash of the server must not undo a claim that was answered:
# its token would be given to another claim. The setting lasts for the statement's transaction. The
# expression is always true, and is the last part of its condition.
DURABLY = """CASE WHEN current_setting('synchronous_commit') = 'off'
    THEN set_config('synchronous_commit', 'local', true) IS NOT NULL ELSE true END"""

# Lets the server say that a commit was not confirmed by a synchronous standby, which it says in a
# warning. As in DURABLY, the setting lasts for the statement's transaction, and the expression is
# always true.
AUDIBLY = """CASE WHEN current_setting('client_min_messages') = 'error'
    THEN set_config('client_min_messages', 'warning', true) IS NOT NULL ELSE true END"""

# Limits the wait for a locked row of any table, because other requests need the connection.
BRIEFLY = f"(set_config('lock_timeout', %(lock_timeout)s, true) IS NOT NULL AND {AUDIBLY})"

SAFELY = f"({DURABLY} AND {BRIEFLY})"

# Whether somebody still waits for the claim, so that a claim that was delayed on its way is not
# granted too late. Each answer has the database's time, so that the replica notices a wrong
# `not_after`, and sends the claim again.
IS_WANTED = "COALESCE(now() <= %(not_after)s::timestamptz, true)"

# The name of the row with the pauses of all tasks. No task's name begins with U+0001.
ALL_TASKS = "(chr(1) || 'pauses')"
# Whether a row is a task's.
IS_TASK = "NOT starts_with(lock.task_name, chr(1))"

# Whether the task itself is paused. A pause without an end lasts until an operator resumes it.
IS_PAUSED = "COALESCE(lock.paused_until > now(), lock.paused_at IS NOT NULL)"

# Whether the due time falls into a pause, so that no run makes up for it. This is false for a due
# time before the pause, because a run after the pause makes up for such a due time.
DUE_IN_PAUSE = """COALESCE(lock.due_at >= lock.paused_at
    AND (lock.paused_until IS NULL OR lock.due_at < lock.paused_until), false)"""

# Whether the task itself is paused, or the run time fell into its last pause. A run time that was
# due before the pause may be run after it.
IS_PAUSED_OR_WAS_AT_FIRED = f"""({IS_PAUSED} OR COALESCE(
    asked.fired >= lock.paused_at AND asked.fired < lock.paused_until, false))"""

# Whether a pause of all tasks is for a name, as a jsonpath. Jsonpath compares texts by their code
# points, so the names that begin with the namespace are those from `namespace` on and before
# `before`. A jsonpath needs only one call of a function, which is fast, and which is made only if
# there is a row with pauses of all tasks.
_IS_FOR_NAME = "@.namespace <= $name && (@.before == null || $name < @.before)"
_GOES_ON = "(@.until == null || $now < @.until)"
_IS_AT = "(@.since <= $at && (@.until == null || $at < @.until))"


def _some_pause_of_all(condition: str, name: str, at: str = "now()") -> str:
    """Return whether there is a pause of all tasks for a name. False also for unreadable pauses."""
    return f"""COALESCE((SELECT jsonb_path_exists(
        pauses_of_all.pauses, '$[*] ? ({_IS_FOR_NAME} && {condition})'::jsonpath,
        pg_catalog.jsonb_build_object('name', {name}, 'at', extract(epoch FROM {at}),
                                      'now', extract(epoch FROM now())), true)
        FROM pauses_of_all), false)"""


def pauses_of_all(table: str) -> str:
    """Return the query of the pauses of all tasks, for a WITH clause: one row or none.

    The row keeps a pause for a day after its end, so that no run makes up for the run times in it.
    """
    return f"""pauses_of_all AS (
        SELECT side.pauses FROM {table} AS side WHERE side.task_name = {ALL_TASKS})"""


def listed_pauses(table: str) -> str:
    """Return the query of the pauses of all tasks with a row for each, for a WITH clause."""
    return f"""listed_pauses AS (
        SELECT pause ->> 'namespace'::text AS namespace, pause ->> 'by'::text AS by,
               {moment_of("pause ->> 'since'::text")} AS since,
               {moment_of("pause ->> 'until'::text")} AS until, pause ->> 'why'::text AS why, place
        FROM {table} AS side,
             {json_elements_of("side.pauses")} WITH ORDINALITY AS each (pause, place)
        WHERE side.task_name = {ALL_TASKS} AND {IS_PAUSE}
    )"""


def paused_with_all(task_name: str, fired: str | None = None) -> str:
    """Return whether a pause of all tasks keeps the run time of a task from being run.

    A pause that has not ended keeps all run times of its tasks from being run. A pause that has
    ended does so for the run times in it. The statement has the query :func:`pauses_of_all`.
    """
    if fired is None:
        return _some_pause_of_all(_GOES_ON, task_name)
    return _some_pause_of_all(f"({_GOES_ON} || {_IS_AT})", task_name, fired)


# Whether a task is paused, by itself or with all tasks. A task that only holds use is not paused
# with all tasks. Each statement with one of these conditions has the query :func:`pauses_of_all`.
IS_PAUSED_IN_ANY_WAY = f"""({IS_PAUSED}
    OR (lock.runs <> '' AND {paused_with_all("lock.task_name")}))"""
DUE_IN_ANY_PAUSE = f"""({DUE_IN_PAUSE} OR (lock.runs <> '' AND lock.due_at IS NOT NULL AND {
    _some_pause_of_all(_IS_AT, "lock.task_name", "lock.due_at")
}))"""


def due_after(asked: Mapping[str, str], since: str) -> str:
    """Return when the next run time is due; null if no run time follows or the next is unknown."""
    following = f"{since} + {asked['next_in']} * interval '1 second'"
    return f"CASE WHEN NOT {asked['is_last']} THEN {following} END"


def asked_parameters(request: type[Parameters]) -> dict[str, str]:
    """Return the values of a request as parameters of a statement."""
    return {name: f"%({name})s" for name in request.types}


def asked_columns(request: type[Parameters]) -> dict[str, str]:
    """Return the values of a request as columns of ``asked``."""
    return {name: f"asked.{name}" for name in request.types}


def json_rows(request: type[Parameters], **more: str) -> str:
    """Return the FROM item that has the batch's requests as rows, from ``many``'s parameter.

    :param more: the SQL types of further columns
    """
    types = {**request.types, **more}
    columns = ", ".join(f"{name} {type_}" for name, type_ in types.items())
    return f"json_to_recordset(%(many)s::json) AS request ({columns})"


# The database's time in milliseconds since 1970. It is the token of a task's first claim, so that
# tokens also grow after a row was deleted.
MILLISECONDS = "(extract(epoch FROM now()) * 1000.0)::bigint"
# The token of a later claim. It grows with the clock, so that a resource accepts the runs after a
# restore, or after a failover that lost commits, although the row has an older token again. If the
# clock went back, or shows the same millisecond, the token grows by one. The addition of 2 lets
# PostgreSQL reject the claim before a token is bigint's largest number, to which no statement could
# add one.
NEXT_TOKEN = f"GREATEST(lock.token + 2 - 1, {MILLISECONDS})"

# The columns of an inserted row.
ROW_COLUMNS = """task_name, started_at, locked_until, run_until, window_start, window_until,
                 locked_by, claim_id, token, deaths, handovers, handed_over, failover, runs,
                 one_off, kind, schedule, due_at, is_last, overdue_at, overrun_at, schedule_since"""
