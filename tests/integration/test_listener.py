"""The connection on which a job store listens for other replicas' changes."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import NullPool

from apscheduler_tasklock._database import rejections
from apscheduler_tasklock._database.listener import Listener
from apscheduler_tasklock._database.url import parse_url
from tests.support.polling import eventually
from tests.support.proxy import Proxy

pytestmark = pytest.mark.direct("a pooler tells nobody")

CHANNEL = 'some "schema".task_lock_job'
NAME = "a listener"
# Where the server names its process at the login, after a type and a length; and another name.
BACKEND_PID = re.compile(b"(?<=K\0\0\0\x0c)....", re.DOTALL)
POOLERS_PID = b"\0\0\0\1"
REJECTED = "Listening for changes of jobs is tried again"

Connection = psycopg.Connection[Any]


class Heard:
    """Counts what was heard."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


Listen = Callable[..., Heard]


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Listen on a database until the test ends."""
    with ExitStack() as closing:

        def listen(database: Any, **options: Any) -> Heard:
            heard = Heard()
            options = {"application_name": NAME, "attempt": 1.0, "reconnect_after": 0.02, **options}
            listener = Listener(database, CHANNEL, heard, **options)
            listener.start()
            closing.callback(listener.close)
            return heard

        yield listen


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


def test_a_connection_that_broke_is_replaced_and_what_it_may_have_missed_looked_for(
    listen: Listen, proxy: Proxy, connection: Connection
) -> None:
    heard = listen(proxy.url)
    eventually(lambda: heard.count)
    proxy.cut_all()
    eventually(lambda: heard.count > 1)
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
    proxy: Proxy, unanswered: bytes
) -> None:
    """That the thread ends, too, is made sure of after each test."""
    reached = threading.Event()

    def swallow(data: bytes) -> bytes:
        if unanswered in data:
            reached.set()
        return b"" if reached.is_set() else data

    proxy.to_server = swallow
    listener = Listener(proxy.url, CHANNEL, Heard(), application_name=NAME, attempt=60.0)
    listener.start()
    assert reached.wait(60)
    listener.close()
    eventually(lambda: not proxy.connected)


def test_a_rejected_login_is_told_once_and_tried_again_ever_later(
    listen: Listen, direct_url: str, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = parse_url(direct_url)
    engine = create_engine(url)
    rejected = True

    @event.listens_for(engine, "do_connect")
    def change_user(_dialect: Any, _record: Any, _args: Any, parameters: Any) -> None:
        # SQLAlchemy 2.0.0 keeps what was changed the last time.
        parameters["user"] = "nobody we know" if rejected else url.username

    heard = listen(engine)

    def told() -> list[logging.LogRecord]:
        return [record for record in caplog.records if REJECTED in record.msg]

    eventually(lambda: len(told()) >= 4)
    rejected = False
    eventually(lambda: heard.count)
    is_told(heard, connection)
    eventually(lambda: "No longer rejected" in caplog.text)
    lines = [record for record in caplog.records if record.name == rejections.logger.name]
    assert [record.levelname for record in lines] == ["WARNING", "INFO"]
    assert "nobody we know" in lines[0].getMessage()
    pauses = [record.args[0] for record in told() if isinstance(record.args, tuple)]
    assert pauses[:4] == [0.02, 0.04, 0.08, 0.16]


def test_pauses_between_rejected_logins_have_a_limit(
    listen: Listen, direct_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    listen(without_credentials(direct_url), reconnect_after=3600.0)
    eventually(lambda: "tried again in some 60.0 sec" in caplog.text)


def test_an_outage_is_left_to_be_told_by_who_polls(
    listen: Listen, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.accepting = False
    heard = listen(proxy.url)
    eventually(lambda: proxy.refused > 2)
    proxy.accepting = True
    eventually(lambda: heard.count)
    assert REJECTED not in caplog.text


def test_through_a_pooler_nothing_is_listened_for(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sent: list[bytes] = []

    def note(data: bytes) -> bytes:
        sent.append(data)
        return data

    proxy.to_server = note
    # A pooler names a process of its own making.
    proxy.to_client = lambda data: BACKEND_PID.sub(POOLERS_PID, data)
    listener = Listener(proxy.url, CHANNEL, Heard(), application_name=NAME, attempt=1.0)
    listener.start()
    eventually(lambda: sent and not proxy.connected)
    assert "A pooler is before the database" in caplog.text
    assert b"LISTEN" not in b"".join(sent)
    listener.close()
