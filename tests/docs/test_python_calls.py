"""Python in the documentation, also what is only a part, names and calls what there is."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from apscheduler_tasklock import TaskLockExecutor
from apscheduler_tasklock.options import LockOptions
from tests.docs.test_python import GIVEN
from tests.support.snippets import ROOT, Snippet, as_module, missing_names, parts, snippets, spans

# What an application brings, or another project that is not among this one's tools.
FOREIGN = ("project", "shop", "myapp", "flask_app", "django_apscheduler")

# What pages give to the executor for the one that it wraps.
FOR_THE_WRAPPED = {"max_workers", "pool_kwargs"}

# What the reader's own names, and the types of other libraries, make of a part of a program.
IGNORED = ("name-defined", "union-attr", "no-redef", "empty-body", "var-annotated")

EXECUTOR_OPTIONS = set(inspect.signature(TaskLockExecutor).parameters) | FOR_THE_WRAPPED
JOB_OPTIONS = {field.name for field in fields(LockOptions)}

every_part = pytest.mark.parametrize("snippet", parts("python"), ids=str)


@every_part
def test_a_block_imports_what_there_is(snippet: Snippet) -> None:
    for node in ast.walk(ast.parse(as_module(snippet))):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in FOREIGN:
                continue
            module = import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                import_module(alias.name)


def keys(value: ast.expr) -> set[str]:
    """Return the keys of a dict that is written out."""
    if not isinstance(value, ast.Dict):
        return set()
    return {str(key.value) for key in value.keys if isinstance(key, ast.Constant)}


def executor_options(tree: ast.AST) -> set[str]:
    """Return the options that code gives to executors, in calls and in configurations."""
    given = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Name("TaskLockExecutor"), _, keywords):
                given |= {keyword.arg for keyword in keywords if keyword.arg}
            case ast.Dict() if "type" in keys(node) and "database" in keys(node):
                given |= keys(node) - {"type"}
    return given


def job_options(tree: ast.AST) -> set[str]:
    """Return the options that code gives to single jobs, in kwargs and in ``jobs=``."""
    given = set()
    for node in ast.walk(tree):
        match node:
            case ast.Dict(names, values):
                for name, value in zip(names, values, strict=True):
                    if isinstance(name, ast.Constant) and name.value == "task_lock":
                        given |= keys(value)
            case ast.keyword("jobs", ast.Dict(_, values)):
                for value in values:
                    given |= keys(value)
    return given


def test_options_that_blocks_give_to_executors_and_jobs_are_options() -> None:
    # The executor hands what it does not know to the one that it wraps, so no type tells.
    of_executors, of_jobs = set(), set()
    for one in snippets("python"):
        tree = ast.parse(as_module(one))
        assert executor_options(tree) <= EXECUTOR_OPTIONS, one
        assert job_options(tree) <= JOB_OPTIONS, one
        of_executors |= executor_options(tree)
        of_jobs |= job_options(tree)
    assert of_executors > {"failover", "database"}
    assert "max_factor" in of_jobs


def calls_in_sentences() -> dict[str, list[str]]:
    """Return the calls that each page names in its sentences, as far as they are whole."""
    found: dict[str, list[str]] = {}
    for page, code in spans():
        try:
            tree = ast.parse(_in_a_coroutine(code))
        except SyntaxError:
            continue
        if any(isinstance(node, ast.Call) for node in ast.walk(tree)) and "..." not in code:
            # Without arguments, it is the name of a function or of a method that is meant.
            found.setdefault(page, []).append(code.removesuffix("()"))
    return found


def _in_a_coroutine(code: str) -> str:
    return f"async def _(): {code}\n"


def with_given(code: str) -> str:
    """Return code as a module, with what stands for the names that it leaves to the reader."""
    names = sorted(missing_names(code) & set(GIVEN))
    return "\n".join(["DATABASE_URL = ''", *(GIVEN[name] for name in names), code])


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_calls_fit_the_types(tmp_path: Path) -> None:
    shown = {str(one): as_module(one) for one in parts("python")}
    calls = calls_in_sentences()
    assert len(calls) > 10
    for page, codes in calls.items():
        # Each in a coroutine, for those that wait.
        shown[f"a sentence of {page}"] = "".join(map(_in_a_coroutine, codes))
    written = {}
    for number, (where, code) in enumerate(shown.items()):
        file = tmp_path / f"shown_{number}.py"
        file.write_text(with_given(code))
        written[str(file)] = where
    checked = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file=", "--check-untyped-defs"),
            *("--ignore-missing-imports", "--follow-imports=silent", "--no-error-summary"),
            "--explicit-package-bases",
            *(f"--disable-error-code={code}" for code in IGNORED),
            *(f"--cache-dir={ROOT / '.cache/mypy-snippets'}", str(tmp_path)),
        ],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = re.sub(
        r"^(.+?\.py)(:\d+)",
        lambda found: written.get(found[1], found[1]),
        checked.stdout,
        flags=re.M,
    )
    assert checked.returncode == 0, errors + checked.stderr
