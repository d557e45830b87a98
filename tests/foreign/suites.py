"""Which suites are run, what is adapted for that, what is left out, and what is known to differ.

``make test-foreign`` fails if a test fails that is not listed here, if a listed one passes, or if
it fails in another way. `docs/explanation/differences.md` tells users the same; a test compares the
two.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """Tests that fail with this library's executor, for one reason.

    :ivar tests: patterns of their names, which begin with their file
    :ivar failure: a regular expression that is found in what each of them reports
    :ivar why: what is different, and why
    :ivar page: the page that tells users, below docs/, with its heading
    """

    tests: tuple[str, ...]
    failure: str
    why: str
    page: str


@dataclass(frozen=True)
class Adaptation:
    """What the plugin does so that tests say something of this library's executor.

    :ivar name: that the plugin names at the place
    :ivar what: what it does
    :ivar why: why
    :ivar page: as of a :class:`Difference`, if users can meet it as well
    """

    name: str
    what: str
    why: str
    page: str | None = None


@dataclass(frozen=True)
class LeftOut:
    """Tests that are not run.

    :ivar test: pattern of their names
    :ivar page: as of a :class:`Difference`, if users can meet it as well
    """

    test: str
    why: str
    page: str | None = None


@dataclass(frozen=True)
class Suite:
    """Tests of a pinned source distribution.

    :ivar project: its name in `sdists.txt`
    :ivar tests: what of its folder `tests` is run
    :ivar executors: that are given jobs there, at least
    :ivar differences: what fails
    :ivar left_out: what cannot be run, or not reliably
    :ivar django: whether it is run in a Django project
    :ivar gevent: whether it is run in a process that gevent has patched
    :ivar claims: whether any of its jobs has to claim its task; not if all are one-offs without
        ids, which may be each replica's own
    """

    project: str
    tests: tuple[str, ...]
    executors: frozenset[str]
    differences: tuple[Difference, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    django: bool = False
    gevent: bool = False
    claims: bool = True


ADAPTATIONS = (
    Adaptation(
        "clock",
        "Where a test sets the clock of APScheduler's modules to 2011, its run times are due now.",
        "The lock goes by the clocks of the machine and of the database.",
        "explanation/windows.md#the-decision",
    ),
    Adaptation(
        "shutdown",
        "Before a pool's executor is shut down, what was submitted to it is run.",
        "A run time that has not begun at the shutdown is left to other replicas.",
        "how-to/deployments.md#what-becomes-of-what-runs",
    ),
    Adaptation(
        "mock",
        "A mock that stands for the scheduler has a scheduler's attributes, and does not get the "
        "events of the lock.",
        "Those events are for listeners that ask for them, and for who overrides "
        "`_dispatch_event`, as instrumentation does.",
        "reference/events.md#together-with-apschedulers-events",
    ),
    Adaptation(
        "internals",
        "What tests look at or replace in an executor, `_run_job_success`, `_run_job_error` and "
        "`_pending_futures`, is that of the wrapped one.",
        "The wrapped executor runs the jobs, and reports them.",
    ),
)

SUITES = (
    Suite(
        "apscheduler",
        ("test_executors.py", "test_schedulers.py"),
        frozenset(
            {
                "ThreadPoolExecutor",
                "ProcessPoolExecutor",
                "AsyncIOExecutor",
                "TornadoExecutor",
                "DebugExecutor",
            }
        ),
        differences=(
            Difference(
                ("test_executors.py::test_max_instances[*",),
                # The latter on a machine that is too slow for the test's grace time of a second.
                r"assert 1 == 2|assert None == 'test'",
                "Two instances of one job do not run at the same time: while the first one holds "
                "the lock, the second is refused.",
                "explanation/guarantees.md#runs-that-do-not-come-or-come-late",
            ),
            Difference(
                ("test_executors.py::test_run_job_error[*",),
                "IndexError: list index out of range",
                "A submission has a job of APScheduler and at least one run time, which say what "
                "is claimed. The test submits neither.",
                "explanation/differences.md#tests-that-fail",
            ),
        ),
        left_out=(
            LeftOut(
                "test_executors.py::test_broken_pool",
                "It fails with APScheduler's own executor, too, if the pool has not noticed yet "
                "that its worker is dead when the next job is submitted.",
            ),
            LeftOut(
                "test_schedulers.py::TestGeventScheduler::*",
                "They are run apart, in a process that gevent has patched: a GeventScheduler is an "
                "error in any other.",
                "reference/messages.md#tasklockoptionerror",
            ),
        ),
    ),
    Suite(
        "apscheduler",
        ("test_schedulers.py::TestGeventScheduler",),
        frozenset({"DebugExecutor"}),
        gevent=True,
        claims=False,
    ),
    Suite(
        "django-apscheduler",
        (
            "test_admin.py",
            "test_apscheduler_jobstore.py",
            "test_jobstores.py",
            "test_models.py",
            "test_tasklock.py",  # this project's own
            "test_util.py",
        ),
        frozenset({"ThreadPoolExecutor"}),
        left_out=(
            LeftOut(
                "test_admin.py::*::test_run_selected_jobs_job_not_found_skips_execution",
                "The executor reads all jobs of a job store when it starts, and a DjangoJobStore "
                "removes what it cannot restore whenever it reads. So the test's job, which has no "
                "content, may be gone before the test looks at it.",
                "how-to/from-django-apscheduler.md#with-the-djangojobstore-for-a-while",
            ),
        ),
        django=True,
    ),
)
