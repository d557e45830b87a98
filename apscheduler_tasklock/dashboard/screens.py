"""Screens: what each page shows, read from the database. Pages and their JSON twins show the same.

Each screen is a function of the reads, the request's query and a time. What it reads, it reads by
:class:`TaskLocks` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta, timezone, tzinfo
from itertools import pairwise
from typing import Any, TypeVar

from apscheduler_tasklock._lock.outcomes import BAD_OUTCOMES, OUTCOMES, UNTIMED
from apscheduler_tasklock._lock.patterns import unmatched
from apscheduler_tasklock._values import cut
from apscheduler_tasklock._words.findings import (
    FINDING_KINDS,
    PAUSED,
    finding_of_task,
    severity_of,
    why_unclaimed,
)
from apscheduler_tasklock._words.headlines import headline_of
from apscheduler_tasklock._words.json_text import as_json
from apscheduler_tasklock._words.lanes import (
    LONGEST_TITLE,
    left_out_in_words,
    not_kept_in_words,
)
from apscheduler_tasklock._words.replicas import (
    fate_of,
    has_no_own_in_words,
    is_removed,
    replica_headline,
    runs_nothing_in_words,
    tasks_of_one,
    that_have,
)
from apscheduler_tasklock._words.runs import durations_in_words, more_in_words
from apscheduler_tasklock._words.stories import story_lines
from apscheduler_tasklock._words.tasks import (
    OpenRun,
    as_listed,
    facts_of,
    notes_of,
    open_runs,
    pause_in_words,
    runs_now,
    why_not_run,
)
from apscheduler_tasklock.dashboard.drawings import (
    NARROWEST,
    PARTS,
    Column,
    Shade,
    Span,
    chart_of,
    css_class_of,
    drawn_lane,
    marks_of,
    strip_of,
)
from apscheduler_tasklock.dashboard.formats import Formats
from apscheduler_tasklock.dashboard.matching import TaskFilter
from apscheduler_tasklock.dashboard.queries import Query, pattern_of, patterns_of
from apscheduler_tasklock.dashboard.reads import SharedReads, in_words_of_a_page
from apscheduler_tasklock.errors import (
    TaskLockError,
    TaskLockNotFoundError,
    TaskLockStateError,
)
from apscheduler_tasklock.locks import TaskLocks, find_task
from apscheduler_tasklock.status import (
    JOB_ORDERS,
    KINDS,
    ORDERS,
    RUN_ORDERS,
    Finding,
    JobState,
    JobStatus,
    Lane,
    Lanes,
    MissCause,
    Overview,
    Pause,
    ReplicaState,
    ReplicaStatus,
    Run,
    TaskState,
    TaskStatus,
)

Value = TypeVar("Value")

_NOT_READ = (
    "The other reads of this page have taken too long, so it was not read. It is when the page is "
    "refreshed."
)
# The rows of a page of tasks, runs and jobs.
ROWS = 50
# The findings that the overview lists.
MOST_LISTED = 20
# The lanes of a page. The many runs of one replica have more shapes than those of a task.
MOST_LANES = {"task": 50, "replica": 20}
# The characters of an error that are kept of an entry that is drawn.
_LONGEST_ERROR = 300
# The runs of a task's page.
CHART_RUNS, LISTED_RUNS = 100, 50
# The replicas, failures and misses that a page shows.
_MOST_REPLICAS = 200
# The tasks of which a replica's page reads what becomes of their runs.
_MOST_RUNNING = 100
_MOST_TROUBLES = 300

_DAY = timedelta(days=1)
# Limits the seconds between the reads of a page whose values tell one moment.
_ONE_MOMENT = 1.0
# Limits the time between two run times that were missed in the same outage.
_SAME_OUTAGE = timedelta(seconds=60)

# The orders of the tasks, as the page calls them.
_ORDERS = {
    "urgency": "worst first",
    "name": "by name",
    "due": "due first",
    "started": "last run first",
    "duration": "longest run first",
    "failures": "most failures first",
}
_RUN_ORDERS = {"newest": "newest first", "name": "by task", "duration": "longest first"}
_JOB_ORDERS = {"due": "due first", "name": "by id"}
_REPLICA_ORDERS = {"state": "alive first", "name": "by id"}

_RUNNING = (TaskState.RUNNING, TaskState.HOLDER_SILENT, TaskState.TOO_LONG)


@dataclass(frozen=True)
class Context:
    """What a screen works with.

    :ivar namespace: what the names of all shown tasks begin with
    :ivar zone: the zone of all times; ``None``: the zone of this machine
    :ivar may_operate: whether the reader has the right to operate
    :ivar now: this machine's time, for what the database's time is not known
    :ivar not_before: by the clock of the reads, the time from which on the overview has to be read,
        unless that takes long
    """

    reads: SharedReads
    query: Query
    namespace: str
    zone: tzinfo | None
    may_operate: bool
    now: datetime
    not_before: float = float("-inf")

    def patterns(self, text: str | None = None) -> tuple[str, ...]:
        """Return the patterns of the tasks whose names have a text in them."""
        return patterns_of(self.namespace, text)

    def task(self) -> str:
        """Return the name of the task that the query asks for.

        :raises TaskLockNotFoundError: the task is of another namespace
        """
        name = self.query.text("name") or ""
        if not name or not name.startswith(self.namespace):
            raise TaskLockNotFoundError([name])
        return name


@dataclass
class ReadState:
    """How the values of a screen were read.

    :ivar now: this machine's time
    :ivar outage: why the database could not be read; ``None``: it was read
    :ivar gap: why a part of the screen could not be read, although the database is available
    :ivar is_known: whether all values were read, be it long ago
    :ivar age: seconds since the oldest of the values was read
    :ivar took: seconds that the reads of these values have taken
    :ivar newest: seconds since the newest of the values was read
    """

    now: datetime
    outage: str | None = None
    gap: str | None = None
    is_known: bool = True
    age: float = 0.0
    took: float = 0.0
    newest: float = float("inf")

    @property
    def at(self) -> datetime:
        """When the oldest of the values was read."""
        return self.now - timedelta(seconds=self.age)

    @property
    def twin(self) -> dict[str, Any]:
        """What the JSON twin says of it."""
        seconds = {"age": round(self.age, 3), "took": round(self.took, 3)}
        return {**seconds, "outage": self.outage, "gap": self.gap}


@dataclass
class Screen:
    """What a page shows.

    :ivar template: the page's template
    :ivar title: the page's title
    :ivar read: how its values were read
    :ivar data: what the JSON twin has
    :ivar drawn: what only the page has: drawings and words
    """

    template: str
    title: str
    formats: Formats
    read: ReadState
    data: dict[str, Any] = field(default_factory=dict)
    drawn: dict[str, Any] = field(default_factory=dict)


class Collector:
    """Reads the values of one screen, and notes how they were read."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._state = ReadState(context.now)
        self._not_before = float("-inf")
        self._has_overview = False
        self._overview_age = 0.0
        self._began = context.reads.clock()

    def overview(self) -> Overview | None:
        """Return the overview of all tasks, which each page reads first.

        If it cannot be read, the database is unavailable, and nothing else is read.
        """
        patterns = self._context.patterns()
        self._not_before = self._context.not_before
        found = self.read(
            ("overview", patterns),
            lambda locks: locks.overview(*patterns, namespace=self._context.namespace),
        )
        state = self._state
        # A page tells one moment: what it lists is older than what it sums up by a second at most.
        self._not_before = self._context.reads.clock() - state.age - _ONE_MOMENT
        self._overview_age = state.age
        self._has_overview = True
        state.outage = state.gap
        state.gap = None
        return found

    def read(
        self, key: Hashable, read: Callable[[TaskLocks], Value], *, tells_when: bool = False
    ) -> Value | None:
        """Return a value; ``None`` if it cannot be read, and never could be.

        If the page's other reads have taken too long, the value is the one that was read last.

        :param tells_when: whether the page tells of the value itself when it was read
        """
        state, reads = self._state, self._context.reads
        is_late = reads.clock() - self._began > reads.page_limit
        try:
            reading = reads.read(
                key,
                read,
                from_before=is_late or state.outage is not None,
                not_before=self._not_before,
            )
        except TaskLockError as error:
            # A part that is too slow leaves a gap. Without the overview there is no page.
            if not self._has_overview or type(error) is not TaskLockError:
                raise
            state.gap, state.is_known = in_words_of_a_page(error), False
            return None
        is_left_out = is_late and not reading.is_known
        state.gap = state.gap or reading.error or (_NOT_READ if is_left_out else None)
        state.is_known = state.is_known and reading.is_known
        if not tells_when:
            state.age = max(state.age, reading.age)
        if reading.is_known:
            state.newest = min(state.newest, reading.age)
        state.took += reading.took
        return reading.value

    def screen(self, template: str, title: str, overview: Overview | None) -> Screen:
        """Return the screen, without its data.

        Its present is the time of the read, because what is due later than that may have run since.
        In an outage it is the time of the oldest read.
        """
        now, state = self._context.now if overview is None else overview.now, self._state
        if overview is not None and state.outage is not None:
            now -= timedelta(seconds=state.age - self._overview_age)
        return Screen(template, title, Formats(self._context.zone, now), self._state)


