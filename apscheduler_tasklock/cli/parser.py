"""The commands, their options, and examples of both."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from apscheduler_tasklock._database.url import DATABASE_VARIABLE
from apscheduler_tasklock._lock.command_lines import PROGRAM, library_version
from apscheduler_tasklock._lock.outcomes import OUTCOMES
from apscheduler_tasklock._words.findings import NO_REPLICA_AFTER
from apscheduler_tasklock.cli import (
    check,
    dashboard,
    doctor,
    importing,
    jobs,
    metrics,
    replicas,
    runs,
    setup,
    status,
    steering,
    values,
    why,
)
from apscheduler_tasklock.cli.exits import (
    FAILED,
    FORBIDDEN,
    INTERRUPTED,
    NOT_FOUND,
    NOT_KNOWN,
    RUN_FAILED,
    USAGE,
    WAIT_OVER,
    without_passwords,
)
from apscheduler_tasklock.cli.text import did_you_mean, wrapped
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.schema.table import DEFAULT_TABLE
from apscheduler_tasklock.status import KINDS, ORDERS

# Limits the columns of help, also where the terminal is wider.
_WIDEST = 100

# The meanings of the exit statuses, beside 0. `check` has its own.
_MEANINGS = {
    FAILED: "failed",
    USAGE: "wrong usage",
    NOT_FOUND: "no such {what}",
    FORBIDDEN: "its state forbids it",
    WAIT_OVER: "the wait ran out",
    RUN_FAILED: "the awaited run failed",
    NOT_KNOWN: "not known whether it was done: no answer came",
    INTERRUPTED: "interrupted",
}
# Those of any command, of a command that is given names, and of one that changes what has a name.
_ANY = (FAILED, USAGE, INTERRUPTED)
_NAMED = (FAILED, USAGE, NOT_FOUND, INTERRUPTED)
_CHANGING = (FAILED, USAGE, NOT_FOUND, FORBIDDEN, NOT_KNOWN, INTERRUPTED)

_TIMES = """
A time T is written as 02:00, yesterday, 'yesterday 22:00', today, 2026-01-31,
'2026-01-31 03:00' or 2026-01-31T03:00:00Z; or as a duration ago: 90s, 15m, 2h,
1d. A time of day is the last one that there was, and a day its beginning. Without
a zone (Z, UTC or +02:00) it is in the zone of this machine, as the environment's
TZ and /etc/localtime have it.
"""

_TIMES_AHEAD = """
A time T is written as 02:00, now, 'today 22:00', tomorrow, 'tomorrow 04:00',
'2026-01-31 03:00' or 2026-01-31T03:00:00Z; or as a duration from now: 90s, 15m,
2h, 'in 1d'. A time of day is the next one, and a day its beginning. A time that
has passed is wrong usage. Without a zone (Z, UTC or +02:00) it is in the zone of
this machine, as the environment's TZ and /etc/localtime have it.
"""

_CHECK_STATUSES = """
exit status: 0 all is well; 1 a task is late by more than half its grace time, or
its last run failed, or was cut by a stop that long ago, or its row cannot be read;
2 one is overdue, dead, or takes too long, or no replica claims a job of the job
store, or no replica has been alive for 5 minutes, which is 1 after 90 seconds;
3 unknown, on every failure of the check itself, if no task was ever registered, and
while the database takes no writes, which the command tries. Tasks that are gone
never alarm, nor does what `ack` has acknowledged, and paused tasks only if a run
takes too long; that all tasks have been paused for more than a day is 1.
"""

_DOCTOR_STATUSES = """
The command writes a row to each table, and rolls it back. It also commits a write
that changes no row, to see whether commits are confirmed.

exit status: 0 nothing is wrong; 1 something is; 2 wrong usage; 130 interrupted
"""

_IMPORT = """
Takes over the jobs of a table of APScheduler's SQLAlchemyJobStore, which lies in
the same database. Jobs keep their next run times, and paused jobs stay paused.
Jobs that the job store has already are not changed, and nothing is deleted from
the old table, so the command can be run again.

