"""The checks: what is told at a moment, compared with the ledger.

A check is a function of what is told and the truth, and yields what is untrue. It rests on the
meaning of what is told: states, times, counts, names. It knows the order of things alone: a row
that has a token knows the run of that token, and what the ledger noted after a release has been
told since then. So no check depends on how fast the machine is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import Any

from tests.night.plan import BATCH, BY_TASK, GRACE, LEASE, NAMESPACE
from tests.night.said import Said, SaidLive
from tests.night.truth import TrueRun, Truth

# The seconds within which a replica has to be seen as gone, and those of two looks.
SILENT_AFTER = 45.0
# Limits the seconds by which two clocks or two notes of one thing may differ in their order.
CLOSE = 1.0

RUNNING = ("running", "too long")


@dataclass(frozen=True)
class Untrue:
    """Something that was told and is not true, or was not told.

    :ivar check: the check that has found it
    :ivar moment: the moment's name
    :ivar said: what was told
    :ivar truth: what the ledger has
    """

    check: str
    moment: str
    said: str
    truth: str

    def __str__(self) -> str:
        where = f"{self.check}, at the moment {self.moment!r}"
        return f"{where}:\n  said:  {self.said}\n  truth: {self.truth}"


Finding = tuple[str, str]
Check = Callable[[Said, Truth], Iterator[Finding]]
CHECKS: dict[str, Check] = {}


LIVE: set[str] = set()


def check(function: Check) -> Check:
    """Add a check under its name."""
    CHECKS[_name_of(function)] = function
    return function


def live_check(function: Check) -> Check:
    """Add a check that rests on one read, so that it holds for what was told live, too."""
    LIVE.add(_name_of(function))
    return check(function)


def _name_of(function: Check) -> str:
    return function.__name__.replace("_", " ")


def untrue_of(said: Said, truth: Truth) -> list[Untrue]:
    """Return all that is untrue at a moment."""
    names = LIVE if isinstance(said, SaidLive) else CHECKS
    return [
        Untrue(name, said.moment.name, *found)
        for name in CHECKS
        if name in names
        for found in CHECKS[name](said, truth)
    ]


# ---- what several checks need --------------------------------------------------------------------


def seconds(time: str | None) -> float | None:
    """Return a time of JSON in seconds."""
    return None if time is None else datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def clock(at: float) -> str:
    """Return a time as people write it."""
    return f"{datetime.fromtimestamp(at):%H:%M:%S}.{int(at % 1 * 10)}"


def told_of(task: dict[str, Any]) -> str:
    """Return what is told of a task, in short."""
    said = f"{task['name']}: {task['state']}, token {task['token']} on {task['holder']}"
    return f"{said}, outcome {task['outcome']}, failures {task['failures']}"


def true_of(run: TrueRun | None) -> str:
    """Return what is true of a run, in short."""
    if run is None:
        return "the ledger has no such run"
    words = f"{run.task} token {run.token} on {run.replica}"
    for name in ("due", "claimed", "begun", "ended", "released", "died", "hung", "lost"):
        at = getattr(run, name)
        words += f", {name} {clock(at)}" if at is not None else ""
    return f"{words}, {run.how or 'no end'}"


def living(said: Said, truth: Truth, namespace: str | None = None) -> list[str]:
    """Return the replicas that surely live, and had the time to report themselves."""
    is_of = {True: NAMESPACE[BATCH], False: ""}
    return [
        name
        for name, replica in truth.replicas.items()
        if replica.lives(said.at)
        and replica.ready < said.at - CLOSE
        and namespace in (None, is_of[name.startswith(BATCH)])
    ]


def run_of(truth: Truth, task: dict[str, Any]) -> TrueRun | None:
    """Return the run that a task's row tells of."""
    return truth.runs.get((task["name"], task["token"]))


# ---- what runs -----------------------------------------------------------------------------------


@live_check
def what_is_said_to_run_runs(said: Said, truth: Truth) -> Iterator[Finding]:
    for task in said.tasks.values():
        if task["started_at"] is None or task["finished_at"] is not None:
            continue
        run = run_of(truth, task)
        told = told_of(task)
        if run is None:
            killed = truth.replicas[task["holder"]].dying
            if said.at - (seconds(task["started_at"]) or 0) > CLOSE and killed == inf:
                yield told, "no job has begun under this token"
        elif run.replica != task["holder"] or (run.released or inf) < said.at - CLOSE:
            yield told, true_of(run)
        elif run.begun is not None and (seconds(task["started_at"]) or 0) > run.begun:
            yield f"{told}, since {task['started_at']}", true_of(run)


