"""Claims of run times."""

from __future__ import annotations

from collections.abc import Mapping

from apscheduler_tasklock._lock.statements.answers import (
    DECIDED_FREE,
    DECIDED_GRANTED,
    NO_ROW,
    RETURNED,
    ROW_FOUND,
    columns_made,
    made_or_found,
    made_or_missing,
    select_list,
)
from apscheduler_tasklock._lock.statements.history import History, death_entry
from apscheduler_tasklock._lock.statements.parts import (
    HANDED_OUT_TO_NOBODY,
    IS_PAUSED,
    IS_WANTED,
    NEVER,
    NOT_RUNNING,
    NOTES_DEATH,
    ROW_COLUMNS,
    SAFELY,
    STANDS,
    WINDOW_SCHEDULE,
    asked_columns,
    asked_parameters,
    due_after,
    json_rows,
)

# What a claim asks for, and the types.
_CLAIM_TYPES = {
    "task_name": "text",
    "claim_id": "uuid",
    "lag": "float8",
    "run_time": "timestamptz",
    "min_lock": "float8",
    "least_gap": "float8",
    "max_lock": "float8",
    "lease": "float8",
    "failover": "boolean",
    "runs": "text",
    "one_off": "boolean",
    "schedule": "text",
    "schedule_for": "float8",
    "next_in": "float8",
    "is_last": "boolean",
    "grace": "float8",
    "max_runtime": "float8",
}

# What says whether a claim's window is taken.
_WINDOW_TYPES = {
    name: _CLAIM_TYPES[name]
    for name in (
        "task_name",
        "claim_id",
        "lag",
        "run_time",
        "min_lock",
        "least_gap",
        "schedule",
        "schedule_for",
        "failover",
        "runs",
    )
}

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
        # Whether the window is that of an older schedule, which must not cover the first run time
        # of this one: of another schedule, whose holders had it before this replica had its own. A
        # replica that a deployment has yet to replace gets no more than the windows leave it. A
        # run time that is this replica's own is served by the run that stands against it.
        since = f"(asked.reckoned - {asked['schedule_for']} * interval '1 second')"
        is_newer = f"""({asked["run_time"]} IS NOT NULL AND {since} > lock.schedule_since
                        AND {WINDOW_SCHEDULE} <> {asked["schedule"]})"""
        # Point 2: the window is new. The claimer's own minimum lock counts if it is the shorter
        # one, so that an interval shortened by a deployment takes effect at once; and less than
        # that after an older schedule. Not where either is a hold, whose minimum lock was promised
        # to it. One run time is run once, also with a minimum lock of 0.
        self.new_window = f"""(
            asked.fired >= LEAST(lock.window_until,
                                 CASE WHEN lock.runs <> '' AND {asked["runs"]} <> ''
                                      THEN lock.window_start + interval '1 second'
                                           * CASE WHEN {is_newer} THEN {asked["least_gap"]}
                                                  ELSE {asked["min_lock"]} END END)
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
        self.paused = f"({IS_PAUSED} OR COALESCE(asked.fired < lock.paused_until, false))"
        is_free = f"NOT {self.own} AND {self.new_window} AND NOT {self.waits} AND NOT {self.paused}"
        self.may_claim = f"{NOT_RUNNING} AND {is_free} AND {IS_WANTED}"
        due = due_after(asked, "asked.fired")
        # Of the same schedule the newest replica counts, so that an older version is known as such
        # whichever replica has claimed. GREATEST passes over a null.
        is_same = f"{WINDOW_SCHEDULE} = {asked['schedule']}"
        known_since = f"""CASE WHEN {is_same} AND {asked["schedule_for"]} IS NOT NULL
                               THEN lock.schedule_since END"""
        status = {
            "kind": f"CASE WHEN {asked['runs']} = '' THEN 'hold' ELSE 'schedule' END",
            "schedule": asked["schedule"],
            "due_at": due,
            "is_last": asked["is_last"],
            "overdue_at": f"{due} + {asked['grace']} * interval '1 second'",
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
            token = lock.token + 1,
            handovers = 0,
            handed_over = false,
            failover = {asked["failover"]},
            runs = {asked["runs"]},
            one_off = {asked["one_off"]},
            finished_at = NULL,
            {", ".join(f"{name} = {value}" for name, value in status.items())},
            schedule_since = GREATEST({since}, {known_since}),
            window_schedule = NULL,
            {NOTES_DEATH}
        """
        # What stands for or against the claim in the row as the statement found it.
        self.found_state = f"""LATERAL (SELECT {granted_before} AS granted, {NOT_RUNNING} AS idle,
                                       {self.new_window} AS new_window, {self.waits} AS waits,
                                       {self.paused} AS paused)
                               AS found"""
        self.made: dict[str, str] = {**DECIDED_GRANTED, **columns_made(asked["claim_id"])}
        # The first token comes from the clock, in milliseconds: where a row was deleted, the tokens
        # of the next one are larger all the same.
        self.first_row = f"""
            SELECT {asked["task_name"]}, now(), now() + LEAST({max_lock}, {self.lease}),
                   now() + {max_lock}, asked.fired, asked.fired + {min_lock}, %(replica_id)s,
                   {asked["claim_id"]}, (extract(epoch FROM now()) * 1000.0)::bigint, 0, 0, false,
                   {asked["failover"]}, {asked["runs"]}, {asked["one_off"]},
                   {", ".join(status.values())}, {since}
        """


