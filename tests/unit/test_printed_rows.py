"""Tasks, runs and replicas as the command line prints them: functions of rows and a time."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from apscheduler_tasklock._words.json_text import as_json
from apscheduler_tasklock.cli.check import line_of, message_of_findings, numbers_of
from apscheduler_tasklock.cli.doctor import finding_table
from apscheduler_tasklock.cli.jobs import job_table
from apscheduler_tasklock.cli.output import PlainOutput, Table, TerminalOutput, output, plain_lines
from apscheduler_tasklock.cli.replicas import print_replicas, replica_table
from apscheduler_tasklock.cli.runs import run_rows
from apscheduler_tasklock.cli.status import TaskHistory, print_task, task_table
from apscheduler_tasklock.status import (
    Finding,
    JobState,
    ReplicaState,
    ReplicaStatus,
    Run,
    RunningRun,
    TaskState,
    TaskStatus,
)
from tests.support.pages import Known
from tests.support.rows import (
    NOW,
    READ,
    action_read,
    job_status,
    miss_read,
    replica_status,
    run_read,
    seconds,
    task_status,
)

Show = Callable[..., str]

# It clears the screen, sets the title, and reads from right to left; in German, with quotes.
ODD = "\x1b[2J\x1b]0;owned\x07 \u202eüber 'a' \"b\" | \x9b31m 報告  x\n\x7f"
ODD_SHOWN = "\\x1b[2J\\x1b]0;owned\\x07 \\u202eüber 'a' \"b\" | \\x9b31m 報告 \\x20x\\n\\x7f"


def cells(table: Table) -> list[list[str]]:
    """Return the cells of a printed table, without its head."""
    return [
        [cell.strip() for cell in line.split("  ") if cell.strip()]
        for line in plain_lines(table)[1:]
    ]


def status(*tasks: TaskStatus, **usual: float) -> list[list[str]]:
    """Return the cells that `status` prints of tasks."""
    return cells(task_table(tasks, usual, NOW, PlainOutput()))


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Return what `show` prints of a task."""

    def shown(
        task: TaskStatus,
        runs: Sequence[Run] = (),
        replicas: Sequence[ReplicaStatus] | None = None,
        **history: Any,
    ) -> str:
        print_task(
            task, TaskHistory(runs, **history), replicas, NOW, PlainOutput(), None, "task_lock"
        )
        return capsys.readouterr().out

    return shown


def line(name: str, text: str) -> str | None:
    """Return what the line of a fact says; ``None``: there is no such fact."""
    found = re.search(f"^{name} +(.*)$", text, re.MULTILINE)
    return found and found[1]


