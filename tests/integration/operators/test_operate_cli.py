"""What operators see and steer on the command line."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from apscheduler.triggers.cron import CronTrigger
from psycopg import sql

from apscheduler_tasklock import TaskLocks, task_lock
from tests.support.commands import (
    COMMAND,
    ROOT,
    Answer,
    Command,
    OnTerminal,
    environment,
    run_pasted,
    run_process,
)
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.roles import role
from tests.support.rows import (
    DEAD,
    FAILING,
    OVERDUE,
    PAUSED,
    STAYS_ALIVE,
    STAYS_OK,
    STAYS_RUNNING,
    add_miss,
    add_replica,
    add_run,
    add_task,
)
from tests.support.schedulers import Replica
from tests.support.stored_jobs import StoreReplica, note

Connection = psycopg.Connection[Any]

# It clears the screen, sets the title, and reads from right to left; in German, with quotes.
ODD = "\x1b[2J\x1b]0;owned\x07 \u202eüber 'a' \"b\" | \x9b31m 報告  x\n\x7f"
ODD_SHOWN = "\\x1b[2J\\x1b]0;owned\\x07 \\u202eüber 'a' \"b\" | \\x9b31m 報告 \\x20x\\n\\x7f"


class TestStatus:
    def test_a_row_has_what_an_operator_asks_for(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync", **OVERDUE, failures="2")
        add_task(connection, "well", **STAYS_OK)
        add_run(connection, "sync", 1, ended_at="now() - interval '55 s'")
        answer = command("status")
        assert (answer.status, answer.err) == (0, "")
        cells = [cell.strip() for cell in answer.cells[0]]
        assert cells[:3] == ["sync", "overdue", "every 5 min"]
        assert cells[4:6] == ["2s", "5s"]
        assert cells[8:] == ["one", "2", "its last run began 40s after its run time"]
        assert answer.cells[1][0] == "well"


class TestShow:
    def test_it_tells_the_function_the_replicas_and_the_usual_duration(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync", runs="'shop.jobs:sync'")
        add_replica(connection, "old", ["sync"], seen_at="now() - interval '1 h'")
        add_replica(connection, "new", ["other", "sync"])
        add_replica(connection, "another", ["other"])
        for token, seconds in enumerate((1, 3, 90), 1):
            ended = f"now() - interval '60 s' + {seconds} * interval '1 s'"
            add_run(connection, "sync", token, ended_at=ended)
        add_run(connection, "sync", 4, ended_at="now() + interval '1 h'", outcome="'error'")
        answer = command("show", "sync")
        assert "function     shop.jobs:sync\n" in answer.out
        assert "replicas     new, old (silent)\n" in answer.out
        assert "usual        3s\n" in answer.out
        told = command("show", "sync", "--json").json
        assert told["usual"] == 3.0
        assert [each["usual"] for each in command("status", "sy*", "--json").json] == [3.0]
        assert [each["replica_id"] for each in told["replicas"]] == ["old", "new"]
        connection.execute("DELETE FROM task_lock_replica")
        assert "replicas     none has reported this task\n" in command("show", "sync").out

    def test_it_tells_options_with_where_they_are_set_and_the_next_run_times(
        self, command: Command, make_replica: Callable[..., Replica]
    ) -> None:
        replica = make_replica(max_factor=3, jobs={"sync": {"lease": 20, "min_lock": 600}})

        @task_lock(max_runtime=90, lease=10)
        def sync() -> None: ...

        daily = CronTrigger(hour=3, timezone="Europe/Berlin")
        own = {"task_lock": {"min_lock": 60, "failover": True}}
        replica.scheduler.add_job(sync, daily, id="sync", kwargs=own)
        eventually(lambda: command("status", "sync").status == 0)
        told = command("show", "sync").out
        [options] = re.findall("options      (.*)\n", told)
        assert options.split(", ") == [
            "cancel_on_lost off (default)",
            "failover on (in the job)",
            "lease 20s (in the executor's jobs)",
            "max_factor 3 (in the executor)",
            "max_runtime 90s (in the function's decorator)",
            "max_takeovers 3 (default)",
            "min_lock 60s (in the job)",
            "on_failure keep (default)",
            "period 3600s (default)",
            "retries 0 (default)",
        ]
        [line] = re.findall("next runs    (.*) Europe/Berlin\n", told)
        expected = [daily.get_next_fire_time(None, datetime.now(timezone.utc))]
        while len(expected) < 5:
            expected.append(daily.get_next_fire_time(expected[-1], expected[-1]))
        assert line == ", ".join(f"{each:%Y-%m-%d %H:%M:%S}" for each in expected)
        shown = command("show", "sync", "--json").json
        assert shown["task"]["options"]["failover"] == {"value": True, "place": "job"}
        assert shown["task"]["zone"] == "Europe/Berlin"
        found = [
            datetime.fromisoformat(each.replace("Z", "+00:00")) for each in shown["next_run_times"]
        ]
        assert found == expected

    def test_of_a_stored_job_it_tells_them_too(self, command: Command, database_url: str) -> None:
        replica = StoreReplica(database_url, min_factor=0.5)
        replica.start()
        try:
            every = {"hours": 6, "args": ["sync"], "kwargs": {"task_lock": {"lease": None}}}
            replica.scheduler.add_job(note, "interval", id="sync", timezone="UTC", **every)
            eventually(lambda: command("status", "sync").status == 0)
            told = command("show", "sync").out
        finally:
            replica.shutdown()
        [options] = re.findall("options      (.*)\n", told)
        assert "lease none (in the job)" in options
        assert "min_factor" not in options
        [line] = re.findall("next runs    (.*) UTC\n", told)
        times = [datetime.fromisoformat(each.replace("Z", "+00:00")) for each in line.split(", ")]
        gaps = {later - earlier for earlier, later in pairwise(times)}
        assert (len(times), gaps) == (5, {timedelta(hours=6)})


class TestRuns:
    def test_they_are_chosen_by_task_outcome_time_and_number(
        self, command: Command, connection: Connection
    ) -> None:
        for task in ("a", "b"):
            add_task(connection, task)
            add_run(connection, task, 1, started_at="now() - interval '3 h'", outcome="'error'")
            add_run(connection, task, 2)

        def found(*arguments: str) -> list[tuple[str, int]]:
            answer = command("runs", "--json", *arguments)
            assert answer.status == 0
            return sorted((run["task"], run["token"]) for run in answer.json)

        everything = [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
        assert found("--since", "2026-01-31T03:00:00Z") == everything
        assert found("a") == everything[:2]
        assert found("a", "b") == everything
        assert found("--outcome", "error") == [("a", 1), ("b", 1)]
        assert found("--since", "2h") == [("a", 2), ("b", 2)]
        assert found("--limit", "2") == [("a", 2), ("b", 2)]
        assert found("x*") == []
        assert command("runs", "x").status == 3
        [line] = command("runs", "a", "--limit", "1").cells
        assert [line[0], *(cell.strip() for cell in line[2:7])] == [
            "a",
            "2s",
            "ok",
            "schedule",
            "one",
            "2",
        ]

    def test_what_operators_did_is_among_them(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync")
        add_replica(connection, "one", ["sync"])
        add_run(connection, "sync", 1)
        paused = ["pause", "sync", "--for", "2h", "--reason", "the shop is closed"]
        for arguments in (paused, ["resume", "sync"], ["run", "sync"], ["pause", "sync"]):
            assert command(*arguments).status == 0
        user = rf"\S+@{re.escape(socket.gethostname())}"
        told = [
            ("paused", rf"by {user} until resumed"),
            ("run", rf"by {user} \(dropped at \S+Z if no replica has begun it\)"),
            ("resumed", rf"by {user}"),
            ("paused", rf"by {user} until \S+Z \(the shop is closed\)"),
        ]
        answer = command("runs", "--kind", "operator")
        for line, (outcome, notes) in zip(answer.out.splitlines()[1:], told, strict=True):
            cells = rf"sync +\S+Z +- +{outcome} +operator +- +- +- +{notes}"
            assert re.fullmatch(cells, line), line
        assert [run["kind"] for run in command("runs", "--json").json].count("operator") == 4
        [paused_last] = command("runs", "--json", "--outcome", "paused", "--limit", "1").json
        assert (paused_last["until"], paused_last["token"]) == (None, None)
        assert command("runs", "--kind", "schedule").cells[0][0] == "sync"

    @pytest.mark.nightly
    @pytest.mark.parametrize("form", [(), ("--json",)], ids=["plain", "JSON"])
    def test_further_ones_are_followed_until_somebody_ends_it(
        self, database_url: str, connection: Connection, form: tuple[str, ...]
    ) -> None:
        # A run that began long ago ends after others that began later.
        add_task(connection, "long", **{**STAYS_RUNNING, "started_at": "now() - interval '5 h'"})
        add_task(connection, "sync")
        add_run(connection, "sync", 1)
        with subprocess.Popen(
            [*COMMAND, "runs", "--follow", *form],
            env=environment(database_url),
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            lines: list[str] = []
            reader = threading.Thread(
                target=lambda: lines.extend(iter(process.stdout.readline, ""))
            )
            reader.start()
            try:
                eventually(lambda: any("sync" in line for line in lines))
                add_run(
                    connection, "long", 2, started_at="now() - interval '5 h'", ended_at="now()"
                )
                connection.execute("UPDATE task_lock SET finished_at = now()")
                eventually(lambda: any("long" in line for line in lines), 30)
                add_run(connection, "sync", 3, started_at="now()", ended_at="now()")
                eventually(lambda: sum("sync" in line for line in lines) == 2)
                add_miss(connection, "sync", 0, started_at="now()", ended_at="now()")
                eventually(lambda: any("missed" in line for line in lines))
                process.send_signal(2)
                reader.join(60)
                assert process.wait(60) == 0
            finally:
                process.kill()
        assert sum("long" in line for line in lines) == 1
        assert len(lines) == 4 + (not form)


class TestMetrics:
    def test_they_are_printed_once(self, command: Command, connection: Connection) -> None:
        add_task(connection, "sync")
        answer = command("metrics")
        assert answer.status == 0
        assert 'tasklock_task_failures{tasklock_task_name="sync"} 0' in answer.out


class TestSetUp:
    def test_json_tells_what_was_done(self, command: Command, empty_database_url: str) -> None:
        for done in (True, False):
            answer = command("upgrade", "--json", database=empty_database_url)
            assert answer.json == {"table": "task_lock", "migrated": done, "notes": []}
        for done in (True, False):
            answer = command("downgrade", "--json", database=empty_database_url)
            assert answer.json == {"table": "task_lock", "dropped": done}
        assert command("upgrade", "--sql", "--json").status == 2

    def test_on_a_terminal_a_downgrade_asks(self, direct_url: str, connection: Connection) -> None:
        add_replica(connection, "one")
        with OnTerminal(direct_url, "downgrade") as terminal:
            assert "1 replica is alive" in terminal.wait_for("Drop them? [y/N]")
            terminal.answer("n\n")
            assert terminal.status() == 1
        assert connection.execute("SELECT to_regclass('task_lock')").fetchone()[0] is not None
        with OnTerminal(direct_url, "downgrade", "--yes") as terminal:  # which is not asked
            assert terminal.status() == 0


class TestReplicas:
    def test_who_they_are_and_what_they_run(self, command: Command, connection: Connection) -> None:
        add_task(connection, "sync", **STAYS_RUNNING)
        add_replica(connection, "one", ["sync", "other"], **STAYS_ALIVE)
        add_replica(connection, "two", seen_at="now() - interval '2 min'")
        first, second = command("replicas").cells
        told = [first[0], *first[1:3], *(c.strip() for c in first[6:])]
        assert told[:-1] == ["one", "host", "1.0", "alive", "2"]
        assert re.fullmatch(r"sync for \d+s", told[-1])
        assert [c.strip() for c in second[6:]] == ["silent", "0", "-"]
        told = command("replicas", "--json").json
        assert told[0]["tasks"] == ["sync", "other"]
        assert [replica["state"] for replica in told] == ["alive", "silent"]
        assert [run["task"] for run in told[0]["running"]] == ["sync"]


class TestAck:
    def test_a_failure_that_is_known_alarms_no_more(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync", **STAYS_OK, **FAILING, token="41")
        assert command("check").status == 1
        assert 'tasklock_task_failures{tasklock_task_name="sync"} 3' in command("metrics").out
        assert command("ack", "sync", "--token", "40").status == 4
        for what in ("acknowledged", "was already acknowledged"):
            answer = command("ack", "sync", "--as", "ann")
            assert (answer.status, answer.out) == (0, f"sync: {what} (token 41)\n")
        assert command("check").status == 0
        assert 'tasklock_task_failures{tasklock_task_name="sync"} 0' in command("metrics").out
        assert "its failure alarms no more" in command("show", "sync").out
        assert re.search(r"acknowledged by ann", command("show", "sync").out)
        wrong = command("ack", "sync", "--token", "40")
        assert (wrong.status, wrong.out) == (4, "")
        assert "its last run has the token 41" in wrong.err


class TestPauseAndResume:
    def test_tasks_are_paused_and_resumed(self, command: Command, connection: Connection) -> None:
        for task in ("a", "b"):
            add_task(connection, task)
        answer = command("pause", "a", "b", "--for", "2h", "--reason", "closed", "--json")
        assert (answer.status, answer.json["paused"]) == (0, ["a", "b"])
        read = """SELECT extract(epoch FROM paused_until - now()), pauses -> 0 ->> 'why'
                  FROM task_lock"""
        for left, why in connection.execute(read).fetchall():
            assert 7000 < left <= 7200
            assert why == "closed"
        assert command("resume", "a", "b").out == "a: resumed\nb: resumed\n"
        assert command("status", "--state", "paused").cells == []
        assert command("pause", "a").out == "a: paused until it is resumed\n"

    def test_the_pauses_of_others_stay_unless_it_is_forced(
        self, command: Command, connection: Connection
    ) -> None:
        for task in ("a", "b"):
            add_task(connection, task)
        assert command("pause", "a", "--as", "ann", "--reason", "closed").status == 0
        assert command("pause", "a", "b", "--reason", "tired").status == 0
        answer = command("resume", "a", "b")
        assert answer.status == 4
        assert "the pauses of others stay; --force takes them out" in answer.err
        first, last = answer.out.splitlines()
        own, left = first.removeprefix("a: ").split("; ")
        assert re.fullmatch(r"no longer paused by \S+ until resumed \(tired\)", own)
        assert re.fullmatch(r"still paused by ann since \S+ until resumed \(closed\)", left)
        assert last == "b: resumed"
        for own in ("--force", "--as=ann"):
            answer = command("resume", "a", own)
            assert (answer.status, answer.out) == (0, "a: resumed\n")
            assert command("pause", "a", "--as", "ann").status == 0

    @pytest.mark.parametrize("operation", ["pause", "resume"])
    def test_one_pattern_without_a_task_leaves_all_as_they_are(
        self, command: Command, connection: Connection, operation: str
    ) -> None:
        add_task(connection, "report")
        add_task(connection, "closed", **PAUSED)
        answer = command(operation, "report", "closed", "tusk*")
        assert (answer.status, answer.out) == (3, "")
        assert "no such task: 'tusk*'" in answer.err
        assert [row[0] for row in command("status", "--state", "paused").cells] == ["closed"]

    def test_a_task_of_exactly_that_name_is_meant_alone(
        self, command: Command, connection: Connection
    ) -> None:
        others = ("a1", "ab", "a[1]", "a\\b")
        for task in others:
            add_task(connection, task)
        for name in ("a*", "a?", "*", "a[1]*", "a\\*"):
            add_task(connection, name)
            assert command("pause", name, "--json").json["paused"] == [name]
            assert command("resume", name, "--json").json["resumed"] == [name]
            assert len(command("pause", "**", "--json").json["paused"]) == 5
            assert len(command("resume", "**", "--json").json["resumed"]) == 5
            connection.execute("DELETE FROM task_lock WHERE task_name = %s", [name])

    def test_rows_are_locked_in_the_order_of_names(
        self, command: Command, connection: Connection, database_url: str
    ) -> None:
        """So that two who change the same tasks never wait for each other in a circle."""
        for task in ("c", "b", "a"):
            add_task(connection, task)
        with (
            psycopg.connect(database_url) as other,
            ThreadPoolExecutor(1) as pool,
        ):
            other.execute("SELECT FROM task_lock WHERE task_name = 'b' FOR UPDATE")
            pausing = pool.submit(command, "pause", "c", "*")
            waits = "SELECT FROM pg_locks WHERE NOT granted"
            eventually(lambda: connection.execute(waits).rowcount)
            free = "SELECT task_name FROM task_lock ORDER BY 1 FOR UPDATE SKIP LOCKED"
            assert connection.execute(free).fetchall() == [("c",)]
            other.rollback()
            assert pausing.result().status == 0
        assert len(command("status", "--state", "paused").cells) == 3


class TestRun:
    def test_a_request_is_left_for_the_replicas(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync")
        assert command("run", "sync").status == 4  # nobody has it
        add_replica(connection, "one", ["sync"])
        assert command("run", "sync").out == "sync: a run is asked for\n"
        told = command("run", "sync", "--json").json
        assert told["request"]["token"] == 7

    def test_the_end_of_the_run_is_waited_for(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync")
        add_replica(connection, "one", ["sync"])
        add_run(connection, "sync", 6, kind="'manual'")  # one that was asked for before
        add_run(connection, "sync", 8)
        thread = threading.Thread(target=self._run_it_when_asked, args=[connection])
        thread.start()
        answer = command("run", "sync", "--wait", "60")
        thread.join()
        assert answer.status == 6
        assert answer.out.startswith("sync: ended: error, took 2s on one")

    def _run_it_when_asked(self, connection: Connection) -> None:
        asked = "SELECT FROM task_lock WHERE request_id IS NOT NULL"
        eventually(lambda: connection.execute(asked).rowcount)
        add_run(connection, "sync", 9, kind="'manual'", outcome="'error'")


class TestFree:
    def test_a_dead_run_is_freed(self, command: Command, connection: Connection) -> None:
        add_task(connection, "sync", **DEAD)
        assert command("free", "sync", "--token", "6").status == 4
        answer = command("free", "sync", "--token", "7", "--run-again", "--json")
        assert answer.status == 0
        told = {key: answer.json[key] for key in ("freed", "token", "holder", "run_again")}
        assert told == {"freed": ["sync"], "token": 7, "holder": "one", "run_again": True}
        [opened] = connection.execute(
            "SELECT window_until < window_start FROM task_lock"
        ).fetchone()
        assert opened
        assert command("runs", "--json").json[0]["outcome"] == "freed"

    @pytest.mark.nightly
    def test_show_prints_the_command_for_it(
        self, command: Command, connection: Connection, database_url: str
    ) -> None:
        add_task(connection, "-it's dead\n", **DEAD)
        shown = command("show", "--", "-it's dead\n").out
        [line] = re.findall(r"free it: (.*)", shown)
        assert run_pasted(line, database_url).startswith("-it's dead\\n: freed: token 7, ")

    def test_on_a_terminal_it_asks(self, database_url: str, connection: Connection) -> None:
        add_task(connection, "sync", **DEAD)
        with OnTerminal(database_url, "free", "sync", "--token", "7") as terminal:
            shown = terminal.wait_for("Free it? [y/N]")
            assert "may overlap with the next run for a third of its lease" in shown
            terminal.answer("y\n")
            assert terminal.status() == 0
        assert connection.execute("SELECT FROM task_lock WHERE finished_at IS NOT NULL").rowcount


class TestForget:
    def test_a_task_goes_unless_a_replica_has_it(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync")
        add_replica(connection, "one", ["sync"])
        assert command("forget", "sync").status == 4
        connection.execute("DELETE FROM task_lock_replica")
        assert command("forget", "sync", "--json").json == {
            "forgotten": ["sync"],
            "gone": ["sync"],
        }
        assert command("show", "sync").status == 3


class TestTerminal:
    def test_a_table_has_colours_and_local_times(
        self, database_url: str, connection: Connection
    ) -> None:
        add_task(connection, ODD, **{**OVERDUE, "kind": "'takeover'"})
        with OnTerminal(database_url, "status", COLUMNS="300") as terminal:
            assert terminal.status() == 0
        assert "\x1b[1;31moverdue" in terminal.text
        assert "\x1b[2J" not in terminal.text
        assert "\\x1b[2J" in terminal.text
        assert "1 min " in terminal.text
        assert "notes" not in terminal.text

    @pytest.mark.nightly
    def test_a_live_view_goes_on_without_the_database_until_ctrl_c(
        self, proxy: Proxy, connection: Connection
    ) -> None:
        add_task(connection, "sync")
        with OnTerminal(proxy.url, "status", "--watch") as terminal:
            terminal.wait_for("sync")
            add_task(connection, "another", **OVERDUE)
            terminal.wait_for("another")
            proxy.close()
            terminal.wait_for("the database is unavailable")
            terminal.interrupt()
            assert terminal.status() == 0
        assert "Traceback" not in terminal.text


class TestErrors:
    @pytest.mark.nightly
    def test_a_database_that_refuses_connections_is_one_line_without_the_password(
        self, database_url: str
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            port = nobody.getsockname()[1]
        url = f"postgresql://app:hunter2@127.0.0.1:{port}/db"
        answer = run_process(environment(url), "status")
        assert_one_line(answer, 1)
        assert "the database is unavailable" in answer.err
        assert str(port) in answer.err

    @pytest.mark.nightly
    def test_a_database_that_never_answers_is_given_up(self, database_url: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            url = f"postgresql://app:hunter2@127.0.0.1:{nobody.getsockname()[1]}/db"
            assert_one_line(run_process(environment(url), "status"), 1)

    def test_a_missing_table_is_one_line_that_names_the_remedy(
        self, command: Command, empty_database_url: str
    ) -> None:
        for arguments in (["status"], ["replicas"], ["pause", "x"], ["runs"]):
            answer = command(*arguments, database=empty_database_url)
            assert_one_line(answer, 1)
            assert "apscheduler-tasklock upgrade" in answer.err

    def test_a_reader_that_ends_early_is_no_traceback(
        self, database_url: str, connection: Connection
    ) -> None:
        add_task(connection, "sync")
        reads, writes = os.pipe()
        os.close(reads)
        with os.fdopen(writes) as closed:
            process = subprocess.run(
                [sys.executable, "-m", "apscheduler_tasklock.cli", "status"],
                env=environment(database_url),
                stdout=closed,
                stderr=subprocess.PIPE,
                text=True,
                timeout=100,
                check=False,
            )
        assert (process.returncode, process.stderr) == (1, "")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["check"], 3),
        (["upgrade"], 1),
    ],
)
def test_an_output_that_is_full_is_one_line(
    database_url: str, arguments: list[str], status: int
) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "apscheduler_tasklock.cli", *arguments],
            env=environment(database_url),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
        )
    assert process.returncode == status, process.stderr
    assert process.stderr.splitlines()[-1].startswith("apscheduler-tasklock: cannot write: ")
    assert "Traceback" not in process.stderr
    assert "Exception ignored" not in process.stderr


SIDE_TABLES = ["task_lock_replica", "task_lock_run"]


@pytest.fixture(params=["without the right", "without the table"])
def bare(
    request: pytest.FixtureRequest,
    database_url: str,
    connection: Connection,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Command]:
    """The command line of a role that has the task lock table alone."""
    with role(database_url) as (name, url):
        user = sql.Identifier(name)
        connection.execute(sql.SQL("GRANT SELECT, INSERT, UPDATE ON task_lock TO {}").format(user))
        if request.param == "without the table":
            connection.execute("DROP TABLE task_lock_replica, task_lock_run")
        yield Command(url, capsys)


@pytest.mark.direct("the pooler keeps connections for a role, and has no login for it")
class TestSideTables:
    """They are a convenience: what does not need them goes on without them."""

    def test_reads_go_on_with_one_note_and_nobody_is_gone(
        self, bare: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync", **OVERDUE)
        for arguments in (["status", "--json"], ["check", "--json"], ["metrics"]):
            answer = bare(*arguments)
            assert answer.err.count("\n") == 1
            assert "replicas cannot be read" in answer.err
            assert answer.status == (2 if arguments[0] == "check" else 0)
        assert bare("status", "--json").json[0]["gone"] is False

    def test_a_task_is_shown_without_its_replicas(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync")
        connection.execute("DROP TABLE task_lock_replica")
        answer = command("show", "sync")
        assert answer.status == 0
        assert "replicas cannot be read" in answer.err
        assert "\nreplicas  " not in answer.out
        assert command("show", "sync", "--json").json["replicas"] is None

    def test_status_goes_on_without_the_history(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync")
        connection.execute("DROP TABLE task_lock_run")
        answer = command("status")
        assert (answer.status, answer.err, answer.cells[0][0]) == (0, "", "sync")

    def test_a_pause_and_a_resume_need_nothing_else(
        self, bare: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync")
        answer = bare("pause", "sync", "--for", "2h")
        assert answer.status == 0
        assert answer.out.startswith("sync: paused until 2")
        assert bare("resume", "sync").status == 0

    @pytest.mark.parametrize(
        ("arguments", "table"),
        [
            (["run", "sync"], "task_lock_replica"),
            (["replicas"], "task_lock_replica"),
            (["runs"], "task_lock_run"),
        ],
    )
    def test_what_needs_one_says_what_is_missing(
        self, bare: Command, connection: Connection, arguments: list[str], table: str
    ) -> None:
        add_task(connection, "sync")
        answer = bare(*arguments)
        assert_one_line(answer, 1)
        is_there = connection.execute("SELECT to_regclass(%s)", [table]).fetchone()[0]
        remedy = f"GRANT SELECT, INSERT, UPDATE ON {table} TO"
        assert (remedy if is_there else f"the table {table} does not exist") in answer.err

    def test_forget_needs_the_right_to_delete_and_names_it(
        self,
        database_url: str,
        connection: Connection,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        add_task(connection, "sync")
        with role(database_url) as (name, url):
            for table in ("task_lock", *SIDE_TABLES):
                grant = sql.SQL("GRANT SELECT, INSERT, UPDATE ON {} TO {}")
                connection.execute(grant.format(sql.Identifier(table), sql.Identifier(name)))
            command = Command(url, capsys)
            for table in ("task_lock", "task_lock_run"):
                answer = command("forget", "sync")
                assert_one_line(answer, 1)
                remedy = answer.err.strip().partition("let its owner run: ")[2]
                assert remedy == f'GRANT DELETE ON {table} TO "{name}"'
                connection.execute(remedy)
            assert command("forget", "sync").status == 0


def assert_one_line(answer: Answer, status: int) -> None:
    assert (answer.status, answer.out) == (status, "")
    assert answer.err.startswith("apscheduler-tasklock: ")
    assert answer.err.count("\n") == 1
    assert "hunter2" not in answer.err


def test_what_hold_holds_is_shown(
    command: Command, make_task_locks: Callable[..., TaskLocks]
) -> None:
    locks = make_task_locks(replica_id="holder")
    with locks.hold("held", min_lock=0, max_lock=600):
        [row] = command("status").cells
    assert [cell.strip() for cell in row[:3]] == ["held", "running", "hold"]
    assert "holder" in row


def test_a_psycopg_without_libpq_is_one_line_that_says_what_to_install() -> None:
    hidden = (
        "import ctypes.util, sys; ctypes.util.find_library = lambda name: None;"
        " sys.modules |= {'psycopg_c': None, 'psycopg_binary': None};"
        " from apscheduler_tasklock.__main__ import main; sys.exit(main())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", hidden, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.count("\n") == 1
    assert "pip install 'psycopg[binary]'" in ended.stderr
