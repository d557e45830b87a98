"""The executor contract's parameters and fixtures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.executors import jobs
from tests.integration.conftest import late_takeovers
from tests.support.hosts import HOSTS, Host
from tests.support.schedulers import Replica

__all__ = ["late_takeovers"]  # a fixture

Jobs = Callable[[str], Callable[..., Any]]

# Hosts that start a Python for each pool: `fork` tests pools in `make test`.
_NIGHTLY_HOSTS = {"spawn"}
# Tests that wait for the end of a lease, or of what is decided before a host gets the job: the
# hosts that they have in `make test`.
_OF_SOME_HOSTS = {
    "test_a_dead_holders_window_is_run_again": {"threadpool"},
    "test_a_job_whose_body_would_never_run_is_an_error": {"threadpool", "asyncio", "fork"},
}


def gevent_patched() -> bool:
    monkey = sys.modules.get("gevent.monkey")
    return bool(monkey and monkey.is_module_patched("socket"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "host" not in metafunc.fixturenames:
        return
    # gevent patches the whole process; test_gevent.py starts one for it.
    names = ["gevent"] if gevent_patched() else [name for name in HOSTS if name != "gevent"]
    some = _OF_SOME_HOSTS.get(metafunc.function.__name__)

    def case(host: str, *values: str) -> Any:
        is_nightly = host in _NIGHTLY_HOSTS or (some is not None and host not in some)
        marks = [pytest.mark.nightly] if is_nightly else []
        return pytest.param(host, *values, marks=marks, id="-".join((host, *values)))

    if "job" not in metafunc.fixturenames:
        metafunc.parametrize("host", [case(name) for name in names], indirect=True)
        return
    kinds = [
        case(name, kind)
        for name in names
        for kind in ("function", "coroutine")
        if kind == "function" or HOSTS[name].coroutines
    ]
    metafunc.parametrize(("host", "job"), kinds, indirect=True)


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    host = HOSTS[request.param]()
    yield host
    host.close()


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Jobs:
    """Return a job function of ``jobs`` by its name, as the kind under test."""
    suffix = "_coroutine" if request.param == "coroutine" else ""
    return lambda name: getattr(jobs, name + suffix)


@pytest.fixture
def make_replica(host: Host, database_url: str) -> Iterator[Callable[..., Replica]]:
    """Make and start a replica on the host; it is shut down after the test."""
    with ExitStack() as closing:

        def make(*, start: bool = True, **options: Any) -> Replica:
            replica = Replica(database_url, host=host, **{**host.executor, **options})
            if start:
                replica.start()
            closing.callback(replica.shutdown)
            return replica

        yield make
