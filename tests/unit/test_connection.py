"""What each connection of the library's own asks for."""

from __future__ import annotations

from math import inf
from typing import Any

import psycopg
import pytest
from sqlalchemy.engine import URL

from apscheduler_tasklock._database.connection import (
    attempt_limit,
    connect_parameters,
    connector,
    turn_limit,
)
from apscheduler_tasklock._database.url import describe, parse_url
from apscheduler_tasklock.errors import TaskLockOptionError

SEVERAL = "postgresql://app@/app?host=one:5432&host=two:5433"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGTARGETSESSIONATTRS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "environment", "wanted"),
    [
        ("postgresql://app@one/app", {}, None),
        (SEVERAL, {}, "read-write"),
        (f"{SEVERAL}&target_session_attrs=any", {}, "any"),
        # libpq reads it by itself.
        (SEVERAL, {"PGTARGETSESSIONATTRS": "primary"}, None),
        ("postgresql:///app", {"PGHOST": "one,two"}, "read-write"),
        ("postgresql://app@one/app", {"PGHOST": "one,two"}, None),
    ],
)
def test_of_several_hosts_the_one_that_takes_writes_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, url: str, environment: dict[str, str], wanted: str | None
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert connect_parameters(parse_url(url)).get("target_session_attrs") == wanted


@pytest.mark.parametrize(
    ("attempt", "left", "limit"),
    [(3.3, inf, 3), (3.3, 2.5, 2), (3.3, -1.0, 2), (1.0, inf, 2)],
    ids=["as an attempt", "as after a stop", "over", "the shortest of libpq"],
)
def test_a_host_that_does_not_answer_leaves_time_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, attempt: float, left: float, limit: int
) -> None:
    asked: list[int] = []

    def connect(**parameters: Any) -> None:
        asked.append(parameters["connect_timeout"])
        raise psycopg.OperationalError("no server in a unit test")

    monkeypatch.setattr(psycopg, "connect", connect)
    with pytest.raises(psycopg.OperationalError):
        connector(parse_url(SEVERAL), attempt, "a test")(0, left)
    assert asked == [limit]


def test_the_text_is_utf8_unless_the_url_says_otherwise() -> None:
    assert connect_parameters(parse_url("postgresql:///app"))["client_encoding"] == "UTF8"
    latin = parse_url("postgresql:///app?client_encoding=latin1")
    assert connect_parameters(latin)["client_encoding"] == "latin1"


def test_a_password_with_an_at_sign_is_refused_and_not_shown() -> None:
    with pytest.raises(TaskLockOptionError, match="write %40 for it") as refused:
        parse_url("postgresql://app:secret@rest#x@127.0.0.1:5432/app")
    assert "rest" not in str(refused.value)
    assert parse_url("postgresql://app:secret%40rest@127.0.0.1/app").password == "secret@rest"


@pytest.mark.parametrize(
    ("url", "host", "port", "shown"),
    [
        ("postgresql://app@%2Ftmp/app", "/tmp", None, "/tmp, database 'app'"),  # noqa: S108  # never opened
        ("postgresql://%2Fvar%2Frun:5433/app", "/var/run", 5433, "/var/run:5433, database 'app'"),
        ("postgresql://app@%40abstract/app", "@abstract", None, "@abstract, database 'app'"),
        (
            "postgresql://app@[fe80::1%25eth0]/app",
            "fe80::1%eth0",
            None,
            "fe80::1%eth0, database 'app'",
        ),
        ("postgresql://app@%2Ftmp/app?host=db", "db", None, "db, database 'app'"),
        ("postgresql://app@db/app", "db", None, "db, database 'app'"),
    ],
)
def test_a_host_is_decoded_as_libpq_does(url: str, host: str, port: int | None, shown: str) -> None:
    parsed = parse_url(url)
    again = parse_url(parsed.render_as_string(hide_password=False))
    for one in (parsed, again, parse_url(parsed)):
        parameters = connect_parameters(one)
        assert (parameters["host"], parameters.get("port")) == (host, port)
        assert describe(one) == shown


def test_a_folder_as_the_host_survives_as_text() -> None:
    parsed = parse_url(
        URL.create("postgresql", "app", host="/var/run/pg", port=5433, database="db")
    )
    again = parse_url(parsed.render_as_string(hide_password=False))
    assert connect_parameters(again) == connect_parameters(parsed)
    assert connect_parameters(again)["host"] == "/var/run/pg"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            "ssl=true",
            "the parameter 'ssl', which libpq does not have; write sslmode=require for it",
        ),
        ("application_name=shop&ssl=verify-full", "write sslmode=require for it"),
        ("sslMode=require", "the parameter 'sslMode', .*; write sslmode=require for it"),
        ("applicationName=shop", "the parameter 'applicationName', .*; write application_name"),
        ("timeout=5", "the parameter 'timeout', .*; write connect_timeout for it"),
        (
            "prepared_statement_cache_size=0",
            "the parameter 'prepared_statement_cache_size', .*; leave it out",
        ),
    ],
)
def test_a_parameter_of_another_driver_is_named_with_that_of_libpq(
    parameters: str, message: str
) -> None:
    with pytest.raises(TaskLockOptionError, match=message):
        parse_url(f"postgresql+asyncpg://app:secret@db/app?{parameters}")


def test_a_part_of_a_password_is_not_shown_as_the_name_of_a_parameter() -> None:
    with pytest.raises(TaskLockOptionError, match="write %40 for it") as refused:
        parse_url("postgresql://app:p@ss?word=1@db/app")
    assert "word'" not in str(refused.value)


def test_all_parameters_of_libpq_are_taken() -> None:
    url = parse_url("postgresql://db/app?sslmode=require&options=-c%20role=app&passfile=a@b")
    assert connect_parameters(url)["options"] == "-c role=app"


@pytest.mark.parametrize(
    ("claim_timeout", "answer", "turn"),
    [
        (10.0, 3.3, 30.0),
        (3.0, 1.0, 9.0),
        (6.0, 2.0, 18.0),
        (0.001, 1.0, 9.0),
        (86400.0, 3.3, 3 * 86400.0),
    ],
)
def test_limits_follow_from_the_claims_timeout(
    claim_timeout: float, answer: float, turn: float
) -> None:
    assert attempt_limit(claim_timeout) == pytest.approx(answer)
    assert turn_limit(claim_timeout) == turn
