"""Each example runs as it stands, in several processes, and each window once."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode

import psycopg
import pytest
import yaml
from sqlalchemy.engine import make_url

from apscheduler_tasklock.demo.server import free_port
from tests.support.polling import eventually
from tests.support.rows import add_job

PERIOD = 2  # seconds, in the examples
RUNS = 5


def gunicorn(app: str, workers: int) -> list[str]:
    address = f"127.0.0.1:{free_port()}"
    return ["gunicorn", app, "--workers", str(workers), "--bind", address]


def uvicorn(app: str, workers: int) -> list[str]:
    return ["uvicorn", app, "--workers", str(workers), "--port", str(free_port())]


@contextmanager
def started(
    commands: list[list[str]], folder: Path, database: str | dict[str, str], log: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run Python modules or scripts of a folder, with all that they start, writing to a log.

    What is left of them at the end is killed.

    :param database: its URL, or the whole environment
    """
    environment = (
        {**os.environ, "TASKLOCK_DATABASE_URL": database} if isinstance(database, str) else database
    )
    processes = []
    with log.open("wb") as output, ExitStack() as ending:
        for command in commands:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            ending.callback(process.wait)
            ending.callback(kill_group, process.pid)
            processes.append(process)
        yield processes


def kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def runs(log: Path) -> list[datetime]:
    """Return the run times that were printed, in their order."""
    lines = [line for line in log.read_text().splitlines() if " syncs prices for " in line]
    return [datetime.fromisoformat(line.partition(" for ")[2]) for line in lines]


