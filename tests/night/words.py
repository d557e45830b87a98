"""Checks of single sentences: what ``show``, ``why``, the findings and the pages say in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from math import inf
from typing import Any

from tests.night.checks import CLOSE, Finding, check, clock, run_of, seconds, told_of, true_of
from tests.night.plan import BY_TASK, UNKNOWN_FUNCTION
from tests.night.said import Said
from tests.night.truth import TrueReplica, Truth

_TIME = r"(\d{4}-\d\d-\d\dT[\d:.]+Z|\d\d:\d\d:\d\d(?:\.\d+)?)"
_REPLICA = r"((?:web|batch)-\d:\d+)"


def moments(text: str, near: float) -> list[float]:
    """Return the times in a text, in seconds. One without a date is of the day of the moment."""
    found = []
    for time in re.findall(_TIME, text):
        if "T" in time:
            found.append(seconds(time) or 0)
        else:
            day = datetime.fromtimestamp(near, timezone.utc)
            parts = time.partition(".")[0].split(":")
            hour, minute, second = map(int, parts)
            found.append(day.replace(hour=hour, minute=minute, second=second).timestamp())
    return found


def replicas_in(text: str) -> list[str]:
    """Return the replicas that a text names."""
    return re.findall(_REPLICA, text)


def _is_about(at: float | None, text: str, near: float, within: float = 2.0) -> bool:
    """Return whether a text has a time that is about another one."""
    return at is not None and any(abs(each - at) <= within for each in moments(text, near))


# ---- show ----------------------------------------------------------------------------------------


def _runs(said: Said, truth: Truth, task: dict[str, Any], words: str) -> bool:
    run = run_of(truth, task)
    return run is None or run.replica in words


def _is_dead(said: Said, truth: Truth, task: dict[str, Any], words: str) -> bool:
    replica = truth.replicas[task["holder"]]
    is_away = replica.dying < said.at or truth.in_outage(said.at - 15, said.at)
    return is_away and task["holder"] in words


def _is_cut(said: Said, truth: Truth, task: dict[str, Any], words: str) -> bool:
    run = run_of(truth, task)
    return run is not None and run.how == "cut" and run.replica in words


def _is_new(said: Said, truth: Truth, task: dict[str, Any], _words: str) -> bool:
    return not any(run.first_sign < said.at - CLOSE for run in truth.of_task(task["name"]))


def _is_retrying(said: Said, truth: Truth, task: dict[str, Any], words: str) -> bool:
    run = run_of(truth, task)
    return (
        run is not None and run.how == "error" and "UpstreamError" in words and "attempt 1" in words
    )


def _hangs(said: Said, truth: Truth, task: dict[str, Any], words: str) -> bool:
    runs = [run for run in truth.of_task(task["name"]) if run.begun and run.begun < said.at]
    return any(run.over > said.at - 2 and run.replica in words for run in runs)


_STATES: dict[str, Callable[[Said, Truth, dict[str, Any], str], bool]] = {
    "running": _runs,
    "dead": _is_dead,
    "cut": _is_cut,
    "new": _is_new,
    "retrying": _is_retrying,
    "too long": _hangs,
}


@check
def show_tells_the_state_as_it_is(said: Said, truth: Truth) -> Iterator[Finding]:
    for name, task in said.tasks.items():
        words = said.show(name)["state"]
        is_true = _STATES.get(task["state"])
        if not words.startswith(task["state"]):
            yield f"show {name}: {words}", f"status: {task['state']}"
        if is_true is not None and not is_true(said, truth, task, words):
            yield f"show {name}: {words}", true_of(run_of(truth, task))


@check
def show_tells_the_last_run_as_it_was(said: Said, truth: Truth) -> Iterator[Finding]:
    for name, task in said.tasks.items():
        words = said.show(name)["last run"]
        run = run_of(truth, task)
        if words == "never":
            if not _is_new(said, truth, task, words):
                yield f"show {name}: last run {words}", "it has run"
            continue
        if run is None:
            continue
        is_true = run.replica in words and f"token {run.token}" in words
        is_true &= ("takeover" in words) == run.takeover
        is_true &= ("attempt" in words) == (run.attempt > 1)
        is_true &= _ended_so(words, run.how, has_died=run.died is not None, is_lost=run.cut_off)
        if "has not reported its end" in words:
            is_true &= (run.released or inf) > said.at - CLOSE
        if not is_true:
            yield f"show {name}: last run {words}", true_of(run)


def _ended_so(words: str, how: str, *, has_died: bool, is_lost: bool) -> bool:
    """Return whether words tell how a run ended."""
    if "cut by a stop" in words or "cancelled" in words:
        return how == "cut"
    if "died with its holder" in words:
        return has_died or is_lost
    if "overran" in words:
        return is_lost
    return True


@check
def show_tells_how_often_it_failed(said: Said, truth: Truth) -> Iterator[Finding]:
    for name, task in said.tasks.items():
        words = said.show(name).get("failures", "")
        if bool(words) != bool(task["failures"]):
            yield f"show {name}: failures {words}", told_of(task)
        if words and not words.startswith(f"{task['failures']} in a row"):
            yield f"show {name}: failures {words}", told_of(task)
        run = run_of(truth, task)
        if "UpstreamError" in words and run is not None and run.how == "ok" and run.released:
            yield f"show {name}: failures {words}", true_of(run)


@check
def show_tells_which_replicas_have_the_task(said: Said, truth: Truth) -> Iterator[Finding]:
    for name in said.tasks:
        words = said.show(name).get("replicas", "")
        job = BY_TASK[name]
        for replica in replicas_in(words):
            known = truth.replicas[replica]
            if not (job.in_store or job.is_in(known.release)):
                yield f"show {name}: replicas {words}", f"{replica} runs {known.release}"
            if f"{replica} (" not in words and known.killed < said.at - 46:
                yield f"show {name}: replicas {words}", str(known)


@check
def show_tells_the_next_run_times(said: Said, truth: Truth) -> Iterator[Finding]:
    """As the page of the task does, which has the time of the moment."""
    for name in said.tasks:
        job = BY_TASK[name]
        words = said.screen(f"/task?name={name}").drawn["facts"].get("next runs", "")
        times = [
            datetime.fromisoformat(each).replace(tzinfo=timezone.utc).timestamp()
            for each in re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", words)
        ]
        if job.every is None or job.in_store or job.every_anew or not times:
            continue
        right = job.due_times(truth.begin, times[-1] + 1)
        wrong = [at for at in times if not any(abs(at - each) <= CLOSE for each in right)]
        if wrong:
            yield f"task {name}: next runs {words}", f"every {job.every} s"


# ---- findings ------------------------------------------------------------------------------------


def _silent(said: Said, truth: Truth, found: dict[str, Any]) -> bool:
    replica = truth.replicas[found["replica"]]
    state = found["says"].partition(",")[0]
    has_died = replica.dying < said.at
    return has_died if state == "died" else has_died or truth.in_outage(said.at - 60, said.at)


def _stopping(said: Said, truth: Truth, found: dict[str, Any]) -> bool:
    replica = truth.replicas[found["replica"]]
    return replica.terminated < said.at and _is_about(replica.stopping, found["says"], said.at, 5.0)


def _no_replica(said: Said, truth: Truth, found: dict[str, Any]) -> bool:
    fleet: list[TrueReplica] = [
        each for each in truth.replicas.values() if each.ready < said.at - CLOSE
    ]
    of = "batch" if "'batch/'" in found["says"] else "web" if "of ''" in found["says"] else ""
    fleet = [each for each in fleet if each.name.startswith(of)]
    if "good order" in found["says"]:
        last = max(fleet, key=lambda each: each.over)
        return last.stopped < inf and last.killed == inf
    seen = replicas_in(found["says"])
    return all(truth.replicas[name].over < said.at for name in seen) and bool(seen)


def _too_long(said: Said, truth: Truth, found: dict[str, Any]) -> bool:
    task = said.tasks[found["task"]]
    return _hangs(said, truth, task, found["says"])


def _healing(said: Said, truth: Truth, found: dict[str, Any]) -> bool:
    runs = truth.of_task(found["task"])
    if "has ended" in found["says"]:
        run = run_of(truth, said.tasks[found["task"]])
        return run is not None and (run.released or inf) > said.at - CLOSE
    failed = [run for run in runs if run.how == "error" or run.died is not None]
    return bool(failed) and any(run.first_sign < said.at for run in failed)


def _cut(said: Said, truth: Truth, found: dict[str, Any]) -> bool:
    run = run_of(truth, said.tasks[found["task"]])
    return run is not None and run.how == "cut"


def _dead(said: Said, truth: Truth, found: dict[str, Any]) -> bool:
    return _is_dead(said, truth, said.tasks[found["task"]], found["says"])


def _overdue(said: Said, truth: Truth, found: dict[str, Any]) -> bool:
    if "stored job" not in found["says"]:
        return True  # compared by itself
    has_live = any(each.lives(said.at) for each in truth.replicas.values())
    if "none is alive" in found["says"] and has_live:
        return False
    return found["task"].endswith(UNKNOWN_FUNCTION) or not has_live


def _versions(said: Said, truth: Truth, found: dict[str, Any]) -> bool:
    releases = {
        each.release for each in truth.replicas.values() if each.ready < said.at < each.over + 50
    }
    return len(releases) > 1


_FINDINGS: dict[str, Callable[[Said, Truth, dict[str, Any]], bool]] = {
    "silent": _silent,
    "stopping": _stopping,
    "no replica": _no_replica,
    "too long": _too_long,
    "healing": _healing,
    "cut": _cut,
    "dead": _dead,
    "overdue": _overdue,
    "versions": _versions,
}


@check
def each_finding_is_true(said: Said, truth: Truth) -> Iterator[Finding]:
    for found in said.check["findings"]:
        is_true = _FINDINGS.get(found["what"])
        if is_true is not None and not is_true(said, truth, found):
            who = found["task"] or found["replica"] or ""
            known = truth.replicas.get(who) or "; ".join(map(true_of, truth.of_task(who)[-2:]))
            yield f"{found['level']} {found['what']} {who}: {found['says']}", str(known)


# What the first line of the overview says, without the number, by what the findings are about.
_FIRST_LINE = {
    "too long": r"tasks? runs? too long",
    "dead": r"tasks? (?:is|are) dead",
    "overdue": r"tasks? (?:is|are) overdue",
    "late": r"tasks? (?:is|are) late",
    "cut": r"tasks? (?:was|were) cut",
    "failing": r"tasks? (?:is|are) failing",
    "healing": r"failures? (?:is|are) being healed",
    "stopping": r"replicas? stops?\b",
    "silent": r"replicas? (?:has|have) died or fallen silent",
}


@check
def the_first_line_of_the_overview_has_the_numbers_of_check(
    said: Said, truth: Truth
) -> Iterator[Finding]:
    words = " ".join(line[1] for line in said.screen("/").drawn["lines"])
    for what, pattern in _FIRST_LINE.items():
        count = sum(each["what"] == what for each in said.check["findings"])
        found = re.search(rf"(\d+) {pattern}", words)
        if (int(found[1]) if found else 0) != count:
            yield f"overview: {words}", f"check: {count} {what}"
    del truth


# ---- what operators did --------------------------------------------------------------------------

# The outcomes of entries, by the kinds of events of the conductor.
_ACTIONS = {
    "paused": "paused",
    "resumed": "resumed",
    "acked": "acknowledged",
    "run asked for": "run",
    "freed": "freed",
    "job-paused": "job-paused",
    "job-resumed": "job-resumed",
    "job-moved": "job-moved",
    "job-removed": "job-removed",
}


@check
def what_operators_did_is_in_the_history(said: Said, truth: Truth) -> Iterator[Finding]:
    """With by whom, and nothing else is. A pause of all has its pattern as the task's name.

    A stored job that has never run may have no task's row, and then it has no history.
    """
    told = {
        (each["outcome"], each["task"].rpartition(":")[2], each["by"])
        for each in said.history
        if each["kind"] == "operator" and each["outcome"] != "rescheduled"
    }
    done = {
        (_ACTIONS[each.kind], each.task, each.detail.partition(":")[0])
        for each in truth.events
        if each.kind in _ACTIONS and not each.replica and each.at < said.at
    }
    rows = {name.rpartition(":")[2] for name in said.tasks}
    done = {
        each for each in done if each[1] in rows or not each[0].startswith("job-")
    } | told & done
    for each in sorted(told ^ done):
        yield f"runs: {sorted(told)}", f"the ledger differs in {each}"


@check
def a_changed_schedule_is_told_if_there_is_one(said: Said, truth: Truth) -> Iterator[Finding]:
    changed = {e["task"] for e in said.history if e["outcome"] == "rescheduled"}
    for name in changed:
        if not BY_TASK[name].every_anew:
            yield f"runs: {name} was rescheduled", "both releases have the same schedule"
    del truth


@check
def each_failed_attempt_was_retried_as_it_was_said_to_be(
    said: Said, truth: Truth
) -> Iterator[Finding]:
    for entry in said.entries:
        retry_at = seconds(entry["retry_at"])
        if retry_at is None:
            continue
        told = f"{entry['task']} token {entry['token']}: to be retried at {entry['retry_at']}"
        run = truth.runs.get((entry["task"], entry["token"]))
        if run is None or run.how != "error" or not BY_TASK[run.task].lock.get("retries"):
            yield told, true_of(run)
            continue
        later = [each for each in truth.of_task(run.task) if each.token > run.token]
        again = [each for each in later if each.attempt > 1 and each.first_sign < retry_at - CLOSE]
        if again and again[0].due == run.due:
            yield told, true_of(again[0])


# ---- why -----------------------------------------------------------------------------------------


@check
def why_tells_where_the_history_begins(said: Said, truth: Truth) -> Iterator[Finding]:
    for name in said.tasks:
        text = said.why_text(name)
        begins = re.search(r"history\s+begins at (.*)", text)
        begun = [run for run in truth.of_task(name) if run.released and run.released < said.at]
        if "there is no history" in text and begun:
            yield f"why {name}: {text}", true_of(begun[-1])
        elif begins and begun:
            [at, *_] = moments(begins[1], said.at)
            kept = {each["token"] for each in said.entries if each["task"] == name}
            lost = [
                run
                for run in begun
                if run.due and run.due > at + CLOSE and run.token not in kept and not run.lost
            ]
            if lost:
                yield f"why {name}: history begins at {clock(at)}", true_of(lost[0])


@check
def why_names_replicas_that_were_there(said: Said, truth: Truth) -> Iterator[Finding]:
    for name in said.tasks:
        for line in said.why_text(name).splitlines():
            for replica, state in re.findall(rf"{_REPLICA} (alive|died|silent|stopped)", line):
                known = truth.replicas[replica]
                if state == "alive" and known.killed < said.at - 46:
                    yield f"why {name}: {line}", str(known)
                if state == "stopped" and known.killed < inf:
                    yield f"why {name}: {line}", str(known)


# How a run ended, in the words of `why`.
_ENDINGS = {
    "ended well": ("ok",),
    "failed": ("error",),
    "was cancelled": ("cut",),
    "died with its holder": ("", "ok", "error", "cut"),
    "overran its maximum lock": ("", "ok", "error"),
    "was freed by an operator": ("", "ok", "error", "cut"),
    "was taken for dead, and ended later": ("ok", "error", "cut"),
}
_STORY_OF_RUN = re.compile(
    rf"began at {_TIME} on {_REPLICA}, ({'|'.join(_ENDINGS)}) after .*?\(token (\d+)"
)


@check
def why_tells_how_the_last_run_ended(said: Said, truth: Truth) -> Iterator[Finding]:
    for name in said.tasks:
        for began, replica, how, token in _STORY_OF_RUN.findall(said.why_text(name)):
            run = truth.runs.get((name, int(token)))
            if run is None:
                continue
            is_true = run.replica == replica and run.how in _ENDINGS[how]
            is_true &= _is_about(run.begun, began, said.at)
            if how == "died with its holder":
                is_true &= run.died is not None or run.cut_off or bool(truth.outages)
            if not is_true:
                yield (
                    f"why {name}: began at {began} on {replica}, {how} (token {token})",
                    true_of(run),
                )


# ---- pages ---------------------------------------------------------------------------------------


@check
def an_outage_is_drawn_where_it_was(said: Said, truth: Truth) -> Iterator[Finding]:
    html = said.html("/?by=task")
    for begin, end in re.findall(rf"the database did not answer from {_TIME} to {_TIME}", html):
        [since], [until] = moments(begin, said.at), moments(end, said.at)
        if not truth.in_outage(since, until, 12):
            yield f"overview: the database did not answer from {begin} to {end}", str(truth.outages)


@check
def a_pause_is_drawn_where_it_was(said: Said, truth: Truth) -> Iterator[Finding]:
    html = said.html("/?by=task")
    for task, by, at in re.findall(rf"<title>([^<:]*): paused by (\S+) since {_TIME}", html):
        pauses = [each for each in truth.pauses if each.task == task and each.by == by]
        if not any(_is_about(each.since, at, said.at) for each in pauses):
            yield f"overview: {task}: paused by {by} since {at}", str(pauses)


@check
def nothing_runs_is_said_only_if_nothing_does(said: Said, truth: Truth) -> Iterator[Finding]:
    html = said.html("/")
    going_on = [
        run
        for run in truth.runs.values()
        if run.goes_on(said.at)
        and run.task in said.tasks
        and run.token == said.tasks[run.task]["token"]
        and not truth.in_outage(said.at - 6, said.at)
    ]
    if "Nothing runs." in html and going_on:
        yield "overview: Nothing runs.", "; ".join(map(true_of, going_on))
    failed = [
        run for run in truth.runs.values() if run.how == "error" and (run.released or inf) < said.at
    ]
    if "Nothing failed, and nothing was missed." in html and failed:
        yield "overview: Nothing failed, and nothing was missed.", true_of(failed[-1])


@check
def nothing_is_due_is_said_only_if_nothing_is(said: Said, truth: Truth) -> Iterator[Finding]:
    """While replicas live and not all is paused, the next run times of their jobs are known."""
    lives = any(
        each.lives(said.at) and each.ready < said.at - 3 for each in truth.replicas.values()
    )
    is_paused = any(each.task == "*" and each.may_hold(said.at) for each in truth.pauses)
    is_known = lives and not is_paused and not truth.in_outage(said.at - 40, said.at)
    if is_known and "No task that is not paused or late is due" in said.html("/"):
        yield "overview: no task is due", "replicas live, and all have jobs of every second"


@check
def a_task_page_tells_the_run_that_goes_on(said: Said, truth: Truth) -> Iterator[Finding]:
    for run in truth.runs.values():
        task = said.tasks.get(run.task)
        if task is not None and run.goes_on(said.at) and task["token"] == run.token:
            words = (
                said.html(f"/task?name={run.task}") and said.texts[f"page /task?name={run.task}"]
            )
            if run.replica not in words:
                yield f"page of {run.task}", true_of(run)
