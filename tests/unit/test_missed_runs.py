"""Missed run times in a replica's memory, until a look notes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import permutations
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from apscheduler_tasklock._database.rejections import RUN_HISTORY, Rejections
from apscheduler_tasklock._database.timings import Timings
from apscheduler_tasklock._runs.missed_runs import (
    MOST_COMPARED,
    MOST_NOTES,
    MOST_RUN_TIMES,
    MissedRuns,
    all_busy,
    too_many_instances,
)
from apscheduler_tasklock._runs.submission import DueRun
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockSchemaError,
)
from apscheduler_tasklock.options import KEEP_ONE_OFFS
from apscheduler_tasklock.status import MissCause, RunningRun
from tests.support.waist import (
    ClaimRequest,
    JobMove,
    MissedTimes,
    MissNote,
    MissNotes,
    Registered,
    Registration,
    ScheduleNotes,
)

# An hour ago. A test may run many minutes after this was computed.
T = datetime.now(timezone.utc) - timedelta(hours=1)


class Client:
    """A client whose statements answer which tasks are to be told again, or raise an error."""

    def __init__(self) -> None:
        self.settings = SimpleNamespace(
            history=100, keep_one_offs=KEEP_ONE_OFFS, timings=Timings(unasked_after=0.0)
        )
        self.rejections = Rejections()
        self.database: Any = self
        self.locks: Any = SimpleNamespace(longest_doubt=3600.0)
        self.outage: Any = SimpleNamespace(has_covered=lambda *_span: False)
        self.replica_id = "web-2"
        self.answer: Callable[[Sequence[MissNote]], set[str]] = lambda _notes: set()
        self.sent: list[list[MissNote]] = []
        self.sent_changes: list[list[str]] = []
        self.answer_to_changes: Callable[[], set[str]] = set

    def carrying_out(self, message: MissNotes | ScheduleNotes) -> Any:
        if isinstance(message, MissNotes):
            notes = message.notes
            self.sent.append(list(notes))
            return lambda: self.answer(notes)
        self.sent_changes.append([note.reason for note in message.notes])
        return self.answer_to_changes


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def missed(client: Client) -> MissedRuns:
    made: Any = client
    return MissedRuns(made, interval=0.0)


def request(seconds: float = 0.0, task: str = "task", **changes: Any) -> ClaimRequest:
    asked = ClaimRequest(
        task, 9.0, 50.0, T + timedelta(seconds=seconds), exact=True, schedule="s", next_in=10.0
    )
    return replace(asked, **changes)


def tell(missed: MissedRuns, client: Client) -> list[MissNote]:
    """Make one look; return the notes that it has sent."""
    client.sent.clear()
    steps = missed.tell()
    try:
        statement = next(steps)
        while True:
            try:
                answer = statement()
            except TaskLockError as error:
                statement = steps.throw(error)
            else:
                statement = steps.send(answer)
    except StopIteration:
        return [note for notes in client.sent for note in notes]


def offsets(note: MissNote) -> list[float]:
    return [(run_time - T).total_seconds() for run_time in note.run_times]


def test_where_the_history_is_long_one_look_sends_fewer_notes(
    missed: MissedRuns, client: Client
) -> None:
    client.settings.history = MOST_COMPARED // 2
    for task in ("a", "b", "c"):
        for seconds in (0, 10):
            missed.note_missed(request(seconds, task), MissCause.RUNNING, "busy")
    looks = [[note.task_name for note in tell(missed, client)] for _ in range(4)]
    assert looks == [["a"], ["b"], ["c"], []]


def test_the_run_times_of_one_task_wait_equally_long(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    jitters = iter([0.0, 36000.0, 36000.0])

    def uniform(least: float, most: float) -> float:
        return next(jitters) if most == 36000.0 else least  # other threads may ask, too

    monkeypatch.setattr("random.uniform", uniform)
    made: Any = client
    missed = MissedRuns(made, interval=36000.0)
    for seconds in (0, 10):
        missed.note_missed(request(seconds), MissCause.RUNNING, "busy")
    missed.note_missed(request(0, "other"), MissCause.RUNNING, "busy")
    assert [offsets(note) for note in tell(missed, client)] == [[0.0, 10.0]]


def test_run_times_of_one_cause_are_one_note_in_their_order(
    missed: MissedRuns, client: Client
) -> None:
    for seconds in (20, 0, 10):
        missed.note_missed(request(seconds), MissCause.MISFIRE, f"late by {seconds}")
    missed.note_missed(request(30), MissCause.PAUSED, "paused")
    missed.note_missed(request(40), MissCause.MISFIRE, "late again")
    looks = [tell(missed, client) for _ in range(4)]
    assert [[(offsets(note), note.reason) for note in notes] for notes in looks] == [
        [([0, 10, 20], "late by 20")],
        [([30], "paused")],
        [([40], "late again")],
        [],
    ]


@pytest.mark.parametrize(("started", "is_witness"), [(-1, True), (0, True), (1, False)])
def test_a_replica_that_started_after_a_run_time_is_no_witness_of_it(
    missed: MissedRuns, client: Client, started: float, is_witness: bool
) -> None:
    missed.started_at = T + timedelta(seconds=started)
    for seconds in (0, 10):
        missed.note_missed(request(seconds), MissCause.UNASKED, "nobody asked for it")
    [note] = tell(missed, client)
    assert (offsets(note), note.is_witness) == ([0, 10], is_witness)


def test_of_the_causes_of_a_run_time_the_one_that_holds_for_all_replicas_is_told(
    missed: MissedRuns, client: Client
) -> None:
    """A pause, an outage, a run in the way, what is so on this replica, and what it only infers."""
    causes = ("paused", "database", "running", "misfire", "unasked")
    client.locks.longest_doubt = 0.0
    for number, pair in enumerate(permutations(causes, 2)):
        for cause in pair:
            missed.note_missed(request(task=f"{number}"), MissCause(cause), cause)
    told = [note.cause for note in tell(missed, client)]
    assert told == [min(pair, key=causes.index) for pair in permutations(causes, 2)]


def test_an_outage_is_not_told_before_the_doubt_is_over(missed: MissedRuns, client: Client) -> None:
    for cause in (MissCause.RUNNING, MissCause.DATABASE):
        missed.note_missed(request(), cause, cause.value)
    missed.note_missed(request(10), MissCause.RUNNING, "running")
    assert tell(missed, client) == []


@pytest.mark.parametrize(
    ("is_running", "waits_for", "is_away", "has_lock", "told"),
    [
        (True, "", False, False, ("running", "its last run on web-2 was still going on (max_")),
        (
            False,
            "worker",
            False,
            True,
            ("running", "its last run on web-2 was still waiting for a w"),
        ),
        (
            False,
            "run",
            False,
            False,
            ("running", "its last run on web-2 was still waiting for ano"),
        ),
        # The lock keeps all replicas from running it, and not only this one.
        (
            *(True, "", False, True),
            ("running", "its run that began at 2026-01-01 00:00:00 UTC on web-2 (token 7) was"),
        ),
        # So does an outage.
        (True, "", True, True, ("database", "the database did not answer")),
        (False, "worker", True, False, ("database", "the database did not answer")),
        (False, "", True, False, ("database", "the database did not answer, and the run be")),
        (False, "", False, False, ("database", "the database did not answer, and the run b")),
    ],
)
def test_max_instances_is_the_cause_only_where_nothing_keeps_all_replicas_from_running_it(
    *, is_running: bool, waits_for: str, is_away: bool, has_lock: bool, told: tuple[str, str]
) -> None:
    outage = SimpleNamespace(reason="refused" if is_away else None)
    began = datetime(2026, 1, 1, tzinfo=timezone.utc)
    runs = [
        RunningRun("other", 5, "web-2", began),
        RunningRun("job", 6, "web-2", began, lost=True),
        *([RunningRun("job", 7, "web-2", began)] if has_lock else []),
    ]
    locks = SimpleNamespace(what_runs=lambda: runs)
    user: Any = SimpleNamespace(outage=outage, replica_id="web-2", locks=locks)
    job: Any = SimpleNamespace(task_name="job", job=SimpleNamespace(max_instances=1))
    cause, reason = too_many_instances(
        job,
        user,
        is_running=is_running,
        is_deferred=waits_for == "run",
        waits_for_worker=waits_for == "worker",
    )
    assert (cause.value, reason[: len(told[1])]) == told


def test_runs_in_the_way_that_differ_are_told_apart(missed: MissedRuns, client: Client) -> None:
    for seconds, token in ((0, 1), (10, 1), (20, 2)):
        missed.note_missed(request(seconds), MissCause.RUNNING, f"token {token}")
    looks = [tell(missed, client)[0] for _ in range(2)]
    assert [(offsets(note), note.reason) for note in looks] == [
        ([0, 10], "token 1"),
        ([20], "token 2"),
    ]


@pytest.mark.parametrize("changes", [{"grace": 7200.0}, {"exact": False, "next_in": 7200.0}])
def test_nothing_is_told_before_it_is_overdue(
    missed: MissedRuns, client: Client, changes: dict[str, Any]
) -> None:
    """And not within a period if each replica computes another run time."""
    missed.note_missed(request(**changes), MissCause.MISFIRE, "late")
    assert tell(missed, client) == []


def test_many_run_times_of_a_task_are_counted(missed: MissedRuns, client: Client) -> None:
    for number in range(MOST_RUN_TIMES + 50):
        missed.note_missed(request(number), MissCause.PAUSED, "paused")
    [note] = tell(missed, client)
    assert (len(note.run_times), note.more) == (MOST_RUN_TIMES, 50)
    assert offsets(note)[-1] == MOST_RUN_TIMES + 49


@pytest.mark.parametrize(
    ("kept", "hours", "noted"),
    [(7 * 24, 143, 1), (7 * 24, 145, 0), (70, 59, 1), (70, 61, 0)],
)
def test_a_one_off_job_whose_row_may_be_deleted_is_not_told_as_missed(
    missed: MissedRuns, client: Client, kept: float, hours: float, noted: int
) -> None:
    client.settings.keep_one_offs = kept * 3600
    now = time.time() - T.timestamp()
    missed.note_missed(request(now - hours * 3600, one_off=True), MissCause.PAUSED, "paused")
    assert len(tell(missed, client)) == noted


def test_a_run_time_that_is_told_late_does_not_take_the_place_of_the_last_one(
    missed: MissedRuns, client: Client
) -> None:
    for number in (*range(1, MOST_RUN_TIMES + 1), 0):
        missed.note_missed(request(number), MissCause.PAUSED, "paused")
    [note] = tell(missed, client)
    assert (len(note.run_times), note.more) == (MOST_RUN_TIMES, 1)
    assert offsets(note)[-1] == MOST_RUN_TIMES
    assert tell(missed, client) == []


def test_a_look_sends_a_limited_number_of_notes(missed: MissedRuns, client: Client) -> None:
    for number in range(MOST_NOTES + 1):
        missed.note_missed(request(task=f"task {number}"), MissCause.PAUSED, "paused")
    assert [len(tell(missed, client)) for _ in range(3)] == [MOST_NOTES, 1, 0]


@pytest.mark.parametrize(
    "error", [TaskLockDatabaseError("away"), TaskLockSchemaError("not permitted")]
)
def test_what_the_database_does_not_take_is_told_later(
    missed: MissedRuns, client: Client, error: TaskLockError
) -> None:
    def fail(_notes: object) -> set[str]:
        raise error

    missed.note_missed(request(), MissCause.MISFIRE, "late")
    client.answer = fail
    try:
        tell(missed, client)
    except TaskLockDatabaseError:
        assert isinstance(error, TaskLockDatabaseError)
    assert client.rejections.suspected == isinstance(error, TaskLockSchemaError)
    client.answer = lambda _notes: {"task"}  # another session has the row locked
    assert len(tell(missed, client)) == 1
    client.answer = lambda _notes: set()
    assert len(tell(missed, client)) == 1
    assert tell(missed, client) == []


def test_a_note_that_the_database_cannot_store_keeps_no_other_note_back(
    missed: MissedRuns, client: Client
) -> None:
    def fail(notes: Sequence[MissNote]) -> set[str]:
        if any(note.task_name == "bad" for note in notes):
            raise TaskLockError("out of range")
        return set()

    client.answer = fail
    for task in ("good", "bad", "better"):
        missed.note_missed(request(task=task), MissCause.MISFIRE, "late")
    assert [note.task_name for note in tell(missed, client)][3:] == ["good", "bad", "better"]
    assert tell(missed, client) == []


def test_a_schedule_that_was_changed_drops_what_was_missed_of_the_old_one(
    missed: MissedRuns, client: Client
) -> None:
    missed.note_missed(request(), MissCause.MISFIRE, "late")
    missed.note_missed(request(10, schedule="another"), MissCause.MISFIRE, "late")
    assert [offsets(note) for note in tell(missed, client)] == [[10]]


def test_nothing_is_sent_while_the_history_is_rejected(missed: MissedRuns, client: Client) -> None:
    missed.note_missed(request(), MissCause.MISFIRE, "late")
    client.rejections.begin(RUN_HISTORY, "not permitted")
    assert tell(missed, client) == []
    client.rejections.permitted(RUN_HISTORY)
    assert len(tell(missed, client)) == 1


def test_the_busiest_jobs_are_named_first() -> None:
    jobs = ["report"] * 3 + ["feed"] * 7 + ["a", "b", "c", "d"]
    named = "`feed` 7, `report` 3, `a` 1, `b` 1, `c` 1, others 1"
    assert all_busy(14, jobs) == f"all 14 workers were busy ({named})"
    assert all_busy(2, []) == "all 2 workers were busy"


def at(seconds: float) -> datetime:
    return T + timedelta(seconds=seconds)


def stretch(first: float, last: float, count: int, cause: MissCause) -> MissedTimes:
    return MissedTimes(at(first), at(last), count, cause, cause.value)


PAUSED = stretch(0, 60, 2, MissCause.PAUSED)
RUNNING = stretch(0, 60, 2, MissCause.RUNNING)
UNASKED = stretch(120, 180, 2, MissCause.UNASKED)


class TestRunTimesOfAStoredJob:
    @pytest.mark.parametrize(
        ("passed", "cause", "expected"),
        [
            ((), MissCause.MISFIRE, [stretch(240, 240, 1, MissCause.MISFIRE)]),
            ((UNASKED,), MissCause.MISFIRE, [stretch(120, 240, 3, MissCause.MISFIRE)]),
            (
                (PAUSED, UNASKED),
                MissCause.MISFIRE,
                [PAUSED, stretch(120, 240, 3, MissCause.MISFIRE)],
            ),
            ((PAUSED,), MissCause.MISFIRE, [PAUSED, stretch(240, 240, 1, MissCause.MISFIRE)]),
            ((PAUSED,), MissCause.PAUSED, [stretch(0, 240, 3, MissCause.PAUSED)]),
            ((RUNNING,), MissCause.MISFIRE, [RUNNING, stretch(240, 240, 1, MissCause.MISFIRE)]),
        ],
    )
    def test_those_before_a_missed_one_are_told_with_it_but_for_a_pause(
        self, passed: tuple[MissedTimes, ...], cause: MissCause, expected: list[MissedTimes]
    ) -> None:
        move = JobMove("job", uuid4(), at(0), at(240), at(300))
        given: Any = SimpleNamespace()
        due = DueRun(
            given,
            "default",
            move,
            due_at=0,
            came=0,
            again_at=0,
            misfires_from=at(0),
            passed=lambda: passed,
        )
        assert due.missed(cause, lambda _first: cause.value) == expected

    def test_they_are_one_note_with_first_last_and_count(
        self, missed: MissedRuns, client: Client
    ) -> None:
        asked = request(240, min_lock=0.0, grace=60.0)
        missed.note_stored(asked, lambda: [stretch(0, 240, 60, MissCause.MISFIRE)])
        [note] = tell(missed, client)
        assert (offsets(note), note.more, note.cause) == ([0, 240], 58, "misfire")

    def test_a_single_one_is_a_note_of_one(self, missed: MissedRuns, client: Client) -> None:
        missed.note_stored(request(), lambda: [stretch(0, 0, 1, MissCause.PAUSED)])
        [note] = tell(missed, client)
        assert (offsets(note), note.more) == ([0], 0)

    def test_they_are_noted_together_once_the_last_is_overdue(
        self, missed: MissedRuns, client: Client
    ) -> None:
        last = 7200.0  # in an hour
        missed.note_stored(request(grace=60.0), lambda: [stretch(0, last, 3, MissCause.PAUSED)])
        assert tell(missed, client) == []

    @pytest.mark.parametrize(
        ("cause", "is_away", "told"),
        [
            (MissCause.UNASKED, True, ("database", "the database did not answer")),
            (MissCause.UNASKED, False, ("unasked", "unasked")),
            (MissCause.PAUSED, True, ("paused", "paused")),
        ],
    )
    def test_in_an_outage_no_replica_could_claim_them(
        self,
        missed: MissedRuns,
        client: Client,
        *,
        cause: MissCause,
        is_away: bool,
        told: tuple[str, str],
    ) -> None:
        spans: list[tuple[float, float]] = []
        client.locks.longest_doubt = 0.0
        client.outage = SimpleNamespace(has_covered=lambda *span: spans.append(span) or is_away)
        missed.note_stored(request(), lambda: [stretch(0, 240, 5, cause)])
        [note] = tell(missed, client)
        assert (note.cause, note.reason) == told
        if cause is MissCause.UNASKED:
            [(first, last)] = spans
            assert last - first == pytest.approx(240)
            assert last < time.monotonic()

    def test_two_stretches_keep_their_own_counts(self, missed: MissedRuns, client: Client) -> None:
        both = stretch(0, 60, 10, MissCause.PAUSED), stretch(120, 180, 7, MissCause.UNASKED)
        missed.note_stored(request(), lambda: both)
        [first], [second] = tell(missed, client), tell(missed, client)
        assert (offsets(first), first.more, first.cause) == ([0, 60], 8, "paused")
        assert (offsets(second), second.more, second.cause) == ([120, 180], 5, "unasked")


def reschedule(
    missed: MissedRuns, due: float | None, following: float | None, **to: Any
) -> datetime:
    """Change the schedule now, and return a moment some seconds before.

    The task was due ``due`` seconds after that moment, and is due ``following`` seconds after it.
    """
    moment = datetime.now(timezone.utc).replace(microsecond=0) - timedelta(seconds=10)
    was, now = (
        None if seconds is None else moment + timedelta(seconds=seconds)
        for seconds in (due, following)
    )
    task = Registration("task", **{"schedule": '"new"', **to}, next_in=1.0, grace=0.0, **REST)
    answer = Registered("task", was_schedule='"old"', was_due_at=was, due_at=now)
    missed.note_rescheduled(task, answer)
    return moment


REST: dict[str, Any] = {"least_gap": 0.0, "runs": "jobs:job"}


@pytest.mark.parametrize(
    ("due", "following", "offset"),
    [
        (0.013, 3600.0, 0.0),  # a registered due time has the time of its statement
        (-0.4, 3600.0, 0.0),
        (0.0, 61.0, 0.0),
        (0.0, 60.0, None),  # soon afterwards
        (0.0, -3600.0, None),
        (None, 3600.0, None),
        (0.0, None, None),
    ],
)
def test_the_old_run_time_was_missed_if_the_new_one_is_later(
    missed: MissedRuns,
    client: Client,
    due: float | None,
    following: float | None,
    offset: float | None,
) -> None:
    moment = reschedule(missed, due, following)
    notes = tell(missed, client)
    assert client.sent_changes == [['from "old" to "new"']]
    if offset is None:
        assert notes == []
        return
    [note] = notes
    assert (note.run_times, note.cause) == ((moment,), "moved")
    assert note.reason == 'the schedule was moved from "old" to "new" by web-2'
    assert (note.schedule, note.exact, note.any_later, note.covers) == ('"new"', True, True, 60.0)


def test_an_old_run_time_is_told_when_it_is_overdue(missed: MissedRuns, client: Client) -> None:
    reschedule(missed, 3600.0, 4 * 3600.0)
    assert tell(missed, client) == []
    reschedule(missed, 0.0, 4 * 3600.0)
    assert len(tell(missed, client)) == 1


def test_an_old_run_time_that_had_passed_before_was_asked_for_by_nobody(
    missed: MissedRuns, client: Client
) -> None:
    """As where all replicas were away, and came back with another schedule."""
    moment = reschedule(missed, -1800.0, 3600.0)
    [note] = tell(missed, client)
    assert (note.run_times, note.cause) == ((moment - timedelta(seconds=1800),), "unasked")
    assert note.reason.startswith("nobody asked for it between ")


def test_a_better_cause_of_the_old_run_time_is_told(missed: MissedRuns, client: Client) -> None:
    at = reschedule(missed, 0.0, 3600.0)
    missed.note_missed(
        request(schedule='"new"', run_time=at, grace=0.0), MissCause.UNASKED, "nobody asked"
    )
    [note] = tell(missed, client)
    assert (note.run_times, note.cause, note.any_later) == ((at,), "unasked", False)


def test_a_miss_of_the_new_schedule_keeps_its_own_limits(
    missed: MissedRuns, client: Client
) -> None:
    """They are not those of the old schedule's run time, which is noted after it."""
    missed.note_missed(request(-600.0, schedule='"new"', exact=False), MissCause.MISFIRE, "late")
    reschedule(missed, 0.0, 3600.0)
    first = tell(missed, client)
    second = tell(missed, client)
    assert [(note.cause, note.exact, note.min_lock) for note in [*first, *second]] == [
        ("misfire", False, 9.0),
        ("moved", True, 0.0),
    ]


@pytest.mark.parametrize(
    ("schedule", "history"), [('"old"', 100), ('"new"', 0)], ids=["same words", "no history"]
)
def test_what_is_no_change_in_words_is_not_told(
    missed: MissedRuns, client: Client, schedule: str, history: int
) -> None:
    client.settings.history = history
    reschedule(missed, 0.0, 3600.0, schedule=schedule)
    assert tell(missed, client) == []
    assert client.sent_changes == []


def test_a_change_that_the_database_does_not_take_is_told_later(
    missed: MissedRuns, client: Client
) -> None:
    reschedule(missed, None, None)
    client.answer_to_changes = lambda: {"task"}
    for _ in range(2):
        tell(missed, client)
    client.answer_to_changes = set
    for _ in range(2):
        tell(missed, client)
    assert len(client.sent_changes) == 3
