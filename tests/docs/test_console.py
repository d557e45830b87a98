"""Commands in the documentation are commands: of this library, of make, of pip and of others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timezone

import pytest
from alembic.config import CommandLine
from alembic.script import ScriptDirectory
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_tasklock import TaskLockExecutor, upgrade
from apscheduler_tasklock.cli.parser import CommandParser, build_parser, joined
from docs.commands import commands, option_strings
from tests.support.commands import Command, PatientTaskLocks
from tests.support.polling import eventually
from tests.support.snippets import ROOT, Snippet, parts, snippets, spans

MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()

# The application that a server is to run, where it is a file of the page's own.
OWN_FILES = {"project.wsgi", "project.asgi:application"}


def command_lines(snippet: Snippet) -> Iterator[list[str]]:
    """Yield the words of each command of a console block; a pipe makes two of them."""
    for line in snippet.text.splitlines():
        if line.startswith("$ "):
            lexer = shlex.shlex(line[2:], posix=True, punctuation_chars="|>")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in lexer:
                if word == "|":
                    yield words
                    words = []
                else:
                    words.append(word)
            yield words


def check_own_command(words: list[str], _page: str) -> None:
    class Parser(CommandParser):
        def error(self, message: str) -> None:  # type: ignore[override]  # it never returns either
            raise AssertionError(f"{shlex.join(words)}: {message}")

    build_parser(Parser).parse_args(joined(words[1:]))


def check_make(words: list[str], _page: str) -> None:
    for word in words[1:]:
        variable, is_set, _ = word.partition("=")
        if is_set:
            assert re.search(rf"^{variable} \?=|\$\({variable}\)", MAKEFILE, re.MULTILINE), word
        else:
            assert re.search(rf"^{word}:.* ## ", MAKEFILE, re.MULTILINE), f"no target {word}"


def check_pip(words: list[str], _page: str) -> None:
    assert words[1] == "install"
    for word in words[2:]:
        # From Git only with dots in place of the address, as long as there is none.
        project = r"(?:\.|apscheduler-tasklock)\[([\w,]+)\](?: @ git\+https://\.\.\.)?"
        if found := re.fullmatch(project, word):
            for extra in found[1].split(","):
                assert re.search(rf"^{extra} = \[", PROJECT, re.MULTILINE), f"no extra {extra}"
        else:
            assert re.search(rf'"{word}\W', PROJECT), f"{word} is not among the project's tools"


def check_alembic(words: list[str], _page: str) -> None:
    options = CommandLine().parser.parse_args(words[1:])
    if getattr(options, "revision", "head") not in ("head", "base"):
        scripts = ScriptDirectory(str(ROOT / "alembic"))
        assert scripts.get_revision(options.revision) is not None


def check_python(words: list[str], page: str) -> None:
    if words[1] == "-m":
        assert words[2] == "venv"
    elif words[1] != "manage.py":
        assert f"Save this as `{words[1]}`" in (ROOT / page).read_text(), words


def check_server(words: list[str], _page: str) -> None:
    app = words[1]
    module = app.partition(":")[0]
    assert app in OWN_FILES or (ROOT / "examples" / f"{module}.py").exists(), app


def check_variable(words: list[str], _page: str) -> None:
    [name] = [word.partition("=")[0] for word in words[1:]]
    assert f"| `{name}` |" in (ROOT / "docs/reference/options.md").read_text()


def nothing(_words: list[str], _page: str) -> None:
    """Leave out what every system has."""


CHECKS: dict[str, Callable[[list[str], str], None]] = {
    ".": nothing,
    "alembic": check_alembic,
    "apscheduler-tasklock": check_own_command,
    "awk": nothing,
    "cut": nothing,
    "export": check_variable,
    "gunicorn": check_server,
    "kill": nothing,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "python3": check_python,
    "uvicorn": check_server,
}


@pytest.mark.parametrize("snippet", parts("console"), ids=str)
def test_each_command_of_a_console_is_one(snippet: Snippet) -> None:
    lines = [line[: line.index(">")] if ">" in line else line for line in command_lines(snippet)]
    assert lines, "a console block shows commands, after $"
    for words in lines:
        assert words[0] in CHECKS, f"CHECKS does not say how {words[0]} is checked"
        CHECKS[words[0]](words, snippet.page)


def test_each_command_in_a_sentence_is_one() -> None:
    seen = 0
    for page, code in spans():
        words = shlex.split(code) if code.count("'") % 2 == 0 else code.split()
        if len(words) < 2:
            continue
        match words[0]:
            case "make":
                seen += 1
                check_make(words, page)
            case "pip":
                check_pip(words, page)
            case "apscheduler-tasklock":
                seen += 1
                check_part(words)
    assert seen > 30


def check_part(words: list[str]) -> None:
    """Check a command that a sentence names, perhaps without what else has to be given."""
    if words[1].startswith("-"):
        return
    name, *rest = joined(words[1:])
    assert name in commands(), f"no command {name}"
    options = option_strings(commands()[name])
    unknown = {word for word in rest if word.startswith("--") and word not in options}
    assert unknown == set(), words


def head(output: str) -> list[str]:
    """Return the names of a table's columns."""
    return re.split(r"  +", output.splitlines()[0].rstrip())


