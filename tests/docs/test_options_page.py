"""The page of options is what the code says, and what is given twice in the code is the same."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest

from apscheduler_tasklock import TaskLockExecutor, TaskLockOptionError, TaskLocks
from apscheduler_tasklock.options import DEFAULT, DEFAULTS, OF_EXECUTOR, LockOptions
from docs.options import PAGE, page
from tests.support.snippets import ROOT
from tests.support.waist import LockSettings

PARAMETERS = inspect.signature(TaskLockExecutor).parameters


def test_the_page_is_written_from_the_code_that_there_is() -> None:
    assert PAGE.read_text() == page(), "write it anew with: make reference"


@pytest.mark.parametrize("name", OF_EXECUTOR)
def test_the_executor_takes_each_option_of_all_jobs_with_its_default(name: str) -> None:
    given, known = PARAMETERS[name].default, getattr(DEFAULTS, name)
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    assert seconds == (DEFAULT if known is None else known)
    impossible: Any = {name: object()}
    with pytest.raises(TaskLockOptionError, match=name):
        TaskLockExecutor("postgresql://localhost/app", **impossible)


def test_the_decorator_takes_each_option() -> None:
    tree = ast.parse((ROOT / "apscheduler_tasklock/decorator.py").read_text())
    definitions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    taken = [[one.arg for one in each.args.kwonlyargs] for each in definitions]
    assert [field.name for field in fields(LockOptions)] in taken


@pytest.mark.parametrize("name", inspect.signature(TaskLocks).parameters)
def test_a_parameter_has_one_default(name: str) -> None:
    default = inspect.signature(TaskLocks).parameters[name].default
    assert default == PARAMETERS[name].default
    if name in ("claim_timeout", "history"):
        assert default == getattr(LockSettings, name)
