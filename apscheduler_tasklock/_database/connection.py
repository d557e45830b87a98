"""psycopg connections, and the limits of their waits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from math import inf
from typing import Any

import psycopg
from psycopg.types.datetime import TimestamptzBinaryLoader
from psycopg.types.json import set_json_loads
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._database.wire import Wire

# The shortest limits of the wait for one answer, in seconds. A claim's limit is SHORTEST_ATTEMPT or
# more, even if its timeout is shorter. Any limit is SHORTEST_ANSWER or more, even if a renewal is
# more urgent.
SHORTEST_ATTEMPT, SHORTEST_ANSWER = 1.0, 0.3
# The shortest limit of a claim's wait for its turn on the connection, in seconds.
SHORTEST_TURN = 9.0


def attempt_limit(timeout: float, longest: float = Timings.longest_answer) -> float:
    """Return how long a claim waits for one answer, in seconds.

    A long timeout does not make this wait long, because renewals wait for the same connection.

    :param timeout: the claim's timeout, in seconds
    :param longest: limits the returned seconds
    """
    return min(longest, max(SHORTEST_ATTEMPT, timeout / 3))


def turn_limit(timeout: float) -> float:
    """Return how long a claim may wait for its turn on the connection, in seconds.

    The returned time is longer than the claim's timeout, because that timeout is for outages. If
    the database only answers slowly, the claim waits for other requests, which is no outage.

    :param timeout: the claim's timeout, in seconds
    """
    return max(SHORTEST_TURN, 3 * timeout)


def connector(url: URL, attempt: float, application_name: str) -> Callable[[int, float], Wire]:
    """Return a function that opens a connection, and returns its wire.

    Its arguments are the place of the host with which libpq begins, among the URL's hosts, and the
    seconds that are left to connect.

    :param attempt: limits each wait of the connection, in seconds
    """
    parameters = {
        "application_name": application_name,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        # At least 1 s, because TCP sends a lost packet again only after a while.
        "tcp_user_timeout": int(max(1.0, attempt) * 1000),
        **connect_parameters(url),
    }

    def connect(first: int = 0, left: float = inf) -> Wire:
        # libpq takes whole seconds, and at least 2.
        timeout = max(2, int(min(attempt, left)))
        chosen = {"connect_timeout": timeout, **_beginning_with(first, parameters)}
        connection = psycopg.connect(**chosen)
        try:
            return set_up(connection, max(SHORTEST_ATTEMPT, min(attempt, left)))
        except BaseException:
            connection.close()
            raise

    return connect


def set_up(connection: psycopg.Connection[Any], attempt: float) -> Wire:
    """Set up a connection of the library, and return its wire.

    :param attempt: limits the wait for each answer, in seconds
    """
    # Register the loader here, because the application may have registered another one in psycopg's
    # global map.
    connection.adapters.register_loader("timestamptz", TimestamptzBinaryLoader)
    set_json_loads(json.loads, connection)  # because an application may have set its own for all
    wire = Wire(connection, attempt)
    [pid] = wire.cursor().execute("SELECT pg_backend_pid()").fetchone()
    # A pooler answers the login itself, with a process id that is not the server's.
    wire.is_direct = pid == connection.info.backend_pid
    return wire


def connect_parameters(url: URL) -> dict[str, Any]:
    """Return a URL's parameters for psycopg, and defaults that the library's connections need."""
    parameters = dict(url.get_dialect()().create_connect_args(url)[1])
    # Name the encoding, because a database in SQL_ASCII does not say which one its texts have.
    parameters.setdefault("client_encoding", "UTF8")
    hosts = parameters.get("host") or parameters.get("hostaddr") or os.environ.get("PGHOST", "")
    if "," in hosts and "PGTARGETSESSIONATTRS" not in os.environ:
        # Skip a standby that the URL names before the primary.
        parameters.setdefault("target_session_attrs", "read-write")
    return parameters


def _beginning_with(first: int, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters with the hosts in another order, from the given one on."""
    turned = dict(parameters)
    for name in ("host", "hostaddr", "port"):
        values = str(parameters.get(name, "")).split(",")
        if len(values) > 1:
            begin = first % len(values)
            turned[name] = ",".join(values[begin:] + values[:begin])
    return turned


def host_count(url: URL) -> int:
    """Return how many hosts libpq tries, one after the other."""
    parameters = url.get_dialect()().create_connect_args(url)[1]
    hosts = parameters.get("host") or parameters.get("hostaddr") or os.environ.get("PGHOST", "")
    return str(hosts).count(",") + 1
