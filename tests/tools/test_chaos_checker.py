"""The checker of the chaos, on histories made by hand: right ones, and each fault put into one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from apscheduler_tasklock.demo import history
from apscheduler_tasklock.demo.history import Event
from tests.chaos.bounds import ORPHANED, POOL_BACK, REACTION, RECOVERY, UNDER_WAY
from tests.chaos.checker import BROKEN, check
from tests.chaos.exclusion import OLD_TOKEN_WRITTEN, OUTLIVED, OVERLAP, SLEW, TOKEN_WENT_BACK
from tests.chaos.history import ALONE, END_GROUP
from tests.chaos.misses import MISSED, SILENT
from tests.chaos.repeats import BELIEVED_TOO_SOON, RUN_TWICE
from tests.chaos.stops import SLOW_STOP, STRANDED
from tests.chaos.tasks import ChaosTask, OneOff

PERIOD, LEASE, TAKES = 2.0, 3.0, 0.5
TASK = ChaosTask("job", PERIOD, (TAKES, TAKES), True, LEASE, 40)
AT_MOST_ONCE = ChaosTask("job", PERIOD, (TAKES, TAKES), False, LEASE, 40)

BASE = 5000.0  # of the machine's clock
LAST = 40.0  # when all histories end

# Seconds from a run time to its claim, and from there to the begin of the job.
DELAY = 0.01


class Story:
    """A history that is written by hand. All times are seconds from its start.

    Two replicas, whose run times are 0.7 s apart: ``a`` at 0, 2, 4 .. and ``b`` at 0.7, 2.7, 4.7 ..
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        for replica in "ab":
            self.starts(-5.0, replica)
        self.tell(LAST, "closing")

    def tell(self, at: float, kind: str, replica: str = "", **details: Any) -> None:
        for name in ("due", "until", "run_until"):
            if details.get(name) is not None:
                details[name] += BASE
        self.events.append(Event(BASE + at, kind, replica, **details))

    def starts(self, at: float, replica: str) -> None:
        self.tell(at, "starting", replica)
        self.tell(at, "ready", replica)

    def fires(self, replica: str, begun: float = 0.0, ended: float = LAST) -> None:
        """Fire at all run times of a replica."""
        at = 0.7 if replica == "b" else 0.0
        while at < ended:
            if at >= begun:
                self.tell(at, "fire", replica, task="job", due=at)
            at += PERIOD

    def claims(
        self,
        token: int,
        replica: str,
        at: float,
        *,
        window: float | None = None,
        lasts: float = LEASE,
        run_until: float | None = None,
    ) -> None:
        self.tell(
            at + DELAY,
            "claimed",
            replica,
            task="job",
            token=token,
            due=(at if window is None else window) + UNDER_WAY / 10,
            until=at + DELAY + lasts,
            run_until=run_until,
        )

    def one_off(self, name: str, at: float) -> None:
        """Let a one-off job be due on both replicas."""
        job = OneOff(name, BASE + at, TAKES, True)
        self.tell(-5.0, "planned", detail=json.dumps(asdict(job)))
        for replica in "ab":
            self.tell(at, "fire", replica, task=name, due=at)

    def hands_over(self, token: int, replica: str, at: float) -> None:
        self.tell(at, "handed over", replica, task="job", token=token, until=at)

    def ends_lease(self, token: int, replica: str, at: float) -> None:
        self.tell(at, "lease ended", replica, task="job", token=token, until=at)

    def renews(self, token: int, replica: str, at: float) -> None:
        self.tell(at, "renewed", replica, task="job", token=token, until=at + LEASE)

    def begins(
        self, token: int, replica: str, due: float, *, at: float | None = None, **details: Any
    ) -> None:
        begun = due + 2 * DELAY if at is None else at
        self.tell(begun, "begin", replica, task="job", token=token, due=due, **details)
        self.tell(begun, "written", replica, task="job", token=token)

    def believes(self, token: int, replica: str, at: float, *, lost: bool = False) -> None:
        self.tell(at, "holds", replica, task="job", token=token, lost=lost)

    def ends(self, token: int, replica: str, at: float, *, lost: bool = False) -> None:
        self.tell(at, "end", replica, task="job", token=token, lost=lost)

    def releases(self, token: int, replica: str, at: float, *, kept: bool = True) -> None:
        self.tell(at, "released", replica, task="job", token=token, until=at, kept=kept)

    def runs(self, token: int, replica: str, due: float, *, kept: bool = True) -> None:
        """Run from the claim to the release."""
        self.claims(token, replica, due)
        self.begins(token, replica, due)
        self.ends(token, replica, due + TAKES)
        self.releases(token, replica, due + TAKES + DELAY, kept=kept)

    def takes_over(self, token: int, replica: str, at: float, window: float) -> None:
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

    def without(self, **wanted: Any) -> None:
        """Leave the first event out that is so."""
        found = next(
            event
            for event in self.events
            if all(getattr(event, name) == value for name, value in wanted.items())
        )
        self.events.remove(found)


def peaceful() -> Story:
    """Nothing happens but runs."""
    story = Story()
    story.fires("a")
    story.fires("b")
    story.goes_on(1, "a", 0.0)
    return story


def begun_on_a(*, ended: float = LAST) -> Story:
    """The third run begins on replica a, which fires until it ends; b fires, too."""
    story = Story()
    story.fires("a", ended=ended)
    story.fires("b")
    story.goes_on(1, "a", 0.0, 4.0)
    story.claims(3, "a", 4.0)
    story.begins(3, "a", 4.0)
    return story


def killed() -> Story:
    """The holder of token 3 is killed in its run, and its window is run again."""
    story = begun_on_a(ended=4.1)
    story.tell(4.3, "killed", "a")
    story.takes_over(4, "b", 7.4, 4.0)
    story.goes_on(5, "b", 8.7)
    return story


def stopped() -> Story:
    """The holder of token 3 is stopped past its lease, and finds out when it goes on."""
    story = Story()
    story.fires("a", ended=4.1)
    story.fires("a", begun=10.0)
    story.fires("b")
    story.goes_on(1, "a", 0.0, 4.0)
    story.claims(3, "a", 4.0)
    story.begins(3, "a", 4.0)
    story.tell(4.3, "stopped", "a")
    story.takes_over(4, "b", 7.4, 4.0)
    story.tell(8.2, "continued", "a")
    story.believes(3, "a", 8.3, lost=True)
    story.ends(3, "a", 8.4, lost=True)
    story.goes_on(5, "b", 8.7)
    return story


