"""The statements of the lock protocol, for psycopg: the decision of who runs a window.

Each is a transaction of its own and one round trip. All times are the database's. Claims,
takeovers and releases have two forms: for one request, and for many that travel together. The
decision is written once, for both: in the first form what is asked for are parameters, in the
second the columns of ``asked``.

What closes a run also writes its entry into the run history (see :class:`History`): a release, and
the claim or takeover that follows a run whose holder died. A running run has none: it is the
task's row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# What a task's times say that has never run. No infinite ones: a replica of the version before
# could not read them.
NEVER = "timestamptz 'epoch'"

# What a claim, a takeover and a release ask for, and the types.
_CLAIM_TYPES = {
    "task_name": "text",
    "claim_id": "uuid",
    "lag": "float8",
    "run_time": "timestamptz",
    "min_lock": "float8",
    "max_lock": "float8",
    "lease": "float8",
    "failover": "boolean",
    "runs": "text",
    "one_off": "boolean",
    "schedule": "text",
    "next_in": "float8",
    "is_last": "boolean",
    "grace": "float8",
    "max_runtime": "float8",
}
# What says whether a claim's window is taken.
_WINDOW_TYPES = {
    name: _CLAIM_TYPES[name]
    for name in ("task_name", "claim_id", "lag", "run_time", "min_lock", "failover", "runs")
}
_TAKEOVER_TYPES = {
    "task_name": "text",
    "claim_id": "uuid",
    "dead_claim_id": "uuid",
    "lease": "float8",
    "failover": "boolean",
}
_REGISTRATION_TYPES = {
    "task_name": "text",
    "schedule": "text",
    "next_in": "float8",
    "is_last": "boolean",
    "grace": "float8",
    "least_gap": "float8",
    "period": "float8",
    "runs": "text",
    "moved": "boolean",
}
_RELEASE_TYPES = {
    "task_name": "text",
    "claim_id": "uuid",
    "keep_window": "boolean",
    "hand_over": "boolean",
    "token": "bigint",
    "outcome": "text",
    "error_type": "text",
    "error": "text",
    "next_in": "float8",
    "is_last": "boolean",
}

# For so long at least something is waited for that is found by the replicas' polls: two intervals.
SHORTEST_WAIT = "interval '10 seconds'"

# Point 1 of the decision: nobody is running the task. A run that never finished counts until its
# lease has ended.
NOT_RUNNING = "(lock.finished_at IS NOT NULL OR lock.locked_until <= now())"

# Nor has anybody died running it.
_WAS_ENDED = "(lock.finished_at IS NOT NULL OR (lock.handed_over AND lock.locked_until <= now()))"

# A claim that its holder may go on with: also after its lease, as long as nobody has taken it over.
STANDS = "(lock.finished_at IS NULL AND NOT lock.handed_over AND lock.run_until > now())"

# A release that opens the window again puts its end this far before its start: early enough for
# every run time of the same window, whose `fired` differ by the clocks' noise, and too late for one
# of the window before. It is half the window, or a second, whichever is shorter, since the
# window may have been set to end at 'infinity'.
JUST_BEFORE = """GREATEST(interval '1 microsecond',
    (LEAST(lock.window_until, lock.window_start + interval '2 seconds') - lock.window_start) / 2)"""

# What the server crashes on must not be a claim that was answered: its token would be given to
# somebody else. It holds for this statement's transaction only. True, and asked last.
DURABLY = """CASE WHEN current_setting('synchronous_commit') = 'off'
    THEN set_config('synchronous_commit', 'local', true) IS NOT NULL ELSE true END"""

# Nor is a row that somebody has locked waited for for long: others want the connection.
SAFELY = f"({DURABLY} AND set_config('lock_timeout', %(lock_timeout)s, true) IS NOT NULL)"

# What a job's row says once its run time is run, missed or changed.
HANDED_OUT_TO_NOBODY = (
    "handed_id = NULL, handed_to = NULL, handed_until = NULL, first_handed_at = NULL"
)

_RETURNED = """lock.task_name, lock.window_start AS new_start, lock.token AS new_token,
               lock.locked_until AS new_locked_until, lock.run_until AS new_run_until"""
_RETURNED_AFTER_DEATH = f"{_RETURNED}, lock.deaths AS new_deaths, lock.recorded AS new_recorded"

# Nobody is granted a paused task; and no run time of a pause is made up for after it.
_IS_PAUSED = "COALESCE(lock.paused_until > now(), false)"

# A due time in a pause is void: nobody makes up for it. One from before it is not.
DUE_IN_PAUSE = "COALESCE(lock.due_at >= lock.paused_at AND lock.due_at < lock.paused_until, false)"

# The claim that is made here follows a run whose holder died.
_FOLLOWS_DEATH = "lock.finished_at IS NULL AND NOT lock.handed_over"
_NOTES_DEATH = f"""
    deaths = lock.deaths + CASE WHEN {_FOLLOWS_DEATH} THEN 1 ELSE 0 END,
    recorded = lock.recorded + CASE WHEN {_FOLLOWS_DEATH} THEN 1 ELSE 0 END,
    failures = lock.failures + CASE WHEN {_FOLLOWS_DEATH} THEN 1 ELSE 0 END,
    failed_at = CASE WHEN {_FOLLOWS_DEATH} THEN lock.locked_until ELSE lock.failed_at END,
    error_type = CASE WHEN {_FOLLOWS_DEATH} THEN NULL ELSE lock.error_type END
"""


@dataclass(frozen=True)
class History:
    """The run history's table: a ring of slots for each task, of which the oldest is overwritten.

    So it keeps its size by itself: an entry is updated in place, and nothing has to be deleted.
    The task's row counts its entries, which says the slot of the next one.

    :ivar table: the table's name, quoted
    :ivar slots: how many runs of each task are kept; 1 or more
    :ivar errors_only: whether runs that ended well are left out
    """

    table: str
    slots: int
    errors_only: bool = False

    def has_entry(self, outcome: str) -> str:
        """Return whether a run with this outcome gets an entry; one that never began has none."""
        return f"{outcome} NOT IN ('', 'ok')" if self.errors_only else f"{outcome} <> ''"

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

        The row as it was before is the run's only if it was still unfinished when it was changed,
        which the count of deaths says.
        """
        return self.entry(
            f"""{table} AS run JOIN claimed USING (task_name)
                WHERE claimed.new_deaths > run.deaths AND claimed.new_token = run.token + 1""",
            recorded="claimed.new_recorded",
            ended_at="run.locked_until",
            outcome="'died'",
        )


def _death(history: History | None, table: str) -> str:
    """Return the part of a WITH clause that writes the entry of a run whose holder died."""
    return f", death AS ({history.death(table)})" if history else ""