def overview(context: Context) -> Screen:
    """Show whether all is well, the last hour, what runs, what went wrong, and what is due."""
    collector = Collector(context)
    found = collector.overview()
    now = found.now if found else context.now
    patterns = context.patterns()
    day_ago = now - _DAY
    troubles = collector.read(
        ("troubles", patterns),
        lambda locks: locks.runs(
            *patterns, outcome=BAD_OUTCOMES, since=day_ago, limit=_MOST_TROUBLES
        ),
    )
    # Kept apart from the other runs, because there are few retries.
    retries = collector.read(
        ("healed", patterns),
        lambda locks: locks.runs(
            *patterns, outcome="ok", kind="retry", since=day_ago, limit=_MOST_TROUBLES
        ),
    )
    healed = {(run.task, run.scheduled_at) for run in retries or ()}
    # An operator knows of a pause, which the lanes show, too.
    bad = [run for run in troubles or () if run.cause != MissCause.PAUSED.value]
    hour_ago = now - timedelta(hours=1)
    by = _lane_for_each(context)
    lanes = collector.read(
        ("hour", patterns, by),
        lambda locks: locks.lanes(
            hour_ago, now, *patterns, by=by, parts=PARTS, limit=MOST_LANES[by]
        ),
        tells_when=True,
    )
    findings = found.findings if found else ()
    severity = severity_of(findings)
    screen = collector.screen("overview.html", "Overview", found)
    listed = replace(found, running=tuple(runs_now(found.running, now))) if found else None
    screen.data = {"overview": listed, "troubles": bad}
    screen.drawn = {
        "last_of_each": _last_of_each(bad, healed),
        "day_ago": screen.formats.field(day_ago),
        "lines": state_lines(found, screen.formats),
        "said": {each.what for each in findings if FINDING_KINDS[each.what].said},
        "is_well": found is not None and not severity and found.alive is not None,
        "severity": severity,
        "listed": MOST_LISTED,
        "unlisted": _unlisted(found),
        **_lanes(screen.formats, lanes, Span(hour_ago, now, now), by),
    }
    return screen


