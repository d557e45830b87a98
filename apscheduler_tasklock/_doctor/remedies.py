"""Why a connection to the database fails, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import psycopg
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.outage import as_unavailable
from apscheduler_tasklock.errors import TaskLockDatabaseError
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

# What to do if the server is a standby, and what to do if it is not and takes no writes.
STANDBY = "name the primary; or all servers, in one URL"
FROZEN = "ALTER DATABASE ... RESET default_transaction_read_only, or the same for the role"
READ_ONLY = f"if this is a standby, {STANDBY}; if not, let the database's owner run: {FROZEN}"

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
        "?host=one:5432&host=two:5432); if not, let default_transaction_read_only be off: ALTER "
        "DATABASE {database} RESET default_transaction_read_only, or the same for the role",
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
