"""The dashboard's pages without a database: functions of what is read of rows, and of a time."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone, tzinfo
from typing import Any, TypeVar, cast

from starlette.applications import Starlette
from starlette.datastructures import QueryParams

from apscheduler_tasklock import TaskLocks
from apscheduler_tasklock._words.stories import story_of
from apscheduler_tasklock.dashboard.access import Authorize, read_only
from apscheduler_tasklock.dashboard.app import Dashboard
from apscheduler_tasklock.dashboard.pages import Visit, page_of_screen, twin_of_screen
from apscheduler_tasklock.dashboard.queries import Query, parse
from apscheduler_tasklock.dashboard.reads import SharedReads
from apscheduler_tasklock.dashboard.screens import Context, Screen, screen_of
from apscheduler_tasklock.errors import TaskLockNotFoundError
from apscheduler_tasklock.status import (
    URGENCY,
    Durations,
    Finding,
    Freed,
    JobMoved,
    JobState,
    JobStatus,
    Lane,
    LaneEntry,
    Lanes,
    MissCause,
    Misses,
    Overview,
    Pause,
    PauseChange,
    ReplicaStatus,
    Run,
    Story,
    TaskState,
    TaskStatus,
)
from tests.support.rows import NOW
from tests.support.waist import NO_REPLICA_AFTER, WatchedRows, with_findings

Value = TypeVar("Value")

_LAST = datetime.max.replace(tzinfo=timezone.utc)
_CHANGES = {
    *("pause", "resume", "pause_all", "resume_all", "request_run", "free", "ack", "forget"),
    *("pause_job", "resume_job", "run_job", "move_job", "remove_job"),
}
_RUNNING = (TaskState.RUNNING, TaskState.HOLDER_SILENT, TaskState.TOO_LONG)


@dataclass
class Known:
    """What the task locks read of some rows, in place of the task locks.

    ``tests/integration/dashboard/test_reads_of_pages.py`` holds it to what the database selects.

    :ivar usual: how long tasks usually run
    :ivar known_since: when the kept history of tasks begins
    :ivar spreads: how long they ran in the last day, and in the week before
    :ivar arguments: those of stored jobs
    :ivar changes: what would have been changed: the method and its arguments
    :ivar answers: what methods that change something return or raise, or what is called for it;
        ``lanes`` may be here as well
    """

    timings = TaskLocks.timings
    tasks_: Sequence[TaskStatus] = ()
    runs_: Sequence[Run] = ()
    replicas_: Sequence[ReplicaStatus] = ()
    jobs_: Sequence[JobStatus] = ()
    pauses: tuple[Pause, ...] = ()
    misses: Sequence[Misses] = ()
    usual: dict[str, float] = field(default_factory=dict)
    known_since: dict[str, datetime] = field(default_factory=dict)
    spreads: dict[str, Durations] = field(default_factory=dict)
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    now: datetime = NOW
    changes: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        """Return a method that notes a change, and changes nothing."""
        if name not in _CHANGES:
            raise AttributeError(name)
        return lambda *names, **options: self._change(name, names, options)

    def _change(self, name: str, names: tuple[Any, ...], options: dict[str, Any]) -> Any:
        self.changes.append((name, names, options))
        answer = self.answers.get(name, self._done)
        if answer == self._done:
            return self._done(name, names, options)
        if isinstance(answer, Exception):
            raise answer
        return answer(*names, **options) if callable(answer) else answer

    def _done(self, name: str, names: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return what a method that changes something returns, by the rows."""
        if name == "pause":
            return [
                PauseChange(task.name, (), task.pauses, task.paused, is_paused=True)
                for task in self.tasks(*names)
            ]
        if name == "free":
            task = self.tasks(names[0])[0]
            began = task.started_at or self.now
            rest = (task.holder, began, task.window_until, task.due_at, task.overdue_at)
            return Freed(task.name, names[1], *rest, options["run_again"])
        if name in ("pause_job", "resume_job", "move_job"):
            was_paused = self.jobs(names[0])[0].state is JobState.PAUSED
            until = {"pause_job": None, "resume_job": self.now}.get(name, names[-1])
            changed = name == "move_job" or was_paused == (name == "resume_job")
            return JobMoved(names[0], until, was_paused, changed)
        return None if name == "run_job" else True

    def close(self) -> None:
        """There is no connection."""

    def check(self) -> None:
        """There are no tables that could be missing."""

    def database_time(self) -> datetime:
        """Return when the rows were read."""
        return self.now

    def check_writes(self) -> None:
        """Nothing keeps the rows from being written."""

    def overview(
        self,
        *patterns: str,
        limit: int = 20,
        namespace: str = "",
        no_replica_after: float | None = NO_REPLICA_AFTER,
        expect_replicas: int = 0,
    ) -> Overview:
        """Return an overview of the tasks, with the findings."""
        tasks = sorted(_chosen(self.tasks_, patterns, _name), key=_name)
        counts = Counter(task.state for task in tasks)
        running = [task for task in tasks if task.state in _RUNNING]
        paused = sorted((task for task in tasks if _is_paused(task)), key=_is_paused_with_all)
        due = [task for task in tasks if task not in paused and task.due_at]
        due = [task for task in due if task.due_at and task.due_at > self.now]
        late = [task.late_by or 0.0 for task in tasks if not task.gone]
        found = Overview(
            self.now,
            {state: counts[state] for state in TaskState},
            sum(task.gone for task in tasks),
            max(late, default=0.0),
            (),
            tuple(sorted(running, key=_first_began)[:limit]),
            tuple(sorted(due, key=lambda task: task.due_at or _LAST)[:limit]),
            tuple(paused[:limit]),
            self.pauses,
            None,
            None,
        )
        jobs: dict[str, JobStatus] = {}
        for job in self.jobs(overdue=True):
            for name in _chosen([job.task or f"{namespace}{job.id}"], patterns, str):
                jobs.setdefault(name, job)
        pauses = [
            pause
            for pause in self.pauses
            if any(task.name.startswith(pause.namespace or "") for task in tasks)
        ]
        names = [*jobs, *(task.name for task in tasks)]
        missing = [pattern for pattern in patterns if not _chosen(names, [pattern], str)]
        is_empty = not patterns and not tasks and not self.jobs_
        rows = WatchedRows(
            self.now,
            tasks,
            replicas=self.replicas_,
            jobs=jobs,
            having={
                job.task: [
                    each.replica_id
                    for each in self.replicas_
                    if each.alive and not each.stopping_since and job.task in each.tasks
                ]
                for job in jobs.values()
                if job.task is not None
            },
            misses=[each for each in self.misses if _chosen([each.task], patterns, str)],
            pauses_of_all=pauses,
            all_paused=found.paused if all(_is_paused(task) for task in tasks) else (),
            is_empty=is_empty,
            unmatched=missing,
            no_replica_after=no_replica_after,
            expect_replicas=expect_replicas,
        )
        return with_findings(found, rows)

    def tasks(
        self,
        *patterns: str,
        states: Collection[TaskState] = (),
        order: str = "name",
        limit: int | None = None,
        offset: int = 0,
        one_offs: bool = True,
    ) -> list[TaskStatus]:
        """Return the tasks in an order. None of them is a one-off job's."""
        found = sorted(_chosen(self.tasks_, patterns, _name), key=_name)
        found = [task for task in found if not states or task.state in states]
        if order == "due":
            found.sort(key=lambda task: task.due_at or _LAST)
        elif order == "started":
            found.sort(key=_began, reverse=True)
        elif order == "duration":
            found.sort(key=lambda task: -1.0 if task.took is None else task.took, reverse=True)
        elif order == "failures":
            found.sort(key=lambda task: task.failures, reverse=True)
        elif order == "urgency":
            found.sort(key=lambda task: URGENCY.index(task.state))
        return found[offset:][:limit]

    def runs(
        self,
        *patterns: str,
        outcome: str | Collection[str] | None = None,
        kind: str | None = None,
        replica: str | None = None,
        error: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        order: str = "newest",
        limit: int = 100,
        offset: int = 0,
    ) -> list[Run]:
        """Return entries of the history in an order."""
        outcomes = (outcome,) if isinstance(outcome, str) else outcome
        found = [
            run
            for run in _chosen(self._newest_first(), patterns, lambda run: run.task)
            if (outcomes is None or run.outcome in outcomes)
            and kind in (None, run.kind)
            and replica in (None, run.replica)
            and (not error or error.lower() in _error(run).lower())
            and (since is None or (run.last_scheduled_at or run.started_at) >= since)
            and (until is None or _when(run) < until)
        ]
        if order == "name":
            found.sort(key=lambda run: run.task)
        elif order == "duration":
            found.sort(key=lambda run: -1.0 if run.token is None else run.took, reverse=True)
        return found[offset:][:limit]

    def recent_runs(self, *names: str, limit: int = 60) -> dict[str, list[Run]]:
        """Return the newest runs of tasks."""
        found = [run for run in self._newest_first() if run.kind != "operator"]
        return {name: [run for run in found if run.task == name][:limit] for name in names}

    def lanes(
        self,
        since: datetime,
        until: datetime,
        *patterns: str,
        by: str = "task",
        parts: int = 500,
        limit: int = 50,
        offset: int = 0,
    ) -> Lanes:
        """Return the lanes of a span. Each entry stands alone, however short it is."""
        if isinstance(self.answers.get("lanes"), Lanes):
            return cast(Lanes, self.answers["lanes"])
        found = self._on_lanes(since, until, patterns, by)
        known = {name: self.known_since[name] for name in _chosen(self.known_since, patterns, str)}
        if by == "task":
            for name, reached in known.items():
                if reached > since:
                    found.setdefault(name, [])
        last = max(known.values(), default=None)
        names = sorted(
            found,
            key=lambda name: (-max([-1, *(each for each, _ in found[name])]), name == "", name),
        )
        lanes = [
            Lane(
                name,
                known.get(name) if by == "task" else last if name else None,
                entries=tuple(
                    sorted(
                        (entry for _, entry in found[name]),
                        key=lambda entry: (entry.since, entry.task or "", entry.outcome),
                    )
                ),
            )
            for name in names[offset:][:limit]
        ]
        spans = [
            (run.scheduled_at, run.last_scheduled_at)
            for run in _chosen(self._newest_first(), patterns, lambda run: run.task)
            if run.cause == MissCause.DATABASE.value and run.scheduled_at and run.last_scheduled_at
        ]
        return Lanes(
            self.now,
            tuple(lanes),
            len(names),
            last,
            tuple(
                run
                for run in self._newest_first()
                if run.outcome in ("paused", "resumed")
                and run.started_at < until
                and _concerns(run.task, [lane.name for lane in lanes], by)
            ),
            tuple(sorted(span for span in spans if span[0] < until and span[1] >= since)),
        )

    def _on_lanes(
        self, since: datetime, until: datetime, patterns: Sequence[str], by: str
    ) -> dict[str, list[tuple[int, LaneEntry]]]:
        """Return the entries of each lane, each with how bad it is."""
        found: dict[str, list[tuple[int, LaneEntry]]] = {}
        for run in _chosen(self._newest_first(), patterns, lambda run: run.task):
            entry = _lane_entry(run)
            if entry is not None and _overlaps(entry, since, until):
                nobody = by == "replica" and run.outcome == "missed"
                lane = run.task if by == "task" else "" if nobody else run.replica
                is_known = run.cause == MissCause.PAUSED.value
                trouble = 0 if is_known else _TROUBLE.get(run.outcome, 0)
                found.setdefault(lane, []).append((trouble, entry))
        for entry in _going_on(_chosen(self.tasks_, patterns, _name)):
            if _overlaps(entry, since, until):
                lane = entry.task if by == "task" else entry.replica
                trouble = 0 if entry.outcome == "running" else 3
                found.setdefault(lane or "", []).append((trouble, entry))
        return found

    def usual_durations(self, *patterns: str) -> dict[str, float]:
        """Return how long tasks usually run."""
        return {name: self.usual[name] for name in _chosen(self.usual, patterns, str)}

    def durations(self, name: str) -> Durations:
        """Return how long a task's runs took."""
        return self.spreads.get(name, Durations(None, None, None))

    def why(self, name: str, at: datetime | None = None) -> Story:
        """Return what is known of a task around a moment."""
        [task] = [task for task in self.tasks_ if task.name == name] or [None]
        if task is None:
            raise TaskLockNotFoundError([name])
        return story_of(task, self.runs(name, limit=1000), self.replicas_, at or self.now, self.now)

    def replicas(self) -> list[ReplicaStatus]:
        """Return the replicas."""
        return list(self.replicas_)

    def jobs(
        self,
        *patterns: str,
        overdue: bool = False,
        order: str = "due",
        limit: int | None = None,
        offset: int = 0,
    ) -> list[JobStatus]:
        """Return the stored jobs in an order."""
        found = _chosen(self.jobs_, patterns, lambda job: job.id)
        is_by_due = order == "due"
        found.sort(key=lambda job: (is_by_due and (job.next_run_time or _LAST), job.id))
        found = [job for job in found if not overdue or job.state is JobState.OVERDUE]
        return found[offset:][:limit]

    def job_arguments(self, job_id: str) -> dict[str, Any]:
        """Return the arguments of a stored job."""
        return self.arguments[job_id]

    def pauses_of_all(self) -> list[Pause]:
        """Return the pauses of all tasks."""
        return list(self.pauses)

    def doctor(self, *, namespace: str = "") -> list[Finding]:
        """Return what the doctor finds."""
        return list(self.findings)

    def _newest_first(self) -> list[Run]:
        return sorted(self.runs_, key=lambda run: (_when(run), run.token or 0), reverse=True)


