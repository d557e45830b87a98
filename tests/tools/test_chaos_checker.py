"""What the chaos finds, on histories made by hand: right ones, and each fault put into one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from apscheduler_tasklock.demo.history import Event
from tests.chaos.bounds import ORPHANED, POOL_BACK, REACTION, RECOVERY, UNDER_WAY
from tests.chaos.checker import BROKEN, check
from tests.chaos.exclusion import OUTLIVED, OVERLAP, TOKEN_WENT_BACK
from tests.chaos.history import ALONE, END_GROUP
from tests.chaos.misses import MISSED, SILENT
from tests.chaos.repeats import RUN_TWICE
from tests.chaos.stops import SLOW_STOP, STRANDED
from tests.chaos.tasks import ChaosTask, OneOff

PERIOD, LEASE, TAKES = 2.0, 3.0, 0.5
TASK = ChaosTask("job", PERIOD, (TAKES, TAKES), True, LEASE, 40)
AT_MOST_ONCE = ChaosTask("job", PERIOD, (TAKES, TAKES), False, LEASE, 40)
ERROR = "error logged"

BASE = 5000.0  # of the machine's clock
LAST = 40.0  # when all histories end

# Seconds from a run time to its claim, and from there to the begin of the job.
DELAY = 0.01

WORKER, SIBLING, NEXT_WORKER = 7, 8, 9
ROWS = ("claimed", "renewed", "released", "handed over", "given up", "lease ended")


class Story:
    """A history that is written by hand. All times are seconds from its start.

    Two replicas, whose run times are 0.7 s apart: ``a`` at 0, 2, 4 .. and ``b`` at 0.7, 2.7, 4.7 ..
    """

    def __init__(self, replicas: str = "ab") -> None:
        self.events: list[Event] = []
        for replica in replicas:
            self.starts(-5.0, replica)
        self.tell(LAST, "closing")

    def tell(self, at: float, kind: str, replica: str = "", **details: Any) -> Story:
        for name in ("due", "until", "run_until"):
            if details.get(name) is not None:
                details[name] += BASE
        self.events.append(Event(BASE + at, kind, replica, **details))
        return self

    def of_job(self, at: float, kind: str, replica: str, token: int, **details: Any) -> Story:
        return self.tell(at, kind, replica, task="job", token=token, **details)

    def during(
        self, begun: float, kind: str, ended: float, end: str, replica: str = "", worker: int = 0
    ) -> Story:
        """Let a trouble begin and end."""
        self.tell(begun, kind, replica, worker=worker)
        return self.tell(ended, end, replica, worker=worker)

    def starts(self, at: float, replica: str) -> Story:
        return self.tell(at, "ready", replica)

    def fires(self, replica: str, begun: float = 0.0, ended: float = LAST) -> Story:
        """Fire at all run times of a replica."""
        at = {"a": 0.0, "b": 0.7}.get(replica, 1.0)
        while at < ended:
            if at >= begun:
                self.tell(at, "fire", replica, task="job", due=at)
            at += PERIOD
        return self

    def claims(
        self,
        token: int,
        replica: str,
        at: float,
        *,
        window: float | None = None,
        run_until: float | None = None,
    ) -> Story:
        due = (at if window is None else window) + UNDER_WAY / 10
        until = at + DELAY + LEASE
        return self.of_job(
            at + DELAY, "claimed", replica, token, due=due, until=until, run_until=run_until
        )

    def ends_at(self, token: int, run_until: float) -> Story:
        """Let the maximum lock of a claim end then."""
        place = [(event.kind, event.token) for event in self.events].index(("claimed", token))
        self.events[place] = replace(self.events[place], run_until=BASE + run_until)
        return self

    def hands_over(self, token: int, replica: str, at: float) -> Story:
        return self.of_job(at, "handed over", replica, token, until=at)

    def ends_lease(self, token: int, replica: str, at: float) -> Story:
        return self.of_job(at, "lease ended", replica, token, until=at)

    def renews(self, token: int, replica: str, *times: float) -> Story:
        for at in times:
            self.of_job(at, "renewed", replica, token, until=at + LEASE)
        return self

    def begins(
        self, token: int, replica: str, due: float, *, at: float | None = None, **details: Any
    ) -> Story:
        begun = due + 2 * DELAY if at is None else at
        return self.of_job(begun, "begin", replica, token, due=due, **details)

    def believes(
        self, token: int, replica: str, at: float, *, lost: bool = False, worker: int = 0
    ) -> Story:
        return self.of_job(at, "holds", replica, token, lost=lost, worker=worker)

    def ends(self, token: int, replica: str, at: float, *, lost: bool = False) -> Story:
        return self.of_job(at, "end", replica, token, lost=lost)

    def releases(self, token: int, replica: str, at: float, *, kept: bool = True) -> Story:
        return self.of_job(at, "released", replica, token, until=at, kept=kept)

    def runs(self, token: int, replica: str, due: float, *, kept: bool = True) -> Story:
        """Run from the claim to the release."""
        self.claims(token, replica, due).begins(token, replica, due)
        self.ends(token, replica, due + TAKES)
        return self.releases(token, replica, due + TAKES + DELAY, kept=kept)

    def runs_late(self, token: int, replica: str, due: float, at: float) -> Story:
        """Run a run time some seconds after it."""
        self.claims(token, replica, at, window=due).begins(token, replica, due, at=at + 2 * DELAY)
        return self.ends(token, replica, at + 0.4).releases(token, replica, at + 0.41)

    def takes_over(self, token: int, replica: str, at: float, window: float = 4.0) -> Story:
        """Run a dead holder's window again, to the end."""
        self.claims(token, replica, at, window=window).begins(token, replica, at, takeover=True)
        self.ends(token, replica, at + TAKES)
        return self.releases(token, replica, at + TAKES + DELAY)

    def goes_on(self, token: int, replica: str, begun: float, ended: float = LAST) -> Story:
        """Run all of a replica's windows; both replicas fire."""
        at = begun
        while at < ended:
            self.runs(token, replica, at)
            token, at = token + 1, at + PERIOD
        return self

    def without(self, **wanted: Any) -> Story:
        """Leave the first event out that is so."""
        self.events.remove(
            next(
                event
                for event in self.events
                if all(getattr(event, name) == value for name, value in wanted.items())
            )
        )
        return self

    def but(self, drop: Callable[[Event], bool]) -> Story:
        """Leave all events out that are so."""
        self.events = [event for event in self.events if not drop(event)]
        return self

    def until(self, token: int) -> Story:
        """Leave out what is of this token, and of later ones."""
        return self.but(lambda event: event.token >= token)

    def unbegun(self, token: int = 3) -> Story:
        """Let the run of a token not have begun."""
        return self.without(kind="begin", token=token)

    def instead(self, kind: str, **changes: Any) -> Story:
        """Change the first event of a kind."""
        place = [event.kind for event in self.events].index(kind)
        self.events[place] = replace(self.events[place], **changes)
        return self

    def in_pool(self) -> Story:
        """Let the runs of ``a`` be in a worker process of its pool, or of the one after a kill.

        The rows know of the replica alone, which claims, renews and releases.
        """
        killed = [event.at for event in self.events if event.kind == "worker killed"]
        for number, event in enumerate(self.events):
            if event.replica == "a" and event.task and event.kind not in ROWS:
                worker = WORKER if not killed or event.at < killed[0] else NEXT_WORKER
                worker = 0 if event.kind == "fire" else event.worker or worker
                self.events[number] = replace(event, replica="a pool", worker=worker)
        self.starts(-5.0, "a pool")
        return self.tell(-5.0, "worker started", "a pool", worker=SIBLING)


