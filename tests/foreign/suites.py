"""Which suites are run, what of them is left out, and what is known to differ.

``make test-foreign`` fails if a test fails that is not listed here, if a listed one passes, or if it
fails in another way. `docs/explanation/differences.md` tells users the same.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """Tests that fail with this library's executor, for one reason.

    :ivar tests: patterns of their names, which begin with their file
    :ivar failure: part of what each of them reports
    :ivar why: what is different, and why
    :ivar page: page below docs/, with its heading, that tells users
    """

    tests: tuple[str, ...]
    failure: str
    why: str
    page: str


@dataclass(frozen=True)
class Suite:
    """Tests of a pinned source distribution.

    :ivar project: its name in `sdists.txt`
    :ivar files: its modules of tests, in `tests`
    :ivar executors: that run jobs there, at least
    :ivar differences: what fails, and why
    :ivar deselected: patterns of tests that cannot be run here at all, and why
    :ivar django: whether it is run in a Django project
    """

    project: str
    files: tuple[str, ...]
    executors: frozenset[str]
    differences: tuple[Difference, ...] = ()
    deselected: tuple[tuple[str, str], ...] = ()
    django: bool = False


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
    ),
    Suite(
        "django-apscheduler",
        (
            "test_admin.py",
            "test_apscheduler_jobstore.py",
            "test_jobstores.py",
            "test_models.py",
            "test_util.py",
        ),
        frozenset({"ThreadPoolExecutor"}),
        django=True,
    ),
)
