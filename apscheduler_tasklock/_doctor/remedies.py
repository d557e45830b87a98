"""Why a connection to the database fails, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import psycopg
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.outage import as_unavailable
from apscheduler_tasklock.errors import TaskLockDatabaseError
from apscheduler_tasklock.schema.inspection import Blocker, Setting
from apscheduler_tasklock.schema.table import literal, quoted

_WHO_IS_CONNECTED = (
    "SELECT usename, application_name, state, count(*) FROM pg_stat_activity GROUP BY 1, 2, 3 "
    "ORDER BY 4 DESC"
)

FULL_SERVER = (
    "close connections that are not needed, or raise max_connections and restart the server, or "
    "put pgbouncer before it (pool_mode = transaction); a superuser, for whom some connections are "
    f"reserved, can list all connections: {_WHO_IS_CONNECTED}"
)
FULL_ROLE = (
    "close connections that are not needed (SELECT pid, application_name, state, state_change FROM "
    "pg_stat_activity WHERE usename = {role_text}), or let a superuser run: ALTER ROLE {role} "
    "CONNECTION LIMIT -1"
)
FULL_DATABASE = (
    "close connections that are not needed (SELECT pid, usename, application_name, state FROM "
    "pg_stat_activity WHERE datname = {database_text}), or let the database's owner run: ALTER "
    "DATABASE {database} CONNECTION LIMIT -1"
)

STATEMENT_POOLING = (
    "set pool_mode = transaction in pgbouncer.ini (also of this database or user, if they have "
    "their own), then RELOAD pgbouncer"
)

# What to do if the server is a standby, and if it takes no writes for any other reason.
STANDBY = "name the primary; or all servers, in one URL"
READ_ONLY = (
    f"if this is a standby, {STANDBY}; if not, `apscheduler-tasklock doctor` says where "
    "default_transaction_read_only was set, and how to take it back"
)
# How the servers of a URL are told apart from a single one in libpq's message.
SEVERAL_SERVERS = "Multiple connection attempts failed"
NONE_WRITABLE = (
    "none of the URL's servers takes writes; `apscheduler-tasklock doctor` says of each why, and "
    "what to do"
)

# What to do while no standby confirms commits.
UNCONFIRMED = (
    "start a standby that synchronous_standby_names lists, or connect it again; if none can come "
    "back, let a superuser run: ALTER SYSTEM SET synchronous_standby_names = '', then SELECT "
    "pg_reload_conf() (with Patroni, change its synchronous_mode in place of that). End no session "
    "that waits: its commit would count, and a failover would lose it"
)

# The configuration file that ALTER SYSTEM writes.
_OF_ALTER_SYSTEM = "postgresql.auto.conf"
_READ_ONLY_SETTING = "default_transaction_read_only"


def set_by(setting: Setting, role: str) -> str:
    """Return where a setting comes from, in words.

    :param role: the role of the connection
    """
    if setting.source == "configuration file":
        if setting.file is None:
            return (
                "set by ALTER SYSTEM or in postgresql.conf, of which role "
                f"{quoted(role)} may not see which"
            )
        if setting.file.endswith(_OF_ALTER_SYSTEM):
            return "set by ALTER SYSTEM"
        return f"set in {setting.file}, line {setting.line}"
    words = {
        "database": "set for the database",
        "user": f"set for role {quoted(role)}",
        "database user": f"set for role {quoted(role)} in the database",
        "global": "set for all roles",
        "client": "set by the connection's options",
        "command line": "set on the server's command line",
        "session": "set by the application in its session",
    }
    return words.get(setting.source, f"its source is {setting.source!r}")


def reset_of(setting: Setting, role: str, database: str) -> str:
    """Return how to take a setting back, by where it comes from.

    :param role: the role of the connection
    :param database: the database of the connection
    """
    name = setting.name
    system = f"let a superuser run: ALTER SYSTEM RESET {name}, then SELECT pg_reload_conf()"
    if setting.source == "configuration file":
        if setting.file is None:
            return (
                f"{system}; if that changes nothing, take {name} out of postgresql.conf, and let a "
                "superuser run SELECT pg_reload_conf() again"
            )
        if setting.file.endswith(_OF_ALTER_SYSTEM):
            return system
        return (
            f"take {name} out of {setting.file}, line {setting.line}, and let a superuser run: "
            "SELECT pg_reload_conf()"
        )
    owner, subject = {
        "database": ("the database's owner", f"DATABASE {quoted(database)}"),
        "user": ("that role", f"ROLE {quoted(role)}"),
        "database user": (
            "the database's owner",
            f"ROLE {quoted(role)} IN DATABASE {quoted(database)}",
        ),
        "global": ("a superuser", "ROLE ALL"),
    }.get(setting.source, ("", ""))
    if subject:
        statement = f"ALTER {subject} RESET {name}"
        if name == _READ_ONLY_SETTING:  # because a session that begins read-only may not run it
            statement = f"BEGIN READ WRITE; {statement}; COMMIT"
        return f"let {owner} run: {statement}"
    return {
        "client": f"take {name} out of the URL's options, PGOPTIONS, or the pooler's configuration",
        "command line": f"take {name} out of the server's command line, and restart the server",
        "session": f"let the application not set {name}, as in a listener of the engine",
    }.get(setting.source, f"see the row of {name} in pg_settings")


def see_more(role: str) -> str:
    """Return how a role can be allowed to see what other roles' sessions do."""
    return (
        "to see more, run doctor as a role with pg_monitor, or let a superuser run: GRANT "
        f"pg_monitor TO {quoted(role)}"
    )