def raised() -> Story:
    """A run raises, which opens its window again, for the other replica's run time in it."""
    story = Story()
    story.fires("a")
    story.fires("b")
    story.runs(1, "a", 0.0, kept=False)
    story.runs(2, "b", 0.7)
    story.goes_on(3, "b", 2.7)
    return story


def outage() -> Story:
    """The server is down for three run times."""
    story = Story()
    story.fires("a")
    story.fires("b")
    story.goes_on(1, "a", 0.0, 4.0)
    story.tell(3.9, "down")
    story.tell(9.0, "up")
    story.goes_on(3, "a", 10.0)
    return story


def cut_off() -> Story:
    """The holder of token 3 is cut off, ends its run, and cannot say so in time."""
    story = begun_on_a()
    story.tell(4.2, "hung", "a")
    story.ends(3, "a", 4.5)
    story.takes_over(4, "b", 7.4, 4.0)
    story.tell(9.0, "freed", "a")
    story.goes_on(5, "b", 8.7)
    return story


def killed_before_it_began() -> Story:
    """The holder of token 3 is killed between its claim and its run."""
    story = killed()
    story.without(kind="begin", token=3)
    story.without(kind="written", token=3)
    return story


def long() -> Story:
    """A run takes longer than the period; other run times find it running."""
    story = begun_on_a()
    for at in range(5, 9):
        story.renews(3, "a", float(at))
    story.ends(3, "a", 9.0)
    story.releases(3, "a", 9.01)
    story.goes_on(4, "a", 10.0)
    return story


def stopped_before_it_began() -> Story:
    """The holder of token 3 is stopped between claim and run, and finds out as it begins."""
    story = stopped()
    story.without(kind="begin", token=3)
    story.without(kind="written", token=3)
    story.begins(3, "a", 4.0, at=8.25, lost=True)
    story.without(kind="written", token=3)
    return story


def stopped_for_long() -> Story:
    """A replica is stopped for many run times, while the other one runs them."""
    story = Story()
    story.fires("a", ended=3.9)
    story.fires("a", begun=20.0)
    story.fires("b")
    story.goes_on(1, "a", 0.0, 4.0)
    story.tell(3.9, "stopped", "a")
    story.tell(19.9, "continued", "a")
    story.goes_on(3, "b", 4.7)
    return story


def killed_and_killed_again() -> Story:
    """Who takes the window of token 3 over is killed, too, before its run begins."""
    story = Story()
    for at in range(1, int(LAST), 2):
        story.tell(at, "fire", "c", task="job", due=float(at))
    story.starts(-5.0, "c")
    story.fires("a", ended=4.1)
    story.fires("b", ended=7.0)
    story.goes_on(1, "a", 0.0, 4.0)
    story.claims(3, "a", 4.0)
    story.begins(3, "a", 4.0)
    story.tell(4.3, "killed", "a")
    story.claims(4, "b", 7.4, window=4.0)
    story.tell(7.41, "killed", "b")
    story.takes_over(5, "c", 10.8, 4.0)
    story.goes_on(6, "c", 11.4 + 1.6)
    return story


def killed_without_failover() -> Story:
    """The holder of token 3 is killed; a run time that was refused meanwhile is run."""
    story = begun_on_a(ended=4.1)
    story.tell(4.3, "killed", "a")
    story.claims(4, "b", 7.4, window=6.7)
    story.begins(4, "b", 6.7, at=7.42)
    story.ends(4, "b", 7.9)
    story.releases(4, "b", 7.91)
    story.goes_on(5, "b", 8.7)
    return story


def handed_over() -> Story:
    """The coroutine of token 3 is cut by a graceful stop, and another replica runs its window."""
    story = begun_on_a(ended=4.1)
    story.tell(4.3, "leaving", "a")
    story.hands_over(3, "a", 4.35)
    story.tell(4.36, "cut", "a", task="job", token=3, lost=True)
    story.tell(4.5, "gone", "a")
    story.takes_over(4, "b", 4.8, 4.0)
    story.goes_on(5, "b", 6.7)
    return story


def handed_over_before_it_began() -> Story:
    """The claim of token 3 is granted when its replica is already ending."""
    story = handed_over()
    story.without(kind="begin", token=3)
    story.without(kind="written", token=3)
    story.without(kind="cut", token=3)
    return story


def joined() -> Story:
    """A replica joins after the holder of token 3 was refused nobody, and runs its window again."""
    story = Story()
    story.without(kind="starting", replica="b")
    story.without(kind="ready", replica="b")
    story.fires("a", ended=4.1)
    story.goes_on(1, "a", 0.0, 4.0)
    story.claims(3, "a", 4.0)
    story.begins(3, "a", 4.0)
    story.tell(4.3, "killed", "a")
    story.starts(5.0, "b")
    story.fires("b", begun=5.0)
    story.takes_over(4, "b", 11.1, 4.0)
    story.goes_on(5, "b", 12.7)
    return story


RIGHT = [
    handed_over,
    handed_over_before_it_began,
    joined,
    peaceful,
    killed,
    stopped,
    raised,
    outage,
    cut_off,
    killed_before_it_began,
    long,
    stopped_before_it_began,
    stopped_for_long,
    killed_and_killed_again,
]


def faults(story: Story, task: ChaosTask = TASK) -> list[str]:
    return [finding.fault for finding in check(story.events, [task])]


@pytest.mark.parametrize("tell", RIGHT)
def test_a_right_history_is_right(tell: Callable[[], Story]) -> None:
    assert check(tell().events, [TASK]) == []


def test_a_history_without_failover_is_right() -> None:
    """The run of a killed holder stands until its lease ends, and then others' run times run."""
    assert check(killed_without_failover().events, [AT_MOST_ONCE]) == []


def test_no_history_has_no_findings() -> None:
    assert check([], [TASK]) == []


# The holder of token 3 goes on at 8.2. So much later it has had an answer to its renewal.
LEARNED = 8.2 + RECOVERY


def test_two_runs_that_both_believed_overlap() -> None:
    story = stopped()
    story.believes(3, "a", LEARNED + 0.1)
    findings = check(story.events, [TASK])
    assert {(finding.fault, finding.task) for finding in findings} == {(OVERLAP, "job")}
    assert findings[0].text == (
        f"run of token 3 on a, begun {BASE + 4.02:.3f} still held the lock when "
        f"takeover of token 4 on b, begun {BASE + 7.42:.3f}, for 0.480 s"
    )


def test_a_belief_before_the_other_run_began_is_no_overlap() -> None:
    story = killed()
    story.believes(3, "a", 4.29)
    assert faults(story) == []