def _lane_for_each(context: Context) -> str:
    """Return what the query asks a lane for: a replica or a task."""
    return context.query.choice("by", ("replica", "task")) or "replica"


def _unlisted(found: Overview | None) -> dict[str, int]:
    """Return how many more tasks run or are paused, and findings there are, than it lists."""
    if found is None:
        return {"running": 0, "findings": 0, "paused": 0}
    paused = [each for each in found.paused if each.state is TaskState.PAUSED]
    return {
        "paused": found.counts[TaskState.PAUSED] - len(paused),
        "running": sum(found.counts[state] for state in _RUNNING) - len(found.running),
        "findings": len(found.findings) - MOST_LISTED,
    }


def _last_of_each(
    runs: Sequence[Run], healed: Collection[tuple[str, datetime | None]]
) -> list[tuple[Run, str]]:
    """Return the newest entry of each task and outcome, and what is told of those before it.

    :param runs: the entries, the newest first
    :param healed: the tasks and run times that have succeeded at a retry
    """
    of_each: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        of_each.setdefault((run.task, run.outcome), []).append(run)
    return [(each[0], more_in_words(each, healed)) for each in of_each.values()]


def state_lines(found: Overview | None, formats: Formats) -> list[tuple[str, str, str]]:
    """Return what the first line says: for each thing its class, its words, and its link."""
    if found is None:
        return []
    lines = []
    by_kind: dict[str, list[Finding]] = {}
    for finding in found.findings:
        by_kind.setdefault(finding.what, []).append(finding)
    for kind, findings in by_kind.items():
        name = "note" if all(each.level == "note" for each in findings) else "bad"
        name = "paused" if kind == PAUSED else name
        if said := FINDING_KINDS[kind].said:
            link = findings[0].link if len(findings) == 1 else "#findings"
            words = said[len(findings) > 1]
            lines.append((name, f"{len(findings)} {words}", link))
        else:
            lines += [
                (name, formats.words(each.says), each.link or "#findings") for each in findings
            ]
    return lines


