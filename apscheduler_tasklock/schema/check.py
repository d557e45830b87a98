"""Checks at the start whether the tables exist, have all columns, and may be used by the role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import psycopg
from sqlalchemy import Table

from apscheduler_tasklock._database.sqlstates import WAITS_FOR_STANDBY, one_line
from apscheduler_tasklock._database.wire import class_row, dict_row
from apscheduler_tasklock.errors import TaskLockDatabaseError, TaskLockError, TaskLockSchemaError
from apscheduler_tasklock.schema.shell import table_options
from apscheduler_tasklock.schema.table import (
    LONGEST_IDENTIFIER,
    job_table,
    literal,
    quoted,
    quoted_name,
    tables_of,
)

# The commands for which row-level security hides all rows of the table `found` from this role,
# because no policy of the table allows these commands.
_WITHOUT_POLICY = """CASE WHEN row_security_active(found.oid) THEN ARRAY(
    SELECT command
    FROM (VALUES ('SELECT', 'r'), ('INSERT', 'a'), ('UPDATE', 'w')) AS _ (command, code)
    WHERE NOT EXISTS (
        SELECT FROM pg_catalog.pg_policy
        WHERE polrelid = found.oid AND polpermissive AND polcmd IN ('*', code::"char")
              AND EXISTS (SELECT FROM pg_catalog.unnest(polroles) AS role
                          WHERE role = 0::oid OR pg_has_role(role, 'USAGE'))))
ELSE '{}' END"""

# The check reads the catalogue, because the application's role has rights on our tables only, and
# so cannot read Alembic's version table. A table whose schema is known is looked up by that schema,
# because to_regclass() fails for a role without USAGE on the schema.
_CHECK = f"""
    SELECT now() AS database_time, current_user::text AS role,
           current_setting('transaction_read_only') = 'on' AS read_only,
           found.oid IS NOT NULL AS table_exists,
           $3::text IS NULL OR has_schema_privilege(space.oid, 'USAGE') AS may_enter,
           ARRAY(SELECT attname::text FROM pg_catalog.pg_attribute
                 WHERE attrelid = found.oid AND attnum > 0 AND NOT attisdropped) AS columns,
           ARRAY(SELECT command
                 FROM pg_catalog.unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'])
                 WITH ORDINALITY AS _ (command, nth)
                 WHERE NOT has_table_privilege(found.oid, command) ORDER BY nth) AS not_granted,
           {_WITHOUT_POLICY} AS without_policy
    FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS asked (quoted, name, place)
         LEFT JOIN pg_catalog.pg_namespace AS space ON space.nspname = $3::text,
         LATERAL (SELECT CASE WHEN $3::text IS NULL THEN to_regclass(asked.quoted)::oid ELSE
                      (SELECT oid FROM pg_catalog.pg_class
                       WHERE relname = asked.name AND relnamespace = space.oid) END AS oid) AS found
    ORDER BY asked.place
"""

# Whether a role may write, and whether it is a setting of the role alone that forbids it.
_WRITABLE = """
    SELECT pg_is_in_recovery() AS is_standby,
           current_setting('transaction_read_only') = 'on' AS read_only,
           has_table_privilege(to_regclass($1)::oid, 'UPDATE') AS may_write,
           (SELECT source IN ('configuration file', 'command line', 'database', 'global')
            FROM pg_catalog.pg_settings WHERE name = 'default_transaction_read_only') AS of_all
"""

_ELSEWHERE = """
    SELECT nspname::text AS schema, pg_get_userbyid(relowner)::text AS owner,
           has_schema_privilege(namespace.oid, 'USAGE') AS may_use,
           nspname = ANY (string_to_array(replace(current_setting('search_path'), '"', ''), ', '))
               AS in_path
    FROM pg_catalog.pg_class AS found JOIN pg_catalog.pg_namespace AS namespace
         ON namespace.oid = relnamespace
    WHERE relname = $1 AND relkind IN ('r', 'p') AND nspname <> COALESCE($2, '')
          AND NOT pg_is_other_temp_schema(namespace.oid)
          AND $3 OPERATOR(pg_catalog.<@) ARRAY(SELECT attname::text FROM pg_catalog.pg_attribute
                          WHERE attrelid = found.oid AND attnum > 0 AND NOT attisdropped)
    ORDER BY in_path DESC, nspname
