"""The Flask extension in this process: configuration, jobs, contexts, starts and stops."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from flask import Flask, current_app, g
from flask_apscheduler import APScheduler
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from apscheduler_tasklock import (
    TaskLockExecutor,
    TaskLockOptionError,
    TaskLocks,
    TaskLockSchemaError,
    current_lock,
    task_lock,
    upgrade,
)
from apscheduler_tasklock.flask import TaskLockScheduler
from apscheduler_tasklock.flask.extension import AppScheduler
from tests.frameworks.servers import windows
from tests.support.internals import executors_of, finish_pass, pool_size
from tests.support.polling import eventually

MakeApp = Callable[..., Flask]


@pytest.fixture
def make_app(database_url: str) -> Iterator[MakeApp]:
    """Make an application with the test's database; its scheduler is shut down at the end."""
    made: list[Flask] = []

    def make(name: str = "shop", **config: Any) -> Flask:
        app = Flask(name)
        app.config.update({"TASKLOCK_DATABASE_URL": database_url, **config})
        made.append(app)
        return app

    yield make
    for app in made:
        if "tasklock" in app.extensions:
            shut_down(app.extensions["tasklock"])


def shut_down(scheduler: AppScheduler) -> None:
    """Shut a scheduler down, whose one-off jobs may have run a moment ago."""
    finish_pass(scheduler.apscheduler)
    scheduler.shutdown()


