"""Claims of run times."""

from __future__ import annotations

from collections.abc import Mapping

from apscheduler_tasklock._lock.protocol_messages import ClaimRequest
from apscheduler_tasklock._lock.statements.columns import (
    DECIDED_FREE,
    DECIDED_GRANTED,
    NO_ROW,
    RETURNED,
    ROW_FOUND,
    ROW_INSERTED,
    columns_made,
    made_or_found,
    made_or_missing,
    select_list,
)
from apscheduler_tasklock._lock.statements.conditions import (
    IS_PAUSED_OR_WAS_AT_FIRED,
    IS_WANTED,
    MILLISECONDS,
    NEXT_TOKEN,
    ROW_COLUMNS,
    SAFELY,
    STANDS,
    WINDOW_SCHEDULE,
    asked_columns,
    asked_parameters,
    due_after,
    json_rows,
    paused_with_all,
    pauses_of_all,
)
from apscheduler_tasklock._lock.statements.deaths import NOT_RUNNING, NOTES_DEATH
from apscheduler_tasklock._lock.statements.history import History, death_entry

# The run time in database time. The database subtracts the claim's lag, which the replica computes
# on its own clock, so that the offset between the clocks cancels out. `latest` caps the database's
# time at the moment when the claim was sent (see database_clock.py); LEAST ignores a null. If each
# replica computes the same run time, that run time is used instead. Otherwise two run times could
# be confused, if the clocks differ by more than the gap between the two. The run time is limited to
# 5 minutes from the time that the database has computed, because beyond that the replica's clock is
# wrong.
_FIRED = """GREATEST(reckoned - interval '5 minutes',
                     LEAST(reckoned + interval '5 minutes', COALESCE(exact_time, reckoned)))"""


def _reckoned(lag: str) -> str:
    return f"LEAST(now(), %(latest)s) - {lag} * interval '1 second' AS reckoned"