def labels(output: str) -> list[str]:
    """Return what a monitor is given numbers of."""
    return re.findall(r"(\w+)=", output.partition(" | ")[2])


def shown_outputs() -> Iterator[tuple[Snippet, str, str]]:
    """Yield each command of the library below which a page shows what it prints, and that."""
    for one in snippets("console"):
        for line, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)+)", one.text, re.MULTILINE):
            # Of `import-jobs`, tests/integration/store/test_import_jobs.py says what it prints.
            if re.match(r"apscheduler-tasklock (?!import-jobs)[^|]*$", line):
                yield one, line.partition(" ")[2], output


# What of an output does not depend on which tasks there are.
COMPARED: dict[str, Callable[[str], object]] = {
    "check": labels,
    "jobs": head,
    "status": head,
    "upgrade": str,
}


@pytest.mark.parametrize(("snippet", "command", "output"), [*shown_outputs()], ids=str)
def test_what_a_console_shows_is_printed(
    snippet: Snippet,
    command: str,
    output: str,
    empty_database_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, *arguments = command.split()
    if name != "upgrade":
        upgrade(empty_database_url)
        with (
            closing(PatientTaskLocks(empty_database_url)) as locks,
            locks.hold("a", min_lock=0, max_lock=600),
        ):
            pass
    run = Command(empty_database_url, capsys)
    answer = run(name, *arguments)
    assert answer.status == 0, answer.err
    assert COMPARED[name](answer.out) == COMPARED[name](output)


def facts(output: str) -> list[str]:
    """Return the names of the facts that `show` tells of a task."""
    return [line[:13].rstrip() for line in output.partition("\n\n")[0].splitlines()]


def test_what_the_pages_show_of_a_task_is_printed(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("the mail server is away")

    [shown] = [
        one.text
        for one in snippets("text")
        if one.page == "docs/how-to/pager.md"
        and one.text.startswith("task         nightly-report\n")
    ]
    scheduler = BackgroundScheduler(timezone="UTC")
    scheduler.add_executor(TaskLockExecutor(database_url, replica_id="web-1", tracebacks=True))
    soon = datetime.now(timezone.utc)
    scheduler.add_job(
        fail,
        "interval",
        minutes=1,
        id="nightly-report",
        next_run_time=soon,
        misfire_grace_time=None,
    )
    run = Command(database_url, capsys)
    scheduler.start()
    try:
        # The run and the registration are two writes, in any order.
        awaited = {"failures", "options"}
        eventually(lambda: awaited <= set(facts(run("show", "nightly-report").out)))
        told = run("show", "nightly-report").out
    finally:
        scheduler.shutdown()
    assert facts(told) == facts(shown)
    for fact in ("options", "next runs"):
        [ours], [theirs] = (re.findall(rf"^{fact} +(.*)$", each, re.M) for each in (told, shown))
        assert re.sub(r"\d\d+", "", ours) == re.sub(r"\d\d+", "", theirs)


def test_no_language_is_left_out() -> None:
    known = {"console", "ini", "json", "python", "sql", "text", "toml", "yaml"}
    directives = {"{eval-rst}", "{literalinclude}", "{toctree}"}
    assert {one.language for one in snippets()} <= known | directives


def test_files_that_sentences_name_are_there() -> None:
    folders = ("docs/", "examples/", "tests/", "benchmarks/", "observability/", "alembic/")
    named = {(page, code) for page, code in spans() if code.startswith(folders)}
    assert named
    assert {one for one in named if not (ROOT / one[1]).exists()} == set()
