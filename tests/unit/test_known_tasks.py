"""The jobs of an executor whose tasks are known."""

from __future__ import annotations

from tests.support.waist import KnownTasks

# More than the tuples that Python keeps for reuse, so that the garbage collector runs.
MANY = 5_000


class Adding:
    """Garbage in a cycle, whose end adds a job, as another thread may whenever a job is added."""

    def __init__(self, known: KnownTasks) -> None:
        self.known = known
        self.cycle = self

    def __del__(self) -> None:
        self.known.add("another task", ("another", "default"), None)


def test_a_job_that_is_added_while_the_jobs_of_a_task_are_looked_for_is_no_error() -> None:
    """The garbage collector runs whatever it ends, and lets other threads go on meanwhile."""
    known = KnownTasks()
    for number in range(MANY):
        known.add("task", (f"job {number}", "default"), None)
    for _ in range(3):  # at the first time a collection may be under way already
        Adding(known)
        assert len(known.keys_of("task")) == MANY
        known.forget(("another", "default"))
