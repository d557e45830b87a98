"""The statements of the lock protocol, for psycopg: the decision of who runs a window.

Each is a transaction of its own and one round trip. All times are the database's. Claims,
takeovers and releases have two forms: for one request, and for many that travel together. The
decision is written once, for both: in the first form what is asked for are parameters, in the
second the columns of ``asked``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

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
}
_TAKEOVER_TYPES = {
    "task_name": "text",
    "claim_id": "uuid",
    "dead_claim_id": "uuid",
    "lease": "float8",
    "failover": "boolean",
}
_RELEASE_TYPES = {
    "task_name": "text",
    "claim_id": "uuid",
    "keep_window": "boolean",
    "hand_over": "boolean",
}

# Point 1 of the decision: nobody is running the task. A run that never finished counts until its
# lease has ended.
NOT_RUNNING = "(lock.finished_at IS NOT NULL OR lock.locked_until <= now())"

# A claim that its holder may go on with: also after its lease, as long as nobody has taken it over.
STANDS = "(lock.finished_at IS NULL AND NOT lock.handed_over AND lock.run_until > now())"

# A release that opens the window again puts its end this far before its start: early enough for
# every run time of the same window, whose `fired` differ by the clocks' noise, and too late for one
# of the window before. It is half the window, or a second, whichever is shorter, since the
# window may have been set to end at 'infinity'.
_JUST_BEFORE = """GREATEST(interval '1 microsecond',
    (LEAST(lock.window_until, lock.window_start + interval '2 seconds') - lock.window_start) / 2)"""

# What the server crashes on must not be a claim that was answered: its token would be given to
# somebody else. It holds for this statement's transaction only. True, and asked last.
_DURABLY = """CASE WHEN current_setting('synchronous_commit') = 'off'
    THEN set_config('synchronous_commit', 'local', true) IS NOT NULL ELSE true END"""

# Nor is a row that somebody has locked waited for for long: others want the connection.
_SAFELY = f"({_DURABLY} AND set_config('lock_timeout', %(lock_timeout)s, true) IS NOT NULL)"

_RETURNED = """lock.task_name, lock.window_start AS new_start, lock.token AS new_token,
               lock.locked_until AS new_locked_until, lock.run_until AS new_run_until"""


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
        self.may_claim = (
            f"{NOT_RUNNING} AND NOT {self.own} AND {self.new_window} AND NOT {self.waits}"
        )
        self.changes = f"""
            started_at = now(),
            locked_until = now() + LEAST({max_lock}, {self.lease}),
            run_until = now() + {max_lock},
            window_start = asked.fired,
            window_until = asked.fired + {min_lock},
            locked_by = %(replica_id)s,
            claim_id = {asked["claim_id"]},
            token = lock.token + 1,
            deaths = lock.deaths + CASE WHEN lock.finished_at IS NULL AND NOT lock.handed_over
                                        THEN 1 ELSE 0 END,
            handovers = 0,
            handed_over = false,
            failover = {asked["failover"]},
            runs = {asked["runs"]},
            one_off = {asked["one_off"]},
            finished_at = NULL
        """
        # What stands for or against the claim in the row as the statement found it.
        self.found_state = f"""LATERAL (SELECT {granted_before} AS granted, {NOT_RUNNING} AS idle,
                                       {self.new_window} AS new_window, {self.waits} AS waits)
                               AS found"""
        self.made: dict[str, str] = {**_DECIDED_GRANTED, **_made(asked["claim_id"])}
        # The first token comes from the clock, in milliseconds: where a row was deleted, the tokens
        # of the next one are larger all the same.
        self.first_row = f"""
            SELECT {asked["task_name"]}, now(), now() + LEAST({max_lock}, {self.lease}),
                   now() + {max_lock}, asked.fired, asked.fired + {min_lock}, %(replica_id)s,
                   {asked["claim_id"]}, (extract(epoch FROM now()) * 1000)::bigint, 0, 0, false,
                   {asked["failover"]}, {asked["runs"]}, {asked["one_off"]}
        """


# The columns of a ``ClaimAnswer`` from the row as the statement found it.
_FOUND = {
    "granted": "found.granted",
    "running": "NOT found.idle",
    "new_window": "found.new_window AND NOT found.granted",
    "unfinished": "lock.finished_at IS NULL",
    "waits": "found.idle AND found.waits",
}
_DECIDED_GRANTED = {
    "granted": "true",
    "running": "true",
    "new_window": "false",
    "unfinished": "true",
    "waits": "false",
}
_ROW_FOUND = {
    "window_start": "lock.window_start",
    "holder": "lock.locked_by",
    "token": "lock.token",
    "locked_until": "lock.locked_until",
    "run_until": "lock.run_until",
    "database_time": "now()",
    "claim_id": "lock.claim_id",
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

_ROW = """task_name, started_at, locked_until, run_until, window_start, window_until, locked_by,
          claim_id, token, deaths, handovers, handed_over, failover, runs, one_off"""

# A release can open the window again. A release that is sent twice opens once.
_RELEASED_WINDOW = (
    "CASE WHEN {keep_window} OR lock.finished_at IS NOT NULL THEN lock.window_until"
    f" ELSE lock.window_start - {_JUST_BEFORE} END"
)
_RELEASE = f"""
    finished_at = COALESCE(lock.finished_at, now()),
    window_until = {_RELEASED_WINDOW},
    locked_until = GREATEST(now(), {_RELEASED_WINDOW}),
    deaths = 0,
    handovers = 0,
    handed_over = false