# ---- right histories -----------------------------------------------------------------------------


def both(*, a_until: float = LAST) -> Story:
    """Both replicas fire."""
    return Story().fires("a", ended=a_until).fires("b")


def alone() -> Story:
    """Replica a is the only one."""
    return Story("a")


def peaceful() -> Story:
    """Nothing happens but runs."""
    return both().goes_on(1, "a", 0.0)


def two_runs(*, a_until: float = LAST) -> Story:
    """The first two runs are on replica a."""
    return both(a_until=a_until).goes_on(1, "a", 0.0, 4.0)


def begun_on_a(*, ended: float = LAST) -> Story:
    """The third run begins on replica a, which fires until it ends; b fires, too."""
    return two_runs(a_until=ended).claims(3, "a", 4.0).begins(3, "a", 4.0)


def killed() -> Story:
    """The holder of token 3 is killed in its run, and its window is run again."""
    story = begun_on_a(ended=4.1).tell(4.3, "killed", "a")
    return story.takes_over(4, "b", 7.4).goes_on(5, "b", 8.7)


def stopped() -> Story:
    """The holder of token 3 is stopped past its lease, and finds out when it goes on."""
    story = begun_on_a(ended=4.1).fires("a", begun=10.0).tell(4.3, "stopped", "a")
    story.takes_over(4, "b", 7.4).tell(8.2, "continued", "a")
    return story.believes(3, "a", 8.3, lost=True).ends(3, "a", 8.4, lost=True).goes_on(5, "b", 8.7)


def raised() -> Story:
    """A run raises, which opens its window again, for the other replica's run time in it."""
    return both().runs(1, "a", 0.0, kept=False).runs(2, "b", 0.7).goes_on(3, "b", 2.7)


def outage() -> Story:
    """The server is down for three run times."""
    return two_runs().during(3.9, "down", 9.0, "up").goes_on(3, "a", 10.0)


def cut_off() -> Story:
    """The holder of token 3 is cut off, ends its run, and cannot say so in time."""
    story = begun_on_a().tell(4.2, "hung", "a").ends(3, "a", 4.5)
    return story.takes_over(4, "b", 7.4).tell(9.0, "freed", "a").goes_on(5, "b", 8.7)


def long() -> Story:
    """A run takes longer than the period; other run times find it running."""
    story = begun_on_a().renews(3, "a", *range(5, 9)).ends(3, "a", 9.0)
    return story.releases(3, "a", 9.01).goes_on(4, "a", 10.0)


def stopped_before_it_began() -> Story:
    """The holder of token 3 is stopped between claim and run, and finds out as it begins."""
    return stopped().unbegun().of_job(8.25, "begin", "a", 3, due=4.0, lost=True)


def stopped_for_long() -> Story:
    """A replica is stopped for many run times, while the other one runs them."""
    story = two_runs(a_until=3.9).fires("a", begun=20.0)
    return story.during(3.9, "stopped", 19.9, "continued", "a").goes_on(3, "b", 4.7)


def killed_and_killed_again() -> Story:
    """Who takes the window of token 3 over is killed, too, before its run begins."""
    story = Story("abc").fires("c").fires("a", ended=4.1).fires("b", ended=7.0)
    story.goes_on(1, "a", 0.0, 4.0).claims(3, "a", 4.0).begins(3, "a", 4.0)
    story.tell(4.3, "killed", "a").claims(4, "b", 7.4, window=4.0).tell(7.41, "killed", "b")
    return story.takes_over(5, "c", 10.8).goes_on(6, "c", 11.4 + 1.6)