SQLAlchemyJobStore pickles its jobs, and reading a pickle can run any code. So use
the command only for a table that nobody else could write to.

First stop the scheduler that runs the jobs of the old table. Otherwise the jobs
run in both places. Run the command where the application's modules can be
imported, for example in the application's folder.
"""

_IMPORT_EXAMPLES = f"""
examples:
  {PROGRAM} import-jobs --functions myapp.
  {PROGRAM} import-jobs --from jobs.apscheduler_jobs --secret-file /run/secrets/jobs

exit status: 0; 1 failed, or a job could not be taken over; 2 wrong usage; 130 interrupted
"""

Default = str | Callable[[], str]
"""An option's default. For ``--database`` it may be a function that returns the default."""

# Limits the seconds for which a change is sent again by default.
_TIMEOUT = 30.0
# Limits the seconds that `run --wait` waits by default: until the request for the run expires.
_WAIT = 3600.0


class HelpFormatter(argparse.HelpFormatter):
    """Wraps help to the terminal's width, and to 100 columns at most."""

    def __init__(self, prog: str) -> None:
        width = min(_WIDEST, shutil.get_terminal_size((_WIDEST + 2, 24)).columns - 2)
        super().__init__(prog, width=width, max_help_position=26)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return wrapped(text, width)


class CommandParser(argparse.ArgumentParser):
    """A parser that asks what was meant by a misspelled command or option.

    :ivar commands: the commands' parsers by name; empty for the parser of one command
    :ivar groups: the commands' names and what they do, by group, as the overview shows them
    """

    def __init__(self, **options: Any) -> None:
        # No abbreviations, because `pause --until` would be `--until-resumed`.
        given = {"formatter_class": HelpFormatter, "allow_abbrev": False, **options}
        super().__init__(**given)
        self.commands: Mapping[str, argparse.ArgumentParser] = {}
        self.groups: dict[str, dict[str, str]] = {}

    def error(self, message: str) -> NoReturn:
        """End the command line with an error, in which a mistyped URL shows no password."""
        super().error(without_passwords(message))

    def format_help(self) -> str:
        """Return the help; that of all commands has them in groups."""
        if not self.groups:
            return super().format_help()
        formatter = HelpFormatter(self.prog)
        formatter.add_usage("%(prog)s [-h] [--version] COMMAND ...", [], [])
        formatter.add_text(self.description)
        for title, commands in self.groups.items():
            formatter.start_section(title)
            formatter.add_arguments(
                argparse.Action([], name, metavar=name, help=told)
                for name, told in commands.items()
            )
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments(dict.fromkeys(self._option_string_actions.values()))
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the options of a command line whose command's name is one word."""
        given = list(args or [])
        self._check_command(given)
        options, unknown = self.parse_known_args(given, namespace)
        if unknown:
            command = self.commands[given[0]]
            name = unknown[0].partition("=")[0]
            command.error(
                f"unrecognized arguments: {' '.join(unknown)}"
                f"{did_you_mean(name, command._option_string_actions)}"
            )
        return options

    def _check_command(self, given: Sequence[str]) -> None:
        """End the command line if it does not begin with a command, or with --help or --version."""
        if not given or given[0] in self.commands or given[0] in self._option_string_actions:
            return
        if given[0].startswith("-"):
            self.error(f"{given[0].partition('=')[0]} has to stand after a command's name")
        self.error(
            f"there is no command {given[0]!r}; `{self.prog} --help` shows all commands"
            f"{did_you_mean(given[0], self.commands)}"
        )


class MonitorParser(CommandParser):
    """A parser for ``check``, whose usage errors go to the monitor."""

    def error(self, message: str) -> NoReturn:
        """Raise an error, because a monitor takes argparse's exit status 2 for an overdue task.

        :raises TaskLockOptionError: always
        """
        raise TaskLockOptionError(f"wrong usage: {without_passwords(message)}")