# Seconds after its last sign that a replica counts as alive: three of its intervals.
ALIVE_FOR = 90.0
IS_ALIVE = f"(stopped_at IS NULL AND seen_at > now() - {ALIVE_FOR} * interval '1 second')"


def _due(asked: Mapping[str, str], since: str) -> str:
    """Return when the next run time is due: never after the last one; null if nobody knows."""
    following = f"{since} + {asked['next_in']} * interval '1 second'"
    return f"CASE WHEN {asked['is_last']} THEN 'infinity' ELSE {following} END"


def _parameters(types: Mapping[str, str]) -> dict[str, str]:
    """Return what is asked for as parameters of a statement."""
    return {name: f"%({name})s::{type_}" for name, type_ in types.items()}


def _columns(types: Mapping[str, str]) -> dict[str, str]:
    """Return what is asked for as columns of ``asked``."""
    return {name: f"asked.{name}" for name in types}


def _rows(types: Mapping[str, str]) -> str:
    """Return the rows that the parameter of :func:`many` holds."""
    columns = ", ".join(f"{name} {type_}" for name, type_ in types.items())
    return f"json_to_recordset(%(many)s::json) AS request ({columns})"


def many(requests: Iterable[Mapping[str, object]]) -> dict[str, str]:
    """Return the parameter of a statement for many from the parameters of the single requests.

    It is one JSON document, with an object for each request: psycopg takes far longer to send an
    array for each column. Characters are not escaped, since a database in another encoding
    than UTF-8 may not take the escapes.
    """
    return {"many": json.dumps(list(requests), default=str, ensure_ascii=False)}


# The run time in database time. The replica says how late it is by its own clock, so that the
# offset between the clocks cancels out; `latest` caps the database's time at what it can have been
# when the replica said so (see clock.py). LEAST passes over a null. Where every replica computes
# the same run time, it is that one: clocks that differ by more than a short gap of the schedule
# would otherwise take one run time for another. More than 5 minutes away it is not believed, since
# then the replica's clock is wrong.
_FIRED = """GREATEST(reckoned - interval '5 minutes',
                     LEAST(reckoned + interval '5 minutes', COALESCE(run_time, reckoned)))"""


def _reckoned(lag: str) -> str:
    return f"LEAST(now(), %(latest)s::timestamptz) - {lag} * interval '1 second' AS reckoned"


class _Claim:
    """The parts of a claim's statement.

    :param asked: what is asked for, by name
    """

    def __init__(self, asked: Mapping[str, str]) -> None:
        self._asked = asked
        # A claim whose answer was lost finds its id in the row: it was granted the first time.
        self.own = f"lock.claim_id = {asked['claim_id']}"
        granted_before = f"({self.own} AND {STANDS})"
        min_lock = f"({asked['min_lock']} * interval '1 second')"
        max_lock = f"({asked['max_lock']} * interval '1 second')"
        # LEAST passes over a null: a claim without a lease.
        self.lease = f"({asked['lease']} * interval '1 second')"
        # Point 2: the window is new. The claimer's own minimum lock counts if it is the shorter
        # one, so that an interval shortened by a deployment takes effect at once; not where either
        # is a hold, whose minimum lock was promised to it. One run time is run once, also with a
        # minimum lock of 0.
        self.new_window = f"""(
            asked.fired >= LEAST(lock.window_until,
                                 CASE WHEN lock.runs <> '' AND {asked["runs"]} <> ''
                                      THEN lock.window_start + {min_lock} END)
            AND ({asked["run_time"]} IS NULL OR asked.fired > lock.window_start
                 OR lock.window_until < lock.window_start)
        )"""
        # A dead run that stands against a new window: its own one is run again first; or the rows
        # cannot be believed yet. Past its maximum lock it stands against nothing.
        self.waits = f"""(
            lock.finished_at IS NULL AND (
                NOT (lock.handed_over OR lock.run_until <= now() OR %(stable)s::boolean)
                OR (lock.runs <> '' AND lock.runs = {asked["runs"]} AND lock.run_until > now()
                    AND (lock.handed_over OR (lock.failover AND {asked["failover"]})))
            )
        )"""
        self.paused = f"({_IS_PAUSED} OR COALESCE(asked.fired < lock.paused_until, false))"
        is_free = f"NOT {self.own} AND {self.new_window} AND NOT {self.waits} AND NOT {self.paused}"
        self.may_claim_after_end = f"{_WAS_ENDED} AND {is_free}"
        self.may_claim = f"{NOT_RUNNING} AND {is_free}"
        due = _due(asked, "asked.fired")
        status = {
            "kind": f"CASE WHEN {asked['runs']} = '' THEN 'hold' ELSE 'schedule' END",
            "schedule": asked["schedule"],
            "due_at": due,
            "overdue_at": f"{due} + {asked['grace']} * interval '1 second'",
            "overrun_at": f"now() + LEAST({asked['max_runtime']}, {asked['max_lock']})"
            " * interval '1 second'",
        }
        self.changes_after_end = f"""
            started_at = now(),
            locked_until = now() + LEAST({max_lock}, {self.lease}),
            run_until = now() + {max_lock},
            window_start = asked.fired,
            window_until = asked.fired + {min_lock},
            locked_by = %(replica_id)s,
            claim_id = {asked["claim_id"]},
            token = lock.token + 1,
            handovers = 0,
            handed_over = false,
            failover = {asked["failover"]},
            runs = {asked["runs"]},
            one_off = {asked["one_off"]},
            finished_at = NULL,
            overdue_told_at = NULL,
            {", ".join(f"{name} = {value}" for name, value in status.items())}
        """
        self.changes = f"{self.changes_after_end}, {_NOTES_DEATH}"
        # What stands for or against the claim in the row as the statement found it.
        self.found_state = f"""LATERAL (SELECT {granted_before} AS granted, {NOT_RUNNING} AS idle,
                                       {self.new_window} AS new_window, {self.waits} AS waits,
                                       {self.paused} AS paused)
                               AS found"""
        self.made: dict[str, str] = {**_DECIDED_GRANTED, **_made(asked["claim_id"])}
        # The first token comes from the clock, in milliseconds: where a row was deleted, the tokens
        # of the next one are larger all the same.
        self.first_row = f"""
            SELECT {asked["task_name"]}, now(), now() + LEAST({max_lock}, {self.lease}),
                   now() + {max_lock}, asked.fired, asked.fired + {min_lock}, %(replica_id)s,
                   {asked["claim_id"]}, (extract(epoch FROM now()) * 1000)::bigint, 0, 0, false,
                   {asked["failover"]}, {asked["runs"]}, {asked["one_off"]},
                   {", ".join(status.values())}
        """