def _when(run: Run) -> datetime:
    return (run.scheduled_at if run.outcome == "missed" else None) or run.started_at


def _chosen(values: Iterable[Value], patterns: Sequence[str], name: Any) -> list[Value]:
    texts = "|".join(
        re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".") for pattern in patterns
    )
    matches = re.compile(texts, re.DOTALL).fullmatch
    return [each for each in values if not patterns or matches(name(each))]


def _error(run: Run) -> str:
    return ": ".join(filter(None, (run.error_type, run.error)))


# How bad an entry is, by which lanes are ordered.
_TROUBLE = {"error": 2, "died": 2, "overran": 2, "missed": 1}


def _lane_entry(run: Run) -> LaneEntry | None:
    """Return what a lane has of an entry of the history."""
    if run.kind == "operator" or run.outcome in ("paused", "resumed"):
        return None
    begin, end = run.started_at, run.ended_at
    if run.outcome == "missed":
        begin, end = run.scheduled_at or begin, run.last_scheduled_at or end
    short = replace(
        run,
        traceback=None,
        error=run.error and run.error[:300],
        reason=run.reason and run.reason[:300],
    )
    return LaneEntry(
        run.task, run.replica, run.kind, run.outcome, begin, end, run.run_times or 1, short
    )


def _going_on(tasks: Sequence[TaskStatus]) -> Iterator[LaneEntry]:
    """Return the runs of tasks that are not in the history yet."""
    for task in tasks:
        for run in task.stuck:
            yield LaneEntry(task.name, run.replica, "schedule", "too long", run.since, None)
        is_told = task.finished_at or task.token in [run.token for run in task.stuck]
        if task.started_at is None or is_told:
            continue
        about = task.name, task.holder, task.kind or "schedule"
        if task.outcome is None:
            own = task.state.value if task.state in _RUNNING and not task.stuck else "running"
            yield LaneEntry(*about, own, task.started_at, None)
        elif task.outcome in ("died", "overran"):
            yield LaneEntry(*about, task.outcome, task.started_at, task.locked_until)