def tasks(context: Context) -> Screen:
    """Show the tasks, each with its state and its last runs."""
    query = context.query
    wanted = TaskFilter.of(query)
    order = query.choice("order", ORDERS) or "urgency"
    page = query.number("page", 1, 1, 100_000)
    patterns = wanted.patterns(context.namespace)
    collector = Collector(context)
    found = collector.overview()
    listed = collector.read(
        ("tasks", patterns, wanted.states, order, page),
        lambda locks: locks.tasks(
            *patterns, states=wanted.states, order=order, limit=ROWS + 1, offset=(page - 1) * ROWS
        ),
    )
    rows = (listed or [])[:ROWS]
    names = tuple(task.name for task in rows)
    recent = collector.read(("recent", names), lambda locks: _recent(locks, names)) or {}
    screen = collector.screen("tasks.html", "Tasks", found)
    screen.data = {"tasks": rows, "runs": recent, "page": page, "more": len(listed or []) > ROWS}
    screen.drawn = {
        "strips": {task.name: strip_of(recent.get(task.name, ())) for task in rows},
        "notes": {task.name: notes_of(task, screen.formats) for task in rows},
        "listed": {task.name: as_listed(task, screen.formats.now) for task in rows},
        "states": [each.value for each in TaskState],
        "counts": {each.value: count for each, count in found.counts.items()} if found else {},
        "chosen": [each.value for each in wanted.states],
        "is_filtered": bool(wanted.fields),
        "orders": _ORDERS,
        "order": order,
    }
    return screen


def task(context: Context) -> Screen:
    """Show one task: its state and lock in words, its last runs, and what operators can do."""
    name = context.task()
    collector = Collector(context)
    found = collector.overview()
    status = collector.read(("task", name), lambda locks: find_task(locks, name))
    runs = collector.read(("runs of", name), lambda locks: _entries(locks, name))
    usual = collector.read(("usual", name), lambda locks: locks.usual_durations(name).get(name))
    durations = collector.read(("durations", name), lambda locks: locks.durations(name))
    fleet = collector.read("replicas", lambda locks: locks.replicas())
    entries = runs or []
    ended = [run for run in entries if run.kind != "operator" and run.outcome != "missed"]
    having = None if fleet is None else that_have(name, fleet, entries)
    screen = collector.screen("task.html", name, found)
    now = screen.formats.now
    going_on = [] if status is None else open_runs(status, now)
    screen.data = {
        "task": status,
        "usual": usual,
        "durations": durations,
        "going_on": going_on,
        "runs": ended[:CHART_RUNS],
        "misses": [run for run in entries if run.outcome == "missed"],
        "actions": [run for run in entries if run.kind == "operator"],
        "replicas": [each.replica_id for each in having or ()],
    }
    formats = screen.formats
    # The entry of a run that has lost its lock is there before the run is over.
    open_tokens = {each.run.token for each in going_on}
    over = [run for run in ended if run.token not in open_tokens]
    levels: dict[str, float] = {}
    for span in ("last_day", "week_before"):
        spread = durations and getattr(durations, span)
        if spread:
            levels |= {f"median {span}": spread.median, f"most {span}": spread.most}
    screen.drawn = {
        "chart": chart_of(
            [*_columns_going_on(going_on, formats), *_columns(over, formats)],
            levels,
            _changes(entries, formats),
        ),
        "durations_in_words": durations_in_words(durations, formats, now) if durations else (),
        "listed": LISTED_RUNS,
    }
    if status is not None:
        of_task = [each for each in (found.findings if found else ()) if each.task == name]
        finding = of_task[0] if of_task else finding_of_task(status, now)
        if finding is not None:
            finding = replace(finding, says=formats.words(finding.says))
        headline = headline_of(status, entries, formats, usual, having, finding, now)
        facts = facts_of(status, ended, formats, usual, having, now, is_removed=is_removed(entries))
        screen.data["headline"] = headline
        screen.drawn["facts"] = facts
        screen.drawn["why_not_run"] = why_not_run(status, having)
        screen.drawn["can"] = _possible_actions(status, found.findings if found else ())
        if screen.drawn["why_not_run"]:
            screen.drawn["can"].discard("run")
    return screen


_CLASSES_OF_OPEN = {TaskState.DEAD: "bad", TaskState.HOLDER_SILENT: "other"}


def _columns_going_on(runs: Sequence[OpenRun], formats: Formats) -> list[Column]:
    """Return what the chart shows of runs that are not over."""
    return [
        Column(
            each.run.since,
            each.took,
            _CLASSES_OF_OPEN.get(each.state, "running"),
            f"{formats.moment(each.run.since)}, {each.state.value} on {each.run.replica} for "
            f"{'at most ' * (each.state is TaskState.HOLDER_SILENT)}"
            f"{formats.seconds(each.took)} so far",
            is_known=False,
        )
        for each in runs
    ]


def _columns(runs: Sequence[Run], formats: Formats) -> list[Column]:
    """Return what the chart shows of runs that are over."""
    return [
        Column(
            run.started_at,
            run.took,
            css_class_of(run),
            f"{formats.moment(run.started_at)}, {run.outcome} after {formats.took(run)}",
            is_known=run.outcome not in UNTIMED,
        )
        for run in runs
    ]


