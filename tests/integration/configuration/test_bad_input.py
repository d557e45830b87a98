"""Wrong set-ups: each gets one clear error that says what to do, and loses nothing."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.gevent import GeventScheduler
from psycopg import sql

from apscheduler_tasklock import (
    EVENT_TASK_LOCK_ERROR,
    EVENT_TASK_LOCK_REFUSED,
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockExecutor,
    TaskLockOptionError,
    TaskLocks,
    TaskLockSchemaError,
    upgrade,
)
from tests.support.polling import eventually
from tests.support.postgres import Server
from tests.support.roles import PASSWORD, role
from tests.support.schedulers import Replica
from tests.support.waist import LockClient

MakeReplica = Callable[..., Replica]
Connection = psycopg.Connection[Any]


class TestDatabase:
    @pytest.mark.parametrize(
        ("database", "says"),
        [
            ("localhost/app", "not a URL"),
            ("mysql://user:hunter2@host/app", "a mysql URL; the task lock needs PostgreSQL"),
            (42, "must be a URL like postgresql://user@host/name or an SQLAlchemy Engine"),
        ],
    )
    def test_a_wrong_url_is_refused_when_the_executor_is_made(
        self, database: Any, says: str
    ) -> None:
        with pytest.raises(TaskLockOptionError, match=says) as error:
            TaskLockExecutor(database)
        assert "hunter2" not in str(error.value)

    def test_an_unreachable_server_is_one_warning_that_names_it_and_one_for_each_run(
        self, make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            port = nobody.getsockname()[1]
        replica = make_replica(f"postgresql://app:hunter2@127.0.0.1:{port}/db", claim_timeout=0.2)
        replica.run_once(lambda: None)
        error = replica.one(EVENT_TASK_LOCK_ERROR).exception
        assert isinstance(error, TaskLockDatabaseError)
        assert f"database (127.0.0.1:{port}, database 'db') could not be used" in str(error)
        replica.idle()
        outage, run = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert "is unavailable" in outage
        assert "Connection refused" in outage
        assert run.startswith("Task 'job': not run for the run time")

    @pytest.mark.direct("pgbouncer answers logins itself")
    def test_a_server_that_rejects_the_login_is_an_error_at_start(self, database_url: str) -> None:
        with role(database_url, f"NOLOGIN PASSWORD '{PASSWORD}'") as (_, url):
            replica = Replica(url)
            with pytest.raises(
                TaskLockError,
                match=r"the task lock database \(.*\) rejects this: .* is not permitted to log in",
            ) as error:
                replica.scheduler.start()
        assert not isinstance(error.value, TaskLockDatabaseError)

    @pytest.mark.direct("pgbouncer's connections are older than the setting")
    def test_a_read_only_database_is_told_at_start_and_leaves_no_release_pending(
        self,
        make_replica: MakeReplica,
        database_url: str,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        name = sql.Identifier(str(psycopg.conninfo.conninfo_to_dict(database_url)["dbname"]))
        read_only = "ALTER DATABASE {} SET default_transaction_read_only = on"
        connection.execute(sql.SQL(read_only).format(name))
        replica = make_replica(claim_timeout=6)  # for longer than a slow machine stops
        assert "it is read-only: a standby, or default_transaction_read_only" in caplog.text
        replica.run_once(lambda: None)
        assert "read-only" in str(replica.one(EVENT_TASK_LOCK_ERROR).exception)
        replica.scheduler.shutdown()
        assert "was not released" not in caplog.text

    def test_a_database_that_does_not_exist_is_an_error_at_start(self, server: Server) -> None:
        replica = Replica(server.database_url("nowhere"))
        with pytest.raises(TaskLockError, match='database "nowhere" does not exist'):
            replica.scheduler.start()


class TestTable:
    def test_a_missing_one_is_an_error_at_start_that_names_the_command(
        self, empty_database_url: str
    ) -> None:
        replica = Replica(empty_database_url)
        with pytest.raises(
            TaskLockSchemaError,
            match=r"tables task_lock, .* do not exist .* apscheduler-tasklock upgrade$",
        ):
            replica.scheduler.start()

    def test_one_of_another_name_is_named_with_its_options(self, database_url: str) -> None:
        replica = Replica(database_url, schema="jobs", table="locks")
        with pytest.raises(
            TaskLockSchemaError,
            match=r"tables jobs\.locks, .*upgrade --schema jobs --table locks$",
        ):
            replica.scheduler.start()

    def test_one_that_lacks_a_column_is_an_error_at_start(
        self, database_url: str, connection: Connection
    ) -> None:
        connection.execute("ALTER TABLE task_lock DROP COLUMN token")
        replica = Replica(database_url)
        with pytest.raises(
            TaskLockSchemaError,
            match=r"the table task_lock has no column token; bring them up to date with: "
            r"apscheduler-tasklock upgrade$",
        ):
            replica.scheduler.start()

    def test_a_newer_one_is_used(self, make_replica: MakeReplica, connection: Connection) -> None:
        connection.execute("ALTER TABLE task_lock ADD COLUMN of_the_future text")
        replica = make_replica()
        replica.run_once(lambda: None)
        replica.one(EVENT_JOB_EXECUTED)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ("DROP TABLE task_lock", "does not exist"),
            ("ALTER TABLE task_lock DROP COLUMN window_until", "lack a column that this version"),
        ],
    )
    def test_one_that_changes_later_is_an_error_at_each_fire(
        self,
        make_replica: MakeReplica,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
        change: str,
        says: str,
    ) -> None:
        replica = make_replica()
        connection.execute(change)
        replica.run_once(lambda: None)
        error = replica.one(EVENT_TASK_LOCK_ERROR)
        replica.idle()
        assert isinstance(error.exception, TaskLockSchemaError)
        assert says in str(error.exception)
        # The look for dead runs may have met it as well, and says so in a line of its own.
        about_it = [r for r in caplog.records if r.getMessage().startswith("Task 'job'")]
        assert [r.levelname for r in about_it if says in r.getMessage()] == ["ERROR"]


class TestRole:
    def test_select_insert_and_update_on_the_tables_are_enough(
        self, make_replica: MakeReplica, database_url: str, connection: Connection
    ) -> None:
        with role(database_url) as (name, url):
            grant = sql.SQL(
                "GRANT SELECT, INSERT, UPDATE ON task_lock, task_lock_run, task_lock_replica TO {}"
            )
            connection.execute(grant.format(sql.Identifier(name)))
            replica = make_replica(url)
            replica.run_once(lambda: None)  # an unknown task: INSERT
            replica.one(EVENT_JOB_EXECUTED)
            replica.run_once(lambda: None, replace_existing=True)  # its window is taken: SELECT
            replica.one(EVENT_TASK_LOCK_REFUSED)
            connection.execute("UPDATE task_lock SET window_until = 'epoch'")
            replica.events.clear()
            replica.run_once(lambda: None, replace_existing=True)  # a known task: UPDATE
            replica.one(EVENT_JOB_EXECUTED)
            replica.scheduler.shutdown()

    def test_fewer_are_an_error_at_start_that_names_the_grant(
        self, database_url: str, connection: Connection
    ) -> None:
        with role(database_url) as (name, url):
            grant = sql.SQL("GRANT SELECT, INSERT ON task_lock TO {}")
            connection.execute(grant.format(sql.Identifier(name)))
            replica = Replica(url)
            with pytest.raises(
                TaskLockSchemaError,
                match=f'GRANT UPDATE ON task_lock TO "{name}"; GRANT SELECT, INSERT, UPDATE ON ',
            ):
                replica.scheduler.start()

    def test_a_password_is_nowhere_to_be_read(
        self,
        make_replica: MakeReplica,
        database_url: str,
        connection: Connection,
        caplog: pytest.LogCaptureFixture,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        caplog.set_level(logging.DEBUG)
        with role(database_url) as (name, url):
            grant = sql.SQL(
                "GRANT SELECT, INSERT, UPDATE ON task_lock, task_lock_run, task_lock_replica TO {}"
            )
            connection.execute(grant.format(sql.Identifier(name)))
            replica = make_replica(url)
            replica.run_once(lambda: None)
            replica.one(EVENT_JOB_EXECUTED)
            connection.execute("DROP TABLE task_lock")
            replica.run_once(lambda: None, job_id="fails")
            replica.one(EVENT_TASK_LOCK_ERROR, "fails")
            replica.scheduler.shutdown()
        told = [record.getMessage() for record in caplog.records]
        told += [record.exc_text or "" for record in caplog.records]
        told += [repr(event) + repr(vars(event)) for event in replica.events]
        told += [repr(value) for value in vars(replica.executor.user).values()]
        told += [repr(replica.executor), repr(replica.executor.user), str(capfd.readouterr())]
        assert "hunter2" not in "\n".join(told)


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"min_factor": -1}, "min_factor must be a number, 0 or more, not -1"),
            ({"max_factor": float("nan")}, "max_factor must be a number above 0, not nan"),
            ({"max_factor": "five"}, "max_factor must be a number above 0, not 'five'"),
            ({"min_factor": 6}, r"min_factor \(6\) must not be above max_factor \(5\)"),
            ({"claim_timeout": 0}, "claim_timeout must be seconds or a timedelta, above 0"),
            ({"claim_timeout": 86401}, "above 0 and at most a day, not 86401"),
            ({"period": "soon"}, "period must be seconds or a timedelta"),
            ({"on_database_error": "panic"}, "on_database_error must be 'skip' or 'run'"),
            ({"jobs": {"a": {"factor": 1}}}, r"jobs\['a'\]: unknown task lock option 'factor'"),
        ],
    )
    def test_of_the_executor_are_refused_when_it_is_made(
        self, options: dict[str, Any], says: str
    ) -> None:
        with pytest.raises(TaskLockOptionError, match=says):
            TaskLockExecutor("postgresql://localhost/app", **options)

    def test_unknown_ones_of_the_executor_are_an_error_at_start(self, database_url: str) -> None:
        replica = Replica(database_url, min_facter=0.5)
        with pytest.raises(TaskLockOptionError, match="unexpected keyword argument 'min_facter'"):
            replica.scheduler.start()

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"min_factor": -1}, "job 'job': min_factor must be a number, 0 or more, not -1"),
            ({"max_factor": 0.5}, r"job 'job': min_factor \(0.9\) must not be above max_factor"),
            ({"max": 1}, "job 'job': unknown task lock option 'max'; allowed are name, min_f"),
            ({"name": "x" * 1001}, "job 'job': the name has 1001 bytes"),
            ({"name": "a\0b"}, "job 'job': the name .* has a NUL character"),
            ("fast", "job 'job': task_lock must be a dict of options, or False"),
        ],
    )
    def test_of_a_job_are_refused_at_start_if_it_was_added_before(
        self, database_url: str, options: Any, says: str
    ) -> None:
        replica = Replica(database_url)
        replica.scheduler.add_job(
            _takes_anything, "interval", hours=1, id="job", kwargs={"task_lock": options}
        )
        with pytest.raises(TaskLockOptionError, match=says):
            replica.scheduler.start()

    def test_of_a_job_added_later_are_an_error_at_once_and_at_each_fire(
        self, make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
    ) -> None:
        replica = make_replica()
        replica.scheduler.pause()
        replica.run_once(_takes_anything, kwargs={"task_lock": {"max": 1}})
        assert "Job 'job' will not run: job 'job': unknown task lock option 'max'" in caplog.text
        replica.scheduler.resume()
        error = replica.one(EVENT_TASK_LOCK_ERROR)
        assert isinstance(error.exception, TaskLockOptionError)
        assert replica.codes() == [EVENT_TASK_LOCK_ERROR]


def _takes_anything(**_: Any) -> None: ...


@pytest.mark.direct("it counts the library's connections in the server")
def test_an_executor_that_cannot_be_started_leaves_no_connection(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    executor = TaskLockExecutor(database_url, AsyncIOExecutor(), replica_id="failing")
    scheduler = BackgroundScheduler(executors={"default": executor})
    with pytest.raises(AttributeError, match="_eventloop"):
        scheduler.start()
    ours = "SELECT FROM pg_stat_activity WHERE application_name = 'tasklock failing'"
    eventually(lambda: connection.execute(ours).rowcount == 0)


@pytest.mark.parametrize("inner", [None, "threadpool", "debug"])
def test_gevent_without_its_patches_is_refused_at_start(
    database_url: str, inner: str | None
) -> None:
    """Another thread could neither submit to its executor nor ask its scheduler for a job."""
    executor = TaskLockExecutor(database_url, inner)
    with pytest.raises(TaskLockOptionError, match=r"call gevent.monkey.patch_all\(\) before"):
        GeventScheduler(executors={"default": executor}).start()


@pytest.mark.parametrize("replica_id", [5, "a\0b", "x" * 1001])
def test_a_replica_id_that_is_no_name_is_refused(database_url: str, replica_id: Any) -> None:
    with pytest.raises(TaskLockOptionError, match="replica_id: the name"):
        TaskLocks(database_url, replica_id=replica_id)


@pytest.mark.parametrize("table", ["", "x" * 48, "é" * 24, "a\0b", "task_lock\n", "a\x1b[2J"])
def test_a_table_that_postgresql_cannot_have_is_not_migrated(database_url: str, table: str) -> None:
    with pytest.raises(TaskLockOptionError, match="table must"):
        upgrade(database_url, table=table)


def test_no_password_is_in_what_is_shown_of_the_locks(
    make_locks: Callable[..., LockClient],
) -> None:
    locks = make_locks(f"postgresql://app:{PASSWORD}@db/app?sslpassword={PASSWORD}")
    shown = [locks, locks.settings, locks.settings.for_process(), locks.where]
    assert PASSWORD not in repr(shown)


class TestWhatTheLockLimits:
    """Told when the job is added, or once the scheduler has started."""

    @pytest.fixture
    def told_of(
        self, make_replica: MakeReplica, caplog: pytest.LogCaptureFixture
    ) -> Callable[..., list[str]]:
        """Return what a replica with one job says, but for the line of its start."""
        caplog.set_level(logging.INFO, "apscheduler_tasklock")

        def start(job: dict[str, Any], **options: Any) -> list[str]:
            replica = make_replica(start=False, **options)
            replica.scheduler.add_job(_nothing, "interval", id="job", **{"hours": 1, **job})
            replica.scheduler.start()
            replica.shutdown()
            ours = (r for r in caplog.records if r.name.startswith("apscheduler_tasklock"))
            lines = [f"{r.levelname} {r.getMessage()}" for r in ours]
            return [line for line in lines if not line.startswith("INFO Task locks are on")]

        return start

    def test_more_than_one_instance(self, told_of: Callable[..., list[str]]) -> None:
        [line] = told_of({"max_instances": 3})
        assert line.startswith("INFO Job 'job': its max_instances=3 has less effect")

    def test_a_lease_above_the_maximum_lock(self, told_of: Callable[..., list[str]]) -> None:
        [line] = told_of({"hours": 0, "seconds": 4}, lease=30, max_factor=2)
        assert line.startswith(
            "WARNING Job 'job': its lease of 30 s is above its maximum lock of 8 s"
        )

    def test_a_short_lease(self, told_of: Callable[..., list[str]]) -> None:
        [line] = told_of({}, lease=4.9)
        assert line.startswith("WARNING Job 'job': its lease of 4.9 s is below 5 s")

    def test_the_shortest_lease_that_is_not_told(self, told_of: Callable[..., list[str]]) -> None:
        assert told_of({}, lease=5) == []

    def test_options_of_a_job_that_is_not_there(self, told_of: Callable[..., list[str]]) -> None:
        options = {"typo": {"min_factor": 0.5}, "job": {"max_factor": 3}}
        [line] = told_of({}, jobs=options)
        assert line.endswith("for jobs that it does not have so far: 'typo'")

    @pytest.mark.parametrize("lease", [None, 30])
    def test_what_has_one_is_not_told(
        self, told_of: Callable[..., list[str]], lease: float | None
    ) -> None:
        assert told_of({"max_instances": 1}, lease=lease, jobs={"job": {}}) == []


def _nothing() -> None: ...


def test_run_times_and_a_grace_time_of_thousands_of_years_are_no_more_than_the_tables_take(
    make_replica: MakeReplica, connection: Connection
) -> None:
    replica = make_replica()
    far = {"weeks": 300_000, "misfire_grace_time": 10**12}
    replica.scheduler.add_job(_nothing, "interval", id="later", **far)
    replica.scheduler.add_job(_nothing, "interval", id="now", next_run_time=datetime.now(), **far)
    replica.one(EVENT_JOB_EXECUTED, "now")
    due = "SELECT count(*) FROM task_lock WHERE overdue_at > now() + interval '190 years'"
    eventually(lambda: connection.execute(due).fetchone() == (2,))


@pytest.mark.parametrize("kept", [0, 3599, timedelta(minutes=59), "a week", -1, float("nan")])
def test_rows_of_one_off_jobs_are_kept_for_an_hour_or_more(database_url: str, kept: Any) -> None:
    with pytest.raises(TaskLockOptionError, match="TaskLockExecutor: keep_one_offs must be"):
        TaskLockExecutor(database_url, keep_one_offs=kept)


@pytest.mark.parametrize("release", ["x" * 101, "1.4\n", "gr\xfcn", 14])
def test_a_release_that_is_no_short_text_in_ascii_is_refused(
    database_url: str, release: Any
) -> None:
    with pytest.raises(TaskLockOptionError, match="release must be at most 100 printable ASCII"):
        TaskLocks(database_url, release=release)


def test_an_invalid_release_of_the_environment_is_named(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKLOCK_RELEASE", "x" * 101)
    with pytest.raises(TaskLockOptionError, match=r"^TASKLOCK_RELEASE must be"):
        TaskLocks(database_url)