def run_all(app: Flask, *others: Flask) -> None:
    """Start the schedulers of applications, and wait until each job has run."""
    schedulers = [each.extensions["tasklock"] for each in (app, *others)]
    ended: queue.Queue[Any] = queue.Queue()
    for scheduler in schedulers:
        scheduler.apscheduler.add_listener(ended.put, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
    jobs = sum(len(scheduler.apscheduler.get_jobs()) for scheduler in schedulers)
    for scheduler in schedulers:
        scheduler.start()
    for _ in range(jobs):
        ended.get(timeout=60)
    for scheduler in schedulers:
        shut_down(scheduler)


def test_a_job_runs_in_a_context_of_the_application_under_its_lock(make_app: MakeApp) -> None:
    app, seen = make_app(), []
    scheduler = TaskLockScheduler(app)

    @app.teardown_appcontext
    def tear_down(error: BaseException | None) -> None:
        seen.append(("torn down", g.pop("price"), error, current_lock() is not None))

    @scheduler.task("date", misfire_grace_time=None)
    def sync_prices() -> None:
        g.price = 3
        seen.append((current_app.name, current_lock() is not None))

    run_all(app)
    assert seen == [("shop", True), ("torn down", 3, None, True)]


def test_one_offs_that_requests_add_without_an_id_all_run_in_a_context(make_app: MakeApp) -> None:
    app = make_app()
    scheduler = TaskLockScheduler(app)
    sent: queue.Queue[Any] = queue.Queue()

    def mail(user: object) -> None:
        sent.put((current_app.name, user, current_lock()))

    app.extensions["tasklock"].start()
    users = [object() for _ in range(3)]
    for user in users:
        with app.test_request_context():
            scheduler.apscheduler.add_job(mail, args=[user], misfire_grace_time=None)
    found = [sent.get(timeout=60) for _ in users]
    assert sorted(map(str, found)) == sorted(str(("shop", user, None)) for user in users)


def test_the_teardown_gets_the_exception_of_a_job_that_fails(
    make_app: MakeApp, connection: psycopg.Connection[Any]
) -> None:
    app, seen = make_app(), []
    scheduler = TaskLockScheduler(app)
    app.teardown_appcontext(seen.append)
    failure = ValueError("no prices")

    @scheduler.task("date", misfire_grace_time=None)
    def sync_prices() -> None:
        raise failure

    run_all(app)
    assert seen == [failure]
    assert connection.execute("SELECT outcome FROM task_lock_run").fetchall() == [("error",)]


def test_the_decorator_returns_the_function_and_takes_options_of_the_lock(
    make_app: MakeApp, connection: psycopg.Connection[Any]
) -> None:
    scheduler = TaskLockScheduler()

    @scheduler.task("date", id="sync", args=[2], misfire_grace_time=None)
    @task_lock(name="prices")
    def double(number: int) -> int:
        return 2 * number

    assert double(3) == 6
    app = make_app()
    scheduler.init_app(app)
    run_all(app)
    assert len(windows(connection, "prices")) == 1


def test_jobs_are_added_before_and_after_the_application(make_app: MakeApp) -> None:
    scheduler, seen = TaskLockScheduler(), []
    scheduler.add_job(lambda: seen.append("before"), id="before", misfire_grace_time=None)
    app = make_app()
    scheduler.init_app(app)
    scheduler.add_job(lambda: seen.append("after"), id="after", misfire_grace_time=None)
    scheduler.start()
    scheduler.add_job(lambda: seen.append("at run time"), id="late", misfire_grace_time=None)
    eventually(lambda: len(seen) == 3)
    shut_down(app.extensions["tasklock"])
    assert sorted(seen) == ["after", "at run time", "before"]


def test_several_applications_each_run_the_jobs_of_one_extension(make_app: MakeApp) -> None:
    scheduler, seen = TaskLockScheduler(), []
    scheduler.add_job(lambda: seen.append(current_app.name), id="name", misfire_grace_time=None)
    shop = make_app("shop", TASKLOCK_NAMESPACE="shop:")
    bank = make_app("bank", TASKLOCK_NAMESPACE="bank:")
    scheduler.init_app(shop)
    scheduler.init_app(bank)
    run_all(shop, bank)
    assert sorted(seen) == ["bank", "shop"]
    with pytest.raises(TaskLockOptionError, match="which application"):
        scheduler.start()
    with bank.app_context():
        assert scheduler.apscheduler is bank.extensions["tasklock"].apscheduler


def test_several_extensions_are_several_schedulers(make_app: MakeApp) -> None:
    shop, bank = make_app("shop"), make_app("bank")
    one, other = TaskLockScheduler(shop), TaskLockScheduler(bank)
    one.add_job(print, "interval", hours=1, id="print")
    other.start()
    assert [job.id for job in other.apscheduler.get_jobs()] == []
    assert not one.apscheduler.running


def test_a_scheduler_that_was_shut_down_starts_again_with_its_jobs(make_app: MakeApp) -> None:
    scheduler = TaskLockScheduler(make_app())
    scheduler.add_job(print, "interval", hours=1, id="print")
    for _ in range(2):
        scheduler.start()
        scheduler.start()  # which does nothing
        assert scheduler.apscheduler.running
        assert scheduler.apscheduler.get_job("print") is not None
        scheduler.shutdown()
        scheduler.shutdown()
        assert not scheduler.apscheduler.running


@pytest.mark.parametrize("kind", ["url", "text", "engine", "of Flask-SQLAlchemy"])
def test_the_database_is_in_the_configuration(
    kind: str, database_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    app, url = Flask("shop"), make_url(database_url).set(drivername="postgresql+psycopg")
    database = {"url": url, "engine": create_engine(url)}.get(kind, database_url)
    key = "SQLALCHEMY_DATABASE_URI" if "of" in kind else "TASKLOCK_DATABASE_URL"
    app.config[key] = database
    scheduler = TaskLockScheduler(app)
    scheduler.start()
    scheduler.shutdown()
    runner = app.test_cli_runner()
    assert runner.invoke(args=["tasklock", "replicas", "--json"]).exit_code == 0
    assert runner.invoke(args=["tasklock", "replicas", "--color"]).exit_code == 2
    if kind == "engine":
        database.dispose()  # type: ignore[union-attr]  # only here


def test_options_of_the_executor_and_of_the_scheduler_are_in_the_configuration(
    make_app: MakeApp,
) -> None:
    options = {
        "TASKLOCK_FAILOVER": True,
        "TASKLOCK_LOCK": "marked",
        "TASKLOCK_REPLICA_ID": "me",
        "TASKLOCK_MAX_WORKERS": 3,
        "TASKLOCK_SCHEDULER": {"timezone": "Europe/Berlin", "job_defaults": {"coalesce": False}},
    }
    scheduler = TaskLockScheduler(make_app(**options))
    scheduler.start()
    apscheduler = scheduler.apscheduler
    assert str(apscheduler.timezone) == "Europe/Berlin"
    job = apscheduler.add_job(print, "interval", hours=1, id="print")
    assert job.coalesce is False
    executor = executors_of(apscheduler)["default"]
    assert executor.user.replica_id == "me"
    assert (executor.health().locked_jobs, executor.health().unlocked_jobs) == (0, 1)
    assert pool_size(executor) == 3


def test_the_command_has_the_namespace_and_the_table_of_the_application(
    make_app: MakeApp, capfd: pytest.CaptureFixture[str], database_url: str
) -> None:
    upgrade(database_url, table="shop_lock")
    app = make_app(TASKLOCK_NAMESPACE="shop:", TASKLOCK_TABLE="shop_lock")
    scheduler = TaskLockScheduler(app)
    scheduler.add_job(print, id="print", misfire_grace_time=None)
    run_all(app)
    said = app.test_cli_runner().invoke(args=["tasklock", "show", "print"])
    assert said.exit_code == 0, said.output
    assert "shop:print" in said.output
    wrong = app.test_cli_runner().invoke(args=["tasklock", "show", "none"])
    assert wrong.exit_code == 3


def test_the_command_takes_names_that_begin_with_a_dash(make_app: MakeApp) -> None:
    app = make_app()
    scheduler = TaskLockScheduler(app)
    scheduler.add_job(print, id="-print", misfire_grace_time=None)
    run_all(app)
    said = app.test_cli_runner().invoke(args=["tasklock", "show", "--json", "--", "-print"])
    assert said.exit_code == 0, said.output
    assert '"name": "-print"' in said.output


def test_a_help_of_the_command_is_that_of_the_command_line(make_app: MakeApp) -> None:
    app = make_app()
    TaskLockScheduler(app)
    said = app.test_cli_runner().invoke(args=["tasklock", "pause", "--help"])
    assert said.exit_code == 0
    assert "usage: flask tasklock pause" in said.output
    said = app.test_cli_runner().invoke(args=["tasklock", "jobs", "pause", "--help"])
    assert "usage: flask tasklock jobs pause" in said.output


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"TASKLOCK_DATABASE_URL": None}, "which database"),
        ({"TASKLOCK_FAILOVER": 30}, "failover must be"),
        ({"TASKLOCK_LOCK": "none"}, "lock must be"),
        ({"TASKLOCK_AUTOSTART": 3}, "TASKLOCK_AUTOSTART must be"),
        ({"TASKLOCK_SCHEDULER": {"executors": {"default": {}}}}, "TASKLOCK_SCHEDULER must be"),
        ({"TASKLOCK_SCHEDULER": 1}, "TASKLOCK_SCHEDULER must be"),
    ],
)
def test_a_configuration_that_cannot_be_is_an_error_at_once(
    config: dict[str, Any], said: str, make_app: MakeApp
) -> None:
    with pytest.raises(TaskLockOptionError, match=said):
        TaskLockScheduler(make_app(**config))


