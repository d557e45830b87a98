"""The commands over rows of no database: what they choose, tell and change, and their statuses."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from io import StringIO
from typing import Any
from uuid import UUID

import pytest

from apscheduler_tasklock.cli.steering import AwaitedRun, End
from apscheduler_tasklock.errors import TaskLockNotFoundError, TaskLockStateError
from apscheduler_tasklock.status import (
    JobMoved,
    JobState,
    Pause,
    PauseChange,
    ReplicaState,
    Run,
    RunningRun,
    RunRequest,
    TaskStatus,
)
from tests.support.commands import Command
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

# It clears the screen, sets the title, and reads from right to left; in German, with quotes.
ODD = "\x1b[2J\x1b]0;owned\x07 \u202eüber 'a' \"b\" | \x9b31m 報告  x\n\x7f"
ODD_SHOWN = "\\x1b[2J\\x1b]0;owned\\x07 \\u202eüber 'a' \"b\" | \\x9b31m 報告 \\x20x\\n\\x7f"

FORMS = pytest.mark.parametrize("form", [(), ("--json",)], ids=["plain", "JSON"])
PREFIX = "apscheduler-tasklock: "

On = Callable[..., Command]


@pytest.fixture
def on(capsys: pytest.CaptureFixture[str]) -> On:
    """Return the command line over some rows."""

    def over(*tasks: TaskStatus, **rows: Any) -> Command:
        return Command("postgresql://localhost:1/none", capsys, Known(tasks, **rows))

    return over


def named(*names: str, **columns: Any) -> list[TaskStatus]:
    """Return tasks of these names."""
    return [task_status(name, **columns) for name in names]


UNNOTED = "not in the run history, which its task has from the job's first run on"


class Terminal(StringIO):
    """A standard stream that is a terminal."""

    def isatty(self) -> bool:
        return True


class TestStatus:
    def test_a_state_is_chosen_in_one_word(self, on: On) -> None:
        command = on(task_status("well"), task_status("hangs", **READ["too long"]))
        assert [row[:2] for row in command("status", "--state", "too-long").cells] == [
            ["hangs", "too long"]
        ]

    def test_in_json_times_are_rfc_3339_and_durations_numbers(self, on: On) -> None:
        [task] = on(task_status("sync", **READ["late"]), usual={"sync": 2.0})(
            "status", "--json"
        ).json
        assert (task["name"], task["state"]) == ("sync", "late")
        assert (task["usual"], task["took"], task["late_by"]) == (2.0, 2.0, 50.0)
        assert task["due_at"] == "2026-01-31T11:59:10Z"
        assert task["schedule"]["length"] == [0, 300, 0]

    @pytest.mark.parametrize(
        ("patterns", "chosen"),
        [
            ((), ["a", "app:a", "app:b"]),
            (("app:?",), ["app:a", "app:b"]),
            (("nothing*",), []),
            (("--namespace", "app:"), ["app:a", "app:b"]),
            (("a*", "--namespace", "app:"), ["app:a"]),
            (("--limit", "2"), ["a", "app:a"]),
            (("app:b", "--limit", "2"), ["app:b"]),
        ],
    )
    def test_patterns_and_a_namespace_choose(
        self, on: On, patterns: Sequence[str], chosen: Sequence[str]
    ) -> None:
        answer = on(*named("app:a", "app:b", "a"))("status", *patterns)
        assert (answer.status, [row[0] for row in answer.cells]) == (0, chosen)

    @pytest.mark.parametrize(
        "arguments",
        [("app:a", "othr"), ("othr", "--limit", "1"), ("othr", "--state", "running")],
    )
    def test_a_mistyped_name_is_an_error(self, on: On, arguments: Sequence[str]) -> None:
        answer = on(*named("app:a"))("status", *arguments)
        assert (answer.status, answer.out) == (3, "")
        assert "no such task: 'othr'" in answer.err

    def test_a_task_in_another_state_is_no_mistyped_name(self, on: On) -> None:
        answer = on(*named("app:a"))("status", "app:a", "--state", "running")
        assert (answer.status, answer.cells) == (0, [])

    def test_of_no_tasks(self, on: On) -> None:
        answer = on()("status")
        assert (answer.status, answer.cells, answer.err) == (0, [], f"{PREFIX}no tasks\n")
        assert on()("status", "--json").json == []


@FORMS
def test_a_name_cannot_steer_the_terminal(on: On, form: Sequence[str]) -> None:
    pause = Pause("\x1b[31m", NOW, None, "closed")
    command = on(
        task_status(ODD, **READ["paused"] | {"pauses": (pause,)}),
        runs_=[run_read(task=ODD, token=7, error="\x1b[2Joops", outcome="error")],
        jobs_=[
            job_status(
                "job\x1b[2J",
                function="\x1b[2J:x",
                trigger={"type": "\x1b]0;owned\x07"},
                executor="\x9b31m",
            )
        ],
        answers={"free": TaskLockStateError(f"task {ODD!r} has ended")},
    )
    answers = [command("status", *form), command("show", ODD, *form), command("runs", *form)]
    answers += [command("pause", ODD, *form), command("jobs", *form)]
    answers.append(command("free", ODD, "--token", "1", *form))
    assert [answer.status for answer in answers] == [0, 0, 0, 0, 0, 4]
    for answer in answers:
        assert all(c == "\n" or c.isprintable() for c in answer.out + answer.err)
    if form:
        assert answers[0].json[0]["name"] == ODD
    else:
        assert answers[0].cells[0][0] == ODD_SHOWN
        assert len(answers[0].out.splitlines()) == 2


class TestShow:
    def test_the_last_20_runs_are_listed_apart_from_what_operators_did_and_misses(
        self, on: On
    ) -> None:
        runs = [
            run_read(
                token=token,
                ended_at=seconds(-60 + token),
                outcome="error" if token == 29 else "ok",
                traceback='  File "jobs.py", line 7, in sync\nValueError' if token == 29 else None,
            )
            for token in range(1, 31)
        ]
        runs += [action_read(started_at=seconds(0)) for _ in range(20)]
        runs += [action_read(task="other", by="somebody"), miss_read()]
        command = on(task_status(), runs_=runs)
        answer = command("show", "sync")
        assert "took  44445555566667777888\nend   ..................x." in answer.out
        shown, _, rest = answer.out.partition("\ntraceback of the last failure (")
        assert len(shown.partition("\ntask  when")[2].splitlines()[1:]) == 20
        assert "ann@ops" not in shown
        traceback, _, rest = rest.partition("\nwhat operators did:\n")
        assert traceback.splitlines()[1:] == [
            '  |   File "jobs.py", line 7, in sync',
            "  | ValueError",
        ]
        did, _, missed = rest.partition("\nmissed run times:\n")
        assert (len(did.splitlines()), len(missed.splitlines())) == (20, 1)
        told = command("show", "sync", "--json").json
        assert [run["token"] for run in told["runs"]] == list(range(30, 10, -1))
        assert (told["task"]["name"], told["runs"][0]["took"]) == ("sync", 30.0)
        first = told["actions"][0]
        assert len(told["actions"]) == 20
        assert (first["outcome"], first["by"], first["token"]) == ("paused", "ann@ops", None)
        assert (first["until"], first["reason"]) == ("2026-01-31T13:00:00Z", "the shop is closed")
        assert [miss["reason"] for miss in told["misses"]] == ["the task was paused"]
        [run] = command("runs", "sync", "--outcome", "error", "--json").json
        assert run["traceback"] == '  File "jobs.py", line 7, in sync\nValueError'

    def test_the_replicas_are_those_that_have_the_task(self, on: On) -> None:
        replicas = [
            replica_status("old", tasks=("sync",), state=ReplicaState.SILENT),
            replica_status("new", tasks=("other", "sync")),
            replica_status("another", tasks=("other",)),
        ]
        command = on(task_status(), replicas_=replicas, usual={"sync": 3.0})
        answer = command("show", "sync")
        assert "replicas     new, old (silent)\n" in answer.out
        assert "usual        3s\n" in answer.out
        told = command("show", "sync", "--json").json
        assert told["usual"] == 3.0
        assert [each["replica_id"] for each in told["replicas"]] == ["old", "new"]

    def test_its_next_run_times_are_after_the_databases_time(self, on: On) -> None:
        command = on(task_status(zone="UTC", due_at=seconds(60)))
        told = command("show", "sync", "--json").json["next_run_times"]
        assert told[0] == "2026-01-31T12:01:00Z"

    def test_a_namespace_is_put_before_the_name(self, on: On) -> None:
        command = on(*named("app:b"))
        assert "app:b" in command("show", "b", "--namespace", "app:").out
        assert command("show", "app:b", "--namespace", "app:").status == 3

    def test_a_name_with_a_star_is_no_pattern(self, on: On) -> None:
        assert on(*named("a"))("show", "*").status == 3
        runs = [run_read(task=task, replica=f"of {task}") for task in ("*", "a")]
        told = on(*named("a", "*"), runs_=runs)("show", "*", "--json").json
        assert [run["replica"] for run in told["runs"]] == ["of *"]


def test_a_run_goes_on_for_the_time_by_the_databases_clock(on: On) -> None:
    """The rows are of another day than this machine's."""
    running: Any = RunningRun("sync", 7, "one", seconds(-5))
    told = on(replicas_=[replica_status("one", running=(running,))])("replicas")
    assert "sync for 5s" in told.out