def test_a_holder_that_was_stopped_believes_until_its_next_renewal_is_answered() -> None:
    story = stopped()
    story.believes(3, "a", LEARNED - 0.1)
    assert faults(story) == []


def test_a_long_overlap_is_found_with_each_run_that_it_meets() -> None:
    story = stopped()
    story.believes(3, "a", LEARNED + 0.1)
    assert faults(story) == [OVERLAP] * 4


def test_a_token_that_went_back() -> None:
    """As if the table had been put back to an older state."""
    story = Story()
    story.fires("a")
    story.fires("b")
    story.goes_on(5, "a", 0.0, 4.0)
    story.runs(5, "b", 4.7)
    story.goes_on(7, "b", 6.7)
    story.events = [event for event in story.events if event.kind != "written"]
    assert faults(story) == [TOKEN_WENT_BACK]


def test_a_token_that_one_replica_runs_with_twice() -> None:
    story = peaceful()
    story.begins(3, "a", 4.0, at=4.55)
    story.events.pop()  # its write
    assert faults(story) == [TOKEN_WENT_BACK]


def test_a_write_with_an_old_token() -> None:
    story = stopped()
    accepted = [event.token for event in story.events].index(5)
    late = Event(BASE + 8.3, "written", "a", "job", 3)
    story.events.insert(accepted, late)
    (finding,) = check(story.events, [TASK])
    assert finding.fault == OLD_TOKEN_WRITTEN
    assert finding.text == "a wrote with token 3 after 4 was written"


def test_writes_are_judged_in_the_order_of_acceptance_not_by_their_times() -> None:
    story = peaceful()
    at = [event for event in story.events if event.kind == "written"]
    early = replace(at[3], at=at[1].at)
    story.events[story.events.index(at[3])] = early
    assert faults(story) == []


def test_a_window_that_another_replica_runs_too() -> None:
    story = Story()
    story.fires("a")
    story.fires("b")
    story.goes_on(1, "a", 0.0, 4.0)
    story.runs(3, "b", 2.7)
    story.goes_on(4, "a", 4.6)
    assert faults(story) == [RUN_TWICE]


def test_a_window_that_one_replica_runs_late() -> None:
    """A starved replica finds the lock free, and runs a window again that is long over."""
    story = peaceful()
    story.events = [event for event in story.events if event.token < 6]
    story.claims(6, "b", 9.0, window=4.7)
    story.begins(6, "b", 4.7, at=9.1)
    story.ends(6, "b", 9.4)
    story.releases(6, "b", 9.5)
    story.goes_on(7, "a", 10.0)
    assert faults(story) == [RUN_TWICE]


def test_a_window_taken_over_from_a_run_that_ended() -> None:
    story = Story()
    story.fires("a")
    story.fires("b")
    story.goes_on(1, "a", 0.0, 4.0)
    story.takes_over(3, "b", 2.7, 2.0)
    story.goes_on(4, "a", 4.0)
    assert faults(story) == [RUN_TWICE]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_claim_that_began_before_a_release_and_has_found_it(is_first: bool) -> None:
    """Their order in the row counts, and not when their statements began."""
    story = Story()
    story.fires("a")
    story.fires("b")
    story.goes_on(1, "a", 0.0, 2 * PERIOD)
    story.without(kind="released", token=2)
    end = partial(story.releases, 2, "a", 2 * PERIOD + DELAY + 0.05)
    if is_first:
        end()
    story.goes_on(3, "a", 2 * PERIOD)
    if not is_first:
        end()
    found = faults(story)
    assert (found == []) if is_first else (OVERLAP in found)


def test_a_window_taken_over_from_a_run_whose_lease_had_not_ended() -> None:
    story = killed()
    story.renews(3, "a", 4.6)
    assert faults(story) == [OVERLAP]


def test_a_window_taken_over_from_a_replica_that_did_not_renew_for_no_reason() -> None:
    story = cut_off()
    story.without(kind="hung")
    assert faults(story) == [RUN_TWICE]


def test_a_short_trouble_is_no_reason() -> None:
    story = cut_off()
    story.without(kind="freed")
    story.tell(4.7, "freed", "a")
    assert faults(story) == [RUN_TWICE]


@pytest.mark.parametrize("kind", ["cut off", "terminated"])
def test_a_broken_connection_is_no_reason(kind: str) -> None:
    story = cut_off()
    story.without(kind="hung")
    story.without(kind="freed")
    story.tell(4.7, kind, "a")
    assert faults(story) == [RUN_TWICE]


def test_a_stall_is_a_reason() -> None:
    story = cut_off()
    story.without(kind="hung")
    story.without(kind="freed")
    story.tell(4.7, "stalled", "a", until=7.0)
    assert faults(story) == []


def test_a_window_taken_over_from_a_run_that_was_released_late() -> None:
    """Its replica had been in trouble, and its lease had ended; but it could still be released."""
    story = cut_off()
    story.releases(3, "a", 7.39)
    assert faults(story) == [RUN_TWICE]


@pytest.mark.parametrize(
    ("freed", "found"), [pytest.param(5.2, [RUN_TWICE], id="able"), pytest.param(5.4, [], id="not")]
)
def test_a_window_taken_over_from_a_run_that_ended_on_a_replica_that_could_have_said_so(
    freed: float, found: list[str]
) -> None:
    story = begun_on_a()
    story.tell(4.2, "hung", "a")
    story.ends(3, "a", 4.5)
    story.tell(freed, "freed", "a")
    story.tell(7.0, "cut off", "b")  # so that it takes its time
    story.takes_over(4, "b", 11.0, 4.0)
    story.goes_on(5, "b", 12.7)
    assert faults(story) == found


def test_a_takeover_of_nothing() -> None:
    story = Story()
    story.fires("a")
    story.fires("b")
    story.takes_over(1, "a", 0.0, 0.0)
    story.goes_on(2, "a", 2.0)
    assert faults(story) == [RUN_TWICE]


def test_a_window_taken_over_without_failover() -> None:
    assert RUN_TWICE in faults(killed(), AT_MOST_ONCE)


def test_a_run_time_that_nobody_claimed() -> None:
    story = peaceful()
    story.events = [event for event in story.events if event.token != 3]
    # That of `a`, which runs the others; and that of `b`, which did not run it in place of `a`.
    assert faults(story) == [MISSED] * 2


