"""The dashboard's reads: shared by all viewers, and kept for outages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from apscheduler_tasklock import TaskLockDatabaseError, TaskLockError
from apscheduler_tasklock.dashboard.reads import SHARED_FOR, SharedReads


class Source:
    """Stands in for the task locks, because a test decides when the database answers, and when.

    :ivar now: the time of the clock
    :ivar takes: the seconds that a read takes
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.takes = 0.0
        self.count = 0
        self.error: Exception | None = None
        self.wait: Callable[[], object] = lambda: None

    def read(self, _locks: object) -> int:
        self.count += 1
        self.wait()
        self.now += self.takes
        if self.error is not None:
            raise self.error
        return self.count


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def reads(source: Source) -> SharedReads:
    locks: Any = None  # the source does not need them
    return SharedReads(locks, lambda: source.now)


def test_viewers_share_a_value_for_some_seconds(reads: SharedReads, source: Source) -> None:
    assert [reads.read("a", source.read).value for _ in range(3)] == [1, 1, 1]
    assert reads.read("b", source.read).value == 2
    source.now += SHARED_FOR - 0.1
    assert reads.read("a", source.read).value == 1
    source.now += 0.1
    assert reads.read("a", source.read).value == 3


def test_a_read_that_takes_long_is_repeated_less_often(reads: SharedReads, source: Source) -> None:
    source.takes = 0.5
    reads.read("a", source.read)
    source.now += 24.9
    reading = reads.read("a", source.read)
    assert (reading.value, reading.took) == (1, 0.5)
    assert reading.age == pytest.approx(24.9)
    source.now += 0.2
    assert reads.read("a", source.read).value == 2


def test_one_slow_read_hides_an_outage_for_half_a_minute_at_most(
    reads: SharedReads, source: Source
) -> None:
    source.takes = 3.0
    reads.read("a", source.read)
    source.error = TaskLockDatabaseError("away")
    source.now += 29.9
    assert reads.read("a", source.read).error is None
    source.now += 0.2
    assert reads.read("a", source.read).error is not None


@pytest.mark.parametrize(("takes", "value"), [(0.0, 2), (0.5, 1)])
def test_a_value_that_is_older_than_the_page_is_read_anew_unless_that_takes_long(
    reads: SharedReads, source: Source, takes: float, value: int
) -> None:
    source.takes = takes
    reads.read("a", source.read)
    source.now += 1
    assert reads.read("a", source.read, not_before=source.now).value == value
    assert reads.read("a", source.read, not_before=source.now).value == value


def test_viewers_at_the_same_time_wait_for_one_read(reads: SharedReads, source: Source) -> None:
    begun, answered = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert answered.wait(30)

    source.wait = wait
    found: list[int | None] = []
    viewers = [
        threading.Thread(target=lambda: found.append(reads.read("a", source.read).value))
        for _ in range(4)
    ]
    for viewer in viewers:
        viewer.start()
    assert begun.wait(30)
    answered.set()
    for viewer in viewers:
        viewer.join(30)
    assert found == [1, 1, 1, 1]


@pytest.mark.parametrize("is_outage", [False, True])
def test_a_viewer_does_not_wait_while_another_one_reads_the_value_anew(
    is_outage: bool, reads: SharedReads, source: Source
) -> None:
    reads.read("a", source.read)
    begun, answered = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert answered.wait(30)

    if is_outage:
        source.now += SHARED_FOR
        source.error = TaskLockDatabaseError("no answer")
        reads.read("a", source.read)
    source.now += SHARED_FOR
    source.wait = wait
    other = threading.Thread(target=reads.read, args=("a", source.read))
    other.start()
    try:
        assert begun.wait(30)
        reading = reads.read("a", source.read)
    finally:
        answered.set()
        other.join(30)
    assert (reading.value, reading.age) == (1, 2 * SHARED_FOR if is_outage else SHARED_FOR)
    assert reading.error == ("no answer" if is_outage else None)


def test_a_change_lets_all_values_be_read_again(reads: SharedReads, source: Source) -> None:
    reads.read("a", source.read)
    reads.forget()
    assert reads.read("a", source.read).value == 2


def test_a_read_that_began_before_a_change_is_not_taken_for_current(
    reads: SharedReads, source: Source
) -> None:
    begun, answered = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert answered.wait(30)

    source.wait = wait
    other = threading.Thread(target=reads.read, args=("a", source.read))
    other.start()
    assert begun.wait(30)
    reads.forget()
    answered.set()
    other.join(30)
    assert reads.read("a", source.read).value == 2


def test_values_with_many_rows_push_each_other_out(reads: SharedReads) -> None:
    read: list[object] = []

    def rows_of(key: object) -> list[int]:
        read.append(key)
        return [0] * 3_000

    for key in range(40):
        reads.read(("span", key), lambda _locks, key=key: {"a": rows_of(key)})
        reads.read("seen by all", lambda _locks: rows_of("seen by all"))
    assert read.count("seen by all") == 1
    reads.read(("span", 39), lambda _locks: rows_of("the newest"))
    reads.read(("span", 20), lambda _locks: rows_of("an old one"))
    assert read[-1] == "an old one"
    assert "the newest" not in read


class TestOutage:
    def test_the_last_value_is_shown_with_the_error(
        self, reads: SharedReads, source: Source
    ) -> None:
        reads.read("a", source.read)
        source.error = TaskLockDatabaseError("no answer")
        source.now += 60
        reading = reads.read("a", source.read)
        assert (reading.value, reading.error, reading.age) == (1, "no answer", 60)
        source.error = None
        source.now += SHARED_FOR
        reading = reads.read("a", source.read)
        assert (reading.value, reading.error, reading.age) == (3, None, 0)

    def test_the_next_viewers_do_not_wait_for_the_same_read(
        self, reads: SharedReads, source: Source
    ) -> None:
        source.error = TaskLockDatabaseError("no answer")
        for _ in range(3):
            reading = reads.read("a", source.read)
            assert (reading.value, reading.error) == (None, "no answer")
        assert source.count == 1

    def test_a_read_that_got_no_answer_does_not_keep_others_from_reading(
        self, reads: SharedReads, source: Source
    ) -> None:
        source.error = TaskLockDatabaseError("no answer in time")
        reads.read("a", source.read)
        source.error = None
        assert reads.read("b", source.read).value == 2

    def test_nothing_is_read_in_a_known_outage(self, reads: SharedReads, source: Source) -> None:
        reads.read("a", source.read)
        source.now += 60
        reading = reads.read("a", source.read, from_before=True)
        assert (reading.value, reading.age, reading.error, source.count) == (1, 60, None, 1)

    def test_a_value_is_kept_through_a_change(self, reads: SharedReads, source: Source) -> None:
        reads.read("a", source.read)
        reads.forget()
        source.error = TaskLockDatabaseError("no answer")
        assert reads.read("a", source.read).value == 1

    def test_what_the_database_rejects_is_raised(self, reads: SharedReads, source: Source) -> None:
        source.error = TaskLockError("a right is missing")
        with pytest.raises(TaskLockError, match="a right is missing"):
            reads.read("a", source.read)


def test_a_limited_number_of_values_is_kept(reads: SharedReads, source: Source) -> None:
    for number in range(65):
        reads.read(number, source.read)
    assert reads.read(64, source.read).value == 65
    assert reads.read(0, source.read).value == 66
