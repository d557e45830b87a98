"""How the statements treat the server: what they write, which commits and which waits they ask for.

A trigger notes the settings under which a row was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock._lock.outcomes import RunOutcome
from tests.contract.conftest import row
from tests.support.polling import eventually
from tests.support.waist import HISTORY, ClaimRequest, ReleaseRequest, Releases, Replica

# What the statements write and wait for.
pytestmark = pytest.mark.postgresql

Travel = Callable[[float], None]
Connection = psycopg.Connection[Any]

LEASED: dict[str, Any] = {"min_lock": 54, "max_lock": 300, "lease": 30, "failover": True}


@pytest.fixture
def noted(connection: Connection) -> Callable[[], list[tuple[str, str]]]:
    """Return and forget the settings under which rows were written."""
    connection.execute("""
        CREATE TABLE public.noted (number serial, synchronous_commit text, lock_timeout text);
        CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO public.noted (synchronous_commit, lock_timeout) VALUES
                (current_setting('synchronous_commit'), current_setting('lock_timeout'));
            RETURN NULL;
        END $$;
        CREATE TRIGGER note AFTER INSERT OR UPDATE ON task_lock
            FOR EACH ROW EXECUTE FUNCTION public.note();
    """)

    def take() -> list[tuple[str, str]]:
        return connection.execute(
            "WITH taken AS (DELETE FROM noted RETURNING *)"
            " SELECT synchronous_commit, lock_timeout FROM taken ORDER BY number"
        ).fetchall()

    return take


@pytest.fixture
def session(direct_url: str) -> Iterator[Connection]:
    """A session of its own, for its settings are the test's."""
    with psycopg.connect(direct_url, autocommit=True) as session:
        yield session


def setting(session: Connection, name: str) -> str:
    found = session.execute("SELECT current_setting(%s)", [name]).fetchone()
    assert found is not None
    return str(found[0])


def lead_a_life(replica: Replica, travel: Travel) -> list[str]:
    """Send every statement that decides who runs a window; return their names."""
    first, _ = replica.claim(**LEASED)
    replica.release(first)
    travel(60)
    second, _ = replica.claim(**LEASED)
    replica.end_lease(second, holders=[replica.name])
    third, _ = replica.take_over(second, lease=30)
    replica.hand_over(third)
    return ["first claim", "release", "claim", "end of the lease", "takeover", "hand-over"]


class TestSynchronousCommit:
    def test_off_is_raised_to_local_for_each_statement_that_decides_and_only_for_it(
        self,
        session: Connection,
        noted: Callable[[], list[tuple[str, str]]],
        travel: Travel,
    ) -> None:
        session.execute("SET synchronous_commit = off")
        names = lead_a_life(Replica("one", session), travel)
        assert [commit for commit, _ in noted()] == ["local"] * len(names), names
        assert setting(session, "synchronous_commit") == "off"

    @pytest.mark.parametrize("chosen", ["local", "remote_write", "on", "remote_apply"])
    def test_what_else_was_chosen_stays(
        self,
        session: Connection,
        noted: Callable[[], list[tuple[str, str]]],
        travel: Travel,
        chosen: str,
    ) -> None:
        session.execute(f"SET synchronous_commit = {chosen}")
        names = lead_a_life(Replica("one", session), travel)
        assert [commit for commit, _ in noted()] == [chosen] * len(names), names
        assert setting(session, "synchronous_commit") == chosen

    def test_off_stays_off_after_a_refused_claim(self, session: Connection) -> None:
        session.execute("SET synchronous_commit = off")
        replica = Replica("one", session)
        assert replica.granted()
        assert not replica.granted()
        assert setting(session, "synchronous_commit") == "off"


