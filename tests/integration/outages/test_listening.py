"""A channel that the replica's thread listens on, as for other replicas' changes of jobs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import NullPool

from apscheduler_tasklock import TaskLockError
from apscheduler_tasklock._database import rejections
from apscheduler_tasklock._database import thread as module
from apscheduler_tasklock._database.listening import Listening
from apscheduler_tasklock._database.rejections import NOTIFICATIONS, Rejections
from apscheduler_tasklock._database.session import NoSession, Session
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._database.url import parse_url
from apscheduler_tasklock._shutdown import Closing
from tests.support.exchanges import Setup
from tests.support.polling import eventually
from tests.support.proxy import Proxy, as_a_pooler
from tests.support.waist import wait_for

pytestmark = pytest.mark.direct("a pooler tells nobody")

CHANNEL = 'some "schema".task_lock_job'
# Seconds within which an answer has come on any machine.
TIMEOUT = 3.0

Connection = psycopg.Connection[Any]


class Heard:
    """Counts what was heard."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rejections = Rejections()
        self.count = 0

    def __call__(self) -> None:
        assert threading.current_thread().name == module.NAME
        self.count += 1


Listen = Callable[..., Heard]


@pytest.fixture
def listen(make_setup: Callable[..., Setup]) -> Listen:
    """Listen on a database until the test ends."""

    def listen(
        database: Any, again: float = 0.02, linger: float = 5.0, *, is_patient: bool = False
    ) -> Heard:
        timings = Timings(listen_again=again, linger=linger)
        limit = TIMEOUT
        if is_patient:
            limit, timings = 60.0, replace(timings, longest_answer=60.0)
        heard = Heard(make_setup(database, limit, timings=timings))
        heard.setup.database.listen(CHANNEL, heard, heard.rejections)
        return heard

    return listen


def notify(connection: Connection) -> None:
    connection.execute("SELECT pg_notify(%s, '')", [CHANNEL])


def is_told(heard: Heard, connection: Connection) -> None:
    """Make sure that the next notification is heard. What listens has to be there already."""
    before = heard.count
    notify(connection)
    eventually(lambda: heard.count > before)


def without_credentials(database_url: str) -> str:
    """Return a URL as of an engine that gets its credentials elsewhere."""
    url = parse_url(database_url).set(username="nobody we know", password=None)
    return url.render_as_string(hide_password=False)


def engine_with_a_creator(database_url: str) -> Engine:
    url = parse_url(database_url).set(drivername="postgresql").render_as_string(False)
    return create_engine(
        parse_url(without_credentials(database_url)),
        creator=lambda: psycopg.connect(url),
        poolclass=NullPool,
    )


def engine_with_a_hook(database_url: str) -> Engine:
    engine = create_engine(parse_url(without_credentials(database_url)), poolclass=NullPool)
    url = parse_url(database_url)

    @event.listens_for(engine, "do_connect")
    def fetch_credentials(_dialect: Any, _record: Any, _args: Any, parameters: Any) -> None:
        parameters.update(user=url.username, password=url.password or "")

    return engine


@pytest.mark.parametrize("make", [str, engine_with_a_creator, engine_with_a_hook])
def test_what_is_notified_is_heard_however_an_application_logs_in(
    listen: Listen, direct_url: str, connection: Connection, make: Callable[[str], Any]
) -> None:
    heard = listen(make(direct_url))
    eventually(lambda: heard.count)
    is_told(heard, connection)


def test_the_thread_goes_on_to_listen_while_there_is_nothing_to_do(
    listen: Listen, direct_url: str, connection: Connection
) -> None:
    heard = listen(direct_url, linger=0.01)
    eventually(lambda: heard.count)
    time.sleep(0.05)
    assert heard.setup.database.has_thread
    is_told(heard, connection)