def _changes(entries: Sequence[Run], formats: Formats) -> list[tuple[datetime, str]]:
    """Return when the task's schedule or release has changed, and how, in words.

    :param entries: the newest first
    """
    changes = [
        (run.started_at, f"schedule changed at {formats.moment(run.started_at)}: {run.reason}")
        for run in entries
        if run.outcome == "rescheduled"
    ]
    runs = [run for run in reversed(entries) if run.release is not None]
    for before, run in pairwise(runs):
        if before.release != run.release:
            at = formats.moment(run.started_at)
            words = f"release changed at {at}: {before.release} to {run.release}"
            changes.append((run.started_at, words))
    return sorted(changes, key=lambda change: change[0])


def _entries(locks: TaskLocks, name: str) -> list[Run]:
    return [run for run in locks.runs(name, limit=CHART_RUNS + 150) if run.task == name]


def _possible_actions(status: TaskStatus, findings: Sequence[Finding]) -> set[str]:
    """Return what an operator can do with a task in its state."""
    possible = {"pause", "run"}
    if status.paused:
        possible.add("resume")
    is_going_on = status.started_at is not None and status.finished_at is None
    if is_going_on or status.retry_at is not None:
        possible.add("free")
    alarms = status.failures or status.cut_for is not None or status.missed_at is not None
    misses = any(
        each.task == status.name and each.what == TaskState.MISSED.value for each in findings
    )
    if misses or (alarms and not status.acknowledged):
        possible.add("ack")
    return possible


def why(context: Context) -> Screen:
    """Tell what is known of a task around a moment, such as why it did not run."""
    name = context.task()
    at = context.query.moment("at", context.zone)
    collector = Collector(context)
    found = collector.overview()
    story = collector.read(("why", name, at), lambda locks: locks.why(name, at))
    screen = collector.screen("why.html", f"Why: {name}", found)
    screen.data = {"name": name, "story": story}
    screen.drawn = {"at": screen.formats.field(at)}
    if story is not None:
        screen.drawn["lines"] = story_lines(story, screen.formats)
    return screen


def runs(context: Context) -> Screen:
    """Show runs, missed run times and what operators did.

    Whoever may read sees the errors, and may look for a text in them.
    """
    query = context.query
    # A shape of a lane leads to the runs of one task, whose name may be a part of other names.
    name = query.text("name")
    patterns = (context.task(),) if name else context.patterns(query.text("q"))
    page = query.number("page", 1, 1, 200)
    chosen = query.several("outcome", (*OUTCOMES, "bad"))
    outcomes = BAD_OUTCOMES if "bad" in chosen else chosen
    order = query.choice("order", RUN_ORDERS) or "newest"
    wanted: dict[str, Any] = {
        "outcome": outcomes or None,
        "kind": query.choice("kind", KINDS),
        "replica": query.text("replica"),
        "error": query.text("error"),
        "since": query.moment("since", context.zone),
        "until": query.moment("until", context.zone),
        "order": order,
    }
    collector = Collector(context)
    found = collector.overview()
    listed = collector.read(
        ("runs", patterns, page, *wanted.values()),
        lambda locks: locks.runs(*patterns, **wanted, limit=ROWS + 1, offset=(page - 1) * ROWS),
    )
    screen = collector.screen("runs.html", "Runs", found)
    screen.data = {
        "runs": (listed or [])[:ROWS],
        "page": page,
        "more": len(listed or []) > ROWS,
    }
    screen.drawn = {
        "outcomes": OUTCOMES,
        "chosen": outcomes,
        "bad": BAD_OUTCOMES,
        "kinds": KINDS,
        "orders": _RUN_ORDERS,
        "order": order,
        "name": name,
        **{each: screen.formats.field(wanted[each]) for each in ("since", "until")},
    }
    return screen


def timeline(context: Context) -> Screen:
    """Show any span of time as lanes, a lane for each replica or each task."""
    collector = Collector(context)
    found = collector.overview()
    now = found.now if found else context.now
    since, until = _span(context, now)
    patterns = context.patterns(context.query.text("q"))
    by = _lane_for_each(context)
    skipped = context.query.number("from", 0, 0, 1_000_000)
    # The last hours are one value, also while the present moves.
    span = (until - since,) if until == now else (since, until)
    lanes = collector.read(
        ("lanes", patterns, by, skipped, *span),
        lambda locks: locks.lanes(
            since, until, *patterns, by=by, parts=PARTS, limit=MOST_LANES[by], offset=skipped
        ),
        tells_when=True,
    )
    screen = collector.screen("timeline.html", "Timeline", found)
    screen.data = {
        "since": since,
        "until": until,
        "read_at": lanes.now if lanes else None,
        "by": by,
        "from": skipped,
        "number": lanes.number if lanes else 0,
        "lanes": lanes.lanes if lanes else (),
        "known_since": lanes.known_since if lanes else None,
        "pauses": lanes.pauses if lanes else (),
        "outages": lanes.outages if lanes else (),
    }
    yesterday = now.astimezone(context.zone).date() - _DAY
    screen.drawn = {
        **_lanes(screen.formats, lanes, Span(since, until, now), by, skipped),
        "last_night": yesterday.isoformat(),
        "spans": _other_spans(since, until, now),
    }
    return screen