def test_a_run_time_that_nobody_claimed_while_its_replica_was_in_trouble() -> None:
    story = Story()
    story.fires("a")
    story.goes_on(1, "a", 0.0, 4.0)
    story.goes_on(3, "a", 12.0)
    story.tell(3.9, "stopped", "a")
    story.tell(8.5, "continued", "a")
    story.without(kind="starting", replica="b")
    story.without(kind="ready", replica="b")
    assert faults(story) == []


def test_a_replica_that_lives_while_another_one_is_in_trouble_misses_a_run_time() -> None:
    story = Story()
    story.fires("b")
    story.goes_on(1, "b", 0.7, 4.0)
    story.goes_on(3, "b", 12.7)
    story.tell(3.9, "stopped", "a")
    story.tell(11.5, "continued", "a")
    story.without(kind="ready", replica="a")
    assert faults(story) == [MISSED] * 4


@pytest.mark.parametrize("tell", [killed, stopped])
def test_a_run_time_that_nobody_claimed_long_after_a_dead_run_was_run_again(
    tell: Callable[[], Story],
) -> None:
    story = tell()
    story.events = [event for event in story.events if event.token != 8]
    assert MISSED in faults(story)


@pytest.mark.parametrize("kind", ["cut off", "terminated"])
def test_a_broken_connection_costs_no_run_time(kind: str) -> None:
    story = peaceful()
    story.events = [event for event in story.events if event.token != 3]
    story.tell(3.6, kind, "a")
    story.tell(3.6, kind, "b")
    assert faults(story) == [MISSED] * 2


def test_a_replica_that_stops_firing() -> None:
    story = peaceful()
    fires = [e for e in story.events if (e.kind, e.replica) == ("fire", "b")]
    for fire in fires[5:]:
        story.events.remove(fire)
    (finding,) = check(story.events, [TASK])
    assert finding.fault == MISSED
    assert finding.text == f"b did not fire from {BASE + 8.7:.3f} to {BASE + LAST:.3f}"


def test_a_run_time_that_was_skipped_by_a_replica_that_was_able_to_claim_it() -> None:
    story = peaceful()
    story.tell(4.2, "skipped", "b", task="job", due=4.7)
    (finding,) = check(story.events, [TASK])
    assert finding.text == f"b was able to claim its run time {BASE + 4.7:.3f}, and skipped it"


def test_a_run_time_that_was_skipped_in_an_outage() -> None:
    story = outage()
    story.tell(7.2, "skipped", "a", task="job", due=4.0)
    assert faults(story) == []


def test_a_run_time_that_was_refused_and_could_not_be_taken_over_later() -> None:
    story = killed()
    story.without(kind="released", token=4)
    story.releases(4, "b", 7.42 + TAKES)
    story.tell(8.0, "skipped", "b", task="job", due=4.7)
    story.tell(7.95, "cut off", "b")
    assert faults(story) == []


def test_a_run_time_that_another_replica_skips() -> None:
    story = peaceful()
    story.tell(4.2, "skipped", "c", task="job", due=4.7)
    assert faults(story) == []


def test_an_opened_window_that_nobody_runs() -> None:
    story = raised()
    story.events = [event for event in story.events if event.token < 2]
    story.goes_on(2, "b", 2.7)
    assert faults(story) == [MISSED]


def test_a_run_time_that_is_recorded_after_its_claim_was_refused() -> None:
    """A busy scheduler tells late, when what stood against it has opened its window."""
    story = raised()
    story.events = [event for event in story.events if event.token < 2]
    story.without(kind="fire", replica="b")
    story.without(kind="released", token=1)
    story.releases(1, "a", 0.75, kept=False)
    story.tell(0.8, "fire", "b", task="job", due=0.7)
    story.goes_on(2, "b", 2.7)
    assert faults(story) == []


def test_a_dead_run_without_failover_stands_no_longer_than_its_lease() -> None:
    story = killed_without_failover()
    story.events = [event for event in story.events if event.token < 4]
    assert set(faults(story, AT_MOST_ONCE)) == {MISSED}


def test_a_run_time_that_a_dead_run_stood_against_is_run_after_it() -> None:
    """Of a task whose next run time is far away."""
    story = Story()
    for replica, at in (("a", 0.0), ("b", 0.7), ("a", 20.0), ("b", 20.7)):
        story.tell(at, "fire", replica, task="job", due=at)
    story.claims(1, "a", -19.0)
    story.begins(1, "a", -19.0)
    for at in range(-18, 1):
        story.renews(1, "a", float(at))
    story.tell(0.4, "killed", "a")
    task = replace(AT_MOST_ONCE, period=20.0)
    assert faults(story, task)[0] == MISSED
    story.claims(2, "b", 3.5, window=0.7)
    story.begins(2, "b", 0.7, at=3.52)
    story.ends(2, "b", 4.0)
    story.releases(2, "b", 4.01)
    story.runs(3, "b", 20.7)
    assert faults(story, task) == []


def test_a_replica_does_not_fire_while_a_job_runs_of_which_it_may_run_one() -> None:
    story = Story()
    story.fires("a", ended=4.1)
    story.fires("a", begun=18.0)
    story.fires("b")
    story.goes_on(1, "a", 0.0, 4.0)
    story.claims(3, "a", 4.0)
    story.begins(3, "a", 4.0)
    for at in range(5, 17):
        story.renews(3, "a", float(at))
    story.ends(3, "a", 17.0)
    story.releases(3, "a", 17.01)
    story.goes_on(4, "a", 18.0)
    assert faults(story) == []


def test_a_claim_that_is_released_without_a_run() -> None:
    story = peaceful()
    story.without(kind="begin", token=3)
    story.without(kind="end", token=3)
    assert faults(story) == [MISSED]


def test_a_claim_that_is_given_back_without_a_run() -> None:
    """Its window is open again, but those that were refused it do not know."""
    story = Story()
    story.fires("a")
    story.fires("b")
    story.goes_on(1, "a", 0.0, 4.0)
    story.claims(3, "a", 4.0)
    story.releases(3, "a", 4.1, kept=False)
    story.goes_on(4, "b", 4.7)
    assert faults(story) == [MISSED]


def test_a_dead_run_that_is_left() -> None:
    story = killed()
    story.events = [event for event in story.events if event.token < 4]
    (finding,) = check(story.events, [TASK])
    assert finding.fault == MISSED
    assert finding.text.endswith("and b was well and left it")


def test_a_dead_run_that_no_poll_finds() -> None:
    """It is run again only when another replica fires."""
    story = killed()
    story.events = [event for event in story.events if event.token < 4]
    story.takes_over(4, "b", 9.4, 4.0)
    story.goes_on(5, "b", 10.7)
    assert MISSED in faults(story)


