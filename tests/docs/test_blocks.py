"""SQL in the documentation runs on the library's tables, and configurations can be read."""

from __future__ import annotations

import json
import re
from configparser import ConfigParser
from io import StringIO
from typing import Any

import psycopg
import pytest
import yaml
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import TaskLockExecutor
from tests.support.internals import executors_of
from tests.support.snippets import ROOT, Snippet, pages, snippets

# What a page speaks of beside the library's tables, and how the application fills in its values.
THE_READERS_OWN = (
    "CREATE TABLE report (name text PRIMARY KEY, body text, token bigint)",
    "CREATE SCHEMA jobs",
    "DO 'BEGIN CREATE ROLE app; EXCEPTION WHEN duplicate_object THEN NULL; END'",
)
VALUES = {"name": "report", "body": "all is well", "token": 1795300160006}


@pytest.mark.parametrize("snippet", snippets("sql"), ids=str)
def test_sql_runs_on_the_tables(snippet: Snippet, connection: psycopg.Connection[Any]) -> None:
    statements = [part for part in snippet.text.split(";\n") if part.strip()]
    with connection.transaction(force_rollback=True):
        for statement in THE_READERS_OWN:
            connection.execute(statement)
        for statement in statements:
            connection.execute(statement, VALUES if "%(" in statement else None)


@pytest.mark.parametrize("snippet", snippets("ini"), ids=str)
def test_an_ini_file_configures_a_scheduler(snippet: Snippet) -> None:
    parser = ConfigParser(interpolation=None)
    parser.read_file(StringIO(f"[scheduler]\n{snippet.text}"))
    scheduler = BackgroundScheduler()
    scheduler.configure(dict(parser["scheduler"]))
    assert isinstance(executors_of(scheduler)["default"], TaskLockExecutor)


def test_yaml_json_and_toml_can_be_read() -> None:
    assert all(yaml.safe_load(one.text) for one in snippets("yaml"))
    assert all(json.loads(one.text) for one in snippets("json"))
    if toml := snippets("toml"):
        tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
        assert all(tomllib.loads(one.text) for one in toml)


def test_each_file_that_a_page_includes_is_used_by_the_tests_of_examples() -> None:
    tests = (ROOT / "tests/acceptance/test_examples.py").read_text()
    included = {
        (file.parent / target).resolve()
        for file in pages()
        for target in re.findall(r"^```{literalinclude} (\S+)$", file.read_text(), re.MULTILINE)
    }
    assert included
    assert {file for file in included if not file.exists()} == set()
    used = {
        file
        for file in included
        if re.search(rf'"{re.escape(file.name)}"|[":]{re.escape(file.stem)}:', tests)
    }
    assert {file.name for file in included - used} == set()
