"""What a release has given its users is still there."""

from __future__ import annotations

import re

import pytest

from apscheduler_tasklock import TaskLockExecutor, TaskLockJobStore, TaskLocks
from apscheduler_tasklock.flask import TaskLockScheduler
from tests.distribution.release import version_in
from tests.released import API, FOLDER, RELEASES, entries, lines_of, public_names

PYPROJECT = FOLDER.parent.parent / "pyproject.toml"
# A major version may drop names.
OF_THIS_MAJOR = [
    release
    for release in RELEASES
    if release.partition(".")[0] == version_in(PYPROJECT.read_text()).partition(".")[0]
]
REQUIRED = re.compile(r"(.+)\((\w+)\)")


@pytest.mark.parametrize("release", OF_THIS_MAJOR)
def test_the_public_names_of_a_release_are_still_there(release: str) -> None:
    assert sorted(released(release) - set(public_names())) == []


@pytest.mark.parametrize("release", OF_THIS_MAJOR)
def test_what_a_release_could_call_needs_no_further_argument(release: str) -> None:
    before, now = released(release), set(public_names())
    for name in now - before:
        new = REQUIRED.fullmatch(name)
        if new is not None and new[1] in before:
            assert f"{name} may be left out" in now


def released(release: str) -> set[str]:
    return set((FOLDER / release / "public.txt").read_text().splitlines())


def test_a_name_of_each_kind_is_told() -> None:
    names = public_names()
    for name in (
        "apscheduler_tasklock.upgrade",
        "apscheduler_tasklock.EVENT_TASK_LOCK_LOST",
        "apscheduler_tasklock.upgrade(database) may be given by place",
        "apscheduler_tasklock.upgrade(revision) may be left out",
        "apscheduler_tasklock.TaskLocks.runs",
        "apscheduler_tasklock.TaskLocks.runs(outcome)",
        "apscheduler_tasklock.TaskStatus.due_at",
        "apscheduler_tasklock.TaskState.PAUSED",
        "apscheduler_tasklock.options.LockOptions.max_factor",
        "apscheduler_tasklock.flask.mount_dashboard(path)",
        "$ runs --since",
        "apscheduler_tasklock.TaskLockExecutor(claim_timeout) is 10 by default",
        "apscheduler_tasklock.TaskState.PAUSED is 'paused'",
        "apscheduler_tasklock.TaskLockSchemaError is TaskLockError",
        "apscheduler.executors tasklock",
    ):
        assert name in names


def test_only_what_the_page_shows_is_public() -> None:
    shown = {entry.name: entry for entry in entries(API.read_text())}
    of_a_lock = set(lines_of(shown["apscheduler_tasklock.HeldLock"]))
    assert "apscheduler_tasklock.HeldLock.extend(by)" in of_a_lock
    assert not [line for line in of_a_lock if "note_renewal" in line or "HeldLock(" in line]
    assert not [name for name in public_names() if "_replace_in_child" in name]


@pytest.mark.parametrize("kind", [TaskLockExecutor, TaskLockJobStore, TaskLocks, TaskLockScheduler])
def test_the_help_of_a_class_has_only_methods_that_users_or_apscheduler_call(kind: type) -> None:
    on_the_page = {
        line.rpartition(".")[2]
        for entry in entries(API.read_text())
        if entry.value is kind
        for line in lines_of(entry)
    }
    own = [each for each in kind.__mro__ if each.__module__.startswith("apscheduler_tasklock")]
    shown = {
        name
        for each in own
        for name, member in vars(each).items()
        if callable(member) and not name.startswith("_")
    }
    of_apscheduler = {name for each in kind.__mro__ if each not in own for name in vars(each)}
    assert shown - on_the_page - of_apscheduler == set()


def test_the_version_of_the_project_is_there() -> None:
    assert version_in(PYPROJECT.read_text()) in RELEASES, "make released"