def build_parser(
    parser_class: type[CommandParser] = CommandParser,
    prog: str = PROGRAM,
    defaults: Mapping[str, Default] | None = None,
) -> CommandParser:
    """Return the parser of the whole command line.

    :param prog: the program's name
    :param defaults: defaults of options, such as ``database``, for all commands except ``demo``
    """
    parser = parser_class(
        prog=prog,
        description="What operators see and steer of APScheduler's task locks.",
        epilog=f"{prog} COMMAND --help shows the options of a command, and examples",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {library_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parser.commands = commands.choices
    for title, add in _GROUPS.items():
        add(_Commands(commands, parser.groups.setdefault(title, {})))
    for name, command in commands.choices.items():
        if defaults and name != "demo":  # because the demo makes a database of its own
            command.set_defaults(**defaults)
    return parser


class _Commands:
    """The commands of one group.

    :param commands: what argparse adds commands to
    :param shown: the names of the group's commands, and what they do
    """

    def __init__(self, commands: Any, shown: dict[str, str]) -> None:
        self._commands = commands
        self._shown = shown

    def add_parser(
        self,
        name: str,
        *,
        help: str,  # noqa: A002  # argparse's name
        epilog: str | None = None,
        **options: Any,
    ) -> argparse.ArgumentParser:
        """Add a command as argparse does, by default with the exit statuses of any command."""
        self._shown[name] = help
        added: argparse.ArgumentParser = self._commands.add_parser(
            name, help=help, epilog=epilog or _statuses(_ANY), **options
        )
        return added


def _statuses(codes: Sequence[int], command: str = "") -> str:
    """Return the exit statuses that a command can have, beside 0, with their meanings."""
    what = "job" if command.startswith("jobs") else "task"
    told = (f"{code} {_MEANINGS[code].format(what=what)}" for code in codes)
    return "\n" + "; ".join(["exit status: 0", *told])


def joined(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, in which a command's name is one word.

    An action that follows ``jobs`` directly is a part of the command's name, as in ``jobs pause``.
    """
    if words[:1] == ["jobs"] and words[1:2] and words[1] in jobs.ACTIONS:
        return [f"jobs {words[1]}", *words[2:]]
    return list(words)


def _add_reads(commands: _Commands) -> None:
    command = _add(
        commands,
        "status",
        status.status,
        "the tasks: what they do, and how they fare",
        [
            "status",
            "status 'report-*' --state overdue",
            "status --order due --limit 10",
            "status --watch",
            "status --json",
        ],
    )
    _add_patterns(command)
    command.add_argument("--state", type=values.state, help="only tasks in this state")
    command.add_argument(
        "--order",
        choices=ORDERS,
        metavar="ORDER",
        help="name; due: the soonest first; started: the last run that began last first; "
        "duration: the last run that took longest first; failures: the most in a row first; "
        "urgency: the worst state first (default: name, with --watch urgency)",
    )
    command.add_argument(
        "--limit",
        type=values.at_least_one,
        metavar="N",
        help="only the first N tasks in this order (default: 1000, of more tasks the worst; a line "
        "says what is left out)",
    )
    command.add_argument(
        "--watch", action="store_true", help="show it live, until Ctrl-C; needs a terminal"
    )

    command = _add(
        commands,
        "show",
        status.show,
        "one task, and how its last 20 runs went",
        ["show sync-prices", "show sync-prices --json"],
    )
    command.add_argument("task", metavar="TASK", help="its name")

    command = _add(
        commands,
        "runs",
        runs.runs,
        "the run history, and what operators did, the newest first",
        [
            "runs",
            "runs sync-prices --outcome error --since 2h",
            "runs --since yesterday --until today",
            "runs --since 22:00 --until 02:00",
            "runs --kind operator --since yesterday",
            "runs --outcome error,died,missed --since yesterday",
            "runs --replica web-1:4127:9c --error timeout",
            "runs --follow",
        ],
        _TIMES,
    )
    _add_patterns(command, "TASK")
    command.add_argument(
        "--outcome",
        type=values.outcomes,
        action="extend",  # given twice, it asks for both
        metavar="OUTCOME,..",
        help=f"only runs with one of these outcomes: {', '.join(OUTCOMES)}",
    )
    command.add_argument(
        "--kind",
        choices=KINDS,
        metavar="KIND",
        help=f"only entries of this kind: {', '.join(KINDS)}; operator: what operators did",
    )
    command.add_argument("--replica", metavar="ID", help="only runs of this replica")
    command.add_argument(
        "--error",
        metavar="TEXT",
        help="only runs whose error has this text in its class or message",
    )
    command.add_argument(
        "--since",
        type=values.moment,
        metavar="T",
        help="only runs that began, or were missed, at this time or later",
    )
    command.add_argument(
        "--until",
        type=values.moment,
        metavar="T",
        help="only runs that began, or were missed, before this time",
    )
    command.add_argument(
        "--limit",
        type=values.at_least_one,
        default=100,
        metavar="N",
        help="how many of the newest runs (default: 100); a line says if there are more",
    )
    command.add_argument(
        "--follow", action="store_true", help="print further runs when they end, until Ctrl-C"
    )
    command = _add(
        commands,
        "why",
        why.why,
        "why a task did not run, or what became of its run",
        ["why sync-prices", "why sync-prices --at 02:00", "why sync-prices --at yesterday --json"],
        _TIMES,
    )
    command.add_argument("task", metavar="TASK", help="its name")
    command.add_argument(
        "--at",
        type=values.moment,
        metavar="T",
        help="the last run time until this moment (default: until now)",
    )
    _add(commands, "replicas", replicas.replicas, "who runs the tasks", ["replicas"], exits=_ANY)

    command = _add(
        commands,
        "dashboard",
        dashboard.dashboard,
        "all of it in a browser, on this machine",
        ["dashboard", "dashboard --operate", "dashboard --port 9000"],
        f"On another host than loopback, browsers ask for the password in "
        f"{dashboard.PASSWORD_VARIABLE}; the user's name is the operator's.",
        exits=_ANY,
    )
    command.add_argument(
        "--host", default="127.0.0.1", metavar="HOST", help="where it listens (default: 127.0.0.1)"
    )
    command.add_argument(
        "--port", type=values.port, default=8765, metavar="N", help="its port (default: 8765)"
    )
    command.add_argument(
        "--operate", action="store_true", help="let readers also pause, resume, run and free tasks"
    )


def _add_changes(commands: _Commands) -> None:
    command = _add(
        commands,
        "pause",
        steering.pause,
        "let no replica begin tasks any more; a run that goes on ends by itself",
        [
            "pause sync-prices --for 2h --reason 'the shop is closed'",
            "pause 'report-*' sync-prices",
            "pause --all --for 30m --reason 'the database moves'",
            "pause --all --namespace shop: --until-resumed",
        ],
        "Tasks that appear later are not paused, whether or not they match. Pauses do not replace "
        "each other: a task is paused until the last of its pauses ends or is taken out.",
        exits=_CHANGING,
    )
    _add_names(command, "*")
    _add_all(command)
    ends = command.add_mutually_exclusive_group()
    ends.add_argument(
        "--for",
        dest="duration",
        type=values.duration,
        metavar="D",
        help="for how long, such as 90s, 15m, 2h or 1d (default: until it is resumed)",
    )
    ends.add_argument(
        "--until-resumed",
        action="store_true",
        help="until it is resumed; --all needs this or --for",
    )
    command.add_argument("--reason", metavar="R", help="why, shown to others")
    _add_operator(command)

    command = _add(
        commands,
        "resume",
        steering.resume,
        "take your own pauses of tasks out",
        [
            "resume sync-prices",
            "resume 'report-*'",
            "resume sync-prices --force",
            "resume --all",
        ],
        "Tasks that others have paused stay paused, which is exit status 4.",
        exits=_CHANGING,
    )
    _add_names(command, "*")
    _add_all(command)
    command.add_argument("--force", action="store_true", help="also the pauses of all others")
    _add_operator(command)

    command = _add(
        commands,
        "run",
        steering.run,
        "let one replica run a task now; its schedule does not change",
        ["run sync-prices", "run sync-prices --wait 10m"],
        exits=(*_CHANGING[:-2], WAIT_OVER, RUN_FAILED, *_CHANGING[-2:]),
    )
    _add_name(command)
    command.add_argument(
        "--wait",
        type=values.duration,
        nargs="?",
        const=_WAIT,
        metavar="D",
        help="wait until the run has ended, at most for D (default: 1h), and print its outcome",
    )
    _add_operator(command)

    command = _add(
        commands,
        "free",
        steering.free,
        "end a run in the place of its holder, which is dead or hangs",
        ["free sync-prices --token 41", "free sync-prices --token 41 --run-again --yes"],
        "A holder that is alive may go on for a third of its lease until it notices.",
        exits=_CHANGING,
    )
    _add_name(command)
    command.add_argument(
        "--token", type=int, required=True, metavar="N", help="the run's token, from `show`"
    )
    command.add_argument(
        "--run-again",
        action="store_true",
        help="open the run's window, to be run again",
    )
    command.add_argument(
        "--force", action="store_true", help="also if the run's holder may be alive"
    )
    command.add_argument("--yes", action="store_true", help="do not ask")
    _add_operator(command)

    command = _add(
        commands,
        "ack",
        steering.ack,
        "acknowledge a failure, a cut or misses, so that they alarm no more",
        ["ack sync-prices", "ack sync-prices --token 41 --as ann"],
        "A later one alarms again. A one-off job's failure or miss alarms for a day at most.",
        exits=_CHANGING,
    )
    _add_name(command)
    command.add_argument(
        "--token",
        type=int,
        metavar="N",
        help="the last run's token, from `show` (default: as it is now); if there is a newer run, "
        "nothing is acknowledged",
    )
    command.add_argument(
        "--until",
        type=values.moment_ahead,
        metavar="T",
        help="until then, later failures and misses alarm no more, either",
    )
    _add_operator(command)

    command = _add(
        commands,
        "forget",
        steering.forget,
        "delete the row and the history of a task that no longer exists, or rows of replicas",
        ["forget old-report", "forget --replica 'web-*'"],
        "A replica that has died and will not come back, such as those in a copy of a database, is "
        "then expected no more. Replicas that are alive stay.",
        exits=_CHANGING,
    )
    command.add_argument("tasks", nargs="*", metavar="TASK", help="its exact name; no pattern")
    command.add_argument(
        "--replica",
        metavar="ID",
        help="in place of a task: a replica's id, in which * and ? stand for characters",
    )


def _add_jobs(commands: _Commands) -> None:
    command = _add(
        commands,
        "jobs",
        jobs.jobs,
        "the jobs of the job store",
        ["jobs", "jobs 'reminder-*'", "jobs --json"],
        "With --namespace, only those whose tasks' names begin with it; patterns are of ids. What "
        "changes jobs directly follows `jobs`: `jobs pause`, `jobs resume`, `jobs run`, `jobs "
        "move`, `jobs remove`.",
    )
    command.add_argument(
        "patterns",
        nargs="*",
        metavar="GLOB",
        help="jobs' ids, in which * and ? stand for characters (default: all jobs)",
    )

    command = _add(
        commands,
        "jobs pause",
        jobs.pause,
        "let jobs have no next run time until somebody resumes them",
        ["jobs pause reminder-7", "jobs pause 'reminder-*' nightly"],
        "A run that goes on ends by itself.",
        exits=_CHANGING,
    )
    _add_ids(command)

    command = _add(
        commands,
        "jobs resume",
        jobs.resume,
        "let jobs have the first run times of their triggers from now on",
        ["jobs resume reminder-7", "jobs resume 'reminder-*'"],
        "A one-off job whose date has passed runs at once.",
        exits=_CHANGING,
    )
    _add_ids(command)

    command = _add(
        commands,
        "jobs run",
        jobs.run,
        "let one replica run a job now; its schedule does not change",
        ["jobs run nightly"],
        "A one-off job runs in place of its date.",
        exits=_CHANGING,
    )
    _add_id(command)

    command = _add(
        commands,
        "jobs move",
        jobs.move,
        "move the next run time of a job; a paused job is resumed",
        ["jobs move nightly --to 04:00", "jobs move nightly --to 'in 2h'"],
        "The run times after it come from the trigger.",
        f"{_TIMES_AHEAD}{_statuses(_CHANGING, 'jobs move')}",
        exits=_CHANGING,
    )
    command.add_argument(
        "--to", type=values.moment_ahead, metavar="T", required=True, help="the time"
    )
    _add_id(command)

    command = _add(
        commands,
        "jobs remove",
        jobs.remove,
        "remove jobs",
        ["jobs remove reminder-7"],
        "A run that goes on ends by itself.",
        exits=_CHANGING,
    )
    _add_id(command, "+")


def _add_monitors(commands: _Commands) -> None:
    command = _add(
        commands,
        "check",
        check.check,
        "one line for a monitor, as a plugin of Nagios",
        ["check", "check 'report-*' sync-prices", "check --namespace shop:"],
        epilog=_CHECK_STATUSES,
    )
    command.add_argument(
        "--allow-empty", action="store_true", help="exit with 0 if no task was ever registered"
    )
    command.add_argument(
        "--no-replica-after",
        type=values.duration_or_never,
        metavar="D",
        default=NO_REPLICA_AFTER,
        help="exit with 2 if no replica has been alive for so long, by default 5m; or never",
    )
    command.add_argument(
        "--expect-replicas",
        type=values.at_least_one,
        metavar="N",
        default=0,
        help="exit with 1 if fewer replicas are alive",
    )
    _add_patterns(command)
    _add(
        commands,
        "doctor",
        doctor.doctor,
        "what is wrong with the set-up, and what to do about it",
        ["doctor", "doctor --json"],
        epilog=_DOCTOR_STATUSES,
    )
    served = commands.add_parser(
        "metrics", help="print what the tasks' rows tell as Prometheus' text, or serve it"
    )
    _add_table_options(served)
    served.add_argument(
        "--listen",
        type=values.address,
        metavar="HOST:PORT",
        help="serve it at /metrics until Ctrl-C, as on 127.0.0.1:9464; by default print it once",
    )
    _add_json(served)
    served.set_defaults(run=metrics.metrics)


def _add_setup(commands: _Commands) -> None:
    upgrade = commands.add_parser("upgrade", help="create the tables, or bring them up to date")
    _add_table_options(upgrade)
    upgrade.add_argument("--sql", action="store_true", help="print the statements, run nothing")
    _add_json(upgrade)
    upgrade.set_defaults(run=setup.upgrade)

    downgrade = commands.add_parser("downgrade", help="drop the tables")
    _add_table_options(downgrade)
    downgrade.add_argument("--yes", action="store_true", help="do not ask")
    _add_json(downgrade)
    downgrade.set_defaults(run=setup.downgrade)

    _add_import(commands)

    demo = commands.add_parser("demo", help="watch replicas share jobs, and one of them die")
    _add_database_option(demo, "by default an embedded PostgreSQL, which goes with the demo")
    demo.add_argument(
        "--replicas", type=values.at_least_one, default=3, help="how many (default: 3)"
    )
    demo.add_argument(
        "--seconds",
        type=values.demo_seconds,
        default=30.0,
        help="how long (default: 30); from 12 on one of them is killed on the way",
    )
    story = demo.add_mutually_exclusive_group()
    story.add_argument(
        "--shared-store",
        action="store_true",
        help="show the job store that all replicas share: jobs that one adds and another runs",
    )
    story.add_argument(
        "--leader",
        action="store_true",
        help="show leader mode: one replica asks first, and is the one that is killed",
    )
    demo.set_defaults(run=setup.demo)


def _add_import(commands: _Commands) -> None:
    command = commands.add_parser(
        "import-jobs",
        help="take over the jobs of APScheduler's SQLAlchemyJobStore",
        description=_IMPORT,
        epilog=_IMPORT_EXAMPLES,
    )
    _add_table_options(command)
    command.add_argument(
        "--from",
        dest="source",
        default="apscheduler_jobs",
        metavar="TABLE",
        help="the old table, or SCHEMA.TABLE (default: %(default)s)",
    )
    command.add_argument(
        "--functions",
        nargs="+",
        metavar="PREFIX",
        help="which functions jobs may call, as the application's job store has them",
    )
    command.add_argument(
        "--secret-file",
        metavar="FILE",
        help="a file with the application's secret, which signs the rows; a line break at its end "
        "does not count",
    )
    command.add_argument(
        "--late",
        action="store_true",
        help="also take over jobs whose last run time has passed; they run at once. Not for an old "
        "table that was taken over before, because jobs that have run since would run again",
    )
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.set_defaults(run=importing.import_jobs)


def _add(
    commands: _Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    help_: str,
    examples: list[str],
    more: str = "",
    epilog: str | None = None,
    exits: Sequence[int] = _NAMED,
) -> argparse.ArgumentParser:
    """Add a command for operators, with the options that all these commands have."""
    shown = "\n".join(f"  {PROGRAM} {example}" for example in examples)
    description = f"{help_[0].upper()}{help_[1:]}."
    if more:
        description += f"\n{more}" if more.startswith("\n") else f" {more}"
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help_,
        description=description,
        epilog=f"examples:\n{shown}\n{epilog or _statuses(exits, name)}",
    )
    _add_table_options(command)
    command.add_argument(
        "--namespace",
        type=values.namespace,
        default="",
        metavar="PREFIX",
        help="put before the given names and patterns; without any, all tasks that begin with it",
    )
    _add_json(command)
    command.set_defaults(run=run)
    if FORBIDDEN in exits:
        command.add_argument(
            "--timeout",
            type=values.duration,
            default=_TIMEOUT,
            metavar="D",
            help="for how long a change without an answer is sent again (default: 30s); it is not "
            "made twice",
        )
    return command


def _add_database_option(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--database", metavar="URL", help=f"postgresql://user:password@host:5432/name; {default}"
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _add_table_options(parser: argparse.ArgumentParser) -> None:
    _add_database_option(parser, f"by default the environment's {DATABASE_VARIABLE}")
    parser.add_argument("--schema", help="schema of the table (default: from the search_path)")
    parser.add_argument("--table", default=DEFAULT_TABLE, help="name (default: %(default)s)")


def _add_patterns(parser: argparse.ArgumentParser, metavar: str = "GLOB") -> None:
    parser.add_argument(
        "patterns",
        nargs="*",
        metavar=metavar,
        help="tasks' names, in which * and ? stand for characters (default: all tasks)",
    )


def _add_all(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all",
        dest="all_tasks",
        action="store_true",
        help="all tasks of the namespace, also those that appear later",
    )


def _add_names(parser: argparse.ArgumentParser, nargs: str = "+") -> None:
    parser.add_argument(
        "tasks",
        nargs=nargs,
        metavar="TASK",
        help="their names, in which * and ? stand for characters where no task has exactly that "
        "name; if one matches no task, nothing is changed",
    )


def _add_operator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--as",
        dest="name",
        metavar="NAME",
        help="in whose name, shown to others (default: this process's user and host)",
    )


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tasks", nargs=1, metavar="TASK", help="its exact name; no pattern")


def _add_ids(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "jobs",
        nargs="+",
        metavar="ID",
        help="their ids, in which * and ? stand for characters where no job has exactly that id; "
        "if one matches no job, nothing is changed",
    )
    parser.set_defaults(patterns=True)
    _add_operator(parser)


def _add_id(parser: argparse.ArgumentParser, nargs: str | int = 1) -> None:
    help_ = "its exact id; no pattern" if nargs == 1 else "their exact ids; no patterns"
    parser.add_argument("jobs", nargs=nargs, metavar="ID", help=help_)
    parser.set_defaults(patterns=False)
    _add_operator(parser)


_GROUPS: dict[str, Callable[[_Commands], None]] = {
    "see what the tasks do": _add_reads,
    "steer tasks": _add_changes,
    "jobs of the job store": _add_jobs,
    "for monitors": _add_monitors,
    "set up": _add_setup,
}