def killed_without_failover() -> Story:
    """The holder of token 3 is killed; a run time that was refused meanwhile is run."""
    story = begun_on_a(ended=4.1).tell(4.3, "killed", "a")
    return story.runs_late(4, "b", 6.7, 7.4).goes_on(5, "b", 8.7)


def handed_over() -> Story:
    """The coroutine of token 3 is cut by a graceful stop, and another replica runs its window."""
    story = begun_on_a(ended=4.1).tell(4.3, "leaving", "a").hands_over(3, "a", 4.35)
    story.of_job(4.36, "cut", "a", 3, lost=True).tell(4.5, "gone", "a")
    return story.takes_over(4, "b", 4.8).goes_on(5, "b", 6.7)


def handed_over_before_it_began() -> Story:
    """The claim of token 3 is granted when its replica is already ending."""
    return handed_over().unbegun().without(kind="cut", token=3)


def joined(at: float = 5.0) -> Story:
    """A replica joins after the holder of token 3 has died, and runs its window again."""
    story = alone().fires("a", ended=4.1).goes_on(1, "a", 0.0, 4.0)
    story.claims(3, "a", 4.0).begins(3, "a", 4.0).tell(4.3, "killed", "a")
    story.starts(at, "b").fires("b", begun=5.0)
    return story.takes_over(4, "b", 11.1).goes_on(5, "b", 12.7)


RIGHT: dict[str, Callable[[], Story]] = {
    "peaceful": peaceful,
    "killed": killed,
    "killed before it began": lambda: killed().unbegun(),
    "killed and killed again": killed_and_killed_again,
    "stopped": stopped,
    "stopped before it began": stopped_before_it_began,
    "stopped for long": stopped_for_long,
    "raised": raised,
    "outage": outage,
    "cut off": cut_off,
    "long": long,
    "handed over": handed_over,
    "handed over before it began": handed_over_before_it_began,
    "joined": joined,
}
IN_POOLS = [
    *("peaceful", "killed", "stopped", "cut off"),
    *("killed before it began", "stopped before it began"),
]


def faults(story: Story, task: ChaosTask = TASK) -> list[str]:
    return [finding.fault for finding in check(story.events, [task])]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_history_is_right_in_any_order_of_its_events(name: str, rng: random.Random) -> None:
    """Each replica tells of its own when it gets to it. Only the tables' rows are in order."""
    events = RIGHT[name]().events
    assert check(events, [TASK]) == []
    rows = [event for event in events if event.kind in ROWS]
    others = [event for event in events if event not in rows]
    rng.shuffle(others)
    assert check([*others, *rows], [TASK]) == []


@pytest.mark.parametrize("name", IN_POOLS)
def test_runs_in_a_pool_are_right(name: str) -> None:
    assert faults(RIGHT[name]().in_pool()) == []


def test_no_history_has_no_findings() -> None:
    assert check([], [TASK]) == []


# ---- a fault put into a history ------------------------------------------------------------------

# The holder of token 3 goes on at 8.2. So much later it has had an answer to its renewal.
LEARNED = 8.2 + RECOVERY


def claim_and_release(*, is_first: bool) -> Story:
    """A claim's statement began before a release, and has found it, or has not.

    Their order in the row counts, and not when their statements began.
    """
    story, at = both().goes_on(1, "a", 0.0, 4.0).without(kind="released", token=2), 4.06
    if is_first:
        return story.releases(2, "a", at).goes_on(3, "a", 4.0)
    return story.goes_on(3, "a", 4.0).releases(2, "a", at)


def ended_while_cut_off(freed: float) -> Story:
    """Its replica is able to say that its run has ended before the takeover, or is not."""
    story = begun_on_a().tell(4.2, "hung", "a").ends(3, "a", 4.5).tell(freed, "freed", "a")
    # A connection of the other one is cut, so that it takes its time.
    return story.tell(7.0, "cut off", "b").takes_over(4, "b", 11.0).goes_on(5, "b", 12.7)


def opened_window_told_late() -> Story:
    """A busy scheduler tells late, when what stood against its claim has opened its window."""
    story = raised().until(2).without(kind="fire", replica="b").without(kind="released", token=1)
    story.releases(1, "a", 0.75, kept=False).tell(0.8, "fire", "b", task="job", due=0.7)
    return story.goes_on(2, "b", 2.7)


def one_instance() -> Story:
    """A replica does not fire while a job runs of which it may run one."""
    story = two_runs(a_until=4.1).fires("a", begun=18.0).claims(3, "a", 4.0).begins(3, "a", 4.0)
    story.renews(3, "a", *range(5, 17)).ends(3, "a", 17.0)
    return story.releases(3, "a", 17.01).goes_on(4, "a", 18.0)


def busy_with_a_lost_run() -> Story:
    """A run that has lost its lock goes on, and may be the one instance that is allowed."""
    story = stopped().but(lambda e: e.token >= 4 or (e.kind, e.token) == ("end", 3))
    return story.tell(6.9, "killed", "b")


def no_poll() -> Story:
    """A dead run is run again only when another replica fires."""
    return killed().until(4).takes_over(4, "b", 9.4).goes_on(5, "b", 10.7)


def cut_again_and_again() -> Story:
    """Nobody can know that a run is dead for as long as its connections are cut."""
    story = killed().until(4)
    for at in range(6, int(LAST), 4):
        story.tell(float(at), "cut off", "b")
    return story


def left_behind() -> Story:
    """A graceful stop leaves a lock behind."""
    story = handed_over().until(4).without(kind="handed over")
    return story.takes_over(4, "b", 7.4).goes_on(5, "b", 8.7)