def test_a_database_of_another_kind_is_an_error_without_its_password(make_app: MakeApp) -> None:
    app = make_app(TASKLOCK_DATABASE_URL=None)
    app.config["SQLALCHEMY_DATABASE_URI"] = "mysql://me:s3cret@db/shop"
    with pytest.raises(TaskLockOptionError) as caught:
        TaskLockScheduler(app)
    assert "s3cret" not in str(caught.value)


def test_two_jobs_of_one_id_and_a_job_without_any_are_errors(make_app: MakeApp) -> None:
    scheduler = TaskLockScheduler(make_app())
    scheduler.add_job(print, "interval", hours=1)
    with pytest.raises(TaskLockOptionError, match="a job 'print' already"):
        scheduler.add_job(print, "interval", hours=2)
    with pytest.raises(TaskLockOptionError, match="an id"):
        scheduler.add_job(lambda: None, "interval", hours=2)


def test_an_application_has_one_scheduler_and_an_extension_some_application(
    make_app: MakeApp,
) -> None:
    app = make_app()
    TaskLockScheduler(app)
    with pytest.raises(TaskLockOptionError, match="'shop' has a scheduler already"):
        TaskLockScheduler(app)
    with pytest.raises(TaskLockOptionError, match="init_app first"):
        TaskLockScheduler().start()
    for call in (TaskLockScheduler(make_app("other")).start, TaskLockScheduler().shutdown):
        with pytest.raises(TaskLockOptionError, match="'cafe' has no scheduler; call init_app"):
            call(app=make_app("cafe"))


