"""Writes the reference of the command line from its parser: `make reference`.

It does not copy what `--help` prints, whose form depends on the terminal and on Python's version.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from apscheduler_tasklock.cli.parser import build_parser

PAGE = Path(__file__).parent / "reference" / "commands.md"

_HEAD = """\
<!-- Written by `make reference` from the parser of the command line. -->

# Commands and their options

What `--help` shows of each command. [The command line for operators](../command-line.md) says how
to use them.
"""


def page() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *(section(name, parser) for name, parser in commands().items())])


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, in the order of `--help`."""
    [subparsers] = [
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return dict(subparsers.choices)


def option_strings(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options of a command, as they are given: ``--json``, ``-h``, ..."""
    return set(parser._option_string_actions)


def short_help() -> dict[str, str]:
    """Return what `apscheduler-tasklock --help` says of each command."""
    [subparsers] = [
        action
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return {action.dest: action.help or "" for action in subparsers._choices_actions}


def section(name: str, parser: argparse.ArgumentParser) -> str:
    """Return what the page says of one command."""
    lines = [f"## `{name}`", "", *description(name, parser), ""]
    lines += ["```text", usage(name, parser), "```", ""]
    lines += ["| argument | meaning |", "| --- | --- |"]
    lines += [f"| {term(action)} | {meaning(action)} |" for action in shown(parser)]
    if parser.epilog:
        lines += ["", "```text", parser.epilog.strip(), "```"]
    return "\n".join([*lines, ""])


def description(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the lines of a command's description; if it has none, its line in the overview."""
    text = parser.description
    if not text:
        text = short_help()[name]
        text = f"{text[0].upper()}{text[1:]}."
    yield from text.strip().splitlines()


def shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return a command's arguments without `--help`: first those by position."""
    actions = [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
    ]
    return sorted(actions, key=lambda action: bool(action.option_strings))


def usage(name: str, parser: argparse.ArgumentParser) -> str:
    """Return how a command is written, with what has to be given."""
    words = ["apscheduler-tasklock", name, "[OPTION ...]"]
    words += [
        f"{action.option_strings[0]} {value(action)}"
        for action in shown(parser)
        if action.option_strings and action.required
    ]
    words += [value(action) for action in shown(parser) if not action.option_strings]
    return " ".join(words)


def term(action: argparse.Action) -> str:
    """Return an argument as it is written."""
    names = ", ".join(action.option_strings)
    return f"`{' '.join(word for word in (names, value(action)) if word)}`"


def value(action: argparse.Action) -> str:
    """Return an argument's value as it is written, or nothing if it takes none."""
    if action.nargs == 0:
        return ""
    if isinstance(action.metavar, str):
        name = action.metavar
    elif action.choices is not None:
        name = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        name = action.dest.upper()
    return {"*": f"[{name} ...]", "+": f"{name} [{name} ...]", "?": f"[{name}]"}.get(
        str(action.nargs), name
    )


def meaning(action: argparse.Action) -> str:
    """Return an argument's help, as a cell of a table."""
    text = (action.help or "") % {**vars(action), "prog": "apscheduler-tasklock"}
    return text.replace("|", "\\|").replace("*", "\\*")


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
