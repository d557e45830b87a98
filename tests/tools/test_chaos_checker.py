"""What the chaos finds, on histories made by hand: right ones, and each fault put into one."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from math import inf
from typing import Any

import pytest

from apscheduler_tasklock.demo.history import Event
from tests.chaos.bounds import ORPHANED, POOL_BACK, REACTION, RECOVERY, UNDER_WAY
from tests.chaos.checker import check
from tests.chaos.tasks import ChaosTask, OneOff

PERIOD, LEASE, TAKES = 2.0, 3.0, 0.5
TASK = ChaosTask("job", PERIOD, (TAKES, TAKES), True, LEASE, 40)
AT_MOST_ONCE = replace(TASK, failover=False)

BASE = 5000.0  # of the machine's clock
LAST = 40.0  # when all histories end

# Seconds from a run time to its claim, and from there to the begin of the job.
DELAY = 0.01

# The worker process of the pool of `a`, and the one after a kill. Another of the pool has 8.
WORKER, NEXT_WORKER, SIBLING = 7, 9, 8
ROWS = ("claimed", "renewed", "released", "handed over", "given up", "lease ended")


class Story:
    """A history that is written by hand, as a text: sentences, each a method and its arguments.

    A sentence may also be the name of another story, whose sentences it stands for. In words, ``-``
    is a space. All times are seconds from the history's start.

    There are mostly two replicas, whose run times are 0.7 s apart: ``a`` at 0, 2, 4 .. and ``b`` at
    0.7, 2.7, 4.7 ..
    """

    def __init__(self, text: str) -> None:
        self.events: list[Event] = []
        self.add(text)
        self.tell(LAST, "closing")

    def add(self, text: str) -> None:
        for sentence in text.split(";"):
            if (story := sentence.strip()) in STORIES:
                self.add(STORIES[story])
                continue
            verb, *words = story.split()
            named = dict(word.split("=") for word in words if "=" in word)
            given = [value(word) for word in words if "=" not in word]
            getattr(self, verb)(*given, **{name: value(word) for name, word in named.items()})

    def tell(self, at: float, kind: str, replica: str = "", **details: Any) -> None:
        for name in ("due", "until", "run_until"):
            if details.get(name) is not None:
                details[name] += BASE
        self.events.append(Event(BASE + at, kind, replica, **details))

    def of_job(self, at: float, kind: str, replica: str, token: int, **details: Any) -> None:
        self.tell(at, kind, replica, task="job", token=token, **details)

    def during(
        self, begun: float, kind: str, ended: float, end: str, replica: str = "", worker: int = 0
    ) -> None:
        """Let a trouble begin and end."""
        self.tell(begun, kind, replica, worker=worker)
        self.tell(ended, end, replica, worker=worker)

    def starts(self, at: float, *replicas: str) -> None:
        for replica in replicas:
            self.tell(at, "ready", replica)

    def fire(self, replica: str, at: float, task: str = "job") -> None:
        self.tell(at, "fire", replica, task=task, due=at)

    def fires(self, replica: str, begun: float = 0.0, ended: float = LAST) -> None:
        """Fire at all run times of a replica."""
        at = {"a": 0.0, "b": 0.7}.get(replica, 1.0)
        while at < ended:
            if at >= begun:
                self.fire(replica, at)
            at += PERIOD

    def skips(self, replica: str, at: float, due: float) -> None:
        self.tell(at, "skipped", replica, task="job", due=due)

    def claims(
        self, token: int, replica: str, at: float, window: float | None = None, **details: Any
    ) -> None:
        due, at = (at if window is None else window) + UNDER_WAY / 10, at + DELAY
        self.of_job(at, "claimed", replica, token, due=due, until=at + LEASE, **details)

    def begins(self, token: int, replica: str, due: float, **details: Any) -> None:
        begun = details.pop("at", due + 2 * DELAY)
        self.of_job(begun, "begin", replica, token, due=due, **details)

    def renews(self, token: int, replica: str, at: float, ended: float = -inf) -> None:
        """Renew once, or each second."""
        self.of_job(at, "renewed", replica, token, until=at + LEASE)
        if at + 1 < ended:
            self.renews(token, replica, at + 1, ended)

    def believes(self, token: int, replica: str, at: float, **details: Any) -> None:
        self.of_job(at, "holds", replica, token, **details)

    def ends(self, token: int, replica: str, at: float, **details: Any) -> None:
        self.of_job(at, "end", replica, token, **details)

    def releases(self, token: int, replica: str, at: float, **details: Any) -> None:
        self.of_job(at, "released", replica, token, until=at, **details)

    def hands_over(self, token: int, replica: str, at: float) -> None:
        self.of_job(at, "handed over", replica, token, until=at)

    def ends_lease(self, token: int, replica: str, at: float) -> None:
        self.of_job(at, "lease ended", replica, token, until=at)

    def gives_up(self, token: int, replica: str, at: float) -> None:
        """Let a replica give a window up, and ``e`` log it."""
        self.of_job(at, "given up", replica, token, until=at)
        self.logs("e", at + 0.01)

    def logs(self, replica: str, at: float) -> None:
        detail = "task 'job': the window of .. is given up: .."
        self.tell(at, "erred", replica, detail=detail)

    def runs(self, token: int, replica: str, due: float, kept: bool = True) -> None:
        """Run from the claim to the release."""
        self.claims(token, replica, due)
        self.begins(token, replica, due)
        self.ends(token, replica, due + TAKES)
        self.releases(token, replica, due + TAKES + DELAY, kept=kept)

    def runs_late(self, token: int, replica: str, due: float, at: float) -> None:
        """Run a run time some seconds after it."""
        self.claims(token, replica, at, window=due)
        self.begins(token, replica, due, at=at + 2 * DELAY)
        self.ends(token, replica, at + 0.4)
        self.releases(token, replica, at + 0.41)

    def takes_over(self, token: int, replica: str, at: float, window: float = 4.0) -> None:
        """Run a dead holder's window again, to the end."""
        self.claims(token, replica, at, window=window)
        self.begins(token, replica, at, takeover=True)
        self.ends(token, replica, at + TAKES)
        self.releases(token, replica, at + TAKES + DELAY)

    def goes_on(self, token: int, replica: str, begun: float, ended: float = LAST) -> None:
        """Run all of a replica's windows; both replicas fire."""
        at = begun
        while at < ended:
            self.runs(token, replica, at)
            token, at = token + 1, at + PERIOD

    def plans(self, job: str, due: float) -> None:
        """Let there be a job that is due once."""
        detail = json.dumps(asdict(OneOff(job, BASE + due, TAKES, True)))
        self.tell(-5.0, "planned", detail=detail)

    def begins_once(self, at: float, known_as: str = "once") -> None:
        """Begin that job on ``a``, in a row that has its id, or a name that is made for it."""
        self.tell(at, "claimed", "a", task=known_as, token=1, due=5.0, until=at + LEASE)
        detail = "" if known_as == "once" else known_as
        self.tell(at + 0.1, "begin", "a", task="once", token=1, due=5.0, detail=detail)

    def runs_once(self, at: float, known_as: str) -> None:
        """Run that job on ``a``."""
        self.begins_once(at, known_as)
        self.tell(at + 0.2, "end", "a", task="once", token=1)
        self.tell(at + 0.3, "released", "a", task=known_as, token=1, until=3605.0)

    def _found(self, since: float = -inf, ended: float = inf, **wanted: Any) -> Iterator[Event]:
        for event in self.events:
            is_wanted = all(getattr(event, name) == value for name, value in wanted.items())
            if is_wanted and since <= event.at - BASE < ended:
                yield event

    def drop(self, **wanted: Any) -> None:
        """Leave all events out that are so."""
        dropped = list(self._found(**wanted))
        self.events = [event for event in self.events if event not in dropped]

    def drop_one(self, kind: str, **wanted: Any) -> None:
        """Leave the first event out that is so."""
        self.events.remove(next(self._found(kind=kind, **wanted)))

    def until(self, token: int) -> None:
        """Leave out what is of this token, and of later ones."""
        self.events = [event for event in self.events if event.token < token]

    def silent(self, replica: str, since: float, ended: float = inf) -> None:
        """Let a replica not fire."""
        self.drop(kind="fire", replica=replica, since=since, ended=ended)

    def ends_at(self, token: int, run_until: float) -> None:
        """Let the maximum lock of a claim end then."""
        place = self.events.index(next(self._found(kind="claimed", token=token)))
        self.events[place] = replace(self.events[place], run_until=BASE + run_until)

    def killed_alone(self) -> None:
        """Let the worker processes of the replica that was killed live on."""
        place = self.events.index(next(self._found(kind="killed")))
        self.events[place] = replace(self.events[place], detail="alone")

    def kills(self, worker: int) -> None:
        """Kill a worker process in the run of token 3."""
        self.tell(4.1, "worker killed", "a pool", worker=worker)

    def in_pool(self) -> None:
        """Let the runs of ``a`` be in a worker process of its pool, or of the one after a kill.

        The rows know of the replica alone, which claims, renews and releases.
        """
        killed = next(self._found(kind="worker killed"), None)
        for number, event in enumerate(self.events):
            if event.replica == "a" and event.task and event.kind not in ROWS:
                worker = WORKER if killed is None or event.at < killed.at else NEXT_WORKER
                worker = 0 if event.kind == "fire" else event.worker or worker
                self.events[number] = replace(event, replica="a pool", worker=worker)
        self.starts(-5.0, "a pool")
        self.tell(-5.0, "worker started", "a pool", worker=SIBLING)


