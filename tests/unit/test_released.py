"""What a release has given its users is still there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.released import API, FOLDER, RELEASES, entries, lines_of, public_names


@pytest.mark.parametrize("release", RELEASES)
def test_the_public_names_of_a_release_are_still_there(release: str) -> None:
    released = set((FOLDER / release / "public.txt").read_text().splitlines())
    assert sorted(released - set(public_names())) == []


def test_a_name_of_each_kind_is_told() -> None:
    names = public_names()
    for name in (
        "apscheduler_tasklock.upgrade",
        "apscheduler_tasklock.upgrade(revision)",
        "apscheduler_tasklock.TaskLocks.runs",
        "apscheduler_tasklock.TaskLocks.runs(outcome)",
        "apscheduler_tasklock.TaskStatus.due_at",
        "apscheduler_tasklock.TaskState.PAUSED",
        "apscheduler_tasklock.options.LockOptions.max_factor",
        "apscheduler_tasklock.flask.mount_dashboard(path)",
        "$ runs --since",
    ):
        assert name in names


def test_only_what_the_page_shows_is_public() -> None:
    shown = {entry.name: entry for entry in entries(API.read_text())}
    of_a_lock = set(lines_of(shown["apscheduler_tasklock.HeldLock"]))
    assert "apscheduler_tasklock.HeldLock.extend(by)" in of_a_lock
    assert not [line for line in of_a_lock if "note_renewal" in line or "HeldLock(" in line]


def test_the_version_to_be_released_is_there(checkout: Path) -> None:
    pyproject = (checkout / "pyproject.toml").read_text()
    [version] = re.findall(r'^version = "(.+)"$', pyproject, re.MULTILINE)
    assert version in RELEASES, "make released"