class TestStatus:
    def test_each_state_is_told(self) -> None:
        for row, columns in READ.items():
            [told] = status(task_status("sync", **columns))
            assert told[:2] == ["sync", columns.get("state", TaskState.OK).value], row

    def test_a_row_has_what_an_operator_asks_for(self) -> None:
        task = task_status("sync", **READ["overdue"], failures=2)
        names, row = plain_lines(task_table([task], {"sync": 5.0}, NOW, PlainOutput()))
        assert re.split("  +", names) == [
            *("task", "state", "schedule", "last run", "took", "usual", "due", "late by"),
            *("holder", "failures", "notes"),
        ]
        assert re.split("  +", row) == [
            "sync",
            "overdue",
            "every 5 min",
            "2026-01-31T11:59:00Z",
            "2s",
            "5s",
            "2026-01-31T11:58:25Z",
            "95s",
            "one",
            "2",
            "its last run began 40s after its run time",
        ]

    @pytest.mark.parametrize(
        ("columns", "told"),
        [
            ({"scheduled_at": seconds(-75)}, "its last run began 15s after its run time"),
            ({"scheduled_at": seconds(-61)}, "-"),
            ({"scheduled_at": seconds(-61.1)}, "its last run began 1.1s after its run time"),
            ({"scheduled_at": seconds(-75), "kind": "takeover"}, "-"),
            (READ["new"], "-"),
        ],
        ids=["late", "in time", "late by a moment", "taken over", "new"],
    )
    def test_a_run_that_began_late_is_noted(self, columns: Mapping[str, Any], told: str) -> None:
        assert status(task_status(**columns))[0][-1] == told

    def test_of_a_paused_one_who_paused_it_and_until_when(self) -> None:
        in_time = {"scheduled_at": seconds(-60)}
        first, second = status(
            task_status("a", **{**READ["paused"], **in_time}),
            task_status("b", **{**READ["paused for a day"], **in_time}),
        )
        since = "2026-01-31T12:00:00Z"
        assert first[-1] == f"paused by me@here since {since} until resumed (closed)"
        assert second[-1] == f"paused by me@here since {since} until 2026-02-01T12:00:00Z (closed)"

    def test_a_run_that_hangs_is_shown_in_place_of_newer_ones(self) -> None:
        stuck = RunningRun("sync", 4, "web-1", NOW + seconds(-600), lost=True)
        hangs = {"state": TaskState.TOO_LONG, "stuck": (stuck,), "holder": "web-2"}
        [row] = status(task_status("sync", **hangs))
        assert row[1:8] == [
            *("too long", "every 5 min", "2026-01-31T11:50:00Z", "600s", "-"),
            *("2026-01-31T12:04:00Z", "-"),
        ]
        assert row[8] == "web-1"

    def test_a_name_cannot_steer_the_terminal(self) -> None:
        lines = plain_lines(task_table([task_status(ODD)], {}, NOW, PlainOutput()))
        assert len(lines) == 2
        assert lines[1].startswith(f"{ODD_SHOWN}  ok  ")
        assert lines[1].isprintable()

    def test_2000_tasks_are_2000_lines(self) -> None:
        names = [f"task {number:04}" for number in range(2000)]
        assert [row[0] for row in status(*map(task_status, names))] == names


