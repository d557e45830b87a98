"""Claims that one request carries: as many are granted as there are workers; each is told."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock._lock.claims import Claimed
from apscheduler_tasklock.lock import HeldLock
from tests.support.claims import held, row
from tests.support.faults import CLAIM, Fault
from tests.support.internals import fail_after_a_claims_answer
from tests.support.outages import refuse, restore
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.waist import AnyAttempt, ClaimOutcome, ClaimRequest, LockClient, Refusal

MakeLocks = Callable[..., LockClient]
Connection = psycopg.Connection[Any]
MakeAsking = Callable[..., "Asking"]
PATIENCE = 60.0


class Asking:
    """Asks for the claims of these tasks, and keeps what is told of them."""

    def __init__(self, locks: LockClient, *tasks: str) -> None:
        self.locks = locks
        self.attempts = [_attempt(locks, task) for task in tasks]
        self.told: queue.SimpleQueue[Sequence[tuple[AnyAttempt, Claimed]]] = queue.SimpleQueue()
        self.held: list[HeldLock] = []

    def ask(self, most: int | None = None) -> dict[str, Any]:
        """Ask, wait for what is told, and return it by the tasks."""
        self.begin(most)
        return self.result()

    def begin(self, most: int | None = None) -> None:
        self.locks.begin_claims(self.attempts, most, self.told.put)

    def result(self) -> dict[str, Any]:
        told = self.told.get(timeout=PATIENCE)
        assert [attempt for attempt, _ in told] == self.attempts
        self.held += [claimed for _, claimed in told if isinstance(claimed, HeldLock)]
        return {attempt.task_name: claimed for attempt, claimed in told}


def _attempt(locks: LockClient, task: str) -> AnyAttempt:
    return locks.attempt(
        ClaimRequest(task, min_lock=9.0, max_lock=3000.0, runs="jobs:job", lease=600.0)
    )


@pytest.fixture
def make_asking(make_locks: MakeLocks) -> Iterator[MakeAsking]:
    """Make what asks for claims; what it was granted is released before the locks are closed."""
    made: list[Asking] = []

    def make(locks: LockClient, *tasks: str) -> Asking:
        made.append(Asking(locks, *tasks))
        return made[-1]

    yield make
    for asking in made:
        for lock in asking.held:
            asking.locks.release(lock)


def kinds(told: dict[str, Any]) -> dict[str, Any]:
    return {
        task: claimed if isinstance(claimed, ClaimOutcome) else type(claimed)
        for task, claimed in told.items()
    }


@pytest.fixture
def busy() -> Iterator[Callable[[LockClient], None]]:
    """Keep a replica's thread busy until the end of the test at the latest."""
    go_on = threading.Event()

    def begin(locks: LockClient) -> None:
        begun = threading.Event()

        def keep(_cursor: object) -> None:
            begun.set()
            assert go_on.wait(PATIENCE)

        thread = threading.Thread(target=locks.ask, args=(keep,))
        thread.start()
        threads.append(thread)
        assert begun.wait(PATIENCE)

    threads: list[threading.Thread] = []
    begin.go_on = go_on.set  # type: ignore[attr-defined]  # for the test to call
    yield begin
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE)


def test_each_is_told_what_became_of_it(
    make_asking: MakeAsking,
    make_locks: MakeLocks,
    known_task: Callable[[str], None],
    direct_url: str,
) -> None:
    other = make_locks(replica_id="other")
    other.release(held(other, "taken", runs="jobs:job"))
    known_task("locked")
    asking = make_asking(make_locks(), "taken", "locked", "a", "b", "c")
    with psycopg.connect(direct_url) as blocker:
        blocker.execute("SELECT FROM task_lock WHERE task_name = 'locked' FOR UPDATE")
        told = asking.ask(most=None)
    assert kinds(told) == {
        "taken": Refusal,
        "locked": ClaimOutcome.LOCKED,
        "a": HeldLock,
        "b": HeldLock,
        "c": HeldLock,
    }
    assert told["taken"].holder == "other"


def test_releases_that_wait_go_before_the_claims_of_their_tasks(
    proxy: Proxy,
    make_asking: MakeAsking,
    make_locks: MakeLocks,
) -> None:
    """Else the replica would be refused on account of its own last runs."""
    locks = make_locks(proxy.url)
    before = [held(locks, task, min_lock=0.0, runs="jobs:job", lease=600.0) for task in "ab"]
    refuse(proxy)
    for lock in before:
        with pytest.raises(TaskLockDatabaseError):
            locks.release(lock)
    asking = make_asking(locks, "b", "a")
    asking.begin(most=2)
    restore(proxy)
    told = asking.result()
    while ClaimOutcome.UNANSWERED in told.values():
        told = asking.ask(most=2)
    assert kinds(told) == {"b": HeldLock, "a": HeldLock}