"""

# A lock in one of these modes blocks every write of a row, also while a session only waits for it.
STRONG_LOCKS = """('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')"""

_IS_READ_ONLY = "it is read-only: a standby, or default_transaction_read_only is on"

_NEEDED_RIGHTS = ("SELECT", "INSERT", "UPDATE")


@dataclass(frozen=True)
class Found:
    """A table as a role finds it: whether it exists, and what the role may do with it.

    :ivar table: the table as this library declares it
    :ivar row: the table's row in the answer to the check's query
    """

    table: Table
    row: dict[str, Any]

    @property
    def exists(self) -> bool:
        """Whether the table exists."""
        return bool(self.row["table_exists"])

    @property
    def may_enter(self) -> bool:
        """Whether the role has USAGE on the table's schema."""
        return bool(self.row["may_enter"])

    @property
    def not_granted(self) -> list[str]:
        """The rights that the role lacks, of SELECT, INSERT, UPDATE and DELETE."""
        return list(self.row["not_granted"])

    @property
    def without_policy(self) -> list[str]:
        """The commands for which row-level security hides all rows from the role."""
        return list(self.row["without_policy"])

    @property
    def lacks_columns(self) -> list[str]:
        """The columns that this library needs and the table lacks."""
        columns = set(self.row["columns"])
        return [column.name for column in self.table.columns if column.name not in columns]

    def with_all_rights(self) -> Found:
        """Return a copy in which the role has all rights on the table and its schema."""
        return replace(self, row={**self.row, "not_granted": [], "may_enter": True})

    def lacks_rights(self, needed: Sequence[str]) -> list[str]:
        """Return which of the needed rights the role lacks."""
        return [right for right in self.not_granted if right in needed]


@dataclass(frozen=True)
class Elsewhere:
    """A table in another schema, with the name and the key columns of one of our tables.

    :ivar schema: the other schema
    :ivar owner: the table's owner
    :ivar may_use: whether the connection's role has USAGE on the schema
    :ivar in_path: whether the schema is on the ``search_path``
    """

    schema: str
    owner: str
    may_use: bool
    in_path: bool


def check_tables(
    cursor: Any, task_lock: Table, tables: Sequence[Table], user: str | None
) -> datetime:
    """Make sure that tables can be used as they are.

    Unknown columns are ignored, because the tables may be newer than some replicas during a rolling
    deployment.

    :param cursor: a psycopg cursor
    :param task_lock: the task lock table as this library declares it
    :param tables: the needed tables: the task lock table, and some of the tables beside it
    :param user: the role of the connection, for the message
    :return: the database's time
    :raises TaskLockSchemaError: a table is missing, old, or not permitted. One message names all
        problems.
    :raises TaskLockDatabaseError: the database is read-only, as during a failover
    """
    found = look_up(cursor, tables)
    problems = problems_of(found, task_lock, user)
    if not found[0].exists and (there := read_elsewhere(cursor, task_lock)):
        problems = [in_another_schema_error(task_lock, tables, there, found[0].row["role"])]
    if problems:
        raise _as_one(problems)
    if found[0].row["read_only"]:
        raise TaskLockDatabaseError(_IS_READ_ONLY)
    return found[0].row["database_time"]  # type: ignore[no-any-return]  # rows are untyped


def check_writable(cursor: Any, task_lock: Table) -> bool:
    """Make sure that the database is not read-only; return whether the role may write.

    A role without the right to write may be read-only on purpose, which no replica is.

    :param cursor: a psycopg cursor
    :raises TaskLockDatabaseError: the database is read-only
    """
    cursor.row_factory = dict_row
    row = cursor.execute(_WRITABLE, [quoted_name(task_lock)]).fetchone()
    if row["is_standby"] or (row["read_only"] and (row["may_write"] or row["of_all"])):
        raise TaskLockDatabaseError(_IS_READ_ONLY)
    return bool(row["may_write"])


def find_problem(
    cursor: Any, task_lock: Table, table: Table, user: str | None
) -> TaskLockSchemaError | None:
    """Return the first problem of a table and the rights on it; ``None`` if there is none.

    :param cursor: a psycopg cursor
    :param task_lock: the task lock table
    :param table: the task lock table, or a table beside it
    """
    problems = problems_of(look_up(cursor, [table]), task_lock, user)
    return problems[0] if problems else None


def look_up(cursor: Any, tables: Sequence[Table]) -> list[Found]:
    """Look up tables of one schema as the connection's role finds them.

    :param cursor: a psycopg cursor
    """
    cursor.row_factory = dict_row
    names = [quoted_name(table) for table in tables], [table.name for table in tables]
    rows = cursor.execute(_CHECK, [*names, tables[0].schema]).fetchall()
    return [Found(table, row) for table, row in zip(tables, rows, strict=True)]


