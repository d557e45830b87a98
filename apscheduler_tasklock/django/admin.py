"""Tasks and runs in Django's admin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from datetime import datetime
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import ImproperlyConfigured
from django.db import DataError
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.http import urlencode

from apscheduler_tasklock.django.configuration import configuration
from apscheduler_tasklock.django.database import task_locks
from apscheduler_tasklock.django.models import Run, Task
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockStateError,
)
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.status import TaskState, TaskStatus


class ReadOnlyAdmin(admin.ModelAdmin):
    """An admin list without forms."""

    list_display_links = None
    list_per_page = 50

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


class TaskList(ReadOnlyList):
    """The list of tasks, each with its status."""

    def get_results(self, request: Any) -> None:
        """Read the rows of a page, and the statuses of their tasks."""
        super().get_results(request)
        tasks: list[Any] = list(self.result_list)
        try:
            with closing(task_locks()) as locks:
                found = {status.name: status for status in _statuses(locks, tasks)}
        except TaskLockError as error:
            messages.error(request, str(error))
            found = {}
        for task in tasks:
            task.status = found.get(task.task_name)
        self.result_list: list[Any] = tasks


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


class TaskAdmin(ReadOnlyAdmin):
    """The list of tasks, with the actions of operators."""

    list_display = ("task_name", "state", "due", "holder", "started", "outcome", "run_list")
    list_filter = (StateFilter,)
    search_fields = ("task_name",)
    fields = ("task_name", "started_at", "locked_by", "token")
    ordering = ("task_name",)
    actions: ClassVar = ["pause", "resume", "resume_all", "run_now", "free"]

    def get_changelist(self, _request: Any, **_kwargs: Any) -> type[ChangeList]:
        """Return the list that reads each task's status."""
        return TaskList

    def has_operate_permission(self, request: Any) -> bool:
        """Return whether a user may pause, resume, run and free tasks."""
        return bool(request.user.has_perm("apscheduler_tasklock.change_task"))

    def has_view_permission(self, request: Any, obj: object = None) -> bool:
        """Return whether a user may see the tasks. Users who may operate tasks may see them."""
        return super().has_view_permission(request, obj) or self.has_operate_permission(request)

    @admin.display(description="state")
    def state(self, task: Any) -> str:
        """Return the task's state, and why it is paused."""
        status = task.status
        if status is None:
            return "-"
        texts = [status.state.value]
        if status.unreadable:
            texts.append(f"cannot be read: {', '.join(status.unreadable)}")
        if status.paused:
            texts += _pauses(status)
        if status.requested_by:
            texts.append(f"{status.requested_by} asked for a run")
        if status.gone:
            texts.append("no replica has it")
        for run in status.stuck:
            texts.append(f"a run that has outlived its maximum lock goes on, on {run.replica}")
        return "; ".join(texts)

    @admin.display(description="next due", ordering="due_at")
    def due(self, task: Any) -> datetime | None:
        """Return when the task is due next."""
        return task.status and _local(task.status.due_at)

    @admin.display(description="last holder", ordering="locked_by")
    def holder(self, task: Any) -> str:
        """Return the replica that runs the task or ran it last."""
        return (task.status and task.status.holder) or "-"

    @admin.display(description="last started", ordering="started_at")
    def started(self, task: Any) -> datetime | None:
        """Return when the task's last run began."""
        return task.status and _local(task.status.started_at)

    @admin.display(description="last outcome")
    def outcome(self, task: Any) -> str:
        """Return the outcome of the task's last run."""
        return _outcome(task.status) if task.status else "-"

    @admin.display(description="runs")
    def run_list(self, task: Any) -> str:
        """Return a link to the task's runs."""
        url = reverse(f"{self.admin_site.name}:apscheduler_tasklock_run_changelist")
        query = urlencode({"task_name__exact": task.task_name})
        return str(format_html('<a href="{}?{}">runs</a>', url, query))

    def response_action(self, request: Any, queryset: Any) -> Any:
        """Run an action on the chosen tasks; report names that PostgreSQL rejects."""
        try:
            return super().response_action(request, queryset)
        except (DataError, ValueError) as error:
            said = str(error).partition("\n")[0]
            self.message_user(request, f"These tasks cannot be chosen: {said}", messages.ERROR)
            return None

    @admin.action(description="Pause selected tasks", permissions=["operate"])
    def pause(self, request: Any, queryset: Any) -> None:
        """Pause tasks until a resume."""
        by = request.user.get_username()
        self._each(request, queryset, "paused", lambda locks, name: locks.pause(name, by=by))

    @admin.action(description="Resume selected tasks", permissions=["operate"])
    def resume(self, request: Any, queryset: Any) -> None:
        """Take the user's own pauses of tasks out."""
        by = request.user.get_username()
        self._each(request, queryset, "resumed", lambda locks, name: _resume(locks, name, by))

    @admin.action(description="Take all pauses of selected tasks out", permissions=["operate"])
    def resume_all(self, request: Any, queryset: Any) -> None:
        """Take all pauses of tasks out, also those of others."""
        by = request.user.get_username()
        self._each(
            request,
            queryset,
            "resumed",
            lambda locks, name: locks.resume(name, by=by, force=True),
        )

    @admin.action(description="Run selected tasks now", permissions=["operate"])
    def run_now(self, request: Any, queryset: Any) -> None:
        """Ask for a manual run of each task."""
        by = request.user.get_username()
        self._each(
            request,
            queryset,
            "asked for a run",
            lambda locks, name: locks.request_run(name, by=by),
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
            self._each(
                request,
                queryset.filter(task_name__in=tokens),
                "freed",
                lambda locks, name: locks.free(
                    name, tokens[name], force=force, run_again=run_again, by=by
                ),
            )
            return None
        try:
            with closing(task_locks()) as locks:
                statuses = _statuses(locks, list(queryset))
        except TaskLockError as error:
            self.message_user(request, str(error), messages.ERROR)
            return None
        context = {
            **self.admin_site.each_context(request),
            "title": "Free tasks",
            "opts": self.opts,
            "tasks": [(status, _local(status.started_at)) for status in statuses],
            "action_checkbox_name": ACTION_CHECKBOX_NAME,
        }
        return TemplateResponse(request, "admin/apscheduler_tasklock/task/free.html", context)

    def _each(
        self,
        request: Any,
        queryset: Any,
        done: str,
        operation: Callable[[TaskLocks, str], object],
    ) -> None:
        """Carry out an operation on each task, and report each outcome."""
        with closing(task_locks()) as locks:
            for task in queryset:
                try:
                    operation(locks, task.task_name)
                except TaskLockDatabaseError as error:
                    self.message_user(request, str(error), messages.ERROR)
                    return  # because each of the other tasks would wait as long
                except TaskLockError as error:
                    self.message_user(request, str(error), messages.ERROR)
                    continue
                self.log_change(request, task, done)
                # The name is not the first word, because the admin's pages capitalize each message.
                message = f"Task {task.task_name!r}: {done}"
                self.message_user(request, message, messages.SUCCESS)


class RunAdmin(ReadOnlyAdmin):
    """The run history, with what operators did."""

    list_display = (
        "task_name",
        "started_at",
        "ended_at",
        "outcome",
        "kind",
        "replica",
        "error_type",
        "error",
        "operator",
    )
    list_filter = ("outcome", "kind")
    search_fields = ("task_name", "error_type", "error", "by", "reason")
    ordering = ("-ended_at",)
    actions = None

    @admin.display(description="operator", ordering="by", empty_value="")
    def operator(self, run: Any) -> str | None:
        """Return who did it, until when it holds, and why; ``None`` for a run."""
        why = f": {run.reason}" if run.reason else ""
        return run.by and f"{run.by}{_until(run.until)}{why}"

    def get_object(self, _request: Any, _object_id: str, _from_field: str | None = None) -> None:
        """Return ``None``, because a name has several runs, so that no run has its own page."""


def _statuses(locks: TaskLocks, tasks: Sequence[Any]) -> list[TaskStatus]:
    """Return the statuses of tasks, without tasks that were deleted meanwhile."""
    names = {task.task_name for task in tasks}
    # The answer is filtered, because a name may contain a wildcard of a pattern.
    return [status for status in locks.tasks(*names) if status.name in names] if names else []


def _outcome(status: TaskStatus) -> str:
    if status.started_at is None:
        return "-"
    if status.outcome is None and status.finished_at is None:
        return "not over"
    if status.outcome not in (None, "ok", "error"):
        return status.outcome
    if status.failures:
        return f"{status.error_type or 'failed'} ({status.failures} in a row)"
    return "ok"


def _until(moment: datetime | None) -> str:
    local = _local(moment)
    return f" until {local:%Y-%m-%d %H:%M:%S}" if local else ""


def _pauses(status: TaskStatus) -> list[str]:
    """Return a paused task's pauses in words."""
    pauses = [
        f"paused by {pause.by}{_until(pause.until)}" + (f": {pause.reason}" if pause.reason else "")
        for pause in status.pauses
    ]
    return pauses or [f"paused{_until(status.paused_until)}"]


def _resume(locks: TaskLocks, name: str, by: str) -> None:
    """Take a user's pauses of a task out.

    :raises TaskLockStateError: others have paused the task, too, so it stays paused
    """
    if not locks.resume(name, by=by):
        left = [task for task in locks.tasks(name) if task.name == name and task.paused]
        for task in left:
            raise TaskLockStateError(f"Task {name!r} stays {'; '.join(_pauses(task))}")


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


_register([(Task, TaskAdmin), (Run, RunAdmin)])
