"""What is signed of stored jobs: nothing that somebody else wrote, and nowhere but where it lies.

The attacker here can write the tables, and has no secret. Each test says what they do to a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta, timezone
from itertools import product
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from apscheduler_tasklock import TaskLockOptionError, upgrade
from apscheduler_tasklock._lock.job_rows import JobRows
from tests.support.postgres import Server
from tests.support.roles import role
from tests.support.stored_jobs import StoreReplica, note, ran

Make = Callable[..., StoreReplica]
Connection = psycopg.Connection[Any]

SECRET = "a secret of ours"
SIGNED = {"functions": None, "secret": SECRET}
PICKLED = {**SIGNED, "serializer": "pickle"}

# What an attacker writes into a column, which is written in another way when it is stored again.
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "args": ("arguments", {"args": ["theirs"], "kwargs": {"$": "dict", "value": {}}}),
    "kwargs": ("arguments", {"args": [], "kwargs": {"$": "dict", "value": {"key": "theirs"}}}),
    "options of the lock": (
        "arguments",
        {"args": [], "kwargs": {"$": "dict", "value": {"task_lock": {"name": "theirs"}}}},
    ),
    "trigger": (
        "trigger",
        {
            "type": "interval",
            "length": [0, 7, 0],
            "start_date": "2020-02-02T02:02:02+00:00",
            "end_date": None,
            "timezone": "Etc/UTC",
            "jitter": None,
        },
    ),
    "options": (
        "options",
        {
            "name": "theirs",
            "misfire_grace_time": {"$": "float", "value": "7.0"},
            "coalesce": False,
            "max_instances": 1,
        },
    ),
}

# What users call, by what is tested with it.
CALLS: dict[str, Callable[[StoreReplica, str], Any]] = {
    "pause": lambda replica, key: replica.scheduler.pause_job(key),
    "resume": lambda replica, key: replica.scheduler.resume_job(key),
    "rename": lambda replica, key: replica.scheduler.modify_job(key, name="ours"),
    "move": lambda replica, key: replica.scheduler.modify_job(
        key, next_run_time=datetime.now(timezone.utc) + timedelta(hours=2)
    ),
    "coalesce": lambda replica, key: replica.scheduler.modify_job(key, coalesce=False),
    "reschedule": lambda replica, key: replica.scheduler.reschedule_job(
        key, trigger="interval", hours=2
    ),
}


def change_kwargs(replica: StoreReplica, key: str) -> None:
    job = replica.scheduler.get_job(key)
    job.modify(kwargs={**job.kwargs, "value": 1})


def declare(replica: StoreReplica, key: str, **options: Any) -> Any:
    given = {"args": [key], "id": key, "misfire_grace_time": None, **options}
    return replica.scheduler.add_job(note, "interval", hours=1, replace_existing=True, **given)


CALLS |= {"add to its kwargs": change_kwargs, "declare": declare}


def saved(connection: Connection, job_id: str, table: str = "task_lock_job") -> dict[str, Any]:
    """Return a row, as an attacker saves it."""
    name = sql.Identifier(*table.split("."))
    read = sql.SQL("SELECT to_jsonb(job) FROM {} AS job WHERE id = %s").format(name)
    row = connection.execute(read, [job_id]).fetchone()
    assert row is not None
    found: dict[str, Any] = row[0]
    return found


def put_back(connection: Connection, row: dict[str, Any], table: str = "task_lock_job") -> None:
    """Write a saved row, in place of what is there."""
    name = sql.Identifier(*table.split("."))
    connection.execute(sql.SQL("DELETE FROM {} WHERE id = %s").format(name), [row["id"]])
    put = sql.SQL("INSERT INTO {0} SELECT * FROM jsonb_populate_record(NULL::{0}, %s)")
    connection.execute(put.format(name), [json.dumps(row)])


def write(connection: Connection, job_id: str, **columns: Any) -> None:
    for column, value in columns.items():
        update = sql.SQL("UPDATE task_lock_job SET {} = %s WHERE id = %s")
        connection.execute(update.format(sql.Identifier(column)), [value, job_id])


def write_definition(connection: Connection, row: dict[str, Any]) -> None:
    """Write what a saved row says of its job into the row of that id, with the signature."""
    columns = {name: row[name] for name in ("func", "executor", "signature")}
    columns |= {name: json.dumps(row[name]) for name in ("trigger", "options", "arguments")}
    write(connection, row["id"], **columns)


def make_due(connection: Connection) -> None:
    connection.execute("UPDATE task_lock_job SET next_run_time = now(), ended = false")


def runs_others_only(replica: StoreReplica, key: str, connection: Connection) -> None:
    """Make all jobs due, and see that another one runs, which was due after them."""
    make_due(connection)
    other = f"{key}-other-{uuid4().hex[:4]}"
    replica.run_at(note, other)
    replica.runs(other)
    assert (ran["theirs"], ran[key]) == ([], [])


@pytest.fixture
def key() -> str:
    """An id that no other test uses."""
    ran.pop("theirs", None)
    return f"job-{uuid4().hex[:8]}"


@pytest.fixture
def make(database_url: str) -> Iterator[Make]:
    """Make and start a replica whose store signs; it is shut down after the test."""
    with ExitStack() as closing:

        def make(*, database: str = database_url, **store: Any) -> StoreReplica:
            options = {**SIGNED, **store}
            tables = {name: options[name] for name in ("schema", "table") if name in options}
            replica = StoreReplica(database, store=options, **tables)
            replica.start()
            closing.callback(replica.shutdown)
            return replica

        yield make


@contextmanager
def attacked(
    monkeypatch: pytest.MonkeyPatch, connection: Connection, job_id: str, at: int, **theirs: Any
) -> Iterator[None]:
    """Let an attacker have their way with a row when it is read, at one read, and not after it."""
    row = saved(connection, job_id)
    ours = {name: json.dumps(row[name]) for name in theirs}
    read, count = JobRows.read, 0

    def reads(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        is_theirs, count = count == at, count + 1
        write(connection, job_id, **(theirs if is_theirs else ours))
        return read(*arguments, **named)

    with monkeypatch.context() as patching:
        patching.setattr(JobRows, "read", reads)
        yield


class TestWhatSomebodyElseWrote:
    @pytest.mark.parametrize("store", [SIGNED, PICKLED], ids=["json", "pickle"])
    @pytest.mark.parametrize("call", CALLS)
    def test_is_not_signed_by_whatever_a_user_calls(
        self,
        make: Make,
        key: str,
        connection: Connection,
        monkeypatch: pytest.MonkeyPatch,
        store: dict[str, Any],
        call: str,
    ) -> None:
        """They write it, and put back what was there, between any two reads of a call."""
        replica = make(**store)
        declare(replica, key)
        before = saved(connection, key)
        for (column, value), at in product(THEIRS.values(), range(4)):
            put_back(connection, before)
            with (
                attacked(monkeypatch, connection, key, at, **{column: json.dumps(value)}),
                suppress(TaskLockOptionError),
            ):
                CALLS[call](replica, key)
            job = replica.scheduler.get_job(key)
            assert "theirs" not in (*job.args, *job.kwargs.values(), job.name)
            assert "task_lock" not in job.kwargs
            assert "0:00:07" not in str(job.trigger)
            assert job.misfire_grace_time != 7

    @pytest.mark.parametrize("call", ["pause", "rename", "coalesce"])
    @pytest.mark.parametrize("what", ["args", "kwargs"])
    def test_is_not_run_after_calls_during_which_it_came_and_went(
        self,
        make: Make,
        key: str,
        connection: Connection,
        monkeypatch: pytest.MonkeyPatch,
        what: str,
        call: str,
    ) -> None:
        replica = make()
        declare(replica, key, args=[], kwargs={"key": key})
        column, value = THEIRS[what]
        for at in range(3):
            with (
                attacked(monkeypatch, connection, key, at, **{column: json.dumps(value)}),
                suppress(TaskLockOptionError),
            ):
                CALLS[call](replica, key)
        make_due(connection)
        runs = f"{key}-runs"
        replica.run_at(note, runs)
        replica.runs(runs)
        assert ran["theirs"] == []

    @pytest.mark.parametrize("what", THEIRS)
    def test_is_not_run_after_it(
        self, make: Make, key: str, connection: Connection, what: str
    ) -> None:
        replica = make()
        declare(replica, key)
        column, value = THEIRS[what]
        write(connection, key, **{column: json.dumps(value)})
        for call in ("pause", "resume", "rename", "move", "coalesce", "add to its kwargs"):
            with suppress(TaskLockOptionError):
                CALLS[call](replica, key)
        runs_others_only(replica, key, connection)


class TestMovedRows:
    """Each test but the last ones moves what was signed to where that does not hold."""

    @pytest.mark.parametrize("place", [{"schema": "elsewhere"}, {"table": "other"}])
    def test_a_row_of_another_schema_or_table_does_not_run(
        self,
        make: Make,
        key: str,
        connection: Connection,
        direct_url: str,
        place: dict[str, str],
    ) -> None:
        upgrade(direct_url, **place)
        theirs = f"{place.get('schema', 'public')}.{place.get('table', 'task_lock')}_job"
        # As the owner of both may do, so that the names alone have to do.
        comment = "COMMENT ON TABLE {} IS 'one id'"
        for table in ("task_lock_job", theirs):
            name = sql.Identifier(*table.split("."))
            connection.execute(sql.SQL(comment).format(name))
        declare(make(**place), key)
        put_back(connection, saved(connection, key, theirs))
        runs_others_only(make(), key, connection)

    def test_a_row_of_a_database_of_another_name_does_not_run(
        self, make: Make, key: str, connection: Connection, server: Server, template: str
    ) -> None:
        """Both are copies of one template, and so have one id."""
        with server.database(template) as url, psycopg.connect(url, autocommit=True) as other:
            replica = make(database=url)
            declare(replica, key)
            put_back(connection, saved(other, key))
            replica.shutdown()
        runs_others_only(make(), key, connection)

    def test_a_row_of_another_database_of_that_name_does_not_run(
        self, make: Make, key: str, connection: Connection, direct_url: str
    ) -> None:
        """As those of two servers, whose tables were made apart."""
        before = make()
        declare(before, key)
        row = saved(connection, key)
        before.shutdown()
        connection.execute("DROP TABLE task_lock_job")
        upgrade(direct_url)
        put_back(connection, row)
        runs_others_only(make(), key, connection)

    def test_who_can_write_the_tables_cannot_change_the_id(
        self, make: Make, key: str, connection: Connection, direct_url: str
    ) -> None:
        with role(direct_url) as (name, url):
            tables = "task_lock, task_lock_run, task_lock_replica"
            grants = (
                f'GRANT SELECT, INSERT, UPDATE ON {tables} TO "{name}"',
                f'GRANT SELECT, INSERT, UPDATE, DELETE ON task_lock_job TO "{name}"',
            )
            for grant in grants:
                connection.execute(grant)
            connection.execute(f'SET ROLE "{name}"')
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute("COMMENT ON TABLE task_lock_job IS 'another'")
            connection.execute("RESET ROLE")
            replica = make(database=url)
            replica.run_at(note, key)
            replica.runs(key)
            replica.shutdown()

    def test_what_was_stored_before_a_change_does_not_hold_for_the_row_after_it(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        declare(replica, key)
        before = saved(connection, key)
        replica.scheduler.modify_job(key, args=["changed"])
        write_definition(connection, before)
        runs_others_only(replica, key, connection)
        assert ran["changed"] == []

    def test_nor_for_a_later_job_of_its_id(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        replica = make()
        declare(replica, key)
        before = saved(connection, key)
        replica.scheduler.remove_job(key)
        declare(replica, key, args=["later"])
        write_definition(connection, before)
        runs_others_only(replica, key, connection)
        assert ran["later"] == []

    def test_a_whole_row_that_is_put_back_runs_again(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        """The limit that SECURITY.md tells of: nothing that they cannot write knows better."""
        replica = make()
        declare(replica, key)
        row = saved(connection, key)
        replica.scheduler.remove_job(key)
        put_back(connection, row)
        make_due(connection)
        replica.runs(key)

    def test_a_row_that_is_only_moved_in_time_runs(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        """As SECURITY.md tells as well: the next run time is not signed."""
        replica = make()
        declare(replica, key)
        replica.scheduler.pause_job(key)
        make_due(connection)
        replica.runs(key)


class TestRotation:
    OLD, NEW = "the old secret of ours", b"the new secret of ours"

    def test_moves_on_job_by_job_until_the_old_key_can_go(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        """A key is added everywhere, then moved to the front, and the old one is taken away."""
        names = [f"{key}-{name}" for name in ("declared", "modified", "paused", "untouched")]
        declared, modified, paused, untouched = names
        old = make(secret=self.OLD)
        for name in names:
            declare(old, name, args=[name])
        before = {name: saved(connection, name) for name in names}
        both = make(secret=[self.OLD, self.NEW])
        declare(both, declared, args=[declared])
        assert saved(connection, declared) == before[declared]
        first = make(secret=[self.NEW, self.OLD])
        for replica in (old, both, first):  # all of them read what was signed with the old one
            assert {job.args for job in replica.scheduler.get_jobs()} == {(n,) for n in names}
        declare(first, declared, args=[declared])
        job = first.scheduler.get_job(modified)
        job.modify(name=job.name)  # which changes nothing else
        first.scheduler.pause_job(paused)
        first.scheduler.resume_job(paused)
        for name in (declared, modified):
            after = saved(connection, name)
            assert after["signature"] != before[name]["signature"]
            assert after["next_run_time"] == before[name]["next_run_time"]
        assert saved(connection, paused)["signature"] == before[paused]["signature"]
        declare(both, declared, args=[declared])  # as when it is restarted before it has the order
        declare(first, declared, args=[declared])
        for replica in (old, both, first):
            replica.shutdown()
        new = make(secret=self.NEW)
        make_due(connection)
        new.runs(declared)
        new.runs(modified)
        runs = f"{key}-runs"
        new.run_at(note, runs)
        new.runs(runs)
        assert (ran[paused], ran[untouched]) == ([], [])

    def test_who_does_not_have_the_new_key_yet_spoils_nothing(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        """The key was moved to the front too early."""
        old, new = make(secret=self.OLD), make(secret=[self.NEW, self.OLD])
        declare(new, key)
        assert old.scheduler.pause_job(key).args == ()
        with pytest.raises(TaskLockOptionError, match="a secret that this replica does not have"):
            old.scheduler.modify_job(key, args=["other"])
        with pytest.raises(TaskLockOptionError, match="a secret that this replica does not have"):
            old.scheduler.resume_job(key)
        new.scheduler.resume_job(key)
        new.scheduler.modify_job(key, next_run_time=datetime.now(timezone.utc))
        new.runs(key)

    def test_a_key_that_was_taken_away_holds_no_more(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        """As one that others have come to know."""
        old = make(secret=self.OLD)
        declare(old, key)
        old.shutdown()
        new = make(secret=self.NEW)
        runs_others_only(new, key, connection)
        declare(new, key)
        new.scheduler.modify_job(key, next_run_time=datetime.now(timezone.utc))
        new.runs(key)

    def test_two_keys_sign_beside_each_other(
        self, make: Make, key: str, connection: Connection
    ) -> None:
        """As while the replicas with the new order are started, one by one."""
        both, first = make(secret=[self.OLD, self.NEW]), make(secret=[self.NEW, self.OLD])
        declare(both, key)
        first.scheduler.modify_job(key, name="a name")
        both.scheduler.modify_job(key, coalesce=False)
        first.scheduler.modify_job(key, kwargs={"value": 3})
        both.scheduler.modify_job(key, next_run_time=datetime.now(timezone.utc))
        [(_, _, value)] = both.runs(key)
        job = first.scheduler.get_job(key)
        assert (job.name, job.coalesce, value) == ("a name", False, 3)
