"""The command line's answers to arguments that it cannot use."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from apscheduler_tasklock.cli import main


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--seconds", "abc", "must be a number from 1 to 86400, not 'abc'"),
        ("--seconds", "nan", "must be a number from 1 to 86400, not 'nan'"),
        ("--seconds", "0.5", "must be a number from 1 to 86400, not '0.5'"),
        ("--replicas", "abc", "must be a whole number, 1 or more, not 'abc'"),
        ("--replicas", "2.5", "must be a whole number, 1 or more, not '2.5'"),
        ("--replicas", "0", "must be a whole number, 1 or more, not '0'"),
    ],
)
def test_an_invalid_number_is_named_with_what_is_allowed(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", option, value])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"apscheduler-tasklock demo: error: argument {option}: {message}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "a\udcff"],
        ["pause", "job", "--reason", "a\udcff"],
        ["jobs", "pause", "job", "--as=a\udcff"],
        ["a\udcff"],
    ],
    ids=["name", "reason", "operator", "command"],
)
def test_an_argument_that_is_no_valid_text_is_invalid(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Python reads bytes that are not valid UTF-8 as surrogates."""
    assert main([*arguments, "--database", "postgresql://localhost:1/none"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "a\\udcff' is not valid UTF-8" in line


def test_an_argument_of_check_that_is_no_valid_text_goes_to_the_monitor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "a\udcff"]) == 3
    assert "is not valid UTF-8" in capsys.readouterr().out


def test_a_demo_of_the_shared_store_is_none_of_leader_mode(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--shared-store", "--leader"])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("argument --leader: not allowed with argument --shared-store")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"apscheduler-tasklock {version('apscheduler-tasklock')}\n"


@pytest.mark.parametrize("module", ["apscheduler_tasklock", "apscheduler_tasklock.cli"])
def test_the_package_can_be_run_as_a_module(module: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert answer.stdout.startswith("apscheduler-tasklock ")