def test_what_is_asked_meanwhile_wakes_the_thread(listen: Listen, direct_url: str) -> None:
    """Else it waits for a notification for ever, since nothing else is due."""
    heard = listen(direct_url, is_patient=True)
    eventually(lambda: heard.count)
    for _ in range(10):
        time.sleep(0.01)  # lets the thread wait again; nothing is expected to happen meanwhile
        heard.setup.ask(lambda cursor: cursor.execute("SELECT 1").fetchone())


def test_what_is_notified_during_a_statement_is_heard_after_it(
    listen: Listen, direct_url: str, connection: Connection
) -> None:
    heard = listen(direct_url, is_patient=True)
    eventually(lambda: heard.count)
    before = heard.count
    in_statement: list[int] = []

    def ask(cursor: Any) -> None:
        notify(connection)
        assert wait_for([cursor.connection.fileno()], 60.0)
        cursor.execute("SELECT 1").fetchone()
        in_statement.append(heard.count)

    heard.setup.ask(ask)
    eventually(lambda: heard.count > before)
    assert in_statement == [before]


def test_what_has_come_with_an_answer_is_heard_though_nothing_more_comes(
    listen: Listen, direct_url: str, connection: Connection
) -> None:
    heard = listen(direct_url, is_patient=True)
    eventually(lambda: heard.count)
    before = heard.count

    def ask(cursor: Any) -> None:
        notify(connection)
        assert wait_for([cursor.connection.fileno()], 60.0)
        cursor.connection.pgconn.consume_input()
        assert not wait_for([cursor.connection.fileno()], 0.0)

    heard.setup.ask(ask)
    eventually(lambda: heard.count > before)


def test_a_connection_that_broke_is_replaced_and_what_it_may_have_missed_looked_for(
    listen: Listen, proxy: Proxy, connection: Connection
) -> None:
    heard = listen(proxy.url)
    eventually(lambda: heard.count)
    proxy.cut_all()
    eventually(lambda: heard.count > 1)
    is_told(heard, connection)


def test_one_that_was_closed_after_a_statement_that_failed_is_replaced_too(
    listen: Listen, direct_url: str, connection: Connection
) -> None:
    heard = listen(direct_url, is_patient=True)
    eventually(lambda: heard.count)
    before = heard.count
    with pytest.raises(TaskLockError):
        heard.setup.ask(lambda cursor: cursor.execute("SELECT 1 / 0"))
    eventually(lambda: heard.count > before)
    is_told(heard, connection)


def test_listening_that_is_not_answered_is_given_up_and_tried_again(
    listen: Listen, proxy: Proxy, connection: Connection
) -> None:
    unanswered: list[bytes] = []

    def swallow_the_first(data: bytes) -> bytes:
        if b"LISTEN" in data and not unanswered:
            unanswered.append(data)
            return b""
        return data

    proxy.to_server = swallow_the_first
    heard = listen(proxy.url)
    eventually(lambda: heard.count)
    assert unanswered
    is_told(heard, connection)


@pytest.mark.parametrize("unanswered", [b"LISTEN", b"pg_backend_pid"])
def test_after_the_close_nothing_stays_with_a_server_that_does_not_answer(
    make_setup: Callable[..., Setup], proxy: Proxy, unanswered: bytes
) -> None:
    """That the thread ends, too, is made sure of after each test."""
    reached = threading.Event()

    def swallow(data: bytes) -> bytes:
        if unanswered in data:
            reached.set()
        return b"" if reached.is_set() else data

    proxy.to_server = swallow
    setup = make_setup(proxy.url, timeout=180.0)
    setup.database.listen(CHANNEL, lambda: None, Rejections())
    assert reached.wait(60)
    setup.close()
    eventually(lambda: not proxy.connected)


def test_after_a_connection_that_broke_there_is_a_pause_unless_all_ends(
    listen: Listen, proxy: Proxy
) -> None:
    heard = listen(proxy.url, again=3600.0)
    eventually(lambda: heard.count)
    proxy.cut_all()
    eventually(lambda: not heard.setup.session.is_open)
    time.sleep(0.05)
    assert not heard.setup.session.is_open
    began = time.monotonic()
    heard.setup.database.end(began + 60.0)  # as the interpreter does, without a shutdown
    assert time.monotonic() < began + 30.0


