"""Pages: a screen as HTML or JSON. A page is a function of the screen, and of who looks at it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urlencode

import jinja2
from starlette.datastructures import QueryParams

from apscheduler_tasklock._lock.command_lines import library_version
from apscheduler_tasklock._lock.schedules import schedule_of, stored_trigger_in_words
from apscheduler_tasklock._words.json_text import as_json
from apscheduler_tasklock._words.lanes import entries_in_words, lane_in_words
from apscheduler_tasklock._words.replicas import last_sign_of
from apscheduler_tasklock._words.runs import (
    action_in_words,
    did_in_words,
    ending_in_words,
    error_in_words,
    miss_in_words,
    run_notes,
    when_of,
)
from apscheduler_tasklock._words.tasks import (
    notes_of,
    pause_in_words,
    pauser_in_words,
    task_took_in_words,
)
from apscheduler_tasklock.dashboard.actions import ACTIONS
from apscheduler_tasklock.dashboard.drawings import (
    CHART_HEIGHT,
    LEGEND,
    ROW,
    STRIP_HEIGHT,
    Shape,
)
from apscheduler_tasklock.dashboard.screens import SCREENS, Screen

# The pages, in the order of the navigation. The overview's address is the dashboard's own.
NAVIGATION = {
    "": "Overview",
    "tasks": "Tasks",
    "runs": "Runs",
    "timeline": "Timeline",
    "replicas": "Replicas",
    "jobs": "Jobs",
    "setup": "Set-up",
}


@dataclass(frozen=True)
class Visit:
    """Who looks at a page, and how.

    :ivar here: the page's name, as in the navigation
    :ivar query: the parameters of its address; as a text, they are as in the address
    :ivar namespace: what the names of all shown tasks begin with
    :ivar may_operate: whether the reader has the right to operate
    :ivar done: what is said of an action that was carried out; ``""`` for nothing
    :ivar is_doubtful: whether it is not known if that action was carried out
    :ivar is_framed: whether a framework draws the frame around the page
    """

    here: str
    query: QueryParams
    namespace: str
    may_operate: bool
    done: str = ""
    is_doubtful: bool = False
    is_framed: bool = False


def twin_of_screen(screen: Screen) -> str:
    """Return the JSON twin of a screen's page."""
    return as_json({**screen.data, **screen.read.twin})


def page_of_screen(screen: Screen, visit: Visit) -> str:
    """Return the HTML of a screen."""
    variables = {
        **screen.data,
        **screen.drawn,
        "screen": screen,
        "formats": screen.formats,
        "here": visit.here,
        "number": screen.data.get("page", 1),
        "query": visit.query,
        "navigation": NAVIGATION,
        "namespace": visit.namespace,
        "may_operate": visit.may_operate,
        "actions": ACTIONS,
        "done": visit.done,
        "is_doubtful": visit.is_doubtful,
        "layout": "frame.html" if visit.is_framed else "layout.html",
        "is_refreshed": visit.here in SCREENS,
        "version": library_version(),
    }
    return _templates().get_template(screen.template).render(variables)


def _changed(query: QueryParams, **changes: object) -> str:
    """Return the parameters of an address that differs from a page's in some of them.

    Another order or filter of a list begins with its first part. What was done is not said again.
    """
    kept = [
        (name, value)
        for name, value in query.multi_items()
        if name not in ("done", "page") and name not in changes
    ]
    return urlencode([*kept, *changes.items()])


def _shape_link(shape: Shape, lane: str, by: str) -> str:
    """Return the address of what a shape stands for: a run by itself, or a list."""
    first = shape.entries[0]
    task = lane if by == "task" else first.task
    if len(shape.entries) == 1 and (first.run or first.until is None or first.count == 1):
        if first.run is None:  # it is not in the history yet
            return f"task?{urlencode({'name': first.task or ''})}"
        # In whole seconds, as the fields of the list have them.
        began = math.floor(when_of(first.run).timestamp())
        return f"runs?{urlencode({'name': first.task, 'since': began, 'until': began + 1})}"
    begin = math.floor(min(entry.since for entry in shape.entries).timestamp())
    end = math.ceil(max(entry.until or entry.since for entry in shape.entries).timestamp()) + 1
    wanted: dict[str, Any] = {"name": task} if task else {}
    if by == "replica" and lane:
        wanted["replica"] = lane
    if all(entry.outcome == "missed" for entry in shape.entries):
        wanted["outcome"] = "missed"
    return f"runs?{urlencode({**wanted, 'since': begin, 'until': end})}"


@cache  # because a template is compiled when it is first used
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("apscheduler_tasklock.dashboard"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        CHART_HEIGHT=CHART_HEIGHT,
        STRIP_HEIGHT=STRIP_HEIGHT,
        schedule_of=schedule_of,
        stored_trigger_in_words=stored_trigger_in_words,
        did_in_words=did_in_words,
        action_in_words=action_in_words,
        miss_in_words=miss_in_words,
        when_of=when_of,
        error_in_words=error_in_words,
        ending_in_words=ending_in_words,
        run_notes=run_notes,
        last_sign_of=last_sign_of,
        notes_of=notes_of,
        pause_in_words=pause_in_words,
        changed=_changed,
        shape_link=_shape_link,
        entries_in_words=entries_in_words,
        lane_in_words=lane_in_words,
        LEGEND=LEGEND,
        ROW=ROW,
        pauser_in_words=pauser_in_words,
        task_took_in_words=task_took_in_words,
    )
    return environment
