"""Sentences as patterns: each is read, and its own times, names and numbers are compared.

A pattern is written as the sentence is, with the fields that it has. A sentence that none of its
source's patterns reads is untrue, so that a new sentence is compared before it is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from math import inf
from typing import Any

from apscheduler_tasklock.demo.history import Event
from tests.night.checks import CLOSE, Finding, run_of, true_of
from tests.night.plan import BATCH, BY_TASK, LEASE, STORE, NightJob
from tests.night.said import Said
from tests.night.truth import TruePause, TrueReplica, TrueRun, Truth

# Limits the seconds by which the ledger may note a thing before or after the database does.
NOTED = 5.0
# Limits the seconds between two signs of life, with those that a busy machine adds.
SIGNS = 35.0
# Seconds after which a replica that was killed is no longer told as alive.
SEEN_DEAD = 46.0

MOMENT = r"(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:\.\d+)?(?: UTC|Z|[+-]\d\d:\d\d)?"
_AMOUNT = r"-?\d+(?:\.\d+)? ?(?:d|h|min|s)\b"
REPLICA = r"(?:web|batch)-\d:\d+"
# The names of fields that are times, spans of time and numbers; and how each field is written.
_TIMES = (
    *("at", "begun", "due", "first", "last", "next"),
    *("seen", "since", "lease", "until", "noted", "overdue"),
)
_SPANS = ("took", "usual", "late", "least", "most", "age")
_NUMBERS = ("count", "token", "attempt")
_FIELDS = {
    **dict.fromkeys(_TIMES, MOMENT),
    **dict.fromkeys(_SPANS, rf"{_AMOUNT}(?: {_AMOUNT})?"),
    **dict.fromkeys(_NUMBERS, r"\d+"),
    "replica": REPLICA,
    "names": rf"{REPLICA}(?:, {REPLICA})*(?: and others)?",
    "by": r"\w+@\w+",
    "error": r"tests\.night\.replica\.UpstreamError",
    **dict.fromkeys(("task", "name"), r"[\w/:*-]+"),
    "why": r".+",
}


@dataclass
class Told:
    """A sentence that was told, as it is read.

    :ivar about: the task or the replica that it is about
    :ivar values: its fields: times and spans in seconds, numbers, or texts
    """

    said: Said
    truth: Truth
    about: str
    values: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return self.values.get(name)

    @property
    def now(self) -> float:
        """The moment's time."""
        return self.said.at

    @property
    def row(self) -> dict[str, Any]:
        """The task that it is about, as ``status`` tells it."""
        found: dict[str, Any] = self.said.tasks[self.about]
        return found

    @property
    def job(self) -> NightJob:
        """The job of that task."""
        return BY_TASK[self.about]

    @property
    def runs(self) -> list[TrueRun]:
        """The true runs of the task, as far as they had begun."""
        return [run for run in self.truth.of_task(self.about) if run.first_sign < self.now]

    @property
    def run(self) -> TrueRun | None:
        """The true run that it is about: that of its token, or that of the row."""
        if self.values.get("token"):
            return self.truth.runs.get((self.about, self.token))
        return run_of(self.truth, self.row)


def value_of(name: str, text: str, near: float) -> Any:
    if name in _TIMES:
        moment = text.replace(" UTC", "+00:00").replace("Z", "+00:00")
        if moment[2] == ":":
            moment = f"{datetime.fromtimestamp(near, timezone.utc):%Y-%m-%d}T{moment}"
        found = datetime.fromisoformat(moment)
        return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
    if name in _SPANS:
        sizes = {"d": 86400, "h": 3600, "min": 60, "s": 1}
        parts = re.findall(r"(-?[\d.]+) ?(d|h|min|s)\b", text)
        return sum(float(number) * sizes[unit] for number, unit in parts)
    return int(text) if name in _NUMBERS else text


Claim = Callable[[Told], bool]


@dataclass(frozen=True)
class Saying:
    """A kind of sentence, and whether one is true."""

    words: re.Pattern[str]
    is_true: Claim


_SAYINGS: dict[str, list[Saying]] = {}


def saying(source: str, *patterns: str) -> Callable[[Claim], Claim]:
    """Add kinds of sentences that a source tells. ``{name}`` is a field, and the rest a regex."""

    def add(is_true: Claim) -> Claim:
        for pattern in patterns:
            words = re.sub(
                r"\{([a-z]+)\}",
                lambda found: f"(?P<{found[1]}>{_FIELDS[found[1]]})",
                pattern,
            )
            _SAYINGS.setdefault(source, []).append(
                Saying(re.compile(words, re.IGNORECASE), is_true)
            )
        return is_true

    return add