def test_the_first_request_starts_the_scheduler_unless_the_application_is_tested(
    make_app: MakeApp,
) -> None:
    app = make_app()
    scheduler = TaskLockScheduler(app)
    app.testing = True
    app.test_client().get("/")
    assert not [t for t in threading.enumerate() if t.name.startswith("tasklock")]
    assert not scheduler.apscheduler.running
    app.testing = False
    app.test_client().get("/")
    eventually(lambda: scheduler.apscheduler.running)


def test_without_autostart_no_request_starts_the_scheduler(make_app: MakeApp) -> None:
    app = make_app(TASKLOCK_AUTOSTART="false")
    scheduler = TaskLockScheduler(app)
    app.test_client().get("/")
    assert not [t for t in threading.enumerate() if t.name.startswith("tasklock")]
    scheduler.start()
    assert scheduler.apscheduler.running


def test_without_the_table_it_says_so_and_starts_when_it_is_there(
    make_app: MakeApp,
    empty_database_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AppScheduler, "retry_interval", 0.05)
    app = make_app(TASKLOCK_DATABASE_URL=empty_database_url)
    scheduler = TaskLockScheduler(app)
    with pytest.raises(TaskLockSchemaError):
        scheduler.start()
    with caplog.at_level(logging.ERROR):
        app.test_client().get("/")
        eventually(lambda: "does not start, and tries again" in caplog.text)
    assert not scheduler.apscheduler.running
    upgrade(empty_database_url)
    eventually(lambda: scheduler.apscheduler.running)


def test_a_start_that_cannot_be_is_told_once(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()
    scheduler = TaskLockScheduler(app)
    options = {"task_lock": {"max_fctor": 2}}
    scheduler.add_job(lambda **_: None, "interval", hours=1, id="job", kwargs=options)
    app.test_client().get("/")
    eventually(lambda: "none of its jobs runs in this process" in caplog.text)
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("tasklock")])
    app.test_client().get("/")
    assert caplog.text.count("none of its jobs runs in this process") == 1
    assert "max_fctor" in caplog.text


def test_a_job_that_starts_the_scheduler_while_it_is_shut_down_does_not_stop_that(
    make_app: MakeApp,
) -> None:
    scheduler = TaskLockScheduler(make_app())
    begun, is_shutting_down, ended = threading.Event(), threading.Event(), threading.Event()

    @scheduler.task("date", misfire_grace_time=None)
    def starts() -> None:
        begun.set()
        assert is_shutting_down.wait(60)
        scheduler.start()
        ended.set()

    scheduler.start()
    assert begun.wait(60)
    stopping = scheduler.apscheduler
    finish_pass(stopping)
    shutting_down = threading.Thread(target=scheduler.shutdown, daemon=True)
    shutting_down.start()
    eventually(lambda: not stopping.running)
    is_shutting_down.set()
    assert ended.wait(60)
    shutting_down.join(60)
    assert not shutting_down.is_alive()


