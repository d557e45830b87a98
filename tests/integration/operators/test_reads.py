"""What operators read of tasks, runs and stored jobs, from rows as replicas write them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from psycopg import sql

from apscheduler_tasklock import (
    Durations,
    Lane,
    Lanes,
    Overview,
    Pause,
    Run,
    Spread,
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockNotFoundError,
    TaskLocks,
    TaskLockStateError,
    TaskState,
    TaskStatus,
)
from apscheduler_tasklock.cli import main
from apscheduler_tasklock.dashboard.access import Access
from apscheduler_tasklock.dashboard.app import Dashboard
from tests.support.asgi_client import TestClient
from tests.support.commands import PATIENT, Command
from tests.support.polling import eventually
from tests.support.roles import role
from tests.support.rows import (
    CUT,
    DEAD,
    FAILING,
    MISSED,
    NEW,
    OVERDUE,
    OVERRUNS,
    PAUSED,
    STAYS_ALIVE,
    STAYS_LATE,
    STAYS_OK,
    STAYS_RUNNING,
    STAYS_TOO_LONG,
    add_action,
    add_job,
    add_miss,
    add_replica,
    add_run,
    add_task,
)

Connection = psycopg.Connection[Any]

RETRYING = {
    "failures": "1",
    "failed_at": "now()",
    "claim_id": "'11111111-1111-1111-1111-111111111111'",
    "retry_of": "'11111111-1111-1111-1111-111111111111'",
    "retry_at": "now() + interval '4 h'",
}
UNREADABLE = {"schedule": "'no JSON'"}
# Copies of the rows of a table, each of a task of its own, over a week.
COPY = """
    CREATE TEMP TABLE copied AS SELECT row.*, n FROM {0} AS row, generate_series(1, 300000) AS n;
    UPDATE copied SET task_name = 'mail ' || n, started_at = started_at - n * interval '2 s',
                      {1} = {1} - n * interval '2 s';
    ALTER TABLE copied DROP COLUMN n;
    INSERT INTO {0} SELECT * FROM copied; DROP TABLE copied;
