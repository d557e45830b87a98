"""The command line's answers to arguments alone: what it cannot use, and its help."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version

import pytest

from apscheduler_tasklock.cli import main
from tests.support.commands import Answer, Command

COMMANDS = ["status", "show", "runs", "replicas", "pause", "resume", "run", "free", "forget"]
COMMANDS += ["check", "doctor", "jobs", "why", "ack"]
COMMANDS += ["jobs pause", "jobs resume", "jobs run", "jobs move", "jobs remove"]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line with a database that nobody can reach."""
    return Command("postgresql://localhost:1/none", capsys)


def assert_one_line(answer: Answer, status: int) -> None:
    assert (answer.status, answer.out) == (status, "")
    assert answer.err.startswith("apscheduler-tasklock: ")
    assert answer.err.count("\n") == 1
    assert "hunter2" not in answer.err


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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["runs", "--since", "soon"], "02:00, yesterday"),
        (["runs", "--until", "90"], "2026-01-31T03:00:00Z, or a duration ago such as 90s"),
        (["runs", "--since", "today", "--until", "yesterday"], "must be before --until"),
        (["runs", "--follow", "--until", "now"], "goes without --until"),
        (["pause", "x", "--for", "5w"], "90s, 15m, 2h or 1d, not '5w'"),
        (["pause", "x", "--for", "0"], "must be above 0"),
        (["status", "--state", "sleepy"], "overdue"),
        (["free", "x"], "--token"),
        (["runs", "--limit", "0"], "1 or more"),
        (["status", "--namespace", "a*"], "without * and ?"),
        (["status", "--table", "x" * 60], "at most"),
        (["show"], "TASK"),
        (["pause", "--all"], "--all needs --for D or --until-resumed"),
        (["pause", "--all", "task", "--for", "2h"], "names or --all, and not both"),
        (["pause"], "give tasks' names, or --all"),
        (["resume"], "give tasks' names, or --all"),
        (["status", "--watch"], "terminal"),
        (["metrics", "--json", "--listen", "127.0.0.1:0"], "goes without --json"),
        (["upgrade", "--sql", "--json"], "--json"),
        (["metrics", "--listen", "nowhere"], "must be a host and a port"),
        (["metrics", "--listen", ":80"], "must be a host and a port"),
        (["metrics", "--listen", "host:"], "must be a host and a port"),
        (["metrics", "--listen", "host:http"], "must be a host and a port"),
        (["metrics", "--listen", "host:70000"], "must be a host and a port"),
    ],
)
def test_wrong_usage_is_2(command: Command, arguments: list[str], says: str) -> None:
    answer = command(*arguments)
    assert (answer.status, answer.out) == (2, "")
    assert says in answer.err


def test_a_name_that_is_no_text_is_one_line(command: Command) -> None:
    for arguments in (["show", "\udc80"], ["pause", "\udc80"], ["runs", "\udc80"]):
        assert_one_line(command(*arguments), 2)


@pytest.mark.parametrize("name", ["status", "upgrade", "downgrade", "metrics"])
def test_a_wrong_url_is_2_and_not_repeated(command: Command, name: str) -> None:
    assert_one_line(command(name, database="mysql://app:hunter2@host/db"), 2)


def test_no_database_is_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TASKLOCK_DATABASE_URL", raising=False)
    assert main(["status"]) == 2
    assert "which database?" in capsys.readouterr().err


def test_what_cannot_be_listened_on_is_said(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = command("metrics", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert answer.status == 1
    assert "cannot listen on 127.0.0.1" in answer.err


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself_with_examples(command: Command, name: str) -> None:
    answer = command(name, "--help")
    assert answer.status == 0
    assert f"examples:\n  apscheduler-tasklock {name}" in answer.out
    for option in ("--database", "--schema", "--table", "--namespace", "--json", "exit status"):
        assert option in answer.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["staus"], "there is no command 'staus'"),
        (["staus"], "did you mean status?"),
        (["status", "--sate", "ok"], "unrecognized arguments: --sate; did you mean --state?"),
        (["jobs", "pause", "x", "--ass=me"], "did you mean --as?"),
        (["pause", "x", "--until"], "did you mean --until-resumed?"),
        (["--json", "status"], "--json has to stand after a command's name"),
    ],
)
def test_a_misspelled_word_is_answered_with_what_was_meant(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


URL = "postgresql://app:hunter2@db/app"


@pytest.mark.parametrize(
    "words",
    [
        [f"--database={URL}", "status"],
        [URL],
        ["upgrade", URL],
        ["status", f"--datbase={URL}"],
        ["status", "--since", URL],
        ["runs", "--since", URL],
        ["check", f"--datbase={URL}"],
    ],
)
def test_the_password_of_a_url_in_the_wrong_place_is_not_repeated(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):
        main(words)
    told = capsys.readouterr()
    assert "hunter2" not in told.out + told.err


@pytest.mark.parametrize(("columns", "widest"), [("200", 100), ("70", 70), (None, 100)])
def test_help_is_as_wide_as_the_terminal_and_100_columns_at_most(
    columns: str | None, widest: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    for words in ([], *([name] for name in COMMANDS)):
        lines = command(*words, "--help").out.splitlines()
        prose = [line for line in lines if not line.startswith("  apscheduler-tasklock")]
        assert max(map(len, prose)) in range(widest - 30, widest + 1)


def test_the_overview_has_the_commands_in_groups(command: Command) -> None:
    groups = command("--help").out.split("\n\n")
    titles = [group.splitlines()[0] for group in groups if group.splitlines()[0].endswith(":")]
    assert titles == [
        *("see what the tasks do:", "steer tasks:", "jobs of the job store:", "for monitors:"),
        *("set up:", "options:"),
    ]
    assert "\n  jobs move    move the next run time of a job" in command("--help").out


@pytest.mark.parametrize(
    ("name", "statuses"),
    [
        ("replicas", "0 1 2 130"),
        ("upgrade", "0 1 2 130"),
        ("status", "0 1 2 3 130"),
        ("free", "0 1 2 3 4 7 130"),
        ("run", "0 1 2 3 4 5 6 7 130"),
        ("jobs move", "0 1 2 3 4 7 130"),
        ("check", "0 1 2 3"),
    ],
)
def test_the_help_of_a_command_has_the_exit_statuses_that_it_can_have(
    name: str, statuses: str, command: Command
) -> None:
    told = " ".join(command(name, "--help").out.partition("exit status:")[2].split())
    assert re.findall(r"(?:^|; )([0-9]+)", told) == statuses.split()
