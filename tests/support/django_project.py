"""A Django project in a folder, whose `manage.py` runs in its own processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from tests.support.polling import eventually

# The first lines of a script in the project.
_SET_UP = """
import json, os, sys
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
import django
django.setup()
def answer(value):
    print("answer:", json.dumps(value, default=str))
"""

# Sends requests to the project's pages as a user.
_BROWSE = """
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.contrib.messages import get_messages
from django.test import Client

user, permissions, requests = json.loads(sys.argv[1])
account, _ = get_user_model().objects.get_or_create(
    username=user, is_staff=True, is_superuser=permissions is None
)
account.user_permissions.set(Permission.objects.filter(codename__in=permissions or ()))
client = Client(HTTP_HOST="localhost")
client.force_login(account)
pages = []
for method, url, data in requests:
    page = getattr(client, method)(url, data)
    told = [(message.level_tag, str(message)) for message in get_messages(page.wsgi_request)]
    if page.status_code == 302:
        page = client.get(page.url)
    pages.append([page.status_code, page.content.decode(), told])
answer(pages)
"""


def database_settings(url: str, **options: Any) -> dict[str, Any]:
    """Return a database's URL as an entry of ``settings.DATABASES``."""
    parts = conninfo_to_dict(url)
    names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host"}
    entry = {name: str(parts.pop(part, None) or "") for name, part in names.items()}
    port = str(parts.pop("port", None) or "")
    return {
        "ENGINE": "django.db.backends.postgresql",
        **entry,
        "PORT": port,
        "OPTIONS": {**parts, **options},
    }


class DjangoProject:
    """A project of ``startproject``, whose package is ``project``.

    :param folder: the folder in which it is made
    """

    def __init__(self, folder: Path, checkout: Path) -> None:
        self.folder = folder
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in ("DJANGO_SETTINGS_MODULE", "TASKLOCK_DATABASE_URL")
        }
        self._environment = {**inherited, "PYTHONPATH": str(checkout), "PYTHONUNBUFFERED": "1"}
        folder.mkdir()
        self.python("-m", "django", "startproject", "project", ".")

    def write(self, path: str, text: str) -> None:
        """Write a file of the project; its folder becomes a package."""
        file = self.folder / path
        file.parent.mkdir(exist_ok=True)
        if file.parent != self.folder:
            (file.parent / "__init__.py").touch()
        file.write_text(text)

    def configure(self, text: str) -> None:
        """Add to the project's settings."""
        with (self.folder / "project" / "settings.py").open("a") as settings:
            settings.write(f"\n{text}\n")

    def finished(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the project, and return the finished process."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def python(self, *arguments: str) -> str:
        """Run Python in the project, and return its output, or fail with it."""
        finished = self.finished(*arguments)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout + finished.stderr

    def manage(self, *arguments: str) -> str:
        """Run a command of ``manage.py``, and return its output, or fail with it."""
        return self.python("manage.py", *arguments)

    def refused(self, *arguments: str) -> str:
        """Run a command of ``manage.py`` that fails, and return the last line of its error."""
        finished = self.finished("manage.py", *arguments)
        assert finished.returncode == 1, finished.stdout + finished.stderr
        return finished.stderr.strip().splitlines()[-1]

    def ask(self, code: str, *arguments: Any) -> Any:
        """Run code in the project, and return the value that it passes to ``answer``."""
        given = [json.dumps(argument) for argument in arguments]
        printed = self.python("-W", "error", "-c", _SET_UP + code, *given)
        [found] = re.findall(r"^answer: (.*)$", printed, re.M)
        return json.loads(found)

    def browse(
        self,
        *requests: tuple[str, str, dict[str, Any]],
        user: str = "alice",
        permissions: Sequence[str] | None = None,
    ) -> list[tuple[int, str, list[list[str]]]]:
        """Send requests to the project's pages as a user.

        :param permissions: the code names of the user's permissions; ``None``: all
        :return: for each page its status, its text, and its messages with their levels
        """
        pages: list[tuple[int, str, list[list[str]]]] = self.ask(
            _BROWSE, [user, permissions, requests]
        )
        return pages

    @contextmanager
    def started(self, *arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run Python in the project with a log; kill its processes at the end."""
        with log.open("wb") as output, ExitStack() as ending:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=self.folder,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            ending.callback(process.wait)
            ending.callback(_kill_group, process.pid)
            yield process

    @contextmanager
    def scheduler(self, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run ``runscheduler``, and wait until its scheduler runs."""
        with self.started("manage.py", "runscheduler", log=log) as process:
            eventually(lambda: " runs. " in log.read_text() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            yield process


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
