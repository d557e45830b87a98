"""Fixtures of all tests: a server for the run, and an empty database with the table for each."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings

from apscheduler_tasklock import _application, upgrade
from tests.support.claims import AHEAD
from tests.support.databases import KeptDatabase
from tests.support.pgbouncer import PgBouncer, TooOldError
from tests.support.polling import eventually
from tests.support.postgres import Server, given_url, start_server
from tests.support.programs import UnavailableError, skip_or_fail

pytest_plugins = ["tests.gate.plugin"]

# It goes beside the tests of other projects; `make test-foreign` runs it.
collect_ignore = ["foreign"]

# What `--pgbouncer` sets `max_prepared_statements` to.
PREPARED_STATEMENTS = {"on": 200, "off": 0}

# Failures are repeated by the seed, not by a database of examples; and no machine is too slow.
settings.register_profile(
    "quick",
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=2000)
settings.load_profile("quick")  # `--hypothesis-profile thorough` takes the other

# Each test waits for the end of this thread, too.
_application.LINGER = 0.05


class _FlushedCaplog(pytest.LogCaptureFixture):
    """Has the records of the replica's thread, too, which another one handles."""

    @property
    def handler(self) -> Any:
        _application.flush_application(time.monotonic() + 60)
        return super().handler


_SERVER = pytest.StashKey[Server]()
_POOLER = pytest.StashKey["PgBouncer | UnavailableError"]()
_SEED = pytest.StashKey[int]()


def _seed(text: str) -> int:
    """Return a seed: the one given, or one that is drawn for ``random``.

    By default it is the same each time: a change is judged by the examples of the one before it.
    """
    return random.randrange(2**32) if text == "random" else int(text)  # noqa: S311  # repeatable, not secret


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--postgres-url", help="run the tests on this server, as its superuser")
    parser.addoption("--postgres-version", help="run the tests on this major version, from npm")
    parser.addoption(
        "--pgbouncer",
        choices=PREPARED_STATEMENTS,
        help="run the tests through pgbouncer, with prepared statements on or off",
    )
    parser.addoption(
        "--seed",
        type=_seed,
        default=1,
        help="seed of the random tests, or `random` for one that is drawn; printed by every run",
    )
    parser.addoption(
        "--pairs",
        type=float,
        default=0.1,
        help="the share of all pairs of simulated faults that `-m simulate` goes through",
    )


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its options
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "direct(reason): skipped with --pgbouncer; needs a direct connection"
    )
    # Each of several processes has a server of its own, so that what tests count in it is theirs.
    seed = getattr(config, "workerinput", {}).get("seed", config.getoption("--seed"))
    config.stash[_SEED] = seed
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(config.stash[_SEED])


def pytest_configure_node(node: Any) -> None:
    """Give a further process the seed that the header tells."""
    node.workerinput["seed"] = node.config.stash[_SEED]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes ``-n auto`` starts.

    The tests wait more than they compute, so they are more than the machine has cores. One alone
    uses a server that was given: tests count its connections and its WAL.
    """
    return 0 if given_url(config.getoption("--postgres-url")) else 4


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    if not config.getoption("--collect-only"):
        config.stash[_SERVER] = start_server(
            config.getoption("--postgres-url"), config.getoption("--postgres-version")
        )
        if config.getoption("--pgbouncer"):
            config.stash[_POOLER] = _start_pooler(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which would look through all that is collected.

    Each process collects everything, and that takes twice as long otherwise.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def _start_pooler(config: pytest.Config) -> PgBouncer | UnavailableError:
    """Return pgbouncer, or why the tests that would go through it cannot run."""
    server = config.stash[_SERVER]
    prepared = PREPARED_STATEMENTS[config.getoption("--pgbouncer")]
    try:
        return server.close.enter_context(PgBouncer(server.url, prepared))
    except UnavailableError as unavailable:
        return unavailable
    except TooOldError as too_old:
        return UnavailableError(str(too_old))


def pytest_report_header(config: pytest.Config) -> list[str]:
    server = config.stash.get(_SERVER, None)
    which = [f"server: {server.description}"] if server else []
    pooler = config.stash.get(_POOLER, None)
    if pooler is not None:
        which.append(f"through: {getattr(pooler, 'description', pooler)}")
    return [*which, f"seed: --seed={config.stash[_SEED]}"]


def pytest_unconfigure(config: pytest.Config) -> None:
    if _SERVER in config.stash:
        config.stash[_SERVER].close.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("direct")
    if marker is not None and item.config.getoption("--pgbouncer"):
        pytest.skip(f"needs a direct connection, because {marker.args[0]}")


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log records of a test, those of the replica's thread that came so far among them."""
    caplog.__class__ = _FlushedCaplog
    yield caplog
    _application.flush_application(time.monotonic() + 60)  # else the next test has them


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Randomness that the seed in the header repeats."""
    seed = f"{request.config.stash[_SEED]} {request.node.nodeid}"
    return random.Random(seed)  # noqa: S311  # repeatable, not secret


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> Server:
    return pytestconfig.stash[_SERVER]


@pytest.fixture(scope="session")
def template(server: Server) -> Iterator[str]:
    """Name of a database with the table, to be copied."""
    with server.database() as url:
        upgrade(url)
        yield str(psycopg.conninfo.conninfo_to_dict(url)["dbname"])


@pytest.fixture(scope="session")
def pooler(pytestconfig: pytest.Config) -> PgBouncer | None:
    """What the tests' databases are behind, with ``--pgbouncer``."""
    pooler = pytestconfig.stash.get(_POOLER, None)
    if isinstance(pooler, UnavailableError):
        skip_or_fail(pooler)
    return pooler


