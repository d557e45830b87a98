"""One connection and one thread for the executors and the job store of one scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from apscheduler.schedulers.background import BackgroundScheduler
from sqlalchemy import create_engine

from apscheduler_tasklock import TaskLockExecutor, TaskLockOptionError
from apscheduler_tasklock._database.thread import NAME
from apscheduler_tasklock._database.url import parse_url
from tests.integration.leases.test_forking import status_of_child
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.stored_jobs import PATIENT, note, ran, store_class

Connection = psycopg.Connection[Any]


class Shared:
    """A scheduler with two executors and a job store, each with its database and options."""

    def __init__(self, *databases: Any, **options: Any) -> None:
        first, second, store = databases * 3 if len(databases) == 1 else databases
        self.first = TaskLockExecutor(first, **options)
        self.second = TaskLockExecutor(second, **options)
        patient = store_class(PATIENT)
        self.store = patient(store, functions=["tests."], poll_interval=0.1, **options)
        self.scheduler = BackgroundScheduler(
            executors={"default": self.first, "second": self.second},
            jobstores={"default": self.store, "memory": {"type": "memory"}},
        )

    def works(self, key: str, *, executor: str = "default", jobstore: str = "default") -> None:
        """Make sure that a job of a job store runs on an executor."""
        job_id = f"{key}-{executor}-{jobstore}-{len(ran)}"
        job = {"id": job_id, "args": [job_id], "misfire_grace_time": None}
        self.scheduler.add_job(note, executor=executor, jobstore=jobstore, **job)
        eventually(lambda: ran[job_id])


Make = Callable[..., Shared]


@pytest.fixture
def key() -> str:
    """The beginning of ids that no other test uses."""
    return f"job-{uuid4().hex[:8]}"


@pytest.fixture
def make(direct_url: str) -> Iterator[Make]:
    """Make and start a scheduler, which is shut down after the test, before its database ends."""
    with ExitStack() as stack:

        def make(*databases: Any, **options: Any) -> Shared:
            shared = Shared(*databases, **options)
            shared.scheduler.start()
            stack.callback(lambda: shared.scheduler.running and shared.scheduler.shutdown())
            return shared

        yield make


@pytest.fixture
def threads() -> Callable[[], int]:
    """Count the threads for the database that are new."""
    before = set(threading.enumerate())

    def count() -> int:
        later = set(threading.enumerate()) - before
        return sum(thread.name == NAME for thread in later)

    return count


@pytest.fixture
def connections(connection: Connection) -> Callable[[], int]:
    """Count the connections of task locks to the test's database."""

    def count() -> int:
        query = (
            "SELECT FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'tasklock%'"
        )
        return connection.execute(query).rowcount

    return count


pytestmark = pytest.mark.direct("a pooler has connections of its own")


def test_executors_and_store_of_one_scheduler_have_one_connection_and_one_thread(
    make: Make,
    direct_url: str,
    key: str,
    connections: Callable[[], int],
    threads: Callable[[], int],
) -> None:
    shared = make(direct_url)
    shared.works(key)
    shared.works(key, executor="second")
    shared.works(key, jobstore="memory")
    shared.works(key, executor="second", jobstore="memory")
    assert (connections(), threads()) == (1, 1)
    shared.scheduler.shutdown()
    eventually(lambda: (connections(), threads()) == (0, 0))


def test_a_scheduler_that_is_started_again_has_one_again(
    make: Make, direct_url: str, key: str, connections: Callable[[], int]
) -> None:
    shared = make(direct_url)
    shared.scheduler.shutdown()
    shared.scheduler.start()
    shared.works(key, executor="second")
    assert connections() == 1


def test_each_scheduler_of_a_process_has_one(
    make: Make, direct_url: str, connections: Callable[[], int], threads: Callable[[], int]
) -> None:
    make(direct_url)
    make(direct_url)
    assert (connections(), threads()) == (2, 2)


def test_each_replica_id_has_one(
    make: Make, direct_url: str, connections: Callable[[], int], threads: Callable[[], int]
) -> None:
    shared = make(direct_url, replica_id="one")
    assert (connections(), threads()) == (1, 1)
    shared.scheduler.add_executor(TaskLockExecutor(direct_url, replica_id="other"), "third")
    assert (connections(), threads()) == (2, 2)


def test_a_password_makes_no_difference(
    make: Make, direct_url: str, key: str, connections: Callable[[], int]
) -> None:
    url = parse_url(direct_url)
    shared = make(url, url.set(password="another"), url.set(password="a third"))  # none
    shared.works(key, executor="second")
    assert connections() == 1


