"""The cells of Django's admin are functions of what is read of a row: they need no database."""

from __future__ import annotations

import re
from pathlib import Path

from tests.frameworks.conftest import APP
from tests.support.django_project import DjangoProject

# Passes the columns of the lists to `answer`, for each row that tests of words begin with.
CELLS = """
from types import SimpleNamespace
from django.contrib import admin
from django.db.migrations.loader import MigrationLoader
from apscheduler_tasklock.django.models import Job, Replica, Run, Task
from tests.support.rows import (
    NOW, READ, action_read, miss_read, replica_status, run_read, seconds, task_status
)
from apscheduler_tasklock._words.tasks import as_listed
from apscheduler_tasklock.status import RunningRun

def cells_of(model, row, columns):
    shown = admin.site._registry[model]  # get_model_admin is of Django 5.0
    return {name: str(getattr(shown, name)(row)) for name in columns}

def task(usual=None, **columns):
    status = task_status("sync", **columns)
    listed = as_listed(status, NOW)
    row = SimpleNamespace(task_name="sync", status=status, listed=listed, usual=usual)
    return cells_of(Task, row, ["state", "schedule", "last_run", "outcome_and_runs", "due"])

def run(entry):
    row = SimpleNamespace(task_name=entry.task, **vars(entry))
    return cells_of(Run, row, ["task", "started", "took", "details"])

def replica(**columns):
    status = replica_status("one", **columns)
    row = SimpleNamespace(**vars(status), status=status)
    return cells_of(Replica, row, ["state", "started", "seen", "running"])

# Their fields as they are and as the migrations have them, without what they are called.
def fields_of(fields):
    made = [(name, *field.deconstruct()[1:]) for name, field in fields]
    return {name: [kind, {**options, "verbose_name": ""}] for name, kind, _, options in made}

def declared_and_migrated(model):
    models = MigrationLoader(None).project_state().models
    migrated = models["apscheduler_tasklock", model._meta.model_name]
    fields = [(field.name, field) for field in model._meta.fields]
    return [fields_of(fields), fields_of(migrated.fields.items())]

stuck = RunningRun("sync", 7, "web-1", NOW + seconds(-600), True)
moved = {"due_at": seconds(240)}
answer({
    "fields": [declared_and_migrated(model) for model in (Task, Run, Replica, Job)],
    **{kind: task(**columns) for kind, columns in READ.items()},
    "usual": task(5.0),
    "asked for": task(requested_by="ann", requested_at=NOW),
    "gone": task(gone=True),
    "stuck": task(**{**READ["too long"], "stuck": (stuck,)}),
    "not read": cells_of(Task, SimpleNamespace(task_name="sync", status=None, usual=None),
                         ["state", "schedule", "last_run", "due"]),
    "a run": run(run_read()),
    "a retry": run(run_read(outcome="error", attempt=2, retry_at=seconds(60))),
    "an error": run(run_read(outcome="error", error_type="KeyError", error="<b>",
                             traceback="File <x>")),
    "an action": run(action_read()),
    "an action on all tasks": run(action_read(task="\\x01pausesshop:")),
    "a miss": run(miss_read(run_times=3, last_scheduled_at=seconds(-60))),
    "alive": replica(tasks=("sync",), running=(RunningRun("sync", 7, "one", NOW),)),
})
"""

RUNS = '<a href="/admin/apscheduler_tasklock/run/?task_name__exact=sync">{}</a>'
OUTCOMES = {
    "ok": "ok, took 2 s",
    "usual": "ok, took 2 s (usually 5 s)",
    "running": "not over, so far 1 min",
    "dead": "died, took at most 2 s",
    "failing": "ValueError (3 in a row), took 2 s",
    "retrying": "ValueError, took 2 s",
    "new": "-",
    "cut": "cut, took 2 s",
    "handed over": "cut, took 2 s",
    "overran": "overran, took over 2 s",
    "died": "died, took at most 2 s",
    "stuck": "not over, so far 10 min",
}
STATES = {
    "ok": "ok",
    "running": "running",
    "dead": "dead",
    "paused": "paused; paused by me@here since 2026-01-31 12:00:00 until resumed (closed)",
    "failing": "failing",
    "retrying": "retrying: attempt 2 failed; its retry is due at 2026-01-31 12:02:00",
    "new": "new",
    "cut": "cut",
    "handed over": "cut",
    "overran": "failing",
    "asked for": "ok; ann asked for a run",
    "gone": "ok; no replica has it",
    "stuck": "too long; a run that has outlived its maximum lock goes on, on web-1",
    "not read": "-",
}
OTHERS = {
    ("ok", "schedule"): "every 5 min",
    ("ok", "last_run"): "2026-01-31 11:59:00 on one",
    ("ok", "due"): "2026-01-31 12:04:00",
    ("new", "last_run"): "-",
    ("stuck", "last_run"): "2026-01-31 11:50:00 on web-1",
    ("the last", "due"): "-",
    ("not read", "due"): "-",
    ("a run", "took"): "2 s",
    ("a run", "details"): "",
    ("a retry", "details"): "(attempt 2, to be retried at 2026-01-31 12:01:00)",
    ("an action", "took"): "",
    ("an action", "details"): "by ann@ops until 2026-01-31 13:00:00 (the shop is closed)",
    ("an action on all tasks", "task"): "shop:*",
    ("alive", "state"): "alive",
    ("alive", "running"): "sync since 2026-01-31 12:00:00",
}


def test_each_cell_says_what_was_read_of_its_row(tmp_path: Path, checkout: Path) -> None:
    """One test for all of them, since it starts processes that load Django."""
    project = DjangoProject(tmp_path / "site", checkout)
    project.configure(f'{APP}\nTIME_ZONE = "UTC"')
    cells = project.ask(CELLS)
    # Django itself compares no fields of tables that it does not manage.
    for declared, migrated in cells["fields"]:
        assert declared == migrated
    outcomes = {kind: cells[kind]["outcome_and_runs"] for kind in OUTCOMES}
    assert outcomes == {kind: RUNS.format(said) for kind, said in OUTCOMES.items()}
    assert {kind: cells[kind]["state"] for kind in STATES} == STATES
    assert {(kind, column): cells[kind][column] for kind, column in OTHERS} == OTHERS
    assert re.fullmatch(r"unreadable; .*\bschedule\b.*", cells["unreadable"]["state"])
    error = cells["an error"]["details"]
    assert "KeyError: &lt;b&gt;" in error
    assert "File &lt;x&gt;</pre>" in error
    missed = "3 run times from 2026-01-31 11:00:00 to 2026-01-31 11:59:00: the task was paused"
    assert missed in cells["a miss"]["details"]
