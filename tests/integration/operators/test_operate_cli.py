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
from apscheduler.triggers.combining import OrTrigger
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
    CUT,
    DEAD,
    FAILING,
    OVERDUE,
    PAUSED,
    STAYS_ALIVE,
    STAYS_LATE,
    STAYS_OK,
    STAYS_RUNNING,
    STAYS_TOO_LONG,
    add_action,
    add_miss,
    add_replica,
    add_run,
    add_task,
    paused,
)
from tests.support.schedulers import Replica
from tests.support.stored_jobs import StoreReplica, note

Connection = psycopg.Connection[Any]

# It clears the screen, sets the title, and reads from right to left; in German, with quotes.
ODD = "\x1b[2J\x1b]0;owned\x07 \u202eüber 'a' \"b\" | \x9b31m 報告  x\n\x7f"
ODD_SHOWN = "\\x1b[2J\\x1b]0;owned\\x07 \\u202eüber 'a' \"b\" | \\x9b31m 報告 \\x20x\\n\\x7f"


@pytest.fixture
def command(database_url: str, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(database_url, capsys)


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

    def test_a_state_is_chosen_in_one_word(self, command: Command, connection: Connection) -> None:
        add_task(connection, "well", **STAYS_OK)
        add_task(connection, "hangs", **STAYS_TOO_LONG)
        assert [row[:2] for row in command("status", "--state", "too-long").cells] == [
            ["hangs", "too long"]
        ]

    def test_in_json_times_are_rfc_3339_and_durations_numbers(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync", **STAYS_LATE)
        add_run(connection, "sync", 1)
        [task] = command("status", "--json").json
        assert task["usual"] == 2.0
        assert datetime.fromisoformat(task["due_at"].replace("Z", "+00:00")).tzinfo
        assert task["took"] == 2.0
        assert isinstance(task["late_by"], float)
        assert (task["name"], task["state"]) == ("sync", "late")
        assert task["schedule"]["length"] == [0, 300, 0]

    def test_patterns_choose_and_a_mistyped_name_is_an_error(
        self, command: Command, connection: Connection
    ) -> None:
        for name in ("app:a", "app:b", "other"):
            add_task(connection, name)
        assert [row[0] for row in command("status", "app:?").cells] == ["app:a", "app:b"]
        assert command("status", "nothing*").cells == []
        answer = command("status", "app:a", "othr")
        assert (answer.status, answer.out) == (3, "")
        assert "no such task: 'othr'" in answer.err

    def test_a_namespace_is_put_before_what_is_given(
        self, command: Command, connection: Connection
    ) -> None:
        for name in ("app:a", "app:b", "a"):
            add_task(connection, name)
        in_app = ("--namespace", "app:")
        assert [row[0] for row in command("status", *in_app).cells] == ["app:a", "app:b"]
        assert [row[0] for row in command("status", "a*", *in_app).cells] == ["app:a"]
        assert "app:b" in command("show", "b", *in_app).out
        assert command("show", "app:b", *in_app).status == 3

    @pytest.mark.parametrize("form", [(), ("--json",)], ids=["plain", "JSON"])
    def test_a_name_cannot_steer_the_terminal(
        self, command: Command, connection: Connection, form: tuple[str, ...]
    ) -> None:
        add_task(connection, ODD, **paused(by="E'\\x1b[31m'"))
        add_run(connection, ODD, 7, error=r"E'\x1b[2Joops'", outcome="'error'")
        answers = [command("status", *form), command("show", ODD, *form), command("runs", *form)]
        answers.append(command("pause", ODD, *form))
        answers.append(command("free", ODD, "--token", "1", *form))
        assert [answer.status for answer in answers] == [0, 0, 0, 0, 4]
        for answer in answers:
            assert all(c == "\n" or c.isprintable() for c in answer.out + answer.err)
        if form:
            assert answers[0].json[0]["name"] == ODD
        else:
            assert answers[0].cells[0][0] == ODD_SHOWN
            assert len(answers[0].out.splitlines()) == 2

    def test_of_no_tasks(self, command: Command) -> None:
        answer = command("status")
        assert (answer.status, answer.cells, answer.err) == (
            0,
            [],
            "apscheduler-tasklock: no tasks\n",
        )
        assert command("status", "--json").json == []


class TestShow:
    def test_the_last_20_runs_are_listed_apart_from_what_operators_did_and_misses(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync", **STAYS_OK)
        for token in range(1, 31):
            failed = (
                r"E'  File \"jobs.py\", line 7, in sync\nValueError'" if token == 29 else "NULL"
            )
            add_run(
                connection,
                "sync",
                token,
                ended_at=f"now() - interval '60 s' + {token} * interval '1 s'",
                outcome="'error'" if token == 29 else "'ok'",
                traceback=failed,
            )
        for slot in range(19):
            add_action(connection, "sync", slot, started_at="now()")
        earlier = {"started_at": "'2026-01-01T01:00Z'", "until": "'2026-01-01T03:00Z'"}
        add_action(connection, "sync", 19, **earlier)
        add_action(connection, "other", 1, by="'somebody'")
        add_miss(connection, "sync", 1)
        answer = command("show", "sync")
        assert "took  44445555566667777888\nend   ..................x." in answer.out
        runs, _, rest = answer.out.partition("\ntraceback of the last failure (")
        assert len(runs.partition("\ntask  started")[2].splitlines()[1:]) == 20
        assert "ann@ops" not in runs
        traceback, _, rest = rest.partition("\nwhat operators did:\n")
        assert traceback.splitlines()[1:] == ['  File "jobs.py", line 7, in sync', "ValueError"]
        did, _, missed = rest.partition("\nmissed run times:\n")
        assert len(did.splitlines()) == 20
        assert did.splitlines()[-1] == (
            "2026-01-01T01:00:00Z  paused by ann@ops until 2026-01-01T03:00:00Z"
            " (the shop is closed)"
        )
        assert len(missed.splitlines()) == 1
        told = command("show", "sync", "--json").json
        assert [run["token"] for run in told["runs"]] == list(range(30, 10, -1))
        assert (told["task"]["name"], told["runs"][0]["took"]) == ("sync", 30.0)
        first, last = told["actions"][0], told["actions"][-1]
        assert len(told["actions"]) == 20
        assert (first["outcome"], first["by"], first["token"]) == ("paused", "ann@ops", None)
        assert (last["until"], last["reason"]) == ("2026-01-01T03:00:00Z", "the shop is closed")
        assert [miss["reason"] for miss in told["misses"]] == ["the task was paused"]
        [run, *_] = command("runs", "sync", "--outcome", "error", "--json").json
        assert run["traceback"] == '  File "jobs.py", line 7, in sync\nValueError'

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

    def test_it_tells_no_run_time_after_the_end(
        self, command: Command, make_replica: Callable[..., Replica]
    ) -> None:
        """Such an end is not the same on all replicas, so the row's schedule does not have it."""
        scheduler = make_replica().scheduler
        end = datetime.now(timezone.utc).replace(microsecond=250) + timedelta(hours=13)
        every = {"id": "sync", "hours": 6, "end_date": end, "timezone": "UTC"}
        scheduler.add_job(str, "interval", **every)
        eventually(lambda: command("status", "sync").status == 0)
        told = command("show", "sync")
        [line] = re.findall("next runs    (.*) UTC\n", told.out)
        assert len(line.split(", ")) == 2
        assert f"schedule     every 6 h until {end:%Y-%m-%dT%H:%M:%SZ}\n" in told.out

    def test_it_tells_the_run_times_of_a_schedule_with_several_zones_in_utc(
        self, command: Command, make_replica: Callable[..., Replica]
    ) -> None:
        parts = [CronTrigger(hour=3, timezone=zone) for zone in ("Asia/Tokyo", "Africa/Lagos")]
        make_replica().scheduler.add_job(str, OrTrigger(parts), id="sync")
        eventually(lambda: command("status", "sync").status == 0)
        told = command("show", "sync").out
        [line] = re.findall("next runs    (.*) UTC\n", told)
        assert {each[-8:] for each in line.split(", ")} == {"18:00:00", "02:00:00"}
        assert "(cron hour=3 minute=0 Africa/Lagos) or (cron hour=3 minute=0 Asia/Tokyo)" in told

    def test_a_run_that_hangs_is_told_while_another_replica_runs_the_task(
        self, command: Command, connection: Connection
    ) -> None:
        began = "'since', extract(epoch FROM now()) - 86400, 'lost', true"
        running = f"jsonb_build_array(jsonb_build_object('task', 'sync', 'token', 6, {began}))"
        add_task(connection, "sync", **STAYS_RUNNING, overrun_at="now() + interval '4 h'")
        add_replica(connection, "web-2", ["sync"], running=running, **STAYS_ALIVE)
        shown = command("show", "sync").out
        assert re.search(r"state +too long: a run that has outlived its maximum lock", shown)
        assert re.search(r"still goes on: on web-2 since [^ ]* \(token 6\); other", shown)
        [replica] = command("replicas").cells
        assert re.fullmatch(r"sync for \d+s \(lock lost, token 6\)", replica[-1].strip())
        assert re.search(r"1 too long \(sync since [^ ]* on web-2\)", command("check").out)

    def test_a_name_with_a_star_is_no_pattern(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "a")
        assert command("show", "*").status == 3
        add_task(connection, "*")
        for task in ("*", "a"):
            add_run(connection, task, 1, replica=f"'of {task}'")
        told = command("show", "*", "--json").json
        assert [run["replica"] for run in told["runs"]] == ["of *"]


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
            ("run", rf"by {user} until \S+Z"),
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
    def test_they_are_chosen_by_times_as_people_write_them(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "a")
        midnight = "date_trunc('day', now(), 'UTC')"
        for token, started in enumerate(
            [
                "now() - interval '3 h'",
                "now() - interval '1 h'",
                f"{midnight} - interval '1 s'",
                f"{midnight} - interval '1 day'",
                f"{midnight} - interval '25 h'",
                "'2026-01-31 03:00+00'",
            ],
            start=1,
        ):
            add_run(connection, "a", token, started_at=started)

        def found(*arguments: str, zone: str = "UTC") -> set[int]:
            env = environment(command.database_url, TZ=zone)
            answer = run_process(env, "runs", *arguments, "--json")
            assert answer.status == 0, answer.err
            return {run["token"] for run in answer.json}

        # Midnight may have been a moment ago, or many hours.
        assert found("--since", "2h") - {3} == {2}
        assert found("--until", "2h ago") - {3} == {1, 4, 5, 6}
        assert found("a", "--since", "4h", "--until", "2h") - {3} == {1}
        assert found("--since", "yesterday", "--until", "today") >= {3, 4}
        assert 5 not in found("--since", "yesterday", "--until", "today")
        # As --since 22:00 --until 02:00 in the morning.
        now = datetime.now(timezone.utc)
        before, later = (f"{now + timedelta(hours=hours):%H:%M}" for hours in (-2, 1))
        assert found("--since", later, "--until", before) & {1, 2} == {1}
        day = ("--since", "2026-01-31", "--until", "2026-01-31 03:00:01Z")
        assert found(*day) == {6}
        assert found(*day[:3], "2026-01-31 03:00:01", zone="Europe/Berlin") == set()
        assert found(*day[:3], "2026-01-31 04:00:01", zone="Europe/Berlin") == {6}

    def test_it_is_said_if_there_are_more(self, command: Command, connection: Connection) -> None:
        add_task(connection, "a")
        for token in (1, 2, 3):
            add_run(connection, "a", token)
        for form in ((), ("--json",)):
            answer = command("runs", "--limit", "2", *form)
            assert answer.err == (
                "apscheduler-tasklock: there are more runs: these are the newest 2; --limit shows "
                "more, and --until earlier ones\n"
            )
        assert [run["token"] for run in answer.json] == [3, 2]
        assert command("runs", "--limit", "3").err == ""

    @pytest.mark.nightly
    def test_of_none_it_is_said_for_which_time_and_zone(
        self, database_url: str, connection: Connection
    ) -> None:
        env = environment(database_url, TZ="Europe/Berlin")
        answer = run_process(env, "runs", "--since", "2026-01-31 02:00", "--until", "2026-07-31")
        assert answer.err == (
            "apscheduler-tasklock: no runs since 2026-01-31 02:00:00 CET before 2026-07-31 "
            "00:00:00 CEST\n"
        )

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
                process.send_signal(2)
                reader.join(60)
                assert process.wait(60) == 0
            finally:
                process.kill()
        assert sum("long" in line for line in lines) == 1
        assert len(lines) == 3 + (not form)


class TestMetrics:
    def test_they_are_printed_once(self, command: Command, connection: Connection) -> None:
        add_task(connection, "sync")
        answer = command("metrics")
        assert answer.status == 0
        assert 'tasklock_task_failures{tasklock_task_name="sync"} 0' in answer.out

    def test_in_json_they_are_the_same_numbers(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, ODD, **FAILING)
        told = command("metrics", "--json").json
        assert told["tasklock_task_failures"] == {ODD: 3.0}
        assert told["tasklock_task_last_success_seconds"][ODD] > 1.7e9
        assert command("metrics", "--json", "--listen", "127.0.0.1:0").status == 2


class TestSetUp:
    def test_json_tells_what_was_done(self, command: Command, empty_database_url: str) -> None:
        for done in (True, False):
            answer = command("upgrade", "--json", database=empty_database_url)
            assert answer.json == {"table": "task_lock", "migrated": done, "notes": []}
        for done in (True, False):
            answer = command("downgrade", "--json", database=empty_database_url)
            assert answer.json == {"table": "task_lock", "dropped": done}
        assert command("upgrade", "--sql", "--json").status == 2

    @pytest.mark.parametrize(("typed", "status"), [("n\n", 1), ("\n", 1), ("y\n", 0)])
    def test_on_a_terminal_a_downgrade_asks(
        self, direct_url: str, connection: Connection, typed: str, status: int
    ) -> None:
        add_replica(connection, "one")
        with OnTerminal(direct_url, "downgrade") as terminal:
            assert "1 replica is alive" in terminal.wait_for("Drop them? [y/N]")
            terminal.answer(typed)
            assert terminal.status() == status
        is_there = connection.execute("SELECT to_regclass('task_lock')").fetchone()[0] is not None
        assert is_there == (status == 1)

    def test_on_a_terminal_it_does_not_ask_who_said_yes(self, direct_url: str) -> None:
        with OnTerminal(direct_url, "downgrade", "--yes") as terminal:
            assert terminal.status() == 0


class TestReplicas:
    def test_who_they_are_and_what_they_run(self, command: Command, connection: Connection) -> None:
        add_task(connection, "sync", **STAYS_RUNNING)
        add_replica(connection, "one", ["sync", "other"], **STAYS_ALIVE)
        add_replica(connection, "two", seen_at="now() - interval '2 min'")
        first, second = command("replicas").cells
        told = [first[0], *first[1:3], *(c.strip() for c in first[5:])]
        assert told[:-1] == ["one", "host", "1.0", "alive", "2"]
        assert re.fullmatch(r"sync for \d+s", told[-1])
        assert [c.strip() for c in second[5:]] == ["silent", "0", "-"]
        told = command("replicas", "--json").json
        assert told[0]["tasks"] == ["sync", "other"]
        assert [replica["state"] for replica in told] == ["alive", "silent"]
        assert [run["task"] for run in told[0]["running"]] == ["sync"]


class TestAck:
    @pytest.mark.parametrize("form", [(), ("--json",)], ids=["plain", "JSON"])
    def test_a_failure_that_is_known_alarms_no_more(
        self, command: Command, connection: Connection, form: tuple[str, ...]
    ) -> None:
        add_task(connection, "sync", **STAYS_OK, **FAILING, token="41")
        assert command("check").status == 1
        assert 'tasklock_task_failures{tasklock_task_name="sync"} 3' in command("metrics").out
        assert command("ack", "sync", "--token", "40").status == 4
        answer = command("ack", "sync", "--as", "ann", *form)
        assert answer.status == 0
        if form:
            assert answer.json == {"acknowledged": ["sync"], "token": 41}
        else:
            assert answer.out == "sync: acknowledged (token 41)\n"
        assert command("check").status == 0
        assert 'tasklock_task_failures{tasklock_task_name="sync"} 0' in command("metrics").out
        assert "its failure alarms no more" in command("show", "sync").out
        assert re.search(r"acknowledged by ann", command("show", "sync").out)
        again = command("ack", "sync", *form)
        assert (again.status, again.out) == (0, answer.out)
        wrong = command("ack", "sync", "--token", "40", *form)
        assert (wrong.status, wrong.out) == (4, "")
        assert "its last run has the token 41" in wrong.err

    def test_a_cut_that_is_known_alarms_no_more(
        self, command: Command, connection: Connection
    ) -> None:
        cut = {**CUT, **STAYS_OK, "finished_at": "now() - interval '4 h'"}
        add_task(connection, "sync", **cut, token="41")
        assert command("check").status == 1
        assert command("ack", "sync").status == 0
        assert command("check").status == 0
        assert 'tasklock_task_cut{tasklock_task_name="sync"} 0' in command("metrics").out
        assert "its cut alarms no more" in command("show", "sync").out

    def test_what_is_well_cannot_be(self, command: Command, connection: Connection) -> None:
        add_task(connection, "sync")
        answer = command("ack", "sync")
        assert answer.status == 4
        assert "it has no failure, no cut, and no miss" in answer.err


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

    @pytest.mark.parametrize("form", [(), ("--json",)], ids=["plain", "JSON"])
    def test_patterns_choose_as_in_status_and_it_is_said_what_they_do_not_cover(
        self, command: Command, connection: Connection, form: tuple[str, ...]
    ) -> None:
        for task in ("report-2", "report-1", "rapport", "other"):
            add_task(connection, task)
        answer = command("pause", "rep*", "r?pport", *form)
        assert answer.status == 0
        names = ["rapport", "report-1", "report-2"]
        if form:
            assert answer.json["paused"] == names
        else:
            assert answer.out.splitlines() == [f"{n}: paused until it is resumed" for n in names]
        assert answer.err == (
            "apscheduler-tasklock: 3 tasks are paused; tasks that appear later and match 'rep*', "
            "'r?pport' are not covered\n"
        )
        add_task(connection, "report-3")
        assert [row[0] for row in command("status", "--state", "paused").cells] == names
        answer = command("resume", "rep*", "other", *form)
        assert answer.status == 0
        if form:
            assert answer.json == {
                "resumed": ["report-1", "report-2"],
                "still_paused": {},
                "ended": {},
            }
        else:
            assert answer.out == ("other: was not paused\nreport-1: resumed\nreport-2: resumed\n")
        assert answer.err == "apscheduler-tasklock: 2 tasks are resumed\n"
        assert [row[0] for row in command("status", "--state", "paused").cells] == ["rapport"]

    @pytest.mark.parametrize("form", [(), ("--json",)], ids=["plain", "JSON"])
    def test_the_pauses_of_others_stay_unless_it_is_forced(
        self, command: Command, connection: Connection, form: tuple[str, ...]
    ) -> None:
        for task in ("a", "b"):
            add_task(connection, task)
        assert command("pause", "a", "--as", "ann", "--reason", "closed").status == 0
        assert command("pause", "a", "b", "--reason", "tired").status == 0
        answer = command("resume", "a", "b", *form)
        assert answer.status == 4
        assert "the pauses of others stay; --force takes them out" in answer.err
        if form:
            [left] = answer.json["still_paused"]["a"]
            assert (answer.json["resumed"], left["by"], left["until"]) == (["b"], "ann", None)
            assert {
                name: [pause["reason"] for pause in pauses]
                for name, pauses in answer.json["ended"].items()
            } == {"a": ["tired"]}
        else:
            first, last = answer.out.splitlines()
            own, left = first.removeprefix("a: ").split("; ")
            assert re.fullmatch(r"no longer paused by \S+ until resumed \(tired\)", own)
            assert left == "still paused by ann until resumed (closed)"
            assert last == "b: resumed"
        answer = command("resume", "a")  # of others alone
        assert (answer.status, answer.out) == (
            4,
            "a: still paused by ann until resumed (closed)\n",
        )
        answer = command("resume", "a", "--force" if form else "--as", *(() if form else ("ann",)))
        assert (answer.status, answer.out) == (0, "a: resumed\n")

    def test_all_pauses_of_a_task_are_shown(self, command: Command, connection: Connection) -> None:
        add_task(connection, "a")
        assert command("pause", "a", "--as", "ann").status == 0
        answer = command("pause", "a", "--as", "bob", "--for", "2h", "--reason", "closed")
        assert answer.out == "a: paused until it is resumed\n"  # because of ann's
        [row] = command("status").cells
        ann, bob, *_ = row[-1].strip().split("; ")
        assert ann == "paused by ann until resumed"
        assert re.fullmatch(r"paused by bob until \S+ \(closed\)", bob)
        [told] = command("status", "--json").json
        assert [pause["reason"] for pause in told["pauses"]] == [None, "closed"]

    def test_each_task_is_told_with_the_end_of_its_own_pauses(
        self, command: Command, connection: Connection
    ) -> None:
        for task in ("a", "b"):
            add_task(connection, task)
        assert command("pause", "a", "--as", "ann").status == 0
        first, second = command("pause", "a", "b", "--for", "2h").out.splitlines()
        assert first == "a: paused until it is resumed"  # because of ann's
        assert re.fullmatch(r"b: paused until 2\S+Z", second)
        told = command("pause", "a", "b", "--for", "2h", "--json").json
        assert told["paused"] == ["a", "b"]
        assert told["paused_until"]["a"] is None
        assert told["paused_until"]["b"] >= second.split()[-1].removesuffix("Z")

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

    def test_patterns_whose_tasks_are_not_paused_resume_none(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "report")
        answer = command("resume", "rep*")
        assert (answer.status, answer.out) == (0, "")
        assert answer.err == "apscheduler-tasklock: no task is resumed\n"

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

    def test_a_namespace_limits_what_a_pattern_chooses(
        self, command: Command, connection: Connection
    ) -> None:
        for task in ("shop:a", "shop:b", "a"):
            add_task(connection, task)
        answer = command("pause", "*", "--namespace", "shop:", "--json")
        assert answer.json["paused"] == ["shop:a", "shop:b"]

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

    def test_what_is_for_one_task_takes_no_pattern(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "report", **DEAD)
        for arguments in (["run", "rep*"], ["forget", "rep*"], ["free", "rep*", "--token", "7"]):
            answer = command(*arguments)
            assert (answer.status, answer.out) == (3, "")
            assert "no such task: 'rep*'" in answer.err
            assert f"`{arguments[0]}` takes one task's exact name" in answer.err

    def test_a_run_is_asked_for_and_freed_in_the_name_that_is_given(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "report", **DEAD)
        add_replica(connection, "one", ["report"])
        assert command("run", "report", "--as", "ann").status == 0
        assert command("free", "report", "--token", "7", "--as", "bob").status == 0
        done = command("runs", "report", "--kind", "operator", "--json").json
        assert {(each["outcome"], each["by"]) for each in done} == {
            ("run", "ann"),
            ("freed", "bob"),
        }

    def test_a_task_that_is_not_there_is_3(self, command: Command) -> None:
        for operation in ("pause", "resume", "forget", "run", "show"):
            answer = command(operation, "tusk")
            assert (answer.status, answer.out) == (3, "")
            assert answer.err.startswith("apscheduler-tasklock: no such task: 'tusk'")
            assert answer.err.count("\n") == 1


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

    @pytest.mark.parametrize(
        ("outcome", "status"), [("ok", 0), ("error", 6), ("died", 6), ("cancelled", 6)]
    )
    def test_the_end_of_the_run_is_waited_for(
        self, command: Command, connection: Connection, outcome: str, status: int
    ) -> None:
        add_task(connection, "sync")
        add_replica(connection, "one", ["sync"])
        add_run(connection, "sync", 6, kind="'manual'")  # one that was asked for before
        add_run(connection, "sync", 8)
        thread = self._run_it_when_asked(connection, outcome)
        answer = command("run", "sync", "--wait", "60")
        thread.join()
        assert answer.status == status
        assert answer.out.startswith(f"sync: ended: {outcome}, took 2s on one")

    def test_a_task_without_a_run_history_is_waited_for_too(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync", token="9", kind="'manual'", failures="1")
        add_replica(connection, "one", ["sync"])
        thread = self._run_it_when_asked(
            connection, "UPDATE task_lock SET token = 10, failures = 1"
        )
        answer = command("run", "sync", "--wait", "--json")
        thread.join()
        assert (answer.status, answer.json["outcome"], answer.json["run"]) == (6, "error", None)

    def test_a_wait_that_runs_out_is_5(self, command: Command, connection: Connection) -> None:
        add_task(connection, "sync")
        add_replica(connection, "one", ["sync"])
        answer = command("run", "sync", "--wait", "0.1", "--json")
        assert (answer.status, answer.json["outcome"]) == (5, None)

    @pytest.mark.nightly
    @pytest.mark.parametrize("kind", ["takeover", "manual"])
    def test_a_takeover_is_waited_for_in_the_place_of_a_run_that_died(
        self, command: Command, connection: Connection, kind: str
    ) -> None:
        """Of a run by hand it is one by hand, too."""
        add_task(connection, "sync", failover="true")
        add_replica(connection, "one", ["sync"])
        environ = environment(command.database_url)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(run_process, environ, "run", "sync", "--wait", "60")
            self._begin_when_asked(connection, DEAD)
            looks_again(connection)
            # What the claim of a takeover writes.
            with connection.transaction():
                connection.execute(
                    "UPDATE task_lock SET token = 9, kind = %s, locked_by = 'two',"
                    " locked_until = now() + interval '1 min'",
                    [kind],
                )
                add_run(connection, "sync", 8, kind="'manual'", outcome="'died'")
            looks_again(connection)
            with connection.transaction():
                connection.execute("UPDATE task_lock SET finished_at = now()")
                add_run(connection, "sync", 9, kind=f"'{kind}'", replica="'two'")
            answer = waiting.result()
        assert answer.status == 0
        as_one = ", as a takeover" if kind == "takeover" else ""
        assert answer.out == f"sync: ended: ok, took 2s on two{as_one}\n"

    def test_a_run_that_died_without_failover_is_6(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync")
        add_replica(connection, "one", ["sync"])
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self._begin_when_asked, connection, DEAD)
            answer = command("run", "sync", "--wait", "60")
        assert (answer.status, answer.out) == (6, "sync: ended: died\n")

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({}, "the run may still begin"),
            (STAYS_RUNNING, "the run goes on, on one"),
            (
                {**DEAD, "failover": "true"},
                "its holder one died or was stopped, and its takeover has not begun",
            ),
            ({"kind": "'schedule'"}, "the run has begun, and the history does not have it"),
        ],
    )
    def test_when_a_wait_runs_out_it_is_told_how_the_run_stands(
        self, command: Command, connection: Connection, changes: dict[str, str], says: str
    ) -> None:
        add_task(connection, "sync")
        add_replica(connection, "one", ["sync"])
        with ThreadPoolExecutor(1) as pool:
            if changes:
                pool.submit(self._begin_when_asked, connection, changes)
            answer = command("run", "sync", "--wait", "3")
        assert answer.status == 5
        assert answer.out.endswith(f" s ran out; {says}\n")

    def _begin_when_asked(self, connection: Connection, changes: dict[str, str]) -> None:
        """Claim the task as a replica does once a run is asked for."""
        begun = {"token": "8", "kind": "'manual'", "request_id": "NULL", "request_until": "NULL"}
        assignments = ", ".join(f"{n} = {v}" for n, v in {**begun, **changes}.items())
        begin = f"UPDATE task_lock SET {assignments} WHERE request_id IS NOT NULL"
        eventually(lambda: connection.execute(begin).rowcount, 60)

    def _run_it_when_asked(self, connection: Connection, end: str) -> threading.Thread:
        def run() -> None:
            asked = "SELECT FROM task_lock WHERE request_id IS NOT NULL"
            eventually(lambda: connection.execute(asked).rowcount)
            if end.startswith("UPDATE"):
                connection.execute(end)
            else:
                add_run(connection, "sync", 9, kind="'manual'", outcome=f"'{end}'")

        thread = threading.Thread(target=run)
        thread.start()
        return thread


def looks_again(connection: Connection) -> None:
    """Wait until the command line has read the history twice more."""
    scans = (
        "SELECT seq_scan + coalesce(idx_scan, 0) FROM pg_stat_user_tables"
        " WHERE relname = 'task_lock_run'"
    )

    def count() -> int:
        return int(connection.execute(scans).fetchone()[0])

    before = count()
    eventually(lambda: count() >= before + 2, 60)


class TestFree:
    def test_a_dead_run_is_freed(self, command: Command, connection: Connection) -> None:
        add_task(connection, "sync", **DEAD)
        assert command("free", "sync", "--token", "6").status == 4
        answer = command("free", "sync", "--token", "7", "--run-again", "--json")
        assert answer.status == 0
        assert answer.json == {"freed": ["sync"], "token": 7, "run_again": True}
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
        assert run_pasted(line, database_url).endswith(": freed\n")

    def test_one_that_may_be_alive_only_by_force(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync", **STAYS_RUNNING)
        answer = command("free", "sync", "--token", "7")
        assert answer.status == 4
        assert "may be alive" in answer.err
        assert command("free", "sync", "--token", "7", "--force").out == "sync: freed\n"

    @pytest.mark.parametrize(("typed", "status"), [("n\n", 1), ("\n", 1), ("y\n", 0)])
    def test_on_a_terminal_it_asks(
        self, database_url: str, connection: Connection, typed: str, status: int
    ) -> None:
        add_task(connection, "sync", **DEAD)
        with OnTerminal(database_url, "free", "sync", "--token", "7") as terminal:
            shown = terminal.wait_for("Free it? [y/N]")
            assert "may overlap with the next run for a third of its lease" in shown
            terminal.answer(typed)
            assert terminal.status() == status
        freed = connection.execute("SELECT FROM task_lock WHERE finished_at IS NOT NULL").rowcount
        assert freed == (status == 0)

    def test_on_a_terminal_it_does_not_ask_who_said_yes(
        self, database_url: str, connection: Connection
    ) -> None:
        add_task(connection, "sync", **DEAD)
        with OnTerminal(database_url, "free", "sync", "--token", "7", "--yes") as terminal:
            assert terminal.status() == 0


class TestForget:
    def test_a_task_goes_unless_a_replica_has_it(
        self, command: Command, connection: Connection
    ) -> None:
        add_task(connection, "sync")
        add_replica(connection, "one", ["sync"])
        assert command("forget", "sync").status == 4
        connection.execute("DELETE FROM task_lock_replica")
        assert command("forget", "sync", "--json").json == {"forgotten": ["sync"]}
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
        (["check", "--json"], 3),
        (["check", "nothing"], 3),
        (["status"], 1),
        (["runs", "--json"], 1),
        (["upgrade"], 1),
        (["metrics"], 1),
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
    assert "pip install 'apscheduler-tasklock[binary]'" in ended.stderr