@pytest.mark.nightly
def test_a_login_that_is_rejected_is_told_once_and_tried_again(
    listen: Listen, direct_url: str, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    url = parse_url(direct_url)
    engine = create_engine(url)
    rejected = True
    attempts: list[float] = []

    @event.listens_for(engine, "do_connect")
    def change_user(_dialect: Any, _record: Any, _args: Any, parameters: Any) -> None:
        attempts.append(time.monotonic())
        # SQLAlchemy 2.0.0 keeps what was changed the last time.
        parameters["user"] = "nobody we know" if rejected else url.username

    heard = listen(engine)
    eventually(lambda: len(attempts) >= 4)
    assert heard.rejections.has(NOTIFICATIONS)
    rejected = False
    eventually(lambda: heard.count)
    is_told(heard, connection)
    eventually(lambda: "No longer rejected" in caplog.text)
    lines = [record for record in caplog.records if record.name == rejections.logger.name]
    assert [record.levelname for record in lines] == ["WARNING", "INFO"]


def test_what_is_rejected_is_tried_again_ever_later() -> None:
    closing = Closing()
    listening = Listening(
        NoSession(1.0), CHANNEL, lambda: None, closing, Rejections(), Timings(listen_again=2.0)
    )
    try:
        request = listening.request(0.0)
        assert request is not None
        assert list(request.rejected_backoff) == [2, 4, 8, 16, 32, 60]
        assert request.not_before == 0.0
        assert listening.request(0.0) is None  # it is under way
    finally:
        listening.stop()
    assert request.is_unwanted


def test_a_server_that_does_not_know_how_to_notify_is_told_once(
    listen: Listen,
    direct_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    attempts: list[str] = []

    def refuse_to_listen(_session: Session, _cursor: Any, channel: str) -> bool:
        attempts.append(channel)
        raise psycopg.errors.FeatureNotSupported("LISTEN is not supported")

    # No server of ours does so. The thread listens as soon as it begins.
    monkeypatch.setattr(Session, "listen", refuse_to_listen)
    heard = listen(direct_url, is_patient=True)
    eventually(lambda: heard.rejections.has(NOTIFICATIONS))
    (told,) = heard.rejections.reported()
    assert "found by polling, not at once, because listening for them failed: " in told
    assert heard.setup.ask(lambda cursor: cursor.execute("SELECT 1").fetchone()) == (1,)
    eventually(lambda: len(attempts) >= 3)
    assert caplog.text.count("Rejected by the database") == 1


def test_an_outage_is_left_to_be_told_by_the_thread(
    listen: Listen, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.accepting = False
    heard = listen(proxy.url, is_patient=True)
    eventually(lambda: proxy.refused > 2)
    assert heard.setup.outage.reason is not None
    proxy.accepting = True
    eventually(lambda: heard.count)
    assert heard.setup.outage.reason is None
    assert not heard.rejections.any
    assert caplog.text.count("is unavailable") == 1


def test_through_a_pooler_nothing_is_listened_for(
    listen: Listen,
    proxy: Proxy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    sent: list[bytes] = []

    def note(data: bytes) -> bytes:
        sent.append(data)
        return data

    proxy.to_server = note
    proxy.to_client = as_a_pooler
    heard = listen(proxy.url, linger=0.01, is_patient=True)
    eventually(lambda: "There is a pooler before the database" in caplog.text)
    eventually(lambda: not heard.setup.database.has_thread)
    heard.setup.ask(lambda cursor: cursor.execute("SELECT 1").fetchone())
    assert caplog.text.count("There is a pooler before the database") == 1
    assert b"LISTEN" not in b"".join(sent)