# The columns of a ``ClaimAnswer`` from the row as the statement found it.
_FOUND = {
    "granted": "found.granted",
    "running": "NOT found.idle",
    "new_window": "found.new_window AND NOT found.granted",
    "unfinished": "lock.finished_at IS NULL",
    "waits": "found.idle AND found.waits",
    "paused": "found.paused",
}
_DECIDED_GRANTED = {
    "granted": "true",
    "running": "true",
    "new_window": "false",
    "unfinished": "true",
    "waits": "false",
    "paused": "false",
}
_ROW_FOUND = {
    "window_start": "lock.window_start",
    "holder": "lock.locked_by",
    "token": "lock.token",
    "locked_until": "lock.locked_until",
    "run_until": "lock.run_until",
    "database_time": "now()",
    "claim_id": "lock.claim_id",
    "manual": "COALESCE(lock.kind, '') = 'manual'",
    "was_overdue": "lock.overdue_told_at IS NOT NULL",
}


def _made(claim_id: str) -> dict[str, str]:
    """Return the columns of the row as a granted claim made it."""
    return {
        "window_start": "claimed.new_start",
        "holder": "%(replica_id)s",
        "token": "claimed.new_token",
        "locked_until": "claimed.new_locked_until",
        "run_until": "claimed.new_run_until",
        "database_time": "now()",
        "claim_id": claim_id,
        "manual": "false",
        "was_overdue": _ROW_FOUND["was_overdue"],
    }


