"""What ``why`` says, also of an earlier moment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone

from tests.night.checks import CLOSE, Finding, check, seconds
from tests.night.plan import BATCH, GRACE, LEASE, NEW
from tests.night.said import Said
from tests.night.sayings import (
    BOUND,
    EITHER,
    ENDINGS,
    HOW,
    MOMENT,
    NOTED,
    REPLICA,
    Told,
    events_of,
    has_begun,
    is_away,
    is_close,
    is_due,
    is_how,
    is_pause,
    is_unnoted,
    is_within,
    lease_ended,
    nobody_ran,
    saying,
    took_so,
    untrue_in,
    value_of,
)
from tests.night.truth import TrueReplica, Truth


@saying(
    "why",
    rf"(?P<again>run again: |retried: )?(?:{{due}}|(?P<manual>a manual run)) began at {{begun}} "
    rf"on {{replica}}, {HOW} after {BOUND}{{took}} "
    rf"\(token {{token}}\)(?:, to be retried at {{next}})?(?:: {{error}}: "
    rf"HTTP 503)?$",
)
def _(told: Told) -> bool:
    run = told.run
    if run is None:
        return told.how not in ("ended well", "failed") and is_unnoted(told)
    is_its = run.replica == told.replica and has_begun(told, run, told.begun)
    is_its &= (told.again == "run again: ") == run.takeover
    is_its &= (told.again == "retried: ") == (run.attempt > 1)
    is_its &= told.due is None or run.due is None or abs(told.due - run.due) < CLOSE
    is_its &= (told.error is not None) == (told.how == "failed")
    is_its &= (told.bound == "at most ") == (told.how == "died with its holder")
    is_its &= told.next is None or -CLOSE - 1 < told.next - (run.ended or 0) - 4 < NOTED
    return is_its and ENDINGS[told.how](told, run) and took_so(told, run, told.begun, told.took)


@saying(
    "why",
    rf"^(?P<again>run again: |retried: )?(?:{{due}}|a manual run) began at {{begun}} on "
    rf"{{replica}}, and "
    rf"{HOW}(?:, which ended at {{lease}}: {EITHER})? \(token {{token}}\)$",
)
def _(told: Told) -> bool:
    run = told.run
    if run is None:
        return is_unnoted(told)
    is_its = run.replica == told.replica and has_begun(told, run, told.begun)
    is_its &= (told.again == "run again: ") == run.takeover
    is_its &= told.due is None or run.due is None or abs(told.due - run.due) < CLOSE
    is_its &= told.lease is None or lease_ended(told, run)
    return is_its and ENDINGS[told.how](told, run)


@saying("why", rf"its last (?:known )?run time until then was {{due}}, whose run {HOW}")
def _(told: Told) -> bool:
    at_it = [run for run in told.runs if run.due is not None and abs(run.due - told.due) < CLOSE]
    if not at_it:
        return told.how not in ("ended well", "failed")
    return is_due(told, told.due) and any(ENDINGS[told.how](told, run) for run in at_it[-2:])


@saying(
    "why",
    "its last (?:known )?run time until then was (?:about )?{due}, which (?:was missed|nobody has "
    "begun)",
)
def _(told: Told) -> bool:
    is_past = told.due <= told.now + CLOSE
    return is_past and is_due(told, told.due) and nobody_ran(told, told.due)


@saying("why", rf"its last run until then was a manual run, which {HOW}")
def _(told: Told) -> bool:
    asked = events_of(told, "run asked for")
    return bool(asked) and told.run is not None and ENDINGS[told.how](told, told.run)


@saying(
    "why",
    "its run of {due} (?:goes on|may be dead, because its replica has died or is silent), "
    "begun at {begun} on {replica}",
)
def _(told: Told) -> bool:
    run = told.run
    if run is None:
        return told.now - told.begun < NOTED
    is_its = run.replica == told.replica and has_begun(told, run, told.begun)
    return is_its and abs(told.due - (run.due or 0)) < CLOSE and run.over > told.now - LEASE - CLOSE


@saying("why", "it is paused now")
def _(told: Told) -> bool:
    is_held = any(pause.may_hold(told.now) for pause in told.truth.pauses_of(told.about))
    changes = events_of(told, "job-paused", "job-resumed", "job-moved")
    return is_held or (bool(changes) and changes[-1].kind == "job-paused")


_NOTED = "(?:a reason is noted from {noted} on|no reason is noted so far)"


@saying(
    "why",
    "^(?:due|by its schedule) {count} run times from {first} to {last}, begun by nobody",
    "^(?:due|by its schedule) {first}, begun by nobody",
)
def _(told: Told) -> bool:
    last = told.last or told.first
    if told.job.every is None or told.job.every_anew:
        return nobody_ran(told, told.first) and nobody_ran(told, last)
    first = told.truth.begin + (told.job.first if told.job.trigger == "interval" else 0)
    times = [
        first + place * told.job.every
        for place in range(int((last - first) // told.job.every) + 1)
        if first + place * told.job.every > told.first - CLOSE / 2
    ]
    return len(times) == (told.count or 1) and all(nobody_ran(told, at) for at in times)


@saying("why", "; a reason is noted from {noted} on", "; no reason is noted so far")
def _(told: Told) -> bool:
    # Run times that are noted after the moment have not all been overdue.
    return told.noted is None or (
        told.noted > told.now - 1
        and is_due(told, told.noted - GRACE)
        and told.noted < told.now + GRACE
    )


@saying("why", r": its run of {due} on {replica} \(token {token}\) (?:is|was) in the way")
def _(told: Told) -> bool:
    run = told.run
    return (
        run is not None and run.replica == told.replica and abs((run.due or 0) - told.due) < CLOSE
    )


_ABSENT = (
    r"(?:no live replica had it|each live replica that had it was stopping) "
    r"\((?P<list>[^)]*?)(?: and {count} more)?\)"
)


@saying("why", f": {_ABSENT}")
def _(told: Told) -> bool:
    return _are_absent(told)


def _are_absent(told: Told) -> bool:
    """Return whether the replicas that are said to have been there no more are named truly."""
    named = re.findall(
        rf"({REPLICA}) (has stopped|has died|is silent|started)(, stopping since {MOMENT})?"
        rf"(?:,? last seen)? at ({MOMENT})(, stopping since {MOMENT})?",
        told.list,
    )
    return bool(named) and all(
        is_how(told, told.truth.replicas[name], how, value_of("at", at, told.now))
        and (not (before or after) or told.truth.replicas[name].terminated < told.now)
        for name, how, before, at, after in named
    )


@saying(
    "why",
    rf"^no replica ran {{due}}: (?P<why>.*?)(?:; {_ABSENT})? "
    r"\((?:told by {replica} at {at}|noted at {noted} by a "
    r"replica that started after it|"
    r"first told by {names} at {first}, and added to until {last})\)$",
)
def _(told: Told) -> bool:
    name = told.replica or told.names
    at = next(each for each in (told.at, told.noted, told.first) if each is not None)
    replica = told.truth.replicas.get(name) if name else None
    is_its = not name or name.startswith(BATCH) == (told.job.application == BATCH)
    is_told = is_its and (replica is None or replica.started < at < replica.over + CLOSE)
    is_told &= told.list is None or _are_absent(told)
    return is_told and told.due <= at <= told.now and nobody_ran(told, told.due)


@saying(
    "why",
    rf"^no replica ran (?P<many>\d+) run times from {{due}} to {{until}}: (?P<why>.*?)"
    rf"(?:; {_ABSENT})? "
    r"\((?:told by {replica} at {at}|noted at {noted} by a replica that started after it|"
    r"first told by {names} at {first}, and added to until {last})\)$",
)
def _(told: Told) -> bool:
    inside = [
        run for run in told.runs if run.due and told.due - CLOSE < run.due < told.until + CLOSE
    ]
    is_absent = told.list is None or _are_absent(told)
    return is_absent and len(inside) <= 1 and told.due < told.until


@saying("why", ": paused by {by} since {since}(?:: (?P<why>[^;]+))?(?=;|$)")
def _(told: Told) -> bool:
    jobs = [e for e in events_of(told, "job-paused") if e.detail == told.by]
    is_jobs = any(is_within(told.since, e.at - NOTED, e.at) for e in jobs)
    return is_jobs or any(is_pause(told, pause) for pause in told.truth.pauses_of(told.about))


@saying("why", r"its run times around then were missed")
def _(told: Told) -> bool:
    return bool([each for each in told.said.misses if each["task"] == told.about])


@saying(
    "why",
    "^its run times after {at} are not known, because its (?:schedule is not that of then, or has "
    "no common times|history begins later)$",
)
def _(told: Told) -> bool:
    """After one of its run times."""
    return told.at < told.now and (is_due(told, told.at) or _has_run_at(told, told.at))


def _has_run_at(told: Told, at: float) -> bool:
    return any(is_close(at, time) for run in told.runs for time in (run.due, run.first_sign))


@saying(
    "why",
    "^{replica} (?P<state>alive|died|silent|stopped)"
    "(?P<stopping>, stopping| while it was stopping)?(?P<leads>, leads)?, started {at}$",
)
def _(told: Told) -> bool:
    replica = told.truth.replicas[told.replica]
    shown = told.said.replicas[told.replica]
    is_known = shown["state"] == told.state and bool(told.leads) == shown["leads"]
    if told.stopping and not replica.terminated < told.now:
        return False
    return is_known and is_how(told, replica, "started", told.at) and _has(told, replica)


@saying("why", rf"its run of {{at}} has not renewed its lease \({EITHER}\)")
def _(told: Told) -> bool:
    """After an outage a run may have ended, whose release still waits."""
    runs = [run for run in told.runs if is_close(told.at, run.due)]
    return any(
        not told.truth.replicas[run.replica].lives(told.now)
        or told.truth.in_outage(told.now - 2 * LEASE, told.now)
        for run in runs
    )


@saying("why", "the run that {by} asked for at {at} still waits")
def _(told: Told) -> bool:
    asked = [e for e in events_of(told, "run asked for") if e.detail == told.by]
    return bool(asked) and is_within(told.at, asked[-1].at - NOTED, asked[-1].at)


def _has(told: Told, replica: TrueReplica) -> bool:
    return told.job.in_store or told.job.is_in(replica.release)


_DID = {
    "paused": "paused",
    "resumed": "resumed",
    "freed": "freed",
    "acknowledged": "acked",
    "a run asked for": "run asked for",
    "its job paused": "job-paused",
    "its job resumed": "job-resumed",
    "its job moved": "job-moved",
    "its job removed": "job-removed",
}


@saying(
    "why",
    rf"^{{at}} (?P<did>{'|'.join(_DID)})(?P<all> all tasks \(\*\))? by {{by}}(?: until "
    rf"resumed| (?:until |\(dropped at ){{until}}(?: if no replica has begun it\))?)?"
    r"(?: \((?P<why>[^)]*)\))?$",
)
def _(told: Told) -> bool:
    for event in events_of(told, _DID[told.did]):
        by, _, reason = event.detail.partition(": ")
        is_its = by == told.by and (event.task == "*") == (told.all is not None)
        is_its &= is_within(told.at, event.at - NOTED, event.at)
        if event.kind == "paused":
            is_its &= reason == (told.why or "")
            is_its &= event.until is None or is_within(
                told.until or 0, event.at - NOTED + event.until, event.at + event.until
            )
        if is_its:
            return True
    return False


@saying("why", r"^{at} rescheduled by {replica} \(from (?P<old>.*) to (?P<new>.*)\)$")
def _(told: Told) -> bool:
    """The first replica of the new release has told that."""
    replica = told.truth.replicas[told.replica]
    is_its = replica.release == NEW and is_within(told.at, replica.started, replica.ready + NOTED)
    every = [f"{told.job.every}" in told.old, f"{told.job.every_anew}" in told.new]
    return is_its and all(every)


@saying("why", "^begins at {at}$", "^there is no history of this task$")
def _(told: Told) -> bool:
    """With a run or a missed run time. Whether all later ones are kept is compared by itself."""
    return told.at is None or _has_run_at(told, told.at) or is_due(told, told.at)


@check
def the_words_of_why_are_true(said: Said, truth: Truth) -> Iterator[Finding]:
    for name in said.tasks:
        first, *lines = said.why_text(name).splitlines()
        told = Told(said, truth, name)
        yield from untrue_in("why", re.sub(rf"^.*? at {MOMENT}: |, and ", "  ", first), told)
        for line in lines:
            yield from untrue_in(
                "why", line[11:] if re.match(r"\S| {11}", line) else line[2:], told
            )


# ---- of an earlier moment ----

# Seconds before a moment that `why` is asked about.
_EARLIER = 20.0


@saying(
    "why at",
    rf"its last (?:known )?run time until then was {{due}}, whose run (?:(?P<later>began later)|"
    rf"(?P<going>was still going on)|(?P<unsure>was not known to be over)|{HOW})",
)
def _(told: Told) -> bool:
    at_it = [run for run in told.runs if run.due is not None and abs(run.due - told.due) < CLOSE]
    if told.due > told.then or not at_it:
        return not at_it and told.how not in ("ended well", "failed")
    if told.later:
        return any(run.first_sign > told.then - NOTED for run in at_it)
    if told.going:
        begun = [run for run in at_it if run.first_sign < told.then + 1 + CLOSE]
        return any(run.over > told.then - NOTED or run.cut_off for run in begun)
    if told.unsure:
        return any(run.freed is not None or is_away(told, run) for run in at_it)
    return any(ENDINGS[told.how](told, run) for run in at_it)


@saying("why at", "it has never run")
def _(told: Told) -> bool:
    return not told.runs


@saying("why at", "the history has no run time before that")
def _(told: Told) -> bool:
    """Of the entries that are kept, the first one is later."""
    kept = [e for e in told.said.entries if e["task"] == told.about and e["scheduled_at"]]
    return all((seconds(e["scheduled_at"]) or 0) > told.then - CLOSE for e in kept)


@saying("why at", "begins at {at}(?P<before>; before it nothing is known)?")
def _(told: Told) -> bool:
    is_later = told.at > told.then
    return abs(told.at - told.then) <= 1 or (told.before is not None) == is_later


@check
def what_why_tells_of_an_earlier_moment_is_true(said: Said, truth: Truth) -> Iterator[Finding]:
    then = float(int(said.at - _EARLIER))
    at = datetime.fromtimestamp(then, timezone.utc).isoformat()
    for name in said.tasks:
        text = said.command("why", name, "--at", at)[1]
        told = Told(said, truth, name, {"then": then})
        for sentence in re.findall(
            r"its last (?:known )?run time until then was [^,]*, whose run "
            r"(?:\([^)\n]*\)|[^,(\n])*|it has never run|"
            r"the history has no run time before that|begins at .*",
            text,
        ):
            yield from untrue_in("why at", sentence, told)