def test_a_shutdown_of_apschedulers_own_scheduler_is_no_error(make_app: MakeApp) -> None:
    scheduler = TaskLockScheduler(make_app())
    scheduler.add_job(print, "interval", hours=1, id="print")
    scheduler.start()
    scheduler.apscheduler.shutdown()
    scheduler.shutdown()
    scheduler.start()
    assert scheduler.apscheduler.get_job("print") is not None


@pytest.mark.parametrize("database", [None, "sqlite://"])
def test_without_locks_jobs_run_where_there_is_no_postgresql(
    database: str | None, make_app: MakeApp
) -> None:
    app = make_app(TASKLOCK_DATABASE_URL=None, TASKLOCK_ENABLED="false")
    app.config["SQLALCHEMY_DATABASE_URI"] = database
    scheduler, ran = TaskLockScheduler(app), threading.Event()
    scheduler.add_job(ran.set, id="set", misfire_grace_time=None)
    run_all(app)
    assert ran.is_set()
    assert app.test_cli_runner().invoke(args=["tasklock", "status"]).exit_code == 2


def test_a_route_runs_a_job_now(make_app: MakeApp) -> None:
    app, ran = make_app(), threading.Event()
    scheduler = TaskLockScheduler(app)
    scheduler.add_job(ran.set, "cron", id="sync_prices", year=2999)

    @app.post("/sync")
    def sync() -> str:
        return scheduler.executor.run_now("sync_prices", by="ann").requested_by

    scheduler.start(app)
    assert app.test_client().post("/sync").text == "ann"
    assert ran.wait(60)


# Flask-APScheduler


def test_a_route_runs_a_job_of_flask_apscheduler_now(database_url: str) -> None:
    app, ran = Flask("shop"), threading.Event()
    executor = TaskLockExecutor(database_url)
    app.config["SCHEDULER_EXECUTORS"] = {"default": executor}
    scheduler = APScheduler(app=app)
    scheduler.scheduler.add_job(ran.set, "cron", id="sync_prices", year=2999)
    app.post("/sync")(lambda: executor.run_now("sync_prices", by="ann").requested_by)
    scheduler.start()
    try:
        assert app.test_client().post("/sync").text == "ann"
        assert ran.wait(60)
    finally:
        scheduler.shutdown()


def test_the_rest_run_of_flask_apscheduler_calls_a_decorated_function_without_the_lock(
    database_url: str,
) -> None:
    locks_of_calls: queue.Queue[Any] = queue.Queue()

    @task_lock
    def clean_up() -> None:
        locks_of_calls.put(current_lock())

    def plain() -> None:
        locks_of_calls.put(current_lock())

    app = Flask("shop")
    app.config["SCHEDULER_API_ENABLED"] = True
    app.config["SCHEDULER_EXECUTORS"] = {
        "default": {"type": "tasklock", "database": database_url, "poll_interval": 0.2}
    }
    scheduler = APScheduler(app=app)
    options = {"task_lock": {"max_factor": 2}}
    scheduler.add_job("clean-up", clean_up, trigger="cron", year=2999, kwargs=options)
    scheduler.add_job("plain", plain, trigger="cron", year=2999)
    scheduler.start()
    try:
        for job in ("clean-up", "plain"):
            answer = app.test_client().post(f"/scheduler/jobs/{job}/run")
            assert answer.status_code == 200, answer.text
            assert locks_of_calls.get(timeout=0) is None
        with closing(TaskLocks(database_url)) as locks:
            assert locks.runs() == []
            eventually(lambda: any("clean-up" in one.tasks for one in locks.replicas()))
            locks.request_run("clean-up")  # as the page advises
            assert locks_of_calls.get(timeout=60).name == "clean-up"
    finally:
        scheduler.shutdown()