def end_of(blocker: Blocker, role: str) -> str:
    """Return what to do about a session, or a prepared transaction, that blocks others.

    A session that waits for a standby is not to be ended, and none of this library's, because each
    of its statements is a transaction of its own.

    :param role: the role of the doctor's connection
    """
    if blocker.gid is not None:
        ends = f"ROLLBACK PREPARED {literal(blocker.gid)}, or COMMIT PREPARED"
    elif blocker.is_unconfirmed:
        return UNCONFIRMED
    elif blocker.is_hidden:
        return (
            "this role may not see whether the session waits for a synchronous standby; if it "
            f"does, do not end it, and if not, end its transaction there; {see_more(role)}"
        )
    elif blocker.is_ours:
        return (
            "this is a session of the task lock, which ends by itself unless something keeps it "
            "waiting: run doctor again, and if the session is still there, see its replica's log"
        )
    else:
        ends = f"SELECT pg_terminate_backend({blocker.pid})"
    return f"end its transaction there, or as that role or a superuser: {ends}"


_HBA = (
    "let the server's pg_hba.conf have a line for this role, database and address, before any that "
    "rejects them, such as: host {database} {role} {network} scram-sha-256; then SELECT "
    "pg_reload_conf()"
)

# Patterns of messages of the server, pgbouncer or libpq, and the remedies. The groups `user`,
# `name` and `host` of a pattern are the role, the database and the client's address in the message.
_REMEDIES: tuple[tuple[str, str], ...] = (
    (r'too many connections for role "(?P<user>.+?)"', FULL_ROLE),
    (r'too many connections for database "(?P<name>.+?)"', FULL_DATABASE),
    (r"too many clients already|remaining connection slots", FULL_SERVER),
    (
        r"no more connections allowed",
        "raise the limit that pgbouncer names (such as max_client_conn) in pgbouncer.ini, or close "
        "clients: SHOW CLIENTS in pgbouncer's console lists them",
    ),
    (
        r"query_wait_timeout",
        "pgbouncer had no connection to the server free: raise default_pool_size in pgbouncer.ini, "
        "or end the sessions that keep connections: see SHOW SERVERS in pgbouncer's console, and "
        "pg_stat_activity with the state 'idle in transaction'",
    ),
    (
        r"server login has been failing|client_login_timeout|server down",
        "pgbouncer answers, but cannot log in to PostgreSQL: check host, port, user and password "
        "in its configuration, and see its log",
    ),
    (
        r"unsupported startup parameter",
        "name that parameter in ignore_startup_parameters in pgbouncer.ini, or leave it out of the "
        "URL",
    ),
    (
        r"server does not support SSL",
        "turn SSL on in the server (ssl = on, with ssl_cert_file and ssl_key_file), or, if the "
        "network can be trusted, put sslmode=prefer into the URL in place of what asks for it (the "
        "URL's sslmode, or PGSSLMODE)",
    ),
    (
        r"root certificate file",
        "name the file of the certificate authority: sslrootcert=/path/to/root.crt in the URL, or "
        "sslrootcert=system",
    ),
    (
        r"certificate verify failed|does not match host name",
        "name the authority of the server's certificate (sslrootcert=...) and the host as it "
        "stands in the certificate",
    ),
    (
        r"valid client certificate",
        "name the client's certificate and key: sslcert=...&sslkey=... in the URL",
    ),
    (
        r'no pg_hba\.conf entry for host "(?P<host>.+?)".*no encryption',
        _HBA + "; or, if its line is a hostssl one, put sslmode=require into the URL",
    ),
    (
        r'(?:no pg_hba\.conf entry|pg_hba\.conf rejects connection) for host "(?P<host>.+?)"'
        r"(?!.*entry.*no encryption)",
        _HBA,
    ),
    (
        r"(?:password|SASL) authentication failed|no such user",
        "check the role and its password (in a URL, special characters are written as %40 for @), "
        "and whether the password has expired or there is no such role, of which PostgreSQL says "
        "the same: SELECT rolvaliduntil FROM pg_roles WHERE rolname = {role_text}; if it has, let "
        "a superuser run: ALTER ROLE {role} VALID UNTIL 'infinity'",
    ),
    (
        r"no password supplied|no password was provided",
        "put the password into the URL (postgresql://user:password@host/name), into PGPASSWORD or "
        "into a ~/.pgpass",
    ),
    (
        r'role "(?P<user>.+?)" does not exist',
        "check the role in the URL, or let a superuser create it: CREATE ROLE {role} LOGIN "
        "PASSWORD '...'",
    ),
    (
        r'role "(?P<user>.+?)" is not permitted to log in',
        "let a superuser run: ALTER ROLE {role} LOGIN",
    ),
    (
        r'database "(?P<name>.+?)" does not exist|no such database',
        "check the database's name in the URL, or create it: CREATE DATABASE {database}",
    ),
    (
        r'database "(?P<name>.+?)" is not currently accepting connections',
        "let a superuser run: ALTER DATABASE {database} ALLOW_CONNECTIONS true",
    ),
    (
        r'permission denied for database "(?P<name>.+?)"',
        "let its owner run: GRANT CONNECT ON DATABASE {database} TO {role}",
    ),
    (
        r"system is starting up|not yet accepting connections|not accepting connections|"
        r"in recovery mode",
        "wait until the server has started or recovered, as its log shows; a standby answers only "
        "with hot_standby = on",
    ),
    (
        r"system is shutting down|terminating connection due to administrator command",
        "wait until the server is started again, or start it",
    ),
    (
        r"session is read-only|server is in hot standby mode",
        "if this is a standby, name the primary, or all servers in one URL (postgresql://user@/name"
        "?host=one:5432&host=two:5432); if not, leave target_session_attrs out of the URL, and run "
        "doctor again, which then says where default_transaction_read_only was set",
    ),
    (
        r"server is not in hot standby mode|session is not read-only",
        "leave target_session_attrs out of the URL: the task lock needs a server that takes writes",
    ),
    (
        r"failed to resolve host|could not translate host name|Name or service not known|"
        r"nodename nor servname",
        "check the host's name in the URL and the DNS of this machine; several hosts are written "
        "?host=one:5432&host=two:5432",
    ),
    (
        r"Connection refused",
        "check the host and the port, that the server runs, and that its listen_addresses has this "
        "address; in a container, localhost is the container itself",
    ),
    (
        r"on socket .* failed",
        "no server listens on that socket: start it, or name its host in the URL; "
        "unix_socket_directories tells the folder",
    ),
    (
        r"timeout expired|no answer from the server|Network is unreachable|No route to host",
        "check the host and the port, that the server runs, and that no firewall blocks the way",
    ),
    (
        r"invalid response|expected authentication request",
        "check the port: the program that answers there is not PostgreSQL",
    ),
    (
        r"server closed the connection unexpectedly",
        "see the server's log, and check that no proxy or firewall cuts connections",
    ),
)

