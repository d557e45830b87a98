"""Why a task did not run, or what became of its run: ``TaskLocks.why`` and the command ``why``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest

from apscheduler_tasklock import TaskLockNotFoundError, TaskLocks
from apscheduler_tasklock.status import Story, Verdict
from tests.support.commands import Command
from tests.support.roles import role
from tests.support.rows import (
    add_action,
    add_miss,
    add_replica,
    add_run,
    add_task,
)

Connection = psycopg.Connection[Any]


@pytest.fixture
def operator(make_task_locks: Callable[..., TaskLocks]) -> TaskLocks:
    return make_task_locks()


def ago(minutes: float) -> datetime:
    return datetime.now(timezone.utc) - timedelta(minutes=minutes)


def began(minutes: float, **changes: str) -> dict[str, str]:
    """Return the columns of a run that began for its run time so many minutes ago."""
    began_at = f"now() - interval '{minutes} min'"
    ended_at = f"{began_at} + interval '2 s'"
    return {"scheduled_at": began_at, "started_at": began_at, "ended_at": ended_at, **changes}


@pytest.fixture
def night(connection: Connection) -> None:
    """A task with four run times: run, failed over, missed twice in a pause, and run."""
    with connection.transaction():  # so that `now()` is one time
        # Its schedule is not known, so nothing is computed.
        row = {"window_start": "now() - interval '10 min'", "schedule": "NULL"}
        add_task(connection, "job", **row)
        add_run(connection, "job", 1, **began(60))
        add_run(connection, "job", 2, **began(50, outcome="'died'", ended_at="now()"))
        taken = began(
            50, kind="'takeover'", replica="'two'", started_at="now() - interval '48 min'"
        )
        add_run(connection, "job", 3, **taken, outcome="'error'", error_type="'ValueError'")
        first, last = "now() - interval '30 min'", "now() - interval '20 min'"
        add_miss(connection, "job", 0, scheduled_at=first, last_scheduled_at=last, run_times="2")
        add_run(connection, "job", 4, **began(10))
        add_action(connection, "job", 0, started_at="now() - interval '35 min'", until="NULL")
        add_action(
            connection,
            "job",
            1,
            started_at="now() - interval '15 min'",
            outcome="'resumed'",
            until="NULL",
            reason="NULL",
        )
        add_action(connection, "job", 2, started_at="now() - interval '70 min'", outcome="'run'")
        add_replica(connection, "one", ["job", "another"])
        add_replica(connection, "two", ["another"])


def tokens(story: Story) -> list[int | None]:
    return [run.token for run in story.runs]


@pytest.mark.usefixtures("night")
class TestStories:
    def test_are_read_from_the_row_the_history_and_the_replicas(self, operator: TaskLocks) -> None:
        story = operator.why("job")
        assert (story.verdict, tokens(story), story.miss) == (Verdict.RAN, [4], None)
        assert [replica.replica_id for replica in story.replicas] == ["one"]
        story = operator.why("job", ago(40))
        assert (story.verdict, tokens(story)) == (Verdict.RAN, [2, 3])
        story = operator.why("job", ago(25))
        assert (story.verdict, story.runs) == (Verdict.MISSED, ())
        assert story.miss is not None
        assert (story.miss.reason, story.miss.run_times) == ("the task was paused", 2)
        assert [action.outcome for action in story.actions] == ["paused", "resumed"]

    def test_a_run_time_that_nobody_has_begun_is_told_before_its_reason_is_noted(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        """The schedule is that of the row, with the zone that a replica has registered."""
        connection.execute(
            "UPDATE task_lock SET details = %s, schedule = %s, window_start = date_trunc('minute',"
            " now()) - interval '2 min', due_at = date_trunc('minute', now()), overdue_at = now()"
            " + interval '1 h', window_until = date_trunc('minute', now()) - interval '90 s'",
            [
                '{"options": {}, "zone": "Europe/Berlin"}',
                '{"type": "cron", "fields": {"minute": "*", "second": "0"}, "start": null, '
                '"end": null, "jitter": 0.0}',
            ],
        )
        story = operator.why("job")
        [before, due] = story.due
        assert (story.verdict, before.is_due, due.is_due) == (Verdict.DUE, False, True)
        assert (before.run_times, before.last + timedelta(minutes=1)) == (1, due.first)

    @pytest.mark.parametrize(("recorded", "oldest"), [(1, 2), (2, 4)])
    def test_the_history_begins_with_the_oldest_entry_of_a_ring_that_has_overwritten_others(
        self, operator: TaskLocks, connection: Connection, recorded: int, oldest: int
    ) -> None:
        """The entry of a run that was taken for dead and ended well is in the ring of failures.

        That ring has overwritten nothing, so it does not tell which runs that ended well are kept.
        """
        connection.execute("UPDATE task_lock_run SET outcome = 'ok' WHERE token = 2")
        connection.execute("DELETE FROM task_lock_run WHERE token = 1")
        connection.execute(f"UPDATE task_lock SET recorded = {recorded}, recorded_failures = 2")
        begins_at = operator.why("job").history_begins_at
        [run] = [each for each in operator.runs("job") if each.token == oldest]
        assert begins_at == run.scheduled_at

    def test_a_miss_that_was_run_after_it_was_told_is_left_out(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        add_miss(connection, "job", 1, scheduled_at="now() - interval '10 min'")
        connection.execute(
            "UPDATE task_lock_run SET scheduled_at = (SELECT window_start FROM task_lock)"
            " WHERE ring = 'misses' AND slot = 1"
        )
        assert operator.why("job").verdict is Verdict.RAN
        assert len(operator.runs("job", outcome="missed")) == 1


@pytest.mark.usefixtures("night")
class TestCommand:
    def test_tells_the_miss_with_what_operators_did(self, command: Command) -> None:
        lines = command("why", "job", "--at", "25m").out.splitlines()
        assert lines[0].endswith(": its run times around then were missed")
        assert lines[1].startswith("  no replica ran 2 run times from ")
        assert ": the task was paused (told by one at " in lines[1]
        names = [line.split()[0] for line in lines[2:] if not line.startswith(" ")]
        assert names == ["before", "after", "operators", "replicas", "history"]
        assert " on two, failed after " in lines[2]
        assert lines[2].endswith(" (token 3): ValueError")
        assert lines[4].endswith(" paused by ann@ops until resumed (the shop is closed)")
        assert "one alive, started " in lines[6]

    def test_of_a_pause_that_has_just_begun_the_verdict_tells(
        self, command: Command, operator: TaskLocks
    ) -> None:
        operator.pause("job", by="ann", reason="moving")
        operator.pause_all(duration=3600, by="bob")
        since, of_all = (f"{one.since:%Y-%m-%dT%H:%M:%SZ}" for one in operator.tasks()[0].pauses)
        headline, _, *pauses = command("why", "job").out.splitlines()
        assert ": it is paused now, and its last run time until then was " in headline
        assert pauses[0] == f"  paused by ann since {since} until resumed (moving)"
        assert pauses[1].startswith(f"  paused with all tasks by bob since {of_all} until ")
        earlier = command("why", "job", "--at", "25m").out.splitlines()
        assert earlier[0].endswith(": its run times around then were missed")
        assert not any(line.startswith("  paused") for line in earlier)
        operator.resume("job", by="ann")
        operator.resume_all(by="bob")
        assert "it is paused now" not in command("why", "job").out

    def test_runs_chooses_missed_run_times_and_shows_the_reason(self, command: Command) -> None:
        header, line = command("runs", "--outcome", "missed").out.splitlines()
        assert header.split()[-1] == "notes"
        assert "2 run times from " in line
        assert line.endswith(": the task was paused")
        assert len(command("show", "job", "--json").json["misses"]) == 1
        assert "missed run times:" in command("show", "job").out

    def test_without_a_right_on_another_table_the_rest_is_told(
        self, connection: Connection, direct_url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with role(direct_url) as (name, url):
            for table in ("task_lock", "task_lock_run", "task_lock_replica"):
                connection.execute(f'GRANT SELECT ON {table} TO "{name}"')
            connection.execute(f'REVOKE SELECT ON task_lock_replica FROM "{name}"')
            command = Command(url, capsys)
            answer = command("why", "job", "--at", "25m")
            assert (answer.status, "missed" in answer.out) == (0, True)
            assert "the replicas cannot be read" in answer.err
            connection.execute(f'REVOKE SELECT ON task_lock_run FROM "{name}"')
            answer = command("show", "job")
            assert answer.status == 0
            assert "task         job" in answer.out
            assert "no runs in the history" not in answer.out
            assert "the run history cannot be read" in answer.err

    def test_a_task_without_a_row_is_an_error(self, command: Command, operator: TaskLocks) -> None:
        assert command("why", "unknown").status == 3
        with pytest.raises(TaskLockNotFoundError, match="unknown"):
            operator.why("unknown")

    def test_a_time_in_the_future_is_an_error(self, command: Command) -> None:
        answer = command("why", "job", "--at", "2099-01-01")
        assert answer.status == 2
        assert "is in the future" in answer.err