@pytest.mark.nightly
@pytest.mark.direct("it breaks a statement on its way")
def test_those_in_doubt_at_the_end_are_handed_over(
    proxy: Proxy,
    make_asking: MakeAsking,
    make_locks: MakeLocks,
    known_task: Callable[[str], None],
    connection: Connection,
) -> None:
    for task in "ab":
        known_task(task)
    asking = make_asking(make_locks(proxy.url, claim_timeout=1.0), "a", "b")
    # At once: later, the claim might have been asked for again, and answered.
    fault = Fault(proxy, CLAIM, "after", "terminated", lambda: refuse(proxy))
    asking.begin(most=2)
    assert fault.met.wait(PATIENCE)
    told = asking.result()
    while ClaimOutcome.UNANSWERED in told.values():
        told = asking.ask(most=2)
    assert kinds(told) == {"a": TaskLockDatabaseError, "b": TaskLockDatabaseError}
    assert [row(connection, task)["finished_at"] for task in "ab"] == [None, None]
    restore(proxy)
    for task in "ab":
        eventually(lambda task=task: row(connection, task)["handed_over"])


@pytest.mark.direct("it breaks a statement on its way")
def test_who_is_withdrawn_in_doubt_is_handed_over(
    proxy: Proxy,
    make_asking: MakeAsking,
    make_locks: MakeLocks,
    known_task: Callable[[str], None],
    connection: Connection,
) -> None:
    known_task("a")
    locks = make_locks(proxy.url)
    asking = make_asking(locks, "a")
    fault = Fault(proxy, CLAIM, "after", "cut", lambda: None)
    told = asking.ask(most=1)
    assert fault.met.is_set()
    while ClaimOutcome.UNANSWERED in told.values():  # on a machine that stops for seconds
        told = asking.ask(most=1)
    assert kinds(told) == {"a": HeldLock}
    assert not row(connection, "a")["handed_over"]
    locks.withdraw(asking.attempts[0])
    eventually(lambda: row(connection, "a")["handed_over"])


def test_one_tasks_mistake_is_its_own(
    make_asking: MakeAsking, make_locks: MakeLocks, connection: Connection
) -> None:
    connection.execute("ALTER TABLE task_lock ADD CHECK (task_name <> 'c')")
    told = make_asking(make_locks(), *"abcde").ask(most=5)
    assert kinds(told) == {"c": TaskLockError, **dict.fromkeys("abde", HeldLock)}
    assert "violates check constraint" in str(told["c"])


@pytest.mark.parametrize("tasks", ["a", "abc"])
def test_an_error_of_the_thread_after_the_answer_costs_no_claim(
    make_asking: MakeAsking, make_locks: MakeLocks, monkeypatch: pytest.MonkeyPatch, tasks: str
) -> None:
    failed = fail_after_a_claims_answer(monkeypatch)
    told = make_asking(make_locks(), *tasks).ask(most=5)
    assert failed
    assert kinds(told) == dict.fromkeys(tasks, HeldLock)


def test_the_limit_holds_for_all_parts_of_what_was_rejected(
    make_asking: MakeAsking, make_locks: MakeLocks, connection: Connection
) -> None:
    connection.execute("ALTER TABLE task_lock ADD CHECK (task_name <> 'b')")
    told = make_asking(make_locks(), *"abcde").ask(most=2)
    assert kinds(told) == {
        "a": HeldLock,
        "b": TaskLockError,
        "c": HeldLock,
        "d": ClaimOutcome.BEYOND,
        "e": ClaimOutcome.BEYOND,
    }


@pytest.mark.usefixtures("unhurried_stop")
def test_what_is_granted_after_a_stop_is_handed_over(
    make_asking: MakeAsking, make_locks: MakeLocks, connection: Connection, busy: Any
) -> None:
    locks = make_locks()
    asking = make_asking(locks, "a")
    busy(locks)
    asking.begin(most=1)
    locks.stop_claiming()
    busy.go_on()
    assert "are closed" in str(asking.result()["a"])
    assert locks.wait_for_claims(PATIENCE)
    eventually(lambda: row(connection, "a")["handed_over"])


@pytest.mark.usefixtures("unhurried_stop")
def test_after_a_stop_none_is_to_be_asked_for_again(
    make_asking: MakeAsking,
    make_locks: MakeLocks,
    known_task: Callable[[str], None],
    direct_url: str,
    busy: Any,
) -> None:
    known_task("a")
    locks = make_locks()
    asking = make_asking(locks, "a")
    busy(locks)
    asking.begin(most=1)
    locks.stop_claiming()
    with psycopg.connect(direct_url) as blocker:
        blocker.execute("SELECT FROM task_lock WHERE task_name = 'a' FOR UPDATE")
        busy.go_on()
        assert isinstance(asking.result()["a"], TaskLockDatabaseError)


@pytest.mark.usefixtures("unhurried_stop")
def test_what_was_beyond_the_limit_is_told_as_that_after_a_stop_too(
    make_asking: MakeAsking, make_locks: MakeLocks, busy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    locks = make_locks()
    asking = make_asking(locks, "a", "b")
    busy(locks)
    asking.begin(most=1)
    locks.stop_claiming()
    busy.go_on()
    assert asking.result()["b"] is ClaimOutcome.BEYOND
    assert "the outcome of its claim is not known" not in caplog.text


def test_whoever_waits_for_claims_waits_until_they_are_told(
    make_asking: MakeAsking, make_locks: MakeLocks, busy: Any
) -> None:
    locks = make_locks()
    busy(locks)
    asking = make_asking(locks, "a")
    asking.begin(most=1)
    assert not locks.wait_for_claims(0)
    busy.go_on()
    assert locks.wait_for_claims(PATIENCE)
    assert kinds(asking.result()) == {"a": HeldLock}
