"""What the database rejects: at the start, and of replicas that run, for as long as it does."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from psycopg import sql

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_RELEASED,
    TaskLockJobStore,
    TaskLocks,
    TaskLockSchemaError,
)
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock.status import TaskState
from tests.support.commands import Command
from tests.support.polling import eventually
from tests.support.roles import role
from tests.support.schedulers import Replica

Connection = psycopg.Connection[Any]
MakeReplica = Callable[..., Replica]

pytestmark = pytest.mark.direct("the pooler keeps connections for a role, and has no login for it")

RIGHTS = ("SELECT", "INSERT", "UPDATE")
TABLES = ("task_lock", "task_lock_run", "task_lock_replica")

# So that nothing of a test waits for seconds.
QUICK = Timings(report_interval=0.2, rejected_interval=0.2)
OFTEN: dict[str, Any] = {"poll_interval": 0.2, "min_factor": 0, "timings": QUICK}


@dataclass
class Application:
    """The role of an application, and what its owner does to it."""

    connection: Connection
    name: str
    url: str
    given: list[str] = field(default_factory=list)

    def run(self, statement: str) -> None:
        self.connection.execute(sql.SQL(statement).format(sql.Identifier(self.name)))

    def grant(self, rights: str, *tables: str) -> None:
        self.run(f"GRANT {rights} ON {', '.join(tables or TABLES)} TO {{}}")

    def revoke(self, rights: str, *tables: str) -> None:
        self.run(f"REVOKE {rights} ON {', '.join(tables or TABLES)} FROM {{}}")


@pytest.fixture
def application(database_url: str, connection: Connection) -> Iterator[Application]:
    with role(database_url) as (name, url):
        yield Application(connection, name, url)


@pytest.fixture
def operator(database_url: str) -> Iterator[TaskLocks]:
    locks = TaskLocks(database_url)
    yield locks
    locks.close()


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "apscheduler_tasklock")


def told(caplog: pytest.LogCaptureFixture, level: str, part: str) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelname == level and part in record.getMessage()
    ]


def alive(operator: TaskLocks) -> set[str]:
    return {replica.replica_id for replica in operator.replicas() if replica.alive}


def rejected(operator: TaskLocks) -> dict[str, tuple[str, ...]]:
    return {replica.replica_id: replica.rejected for replica in operator.replicas()}


def seen_since(operator: TaskLocks, replicas: int) -> Callable[[], bool]:
    """Return whether each of so many replicas has given a sign of life after this."""
    before = {each.replica_id: each.seen_at for each in operator.replicas()}
    assert len(before) == replicas
    return lambda: all(each.seen_at > before[each.replica_id] for each in operator.replicas())


class TestAtTheStart:
    def test_each_missing_right_keeps_the_scheduler_from_starting(
        self, application: Application
    ) -> None:
        for table, right in product(TABLES, RIGHTS):
            application.grant(", ".join(RIGHTS))
            application.revoke(right, table)
            replica = Replica(application.url)
            with pytest.raises(TaskLockSchemaError) as raised:
                replica.scheduler.start()
            assert str(raised.value) == (
                f'role "{application.name}" may not use the table {table}; let its owner run: '
                f'GRANT {right} ON {table} TO "{application.name}"'
            )

    def test_one_error_has_all_statements_and_after_them_it_starts(
        self, application: Application, make_replica: MakeReplica, connection: Connection
    ) -> None:
        application.grant("SELECT, UPDATE", "task_lock")
        application.grant("INSERT", "task_lock_run")
        with pytest.raises(TaskLockSchemaError) as raised:
            Replica(application.url).scheduler.start()
        remedy = str(raised.value).partition("let their owner run: ")[2]
        assert remedy.split("; ") == [
            f'GRANT INSERT ON task_lock TO "{application.name}"',
            f'GRANT SELECT, UPDATE ON task_lock_run TO "{application.name}"',
            f'GRANT SELECT, INSERT, UPDATE ON task_lock_replica TO "{application.name}"',
        ]
        connection.execute(remedy)
        make_replica(application.url).shutdown()

    @pytest.mark.parametrize(
        "name",
        [
            "a; DROP TABLE task_lock; --",
            'my "app"; let a superuser run: x',
            "it's {role} 100% %(name)s \\",
            "system_user",
            "line\nbreak\x1b[2J\\+00000A",
            "é" * 31,
        ],
    )
    def test_the_printed_statements_grant_to_a_role_of_any_name(
        self, connection: Connection, database_url: str, command: Command, name: str
    ) -> None:
        with role(database_url, name=name) as (_, url):
            answer = command("status", database=url)
            assert answer.status == 1
            assert answer.err.count("\n") == 1
            connection.execute(answer.err.rpartition("owner run: ")[2])
            assert command("status", database=url).status == 0
            rights = connection.execute(
                "SELECT DISTINCT grantee::text FROM information_schema.role_table_grants"
                " WHERE table_name = 'task_lock' AND grantee <> current_user"
            ).fetchall()
            assert rights == [(name,)]

    def test_that_of_a_schema_is_named_with_those_of_its_tables(
        self, application: Application, make_replica: MakeReplica, connection: Connection
    ) -> None:
        connection.execute("CREATE SCHEMA jobs")
        for table in TABLES:
            connection.execute(f"ALTER TABLE {table} SET SCHEMA jobs")
        with pytest.raises(TaskLockSchemaError) as raised:
            Replica(application.url, schema="jobs").scheduler.start()
        remedy = str(raised.value).partition("let their owner run: ")[2]
        assert remedy.startswith(f'GRANT USAGE ON SCHEMA jobs TO "{application.name}"; GRANT ')
        connection.execute(remedy)
        make_replica(application.url, schema="jobs").shutdown()

    def test_those_of_stored_jobs_are_named_with_the_others(self, application: Application) -> None:
        application.grant("SELECT, INSERT, UPDATE", "task_lock", "task_lock_run", "task_lock_job")
        replica = Replica(application.url)
        replica.scheduler.add_jobstore(TaskLockJobStore(application.url, functions=["tests.*"]))
        with pytest.raises(TaskLockSchemaError) as raised:
            replica.scheduler.start()
        assert str(raised.value).partition("let their owner run: ")[2].split("; ") == [
            f'GRANT SELECT, INSERT, UPDATE ON task_lock_replica TO "{application.name}"',
            f'GRANT DELETE ON task_lock_job TO "{application.name}"',
        ]

    def test_missing_side_tables_are_named_with_the_command(self, connection: Connection) -> None:
        connection.execute("DROP TABLE task_lock_run, task_lock_replica")
        with pytest.raises(TaskLockSchemaError) as raised:
            Replica(connection.info.dsn and _url(connection)).scheduler.start()
        assert str(raised.value) == (
            "the tables task_lock_run, task_lock_replica do not exist in this database; create "
            "them with: apscheduler-tasklock upgrade"
        )

    def test_missing_rights_and_missing_tables_are_in_one_error(
        self, application: Application, connection: Connection
    ) -> None:
        application.grant("SELECT, INSERT", "task_lock")
        connection.execute("DROP TABLE task_lock_replica")
        with pytest.raises(TaskLockSchemaError) as raised:
            Replica(application.url).scheduler.start()
        for part in (
            "the table task_lock_replica does not exist",
            "apscheduler-tasklock upgrade; also: ",
            f'GRANT UPDATE ON task_lock TO "{application.name}"',
            f'GRANT SELECT, INSERT, UPDATE ON task_lock_run TO "{application.name}"',
        ):
            assert part in str(raised.value)

    def test_who_keeps_no_history_needs_no_right_on_it(
        self, application: Application, make_replica: MakeReplica
    ) -> None:
        application.grant("SELECT, INSERT, UPDATE", "task_lock", "task_lock_replica")
        make_replica(application.url, history=0).shutdown()


def _url(connection: Connection) -> str:
    info = connection.info
    return f"postgresql://{info.user}@{info.host}:{info.port}/{info.dbname}"


class TestWhileReplicasRun:
    @pytest.fixture
    def replicas(
        self, application: Application, make_replica: MakeReplica
    ) -> Iterator[list[Replica]]:
        application.grant("SELECT, INSERT, UPDATE")
        made = [
            make_replica(application.url, replica_id=name, **OFTEN) for name in ("web-1", "web-2")
        ]
        for replica in made:
            replica.scheduler.add_job(nothing, "interval", seconds=0.3, id="job")
        yield made
        for replica in made:
            replica.shutdown()

    def test_update_on_the_task_lock_is_revoked_and_all_are_alive_throughout(
        self,
        application: Application,
        replicas: list[Replica],
        operator: TaskLocks,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        eventually(lambda: alive(operator) == {"web-1", "web-2"} and operator.runs("job"))
        application.revoke("UPDATE", "task_lock")
        eventually(
            lambda: all("claims: " in " ".join(each) for each in rejected(operator).values())
        )
        eventually(seen_since(operator, 2))
        remedy = f'GRANT UPDATE ON task_lock TO "{application.name}"'
        for replica in replicas:
            assert any(remedy in each for each in replica.executor.health().degraded)
        ran = len(operator.runs("job"))
        connection.execute(remedy)
        eventually(lambda: all(each == () for each in rejected(operator).values()))
        eventually(lambda: len(operator.runs("job")) > ran + 1)
        assert alive(operator) == {"web-1", "web-2"}
        eventually(lambda: all(each.executor.health().degraded == () for each in replicas))
        began = told(caplog, "WARNING", "Rejected by the database")
        assert [remedy in line for line in began] == [True, True]  # one each
        assert len(told(caplog, "INFO", "No longer rejected by the database")) == 2
        replicas[0].scheduler.remove_job("job")
        replicas[1].scheduler.pause_job("job")
        operator.request_run("job")  # which is refused where no replica is alive

    @pytest.mark.parametrize("right", RIGHTS)
    def test_a_right_on_the_history_is_revoked(
        self,
        application: Application,
        replicas: list[Replica],
        operator: TaskLocks,
        command: Command,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
        right: str,
    ) -> None:
        eventually(lambda: operator.runs("job"))
        application.revoke(right, "task_lock_run")
        remedy = f'GRANT {right} ON task_lock_run TO "{application.name}"'
        says = f'history: role "{application.name}" may not use the table task_lock_run; '
        entry = f"{says}let its owner run: {remedy}"
        both = {"web-1": (entry,), "web-2": (entry,)}
        eventually(lambda: rejected(operator) == both)
        ran = len(executed(replicas))
        eventually(lambda: len(executed(replicas)) > ran + 2)  # the lock does not depend on it
        assert "history rejected on web-1: " in command("replicas").out
        found = [
            each
            for each in command("doctor", "--json").json["findings"]
            if each["what"] == "rejected"
        ]
        assert [each["level"] for each in found] == ["wrong"]
        begins = "history rejected on web-1, web-2, which say: "
        assert found[0]["says"].startswith(begins)
        assert json.loads(found[0]["says"].removeprefix(begins)).endswith(remedy)
        connection.execute(remedy)
        eventually(lambda: set(rejected(operator).values()) == {()})
        before = operator.runs("job")[0].started_at
        eventually(lambda: operator.runs("job")[0].started_at > before)
        assert len(told(caplog, "WARNING", remedy)) == 2
        assert len(told(caplog, "WARNING", "Rejected by")) == 2
        assert len(told(caplog, "INFO", "No longer rejected by the database")) == 2

    @pytest.mark.parametrize("right", RIGHTS)
    def test_a_right_on_the_replicas_is_revoked(
        self,
        application: Application,
        replicas: list[Replica],
        operator: TaskLocks,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
        right: str,
    ) -> None:
        eventually(lambda: alive(operator) == {"web-1", "web-2"})
        application.revoke(right, "task_lock_replica")
        remedy = f'GRANT {right} ON task_lock_replica TO "{application.name}"'
        eventually(lambda: len(told(caplog, "WARNING", remedy)) == 2)
        ran = len(executed(replicas))
        eventually(lambda: len(executed(replicas)) > ran + 2)
        connection.execute(remedy)
        eventually(seen_since(operator, 2))
        eventually(lambda: len(told(caplog, "INFO", "No longer rejected by the database")) == 2)
        assert len(told(caplog, "WARNING", "Rejected by")) == 2
        eventually(lambda: set(rejected(operator).values()) == {()})

    @pytest.mark.parametrize("table", ["task_lock_run", "task_lock_replica"])
    def test_a_side_table_is_dropped_and_made_anew_by_another_owner(
        self,
        application: Application,
        replicas: list[Replica],
        operator: TaskLocks,
        connection: Connection,
        database_url: str,
        caplog: pytest.LogCaptureFixture,
        table: str,
    ) -> None:
        eventually(lambda: operator.runs("job") and alive(operator) == {"web-1", "web-2"})
        definition = f"CREATE TABLE {table} (LIKE kept INCLUDING ALL)"
        connection.execute(f"CREATE TABLE kept (LIKE {table} INCLUDING ALL)")
        connection.execute(f"DROP TABLE {table}")
        eventually(lambda: len(told(caplog, "WARNING", f"the table {table} does not exist")) >= 2)
        ran = len(executed(replicas))
        eventually(lambda: len(executed(replicas)) > ran + 2)
        with role(database_url) as (owner, _):
            connection.execute(definition)
            connection.execute(f'ALTER TABLE {table} OWNER TO "{owner}"')
            remedy = f'GRANT SELECT, INSERT, UPDATE ON {table} TO "{application.name}"'
            eventually(lambda: len(told(caplog, "WARNING", remedy)) >= 2)
            connection.execute(remedy)
            eventually(lambda: len(told(caplog, "INFO", "No longer rejected")) >= 2)
            eventually(lambda: alive(operator) == {"web-1", "web-2"})
            eventually(lambda: set(rejected(operator).values()) == {()})
            eventually(lambda: operator.runs("job"))
            for replica in replicas:
                replica.shutdown()
            connection.execute(f'REASSIGN OWNED BY "{owner}" TO CURRENT_USER')

    @pytest.mark.nightly
    def test_select_on_the_task_lock_is_revoked_and_the_replicas_say_that_they_live(
        self,
        application: Application,
        replicas: list[Replica],
        operator: TaskLocks,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        eventually(lambda: operator.runs("job"))
        application.revoke("SELECT", "task_lock")
        eventually(lambda: all(rejected(operator).values()))
        eventually(seen_since(operator, 2))
        application.grant("SELECT", "task_lock")
        ran = len(executed(replicas))
        eventually(lambda: len(executed(replicas)) > ran + 2)
        eventually(lambda: set(rejected(operator).values()) == {()})
        assert len(told(caplog, "WARNING", "Rejected by")) == 2
        assert not [record for record in caplog.records if record.exc_info]


class TestHistory:
    @pytest.mark.parametrize(
        ("says", "kept"),
        [
            ("a NUL\0 in it", "a NUL\ufffd in it"),
            ("a lone \ud800 surrogate", "a lone ? surrogate"),
            ("long " * 100_000, ("long " * 100)[:500]),
        ],
        ids=["NUL", "surrogate", "long"],
    )
    def test_what_an_exception_says_is_made_fit_and_the_run_released(
        self,
        make_replica: MakeReplica,
        operator: TaskLocks,
        monkeypatch: pytest.MonkeyPatch,
        says: str,
        kept: str,
    ) -> None:
        # APScheduler logs the exception, which pytest's workers cannot send to their parent.
        monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)

        def fail() -> None:
            raise type("Odd", (Exception,), {"__module__": "odd\udfff\0"})(says)

        replica = make_replica()
        replica.run_once(fail)
        replica.one(EVENT_TASK_LOCK_RELEASED)
        [run] = operator.runs("job")
        assert (run.outcome, run.error) == ("error", kept)
        assert run.error_type == "odd?\ufffd.Odd"
        assert replica.executor.health().degraded == ()

    @pytest.mark.parametrize("harm", ["revoke", "drop", "policy", "trigger", "column"])
    def test_a_release_whose_entry_is_rejected_releases_at_once(
        self,
        application: Application,
        make_replica: MakeReplica,
        operator: TaskLocks,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
        harm: str,
    ) -> None:
        """Nothing is tried again meanwhile, and none is sent in the background."""
        application.grant("SELECT, INSERT, UPDATE")
        never = Timings(rejected_interval=3600.0, release_interval=3600.0)
        replica = make_replica(application.url, timings=never, min_factor=0)

        def harm_it() -> None:
            if harm == "revoke":
                application.revoke("INSERT", "task_lock_run")
            else:
                connection.execute(HARM[harm])

        replica.run_once(harm_it)
        replica.one(EVENT_TASK_LOCK_RELEASED)
        [task] = operator.tasks("job")
        assert task.state is TaskState.OK
        assert not told(caplog, "ERROR", "")
        assert len(told(caplog, "WARNING", "tried again: history: ")) == 1
        replica.shutdown()

    @pytest.mark.parametrize("harm", ["policy", "trigger", "column"])
    def test_what_no_missing_right_explains_is_over_with_the_next_entry(
        self,
        application: Application,
        make_replica: MakeReplica,
        operator: TaskLocks,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
        harm: str,
    ) -> None:
        """It is tried again with each look."""
        application.grant("SELECT, INSERT, UPDATE")
        looks = Timings(report_interval=0.2, rejected_interval=3600.0)
        replica = make_replica(application.url, **{**OFTEN, "timings": looks})
        replica.scheduler.add_job(nothing, "interval", seconds=0.3, id="job")
        eventually(lambda: operator.runs("job"))
        connection.execute(HARM[harm])
        connection.execute("TRUNCATE task_lock_run")  # else an entry may be overwritten
        eventually(lambda: any("history: " in each for each in replica.executor.health().degraded))
        ended = replica.codes().count(EVENT_TASK_LOCK_RELEASED)
        eventually(lambda: replica.codes().count(EVENT_TASK_LOCK_RELEASED) >= ended + 3)
        connection.execute(MENDED[harm])
        eventually(lambda: operator.runs("job"))
        eventually(lambda: replica.executor.health().degraded == ())
        assert len(told(caplog, "WARNING", "tried again: history: ")) == 1
        assert len(told(caplog, "INFO", "No longer rejected by the database")) == 1
        replica.shutdown()

    @pytest.mark.nightly
    def test_a_hold_writes_it_again(
        self,
        application: Application,
        make_task_locks: Callable[..., TaskLocks],
        operator: TaskLocks,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Without a replica that looks, it is tried again after some seconds."""
        application.grant("SELECT, INSERT, UPDATE")
        application.revoke("INSERT", "task_lock_run")
        locks = make_task_locks(application.url)

        def hold() -> list[Any]:
            with locks.hold("held", min_lock=0, max_lock=60):
                pass
            return operator.runs("held")

        assert hold() == []
        application.grant("INSERT", "task_lock_run")
        eventually(hold)
        assert len(told(caplog, "WARNING", "tried again: history: ")) == 1
        assert len(told(caplog, "INFO", "No longer rejected by the database")) == 1
        locks.close()

    @pytest.mark.nightly
    def test_worker_processes_write_it_again(
        self, application: Application, make_replica: MakeReplica, operator: TaskLocks
    ) -> None:
        application.grant("SELECT, INSERT, UPDATE")
        replica = make_replica(application.url, executor="processpool", max_workers=1, **OFTEN)
        replica.scheduler.add_job(nothing, "interval", seconds=0.3, id="job")
        eventually(lambda: operator.runs("job"))
        application.revoke("UPDATE", "task_lock_run")
        eventually(lambda: any("history: " in each for each in replica.executor.health().degraded))
        ran = len(executed([replica]))
        eventually(lambda: len(executed([replica])) > ran + 2)
        application.grant("UPDATE", "task_lock_run")
        before = operator.runs("job")[0].started_at
        eventually(lambda: operator.runs("job")[0].started_at > before)
        eventually(lambda: replica.executor.health().degraded == ())
        replica.shutdown()