def _overlaps(entry: LaneEntry, since: datetime, until: datetime) -> bool:
    return entry.since < until and (entry.until is None or entry.until >= since)


def _concerns(task: str, lanes: Sequence[str], by: str) -> bool:
    """Return whether a pause is one of these lanes, or of all tasks."""
    if by == "replica":
        return task == "*"
    return any(name.startswith(task[:-1]) if task.endswith("*") else name == task for name in lanes)


def _name(task: TaskStatus) -> str:
    return task.name


def _began(task: TaskStatus) -> datetime:
    return task.started_at or datetime.min.replace(tzinfo=timezone.utc)


def _first_began(task: TaskStatus) -> datetime:
    return min([_began(task), *(run.since for run in task.stuck)])


def _is_paused(task: TaskStatus) -> bool:
    return task.paused or bool(task.pauses)


def _is_paused_with_all(task: TaskStatus) -> bool:
    return bool(task.pauses) and all(pause.namespace is not None for pause in task.pauses)


class Reader:
    """Somebody who looks at the pages of some rows."""

    def __init__(
        self,
        known: Known | TaskLocks,
        namespace: str = "",
        zone: tzinfo | None = timezone.utc,
        *,
        may_operate: bool = False,
    ) -> None:
        self._reads = SharedReads(cast(TaskLocks, known), clock=lambda: self.seconds)
        self.seconds = 0.0
        self._namespace = namespace
        self._may_operate = may_operate
        self._seen_by = (namespace, zone, may_operate, getattr(known, "now", NOW))

    def screen(self, path: str) -> tuple[str, Screen]:
        """Return the name and the screen of the page at a path, as ``/tasks?order=name``."""
        name, _, query = path.removeprefix("/").partition("?")
        parameters = Query.of(parse(query.encode()))
        return name, screen_of(name, Context(self._reads, parameters, *self._seen_by))

    def html(self, path: str) -> str:
        """Return the page at a path."""
        name, screen = self.screen(path)
        query = QueryParams(path.partition("?")[2])
        return page_of_screen(screen, Visit(name, query, self._namespace, self._may_operate))

    def words(self, path: str) -> str:
        """Return the words of the page at a path."""
        return words(self.html(path))

    def twin(self, path: str) -> Any:
        """Return the JSON twin of the page at a path."""
        return json.loads(twin_of_screen(self.screen(path)[1]))


def app(
    known: Known,
    *,
    namespace: str = "",
    authorize: Authorize = read_only,
    zone: tzinfo | None = timezone.utc,
) -> Starlette:
    """Return the dashboard's application over some rows."""
    return Dashboard(cast(TaskLocks, known), namespace, authorize, zone).app()


def words(html: str) -> str:
    """Return a page without its tags, in which one space stands for each stretch of white space."""
    text = re.sub(r"<style.*?</style>|<title>.*?</title>|<[^>]*>", " ", html, flags=re.S)
    return re.sub(r"\s+", " ", text)


def lanes(html: str) -> dict[str, list[str]]:
    """Return the classes of the shapes and shades on each lane of a page."""
    found = re.findall(r'aria-label="([^"]*?): [^"]*">(.*?)</svg>', html, flags=re.S)
    return {name: sorted(set(re.findall(r'rect class="(\w+)"', svg))) for name, svg in found}