# The columns of a ``ClaimAnswer`` from the row as the statement found it.
_FOUND = {
    "granted": "found.granted",
    "running": "NOT found.idle",
    "new_window": "found.new_window AND NOT found.granted",
    "unfinished": "lock.finished_at IS NULL",
    "waits": "found.idle AND found.waits",
    "paused": "found.paused",
    "came_first": "lock.started_at <= asked.fired",
}
_PARAMETERS = asked_parameters(_CLAIM_TYPES)
_ONE = _Claim({**_PARAMETERS, "run_time": "asked.run_time"})
_MANY = _Claim(asked_columns(_CLAIM_TYPES))
_ASKED_ONE = f"""SELECT run_time, reckoned, {_FIRED} AS fired
                 FROM (SELECT {_PARAMETERS["run_time"]} AS run_time,
                              {_reckoned(_PARAMETERS["lag"])}) AS request"""


def _asked(types: Mapping[str, str]) -> str:
    """Return the select of what many claims ask for, from one JSON document."""
    return f"""SELECT *, {_FIRED} AS fired
               FROM (SELECT *, {_reckoned("lag")} FROM {json_rows(types)}) AS request"""


_ASKED_MANY = _asked(_CLAIM_TYPES)
_ASKED_SOME = _asked({**_CLAIM_TYPES, "position": "int"})
_ASKED_WINDOWS = _asked(_WINDOW_TYPES)


def claim(table: str, history: History | None = None) -> str:
    """Return the statement that claims, or says why it may not. Without a row it returns none.

    An UPDATE whose condition is false takes no row lock, no transaction id and no WAL; an
    INSERT .. ON CONFLICT DO UPDATE would take all three to be refused. What it is joined with is
    the row as it was before.

    A claim that was granted once is not granted again: a statement that was held up on its way may
    arrive after the release, and nobody would know of what it got.
    """
    return f"""
        WITH asked AS ({_ASKED_ONE}), claimed AS (
            UPDATE {table} AS lock SET {_ONE.changes} FROM asked
            WHERE lock.task_name = {_PARAMETERS["task_name"]} AND {_ONE.may_claim} AND {SAFELY}
            RETURNING {RETURNED}
        ){death_entry(history, table)}
        SELECT {made_or_found(_ONE.made, {**_FOUND, **ROW_FOUND})}
        FROM {table} AS lock CROSS JOIN asked LEFT JOIN claimed ON true, {_ONE.found_state}
        WHERE lock.task_name = {_PARAMETERS["task_name"]}
    """


def claim_many(table: str, history: History | None = None, *, limited: bool = False) -> str:
    """Return the statement that claims many tasks, each of them once.

    Only rows that may be claimed are locked, in the order of their names; a batch that is refused
    writes nothing. A row that somebody else has locked is passed over: its answer is the row as it
    was before, which looks free.

    :param limited: whether as many are granted as ``most`` says, in the order in which they are
        asked for. What is beyond that looks free, too. It counts those that were granted when the
        same claims were sent before, and no answer came.
    """
    order = "ORDER BY lock.task_name"
    if limited:
        # Nobody waits for a row here, so any order will do.
        order = f"""ORDER BY asked.position LIMIT GREATEST(0, %(most)s::bigint - (
                        SELECT count(*) FROM {table} AS lock JOIN asked USING (task_name)
                        WHERE {_MANY.own} AND {STANDS}))"""
    return f"""
        WITH asked AS ({_ASKED_SOME if limited else _ASKED_MANY}), free AS (
            SELECT lock.task_name FROM {table} AS lock JOIN asked USING (task_name)
            WHERE {_MANY.may_claim}
            {order} FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), claimed AS (
            UPDATE {table} AS lock SET {_MANY.changes} FROM asked JOIN free USING (task_name)
            WHERE lock.task_name = free.task_name AND {SAFELY}
            RETURNING {RETURNED}
        ){death_entry(history, table)}
        SELECT asked.claim_id AS asked_claim_id,
               {made_or_found(_MANY.made, {**_FOUND, **ROW_FOUND})}
        FROM asked JOIN {table} AS lock USING (task_name) LEFT JOIN claimed USING (task_name),
             {_MANY.found_state}
    """


def find_taken(table: str) -> str:
    """Return the statement that tells which of many windows are taken. It writes nothing."""
    return f"""
        WITH asked AS ({_ASKED_WINDOWS})
        SELECT asked.claim_id AS asked_claim_id, {select_list({**_FOUND, **ROW_FOUND})}
        FROM asked JOIN {table} AS lock USING (task_name), {_MANY.found_state}
        WHERE NOT (found.granted OR found.new_window)
    """


