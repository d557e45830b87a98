"""Statements, round trips, WAL and connections of a claim, a refusal and a release."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from apscheduler_tasklock.demo.server import EmbeddedServer
from benchmarks.speed.contenders import (
    Bare,
    Contender,
    Library,
    ShedLock,
    ShedLockInsert,
)
from benchmarks.speed.counters import SETTLE, Count, RoundTrips, in_log, in_server
from benchmarks.speed.effort import Effort, progress
from benchmarks.speed.peers import installed_peers
from benchmarks.speed.report import Goal, Section, table
from benchmarks.speed.rounds import OPERATIONS
from tests.support.proxy import proxy_to

LOGGED = {"log_statement": "all", "log_connections": "on", "max_connections": "100"}
# The name of further refusals of one claim. The first refusal may prune the page, as any read may,
# which writes WAL.
IN_A_ROW = "refused again"

CYCLES = 5
HELD = 8

CONTENDERS: list[type[Contender]] = [Bare, Library, ShedLock, ShedLockInsert]


def run(effort: Effort) -> Section:
    """Count for each contender."""
    found, missing = installed_peers()
    section = Section(
        "Statements, round trips, WAL and connections",
        f"Statements and new connections are counted in the server's log, round trips by a proxy "
        f"(a new connection is some, too), over {CYCLES} claims, refusals and releases. WAL and "
        f"transaction ids are the server's own counters, over {effort.of(300, 100)} of each. A "
        "refusal right after a claim may prune the page of dead rows, as any read of it may, and "
        "PostgreSQL writes that down; *refused again* are more of them in a row. "
        f"Connections are those beyond none at all, with {HELD} locks held by one replica, and "
        "after their release.",
    )
    if missing:
        section.tables.append(f"**Not installed, and not counted: {', '.join(missing)}.**")
    rows = []
    for kind in [*CONTENDERS, *found]:
        progress(f"counting {kind.name}")
        with EmbeddedServer(LOGGED, loopback=True) as server:
            counts = count(kind, server, effort.of(300, 100))
            held, rest = _connections(kind, server.url)
        rows += [_row(kind, what, counts[what], held, rest) for what in (*OPERATIONS, IN_A_ROW)]
        if kind is Library:
            section.goals = _goals(counts, held - rest)
    section.tables.append(table(HEADER, rows))
    return section


HEADER = [
    "",
    "operation",
    "statements",
    "round trips",
    "new connections",
    "WAL bytes",
    "transaction ids",
    f"connections, {HELD} held",
    "at rest",
]


def _row(kind: type[Contender], what: str, found: Count, held: int, rest: int) -> list[str]:
    first = what == OPERATIONS[0]
    numbers = [found.statements, found.round_trips, found.connections]
    return [
        kind.name if first else "",
        what,
        *("" if what == IN_A_ROW else f"{number:g}" for number in numbers),
        f"{found.wal:,.1f}",
        f"{found.transactions:.2g}",
        str(held) if first else "",
        str(rest) if first else "",
    ]


def _goals(counts: dict[str, Count], per_held: int) -> list[Goal]:
    goals = []
    for what in OPERATIONS:
        found = counts[what]
        met = found.statements == found.round_trips == 1
        measured = f"{found.statements:g} and {found.round_trips:g}"
        goals.append(Goal(f"{what}", "1 statement, 1 round trip", measured, met))
    refused = counts[IN_A_ROW]
    goals.append(
        Goal(
            IN_A_ROW,
            "0 bytes of WAL, 0 transaction ids",
            f"{refused.wal:.3g} bytes, {refused.transactions:g}",
            refused.wal == refused.transactions == 0,
        )
    )
    measured = f"{per_held} for {HELD} locks"
    goals.append(Goal("connections held per running job", "0", measured, per_held <= 0))
    return goals


def count(
    kind: type[Contender], server: EmbeddedServer, often: int, warm_up: int = 20
) -> dict[str, Count]:
    """Count what each operation of a contender takes, on average.

    :param server: with the settings ``LOGGED``
    :param often: how many of each have their WAL and transaction ids counted
    :param warm_up: how many claims, refusals and releases go before
    """
    counts = {what: Count() for what in OPERATIONS}
    with proxy_to(server.url) as proxy, psycopg.connect(server.url, autocommit=True) as own:
        trips = RoundTrips(proxy)
        kind.prepare(proxy.url)
        contender = kind(proxy.url)
        try:
            _cycles(contender, warm_up, lambda _what: lambda: None)
            _cycles(contender, CYCLES, lambda what: in_log(server, trips, counts[what]))
            _cycles(contender, often, lambda what: in_server(own, counts[what]))
            counts[IN_A_ROW] = _refusals_in_a_row(contender, own, often)
        finally:
            contender.close()
    for what in OPERATIONS:
        found = counts[what]
        found.statements /= CYCLES
        found.connections /= CYCLES
        found.round_trips /= CYCLES
        found.wal /= often
        found.transactions /= often
    return counts


def _cycles(contender: Contender, often: int, begin: Callable[[str], Callable[[], None]]) -> None:
    """Claim, be refused and release; ``begin`` is called before each, and its result after it."""

    def observed(what: str, operation: Callable[..., Any], *arguments: Any) -> Any:
        end = begin(what)
        result = operation(*arguments)
        end()
        return result

    for _ in range(often):
        held = observed("granted", contender.claim, "counted")
        assert held is not None
        assert observed("refused", contender.claim_second, "counted") is None
        if contender.releases:
            observed("release", contender.release, held)
        else:
            contender.release(held)


def _refusals_in_a_row(contender: Contender, own: psycopg.Connection[Any], often: int) -> Count:
    """Return the least of some batches, because the server now and then writes WAL of its own."""
    held = contender.claim("counted")
    batches = [Count() for _ in range(3)]
    for batch in batches:
        contender.claim_second("counted")
        end = in_server(own, batch)
        for _ in range(often):
            contender.claim_second("counted")
        end()
    contender.release(held)
    least = min(batches, key=lambda batch: batch.wal)
    return Count(wal=least.wal / often, transactions=least.transactions / often)


def _connections(kind: type[Contender], url: str) -> tuple[int, int]:
    """Return the connections that a replica has while it holds locks, and after it."""
    with psycopg.connect(url, autocommit=True) as own:

        def connections() -> int:
            time.sleep(SETTLE * 3)
            row = own.execute(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            ).fetchone()
            assert row is not None
            return int(row[0])

        before = connections()
        kind.prepare(url)
        contender = kind(url)
        try:
            held: Sequence[Any] = [contender.claim(f"held {number}") for number in range(HELD)]
            while_held = connections()
            for one in held:
                contender.release(one)
            return while_held - before, connections() - before
        finally:
            contender.close()