class TestLockTimeout:
    @pytest.mark.parametrize("chosen", ["0", "77s"])
    def test_it_holds_for_each_statement_that_decides_and_not_after_it(
        self,
        session: Connection,
        noted: Callable[[], list[tuple[str, str]]],
        travel: Travel,
        chosen: str,
    ) -> None:
        session.execute(f"SET lock_timeout = '{chosen}'")
        names = lead_a_life(Replica("one", session, lock_timeout=2.5), travel)
        assert [timeout for _, timeout in noted()] == ["2500ms"] * len(names), names
        assert setting(session, "lock_timeout") == chosen

    @pytest.mark.parametrize(
        "ask",
        [
            pytest.param(lambda replica, _dead: replica.claim("free", **LEASED), id="claim"),
            pytest.param(lambda replica, dead: replica.release(dead, "dead"), id="release"),
            pytest.param(lambda replica, dead: replica.hand_over(dead, "dead"), id="hand-over"),
        ],
    )
    def test_it_ends_the_wait_for_a_row_that_somebody_has_locked(
        self,
        session: Connection,
        direct_url: str,
        travel: Travel,
        ask: Callable[[Replica, Any], Any],
    ) -> None:
        replica = Replica("one", session, lock_timeout=0.05)
        replica.release(replica.claim("free", **LEASED)[0], "free")
        dead, _ = replica.claim("dead", **LEASED)
        travel(60)
        with psycopg.connect(direct_url) as blocker:
            blocker.execute("SELECT FROM task_lock FOR UPDATE")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                ask(replica, dead)
        assert setting(session, "lock_timeout") == "0"
        assert ask(replica, dead) is not None

    def test_it_ends_the_wait_for_a_locked_entry_of_the_history(
        self, session: Connection, direct_url: str, travel: Travel
    ) -> None:
        """A row of the task that is locked is passed over; one of its history is waited for."""
        replica = Replica("one", session, lock_timeout=0.05)
        # All entries are there, so that the next one overwrites one.
        for outcome in ["ok", "error"] * HISTORY:
            ended, _ = replica.claim(**LEASED)
            replica.end(ended, outcome=outcome)
            travel(60)
        dead, _ = replica.claim(**LEASED)
        travel(60)
        request = ClaimRequest("task", **LEASED)
        release = ReleaseRequest("task", dead, RunOutcome(outcome="ok"))
        for ask in (
            lambda: replica.take_over(dead, lease=30),
            lambda: replica.claim_many(request),
            lambda: replica.ask(Releases([release])),
        ):
            with psycopg.connect(direct_url) as blocker:
                blocker.execute("SELECT FROM task_lock_run FOR UPDATE")
                with pytest.raises(psycopg.errors.LockNotAvailable):
                    ask()
        assert replica.takes_over(dead, lease=30)

    def test_it_ends_the_wait_for_a_first_claim_that_is_not_committed(
        self, session: Connection, connection: Connection
    ) -> None:
        with connection.transaction():
            assert Replica("other", connection).granted()
            with pytest.raises(psycopg.errors.LockNotAvailable):
                Replica("one", session, lock_timeout=0.05).claim()

    def test_a_claim_that_gave_up_waiting_claims_nothing_later(
        self, session: Connection, direct_url: str, connection: Connection, travel: Travel
    ) -> None:
        replica = Replica("one", session, lock_timeout=0.05)
        replica.release(replica.claim()[0])
        travel(60)
        before = row(connection)
        with psycopg.connect(direct_url) as blocker:
            blocker.execute("SELECT FROM task_lock FOR UPDATE")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                replica.claim()
        assert row(connection) == before

    @pytest.mark.parametrize(("seconds", "told"), [(0.0001, "1ms"), (30.0, "30s")])
    def test_it_is_never_none_at_all(
        self,
        session: Connection,
        noted: Callable[[], list[tuple[str, str]]],
        seconds: float,
        told: str,
    ) -> None:
        Replica("one", session, lock_timeout=seconds).claim()
        assert [timeout for _, timeout in noted()] == [told]


class TestRefusal:
    @pytest.fixture
    def refusals(self, one: Replica, other: Replica, travel: Travel) -> list[Callable[[], bool]]:
        """Every way to be refused."""
        too_late, _ = one.claim("over", **LEASED)
        travel(300)
        one.claim("dead", **LEASED)
        one.hand_over(one.claim("handed over", **LEASED)[0], "handed over")
        travel(100)
        ended, _ = one.claim("ended", **LEASED)
        one.release(ended, "ended")
        one.release(one.hold("held", min_lock=60)[0], "held")
        running, _ = one.claim("running", **LEASED)
        return [
            lambda: other.granted("running", **LEASED),
            lambda: other.granted("ended", **LEASED),
            lambda: other.granted("ended", claim_id=ended, **LEASED),
            lambda: other.hold("held", min_lock=0)[1].granted,
            lambda: other.granted("dead", **LEASED),
            lambda: other.granted("dead", lag=100, **LEASED),
            lambda: other.granted("dead", stable=False, min_lock=0),
            lambda: other.granted("handed over", **LEASED),
            lambda: other.takes_over(running, "running"),
            lambda: other.takes_over(ended, "ended"),
            lambda: other.takes_over(too_late, "over"),
            lambda: other.takes_over(ended, "dead"),
            lambda: other.takes_over(ended, "unknown"),
            lambda: other.give_up(running, "running"),
            lambda: other.give_up(ended, "ended"),
            lambda: other.renewed(ended, "ended"),
            lambda: other.extend(ended, 10, task="ended") is not None,
            lambda: bool(other.read("no dead one")),
            lambda: other.prune(1) > 0,
        ]

    def test_it_leaves_every_row_as_it_is_and_locks_none(
        self, refusals: list[Callable[[], bool]], connection: Connection
    ) -> None:
        def versions() -> list[tuple[Any, ...]]:
            return connection.execute(
                "SELECT ctid, xmin, xmax, * FROM task_lock ORDER BY task_name"
            ).fetchall()

        before = versions()
        assert [refused() for refused in refusals] == [False] * len(refusals)
        assert versions() == before

    def test_it_writes_no_wal_and_takes_no_transaction_id(
        self, refusals: list[Callable[[], bool]], connection: Connection
    ) -> None:
        def written() -> tuple[Any, ...]:
            found = connection.execute(
                "SELECT pg_current_wal_insert_lsn() - '0/0',"
                " pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
            ).fetchone()
            assert found is not None
            return found

        connection.execute("CHECKPOINT")

        def nothing(refused: Callable[[], bool]) -> bool:
            before = written()
            assert not refused()
            return written() == before

        # The server's own processes write now and then; a refusal that writes does so every time.
        for refused in refusals:
            eventually(lambda refused=refused: nothing(refused), timeout=30)
