"""The commands, their options, and examples of both."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from apscheduler_tasklock._lock.commands import PROGRAM
from apscheduler_tasklock.cli import (
    check,
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
)
from apscheduler_tasklock.cli.target import DATABASE_VARIABLE
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.schema.table import DEFAULT_TABLE
from apscheduler_tasklock.status import OUTCOMES

_STATUSES = """
exit status: 0; 1 failed; 2 wrong usage; 3 no such task; 4 its state forbids it;
5 the wait ran out; 6 the awaited run failed
"""

_TIMES = """
A time T is written as 02:00, yesterday, 'yesterday 22:00', today, 2026-01-31,
'2026-01-31 03:00' or 2026-01-31T03:00:00Z; or as a duration ago: 90s, 15m, 2h,
1d. A time of day is the last one that there was, and a day its beginning. With
--since 22:00, --until 02:00 is the one after that, or now if it is still to come.
Without a zone (Z, UTC or +02:00) it is in the zone of this machine, as the
environment's TZ and /etc/localtime have it.
"""

_CHECK_STATUSES = """
exit status: 0 all is well; 1 a task is late by more than half its grace time, or
its last run failed, or was cut by a stop that long ago, or its row cannot be read;
2 one is overdue, dead, or takes too long; 3 unknown, on every failure of the check
itself. Tasks that are paused or gone never alarm.
"""

_DOCTOR_STATUSES = """
It writes a row to each table, and rolls that back.

exit status: 0 nothing is wrong; 1 something is; 2 wrong usage
"""

_IMPORT = """
Takes over the jobs of a table of APScheduler's SQLAlchemyJobStore, which lies in
the same database. They keep their next run times, and stay paused if they are.
What is there already is left as it is, and nothing is deleted from the old table,
so it can be run again.

SQLAlchemyJobStore pickles its jobs. To read a pickle runs what it says: only do
this with a table that you trust, that is, one that nobody else could write to.

Stop what runs the jobs of the old table first, or they run here and there. Run
this where the application's modules can be imported, as in its folder.
"""

_IMPORT_EXAMPLES = f"""
examples:
  {PROGRAM} import-jobs --functions myapp.
  {PROGRAM} import-jobs --from jobs.apscheduler_jobs --secret-file /run/secrets/jobs

exit status: 0; 1 failed, or a job could not be taken over; 2 wrong usage
"""

Default = str | Callable[[], str]
"""An option's default; of ``--database``, also a function that returns it."""

# How long `run --wait` waits: as long as a request stands.
_WAIT = 3600.0


class MonitorParser(argparse.ArgumentParser):
    """A parser for ``check``, whose usage errors are the monitor's to be told."""

    def error(self, message: str) -> NoReturn:
        """Raise an error in place of ending with 2, which would say that a task is overdue.

        :raises TaskLockOptionError: always
        """
        raise TaskLockOptionError(f"wrong usage: {message}")


def build_parser(
    parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser,
    prog: str = PROGRAM,
    defaults: Mapping[str, Default] | None = None,
) -> argparse.ArgumentParser:
    """Return the parser of the whole command line.

    :param prog: what it is called as
    :param defaults: of options of all commands except ``demo``, as ``database``
    """
    parser = parser_class(
        prog=prog,
        description="What operators see and steer of APScheduler's task locks.",
        epilog=f"{prog} COMMAND --help shows the options of a command, and examples",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_reads(commands)
    _add_changes(commands)
    _add_monitors(commands)
    _add_setup(commands)
    for name, command in commands.choices.items():
        if defaults and name != "demo":  # which makes a database of its own
            command.set_defaults(**defaults)
    return parser


def needs_defaults(options: argparse.Namespace) -> bool:
    """Tell whether the command that was given has defaults; ``demo`` has a database of its own."""
    return options.run is not setup.demo


def _add_reads(commands: Any) -> None:
    command = _add(
        commands,
        "status",
        status.status,
        "the tasks: what they do, and how they fare",
        ["status", "status 'report-*' --state overdue", "status --watch", "status --json"],
    )
    _add_patterns(command)
    command.add_argument("--state", type=values.state, help="only tasks in this state")
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
        "the run history, the newest first",
        [
            "runs",
            "runs sync-prices --outcome error --since 2h",
            "runs --since yesterday --until today",
            "runs --since 22:00 --until 02:00",
            "runs --follow",
        ],
        _TIMES,
    )
    _add_patterns(command, "TASK")
    command.add_argument("--outcome", choices=OUTCOMES, help="only runs that ended so")
    command.add_argument(
        "--since",
        type=values.moment,
        metavar="T",
        help="only those begun then or later",
    )
    command.add_argument(
        "--until", type=values.End.of, metavar="T", help="only those begun before then"
    )
    command.add_argument(
        "--limit",
        type=values.at_least_one,
        default=100,
        metavar="N",
        help="how many, the newest of them (default: 100); it is said if there are more",
    )
    command.add_argument(
        "--follow", action="store_true", help="print further ones when they end, until Ctrl-C"
    )
    _add(commands, "replicas", replicas.replicas, "who runs the tasks", ["replicas"])

    command = _add(
        commands,
        "jobs",
        jobs.jobs,
        "the jobs of the job store",
        ["jobs", "jobs 'reminder-*'", "jobs --json"],
        "With --namespace, only those whose tasks' names begin with it; patterns are of ids.",
    )
    command.add_argument(
        "patterns",
        nargs="*",
        metavar="GLOB",
        help="jobs' ids, in which * and ? stand for characters (default: all jobs)",
    )


