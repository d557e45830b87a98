"""Tasks, runs, replicas and stored jobs in Django's admin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from datetime import datetime
from datetime import timezone as zones
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import ImproperlyConfigured
from django.db import DataError, ProgrammingError, transaction
from django.db.models import Case, When
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.http import urlencode

from apscheduler_tasklock._lock.outcomes import outcome_named
from apscheduler_tasklock._lock.patterns import shown_name
from apscheduler_tasklock._lock.schedules import schedule_of, stored_trigger_in_words
from apscheduler_tasklock._lock.words import seconds_in_words, unreadable_in_words
from apscheduler_tasklock._words.actions import (
    freed_in_words,
    gone_in_words,
    job_in_words,
    paused_in_words,
    requested_in_words,
    resumed_in_words,
)
from apscheduler_tasklock._words.runs import (
    action_in_words,
    error_in_words,
    miss_in_words,
    run_notes,
    when_of,
)
from apscheduler_tasklock._words.tasks import as_listed, pauses_of, task_took_in_words
from apscheduler_tasklock.django.configuration import configuration
from apscheduler_tasklock.django.database import task_locks
from apscheduler_tasklock.django.models import Job, Replica, Run, Task
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockSchemaError,
    TaskLockStateError,
    TaskLockUnknownError,
)
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.status import JobMoved, TaskState, TaskStatus

# Limits the runs on the page of one task.
SHOWN_RUNS = 20


class ReadOnlyAdmin(admin.ModelAdmin):
    """An admin list without forms."""

    list_display_links: Any = None
    list_per_page = 50

    class Media:
        """The styles of the lists."""

        css: ClassVar = {"all": ("apscheduler_tasklock/admin.css",)}

    def has_add_permission(self, _request: Any, _obj: object = None) -> bool:
        """Allow no additions."""
        return False

    def has_delete_permission(self, _request: Any, _obj: object = None) -> bool:
        """Allow no deletions."""
        return False

    def has_change_permission(self, _request: Any, _obj: object = None) -> bool:
        """Allow no changes in a form."""
        return False

    def get_queryset(self, request: Any) -> Any:
        """Return all rows. Django would use the model's first manager, which has no rows."""
        return self.model.objects.order_by(*self.get_ordering(request))

    def get_changelist(self, _request: Any, **_kwargs: Any) -> type[ChangeList]:
        """Return the list that reports filters which PostgreSQL rejects."""
        return ReadOnlyList

    def get_object(self, request: Any, object_id: str, from_field: str | None = None) -> Any:
        """Return a row; ``None`` if there is none, also for a name that PostgreSQL rejects."""
        try:
            return super().get_object(request, object_id, from_field)
        except (DataError, ValueError):
            return None


class ReadOnlyList(ChangeList):
    """A list that reports invalid filters, because anybody can write any filter into the URL."""

    def get_results(self, request: Any) -> None:
        """Read the rows of a page.

        :raises IncorrectLookupParameters: PostgreSQL rejects a filter, such as a NUL or a number
            that is too large. Django then shows the list without filters.
        """
        try:
            super().get_results(request)
        except (DataError, ValueError) as error:
            said = str(error).partition("\n")[0]
            messages.error(request, f"These filters cannot be applied: {said}")
            raise IncorrectLookupParameters(said) from error


class StatusList(ReadOnlyList):
    """A list of rows, each with its status."""

    def get_results(self, request: Any) -> None:
        """Read the rows of a page, and their statuses."""
        super().get_results(request)
        self.result_list: list[Any] = list(self.result_list)
        self.model_admin.add_statuses(request, self.result_list)