def skipped_after_a_refusal() -> Story:
    story = killed().without(kind="released", token=4).releases(4, "b", 7.42 + TAKES)
    return story.tell(8.0, "skipped", "b", task="job", due=4.7).tell(7.95, "cut off", "b")


def given_up(deaths: int, *, since_end: float | None = None, left_for: float = 0.0) -> Story:
    """So many holders of a window die one after the other, and then another replica gives it up.

    :param since_end: seconds from the end of the maximum lock of the last ones to that
    :param left_for: for how many seconds nobody runs the window again after the last death
    """
    story = killed().but(lambda e: e.token >= 4 or e.replica == "b").starts(-5.0, "e").fires("e")
    at = 7.2 + (deaths - 1) * (LEASE + 0.2) + left_for
    run_until = None if since_end is None else at - since_end
    end = 7.2
    for token, replica in zip(range(4, 3 + deaths), "bcd", strict=False):
        story.starts(end - 8.0, replica)
        story.claims(token, replica, end, window=4.0, run_until=run_until)
        story.tell(end + 0.1, "killed", replica)
        end += LEASE + 0.2
    story.tell(at, "given up", "b", task="job", token=2 + deaths, until=at)
    story.tell(at + 0.01, "erred", "e", detail="task 'job': the window of .. is given up: ..")
    return story.goes_on(3 + deaths, "e", float(int(at) // 2 * 2 + 1))


CASES: dict[str, tuple[Story, list[str]]] = {
    # Overlaps. A lock that is lost stays so, so beliefs last from one telling to the next.
    "two runs that both believed": (
        stopped().believes(3, "a", LEARNED + 0.1),
        [OVERLAP] * 4,  # with each run that it meets
    ),
    "a belief until the next renewal is answered": (stopped().believes(3, "a", LEARNED - 0.1), []),
    "a belief before the other run began": (killed().believes(3, "a", 4.29), []),
    "a release that a claim has found": (claim_and_release(is_first=True), []),
    "a release that a claim has not found": (
        claim_and_release(is_first=False),
        [OVERLAP, MISSED],
    ),
    "taken over before the lease had ended": (killed().renews(3, "a", 4.6), [OVERLAP]),
    # Tokens.
    "a table put back to an older state": (
        two_runs().until(0).goes_on(5, "a", 0.0, 4.0).runs(5, "b", 4.7).goes_on(7, "b", 6.7),
        [TOKEN_WENT_BACK],
    ),
    "a token that one replica runs with twice": (
        peaceful().of_job(4.55, "begin", "a", 3, due=4.0),
        [TOKEN_WENT_BACK],
    ),
    # Windows that are run twice.
    "run by another replica, too": (
        two_runs().runs(3, "b", 2.7).goes_on(4, "a", 4.6),
        [RUN_TWICE],
    ),
    "run late by a starved replica that finds the lock free": (
        peaceful().until(6).runs_late(6, "b", 4.7, 9.0).goes_on(7, "a", 10.0),
        [RUN_TWICE],
    ),
    "taken over from a run that ended": (
        two_runs().takes_over(3, "b", 2.7, 2.0).goes_on(4, "a", 4.0),
        [RUN_TWICE],
    ),
    "taken over from nobody": (
        both().takes_over(1, "a", 0.0, 0.0).goes_on(2, "a", 2.0),
        [RUN_TWICE],
    ),
    "not renewed for no reason": (cut_off().without(kind="hung"), [RUN_TWICE]),
    "not renewed for a short trouble": (
        cut_off().without(kind="freed").tell(4.7, "freed", "a"),
        [RUN_TWICE],
    ),
    **{
        f"not renewed for a connection that was {kind}": (
            cut_off().without(kind="hung").without(kind="freed").tell(4.7, kind, "a"),
            [RUN_TWICE],
        )
        for kind in ("cut off", "terminated")
    },
    "not renewed in a stall": (
        cut_off().without(kind="hung").without(kind="freed").tell(4.7, "stalled", "a", until=7.0),
        [],
    ),
    "taken over from a run that was released late": (
        cut_off().releases(3, "a", 7.39),
        [RUN_TWICE],
    ),
    "taken over although its end could be said": (ended_while_cut_off(5.2), [RUN_TWICE]),
    "taken over since its end could not be said": (ended_while_cut_off(5.4), []),
    "handed over when it had ended": (
        handed_over().without(kind="cut", token=3).ends(3, "a", 4.3),
        [RUN_TWICE],
    ),
    "taken over past its maximum lock": (killed().ends_at(3, 7.0), [RUN_TWICE]),
    "taken over before the end of its maximum lock": (killed().ends_at(3, 7.5), []),
    # Windows that are missed.
    # That of `a`, which runs the others; and that of `b`, which did not run it in place of `a`.
    "claimed by nobody": (peaceful().but(lambda event: event.token == 3), [MISSED] * 2),
    "claimed by nobody while the only replica was stopped": (
        alone()
        .fires("a")
        .goes_on(1, "a", 0.0, 4.0)
        .goes_on(3, "a", 12.0)
        .during(3.9, "stopped", 8.5, "continued", "a"),
        [],
    ),
    "claimed by nobody while another replica was stopped": (
        Story("b")
        .fires("b")
        .goes_on(1, "b", 0.7, 4.0)
        .goes_on(3, "b", 12.7)
        .during(3.9, "stopped", 11.5, "continued", "a"),
        [MISSED] * 4,
    ),
    **{
        f"claimed by nobody long after a holder was {what}": (
            tell().but(lambda event: event.token == 8),
            [MISSED],
        )
        for what, tell in (("killed", killed), ("stopped", stopped))
    },
    **{
        f"claimed by nobody after connections were {kind}": (
            peaceful()
            .but(lambda event: event.token == 3)
            .tell(3.6, kind, "a")
            .tell(3.6, kind, "b"),
            [MISSED] * 2,
        )
        for kind in ("cut off", "terminated")
    },
    "a replica that stops firing": (
        peaceful().but(lambda e: (e.kind, e.replica) == ("fire", "b") and e.at > BASE + 9),
        [MISSED],
    ),
    "skipped by a replica that was able to claim": (
        peaceful().tell(4.2, "skipped", "b", task="job", due=4.7),
        [MISSED],
    ),
    "skipped by a replica that does not fire": (
        peaceful().tell(4.2, "skipped", "c", task="job", due=4.7),
        [],
    ),
    "skipped in an outage": (outage().tell(7.2, "skipped", "a", task="job", due=4.0), []),
    "refused, and could not be taken over later": (skipped_after_a_refusal(), []),
    "an opened window that nobody runs": (raised().until(2).goes_on(2, "b", 2.7), [MISSED]),
    "an opened window, told after its refusal": (opened_window_told_late(), []),
    "not fired while one instance runs": (one_instance(), []),
    "released without a run": (
        peaceful().without(kind="begin", token=3).without(kind="end", token=3),
        [MISSED],
    ),
    # Its window is open again, but those that were refused it do not know.
    "given back without a run": (
        two_runs().claims(3, "a", 4.0).releases(3, "a", 4.1, kept=False).goes_on(4, "b", 4.7),
        [MISSED],
    ),
    "given back, and claimed again at once": (
        two_runs()
        .claims(3, "a", 4.0)
        .releases(3, "a", 4.1, kept=False)
        .runs_late(4, "a", 4.0, 4.2)
        .goes_on(5, "a", 6.0),
        [],
    ),
    "a dead run that is left": (killed().until(4), [MISSED]),
    "a dead run that no poll finds": (no_poll(), [MISSED]),
    "a dead run that the next window passes over": (
        killed().until(4).goes_on(4, "b", 8.7),
        [MISSED],
    ),
    "a dead run of which nobody can know": (cut_again_and_again(), []),
    "a dead run, by a replica that is busy with the task": (busy_with_a_lost_run(), []),
    "a window that was handed over and left": (
        handed_over().until(4).takes_over(4, "b", 7.4).goes_on(5, "b", 8.7),
        [MISSED],
    ),
    "a window that was handed over and that the next one passes over": (
        handed_over().until(4).runs(4, "b", 4.7).goes_on(5, "b", 6.7),
        [MISSED, RUN_TWICE],
    ),
    "a cut run that is released as if it had ended": (
        handed_over()
        .until(4)
        .without(kind="handed over")
        .releases(3, "a", 4.35)
        .goes_on(4, "b", 6.7),
        [MISSED],
    ),
    "taken for a misfire": (peaceful().tell(5.0, "misfired", "b", task="job", due=2.7), [MISSED]),
    "a misfire of a replica that was stopped": (
        peaceful()
        .tell(5.0, "misfired", "b", task="job", due=2.7)
        .during(3.0, "stopped", 4.9, "continued", "b"),
        [],
    ),
    # Stops, and what replicas tell.
    "a lock that a graceful stop leaves behind": (left_behind(), [STRANDED]),
    "a lock that a replica in trouble leaves behind": (
        left_behind().during(4.2, "hung", 4.6, "freed", "a"),
        [],
    ),
    "a replica that takes long to end": (
        handed_over().without(kind="gone").tell(14.0, "gone", "a"),
        [SLOW_STOP],
    ),
    "a job that runs before it is due": (
        peaceful().tell(5.0, "early", "b", task="job"),
        ["ran too early"],
    ),
    "a replica that logs an error": (peaceful().tell(3.0, "erred", "b", detail="Oops"), [ERROR]),
    "given up since four holders died": (given_up(4), []),
    "said to be given up": (
        peaceful().tell(3.0, "erred", "b", detail="task 'job': the window of .. is given up: .."),
        [ERROR],
    ),
    # As after a worker and then its replica died, when no other replica was well before that.
    "given up since its maximum lock has ended": (given_up(2, since_end=0.05), []),
    # That is a fault of the replica that left it, although giving the window up was right.
    "given up since a replica had left it": (
        given_up(2, since_end=0.05, left_for=8.0),
        [MISSED],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_history_is_judged(case: str) -> None:
    story, expected = CASES[case]
    assert faults(story) == expected


def far_apart(*, is_run: bool) -> Story:
    """A run time that a dead run stood against is run after it, or is not."""
    story = Story()
    for replica, at in (("a", 0.0), ("b", 0.7), ("a", 20.0), ("b", 20.7)):
        story.tell(at, "fire", replica, task="job", due=at)
    story.claims(1, "a", -19.0).begins(1, "a", -19.0).renews(1, "a", *range(-18, 1))
    story.tell(0.4, "killed", "a")
    return story.runs_late(2, "b", 0.7, 3.5).runs(3, "b", 20.7) if is_run else story


FAR_APART = replace(AT_MOST_ONCE, period=20.0)

# Without failover, a run is begun once.
WITHOUT_FAILOVER: dict[str, tuple[Story, list[str]]] = {
    "a killed holder, whose run stands until its lease ends": (killed_without_failover(), []),
    "a dead run that stands for longer": (killed_without_failover().until(4), [MISSED] * 16),
    "a window taken over": (killed(), [RUN_TWICE]),
    "handed over when it had begun": (handed_over(), [RUN_TWICE]),
    "handed over when it had not begun": (handed_over_before_it_began(), []),
    "handed over when it had not begun, and left": (
        handed_over_before_it_began().until(4).goes_on(4, "b", 6.7),
        [MISSED],
    ),
    "a cut run that is released as if it had ended": (
        handed_over()
        .until(4)
        .without(kind="handed over")
        .releases(3, "a", 4.35)
        .goes_on(4, "b", 6.7),
        [],
    ),
}


@pytest.mark.parametrize("case", WITHOUT_FAILOVER)
def test_a_history_without_failover_is_judged(case: str) -> None:
    story, expected = WITHOUT_FAILOVER[case]
    assert faults(story, AT_MOST_ONCE) == expected


def test_a_run_time_that_a_dead_run_stood_against_is_run_after_it() -> None:
    """Of a task whose next run time is far away."""
    assert faults(far_apart(is_run=False), FAR_APART)[0] == MISSED
    assert faults(far_apart(is_run=True), FAR_APART) == []


@pytest.mark.parametrize(
    ("lasts", "before", "then", "found"),
    [
        pytest.param(1.0, False, [], [MISSED], id="short"),
        pytest.param(4.0, False, [], [], id="long"),
        pytest.param(1.0, False, ["cut off"], [], id="short, but there is another trouble"),
        pytest.param(1.0, False, ["stopped", "continued"], [], id="short, but it is stopped"),
        pytest.param(1.0, True, [], [], id="short, but it was stopped"),
    ],
)
def test_an_outage_costs_a_run_time_only_if_it_lasts(
    lasts: float, before: bool, then: list[str], found: list[str]
) -> None:
    """Within the claim timeout, a claim is asked again. Of a task whose run times are far apart."""
    story = alone().runs(1, "a", 0.0).runs(2, "a", 20.0).during(9.9, "down", 9.9 + lasts, "up")
    for at in (0.0, 10.0, 20.0):
        story.tell(at, "fire", "a", task="job", due=at)
    for number, kind in enumerate(then):
        story.tell(11.5 + number, kind, "a")
    if before:
        story.during(9.0, "stopped", 9.5, "continued", "a")
    assert faults(story, replace(TASK, period=10.0)) == found


@pytest.mark.parametrize(
    ("story", "text"),
    [
        pytest.param(
            stopped().believes(3, "a", LEARNED + 0.1),
            f"overlap at {BASE + 7.42:.3f}: job: run of token 3 on a, begun {BASE + 4.02:.3f} still"
            f" held the lock when takeover of token 4 on b, begun {BASE + 7.42:.3f}, for 0.480 s",
            id="overlap",
        ),
        pytest.param(
            CASES["a replica that stops firing"][0],
            f"b did not fire from {BASE + 8.7:.3f} to {BASE + LAST:.3f}",
            id="silence",
        ),
        pytest.param(
            CASES["skipped by a replica that was able to claim"][0],
            f"b was able to claim its run time {BASE + 4.7:.3f}, and skipped it",
            id="skipped",
        ),
        pytest.param(killed().until(4), "and b was well and left it", id="left"),
        pytest.param(
            CASES["a window that was handed over and left"][0],
            f"was handed over {BASE + 4.35:.3f}, and b was well and left it",
            id="handed over",
        ),
        pytest.param(
            peaceful().tell(LAST - 0.1, "died", "b", detail="status 1: Oops"),
            f"replica died at {BASE + LAST - 0.1:.3f}: b ended: status 1: Oops",
            id="died",
        ),
        pytest.param(
            CASES["a replica that logs an error"][0],
            f"error logged at {BASE + 3:.3f}: b: Oops",
            id="error",
        ),
    ],
)
def test_a_finding_says_what_happened(story: Story, text: str) -> None:
    assert str(check(story.events, [TASK])[0]).endswith(text)


def once(*, late: bool = False, known_as: str = "") -> Story:
    """A one-off job, which one replica runs."""
    story = peaceful()
    job = OneOff("once", BASE + 5.0, TAKES, True)
    story.tell(-5.0, "planned", detail=json.dumps(asdict(job)))
    for replica in "ab":
        story.tell(5.0, "fire", replica, task="once", due=5.0)
    if late:
        story.during(4.0, "slowed", 9.0, "quick")
    name, at = known_as or "once", 7.0 if late else 5.1
    story.tell(at, "claimed", "a", task=name, token=1, due=5.0, until=at + LEASE)
    story.tell(at + 0.1, "begin", "a", task="once", token=1, due=5.0, detail=known_as)
    story.tell(at + 0.2, "end", "a", task="once", token=1)
    return story.tell(at + 0.3, "released", "a", task=name, token=1, until=3605.0)


@pytest.mark.parametrize("known_as", ["", "job:0123456789abcdef"])
def test_a_one_off_job_that_runs_once_the_database_answers(known_as: str) -> None:
    assert faults(once(late=True, known_as=known_as)) == []


@pytest.mark.parametrize("late", [False, True])
def test_a_one_off_job_that_nobody_runs(late: bool) -> None:
    story = once(late=late).but(lambda event: event.task == "once" and event.kind != "fire")
    assert faults(story) == [MISSED] * 2


def test_a_dead_one_off_job_is_left_by_those_that_do_not_know_it() -> None:
    story = once().tell(5.15, "killed", "a")
    story.but(lambda e: e.task == "once" and e.kind in ("begin", "end", "released"))
    assert MISSED in faults(story)
    story.without(kind="fire", replica="b", task="once")
    assert [f for f in check(story.events, []) if f.task == "once"] == []


# ---- pools of worker processes -------------------------------------------------------------------


def worker_killed(
    *, freed: bool = True, killed: int = WORKER, more: Callable[[Story], object] | None = None
) -> Story:
    """A worker process is killed in the run of token 3, and its replica ends its lease, or not.

    :param more: what happens before its window is run again
    """
    story = begun_on_a().tell(4.1, "worker killed", "a pool", worker=killed)
    if freed:
        story.ends_lease(3, "a", 4.7)
    if more is not None:
        more(story)
    else:
        story.takes_over(4, "b", 5.5 if freed else 7.4).goes_on(5, "b", 6.7 if freed else 8.7)
    return story.in_pool()


def a_worker_lives(went_on: float) -> Story:
    """A process of the broken pool is stopped, so that it does not end when it is told to."""

    def more(story: Story) -> None:
        story.during(4.05, "worker stopped", went_on, "worker continued", "a pool", WORKER)
        story.renews(3, "a", *range(5, 13)).ends_lease(3, "a", 12.6)
        story.takes_over(4, "b", 12.7).goes_on(5, "b", 14.7)

    return worker_killed(freed=False, killed=SIBLING, more=more)


def a_worker_keeps_its_replica(gone: float) -> Story:
    """A stopped worker of a broken pool keeps its replica waiting, which is told to end."""

    def more(story: Story) -> None:
        story.during(4.05, "worker stopped", 25.5, "worker continued", "a pool", WORKER)
        story.tell(4.3, "leaving", "a").renews(3, "a", *range(5, 26)).ends_lease(3, "a", 25.6)
        story.tell(gone, "gone", "a").takes_over(4, "b", 25.9).goes_on(5, "b", 26.7)

    return worker_killed(freed=False, killed=SIBLING, more=more)


def ended_wrongly(kind: str, worker: int) -> Story:
    """A lease is ended although no worker of its pool was killed: one of the pool before was."""
    story = worker_killed().without(kind="worker killed").tell(4.1, kind, "a pool", worker=worker)
    return pool_before(story)


def pool_before(story: Story) -> Story:
    """Let there be another pool before, whose processes may live for long."""
    story.tell(-4.5, "worker killed", "a pool", worker=6)
    return story.tell(-4.6, "worker started", "a pool", worker=6)


def signalled(*, freed: bool, renewed: bool = False) -> Story:
    """SIGTERM to a whole group ends the worker process of token 3, too."""
    story = begun_on_a(ended=4.1).tell(4.1, "leaving", "a", detail=END_GROUP)
    if freed:
        story.ends_lease(3, "a", 4.3)
    if renewed:
        story.renews(3, "a", 4.4)
    story.tell(4.5, "gone", "a").takes_over(4, "b", 5.1 if freed else 7.4)
    return story.goes_on(5, "b", 6.7 if freed else 8.7).in_pool()


def orphaned(at: float, *, lost: bool = False) -> Story:
    """A replica's own process is killed alone in the run of token 3, which goes on."""
    return killed().instead("killed", detail=ALONE).believes(3, "a", at, lost=lost)


def believed_in_a_pool(trouble: str, worker: int, over: str) -> Story:
    """A run in a worker process believes after its window was taken over."""
    story, replica = begun_on_a(ended=4.1), "a pool" if worker else "a"
    story.tell(4.3, trouble, replica, worker=worker, detail=ALONE * (trouble == "killed"))
    if over:
        story.tell(7.5, over, replica, worker=worker)
    story.takes_over(4, "b", 7.4).believes(3, "a pool", 7.7, worker=WORKER)
    return story.goes_on(5, "b", 8.7).in_pool()


# So much later a worker process whose parent was killed has to know it.
KNOWN = 4.3 + ORPHANED + REACTION

POOLS: dict[str, tuple[Story, list[str]]] = {
    "a killed worker": (worker_killed(), []),
    "a killed worker of the same pool": (worker_killed(killed=SIBLING), []),
    "left to its lease": (worker_killed(freed=False), [SILENT]),
    "left to its lease, another of its pool": (
        worker_killed(freed=False, killed=SIBLING),
        [SILENT],
    ),
    "left to its lease, in trouble": (
        worker_killed(freed=False).during(4.2, "hung", 5.2, "freed", "a"),
        [],
    ),
    "left to its lease, another of its pool, in trouble": (
        worker_killed(freed=False, killed=SIBLING).during(4.2, "hung", 5.2, "freed", "a"),
        [],
    ),
    "renewed for good": (
        worker_killed(freed=False, more=lambda story: story.renews(3, "a", *range(5, int(LAST)))),
        [SILENT],
    ),
    "not ended while a process of the pool may live": (a_worker_lives(12.5), []),
    "not ended although no process of the pool may live": (a_worker_lives(9.0), [SILENT]),
    # Its process puts the signal off that ends the others. Nobody can hear of its end.
    "ended after its pool broke": (
        worker_killed(killed=SIBLING).of_job(4.65, "end", "a pool", 3, worker=WORKER),
        [],
    ),
    "its lease is ended while its run goes on": (
        worker_killed(killed=SIBLING).believes(3, "a pool", 5.6, worker=WORKER),
        [OVERLAP],
    ),
    "its lease is ended since it was stopped": (
        ended_wrongly("worker stopped", WORKER),
        [RUN_TWICE],
    ),
    "its lease is ended since one of the pool before was killed": (
        ended_wrongly("worker killed", SIBLING),
        [RUN_TWICE],
    ),
    "killed in one pool after the other": (pool_before(worker_killed()), []),
    # It is begun in the next one, whose processes live.
    "claimed before its pool is replaced": (
        worker_killed(killed=SIBLING)
        .without(kind="begin", token=3)
        .of_job(4.2, "begin", "a pool", 3, due=4.0, worker=NEXT_WORKER),
        [RUN_TWICE],
    ),
    "keeps its replica waiting": (a_worker_keeps_its_replica(25.7), []),
    "keeps its replica waiting for too long": (a_worker_keeps_its_replica(39.7), [SLOW_STOP]),
    "a signal to the group": (signalled(freed=True), []),
    "a signal to the group, and its lease is not ended": (signalled(freed=False), [STRANDED]),
    # It is as if the end of the lease had not been.
    "renewed after the end of its lease": (
        signalled(freed=True, renewed=True),
        [STRANDED, OVERLAP],
    ),
    "orphaned, goes on for a moment": (orphaned(KNOWN - 0.1).in_pool(), []),
    "orphaned, goes on": (orphaned(KNOWN + 0.1).in_pool(), [OUTLIVED]),
    "orphaned, goes on, and knows that it is lost": (
        orphaned(KNOWN + 0.1, lost=True).in_pool(),
        [OUTLIVED],
    ),
    "orphaned, and stopped for a while": (
        orphaned(6.5)
        .during(4.4, "worker stopped", 6.4, "worker continued", "a pool", WORKER)
        .in_pool(),
        [],
    ),
    # Its parent renews, and nobody tells it that its lock is lost.
    "believes while its replica is stopped": (stopped().believes(3, "a", 20.0).in_pool(), []),
    "believes beyond its maximum lock": (
        stopped().ends_at(3, 20.0).believes(3, "a", 20.1).in_pool(),
        [*[OVERLAP] * 7, OUTLIVED],
    ),
    "stopped, which is no reason not to renew": (
        stopped()
        .without(kind="stopped")
        .without(kind="continued")
        .during(4.3, "worker stopped", 8.2, "worker continued", "a pool", WORKER)
        .in_pool(),
        [RUN_TWICE],
    ),
}


@pytest.mark.parametrize("case", POOLS)
def test_a_history_with_a_pool_is_judged(case: str) -> None:
    story, expected = POOLS[case]
    assert faults(story) == expected


@pytest.mark.parametrize(("lost", "found"), [(True, []), (False, [OUTLIVED])])
def test_a_worker_whose_parent_was_killed_may_go_on_without_failover_if_it_knows(
    lost: bool, found: list[str]
) -> None:
    story = killed_without_failover().instead("killed", detail=ALONE)
    story.believes(3, "a", KNOWN + 0.1, lost=lost)
    assert faults(story.in_pool(), AT_MOST_ONCE) == found


@pytest.mark.parametrize(
    ("trouble", "worker", "over", "excused"),
    [
        pytest.param("killed", 0, "", False, id="its replica is killed alone"),
        pytest.param("stopped", 0, "continued", True, id="its replica is stopped"),
        pytest.param("worker stopped", SIBLING, "worker continued", False, id="another is stopped"),
        pytest.param("worker killed", SIBLING, "", False, id="another one is killed"),
        pytest.param("worker stopped", WORKER, "worker continued", False, id="it is stopped"),
        pytest.param("hung", 0, "freed", True, id="its replica is cut off"),
    ],
)
def test_a_worker_that_believed_is_excused_by_the_troubles_of_its_replica(
    trouble: str, worker: int, over: str, excused: bool
) -> None:
    """That renews for it, or does not. When it is dead, the worker process ends as well."""
    assert (OVERLAP not in faults(believed_in_a_pool(trouble, worker, over))) == excused


def test_a_pool_is_expected_to_run_again_after_its_worker_was_killed() -> None:
    """The run in it is over; and nobody can continue a stopped worker any more."""
    story = worker_killed().but(lambda e: e.replica == "a pool" and e.at >= BASE + 4.2)
    [finding] = check(story.events, [TASK])
    since = BASE + 4.1 + POOL_BACK
    assert finding.text == f"a pool did not fire from {since:.3f} to {BASE + LAST:.3f}"
    story = worker_killed().tell(4.05, "worker stopped", "a pool", worker=WORKER)
    assert faults(story) == []
    # The first one's window owns the next run time of the pool, too, but not the one after it.
    story.but(lambda event: event.token in (12, 13))
    texts = [finding.text for finding in check(story.events, [TASK])]
    assert any(" of a pool, which was able to" in text for text in texts), texts


LOGGED = {"detail": f"apscheduler.executors.pool: Error running job job: {BROKEN}()"}
# The worker process is killed at 4.1. So much later its pool has been replaced.
REPLACED = 4.1 + POOL_BACK + REACTION


@pytest.mark.parametrize(
    ("at", "found"),
    [
        pytest.param(4.0, [ERROR], id="before"),
        pytest.param(4.2, [], id="at once"),
        pytest.param(REPLACED - 0.1, [], id="soon"),
        pytest.param(REPLACED + 0.1, [ERROR], id="late"),
        pytest.param(30.0, [ERROR], id="for good"),
    ],
)
def test_errors_of_a_pool_end_when_it_is_replaced(at: float, found: list[str]) -> None:
    assert faults(worker_killed().tell(at, "erred", "a", **LOGGED)) == found


def test_a_stopped_replica_tells_late_that_its_pool_is_broken() -> None:
    story = worker_killed().during(4.2, "stopped", 9.0, "continued", "a")
    assert ERROR not in faults(story.tell(9.1, "erred", "a", **LOGGED))
    assert ERROR in faults(story.tell(30.0, "erred", "a", **LOGGED))


def test_errors_of_a_pool_that_was_not_broken_by_us() -> None:
    assert faults(handed_over().in_pool().tell(30.0, "erred", "a", **LOGGED)) == [ERROR]