def replicas(connection: psycopg.Connection[Any]) -> int:
    """Count the schedulers that are connected; each names itself."""
    found = connection.execute(
        "SELECT count(DISTINCT application_name) FROM pg_stat_activity"
        " WHERE application_name LIKE 'tasklock %'"
    ).fetchone()
    assert found is not None
    return int(found[0])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("folder", "processes", "commands"),
    [
        pytest.param(".", 3, [["threads.py"]] * 3, id="threads"),
        pytest.param(".", 3, [["-m", *uvicorn("fastapi_app:app", 3)]], id="fastapi"),
        pytest.param(".", 4, [["-m", *gunicorn("flask_app:app", 4)]], id="flask"),
        pytest.param(".", 3, [["-m", *gunicorn("django_app:application", 3)]], id="django"),
        pytest.param("own_alembic", 3, [["app.py"]] * 3, id="own-alembic"),
    ],
)
def test_an_example_runs_each_window_in_one_of_its_processes(
    folder: str,
    processes: int,
    commands: list[list[str]],
    checkout: Path,
    database_url: str,
    connection: psycopg.Connection[Any],
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    with started(commands, checkout / "examples" / folder, database_url, log) as servers:
        eventually(lambda: replicas(connection) == processes)
        eventually(lambda: len(runs(log)) >= RUNS)
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(60)
    assert "Traceback" not in log.read_text(), log.read_text()
    assert connection.execute("SELECT FROM task_lock WHERE finished_at IS NULL").rowcount == 0
    ran = sorted(runs(log))
    gaps = [(later - earlier).total_seconds() for earlier, later in pairwise(ran)]
    # The processes start at different moments; the window is 0.9 periods. Run times are measured
    # on arrival in the database, which may take a loaded machine a moment.
    assert min(gaps) > 0.8 * PERIOD, log.read_text()
    assert max(gaps) < 1.2 * PERIOD, log.read_text()


@pytest.mark.nightly
def test_the_example_for_kubernetes_answers_its_probes_and_drains(
    checkout: Path,
    database_url: str,
    connection: psycopg.Connection[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, port = tmp_path / "log", free_port()
    folder = checkout / "examples" / "kubernetes"
    monkeypatch.setenv("PROBE_HOST", "127.0.0.1")
    monkeypatch.setenv("PROBE_PORT", str(port))

    def answers(path: str) -> bool:
        with suppress(OSError):  # also while it is 503
            url = f"http://127.0.0.1:{port}{path}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return bool(json.load(answer)["ok"])
        return False

    with started([["app.py"]], folder, database_url, log) as [server]:
        eventually(lambda: answers("/live") and answers("/ready"))
        eventually(lambda: "report" in log.read_text())
        server.terminate()
        assert server.wait(60) == 0, log.read_text()
    assert connection.execute("SELECT FROM task_lock WHERE finished_at IS NULL").rowcount == 0
    manifest = yaml.safe_load((folder / "deployment.yaml").read_text())
    pod = manifest["spec"]["template"]["spec"]
    [drains] = re.findall(r"^DRAIN_TIMEOUT = (\d+)$", (folder / "app.py").read_text(), re.M)
    assert pod["terminationGracePeriodSeconds"] >= int(drains) + 10
    [container] = pod["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


def dockerfile(folder: Path) -> dict[str, list[str]]:
    """Return what follows each kind of instruction of a Dockerfile, in their order."""
    found: dict[str, list[str]] = {}
    for line in (folder / "Dockerfile").read_text().splitlines():
        if line and not line.startswith("#"):
            instruction, _, rest = line.partition(" ")
            found.setdefault(instruction, []).append(rest)
    return found


def pid_of(replica: str) -> int:
    """Return the process of a replica, whose id is ``host:process:random``."""
    return int(replica.split(":")[1])


def as_here(command: list[str]) -> list[str]:
    """Return the arguments for this test's Python of a container's command."""
    if command[0] == "python":
        return command[1:]
    module = {"apscheduler-tasklock": "apscheduler_tasklock"}.get(command[0], command[0])
    return ["-m", module, *command[1:]]


def test_the_example_for_compose_can_be_read(checkout: Path) -> None:
    folder = checkout / "examples" / "compose"
    build = dockerfile(folder)
    assert set(build) == {"FROM", "COPY", "RUN", "WORKDIR", "USER", "CMD"}
    allowed = (folder / "Dockerfile.dockerignore").read_text().splitlines()
    for copy in build["COPY"]:
        for source in copy.split()[:-1]:
            assert (checkout / source).exists(), source
            assert f"!{source}" in allowed
    compose = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    db, upgrade, app = (compose[name] for name in ("db", "upgrade", "app"))
    assert upgrade["depends_on"] == {"db": {"condition": "service_healthy"}}
    assert db["healthcheck"]["test"][:2] == ["CMD", "pg_isready"]
    assert app["depends_on"] == {"upgrade": {"condition": "service_completed_successfully"}}
    assert app["deploy"]["replicas"] == 3
    # If two services built one image, they would do so at the same time, and one would fail.
    assert "build" not in app
    assert app["image"] == upgrade["image"]
    context = folder / upgrade["build"]["context"]
    assert context.resolve() == checkout
    assert (context / upgrade["build"]["dockerfile"]).resolve() == folder / "Dockerfile"
    environment = db["environment"]
    for service in (upgrade, app):
        url = make_url(service["environment"]["TASKLOCK_DATABASE_URL"])
        assert url.host == "db"
        parts = url.username, url.password, url.database
        names = "POSTGRES_USER", "POSTGRES_PASSWORD", "POSTGRES_DB"
        assert parts == tuple(environment[name] for name in names)


@pytest.mark.nightly
def test_the_commands_of_the_example_for_compose_run_without_docker(
    checkout: Path, empty_database_url: str, tmp_path: Path
) -> None:
    folder = checkout / "examples" / "compose"
    build = dockerfile(folder)
    compose = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    for copy in build["COPY"]:
        *sources, target = copy.split()
        to = tmp_path / target.strip("/")
        for source in sources:
            if (checkout / source).is_dir():
                shutil.copytree(checkout / source, to, dirs_exist_ok=True)
            else:
                to.mkdir(parents=True, exist_ok=True)
                shutil.copy(checkout / source, to)
    # The same command, but into a folder, and with the dependencies of this environment.
    [install] = build["RUN"]
    words = shlex.split(install.replace("/src", f"{tmp_path}/src"))
    assert words[:2] == ["pip", "install"]
    here = ["--target", f"{tmp_path}/installed", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, "-m", *words, *here], check=True, timeout=100)
    # What the installed package finds, it has inside, as in the image.
    path = os.pathsep.join([f"{tmp_path}/installed", str(tmp_path)])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "TASKLOCK_DATABASE_URL": empty_database_url,
    }

    def run(command: list[str]) -> str:
        return subprocess.run(
            [sys.executable, *as_here(command)],
            cwd=tmp_path,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=100,
        ).stdout

    where = "import apscheduler_tasklock; print(apscheduler_tasklock.__file__)"
    assert run(["python", "-c", where]).startswith(f"{tmp_path}/installed")
    assert "is migrated" in run(compose["upgrade"]["command"])
    log = tmp_path / "log"
    [command], [workdir] = build["CMD"], build["WORKDIR"]
    replicas = [as_here(json.loads(command))] * compose["app"]["deploy"]["replicas"]
    with started(replicas, tmp_path / workdir.strip("/"), environment, log) as processes:

        def history() -> list[dict[str, Any]]:
            runs: list[dict[str, Any]] = json.loads(run(["apscheduler-tasklock", "runs", "--json"]))
            return runs

        eventually(lambda: log.read_text().count("Task locks are on for") == len(replicas))
        eventually(lambda: len(history()) >= 3)
        alive = json.loads(run(["apscheduler-tasklock", "replicas", "--json"]))
        assert {pid_of(one["replica_id"]) for one in alive} == {one.pid for one in processes}
        for process in processes:
            process.terminate()
        assert [process.wait(60) for process in processes] == [0] * len(replicas), log.read_text()
    pids = {int(pid) for pid in re.findall(r"\(process (\d+)\) syncs prices", log.read_text())}
    assert pids <= {process.pid for process in processes}
    ran = history()
    assert {pid_of(one["replica"]) for one in ran} == pids
    times = [one["scheduled_at"] for one in ran]
    assert len(times) == len(set(times))
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.mark.nightly
def test_the_example_of_fencing_refuses_the_write_of_a_holder_that_was_overtaken(
    checkout: Path, database_url: str, connection: psycopg.Connection[Any], tmp_path: Path
) -> None:
    log = tmp_path / "log"

    def said(pattern: str) -> re.Match[str] | None:
        return re.search(rf"^process (\d+) \(token (\d+)\) {pattern}$", log.read_text(), re.M)

    def report() -> tuple[Any, ...]:
        row = connection.execute("SELECT body, token FROM report").fetchone()
        assert row is not None
        return row

    with started([["fencing.py"]] * 3, checkout / "examples", database_url, log):
        works = eventually(lambda: said("works"))
        holder = int(works[1])
        os.kill(holder, signal.SIGSTOP)
        heir, token = eventually(lambda: said("writes")).groups()
        assert int(heir) != holder
        written = report()
        assert written == (f"by process {heir} (token {token})", int(token))
        os.kill(holder, signal.SIGCONT)
        refused = eventually(lambda: said("is refused"))
        assert refused.groups() == works.groups()
        assert int(works[2]) < int(token)
        assert report()[1] >= int(token)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "database", ["given", pytest.param("embedded", marks=pytest.mark.own_server)]
)
def test_the_example_of_reminders_sends_each_once_on_whichever_worker(
    database: str,
    checkout: Path,
    database_url: str,
    connection: psycopg.Connection[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, port = tmp_path / "log", free_port()
    monkeypatch.setenv("PORT", str(port))

    def ask(path: str, method: str = "GET", **form: object) -> dict[str, Any]:
        data = urlencode(form).encode() if form else None
        url = f"http://127.0.0.1:{port}{path}"
        request = urllib.request.Request(url, data, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310  # HTTP
            found: dict[str, Any] = json.load(answer)
            return found

    workers: set[int] = set()

    def both_answer() -> bool:
        with suppress(OSError):  # while they start
            workers.add(ask("/reminders")["listed_by"])
        return len(workers) == 2

    def waiting() -> list[str]:
        return [reminder["id"] for reminder in ask("/reminders")["waiting"]]

    url = database_url if database == "given" else ""
    with started([["app.py"]], checkout / "examples" / "reminders", url, log) as [server]:
        eventually(both_answer)
        later = ask("/reminders", "POST", text="never", seconds=3600)["id"]
        soon = [ask("/reminders", "POST", text=f"tea {n}", seconds=1)["id"] for n in range(6)]
        eventually(lambda: len(ask("/reminders")["sent"]) == len(soon))
        sent = ask("/reminders")["sent"]
        assert {reminder["id"] for reminder in sent} == set(soon)
        # uvicorn replaces a worker that takes long to start.
        began = re.findall(r"Started server process \[(\d+)\]", log.read_text())
        assert {reminder["sent_by"] for reminder in sent} <= {int(pid) for pid in began}
        assert waiting() == [later]
        with pytest.raises(HTTPError, match="422"):
            ask("/reminders", "POST", text="a\0b", seconds=1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as page:
            assert "<li>tea 5, by worker" in page.read().decode()
        if database == "given":  # a row that somebody has broken hides no reminder
            add_job(connection, "broken", arguments="'null'", next_run_time="NULL")
            assert sorted(waiting()) == sorted(["broken", later])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as page:
                shown = page.read().decode()
            assert "<li>never, at " in shown
            assert "<li>unreadable: " in shown
            ask("/reminders/broken", "DELETE")
        ask(f"/reminders/{later}", "DELETE")
        assert waiting() == []
        server.terminate()
        assert server.wait(60) == 0, log.read_text()
    assert "Traceback" not in log.read_text(), log.read_text()
    lines = re.findall(r"^worker \d+ sends (\S+): ", log.read_text(), re.M)
    assert sorted(lines) == sorted(soon)
    if database == "given":
        assert connection.execute("SELECT FROM task_lock WHERE finished_at IS NULL").rowcount == 0


def test_the_example_with_its_own_history_takes_ours_in(
    checkout: Path, empty_database_url: str
) -> None:
    subprocess.run(
        [sys.executable, "-m", "alembic", "upgrade", "head"],
        cwd=checkout / "examples" / "own_alembic",
        env={**os.environ, "TASKLOCK_DATABASE_URL": empty_database_url},
        check=True,
        timeout=120,
    )
    with psycopg.connect(empty_database_url) as connection:
        names = "SELECT tablename::text FROM pg_tables WHERE schemaname = 'public' ORDER BY 1"
        tables = [name for (name,) in connection.execute(names)]
    ours = [
        "task_lock",
        "task_lock_alembic_version",
        "task_lock_job",
        "task_lock_replica",
        "task_lock_run",
    ]
    assert tables == ["alembic_version", "prices", *ours]