@live_check
def what_runs_is_said_to_run(said: Said, truth: Truth) -> Iterator[Finding]:
    """A run that goes on is the row's, or it has lost its lock and is told as stuck."""
    for run in truth.runs.values():
        task = said.tasks.get(run.task)
        if not run.goes_on(said.at) or run.over <= said.until:
            continue
        if task is None:
            yield f"there is no task {run.task}", true_of(run)
        elif task["token"] == run.token and task["finished_at"] is None:
            if task["state"] not in (*RUNNING, "dead", "paused", "unreadable"):
                yield told_of(task), true_of(run)
        elif task["token"] < run.token or (task["token"] == run.token and not run.cut_off):
            yield told_of(task), true_of(run)


@check
def a_hanging_run_is_told(said: Said, truth: Truth) -> Iterator[Finding]:
    """One that outlives its maximum lock is critical, and is named with its replica."""
    for run in truth.runs.values():
        limit = BY_TASK[run.task].lock.get("max_lock", inf)
        if not run.goes_on(said.at) or said.at - (run.begun or 0) < limit + 5:
            continue
        if truth.in_outage(said.at - 5, said.at, 0.0):
            continue
        task = said.tasks[run.task]
        told = [each for each in said.check["findings"] if each["task"] == run.task]
        if task["state"] != "too long" or said.check["exit_status"] != 2:
            yield f"{told_of(task)}; check: {said.check['message']}", true_of(run)
        elif not any(run.replica in each["says"] for each in told):
            yield f"check: {told}", true_of(run)


# ---- the history ---------------------------------------------------------------------------------

_ENDS = {
    "ok": ("ok",),
    "error": ("error",),
    "cancelled": ("cut",),
    "died": ("", "ok", "error", "cut"),
    "overran": ("", "ok", "error"),
    "overtaken": ("", "ok", "error", "cut"),
    "freed": ("", "ok", "error", "cut"),
}


def _told_of_entry(entry: dict[str, Any]) -> str:
    told = f"{entry['task']} token {entry['token']} on {entry['replica']}: {entry['outcome']}"
    times = f"{entry['started_at']} to {entry['ended_at']}"
    return f"{told}, {times}, run time {entry['scheduled_at']}, {entry['error_type']}"


@live_check
def each_entry_is_of_a_run_that_was_begun(said: Said, truth: Truth) -> Iterator[Finding]:
    for entry in said.entries:
        run = truth.runs.get((entry["task"], entry["token"]))
        told = _told_of_entry(entry)
        if run is not None:
            is_before = run.begun is None or (seconds(entry["started_at"]) or 0) <= run.begun
            if entry["replica"] != run.replica or not is_before:
                yield told, true_of(run)
        elif truth.replicas[entry["replica"]].dying == inf and entry["outcome"] != "cancelled":
            # Else its replica was killed, or stopped, between the claim and the job's begin.
            yield told, true_of(run)


@live_check
def each_entry_has_the_outcome_of_its_run(said: Said, truth: Truth) -> Iterator[Finding]:
    for entry, run in _entries_and_runs(said, truth):
        is_true = run.how in _ENDS[entry["outcome"]]
        if entry["outcome"] == "died":
            # The replica was killed, or was away for longer than its lease.
            ended = seconds(entry["ended_at"]) or 0
            is_true &= run.died is not None or run.cut_off or truth.in_outage(ended - 15, ended)
        if entry["outcome"] == "error":
            is_true &= entry["error_type"].endswith("UpstreamError")
        if not is_true:
            yield _told_of_entry(entry), true_of(run)