def _as(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{expression} AS {name}" for name, expression in columns.items())


def _made_or_found(made: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Return the columns of a row as a granted claim made it, or else as it was found."""

    def either(name: str) -> str:
        if made[name] == found[name]:
            return found[name]
        if made[name] == "true":
            return f"claimed.new_token IS NOT NULL OR {found[name]}"
        if made[name] == "false":
            return f"claimed.new_token IS NULL AND {found[name]}"
        if made[name].startswith("claimed."):
            return f"COALESCE({made[name]}, {found[name]})"
        return f"CASE WHEN claimed.new_token IS NULL THEN {found[name]} ELSE {made[name]} END"

    return _as({name: either(name) for name in found})


_PARAMETERS = _parameters(_CLAIM_TYPES)
_ONE = _Claim({**_PARAMETERS, "run_time": "asked.run_time"})
_MANY = _Claim(_columns(_CLAIM_TYPES))
_ASKED_ONE = f"""SELECT run_time, {_FIRED} AS fired
                 FROM (SELECT {_PARAMETERS["run_time"]} AS run_time,
                              {_reckoned(_PARAMETERS["lag"])}) AS request"""
_ASKED_MANY = f"""SELECT *, {_FIRED} AS fired
                  FROM (SELECT *, {_reckoned("lag")} FROM {_rows(_CLAIM_TYPES)}) AS request"""

_ASKED_WINDOWS = f"""SELECT *, {_FIRED} AS fired
                     FROM (SELECT *, {_reckoned("lag")} FROM {_rows(_WINDOW_TYPES)}) AS request"""

_ROW = """task_name, started_at, locked_until, run_until, window_start, window_until, locked_by,
          claim_id, token, deaths, handovers, handed_over, failover, runs, one_off, kind, schedule,
          due_at, overdue_at, overrun_at"""


class _Release:
    """The parts of a release's statement. One that is sent twice changes nothing the second time.

    :param asked: what is asked for, by name
    :param history: where the run's entry is written
    """

    def __init__(self, asked: Mapping[str, str], history: History | None) -> None:
        outcome = asked["outcome"]
        self._history = history
        # A release can open the window again.
        window_until = f"""CASE WHEN {asked["keep_window"]} OR lock.finished_at IS NOT NULL
                                THEN lock.window_until
                                ELSE lock.window_start - {JUST_BEFORE} END"""
        # A run time that came while a run by hand went on follows it, and is due then. One that was
        # overdue before, or came in a pause, stays what it is.
        follows = """(lock.kind = 'manual' AND lock.finished_at IS NULL AND lock.due_at <= now()
                      AND lock.overdue_at > lock.started_at
                      AND lock.due_at >= COALESCE(lock.paused_until, '-infinity'))"""
        # A job that ran past its next run time has another one by now.
        # A run by hand moves one only if it makes up for it: it was overdue, and the run went well.
        is_past = f"""(lock.due_at <= now()
                       AND ({asked["is_last"]} OR {asked["next_in"]} IS NOT NULL)
                       AND (lock.kind IS DISTINCT FROM 'manual'
                            OR (lock.overdue_at <= lock.started_at AND {outcome} = 'ok')))"""
        due = _due(asked, "now()")
        is_first = "lock.finished_at IS NULL"
        has_entry = history.has_entry(outcome) if history else "false"
        recorded = f"lock.recorded + CASE WHEN {{first}} AND {has_entry} THEN 1 ELSE 0 END"
        self.changes = f"""
            finished_at = COALESCE(lock.finished_at, now()),
            window_until = {window_until},
            locked_until = GREATEST(now(), {window_until}),
            deaths = 0,
            handovers = 0,
            handed_over = false,
            recorded = {recorded.format(first=is_first)},
            succeeded_at = CASE WHEN {is_first} AND {outcome} = 'ok' THEN now()
                                ELSE lock.succeeded_at END,
            failed_at = CASE WHEN {is_first} AND {outcome} = 'error' THEN now()
                             ELSE lock.failed_at END,
            failures = CASE WHEN {is_first} AND {outcome} = 'ok' THEN 0
                            WHEN {is_first} AND {outcome} = 'error' THEN lock.failures + 1
                            ELSE lock.failures END,
            error_type = CASE WHEN {is_first} AND {outcome} IN ('ok', 'error')
                              THEN {asked["error_type"]} ELSE lock.error_type END,
            overdue_at = CASE WHEN {follows} THEN now()
                                   + GREATEST(lock.overdue_at - lock.due_at, {SHORTEST_WAIT})
                              WHEN {is_past} THEN {due} + (lock.overdue_at - lock.due_at)
                              ELSE lock.overdue_at END,
            due_at = CASE WHEN {follows} THEN now() WHEN {is_past} THEN {due}
                          ELSE lock.due_at END
        """
        # What its holder has handed over stays handed over, also if the holder is then found dead.
        self.hand_over = f"""
            locked_until = LEAST(lock.locked_until, now()),
            recorded = {recorded.format(first="NOT lock.handed_over")},
            handed_over = true
        """
        self.ended = f"""lock.task_name, lock.claim_id, lock.token, lock.window_start,
                         lock.started_at, lock.finished_at, lock.locked_by, lock.kind,
                         lock.recorded, lock.locked_until, {outcome} AS outcome,
                         {asked["error_type"]} AS error_type, {asked["error"]} AS error"""

    @property
    def entry(self) -> str:
        """The part of a WITH clause that writes the entries of what ended."""
        if self._history is None:
            return ""
        # Not of one that was released before: then its row counts the entry of another.
        is_first = "(run.finished_at IS NULL OR run.finished_at = now())"
        rows = f"ended AS run WHERE {self._history.has_entry('run.outcome')} AND {is_first}"
        entry = self._history.entry(rows, error_type="run.error_type", error="run.error")
        return f", entry AS ({entry})"

    def overtaken(self, late: str) -> str:
        """Return the part that corrects the entries of runs that were not as dead as they seemed.

        :param late: a FROM clause and a condition, with their tasks and tokens as ``late``
        """
        if self._history is None:
            return ""
        return f""", overtaken AS (
            UPDATE {self._history.table} AS run SET outcome = 'overtaken', ended_at = now()
            FROM {late} AND run.task_name = late.task_name AND run.token = late.token
                 AND run.outcome IN ('died', 'freed')
        )"""


def claim_after_end(table: str) -> str:
    """Return the statement that claims unless the last run's holder died.

    It is what nearly every claim gets by with. What notes a death, in the row and in the run
    history, takes PostgreSQL as long to begin as a tenth of a refused claim, also where nobody
    died. As for the rest it is as :func:`claim`.
    """
    return _claim(table, _ONE.may_claim_after_end, _ONE.changes_after_end, _RETURNED)


def claim(table: str, history: History | None = None) -> str:
    """Return the statement that claims, or says why it may not. Without a row it returns none.

    An UPDATE whose condition is false takes no row lock, no transaction id and no WAL; an
    INSERT .. ON CONFLICT DO UPDATE would take all three to be refused. What it is joined with is
    the row as it was before.

    A claim that was granted once is not granted again: a statement that was held up on its way may
    arrive after the release, and nobody would know of what it got.
    """
    death = _death(history, table)
    return _claim(table, _ONE.may_claim, _ONE.changes, _RETURNED_AFTER_DEATH, death)


def _claim(table: str, may_claim: str, changes: str, returned: str, death: str = "") -> str:
    return f"""
        WITH asked AS ({_ASKED_ONE}), claimed AS (
            UPDATE {table} AS lock SET {changes} FROM asked
            WHERE lock.task_name = {_PARAMETERS["task_name"]} AND {may_claim} AND {SAFELY}
            RETURNING {returned}
        ){death}
        SELECT {_made_or_found(_ONE.made, {**_FOUND, **_ROW_FOUND})}
        FROM {table} AS lock CROSS JOIN asked LEFT JOIN claimed ON true, {_ONE.found_state}
        WHERE lock.task_name = {_PARAMETERS["task_name"]}
    """


def claim_many_after_end(table: str) -> str:
    """Return the statement that claims many tasks, unless the last run's holder died.

    See :func:`claim_after_end`.
    """
    return _claim_many(table, _MANY.may_claim_after_end, _MANY.changes_after_end, _RETURNED)


def claim_many(table: str, history: History | None = None) -> str:
    """Return the statement that claims many tasks, each of them once.

    Only rows that may be claimed are locked, in the order of their names; a batch that is refused
    writes nothing. A row that somebody else has locked is passed over: its answer is the row as it
    was before, which looks free.
    """
    death = _death(history, table)
    return _claim_many(table, _MANY.may_claim, _MANY.changes, _RETURNED_AFTER_DEATH, death)


def _claim_many(table: str, may_claim: str, changes: str, returned: str, death: str = "") -> str:
    return f"""
        WITH asked AS ({_ASKED_MANY}), free AS (
            SELECT lock.task_name FROM {table} AS lock JOIN asked USING (task_name)
            WHERE {may_claim}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), claimed AS (
            UPDATE {table} AS lock SET {changes} FROM asked JOIN free USING (task_name)
            WHERE lock.task_name = free.task_name AND {DURABLY}
            RETURNING {returned}
        ){death}
        SELECT asked.claim_id AS asked_claim_id,
               {_made_or_found(_MANY.made, {**_FOUND, **_ROW_FOUND})}
        FROM asked JOIN {table} AS lock USING (task_name) LEFT JOIN claimed USING (task_name),
             {_MANY.found_state}
    """


def find_taken(table: str) -> str:
    """Return the statement that tells which of many windows are taken. It writes nothing."""
    return f"""
        WITH asked AS ({_ASKED_WINDOWS})
        SELECT asked.claim_id AS asked_claim_id, {_as({**_FOUND, **_ROW_FOUND})}
        FROM asked JOIN {table} AS lock USING (task_name), {_MANY.found_state}
        WHERE NOT (found.granted OR found.new_window)
    """


def first_claim(table: str) -> str:
    """Return the statement that claims a task that has no row; if it has one, it returns none."""
    return f"""
        WITH asked AS ({_ASKED_ONE})
        INSERT INTO {table} AS lock ({_ROW})
        {_ONE.first_row} FROM asked WHERE {SAFELY}
        ON CONFLICT DO NOTHING
        RETURNING {_as({**_DECIDED_GRANTED, **_ROW_FOUND})}
    """


def first_claim_many(table: str) -> str:
    """Return the statement that claims many tasks that have no row, in the order of their names.

    In any other order, two replicas that insert the same rows could wait for each other.
    """
    return f"""
        WITH asked AS ({_ASKED_MANY})
        INSERT INTO {table} AS lock ({_ROW})
        {_MANY.first_row} FROM asked WHERE {SAFELY} ORDER BY asked.task_name
        ON CONFLICT DO NOTHING
        RETURNING lock.claim_id AS asked_claim_id, {_as({**_DECIDED_GRANTED, **_ROW_FOUND})}
    """


def claim_handed_out(table: str, history: History | None = None, *, jobs: str) -> str:
    """Return the statement that claims a run time of a job that was handed out to a replica.

    It claims the task, with or without a row, and moves the job to its next run time, or ends it.
    Both happen, or neither: whoever dies before it has lost nothing, and whoever sends it again
    under the same id changes nothing. The id of the hand-out is the fence: it is gone once the job
    was claimed, changed, removed or given back. There are no windows: the run time is in the row.

    It always returns a row. Without ``granted`` the task has none yet; ``withdrawn`` says that the
    job is handed out to this replica no more.

    :param jobs: the jobs' table
    """
    task_name = _PARAMETERS["task_name"]
    may_claim = f"{NOT_RUNNING} AND NOT {_ONE.own} AND NOT {_ONE.waits} AND NOT {_IS_PAUSED}"
    found = {
        **_FOUND,
        "new_window": "NOT found.granted",
        "paused": _IS_PAUSED,
        **_ROW_FOUND,
    }
    first = {**_DECIDED_GRANTED, **_ROW_FOUND}
    return f"""
        WITH asked AS (
            SELECT {_PARAMETERS["run_time"]} AS run_time, {_PARAMETERS["run_time"]} AS fired
        ), job AS (
            SELECT id FROM {jobs}
            WHERE id = %(job_id)s AND handed_id = %(handed_id)s::uuid AND {SAFELY}
            FOR NO KEY UPDATE
        ), claimed AS (
            UPDATE {table} AS lock SET {_ONE.changes} FROM asked, job
            WHERE lock.task_name = {task_name} AND {may_claim}
            RETURNING {_RETURNED_AFTER_DEATH}
        ), first AS (
            INSERT INTO {table} AS lock ({_ROW})
            {_ONE.first_row} FROM asked, job
            WHERE NOT EXISTS (SELECT FROM {table} WHERE task_name = {task_name})
            ON CONFLICT DO NOTHING
            RETURNING {_as(first)}
        ), moved AS (
            UPDATE {jobs} AS job SET
                next_run_time = %(following)s::timestamptz,
                ended = %(following)s::timestamptz IS NULL,
                last_run_time = asked.run_time, task_name = {task_name}, {HANDED_OUT_TO_NOBODY}
            FROM asked, (SELECT FROM claimed UNION ALL SELECT FROM first) AS granted
            WHERE job.id = %(job_id)s AND job.handed_id = %(handed_id)s::uuid
        ){_death(history, table)}
        SELECT NOT EXISTS (SELECT FROM job) AS withdrawn, answer.*
        FROM (SELECT) AS always LEFT JOIN (
            SELECT {_made_or_found(_ONE.made, found)}
            FROM {table} AS lock CROSS JOIN asked LEFT JOIN claimed ON true, {_ONE.found_state}
            WHERE lock.task_name = {task_name}
            UNION ALL SELECT {", ".join(first)} FROM first
        ) AS answer ON true
    """


def settle_last(table: str, history: History, *, jobs: str) -> str:
    """Return the statement that ends a job whose last run time was missed, and notes that.

    It has an entry in the run history then, as nobody else tells of it any more. The task gets a
    row if it has none, which is deleted one day as those of one-off jobs are, with the history. It
    returns the job, if it was still handed out.

    :param jobs: the jobs' table
    """
    entry = history.entry(
        "(SELECT * FROM known UNION ALL SELECT * FROM first) AS run",
        scheduled_at="%(run_time)s::timestamptz",
        started_at="now()",
        replica="%(replica_id)s",
        kind="'schedule'",
        outcome="'missed'",
    )
    return f"""
        WITH settled AS (
            UPDATE {jobs} SET
                next_run_time = NULL, ended = true, {HANDED_OUT_TO_NOBODY}
            WHERE id = %(job_id)s AND handed_id = %(handed_id)s::uuid AND {SAFELY}
            RETURNING id
        ), known AS (
            UPDATE {table} AS lock SET token = token + 1, recorded = recorded + 1
            FROM settled WHERE lock.task_name = %(task_name)s AND lock.finished_at IS NOT NULL
            RETURNING lock.task_name, lock.token, lock.recorded
        ), first AS (
            INSERT INTO {table} AS lock ({_ROW}, finished_at, recorded)
            SELECT %(task_name)s::text, {NEVER}, {NEVER}, {NEVER}, {NEVER}, {NEVER}, '',
                   gen_random_uuid(), (extract(epoch FROM now()) * 1000)::bigint, 0, 0, false,
                   false, '', true, NULL, NULL, timestamptz 'infinity', NULL, NULL, now(), 1
            FROM settled WHERE NOT EXISTS (SELECT FROM {table} WHERE task_name = %(task_name)s)
            ON CONFLICT DO NOTHING
            RETURNING lock.task_name, lock.token, lock.recorded
        ), entry AS ({entry})
        SELECT id FROM settled
    """


def look(table: str) -> str:
    """Return the statement that says what became of a claim that was not granted."""
    return f"""
        WITH asked AS ({_ASKED_ONE})
        SELECT {_as({**_FOUND, **_ROW_FOUND})}
        FROM {table} AS lock CROSS JOIN asked, {_ONE.found_state}
        WHERE lock.task_name = {_PARAMETERS["task_name"]}
    """


class _Takeover:
    """The parts of a takeover's statement. Its window and maximum lock stay what they were.

    What runs a manual run again is one itself: it has no window, and no run time of the schedule's.

    :param asked: what is asked for, by name
    """

    def __init__(self, asked: Mapping[str, str]) -> None:
        self.may_take_over = f"""(
            lock.claim_id = {asked["dead_claim_id"]} AND lock.finished_at IS NULL
            AND lock.locked_until <= now() AND lock.run_until > now() AND NOT {_IS_PAUSED}
        )"""
        self.changes = f"""
            started_at = now(),
            locked_until = LEAST(
                now() + {asked["lease"]} * interval '1 second', lock.run_until),
            locked_by = %(replica_id)s,
            claim_id = {asked["claim_id"]},
            token = lock.token + 1,
            kind = CASE WHEN lock.kind = 'manual' THEN 'manual' ELSE 'takeover' END,
            overrun_at = LEAST(now() + (lock.overrun_at - lock.started_at), lock.run_until),
            {_NOTES_DEATH},
            handovers = lock.handovers + CASE WHEN lock.handed_over THEN 1 ELSE 0 END,
            handed_over = false,
            failover = {asked["failover"]}
        """
        self.found = {
            "granted": f"(lock.claim_id = {asked['claim_id']} AND {STANDS})",
            "running": f"NOT {NOT_RUNNING}",
            "new_window": "false",
            "unfinished": "lock.finished_at IS NULL",
            "waits": "false",
            "paused": _IS_PAUSED,
            **_ROW_FOUND,
            "was_overdue": "false",  # that a run of the schedule says
        }
        made = {**_DECIDED_GRANTED, **_made(asked["claim_id"]), "was_overdue": "false"}
        made["manual"] = _ROW_FOUND["manual"]  # if the run that died was
        self.made_or_found = _made_or_found(made, self.found)


_TAKE_OVER = _Takeover(_parameters(_TAKEOVER_TYPES))
_TAKE_OVER_MANY = _Takeover(_columns(_TAKEOVER_TYPES))


def take_over(table: str, history: History | None = None) -> str:
    """Return the statement that takes over one claim of a dead holder, or says why it may not."""
    return f"""
        WITH claimed AS (
            UPDATE {table} AS lock SET {_TAKE_OVER.changes}
            WHERE lock.task_name = %(task_name)s AND {_TAKE_OVER.may_take_over} AND {SAFELY}
            RETURNING {_RETURNED_AFTER_DEATH}
        ){_death(history, table)}
        SELECT {_TAKE_OVER.made_or_found}
        FROM {table} AS lock LEFT JOIN claimed ON true WHERE lock.task_name = %(task_name)s
    """


def take_over_many(table: str, history: History | None = None) -> str:
    """Return the statement that takes over many claims, in the order of their tasks' names.

    A row that somebody else has locked is passed over: its answer is the row as it was before.
    """
    return f"""
        WITH asked AS (SELECT * FROM {_rows(_TAKEOVER_TYPES)}), free AS (
            SELECT lock.task_name FROM {table} AS lock JOIN asked USING (task_name)
            WHERE {_TAKE_OVER_MANY.may_take_over}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), claimed AS (
            UPDATE {table} AS lock SET {_TAKE_OVER_MANY.changes}
            FROM asked JOIN free USING (task_name)
            WHERE lock.task_name = free.task_name AND {DURABLY}
            RETURNING {_RETURNED_AFTER_DEATH}
        ){_death(history, table)}
        SELECT asked.claim_id AS asked_claim_id, {_TAKE_OVER_MANY.made_or_found}
        FROM asked JOIN {table} AS lock USING (task_name) LEFT JOIN claimed USING (task_name)
    """


def claim_requested(table: str, history: History | None = None) -> str:
    """Return the statement that claims a run that was asked for by hand.

    It clears the request, so one claim is granted for it. The window stays what it is, and when the
    next run is due. It goes before a pause, and behind a run that goes on or is to be run again.
    Where nobody runs that again, it takes its place: while the task is paused; and once the request
    has stood, and the lease has been over, for longer than a takeover takes. Else a dead run that
    no replica can run any more, as after a deployment, would keep an operator waiting.
    """
    nobody_does = f"""({_IS_PAUSED} OR
                       GREATEST(lock.requested_at, lock.locked_until) + {SHORTEST_WAIT} <= now())"""
    max_lock = "%(max_lock)s::float8 * interval '1 second'"
    own = "lock.claim_id = %(claim_id)s::uuid"
    found = {
        **_TAKE_OVER.found,
        "granted": f"({own} AND {STANDS})",
        "paused": "false",
    }
    made = {
        **_DECIDED_GRANTED,
        **_made("%(claim_id)s::uuid"),
        "manual": "true",
        "was_overdue": "false",
    }
    return f"""
        WITH claimed AS (
            UPDATE {table} AS lock SET
                started_at = now(),
                locked_until = now()
                    + LEAST(%(lease)s::float8 * interval '1 second', {max_lock}),
                run_until = now() + {max_lock},
                overrun_at = now()
                    + LEAST(%(max_runtime)s::float8 * interval '1 second', {max_lock}),
                locked_by = %(replica_id)s, claim_id = %(claim_id)s::uuid, token = lock.token + 1,
                {_NOTES_DEATH}, handovers = 0, handed_over = false,
                failover = %(failover)s::boolean, runs = %(runs)s::text, finished_at = NULL,
                kind = 'manual', request_id = NULL, requested_by = NULL, requested_at = NULL,
                request_until = NULL
            WHERE lock.task_name = %(task_name)s AND lock.request_id = %(request_id)s::uuid
                  AND lock.request_until > now() AND (lock.finished_at IS NOT NULL OR (
                      lock.locked_until <= now() AND %(stable)s::boolean
                      AND (lock.run_until <= now() OR NOT (lock.failover OR lock.handed_over)
                           OR {nobody_does})))
                  AND {SAFELY}
            RETURNING {_RETURNED_AFTER_DEATH}
        ){_death(history, table)}
        SELECT {_made_or_found(made, found)}
        FROM {table} AS lock LEFT JOIN claimed ON true WHERE lock.task_name = %(task_name)s
    """


def look_after_takeover(table: str) -> str:
    """Return the statement that says what became of a takeover that was not granted."""
    return f"SELECT {_as(_TAKE_OVER.found)} FROM {table} AS lock WHERE task_name = %(task_name)s"


def release(table: str, history: History | None = None) -> str:
    """Return the statement that ends a claim whose run has ended."""
    release = _Release(_parameters(_RELEASE_TYPES), history)
    mine = "task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid"
    late = """(SELECT %(task_name)s::text AS task_name, %(token)s::bigint AS token) AS late
              WHERE NOT EXISTS (SELECT FROM ended)"""
    return f"""
        WITH ended AS (
            UPDATE {table} AS lock SET {release.changes} WHERE {mine} AND {SAFELY}
            RETURNING {release.ended}
        ){release.entry}{release.overtaken(late)}
        SELECT locked_until, now() AS database_time FROM ended
    """


def hand_over(table: str, history: History | None = None) -> str:
    """Return the statement that ends the lease of a run, so that another replica runs its window.

    Its holder has cut it short, or never begun it.
    """
    release = _Release(_parameters(_RELEASE_TYPES), history)
    mine = "task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid AND finished_at IS NULL"
    return f"""
        WITH ended AS (
            UPDATE {table} AS lock SET {release.hand_over} WHERE {mine} AND {SAFELY}
            RETURNING {release.ended}
        ){release.entry}
        SELECT locked_until, now() AS database_time FROM ended
    """


def release_many(table: str, history: History | None = None) -> str:
    """Return the statement that ends many claims, in the order of their tasks' names.

    Some of them may be handed over, as :func:`hand_over` does. It returns the claims that stood.
    One whose row somebody else has locked is passed over: it comes without an end.
    PostgreSQL takes what has ended for a single row, and would join it as such: 200 times 200 rows
    took a third of the statement's time. Names to be ``NOT IN`` are looked up in a hash table.
    """
    release = _Release(_columns(_RELEASE_TYPES), history)
    found = "(lock.finished_at IS NULL OR NOT asked.hand_over)"
    update = f"""UPDATE {table} AS lock SET {{changes}} FROM asked JOIN free USING (task_name)
                 WHERE lock.task_name = free.task_name AND {{which}} AND {DURABLY}
                 RETURNING {release.ended}"""
    released = update.format(changes=release.changes, which="NOT asked.hand_over")
    handed_over = update.format(changes=release.hand_over, which="asked.hand_over")
    late = f"""(SELECT task_name, token FROM asked
                WHERE NOT hand_over AND NOT EXISTS (
                    SELECT FROM {table} JOIN asked AS own USING (task_name, claim_id)
                    WHERE task_name = asked.task_name)
                OFFSET 0) AS late WHERE true"""
    return f"""
        WITH asked AS (SELECT * FROM {_rows(_RELEASE_TYPES)}), free AS (
            SELECT lock.task_name FROM {table} AS lock JOIN asked USING (task_name, claim_id)
            WHERE {found}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), released AS ({released}), handed_over AS ({handed_over}),
        ended AS (SELECT * FROM released UNION ALL SELECT * FROM handed_over)
        {release.entry}{release.overtaken(late)}
        SELECT claim_id AS asked_claim_id, locked_until, now() AS database_time FROM ended
        UNION ALL
        SELECT claim_id, NULL, now()
        FROM asked JOIN {table} AS lock USING (task_name, claim_id)
        WHERE {found} AND task_name NOT IN (SELECT task_name FROM ended)
    """


def end_lease(table: str) -> str:
    """Return the statement that ends the lease of a run whose holder is known to be dead."""
    return f"""
        UPDATE {table} AS lock SET locked_until = LEAST(lock.locked_until, now())
        WHERE task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid AND finished_at IS NULL
          AND locked_by = ANY(%(holders)s::text[]) AND {SAFELY}
        RETURNING locked_until, now() AS database_time
    """


def give_up(table: str, history: History | None = None) -> str:
    """Return the statement that finishes a dead run which is not run again; one replica's does."""
    dead = "NOT lock.handed_over"
    died = "closed AS run WHERE run.died"
    entry = history.entry(died, ended_at="run.ended_at", outcome="'died'") if history else ""
    return f"""
        WITH dead AS (
            SELECT task_name, locked_until AS ended_at, {dead} AS died FROM {table} AS lock
            WHERE task_name = %(task_name)s
        ), closed AS (
            UPDATE {table} AS lock SET
                finished_at = now(), locked_until = GREATEST(now(), window_until),
                handed_over = false, deaths = deaths + 1,
                recorded = recorded + CASE WHEN {dead} THEN 1 ELSE 0 END,
                failures = failures + CASE WHEN {dead} THEN 1 ELSE 0 END,
                failed_at = CASE WHEN {dead} THEN lock.locked_until ELSE failed_at END,
                error_type = CASE WHEN {dead} THEN NULL ELSE error_type END
            FROM dead
            WHERE lock.task_name = dead.task_name AND claim_id = %(claim_id)s::uuid
              AND finished_at IS NULL AND locked_until <= now() AND {SAFELY}
            RETURNING lock.task_name, token, window_start, started_at, locked_by, kind, recorded,
                      dead.ended_at, dead.died
        ){f", entry AS ({entry})" if entry else ""}
        SELECT token FROM closed
    """


def extend(table: str) -> str:
    """Return the statement that moves the end of a running claim's maximum lock."""
    return f"""
        UPDATE {table} AS lock SET
            run_until = run_until + %(by)s::float8 * interval '1 second',
            locked_until = GREATEST(locked_until, LEAST(
                now() + %(lease)s::float8 * interval '1 second',
                run_until + %(by)s::float8 * interval '1 second'))
        WHERE task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid AND {STANDS}
          AND {SAFELY}
        RETURNING locked_until, run_until, now() AS database_time
    """


def renew(table: str) -> str:
    """Return the statement that renews all that a replica holds, and says what of it stands.

    A lease that has ended is revived, as long as nobody has taken the run over: during an outage
    nobody could renew, and the run goes on. A row that somebody has locked is passed over, and
    comes without an end: else one of them would keep all the others waiting until their leases end.
    """
    return f"""
        WITH asked AS (
            SELECT * FROM unnest(%(task_names)s::text[], %(claim_ids)s::uuid[],
                                 %(leases)s::float8[]) AS renewal (task_name, claim_id, lease)
        ), free AS (
            SELECT lock.task_name, lease
            FROM {table} AS lock JOIN asked USING (task_name, claim_id)
            WHERE {STANDS}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), renewed AS (
            UPDATE {table} AS lock SET
                locked_until = GREATEST(
                    locked_until, LEAST(now() + lease * interval '1 second', run_until))
            FROM free WHERE lock.task_name = free.task_name
            RETURNING lock.claim_id, lock.locked_until AS renewed_until
        )
        SELECT claim_id, renewed_until AS locked_until, lock.run_until, now() AS database_time
        FROM {table} AS lock JOIN asked USING (task_name, claim_id)
             LEFT JOIN renewed USING (claim_id)
        WHERE {STANDS}
    """


def read(table: str) -> str:
    """Return the statement that reads the last runs of tasks: the dead ones, and some tasks' all.

    A row without a task has the server's own state, also where there is no other row.
    """
    not_paused = f"due_at < now() AND NOT {_IS_PAUSED}"
    is_due = f"finished_at IS NOT NULL AND {not_paused}"
    # A run that died and is not run again stands against no later one.
    died = "(locked_until <= now() AND NOT failover AND NOT handed_over)"
    is_over = f"(finished_at IS NOT NULL OR {died})"
    return f"""
        SELECT task_name, claim_id, token, finished_at IS NOT NULL AS finished,
               finished_at IS NULL AND locked_until <= now() AS dead,
               run_until <= now() AS expired, failover, deaths, handovers, handed_over, runs,
               window_start, locked_by AS holder, now() AS database_time, read_only,
               COALESCE(kind = 'manual', false) AS manual,
               CASE WHEN request_until > now() THEN request_id END AS request_id, schedule,
               CASE WHEN {is_over} AND {not_paused} THEN due_at END AS due_at,
               COALESCE({is_due} AND window_start < due_at AND overdue_at < now()
                        AND NOT {DUE_IN_PAUSE}, false) AS overdue,
               overdue_told_at IS NOT NULL AS told_overdue,
               COALESCE({_IS_PAUSED}, false) AS paused,
               {DUE_IN_PAUSE} AS due_in_pause
        FROM (SELECT current_setting('transaction_read_only')::boolean AS read_only) AS server
        LEFT JOIN {table} AS lock ON task_name = ANY(%(task_names)s::text[])
            AND ((finished_at IS NULL AND locked_until <= now())
                 OR ({is_due}) OR request_until > now()
                 OR task_name = ANY(%(always)s::text[]))
    """


def register(table: str) -> str:
    """Return the statement by which a replica tells of the tasks that it has.

    A task that has never run gets a row. Under another schedule than the row's, the task's window
    ends at the next run time of the new one at the latest, so that its first run time is not taken
    for one of the old window; but not sooner after the window's start than two run times may be
    apart, so that replicas of two versions side by side run nothing twice. A row that says the same
    is left alone, unless nobody knows when its next run is due. A task that was told to be overdue
    has not recovered by that, but when it runs. It returns the tasks of another
    schedule that were passed over, since somebody has their rows locked.
    """
    due = _due(_columns(_REGISTRATION_TYPES), "now()")
    # A second sooner: the statement has been on its way, and the run time is not any later for it.
    first_run = """GREATEST(now() + (asked.next_in - 1) * interval '1 second',
                             lock.window_start + asked.least_gap * interval '1 second')"""
    window_until = f"""CASE WHEN lock.schedule <> asked.schedule AND asked.next_in IS NOT NULL
                            THEN LEAST(lock.window_until, {first_run})
                            ELSE lock.window_until END"""
    # A run time inside the window is refused: the one after it is due.
    next_due = f"""CASE WHEN {due} < {window_until}
                        THEN GREATEST({due} + asked.period * interval '1 second', {window_until})
                        ELSE {due} END"""
    grace = "asked.grace * interval '1 second'"
    return f"""
        WITH asked AS (SELECT * FROM {_rows(_REGISTRATION_TYPES)}), changed AS (
            SELECT lock.task_name FROM {table} AS lock JOIN asked USING (task_name)
            WHERE lock.schedule IS DISTINCT FROM asked.schedule OR asked.moved
                  OR (lock.due_at IS NULL AND asked.next_in IS NOT NULL)
                  OR {DUE_IN_PAUSE}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), rewritten AS (
            UPDATE {table} AS lock SET
                schedule = asked.schedule, due_at = {next_due}, overdue_at = {next_due} + {grace},
                window_until = {window_until}
            FROM asked JOIN changed USING (task_name)
            WHERE lock.task_name = changed.task_name
        ), inserted AS (
        INSERT INTO {table} AS lock ({_ROW}, finished_at)
        SELECT asked.task_name, {NEVER}, {NEVER}, {NEVER}, {NEVER}, {NEVER}, '', gen_random_uuid(),
               (extract(epoch FROM now()) * 1000)::bigint, 0, 0, false, false, asked.runs, false,
               NULL, asked.schedule, {due}, {due} + {grace}, NULL, {NEVER}
        FROM asked WHERE NOT EXISTS (SELECT FROM {table} WHERE task_name = asked.task_name)
        ORDER BY asked.task_name ON CONFLICT DO NOTHING
        )
        SELECT task_name FROM {table} AS lock JOIN asked USING (task_name)
        WHERE lock.schedule IS DISTINCT FROM asked.schedule
              AND NOT EXISTS (SELECT FROM changed WHERE changed.task_name = lock.task_name)
    """


def tell_overdue(table: str) -> str:
    """Return the statement by which one replica takes it on to tell that a task is overdue."""
    return f"""
        UPDATE {table} AS lock SET overdue_told_at = now()
        WHERE task_name = %(task_name)s AND overdue_told_at IS NULL AND overdue_at < now()
              AND finished_at IS NOT NULL AND window_start < due_at AND NOT {_IS_PAUSED}
              AND NOT {DUE_IN_PAUSE} AND {SAFELY}
        RETURNING due_at, locked_by AS holder, token
    """


def report_replica(replicas: str) -> str:
    """Return the statement by which a replica says that it is alive, and which tasks it has.

    The first time it does, ``started_at`` is null, and all of the row becomes its own: the id may
    be that of a process before it. It returns the ``started_at`` that stands.
    """
    return f"""
        INSERT INTO {replicas} AS replica (replica_id, host, version, started_at, seen_at, tasks)
        VALUES (%(replica_id)s, %(host)s, %(version)s,
                COALESCE(%(started_at)s::timestamptz, now()), now(), %(tasks)s::text[])
        ON CONFLICT (replica_id) DO UPDATE SET
            host = excluded.host, version = excluded.version, seen_at = now(), stopped_at = NULL,
            started_at = CASE WHEN %(started_at)s::timestamptz IS NULL THEN now()
                              ELSE replica.started_at END,
            tasks = CASE WHEN replica.tasks = excluded.tasks THEN replica.tasks
                         ELSE excluded.tasks END
        RETURNING started_at
    """


def stop_replica(replicas: str) -> str:
    """Return the statement by which a replica says that it stops."""
    return f"UPDATE {replicas} SET stopped_at = now() WHERE replica_id = %(replica_id)s"


def retire(table: str, replicas: str) -> str:
    """Return the statement after which nobody waits for tasks that were removed.

    These are the ones that this replica has dropped, and, as after a deployment, the ones that a
    replica had that has stopped and whose other tasks this one has. Not if its holder was killed,
    or its application has no other replica: then somebody has to be told that they do not run.
    """
    return f"""
        UPDATE {table} AS lock SET due_at = NULL, overdue_at = NULL
        WHERE due_at IS NOT NULL AND finished_at IS NOT NULL AND NOT one_off
              AND task_name IN (
                  SELECT task_name FROM {table}
                  WHERE due_at IS NOT NULL AND finished_at IS NOT NULL AND NOT one_off
                        AND task_name IN (
                  SELECT unnest(%(dropped)s::text[])
                  UNION
                  SELECT unnest(tasks) FROM {replicas}
                  WHERE stopped_at IS NOT NULL AND tasks && %(tasks)s::text[]
                  EXCEPT
                  SELECT unnest(tasks) FROM {replicas} WHERE {IS_ALIVE})
                  ORDER BY task_name FOR NO KEY UPDATE SKIP LOCKED)
    """


def remove_replicas(replicas: str) -> str:
    """Return the statement that removes replicas that nobody has seen for long."""
    return f"""
        DELETE FROM {replicas} WHERE seen_at < now() - %(age)s::float8 * interval '1 second'
    """


def shorten_history(history: History) -> str:
    """Return the statement that deletes what a longer history has left of these tasks."""
    return f"""
        DELETE FROM {history.table}
        WHERE task_name = ANY (%(names)s::text[]) AND slot >= {history.slots}
    """


def prune(table: str, history: History | None = None) -> str:
    """Return the statement that deletes rows of one-off jobs that were over long ago.

    Their history goes with them.
    """
    runs = ""
    if history is not None:
        runs = f""", runs AS (
            DELETE FROM {history.table} WHERE task_name IN (SELECT task_name FROM pruned)
        )"""
    return f"""
        WITH pruned AS (
            DELETE FROM {table} WHERE task_name IN (
                SELECT task_name FROM {table}
                WHERE one_off AND GREATEST(finished_at, window_until, run_until)
                                  < now() - %(age)s::float8 * interval '1 second'
                LIMIT 1000 FOR UPDATE SKIP LOCKED
            ) RETURNING task_name
        ){runs}
        SELECT task_name FROM pruned
    """
