"""What commands answer to operators, and what is told if it is asked for with options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import inf
from statistics import median

from apscheduler_tasklock.demo.history import Event
from tests.night.checks import CLOSE, Finding, check
from tests.night.plan import BY_TASK, GRACE, STORE
from tests.night.said import Said
from tests.night.sayings import (
    NOTED,
    Told,
    has_begun,
    is_close,
    is_due,
    is_within,
    saying,
    untrue_in,
)
from tests.night.truth import TruePause, Truth
from tests.support.waist import UNNOTED


def _before(told: Told, *kinds: str) -> list[Event]:
    """Return what was done with a task until its operator was answered."""
    names = (told.about, told.about.removeprefix(f"{STORE}:"))
    return [
        e for e in told.truth.events if e.kind in kinds and e.task in names and e.at <= told.then
    ]


def _pauses_then(told: Told) -> list[TruePause]:
    return [
        pause
        for pause in told.truth.pauses_of(told.about)
        if pause.since <= told.then < pause.end_asked
    ]


@saying("answer", "^paused until (?:{until}|it is resumed)$")
def _(told: Told) -> bool:
    if _before(told, "job-paused"):
        return told.until is None
    ends = [pause.end_asked if pause.end_asked < inf else inf for pause in _planned(told)]
    last = max(ends)
    return (
        told.until is None
        if last == inf
        else is_within(told.until or 0, last - NOTED, last + NOTED)
    )


def _planned(told: Told) -> list[TruePause]:
    """Return the pauses that are in force, with the ends that they were to have."""
    planned = {e.at: e.until for e in told.truth.events if e.kind == "paused"}
    return [
        TruePause(
            p.task,
            p.by,
            p.reason,
            p.asked,
            p.since,
            inf if planned[p.since] is None else p.since + planned[p.since],
        )
        for p in _pauses_then(told)
    ]


@saying("answer", r"^all tasks: paused by {by} until {until} \((?P<why>.*)\)$")
@saying(
    "answer",
    r"(?P<left>no longer|; still) paused by {by}(?: since {since})? until (?:resumed|{until})(?: "
    r"\((?P<why>[^)]*)\))?",
)
def _(told: Told) -> bool:
    is_over = told.left == "no longer"
    return any(
        pause.by == told.by
        and pause.reason == (told.why or "")
        and (told.since is None or is_within(told.since, pause.asked, pause.since))
        and (pause in _pauses_then(told)) != is_over
        and (told.until is None or is_close(told.until, pause.since + 600, NOTED))
        for pause in told.truth.pauses_of(told.about)
        if pause.since <= told.then
    )


@saying("answer", "^all tasks: resumed$", "^was not paused$")
def _(told: Told) -> bool:
    jobs = _before(told, "job-paused", "job-resumed", "job-moved")
    return not _pauses_then(told) and (not jobs or jobs[-1].kind != "job-paused")


@saying("answer", "^was already paused$")
def _(told: Told) -> bool:
    return _before(told, "job-paused", "job-resumed", "job-moved")[-1].kind == "job-paused"


@saying("answer", "^resumed, due {next}$")
def _(told: Told) -> bool:
    is_last = _before(told, "job-paused", "job-resumed")[-1].kind == "job-resumed"
    return (
        is_last
        and told.next > told.then - NOTED
        and is_due(told, told.next, BY_TASK[f"{STORE}:{told.about}"])
    )


@saying("answer", "^moved to {next}(?P<ends>, and no longer paused)?$")
def _(told: Told) -> bool:
    changes = _before(told, "job-paused", "job-resumed", "job-moved")
    was_paused = len(changes) > 1 and changes[-2].kind == "job-paused"
    return is_close(told.next, changes[-1].due) and (told.ends is not None) == was_paused


@saying("answer", "^was already due {next}$")
def _(told: Told) -> bool:
    return is_close(told.next, _before(told, "job-moved")[-1].due)


@saying("answer", "^removed$")
def _(told: Told) -> bool:
    return bool(_before(told, "job-removed"))


@saying("answer", r"^(?P<was>was already )?acknowledged \(token {token}\)$")
def _(told: Told) -> bool:
    """Of the last run then; of a miss there is none."""
    runs = [run for run in told.truth.of_task(told.about) if run.first_sign < told.then]
    is_last = not runs or runs[-1].token == told.token
    return (is_last and told.was is None) or len(_before(told, "acked", "nothing")) > 1


@saying("answer", "^a run is asked for$")
def _(told: Told) -> bool:
    return bool(_before(told, "run asked for"))


@saying("answer", "^a run was asked for already, by {by} at {at}$")
def _(told: Told) -> bool:
    asked = _before(told, "run asked for")[-1]
    return asked.detail == told.by and is_within(told.at, asked.at - NOTED, asked.at)


@saying("answer", r"^freed: token {token}, held by {replica} since {begun}")
def _(told: Told) -> bool:
    run = told.truth.runs[told.about, told.token]
    return run.replica == told.replica and has_begun(told, run, told.begun) and run.died is not None


@saying("answer", "; its window is open again$")
def _(told: Told) -> bool:
    return told.about == "archive"


@saying(
    "answer",
    "; its window stays until {until}; it is skipped until it is due at {next}; overdue after "
    "{overdue}$",
)
def _(told: Told) -> bool:
    run = [run for run in told.truth.of_task(told.about) if run.first_sign < told.then][-1]
    job = BY_TASK[told.about]
    is_window = (run.due or 0) < told.until <= (run.due or 0) + (job.every or 0) + CLOSE
    return is_window and is_due(told, told.next) and abs(told.overdue - told.next - GRACE) < CLOSE


def _has_history(told: Told) -> bool:
    """Return whether a stored job had run by then, so that what is done with it is noted."""
    runs = told.truth.of_task(f"{STORE}:{told.about.removeprefix(f'{STORE}:')}")
    return any(run.first_sign < told.then - NOTED for run in runs)


@check
def the_answers_to_operators_are_true(said: Said, truth: Truth) -> Iterator[Finding]:
    for event in truth.events:
        if event.kind != "answered" or event.at > said.at:
            continue
        for line in event.detail.splitlines():
            if not line.startswith("apscheduler-tasklock: "):  # a hint
                words = line if event.task == "*" else line.removeprefix(f"{event.task}: ")
                told = Told(said, truth, event.task, {"then": event.at})
                if words.endswith(f" ({UNNOTED})") and _has_history(told):
                    yield words, "its task has a history by then"
                yield from untrue_in("answer", words.removesuffix(f" ({UNNOTED})"), told)


# ---- what is asked with options ----


@saying(
    "spread", r"^(?P<when>in the last day|in the week before): no run that ended well(?: is kept)?$"
)
@saying(
    "spread",
    r"^(?P<when>in the last day): median {took}, 95th percentile {most} \({count} runs? that "
    r"ended well(?:, kept since {since})?\)$",
)
def _(told: Told) -> bool:
    well = [run for run in told.runs if run.how == "ok" and run.lost is None and run.ended]
    well = [run for run in well if (run.ended or 0) < told.now]
    over = [run for run in well if (run.released or inf) < told.now]
    if told.count is None:
        return told.when == "in the week before" or not over
    took = sorted((run.ended or 0) - (run.begun or 0) for run in well)[-told.count :]
    since = [run for run in well if run.first_sign > (told.since or 0) - CLOSE]
    is_all = min(len(over), 100) <= told.count <= len(since)
    is_within = took[0] - 0.1 <= told.took <= told.most <= took[-1] + CLOSE
    return is_all and is_within and abs(told.took - median(took)) < CLOSE


@check
def the_durations_of_runs_are_true(said: Said, truth: Truth) -> Iterator[Finding]:
    for name in said.tasks:
        for line in said.screen(f"/task?name={name}").drawn["durations_in_words"]:
            yield from untrue_in("spread", line, Told(said, truth, name))


_NO_SUCH = "no-such-thing"
# The pages that say that a filter matches nothing.
_FILTERED = {
    f"/tasks?q={_NO_SUCH}": "No task matches.",
    f"/jobs?q={_NO_SUCH}": "No job matches.",
    f"/replicas?q={_NO_SUCH}": "No replica matches.",
    f"/replica?id={_NO_SUCH}": "No replica of this name has given a sign of life",
    f"/runs?q={_NO_SUCH}": "There are no such runs in the history.",
}


@check
def what_filters_leave_is_true(said: Said, truth: Truth) -> Iterator[Finding]:
    """The filters that match something show it, and those that match nothing say so."""
    for path, words in _FILTERED.items():
        if words not in said.html(path) and said.tasks:
            yield f"page {path} does not say {words!r}", "there is nothing of that name"
    for page, named in (("tasks", said.tasks), ("jobs", said.jobs), ("replicas", said.replicas)):
        for name in list(named)[:1]:
            if " matches." in said.html(f"/{page}?q={name}"):
                yield f"page /{page}?q={name} says that nothing matches", name


@check
def what_options_of_commands_leave_is_true(said: Said, truth: Truth) -> Iterator[Finding]:
    del truth
    told = said.command("check", _NO_SUCH)[1]
    if f"no task matches {_NO_SUCH!r}" not in told:
        yield f"check {_NO_SUCH}: {told}", "there is no such task"
    told = said.command("check", "--expect-replicas", "20")[1]
    found = re.search(r"(\d+) of 20 expected replicas are alive", told)
    alive = sum(each["state"] == "alive" for each in said.replicas.values())
    if said.tasks and (found is None or int(found[1]) != alive):
        yield f"check --expect-replicas 20: {told}", f"{alive} are alive"
    count = len(said.history) - 1
    if count > 0:
        told = said.command("runs", "--limit", str(count))[1] + said.texts[f"runs --limit {count}"]
        if f"these are the newest {count};" not in told:
            yield f"runs --limit {count}", f"the history has {len(said.history)} entries"


@saying(
    "job",
    "the job store has a job '{task}', which is (?P<state>waiting|due|overdue|paused)(?:, with the "
    "run time {next})?(?:; `apscheduler-tasklock doctor` says what to do)?(?:; its task is "
    "'{name}')?",
)
def _(told: Told) -> bool:
    job = BY_TASK[f"{STORE}:{told.task}"]
    changes = [e for e in told.truth.events if e.task == job.name and e.at < told.now]
    kinds = [e.kind for e in changes if e.kind in ("job-paused", "job-moved")]
    is_paused = bool(kinds) and kinds[-1] == "job-paused"
    if (told.state == "paused") != is_paused or told.name not in (None, job.task):
        return False
    return told.next is None or (
        is_due(told, told.next, job) and (told.next <= told.now) == (told.state != "waiting")
    )


@check
def what_why_tells_of_a_job_without_a_task_is_true(said: Said, truth: Truth) -> Iterator[Finding]:
    for job in said.jobs:
        task = f"{STORE}:{job}"
        if task in said.tasks:
            continue
        said.command("why", job)
        words = said.texts[f"why {job}"].strip().removeprefix("apscheduler-tasklock: ")
        yield from untrue_in("job", words, Told(said, truth, task))