_REJECTED = "check the role, the password and the database's name, and pg_hba.conf"
_UNAVAILABLE = (
    "check the host and the port, that the server runs, and that no firewall blocks the way; the "
    "server's log may say more"
)


def remedy_of(error: psycopg.Error | TaskLockDatabaseError, url: URL) -> str:
    """Return what to do about a connection that cannot be opened.

    :param error: libpq's error, which has the messages of all hosts; or that no connection came
    :param url: the URL of the connection
    """
    found = list(dict.fromkeys(_remedies(str(error), url)))
    if found:
        return "; ".join(found)
    return _REJECTED if as_unavailable(error) is None else _UNAVAILABLE


def _remedies(said: str, url: URL) -> Iterator[str]:
    for sign, remedy in _REMEDIES:
        match = re.search(sign, said)
        if match is not None:
            yield filled(remedy, url, match.groupdict())


def filled(remedy: str, url: URL, told: Mapping[str, str | None] | None = None) -> str:
    """Return a remedy with the role, the database and the network filled in.

    :param told: ``user``, ``name`` and ``host``, as far as the error's message has them
    """
    told = told or {}
    user = told.get("user") or url.username or "<the role>"
    name = told.get("name") or url.database or user
    host = told.get("host") or "<the address>"
    return remedy.format(
        role=quoted(user),
        role_text=literal(user),
        database=quoted(name),
        database_text=literal(name),
        network=f"{host}/{128 if ':' in host else 32}",
    )