@pytest.fixture(scope="session")
def kept_database(server: Server, template: str) -> Iterator[KeptDatabase]:
    """The database that the tests of this process have one after the other."""
    kept = KeptDatabase(server, template)
    yield kept
    kept.drop()


@pytest.fixture
def direct_url(
    kept_database: KeptDatabase,
    pytestconfig: pytest.Config,
    _nothing_left_behind: Callable[[float], list[threading.Thread]],
) -> Iterator[str]:
    """URL of an empty database with the table, this test's alone, straight to the server."""
    yield kept_database.take()
    # A pooler keeps sessions of the database. And a thread that a later fixture ends could write
    # into it once more; others end within their linger.
    if pytestconfig.getoption("--pgbouncer") or _nothing_left_behind(20 * _application.LINGER):
        kept_database.drop()
    else:
        kept_database.give_back()


@pytest.fixture
def database_url(direct_url: str, pooler: PgBouncer | None) -> str:
    """URL of the same database as the library gets it: through pgbouncer, with ``--pgbouncer``."""
    return direct_url if pooler is None else pooler.spread(direct_url)


@pytest.fixture
def empty_database_url(server: Server) -> Iterator[str]:
    """URL of a database of this test's own, without the table."""
    with server.database() as url:
        yield url


@pytest.fixture
def connection(direct_url: str, kept_database: KeptDatabase) -> Iterator[psycopg.Connection[Any]]:
    """A plain connection to the test's database, in autocommit mode, never through pgbouncer."""
    with kept_database.session(direct_url) as connection:
        yield connection


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[Callable[[float], list[threading.Thread]]]:
    """Fail a test that leaves a thread of the library running, and tell where it is.

    The value waits for so many seconds for the end of the test's threads, and returns those that go
    on.
    """
    before = set(threading.enumerate())

    def left() -> list[threading.Thread]:
        """Return the threads of this test alone: each fails for its own."""
        later = set(threading.enumerate()) - before
        return [thread for thread in later if thread.name.startswith("tasklock")]

    def go_on(seconds: float) -> list[threading.Thread]:
        with contextlib.suppress(AssertionError):
            eventually(lambda: not left(), seconds)
        return left()

    yield go_on
    if threads := go_on(60.0):
        pytest.fail("\n".join(map(_where_it_is, threads)), pytrace=False)


def _where_it_is(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{thread.name} was left running:\n{''.join(traceback.format_stack(frame))}"


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the source tree."""
    return Path(__file__).parent.parent


@pytest.fixture
def known_task(connection: psycopg.Connection[Any]) -> Callable[[str], None]:
    """Give a task a row, as if it had run long ago. Its claims are counted from ``AHEAD`` on."""

    def make(name: str) -> None:
        connection.execute(
            "INSERT INTO task_lock (task_name, started_at, locked_until, window_start,"
            " window_until, locked_by, claim_id, token, finished_at, run_until, failover, deaths,"
            " handovers, handed_over, runs, one_off)"
            " SELECT %s, past, past, past, past, 'before', gen_random_uuid(), %s, past, past,"
            " false, 0, 0, false, '', false FROM (SELECT now() - interval '1 year' AS past) AS _",
            [name, AHEAD],
        )

    return make
