"""Every reader on every hostile row: it tells of the good rows beside it, and names the bad one.

The rows are a table of cases, ``tests/support/hostile.py``. All of them are in one database, and
are read once: what blinds a read is found by asking it again with each of them alone. What is shown
of them is a function of what was read.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from io import StringIO
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

import psycopg
import pytest
from rich.console import Console
from sqlalchemy import DateTime, Text

from apscheduler_tasklock import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockOptionError,
    TaskLocks,
)
from apscheduler_tasklock._words.gauges import rows_of, text_of
from apscheduler_tasklock._words.json_text import as_json
from apscheduler_tasklock.cli.check import line_of, message_of_findings, numbers_of
from apscheduler_tasklock.cli.jobs import job_table
from apscheduler_tasklock.cli.output import PlainOutput, Table, TerminalOutput, print_json
from apscheduler_tasklock.cli.replicas import print_replicas
from apscheduler_tasklock.cli.runs import run_rows
from apscheduler_tasklock.cli.status import TaskHistory, print_task, task_table
from apscheduler_tasklock.metrics import prometheus_text
from apscheduler_tasklock.schema.table import (
    LARGEST_DEFINITION,
    LARGEST_REPLICA,
    LARGEST_VALUE,
    LONGEST_TEXT,
    LONGEST_TEXTS,
    tables_of,
    task_lock_table,
)
from apscheduler_tasklock.status import ORDERS, JobState, ReplicaState, TaskState
from tests.support import hostile, rows
from tests.support.commands import Command, OnTerminal
from tests.support.hostile import GOOD, JOBS, REPLICAS, RUNS, TASKS, Hostile
from tests.support.markup import check_markup
from tests.support.pages import Known, Reader
from tests.support.polling import eventually
from tests.support.schedulers import Replica
from tests.support.stored_jobs import StoreReplica, note, ran
from tests.support.waist import printable, severity_of

Connection = psycopg.Connection[Any]

LATER = datetime(2100, 1, 1, tzinfo=timezone.utc)


# Of so many tasks the story of one is read.
SHOWN = 9

PAGES = (
    *("/", "/tasks", "/runs", "/timeline", "/timeline?by=task", "/replicas", "/jobs"),
    *("/tasks?order=due", "/jobs?page=2"),
)


@dataclass(frozen=True)
class Told:
    """What a reader has told.

    :ivar names: the rows that it has named, good and bad
    :ivar unreadable: those of them that it has told as unreadable
    """

    names: set[str]
    unreadable: set[str]


class Commands:
    """The commands with which operators and monitors read the tables, one method for each."""

    def __init__(self, locks: TaskLocks, command: Command) -> None:
        self._locks = locks
        self._command = command

    def status(self) -> Told:
        return self._listed("status", "name")

    def runs_command(self) -> Told:
        return self._listed("runs", "task", "--limit", "10000")

    def replicas_command(self) -> Told:
        return self._listed("replicas", "replica_id")

    def jobs_command(self) -> Told:
        return self._listed("jobs", "id")

    def check(self) -> Told:
        answer = self._command("check", "--json")
        assert answer.status in (0, 1, 2), answer
        findings = answer.json["findings"]
        names = {task.name for task in self._locks.tasks()}
        bad = {each["task"] for each in findings if each["what"] == "unreadable"}
        assert answer.json["metrics"]["unreadable"] == len(bad)
        assert not bad or answer.json["exit_status"] >= 1
        assert len(self._command("check").out) < 20_000
        return Told(names, bad)

    def metrics(self) -> Told:
        names = [task.name for task in self._locks.tasks()]
        return told_by_metrics(prometheus_text(self._locks), names)

    def show(self) -> Told:
        names = {task.name for task in self._locks.tasks()}
        bad = set()
        for name in names:
            answer = self._command("show", "--", name)
            assert answer.status == 0, answer
            if "\nstate        unreadable" in answer.out:
                bad.add(name)
        return Told(names, bad)

    def _listed(self, command: str, key: str, *options: str) -> Told:
        """As lines and columns, and as JSON."""
        answer = self._command(command, *options)
        assert answer.status == 0, answer.err
        check_lines(answer.out)
        answer = self._command(command, "--json", *options)
        assert answer.status == 0, answer.err
        return told_by_json(answer.out, key)


def check_lines(text: str) -> None:
    assert len(max(text.splitlines(), key=len)) < 10_000, "a line is too long to be read"
    assert text.replace("\n", "").isprintable()


def told_by_json(text: str, key: str) -> Told:
    """Return what rows as JSON tell. Those that have no state are not told as unreadable."""
    found = json.loads(text, parse_constant=pytest.fail)
    bad = {row[key] for row in found if row.get("state") == "unreadable"}
    return Told({row[key] for row in found}, bad)


def told_by_metrics(text: str, known: Iterable[str]) -> Told:
    """Return what the text tells of tasks, by their names as the rows have them."""
    assert text.replace("\n", "").isprintable()
    rows_of_names = {"\n".join(map(printable, name.split("\n"))): name for name in known}
    names, bad = set(), set()
    for line in text.split("\n"):
        labels, _, rest = line.partition('tasklock_task_name="')
        if rest:
            label, _, value = rest.rpartition('"} ')
            name = rows_of_names[json.loads(f'"{label}"', strict=False)]
            names.add(name)
            assert value not in ("nan", "inf", "-inf")
            if 'tasklock_finding_kind="unreadable"' in labels:
                bad.add(name)
    return Told(names, bad)


def insert(connection: Connection, cases: Sequence[Hostile]) -> dict[Hostile, str]:
    """Make the good rows and the hostile ones, and return the names of these."""
    with connection.transaction():
        hostile.insert_good(connection)
        return {case: case.insert(connection) for case in cases}


def judge(told: Told, table: str, names: dict[Hostile, str]) -> list[str]:
    """Return what is wrong with what a reader has told."""
    wrong = []
    if GOOD[table] not in told.names - told.unreadable:
        wrong.append("the good row is not told")
    for case, name in names.items():
        if case.table == table:
            if name not in told.names:
                wrong.append(f"{case}: not told")
            elif case.unreadable != (name in told.unreadable):
                wrong.append(f"{case}: told as {'odd' if case.unreadable else 'unreadable'}")
    return wrong


def culprits(
    read: Callable[[], Any], connection: Connection, cases: Sequence[Hostile]
) -> list[str]:
    """Return the cases that a reader fails on, each of them alone in the database."""
    found = []
    for case in cases:
        connection.execute(f"TRUNCATE {', '.join(hostile.KEYS)}".encode())
        insert(connection, [case])
        try:
            read()
        except Exception as error:  # noqa: BLE001  # whatever it is, it is what is looked for
            found.append(f"{case}: {type(error).__name__}: {str(error)[:150]}")
    return found


@dataclass(frozen=True)
class Hostiles:
    """What was read of the good rows and the hostile ones.

    :ivar names: the names of the hostile rows
    """

    known: Known
    names: dict[Hostile, str]


# The rows are read once in a process of tests.
_READ: list[Hostiles] = []


@pytest.fixture
def hostiles(request: pytest.FixtureRequest) -> Hostiles:
    """What each method of the task locks reads of the rows."""
    if not _READ:
        connection = request.getfixturevalue("connection")
        locks: TaskLocks = request.getfixturevalue("make_task_locks")()
        names = insert(connection, hostile.CASES)
        try:
            known = read(locks)
        except Exception as error:
            found = culprits(lambda: read(locks), connection, hostile.CASES)
            raise AssertionError("\n".join(found)) from error
        _READ.append(Hostiles(known, names))
    return _READ[0]


def read(locks: TaskLocks) -> Known:
    """Read the rows by each method, and return what was read."""
    overview = locks.overview(limit=1000)
    tasks = locks.tasks()
    names = [task.name for task in tasks]
    for order in ORDERS:
        ordered = locks.tasks(order=order, states=list(TaskState))
        assert sorted(task.name for task in ordered) == sorted(names)
    assert sum(overview.counts.values()) == len(tasks)
    runs = locks.runs(limit=10_000)
    assert set(locks.recent_runs(*names)) == set(names)
    for by in ("task", "replica"):
        assert locks.lanes(overview.now - timedelta(hours=1), overview.now, by=by).lanes
    for name in [name for name in names if len(name) < 1000][::SHOWN]:
        assert locks.why(name).task.name == name
        assert [task.name for task in locks.tasks(name)] != [] or "\\" in name
    usual = locks.usual_durations()
    assert locks.usual_durations(*names) == {n: usual[n] for n in names if n in usual}
    locks.jobs(overdue=True)
    return Known(tasks, runs, locks.replicas(), locks.jobs(), usual=usual, now=overview.now)


@pytest.mark.parametrize("table", [TASKS, RUNS, REPLICAS, JOBS])
def test_a_read_tells_of_good_rows_and_names_the_bad_ones(table: str, hostiles: Hostiles) -> None:
    known = hostiles.known
    if table == TASKS:
        tasks = known.tasks()
        assert all((task.state is TaskState.UNREADABLE) == bool(task.unreadable) for task in tasks)
        told = Told({t.name for t in tasks}, {t.name for t in tasks if t.unreadable})
    elif table == RUNS:
        assert all(isinstance(run.took, float) for run in known.runs_)
        told = Told({run.task for run in known.runs_}, set())
    elif table == REPLICAS:
        found = known.replicas()
        assert all((r.state is ReplicaState.UNREADABLE) == bool(r.unreadable) for r in found)
        told = Told({r.replica_id for r in found}, {r.replica_id for r in found if r.unreadable})
    else:
        jobs = known.jobs()
        assert all((job.state is JobState.UNREADABLE) == bool(job.unreadable) for job in jobs)
        told = Told({job.id for job in jobs}, {job.id for job in jobs if job.unreadable})
    assert not judge(told, table, hostiles.names)


class Shown:
    """What commands and monitors show of what was read, one method for each."""

    def __init__(self, known: Known, capsys: pytest.CaptureFixture[str]) -> None:
        self._known = known
        self._capsys = capsys

    def status(self) -> Told:
        tasks, usual = self._known.tasks(), self._known.usual
        table = task_table(tasks, usual, self._known.now, PlainOutput())
        rows = [{**asdict(task), "usual": usual.get(task.name)} for task in tasks]
        return self._listed(table, rows, "name")

    def show(self) -> Told:
        """As lines of each task. It is the name of a task that the command is given."""
        bad = set()
        for task in self._known.tasks():
            history = TaskHistory(runs=self._known.runs(task.name, limit=20), actions=[], misses=[])
            having = [each for each in self._known.replicas() if task.name in each.tasks]
            now = self._known.now
            print_task(task, history, having, now, PlainOutput(), None, "task_lock")
            if "\nstate        unreadable" in self._capsys.readouterr().out:
                bad.add(task.name)
        return Told({task.name for task in self._known.tasks()}, bad)

    def runs_command(self) -> Told:
        runs = self._known.runs(limit=10_000)
        return self._listed(run_rows(runs, PlainOutput()), runs, "task")

    def replicas_command(self) -> Told:
        replicas = self._known.replicas()
        print_replicas(replicas, self._known.now, PlainOutput())
        return self._listed(None, replicas, "replica_id")

    def jobs_command(self) -> Told:
        jobs = self._known.jobs()
        return self._listed(job_table(jobs, None, PlainOutput()), jobs, "id")

    def check(self) -> Told:
        tasks = self._known.tasks()
        overview = self._known.overview()
        findings, numbers = overview.findings, numbers_of(overview)
        bad = {each.task for each in findings if each.what == "unreadable"}
        assert numbers["unreadable"] == len(bad)
        status = severity_of(findings)
        assert not bad or status >= 1
        assert len(line_of(status, message_of_findings(findings, overview), numbers)) < 20_000
        json.loads(as_json([findings, numbers]), parse_constant=pytest.fail)
        return Told({task.name for task in tasks}, bad)

    def metrics(self) -> Told:
        known = self._known
        return told_by_metrics(
            text_of(rows_of(known.tasks(), known.overview().findings, known.replicas())),
            [task.name for task in known.tasks()],
        )

    def _listed(self, table: Table | None, rows: Sequence[Any], key: str) -> Told:
        """As lines and columns, and as JSON."""
        if table is not None:
            PlainOutput().print_table(table)
        check_lines(self._capsys.readouterr().out)
        print_json(rows)
        return told_by_json(self._capsys.readouterr().out, key)


# Which tables each of them tells of.
SHOWN_OF = {
    "status": TASKS,
    "show": TASKS,
    "runs_command": RUNS,
    "replicas_command": REPLICAS,
    "jobs_command": JOBS,
    "check": TASKS,
    "metrics": TASKS,
}


@pytest.mark.parametrize("reader", SHOWN_OF)
def test_a_reader_tells_of_good_rows_and_names_the_bad_ones(
    reader: str, hostiles: Hostiles, capsys: pytest.CaptureFixture[str]
) -> None:
    told: Told = getattr(Shown(hostiles.known, capsys), reader)()
    assert not judge(told, SHOWN_OF[reader], hostiles.names)


def test_each_command_tells_of_hostile_rows_of_a_database(
    make_task_locks: Callable[..., TaskLocks],
    database_url: str,
    connection: Connection,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of each table one row that is unreadable, if it has such rows, and one that is odd."""
    chosen = {(case.table, case.unreadable): case for case in hostile.CASES if case.named is None}
    names = insert(connection, list(chosen.values()))
    commands = Commands(make_task_locks(), Command(database_url, capsys))
    for reader, table in SHOWN_OF.items():
        assert not judge(getattr(commands, reader)(), table, names), reader


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_hostile_rows(page: str, hostiles: Hostiles) -> None:
    reader = Reader(hostiles.known, may_operate=True)
    check_markup(reader.html(page))
    reader.twin(page)


