"""Projects of web frameworks, in folders of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.django_project import DjangoProject, database_settings

APP = 'INSTALLED_APPS += ["apscheduler_tasklock.django"]'

MakeProject = Callable[..., DjangoProject]


@pytest.fixture
def make_project(tmp_path: Path, checkout: Path) -> MakeProject:
    """Make a Django project with the app, on the databases of these URLs."""

    def make(*urls: str, **others: str) -> DjangoProject:
        project = DjangoProject(tmp_path / "site", checkout)
        databases = {"default": database_settings(urls[0])} if urls else {}
        databases |= {alias: database_settings(url) for alias, url in others.items()}
        project.configure(f"DATABASES |= {databases!r}\n{APP}")
        return project

    return make


@pytest.fixture
def project(make_project: MakeProject, empty_database_url: str) -> DjangoProject:
    """A Django project with the app, on a database without tables."""
    return make_project(empty_database_url)