"""
# What its holder has handed over stays handed over, also if the holder is then found dead.
_END_OF_LEASE = """
    locked_until = LEAST(lock.locked_until, now()),
    handed_over = lock.handed_over OR {handed_over}
"""


def claim(table: str) -> str:
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
            WHERE lock.task_name = {_PARAMETERS["task_name"]} AND {_ONE.may_claim} AND {_SAFELY}
            RETURNING {_RETURNED}
        )
        SELECT {_made_or_found(_ONE.made, {**_FOUND, **_ROW_FOUND})}
        FROM {table} AS lock CROSS JOIN asked LEFT JOIN claimed ON true, {_ONE.found_state}
        WHERE lock.task_name = {_PARAMETERS["task_name"]}
    """


def claim_many(table: str) -> str:
    """Return the statement that claims many tasks, each of them once.

    Only rows that may be claimed are locked, in the order of their names; a batch that is refused
    writes nothing. A row that somebody else has locked is passed over: its answer is the row as it
    was before, which looks free.
    """
    return f"""
        WITH asked AS ({_ASKED_MANY}), free AS (
            SELECT lock.task_name FROM {table} AS lock JOIN asked USING (task_name)
            WHERE {_MANY.may_claim}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), claimed AS (
            UPDATE {table} AS lock SET {_MANY.changes} FROM asked JOIN free USING (task_name)
            WHERE lock.task_name = free.task_name AND {_DURABLY}
            RETURNING {_RETURNED}
        )
        SELECT asked.claim_id AS asked_claim_id,
               {_made_or_found(_MANY.made, {**_FOUND, **_ROW_FOUND})}
        FROM asked JOIN {table} AS lock USING (task_name) LEFT JOIN claimed USING (task_name),
             {_MANY.found_state}
    """


def first_claim(table: str) -> str:
    """Return the statement that claims a task that has no row; if it has one, it returns none."""
    return f"""
        WITH asked AS ({_ASKED_ONE})
        INSERT INTO {table} AS lock ({_ROW})
        {_ONE.first_row} FROM asked WHERE {_SAFELY}
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
        {_MANY.first_row} FROM asked WHERE {_SAFELY} ORDER BY asked.task_name
        ON CONFLICT DO NOTHING
        RETURNING lock.claim_id AS asked_claim_id, {_as({**_DECIDED_GRANTED, **_ROW_FOUND})}
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

    :param asked: what is asked for, by name
    """

    def __init__(self, asked: Mapping[str, str]) -> None:
        self.may_take_over = f"""(
            lock.claim_id = {asked["dead_claim_id"]} AND lock.finished_at IS NULL
            AND lock.locked_until <= now() AND lock.run_until > now()
        )"""
        self.changes = f"""
            started_at = now(),
            locked_until = LEAST(
                now() + {asked["lease"]} * interval '1 second', lock.run_until),
            locked_by = %(replica_id)s,
            claim_id = {asked["claim_id"]},
            token = lock.token + 1,
            deaths = lock.deaths + CASE WHEN lock.handed_over THEN 0 ELSE 1 END,
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
            **_ROW_FOUND,
        }
        self.made_or_found = _made_or_found(
            {**_DECIDED_GRANTED, **_made(asked["claim_id"])}, self.found
        )


_TAKE_OVER = _Takeover(_parameters(_TAKEOVER_TYPES))
_TAKE_OVER_MANY = _Takeover(_columns(_TAKEOVER_TYPES))


def take_over(table: str) -> str:
    """Return the statement that takes over one claim of a dead holder, or says why it may not."""
    return f"""
        WITH claimed AS (
            UPDATE {table} AS lock SET {_TAKE_OVER.changes}
            WHERE lock.task_name = %(task_name)s AND {_TAKE_OVER.may_take_over} AND {_SAFELY}
            RETURNING {_RETURNED}
        )
        SELECT {_TAKE_OVER.made_or_found}
        FROM {table} AS lock LEFT JOIN claimed ON true WHERE lock.task_name = %(task_name)s
    """


def take_over_many(table: str) -> str:
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
            WHERE lock.task_name = free.task_name AND {_DURABLY}
            RETURNING {_RETURNED}
        )
        SELECT asked.claim_id AS asked_claim_id, {_TAKE_OVER_MANY.made_or_found}
        FROM asked JOIN {table} AS lock USING (task_name) LEFT JOIN claimed USING (task_name)
    """