def test_a_dead_run_that_the_next_window_passes_over() -> None:
    story = killed()
    story.events = [event for event in story.events if event.token < 4]
    story.goes_on(4, "b", 8.7)
    assert faults(story) == [MISSED]


def test_a_dead_run_is_not_left_for_as_long_as_nobody_can_know_that_it_is_dead() -> None:
    story = killed()
    story.events = [event for event in story.events if event.token < 4]
    for at in range(6, int(LAST), 4):
        story.tell(float(at), "cut off", "b")
    assert faults(story) == []


def test_a_replica_that_ends_on_its_own() -> None:
    story = peaceful()
    story.tell(LAST - 0.1, "died", "b", detail="status 1: Oops")
    (finding,) = check(story.events, [TASK])
    assert str(finding) == f"replica died at {BASE + LAST - 0.1:.3f}: b ended: status 1: Oops"


@pytest.mark.parametrize("tell", RIGHT)
def test_events_may_be_in_any_order(tell: Callable[[], Story], rng: random.Random) -> None:
    """Each replica tells of its own when it gets to it. Only the tables' rows are in order."""
    events = tell().events
    rows = [event for event in events if event.kind in ("written", *ROWS)]
    others = [event for event in events if event not in rows]
    rng.shuffle(others)
    assert check([*others, *rows], [TASK]) == []


def test_a_history_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    events = [event for tell in RIGHT for event in tell().events]
    history.write(events, tmp_path / "history.jsonl")
    assert history.read(tmp_path / "history.jsonl") == events


def test_a_replica_that_logs_an_error() -> None:
    story = peaceful()
    story.tell(3.0, "erred", "b", detail="Oops")
    (finding,) = check(story.events, [TASK])
    assert str(finding) == f"error logged at {BASE + 3:.3f}: b: Oops"


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
    story = Story()
    story.without(kind="starting", replica="b")
    story.without(kind="ready", replica="b")
    for token, at in enumerate([0.0, 20.0], 1):
        story.tell(at, "fire", "a", task="job", due=at)
        story.runs(token, "a", at)
    story.tell(10.0, "fire", "a", task="job", due=10.0)
    story.tell(9.9, "down")
    story.tell(9.9 + lasts, "up")
    for number, kind in enumerate(then):
        story.tell(11.5 + number, kind, "a")
    if before:
        story.tell(9.0, "stopped", "a")
        story.tell(9.5, "continued", "a")
    assert faults(story, replace(TASK, period=10.0)) == found


def test_a_dead_run_is_not_left_by_a_replica_that_is_busy_with_the_task() -> None:
    """A run that has lost its lock goes on, and may be the one instance that is allowed."""
    story = stopped()
    story.events = [e for e in story.events if e.token < 4 and (e.kind, e.token) != ("end", 3)]
    story.tell(6.9, "killed", "b")
    assert faults(story) == []


def test_a_window_that_was_handed_over_and_is_left() -> None:
    story = handed_over()
    story.events = [event for event in story.events if event.token < 4]
    story.takes_over(4, "b", 7.4, 4.0)
    story.goes_on(5, "b", 8.7)
    (finding,) = check(story.events, [TASK])
    assert finding.text.endswith(f"was handed over {BASE + 4.35:.3f}, and b was well and left it")


def test_a_window_that_was_handed_over_and_that_the_next_one_passes_over() -> None:
    story = handed_over()
    story.events = [event for event in story.events if event.token < 4]
    story.runs(4, "b", 4.7)
    story.goes_on(5, "b", 6.7)
    assert MISSED in faults(story)


def test_a_window_that_was_handed_over_when_its_run_had_ended() -> None:
    story = handed_over()
    story.without(kind="cut", token=3)
    story.ends(3, "a", 4.3)
    assert faults(story) == [RUN_TWICE]


def test_a_window_is_not_handed_over_without_failover_when_its_run_has_begun() -> None:
    assert faults(handed_over(), AT_MOST_ONCE) == [RUN_TWICE]


def test_a_window_is_handed_over_without_failover_when_its_run_has_not_begun() -> None:
    story = handed_over_before_it_began()
    assert faults(story, AT_MOST_ONCE) == []
    story.events = [event for event in story.events if event.token < 4]
    story.goes_on(4, "b", 6.7)
    assert MISSED in faults(story, AT_MOST_ONCE)


def test_a_cut_run_that_is_released_as_if_it_had_ended() -> None:
    """Without failover it was started once. With it, another replica runs the window."""
    story = handed_over()
    story.events = [event for event in story.events if event.token < 4]
    story.without(kind="handed over")
    story.releases(3, "a", 4.35)
    story.goes_on(4, "b", 6.7)
    assert faults(story, AT_MOST_ONCE) == []
    assert faults(story) == [MISSED]


def test_a_lock_that_a_graceful_stop_leaves_behind() -> None:
    story = handed_over()
    story.events = [event for event in story.events if event.token < 4]
    story.without(kind="handed over")
    story.takes_over(4, "b", 7.4, 4.0)
    story.goes_on(5, "b", 8.7)
    assert STRANDED in faults(story)
    story.tell(4.2, "hung", "a")
    story.tell(4.6, "freed", "a")
    assert STRANDED not in faults(story)


def test_a_replica_that_takes_long_to_end() -> None:
    story = handed_over()
    story.without(kind="gone")
    story.tell(14.0, "gone", "a")
    assert faults(story) == [SLOW_STOP]


def test_a_window_taken_over_right_after_the_start_of_a_replica() -> None:
    story = joined()
    story.without(kind="starting", replica="b")
    story.without(kind="ready", replica="b")
    story.starts(10.9, "b")
    assert faults(story) == [BELIEVED_TOO_SOON]


def test_a_window_taken_over_right_after_an_outage() -> None:
    """Its run had ended meanwhile, which could not be said."""
    story = begun_on_a()
    story.tell(4.3, "down")
    story.ends(3, "a", 4.5)
    story.tell(8.0, "up")
    story.takes_over(4, "b", 8.1, 4.0)
    story.goes_on(5, "b", 8.7)
    assert faults(story) == [BELIEVED_TOO_SOON]


