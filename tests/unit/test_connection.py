"""What each connection of the library's own asks for."""

from __future__ import annotations

import pytest

from apscheduler_tasklock._database.connection import connect_parameters
from apscheduler_tasklock._database.url import parse_url
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


def test_the_text_is_utf8_unless_the_url_says_otherwise() -> None:
    assert connect_parameters(parse_url("postgresql:///app"))["client_encoding"] == "UTF8"
    latin = parse_url("postgresql:///app?client_encoding=latin1")
    assert connect_parameters(latin)["client_encoding"] == "latin1"


def test_a_password_with_an_at_sign_is_refused_and_not_shown() -> None:
    with pytest.raises(TaskLockOptionError, match="write %40 for it") as refused:
        parse_url("postgresql://app:secret@rest#x@127.0.0.1:5432/app")
    assert "rest" not in str(refused.value)
    assert parse_url("postgresql://app:secret%40rest@127.0.0.1/app").password == "secret@rest"
