"""The statements of the lock protocol, for psycopg: the decision of who runs a window.

Each is a transaction of its own and one round trip. All times are the database's.
"""

from __future__ import annotations

# Point 1 of the decision: nobody is running the task. A run that never finished counts until its
# lease, or its maximum lock, has passed.
NOT_RUNNING = "(finished_at IS NOT NULL OR locked_until <= now())"

# The run time in database time. The replica says how late it is by its own clock, so that the
# offset between the clocks cancels out; `latest` caps the database's time at what it can have
# been when the replica said so (see clock.py). LEAST passes over a null.
FIRED = "(LEAST(now(), %(latest)s::timestamptz) - %(lag)s::float8 * interval '1 second')"

MIN_LOCK = "(%(min_lock)s::float8 * interval '1 second')"
# LEAST passes over a null: a claim without a lease.
LOCK = "(LEAST(%(max_lock)s::float8, %(lease)s::float8) * interval '1 second')"

# Point 2: the window is new. The claimer's own minimum lock counts if it is the shorter one, so
# that an interval shortened by a deployment takes effect at once.
NEW_WINDOW = f"({FIRED} >= LEAST(window_until, window_start + {MIN_LOCK}))"

# What the claimer wants with a run whose holder died. Its window is taken over before the
# claimer's own, however new that is; else it would be lost.
LEAVES_DEAD = "(%(dead_run)s::text = 'leave' AND finished_at IS NULL)"
TAKES_OVER = "(%(dead_run)s::text = 'take over' AND finished_at IS NULL)"

# A claim whose answer was lost finds one of its ids in the row: it was granted the first time, and
# the id tells which window. If that is its own one, it is not left to be claimed, however short.
OWN = "claim_id IN (%(claim_id)s::uuid, %(takeover_id)s::uuid)"
GRANTED_BEFORE = f"({OWN} AND NOT {NOT_RUNNING})"
TOOK_OVER = f"(claim_id = %(takeover_id)s::uuid AND NOT {NOT_RUNNING})"
# Not by what the statement found: a holder that is late may have released while it waited.
TAKES_IT_OVER = "(new_claim_id = %(takeover_id)s::uuid)"

# The columns of a ``ClaimAnswer``: from the row as the statement found it, and as a granted claim
# made it.
_ANSWER = {
    GRANTED_BEFORE: "true",
    f"NOT {NOT_RUNNING}": "true",
    f"{NEW_WINDOW} AND (NOT {GRANTED_BEFORE} OR {TOOK_OVER})": f"{NEW_WINDOW} AND {TAKES_IT_OVER}",
    "finished_at IS NULL": "true",
    "window_start": "new_start",
    f"CASE WHEN {TOOK_OVER} THEN 'unknown' END": f"CASE WHEN {TAKES_IT_OVER} THEN locked_by END",
    "locked_by": "%(replica_id)s",
    "token": "new_token",
    "locked_until": "new_locked_until",
    "now()": "now()",
    "claim_id": "new_claim_id",
}
ROW_BEFORE = ", ".join(_ANSWER)
ROW_AFTER = ", ".join(
    f"CASE WHEN new_token IS NULL THEN {before} ELSE {after} END"
    for before, after in _ANSWER.items()
)

# A release can open the window again. It ends then half a window before its start: early enough
# for every fire of the same window, whose `fired` differ by the clocks' noise, and too late for a
# fire of the window before. A release that is sent twice opens once.
RELEASED_WINDOW = (
    "CASE WHEN %(keep_window)s::boolean OR finished_at IS NOT NULL THEN window_until"
    " ELSE window_start - (window_until - window_start) / 2 END"
)