@pytest.mark.parametrize(
    ("run_until", "found"),
    [pytest.param(10.6, set(), id="over"), pytest.param(10.8, {BELIEVED_TOO_SOON}, id="not over")],
)
def test_a_dead_run_needs_no_grace_past_its_maximum_lock(run_until: float, found: set[str]) -> None:
    """It stands against nothing any more, also on a replica that has just started."""
    story = Story()
    story.without(kind="starting", replica="b")
    story.without(kind="ready", replica="b")
    story.fires("a", ended=4.1)
    story.goes_on(1, "a", 0.0, 4.0)
    story.claims(3, "a", 4.0, run_until=run_until)
    story.begins(3, "a", 4.0)
    story.tell(4.3, "killed", "a")
    story.starts(10.5, "b")
    story.fires("b", begun=10.5)
    story.goes_on(4, "b", 10.7)
    assert set(faults(story, AT_MOST_ONCE)) == found


@pytest.mark.parametrize(
    ("run_until", "found"),
    [pytest.param(7.0, [RUN_TWICE], id="over"), pytest.param(7.5, [], id="not over")],
)
def test_a_window_is_not_taken_over_past_its_maximum_lock(
    run_until: float, found: list[str]
) -> None:
    """It is given up then."""
    story = killed()
    story.without(kind="claimed", token=3)
    story.claims(3, "a", 4.0, run_until=run_until)
    claim = story.events.pop()
    story.events.insert([event.token for event in story.events].index(3), claim)
    assert faults(story) == found


def test_a_lease_that_is_longer_than_it_should_be() -> None:
    story = killed_without_failover()
    story.renews(3, "a", 4.02)
    story.without(kind="renewed")
    story.tell(4.02, "renewed", "a", task="job", token=3, until=7.3)
    assert faults(story, AT_MOST_ONCE) == [SILENT]


def test_a_run_time_that_is_taken_for_a_misfire() -> None:
    story = peaceful()
    story.tell(5.0, "misfired", "b", task="job", due=2.7)
    assert faults(story) == [MISSED]
    story.tell(3.0, "stopped", "b")
    story.tell(4.9, "continued", "b")
    assert faults(story) == []


def test_a_job_that_runs_before_it_is_due() -> None:
    story = peaceful()
    story.tell(5.0, "early", "b", task="job")
    assert faults(story) == ["ran too early"]