@live_check
def each_entry_has_the_times_of_its_run(said: Said, truth: Truth) -> Iterator[Finding]:
    for entry, run in _entries_and_runs(said, truth):
        is_true = True
        if entry["outcome"] in ("ok", "error") and run.ended is not None and run.begun is not None:
            is_true &= (seconds(entry["ended_at"]) or 0) >= run.ended - CLOSE
            is_true &= entry["took"] >= run.ended - run.begun - CLOSE
        if run.due is not None and entry["kind"] in ("schedule", "takeover", "retry"):
            is_true &= abs((seconds(entry["scheduled_at"]) or 0) - run.due) < CLOSE
        if not is_true:
            yield _told_of_entry(entry), true_of(run)


def _entries_and_runs(said: Said, truth: Truth) -> Iterator[tuple[dict[str, Any], TrueRun]]:
    for entry in said.entries:
        run = truth.runs.get((entry["task"], entry["token"]))
        if run is not None:
            yield entry, run


@live_check
def no_ended_run_is_missing(said: Said, truth: Truth) -> Iterator[Finding]:
    """As far back as the ring reaches."""
    tokens = {(each["task"], each["token"]) for each in said.entries}
    oldest: dict[str, int] = {}
    for each in said.entries:
        if each["outcome"] == "ok":
            oldest[each["task"]] = min(oldest.get(each["task"], each["token"]), each["token"])
    counts = Counter(each["task"] for each in said.entries if each["outcome"] == "ok")
    for run in truth.runs.values():
        if run.released is None or run.released > said.at or run.lost is not None:
            continue
        is_kept = counts[run.task] < 100 or run.token > oldest.get(run.task, 0)
        if is_kept and (run.task, run.token) not in tokens:
            yield f"the history of {run.task} has no token {run.token}", true_of(run)


# ---- failures ------------------------------------------------------------------------------------


@live_check
def failures_are_counted_as_they_were(said: Said, truth: Truth) -> Iterator[Finding]:
    for task in said.tasks.values():
        run = run_of(truth, task)
        if run is None or task["state"] in ("dead", "unreadable", "retrying", *RUNNING):
            continue
        if task["finished_at"] is None or run.lost is not None or run.hung is not None:
            continue
        count = truth.failures(task["name"], task["token"])
        overran = any(each.hung for each in truth.known_until(task["name"], task["token"]))
        if task["failures"] != count and not overran:
            runs = [each.how or "died" for each in truth.known_until(task["name"], task["token"])]
            yield told_of(task), f"{count} failures: the last runs are {runs[-5:]}"


@check
def check_names_each_failing_task_and_no_other(said: Said, truth: Truth) -> Iterator[Finding]:
    told = {e["task"] for e in said.check["findings"] if e["what"] == "failing"}
    acked = {e.task for e in truth.events if e.kind == "acked" and e.at < said.at}
    for task in said.tasks.values():
        name = task["name"]
        run = run_of(truth, task)
        if run is None or task["finished_at"] is None or task["state"] in ("paused", "too long"):
            continue
        failed = truth.failures(name, task["token"]) > 0
        is_shown = name in told
        others = {e["task"] for e in said.check["findings"] if e["task"] and e["what"] != "failing"}
        if is_shown and not failed and run.how == "ok" and run.released:
            yield f"check: {name} is failing", true_of(run)
        if failed and not is_shown and name not in acked | others and not task["gone"]:
            yield f"check: {said.check['message']}", f"{name} fails: {true_of(run)}"


@check
def the_numbers_of_check_are_those_of_its_findings(said: Said, truth: Truth) -> Iterator[Finding]:
    numbers, message = said.check["metrics"], said.check["message"]
    if len(said.tasks) != numbers["tasks"]:
        yield f"check: {numbers['tasks']} tasks", f"{len(said.tasks)} rows"
    for what in ("overdue", "dead", "too long", "late", "missed", "cut", "failing"):
        count = sum(each["what"] == what for each in said.check["findings"])
        if numbers[what.replace(" ", "_")] != count:
            yield f"check: {what}={numbers[what.replace(' ', '_')]}", f"{count} findings"
        found = re.search(rf"(\d+) {what} \(", message)
        if (int(found[1]) if found else 0) != count:
            yield f"check: {message}", f"{count} {what}"
    states = Counter(task["state"] for task in said.tasks.values())
    for what in ("running", "paused"):
        if numbers[what] != states[what]:
            yield f"check: {what}={numbers[what]}", f"{states[what]} tasks have that state"
    del truth


# ---- one verdict ---------------------------------------------------------------------------------