"""
ENDED_ONE_OFF = {
    "one_off": "true",
    "is_last": "true",
    "schedule": """'{"run":null,"type":"date"}'""",
    "last_outcome": "'ok'",
    "due_at": "NULL",
    "overdue_at": "NULL",
}

# One task of each state, by its name, with the worst one first.
EACH_STATE: dict[str, dict[str, str]] = {
    "unreadable": UNREADABLE,
    "too long": STAYS_TOO_LONG,
    "dead": {**STAYS_OK, **DEAD},
    "overdue": OVERDUE,
    "failing": {**STAYS_OK, **FAILING},
    "missed": MISSED,
    "cut": {**CUT, **STAYS_OK},
    "late": STAYS_LATE,
    "retrying": {**STAYS_OK, **RETRYING},
    "holder silent": {**STAYS_RUNNING, "locked_by": "'silent'"},
    "running": STAYS_RUNNING,
    "paused": PAUSED,
    "gone": {**STAYS_OK, "due_at": "NULL", "overdue_at": "NULL"},
    "new": {**STAYS_OK, **NEW},
    "ok": STAYS_OK,
}
TROUBLED = list(EACH_STATE)[:9]


@pytest.fixture
def operator(make_task_locks: Callable[..., TaskLocks]) -> TaskLocks:
    return make_task_locks(replica_id="operator")


@pytest.fixture
def each_state(connection: Connection) -> None:
    for name, columns in EACH_STATE.items():
        add_task(connection, name, **columns)
    others = [name for name in EACH_STATE if name != "gone"]
    add_replica(connection, "one", others, seen_at=ahead(hours=1))
    add_replica(connection, "silent", seen_at=ago(days=2))


def names(tasks: Sequence[TaskStatus]) -> list[str]:
    return [task.name for task in tasks]


def ago(**times: float) -> str:
    """Return the SQL of a time in the past."""
    return f"now() - interval '{timedelta(**times).total_seconds()} s'"


def ahead(**times: float) -> str:
    """Return the SQL of a time in the future."""
    return f"now() + interval '{timedelta(**times).total_seconds()} s'"


def moment(**times: float) -> datetime:
    """Return a time in the past, as it is now."""
    return datetime.now(timezone.utc) - timedelta(**times)


@pytest.mark.usefixtures("each_state")
class TestTasks:
    def test_the_worst_state_comes_first_by_urgency(self, operator: TaskLocks) -> None:
        found = operator.tasks(order="urgency")
        assert names(found) == list(EACH_STATE)
        assert [task.state.value for task in found] == list(EACH_STATE)

    def test_equally_urgent_tasks_come_by_their_names(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        add_task(connection, "a", **FAILING)
        found = operator.tasks(states=[TaskState.FAILING, TaskState.DEAD], order="urgency")
        assert names(found) == ["dead", "a", "failing"]

    def test_a_state_filters(self, operator: TaskLocks) -> None:
        for state in TaskState:
            [task] = operator.tasks(states=[state])
            assert (task.name, task.state) == (state.value, state)

    def test_states_patterns_and_pages_go_together(self, operator: TaskLocks) -> None:
        states = {TaskState.DEAD, TaskState.CUT, TaskState.LATE, TaskState.OK}
        assert names(operator.tasks(states=states)) == ["cut", "dead", "late", "ok"]
        assert names(operator.tasks("*e*", states=states)) == ["dead", "late"]
        assert names(operator.tasks(states=states, limit=2)) == ["cut", "dead"]
        assert names(operator.tasks(states=states, limit=2, offset=1)) == ["dead", "late"]
        assert names(operator.tasks(states=states, offset=3)) == ["ok"]

    def test_pages_have_each_task_once(self, operator: TaskLocks) -> None:
        for order in ("name", "due", "started", "urgency"):
            pages = [
                operator.tasks(order=order, limit=5, offset=offset) for offset in (0, 5, 10, 15)
            ]
            assert [len(page) for page in pages] == [5, 5, 5, 0]
            assert [task for page in pages for task in names(page)] == names(
                operator.tasks(order=order)
            )


def test_the_soonest_due_time_comes_first(operator: TaskLocks, connection: Connection) -> None:
    add_task(connection, "a-none", due_at="NULL", overdue_at="NULL")
    add_task(connection, "b-late", **STAYS_LATE)
    add_task(connection, "c-far", due_at=ahead(hours=2), overdue_at=ahead(hours=3))
    add_task(connection, "d-soon")
    add_task(connection, "e-none", due_at="NULL", overdue_at="NULL")
    assert names(operator.tasks(order="due")) == ["b-late", "d-soon", "c-far", "a-none", "e-none"]


def test_the_run_that_began_last_comes_first(operator: TaskLocks, connection: Connection) -> None:
    add_task(connection, "a-new", **NEW)
    add_task(connection, "b", started_at=ago(hours=2))
    add_task(connection, "c", **{**STAYS_RUNNING, "started_at": ago(seconds=1)})
    add_task(connection, "d", started_at=ago(hours=1))
    assert names(operator.tasks(order="started")) == ["c", "d", "b", "a-new"]


def test_the_longest_run_comes_first_also_if_it_hangs_beside_newer_ones(
    operator: TaskLocks, connection: Connection
) -> None:
    hour = {"started_at": ago(hours=2), "finished_at": ago(hours=1)}
    add_task(connection, "an hour", **hour)
    add_task(connection, "hangs", **STAYS_OK)  # its newest run took two seconds
    add_task(connection, "seconds", **STAYS_OK)
    since = "extract(epoch FROM now() - interval '3 h')"
    run = f"jsonb_build_object('task', 'hangs', 'token', 4, 'since', {since}, 'lost', true)"
    running = f"jsonb_build_array({run})"
    add_replica(connection, "one", ["hangs"], running=running, seen_at=ahead(hours=1))
    assert names(operator.tasks(order="duration")) == ["hangs", "an hour", "seconds"]


def test_status_of_very_many_tasks_says_what_it_leaves_out(
    command: Command, connection: Connection
) -> None:
    for name in ("z1", "z2"):
        add_task(connection, name, **FAILING)
    add_task(connection, "z3", **STAYS_OK)
    connection.execute("""
        CREATE TEMPORARY TABLE many AS SELECT task_lock.* FROM task_lock
            CROSS JOIN generate_series(1, 999) WHERE task_name = 'z3';
        UPDATE many SET task_name = 'a' || ctid;
        INSERT INTO task_lock SELECT * FROM many
    """)
    answer = command("status", "--json")
    found = [task["name"] for task in answer.json]
    assert len(found) == 1000
    assert found[:2] == ["z1", "z2"]
    assert "2 more tasks are left out: 2 ok (--limit N shows more)" in answer.err
    assert command("status", "--limit", "2000").out.count("\n") > 1002
    assert "left out" not in command("status", "z*").err


@pytest.mark.usefixtures("each_state")
class TestCommand:
    def test_status_orders_and_limits(self, command: Command) -> None:
        assert [row[0] for row in command("status").cells] == sorted(EACH_STATE)
        by_urgency = command("status", "--order", "urgency", "--limit", "3")
        assert [row[0] for row in by_urgency.cells] == list(EACH_STATE)[:3]
        due = command("status", "--order", "due", "--state", "late", "--json")
        assert [task["name"] for task in due.json] == ["late"]


class TestOverview:
    def test_an_empty_table_has_an_empty_overview(self, operator: TaskLocks) -> None:
        found = operator.overview()
        none = dict.fromkeys(TaskState, 0)
        assert [each.what for each in found.findings] == ["empty"]
        assert found == Overview(found.now, none, 0, 0.0, found.findings, (), (), (), (), 0, 0)

    def test_what_is_acknowledged_alarms_no_more(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        add_task(connection, "fails", **FAILING)
        add_task(connection, "is acknowledged", **FAILING)
        [task] = operator.tasks("is acknowledged")
        operator.ack(task.name, task.token)
        found = operator.overview()
        assert found.counts[TaskState.FAILING] == 2
        assert [each.task for each in found.findings] == ["fails"]

    def test_regular_misses_are_found_until_they_are_acknowledged(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        missed = {"missed_at": ago(minutes=5), "window_start": ago(hours=9)}
        add_task(connection, "sync", **{**STAYS_OK, **missed})
        add_miss(connection, "sync", 1, cause="'misfire'", run_times="3", reason="'all busy'")
        [finding] = operator.overview().findings
        assert (finding.what, finding.task) == ("missed", "sync")
        assert finding.says.startswith("3 run times in a row, the last at ")
        assert finding.says.endswith(": all busy")
        [task] = operator.tasks("sync")
        operator.ack("sync", task.token)
        assert operator.overview().findings == ()
        with pytest.raises(TaskLockStateError, match="no failure, no cut, and no miss"):
            operator.ack("sync", task.token)
        connection.execute("UPDATE task_lock SET missed_at = now()")
        add_miss(connection, "sync", 2, cause="'misfire'", scheduled_at="now()")
        assert operator.overview().findings[0].says.startswith("4 run times in a row")
        operator.ack("sync", task.token, until=moment() + timedelta(hours=1))
        connection.execute("UPDATE task_lock SET missed_at = now()")
        add_miss(connection, "sync", 3, cause="'misfire'", scheduled_at="now()")
        assert operator.overview().findings == ()

    @pytest.mark.usefixtures("each_state")
    def test_each_state_is_counted_and_listed(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        add_task(connection, "fails too", **FAILING)
        found = operator.overview()
        assert found.counts == {**dict.fromkeys(TaskState, 1), TaskState.FAILING: 2}
        assert set(names(found.running)) == {"running", "holder silent", "too long"}
        assert [each.what for each in found.findings] == [
            *("overdue", "dead", "too long"),
            *("unreadable", "missed", "failing", "failing", "healing"),
        ]
        assert names(found.paused) == ["paused"]
        assert abs((found.now - moment()).total_seconds()) < 60

    @pytest.mark.usefixtures("each_state")
    def test_its_tasks_are_those_of_tasks(self, operator: TaskLocks) -> None:
        overview, found = operator.overview(), {task.name: task for task in operator.tasks()}
        lists = (overview.running, overview.due_next, overview.paused)
        for task in (task for tasks in lists for task in tasks):
            same = found[task.name]
            assert (task.state, task.due_at, task.token) == (same.state, same.due_at, same.token)
            assert (task.pauses, task.options, task.gone) == (
                same.pauses,
                same.options,
                same.gone,
            )

    @pytest.mark.parametrize("paused", [None, "", "mails:"])
    def test_one_off_jobs_that_ended_well_are_counted_by_their_states(
        self, operator: TaskLocks, connection: Connection, paused: str | None
    ) -> None:
        """They are counted apart, since there may be very many."""
        ended = {**ENDED_ONE_OFF, "paused_until": "NULL"}
        add_task(connection, "mails:ended", **ended)
        add_task(connection, "other", **ended)
        add_task(connection, "failed", **{**ended, "failures": "1", "failed_at": "now()"})
        add_task(connection, "stuck", **ended, token="5")
        run = '[{"task": "stuck", "token": 4, "since": 1767225600, "lost": true}]'
        add_replica(connection, "one", [], running=f"'{run}'", seen_at=ahead(hours=1))
        if paused is not None:
            operator.pause_all(duration=3600, by="ann", namespace=paused)
        states = {task.name: task.state for task in operator.tasks()}
        assert states["stuck"] is TaskState.TOO_LONG
        assert {task.name: task.state for task in operator.tasks(order="urgency")} == states
        overview = operator.overview("*")
        assert {state: n for state, n in overview.counts.items() if n} == Counter(states.values())
        for state in TaskState:
            found = names(operator.tasks(states=[state]))
            assert found == [name for name in sorted(states) if states[name] is state]
        assert names(operator.tasks(order="urgency", one_offs=False)) == []
        assert names(operator.tasks(one_offs=False)) == []

    def test_the_oldest_run_comes_first(self, operator: TaskLocks, connection: Connection) -> None:
        for name, minutes in (("a", 1), ("b", 3), ("c", 2)):
            add_task(connection, name, **{**STAYS_RUNNING, "started_at": ago(minutes=minutes)})
        assert names(operator.overview().running) == ["b", "c", "a"]
        assert names(operator.overview(limit=2).running) == ["b", "c"]

    def test_what_is_known_or_gone_is_no_finding(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        add_replica(connection, "one", ["dead", "held", "known", "late"])
        known = {**FAILING, "acknowledged_at": "now()"}
        gone = {**FAILING, "due_at": "NULL", "overdue_at": "NULL"}
        late = {"due_at": ago(hours=3), "overdue_at": ahead(hours=2), "window_start": ago(hours=4)}
        tasks = {"known": known, "gone": gone, "held": gone, "late": late, "dead": DEAD}
        for name, columns in tasks.items():
            add_task(connection, name, **columns)
        found = operator.overview()
        assert [each.task for each in found.findings] == ["dead", "late", "held"]
        assert found.gone == 1

    def test_what_is_due_next_is_neither_past_nor_paused(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        add_task(connection, "far", due_at=ahead(hours=1), overdue_at=ahead(hours=2))
        add_task(connection, "late", **STAYS_LATE)
        add_task(connection, "paused", **PAUSED)
        add_task(connection, "soon", due_at=ahead(minutes=59), overdue_at=ahead(hours=2))
        add_task(connection, "none", due_at="NULL", overdue_at="NULL")
        assert names(operator.overview().due_next) == ["soon", "far"]

    def test_pauses_of_all_tasks_are_told(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        add_task(connection, "a")
        add_task(connection, "b", **PAUSED)
        add_task(connection, "c", **STAYS_RUNNING)
        pause: Pause = operator.pause_all(duration=60, by="ann", reason="upgrade")
        found = operator.overview()
        assert found.pauses_of_all == (pause,)
        # A task with a pause of its own comes first, and a running one can be paused, too.
        assert names(found.paused) == ["b", "a", "c"]
        assert found.counts[TaskState.PAUSED] == 2
        assert found.due_next == ()

    def test_a_paused_stored_job_is_not_well(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        """Who has paused it is known, unless an application has, or has changed it since."""
        at = "timestamptz '2026-01-01Z'"
        paused = {"next_run_time": "NULL", "changed_at": at}
        for name in ("by ann", "by the application", "waits"):
            add_task(connection, name, **FAILING, due_at="NULL", overdue_at="NULL")
            columns = {} if name == "waits" else paused
            add_job(connection, name, task_name=f"'{name}'", **columns)
        add_job(connection, "another", task_name="'waits'", **paused)
        entry = {"outcome": "'job-paused'", "by": "'ann'"}
        add_action(connection, "by ann", 0, started_at=at, **entry)
        add_action(connection, "by the application", 0, **entry)
        found = operator.overview()
        assert (found.counts[TaskState.PAUSED], found.counts[TaskState.FAILING]) == (2, 1)
        assert [each.task for each in found.findings] == ["waits"]
        assert names(found.paused) == ["by ann", "by the application"]
        by_ann, by_application = operator.tasks(states=[TaskState.PAUSED])
        assert (by_ann.paused, [(each.job, each.by) for each in by_ann.pauses]) == (
            False,
            [("by ann", "ann")],
        )
        assert [(each.job, each.by) for each in by_application.pauses] == [
            ("by the application", "")
        ]
        jobs = {job.id: job for job in operator.jobs()}
        since = by_ann.pauses[0].since
        assert (jobs["by ann"].paused_by, jobs["by ann"].paused_since) == ("ann", since)
        assert jobs["by the application"].paused_by is None
        assert jobs["waits"].paused_since is None

    def test_patterns_choose_tasks(self, operator: TaskLocks, connection: Connection) -> None:
        for name in ("web:a", "web:b", "shop:a"):
            add_task(connection, name, **FAILING)
        found = operator.overview("web:*")
        assert [each.task for each in found.findings] == ["web:a", "web:b"]
        assert found.counts[TaskState.FAILING] == 2

    def test_replicas_are_counted(self, operator: TaskLocks, connection: Connection) -> None:
        add_replica(connection, "alive", **STAYS_ALIVE)
        add_replica(connection, "silent", seen_at=ago(minutes=5))
        add_replica(connection, "long silent", seen_at=ago(days=2))
        add_replica(connection, "stopped", seen_at=ago(minutes=5), stopped_at=ago(minutes=5))
        add_replica(connection, "died", seen_at=ago(seconds=30))
        add_task(connection, "task", **FAILING)
        died = {"outcome": "'died'", "replica": "'died'", "ended_at": ago(seconds=10)}
        add_run(connection, "task", 1, **died)
        found = operator.overview()
        assert (found.alive, found.silent) == (1, 2)
        states = {each.replica_id: each.state.value for each in operator.replicas()}
        assert states["died"] == "died"

    @pytest.mark.direct("roles log in by themselves")
    def test_a_run_goes_on_only_on_a_replica_that_is_alive(
        self,
        operator: TaskLocks,
        direct_url: str,
        connection: Connection,
        make_task_locks: Callable[..., TaskLocks],
    ) -> None:
        """As its state says. Without the right on the history nobody knows of a death."""
        add_replica(connection, "alive", **STAYS_ALIVE)
        add_replica(connection, "silent", seen_at=ago(minutes=5))
        add_replica(connection, "died", seen_at="now() + interval '4 h'")
        add_task(connection, "task", **{**FAILING, "failed_at": "now()"})
        died = {"outcome": "'died'", "replica": "'died'", "ended_at": "now() + interval '5 h'"}
        add_run(connection, "task", 1, **died)
        for holder in ("alive", "silent", "died", "unknown"):
            add_task(connection, holder, **STAYS_RUNNING, locked_by=f"'{holder}'")
        add_task(connection, "hangs", **STAYS_TOO_LONG, locked_by="'silent'")

        def told(locks: TaskLocks) -> dict[str, str]:
            found = {task.name: task.state.value for task in locks.overview().running}
            assert found == {
                task.name: task.state.value for task in locks.tasks() if task.finished_at is None
            }
            return found

        known = {
            "alive": "running",
            "silent": "holder silent",
            "died": "holder silent",
            "unknown": "running",
            "hangs": "too long",
        }
        assert told(operator) == known
        lanes = operator.lanes(moment(hours=1), moment(hours=-1), by="task").lanes
        entries = {lane.name: lane.entries[0].outcome for lane in lanes if lane.name in known}
        assert entries == known
        with role(direct_url) as (name, url):
            grant = sql.SQL("GRANT SELECT ON task_lock, task_lock_replica TO {}")
            connection.execute(grant.format(sql.Identifier(name)))
            found = told(make_task_locks(database=url, given=PATIENT, claim_timeout=180))
        assert found == {**known, "died": "running"}

    @pytest.mark.direct("roles log in by themselves")
    def test_without_the_right_on_the_replicas_the_tasks_are_told(
        self, direct_url: str, connection: Connection, make_task_locks: Callable[..., TaskLocks]
    ) -> None:
        add_replica(connection, "alive", **STAYS_ALIVE)
        add_task(connection, "fails", **FAILING)
        with role(direct_url) as (name, url):
            grant = sql.SQL("GRANT SELECT ON task_lock TO {}")
            connection.execute(grant.format(sql.Identifier(name)))
            locks = make_task_locks(database=url, given=PATIENT, claim_timeout=180)
            found = locks.overview()
            assert [each.what for each in found.findings] == ["failing", "not read", "not read"]
            assert (found.alive, found.silent) == (None, None)
            assert names(locks.tasks(states=[TaskState.FAILING])) == ["fails"]


def tokens(runs: Sequence[Run]) -> list[int | None]:
    return [run.token for run in runs]


def test_durations_of_the_last_day_and_of_the_week_before(
    operator: TaskLocks, connection: Connection
) -> None:
    assert operator.durations("a") == Durations(None, None, None)
    runs = [(1, 10, 2), (2, 20, 4), (3, 23 * 60, 6), (4, 25 * 60, 10), (5, 7.9 * 1440, 20)]
    runs.append((6, 8.1 * 1440, 500))
    for token, minutes, took in runs:
        began = ago(minutes=minutes)
        add_run(
            connection,
            "a",
            token,
            started_at=began,
            ended_at=f"{began} + interval '{took} s'",
        )
    add_run(connection, "a", 7, outcome="'error'", started_at=ago(minutes=5), ended_at="now()")
    add_run(connection, "b", 1)
    found = operator.durations("a")
    assert found.last_day == Spread(3, 4.0, pytest.approx(5.8))
    assert found.week_before == Spread(2, 15.0, pytest.approx(19.5))
    assert found.kept_since == operator.runs("a")[-1].started_at


class TestRecentRuns:
    def test_runs_and_misses_come_by_name_the_newest_first(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        for token in range(1, 6):
            outcome = "'error'" if token == 4 else "'ok'"
            add_run(connection, "a", token, outcome=outcome, started_at=ago(minutes=60 - token))
        # In its place by its run time, although it was noted later.
        add_miss(connection, "a", 0, scheduled_at=ago(minutes=57.5), started_at=ago(minutes=10))
        add_action(connection, "a", 0)
        add_run(connection, "a*", 9)
        add_run(connection, "ab", 10)
        found = operator.recent_runs("a*", "a", "none", "a")
        assert list(found) == ["a*", "a", "none"]
        assert {name: tokens(runs) for name, runs in found.items()} == {
            "a": [5, 4, 3, None, 2, 1],
            "a*": [9],
            "none": [],
        }
        assert found["a"][3].outcome == "missed"
        assert found["a"][1].outcome == "error"
        assert tokens(operator.recent_runs("a", limit=3)["a"]) == [5, 4, 3]

    def test_a_run_time_that_was_run_after_all_is_no_miss(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        add_miss(connection, "a", 0, scheduled_at="'2026-01-01T00:00Z'", run_times="1")
        add_run(connection, "a", 1, scheduled_at="'2026-01-01T00:00Z'")
        assert tokens(operator.recent_runs("a")["a"]) == [1]

    def test_no_names_have_no_runs(self, operator: TaskLocks) -> None:
        assert operator.recent_runs() == {}


@pytest.mark.parametrize("patterns", [("sync",), ()], ids=["by name", "all"])
def test_that_an_operator_has_freed_a_task_is_no_outcome_of_a_run(
    operator: TaskLocks, connection: Connection, patterns: tuple[str, ...]
) -> None:
    add_run(connection, "sync", 1, outcome="'freed'")
    add_action(connection, "sync", 0, outcome="'freed'")
    add_action(connection, "sync", 1, outcome="'paused'")

    def found(**wanted: Any) -> list[str]:
        return sorted(run.kind for run in operator.runs(*patterns, **wanted))

    assert found(outcome=["freed", "error"]) == ["schedule"]
    assert found(outcome=["freed", "paused"]) == ["operator", "schedule"]
    assert found(outcome="freed", kind="operator") == ["operator"]
    assert found() == ["operator", "operator", "schedule"]


class TestTimesOfMisses:
    """A missed run time is listed at its time, and not at the time at which it was noted."""

    @pytest.mark.parametrize("patterns", [("sync",), ()], ids=["by name", "all"])
    @pytest.mark.parametrize(
        ("since", "until", "found"),
        [
            (50, 40, ["missed"]),  # from the first of its run times to the last
            (39, 31, ["missed"]),
            (31, 29, ["missed", "ok"]),
            (60, 45, ["missed"]),
            (60, 51, []),
            (29, 1, []),  # it was noted then
        ],
    )
    def test_they_are_found_by_their_run_times(
        self,
        operator: TaskLocks,
        connection: Connection,
        patterns: tuple[str, ...],
        since: int,
        until: int,
        found: list[str],
    ) -> None:
        times = {"scheduled_at": ago(minutes=50), "last_scheduled_at": ago(minutes=30)}
        noted = {"started_at": ago(minutes=10), "ended_at": ago(minutes=5)}
        add_miss(connection, "sync", 0, run_times="3", **times, **noted)
        add_run(connection, "sync", 1, started_at=ago(minutes=30), ended_at=ago(minutes=30))
        span = {"since": moment(minutes=since + 0.1), "until": moment(minutes=until - 0.1)}
        runs = operator.runs(*patterns, **span)
        assert sorted(run.outcome for run in runs) == found

    @pytest.mark.parametrize("patterns", [("sync",), ()], ids=["by name", "all"])
    def test_they_are_in_order_by_their_run_times(
        self, operator: TaskLocks, connection: Connection, patterns: tuple[str, ...]
    ) -> None:
        for token, minutes in ((1, 50), (2, 30)):
            began = ago(minutes=minutes)
            add_run(connection, "sync", token, started_at=began, ended_at=began)
        times = {"scheduled_at": ago(minutes=40), "started_at": ago(minutes=10)}
        add_miss(connection, "sync", 0, **times)
        assert tokens(operator.runs(*patterns)) == [2, None, 1]


class TestPagesOfRuns:
    def test_a_page_skips_misses_that_were_run_after_all(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        for n in range(6):
            at = f"'2026-01-01T0{n}:00Z'"
            times = {"scheduled_at": at, "started_at": at, "ended_at": at}
            add_run(connection, "a", n, **times)
            add_miss(connection, "a", n, **times, last_scheduled_at=at)
        assert tokens(operator.runs("?", limit=2, offset=1)) == [4, 3]
        assert tokens(operator.runs("?", limit=4, offset=4)) == [1, 0]

    def test_pages_have_each_run_once(self, operator: TaskLocks, connection: Connection) -> None:
        """All runs begin at the same time, so that only the key tells them apart."""
        connection.execute(
            "INSERT INTO task_lock_run (task_name, ring, slot, token, started_at, ended_at,"
            " replica, kind, outcome) SELECT chr(97 + n % 3), 'runs', n, 1, '2026-01-01T00:00Z',"
            " now(), 'one', 'schedule', n::text FROM generate_series(1, 90) AS n"
        )
        for patterns, count in (((), 90), (("a",), 30), (("a", "b*"), 60)):
            expected = operator.runs(*patterns)
            pages = [operator.runs(*patterns, limit=7, offset=start) for start in range(0, 100, 7)]
            assert len(expected) == count
            # Each entry has another outcome, which tells it apart.
            assert [run for page in pages for run in page] == expected
            assert len({run.outcome for run in expected}) == count

    def test_pages_of_a_long_history_are_in_order(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        """The history is so long that a sample of it has more runs than the first pages."""
        connection.execute(
            "INSERT INTO task_lock_run (task_name, ring, slot, token, started_at, ended_at,"
            " replica, kind, outcome) SELECT 'task', 'runs', n, n, now() - n * interval '1 s',"
            " now(), 'one', 'schedule', 'ok' FROM generate_series(1, 30000) AS n"
        )
        for limit, offset in ((10, 0), (10, 10), (10, 95), (50, 1000), (5, 29_990), (5, 30_000)):
            found = operator.runs("*", limit=limit, offset=offset)
            assert tokens(found) == [*range(offset + 1, min(offset + limit, 30_000) + 1)]
            longest = operator.runs("*", order="duration", limit=limit, offset=offset)
            assert tokens(longest) == [*range(30_000 - offset, max(30_000 - offset - limit, 0), -1)]
        assert tokens(operator.runs("task", order="duration", limit=2)) == [30_000, 29_999]


class TestLanes:
    """The span begins 60 minutes ago and ends 30 minutes ago. A part of it has 3.6 seconds."""

    def lanes(self, operator: TaskLocks, *patterns: str, **options: Any) -> Lanes:
        return operator.lanes(moment(minutes=60), moment(minutes=30), *patterns, **options)

    def lane(self, operator: TaskLocks, *patterns: str, **options: Any) -> Lane:
        [lane] = self.lanes(operator, *patterns, **options).lanes
        return lane

    def test_runs_of_which_a_part_is_in_the_span_are_returned(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        for name, began, ended in (
            ("a", 70, 65),
            ("b", 70, 55),
            ("c", 50, 40),
            ("d", 70, 20),
            ("e", 40, 20),
            ("f", 20, 10),
        ):
            for token, outcome in ((1, "'ok'"), (2, "'error'")):
                times = {"started_at": ago(minutes=began), "ended_at": ago(minutes=ended)}
                add_run(connection, name, token, outcome=outcome, **times)
        for patterns, expected in {(): "bcde", ("?",): "bcde", ("a", "b", "d*"): "bd"}.items():
            found = self.lanes(operator, *patterns)
            assert "".join(lane.name for lane in found.lanes) == expected, patterns
            assert {tuple(outcomes(lane)) for lane in found.lanes} == {("error", "ok")}
            [of_replica] = self.lanes(operator, *patterns, by="replica").lanes
            names = [entry.task or "" for entry in of_replica.entries]
            assert sorted(names) == sorted(2 * expected), patterns

    def test_misses_are_returned_by_their_run_times(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        cases = {
            (80, 65): False,
            (80, 50): True,
            (40, 40): True,
            (50, 10): True,
            (20, 10): False,
        }
        for first, last in cases:
            add_miss(
                connection,
                f"{first} to {last}",
                0,
                scheduled_at=ago(minutes=first),
                last_scheduled_at=ago(minutes=last),
                run_times="2",
                started_at=ago(minutes=5),
                ended_at=ago(minutes=5),
                cause="'database'",
            )
        found = self.lanes(operator)
        expected = sorted(f"{first} to {last}" for (first, last), is_in in cases.items() if is_in)
        assert [lane.name for lane in found.lanes] == expected
        assert [(each.outcome, each.count) for lane in found.lanes for each in lane.entries] == [
            *3 * [("missed", 2)]
        ]
        lane = self.lane(operator, by="replica")
        assert (lane.name, len(lane.entries)) == ("", 3)
        assert [(round_(begin), round_(end)) for begin, end in sorted(found.outages)] == [
            (80, 50),
            (50, 10),
            (40, 40),
        ]

    @pytest.mark.parametrize("by", ["task", "replica"])
    def test_a_run_time_that_was_run_after_all_is_no_miss(
        self, operator: TaskLocks, connection: Connection, by: str
    ) -> None:
        for name, began in (("in the span", 40), ("after it", 20)):
            with connection.transaction():  # `now()` is the same in both rows
                add_miss(connection, name, 0, scheduled_at=ago(minutes=40), run_times="1")
                at = {"started_at": ago(minutes=began), "ended_at": ago(minutes=began - 1)}
                add_run(connection, name, 1, scheduled_at=ago(minutes=40), **at)
        lane = self.lane(operator, by=by)
        assert (lane.name, outcomes(lane)) == (
            "in the span" if by == "task" else "one",
            ["ok"],
        )

    def test_a_miss_of_the_run_time_that_runs_now_is_hidden(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        with connection.transaction():  # `now()` is the same in both rows
            add_miss(connection, "a", 0, scheduled_at=ago(minutes=40), run_times="1")
            add_task(connection, "a", **{**STAYS_RUNNING, "window_start": ago(minutes=40)})
        assert outcomes(self.lane(operator, "a")) == []

    @pytest.mark.parametrize(
        ("row", "outcome", "goes_on"),
        [
            (STAYS_RUNNING, "running", True),
            (STAYS_TOO_LONG, "too long", True),
            (OVERRUNS, "too long", True),
            ({**OVERRUNS, "locked_by": "'silent'"}, "overran", False),
            (DEAD, "died", False),
            ({**DEAD, "locked_until": ago(minutes=65)}, None, False),
            ({**STAYS_RUNNING, "handed_over": "true"}, None, False),
            ({}, None, False),
        ],
    )
    @pytest.mark.parametrize("by", ["task", "replica"])
    def test_runs_that_are_not_in_the_history_yet(
        self,
        operator: TaskLocks,
        connection: Connection,
        row: dict[str, str],
        outcome: str | None,
        goes_on: bool,
        by: str,
    ) -> None:
        """Each of them, however many go on, and those whose lease has ended as that."""
        add_replica(connection, "one", **STAYS_ALIVE)
        add_replica(connection, "silent", seen_at=ago(minutes=40))
        began = {"started_at": ago(minutes=70), "overrun_at": row.get("overrun_at", "NULL")}
        if outcome == "too long" and row is STAYS_TOO_LONG:
            began["overrun_at"] = ago(minutes=65)
        for number in range(30):
            add_task(connection, f"t{number}", **{**row, **began, "succeeded_at": "NULL"})
        found = [entry for lane in self.lanes(operator, by=by).lanes for entry in lane.entries]
        assert {(entry.outcome, entry.until is None) for entry in found} == (
            {(outcome, goes_on)} if outcome else set()
        )
        assert len(found) == (30 if outcome else 0)

    def test_a_run_that_hangs_after_its_lock_was_lost_goes_on(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        """It is drawn once, though it has an entry, and comes before all that ended well."""
        lost = {"task": "hangs", "token": 6, "since": moment(minutes=50).timestamp(), "lost": True}
        add_replica(
            connection,
            "two",
            **{**STAYS_ALIVE, "running": sql.Literal(json.dumps([lost])).as_string(None)},
        )
        add_task(connection, "hangs")  # token 7 has ended
        times = {"started_at": ago(minutes=50), "ended_at": ago(minutes=40)}
        add_run(connection, "hangs", 6, outcome="'overran'", replica="'two'", **times)
        add_run(connection, "another", 1, **times)
        first, second = self.lanes(operator).lanes
        assert (first.name, outcomes(first)) == ("hangs", ["too long"])
        assert second.name == "another"
        of_two, _ = self.lanes(operator, by="replica").lanes
        assert (of_two.name, outcomes(of_two)) == ("two", ["too long"])

    def test_short_entries_of_one_part_are_counted_and_long_ones_stand_alone(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        connection.execute(
            "INSERT INTO task_lock_run (task_name, ring, slot, token, started_at, ended_at,"
            " replica, kind, outcome, error) SELECT 't' || mod(n, 2), 'failures', n, n, began,"
            " began + CASE WHEN n < 20 THEN interval '3 s' ELSE interval '4 s' END, 'one',"
            " 'schedule', CASE WHEN mod(n, 4) = 0 THEN 'error' ELSE 'died' END, repeat('e', 400)"
            " FROM generate_series(0, 29) AS n, LATERAL (SELECT %s::timestamptz"
            " + (CASE WHEN n = 7 THEN 3.7 ELSE 1 + n / 100.0 END) * interval '1 s' AS began) AS at",
            [self.beginning(operator)],
        )
        since = self.beginning(operator)
        [lane] = operator.lanes(since, since + timedelta(minutes=30), by="replica").lanes
        several = [each for each in lane.entries if each.run is None]
        assert sorted((each.outcome, each.count, each.task) for each in several) == [
            ("died", 14, None),
            ("error", 5, "t0"),
        ]
        alone = [each.run for each in lane.entries if each.run is not None]
        assert sorted(run.token or 0 for run in alone) == [7, *range(20, 30)]
        assert {len(run.error or "") for run in alone} == {300}

    def beginning(self, operator: TaskLocks) -> datetime:
        """Return a time at which a part begins, whenever it is asked for."""
        return datetime(2026, 1, 1, tzinfo=timezone.utc)

    def test_a_failure_is_never_left_out_and_what_ended_well_only_with_its_number(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        since = self.beginning(operator)
        connection.execute(
            "INSERT INTO task_lock_run (task_name, ring, slot, token, started_at, ended_at,"
            " replica, kind, outcome) SELECT 'a', ring, n, n, at, at + interval '5 s', 'one',"
            " 'schedule', outcome FROM generate_series(0, 299) AS n,"
            " (VALUES ('runs', 'ok'), ('failures', 'error')) AS rings (ring, outcome),"
            " LATERAL (SELECT %s::timestamptz + n / 10 * interval '50 s' AS at) AS each",
            [since],
        )
        for by in ("task", "replica"):
            [lane] = operator.lanes(since, since + timedelta(minutes=30), by=by).lanes
            counts = Counter[str]()
            for entry in lane.entries:
                counts[entry.outcome] += entry.count
            assert counts == {"ok": 120, "error": 300}
            assert lane.left_out == 180
            assert lane.left_until == since + timedelta(seconds=17 * 50 + 5)
            assert len(lane.entries) == 120 + 120 + 18

    def test_lanes_with_trouble_come_first_and_then_by_name(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        times = {"started_at": ago(minutes=50), "ended_at": ago(minutes=49)}
        for name in ("a", "b", "c", "d", "e"):
            add_run(connection, name, 1, **times)
        add_run(connection, "d", 2, outcome="'died'", **times)
        add_run(connection, "e", 2, outcome="'cancelled'", **times)
        add_run(connection, "f", 2, outcome="'freed'", **times)
        at = {"scheduled_at": ago(minutes=45)}
        add_miss(connection, "c", 1, cause="'misfire'", **at)
        add_miss(connection, "b", 1, **at)  # of a pause
        add_task(connection, "z", **{**DEAD, "succeeded_at": "NULL", "started_at": ago(minutes=45)})
        found = self.lanes(operator)
        assert "".join(lane.name for lane in found.lanes) == "zdfcabe"
        parts = [self.lanes(operator, limit=4, offset=offset) for offset in (0, 4, 8)]
        assert [[lane.name for lane in part.lanes] for part in parts] == [
            ["z", "d", "f", "c"],
            ["a", "b", "e"],
            [],
        ]
        assert {part.number for part in parts} == {7}

    def test_a_part_has_fewer_lanes_if_they_have_many_entries(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        since = self.beginning(operator)
        connection.execute(
            "INSERT INTO task_lock_run (task_name, ring, slot, token, started_at, ended_at,"
            " replica, kind, outcome) SELECT task, 'runs', n, n, at, at, 'one', 'schedule', 'ok'"
            " FROM generate_series(10, 39) AS task, generate_series(0, 499) AS n,"
            " LATERAL (SELECT %s::timestamptz + n * interval '3.6 s' AS at) AS each",
            [since],
        )
        found = operator.lanes(since, since + timedelta(minutes=30))
        assert (len(found.lanes), found.number) == (16, 30)
        rest = operator.lanes(since, since + timedelta(minutes=30), offset=16)
        assert [lane.name for lane in found.lanes + rest.lanes] == [str(n) for n in range(10, 40)]

    @pytest.mark.parametrize(
        ("row", "known_since"),
        [
            ({}, None),
            ({"recorded": "2"}, None),
            ({"recorded": "3"}, 55),
            ({"recorded_failures": "2"}, 53),
            ({"recorded_misses": "2"}, 45),
            ({"recorded": "3", "recorded_failures": "2", "recorded_misses": "2"}, 45),
            # Nothing of it is kept, for example because the history is switched off.
            ({"succeeded_at": ago(minutes=32)}, 32),
        ],
    )
    def test_a_lane_tells_since_when_everything_is_kept(
        self,
        operator: TaskLocks,
        connection: Connection,
        row: dict[str, str],
        known_since: float | None,
    ) -> None:
        """That is the end of the oldest entry of a ring that has overwritten others."""
        for token, began in ((1, 56), (2, 40)):
            times = {"started_at": ago(minutes=began), "ended_at": ago(minutes=began - 1)}
            add_run(connection, "a", token, **times)
        times = {"started_at": ago(minutes=54), "ended_at": ago(minutes=53)}
        add_run(connection, "a", 3, outcome="'error'", **times)
        add_miss(connection, "a", 1, scheduled_at=ago(minutes=50), ended_at=ago(minutes=45))
        add_run(connection, "whole", 1, **times)
        for name, columns in (("a", row), ("whole", {})):
            add_task(connection, name, **{"succeeded_at": "NULL", **columns})
        a, whole = self.lanes(operator).lanes
        assert (a.name, a.known_since and round_(a.known_since)) == ("a", known_since)
        assert whole.known_since is None
        # Any replica may have run what is not kept. Misses are told of on the lane of nobody.
        found = self.lanes(operator, by="replica")
        since = {lane.name: lane.known_since and round_(lane.known_since) for lane in found.lanes}
        of_misses = known_since if "recorded_misses" in row else None
        of_runs = {"recorded_misses"} - set(row) and known_since
        if len(row) == 3:
            of_runs = 53
        assert since == {"one": of_runs or None, "": of_misses}

    def test_a_task_of_which_nothing_is_kept_has_a_lane_that_says_so(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        """A job that runs each five seconds fills its ring in eight minutes."""
        add_task(connection, "often", recorded="900", succeeded_at="NULL")
        add_run(connection, "often", 1, started_at=ago(minutes=8), ended_at=ago(minutes=8))
        lane = self.lane(operator)
        assert (lane.name, lane.entries) == ("often", ())
        assert lane.known_since is not None
        assert round_(lane.known_since) == 8
        found = self.lanes(operator, by="replica")
        assert found.lanes == ()
        assert found.known_since == lane.known_since

    def test_pauses_are_returned_with_their_resumptions(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        cases = [
            ("paused", 50, True),
            ("resumed", 50, True),
            ("freed", 50, False),
            ("run", 50, False),
            ("job-paused", 50, False),
            ("paused", 90, True),
            ("resumed", 90, True),
            ("paused", 20, False),
        ]
        times = {"started_at": ago(minutes=50), "ended_at": ago(minutes=49)}
        for number, (outcome, made, _) in enumerate(cases):
            made_at = {"started_at": ago(minutes=made), "ended_at": ago(minutes=made)}
            add_action(connection, str(number), 0, outcome=f"'{outcome}'", **made_at)
            add_run(connection, str(number), 1, **times)
        add_action(connection, "without a lane", 0, started_at=ago(minutes=50))
        found = sorted((run.task, run.outcome) for run in self.lanes(operator).pauses)
        assert found == [
            (str(number), outcome) for number, (outcome, _, is_in) in enumerate(cases) if is_in
        ]
        assert self.lanes(operator, by="replica").pauses == ()

    def test_pauses_of_all_tasks_are_returned_with_the_lanes_that_they_apply_to(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        for name in ("web:a", "shop"):
            add_task(connection, name)
            add_run(connection, name, 1)
        operator.pause_all(duration=None, namespace="web:", by="ann")
        operator.pause_all(duration=None, by="bob")
        since, until = moment(minutes=5), moment(minutes=-5)
        for by, pattern, expected in (
            ("task", "*", ["*", "web:*"]),
            ("task", "web:*", ["*", "web:*"]),
            ("task", "shop", ["*"]),
            ("replica", "*", ["*"]),
        ):
            found = operator.lanes(since, until, pattern, by=by).pauses
            assert sorted(run.task for run in found) == expected, (by, pattern)

    def test_without_a_right_on_the_replicas_the_lanes_are_read_all_the_same(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        add_run(connection, "a", 1, started_at=ago(minutes=50), ended_at=ago(minutes=49))
        connection.execute("ALTER TABLE task_lock_replica RENAME TO hidden")
        assert outcomes(self.lane(operator)) == ["ok"]


def outcomes(lane: Lane) -> list[str]:
    return sorted(entry.outcome for entry in lane.entries)


def round_(at: datetime) -> int:
    """Return how many minutes ago a time was."""
    return round((datetime.now(timezone.utc) - at).total_seconds() / 60)


class TestArgumentsOfJobs:
    def add(self, connection: Connection, arguments: Any, job_id: str = "job") -> None:
        add_job(connection, job_id)
        connection.execute(
            "UPDATE task_lock_job SET arguments = %s WHERE id = %s",
            [json.dumps(arguments), job_id],
        )

    def test_names_and_values_are_returned(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        cases: list[tuple[Any, dict[str, Any]]] = [
            ({"args": [], "kwargs": {}}, {}),
            ({"args": ["x", [1]], "kwargs": {}}, {"args[0]": "x", "args[1]": [1]}),
            ({"args": [], "kwargs": {"longer": 1, "b": None}}, {"b": None, "longer": 1}),
            ({"args": [], "kwargs": {"task_lock": {"lease": 5}, "b": 1}}, {"b": 1}),
            (
                {"args": [{"$": "date", "value": "2026-01-01"}], "kwargs": {"a": 1}},
                {"args[0]": {"$": "date", "value": "2026-01-01"}, "a": 1},
            ),
            (
                {"args": [], "kwargs": {"$": "dict", "value": {"$": 1, "a": 2}}},
                {"$": 1, "a": 2},
            ),
        ]
        for number, (stored, _) in enumerate(cases):
            self.add(connection, stored, str(number))
        for number, (_, expected) in enumerate(cases):
            [job] = operator.jobs(str(number))
            assert job.argument_names == tuple(expected)
            assert operator.job_arguments(str(number)) == expected
            assert list(operator.job_arguments(str(number))) == list(expected)

    def test_arguments_that_are_pickled_or_of_another_form_are_not_shown(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        pickled = {"pickle": "gASVBwAAAAAAAAApfZSGlC4="}
        for number, stored in enumerate((pickled, [], "args", {"args": 1, "kwargs": []})):
            self.add(connection, stored, str(number))
            [job] = operator.jobs(str(number))
            assert job.argument_names == ()
            with pytest.raises(TaskLockStateError, match="cannot be shown"):
                operator.job_arguments(str(number))

    def test_an_unknown_job_is_an_error(self, operator: TaskLocks, connection: Connection) -> None:
        self.add(connection, {"args": [], "kwargs": {}})
        for job_id in ("none", "jo*", "\0"):
            with pytest.raises(TaskLockNotFoundError, match="no such job"):
                operator.job_arguments(job_id)


class TestSlowReads:
    def test_each_read_has_a_limit_in_the_server(
        self, operator: TaskLocks, connection: Connection
    ) -> None:
        add_task(connection, "task")
        connection.execute("ALTER TABLE task_lock RENAME TO as_it_was")
        connection.execute("""
            CREATE VIEW task_lock AS
                SELECT * FROM as_it_was WHERE current_setting('statement_timeout') <> '0'
        """)
        assert names(operator.tasks()) == ["task"]
        assert sum(operator.overview().counts.values()) == 1

    def test_one_that_the_server_ends_is_told_as_slow_and_is_no_outage(
        self, operator: TaskLocks, connection: Connection, caplog: pytest.LogCaptureFixture
    ) -> None:
        add_task(connection, "task")
        connection.execute("""
            ALTER TABLE task_lock RENAME TO as_it_was;
            CREATE VIEW task_lock AS
                SELECT as_it_was.* FROM as_it_was, (SELECT pg_sleep(600) OFFSET 0) AS slept
        """)
        end = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
        with ThreadPoolExecutor() as pool:
            read = pool.submit(operator.tasks)
            eventually(lambda: connection.execute(end).fetchone())
            with pytest.raises(TaskLockError, match="the read is too slow: the server") as raised:
                read.result(60)
        assert not isinstance(raised.value, TaskLockDatabaseError), "no outage"
        assert not [r for r in caplog.records if "unavailable" in r.getMessage()]

    @pytest.mark.nightly
    @pytest.mark.timeout(600)
    def test_none_is_too_slow_with_300_000_one_off_jobs(
        self, database_url: str, connection: Connection, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The server ends each read after 3 s, and a page begins none after its first 3 s."""
        add_task(connection, "one", **ENDED_ONE_OFF)
        add_run(connection, "one", 1)
        connection.execute(COPY.format("task_lock", "finished_at"))
        connection.execute(COPY.format("task_lock_run", "ended_at"))
        failing = [f"sync {number:02}" for number in range(20)]
        for number, name in enumerate(failing):
            add_task(connection, name, **{**STAYS_OK, **FAILING})
            follows = {**STAYS_ALIVE, "leader_namespace": "'z'"}
            add_replica(connection, f"web-{number}", failing, **follows)
        connection.execute("ANALYZE")
        with TaskLocks(database_url) as locks:
            found = locks.overview()
            assert found.counts[TaskState.OK] == 300_001
            assert [each.task for each in found.findings] == failing
            dashboard = Dashboard(locks, "", lambda _request: Access("read"), None)
            for path in ("/", "/tasks", "/runs", "/timeline", "/replicas", "/task?name=one"):
                page = TestClient(dashboard.app()).get(path)
                assert page.status_code == 200, path
                assert "could not be read" not in page.text, path
            for words in ("check", "status", "metrics", "runs", "replicas"):
                assert main(words.split(), locks=locks) in (0, 1), words
        assert "too slow" not in capsys.readouterr().err