def given_up(deaths: int, run_until: float | None = None, left_for: float = 0.0) -> Story:
    """So many holders of a window die one after the other, and then another replica gives it up.

    :param run_until: when the maximum locks of these holders end
    :param left_for: for how many seconds nobody runs the window again after the last death
    """
    story = killed()
    story.events = [e for e in story.events if e.token < 4 and e.replica != "b"]
    story.starts(-5.0, "e")
    for at in range(1, int(LAST), 2):
        story.tell(at, "fire", "e", task="job", due=float(at))
    end = 7.2
    for token, replica in zip(range(4, 3 + deaths), "bcd", strict=False):
        story.starts(end - 8.0, replica)
        story.claims(token, replica, end, window=4.0, run_until=run_until)
        story.tell(end + 0.1, "killed", replica)
        end += LEASE + 0.2
    end += left_for
    story.tell(end, "given up", "b", task="job", token=2 + deaths, until=end, deaths=deaths)
    story.tell(end + 0.01, "erred", "e", detail="task 'job': the window of .. is given up: ..")
    story.goes_on(3 + deaths, "e", float(int(end) // 2 * 2 + 1))
    return story


@pytest.mark.parametrize(("deaths", "found"), [(4, []), (3, ["error logged"])])
def test_a_window_that_is_given_up_since_many_holders_died(deaths: int, found: list[str]) -> None:
    assert faults(given_up(deaths)) == found


@pytest.mark.parametrize(("early", "found"), [(0.05, []), (-0.1, ["error logged"])])
def test_a_window_that_is_given_up_since_its_maximum_lock_has_ended(
    early: float, found: list[str]
) -> None:
    """As after a worker and then its replica died, when no other replica was well before that."""
    [at] = [event.at - BASE for event in given_up(2).events if event.kind == "given up"]
    assert faults(given_up(2, run_until=at - early)) == found


def test_a_window_that_a_replica_has_left_until_its_maximum_lock_has_ended() -> None:
    """That is a fault of that replica, although giving the window up was right."""
    [at] = [e.at - BASE for e in given_up(2, left_for=8.0).events if e.kind == "given up"]
    assert faults(given_up(2, run_until=at - 0.05, left_for=8.0)) == [MISSED]


def test_a_window_that_is_given_up_although_a_run_had_ended_among_the_deaths() -> None:
    story = given_up(4)
    story.releases(4, "b", 7.25)
    assert "error logged" in faults(story)


def once(*, late: bool = False, known_as: str = "") -> Story:
    """A one-off job, which one replica runs."""
    story = Story()
    story.fires("a")
    story.fires("b")
    story.goes_on(1, "a", 0.0)
    story.one_off("once", 5.0)
    if late:
        story.tell(4.0, "slowed")
        story.tell(9.0, "quick")
    name, at = known_as or "once", 7.0 if late else 5.1
    story.tell(at, "claimed", "a", task=name, token=1, due=5.0, until=at + LEASE)
    story.tell(at + 0.1, "begin", "a", task="once", token=1, due=5.0, detail=known_as)
    story.tell(at + 0.2, "end", "a", task="once", token=1)
    story.tell(at + 0.3, "released", "a", task=name, token=1, until=3605.0)
    return story


@pytest.mark.parametrize("known_as", ["", "job:0123456789abcdef"])
def test_a_one_off_job_that_runs_once_the_database_answers(known_as: str) -> None:
    assert faults(once(late=True, known_as=known_as)) == []


@pytest.mark.parametrize("late", [False, True])
def test_a_one_off_job_that_nobody_runs(late: bool) -> None:
    story = once(late=late)
    story.events = [event for event in story.events if event.task != "once" or event.kind == "fire"]
    assert faults(story) == [MISSED] * 2


def test_a_dead_one_off_job_is_left_by_those_that_do_not_know_it() -> None:
    story = once()
    for kind in ("begin", "end", "released"):
        story.without(kind=kind, task="once")
    story.tell(5.15, "killed", "a")
    assert MISSED in faults(story)
    story.without(kind="fire", replica="b", task="once")
    assert [f for f in check(story.events, []) if f.task == "once"] == []


WORKER, SIBLING, NEXT_WORKER = 7, 8, 9
ROWS = ("claimed", "renewed", "released", "handed over", "given up", "lease ended")


def in_pool(story: Story) -> Story:
    """Let the runs of ``a`` be in a worker process of its pool, or of the one after a kill.

    The rows know of the replica alone, which claims, renews and releases.
    """
    killed = [event.at for event in story.events if event.kind == "worker killed"]
    for number, event in enumerate(story.events):
        if event.replica == "a" and event.task and event.kind not in ROWS:
            worker = WORKER if not killed or event.at < killed[0] else NEXT_WORKER
            worker = 0 if event.kind == "fire" else event.worker or worker
            story.events[number] = replace(event, replica="a pool", worker=worker)
    story.starts(-5.0, "a pool")
    story.tell(-5.0, "worker started", "a pool", worker=SIBLING)
    return story


def worker_killed(*, freed: bool, killed: int = WORKER) -> Story:
    """A worker process is killed in the run of token 3, and its replica ends its lease, or not."""
    story = begun_on_a()
    story.tell(4.1, "worker killed", "a pool", worker=killed)
    if freed:
        story.ends_lease(3, "a", 4.7)
    story.takes_over(4, "b", 5.5 if freed else 7.4, 4.0)
    story.goes_on(5, "b", 6.7 if freed else 8.7)
    return in_pool(story)


@pytest.mark.parametrize(
    "tell",
    [
        pytest.param(peaceful, id="peaceful"),
        pytest.param(killed, id="killed"),
        pytest.param(stopped, id="stopped"),
        pytest.param(cut_off, id="cut off"),
        pytest.param(killed_before_it_began, id="killed before it began"),
        pytest.param(stopped_before_it_began, id="stopped before it began"),
    ],
)
def test_runs_in_a_pool_are_right(tell: Callable[[], Story]) -> None:
    assert faults(in_pool(tell())) == []


@pytest.mark.parametrize("killed", [WORKER, SIBLING])
def test_a_killed_worker_and_the_others_of_its_pool(killed: int) -> None:
    assert faults(worker_killed(freed=True, killed=killed)) == []


@pytest.mark.parametrize("killed", [WORKER, SIBLING])
def test_a_killed_workers_task_that_is_left_to_its_lease(killed: int) -> None:
    assert faults(worker_killed(freed=False, killed=killed)) == [SILENT]
    disturbed = worker_killed(freed=False, killed=killed)
    disturbed.tell(4.2, "hung", "a")
    disturbed.tell(5.2, "freed", "a")
    assert faults(disturbed) == []


def test_a_killed_workers_task_that_its_replica_renews_for_good() -> None:
    story = worker_killed(freed=True)
    story.events = [event for event in story.events if event.token < 4]
    story.without(kind="lease ended")
    for at in range(5, int(LAST)):
        story.renews(3, "a", float(at))
    assert SILENT in faults(story)


def test_a_lease_is_not_ended_while_a_process_of_the_broken_pool_may_live() -> None:
    """It is stopped, so that it does not end when it is told to."""
    story = worker_killed(freed=False, killed=SIBLING)
    story.events = [event for event in story.events if event.token < 4]
    story.tell(4.05, "worker stopped", "a pool", worker=WORKER)
    for at in range(5, 13):
        story.renews(3, "a", float(at))
    story.tell(12.5, "worker continued", "a pool", worker=WORKER)
    story.ends_lease(3, "a", 12.6)
    story.takes_over(4, "b", 12.7, 4.0)
    story.goes_on(5, "b", 14.7)
    assert faults(story) == []
    story.without(kind="worker continued")
    story.tell(9.0, "worker continued", "a pool", worker=WORKER)
    assert faults(story) == [SILENT]


def test_a_run_that_ends_after_its_pool_broke() -> None:
    """Its process puts the signal off that ends the others. Nobody can hear of its end."""
    story = worker_killed(freed=True, killed=SIBLING)
    story.ends(3, "a", 4.65)
    ended = story.events[-1]
    story.events[-1] = replace(ended, replica="a pool", worker=WORKER)
    assert faults(story) == []


def test_a_lease_that_is_ended_while_its_run_goes_on() -> None:
    story = worker_killed(freed=True, killed=SIBLING)
    story.tell(4.7 + 2 * SLEW, "holds", "a pool", task="job", token=3, worker=WORKER)
    assert faults(story) == [OVERLAP]


@pytest.mark.parametrize(
    ("kind", "worker"),
    [
        pytest.param("worker stopped", WORKER, id="it was stopped"),
        pytest.param("worker killed", SIBLING, id="one of the pool before was killed"),
    ],
)
def test_a_lease_that_is_ended_although_no_worker_of_its_pool_was_killed(
    kind: str, worker: int
) -> None:
    """Processes of a pool that was replaced may live for long."""
    story = worker_killed(freed=True)
    story.without(kind="worker killed")
    story.tell(-4.5, "worker killed", "a pool", worker=6)
    story.tell(-4.6, "worker started", "a pool", worker=6)
    story.tell(4.1, kind, "a pool", worker=worker)
    assert faults(story) == [OVERLAP]


def test_a_worker_is_killed_in_one_pool_after_the_other() -> None:
    story = worker_killed(freed=True)
    story.tell(-4.5, "worker killed", "a pool", worker=6)
    story.tell(-4.6, "worker started", "a pool", worker=6)
    assert faults(story) == []


def test_a_run_that_is_claimed_before_its_pool_is_replaced() -> None:
    """It is begun in the next one, whose processes live."""
    story = worker_killed(freed=True, killed=SIBLING)
    story.without(kind="begin", token=3)
    story.begins(3, "a pool", 4.0, at=4.2, worker=NEXT_WORKER)
    story.events.pop()  # its write
    assert faults(story) == [OVERLAP]


def test_a_stopped_worker_of_a_broken_pool_keeps_its_replica_waiting() -> None:
    story = worker_killed(freed=False, killed=SIBLING)
    story.events = [event for event in story.events if event.token < 4]
    story.tell(4.05, "worker stopped", "a pool", worker=WORKER)
    story.tell(4.3, "leaving", "a")
    for at in range(5, 26):
        story.renews(3, "a", float(at))
    story.tell(25.5, "worker continued", "a pool", worker=WORKER)
    story.ends_lease(3, "a", 25.6)
    story.tell(25.7, "gone", "a")
    story.takes_over(4, "b", 26.5, 4.0)
    story.goes_on(5, "b", 26.7)
    assert SLOW_STOP not in faults(story)
    story.without(kind="gone")
    story.tell(39.7, "gone", "a")
    assert SLOW_STOP in faults(story)


def test_a_lease_that_is_renewed_after_its_end() -> None:
    """It is as if that had not been."""
    story = signalled(freed=True)
    renewed = [event.kind for event in story.events].index("lease ended") + 1
    story.renews(3, "a", 4.4)
    story.events.insert(renewed, story.events.pop())
    assert STRANDED in faults(story)


def test_a_pool_that_stops_firing_after_its_worker_was_killed() -> None:
    """The run in it is over, and keeps no other one waiting."""
    story = worker_killed(freed=True)
    story.events = [
        event for event in story.events if event.replica != "a pool" or event.at < BASE + 4.2
    ]
    (finding,) = check(story.events, [TASK])
    assert (
        finding.text
        == f"a pool did not fire from {BASE + 4.1 + POOL_BACK:.3f} to {BASE + LAST:.3f}"
    )


def signalled(*, freed: bool) -> Story:
    """SIGTERM to a whole group ends the worker process of token 3, too."""
    story = begun_on_a(ended=4.1)
    story.tell(4.1, "leaving", "a", detail=END_GROUP)
    if freed:
        story.ends_lease(3, "a", 4.3)
    story.tell(4.5, "gone", "a")
    story.takes_over(4, "b", 5.1 if freed else 7.4, 4.0)
    story.goes_on(5, "b", 6.7 if freed else 8.7)
    return in_pool(story)


def test_a_signal_to_the_group_that_ends_a_worker() -> None:
    assert faults(signalled(freed=True)) == []
    assert STRANDED in faults(signalled(freed=False))


def orphaned() -> Story:
    """A replica's own process is killed alone in the run of token 3."""
    story = killed()
    story.without(kind="killed")
    story.tell(4.3, "killed", "a", detail=ALONE)
    return story


# So much later a worker process whose parent was killed has to know it.
KNOWN = 4.3 + ORPHANED + REACTION


@pytest.mark.parametrize(
    ("failover", "at", "lost", "found"),
    [
        pytest.param(True, KNOWN - 0.1, False, [], id="goes on for a moment"),
        pytest.param(True, KNOWN + 0.1, False, [OUTLIVED], id="goes on"),
        pytest.param(True, KNOWN + 0.1, True, [OUTLIVED], id="goes on, and knows that it is lost"),
        pytest.param(False, KNOWN + 0.1, True, [], id="without failover: goes on, and knows it"),
        pytest.param(False, KNOWN + 0.1, False, [OUTLIVED], id="without failover: believes"),
    ],
)
def test_a_worker_whose_parent_was_killed(
    failover: bool, at: float, lost: bool, found: list[str]
) -> None:
    """With failover its process ends, and its window is run again."""
    if failover:
        story, task = orphaned(), TASK
    else:
        story, task = killed_without_failover(), AT_MOST_ONCE
        story.tell(4.3, "killed", "a", detail=ALONE)
    story.believes(3, "a", at, lost=lost)
    assert faults(in_pool(story), task) == found


def test_a_stopped_worker_learns_late_that_its_parent_was_killed() -> None:
    story = orphaned()
    story.believes(3, "a", 6.5)
    story.tell(4.4, "worker stopped", "a pool", worker=WORKER)
    story.tell(6.4, "worker continued", "a pool", worker=WORKER)
    assert faults(in_pool(story)) == []


def test_a_stopped_replica_is_a_reason_for_a_worker_to_believe() -> None:
    """Its parent renews, and nobody tells it that its lock is lost."""
    story = stopped()
    story.believes(3, "a", 20.0)
    assert faults(in_pool(story)) == []


def test_a_worker_that_believes_beyond_its_maximum_lock() -> None:
    story = stopped()
    story.without(kind="claimed", token=3)
    story.claims(3, "a", 4.0, run_until=20.0)
    claim = story.events.pop()
    story.events.insert([event.token for event in story.events].index(3), claim)
    story.believes(3, "a", 20.1)
    assert OUTLIVED in faults(in_pool(story))


def test_a_stopped_worker_is_no_reason_for_its_replica_not_to_renew() -> None:
    story = stopped()
    story.without(kind="stopped")
    story.without(kind="continued")
    story.tell(4.3, "worker stopped", "a pool", worker=WORKER)
    story.tell(8.2, "worker continued", "a pool", worker=WORKER)
    assert RUN_TWICE in faults(in_pool(story))


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
    story = begun_on_a(ended=4.1)
    replica = "a pool" if worker else "a"
    story.tell(4.3, trouble, replica, worker=worker, detail=ALONE * (trouble == "killed"))
    if over:
        story.tell(7.5, over, replica, worker=worker)
    story.takes_over(4, "b", 7.4, 4.0)
    story.tell(7.7, "holds", "a pool", task="job", token=3, worker=WORKER)
    story.goes_on(5, "b", 8.7)
    assert (OVERLAP not in faults(in_pool(story))) == excused


def test_a_pool_is_expected_to_run_again_after_its_stopped_worker_was_killed() -> None:
    """Nobody can continue that worker any more."""
    story = worker_killed(freed=True)
    story.tell(4.05, "worker stopped", "a pool", worker=WORKER)
    assert faults(story) == []
    # The first one's window owns the next run time of the pool, too, but not the one after it.
    story.events = [event for event in story.events if event.token not in (12, 13)]
    texts = [finding.text for finding in check(story.events, [TASK])]
    assert any(" of a pool, which was able to" in text for text in texts), texts


LOGGED = {"detail": f"apscheduler.executors.pool: Error running job job: {BROKEN}()"}
# The worker process is killed at 4.1. So much later its pool has been replaced.
REPLACED = 4.1 + POOL_BACK + REACTION


@pytest.mark.parametrize(
    ("at", "found"),
    [
        pytest.param(4.0, ["error logged"], id="before"),
        pytest.param(4.2, [], id="at once"),
        pytest.param(REPLACED - 0.1, [], id="soon"),
        pytest.param(REPLACED + 0.1, ["error logged"], id="late"),
        pytest.param(30.0, ["error logged"], id="for good"),
    ],
)
def test_errors_of_a_pool_of_which_a_worker_was_killed(at: float, found: list[str]) -> None:
    """They end when it is replaced."""
    story = worker_killed(freed=True)
    story.tell(at, "erred", "a", **LOGGED)
    assert faults(story) == found


def test_a_stopped_replica_tells_late_that_its_pool_is_broken() -> None:
    story = worker_killed(freed=True)
    story.tell(4.2, "stopped", "a")
    story.tell(9.0, "continued", "a")
    story.tell(9.1, "erred", "a", **LOGGED)
    assert "error logged" not in faults(story)
    story.tell(30.0, "erred", "a", **LOGGED)
    assert "error logged" in faults(story)


def test_errors_of_a_pool_that_was_not_broken_by_us() -> None:
    story = in_pool(handed_over())
    story.tell(30.0, "erred", "a", **LOGGED)
    assert faults(story) == ["error logged"]