def _span(context: Context, now: datetime) -> tuple[datetime, datetime]:
    """Return the span that the query asks for: a night, two times, or the last hours."""
    query = context.query
    night = query.date("night")
    if night is not None:  # from 20:00 on that day until 08:00 on the next
        return _hour_of(night, 20, context.zone), _hour_of(night + _DAY, 8, context.zone)
    until = query.moment("until", context.zone) or now
    hours = query.number("hours", 1, 1, 24 * 7)
    since = query.moment("since", context.zone) or until - timedelta(hours=hours)
    if since >= until:
        since = until - timedelta(hours=1)
    return since, until


def _hour_of(day: date, hour: int, zone: tzinfo | None) -> datetime:
    """Return an hour of a day in a zone, as a time in UTC.

    In UTC, because the difference of two times of one zone leaves changes of its offset out.
    """
    local = datetime(day.year, day.month, day.day, hour, tzinfo=zone)
    return local.astimezone(timezone.utc)


def _other_spans(since: datetime, until: datetime, now: datetime) -> dict[str, str]:
    """Return the queries of the spans beside this one, by their names."""
    half = (until - since) / 2
    spans = {
        "earlier": (since - half, until - half),
        "later": (since + half, until + half),
        "closer": (since + half / 2, until - half / 2),
        "wider": (since - half, min(now, until + half)),
    }
    if until >= now - timedelta(seconds=60):
        del spans["later"]
    if half < timedelta(seconds=60):
        del spans["closer"]
    return {
        name: f"since={begin.timestamp():.0f}&until={end.timestamp():.0f}"
        for name, (begin, end) in spans.items()
        if begin.timestamp() >= 0  # because addresses have no earlier times
    }


def replicas(context: Context) -> Screen:
    """Show the replicas: which are alive, of which version, and what each runs."""
    text = context.query.text("q")
    order_by = context.query.choice("order", tuple(_REPLICA_ORDERS)) or "state"
    collector = Collector(context)
    found = collector.overview()
    fleet = collector.read("replicas", lambda locks: locks.replicas()) or []
    day_ago = (found.now if found else context.now) - timedelta(days=1)
    order = {state: place for place, state in enumerate(ReplicaState)}
    known = [each for each in fleet if each.alive or each.seen_at > day_ago]
    listed = sorted(
        (
            each
            for each in known
            if not text or not unmatched([pattern_of(text)], [each.replica_id])
        ),
        key=lambda each: (not each.alive, order[each.state], each.started_at, each.replica_id),
    )
    if order_by == "name":
        listed.sort(key=lambda each: each.replica_id)
    screen = collector.screen("replicas.html", "Replicas", found)
    screen.data = {
        "replicas": listed[:_MOST_REPLICAS],
        "more": max(0, len(listed) - _MOST_REPLICAS),
        "older": len(fleet) - len(known),
    }
    screen.drawn = {"orders": _REPLICA_ORDERS, "order": order_by}
    return screen


def replica(context: Context) -> Screen:
    """Show one replica: how it is, what it runs, and what only it can run."""
    replica_id = context.query.text("id") or ""
    collector = Collector(context)
    found = collector.overview()
    read = collector.read(("replica", replica_id), lambda locks: _replica(locks, replica_id))
    status, fleet, tasks = read or (None, None, {})
    screen = collector.screen("replica.html", replica_id, found)
    formats = screen.formats
    running = () if status is None else (*status.running, *status.unfinished)
    unfinished = () if status is None else status.unfinished
    screen.data = {
        "replica": status,
        "runs": [
            {
                "run": run,
                "if_killed": fate_of(
                    *(run, tasks.get(run.task), fleet, formats, formats.now),
                    has_ended=run in unfinished,
                ),
            }
            for run in running
        ],
        "only_here": [] if status is None else tasks_of_one(status, fleet or ()),
    }
    screen.drawn = {
        "id": replica_id,
        "headline": "" if status is None else replica_headline(status, formats),
        "runs_nothing": "" if status is None else runs_nothing_in_words(status),
        "runs_no_others": "" if status is None else has_no_own_in_words(status),
        "listed": _MOST_REPLICAS,
    }
    return screen