def problems_of(
    found: Sequence[Found], task_lock: Table, user: str | None
) -> list[TaskLockSchemaError]:
    """Return one error for each kind of problem that makes tables unusable.

    :param found: the answer of :func:`look_up`
    :param user: the role of the connection, for messages if the server has not named it
    """
    problems = []
    there = [each for each in found if each.exists]
    missing = [each.table for each in found if not each.exists]
    if missing:
        problems.append(missing_tables_error(task_lock, missing))
    for each in there:
        if each.lacks_columns:
            problems.append(old_table_error(task_lock, each.lacks_columns[0], each.table))
            break
    lacking = {
        each.table: rights
        for each in there
        if (rights := each.lacks_rights(_rights_needed(task_lock, each.table)))
    }
    role = found[0].row["role"] or user
    may_enter = all(each.may_enter for each in there)
    if lacking or not may_enter:
        lacking = lacking or {there[0].table: []}
        problems.append(missing_grants_error(lacking, role, on_schema=not may_enter))
    # Without a policy the rows are invisible, so that each claim would be refused.
    problems += [
        missing_policy_error(each.table, role, each.without_policy)
        for each in there
        if each.without_policy
    ]
    return problems


def _as_one(problems: Sequence[TaskLockSchemaError]) -> TaskLockSchemaError:
    return TaskLockSchemaError("; also: ".join(map(str, problems)))


def _rights_needed(task_lock: Table, table: Table) -> Sequence[str]:
    """Return the rights that a replica needs on a table."""
    deletes = ("DELETE",) if table is job_table(task_lock) else ()
    return (*_NEEDED_RIGHTS, *deletes)


def lock_query(tables: Sequence[Table]) -> bytes:
    """Return the query for the session that blocks claims by its lock on a table.

    The query returns one text, or no row. The text is ``WAITS_FOR_STANDBY`` if the session's commit
    waits for a synchronous standby, because the session is not to blame then. Where the
    role may not see that, the statement that ends the session looks first. A session that only
    waits for such a lock blocks claims, too: for example an ALTER TABLE that waits for a
    transaction that has read the table.
    """
    names = ", ".join(f"to_regclass({literal(quoted_name(table))})" for table in tables)
    return f"""
        SELECT CASE WHEN wait_event = '{WAITS_FOR_STANDBY}' THEN wait_event ELSE
               pg_catalog.format('pid %s (%s) %s %s on %s%s; %s',
                      lock.pid, COALESCE(NULLIF(application_name, ''), 'without a name'),
                      CASE WHEN granted THEN 'has' ELSE 'waits for' END, mode, relation::regclass,
                      ', in a transaction since ' || date_trunc('second', xact_start)::text,
                      'let it end its transaction, or run: SELECT pg_terminate_backend('
                      || lock.pid::text || ')' || CASE WHEN state IS NULL THEN
                          ' FROM pg_stat_activity WHERE pid = ' || lock.pid::text ||
                          ' AND state IS NOT NULL'
                          ' AND wait_event IS DISTINCT FROM ''{WAITS_FOR_STANDBY}'''
                      ELSE '' END) END
        FROM pg_catalog.pg_locks AS lock
             LEFT JOIN pg_catalog.pg_stat_activity AS activity ON activity.pid = lock.pid
        WHERE locktype = 'relation' AND relation = ANY (ARRAY[{names}]::oid[])
              AND mode IN {STRONG_LOCKS}
              AND lock.pid IS NOT NULL AND lock.pid <> pg_backend_pid()
              AND database = (SELECT oid FROM pg_catalog.pg_database
                              WHERE datname = current_database())
        ORDER BY granted DESC, xact_start LIMIT 1
    """.encode()


UPGRADE_COMMAND = "apscheduler-tasklock upgrade"
DOWNGRADE_COMMAND = "apscheduler-tasklock downgrade"


