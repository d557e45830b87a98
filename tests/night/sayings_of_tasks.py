"""What headlines, ``show`` and findings say of tasks, and what findings say besides."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from math import inf

from tests.night.checks import CLOSE, Finding, check, seconds
from tests.night.plan import BATCH, BY_TASK, GRACE, LEASE, NAMESPACE
from tests.night.said import Said
from tests.night.sayings import (
    BOUND,
    ENDINGS,
    HOW,
    NOTED,
    SEEN_DEAD,
    SIGNS,
    Told,
    alive_with,
    all_may_have,
    events_of,
    has_begun,
    is_away,
    is_due,
    is_how,
    is_pause,
    is_unnoted,
    is_within,
    lease_ended,
    may_have,
    nobody_ran,
    saying,
    took_so,
    untrue_in,
    was_seen,
)
from tests.night.truth import Truth


@saying(
    "headline",
    rf"(?:well: )?its last run, at {{begun}} on {{replica}}, {HOW} after {BOUND}{{took}}",
)
def _(told: Told) -> bool:
    run = told.run
    is_its = run is not None and run.replica == told.replica and has_begun(told, run, told.begun)
    return is_its and ENDINGS[told.how](told, run) and took_so(told, run, told.begun, told.took)


@saying("headline", "; due next at {next}", ", which is due at {next}")
@saying("why", "^due next at {next}$")
@saying("fate", ", due at {next}")
def _(told: Told) -> bool:
    """It is a run time, and no other one comes before it."""
    job = BY_TASK[told.values.get("of", told.about)]
    every = max(job.every or inf, job.every_anew or 0)
    return is_due(told, told.next, job) and told.next - every < told.now + CLOSE


@saying("headline", r"running since {begun} on {replica}, for {took}(?: \(usually {usual}\))?")
def _(told: Told) -> bool:
    run = told.run
    is_its = run is None or (run.replica == told.replica and has_begun(told, run, told.begun))
    return is_its and abs(told.now - told.begun - told.took) < CLOSE + 0.6 and is_usual(told)


def is_usual(told: Told) -> bool:
    well = [run for run in told.runs if run.how == "ok" and run.ended and run.begun]
    took = [(run.ended or 0) - (run.begun or 0) for run in well]
    return told.usual is None or min(took) - 0.6 <= told.usual <= max(took) + NOTED


@saying(
    "headline",
    r"running too long: since {begun} on {replica}, for {took}(?: \(usually {usual}\))?, although "
    "its lock is lost",
)
@saying("why", "a run that began at {begun} on {replica} goes on although its lock is lost")
@saying(
    "why",
    r"^a run that began at {begun} on {replica} goes on although its lock is lost \(token "
    r"{token}\)$",
)
@saying(
    "state",
    r"^too long: a run still goes on although its lock is lost: on {replica} since {begun} "
    r"\(token {token}\)",
)
@saying("too long", r"^since {begun} on {replica}$", r"^for {took} on {replica}$")
def _(told: Told) -> bool:
    for run in told.runs:
        is_its = run.replica == told.replica and told.token in (None, run.token)
        is_its &= told.begun is None or has_begun(told, run, told.begun)
        begun = told.begun or run.first_sign
        is_its &= told.took is None or abs(told.now - begun - told.took) < CLOSE + 0.6
        if is_its and run.over > told.now - 2 * LEASE:
            return run.cut_off and is_usual(told)
    return False


@saying("headline", "; {names}(?: and {count} more)? can run the task meanwhile")
@saying(
    "state",
    r"; {names}(?: and {count} more)? can run the task meanwhile\. If it hangs, restart that "
    "replica$",
)
def _(told: Told) -> bool:
    return all_may_have(told)


@saying("headline", "; no other live replica can run the task until that run ends")
@saying(
    "state",
    r"; no other live replica can run the task until that run ends\. If it hangs, restart that "
    "replica$",
)
def _(told: Told) -> bool:
    hangs = [run.replica for run in told.runs if run.cut_off and run.over > told.now - 2 * LEASE]
    return bool(hangs) and not alive_with(told, told.job, but=hangs[-1])


@saying(
    "headline",
    r"{replica} has (?:died|been silent since {seen}), and nobody knows whether its run goes on: "
    r"since {begun} on [\w:-]+, for at most {took}(?: \(usually {usual}\))?; no other replica runs "
    "the task before its lease has ended, at {lease}",
)
@saying(
    "state",
    "^holder silent: {replica} has (?:died|been silent since {seen}), and nobody knows whether its "
    "run goes on; locked until {lease}$",
)
def _(told: Told) -> bool:
    """Its replica was killed, or could not report; and the lease is not over."""
    run = told.run
    if run is None or run.replica != told.replica:
        return False
    is_its = told.begun is None or has_begun(told, run, told.begun)
    is_its &= told.seen is None or was_seen(told, told.truth.replicas[told.replica], told.seen)
    is_its &= told.took is None or abs(told.now - told.begun - told.took) < CLOSE + 0.6
    return is_its and is_away(told, run) and told.now - 1 < told.lease < told.now + LEASE + 1


@saying(
    "headline",
    "dead since {lease}: its run, begun at {begun} on {replica}, has not renewed its lease",
)
@saying(
    "state",
    r"^dead: its holder {replica} has not renewed its lease, which ended at {lease}; if no .*$",
)
@saying("dead", "^on {replica}$")
def _(told: Told) -> bool:
    run = told.run
    is_its = run is None or run.replica == told.replica
    is_its &= told.begun is None or run is None or has_begun(told, run, told.begun)
    return (
        is_its
        and (run is None or is_away(told, run))
        and (told.lease is None or lease_ended(told, run))
    )


@saying("headline", "; nobody runs it again before its next run time")
@saying("fate", "it is not run again, because it has no failover")
def _(told: Told) -> bool:
    return not BY_TASK[told.values.get("of", told.about)].lock.get("failover")


@saying("headline", "; failover runs it again on a replica that has the task")
@saying(
    "healing",
    "^the lease of its run on {replica} has ended, and failover runs it again unless that run is "
    "reported to be over$",
)
def _(told: Told) -> bool:
    run = told.run
    is_its = run is None or told.replica in (None, run.replica)
    return is_its and bool(told.job.lock.get("failover"))


@saying("headline", "(?:late|overdue) since {due}, for {late}: no replica has begun it")
def _(told: Told) -> bool:
    is_late = abs(told.now - told.due - told.late) < CLOSE + 0.6 + told.late // 3600 * 60
    return is_late and is_due(told, told.due) and nobody_ran(told, told.due)


@saying("headline", "; failover cannot run it again, because no live replica has it")
@saying("headline", ", and (?:no live replica has it|each live replica that has it is stopping)")
@saying("headline", "gone: no live replica has it any more, not counting those that stop; ")
@saying("why", "(?:no live replica has it|each live replica that has it is stopping) now")
@saying("notes", "gone: no live replica has it, not counting those that stop")
def _(told: Told) -> bool:
    return not alive_with(told, told.job)


@saying("headline", ", and each live replica that has it is stopping")
@saying("why", "each live replica that has it is stopping now")
def _(told: Told) -> bool:
    of_job = [name for name in told.truth.replicas if may_have(told, name, told.job)]
    stops = [name for name in of_job if told.truth.replicas[name].terminated < told.now]
    return bool(stops) and not alive_with(told, told.job)


@saying("headline", ", although {names}(?: and {count} more)? ha(?:s|ve) the task")
def _(told: Told) -> bool:
    return all_may_have(told)


@saying(
    "headline",
    "cut at {at}: a stop of {replica} ended its last run, and nobody has run its window again",
)
@saying("state", "^cut: a stop of {replica} has cut its last run, and nobody has run its window$")
@saying("cut", "^{age} ago$")
def _(told: Told) -> bool:
    run = told.run
    if (
        run is None
        or run.how != "cut"
        or run.ended is None
        or told.replica not in (None, run.replica)
    ):
        return False
    if any(later.due == run.due and later.token > run.token for later in told.runs):
        return False
    since = told.at if told.at is not None else run.ended
    return -CLOSE - 1 < since - run.ended < NOTED and (
        told.age is None or -NOTED < told.age - (told.now - run.ended) < CLOSE
    )


@saying(
    "headline",
    r"failed at {at} on {replica} with {error} \(attempt {attempt}\); a retry is due at {next}",
)
@saying("state", r"^retrying: attempt {attempt} failed \({error}\); its retry is due at {next}$")
@saying("healing", "^attempt {attempt} failed, and a retry follows, due at {next}$")
def _(told: Told) -> bool:
    run = told.run
    if run is None or run.ended is None or run.how != "error" or run.attempt != told.attempt:
        return False
    delay = told.job.lock["retry_delay"]
    is_its = told.replica in (None, run.replica)
    is_its &= told.at is None or -CLOSE - 1 < told.at - run.ended < NOTED
    return is_its and -CLOSE - 1 < told.next - run.ended - delay < NOTED


@saying(
    "headline",
    "failed at {at}(?: on {replica})?(?:, {count} times in a row)?: {error}: HTTP 503",
)
def _(told: Told) -> bool:
    failed = [
        run
        for run in told.runs
        if run.how == "error" and is_within(told.at, run.ended or 0, (run.ended or 0) + NOTED)
    ]
    return told.count in (None, told.row["failures"]) and any(
        told.replica in (None, run.replica) for run in failed
    )


@saying("headline", "failed at {at} on {replica}: the last (?P<how>died with its holder|was freed)")
def _(told: Told) -> bool:
    run = told.run
    if run is None or run.died is None or run.replica != told.replica:
        return False
    ended = run.freed if told.how == "was freed" else run.died
    return ended is not None and is_within(told.at, run.died - NOTED, told.now)


@saying("headline", "new: it has never run", "; it has never run")
@saying("why", "it has never run")
@saying("state", "^new: a replica has the task, and the task has never run$")
@saying("last run", "^never$")
def _(told: Told) -> bool:
    return not any(run.first_sign < told.now - CLOSE for run in told.runs)


_OF_ALL = r"(?P<all> with all tasks| all tasks)?"


@saying(
    "headline",
    rf"(?<!' )paused{_OF_ALL} by {{by}} since {{since}} until (?:resumed|{{until}})(?: "
    rf"\({{why}}?\))?(?=;|\.)",
)
@saying(
    "paused",
    rf"(?<!' )paused{_OF_ALL} by {{by}} since {{since}} until (?:resumed|{{until}})(?: "
    rf"\((?P<why>[^)]*)\))?",
)
@saying(
    "why",
    rf"^paused{_OF_ALL} by {{by}} since {{since}} until (?:resumed|{{until}})(?: "
    rf"\((?P<why>[^)]*)\))?$",
)
@saying(
    "pause of all",
    r"^all tasks paused by {by} since {since} until (?:resumed|{until})(?: \((?P<why>[^)]*)\))?$",
)
def _(told: Told) -> bool:
    pauses = told.truth.pauses_of(told.about)
    is_all = told.all is not None or told.about == "*"
    return any(
        pause.may_hold(told.now) and (pause.task == "*") == is_all and is_pause(told, pause)
        for pause in pauses
    )


@saying("headline", "its stored job '{task}' paused by {by} since {since} until resumed")
@saying("paused", "its stored job '{task}' paused by {by} since {since} until resumed")
@saying("why", "^its stored job '{task}' paused by {by} since {since} until resumed$")
def _(told: Told) -> bool:
    last = events_of(told, "job-paused", "job-resumed", "job-moved")[-1]
    is_its = last.kind == "job-paused" and last.task == told.task and last.detail == told.by
    return is_its and is_within(told.since, last.at - NOTED, last.at)


@saying(
    "headline",
    "; missed: {count} (?:of the last 10 run times|run times in a row), the last at {last}: "
    "[^;]*(?=;|\\.$)",
)
@saying(
    "missed", "^{count} (?:of the last 10 run times|run times in a row), the last at {last}: .*$"
)
def _(told: Told) -> bool:
    """As many run times until the last missed one were run by nobody, at least."""
    every = told.job.every or 1
    missed = [told.last - place * every for place in range(10)]
    missed = [at for at in missed if not any(abs((run.due or 0) - at) < CLOSE for run in told.runs)]
    return is_due(told, told.last) and told.last in missed and len(missed) >= told.count


@saying("missed", "^at {last}$")
@saying("state", "^missed: no replica has run it at {last}, and it is not run again; .*$")
@saying("headline", "missed: no replica ran {last}: [^;]*(?=;|\\.$)")
def _(told: Told) -> bool:
    return is_due(told, told.last) and nobody_ran(told, told.last) and told.last < told.now


_DIED = (
    "died with its holder|has overrun its maximum lock|was freed|"
    "died, overran its maximum lock or was freed"
)
_LAST = f"(?:the last )?(?:{_DIED})"


@saying("headline", f"; healing: (?P<how>{_LAST}), and {{replica}} runs it again")
@saying("healing", f"^(?P<how>{_LAST}), and {{replica}} runs it again$")
def _(told: Told) -> bool:
    run = told.run
    before = [each for each in told.runs if run is not None and each.token < run.token]
    is_its = run is not None and run.takeover and run.replica == told.replica
    return is_its and is_away(told, before[-1])


@saying(
    "headline",
    "; failing: (?:{count} times, the last )?with {error}",
    f"; failing: (?:{{count}} times, )?(?P<how>{_LAST})",
)
@saying(
    "failing",
    "^(?:{count} times, the last )?with {error}$",
    f"^(?:{{count}} times, )?(?P<how>{_LAST})$",
)
def _(told: Told) -> bool:
    return _failed(told, told.count or 1)


@saying(
    "failures",
    "^{count} in a row, the last with {error}$",
    f"^{{count}} in a row, (?P<how>{_LAST})$",
)
def _(told: Told) -> bool:
    return _failed(told, told.count)


def _failed(told: Told, count: int) -> bool:
    """Return whether the last failure is the said one, and the count that of the row."""
    failed = [run for run in told.runs if run.how == "error" or is_away(told, run)][-2:]
    if count != told.row["failures"]:
        return False
    if told.error:
        return any(run.how == "error" for run in failed)
    has_died = "died" in told.how and any(run.hung is None and is_away(told, run) for run in failed)
    if "was freed" in told.how and any(run.freed is not None for run in told.runs):
        return True
    return has_died or ("overra" in told.how and any(run.cut_off for run in failed))


# ---- show ----


@saying("state", "^(?:ok|failing|paused|gone|running too long)$")
@saying("state", "^(?P<state>late|overdue): by {late}$")
def _(told: Told) -> bool:
    return (
        told.late is None or abs(told.late - told.row["late_by"]) < CLOSE + told.late // 3600 * 60
    )


@saying("state", "^running: on {replica}, locked until {until}$")
def _(told: Told) -> bool:
    run = told.run
    is_away = told.truth.in_outage(told.now - 2 * LEASE, told.now)
    is_lease = abs(told.until - told.now) < LEASE + NOTED or is_away
    return is_lease and (run is None or run.replica == told.replica)


@saying(
    "last run",
    r"^{begun} on {replica}(?:, (?P<kind>schedule|takeover|retry|manual))?(?:, attempt {attempt})?"
    r"(?:, for {due})?, (?P<how>so far|took|cut by a stop after|freed after|cancelled after|died "
    r"with "
    r"its holder, whose lease ended after|overran its maximum lock after|its lease ended after) "
    r"{took}(?:, and it has not reported its end)?, token {token}$",
)
def _(told: Told) -> bool:
    run = told.run
    if run is None:
        return is_unnoted(told)
    hows = {
        "so far": "goes on",
        "cut by a stop after": "was cut by a stop",
        "freed after": "was freed by an operator",
        "cancelled after": "was cancelled",
        "overran its maximum lock after": "overran its maximum lock",
        "its lease ended after": "has not renewed its lease",
        "died with its holder, whose lease ended after": "died with its holder",
    }
    is_its = run.replica == told.replica and has_begun(told, run, told.begun)
    asked = events_of(told, "run asked for")
    kind = "takeover" if run.takeover else "retry" if run.attempt > 1 else "schedule"
    is_its &= told.kind == kind or (told.kind == "manual" and bool(asked))
    is_its &= (told.attempt or 1) == run.attempt
    is_its &= told.due is None or run.due is None or abs(told.due - run.due) < CLOSE
    is_its &= told.how == "took" or ENDINGS[hows[told.how]](told, run)
    is_its &= told.how != "took" or run.how in ("ok", "error")
    return is_its and took_so(told, run, told.begun, told.took)


@saying("due", "^{due}(?:, overdue from {overdue})?$")
def _(told: Told) -> bool:
    is_one_off = told.job.every is None
    is_right = told.overdue is None or abs(told.overdue - told.due - GRACE) < CLOSE or is_one_off
    return is_right and is_due(told, told.due)


@saying("last success", "^{at}$")
def _(told: Told) -> bool:
    return any(
        run.how == "ok" and is_within(told.at, run.ended or 0, (run.ended or 0) + NOTED)
        for run in told.runs
    )


@saying("last failure", "^{at}$")
def _(told: Told) -> bool:
    times = [run.ended for run in told.runs if run.how in ("error", "cut")]
    for run, later in zip(told.runs, [*told.runs[1:], None], strict=True):
        if is_away(told, run):  # known when the lease has ended, or when the next run begins
            times += [run.died, run.lost, run.hung, later and later.first_sign]
    times += [begin for begin, _ in told.truth.outages]
    return any(is_within(told.at, at, at + LEASE + NOTED) for at in times if at)


@saying(
    "lock times",
    "^minimum {least}, for the window until {until}; maximum {most}$",
    "^maximum {most}$",
)
def _(told: Told) -> bool:
    run, most = told.run, told.job.lock.get("max_lock")
    every = {told.job.every or 3600, told.job.every_anew or told.job.every or 3600}
    # It is counted from the run time on, so that a later begin has less of it: a takeover has what
    # the dead run has left.
    wanted = [most] if most else [5 * each for each in every]
    late = 0.0 if run is None or run.due is None else run.first_sign - run.due
    is_right = any(0 <= each - told.most < max(LEASE, late) + NOTED for each in wanted)
    is_manual = told.row["kind"] == "manual"  # the window is that of the last run time
    if run is None or run.due is None or told.least is None or is_manual:
        return is_right
    return is_right and abs(told.until - run.due - told.least) < CLOSE + 0.1


@saying("notes", "its last run began {late} after its run time")
def _(told: Told) -> bool:
    run = told.run
    if run is None or run.due is None:
        return told.truth.in_outage(told.now - 30, told.now) or run is None
    return run.first_sign - run.due - NOTED < told.late < run.first_sign - run.due + CLOSE


@saying("notes", "its (?P<what>failure|cut|miss) alarms no more")
def _(told: Told) -> bool:
    acked = any(event.task == told.about for event in events_of(told, "acked"))
    run = told.run
    if told.what == "failure":
        return acked and told.truth.failures(told.about, told.row["token"]) > 0
    return acked and (run is not None and run.how == "cut" if told.what == "cut" else run is None)


@saying("notes", "run asked for by {by}")
@saying("headline", "; a run was asked for by {by} at {at}")
def _(told: Told) -> bool:
    asked = events_of(told, "run asked for")
    is_its = bool(asked) and asked[-1].detail == told.by
    is_its &= told.at is None or is_within(told.at, asked[-1].at - NOTED, asked[-1].at)
    return is_its and not any(
        run.first_sign > asked[-1].at + NOTED for run in told.runs if not run.due
    )


@saying(
    "options",
    r"(?P<name>\w+) (?P<value>on|off|\w+|[\d.]+s?) \((?P<place>default|in the job|in the "
    r"executor)\)(?:, )?",
)
def _(told: Told) -> bool:
    """What the job or the executor sets is told with its value and its place."""
    job = {"grace": GRACE, **told.job.lock}
    given = job.get(told.name, LEASE if told.name == "lease" else None)
    place = (
        "in the job"
        if told.name in job
        else "in the executor"
        if told.name == "lease"
        else "default"
    )
    if told.place != place:
        return False
    if given is None:
        return True
    right = ("on" if given else "off") if isinstance(given, bool) else f"{given:g}"
    return told.value.removesuffix("s") == right


# ---- findings ----


@saying("late", "^by {late}$")
@saying("overdue", "^by {late}$")
def _(told: Told) -> bool:
    due = seconds(told.row["due_at"]) or 0
    return abs(told.now - due - told.late) < CLOSE + 0.6 and nobody_ran(told, due)


@saying(
    "overdue",
    r"^by {late}, (?:a stored job|the stored job '{task}') that no replica claims(?:: none is "
    r"alive|: {names} (?:lists it, but does|list it, but do) not claim it, because something that "
    r"it needs is missing there, such as its function, or because no worker is free)?$",
)
def _(told: Told) -> bool:
    has_live = any(each.lives(told.now) for each in told.truth.replicas.values())
    if "none is alive" in told.text and has_live:
        return False
    is_its = is_due(told, told.now - told.late) and told.late > 0
    return is_its and (told.names is None or all_may_have(told))


@saying(
    "died", "^(?P<state>died)(?P<stopping> while it was stopping)?, last sign of life {age} ago$"
)
@saying(
    "silent",
    "^(?P<state>silent)(?P<stopping> while it was stopping)?, last sign of life {age} ago$",
)
def _(told: Told) -> bool:
    replica = told.truth.replicas[told.about]
    how = "has died" if told.state == "died" else "is silent"
    is_stopping = replica.terminated < told.now
    is_right = (told.stopping is None or is_stopping) and is_how(
        told, replica, how, told.now - told.age
    )
    return is_right and (told.state == "silent" or replica.dying < told.now)


@saying("stopping", "^it has been stopping since {since}, and waits for (?P<tasks>.*)$")
def _(told: Told) -> bool:
    replica = told.truth.replicas[told.about]
    is_since = is_within(told.since, replica.terminated, replica.stopping + NOTED)
    named = [] if told.tasks == "its runs" else told.tasks.split(", ")
    begun = {
        run.task
        for run in told.truth.runs.values()
        if run.replica == told.about and run.first_sign < told.now
    }
    return is_since and set(named) <= begun


@saying("releases", "^live replicas with common tasks have several releases: (?P<list>.*)$")
def _(told: Told) -> bool:
    numbers = {
        value: int(number) for number, value in re.findall(r"(\d+) with ([\d.]+)", told.list)
    }
    # The other application has one release.
    everybody = [each for name, each in told.truth.replicas.items() if not name.startswith(BATCH)]
    sure = Counter(
        each.release for each in everybody if each.lives(told.now) and each.ready < told.now - 3
    )
    may = Counter(
        each.release
        for each in everybody
        if each.started < told.now < min(each.stopped + CLOSE, each.killed + SEEN_DEAD)
    )
    return all(sure[value] <= number <= may[value] for value, number in numbers.items())


@saying(
    "no replica",
    "^no replica(?: of '(?P<space>[^']*)')? is alive for {age}; last seen: {replica}$",
)
@saying(
    "no replica",
    "^all replicas(?: of '(?P<space>[^']*)')? have stopped in good order, last {replica}$",
)
def _(told: Told) -> bool:
    application = next(name for name, space in NAMESPACE.items() if space == (told.space or ""))
    fleet = [
        each
        for name, each in told.truth.replicas.items()
        if name.startswith(BATCH) == (application == BATCH) and each.started < told.now
    ]
    over = max(each.over for each in fleet)
    if over > told.now:
        return False
    last = told.truth.replicas[told.replica]
    if last not in fleet:
        return False
    if told.age is None:
        return last.over == over and last.killed == inf
    # Several were killed within a second, and each gives signs of life now and then.
    return last.over > over - SIGNS and over - SIGNS < told.now - told.age < over + CLOSE


@saying("empty", "^no task was ever registered here: is this the right database\\?$")
def _(told: Told) -> bool:
    # The night begins up to some seconds before its first replicas.
    return all(told.now < each.started for each in told.truth.replicas.values())


# ---- the checks ----


@check
def the_headline_of_a_task_is_true(said: Said, truth: Truth) -> Iterator[Finding]:
    for name in said.tasks:
        says = said.screen(f"/task?name={name}").data["headline"].says
        yield from untrue_in("headline", says, Told(said, truth, name))


_FACTS = (
    "state",
    "paused",
    "last run",
    "due",
    "last success",
    "last failure",
    "failures",
    "lock times",
    "notes",
    "options",
)


@check
def the_facts_of_show_are_true(said: Said, truth: Truth) -> Iterator[Finding]:
    for name in said.tasks:
        facts = said.show(name)
        state = said.tasks[name]["state"]
        if not facts["state"].startswith(state) or ("failures" in facts) != bool(
            said.tasks[name]["failures"]
        ):
            yield f"show {name}: {facts}", f"status: {state}"
        for fact in _FACTS:
            if fact in facts:
                yield from untrue_in(fact, facts[fact], Told(said, truth, name))


@check
def the_words_of_each_finding_are_true(said: Said, truth: Truth) -> Iterator[Finding]:
    for found in said.check["findings"]:
        about = found["task"] or found["replica"] or "*"
        source = {"paused": "pause of all", "paused for long": "pause of all"}.get(
            found["what"], found["what"]
        )
        yield from untrue_in(source, found["says"], Told(said, truth, about))