@check
def all_tell_the_same_findings(said: Said, truth: Truth) -> Iterator[Finding]:
    def key(finding: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(finding[name] for name in ("what", "level", "task", "replica", "says"))

    told = sorted(map(str, map(key, said.check["findings"])))
    overview = said.twin("/")["overview"]
    if sorted(map(str, map(key, overview["findings"]))) != told:
        yield f"overview: {overview['findings']}", f"check: {told}"
    counts = Counter((each["what"], each["level"]) for each in said.check["findings"])
    gauges: Counter[tuple[str, str]] = Counter()
    for each in said.metrics.get("tasklock_finding", ()):
        gauges[each["tasklock_finding_kind"], each["tasklock_finding_level"]] += each["value"]
    if counts != gauges:
        yield f"metrics: {dict(gauges)}", f"check: {dict(counts)}"
    del truth


@check
def all_is_well_is_said_only_if_it_is(said: Said, truth: Truth) -> Iterator[Finding]:
    """With what the ledger is sure of: nobody lives, a run hangs, or a task has failed."""
    line = said.check_line
    is_ok = said.check["exit_status"] == 0
    if f"TASKLOCK {said.check['status']}" not in line:
        yield line, said.check["status"]
    if "All is well" in said.html("/") and not is_ok:
        yield "overview: all is well", f"check: {said.check['message']}"
    if not truth.replicas and is_ok:
        yield f"check: {said.check['message']}", "nothing has ever run here"
    gone = [each.over for each in truth.replicas.values() if each.ready < said.at]
    # All are gone for longer than 90 s, and not all of them in good order.
    died = [each.killed for each in truth.replicas.values() if each.killed < said.at]
    if gone and max(gone) < said.at - 95 and died and is_ok:
        yield f"check: {said.check['message']}", f"the last replica ended at {clock(max(gone))}"


# ---- pauses --------------------------------------------------------------------------------------


@check
def what_is_paused_is_told_and_nothing_else(said: Said, truth: Truth) -> Iterator[Finding]:
    for task in said.tasks.values():
        name = task["name"]
        told = f"{name}: paused {task['paused']}, pauses {task['pauses']}"
        pauses = truth.pauses_of(name)
        hold = [each for each in pauses if each.holds(said.at)]
        if hold and not task["paused"]:
            yield told, str(hold)
        if task["paused"] and not any(each.may_hold(said.at) for each in pauses):
            yield told, "no pause is in force"
        if len(hold) == 1 and task["paused"]:
            words = [(each["by"], each["reason"] or "") for each in task["pauses"]]
            if (hold[0].by, hold[0].reason) not in words:
                yield told, str(hold[0])
            notes = f"{said.show(name)}"
            if hold[0].by not in notes or hold[0].reason not in notes:
                yield f"show: {notes}", str(hold[0])


@live_check
def that_all_is_paused_is_told(said: Said, truth: Truth) -> Iterator[Finding]:
    pauses = [each for each in truth.pauses if each.task == "*"]
    told = said.check["message"]
    is_told = "all tasks paused" in told or "all tasks are paused" in told
    for each in pauses:
        if each.holds(said.at) and not (is_told and each.by in told and each.reason in told):
            yield f"check: {told}", str(each)
    is_all = any(each.may_hold(said.at) for each in pauses)
    if is_told and not is_all and not all(task["paused"] for task in said.tasks.values()):
        yield f"check: {told}", "not all is paused"


# ---- replicas ------------------------------------------------------------------------------------


@live_check
def who_lives_is_alive_and_who_is_dead_is_not(said: Said, truth: Truth) -> Iterator[Finding]:
    for name, replica in truth.replicas.items():
        state = said.replicas[name]["state"] if name in said.replicas else None
        # A sign of life that came to nothing in the outage follows 30 s later.
        is_certain = replica.ready < said.at - CLOSE and not truth.in_outage(said.at - 35, said.at)
        is_wrong = replica.lives(said.at) and is_certain and state != "alive"
        if replica.killed < said.at - SILENT_AFTER - CLOSE:
            is_wrong |= state not in ("died", "silent", None)
        if is_wrong or (state == "died" and replica.dying > said.at):
            yield f"{name}: {state}", str(replica)


@live_check
def who_is_stopped_has_stopped_in_good_order(said: Said, truth: Truth) -> Iterator[Finding]:
    for name, told in said.replicas.items():
        replica = truth.replicas[name]
        has_stopped = replica.stopped < said.at and replica.killed == inf
        is_not = replica.killed < said.at or replica.stopping > said.at
        is_told = told["state"] == "stopped"
        if (has_stopped and not is_told) or (is_told and is_not):
            yield f"{name}: {told['state']}", str(replica)


@live_check
def who_stops_is_told(said: Said, truth: Truth) -> Iterator[Finding]:
    for name, replica in truth.replicas.items():
        told = said.replicas.get(name)
        if told is None:
            continue
        waits = any(run.replica == name and run.goes_on(said.at) for run in truth.runs.values())
        is_stopping = replica.stopping < said.at - CLOSE and replica.over > said.at
        if is_stopping and waits and not told["stopping_since"]:
            yield f"{name}: {told['state']}, stopping_since {told['stopping_since']}", str(replica)
        if told["stopping_since"] and replica.terminated > said.at:
            yield f"{name}: stopping_since {told['stopping_since']}", str(replica)


@live_check
def what_a_replica_runs_it_runs(said: Said, truth: Truth) -> Iterator[Finding]:
    for name, told in said.replicas.items():
        if told["state"] != "alive" or truth.replicas[name].dying < said.at:
            continue
        for running in told["running"]:
            run = truth.runs.get((running["task"], running["token"]))
            # It is as old as the replica's last sign of life.
            seen = seconds(told["seen_at"]) or 0
            if run is None or run.replica != name or (run.released or inf) < seen - CLOSE:
                yield f"{name} runs {running}, seen {told['seen_at']}", true_of(run)


@check
def as_many_replicas_live_as_are_said_to(said: Said, truth: Truth) -> Iterator[Finding]:
    alive = said.twin("/")["overview"]["alive"]
    counted = sum(each["state"] == "alive" for each in said.replicas.values())
    if alive != counted:
        yield f"overview: {alive} alive", f"replicas: {counted}"
    if alive < len(living(said, truth)) and not truth.in_outage(said.at - 35, said.at):
        yield f"overview: {alive} alive", str(living(said, truth))


@live_check
def who_leads_leads(said: Said, truth: Truth) -> Iterator[Finding]:
    leaders = [name for name, each in said.replicas.items() if each["leads"]]
    for name in leaders:
        replica = truth.replicas[name]
        # A killed leader's lease may go on for a while.
        if not any(at < said.at + CLOSE for at in replica.led) or replica.over < said.at - 20:
            yield f"{name} leads", str(replica)
    if len(leaders) > 1:
        yield f"{leaders} lead", "there is one namespace in leader mode"


# ---- due times -----------------------------------------------------------------------------------


@live_check
def what_is_due_next_is_a_run_time(said: Said, truth: Truth) -> Iterator[Finding]:
    for task in said.tasks.values():
        job = BY_TASK[task["name"]]
        due = seconds(task["due_at"])
        if due is None or job.every is None or job.in_store or job.every_anew:
            continue
        times = job.due_times(truth.begin, due + 2 * job.every)
        if not any(abs(each - due) < CLOSE for each in times):
            yield f"{job.task} is due at {clock(due)}", f"every {job.every} s"
        run = run_of(truth, task)
        is_past = run is not None and run.due is not None and run.due > due + CLOSE
        if is_past and task["kind"] != "manual":
            yield f"{job.task} is due at {clock(due)}", true_of(run)


@check
def what_is_late_or_overdue_was_not_run(said: Said, truth: Truth) -> Iterator[Finding]:
    for task in said.tasks.values():
        if task["late_by"] is None:
            continue
        told = f"{task['name']}: {task['state']} by {task['late_by']:.1f} s since {task['due_at']}"
        due = seconds(task["due_at"]) or 0
        if abs(said.at - due - task["late_by"]) > CLOSE:
            yield told, f"it is {clock(said.at)}"
        for run in truth.of_task(task["name"]):
            is_before = run.first_sign < said.at - CLOSE
            if run.due is not None and abs(run.due - due) < CLOSE and is_before:
                yield told, true_of(run)
        if task["state"] == "overdue" and task["late_by"] < GRACE - CLOSE:
            yield told, f"its grace time is {GRACE} s"


@check
def what_nobody_runs_is_overdue(said: Said, truth: Truth) -> Iterator[Finding]:
    """Where no replica has lived for a while, each recurring task that is due is overdue."""
    for application in NAMESPACE:
        space = NAMESPACE[application]
        fleet = [
            replica
            for name, replica in truth.replicas.items()
            if name.startswith(BATCH) == bool(space) and replica.started < said.at
        ]
        if not fleet or max(each.over for each in fleet) > said.at:
            continue
        since = max(each.over for each in fleet)
        newest = max(fleet, key=lambda each: each.started).release
        for task in said.tasks.values():
            job = BY_TASK[task["name"]]
            if job.application != application or job.every is None or job.in_store:
                continue
            if task["paused"] or task["state"] in ("dead", "too long") or task["gone"]:
                continue
            longest = max(job.every, job.every_anew or 0)
            if not job.is_in(newest) or since + longest + GRACE > said.at - 5:
                continue
            if task["state"] != "overdue":
                yield told_of(task), f"nobody has lived since {clock(since)}"


# ---- missed run times ----------------------------------------------------------------------------


@live_check
def what_is_said_to_be_missed_was_not_run(said: Said, truth: Truth) -> Iterator[Finding]:
    fleet = [each for each in truth.replicas.values() if each.started < said.at]
    for miss in said.misses:
        first, last = seconds(miss["scheduled_at"]), seconds(miss["last_scheduled_at"])
        told = f"{miss['task']}: missed {miss['run_times']} from {miss['scheduled_at']} to "
        told += f"{miss['last_scheduled_at']}: {miss['reason']} ({miss['cause']}) told by "
        told += miss["replica"]
        assert first is not None
        assert last is not None
        inside = [
            run
            for run in truth.of_task(miss["task"])
            if run.due is not None
            and first - CLOSE / 2 < run.due < last + CLOSE / 2
            and run.first_sign < said.at
        ]
        # A stretch of one cause may have a run time that is run in its midst.
        if inside and (miss["run_times"] == 1 or len(inside) > 1):
            yield told, "; ".join(map(true_of, inside))
        replica = truth.replicas.get(miss["replica"])
        is_known = replica is not None and replica.started < (seconds(miss["started_at"]) or 0)
        # What no replica could note in time is noted by one that started later.
        if not is_known and (miss["replica"] or not any(last < each.started for each in fleet)):
            yield told, f"that replica: {replica}"


def _was_paused(truth: Truth, task: str, first: float, last: float) -> bool:
    pauses = truth.pauses_of(task)
    return any(p.asked - CLOSE <= first and last <= p.until + CLOSE for p in pauses)


def _was_away(truth: Truth, _task: str, first: float, last: float) -> bool:
    return truth.in_outage(first, last, 12)


def _was_running(truth: Truth, task: str, first: float, _last: float) -> bool:
    runs = truth.of_task(task)
    return any(r.first_sign < first + 3 and first - 3 < (r.released or r.over) for r in runs)


def _was_moved(_truth: Truth, task: str, _first: float, _last: float) -> bool:
    return BY_TASK[task].every_anew is not None


# Whether a miss had its cause. A busy machine may be late at any time.
_CAUSES = {
    "paused": _was_paused,
    "database": _was_away,
    "running": _was_running,
    "moved": _was_moved,
}


@live_check
def the_reason_of_a_miss_is_true(said: Said, truth: Truth) -> Iterator[Finding]:
    for miss in said.misses:
        first, last = seconds(miss["scheduled_at"]) or 0, seconds(miss["last_scheduled_at"]) or 0
        was = _CAUSES.get(miss["cause"])
        if was is not None and not was(truth, miss["task"], first, last):
            told = f"{miss['task']} {miss['scheduled_at']} to {miss['last_scheduled_at']}"
            yield f"{told}: {miss['reason']} ({miss['cause']})", "the ledger knows of no such cause"


# ---- gone, stored jobs, metrics ------------------------------------------------------------------


@live_check
def what_is_gone_is_in_no_live_replica(said: Said, truth: Truth) -> Iterator[Finding]:
    for task in said.tasks.values():
        job = BY_TASK[task["name"]]
        if job.in_store or job.every is None:
            continue
        having = [
            name
            for name in living(said, truth, NAMESPACE[job.application])
            if job.is_in(truth.replicas[name].release)
        ]
        if task["gone"] and having and min(truth.replicas[n].ready for n in having) < said.at - 2:
            yield f"{task['name']} is gone", f"{having} have it"


@live_check
def a_stored_job_is_what_it_is_said_to_be(said: Said, truth: Truth) -> Iterator[Finding]:
    changes: dict[str, str] = {}
    for event in truth.events:
        kinds = ("job-paused", "job-resumed", "job-moved", "job-removed")
        if event.kind in kinds and event.at < said.at:
            changes[event.task] = event.kind
    for name, job in said.jobs.items():
        told = f"{name}: {job['state']}, next {job['next_run_time']}"
        if (changes.get(name) == "job-paused") != (job["state"] == "paused"):
            yield told, str(changes.get(name))
        if changes.get(name) == "job-removed":
            yield told, "it was removed"
        due = seconds(job["next_run_time"])
        if job["state"] == "overdue" and (due is None or due > said.at):
            yield told, f"it is {clock(said.at)}"


@check
def metrics_tell_what_status_tells(said: Said, truth: Truth) -> Iterator[Finding]:
    for name, value in said.metrics["tasklock_task_last_success_seconds"].items():
        well = [
            run
            for run in truth.of_task(name)
            if run.how == "ok" and run.released is not None and run.released < said.at
        ]
        if well and value < max(run.ended or 0 for run in well) - CLOSE:
            yield f"{name}: last success {clock(value)}", true_of(well[-1])
        if not any(
            run.how == "ok" and abs((run.ended or 0) - value) < 5 for run in truth.of_task(name)
        ):
            yield f"{name}: last success {clock(value)}", "no run ended well then"


# ---- why -----------------------------------------------------------------------------------------


@check
def why_tells_what_became_of_the_last_run_time(said: Said, truth: Truth) -> Iterator[Finding]:
    for name in said.tasks:
        story = said.why(name)
        told = f"why {name}: {said.why_text(name).splitlines()[0]}"
        about = seconds(story["scheduled_at"])
        runs = [r for r in truth.of_task(name) if r.due is not None and about is not None]
        at_it = [run for run in runs if abs((run.due or 0) - (about or 0)) < CLOSE]
        verdict = story["verdict"]
        if verdict == "ran" and not at_it and story["runs"][-1]["kind"] != "manual":
            yield told, f"nobody has run {story['scheduled_at']}"
        # A killed replica is not missed before its lease has ended.
        goes_on = verdict == "running" and said.tasks[name]["outcome"] is None
        if goes_on and not any(run.over > said.at - LEASE - CLOSE for run in at_it):
            yield told, "; ".join(map(true_of, at_it)) or "no such run"
        if verdict in ("missed", "due"):
            ended = [run for run in at_it if run.first_sign < said.at - CLOSE]
            if ended and not (verdict == "missed" and story["miss"]["run_times"] > 1):
                yield told, "; ".join(map(true_of, ended))


@check
def why_is_about_the_last_run_time_that_is_due(said: Said, truth: Truth) -> Iterator[Finding]:
    """No later run time has passed, and a run that goes on is told."""
    for name in said.tasks:
        job = BY_TASK[name]
        story = said.why(name)
        text = said.why_text(name)
        told = f"why {name}: {text.splitlines()[0]}"
        about = seconds(story["scheduled_at"])
        if job.every is not None and not job.in_store and not job.every_anew and about is not None:
            passed = [at for at in job.due_times(truth.begin, said.at - 3) if at > about + CLOSE]
            is_told = any(
                word in text
                for word in ("goes on", "paused", "no live replica", "is stopping now", "about")
            )
            noted = story["miss"] and story["miss"]["run_times"] > 1
            if passed and not is_told and not noted and len(passed) > 1:
                yield told, f"{len(passed)} later run times have passed, as {clock(passed[-1])}"
        hanging = [run for run in truth.of_task(name) if run.goes_on(said.at - CLOSE)]
        for run in hanging:
            if run.goes_on(said.at) and run.replica not in text:
                yield told, true_of(run)