@pytest.mark.parametrize("page", ["/task", "/why"])
def test_the_page_of_a_hostile_task(page: str, hostiles: Hostiles) -> None:
    reader = Reader(hostiles.known, may_operate=True)
    for case in hostile.of(TASKS):
        name = hostiles.names[case]
        if 0 < len(name) <= 4_000:
            path = f"{page}?{urlencode({'name': name})}"
            check_markup(reader.html(path))
            if page == "/task":
                reader.twin(path)


@pytest.mark.parametrize(
    ("command", "zone"),
    [
        ("status", "America/Los_Angeles"),
        ("runs", "Asia/Tokyo"),
        ("replicas", "America/Los_Angeles"),
        ("jobs", "Asia/Tokyo"),
    ],
)
def test_a_terminal_draws_hostile_rows(
    command: str, zone: str, hostiles: Hostiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = hostiles.known
    drawn = StringIO()
    shown = TerminalOutput(Console(file=drawn, force_terminal=True, width=200))
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        if command == "status":
            shown.print_table(task_table(known.tasks(), known.usual, known.now, shown))
        elif command == "runs":
            shown.print_table(run_rows(known.runs(limit=10_000), shown))
        elif command == "replicas":
            print_replicas(known.replicas(), known.now, shown)
        else:
            shown.print_table(job_table(known.jobs(), None, shown))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert "good" in drawn.getvalue()
    assert "\x1b]0;owned" not in drawn.getvalue()


def too_large() -> Iterator[tuple[str, str]]:
    """Yield each place of a row that has a limit: its table, and an UPDATE beyond it."""
    for table in tables_of(task_lock_table()):
        for column in table.columns:
            if isinstance(column.type, Text):
                most = LONGEST_TEXTS.get(column.name, LONGEST_TEXT)
                if table.name == JOBS or column.name == "details":
                    most = LARGEST_VALUE
                yield table.name, f"{column.name} = repeat('x', {most + 1})"
    for part in ("trigger", "options", "arguments"):
        text = f"repeat('x', {LARGEST_DEFINITION})"
        yield JOBS, f"{part} = jsonb_build_object('x', {text})"
    many = f"generate_series(1, {LARGEST_REPLICA // 10}) n"
    yield REPLICAS, f"running = (SELECT jsonb_agg(n + 1e9) FROM {many})"
    for part in ("tasks", "rejected"):
        value = f"(SELECT array_agg('a task ' || n + 1000000) FROM {many})"
        yield REPLICAS, f"{part} = {value}"


def test_the_tables_take_no_larger_rows(connection: Connection) -> None:
    """So that nobody reads for long: in each table there are cases as large as they may be."""
    hostile.insert_good(connection)
    taken = []
    for table, changes in too_large():
        try:
            connection.execute(f"UPDATE {table} SET {changes}".encode())
        except psycopg.errors.CheckViolation:
            continue
        taken.append((table, changes))
    assert taken == []


@pytest.mark.parametrize("time", hostile.NO_TIMES)
def test_the_tables_take_no_time_that_python_lacks(time: str, connection: Connection) -> None:
    hostile.insert_good(connection)
    for table in tables_of(task_lock_table()):
        for column in table.columns:
            if isinstance(column.type, DateTime):
                with pytest.raises(psycopg.errors.CheckViolation):
                    connection.execute(f"UPDATE {table.name} SET {column.name} = '{time}'".encode())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "zone"),
    [
        ("status", "America/Los_Angeles"),
        ("runs", "Asia/Tokyo"),
        ("replicas", "America/Los_Angeles"),
        ("jobs", "Asia/Tokyo"),
    ],
)
def test_a_terminal_shows_hostile_rows(
    command: str, zone: str, database_url: str, connection: Connection
) -> None:
    insert(connection, hostile.CASES)
    with OnTerminal(database_url, command, TZ=zone) as shown:
        assert shown.status() == 0, shown.text
        assert "good" in shown.text
        assert "Traceback" not in shown.text
        assert "\x1b]0;owned" not in shown.text