def untrue_in(source: str, text: str, told: Told) -> Iterator[Finding]:
    """Yield what is untrue of a text, and what of it no pattern reads."""
    spans: list[tuple[int, int]] = []
    for each in _SAYINGS[source]:
        for found in each.words.finditer(text):
            if any(begin < found.end() and found.start() < end for begin, end in spans):
                continue
            spans.append(found.span())
            fields = {name: text_ for name, text_ in found.groupdict().items() if text_ is not None}
            values = {name: value_of(name, text_, told.now) for name, text_ in fields.items()}
            one = Told(
                told.said, told.truth, told.about, {**told.values, **values, "text": found[0]}
            )
            if not each.is_true(one):
                yield f"{source} {told.about}: {found[0]} (of: {text})", _truth_of(one)
    left = "".join(" " if any(b <= at < e for b, e in spans) else c for at, c in enumerate(text))
    if re.search(r"\w", left):
        yield f"{source} {told.about}: {text}", f"no pattern reads {left.strip()!r}"


def _truth_of(told: Told) -> str:
    if told.about in BY_TASK:
        return "; ".join(map(true_of, told.runs[-3:])) or "it has not run"
    return str(told.truth.replicas.get(told.about))


# ---- what sentences have in common ------------------------------------------------------------


def is_close(told: float | None, true: float | None, within: float = CLOSE) -> bool:
    """Return whether a time is told as it is. Those that are told are without fractions."""
    return told is not None and true is not None and -within - 1 <= told - true <= within


def has_begun(told: Told, run: TrueRun | None, at: float) -> bool:
    """Return whether a run has begun at a time: the database's, which is before the ledger's."""
    return run is not None and -NOTED - 1 < at - run.first_sign < CLOSE


def is_due(told: Told, at: float, job: NightJob | None = None) -> bool:
    """Return whether a time is one of a job's run times, by any of its releases' schedules."""
    job = job or told.job
    moves = [e.due for e in told.truth.events if e.kind == "job-moved" and e.task == job.name]
    if any(is_close(at, due) for due in moves):
        return True
    if job.every is None:
        return is_close(at, told.truth.begin + job.first)
    return any(
        abs((at - told.truth.begin - first) % every) in (0, every)
        or min((at - told.truth.begin - first) % every, -(at - told.truth.begin - first) % every)
        < CLOSE
        for every in {job.every, job.every_anew or job.every}
        for first in (job.first if job.trigger == "interval" else 0,)
    )


def took_so(told: Told, run: TrueRun | None, at: float, took: float) -> bool:
    """Return whether a run that began at a time took so long. If it goes on: so far."""
    if run is None:
        return False
    if told.row["token"] == run.token and told.row["finished_at"] is None:
        return (
            abs(told.now - at - took) <= CLOSE + 0.6
            or run.died is not None
            or run.cut_off
            or (told.truth.in_outage(at, told.now))
        )
    if run.died is not None:
        return run.died - at <= took + CLOSE
    if run.ended is None or run.begun is None or run.cut_off:
        return True
    return run.ended - run.begun - 0.6 <= took <= (run.released or run.ended) - at + CLOSE


def is_away(told: Told, run: TrueRun) -> bool:
    """Return whether a run's replica was killed, or could not renew its lease."""
    return run.died is not None or run.cut_off or told.truth.in_outage(run.first_sign, told.now)


# How a run ended, by the words for it.
ENDINGS: dict[str, Callable[[Told, TrueRun], bool]] = {
    "ended well": lambda _t, run: run.how == "ok",
    "failed": lambda _t, run: run.how == "error",
    "was cancelled": lambda _t, run: run.how == "cut",
    "was cut by a stop": lambda _t, run: run.how == "cut",
    "goes on": lambda told, run: (
        run.over > told.now - LEASE - CLOSE or told.truth.in_outage(told.now - 2 * LEASE, told.now)
    ),
    "may be dead, because its replica has died or is silent": is_away,
    "has not renewed its lease": is_away,
    "died with its holder": is_away,
    "was freed by an operator": lambda _t, run: run.freed is not None,
    "overran its maximum lock": lambda _t, run: run.cut_off,
    "lost its lock, and ended later": lambda _t, run: bool(run.how) and run.cut_off,
}
# What may have become of a run that has not renewed its lease.
EITHER = "it died, or its end has not been written yet"
HOW = rf"(?P<how>{'|'.join(ENDINGS)})(?: \({EITHER}\))?"
# What is known of how long a run took, if its end is not.
BOUND = "(?P<bound>at most |over )?"