def test_a_connection_with_other_options_is_an_error_that_names_both(direct_url: str) -> None:
    url = parse_url(direct_url).set(password="secret")  # none
    other = url.update_query_dict({"connect_timeout": "7", "sslpassword": "hidden"})
    shared = Shared(url, other, url)
    with pytest.raises(TaskLockOptionError, match="connect_timeout=7") as raised:
        shared.scheduler.start()
    assert "secret" not in str(raised.value)
    assert "hidden" not in str(raised.value)
    assert str(raised.value).count("postgresql") == 2
    shared.first.shutdown()


def test_an_engine_that_is_given_to_all_is_one_and_another_way_to_connect_is_another(
    make: Make, direct_url: str, key: str, connections: Callable[[], int]
) -> None:
    engine = create_engine(
        parse_url(direct_url).update_query_dict({"application_name": "tasklock"})
    )
    shared = make(engine)
    shared.works(key, executor="second")
    assert connections() == 1
    shared.scheduler.add_executor(TaskLockExecutor(direct_url), "third")
    assert connections() == 2


def test_an_executor_that_is_removed_leaves_the_others_working(
    make: Make, direct_url: str, key: str, connections: Callable[[], int]
) -> None:
    shared = make(direct_url)
    shared.works(key, executor="second")
    shared.scheduler.remove_executor("second")
    assert shared.second.user.closed
    shared.works(key)
    shared.works(key, jobstore="memory")
    assert connections() == 1
    shared.scheduler.add_executor(shared.second, "second")
    shared.works(key, executor="second")
    assert connections() == 1


def test_the_first_that_started_may_be_removed_too(
    make: Make, direct_url: str, key: str, connections: Callable[[], int]
) -> None:
    shared = make(direct_url)
    shared.scheduler.remove_executor("default")
    shared.works(key, executor="second")
    shared.works(key, executor="second", jobstore="memory")
    assert connections() == 1


def test_an_executor_that_is_drained_leaves_the_others_working(
    make: Make, direct_url: str, key: str
) -> None:
    shared = make(direct_url)
    assert shared.first.drain(10)
    shared.works(key, executor="second")
    shared.works(key, executor="second", jobstore="memory")
    assert not shared.second.user.closed


def test_what_others_ask_is_sent_again_after_an_executor_was_drained(
    make: Make, proxy: Proxy, key: str
) -> None:
    shared = make(proxy.url)
    assert shared.first.drain(10)
    lost = threading.Event()

    def lose_once(data: bytes) -> bytes | None:
        if key.encode() in data and not lost.is_set():
            lost.set()
            return None
        return data

    proxy.to_client = lose_once
    shared.works(key, executor="second")
    assert lost.is_set()


def test_a_store_that_is_removed_leaves_executors_working_and_listens_no_more(
    make: Make, direct_url: str, key: str, connections: Callable[[], int]
) -> None:
    shared = make(direct_url)
    eventually(lambda: shared.first.user.replica.thread.listens)
    shared.scheduler.remove_jobstore("default")
    eventually(lambda: not shared.first.user.replica.thread.listens)
    shared.works(key, jobstore="memory")
    assert connections() == 1
    shared.scheduler.add_jobstore(shared.store, "default")
    shared.works(key)
    eventually(lambda: shared.first.user.replica.thread.listens)


def test_each_holds_locks_under_its_own_name(
    make: Make, direct_url: str, key: str, connection: Connection
) -> None:
    """Also of claims that go at the same time: they do not travel together."""
    shared = make(direct_url)
    tasks = [f"{key}-{number}" for number in range(20)]
    shared.scheduler.pause()
    for number, task in enumerate(tasks):
        executor = "second" if number % 2 else "default"
        shared.scheduler.add_job(
            note,
            "interval",
            hours=1,
            next_run_time=datetime.now(timezone.utc),
            id=task,
            args=[task],
            misfire_grace_time=None,
            executor=executor,
            jobstore="memory",
        )
    shared.scheduler.resume()
    eventually(lambda: all(ran[task] for task in tasks))
    holders = dict(connection.execute("SELECT task_name, locked_by FROM task_lock").fetchall())
    expected = [shared.first.user.replica_id, shared.second.user.replica_id]
    assert [holders[f"memory:{task}"] for task in tasks] == expected * 10


# What Python 3.12 and later say of a fork beside threads, which is what is tested here.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_connections_of_its_own_and_the_parent_keeps_its_own(
    make: Make, direct_url: str, key: str, connections: Callable[[], int]
) -> None:
    shared = make(direct_url)
    shared.works(key)

    def use() -> None:
        for user in (shared.first.user, shared.second.user, shared.store.user):
            user.rights.check()
            user.close(blocking=True)
        again = Shared(direct_url)
        again.scheduler.start()
        assert again.first.user.replica is again.store.user.replica
        again.scheduler.shutdown()

    assert status_of_child(use) == 0
    shared.works(key, executor="second")
    eventually(lambda: connections() == 1)