class TestShow:
    def test_the_runs_are_a_picture_and_a_list(self, show: Show) -> None:
        runs = [
            run_read(
                token=token,
                ended_at=seconds(-60 + token),
                outcome="error" if token == 29 else "ok",
            )
            for token in range(30, 10, -1)
        ]
        told = show(task_status(), runs)
        assert line("state", told) == "ok"
        assert line("schedule", told) == "every 5 min"
        assert "token 7" in told
        assert "took  44445555566667777888\nend   ..................x." in told
        assert (
            "took: 1 short, 8 as the longest; end: . ok, x another outcome\n"
            "the last 20 runs, the newest at the right; the highest took 30s\n"
        ) in told
        assert len(told.partition("\ntask  when")[2].splitlines()[1:]) == 20

    def test_a_death_is_told_as_the_end_of_its_lease_and_is_no_highest_duration(
        self, show: Show
    ) -> None:
        died = run_read(token=2, outcome="died", ended_at=seconds(0))
        told = show(task_status(), [run_read(token=3), died])
        assert "took  88\nend   x." in told
        assert "the highest took 2s\n" in told
        assert re.search("at most 60s +died", told)
        assert "the only run in the history, which took at most 60s" in show(task_status(), [died])

    def test_it_tells_the_function_the_replicas_and_the_usual_duration(self, show: Show) -> None:
        task = task_status(function="shop.jobs:sync")
        old = replica_status("old", state=ReplicaState.SILENT)
        told = show(task, replicas=[old, replica_status("new")], usual=3.0)
        assert line("function", told) == "shop.jobs:sync"
        assert line("replicas", told) == "new, old (silent)"
        assert line("usual", told) == "3s"
        assert line("replicas", show(task, replicas=[])) == "none has reported this task"
        assert line("replicas", show(task, replicas=None)) is None

    def test_the_first_run_time_is_the_due_time(self, show: Show) -> None:
        due_at = datetime(2099, 1, 1, 0, 0, 49, 700_000, tzinfo=timezone.utc)
        told = show(task_status(due_at=due_at, zone="UTC"))
        due = line("due", told)
        assert due is not None
        assert due.startswith("2099-01-01T00:00:49Z")
        runs = line("next runs", told)
        assert runs is not None
        assert runs.startswith("2099-01-01 00:00:49, 2099-01-01 00:05:49, ")

    @pytest.mark.parametrize(
        ("end", "words"),
        [
            ("2020-01-01T00:00:00+00:00", "none: the schedule ended at 2020-01-01T00:00:00Z"),
            ("2026-01-31T11:59:59+00:00", "none: the schedule ended at 2026-01-31T11:59:59Z"),
            ("2026-01-31T12:00:00+00:00", None),
            ("9020-01-01T00:00:00+00:00", None),
            ("2020-01-01", None),
        ],
    )
    def test_it_says_that_the_schedule_has_ended(
        self, show: Show, end: str, words: str | None
    ) -> None:
        schedule = {"type": "interval", "length": [0, 60, 0], "end": end, "jitter": 0.0}
        told = show(task_status(**READ["the last"] | {"schedule": schedule}))
        assert line("next runs", told) == words

    @pytest.mark.parametrize(
        ("end", "words"),
        [
            ("2020-01-01", "none: the schedule ended with 2020-01-01"),
            ("2026-01-29", "none: the schedule ended with 2026-01-29"),
            ("2026-01-30", None),  # the day may go on in the schedule's time zone
        ],
    )
    def test_it_says_that_a_schedule_of_days_has_ended(
        self, show: Show, end: str, words: str | None
    ) -> None:
        schedule = {
            "type": "calendarinterval",
            "length": [0, 0, 0, 1],
            "time": [3, 0, 0],
            "end": end,
            "jitter": 0.0,
        }
        told = show(task_status(**READ["the last"] | {"schedule": schedule}))
        assert line("next runs", told) == words

    @pytest.mark.parametrize(
        ("length", "zone", "due_at", "words"),
        [
            (
                [0, 0, 500_000],
                "Etc/UTC",
                "2099-01-01T00:00+00:00",
                "2099-01-01 00:00:00, 2099-01-01 00:00:00.500000, 2099-01-01 00:00:01, "
                "2099-01-01 00:00:01.500000, 2099-01-01 00:00:02 UTC",
            ),
            (
                [0, 3600, 0],
                "Europe/Berlin",
                "2099-10-25T00:00:00.020000+00:00",
                "2099-10-25 02:00:00+02:00, 2099-10-25 02:00:00+01:00, 2099-10-25 03:00:00+01:00, "
                "2099-10-25 04:00:00+01:00, 2099-10-25 05:00:00+01:00 Europe/Berlin",
            ),
        ],
        ids=["period below a second", "hour that clocks repeat"],
    )
    def test_no_two_run_times_read_the_same(
        self, show: Show, length: list[int], zone: str, due_at: str, words: str
    ) -> None:
        schedule = {"type": "interval", "length": length, "end": None, "jitter": 0.0}
        task = task_status(schedule=schedule, zone=zone, due_at=datetime.fromisoformat(due_at))
        assert line("next runs", show(task)) == words

    def test_options_that_are_not_known_are_left_out(self, show: Show) -> None:
        assert line("options", show(task_status(options={}))) is None

    def test_the_traceback_of_the_last_failure_is_printed(self, show: Show) -> None:
        well, *failed = (
            run_read(token=3),
            *(
                run_read(
                    token=token,
                    outcome="error",
                    traceback=f'  File "jobs.py", line {token}, in sync\nValueError',
                )
                for token in (2, 1)
            ),
        )
        told = show(task_status(), [well, *failed])
        head, *lines = told.partition("\ntraceback of the last failure (")[2].splitlines()
        assert head == "2026-01-31T11:59:00Z, token 2):"
        assert lines == ['  |   File "jobs.py", line 2, in sync', "  | ValueError"]
        assert "traceback" not in show(task_status(), [well])

    def test_a_traceback_forges_no_lines(self, show: Show) -> None:
        forged = "ValueError: no\n\nwhat operators did:\u20282026-01-31  ann freed it\x0bstate  ok"
        told = show(task_status(), [run_read(outcome="error", traceback=forged)])
        lines = told.partition("\ntraceback of the last failure (")[2].splitlines()[1:]
        assert len(lines) == 5
        assert all(line.startswith("  | ") for line in lines)
        assert "\nwhat operators did" not in told

    @pytest.mark.parametrize("width", [0, 40], ids=["plain", "a terminal"])
    def test_texts_of_rows_cannot_forge_its_lines(
        self, capsys: pytest.CaptureFixture[str], width: int
    ) -> None:
        """Whether by a line of a traceback, by a break, or by the width of the terminal."""
        forged = "state        ok"
        text = "\n".join(["x", forged, "x".ljust(40 - 13) + forged, "x".ljust(40 - 4) + forged])
        error = {"outcome": "error", "error_type": "E", "error": text, "traceback": text}
        failed = task_status(**{**READ["failing"], "error_type": text}, function=text)
        entries = TaskHistory(
            [run_read(token=1, **error)],
            [action_read(reason="x".ljust(40 - 22) + forged)],
            [miss_read(reason="x".ljust(40) + forged + "\x1b[2J")],
        )
        drawn = StringIO()
        shown: Any = PlainOutput()
        if width:
            shown = TerminalOutput(Console(file=drawn, width=width, force_terminal=True))
        print_task(failed, entries, [], NOW, shown, None, "task_lock")
        told = capsys.readouterr().out + drawn.getvalue()
        lines = re.sub(r"\x1b\[[0-9;]*m", "", told).splitlines()
        states = [line for line in lines if re.match(r"state\b", line)]
        assert [line.split()[:2] for line in states] == [["state", "failing"]]
        assert "\x1b[2J" not in told

    def test_what_operators_did_is_told_apart_from_the_runs(self, show: Show) -> None:
        begin = datetime(2026, 1, 1, 1, tzinfo=timezone.utc)
        actions = [
            action_read(),
            action_read(outcome="resumed", until=None, reason=None),
            action_read(started_at=begin, until=begin.replace(hour=3)),
        ]
        told = show(task_status(), [run_read()], actions=actions)
        runs, _, did = told.partition("\nwhat operators did:\n")
        assert len(runs.partition("\ntask  when")[2].splitlines()[1:]) == 1
        assert "ann@ops" not in runs
        assert did.splitlines() == [
            "2026-01-31T11:00:00Z  paused by ann@ops until 2026-01-31T13:00:00Z "
            "(the shop is closed)",
            "2026-01-31T11:00:00Z  resumed by ann@ops",
            "2026-01-01T01:00:00Z  paused by ann@ops until 2026-01-01T03:00:00Z "
            "(the shop is closed)",
        ]

    def test_missed_run_times_are_told_apart_from_the_runs(self, show: Show) -> None:
        told = show(task_status(), misses=[miss_read()])
        assert "no runs in the history\n\nmissed run times:\n2026-01-31T11:00:00Z" in told
        assert "the task was paused" in told

    def test_a_history_that_was_not_read_is_not_said_to_be_empty(self, show: Show) -> None:
        assert "no runs in the history" in show(task_status())
        assert "no runs in the history" not in show(task_status(), is_read=False)

    @pytest.mark.parametrize(
        ("columns", "told"),
        [
            (
                {"window_until": seconds(170)},
                "minimum 270s, for the window until 2026-01-31T12:02:50Z",
            ),
            (
                READ["window shortened"],
                "minimum 0s, for the window until 2026-01-31T11:58:20Z",
            ),
            (
                READ["window of no time"],
                "minimum 0s, for the window until 2026-01-31T11:58:20Z",
            ),
        ],
    )
    def test_the_last_runs_lock_times_are_told(
        self, show: Show, columns: Mapping[str, Any], told: str
    ) -> None:
        assert line("lock times", show(task_status(**columns))) == f"{told}; maximum 1260s"

    @pytest.mark.parametrize(
        ("row", "told"),
        [
            ("running", "so far 60s, token 7"),
            ("dead", "its lease ended after 2s, and it has not reported its end, token 7"),
            ("cut", "cut by a stop after 2s, token 7"),
            ("handed over", "cut by a stop after 2s, token 7"),
            ("overruns", "so far 60s, token 7"),
            ("given up", "overran its maximum lock after 2s, token 7"),
            ("freed", "freed after 2s, token 7"),
            ("cancelled", "cancelled after 2s, token 7"),
            ("ok", "took 2s, token 7"),
        ],
    )
    def test_how_the_last_run_ended_is_told(self, show: Show, row: str, told: str) -> None:
        last = line("last run", show(task_status(**READ[row])))
        assert last == ("2026-01-31T11:59:00Z on one, schedule, for 2026-01-31T11:58:20Z, " + told)

    @pytest.mark.parametrize(
        ("row", "told"),
        [
            ("failing", "3 in a row, the last with ValueError"),
            ("died", "2 in a row, the last died with its holder"),
            ("overran", "1 in a row, the last has overrun its maximum lock"),
            ("died, running", "2 in a row, the last died with its holder"),
            ("died, cut", "2 in a row, the last has overrun its maximum lock"),
        ],
    )
    def test_how_the_last_one_of_several_failed_is_told(
        self, show: Show, row: str, told: str
    ) -> None:
        runs = [
            run_read(token=2, outcome="overran", started_at=seconds(0)),
            run_read(token=1, outcome="died"),
        ]
        assert line("failures", show(task_status(**READ[row]), runs)) == told

    @pytest.mark.parametrize("row", READ)
    def test_no_state_shows_what_nobody_can_read(
        self, show: Show, capsys: pytest.CaptureFixture[str], row: str
    ) -> None:
        """Such as the year of a time that never was, or Python's words."""
        task, replica = task_status(**READ[row]), replica_status(tasks=("sync",))
        runs = [run_read(token=7, **({"scheduled_at": None} if "hand" in row else {}))]
        runs = [] if row == "new" else runs
        print_replicas([replica], NOW, PlainOutput())
        overview = Known([task], replicas_=[replica]).overview()
        message = message_of_findings(overview.findings, overview)
        printed = [
            show(task, runs, [replica]),
            *plain_lines(task_table([task], {}, NOW, PlainOutput())),
            *plain_lines(run_rows(runs, PlainOutput())),
            line_of(0, message, numbers_of(overview)),
            *map(as_json, (task, runs, replica)),
            *(as_json(replace(finding, link="")) for finding in overview.findings),
            capsys.readouterr().out,
        ]
        for text in printed:
            assert re.search(r"1970-|\?|None|infinity|\bnan\b|inf\b", text) is None, text

    def test_a_run_that_hangs_is_told_while_another_replica_runs_the_task(
        self, show: Show, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hangs: Any = RunningRun("sync", 6, "web-2", seconds(-3600), lost=True)
        task = task_status(**READ["too long"], stuck=(hangs,))
        assert line("state", show(task)) == (
            "too long: a run still goes on although its lock is lost: on web-2 since "
            "2026-01-31T11:00:00Z (token 6); other replicas may run the task meanwhile. If it "
            "hangs, restart that replica"
        )
        replica = replica_status("web-2", tasks=("sync",), running=(hangs,))
        print_replicas([replica], NOW, PlainOutput())
        assert (
            capsys.readouterr().out.splitlines()[1].endswith("sync for 3600s (lock lost, token 6)")
        )
        [finding] = Known([task]).overview().findings
        assert finding.says == "since 2026-01-31T11:00:00Z on web-2"

    @pytest.mark.parametrize(
        ("columns", "told"),
        [
            ({}, "2026-01-31T12:04:00Z, overdue from 2026-01-31T12:05:00Z"),
            (READ["overdue"], "2026-01-31T11:58:25Z, overdue from 2026-01-31T11:59:25Z"),
            # A run in the way or a pause has taken this one.
            ({**READ["running"], "due_at": seconds(-30)}, "2026-01-31T12:04:30Z"),
            ({**READ["too long"], "due_at": seconds(-30)}, "2026-01-31T12:04:30Z"),
            ({**READ["holder silent"], "due_at": seconds(-30)}, "2026-01-31T12:04:30Z"),
            ({"state": TaskState.PAUSED, "due_at": seconds(-30)}, "2026-01-31T12:04:30Z"),
            ({**READ["running"], "due_at": seconds(-30), "schedule": None}, None),
        ],
    )
    def test_a_due_time_that_nobody_runs_is_not_told_as_due(
        self, show: Show, columns: dict[str, Any], told: str | None
    ) -> None:
        task = task_status(**{"zone": "UTC", **columns})
        assert line("due", show(task)) == told
        [row] = status(task)
        assert row[6] == (told or "-").partition(",")[0]

    @pytest.mark.parametrize(
        ("state", "told"),
        [
            (None, "two has died or is silent, and nobody"),
            (ReplicaState.DIED, "two has died, and nobody"),
            (ReplicaState.SILENT, "two has been silent since 2026-01-31T11:58:00Z, and nobody"),
        ],
    )
    def test_a_run_of_a_silent_replica_is_not_said_to_run(
        self, show: Show, state: ReplicaState | None, told: str
    ) -> None:
        task = task_status(**READ["holder silent"])
        silent: Any = seconds(-120)
        replicas = [replica_status("two", state=state, seen_at=silent)] if state else None
        text = show(task, (), replicas)
        assert line("state", text) == (
            f"holder silent: {told} knows whether its run goes on; locked until "
            "2026-01-31T12:01:00Z"
        )
        assert ", so far at most 60s, token 7" in (line("last run", text) or "")
        [row] = status(task)
        assert (row[1], row[4]) == ("holder silent", "at most 60s")

    def test_no_replica_has_the_task_of_a_removed_job(self, show: Show) -> None:
        assert line("replicas", show(task_status(), (), [])) == "none has reported this task"
        removed = [action_read(outcome="job-removed")]
        told = line("replicas", show(task_status(), (), [], actions=removed))
        assert told == "none since its job was removed"


class TestRuns:
    def test_a_run_is_told_with_its_error(self) -> None:
        failed = run_read(outcome="error", error_type="ValueError", error=f"{ODD}oops", token=7)
        [row] = cells(run_rows([failed], PlainOutput()))
        assert row[:7] == ["sync", "2026-01-31T11:59:00Z", "2s", "error", "schedule", "one", "7"]
        assert row[7].startswith("ValueError: \\x1b[2J")

    def test_a_run_is_told_with_its_release(self) -> None:
        [row] = cells(run_rows([run_read(attempt=2, release="1.4")], PlainOutput()))
        assert row[-1] == "attempt 2, release 1.4"

    def test_what_operators_did_is_told_with_who_did_it(self) -> None:
        asked = action_read(outcome="run", reason=None)
        [row] = cells(run_rows([asked], PlainOutput()))
        assert row == [
            *("sync", "2026-01-31T11:00:00Z", "-", "run", "operator", "-", "-", "-"),
            "by ann@ops (dropped at 2026-01-31T13:00:00Z if no replica has begun it)",
        ]

    @pytest.mark.parametrize(
        ("count", "words"), [(2, "2"), (10_000, "10000"), (10_001, "more than 10,000")]
    )
    def test_missed_run_times_are_told_with_the_reason(self, count: int, words: str) -> None:
        missed = miss_read(last_scheduled_at=seconds(-3300), run_times=count)
        [row] = cells(run_rows([missed], PlainOutput()))
        told = "run times from 2026-01-31T11:00:00Z to 2026-01-31T11:05:00Z: the task was paused"
        assert row[-1] == f"{words} {told}"


class TestReplicas:
    def test_who_they_are_and_what_they_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        running: Any = RunningRun("sync", 7, "one", seconds(-61.4))
        one = replica_status("one", tasks=("sync", "other"), running=(running,), release="1.4")
        two = replica_status("two", state=ReplicaState.SILENT, seen_at=seconds(-120))
        killed: Any = RunningRun("sync", 6, "three", seconds(-59))
        times: Any = {"seen_at": seconds(-120)}
        three = replica_status("three", state=ReplicaState.DIED, running=(killed,), **times)
        print_replicas([one, two, three], NOW, PlainOutput())
        lines = [re.split("  +", told) for told in capsys.readouterr().out.splitlines()]
        assert lines[1:] == [
            [
                *("one", "host", "1.0", "1.4", "2026-01-31T11:00:00Z", "2026-01-31T12:00:00Z"),
                *("alive", "2", "sync for 61s"),
            ],
            [
                *("two", "host", "1.0", "-", "2026-01-31T11:00:00Z", "2026-01-31T11:58:00Z"),
                *("silent", "0", "-"),
            ],
            [
                *("three", "host", "1.0", "-", "2026-01-31T11:00:00Z", "2026-01-31T11:59:01Z"),
                *("died", "0", "sync for at most 59s"),
            ],
        ]

    def test_a_run_that_began_by_a_clock_ahead_of_this_one_has_just_begun(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        running: Any = RunningRun("sync", 7, "one", seconds(2))
        print_replicas([replica_status(running=(running,))], NOW, PlainOutput())
        assert capsys.readouterr().out.splitlines()[1].endswith("  sync for 0s")


WEEKLY = {
    "type": "cron",
    "fields": {"day_of_week": "mon-fri", "hour": 3},
    "timezone": "Europe/Berlin",
    "end_date": None,
    "jitter": None,
}


def on_terminal(table: Callable[[TerminalOutput], Table], columns: int) -> list[str]:
    """Return the lines of a table on a terminal of so many columns, without colours."""
    drawn = StringIO()
    console = Console(file=drawn, width=columns, highlight=False, markup=False, emoji=False)
    shown = TerminalOutput(console)
    shown.print_table(table(shown))
    lines = drawn.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    return lines


def first_column(lines: Sequence[str]) -> str:
    """Return the cells of the first column, the lines of a broken one together."""
    end = re.match(r"\S+ +", lines[0])
    assert end is not None
    return "".join(line[: end.end()].strip() for line in lines[2:])


class Screen(StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def standard_output(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Screen:
    """Let standard output be a terminal for the rest of a test."""
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "300", **environment}.items():
        monkeypatch.setenv(name, value)
    return screen


class TestTerminal:
    @pytest.mark.parametrize("columns", [40, 80, 120])
    def test_a_narrow_one_drops_columns_but_breaks_no_name_off(self, columns: int) -> None:
        """Of runs the token goes first, and who ran what and why it failed stay."""
        name, token = "shop:sync-prices-of-all-suppliers", 1795402930123456
        schedule = {"type": "cron", "fields": {"day_of_week": "mon-fri", "hour": "3"}}
        holder = "web-7d9f8-abcde:1:1a2b3c4d"
        prices = task_status(name, **READ["paused"] | {"schedule": schedule, "holder": holder})
        report = task_status("report", **READ["overdue"] | {"holder": holder})
        tasks = on_terminal(lambda shown: task_table([report, prices], {}, NOW, shown), columns)
        assert first_column(tasks) == "report" + name
        assert "overdue" in tasks[2]
        assert "1 min" in tasks[2]
        assert ("schedule" in tasks[0]) == (columns > 40)
        assert len(tasks) <= 2 + 2 + 3, tasks
        run = run_read(
            task=name,
            token=token,
            outcome="overtaken",
            error="it went wrong",
            replica=holder,
            started_at=seconds(-172_800),
        )
        runs = on_terminal(lambda shown: run_rows([run], shown), columns)
        assert first_column(runs) == name
        assert "overtaken" in "".join(runs[2:])
        names = set(runs[0].split())
        if columns == 40:
            assert names >= {"task", "outcome"}
        else:
            assert names >= {"task", "when", "outcome", "replica", "error"}
            assert ("token" in names) <= ("kind" in names)
            assert "it went" in runs[2]
            assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", runs[2])
        replica = replica_status(holder, tasks=(name, "report"))
        drawn = on_terminal(lambda shown: replica_table([replica], NOW, shown), columns)
        assert first_column(drawn) == holder
        assert "alive" in drawn[2]
        found = Finding("connection", "ok", "the server answers, and has the tables " * 4)
        lines = on_terminal(lambda _: finding_table([found]), columns)
        assert lines[0].split() == ["what", "how", "it", "is"]

    def test_runs_of_ordinary_names_keep_the_replica_in_one_piece_at_80_columns(self) -> None:
        well = run_read(task="sync-prices", token=1795402930123456, replica="web-1:68:c")
        failed = run_read(
            task="sync-prices",
            token=1795402930123457,
            outcome="error",
            error_type="ValueError",
            error="no price for 4711",
            replica="web-7d9f8:1:1a2b3c4d",
        )
        text = "\n".join(on_terminal(lambda shown: run_rows([failed, well], shown), 80))
        for part in ("web-1:68:c", "web-7d9f8:1:1a2b3c4d", "ValueError"):
            assert part in text
        assert "token" not in text

    def test_a_table_has_colours_and_no_empty_columns(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        screen = standard_output(monkeypatch)
        columns = READ["overdue"] | {"kind": "takeover"}
        shown = output()
        shown.print_table(task_table([task_status(ODD, **columns)], {}, NOW, shown))
        text = screen.getvalue()
        assert "\x1b[1;31moverdue" in text
        assert "\x1b[2J" not in text
        assert "\\x1b[2J" in text
        assert "1 min " in text
        assert "notes" not in text

    def test_its_width_is_respected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        screen = standard_output(monkeypatch, COLUMNS="40", NO_COLOR="1")
        shown = output()
        shown.print_table(task_table([task_status(**READ["overdue"])], {}, NOW, shown))
        lines = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).splitlines()
        assert "overdue" in lines[2]
        assert max(map(len, lines)) <= 40

    def test_no_color_is_respected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        screen = standard_output(monkeypatch, NO_COLOR="1")
        shown = output()
        shown.print_table(task_table([task_status(**READ["overdue"])], {}, NOW, shown))
        assert "overdue" in screen.getvalue()
        assert "31m" not in screen.getvalue()

    def test_a_dumb_one_gets_plain_columns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        screen = standard_output(monkeypatch, TERM="dumb")
        shown = output()
        shown.print_table(task_table([task_status()], {}, NOW, shown))
        assert screen.getvalue().startswith("task  state  schedule ")
        assert "\x1b" not in screen.getvalue()

    def test_the_picture_of_the_runs_has_bars(self, monkeypatch: pytest.MonkeyPatch) -> None:
        screen = standard_output(monkeypatch)
        failed = run_read(ended_at=seconds(-59.9), outcome="error")
        output().print_bars([failed, run_read(ended_at=seconds(-50))])
        for part in ("\x1b[1;31m▁", "\x1b[32m█", "✗"):
            assert part in screen.getvalue()


class TestJobs:
    def test_a_row_has_what_an_operator_asks_for(self) -> None:
        due = datetime(2100, 1, 1, tzinfo=timezone.utc)
        table = job_table(
            [
                job_status("nightly", next_run_time=due, last_run_time=NOW),
                job_status("held", holder="web-1", state=JobState.ENDED, next_run_time=None),
                job_status("stays", task_paused=True),
                job_status("waits", task_paused=True, task_paused_until=due),
                job_status("odd", unreadable=("trigger",), trigger=None, state=JobState.UNREADABLE),
                job_status("unclaimed", state=JobState.OVERDUE),
            ],
            [],
            PlainOutput(),
        )
        nightly, held, stays, waits, odd, unclaimed = cells(table)
        assert nightly[:2] == ["nightly", "waiting"]
        function = "tests.support.stored_jobs:note"
        assert nightly[3:] == [
            *("2100-01-01T00:00:00Z", "2026-01-31T12:00:00Z", function, "default", "-")
        ]
        assert (held[1], held[3], held[-1]) == ("ended", "-", "its task runs on web-1")
        assert stays[-1] == "its task is paused until resumed"
        assert waits[-1] == "its task is paused until 2100-01-01T00:00:00Z"
        assert odd[1] == "unreadable"
        assert "trigger" in odd[-1]
        assert unclaimed[-1] == "no replica claims it: none is alive"

    @pytest.mark.parametrize("columns", [60, 80, 120])
    @pytest.mark.parametrize(
        "job_id", ["0f8fad5b-d9cb-469f-a165-70867728950e", "remind-" + "x" * 43]
    )
    def test_on_a_narrow_terminal_an_id_is_in_one_piece(self, columns: int, job_id: str) -> None:
        due = datetime(2100, 1, 1, 3, tzinfo=timezone.utc)
        jobs = [job_status(each, next_run_time=due, trigger=WEEKLY) for each in (job_id, "other")]
        lines = on_terminal(lambda shown: job_table(jobs, None, shown), columns)
        assert any(job_id in line and "waiting" in line for line in lines)
        if columns == 80 and len(job_id) == 36:
            assert any(job_id in line and "2100-01-01 0" in line for line in lines)
        text = "\n".join(lines)
        assert "function" not in text if columns < 120 else "trigger" in text


def test_in_json_times_are_rfc_3339_and_durations_numbers() -> None:
    told = json.loads(as_json(task_status(**READ["late"])))
    assert (told["due_at"], told["took"], told["late_by"]) == ("2026-01-31T11:59:10Z", 2.0, 50.0)
    assert (told["name"], told["state"]) == ("sync", "late")
    assert told["schedule"]["length"] == [0, 300, 0]