class StatusAdmin(ReadOnlyAdmin):
    """A list whose rows have a status that ``TaskLocks`` reads."""

    def get_changelist(self, _request: Any, **_kwargs: Any) -> type[ChangeList]:
        """Return the list that reads each row's status."""
        return StatusList

    def get_object(self, request: Any, object_id: str, from_field: str | None = None) -> Any:
        """Return a row with its status."""
        row = super().get_object(request, object_id, from_field)
        if row is not None:
            self.add_statuses(request, [row])
        return row

    def add_statuses(self, request: Any, rows: Sequence[Any]) -> None:
        """Add to each row its ``status``; ``None`` if it cannot be read."""
        for row in rows:
            row.status = None
        try:
            with closing(task_locks()) as locks:
                self.read_statuses(locks, rows)
        except TaskLockError as error:
            messages.error(request, str(error))

    def read_statuses(self, locks: TaskLocks, rows: Sequence[Any]) -> None:
        """Set the ``status`` of each row that has one."""
        raise NotImplementedError


class SteeredAdmin(StatusAdmin):
    """A list whose rows have actions of operators."""

    # The attribute of a row with the name by which ``TaskLocks`` knows it.
    name_of: ClassVar = "task_name"
    # What a row is called in messages.
    called: ClassVar = "task"

    def has_operate_permission(self, request: Any) -> bool:
        """Return whether a user may use the actions."""
        return bool(request.user.has_perm(f"apscheduler_tasklock.change_{self.opts.model_name}"))

    def has_view_permission(self, request: Any, obj: object = None) -> bool:
        """Return whether a user may see the rows. Users who may use the actions may see them."""
        return super().has_view_permission(request, obj) or self.has_operate_permission(request)

    def response_action(self, request: Any, queryset: Any) -> Any:
        """Run an action on the chosen rows; report names that PostgreSQL rejects."""
        try:
            return super().response_action(request, queryset)
        except (DataError, ValueError) as error:
            said = str(error).partition("\n")[0]
            told = f"These {self.called}s cannot be chosen: {said}"
            self.message_user(request, told, messages.ERROR)
            return None

    def for_each(
        self,
        request: Any,
        queryset: Any,
        done: str,
        operation: Callable[[TaskLocks, str], str],
    ) -> None:
        """Carry out an operation on each row, and report each outcome.

        :param done: what is to be done, for the message of what was left out
        :param operation: gets the task locks, and the row's name; returns what was done, for the
            message and the admin's log
        """
        rows = list(queryset)
        self._report_left_out(request, [getattr(row, self.name_of) for row in rows])
        with closing(task_locks()) as locks:
            for place, row in enumerate(rows):
                name = getattr(row, self.name_of)
                try:
                    what = operation(locks, name)
                except TaskLockDatabaseError as error:
                    is_unknown = isinstance(error, TaskLockUnknownError)
                    about = f"{self.called.capitalize()} {name!r}: " if is_unknown else ""
                    self.message_user(request, f"{about}{error}", messages.ERROR)
                    # The others are left out, because each of them would wait as long.
                    others = rows[place + is_unknown :]
                    left = ", ".join(repr(getattr(each, self.name_of)) for each in others)
                    if left:
                        self.message_user(request, f"Not {done}: {left}", messages.ERROR)
                    return
                except TaskLockError as error:
                    self.message_user(request, error.for_page(), messages.ERROR)
                    continue
                self.log_change(request, row, what)
                # The name is not the first word, because the admin's pages capitalize each message.
                message = f"{self.called.capitalize()} {name!r}: {what}"
                self.message_user(request, message, messages.SUCCESS)

    def _report_left_out(self, request: Any, names: Sequence[str]) -> None:
        """Report chosen rows that the list does not have any more.

        :param names: the names of the chosen rows that the list still has
        """
        if request.POST.get("select_across") == "1":  # then the form names only some of the rows
            return
        for name in request.POST.getlist(ACTION_CHECKBOX_NAME):
            if name not in names:
                told = f"{self.called.capitalize()} {name!r} is not in the list any more"
                self.message_user(request, told, messages.ERROR)

    def confirmation(self, request: Any, title: str, page: str, **context: Any) -> Any:
        """Return a page that asks before an action.

        :param page: the name of the page's template
        """
        context = {
            **self.admin_site.each_context(request),
            "title": title,
            "opts": self.opts,
            "action_checkbox_name": ACTION_CHECKBOX_NAME,
            **context,
        }
        template = f"admin/apscheduler_tasklock/{self.opts.model_name}/{page}.html"
        return TemplateResponse(request, template, context)


