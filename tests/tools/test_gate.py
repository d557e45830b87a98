"""The gate's lint finds what real time decides, and its list of exceptions only gets shorter."""

from __future__ import annotations

import textwrap

import pytest

from tests.gate.exceptions import Exceptions, read
from tests.gate.findings import findings
from tests.gate.plugin import CPU, CpuTimes

HEADER = """
    import pytest
    SHORT = 1
    LONG = 600
"""


def found(source: str, path: str = "integration/test_it.py") -> list[tuple[str, str]]:
    """Return the rules and the names of the tests that a file's source breaks."""
    text = textwrap.dedent(HEADER) + textwrap.dedent(source)
    return sorted({(one.rule, one.place.partition("::")[2]) for one in findings(text, path)})


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("time.sleep(0.1)", "sleep"),
        ("await asyncio.sleep(1)", "sleep"),
        ("sleep(1)", "sleep"),
        ("time.sleep(latency)", "sleep"),
        ("cursor.execute('SELECT pg_sleep(1.1)')", "sleep"),
        ("make(lease=1)", "limit"),
        ("make(max_lock=59.9)", "limit"),
        ("make(claim_timeout='3')", "limit"),
        ("make(misfire_grace_time=SHORT)", "limit"),
        ("make(kwargs={'task_lock': {'max_lock': 2}})", "limit"),
        ("make('postgresql://a/b?claim_timeout=3')", "limit"),
        ("execute(\"UPDATE task_lock SET locked_until = now() - interval '1 s'\")", "now"),
        ("execute(\"SELECT now() + interval '59.9 seconds'\")", "now"),
    ],
)
def test_what_real_time_decides_is_found(line: str, rule: str) -> None:
    assert found(f"""
        async def test_it():
            {line}
    """) == [(rule, "test_it")]


@pytest.mark.parametrize(
    "line",
    [
        "time.sleep(0.05)",
        "await asyncio.sleep(3600)",
        "make(lease=600)",
        "make(lease=LONG)",
        "make(misfire_grace_time=None)",
        "make(max_lock=0)",
        "make(min_lock=1)",
        "execute(\"UPDATE task_lock SET locked_until = now() - interval '1 min'\")",
    ],
)
def test_what_no_machine_is_too_slow_for_is_not_found(line: str) -> None:
    assert (
        found(f"""
        async def test_it():
            {line}
    """)
        == []
    )


def test_a_helper_counts_for_each_test_that_reaches_it_and_for_no_other() -> None:
    assert found("""
        def claim():
            return make(lease=1)

        @pytest.fixture
        def holder():
            return claim()

        def test_by_fixture(holder): ...

        class TestMany:
            @pytest.fixture
            def other(self):
                return make(max_lock=1)

            def test_by_name(self):
                claim()

            def test_by_fixture_of_the_class(self, other): ...

            def test_without(self): ...
    """) == [
        ("limit", "TestMany::test_by_fixture_of_the_class"),
        ("limit", "TestMany::test_by_name"),
        ("limit", "test_by_fixture"),
    ]


def test_a_helper_of_other_files_counts_itself() -> None:
    source = "def claim(lease=1): ..."
    assert found(source, "support/helps.py") == [("limit", "claim")]


def test_nightly_tests_and_cases_may_take_real_time() -> None:
    assert (
        found("""
        @pytest.mark.nightly
        def test_one():
            make(lease=1)

        @pytest.mark.simulate
        class TestMany:
            def test_two(self):
                make(lease=1)

        @pytest.mark.parametrize("case", [pytest.param(dict(lease=1), marks=pytest.mark.nightly)])
        def test_some_cases(case): ...
    """)
        == []
    )
    assert (
        found("""
        pytestmark = [pytest.mark.nightly]

        def test_three():
            make(lease=1)
    """)
        == []
    )


def test_a_test_of_which_some_cases_are_nightly_is_one_of_the_gate() -> None:
    assert found("""
        @pytest.mark.parametrize("case", [1, pytest.param(2, marks=pytest.mark.nightly)])
        def test_it(case):
            make(lease=1)
    """) == [("limit", "test_it")]


def test_where_time_is_simulated_only_sleeps_are_found() -> None:
    assert found(
        """
        def test_it():
            make(lease=1)
            time.sleep(1)
        """,
        "contract/test_it.py",
    ) == [("sleep", "test_it")]


LIST = """
# Why there is a list.
at most 2

[a reason]
limit a.py::test_one
[another reason]
sleep a.py::test_two
"""


def test_what_is_on_the_list_is_no_complaint() -> None:
    exceptions = read(LIST)
    listed = [("limit", "a.py::test_one"), ("sleep", "a.py::test_two")]
    assert exceptions.entries == listed
    assert list(exceptions.complaints(listed, ("limit", "sleep"))) == []
    assert exceptions.wrong_length() is None


def test_what_is_not_on_the_list_or_no_longer_needed_is_told() -> None:
    told = list(read(LIST).complaints([("limit", "a.py::test_new")], ("limit",)))
    assert told == [
        ("limit", "a.py::test_new", "is not on the list of exceptions"),
        ("limit", "a.py::test_one", "is no longer needed on the list of exceptions: take it off"),
    ]


@pytest.mark.parametrize(("most", "what"), [(1, "may have 1 at most"), (3, "write `at most 2`")])
def test_the_list_has_as_many_entries_as_it_says(most: int, what: str) -> None:
    assert what in str(Exceptions(most, read(LIST).entries).wrong_length())


@pytest.mark.parametrize(
    "text",
    [
        "limit a.py::test_one",
        "at most 1\nlimit a.py::test_one",
        "at most 1\n[a reason]\nlimit a.py",
        "at most 2\n[a reason]\nlimit a.py::b\nlimit a.py::b",
    ],
    ids=["no length", "no reason", "no test", "twice"],
)
def test_a_list_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"list|entry"):
        read(text)


def reported(times: CpuTimes, nodeid: str, seconds: float) -> None:
    times.pytest_runtest_logreport(
        pytest.TestReport(
            nodeid, ("", 0, ""), {}, "passed", None, "call", user_properties=[(CPU, seconds)]
        )
    )


@pytest.mark.parametrize(
    ("seconds", "listed", "complaint"),
    [
        (19.9, False, None),
        (20.1, False, "is not on the list"),
        (20.1, True, None),
        (4.0, True, None),
        (2.0, True, "take it off the list"),
        (None, True, None),
    ],
)
def test_the_cpu_time_of_a_test_is_that_of_its_worst_case(
    seconds: float | None, listed: bool, complaint: str | None
) -> None:
    times = CpuTimes(20.0, ["unit/test_a.py::test_it"] if listed else [])
    if seconds is not None:
        reported(times, "tests/unit/test_a.py::test_it[1]", seconds)
        reported(times, "tests/unit/test_a.py::test_it[2]", 0.1)
    told = times.complaints()
    assert len(told) == (complaint is not None)
    assert complaint is None or complaint in told[0]


def test_without_a_limit_no_cpu_time_fails() -> None:
    times = CpuTimes(None, [])
    reported(times, "tests/unit/test_a.py::test_it", 1000.0)
    assert times.complaints() == []
