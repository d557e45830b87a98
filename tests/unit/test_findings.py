"""The findings on rows at a time: what ``check``, the overview and the metrics tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from apscheduler_tasklock.status import (
    Finding,
    JobState,
    Misses,
    Pause,
    ReplicaState,
    ReplicaStatus,
    Silence,
    TaskStatus,
)
from tests.support.rows import NOW, READ, job_status, replica_status, seconds, task_status
from tests.support.waist import (
    SEVERITIES,
    WatchedRows,
    findings_of,
    severity_of,
)

OK, WARNING, CRITICAL, UNKNOWN = range(4)
NAMES = list(SEVERITIES)


def found(*tasks: TaskStatus, **rows: Any) -> list[Finding]:
    return findings_of(WatchedRows(NOW, tasks, **rows))


def told(findings: Sequence[Finding]) -> list[tuple[str, str, str]]:
    """Return what findings are about, their levels and their words."""
    return [(each.what, each.level, each.says) for each in findings]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("ok", None),
        ("new", None),
        ("running", None),
        ("barely late", None),
        ("late", ("late", "warning", "by 50 s", seconds(-50))),
        ("failing", ("failing", "warning", "3 times, the last with ValueError", seconds(0))),
        (
            "failing, running",
            ("failing", "warning", "3 times, the last with ValueError", seconds(0)),
        ),
        (
            "failing, barely late",
            ("failing", "warning", "3 times, the last with ValueError", seconds(0)),
        ),
        ("died", ("failing", "warning", "2 times, the last died with its holder", seconds(0))),
        ("overran", ("failing", "warning", "has overrun its maximum lock", seconds(0))),
        ("overdue", ("overdue", "critical", "by 95 s", seconds(-95))),
        ("dead", ("dead", "critical", "on one", seconds(-58))),
        ("just dead", None),
        ("too long", ("too long", "critical", "for 60 s on one", seconds(-60))),
        ("overruns", ("too long", "critical", "for 60 s on one", seconds(-60))),
        ("cut", ("cut", "warning", "58 s ago", seconds(-58))),
        ("just cut", None),
        ("handed over", ("cut", "warning", "58 s ago", seconds(-58))),
        ("just handed over", None),
        ("cut, running", None),
        ("cut, paused", None),
        ("missed", ("missed", "warning", "at 2026-01-31T11:59:50Z", seconds(-10))),
        ("unreadable", ("unreadable", "warning", "schedule", None)),
        ("overdue, paused", None),
        ("failing, paused", None),
        ("failing, running, paused", None),
        ("too long, paused", ("too long", "critical", "for 60 s on one", seconds(-60))),
    ],
)
def test_a_task_that_somebody_has_to_look_at_is_found(row: str, expected: Any) -> None:
    findings = found(task_status("sync/1", **READ[row]))
    if expected is None:
        assert findings == []
        return
    what, level, says, since = expected
    assert told(findings) == [(what, level, says)]
    [finding] = findings
    assert finding.since == (None if since is None else NOW + since)
    assert (finding.task, finding.link) == ("sync/1", "task?name=sync%2F1")
    assert finding.remedy


# What is later than the limits by a moment is told, and what is just within them is not.
@pytest.mark.parametrize(
    ("columns", "status"),
    [
        ({**READ["dead"], "locked_until": seconds(-9.9)}, OK),
        ({**READ["dead"], "locked_until": seconds(-10)}, CRITICAL),
        ({**READ["late"], "late_by": 30.0}, OK),
        ({**READ["late"], "late_by": 30.1}, WARNING),
        ({**READ["cut"], "cut_for": 55.0}, OK),  # half of the grace time
        ({**READ["cut"], "cut_for": 55.1}, WARNING),
        ({**READ["the last, cut"], "cut_for": 30.0}, OK),  # half of the shortest
        ({**READ["the last, cut"], "cut_for": 30.1}, WARNING),
    ],
)
def test_the_limits_are_kept_to_the_moment(columns: Mapping[str, Any], status: int) -> None:
    assert severity_of(found(task_status("sync", **columns))) == status


# A failure that failover or a retry heals is a note, until it should have been healed.
@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({**READ["dead"], "failover": True, "locked_until": seconds(-0.1)}, "healing"),
        ({**READ["dead"], "failover": True, "locked_until": seconds(-69.9)}, "healing"),
        ({**READ["dead"], "failover": True, "locked_until": seconds(-70)}, "dead"),
        ({**READ["dead"], "locked_until": seconds(-9.9)}, None),  # nobody heals it
        (READ["retrying"], "healing"),
        ({**READ["died, running"], "kind": "takeover", "failures": 1}, "healing"),
        ({**READ["died, running"], "kind": "takeover"}, "failing"),  # the second in a row
        ({**READ["died, running"], "failures": 1}, "failing"),  # the next run time
        (
            {
                **READ["died, running"],
                "kind": "takeover",
                "failures": 1,
                "failed_at": seconds(-70),
            },
            "failing",
        ),
        ({**READ["died"], "kind": "takeover", "failures": 1}, "failing"),  # it failed, too
    ],
)
def test_a_failure_that_is_being_healed_is_a_note(
    columns: Mapping[str, Any], what: str | None
) -> None:
    findings = found(task_status("sync", **columns))
    assert [each.what for each in findings] == ([what] if what else [])
    if what == "healing":
        assert severity_of(findings) == OK


def test_a_run_whose_lease_has_ended_may_have_ended_or_go_on() -> None:
    """In an outage its replica can neither renew the lease nor report the end."""
    columns = {**READ["dead"], "failover": True, "locked_until": seconds(-0.1)}
    says = "the lease of its run on one has ended, and failover runs it again unless that run is "
    expected = [("healing", "note", f"{says}reported to be over")]
    assert told(found(task_status("sync", **columns))) == expected


def test_replicas_that_stop_and_several_versions_are_notes() -> None:
    has = {"tasks": ("sync",)}
    stops = replica_status("web-1", stopping_since=seconds(-5), version="1.1", **has)
    stopped = replica_status("web-0", state=ReplicaState.STOPPED, version="0.9", **has)
    findings = found(replicas=[stops, replica_status("web-2", **has), stopped])
    assert told(findings) == [
        (
            "stopping",
            "note",
            "it has been stopping since 2026-01-31T11:59:55Z, and waits for its runs",
        ),
        (
            "versions",
            "note",
            "live replicas with common tasks have several versions: 1 with 1.0, 1 with 1.1",
        ),
    ]


@pytest.mark.parametrize(
    ("seconds_late", "says"),
    [(3599.0, "by 3599 s"), (3600.0, "by 1 h"), (100_000.0, "by 1 d 3 h")],
)
def test_from_an_hour_on_durations_are_told_in_hours(seconds_late: float, says: str) -> None:
    overdue = {**READ["overdue"], "late_by": seconds_late}
    assert told(found(task_status("sync", **overdue))) == [("overdue", "critical", says)]


def misses(in_a_row: int, of_ten: int, reason: str | None = None) -> Misses:
    return Misses("sync", in_a_row, of_ten, NOW - 3 * EVERY, NOW - EVERY, reason)


EVERY = timedelta(minutes=5)


@pytest.mark.parametrize(
    ("missed", "says"),
    [
        (misses(2, 4), None),
        (misses(3, 3), "3 run times in a row, the last at 2026-01-31T11:55:00Z"),
        (misses(60, 10, "x" * 999), "60 run times in a row, the last at 2026-01-31T11:55:00Z: xxx"),
        (misses(0, 4), None),
        (misses(0, 5, "why"), "5 of the last 10 run times, the last at 2026-01-31T11:55:00Z: why"),
    ],
)
def test_regular_misses_are_a_warning(missed: Misses, says: str | None) -> None:
    findings = found(task_status("sync"), misses=[missed])
    if says is None:
        assert findings == []
        return
    [finding] = findings
    assert (finding.what, finding.level, finding.task) == ("missed", "warning", "sync")
    assert finding.says.startswith(says)
    assert (len(finding.says) < 400, finding.since) == (True, NOW - 3 * EVERY)
    assert finding.link == "task?name=sync"


@pytest.mark.parametrize(
    ("columns", "kinds"),
    [
        (READ["overdue"], ["overdue"]),
        (READ["failing"], ["failing"]),
        (READ["retrying"], ["missed"]),  # what is being healed is a note only
    ],
)
def test_a_task_with_regular_misses_has_one_finding(
    columns: Mapping[str, Any], kinds: list[str]
) -> None:
    findings = found(task_status("sync", **columns), misses=[misses(3, 3)])
    assert [each.what for each in findings] == kinds


def test_without_a_right_on_the_history_it_is_said_that_misses_are_not_known() -> None:
    [finding] = found(misses=None)
    assert (finding.what, finding.level) == ("not read", "note")


def test_two_releases_of_live_replicas_are_a_note() -> None:
    replicas = [
        replica_status("web-1", release="2.0", tasks=("sync",)),
        replica_status("web-2", release="1.9", tasks=("sync", "old")),
        replica_status("web-3", release="2.0", tasks=("new", "sync")),
        replica_status("web-4", tasks=("sync",)),  # nobody knows its release
        replica_status("web-0", release="1.8", tasks=("sync",), state=ReplicaState.STOPPED),
        replica_status("batch-1", release="7", tasks=("batch/sum",)),  # of another application
        replica_status("none", release="8"),  # has none of the tasks that were asked for
    ]
    says = "live replicas with common tasks have several releases: 1 with 1.9, 2 with 2.0"
    assert told(found(replicas=replicas)) == [("releases", "note", says)]
    assert found(replicas=[replicas[0], *replicas[2:]]) == []
    long = [replica_status(name, release="a" * 50 + name, tasks=("sync",)) for name in "xy"]
    cut_there = "a" * 50 + "... (51 characters)"
    says = "live replicas with common tasks have several releases: "
    says += f"1 with {cut_there}, 1 with {cut_there}"
    assert told(found(replicas=long)) == [("releases", "note", says)]


def test_a_task_that_is_gone_is_no_finding() -> None:
    """A task that no live replica has, and that was removed, has no due time."""
    assert found(task_status("sync", **READ["dead"], gone=True)) == []


def test_the_worst_comes_first_and_each_task_once() -> None:
    rows = ("failing", "cut", "missed", "late", "unreadable", "too long", "dead", "overdue")
    tasks = [task_status(row, **READ[row]) for row in rows]
    findings = found(*tasks, unmatched=["tusk"])
    assert [each.what for each in findings] == [
        *("overdue", "dead", "too long"),
        "no match",
        *("unreadable", "late", "missed", "cut", "failing"),
    ]


@pytest.mark.parametrize(
    ("row", "status"), [("ok", UNKNOWN), ("late", UNKNOWN), ("overdue", CRITICAL)]
)
def test_what_is_unknown_is_no_relief_from_what_is_known(row: str, status: int) -> None:
    findings = found(task_status("sync", **READ[row]), unmatched=["tusk"])
    assert severity_of(findings) == status
    assert ("no match", "unknown", "no task matches 'tusk'") in told(findings)


def test_of_a_kind_the_oldest_comes_first() -> None:
    tasks = [
        task_status(name, **READ["overdue"] | {"due_at": seconds(due)})
        for name, due in (("c", -100), ("b", -200), ("a", -100))
    ]
    assert [each.task for each in found(*tasks)] == ["b", "a", "c"]


def test_what_could_not_be_read_is_unknown_and_tasks_beyond_the_limit_are_a_warning() -> None:
    assert told(found(unread=["the stored jobs cannot be read"], more=3)) == [
        ("not read", "unknown", "the stored jobs cannot be read"),
        ("not listed", "warning", "3 more tasks are not well or were not looked at"),
    ]


def test_an_empty_database_may_be_the_wrong_one() -> None:
    says = "no task was ever registered here: is this the right database?"
    assert told(found(is_empty=True)) == [("empty", "unknown", says)]


DUE = {"state": JobState.OVERDUE, "next_run_time": seconds(-300)}


def test_an_overdue_stored_job_is_told_with_its_id_unless_that_ends_its_tasks_name() -> None:
    jobs = {"sent": job_status("sent", **DUE), "imports": job_status("one", **DUE)}
    findings = found(jobs=jobs, replicas=[replica_status("web-1")], having=None)
    assert told(findings) == [
        ("overdue", "critical", "by 300 s, the stored job 'one' that no replica claims"),
        ("overdue", "critical", "by 300 s, a stored job that no replica claims"),
    ]
    assert [(each.task, each.link) for each in findings] == [
        ("imports", "job?id=one"),
        ("sent", "job?id=sent"),
    ]


WEB, JOBS = replica_status("web-1"), replica_status("jobs-1")


@pytest.mark.parametrize(
    ("job", "replicas", "having", "why"),
    [
        ({}, None, None, ""),
        ({}, [], [], "none is alive"),
        ({}, [replace(WEB, state=ReplicaState.DIED)], [], "none is alive"),
        ({"unreadable": ("trigger",)}, [], [], "its row has in trigger what no replica writes"),
        ({}, [replace(WEB, stopping_since=NOW)], ["web-1"], "each live one stops"),
        (
            {},
            [WEB, replace(JOBS, rejected=("history: x", "claims: role app may not write"))],
            ["web-1"],
            "on jobs-1 the database rejects the claims: role app may not write",
        ),
        (
            {},
            [replace(WEB, rejected=("history: x",))],
            [],
            "no live one lists it: none has both its executor and its job store",
        ),
        (
            {},
            [WEB, JOBS],
            ["a", "b", "c", "d"],
            "a, b, c and others list it, but do not claim it, because something that it needs is "
            "missing there, such as its function, or because no worker is free",
        ),
        ({"task": None}, [WEB], [], ""),
        ({"trigger": {"type": "date"}}, [WEB], [], ""),  # tasks of such jobs are not listed
        ({}, [WEB], None, ""),
    ],
)
def test_an_overdue_stored_job_has_its_reason_if_the_rows_tell_it(
    job: Mapping[str, Any],
    replicas: Sequence[ReplicaStatus] | None,
    having: Sequence[str] | None,
    why: str,
) -> None:
    jobs = {"sent": job_status("sent", **{**DUE, "task": "sent", **job})}
    listed = None if having is None else {"sent": having}
    says = "by 300 s, a stored job that no replica claims"
    findings = told(found(jobs=jobs, replicas=replicas, having=listed))
    assert ("overdue", "critical", f"{says}{why and ': '}{why}") in findings


def test_a_task_with_a_worse_finding_than_its_job_is_named_once() -> None:
    jobs = {"both": job_status("one", **DUE), "worse": job_status("two", **DUE)}
    tasks = [task_status("both", **READ["overdue"]), task_status("worse", **READ["failing"])]
    findings = found(*tasks, jobs=jobs)
    assert [(each.task, each.what) for each in findings] == [
        ("worse", "overdue"),
        ("both", "overdue"),
    ]
    assert findings[1].says == "by 95 s"  # and not of the stored job


@pytest.mark.parametrize(
    ("since", "until", "namespace", "level", "says"),
    [
        (-86_400, None, "", "note", "all tasks paused by ann since {} until resumed (x)"),
        (-60, 60, "", "note", "all tasks paused by ann since {} until {} (x)"),
        (
            -86_401,
            None,
            "a:",
            "warning",
            "all tasks of 'a:' paused by ann since {} until resumed (x)",
        ),
    ],
)
def test_a_pause_of_all_tasks_is_told_and_may_be_forgotten_after_a_day(
    since: float, until: float | None, namespace: str, level: str, says: str
) -> None:
    end = None if until is None else NOW + seconds(until)
    pause = Pause("ann", NOW + seconds(since), end, "x", namespace)
    times = [f"{each:%Y-%m-%dT%H:%M:%SZ}" for each in (pause.since, end) if each]
    what = "paused" if level == "note" else "paused for long"
    assert told(found(pauses_of_all=[pause])) == [(what, level, says.format(*times))]


def test_that_all_tasks_are_paused_one_by_one_is_told() -> None:
    tasks = [task_status(name, **READ["paused"]) for name in ("a", "b")]
    says = "all tasks paused by me@here since 2026-01-31T12:00:00Z until resumed (closed)"
    assert told(found(all_paused=tasks)) == [("paused", "note", says)]


@pytest.mark.parametrize(
    ("by", "says"),
    [
        ("ann", "all tasks paused by ann since 2026-01-31T12:00:00Z until resumed"),
        (
            "",
            "all tasks paused until resumed, by whom is not known, changed last at "
            "2026-01-31T12:00:00Z",
        ),
    ],
)
def test_that_the_stored_jobs_of_all_tasks_are_paused_is_told(by: str, says: str) -> None:
    task = task_status("a", pauses=(Pause(by, NOW, None, None, job="a"),))
    assert told(found(all_paused=[task])) == [("paused", "note", says)]


@pytest.mark.parametrize(
    ("replica", "says"),
    [
        ({"leaderless_for": 30.0}, None),
        ({"leaderless_for": 30.1}, "nobody leads 'shop:' for 30 s"),
        ({"leaderless_for": None, "leads": True}, None),
        ({"leaderless_for": 99.0, "state": ReplicaState.STOPPED}, None),
        ({"leaderless_for": 99.0, "tasks": ()}, None),
        ({"leaderless_for": 99.0, "leader_namespace": None}, None),
    ],
)
def test_replicas_that_follow_nobody_are_told(replica: Mapping[str, Any], says: str | None) -> None:
    columns = {"leader_namespace": "shop:", "tasks": ("shop:sync",), **replica}
    findings = found(task_status("shop:sync"), replicas=[replica_status("web-1", **columns)])
    assert told(findings) == ([("no leader", "warning", says)] if says else [])


@pytest.mark.parametrize(("leaderless_for", "status"), [(60.0, OK), (60.1, WARNING)])
def test_a_large_fleet_may_be_without_a_leader_for_longer(
    leaderless_for: float, status: int
) -> None:
    columns = {"leader_namespace": "", "tasks": ("sync",), "leaderless_for": leaderless_for}
    fleet: list[ReplicaStatus] = [
        replica_status(f"web-{number}", **columns) for number in range(400)
    ]
    assert severity_of(found(replicas=fleet)) == status


@pytest.mark.parametrize(
    ("seen", "sign", "is_stopped", "after", "level"),
    [
        (-89, None, False, 300.0, None),
        (-90, None, False, 300.0, "warning"),
        (-299, None, False, 300.0, "warning"),
        (-300, None, False, 300.0, "critical"),
        (-300, None, False, 600.0, "warning"),
        (-9999, None, False, None, "warning"),  # never
        (-9999, -89, False, 300.0, None),  # it works, and what it reports of itself is rejected
        (-9999, -95, False, 300.0, "warning"),
        (-9999, None, True, 300.0, "note"),
        (-1, None, True, 300.0, "note"),
    ],
)
def test_a_namespace_without_a_live_replica(
    seen: float, sign: float | None, *, is_stopped: bool, after: float | None, level: str | None
) -> None:
    sign_at = None if sign is None else NOW + seconds(sign)
    silence = Silence("shop:", "web-1", NOW + seconds(seen), is_stopped, sign_at)
    findings = found(silences=[silence], no_replica_after=after)
    assert [(each.what, each.level) for each in findings] == (
        [("no replica", level)] if level else []
    )
    if level in ("warning", "critical"):
        [finding] = findings
        last = seen if sign is None else sign
        assert finding.since == NOW + seconds(last)
        lasting = "2 h 46 min" if last < -3600 else f"{-last} s"
        assert finding.says == f"no replica of 'shop:' is alive for {lasting}; last seen: web-1"


@pytest.mark.parametrize(("expected", "level"), [(0, None), (2, None), (3, "warning")])
def test_fewer_replicas_than_expected(expected: int, level: str | None) -> None:
    replicas = [replica_status(name, tasks=("sync",)) for name in ("web-1", "web-2")]
    replicas += [replica_status("other"), replica_status("x", state=ReplicaState.STOPPED)]
    findings = found(replicas=replicas, expect_replicas=expected)
    assert [(each.level, each.says) for each in findings] == (
        [(level, "2 of 3 expected replicas are alive")] if level else []
    )


def test_replicas_that_died_or_fell_silent_in_the_last_day_are_notes() -> None:
    replicas = [
        replica_status("alive"),
        replica_status("stopped", state=ReplicaState.STOPPED),
        replica_status("died", state=ReplicaState.DIED, seen_at=seconds(-60)),
        replica_status("silent", state=ReplicaState.SILENT, seen_at=seconds(-60)),
        replica_status("long ago", state=ReplicaState.SILENT, seen_at=seconds(-86_400)),
    ]
    findings = found(replicas=replicas)
    assert [(each.replica, each.what, each.level) for each in findings] == [
        ("died", "died", "note"),
        ("silent", "silent", "note"),
    ]
    assert findings[0].says == "died, last sign of life 1 min ago"


def test_replicas_that_cannot_be_read_are_a_note() -> None:
    [finding] = found(replicas=None)
    assert (finding.what, finding.level) == ("not read", "note")


@pytest.mark.parametrize("row", ["failing", "cut", "missed"])
def test_what_is_acknowledged_is_found_no_more(row: str) -> None:
    assert found(task_status("sync", **READ[row])) != []
    assert found(task_status("sync", **READ[row], acknowledged=True)) == []