def claim(table: str) -> str:
    """Return the statement that claims, or says why it may not. Without a row it returns none.

    An UPDATE whose condition is false takes no row lock, no transaction id and no WAL; an
    INSERT .. ON CONFLICT DO UPDATE would take all three to be refused. What it is joined with is
    the row as it was before.

    A claim that was granted once is not granted again: a statement that was held up on its way may
    arrive after the release, and nobody would know of what it got.
    """
    return f"""
        WITH claimed AS (
            UPDATE {table} SET
                started_at = now(),
                locked_until = now() + {LOCK},
                window_start = CASE WHEN {TAKES_OVER} THEN window_start ELSE {FIRED} END,
                window_until = CASE WHEN {TAKES_OVER} THEN window_until
                                    ELSE {FIRED} + {MIN_LOCK} END,
                locked_by = %(replica_id)s,
                claim_id = CASE WHEN {TAKES_OVER} THEN %(takeover_id)s::uuid
                                ELSE %(claim_id)s::uuid END,
                token = token + 1,
                finished_at = NULL
            WHERE task_name = %(task_name)s AND {NOT_RUNNING} AND NOT {LEAVES_DEAD}
              AND ({NEW_WINDOW} OR {TAKES_OVER}) AND NOT {OWN}
            RETURNING window_start AS new_start, token AS new_token,
                      locked_until AS new_locked_until, claim_id AS new_claim_id
        )
        SELECT {ROW_AFTER} FROM {table} LEFT JOIN claimed ON true WHERE task_name = %(task_name)s
    """


def first_claim(table: str) -> str:
    """Return the statement that claims a task that has no row; if it has one, it returns none."""
    return f"""
        INSERT INTO {table} (task_name, started_at, locked_until, window_start, window_until,
                             locked_by, claim_id, token)
        VALUES (%(task_name)s, now(), now() + {LOCK}, {FIRED}, {FIRED} + {MIN_LOCK},
                %(replica_id)s, %(claim_id)s::uuid, 1)
        ON CONFLICT DO NOTHING
        RETURNING true, true, false, true, window_start, NULL, locked_by, token, locked_until,
                  now(), claim_id
    """


def look(table: str) -> str:
    """Return the statement that says what became of a claim that was not granted."""
    return f"SELECT {ROW_BEFORE} FROM {table} WHERE task_name = %(task_name)s"


def release(table: str) -> str:
    """Return the statement that ends a claim."""
    return f"""
        UPDATE {table} SET
            finished_at = COALESCE(finished_at, now()),
            window_until = {RELEASED_WINDOW},
            locked_until = GREATEST(now(), {RELEASED_WINDOW})
        WHERE task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid
        RETURNING locked_until, now()
    """


def extend(table: str) -> str:
    """Return the statement that moves the end of a running claim."""
    return f"""
        UPDATE {table} SET locked_until = locked_until + %(by)s::float8 * interval '1 second'
        WHERE task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid AND NOT {NOT_RUNNING}
        RETURNING locked_until
    """


def renew(table: str, *, waits: bool) -> str:
    """Return the statement that renews all that a replica holds, and tells what of it stands.

    A claim whose lease has ended stays so, even if nobody has taken it over: its holder has been
    told that it is lost. A row that somebody has locked is passed over, and told without an end:
    else one of them would keep all the others waiting until their leases end.

    :param waits: whether it is waited for all the same, as for a single claim
    """
    return f"""
        WITH wanted AS (
            SELECT * FROM unnest(%(task_names)s::text[], %(claim_ids)s::uuid[],
                                 %(leases)s::float8[], %(max_locks)s::float8[])
                     AS renewal (task_name, claim_id, lease, max_lock)
        ), free AS (
            SELECT claim.task_name, lease, max_lock
            FROM {table} AS claim JOIN wanted USING (task_name, claim_id)
            WHERE NOT {NOT_RUNNING}
            FOR NO KEY UPDATE OF claim {"" if waits else "SKIP LOCKED"}
        ), renewed AS (
            UPDATE {table} AS claim SET
                locked_until = GREATEST(locked_until, LEAST(
                    now() + lease * interval '1 second',
                    started_at + max_lock * interval '1 second'
                ))
            FROM free WHERE claim.task_name = free.task_name
            RETURNING claim.claim_id, locked_until AS renewed_until
        )
        SELECT claim_id, renewed_until, now()
        FROM {table} JOIN wanted USING (task_name, claim_id) LEFT JOIN renewed USING (claim_id)
        WHERE NOT {NOT_RUNNING}
    """


def read(table: str) -> str:
    """Return the statement that reads the last runs of tasks."""
    return f"""
        SELECT task_name, finished_at IS NOT NULL, finished_at IS NULL AND locked_until <= now(),
               window_start, locked_by, locked_until, now(), read_only
        FROM (SELECT current_setting('transaction_read_only')::boolean AS read_only) AS server
        LEFT JOIN {table} ON task_name = ANY(%(task_names)s::text[])
    """