def value(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word.replace("-", " ")


# The right ones have no other's name in front.
RIGHT = {
    "peaceful": "both; goes_on 1 a 0",
    # The holder of token 3 is killed in its run, and its window is run again.
    "killed": "killed in its run; takes_over 4 b 7.4; goes_on 5 b 8.7",
    "killed before it began": "killed; drop_one begin token=3",
    # Who takes the window of token 3 over is killed, too, before its run begins.
    "killed and killed again": "starts -5 a b c; fires a 0 4.1; fires b 0 7; fires c;"
    "goes_on 1 a 0 4; claims 3 a 4; begins 3 a 4; tell 4.3 killed a;"
    "claims 4 b 7.4 4; tell 7.41 killed b; takes_over 5 c 10.8; goes_on 6 c 13",
    # The holder of token 3 is stopped past its lease, and finds out when it goes on.
    "stopped": "begun on a; silent a 4.1 10; tell 4.3 stopped a; takes_over 4 b 7.4;"
    "tell 8.2 continued a; believes 3 a 8.3 lost=1; ends 3 a 8.4 lost=1; goes_on 5 b 8.7",
    "stopped before it began": "stopped; drop_one begin token=3;of_job 8.25 begin a 3 due=4 lost=1",
    "stopped for long": "two runs; silent a 3.9 20; during 3.9 stopped 19.9 continued a;"
    "goes_on 3 b 4.7",
    # A run raises, which opens its window again, for the other replica's run time in it.
    "raised": "both; runs 1 a 0 0; runs 2 b 0.7; goes_on 3 b 2.7",
    "outage": "two runs; during 3.9 down 9 up; goes_on 3 a 10",
    # The holder of token 3 is cut off, ends its run, and cannot say so in time.
    "cut off": "ended in secret; during 4.2 hung 9 freed a",
    # Other run times find a run running that takes longer than the period.
    "long": "begun on a; renews 3 a 5 9; ends 3 a 9; releases 3 a 9.01; goes_on 4 a 10",
    # The coroutine of token 3 is cut by a graceful stop, and another replica runs its window.
    "handed over": "begun on a; silent a 4.1; tell 4.3 leaving a; hands_over 3 a 4.35;"
    "of_job 4.36 cut a 3 lost=1; tell 4.5 gone a; takes_over 4 b 4.8; goes_on 5 b 6.7",
    # The claim of token 3 is granted when its replica is already ending.
    "handed over unbegun": "handed over; drop_one begin token=3; drop_one cut token=3",
    # A replica joins after the holder of token 3 has died, and runs its window again.
    "joined": "alone; fires a 0 4.1; goes_on 1 a 0 4; claims 3 a 4; begins 3 a 4;"
    "tell 4.3 killed a; starts 5 b; fires b 5; takes_over 4 b 11.1; goes_on 5 b 12.7",
}
STORIES = {
    **RIGHT,
    "alone": "starts -5 a",
    "both": "starts -5 a b; fires a; fires b",
    "two runs": "both; goes_on 1 a 0 4",
    "begun on a": "two runs; claims 3 a 4; begins 3 a 4",
    "killed in its run": "begun on a; silent a 4.1; tell 4.3 killed a",
    "ended in secret": "begun on a; ends 3 a 4.5; takes_over 4 b 7.4; goes_on 5 b 8.7",
    # A connection of the other replica is cut, so that it takes its time.
    "ended in secret for long": "begun on a; tell 4.2 hung a; ends 3 a 4.5; tell 7 cut-off b;"
    "takes_over 4 b 11; goes_on 5 b 12.7",
    "handed over and left": "handed over; until 4",
    "left behind": "handed over and left; drop_one handed-over; takes_over 4 b 7.4;goes_on 5 b 8.7",
    # The end of the lease of token 3, in a pool of which a worker was killed; or none.
    "freed": "ends_lease 3 a 4.7; takes_over 4 b 5.5; goes_on 5 b 6.7; in_pool",
    "left": "takes_over 4 b 7.4; goes_on 5 b 8.7; in_pool",
    "pool before": "during -4.6 worker-started -4.5 worker-killed a-pool 6",
    "group ends": "begun on a; silent a 4.1; tell 4.1 leaving a detail=end-group; tell 4.5 gone a",
    "killed alone": "killed; killed_alone",
    "worker killed": "begun on a; kills 7; freed",
    "given up by b": "killed in its run; drop replica=b; starts -5 e; fires e; starts -0.8 b",
    # The run of token 3 dies, and that of an earlier run time, which goes first.
    "two dead": "begun on a; renews 3 a 5 8; silent a 8.1; tell 8.3 killed a; starts -5 c;"
    "fires c 0 16; gives_up 3 b 11.4; claims 4 c 11.5 6.7; begins 4 c 6.7 at=11.5;"
    "renews 4 c 12.5 16; tell 16.3 killed c; gives_up 4 b 18.9",
    "once": "peaceful; plans once 5; fire a 5 once; fire b 5 once",
}

# The holder of token 3 goes on at 8.2. So much later it has had an answer to its renewal.
LEARNED = 8.2 + RECOVERY
# So much later a worker process whose parent was killed has to know it.
KNOWN = 4.3 + ORPHANED + REACTION
# A worker process is killed at 4.1. So much later its pool has been replaced.
REPLACED = 4.1 + POOL_BACK + REACTION

# What is found in a history, after its name; "right" for nothing.
CASES = f"""
# Overlaps. A lock that is lost stays so, so beliefs last from one telling to the next. An overlap
# counts with each run that it meets.
two runs that both believed
    stopped; believes 3 a {LEARNED + 0.1} -> 4 overlap
a belief until the next renewal is answered
    stopped; believes 3 a {LEARNED - 0.1} -> right
a belief before the other run began
    killed; believes 3 a 4.29 -> right
a release that a claim has found
    both; goes_on 1 a 0 4; drop_one released token=2; releases 2 a 4.06; goes_on 3 a 4 -> right
a release that a claim has not found, since it came later in the row
    both; goes_on 1 a 0 4; drop_one released token=2; goes_on 3 a 4; releases 2 a 4.06
    -> overlap, window missed
taken over before the lease had ended
    killed; renews 3 a 4.6 -> overlap

# Tokens.
a table put back to an older state
    both; goes_on 5 a 0 4; runs 5 b 4.7; goes_on 7 b 6.7 -> token went back
a token that one replica runs with twice
    peaceful; of_job 4.55 begin a 3 due=4 -> token went back

# Windows that are run twice.
run by another replica, too
    two runs; runs 3 b 2.7; goes_on 4 a 4.6 -> window run twice
run late by a starved replica that finds the lock free
    peaceful; until 6; runs_late 6 b 4.7 9; goes_on 7 a 10 -> window run twice
taken over from a run that ended
    two runs; takes_over 3 b 2.7 2; goes_on 4 a 4 -> window run twice
taken over from nobody
    both; takes_over 1 a 0 0; goes_on 2 a 2 -> window run twice
not renewed for no reason
    ended in secret -> window run twice
not renewed for a short trouble
    ended in secret; during 4.2 hung 4.7 freed a -> window run twice
not renewed for a connection that was cut off
    ended in secret; tell 4.7 cut-off a -> window run twice
not renewed for a connection that was terminated
    ended in secret; tell 4.7 terminated a -> window run twice
not renewed in a stall
    ended in secret; tell 4.7 stalled a until=7 -> right
taken over from a run that was released late
    cut off; releases 3 a 7.39 -> window run twice
taken over although its end could be said
    ended in secret for long; tell 5.2 freed a -> window run twice
taken over since its end could not be said
    ended in secret for long; tell 5.4 freed a -> right
handed over when it had ended
    handed over; drop_one cut token=3; ends 3 a 4.3 -> window run twice
taken over past its maximum lock
    killed; ends_at 3 7 -> window run twice
taken over before the end of its maximum lock
    killed; ends_at 3 7.5 -> right

# Windows that are missed: that of `a`, which runs the others; and that of `b`, which did not run it
# in place of `a`.
claimed by nobody
    peaceful; drop token=3 -> 2 window missed
claimed by nobody while the only replica was stopped
    alone; fires a; goes_on 1 a 0 4; goes_on 3 a 12; during 3.9 stopped 8.5 continued a -> right
claimed by nobody while another replica was stopped
    starts -5 b; fires b; goes_on 1 b 0.7 4; goes_on 3 b 12.7; during 3.9 stopped 11.5 continued a
    -> 4 window missed
claimed by nobody long after a holder was killed
    killed; drop token=8 -> window missed
claimed by nobody long after a holder was stopped
    stopped; drop token=8 -> window missed
claimed by nobody after connections were cut off
    peaceful; drop token=3; tell 3.6 cut-off a; tell 3.6 cut-off b -> 2 window missed
claimed by nobody after connections were terminated
    peaceful; drop token=3; tell 3.6 terminated a; tell 3.6 terminated b -> 2 window missed
a replica that stops firing
    peaceful; silent b 9.1 -> window missed
skipped by a replica that was able to claim
    peaceful; skips b 4.2 4.7 -> window missed
skipped by a replica that does not fire
    peaceful; skips c 4.2 4.7 -> right
skipped in an outage
    outage; skips a 7.2 4 -> right
refused, and could not be taken over later
    killed; drop_one released token=4; releases 4 b 7.92; skips b 8 4.7; tell 7.95 cut-off b
    -> right
an opened window that nobody runs
    raised; until 2; goes_on 2 b 2.7 -> window missed
an opened window, told after its refusal by a busy scheduler
    raised; until 2; drop_one fire replica=b; drop_one released token=1; releases 1 a 0.75 kept=0;
    tell 0.8 fire b task=job due=0.7; goes_on 2 b 2.7 -> right
not fired while one instance runs
    begun on a; silent a 4.1 18; renews 3 a 5 17; ends 3 a 17; releases 3 a 17.01; goes_on 4 a 18
    -> right
released without a run
    peaceful; drop_one begin token=3; drop_one end token=3 -> window missed
given back without a run, of which those that were refused it do not know
    two runs; claims 3 a 4; releases 3 a 4.1 kept=0; goes_on 4 b 4.7 -> window missed
refused because of a dead run, when an earlier run time goes first and takes long
    begun on a; renews 3 a 5 8; silent a 8.1; tell 8.3 killed a; starts -5 c; fires c;
    gives_up 3 b 11.4; claims 4 c 11.5 6.7; begins 4 c 6.7 at=11.5; renews 4 c 12.5 16; ends 4 c 16;
    releases 4 c 16.01; goes_on 5 b 16.7 -> right
refused because of two dead runs, one after the other, and claimed then
    two dead; runs_late 5 b 18.7 19; goes_on 6 b 20.7 -> right
refused because of two dead runs, one after the other, and forgotten
    two dead; goes_on 5 b 20.7 -> 2 window missed
given back, and claimed again at once
    two runs; claims 3 a 4; releases 3 a 4.1 kept=0; runs_late 4 a 4 4.2; goes_on 5 a 6 -> right
a dead run that is left
    killed; until 4 -> window missed
a dead run that no poll finds
    killed in its run; takes_over 4 b 9.4; goes_on 5 b 10.7 -> window missed
a dead run that the next window passes over
    killed in its run; goes_on 4 b 8.7 -> window missed
a dead run of which nobody can know, since connections are cut again and again
    killed in its run; tell 6 cut-off b; tell 10 cut-off b; tell 14 cut-off b; tell 18 cut-off b;
    tell 22 cut-off b; tell 26 cut-off b; tell 30 cut-off b; tell 34 cut-off b; tell 38 cut-off b
    -> right
a dead run, by a replica that is busy with the task, since its lost run goes on
    stopped; until 4; drop_one end token=3; tell 6.9 killed b -> right
a window that was handed over and left
    handed over and left; takes_over 4 b 7.4; goes_on 5 b 8.7 -> window missed
a window that was handed over and that the next one passes over
    handed over and left; runs 4 b 4.7; goes_on 5 b 6.7 -> window missed, window run twice
a cut run that is released as if it had ended
    handed over and left; drop_one handed-over; releases 3 a 4.35; goes_on 4 b 6.7 -> window missed
taken for a misfire
    peaceful; tell 5 misfired b task=job due=2.7 -> window missed
a misfire of a replica that was stopped
    peaceful; tell 5 misfired b task=job due=2.7; during 3 stopped 4.9 continued b -> right

# Stops, and what replicas tell.
a lock that a graceful stop leaves behind
    left behind -> lock left behind
a lock that a replica in trouble leaves behind
    left behind; during 4.2 hung 4.6 freed a -> right
a lock that a replica leaves behind which wrote to its rows after its trouble
    left behind; during 3.5 hung 3.9 freed a -> lock left behind
a replica that takes long to end
    handed over; drop_one gone; tell 14 gone a -> slow stop
a job that runs before it is due
    peaceful; tell 5 early b task=job -> ran too early
a replica that logs an error
    peaceful; tell 3 erred b detail=Oops -> error logged
said to be given up
    peaceful; logs b 3 -> error logged
given up since four holders died
    given up by b; claims 4 b 7.2 4; tell 7.3 killed b; starts 2.4 c; claims 5 c 10.4 4;
    tell 10.5 killed c; starts 5.6 d; claims 6 d 13.6 4; tell 13.7 killed d; gives_up 6 b 16.8;
    goes_on 7 e 17 -> right
given up since its maximum lock has ended, when no other replica was well before that
    given up by b; claims 4 b 7.2 4 run_until=10.35; tell 7.3 killed b; gives_up 4 b 10.4;
    goes_on 5 e 11 -> right
given up rightly, but a replica had left it before
    given up by b; claims 4 b 7.2 4 run_until=18.35; tell 7.3 killed b; gives_up 4 b 18.4;
    goes_on 5 e 19 -> window missed

# One-off jobs.
a one-off job that runs once the database answers
    once; during 4 slowed 9 quick; runs_once 7 once -> right
a one-off job whose row has another name
    once; during 4 slowed 9 quick; runs_once 7 job:0123456789abcdef -> right
a one-off job that nobody runs
    once -> 2 window missed
a dead run of a one-off job that another replica has asked for
    killed; plans once 3.5; fire a 3.5 once; fire b 3.5 once; begins_once 3.6;
    during 3.4 stopped 3.54 continued b -> window missed
a dead run of a one-off job that another replica has missed
    killed; plans once 3.5; fire a 3.5 once; fire b 3.5 once; begins_once 3.6;
    tell 3.55 misfired b task=once due=3.5; during 3.4 stopped 3.54 continued b -> right
a dead run of a one-off job that another replica has missed long after it
    killed; plans once 3.5; fire a 3.5 once; fire b 3.5 once; begins_once 3.6;
    tell 20 misfired b task=once due=3.5; during 15 stopped 19.9 continued b -> window missed
a one-off job that nobody runs once the database answers
    once; during 4 slowed 9 quick -> 2 window missed

# Pools of worker processes.
a killed worker
    worker killed -> right
a killed worker of the same pool
    begun on a; kills 8; freed -> right
left to its lease
    begun on a; kills 7; left -> lease too long
left to its lease, another of its pool
    begun on a; kills 8; left -> lease too long
left to its lease, in trouble
    begun on a; kills 7; left; during 4.2 hung 5.2 freed a -> right
left to its lease, another of its pool, in trouble
    begun on a; kills 8; left; during 4.2 hung 5.2 freed a -> right
renewed for good
    begun on a; kills 7; renews 3 a 5 40; in_pool -> lease too long
not ended while a process of the pool may live, which is stopped, so that it does not end
    begun on a; kills 8; during 4.05 worker-stopped 12.5 worker-continued a-pool 7; renews 3 a 5 13;
    ends_lease 3 a 12.6; takes_over 4 b 12.7; goes_on 5 b 14.7; in_pool -> right
not ended although no process of the pool may live
    begun on a; kills 8; during 4.05 worker-stopped 9 worker-continued a-pool 7; renews 3 a 5 13;
    ends_lease 3 a 12.6; takes_over 4 b 12.7; goes_on 5 b 14.7; in_pool -> lease too long
# Its process puts the signal off that ends the others. Nobody can hear of its end.
ended after its pool broke
    begun on a; kills 8; freed; of_job 4.65 end a-pool 3 worker=7 -> right
its lease is ended while its run goes on
    begun on a; kills 8; freed; believes 3 a-pool 5.6 worker=7 -> overlap
its lease is ended since it was stopped
    worker killed; drop_one worker-killed; tell 4.1 worker-stopped a-pool worker=7; pool before
    -> window run twice
its lease is ended since one of the pool before was killed
    worker killed; drop_one worker-killed; tell 4.1 worker-killed a-pool worker=8; pool before
    -> window run twice
killed in one pool after the other
    worker killed; pool before -> right
# It is begun in the next one, whose processes live.
claimed before its pool is replaced
    begun on a; kills 8; freed; drop_one begin token=3; of_job 4.2 begin a-pool 3 due=4 worker=9
    -> window run twice
keeps its replica waiting, which is told to end, since it is stopped
    begun on a; kills 8; during 4.05 worker-stopped 25.5 worker-continued a-pool 7;
    tell 4.3 leaving a; renews 3 a 5 26; ends_lease 3 a 25.6; tell 25.7 gone a; takes_over 4 b 25.9;
    goes_on 5 b 26.7; in_pool -> right
keeps its replica waiting for too long
    begun on a; kills 8; during 4.05 worker-stopped 25.5 worker-continued a-pool 7;
    tell 4.3 leaving a; renews 3 a 5 26; ends_lease 3 a 25.6; tell 39.7 gone a; takes_over 4 b 25.9;
    goes_on 5 b 26.7; in_pool -> slow stop
a signal to the group
    group ends; ends_lease 3 a 4.3; takes_over 4 b 5.1; goes_on 5 b 6.7; in_pool -> right
a signal to the group, and its lease is not ended
    group ends; left -> lock left behind
# It is as if the end of the lease had not been.
renewed after the end of its lease
    group ends; ends_lease 3 a 4.3; renews 3 a 4.4; takes_over 4 b 5.1; goes_on 5 b 6.7; in_pool
    -> lock left behind, overlap
orphaned, goes on for a moment
    killed alone; believes 3 a {KNOWN - 0.1}; in_pool -> right
orphaned, goes on
    killed alone; believes 3 a {KNOWN + 0.1}; in_pool -> run outlived its lock
orphaned, goes on, and knows that it is lost
    killed alone; believes 3 a {KNOWN + 0.1} lost=1; in_pool -> run outlived its lock
orphaned, and stopped for a while
    killed alone; believes 3 a 6.5; during 4.4 worker-stopped 6.4 worker-continued a-pool 7; in_pool
    -> right
# Its parent renews, and nobody tells it that its lock is lost.
believes while its replica is stopped
    stopped; believes 3 a 20; in_pool -> right
believes beyond its maximum lock
    stopped; ends_at 3 20; believes 3 a 20.1; in_pool -> 7 overlap, run outlived its lock
stopped, which is no reason not to renew
    stopped; drop kind=stopped; drop kind=continued; in_pool;
    during 4.3 worker-stopped 8.2 worker-continued a-pool 7 -> window run twice
"""

# Without failover, a run is begun once.
WITHOUT_FAILOVER = f"""
a killed holder, whose run stands until its lease ends
    killed in its run; runs_late 4 b 6.7 7.4; goes_on 5 b 8.7 -> right
a dead run that stands for longer
    killed in its run -> 16 window missed
a window taken over
    killed -> window run twice
handed over when it had begun
    handed over -> window run twice
handed over when it had not begun
    handed over unbegun -> right
handed over when it had not begun, and left
    handed over unbegun; until 4; goes_on 4 b 6.7 -> window missed
a cut run that is released as if it had ended
    handed over and left; drop_one handed-over; releases 3 a 4.35; goes_on 4 b 6.7 -> right
orphaned in a pool, goes on, and knows that it is lost
    killed in its run; killed_alone; runs_late 4 b 6.7 7.4; goes_on 5 b 8.7;
    believes 3 a {KNOWN + 0.1} lost=1; in_pool -> right
orphaned in a pool, goes on
    killed in its run; killed_alone; runs_late 4 b 6.7 7.4; goes_on 5 b 8.7;
    believes 3 a {KNOWN + 0.1}; in_pool -> run outlived its lock
"""

FAR_APART = """
a run time that a dead run stood against is not run after it
    starts -5 a b; fire a 0; fire b 0.7; fire a 20; fire b 20.7; claims 1 a -19; begins 1 a -19;
    renews 1 a -18 1; tell 0.4 killed a -> 2 window missed
a run time that a dead run stood against is run after it
    starts -5 a b; fire a 0; fire b 0.7; fire a 20; fire b 20.7; claims 1 a -19; begins 1 a -19;
    renews 1 a -18 1; tell 0.4 killed a; runs_late 2 b 0.7 3.5; runs 3 b 20.7 -> right
"""

# Within the claim timeout, a claim is asked again.
STORIES["one not run"] = "alone; fire a 0; fire a 10; fire a 20; runs 1 a 0; runs 2 a 20"
OUTAGES = """
a short outage
    one not run; during 9.9 down 10.9 up -> window missed
a long outage
    one not run; during 9.9 down 13.9 up -> right
a short outage, and another trouble
    one not run; during 9.9 down 10.9 up; tell 11.5 cut-off a -> right
a short outage, and a stop
    one not run; during 9.9 down 10.9 up; during 11.5 stopped 12.5 continued a -> right
a short outage after a stop
    one not run; during 9.9 down 10.9 up; during 9 stopped 9.5 continued a -> right
"""


def cases() -> list[Any]:
    found = []
    for task, table in [
        (TASK, CASES),
        (AT_MOST_ONCE, WITHOUT_FAILOVER),
        (replace(AT_MOST_ONCE, period=20.0), FAR_APART),
        (replace(TASK, period=10.0), OUTAGES),
    ]:
        name, told = "", ""
        for line in table.splitlines():
            if line.startswith("#") or not line:
                continue
            name, told = (name, told + line) if line[0] == " " else (line, "")
            if " -> " in line:
                found.append(pytest.param(task, *told.split(" -> "), id=name))
    return found


def faults(text: str, task: ChaosTask = TASK) -> list[str]:
    return [finding.fault for finding in check(Story(text).events, [task])]


@pytest.mark.parametrize(("task", "story", "expected"), cases())
def test_a_history_is_judged(task: ChaosTask, story: str, expected: str) -> None:
    found: list[str] = []
    for fault in expected.split(", "):
        count, _, kind = fault.partition(" ") if fault[0].isdigit() else ("1", "", fault)
        found += [kind] * int(count) if kind != "right" else []
    assert faults(story, task) == found


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_history_is_right_in_any_order_of_its_events(name: str, rng: random.Random) -> None:
    """Each replica tells of its own when it gets to it. Only the tables' rows are in order."""
    events = Story(name).events
    assert check(events, [TASK]) == []
    rows = [event for event in events if event.kind in ROWS]
    others = [event for event in events if event not in rows]
    rng.shuffle(others)
    assert check([*others, *rows], [TASK]) == []


@pytest.mark.parametrize(
    "name",
    [
        *("peaceful", "killed", "stopped", "cut off"),
        *("killed before it began", "stopped before it began"),
    ],
)
def test_runs_in_a_pool_are_right(name: str) -> None:
    assert faults(f"{name}; in_pool") == []


def test_no_history_has_no_findings() -> None:
    assert check([], [TASK]) == []


@pytest.mark.parametrize(
    ("story", "text"),
    [
        (
            f"stopped; believes 3 a {LEARNED + 0.1}",
            f"overlap at {BASE + 7.42:.3f}: job: run of token 3 on a, begun {BASE + 4.02:.3f} still"
            f" held the lock when takeover of token 4 on b, begun {BASE + 7.42:.3f}, for 0.480 s",
        ),
        ("peaceful; silent b 9.1", f"b did not fire from {BASE + 8.7:.3f} to {BASE + LAST:.3f}"),
        (
            "peaceful; skips b 4.2 4.7",
            f"b was able to claim its run time {BASE + 4.7:.3f}, and skipped it",
        ),
        ("killed; until 4", "and b was well and left it"),
        (
            "handed over and left; takes_over 4 b 7.4; goes_on 5 b 8.7",
            f"was handed over {BASE + 4.35:.3f}, and b was well and left it",
        ),
        (
            "peaceful; tell 39.9 died b detail=status-1:-Oops",
            f"replica died at {BASE + LAST - 0.1:.3f}: b ended: status 1: Oops",
        ),
        ("peaceful; tell 3 erred b detail=Oops", f"error logged at {BASE + 3:.3f}: b: Oops"),
    ],
)
def test_a_finding_says_what_happened(story: str, text: str) -> None:
    assert str(check(Story(story).events, [TASK])[0]).endswith(text)


def test_a_dead_one_off_job_is_left_by_those_that_do_not_know_it() -> None:
    story = "once; tell 5.1 claimed a task=once token=1 due=5 until=8.1; tell 5.15 killed a"
    assert "window missed" in faults(story)
    events = Story(f"{story}; drop_one fire replica=b task=once").events
    assert [found for found in check(events, []) if found.task == "once"] == []


@pytest.mark.parametrize(
    ("trouble", "is_excused"),
    [
        pytest.param("tell 4.3 killed a detail=alone", False, id="its replica is killed alone"),
        pytest.param("during 4.3 stopped 7.5 continued a", True, id="its replica is stopped"),
        pytest.param(
            "during 4.3 worker-stopped 7.5 worker-continued a-pool 8", False, id="another"
        ),
        pytest.param("tell 4.3 worker-killed a-pool worker=8", False, id="another one is killed"),
        pytest.param("during 4.3 worker-stopped 7.5 worker-continued a-pool 7", False, id="it"),
        pytest.param("during 4.3 hung 7.5 freed a", True, id="its replica is cut off"),
    ],
)
def test_a_worker_that_believed_is_excused_by_the_troubles_of_its_replica(
    trouble: str, is_excused: bool
) -> None:
    """That renews for it, or does not. When it is dead, the worker process ends as well."""
    story = f"begun on a; silent a 4.1; {trouble}; believes 3 a-pool 7.7 worker=7; left"
    assert ("overlap" not in faults(story)) == is_excused


def test_a_pool_is_expected_to_run_again_after_its_worker_was_killed() -> None:
    """The run in it is over; and nobody can continue a stopped worker any more."""
    [finding] = check(Story("worker killed; drop replica=a-pool since=4.2").events, [TASK])
    since = BASE + 4.1 + POOL_BACK
    assert finding.text == f"a pool did not fire from {since:.3f} to {BASE + LAST:.3f}"
    story = "worker killed; tell 4.05 worker-stopped a-pool worker=7"
    assert faults(story) == []
    # The first one's window owns the next run time of the pool, too, but not the one after it.
    found = check(Story(f"{story}; drop token=12; drop token=13").events, [TASK])
    assert any(" of a pool, which was able to" in finding.text for finding in found), found


@pytest.mark.parametrize(
    ("story", "at", "is_found"),
    [
        pytest.param("worker killed", 4.0, True, id="before"),
        pytest.param("worker killed", 4.2, False, id="at once"),
        pytest.param("worker killed", REPLACED - 0.1, False, id="soon"),
        pytest.param("worker killed", REPLACED + 0.1, True, id="late"),
        pytest.param("worker killed", 30.0, True, id="for good"),
        pytest.param("worker killed; during 4.2 stopped 9 continued a", 9.1, False, id="stopped"),
        pytest.param("worker killed; during 4.2 stopped 9 continued a", 30.0, True, id="then late"),
        pytest.param("handed over; in_pool", 30.0, True, id="no worker was killed"),
    ],
)
def test_errors_of_a_pool_end_when_it_is_replaced(story: str, at: float, is_found: bool) -> None:
    found = faults(f"{story}; tell {at} erred a detail=Error-running-job-job:-BrokenProcessPool()")
    assert ("error logged" in found) == is_found
