"""Which suites are run, what is adapted for that, what is left out, and what is known to differ.

``make test-foreign`` fails if a test fails that is not listed here, if a listed one passes, or if
it fails in another way. `docs/explanation/differences.md` tells users the same; a test compares the
two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """Tests that fail with this library's executor or job store, for one reason.

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
    """What the plugin does so that tests say something of this library.

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

    :ivar sdist: its project and version, as `sdists.txt` has them
    :ivar tests: what of its folder `tests` is run
    :ivar executors: that are given jobs there, at least
    :ivar differences: what fails
    :ivar left_out: what cannot be run, or not reliably
    :ivar django: whether it is run in a Django project
    :ivar gevent: whether it is run in a process that gevent has patched
    :ivar store: options of the job store in place of APScheduler's SQLAlchemyJobStore; ``None`` if
        executors are in place of APScheduler's
    :ivar due: whether that job store answers what is due, see the adaptation
    :ivar only: pattern of the names of the tests that are run
    :ivar claims: whether any of its jobs has to claim its task; not if all are one-offs without
        ids, which may be each replica's own
    """

    sdist: str
    tests: tuple[str, ...]
    executors: frozenset[str] = frozenset()
    differences: tuple[Difference, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    django: bool = False
    gevent: bool = False
    store: Mapping[str, Any] | None = None
    due: bool = False
    only: str = "*"
    claims: bool = True

    @property
    def project(self) -> str:
        """The name of the project."""
        return self.sdist.partition("==")[0]

    @property
    def version(self) -> str:
        """Its version."""
        return self.sdist.partition("==")[2]


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
    Adaptation(
        "loop",
        "Where a test makes a TornadoScheduler on a loop that never runs, its executor has the "
        "loop of the test.",
        "What is claimed is given to the executor on its own loop.",
        "how-to/asyncio-and-processes.md#coroutines",
    ),
    Adaptation(
        "store",
        "Where a test makes a SQLAlchemyJobStore with a URL, a TaskLockJobStore is on the database "
        "of the run, and its table is emptied when it is shut down.",
        "The tests have a new file for each job store.",
        "reference/options.md#the-job-store",
    ),
    Adaptation(
        "scheduler",
        "A job store that a test starts without a scheduler has one that is not started.",
        "The job store reads what is due for a scheduler that runs. The tests' jobs were due in "
        "2013, and would run.",
        "job-store.md#how-it-works",
    ),
    Adaptation(
        "due",
        "In the run with a `secret` and pickle, `get_due_jobs` and `get_next_run_time` answer by "
        "what a replica would read as due.",
        "So the tests look at that statement.",
        "job-store.md#how-it-works",
    ),
)

# The first one is installed for the suites; the other lies beside its tests.
NEWEST, OLDEST = "apscheduler==3.11.3", "apscheduler==3.10.4"

# What differs of a TaskLockJobStore, however it is made.
DIFFERENCES_OF_STORES = (
    Difference(
        ("test_jobstores.py::test_update_job[*",),
        r"TaskLockOptionError: .* max_instances=6 makes no sense",
        "One run of a job goes on at a time, so a `max_instances` above 1 is an error.",
        "job-store.md#what-it-does-not-do",
    ),
    Difference(
        ("test_jobstores.py::test_one_job_fails_to_load[*",),
        r"At index 0 diff: <Job .*\s+E +Left contains one more item: <Job ",
        "A job whose function cannot be imported on a replica is listed, and skipped there. It "
        "is not removed, because other replicas may have its function.",
        "job-store.md#what-is-promised",
    ),
    Difference(
        (
            "test_jobstores.py::test_repr_sqlalchemyjobstore",
            "test_jobstores.py::test_sqlalchemy_engine_ref",
            "test_jobstores.py::test_sqlalchemy_missing_engine",
        ),
        r"'<SQLAlchemyJobStore \(url='|TypeError: TaskLockJobStore\.__init__\(\) .*"
        r"('engine'|'database')|'which database\? ",
        "A `TaskLockJobStore` has a name and arguments of its own: it takes a URL or an `Engine`, "
        "and not the name of a variable that has one. Without either it asks for a database.",
        "reference/options.md#the-job-store",
    ),
)

SUITES = (
    Suite(
        NEWEST,
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
            Difference(
                ("test_executors.py::test_asyncio_executor_shutdown",),
                "assert 0 == 1",
                "A coroutine is given to the event loop once its task is claimed, and not within "
                "`submit_job`.",
                "how-to/asyncio-and-processes.md#coroutines",
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
        NEWEST,
        ("test_schedulers.py::TestGeventScheduler",),
        frozenset({"DebugExecutor"}),
        gevent=True,
        claims=False,
    ),
    *(
        Suite(
            sdist,
            ("test_jobstores.py",),
            differences=(
                Difference(
                    (
                        "test_jobstores.py::test_get_pending_jobs[*",
                        "test_jobstores.py::test_get_pending_jobs_subsecond_difference[*",
                        "test_jobstores.py::test_get_next_run_time[*",
                        "test_jobstores.py::test_update_job_next_runtime[*",
                        "test_jobstores.py::test_update_job_clear_next_runtime[*",
                    ),
                    r"assert \[\] == \[<Job |assert None == datetime|assert 0 == [23]",
                    "The scheduler's own loop gets no due jobs: `get_due_jobs` returns none, and "
                    "`get_next_run_time` returns `None`. Each replica reads what is due beside the "
                    "loop, and claims it. With what it reads in place of these answers, the tests "
                    "pass.",
                    "job-store.md#what-it-does-not-do",
                ),
                Difference(
                    ("test_jobstores.py::test_add_callable_instance_method_job[*",),
                    r"UnstorableError: .* args\[0\] cannot be stored: it is a .*\.DummyClass",
                    "A method's instance is stored as an argument. JSON has none of the test's "
                    "class. With a `secret` and pickle, the test passes.",
                    "job-store.md#what-is-stored-and-who-may-write-it",
                ),
                Difference(
                    ("test_jobstores.py::test_add_textual_instance_method_job[*",),
                    r"TaskLockOptionError: .* is not allowed under another name",
                    "With `functions=`, a job names a function by its module and class, and not by "
                    "an instance. With a `secret` alone, the test passes.",
                    "job-store.md#what-is-stored-and-who-may-write-it",
                ),
                *DIFFERENCES_OF_STORES,
            ),
            store={"functions": ["tests.test_jobstores."]},
            only="*sqlalchemy*",
        )
        for sdist in (NEWEST, OLDEST)
    ),
    *(
        Suite(
            sdist,
            ("test_jobstores.py",),
            differences=DIFFERENCES_OF_STORES,
            store={"secret": "of the tests, and of nobody else", "serializer": "pickle"},
            due=True,
            only="*sqlalchemy*",
        )
        for sdist in (NEWEST, OLDEST)
    ),
    Suite(
        "django-apscheduler==0.7.0",
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