def _replica(
    locks: TaskLocks, replica_id: str
) -> tuple[ReplicaStatus | None, list[ReplicaStatus], dict[str, TaskStatus]]:
    """Return a replica, all replicas, and the tasks of its runs, which are read together."""
    fleet = locks.replicas()
    status = next((each for each in fleet if each.replica_id == replica_id), None)
    running = () if status is None else (*status.running, *status.unfinished)
    names = list(dict.fromkeys(run.task for run in running))[:_MOST_RUNNING]
    tasks = locks.tasks(*names) if names else []
    # In names, `*` and `?` stand for themselves.
    return status, fleet, {task.name: task for task in tasks if task.name in names}


def setup(context: Context) -> Screen:
    """Show what the doctor finds."""
    # Nothing else is read, because a missing table is what the findings are about.
    collector = Collector(context)
    findings = collector.read(
        "doctor",
        lambda locks: locks.doctor(namespace=context.namespace),
    )
    screen = collector.screen("setup.html", "Set-up", None)
    screen.data = {"findings": findings or []}
    return screen


def jobs(context: Context) -> Screen:
    """Show the jobs of the job store that all replicas share."""
    query = context.query
    text = query.text("q")
    patterns = (pattern_of(text),) if text else ()
    page = query.number("page", 1, 1, 100_000)
    order = query.choice("order", JOB_ORDERS) or "due"
    collector = Collector(context)
    found = collector.overview()
    listed = collector.read(
        ("jobs", patterns, order, page),
        lambda locks: locks.jobs(*patterns, order=order, limit=ROWS + 1, offset=(page - 1) * ROWS),
    )
    screen = collector.screen("jobs.html", "Jobs", found)
    rows = listed or []
    screen.data = {"jobs": rows[:ROWS], "page": page, "more": len(rows) > ROWS}
    whys = {job.id: _why_unclaimed(collector, job) for job in rows[:ROWS]}
    screen.drawn = {"orders": _JOB_ORDERS, "order": order, "whys": whys}
    return screen


def job(context: Context) -> Screen:
    """Show one stored job. The values of its arguments are for those who may operate."""
    job_id = context.query.text("id") or ""
    collector = Collector(context)
    found = collector.overview()
    status = collector.read(("job", job_id), lambda locks: _job(locks, job_id))
    arguments: dict[str, Any] | str | None = None
    if context.may_operate and status is not None:
        arguments = collector.read(("arguments", job_id), lambda locks: _arguments(locks, job_id))
    screen = collector.screen("job.html", job_id, found)
    screen.data = {"job": status, "arguments": arguments}
    if isinstance(arguments, dict):
        screen.drawn = {"values": {name: as_json(value) for name, value in arguments.items()}}
    else:
        screen.drawn = {"values": {"": arguments} if arguments else {}}
    screen.drawn["why_unclaimed"] = "" if status is None else _why_unclaimed(collector, status)
    return screen


def _why_unclaimed(collector: Collector, job: JobStatus) -> str:
    """Return why no replica claims an overdue job. The replicas are read only for such a one."""
    if job.state is not JobState.OVERDUE:
        return ""
    return why_unclaimed(job, collector.read("replicas", lambda locks: locks.replicas()))


def _job(locks: TaskLocks, job_id: str) -> JobStatus:
    for found in locks.jobs(job_id):
        if found.id == job_id:
            return found
    raise TaskLockNotFoundError([job_id], "job")


def _arguments(locks: TaskLocks, job_id: str) -> dict[str, Any] | str:
    """Return the arguments by their names, or why they cannot be read."""
    try:
        return locks.job_arguments(job_id)
    except TaskLockStateError as error:
        return error.for_page()


def _recent(locks: TaskLocks, names: Sequence[str]) -> dict[str, list[Run]]:
    return {name: _drawn(found) for name, found in locks.recent_runs(*names).items()}


def _drawn(entries: Iterable[Run]) -> list[Run]:
    """Return entries with what is drawn of them.

    Thousands of them are kept for each span that somebody has looked at, and tracebacks would take
    most of the memory.
    """
    return [
        replace(each, traceback=None, error=each.error and cut(each.error, _LONGEST_ERROR))
        for each in entries
    ]


