"""The statements of the lock protocol, for psycopg: the decision of who runs a window.

Each is a transaction of its own and one round trip. All times are the database's.
"""

from __future__ import annotations

# Point 1 of the decision: nobody is running the task. A run that never finished counts until its
# lease has ended.
NOT_RUNNING = "(finished_at IS NOT NULL OR locked_until <= now())"

# A claim that its holder may go on with: also after its lease, as long as nobody has taken it over.
STANDS = "(finished_at IS NULL AND NOT handed_over AND run_until > now())"

# The run time in database time. The replica says how late it is by its own clock, so that the
# offset between the clocks cancels out; `latest` caps the database's time at what it can have
# been when the replica said so (see clock.py). LEAST passes over a null. Where every replica
# computes the same run time, it is that one: clocks that differ by more than a short gap of the
# schedule would otherwise take one run time for another. More than 5 minutes away it is not
# believed, since then the replica's clock is wrong.
_ASKED = """
    SELECT GREATEST(reckoned - interval '5 minutes', LEAST(reckoned + interval '5 minutes',
               COALESCE(%(run_time)s::timestamptz, reckoned))) AS fired
    FROM (SELECT LEAST(now(), %(latest)s::timestamptz) - %(lag)s::float8 * interval '1 second'
                 AS reckoned) AS clock
"""

_MIN_LOCK = "(%(min_lock)s::float8 * interval '1 second')"
_MAX_LOCK = "(%(max_lock)s::float8 * interval '1 second')"
# LEAST passes over a null: a claim without a lease.
_LEASE = "(%(lease)s::float8 * interval '1 second')"

# A release that opens the window again puts its end this far before its start: early enough for
# every fire of the same window, whose `fired` differ by the clocks' noise, and too late for a
# fire of the window before. It is half the window, or a second, whichever is shorter, since the
# window may have been set to end at 'infinity'.
_JUST_BEFORE = """GREATEST(interval '1 microsecond',
    (LEAST(window_until, window_start + interval '2 seconds') - window_start) / 2)"""

# Point 2: the window is new. The claimer's own minimum lock counts if it is the shorter one, so
# that an interval shortened by a deployment takes effect at once; not where either is a hold, whose
# minimum lock was promised to it. One run time is run once, also with a minimum lock of 0.
_NEW_WINDOW = f"""(
    fired >= LEAST(window_until,
                   CASE WHEN runs <> '' AND %(runs)s <> '' THEN window_start + {_MIN_LOCK} END)
    AND (%(run_time)s::timestamptz IS NULL OR fired > window_start OR window_until < window_start)
)"""

# A dead run that stands against a new window: its own one is run again first; or the rows cannot
# be believed yet. Past its maximum lock it stands against nothing.
_WAITS = """(
    finished_at IS NULL AND (
        NOT (handed_over OR run_until <= now() OR %(stable)s::boolean)
        OR (runs <> '' AND runs = %(runs)s AND run_until > now()
            AND (handed_over OR (failover AND %(failover)s::boolean)))
    )
)"""

# A claim whose answer was lost finds its id in the row: it was granted the first time.
_OWN = "claim_id = %(claim_id)s::uuid"
_GRANTED_BEFORE = f"({_OWN} AND {STANDS})"

# What the server crashes on must not be a claim that was answered: its token would be given to
# somebody else. A limit for the wait on a row, where there is none, since a statement whose replica
# has given up must not claim later. Both hold for this statement's transaction only. True, and
# asked last.
_SAFELY = """(
    CASE WHEN current_setting('synchronous_commit') = 'off'
         THEN set_config('synchronous_commit', 'local', true) IS NOT NULL ELSE true END
    AND CASE WHEN current_setting('lock_timeout') = '0'
             THEN set_config('lock_timeout', %(lock_timeout)s, true) IS NOT NULL ELSE true END
)"""

# The columns of a ``ClaimAnswer``: from the row as the statement found it, and as a granted claim
# made it.
_ROW_AFTER = (
    "true",
    "true",
    "false",
    "true",
    "false",
    "new_start",
    "%(replica_id)s",
    "new_token",
    "new_locked_until",
    "new_run_until",
    "now()",
    "%(claim_id)s::uuid",
)