def explain_rejection(
    error: psycopg.Error, table: Table, user: str | None, where: str
) -> TaskLockError:
    """Return the error to raise for a statement that PostgreSQL rejects every time.

    :param error: PostgreSQL's error
    :param table: the task lock table
    :param user: the role of the connection, if known
    :param where: the database, shown in messages
    """
    if isinstance(error, psycopg.errors.UndefinedTable):
        return missing_table_error(table, _named(table, one_line(error)))
    if isinstance(error, psycopg.errors.InvalidSchemaName):
        return missing_table_error(table)
    if isinstance(error, psycopg.errors.UndefinedColumn):
        return old_table_error(table)
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        said = one_line(error)
        named = _named(table, said)
        rejected = table if named is None else named
        return missing_grant_error(rejected, user, said, _rights_needed(table, rejected))
    return TaskLockError(f"the task lock database ({where}) rejects this: {one_line(error)}")


def explain_missing_rights(
    cursor: Any, error: psycopg.errors.InsufficientPrivilege, table: Table, user: str | None
) -> TaskLockSchemaError:
    """Return the error for a statement that a role may not run, with the rights that it lacks.

    :param cursor: of the same connection, outside a transaction
    :param table: the task lock table
    :param user: the role of the connection, for the message
    """
    said = one_line(error)
    named = _named(table, said)
    rejected = table if named is None else named
    # An error without a table's name is about the schema. Then all tables are checked, except the
    # jobs' table, because only a job store needs it.
    asked = [named] if named is not None else tables_of(table)[:-1]
    try:
        found, *others = look_up(cursor, asked)
    except psycopg.Error:  # the role may not even read the catalogue
        return missing_grant_error(rejected, user, said, _rights_needed(table, rejected))
    problems = problems_of([found, *others], table, user)
    if problems:
        return _as_one(problems)
    role, rights = found.row["role"], found.not_granted
    if rights:  # the role lacks only DELETE, which is no problem on most tables
        return missing_grant_error(rejected, role, rights=rights)
    return TaskLockSchemaError(
        f"role {quoted(role)} may not use the table {rejected.fullname} (PostgreSQL: {said}); let "
        f"its owner look at its policies and triggers, with: \\d {quoted_name(rejected)}"
    )


def read_elsewhere(cursor: Any, table: Table) -> list[Elsewhere]:
    """Return the tables of the same name and key in other schemas."""
    cursor.row_factory = class_row(Elsewhere)
    key = [column.name for column in table.primary_key]
    found: list[Elsewhere] = cursor.execute(_ELSEWHERE, [table.name, table.schema, key]).fetchall()
    # A table that the connection finds by now was created or renamed after it was missing.
    return [each for each in found if table.schema or not (each.in_path and each.may_use)]


def in_another_schema_error(
    task_lock: Table, tables: Sequence[Table], there: Sequence[Elsewhere], role: str
) -> TaskLockSchemaError:
    """Return the error for tables that are in another schema than the one that was given.

    :param task_lock: the task lock table
    :param tables: the missing tables
    :param there: where the first of the tables is, as :func:`read_elsewhere` has found it
    """
    where = f"schema {tables[0].schema}" if tables[0].schema else "the search_path"
    # The owner is named, because somebody may have created a table of this name as a trap.
    schemas = ", ".join(f"{quoted(one.schema)} of role {quoted(one.owner)}" for one in there)
    first = there[0]
    schema = quoted(first.schema)
    [option] = table_options(first.schema)
    remedies = []
    if not first.may_use:
        remedies.append(f"let its owner run: GRANT USAGE ON SCHEMA {schema} TO {quoted(role)}")
    if tables[0].schema or not first.in_path:
        remedies.append(
            f"if it is yours: pass {option} to the command and schema={first.schema!r} to "
            f"the executor, or put it into the search_path: ALTER ROLE {quoted(role)} SET "
            f"search_path = {schema}, public; if it is not, create your own with: "
            f"{with_table_options(UPGRADE_COMMAND, task_lock)}"
        )
    names = ", ".join(each.name for each in tables)
    is_not = f"the table {names} is not" if len(tables) == 1 else f"the tables {names} are not"
    one = "one" if len(tables) == 1 else "such a table"
    return TaskLockSchemaError(
        f"{is_not} in {where}, but there is {one} in schema {schemas}; {'; '.join(remedies)}"
    )


def explain_missing_table(
    cursor: Any,
    error: psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName,
    table: Table,
) -> TaskLockSchemaError:
    """Return the error for a statement on a missing table, with the schema that has the table.

    :param cursor: of the same connection, outside a transaction
    :param table: the task lock table
    """
    missing = _named(table, one_line(error))
    try:
        [found] = look_up(cursor, [table])
        if not found.exists and (there := read_elsewhere(cursor, table)):
            return in_another_schema_error(table, [table], there, found.row["role"])
    except psycopg.Error:  # the role may not even read the catalogue
        pass
    return missing_table_error(table, missing)