def lease_ended(told: Told, run: TrueRun | None) -> bool:
    """Return whether a lease ended when it is said to: soon after its replica was killed."""
    if run is None:
        return False
    ends = [run.died] if run.died is not None else [begin for begin, _ in told.truth.outages]
    return any(0 < told.lease - end < LEASE + CLOSE for end in ends)


def alive_with(told: Told, job: NightJob, *, but: str = "") -> list[TrueReplica]:
    """Return the replicas that surely live, were ready in time, and have a job."""
    if any(
        e.kind == "job-removed" and e.task == job.name and e.at <= told.now
        for e in told.truth.events
    ):
        return []
    return [
        each
        for name, each in told.truth.replicas.items()
        if each.lives(told.now) and each.ready < told.now - 3 and name != but
        if name.startswith(BATCH) == (job.application == BATCH)
        if job.in_store or job.is_in(each.release)
    ]


def may_have(told: Told, name: str, job: NightJob) -> bool:
    """Return whether a replica may be told as a live one that has a job."""
    replica = told.truth.replicas[name]
    is_its = name.startswith(BATCH) == (job.application == BATCH)
    lives = replica.started < told.now < min(replica.stopped, replica.killed + SEEN_DEAD)
    return is_its and lives and (job.in_store or job.is_in(replica.release))


def all_may_have(told: Told) -> bool:
    return all(may_have(told, name, told.job) for name in re.findall(REPLICA, told.names))


def nobody_ran(told: Told, due: float) -> bool:
    return not any(
        run.due is not None and abs(run.due - due) < CLOSE and run.first_sign < told.now - CLOSE
        for run in told.runs
    )


def is_unnoted(told: Told) -> bool:
    """Return whether the ledger may lack a run: its replica ended, or was away, when it began."""
    replica = told.truth.replicas[told.replica]
    ends = (replica.dying, replica.terminated)
    is_away = told.truth.in_outage(told.begun, told.begun)
    return is_away or any(abs(end - told.begun) < NOTED for end in ends)


def events_of(told: Told, *kinds: str) -> list[Event]:
    """Return what operators have done so far with a task or its job."""
    names = (told.about, told.about.removeprefix(f"{STORE}:"), "*")
    return [
        e for e in told.truth.events if e.kind in kinds and e.task in names and e.at <= told.now
    ]


def is_pause(told: Told, pause: TruePause) -> bool:
    # A reason that a replica has noted has whole seconds.
    asked = pause.asked - (told.since % 1 == 0)
    is_its = told.by == pause.by and is_within(told.since, asked, pause.since)
    if told.until is not None:
        planned = [e.until for e in told.truth.events if e.kind == "paused" and e.at == pause.since]
        is_its &= planned[0] is not None and is_within(
            told.until, pause.asked + planned[0], pause.since + planned[0]
        )
    return is_its and (told.why or "") == pause.reason


def is_within(told: float, earliest: float, latest: float) -> bool:
    return earliest - CLOSE <= told <= latest + CLOSE


def is_how(told: Told, replica: TrueReplica, how: str, at: float) -> bool:
    """Return whether a replica has become what it is said to, and was seen when it is said."""
    if how in ("started", "alive"):
        return is_within(at, replica.started - 1, replica.ready + NOTED)
    is_seen = was_seen(told, replica, at)
    if how in ("has stopped", "stopped"):
        return is_seen and replica.stopped <= told.now and replica.killed == inf
    return is_seen and (replica.dying < told.now or told.truth.in_outage(told.now - 60, told.now))


def was_seen(told: Told, replica: TrueReplica, at: float) -> bool:
    """Return whether a replica may have given its last sign of life at a time."""
    over = min(replica.over, told.now)
    # One that came to nothing in an outage follows later.
    longest = 3 * SIGNS if told.truth.in_outage(over - 2 * SIGNS, over) else SIGNS
    return over - longest - 1 < at < over + CLOSE