class ClaimParts:
    """The parts of the statement that claims a task.

    :param asked: the SQL of the request's values, by name
    """

    def __init__(self, asked: Mapping[str, str]) -> None:
        self._asked = asked
        # Whether the row has this claim's id, because an earlier try of the claim was granted and
        # the answer was lost.
        self.own = f"lock.claim_id = {asked['claim_id']}"
        granted_before = f"({self.own} AND {STANDS})"
        min_lock = f"({asked['min_lock']} * interval '1 second')"
        max_lock = f"({asked['max_lock']} * interval '1 second')"
        # Null for a claim without a lease. LEAST ignores a null.
        self.lease = f"({asked['lease']} * interval '1 second')"
        # Whether the row's window belongs to an older schedule: to another schedule than the
        # claim's, and the window's holder got that schedule before this replica got the claim's.
        # Such a window must not cover the first run time of the newer schedule. The condition is
        # false for a claim by a replica that still has the older schedule, in a rolling deployment.
        # It is also false if replicas do not compute exactly the same run time.
        since = f"(asked.reckoned - {asked['schedule_for']} * interval '1 second')"
        is_newer = f"""({asked["exact_time"]} IS NOT NULL AND {since} > lock.schedule_since
                        AND {WINDOW_SCHEDULE} <> {asked["schedule"]})"""
        least_gap = f"COALESCE({asked['least_gap']}, {asked['min_lock']})"
        # Condition 2 of the decision: the window is new. The row's window lasts as long as the
        # minimum lock that it was claimed with, or as this claim's minimum lock, if that is
        # shorter. So a deployment that shortens an interval takes effect at once. For the window of
        # an older schedule, `least_gap` is used instead of this claim's minimum lock. A hold's
        # window is not shortened, because the whole minimum lock was promised to the holder. A run
        # time is run once, also with a minimum lock of 0.
        self.new_window = f"""(
            asked.fired >= LEAST(lock.window_until,
                                 CASE WHEN lock.runs <> '' AND {asked["runs"]} <> ''
                                      THEN lock.window_start + interval '1 second'
                                           * CASE WHEN {is_newer} THEN {least_gap}
                                                  ELSE {asked["min_lock"]} END END)
            AND ({asked["exact_time"]} IS NULL OR asked.fired > lock.window_start
                 OR lock.window_until < lock.window_start)
        )"""
        # Whether a dead run blocks a new window, because the dead run's window is run again first,
        # or because this replica does not yet believe that the run is dead: after an outage,
        # holders get time to renew first. A dead run whose maximum lock has ended blocks no claim.
        self.waits = f"""(
            lock.finished_at IS NULL AND (
                NOT (lock.handed_over OR lock.run_until <= now() OR %(stable)s::boolean)
                OR (lock.runs <> '' AND lock.runs = {asked["runs"]} AND lock.run_until > now()
                    AND (lock.handed_over OR (lock.failover AND {asked["failover"]})))
            )
        )"""
        # A hold is not paused with all tasks, because the application's code waits for the hold.
        self.paused_with_all = f"""(
            {asked["runs"]} <> '' AND {paused_with_all(asked["task_name"], "asked.fired")})"""
        # The CASE checks the window first, because the window decides most claims, and its check
        # costs less. `is_free` needs no CASE, because PostgreSQL evaluates the cheaper parts of a
        # WHERE clause first.
        self.paused = f"""({IS_PAUSED_OR_WAS_AT_FIRED} OR CASE WHEN {self.new_window}
                           THEN {self.paused_with_all} ELSE false END)"""
        is_free = f"""NOT {self.own} AND {self.new_window} AND NOT {self.waits}
                      AND NOT {IS_PAUSED_OR_WAS_AT_FIRED} AND NOT {self.paused_with_all}"""
        self.may_claim = f"{NOT_RUNNING} AND {is_free} AND {IS_WANTED}"
        due = due_after(asked, "asked.fired")
        # A one-off job's grace is kept, because its row stays for that long after the run time.
        graced = f"COALESCE({due}, CASE WHEN {asked['one_off']} THEN asked.fired END)"
        # `schedule_since` is when the claim's replica got the schedule, or the row's time, if that
        # is later and the row's window has the same schedule. So an older schedule is recognized,
        # whichever replica has claimed. GREATEST ignores a null.
        is_same = f"{WINDOW_SCHEDULE} = {asked['schedule']}"
        known_since = f"""CASE WHEN {is_same} AND {asked["schedule_for"]} IS NOT NULL
                               THEN lock.schedule_since END"""
        status = {
            "kind": f"CASE WHEN {asked['runs']} = '' THEN 'hold' ELSE 'schedule' END",
            "schedule": asked["schedule"],
            "due_at": due,
            "is_last": asked["is_last"],
            "overdue_at": f"{graced} + {asked['grace']} * interval '1 second'",
            "overrun_at": f"now() + LEAST({asked['max_runtime']}, {asked['max_lock']})"
            " * interval '1 second'",
        }
        self.changes = f"""
            started_at = now(),
            locked_until = now() + LEAST({max_lock}, {self.lease}),
            run_until = now() + {max_lock},
            window_start = asked.fired,
            window_until = asked.fired + {min_lock},
            locked_by = %(replica_id)s,
            claim_id = {asked["claim_id"]},
            token = {NEXT_TOKEN},
            handovers = 0,
            handed_over = false,
            failover = {asked["failover"]},
            runs = {asked["runs"]},
            one_off = {asked["one_off"]},
            finished_at = NULL,
            attempt = 1,
            {", ".join(f"{name} = {value}" for name, value in status.items())},
            schedule_since = GREATEST({since}, {known_since}),
            window_schedule = NULL,
            {NOTES_DEATH}
        """
        # The conditions that decide the claim, computed from the row as it was before the statement
        # changed it.
        self.found_state = f"""LATERAL (SELECT {granted_before} AS granted, {NOT_RUNNING} AS idle,
                                       {self.new_window} AS new_window, {self.waits} AS waits,
                                       {self.paused} AS paused)
                               AS found"""
        self.made: dict[str, str] = {**DECIDED_GRANTED, **columns_made(asked["claim_id"])}
        self.first_row = f"""
            SELECT {asked["task_name"]}, now(), now() + LEAST({max_lock}, {self.lease}),
                   now() + {max_lock}, asked.fired, asked.fired + {min_lock}, %(replica_id)s,
                   {asked["claim_id"]}, {MILLISECONDS}, 0, 0, false,
                   {asked["failover"]}, {asked["runs"]}, {asked["one_off"]},
                   {", ".join(status.values())}, {since}
        """


# The columns of a ``ClaimAnswer`` from the row as the statement found it.
FOUND = {
    "granted": "found.granted",
    "running": "NOT found.idle",
    "new_window": "found.new_window AND NOT found.granted",
    "unfinished": "lock.finished_at IS NULL",
    "waits": "found.idle AND found.waits",
    "paused": "found.paused",
    "came_first": "lock.started_at <= asked.fired",
}
_PARAMETERS = asked_parameters(ClaimRequest)
_ONE = ClaimParts({**_PARAMETERS, "exact_time": "asked.exact_time"})
_MANY = ClaimParts(asked_columns(ClaimRequest))
_ASKED_ONE = f"""SELECT exact_time, reckoned, {_FIRED} AS fired
                 FROM (SELECT {_PARAMETERS["exact_time"]} AS exact_time,
                              {_reckoned("%(lag)s")}) AS request"""