HARM = {
    "drop": "DROP TABLE task_lock_run",
    "policy": """
        ALTER TABLE task_lock_run ENABLE ROW LEVEL SECURITY;
        CREATE POLICY none ON task_lock_run USING (true) WITH CHECK (false)""",
    "trigger": """
        CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN RAISE EXCEPTION 'not here'; END $$;
        CREATE TRIGGER no BEFORE INSERT ON task_lock_run FOR EACH ROW EXECUTE FUNCTION no()""",
    "column": "ALTER TABLE task_lock_run ADD more text, ADD CHECK (more IS NOT NULL) NOT VALID",
}


MENDED = {
    "policy": "ALTER TABLE task_lock_run DISABLE ROW LEVEL SECURITY",
    "trigger": "DROP TRIGGER no ON task_lock_run",
    "column": "ALTER TABLE task_lock_run DROP COLUMN more",
}


class QuickStore(TaskLockJobStore):
    """A job store that soon looks again at what the database has rejected."""

    timings = QUICK


def begun(
    application: Application, make_replica: MakeReplica, kind: type[TaskLockJobStore]
) -> Replica:
    """Return a replica with all rights and a stored job that is due each second."""
    application.grant("SELECT, INSERT, UPDATE", *TABLES, "task_lock_job")
    application.grant("DELETE", "task_lock_job")
    replica = make_replica(application.url, start=False, **OFTEN)
    replica.scheduler.add_jobstore(kind(application.url, functions=["tests."], poll_interval=0.2))
    replica.scheduler.add_job(nothing, "interval", seconds=1, id="job")
    replica.start()
    return replica


