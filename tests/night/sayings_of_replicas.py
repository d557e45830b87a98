"""What the pages of replicas say of them, and of their runs if they are killed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import inf

from tests.night.checks import CLOSE, Finding, check, seconds, true_of
from tests.night.plan import BATCH, BY_TASK, LEASE
from tests.night.said import Said
from tests.night.sayings import (
    NOTED,
    REPLICA,
    SEEN_DEAD,
    Told,
    alive_with,
    is_how,
    is_within,
    may_have,
    saying,
    untrue_in,
    was_seen,
)
from tests.night.truth import TrueRun, Truth


@saying("replica", "alive since {begun}, its last sign of life was at {seen}")
def _(told: Told) -> bool:
    replica = told.truth.replicas[told.about]
    is_seen = was_seen(told, replica, told.seen)
    is_here = is_how(told, replica, "started", told.begun) and replica.over > told.now - SEEN_DEAD
    return is_seen and is_here


@saying("replica", "stopped in good order at {at}")
def _(told: Told) -> bool:
    replica = told.truth.replicas[told.about]
    return replica.killed == inf and is_within(told.at, replica.stopping, replica.stopped + 1)


@saying(
    "replica",
    "(?P<state>died): a run of it was found dead, and its last sign of life was at {seen}",
    "(?P<state>died) while it was stopping, and its last sign of life was at {seen}",
)
@saying(
    "replica", "(?P<state>silent) since {seen}: it is dead, hangs, or cannot reach the database"
)
def _(told: Told) -> bool:
    how = "has died" if told.state.lower() == "died" else "is silent"
    return is_how(told, told.truth.replicas[told.about], how, told.seen)


@saying("replica", "; it (?P<leads>leads|does not lead)(?: batch/)?")
def _(told: Told) -> bool:
    replica = told.truth.replicas[told.about]
    if told.leads == "leads":
        return any(at < told.now + CLOSE for at in replica.led)
    led = [at for each in told.truth.replicas.values() for at in each.led if at < told.now + CLOSE]
    # Who was the last to lead does so, unless nobody could say so for a while.
    is_last = bool(led) and max(led) in replica.led and max(led) < told.now - NOTED
    is_sure = replica.lives(told.now) and not told.truth.in_outage(told.now - 60, told.now)
    return told.about.startswith(BATCH) and not (is_last and is_sure)


@saying(
    "replica",
    "; it has been stopping since {since}, and waits for (?P<tasks>[^.]*)",
    "; its stop had begun at {since}, and was not over",
)
def _(told: Told) -> bool:
    replica = told.truth.replicas[told.about]
    return is_within(told.since, replica.terminated, replica.stopping + NOTED)


@saying("fate", "nothing changes for others: its lock is lost, so they may run the task already")
def _(told: Told) -> bool:
    run = told.truth.runs[told.of, told.of_token]
    return run.cut_off


@saying("fate", "not known")
def _(told: Told) -> bool:
    run = told.truth.runs.get((told.of, told.of_token))
    return run is None


@saying("fate", "it has ended since")
def _(told: Told) -> bool:
    run = told.truth.runs.get((told.of, told.of_token))
    return run is None or run.over < told.now + 1


@saying("fate", "; {names} can run its next run time", ", by {names}")
def _(told: Told) -> bool:
    names = re.findall(REPLICA, told.names)
    return told.about not in names and all(may_have(told, name, BY_TASK[told.of]) for name in names)


@saying(
    "fate",
    "; no other live replica has the task for its next run time",
    "nobody runs it again, because no other live replica has the task",
)
def _(told: Told) -> bool:
    return not alive_with(told, BY_TASK[told.of], but=told.about)


@saying(
    "fate",
    ", when the lease has ended at {lease}",
    "it is run again soon after {lease}, when its lease ends",
)
def _(told: Told) -> bool:
    is_failover = bool(BY_TASK[told.of].lock.get("failover"))
    return (
        is_failover == ("run again" in told.text)
        and told.now - LEASE - 1 < told.lease < told.now + LEASE + 1
    )


@saying("fate", "its lease ended at {lease}, and its end is not reported")
def _(told: Told) -> bool:
    run = told.truth.runs.get((told.of, told.of_token))
    return run is not None and told.lease < told.now + 1 and run.over > told.lease - LEASE - NOTED


@saying("fate", "it is run again soon(?=, by)")
def _(told: Told) -> bool:
    return bool(BY_TASK[told.of].lock.get("failover"))


@saying("fate", "it is run again when the task is no longer paused")
def _(told: Told) -> bool:
    is_paused = any(pause.may_hold(told.now) for pause in told.truth.pauses_of(told.of))
    return is_paused and bool(BY_TASK[told.of].lock.get("failover"))


@check
def the_page_of_a_replica_is_true(said: Said, truth: Truth) -> Iterator[Finding]:
    for name in said.replicas:
        screen = said.screen(f"/replica?id={name}")
        yield from untrue_in("replica", screen.drawn["headline"], Told(said, truth, name))
        for each in screen.data["runs"]:
            of = {"of": each["run"].task, "of_token": each["run"].token}
            one = Told(said, truth, name, of)
            yield from untrue_in("fate", each["if_killed"], one)
        if not screen.data["runs"] and (on := _surely_runs(said, truth, name)):
            yield f"page of {name}: {screen.drawn['runs_nothing']}", true_of(on)
        # One that has stopped or died can run none.
        is_gone = said.replicas[name]["state"] in ("stopped", "died")
        if is_gone and screen.data["only_here"]:
            yield f"page of {name}: only it can run {screen.data['only_here']}", "it is gone"
        tasks = [] if is_gone else said.replicas[name]["tasks"]
        for task in set(tasks) - set(screen.data["only_here"]):
            others = [each for each in truth.replicas if each != name]
            one = Told(said, truth, task)
            if not any(may_have(one, each, BY_TASK[task]) for each in others):
                yield f"page of {name}: others have {task}", f"only {name} has it"


def _surely_runs(said: Said, truth: Truth, name: str) -> TrueRun | None:
    """Return a run that goes on, and did so at the replica's last sign of life."""
    seen = seconds(said.replicas[name]["seen_at"]) or 0
    for run in truth.runs.values():
        had_begun = run.replica == name and run.first_sign < seen - CLOSE
        if had_begun and min(run.over, run.lost or inf) > said.at:
            return run
    return None