class StateFilter(admin.SimpleListFilter):
    """Filters tasks by their states."""

    title = "state"
    parameter_name = "state"

    def lookups(self, _request: Any, _model_admin: Any) -> list[tuple[str, str]]:
        """Return the states."""
        return [(state.value, state.value) for state in TaskState]

    def queryset(self, request: Any, queryset: Any) -> Any:
        """Return the tasks in the chosen state."""
        if self.value() is None:
            return queryset
        try:
            with closing(task_locks()) as locks:
                names = [s.name for s in locks.tasks() if s.state.value == self.value()]
        except TaskLockError as error:
            messages.error(request, str(error))
            return queryset.none()
        return queryset.filter(task_name__in=names)


class TaskAdmin(SteeredAdmin):
    """The list of tasks, with the actions of operators, and a page for each task."""

    list_display = (
        "task_name",
        "state",
        "schedule",
        "last_run",
        "outcome_and_runs",
        "due",
    )
    list_display_links = ("task_name",)
    list_filter = (StateFilter,)
    search_fields = ("task_name",)
    fields = (
        "task_name",
        "state",
        "function",
        "schedule",
        "replicas",
        "started",
        "took",
        "outcome",
        "holder",
        "token",
        "due",
        "succeeded",
        "failed",
        "run_list",
    )
    ordering = ("task_name",)
    actions: ClassVar = ["pause", "resume", "resume_all", "run_now", "free"]

    def read_statuses(self, locks: TaskLocks, rows: Sequence[Any]) -> None:
        """Set the status and the usual duration of each task."""
        found = {status.name: status for status in _statuses(locks, rows)}
        now = locks.database_time()
        try:
            usual = locks.usual_durations(*found) if found else {}
        except TaskLockSchemaError:  # because the states, which need no history, can still be shown
            usual = {}
        for row in rows:
            row.status = found.get(row.task_name)
            row.listed = row.status and as_listed(row.status, now)
            row.usual = usual.get(row.task_name)

    def change_view(
        self, request: Any, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> Any:
        """Show a task's page, with its last runs for users who may see runs."""
        context = {"title": "Task", "tasklock_runs": None, **(extra_context or {})}
        if request.user.has_perm("apscheduler_tasklock.view_run"):
            try:
                context["tasklock_runs"] = _last_runs(unquote(object_id))
            except ProgrammingError as error:  # a missing right or table; the rest can be shown
                said = str(error).partition("\n")[0]
                messages.error(request, f"The runs cannot be read: {said}")
        return super().change_view(request, object_id, form_url, context)

    @admin.display(description="state")
    def state(self, task: Any) -> str:
        """Return the task's state, and why it is paused."""
        status = task.status
        if status is None:
            return "-"
        texts = [status.state.value]
        if status.state is TaskState.RETRYING:
            told = f"attempt {status.attempt} failed; its retry is due at {_time(status.retry_at)}"
            texts[0] += f": {told}"
        if status.unreadable:
            texts.append(unreadable_in_words(status.unreadable))
        if status.paused:
            texts += pauses_of(status, _FORMATS)
        if status.requested_by:
            texts.append(f"{status.requested_by} asked for a run")
        if status.gone:
            texts.append("no replica has it")
        for run in status.stuck:
            texts.append(f"a run that has outlived its maximum lock goes on, on {run.replica}")
        return "; ".join(texts)

    @admin.display(description="schedule")
    def schedule(self, task: Any) -> str:
        """Return the task's schedule in words."""
        return schedule_of(task.status) if task.status else "-"

    @admin.display(description="function")
    def function(self, task: Any) -> str:
        """Return the reference of the job's function."""
        return (task.status and task.status.function) or "-"

    @admin.display(description="replicas")
    def replicas(self, task: Any) -> str:
        """Return which replicas have the task, for the task's page."""
        try:
            with closing(task_locks()) as locks:
                found = [each for each in locks.replicas() if task.task_name in each.tasks]
        except TaskLockError:  # the page says already that the status cannot be read
            return "-"
        return ", ".join(f"{each.replica_id} ({each.state.value})" for each in found) or "none"

    @admin.display(description="took")
    def took(self, task: Any) -> str:
        """Return how long the last run took, and how long a run usually takes."""
        return _took_with_usual(task.status, task.usual) if task.status else "-"

    @admin.display(description="next due", ordering="due_at")
    def due(self, task: Any) -> str:
        """Return when the task is due next."""
        return _time(task.listed.due_at) if task.status else "-"

    @admin.display(description="last success")
    def succeeded(self, task: Any) -> str:
        """Return when a run last ended well."""
        return _time(task.status.succeeded_at) if task.status else "-"

    @admin.display(description="last failure")
    def failed(self, task: Any) -> str:
        """Return when a run last failed."""
        return _time(task.status.failed_at) if task.status else "-"

    @admin.display(description="last holder", ordering="locked_by")
    def holder(self, task: Any) -> str:
        """Return the replica that runs the task or ran it last."""
        return (task.status and task.status.holder) or "-"

    @admin.display(description="last started", ordering="started_at")
    def started(self, task: Any) -> str:
        """Return when the task's last run began."""
        return _time(task.status.started_at) if task.status else "-"

    @admin.display(description="last outcome")
    def outcome(self, task: Any) -> str:
        """Return the outcome of the task's last run."""
        return _outcome(task.status) if task.status else "-"

    @admin.display(description="last run", ordering="started_at")
    def last_run(self, task: Any) -> str:
        """Return when the task's last run began, and on which replica; one that hangs first."""
        if task.status is None or task.status.started_at is None:
            return "-"
        return f"{_time(task.listed.started_at)} on {task.listed.holder}"

    @admin.display(description="last outcome")
    def outcome_and_runs(self, task: Any) -> Any:
        """Return that run's outcome and duration, as a link to the task's runs."""
        if task.status is None:
            told = "-"
        else:
            told, is_over = _outcome(task.listed), task.listed.finished_at or task.listed.outcome
            if task.listed.took is not None:
                took = _took_with_usual(task.listed, task.usual)
                told = f"{told}, {'took' if is_over else 'so far'} {took}"
        return format_html('<a href="{}">{}</a>', self._url_of_runs(task), told)

    @admin.display(description="runs")
    def run_list(self, task: Any) -> str:
        """Return a link to the task's runs."""
        return str(format_html('<a href="{}">runs</a>', self._url_of_runs(task)))

    def _url_of_runs(self, task: Any) -> str:
        url = reverse(f"{self.admin_site.name}:apscheduler_tasklock_run_changelist")
        return f"{url}?{urlencode({'task_name__exact': task.task_name})}"

    @admin.action(description="Pause selected tasks", permissions=["operate"])
    def pause(self, request: Any, queryset: Any) -> None:
        """Pause tasks until a resume."""
        by = request.user.get_username()
        self.for_each(request, queryset, "paused", lambda locks, name: _pause(locks, name, by))

    @admin.action(description="Resume selected tasks", permissions=["operate"])
    def resume(self, request: Any, queryset: Any) -> None:
        """Take the user's own pauses of tasks out."""
        by = request.user.get_username()
        self.for_each(request, queryset, "resumed", lambda locks, name: _resume(locks, name, by))

    @admin.action(description="Take all pauses of selected tasks out", permissions=["operate"])
    def resume_all(self, request: Any, queryset: Any) -> None:
        """Take all pauses of tasks out, also those of others."""
        by = request.user.get_username()
        self.for_each(
            request,
            queryset,
            "resumed",
            lambda locks, name: _resume(locks, name, by, force=True),
        )

    @admin.action(description="Run selected tasks now", permissions=["operate"])
    def run_now(self, request: Any, queryset: Any) -> None:
        """Ask for a manual run of each task."""
        by = request.user.get_username()
        self.for_each(
            request,
            queryset,
            "asked for a run",
            lambda locks, name: requested_in_words(locks.request_run(name, by=by), _FORMATS),
        )

    @admin.action(description="Free selected tasks", permissions=["operate"])
    def free(self, request: Any, queryset: Any) -> Any:
        """Show the runs that would be freed; after the confirmation free the shown runs."""
        if "confirmed" in request.POST:
            tokens = dict(
                zip(request.POST.getlist("name"), request.POST.getlist("token"), strict=False)
            )
            force, run_again = "force" in request.POST, "run_again" in request.POST
            by = request.user.get_username()
            self.for_each(
                request,
                queryset.filter(task_name__in=tokens),
                "freed",
                lambda locks, name: freed_in_words(
                    locks.free(name, tokens[name], force=force, run_again=run_again, by=by),
                    _FORMATS,
                ),
            )
            return None
        try:
            with closing(task_locks()) as locks:
                statuses = _statuses(locks, list(queryset))
        except TaskLockError as error:
            self.message_user(request, str(error), messages.ERROR)
            return None
        self._report_left_out(request, [status.name for status in statuses])
        shown = [(status, _local(status.started_at)) for status in statuses]
        return self.confirmation(request, "Free tasks", "free", tasks=shown)


class RunAdmin(ReadOnlyAdmin):
    """The run history, with what operators did."""

    list_display = (
        "task",
        "started",
        "took",
        "outcome",
        "kind",
        "replica",
        "details",
    )
    list_filter = ("outcome", "kind")
    search_fields = ("task_name", "error_type", "error", "by", "reason")
    ordering = ("-ended_at",)
    actions = None

    @admin.display(description="task", ordering="task_name")
    def task(self, run: Any) -> str:
        """Return the task's name; for what an operator did with all tasks, a pattern of names."""
        return shown_name(run.task_name)

    @admin.display(
        description="when",
        ordering=Case(When(ring="misses", then="scheduled_at"), default="started_at"),
    )
    def started(self, run: Any) -> str:
        """Return when the run began, was missed, or an operator did it."""
        return _time(when_of(run))

    @admin.display(description="took")
    def took(self, run: Any) -> str:
        """Return how long the run took; nothing for what an operator did."""
        return _took(run)

    @admin.display(description="details", ordering="error_type", empty_value="")
    def details(self, run: Any) -> Any:
        """Return a run's error and traceback.

        For what an operator did, return who did it, until when, and why.
        """
        if run.kind != "operator":
            return _error(run)
        return action_in_words(run, _FORMATS)

    def get_object(self, _request: Any, _object_id: str, _from_field: str | None = None) -> None:
        """Return ``None``: no run has its own page, because several runs have the same name."""


class ReplicaAdmin(StatusAdmin):
    """The list of replicas."""

    list_display = (
        *("replica_id", "state", "host", "version", "release"),
        *("started", "seen", "has", "running"),
    )
    fields = (
        *("replica_id", "state", "host", "version", "release"),
        *("started", "seen", "tasks", "running"),
    )
    list_display_links = ("replica_id",)
    search_fields = ("replica_id", "host")
    ordering = ("started_at", "replica_id")
    actions = None

    def read_statuses(self, locks: TaskLocks, rows: Sequence[Any]) -> None:
        """Set the status of each replica."""
        found = {status.replica_id: status for status in locks.replicas()}
        for row in rows:
            row.status = found.get(row.replica_id)

    @admin.display(description="state")
    def state(self, replica: Any) -> str:
        """Return the replica's state, and what the database rejects of its work."""
        status = replica.status
        return "; ".join([status.state_in_words, *status.rejected]) if status else "-"

    @admin.display(description="started", ordering="started_at")
    def started(self, replica: Any) -> str:
        """Return when the replica started."""
        return _time(replica.started_at)

    @admin.display(description="last seen", ordering="seen_at")
    def seen(self, replica: Any) -> str:
        """Return when the replica gave its last sign of life."""
        return _time(replica.seen_at)

    @admin.display(description="tasks")
    def has(self, replica: Any) -> int | None:
        """Return how many tasks the replica has."""
        return len(replica.status.tasks) if replica.status else None

    @admin.display(description="tasks")
    def tasks(self, replica: Any) -> str:
        """Return the names of the replica's tasks."""
        return ", ".join(replica.status.tasks) if replica.status else "-"

    @admin.display(description="running")
    def running(self, replica: Any) -> str:
        """Return what runs on the replica, and since when, as far as rows tell."""
        if not replica.status:
            return ""
        told = [(run, " (lock lost)" if run.lost else "") for run in replica.status.running]
        told += [(run, " (lease ended)") for run in replica.status.unfinished]
        return ", ".join(f"{run.task} since {_time(run.since)}{how}" for run, how in told)


class JobAdmin(SteeredAdmin):
    """The list of stored jobs, with the actions of operators.

    The jobs' arguments are not shown, because they may be secret.
    """

    name_of: ClassVar = "id"
    called: ClassVar = "job"

    list_display = (
        "id",
        "state",
        "func",
        "trigger",
        "next_run",
        "last_run",
        "executor",
        "task_name",
    )
    list_display_links = ("id",)
    fields = list_display
    search_fields = ("id", "func", "task_name")
    ordering = ("id",)
    actions: ClassVar = ["pause", "resume", "run_now", "move", "remove"]

    def read_statuses(self, locks: TaskLocks, rows: Sequence[Any]) -> None:
        """Set the status of each stored job."""
        ids = {row.id for row in rows}
        # An id with a wildcard matches further jobs, which are left out here.
        found = {status.id: status for status in locks.jobs(*ids)} if ids else {}
        for row in rows:
            row.status = found.get(row.id)

    @admin.display(description="state")
    def state(self, job: Any) -> str:
        """Return the job's state, where it runs, and whether its task is paused."""
        status = job.status
        if status is None:
            return "-"
        texts = [status.state.value]
        if status.paused_by:
            texts.append(f"by {status.paused_by}")
        if status.holder:
            texts.append(f"runs on {status.holder}")
        if status.task_paused:
            texts.append(f"its task is paused{_until(status.task_paused_until)}")
        return "; ".join(texts)

    @admin.display(description="trigger")
    def trigger(self, job: Any) -> str:
        """Return the job's trigger in words."""
        return stored_trigger_in_words(job.status.trigger) if job.status else "-"

    @admin.display(description="next run time", ordering="next_run_time")
    def next_run(self, job: Any) -> str:
        """Return the job's next run time."""
        return _time(job.next_run_time)

    @admin.display(description="last run time", ordering="last_run_time")
    def last_run(self, job: Any) -> str:
        """Return the run time that was claimed last."""
        return _time(job.last_run_time)

    @admin.action(description="Pause selected jobs", permissions=["operate"])
    def pause(self, request: Any, queryset: Any) -> None:
        """Pause jobs until a resume."""
        by = request.user.get_username()
        self.for_each(
            request,
            queryset,
            "paused",
            lambda locks, job: _steered("paused", locks.pause_job(job, by=by)),
        )

    @admin.action(description="Resume selected jobs", permissions=["operate"])
    def resume(self, request: Any, queryset: Any) -> None:
        """Resume jobs from now on."""
        by = request.user.get_username()
        self.for_each(
            request,
            queryset,
            "resumed",
            lambda locks, job: _steered("resumed", locks.resume_job(job, by=by)),
        )

    @admin.action(description="Run selected jobs now", permissions=["operate"])
    def run_now(self, request: Any, queryset: Any) -> None:
        """Let one replica run each job once, now."""
        by = request.user.get_username()
        self.for_each(
            request, queryset, "asked for a run", lambda locks, job: _run_job(locks, job, by)
        )

    @admin.action(description="Move selected jobs", permissions=["operate"])
    def move(self, request: Any, queryset: Any) -> Any:
        """Ask for a time; after the confirmation set the next run time of the shown jobs."""
        if "confirmed" not in request.POST:
            return self._ask_first(request, queryset, "Move jobs", "move")
        to = _moment(request.POST.get("to", ""))
        if to is None:
            self.message_user(request, "The time must be like 2026-03-01 02:00", messages.ERROR)
            return self._ask_first(request, queryset, "Move jobs", "move")
        by = request.user.get_username()
        self.for_each(
            request,
            queryset,
            f"moved to {_time(to)}",
            lambda locks, job: _steered("moved", locks.move_job(job, to, by=by)),
        )
        return None

    @admin.action(description="Remove selected jobs", permissions=["operate"])
    def remove(self, request: Any, queryset: Any) -> Any:
        """Show the jobs; after the confirmation remove the shown jobs."""
        if "confirmed" not in request.POST:
            return self._ask_first(request, queryset, "Remove jobs", "remove")
        by = request.user.get_username()
        self.for_each(
            request,
            queryset,
            "removed",
            lambda locks, job: gone_in_words("removed", is_done=locks.remove_job(job, by=by)),
        )
        return None

    def _ask_first(self, request: Any, queryset: Any, title: str, page: str) -> Any:
        jobs = [(job.id, job.func, _time(job.next_run_time)) for job in queryset]
        self._report_left_out(request, [name for name, _, _ in jobs])
        zone = timezone.get_current_timezone_name()
        return self.confirmation(request, title, page, jobs=jobs, zone=zone)


def _last_runs(task: str) -> list[dict[str, Any]] | None:
    """Return the last runs of a task, as its page shows them."""
    runs = Run.objects.filter(task_name=task).exclude(kind="operator")
    # In a transaction of its own, so that an error leaves the request's transaction usable.
    with suppress(DataError, ValueError), transaction.atomic(using=runs.db):
        return [
            {
                "started": _time(run.started_at),
                "took": _took(run),
                "outcome": run.outcome,
                "kind": run.kind,
                "replica": run.replica,
                "error": _error(run),
            }
            for run in runs.order_by("-started_at", "-token")[:SHOWN_RUNS]
        ]
    return None  # a name that PostgreSQL rejects has no runs


def _statuses(locks: TaskLocks, tasks: Sequence[Any]) -> list[TaskStatus]:
    """Return the statuses of tasks, without tasks that were deleted meanwhile."""
    names = {task.task_name for task in tasks}
    # The answer is filtered, because a name may contain a wildcard of a pattern.
    return [status for status in locks.tasks(*names) if status.name in names] if names else []


def _took_with_usual(status: TaskStatus, usual: float | None) -> str:
    if status.took is None:
        return "-"
    told = f" (usually {seconds_in_words(usual)})" if usual is not None else ""
    return f"{task_took_in_words(status, _FORMATS)}{told}"


def _outcome(status: TaskStatus) -> str:
    if status.started_at is None:
        return "-"
    if status.outcome is None and status.finished_at is None:
        return "not over"
    if status.outcome not in (None, "ok", "error"):
        return status.outcome
    # A failure whose retry is to come is none of the failures in a row.
    if status.failures:
        return f"{status.error_type or 'failed'} ({status.failures} in a row)"
    return "ok" if status.outcome != "error" else status.error_type or "failed"


def _until(moment: datetime | None) -> str:
    return f" until {_time(moment)}" if moment else ""


def _time(moment: datetime | None) -> str:
    """Return a moment in Django's time zone, to the second; ``-`` for none."""
    local = _local(moment)
    return f"{local:%Y-%m-%d %H:%M:%S}" if local else "-"


class _Formats:
    """Writes times in Django's time zone, and durations in words."""

    def moment(self, moment: datetime | None) -> str:
        """Return a time, to the second."""
        return _time(moment) if moment else ""

    def seconds(self, seconds: float | None) -> str:
        """Return a duration in its two largest units."""
        return "" if seconds is None else seconds_in_words(seconds)


_FORMATS = _Formats()


def _took(run: Any) -> str:
    if run.kind == "operator" or run.outcome == "missed":
        return ""
    took = seconds_in_words((run.ended_at - run.started_at).total_seconds())
    return outcome_named(run.outcome).took.format(took)


def _error(run: Any) -> Any:
    """Return a run's error, and below it the traceback, which opens with a click.

    For missed run times, return which run times they are, and why no replica ran them.
    """
    if run.outcome == "missed":
        return miss_in_words(run, _FORMATS)
    error, notes = error_in_words(run), run_notes(run, _FORMATS)
    error = " ".join(filter(None, [error, notes and f"({notes})"]))
    if not run.traceback:
        return error
    return format_html(
        "{}<details><summary>traceback</summary><pre>{}</pre></details>", error, run.traceback
    )


def _pause(locks: TaskLocks, name: str, by: str) -> str:
    """Pause a task; return what was done."""
    return "; ".join(paused_in_words(each, _FORMATS) for each in locks.pause(name, by=by))


def _resume(locks: TaskLocks, name: str, by: str, *, force: bool = False) -> str:
    """Take a user's pauses of a task out; return what was done.

    :param force: whether the pauses of all others are taken out, too
    :raises TaskLockStateError: no pause was taken out
    """
    [change] = locks.resume(name, by=by, force=force)
    words = resumed_in_words(change, _FORMATS)
    if not (change.is_resumed or change.ended):
        raise TaskLockStateError(f"Task {name!r}: {words}")
    return words


def _steered(outcome: str, moved: JobMoved) -> str:
    """Return what was done with a stored job.

    :param outcome: as in ``job_in_words``
    :raises TaskLockStateError: it was so before
    """
    words = job_in_words(outcome, moved, _FORMATS)
    if not moved.is_changed:
        raise TaskLockStateError(f"Job {moved.job_id!r}: {words}")
    return words


def _run_job(locks: TaskLocks, job_id: str, by: str) -> str:
    """Let a replica run a job once; return what was done."""
    request = locks.run_job(job_id, by=by)
    return "due now" if request is None else requested_in_words(request, _FORMATS)


def _moment(text: str) -> datetime | None:
    """Return a time that a user has typed, in Django's time zone; ``None``: it is no time."""
    try:
        moment = datetime.fromisoformat(text.strip())
        if timezone.is_naive(moment):
            moment = timezone.make_aware(moment)
        # In UTC, so that a time in an hour that clocks skip is shown as the later one that it
        # means, and so that a time beyond Python's years is found here.
        return moment.astimezone(zones.utc)
    except (ValueError, OverflowError):
        return None


def _local(moment: datetime | None) -> datetime | None:
    """Return a moment in Django's time zone."""
    return moment and timezone.localtime(moment)


def _register(models: Iterable[tuple[Any, Any]]) -> None:
    """Register the lists if locks are on. Without locks there may be no tables."""
    try:
        enabled = configuration().enabled
    except ImproperlyConfigured:
        return  # `manage.py check` reports the error
    if enabled:
        for model, model_admin in models:
            admin.site.register(model, model_admin)


_register([(Task, TaskAdmin), (Run, RunAdmin), (Replica, ReplicaAdmin), (Job, JobAdmin)])
