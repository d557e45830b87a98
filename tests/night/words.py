"""Checks of single sentences: what ``show``, ``why``, the findings and the pages say in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone
from math import inf

from apscheduler_tasklock.demo.history import Event
from tests.night.checks import CLOSE, Finding, check, clock, seconds, true_of
from tests.night.plan import BY_TASK, STORE
from tests.night.said import Said
from tests.night.truth import Truth

_TIME = r"(\d{4}-\d\d-\d\dT[\d:.]+Z|(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d(?:\.\d+)?)"
_REPLICA = r"((?:web|batch)-\d:\d+)"


def moments(text: str, near: float) -> list[float]:
    """Return the times in a text, in seconds. One without a date is of the day of the moment."""
    found = []
    for time in re.findall(_TIME, text):
        if "T" in time:
            found.append(seconds(time) or 0)
        else:
            day = f"{datetime.fromtimestamp(near, timezone.utc):%Y-%m-%d} " * (" " not in time)
            found.append(seconds(f"{day}{time.partition('.')[0]}Z") or 0)
    return found


def replicas_in(text: str) -> list[str]:
    """Return the replicas that a text names."""
    return re.findall(_REPLICA, text)


def _is_about(at: float | None, text: str, near: float, within: float = 2.0) -> bool:
    """Return whether a text has a time that is about another one."""
    return at is not None and any(abs(each - at) <= within for each in moments(text, near))


# ---- show ----------------------------------------------------------------------------------------


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
        times = moments(words, said.at)
        if job.every is None or job.in_store or job.every_anew or not times:
            continue
        right = job.due_times(truth.begin, times[-1] + 1)
        wrong = [at for at in times if not any(abs(at - each) <= CLOSE for each in right)]
        if wrong:
            yield f"task {name}: next runs {words}", f"every {job.every} s"


# ---- findings ------------------------------------------------------------------------------------


# What the first line of the overview says, without the number, by what the findings are about.
_FIRST_LINE = {
    "too long": r"tasks? runs? too long",
    "dead": r"tasks? (?:is|are) dead",
    "overdue": r"tasks? (?:is|are) overdue",
    "late": r"tasks? (?:is|are) late",
    "missed": r"tasks? missed (?:a run time|run times)",
    "cut": r"tasks? (?:was|were) cut",
    "failing": r"tasks? (?:is|are) failing",
    "healing": r"failures? (?:is|are) being healed",
    "stopping": r"replicas? stops?\b",
    "died": r"replicas? (?:has|have) died",
    "silent": r"replicas? (?:is|are) silent",
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


def _had_run(truth: Truth, event: Event) -> bool:
    """Return whether the stored job that an event is about had run before."""
    return any(run.first_sign < event.at for run in truth.of_task(f"{STORE}:{event.task}"))


@check
def what_operators_did_is_in_the_history(said: Said, truth: Truth) -> Iterator[Finding]:
    """With by whom, and nothing else is. A pause of all has its pattern as the task's name.

    A stored job that had never run may have had no task's row then, and so no history.
    """
    told = {
        (each["outcome"], each["task"].rpartition(":")[2], each["by"])
        for each in said.history
        if each["kind"] == "operator" and each["outcome"] != "rescheduled"
    }
    done = set()
    for event in truth.events:
        if event.kind in _ACTIONS and not event.replica and event.at < said.at:
            by = event.detail.partition(":")[0]
            action = (_ACTIONS[event.kind], event.task.rpartition(":")[2], by)
            if not event.kind.startswith("job-") or _had_run(truth, event) or action in told:
                done.add(action)
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


# ---- pages ---------------------------------------------------------------------------------------


@check
def an_outage_is_drawn_where_it_was(said: Said, truth: Truth) -> Iterator[Finding]:
    html = said.html("/?by=task")
    for begin, end in re.findall(
        rf"the database did not answer: run times from {_TIME} to {_TIME}", html
    ):
        [since], [until] = moments(begin, said.at), moments(end, said.at)
        if not truth.in_outage(since, until, 12):
            yield (
                f"overview: the database did not answer: run times from {begin} to {end}",
                str(truth.outages),
            )


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