# The SELECT of many claims' requests, from one JSON document.
_ASKED_MANY = f"""
    SELECT *, {_FIRED} AS fired FROM (
        SELECT *, {_reckoned("lag")}
        FROM {json_rows(ClaimRequest, lag="float8", position="bigint")}) AS request"""


def claim(table: str, history: History | None = None) -> str:
    """Return the statement that claims one task, and returns a ``ClaimAnswer``'s columns.

    For a task without a row it returns nothing. The claim is an UPDATE, because an UPDATE whose
    condition is false takes no row lock, no transaction id and no WAL. A refused INSERT .. ON
    CONFLICT DO UPDATE would take all three. The SELECT sees the row as it was before the UPDATE.

    A claim that was granted once is not granted again, because its statement may be sent twice, and
    arrive for the second time after the release.
    """
    return f"""
        WITH {pauses_of_all(table)}, asked AS ({_ASKED_ONE}), claimed AS (
            UPDATE {table} AS lock SET {_ONE.changes} FROM asked
            WHERE lock.task_name = {_PARAMETERS["task_name"]} AND {_ONE.may_claim} AND {SAFELY}
            RETURNING {RETURNED}
        ){death_entry(history, table)}
        SELECT {made_or_found(_ONE.made, {**FOUND, **ROW_FOUND})}
        FROM {table} AS lock CROSS JOIN asked LEFT JOIN claimed ON true, {_ONE.found_state}
        WHERE lock.task_name = {_PARAMETERS["task_name"]}
    """


def claim_many(table: str, history: History | None = None, *, limited: bool = False) -> str:
    """Return the statement that claims many tasks, each of them once.

    It locks only rows that may be claimed, in the order of the tasks' names. If all claims are
    refused, nothing is written. A row that another session has locked is passed over, and its
    answer looks free.

    :param limited: whether at most ``most`` claims are granted, in the order of the requests.
        Claims that an earlier try has granted count, too. The answer to a claim beyond the limit
        also looks free.
    """
    order = "ORDER BY lock.task_name"
    if limited:
        # SKIP LOCKED never waits, so an order by position cannot end in a deadlock.
        order = f"""ORDER BY asked.position LIMIT GREATEST(0, %(most)s - (
                        SELECT count(*) FROM {table} AS lock JOIN asked USING (task_name)
                        WHERE {_MANY.own} AND {STANDS}))"""
    return f"""
        WITH {pauses_of_all(table)}, asked AS (
            {_ASKED_MANY}
        ), free AS (
            SELECT lock.task_name FROM {table} AS lock JOIN asked USING (task_name)
            WHERE {_MANY.may_claim}
            {order} FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), claimed AS (
            UPDATE {table} AS lock SET {_MANY.changes} FROM asked JOIN free USING (task_name)
            WHERE lock.task_name = free.task_name AND {SAFELY}
            RETURNING {RETURNED}
        ){death_entry(history, table)}
        SELECT asked.claim_id AS asked_claim_id,
               {made_or_found(_MANY.made, {**FOUND, **ROW_FOUND})}
        FROM asked JOIN {table} AS lock USING (task_name) LEFT JOIN claimed USING (task_name),
             {_MANY.found_state}
    """


def first_claim_many(table: str, *, limited: bool = False) -> str:
    """Return the statement that claims many tasks without a row.

    The statement inserts the rows in the order of their names, because two replicas that insert the
    same rows in different orders could wait for each other. The answer to a claim that is not
    granted looks free (see :attr:`ClaimAnswer.looks_free`), and has the database's time.

    :param limited: whether at most ``most`` rows are inserted, in the order of the requests
    """
    made = {**DECIDED_GRANTED, **ROW_INSERTED}
    first = "asked"
    if limited:
        first = "(SELECT * FROM asked ORDER BY position LIMIT %(most)s) AS asked"
    missing = {**DECIDED_FREE, "paused": _MANY.paused_with_all, **NO_ROW}
    return f"""
        WITH {pauses_of_all(table)}, asked AS (
            {_ASKED_MANY}
        ), first AS (
            INSERT INTO {table} AS lock ({ROW_COLUMNS})
            {_MANY.first_row} FROM {first}
            WHERE NOT {_MANY.paused_with_all} AND {IS_WANTED} AND {SAFELY} ORDER BY asked.task_name
            ON CONFLICT DO NOTHING
            RETURNING {select_list(made)}
        )
        SELECT asked.claim_id AS asked_claim_id,
               {made_or_missing("first", missing)}
        FROM asked LEFT JOIN first ON first.claim_id = asked.claim_id
    """