def _lanes(
    formats: Formats, found: Lanes | None, span: Span, by: str, skipped: int = 0
) -> dict[str, Any]:
    """Return the drawing of a span as lanes.

    :param found: the lanes; ``None`` if they could not be read
    :param skipped: how many lanes come before them
    """
    lanes = found.lanes if found else ()
    shades = _shades(found, formats, span, by) if found else lambda _: []
    unread = _not_read(formats, span, found.now) if found else []
    read = replace(span, now=found.now) if found else span
    return {
        "drawn": [
            drawn_lane(
                lane, read, [*_not_kept(lane, formats, span, by), *shades(lane.name), *unread]
            )
            for lane in lanes
        ],
        "marks": marks_of(span.since, span.until, formats.zone),
        "by": by,
        "since": span.since,
        "until": span.until,
        "nothing_before": found.known_since if found and not lanes and not skipped else None,
        "before": skipped,
        "after": max(0, found.number - skipped - len(lanes)) if found else 0,
        "most_lanes": MOST_LANES[by],
    }


def _not_kept(lane: Lane, formats: Formats, span: Span, by: str) -> list[Shade]:
    """Return the shades of the times of which not everything is known, or drawn."""
    shades = []
    begin = span.since
    if lane.known_since is not None and lane.known_since > span.since:
        begin = min(lane.known_since, span.now)
        title = not_kept_in_words(lane, by, formats)
        shades.append(span.shade(span.since, begin, "unknown", title))
    if lane.left_until is not None:
        title = left_out_in_words(lane, formats)
        shades.append(span.shade(begin, max(begin, lane.left_until), "unknown", title))
    return shades


def _not_read(formats: Formats, span: Span, read_at: datetime) -> list[Shade]:
    """Return the shade of what has come since the lanes were read, as in an outage."""
    end = min(span.now, span.until)
    if span.percent(end) - span.percent(read_at) <= NARROWEST:
        return []
    title = f"not known: this was read at {formats.moment(read_at)}"
    return [span.shade(read_at, end, "unknown", title)]


def _shades(found: Lanes, formats: Formats, span: Span, by: str) -> Callable[[str], list[Shade]]:
    """Return what tells the shades of pauses and outages behind a lane.

    A pause of one task is behind its lane. A pause of all tasks of a namespace is behind the lanes
    of these tasks, and behind those of replicas if it is a pause of all tasks. An outage lies where
    run times were missed because the database did not answer.
    """
    shades: list[tuple[str, bool, Shade]] = []
    resumed: dict[str, datetime] = {}
    for run in found.pauses:  # the newest first
        if run.outcome == "resumed":
            resumed[run.task] = run.started_at
            continue
        end = min(filter(None, (resumed.get(run.task), run.until)), default=None)
        if end is not None and end < span.since:
            continue
        pause = Pause(run.by or "nobody", run.started_at, end, run.reason)
        title = f"{cut(run.task, LONGEST_TITLE)}: "
        title += cut(pause_in_words(pause, formats, with_since=True), 2 * LONGEST_TITLE)
        shade = span.shade(run.started_at, end, "pause", title)
        is_of_many = run.task.endswith("*")
        shades.append((run.task[:-1] if is_of_many else run.task, is_of_many, shade))
    for begin, end in _outages(found.outages):
        missed = f"run times from {formats.moment(begin)} to {formats.moment(end)} were missed"
        title = f"the database did not answer: {missed}"
        shades.append(("", True, span.shade(begin, end, "outage", title)))

    def behind(lane: str) -> list[Shade]:
        return [
            shade
            for name, is_beginning, shade in shades
            if (not name or lane.startswith(name) if is_beginning else lane == name)
        ]

    return behind


def _outages(spans: Sequence[tuple[datetime, datetime]]) -> list[tuple[datetime, datetime]]:
    """Return the begins and ends of outages, from the missed run times that tell of them.

    :param spans: the first and the last run time that a note tells of
    """
    outages: list[tuple[datetime, datetime]] = []
    for begin, end in sorted(spans):
        if outages and begin - outages[-1][1] <= _SAME_OUTAGE:
            outages[-1] = outages[-1][0], max(end, outages[-1][1])
        else:
            outages.append((begin, end))
    return outages


SCREENS: Mapping[str, Callable[[Context], Screen]] = {
    "": overview,
    "tasks": tasks,
    "task": task,
    "why": why,
    "runs": runs,
    "timeline": timeline,
    "replicas": replicas,
    "replica": replica,
    "setup": setup,
    "jobs": jobs,
    "job": job,
}


def screen_of(name: str, context: Context) -> Screen:
    """Return the screen of a page, all of one moment as far as it can be read so.

    Viewers share what was read, so that a part of the page may have been read after the overview.
    Then the overview is read again, unless its read takes long.
    """
    show = SCREENS[name]
    screen = show(context)
    state = screen.read
    if state.outage is not None or state.age - state.newest <= _ONE_MOMENT:
        return screen
    not_before = context.reads.clock() - state.newest - _ONE_MOMENT
    return show(replace(context, not_before=not_before))