def _add_changes(commands: Any) -> None:
    command = _add(
        commands,
        "pause",
        steering.pause,
        "let no replica begin tasks any more; a run that goes on ends by itself",
        [
            "pause sync-prices --for 2h --reason 'the shop is closed'",
            "pause 'report-*' sync-prices",
        ],
        "Tasks that appear later are not paused, whether or not they match.",
    )
    _add_names(command)
    command.add_argument(
        "--for",
        dest="duration",
        type=values.duration,
        metavar="D",
        help="for how long, such as 90s, 15m, 2h or 1d (default: until it is resumed)",
    )
    command.add_argument("--reason", metavar="R", help="why, shown to others")

    command = _add(
        commands,
        "resume",
        steering.resume,
        "end the pause of tasks",
        ["resume sync-prices", "resume 'report-*'"],
    )
    _add_names(command)

    command = _add(
        commands,
        "run",
        steering.run,
        "let one replica run a task now; its schedule does not change",
        ["run sync-prices", "run sync-prices --wait 10m"],
    )
    _add_name(command)
    command.add_argument(
        "--wait",
        type=values.duration,
        nargs="?",
        const=_WAIT,
        metavar="D",
        help="wait until that run has ended, for 1h or so long at most, and tell how it ended",
    )

    command = _add(
        commands,
        "free",
        steering.free,
        "end a run in the place of its holder, which is dead or hangs",
        ["free sync-prices --token 41", "free sync-prices --token 41 --run-again --yes"],
        "A holder that is alive may go on for a third of its lease until it notices.",
    )
    _add_name(command)
    command.add_argument(
        "--token", type=int, required=True, metavar="N", help="of the run, as `show` has it"
    )
    command.add_argument(
        "--run-again", action="store_true", help="open its window, so that it can be run again"
    )
    command.add_argument(
        "--force", action="store_true", help="also if its holder may be alive, and hangs"
    )
    command.add_argument("--yes", action="store_true", help="do not ask")

    command = _add(
        commands,
        "forget",
        steering.forget,
        "delete the row and the history of a task that no longer exists",
        ["forget old-report"],
    )
    _add_name(command)


def _add_monitors(commands: Any) -> None:
    command = _add(
        commands,
        "check",
        check.check,
        "one line for a monitor, as a plugin of Nagios",
        ["check", "check 'report-*' sync-prices", "check --namespace shop:"],
        epilog=_CHECK_STATUSES,
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


def _add_setup(commands: Any) -> None:
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
    demo.add_argument(
        "--shared-store",
        action="store_true",
        help="show the job store that all replicas share: jobs that one adds and another runs",
    )
    demo.set_defaults(run=setup.demo)


def _add_import(commands: Any) -> None:
    command = commands.add_parser(
        "import-jobs",
        help="take over the jobs of APScheduler's SQLAlchemyJobStore",
        description=_IMPORT,
        epilog=_IMPORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        help="also jobs whose last run time has passed: they run at once. Not if the old table was "
        "taken over before: those that have run since would run again",
    )
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.set_defaults(run=importing.import_jobs)


def _add(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    help_: str,
    examples: list[str],
    more: str = "",
    epilog: str = _STATUSES,
) -> argparse.ArgumentParser:
    """Add a command, with the options that all of them have."""
    shown = "\n".join(f"  {PROGRAM} {example}" for example in examples)
    description = f"{help_[0].upper()}{help_[1:]}."
    if more:
        description += f"\n{more}" if more.startswith("\n") else f" {more}"
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help_,
        description=description,
        epilog=f"examples:\n{shown}\n{epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_table_options(command)
    command.add_argument(
        "--namespace",
        type=values.namespace,
        default="",
        metavar="PREFIX",
        help="put before the names and patterns that are given; without any, all tasks with it",
    )
    _add_json(command)
    command.set_defaults(run=run)
    return command


def _version() -> str:
    try:
        return version(PROGRAM)
    except PackageNotFoundError:  # run from a folder where it is not installed
        return "(not installed)"


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


def _add_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tasks",
        nargs="+",
        metavar="TASK",
        help="their names, in which * and ? stand for characters where no task has exactly that "
        "name; if one matches no task, nothing is changed",
    )


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tasks", nargs=1, metavar="TASK", help="its exact name; no pattern")