class TestStoredJobs:
    @pytest.mark.nightly
    @pytest.mark.parametrize("right", [*RIGHTS, "DELETE"])
    def test_a_right_on_the_jobs_is_revoked(
        self,
        application: Application,
        make_replica: MakeReplica,
        operator: TaskLocks,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
        right: str,
    ) -> None:
        replica = begun(application, make_replica, TaskLockJobStore)
        eventually(lambda: operator.runs("job"))
        application.revoke(right, "task_lock_job")
        if right != "INSERT":  # which only users' calls need
            eventually(lambda: " ".join(replica.executor.health().degraded))
            eventually(lambda: any(rejected(operator).values()))
        if right == "SELECT":  # the executor lists the jobs, too, and lets the store warn
            eventually(lambda: [t for t in told(caplog, "INFO", "Rejected by") if "store" in t])
        if right in ("INSERT", "DELETE"):  # no reason to run no jobs
            ran = len(executed([replica]))
            eventually(lambda: len(executed([replica])) > ran + 1)
        application.grant(right, "task_lock_job")
        ran = len(executed([replica]))
        eventually(lambda: len(executed([replica])) > ran + 1)
        eventually(lambda: replica.executor.health().degraded == ())
        eventually(lambda: set(rejected(operator).values()) == {()})
        assert len(told(caplog, "WARNING", "Rejected by")) == (right != "INSERT")
        replica.shutdown()

    def test_a_right_is_back_while_other_replicas_run_all_that_is_due(
        self,
        application: Application,
        make_replica: MakeReplica,
        connection: Connection,
    ) -> None:
        replica = begun(application, make_replica, QuickStore)
        application.revoke("UPDATE", "task_lock_job")
        eventually(lambda: any("job store" in each for each in replica.executor.health().degraded))
        # From now on nothing is due here, and what was read before has been claimed in vain.
        connection.execute("UPDATE task_lock_job SET next_run_time = now() + interval '1 h'")
        for _ in range(3):
            until_due_jobs_are_read(connection)
        assert replica.executor.health().degraded
        application.grant("UPDATE", "task_lock_job")
        eventually(lambda: replica.executor.health().degraded == ())
        replica.shutdown()


def until_due_jobs_are_read(connection: Connection) -> None:
    """Wait until a replica begins one more look for due jobs."""
    found = connection.execute("SELECT clock_timestamp()").fetchone()
    looking = (
        "SELECT 1 FROM pg_stat_activity WHERE application_name LIKE 'tasklock %%' "
        "AND query LIKE '%%task_lock_job%%' AND query_start > %s"
    )
    eventually(lambda: connection.execute(looking, found).fetchall())


def nothing() -> None:
    """Do nothing."""


def executed(replicas: list[Replica]) -> list[Any]:
    return [e for each in replicas for e in each.of("job") if e.code == EVENT_JOB_EXECUTED]