@pytest.mark.nightly
def test_the_lock_of_a_hostile_row_is_granted_refused_or_rejected_and_others_are_granted(
    make_task_locks: Callable[..., TaskLocks], connection: Connection
) -> None:
    names = insert(connection, hostile.of(TASKS))
    locks = make_task_locks(claim_timeout=3)
    open_windows(connection)
    for case, name in names.items():
        try:
            with locks.hold(name, min_lock=0, max_lock=60):
                pass
        except TaskLockDatabaseError as error:
            raise AssertionError(f"{case} is taken for an outage") from error
        except TaskLockError:  # refused, or rejected: whoever asks knows for what
            pass
    with locks.hold(GOOD[TASKS], min_lock=0, max_lock=60) as held:
        assert not held.lost


@pytest.mark.nightly
def test_a_replica_runs_its_tasks_beside_hostile_rows(
    make_replica: Callable[..., Replica],
    make_task_locks: Callable[..., TaskLocks],
    connection: Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The look, registration, claims in batches, takeovers, and the sign of life."""
    names = insert(connection, hostile.of(TASKS, REPLICAS))
    open_windows(connection)
    past = {"window_start": "now() - interval '1 h'", "window_until": "now() - interval '50 min'"}
    rows.add_task(connection, "known", **past)
    replica = make_replica(start=False, poll_interval=0.2, replica_id="web-1", failover=True)
    begun: list[str] = []
    tasks = [name for case, name in names.items() if case.table == TASKS and 0 < len(name) < 255]
    good = ["known", "unknown", "killed"]
    for name in [*tasks, *good]:
        replica.run_once(partial(begun.append, name), job_id=name)
    replica.start()
    eventually(lambda: {"known", "unknown"} <= set(begun))
    replica.idle()
    assert len(set(begun) & set(tasks)) > len(tasks) / 3, "the windows are open"
    # As if a replica had been killed that ran it.
    connection.execute("""
        UPDATE task_lock SET finished_at = NULL, locked_by = 'killed', claim_id = gen_random_uuid(),
            locked_until = now(), run_until = now() + interval '10 min' WHERE task_name = 'killed'
    """)
    eventually(lambda: begun.count("killed") == 2)
    replica.idle()
    locks = make_task_locks()
    eventually(lambda: not replica.executor.health().degraded)
    [own] = [each for each in locks.replicas() if each.replica_id == "web-1"]
    assert set(tasks) < set(own.tasks)
    schedules = {task.name: task.schedule for task in locks.tasks()}
    hourly = schedules["unknown"]
    assert hourly["length"] == [0, 3600, 0]
    differ = {
        n for n in tasks if schedules[n] is None or schedules[n].get("length") != [0, 3600, 0]
    }
    assert differ <= {n for n in tasks if "window_start" in n or "due" in n}, "not registered"
    for name in good:
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING and name in r.args]


def open_windows(connection: Connection) -> None:
    """End the windows that the rows have from the good one, so that their tasks can be claimed."""
    connection.execute("""
        UPDATE task_lock SET window_until = now() - interval '1 s'
        WHERE window_until BETWEEN now() AND now() + interval '1 h'
    """)


@pytest.mark.nightly
def test_the_job_store_runs_its_jobs_beside_hostile_rows(
    database_url: str, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """Also beside hostile rows of the tasks that its jobs are."""
    names = insert(connection, hostile.of(TASKS, JOBS))
    open_windows(connection)
    connection.execute("UPDATE task_lock_job SET next_run_time = now() WHERE next_run_time > now()")
    for case, name in names.items():
        if case.table == TASKS:
            task = hostile.literal(name)
            rows.add_job(connection, f"job of {case}", task_name=task, next_run_time="now()")
    listed = {name for case, name in names.items() if case.table == JOBS}
    listed -= {"ended though due"}
    key, added = f"good {uuid4()}", f"added {uuid4()}"
    rows.add_job(connection, key, next_run_time="now() + interval '1 s'")
    with ExitStack() as closing:
        replica = StoreReplica(database_url, replica_id="web-1", poll_interval=0.2)
        closing.callback(replica.shutdown)
        replica.start()
        eventually(lambda: ran[key])
        replica.run_at(note, added)
        eventually(lambda: ran[added])
        jobs = {job.id for job in replica.scheduler.get_jobs()}
        assert {key, *listed} <= jobs
        for name in listed:
            assert replica.scheduler.get_job(name) is not None, name
            with suppress(TaskLockError):  # of the job that was asked for
                replica.scheduler.modify_job(name, next_run_time=LATER)
            with suppress(TaskLockError):
                replica.scheduler.pause_job(name)
        replica.scheduler.pause_job(key)
        assert replica.scheduler.get_job(key).next_run_time is None
        eventually(lambda: not replica.executor.health().degraded)
        replica.idle()
    assert not [record for record in caplog.records if "could not be looked at" in record.msg]


def test_a_name_that_postgresql_cannot_have_is_an_error(
    make_task_locks: Callable[..., TaskLocks], connection: Connection
) -> None:
    hostile.insert_good(connection)
    locks = make_task_locks()
    for ask in (
        locks.tasks,
        locks.runs,
        locks.jobs,
        locks.pause,
        locks.resume,
        locks.request_run,
        locks.forget,
        lambda name: locks.free(name, 7),
    ):
        with pytest.raises(TaskLockError) as raised:
            ask("a\0b")
        assert not isinstance(raised.value, TaskLockDatabaseError), "no outage"
    assert locks.tasks()


@pytest.mark.parametrize("token", ["x", "", "1.5", 1.5, None, True, "9" * 30, 2**63, "9" * 5000])
def test_a_token_that_is_no_number_frees_nothing(
    token: Any, make_task_locks: Callable[..., TaskLocks]
) -> None:
    with pytest.raises(TaskLockOptionError, match="token must be a whole number") as raised:
        make_task_locks().free("good task", token)
    assert len(str(raised.value)) < 300