def look_after_takeover(table: str) -> str:
    """Return the statement that says what became of a takeover that was not granted."""
    return f"SELECT {_as(_TAKE_OVER.found)} FROM {table} AS lock WHERE task_name = %(task_name)s"


def release(table: str) -> str:
    """Return the statement that ends a claim whose run has ended."""
    changes = _RELEASE.format(keep_window="%(keep_window)s::boolean")
    return f"""
        UPDATE {table} AS lock SET {changes}
        WHERE task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid AND {_SAFELY}
        RETURNING locked_until, now() AS database_time
    """


def release_many(table: str) -> str:
    """Return the statement that ends many claims, in the order of their tasks' names.

    Some of them may be handed over, as :func:`end_lease` does. It returns the claims that stood.
    One whose row somebody else has locked is passed over: it comes without an end.
    """
    released = _RELEASE.format(keep_window="asked.keep_window")
    handed_over = _END_OF_LEASE.format(handed_over="true")
    found = "(lock.finished_at IS NULL OR NOT asked.hand_over)"
    return f"""
        WITH asked AS (SELECT * FROM {_rows(_RELEASE_TYPES)}), free AS (
            SELECT lock.task_name, hand_over
            FROM {table} AS lock JOIN asked USING (task_name, claim_id) WHERE {found}
            ORDER BY lock.task_name FOR NO KEY UPDATE OF lock SKIP LOCKED
        ), released AS (
            UPDATE {table} AS lock SET {released} FROM asked JOIN free USING (task_name)
            WHERE lock.task_name = free.task_name AND NOT free.hand_over AND {_DURABLY}
            RETURNING lock.claim_id, lock.locked_until
        ), handed_over AS (
            UPDATE {table} AS lock SET {handed_over} FROM free
            WHERE lock.task_name = free.task_name AND free.hand_over AND {_DURABLY}
            RETURNING lock.claim_id, lock.locked_until
        ), ended AS (SELECT * FROM released UNION ALL SELECT * FROM handed_over)
        SELECT claim_id AS asked_claim_id, ended.locked_until, now() AS database_time
        FROM asked JOIN {table} AS lock USING (task_name, claim_id) LEFT JOIN ended USING (claim_id)
        WHERE {found}
    """


def end_lease(table: str) -> str:
    """Return the statement that ends the lease of a run that has not ended, and will not."""
    changes = _END_OF_LEASE.format(handed_over="%(handed_over)s::boolean")
    return f"""
        UPDATE {table} AS lock SET {changes}
        WHERE task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid AND finished_at IS NULL
          AND (%(holders)s::text[] IS NULL OR locked_by = ANY(%(holders)s::text[])) AND {_SAFELY}
        RETURNING locked_until, now() AS database_time
    """


def give_up(table: str) -> str:
    """Return the statement that finishes a dead run which is not run again; one replica's does."""
    return f"""
        UPDATE {table} SET
            finished_at = now(), locked_until = GREATEST(now(), window_until),
            handed_over = false, deaths = deaths + 1
        WHERE task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid
          AND finished_at IS NULL AND locked_until <= now() AND {_SAFELY}
        RETURNING token
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
          AND {_SAFELY}
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
    return f"""
        SELECT task_name, claim_id, token, finished_at IS NOT NULL AS finished,
               finished_at IS NULL AND locked_until <= now() AS dead,
               run_until <= now() AS expired, failover, deaths, handovers, handed_over, runs,
               window_start, locked_by AS holder, now() AS database_time, read_only
        FROM (SELECT current_setting('transaction_read_only')::boolean AS read_only) AS server
        LEFT JOIN {table} ON task_name = ANY(%(task_names)s::text[])
            AND ((finished_at IS NULL AND locked_until <= now())
                 OR task_name = ANY(%(always)s::text[]))
    """


def prune(table: str) -> str:
    """Return the statement that deletes rows of one-off jobs that were over long ago."""
    return f"""
        DELETE FROM {table} WHERE task_name IN (
            SELECT task_name FROM {table}
            WHERE one_off AND GREATEST(finished_at, window_until, run_until)
                              < now() - %(age)s::float8 * interval '1 second'
            LIMIT 1000 FOR UPDATE SKIP LOCKED
        )
    """


def free(table: str, task_name: str, token: int) -> str:
    """Return the SQL by which an operator frees a task whose run hangs, as in the README.

    It is for people, in one line and without parameters.

    :param token: of that run, so that no newer one is freed
    """
    frees = "finished_at = now(), locked_until = now(), claim_id = gen_random_uuid()"
    run = f"task_name = {_literal(task_name)} AND token = {token}"
    return f"UPDATE {table} SET {frees} WHERE {run}"


def _literal(text: str) -> str:
    """Return a text as SQL in one line, whatever is in it."""
    if text.isprintable():
        return "'" + text.replace("'", "''") + "'"
    plain = (c if c.isprintable() and c not in "'\\" else f"\\U{ord(c):08X}" for c in text)
    return f"E'{''.join(plain)}'"