def first_claim_many(table: str, *, limited: bool = False) -> str:
    """Return the statement that claims many tasks that have no row, in the order of their names.

    In any other order, two replicas that insert the same rows could wait for each other. A claim
    that is not granted has an answer, too, which looks free: it has the database's time.

    :param limited: whether as many are inserted as ``most`` says, those that are asked for first
    """
    made = {**DECIDED_GRANTED, **ROW_FOUND}
    first = "asked"
    if limited:
        first = "(SELECT * FROM asked ORDER BY position LIMIT %(most)s::bigint) AS asked"
    return f"""
        WITH asked AS ({_ASKED_SOME if limited else _ASKED_MANY}), first AS (
            INSERT INTO {table} AS lock ({ROW_COLUMNS})
            {_MANY.first_row} FROM {first} WHERE {IS_WANTED} AND {SAFELY} ORDER BY asked.task_name
            ON CONFLICT DO NOTHING
            RETURNING {select_list(made)}
        )
        SELECT asked.claim_id AS asked_claim_id,
               {made_or_missing("first", {**DECIDED_FREE, **NO_ROW})}
        FROM asked LEFT JOIN first ON first.claim_id = asked.claim_id
    """


def claim_handed_out(table: str, history: History | None = None, *, jobs: str) -> str:
    """Return the statement that claims a run time of a job that was handed out to a replica.

    It claims the task, with or without a row, and moves the job to its next run time, or ends it.
    Both happen, or neither: whoever dies before it has lost nothing, and whoever sends it again
    under the same id changes nothing. The id of the hand-out is the fence: it is gone once the job
    was claimed, changed, removed or given back. There are no windows: the run time is in the row.

    It always returns a row. Without ``granted`` the task has none yet; ``withdrawn`` says that the
    job is handed out to this replica no more, and ``was_handed`` that it was when the statement
    began: then it has waited for another one, whose changes its answer does not show.

    :param jobs: the jobs' table
    """
    task_name = _PARAMETERS["task_name"]
    may_claim = f"{NOT_RUNNING} AND NOT {_ONE.own} AND NOT {_ONE.waits} AND NOT {IS_PAUSED}"
    found = {
        **_FOUND,
        "new_window": "NOT found.granted",
        "paused": IS_PAUSED,
        **ROW_FOUND,
    }
    first = {**DECIDED_GRANTED, **ROW_FOUND}
    return f"""
        WITH asked AS (
            SELECT {_PARAMETERS["run_time"]} AS run_time, {_PARAMETERS["run_time"]} AS fired,
                   {_PARAMETERS["run_time"]} AS reckoned
        ), job AS (
            SELECT id FROM {jobs}
            WHERE id = %(job_id)s AND handed_id = %(handed_id)s::uuid AND {SAFELY}
            FOR NO KEY UPDATE
        ), claimed AS (
            UPDATE {table} AS lock SET {_ONE.changes} FROM asked, job
            WHERE lock.task_name = {task_name} AND {may_claim}
            RETURNING {RETURNED}
        ), first AS (
            INSERT INTO {table} AS lock ({ROW_COLUMNS})
            {_ONE.first_row} FROM asked, job
            WHERE NOT EXISTS (SELECT FROM {table} WHERE task_name = {task_name})
            ON CONFLICT DO NOTHING
            RETURNING {select_list(first)}
        ), moved AS (
            UPDATE {jobs} AS job SET
                next_run_time = %(following)s::timestamptz,
                ended = %(following)s::timestamptz IS NULL,
                last_run_time = asked.run_time, task_name = {task_name}, {HANDED_OUT_TO_NOBODY}
            FROM asked, (SELECT FROM claimed UNION ALL SELECT FROM first) AS granted
            WHERE job.id = %(job_id)s AND job.handed_id = %(handed_id)s::uuid
        ){death_entry(history, table)}
        SELECT NOT EXISTS (SELECT FROM job) AS withdrawn,
               EXISTS (SELECT FROM {jobs} WHERE id = %(job_id)s AND handed_id = %(handed_id)s::uuid)
                   AS was_handed, answer.*
        FROM (SELECT) AS always LEFT JOIN (
            SELECT {made_or_found(_ONE.made, found)}
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
            INSERT INTO {table} AS lock ({ROW_COLUMNS}, finished_at, recorded)
            SELECT %(task_name)s::text, {NEVER}, {NEVER}, {NEVER}, {NEVER}, {NEVER}, '',
                   gen_random_uuid(), (extract(epoch FROM now()) * 1000.0)::bigint, 0, 0, false,
                   false, '', true, NULL, NULL, NULL, true, NULL, NULL, NULL, now(), 1
            FROM settled WHERE NOT EXISTS (SELECT FROM {table} WHERE task_name = %(task_name)s)
            ON CONFLICT DO NOTHING
            RETURNING lock.task_name, lock.token, lock.recorded
        ), entry AS ({entry})
        SELECT id FROM settled
    """