def _row_before(new_window: str, waits: str) -> tuple[str, ...]:
    return (
        _GRANTED_BEFORE,
        f"NOT {NOT_RUNNING}",
        f"{new_window} AND NOT {_GRANTED_BEFORE}",
        "finished_at IS NULL",
        f"{NOT_RUNNING} AND {waits}",
        "window_start",
        "locked_by",
        "token",
        "locked_until",
        "run_until",
        "now()",
        "claim_id",
    )


_BEFORE_CLAIM = _row_before(_NEW_WINDOW, _WAITS)
_BEFORE_TAKEOVER = _row_before("false", "false")


def _made_or_found(before: tuple[str, ...]) -> str:
    return ", ".join(
        f"CASE WHEN new_token IS NULL THEN {found} ELSE {made} END"
        for found, made in zip(before, _ROW_AFTER, strict=True)
    )


_RETURNED = """window_start AS new_start, token AS new_token, locked_until AS new_locked_until,
               run_until AS new_run_until"""

# A release can open the window again. A release that is sent twice opens once.
_RELEASED_WINDOW = (
    "CASE WHEN %(keep_window)s::boolean OR finished_at IS NOT NULL THEN window_until"
    f" ELSE window_start - {_JUST_BEFORE} END"
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
        WITH asked AS ({_ASKED}), claimed AS (
            UPDATE {table} SET
                started_at = now(),
                locked_until = now() + LEAST({_MAX_LOCK}, {_LEASE}),
                run_until = now() + {_MAX_LOCK},
                window_start = fired,
                window_until = fired + {_MIN_LOCK},
                locked_by = %(replica_id)s,
                claim_id = %(claim_id)s::uuid,
                token = token + 1,
                deaths = deaths + CASE WHEN finished_at IS NULL AND NOT handed_over
                                       THEN 1 ELSE 0 END,
                handovers = 0,
                handed_over = false,
                failover = %(failover)s::boolean,
                runs = %(runs)s,
                one_off = %(one_off)s::boolean,
                finished_at = NULL
            FROM asked
            WHERE task_name = %(task_name)s AND {NOT_RUNNING} AND NOT {_OWN} AND {_NEW_WINDOW}
              AND NOT {_WAITS} AND {_SAFELY}
            RETURNING {_RETURNED}
        )
        SELECT {_made_or_found(_BEFORE_CLAIM)}
        FROM {table} CROSS JOIN asked LEFT JOIN claimed ON true WHERE task_name = %(task_name)s
    """


def first_claim(table: str) -> str:
    """Return the statement that claims a task that has no row; if it has one, it returns none.

    The first token comes from the clock, in milliseconds: where a row was deleted, the tokens of
    the next one are larger all the same.
    """
    return f"""
        WITH asked AS ({_ASKED})
        INSERT INTO {table} (task_name, started_at, locked_until, run_until, window_start,
                             window_until, locked_by, claim_id, token, deaths, handovers,
                             handed_over, failover, runs, one_off)
        SELECT %(task_name)s, now(), now() + LEAST({_MAX_LOCK}, {_LEASE}), now() + {_MAX_LOCK},
               fired, fired + {_MIN_LOCK}, %(replica_id)s, %(claim_id)s::uuid,
               (extract(epoch FROM now()) * 1000)::bigint, 0, 0, false,
               %(failover)s::boolean, %(runs)s, %(one_off)s::boolean
        FROM asked WHERE {_SAFELY}
        ON CONFLICT DO NOTHING
        RETURNING true, true, false, true, false, window_start, locked_by, token, locked_until,
                  run_until, now(), claim_id
    """


def look(table: str) -> str:
    """Return the statement that says what became of a claim that was not granted."""
    return f"""
        WITH asked AS ({_ASKED})
        SELECT {", ".join(_BEFORE_CLAIM)} FROM {table} CROSS JOIN asked
        WHERE task_name = %(task_name)s
    """


def take_over(table: str) -> str:
    """Return the statement that takes over one claim of a dead holder, or says why it may not.

    Its window and the end of its maximum lock stay what they were.
    """
    return f"""
        WITH claimed AS (
            UPDATE {table} SET
                started_at = now(),
                locked_until = LEAST(now() + {_LEASE}, run_until),
                locked_by = %(replica_id)s,
                claim_id = %(claim_id)s::uuid,
                token = token + 1,
                deaths = deaths + CASE WHEN handed_over THEN 0 ELSE 1 END,
                handovers = handovers + CASE WHEN handed_over THEN 1 ELSE 0 END,
                handed_over = false,
                failover = %(failover)s::boolean
            WHERE task_name = %(task_name)s AND claim_id = %(dead_claim_id)s::uuid
              AND finished_at IS NULL AND locked_until <= now() AND run_until > now() AND {_SAFELY}
            RETURNING {_RETURNED}
        )
        SELECT {_made_or_found(_BEFORE_TAKEOVER)}
        FROM {table} LEFT JOIN claimed ON true WHERE task_name = %(task_name)s
    """


def look_after_takeover(table: str) -> str:
    """Return the statement that says what became of a takeover that was not granted."""
    return f"SELECT {', '.join(_BEFORE_TAKEOVER)} FROM {table} WHERE task_name = %(task_name)s"


def release(table: str) -> str:
    """Return the statement that ends a claim whose run has ended."""
    return f"""
        UPDATE {table} SET
            finished_at = COALESCE(finished_at, now()),
            window_until = {_RELEASED_WINDOW},
            locked_until = GREATEST(now(), {_RELEASED_WINDOW}),
            deaths = 0,
            handovers = 0,
            handed_over = false
        WHERE task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid AND {_SAFELY}
        RETURNING locked_until, now()
    """


def end_lease(table: str) -> str:
    """Return the statement that ends the lease of a run that has not ended, and will not.

    What its holder has handed over stays handed over, also if the holder is then found dead.
    """
    return f"""
        UPDATE {table} SET
            locked_until = LEAST(locked_until, now()),
            handed_over = handed_over OR %(handed_over)s::boolean
        WHERE task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid AND finished_at IS NULL
          AND (%(holders)s::text[] IS NULL OR locked_by = ANY(%(holders)s::text[])) AND {_SAFELY}
        RETURNING locked_until, now()
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
        UPDATE {table} SET
            run_until = run_until + %(by)s::float8 * interval '1 second',
            locked_until = GREATEST(locked_until, LEAST(
                now() + {_LEASE}, run_until + %(by)s::float8 * interval '1 second'))
        WHERE task_name = %(task_name)s AND claim_id = %(claim_id)s::uuid AND {STANDS}
          AND {_SAFELY}
        RETURNING locked_until, run_until, now()
    """


def renew(table: str) -> str:
    """Return the statement that renews all that a replica holds, and tells what of it stands.

    A lease that has ended is revived, as long as nobody has taken the run over: during an outage
    nobody could renew, and the run goes on. A row that somebody has locked is passed over, and
    told without an end: else one of them would keep all the others waiting until their leases end.
    """
    return f"""
        WITH wanted AS (
            SELECT * FROM unnest(%(task_names)s::text[], %(claim_ids)s::uuid[],
                                 %(leases)s::float8[]) AS renewal (task_name, claim_id, lease)
        ), free AS (
            SELECT claim.task_name, lease
            FROM {table} AS claim JOIN wanted USING (task_name, claim_id)
            WHERE {STANDS}
            FOR NO KEY UPDATE OF claim SKIP LOCKED
        ), renewed AS (
            UPDATE {table} AS claim SET
                locked_until = GREATEST(
                    locked_until, LEAST(now() + lease * interval '1 second', run_until))
            FROM free WHERE claim.task_name = free.task_name
            RETURNING claim.claim_id, locked_until AS renewed_until
        )
        SELECT claim_id, renewed_until, run_until, now()
        FROM {table} JOIN wanted USING (task_name, claim_id) LEFT JOIN renewed USING (claim_id)
        WHERE {STANDS}
    """


def read(table: str) -> str:
    """Return the statement that reads the last runs of tasks: the dead ones, and some tasks' all.

    A row without a task has the server's own state, also where there is no other row.
    """
    return f"""
        SELECT task_name, claim_id, token, finished_at IS NOT NULL,
               finished_at IS NULL AND locked_until <= now(), run_until <= now(), failover, deaths,
               handovers, handed_over, runs, window_start, locked_by, now(), read_only
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
