"""What the migrations do beside tables that are in use."""

from __future__ import annotations

from alembic.operations import Operations

from apscheduler_tasklock.schema.table import literal, quoted

# Milliseconds that an attempt waits for others to leave the table, and how many attempts there are.
# While one waits, every claim waits behind it: for longer, and jobs would be missed.
LOCK_TIMEOUT = 1000
MOST_ATTEMPTS = 30

# One statement, which is retried in the server: also where a DBA runs printed SQL.
_UNTIL_UNLOCKED = """
DECLARE
    before text := current_setting('lock_timeout');
BEGIN
    FOR attempt IN 1..{most} LOOP
        BEGIN
            PERFORM set_config('lock_timeout', '{timeout}ms', true);
            {statement};
            PERFORM set_config('lock_timeout', before, true);
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            IF attempt = {most} THEN
                RAISE EXCEPTION 'another session keeps the table of the task locks locked'
                    USING ERRCODE = 'lock_not_available',
                          HINT = 'end long transactions that use it, and try again';
            END IF;
            PERFORM pg_sleep(0.5 + random());
        END;
    END LOOP;
END
"""

# Whoever may use the task lock table may use what lies beside it.
_GRANT_LIKE = """
DECLARE
    entry record;
BEGIN
    FOR entry IN
        SELECT privilege_type, CASE WHEN grantee = 0 THEN 'PUBLIC'
                                    ELSE quote_ident(pg_get_userbyid(grantee)) END AS grantee
        FROM pg_class, aclexplode(COALESCE(relacl, acldefault('r', relowner)))
        WHERE pg_class.oid = {table_literal}::regclass
             AND grantee <> (SELECT oid FROM pg_roles WHERE rolname = current_user)
             AND privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
    LOOP
        EXECUTE 'GRANT ' || entry.privilege_type || ' ON ' || {beside_literal}
                || ' TO ' || entry.grantee;{more}
    END LOOP;
END
"""
# Only the table's owner can change a comment, and a backup has it. The id is made by the server, so
# that printed SQL gives each database another one.
_IDENTIFY = """
BEGIN
    EXECUTE 'COMMENT ON TABLE ' || {table_literal} || ' IS ' || pg_catalog.quote_literal(
        'apscheduler-tasklock ' || gen_random_uuid()
        || '. Do not change this comment: the signatures of stored jobs are made with it.');
END
"""
_GRANT_DELETE = """
        IF entry.privilege_type = 'UPDATE' THEN
            EXECUTE 'GRANT DELETE ON ' || {beside_literal} || ' TO ' || entry.grantee;
        END IF;"""


def qualified(table: str, schema: str | None) -> str:
    """Return a table's name, with its schema if it has one, quoted for SQL where needed."""
    return f"{quoted(schema)}.{quoted(table)}" if schema else quoted(table)


def execute_when_unlocked(op: Operations, statement: str) -> None:
    """Run a statement that needs a table for itself, without keeping claims waiting for long.

    It waits for a second, lets claims pass, and tries again, for about a minute.
    """
    _execute(op, when_unlocked(statement))


def when_unlocked(statement: str) -> str:
    """Return the statement that does what :func:`execute_when_unlocked` does."""
    return _block(
        _UNTIL_UNLOCKED.format(most=MOST_ATTEMPTS, timeout=LOCK_TIMEOUT, statement=statement)
    )


def grant_like(
    op: Operations, table: str, beside: str, schema: str | None, *, deletes: bool = False
) -> None:
    """Grant on one table what roles may do with another.

    :param deletes: whether those that may update may delete as well
    """
    _execute(op, granting_like(table, beside, schema, deletes=deletes))


def granting_like(table: str, beside: str, schema: str | None, *, deletes: bool = False) -> str:
    """Return the statement that does what :func:`grant_like` does."""
    beside_literal = literal(qualified(beside, schema))
    return _block(
        _GRANT_LIKE.format(
            table_literal=literal(qualified(table, schema)),
            beside_literal=beside_literal,
            more=_GRANT_DELETE.format(beside_literal=beside_literal) if deletes else "",
        )
    )


def _block(body: str) -> str:
    """Return the statement that runs a block of PL/pgSQL, whatever names are in it."""
    quote = "$tasklock$"
    while quote in body:
        quote = f"{quote[:-1]}_$"
    return f"\nDO {quote}{body}{quote}\n"


def identify(op: Operations, table: str, schema: str | None) -> None:
    """Give a table an id, which the signatures of its rows are made with."""
    _execute(op, identifying(table, schema))


def identifying(table: str, schema: str | None) -> str:
    """Return the statement that does what :func:`identify` does."""
    return _block(_IDENTIFY.format(table_literal=literal(qualified(table, schema))))


def _execute(op: Operations, statement: str) -> None:
    op.execute(statement.replace(":", r"\:"))  # which begins a parameter here
