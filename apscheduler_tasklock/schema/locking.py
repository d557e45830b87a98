"""Statements for migrations: changes of tables in use, grants, and the id of the jobs' table."""

from __future__ import annotations

from alembic.operations import Operations

from apscheduler_tasklock.schema.table import literal, quoted

# Limits the milliseconds that one attempt waits for the table's lock, and the number of attempts.
# All claims wait while an attempt waits, so a longer wait would cause misfires.
LOCK_TIMEOUT = 1000
MOST_ATTEMPTS = 30

# All attempts are in one statement, so that printed SQL also makes them when a DBA runs the SQL.
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

# Grants each role the rights on another table that it has on the task lock table.
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
# The id is in the table's comment, because only the table's owner can change the comment, and
# backups contain the comment. The server makes the id, so that printed SQL makes another id in each
# database.
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
    """Run a statement that needs an exclusive lock on a table, without long waits of claims.

    Each attempt waits for the lock for a second. Claims go on between the attempts. After 30
    attempts, which take about a minute, the statement fails.
    """
    _execute(op, when_unlocked(statement))


def when_unlocked(statement: str) -> str:
    """Return the statement that :func:`execute_when_unlocked` runs."""
    return _block(
        _UNTIL_UNLOCKED.format(most=MOST_ATTEMPTS, timeout=LOCK_TIMEOUT, statement=statement)
    )


def grant_like(
    op: Operations, table: str, beside: str, schema: str | None, *, deletes: bool = False
) -> None:
    """Grant each role the rights on the table ``beside`` that it has on ``table``.

    :param deletes: whether roles with UPDATE also get DELETE
    """
    _execute(op, granting_like(table, beside, schema, deletes=deletes))


def granting_like(table: str, beside: str, schema: str | None, *, deletes: bool = False) -> str:
    """Return the statement that :func:`grant_like` runs."""
    beside_literal = literal(qualified(beside, schema))
    return _block(
        _GRANT_LIKE.format(
            table_literal=literal(qualified(table, schema)),
            beside_literal=beside_literal,
            more=_GRANT_DELETE.format(beside_literal=beside_literal) if deletes else "",
        )
    )


def _block(body: str) -> str:
    """Return a DO statement with a block of PL/pgSQL, which may contain any names."""
    quote = "$tasklock$"
    while quote in body:
        quote = f"{quote[:-1]}_$"
    return f"\nDO {quote}{body}{quote}\n"


def identify(op: Operations, table: str, schema: str | None) -> None:
    """Give a table an id, which the signatures of its rows cover."""
    _execute(op, identifying(table, schema))


def identifying(table: str, schema: str | None) -> str:
    """Return the statement that :func:`identify` runs."""
    return _block(_IDENTIFY.format(table_literal=literal(qualified(table, schema))))


def _execute(op: Operations, statement: str) -> None:
    op.execute(statement.replace(":", r"\:"))  # a plain colon would begin a parameter