def _named(table: Table, said: str) -> Table | None:
    """Return which of our tables PostgreSQL's message names; ``None`` if it names none."""
    # The task lock table's name is looked for last, because the other tables' names begin with it.
    return next((each for each in reversed(tables_of(table)) if each.name in said), None)


def missing_table_error(table: Table, beside: Table | None = None) -> TaskLockSchemaError:
    """Return the error for a missing table.

    :param table: the task lock table
    :param beside: the missing table; by default the task lock table
    """
    return missing_tables_error(table, [table if beside is None else beside])


def missing_tables_error(table: Table, missing: Sequence[Table]) -> TaskLockSchemaError:
    """Return the error for missing tables.

    :param table: the task lock table
    """
    names = ", ".join(each.fullname for each in missing)
    they, them = ("the table {} does", "it") if len(missing) == 1 else ("the tables {} do", "them")
    return TaskLockSchemaError(
        f"{they.format(names)} not exist in this database; "
        f"create {them} with: {with_table_options(UPGRADE_COMMAND, table)}"
    )


def old_table_error(
    table: Table, missing: str = "", beside: Table | None = None
) -> TaskLockSchemaError:
    """Return the error for a table that lacks a column.

    As a rule an older version made it. If the noted revision has the column, ``upgrade`` says so.

    :param table: the task lock table
    :param missing: a column that the old table lacks
    :param beside: the old table; by default the task lock table
    """
    old = table if beside is None else beside
    problem = (
        f"the table {old.fullname} has no column {missing}"
        if missing
        else f"the tables of {table.fullname} lack a column that this version of the library needs"
    )
    return TaskLockSchemaError(
        f"{problem}; bring them up to date with: {with_table_options(UPGRADE_COMMAND, table)}"
    )


def missing_grant_error(
    table: Table, user: str | None, said: str = "", rights: Sequence[str] = ()
) -> TaskLockSchemaError:
    """Return the error for a role that may not use a table.

    :param table: the task lock table, or a table beside it
    :param said: PostgreSQL's message, where the missing rights are not known
    :param rights: the missing rights; by default all that a replica needs
    """
    lacking = {table: rights or _NEEDED_RIGHTS}
    return missing_grants_error(lacking, user, said, on_schema=table.schema is not None)


def missing_grants_error(
    lacking: Mapping[Table, Sequence[str]],
    user: str | None,
    said: str = "",
    *,
    on_schema: bool = False,
) -> TaskLockSchemaError:
    """Return the error for a role that lacks rights on some of our tables.

    :param lacking: the missing rights by table
    :param said: PostgreSQL's message, where the missing rights are not known
    :param on_schema: whether the role also lacks USAGE on the schema
    """
    role = quoted(user) if user else "<the application's role>"
    tables = list(lacking)
    grants = [
        f"GRANT {', '.join(rights)} ON {quoted_name(table)} TO {role}"
        for table, rights in lacking.items()
        if rights
    ]
    if on_schema and tables[0].schema:
        grants.insert(0, f"GRANT USAGE ON SCHEMA {quoted(tables[0].schema)} TO {role}")
    names = ", ".join(table.fullname for table in tables)
    which, whose = (f"table {names}", "its") if len(tables) == 1 else (f"tables {names}", "their")
    why = f" (PostgreSQL: {said})" if said else ""
    return TaskLockSchemaError(
        f"role {role} may not use the {which}{why}; let {whose} owner run: {'; '.join(grants)}"
    )


def missing_policy_error(
    table: Table, user: str | None, commands: Sequence[str]
) -> TaskLockSchemaError:
    """Return the error for a role from which row-level security hides the rows.

    :param commands: the commands for which the role has no policy
    """
    role = quoted(user) if user else "<the application's role>"
    # The policy's name contains the role, because each role needs its own policy.
    name = f"task_lock_of_{user or 'the_application'}".encode()[:LONGEST_IDENTIFIER]
    policy = quoted(name.decode(errors="ignore"))
    return TaskLockSchemaError(
        f"row-level security is on for the table {table.fullname}, and role {role} has no policy "
        f"for {', '.join(commands)}; let its owner run: CREATE POLICY {policy} ON "
        f"{quoted_name(table)} TO {role} USING (true) WITH CHECK (true)"
    )


def with_table_options(what: str, table: Table) -> str:
    """Return a command with the options that name a task lock table."""
    return " ".join([what, *table_options(table.schema, table.name)])