@pytest.fixture
def local_zone(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Set the zone of this machine for the rest of a test."""
    yield lambda zone: (monkeypatch.setenv("TZ", zone), time.tzset())
    monkeypatch.undo()
    time.tzset()


class TestRuns:
    def test_it_is_said_if_there_are_more(self, on: On) -> None:
        runs = [run_read(token=token) for token in (1, 2, 3)]
        command = on(task_status(), runs_=runs)
        for form in ((), ("--json",)):
            answer = command("runs", "--limit", "2", *form)
            assert answer.err == (
                f"{PREFIX}there are more runs: these are the newest 2; --limit shows more, and "
                "--until earlier ones\n"
            )
        assert [run["token"] for run in answer.json] == [3, 2]
        assert command("runs", "--limit", "3").err == ""

    @pytest.mark.parametrize(
        ("arguments", "tokens"),
        [
            (("--since", "2h"), {2}),
            (("--until", "2h ago"), {1, 3, 4}),
            (("sync", "--since", "4h", "--until", "2h"), {1}),
            (("--since", "2026-01-31", "--until", "2026-01-31 03:00:01Z"), {4}),
            (("--since", "2026-01-31", "--until", "2026-01-31 04:00:01"), {4}),
            (("--since", "2026-01-31", "--until", "2026-01-31 03:00:01"), set()),
            (("--outcome", "error"), {3}),
            (("--outcome", "error, ok", "--kind", "schedule"), {1, 3, 4}),
            (("--outcome", "error", "--outcome", "ok", "--kind", "schedule"), {1, 3, 4}),
            (("--kind", "manual"), {2}),
            (("--replica", "web-2"), {1}),
            (("--error", "NO PRICE"), {3}),
        ],
    )
    def test_they_are_chosen_by_times_as_people_write_them(
        self,
        on: On,
        local_zone: Callable[[str], None],
        arguments: Sequence[str],
        tokens: set[int],
    ) -> None:
        local_zone("Europe/Berlin")
        now = datetime.now(timezone.utc)
        runs = [
            run_read(token=1, started_at=now - timedelta(hours=3), replica="web-2"),
            run_read(token=2, started_at=now - timedelta(hours=1), kind="manual"),
            run_read(
                token=3, started_at=now - timedelta(hours=25), outcome="error", error="no price"
            ),
            run_read(token=4, started_at=datetime(2026, 1, 31, 3, tzinfo=timezone.utc)),
        ]
        found = on(task_status(), runs_=runs)("runs", *arguments, "--json").json
        assert {run["token"] for run in found} == tokens

    @pytest.mark.parametrize("text", ["error,dead", "error,", "", "bad"])
    def test_an_outcome_that_there_is_none_of_is_an_error(self, on: On, text: str) -> None:
        answer = on(task_status())("runs", "--outcome", text)
        assert answer.status == 2
        assert "must be one of ok, error," in answer.err

    def test_of_none_it_is_said_for_which_time_and_zone(
        self, on: On, local_zone: Callable[[str], None]
    ) -> None:
        local_zone("Europe/Berlin")
        answer = on()("runs", "--since", "2026-01-31 02:00", "--until", "2026-07-31")
        assert answer.err == (
            f"{PREFIX}no runs since 2026-01-31 02:00:00 CET before 2026-07-31 00:00:00 CEST\n"
        )

    def test_a_task_without_runs_is_no_mistyped_name(self, on: On) -> None:
        command = on(task_status("a"))
        assert command("runs", "a").status == command("runs", "x*").status == 0
        answer = command("runs", "x")
        assert (answer.status, "no such task: 'x'" in answer.err) == (3, True)


class TestMetrics:
    def test_in_json_they_are_the_same_numbers(self, on: On) -> None:
        command = on(task_status(ODD, **READ["failing"]))
        told = command("metrics", "--json").json
        assert told["tasklock_task_failures"] == {ODD: 3.0}
        assert told["tasklock_task_last_success_seconds"][ODD] == (NOW.timestamp() - 58)
        assert command("metrics", "--json", "--listen", "127.0.0.1:0").status == 2

    @pytest.mark.parametrize("row", ["failing", "cut"])
    def test_what_is_known_alarms_no_more(self, on: On, row: str) -> None:
        known = task_status(**READ[row] | {"acknowledged": True, "due_at": None})
        command = on(known)
        assert "tasklock_finding{" not in command("metrics").out
        assert "alarms no more" in command("show", "sync").out

    @pytest.mark.parametrize("row", ["ok", "failing"])
    def test_what_is_silent_is_told_also_if_all_is_well(self, on: On, row: str) -> None:
        until = datetime(2999, 1, 31, 4, tzinfo=timezone.utc)
        told = on(task_status(**READ.get(row, {}) | {"silent_until": until}))("show", "sync").out
        assert "its failures and misses alarm no more until 2999-01-31T04:00:00Z" in told


class TestCheck:
    @pytest.mark.parametrize(
        ("arguments", "status", "says"),
        [
            ([], 3, "no task was ever registered here: is this the right database?; 0 tasks"),
            (["--allow-empty"], 0, "OK - 0 tasks"),
            (["--allow-empty", "x"], 3, "no task matches 'x'"),
            (["x*"], 3, "no task matches 'x*'"),
            (["x"], 3, "no task matches 'x'"),
            (["--namespace", "x:"], 3, "no task matches 'x:*'"),
        ],
    )
    def test_no_tasks_at_all_are_unknown(
        self, on: On, arguments: Sequence[str], status: int, says: str
    ) -> None:
        answer = on()("check", *arguments)
        assert (answer.status, says in answer.out) == (status, True)

    def test_a_pattern_without_a_task_is_unknown_but_no_relief(self, on: On) -> None:
        command = on(task_status("fine", due_at=None), task_status("overdue", **READ["overdue"]))
        assert command("check", "fine", "tusk").status == 3
        answer = command("check", "overdue", "tusk")
        assert (answer.status, "no task matches 'tusk'" in answer.out) == (2, True)

    def test_a_stored_job_is_known_by_its_task_or_by_its_id(self, on: On) -> None:
        overdue = {"state": JobState.OVERDUE, "next_run_time": seconds(-300)}
        command = on(
            jobs_=[
                job_status("sent", **overdue),
                job_status("known", task="mail.task", **overdue),
                job_status("two", task="imports", **overdue | {"next_run_time": seconds(-240)}),
                job_status("one", task="imports", **overdue),
            ]
        )
        told = command("check", "--namespace", "web.", "--json").json
        assert [each["task"] for each in told["findings"]] == ["web.sent"]
        assert command("check", "sent").status == 2
        other = command("check", "w*")
        assert (other.status, "overdue" in other.out.partition("|")[0]) == (3, False)
        said = r"1 overdue \(imports by \d+ s, the stored job 'one' that no replica claims: "
        assert re.search(said, command("check", "imports").out)
        assert "a job 'one', which is overdue" in command("why", "imports").err
        why = command("why", "sent")
        assert why.status == 3
        assert (
            "the job store has a job 'sent', which is overdue, with the run time "
            "2026-01-31T11:55:00Z; `apscheduler-tasklock doctor` says what to do"
        ) in why.err
        assert command("why", "nothing").err.count("\n") == 1


class TestWhy:
    def test_the_story_is_of_the_time_that_is_given(self, on: On) -> None:
        runs = [
            run_read(
                token=token,
                scheduled_at=seconds(at),
                started_at=seconds(at),
                ended_at=seconds(at + 2),
            )
            for token, at in ((6, -3600), (7, -100))
        ]
        command = on(task_status(), runs_=runs)
        headline = command("why", "sync", "--at", "2026-01-31T11:00:30Z").out.splitlines()[0]
        assert headline.endswith(
            "run time until then was 2026-01-31T11:00:00Z, whose run ended well"
        )
        told = command("why", "sync", "--at", "2026-01-31T11:00:30Z", "--json").json
        assert (told["verdict"], [run["token"] for run in told["runs"]]) == ("ran", [6])


class TestAck:
    def test_it_is_of_the_last_run_unless_a_token_is_given(self, on: On) -> None:
        command = on(task_status(token=41))
        told = {"acknowledged": ["sync"], "token": 41, "until": None, "is_new": True}
        assert command("ack", "sync", "--json").json == told
        assert command("ack", "sync", "--token", "40").out == "sync: acknowledged (token 40)\n"

    def test_until_when_later_failures_are_silent_is_told(self, on: On) -> None:
        answer = on(task_status(token=41))("ack", "sync", "--until", "2999-01-31T04:00:00Z")
        assert answer.out == (
            "sync: acknowledged (token 41); later failures and misses alarm no more until "
            "2999-01-31T04:00:00Z\n"
        )

    def test_a_state_that_forbids_it_is_4(self, on: On) -> None:
        told = "it has no failure, no cut, and no miss"
        answer = on(task_status(), answers={"ack": TaskLockStateError(told)})("ack", "sync")
        assert (answer.status, answer.out, answer.err) == (4, "", f"{PREFIX}{told}\n")


OTHERS_STAY = (
    f"{PREFIX}the pauses of others stay; --force takes them out, and --as NAME those of that name\n"
)
ANN = Pause("ann", NOW, None, "closed")
BOB = Pause("bob", NOW, NOW + timedelta(hours=2), "tired")
ANN_IN_WORDS = "paused by ann until resumed (closed)"
BOB_IN_WORDS = "paused by bob until 2026-01-31T14:00:00Z (tired)"
SINCE = "since 2026-01-31T12:00:00Z"
STILL_ANN = ANN_IN_WORDS.replace("ann", f"ann {SINCE}")


def in_pause(name: str, *pauses: Pause) -> TaskStatus:
    """Return a task with these pauses; without any, it is not paused."""
    ends = [pause.until for pause in pauses]
    until = max(filter(None, ends), default=None) if None not in ends else None
    columns = {**READ["paused"], "pauses": pauses, "paused_until": until} if pauses else {}
    return task_status(name, **columns)


class Resuming(Known):
    """Tasks as they are before a resume, and after it.

    :ivar after: the tasks that the resume leaves
    """

    after: Sequence[TaskStatus] = ()

    def resume(self, *names: str, **_: Any) -> list[PauseChange]:
        """Resume tasks: return what has become of their pauses."""
        was = {task.name: task for task in self.tasks(*names)}
        self.tasks_ = self.after
        return [
            PauseChange(
                task.name,
                tuple(each for each in was[task.name].pauses if each not in task.pauses),
                task.pauses,
                was[task.name].paused,
                task.paused,
            )
            for task in self.tasks(*names)
        ]


class TestPause:
    @FORMS
    def test_it_is_said_what_patterns_do_not_cover(self, on: On, form: Sequence[str]) -> None:
        names = ["rapport", "report-1", "report-2"]
        command = on(*(in_pause(name, ANN) for name in names))
        answer = command("pause", "rep*", "r?pport", *form)
        assert answer.status == 0
        if form:
            assert answer.json == {"paused": names, "paused_until": dict.fromkeys(names)}
        else:
            assert answer.out.splitlines() == [f"{n}: paused until it is resumed" for n in names]
        assert answer.err == (
            f"{PREFIX}3 tasks are paused; tasks that appear later and match 'rep*', 'r?pport' are "
            "not covered\n"
        )

    def test_each_task_is_told_with_the_end_of_its_own_pauses(self, on: On) -> None:
        command = on(in_pause("a", ANN, BOB), in_pause("b", BOB))
        assert command("pause", "a", "b", "--for", "2h").out.splitlines() == [
            "a: paused until it is resumed",  # because of ann's
            "b: paused until 2026-01-31T14:00:00Z",
        ]
        told = command("pause", "a", "b", "--for", "2h", "--json").json
        assert told["paused_until"] == {"a": None, "b": "2026-01-31T14:00:00Z"}

    def test_all_pauses_of_a_task_are_shown(self, on: On) -> None:
        command = on(in_pause("a", ANN, BOB))
        [row] = command("status").cells
        assert row[-1].split("; ")[:2] == [STILL_ANN, BOB_IN_WORDS.replace("bob", f"bob {SINCE}")]
        [told] = command("status", "--json").json
        assert [pause["reason"] for pause in told["pauses"]] == ["closed", "tired"]

    @pytest.mark.parametrize(
        ("arguments", "change"),
        [
            (
                ("pause", "*", "--namespace", "shop:", "--for", "2h", "--reason", "x", "--as", "y"),
                ("pause", ("shop:*",), {"duration": 7200.0, "reason": "x", "by": "y"}),
            ),
            (
                ("resume", "b", "--namespace", "shop:", "--force"),
                ("resume", ("shop:b",), {"by": None, "force": True}),
            ),
            (
                ("run", "b", "--namespace", "shop:", "--as", "y"),
                ("request_run", ("shop:b",), {"by": "y"}),
            ),
            (
                ("free", "b", "--namespace", "shop:", "--token", "7", "--run-again"),
                ("free", ("shop:b", 7), {"force": False, "run_again": True, "by": None}),
            ),
            (
                ("ack", "b", "--namespace", "shop:", "--token", "7"),
                ("ack", ("shop:b", 7), {"by": None, "until": None}),
            ),
            (
                ("free", "b", "--namespace", "shop:", "--token", "7", "--force", "--as", "y"),
                ("free", ("shop:b", 7), {"force": True, "run_again": False, "by": "y"}),
            ),
            (("forget", "b", "--namespace", "shop:"), ("forget", ("shop:b",), {})),
        ],
        ids=["pause", "resume", "run", "free", "ack", "free by force", "forget"],
    )
    def test_what_is_changed_is_what_the_words_say(
        self, on: On, arguments: Sequence[str], change: Any
    ) -> None:
        known = Known([task_status("shop:b")], answers={"resume": [], "request_run": REQUEST})
        command = on()
        command.known = known
        assert command(*arguments).status == 0
        assert known.changes == [change]

    def test_a_task_that_is_not_there_is_3(self, on: On) -> None:
        answers = dict.fromkeys(
            ("pause", "resume", "request_run", "forget"), TaskLockNotFoundError(["tusk"])
        )
        for operation in ("pause", "resume", "forget", "run", "show"):
            answer = on(answers=answers)(operation, "tusk")
            assert (answer.status, answer.out) == (3, "")
            assert answer.err.startswith(f"{PREFIX}no such task: 'tusk'")
            assert answer.err.count("\n") == 1

    def test_what_is_for_one_task_takes_no_pattern(self, on: On) -> None:
        for arguments in (["run", "rep*"], ["forget", "rep*"], ["free", "rep*", "--token", "7"]):
            answer = on(*named("report"))(*arguments)
            assert (answer.status, answer.out) == (3, "")
            assert "no such task: 'rep*'" in answer.err
            assert f"`{arguments[0]}` takes one task's exact name" in answer.err


class TestResume:
    @pytest.mark.parametrize(
        ("given", "before", "after", "status", "lines", "told", "err"),
        [
            (
                ("a", "b"),
                (in_pause("a", ANN), in_pause("b", ANN)),
                (in_pause("a"), in_pause("b")),
                0,
                ["a: resumed", "b: resumed"],
                {"resumed": ["a", "b"], "still_paused": {}, "ended": {}},
                "",
            ),
            (
                ("rep*", "other"),
                (in_pause("report", ANN), in_pause("other")),
                (in_pause("report"), in_pause("other")),
                0,
                ["other: was not paused", "report: resumed"],
                {"resumed": ["report"], "still_paused": {}, "ended": {}},
                f"{PREFIX}1 task is resumed\n",
            ),
            (
                ("rep*",),
                (in_pause("report"),),
                (in_pause("report"),),
                0,
                [],
                {"resumed": [], "still_paused": {}, "ended": {}},
                f"{PREFIX}no task is resumed\n",
            ),
            (
                ("a", "b"),
                (in_pause("a", ANN, BOB), in_pause("b", BOB)),
                (in_pause("a", ANN), in_pause("b")),
                4,
                [f"a: no longer {BOB_IN_WORDS}; still {STILL_ANN}", "b: resumed"],
                {
                    "resumed": ["b"],
                    "still_paused": {"a": ["closed"]},
                    "ended": {"a": ["tired"]},
                },
                OTHERS_STAY,
            ),
            (
                ("a",),
                (in_pause("a", ANN),),
                (in_pause("a", ANN),),
                4,
                [f"a: still {STILL_ANN}"],
                {"resumed": [], "still_paused": {"a": ["closed"]}, "ended": {"a": []}},
                OTHERS_STAY,
            ),
        ],
        ids=["all", "a pattern", "a pattern, of none", "in part", "of others alone"],
    )
    def test_it_is_told_what_is_left_and_what_is_not(
        self,
        on: On,
        given: Sequence[str],
        before: Sequence[TaskStatus],
        after: Sequence[TaskStatus],
        status: int,
        lines: Sequence[str],
        told: dict[str, Any],
        err: str,
    ) -> None:
        command = on()
        for form in ((), ("--json",)):
            command.known = Resuming(before)
            command.known.after = after
            answer = command("resume", *given, *form)
            assert answer.status == status
            assert answer.err == err
            if not form:
                assert answer.out.splitlines() == lines
                continue
            found = answer.json
            for key in ("still_paused", "ended"):
                found[key] = {
                    name: [pause["reason"] for pause in pauses]
                    for name, pauses in found[key].items()
                }
            assert found == told


ALL_BY_ANN = Pause("ann", NOW, None, None, namespace="")
ALL_BY_BOB = Pause("bob", NOW, None, None, namespace="")
OF_SHOP = Pause("ann", NOW, None, None, namespace="shop:")


class TestOfAll:
    @pytest.mark.parametrize(
        ("namespace", "before", "left", "status", "lines", "ended", "err"),
        [
            ("", [], [], 0, ["all tasks: were not paused with --all"], 0, ""),
            ("", [ALL_BY_BOB], [], 0, ["all tasks: resumed"], 1, ""),
            (
                "",
                [ALL_BY_ANN, ALL_BY_BOB],
                [ALL_BY_ANN],
                4,
                [
                    "all tasks: no longer paused by bob until resumed",
                    "all tasks: still paused by ann until resumed",
                ],
                1,
                OTHERS_STAY,
            ),
            (
                "",
                [ALL_BY_ANN],
                [ALL_BY_ANN],
                4,
                ["all tasks: still paused by ann until resumed"],
                0,
                OTHERS_STAY,
            ),
            (
                "shop:",
                [OF_SHOP, ALL_BY_BOB],
                [],
                0,
                ["all tasks of the namespace 'shop:': resumed"],
                1,
                "",
            ),
            (
                "",
                [OF_SHOP],
                [OF_SHOP],
                4,
                ["all tasks of the namespace 'shop:': still paused by ann until resumed"],
                0,
                f"{PREFIX}all tasks of the namespace 'shop:' are paused; `resume --all --namespace "
                "shop:` ends that\n",
            ),
        ],
        ids=["none", "all", "one's own", "others' alone", "a namespace", "another namespace's"],
    )
    def test_it_says_which_pauses_have_ended(
        self,
        on: On,
        namespace: str,
        before: Sequence[Pause],
        left: Sequence[Pause],
        status: int,
        lines: Sequence[str],
        ended: int,
        err: str,
    ) -> None:
        change = PauseChange(
            f"{namespace}*",
            tuple(pause for pause in before if pause not in left and pause.namespace == namespace),
            tuple(left),
            was_paused=any(pause.namespace == namespace for pause in before),
            is_paused=bool(left),
        )
        command = on(pauses=tuple(before), answers={"resume_all": change})
        given = ("--all", "--as", "bob", "--namespace", namespace)
        answer = command("resume", *given)
        assert (answer.status, answer.out.splitlines(), answer.err) == (status, lines, err)
        told = command("resume", *given, "--json")
        assert (told.status, len(told.json["still_paused"])) == (status, len(left))
        assert len(told.json["ended"]) == ended
        assert command.known.changes[0] == (
            "resume_all",
            (),
            {"namespace": namespace, "by": "bob", "force": False},
        )

    def test_what_is_paused_and_what_is_not_is_told(self, on: On) -> None:
        paused = replace(OF_SHOP, until=NOW + timedelta(hours=2), reason="a move")
        command = on(answers={"pause_all": paused})
        given = ("--all", "--namespace", "shop:", "--for", "2h", "--reason", "a move")
        answer = command("pause", *given)
        assert answer.out == (
            "all tasks of the namespace 'shop:': paused by ann until 2026-01-31T14:00:00Z "
            "(a move)\n"
        )
        assert "not paused are code under `hold`" in answer.err
        assert command("pause", *given, "--json").json["paused"]["namespace"] == "shop:"
        asked = {"duration": 7200.0, "namespace": "shop:", "by": None, "reason": "a move"}
        assert command.known.changes[0] == ("pause_all", (), asked)

    def test_the_pause_of_all_is_told_with_the_tasks(self, on: On) -> None:
        task = in_pause("task", ALL_BY_ANN)
        listed = on(task)("status")
        assert listed.err == f"{PREFIX}all tasks: paused by ann {SINCE} until resumed\n"
        command = on()
        command.known = Resuming([task])
        command.known.after = [task]
        answer = command("resume", "task")
        assert answer.status == 4
        assert answer.out == f"task: still paused with all tasks by ann {SINCE} until resumed\n"
        assert answer.err == f"{PREFIX}all tasks are paused; `resume --all` ends that\n"


REQUEST = RunRequest(
    UUID("a7ed9d1c-5c5c-4a3e-8a67-2f2a2f1c7a11"), "sync", 7, "ann", NOW, NOW + timedelta(minutes=5)
)
ASKED_FOR = task_status(requested_by="ann", requested_at=NOW)
ROW_8 = {"token": 8, "kind": "manual"}
RUNS_8 = task_status(**READ["running"] | ROW_8)
DEAD_8 = task_status(**READ["dead"] | ROW_8)
CUT_8 = task_status(**READ["dead"] | ROW_8 | {"failover": True})
ENDED_8 = task_status(**ROW_8)
RUN_8 = run_read(token=8, kind="manual")
DIED_8 = run_read(token=8, kind="manual", outcome="died")
# Of runs that were before.
EARLIER = [run_read(token=6, kind="manual"), run_read(token=5)]

Looks = Sequence[tuple[TaskStatus, Sequence[Run]]]


def taken_over(kind: str, **columns: Any) -> TaskStatus:
    """Return the task whose run was taken over."""
    return task_status(**READ["running"] | {"token": 9, "kind": kind, "failover": True} | columns)


class TestRun:
    @pytest.mark.parametrize(
        ("looks", "outcome", "token"),
        [
            *(
                (
                    [
                        (ASKED_FOR, EARLIER),
                        (RUNS_8, EARLIER),
                        (task_status(**ROW_8), [run_read(**ROW_8, outcome=outcome), *EARLIER]),
                    ],
                    outcome,
                    8,
                )
                for outcome in ("ok", "error", "died", "cancelled")
            ),
            # A run by the schedule that began meanwhile is another one.
            ([(ASKED_FOR, EARLIER), (task_status(token=8), [run_read(token=8)])], None, None),
            # Tasks without a history.
            ([(task_status(**ROW_8), [])], "ok", None),
            ([(task_status(**ROW_8, failures=1), [])], "error", None),
            ([(task_status(**ROW_8, outcome="freed"), [])], "freed", None),
            # Without failover a run that is found dead three times in a row has died.
            ([(RUNS_8, []), *[(DEAD_8, [])] * 3], "died", None),
            ([*[(DEAD_8, [])] * 2, (RUNS_8, []), *[(DEAD_8, [])] * 2], None, None),
            # A takeover is awaited in the place of a run that died; of a manual one it is manual.
            *(
                (
                    [
                        *[(CUT_8, [])] * 4,
                        (taken_over(kind), [DIED_8]),
                        (
                            taken_over(kind, finished_at=NOW),
                            [run_read(token=9, kind=kind), DIED_8],
                        ),
                    ],
                    "ok",
                    9,
                )
                for kind in ("takeover", "manual")
            ),
            ([*[(CUT_8, [])] * 4, (taken_over("takeover"), [DIED_8])], None, None),
        ],
    )
    def test_its_end_is_found_in_the_row_or_the_history(
        self, looks: Looks, outcome: str | None, token: int | None
    ) -> None:
        awaited = AwaitedRun(REQUEST)
        *before, last = [awaited.look(task, runs) for task, runs in looks]
        assert before == [None] * len(before)
        if outcome is None:
            assert last is None
        else:
            assert last is not None
            assert (last.outcome, last.run and last.run.token) == (outcome, token)

    def test_a_look_in_vain_between_finds_no_dead_run(self) -> None:
        awaited = AwaitedRun(REQUEST)
        for _ in range(2):
            assert awaited.look(DEAD_8, []) is None
        awaited.not_seen()
        assert [awaited.look(DEAD_8, []) for _ in range(3)] == [None, None, End("died", None)]

    @pytest.mark.parametrize(
        ("looks", "at", "says"),
        [
            ([], 0, "the state of the run is not known"),
            ([(ASKED_FOR, [])], 0, "the run may still begin"),
            ([(RUNS_8, [])], 0, "the run goes on, on one"),
            (
                [(task_status(**READ["too long"] | ROW_8), [])],
                0,
                "the run goes on, on one",
            ),
            (
                [(CUT_8, [])],
                0,
                "its holder one died or was stopped, and its takeover has not begun",
            ),
            (
                [(RUNS_8, []), (task_status(token=9), [])],
                0,
                "the run has ended, and the history does not have its outcome",
            ),
            (
                [(task_status(token=8), [])],
                299,
                "the run has begun, and the history does not have it",
            ),
            ([(task_status(), [])], 300, "the request has expired"),
        ],
    )
    def test_when_a_wait_runs_out_it_is_told_how_the_run_stands(
        self, looks: Looks, at: float, says: str
    ) -> None:
        awaited = AwaitedRun(REQUEST)
        for task, runs in looks:
            assert awaited.look(task, runs) is None
        assert awaited.when_it_ran_out(NOW + timedelta(seconds=at)) == says

    @pytest.mark.parametrize(
        ("task", "run", "status", "words"),
        [
            (ENDED_8, RUN_8, 0, "ended: ok, took 2s on one"),
            (ENDED_8, DIED_8, 6, "ended: died, took at most 2s on one"),
            (
                ENDED_8,
                run_read(token=8, kind="manual", outcome="error", error_type="ValueError"),
                6,
                "ended: error, took 2s on one, ValueError",
            ),
            (
                taken_over("takeover", finished_at=NOW),
                run_read(token=9, kind="takeover", replica="two"),
                0,
                "ended: ok, took 2s on two, as a takeover",
            ),
        ],
    )
    def test_how_it_ended_is_told(
        self, on: On, task: TaskStatus, run: Run, status: int, words: str
    ) -> None:
        runs = [run] if run.token == 8 else [run, DIED_8]
        command = on(task, runs_=runs, answers={"request_run": REQUEST})
        answer = command("run", "sync", "--wait")
        assert (answer.status, answer.out) == (status, f"sync: {words}\n")
        told = command("run", "sync", "--wait", "--json")
        assert (told.status, told.json["outcome"]) == (status, run.outcome)
        assert (told.json["request"]["token"], told.json["run"]["token"]) == (7, run.token)

    def test_a_wait_that_runs_out_is_5(self, on: On) -> None:
        command = on(ASKED_FOR, answers={"request_run": REQUEST})
        answer = command("run", "sync", "--wait", "0.01")
        assert answer.status == 5
        assert answer.out == "sync: the wait of 0.01 s ran out; the run may still begin\n"
        assert command("run", "sync", "--wait", "0.01", "--json").json["outcome"] is None

    def test_a_task_that_was_forgotten_meanwhile_has_no_run(self, on: On) -> None:
        answer = on(answers={"request_run": REQUEST})("run", "sync", "--wait")
        assert (answer.status, answer.out) == (6, "sync: ended: forgotten\n")


class TestJobs:
    def test_they_are_told_as_they_are_read(self, on: On) -> None:
        command = on(
            jobs_=[
                job_status("once", name="Once", next_run_time=seconds(60)),
                job_status("nightly", next_run_time=None, state=JobState.PAUSED),
            ]
        )
        first, second = command("jobs").cells
        assert [first[0].strip(), second[0].strip()] == ["once", "nightly"]
        told, _ = command("jobs", "--json").json
        assert (told["id"], told["state"], told["name"]) == ("once", "waiting", "Once")
        assert told["next_run_time"] == "2026-01-31T12:01:00Z"
        assert told["trigger"]["type"] == "interval"

    @pytest.mark.parametrize(
        ("arguments", "chosen"),
        [
            ((), ["a", "b", "pause", "r-1"]),
            (("r-*",), ["r-1"]),
            (("x*",), []),
            (("--namespace", "shop:"), ["a"]),
            (("--", "pause"), ["pause"]),
        ],
    )
    def test_patterns_and_a_namespace_choose(
        self, on: On, arguments: Sequence[str], chosen: Sequence[str]
    ) -> None:
        """The namespace is that of their tasks."""
        tasks = {"a": "shop:a", "b": "b", "r-1": None, "pause": None}
        answer = on(jobs_=[job_status(each, task=task) for each, task in tasks.items()])(
            "jobs", *arguments
        )
        assert (answer.status, [row[0].strip() for row in answer.cells]) == (0, chosen)

    def test_a_mistyped_id_is_an_error(self, on: On) -> None:
        answer = on(jobs_=[job_status("report")])("jobs", "reprot")
        assert (answer.status, answer.out) == (3, "")
        assert "no such job: 'reprot'; `apscheduler-tasklock jobs`" in answer.err

    def test_of_no_jobs_that_is_said(self, on: On) -> None:
        answer = on()("jobs")
        assert (answer.status, answer.err) == (0, f"{PREFIX}no jobs\n")

    def test_an_action_after_an_option_is_said_to_be_at_the_wrong_place(self, on: On) -> None:
        command = on(jobs_=[job_status("a")])
        answer = command("jobs", "--json", "pause", "a")
        assert (answer.status, answer.out) == (3, "")
        assert "`pause` has to follow `jobs` directly, before any option" in answer.err
        assert command.known.changes == []

    @pytest.mark.parametrize(
        ("words", "told", "status", "ids"),
        [
            ("pause r-? a r-1", {"paused": ["r-1", "r-2", "a"]}, 0, ["r-1", "r-2", "a"]),
            # What was paused before is not told as done.
            ("pause *", {"paused": ["a", "r-1", "r-2"]}, 0, ["a", "p", "r-1", "r-2"]),
            # What was not paused is asked for all the same: it may be paused meanwhile.
            ("resume a p", {"resumed": ["p"]}, 0, ["a", "p"]),
            ("remove a p", {"removed": ["a", "p"]}, 0, ["a", "p"]),
            (
                "move a --to 2100-01-02T00:00:00Z",
                {"moved": "a", "next_run_time": "2100-01-02T00:00:00Z"},
                0,
                ["a"],
            ),
            ("run a", {"run": "a", "request": None}, 0, ["a"]),
            # A mistyped one leaves all as they are.
            ("pause a none n*", None, 3, []),
            ("resume a none n*", None, 3, []),
            ("remove a none n*", None, 3, []),
            ("run none", None, 3, []),
            ("move none --to now", None, 3, []),
            # One that has ended is what its id means alone.
            ("pause e*", None, 3, []),
            ("pause ended", {"paused": ["ended"]}, 0, ["ended"]),
            ("remove ?", None, 3, []),
            ("move a", None, 2, []),
            ("move a --to soon", None, 2, []),
            ("move a --to 2026-01-30", None, 2, []),
            ("pause", None, 2, []),
        ],
    )
    def test_what_is_changed_and_told(
        self, on: On, words: str, told: dict[str, Any] | None, status: int, ids: Sequence[str]
    ) -> None:
        states = {"ended": JobState.ENDED, "p": JobState.PAUSED}
        command = on(
            jobs_=[
                job_status(name, state=states.get(name, JobState.WAITING))
                for name in ("r-2", "r-1", "p", "a", "ended")
            ],
        )
        action, *arguments = words.split()
        answer = command(f"jobs {action}", *arguments, "--json")
        assert answer.status == status
        assert (answer.json if answer.out else None) == told
        assert [names[0] for _, names, _ in command.known.changes] == ids
        assert {name for name, *_ in command.known.changes} <= {f"{action}_job"}
        if status == 3:
            assert "no such job: " in answer.err
        assert ("exact ids are needed here" in answer.err) == (words == "remove ?")

    @pytest.mark.parametrize(
        ("words", "lines"),
        [
            ("pause a", ["a: paused until it is resumed"]),
            ("resume a p", ["a: was not paused", "p: resumed, due 2026-01-31T12:00:00Z"]),
            ("remove a", ["a: removed"]),
            ("run a", ["a: due now"]),
            ("move a --to 2100-01-02T00:00:00Z", ["a: moved to 2100-01-02T00:00:00Z"]),
            (
                "move p --to 2100-01-02T00:00:00Z",
                ["p: moved to 2100-01-02T00:00:00Z, and no longer paused"],
            ),
            (
                "move new --to 2100-01-02T00:00:00Z",
                [f"new: moved to 2100-01-02T00:00:00Z ({UNNOTED})"],
            ),
            ("remove new", [f"new: removed ({UNNOTED})"]),
            ("resume new", ["new: was not paused"]),
        ],
    )
    def test_in_words(self, on: On, words: str, lines: Sequence[str]) -> None:
        paused = job_status("p", state=JobState.PAUSED, has_task=True)
        command = on(jobs_=[job_status("a", has_task=True), paused, job_status("new")])
        action, *arguments = words.split()
        answer = command(f"jobs {action}", *arguments)
        assert (answer.status, answer.err, answer.out.splitlines()) == (0, "", lines)

    def test_a_run_of_a_recurring_one_is_asked_for(self, on: On) -> None:
        command = on(jobs_=[job_status("every")], answers={"run_job": REQUEST})
        said = "every: a run of its task sync is asked for\n"
        assert command("jobs run", "every", "--as", "ann").out == said
        assert command("jobs run", "every", "--json").json["request"]["task"] == "sync"
        assert command.known.changes[0] == ("run_job", ("every",), {"by": "ann"})

    def test_a_state_that_forbids_it_is_4_and_keeps_no_other_job_from_it(self, on: On) -> None:
        def resumed(job_id: str, **_: Any) -> JobMoved:
            if job_id == "b":
                raise TaskLockStateError("job 'b' is not resumed")
            return JobMoved(job_id, NOW, was_paused=True, is_changed=True)

        command = on(
            jobs_=[job_status(each, state=JobState.PAUSED) for each in "abc"],
            answers={"resume_job": resumed},
        )
        answer = command("jobs resume", "*", "--json")
        assert (answer.status, answer.json) == (4, {"resumed": ["a", "c"]})
        assert answer.err == f"{PREFIX}job 'b' is not resumed\n"

    @pytest.mark.parametrize(
        ("given", "status", "paused"),
        [("*", 0, ["a"]), ("b", 3, []), ("new", 0, ["new"]), ("a*", 0, ["a*"])],
    )
    def test_a_namespace_leaves_other_jobs_alone(
        self, on: On, given: str, status: int, paused: Sequence[str]
    ) -> None:
        """An id means its job alone, which may be one that no replica has registered so far."""
        tasks = {"a": "shop:a", "b": "bank:b", "new": None}
        if given == "a*":
            tasks[given] = "shop:star"
        command = on(jobs_=[job_status(name, task=task) for name, task in tasks.items()])
        assert command("jobs pause", given, "--namespace", "shop:").status == status
        assert [names for _, names, _ in command.known.changes] == [(name,) for name in paused]


class TestOnATerminal:
    @pytest.mark.parametrize(
        ("typed", "status"),
        [("n\n", 1), ("\n", 1), ("", 1), ("y\n", 0), (" YES \n", 0), ("yesterday\n", 1)],
    )
    def test_free_asks(
        self, on: On, monkeypatch: pytest.MonkeyPatch, typed: str, status: int
    ) -> None:
        asked = Terminal()
        monkeypatch.setattr(sys, "stdin", Terminal(typed))
        monkeypatch.setattr(sys, "stderr", asked)
        command = on(task_status(**READ["dead"]))
        assert command("free", "sync", "--token", "7").status == status
        assert [name for name, *_ in command.known.changes] == ["free"] * (status == 0)
        told = asked.getvalue()
        assert (
            "task 'sync' (token 7) is held by 'one' since 2026-01-31T11:59:00Z, locked until "
            "2026-01-31T11:59:02Z. Its window stays" in told
        )
        assert "may overlap with the next run for a third of its lease" in told
        assert "Free it? [y/N]" in told
        assert ("task 'sync' is not freed" in told) == (status == 1)

    def test_free_does_not_ask_who_said_yes(self, on: On, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = Terminal()
        monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
        monkeypatch.setattr(sys, "stderr", asked)
        command = on(task_status(**READ["dead"]))
        assert command("free", "sync", "--token", "7", "--yes").out == (
            "sync: freed: token 7, held by one since 2026-01-31T11:59:00Z; its window stays until "
            "2026-01-31T12:03:20Z; it is skipped until it is due at 2026-01-31T12:04:00Z; overdue "
            "after 2026-01-31T12:05:00Z\n"
        )
        assert asked.getvalue() == ""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["check"], 3),
        (["check", "--json"], 3),
        (["check", "nothing"], 3),
        (["status"], 1),
        (["runs", "--json"], 1),
        (["metrics"], 1),
    ],
)
def test_an_output_that_is_full_is_one_line(
    on: On, monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int
) -> None:
    errors = StringIO()
    with monkeypatch.context() as patched, open("/dev/full", "w") as full:
        patched.setattr(sys, "stdout", full)
        patched.setattr(sys, "stderr", errors)
        answer = on()(*arguments)
    assert answer.status == status
    [line] = errors.getvalue().splitlines()[-1:]
    assert line.startswith(f"{PREFIX}cannot write: ")
    assert "Traceback" not in errors.getvalue()
