"""The demo as its user sees it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from tests.conftest import eventually
from tests.support.postgres import Server

pytestmark = pytest.mark.nightly

CODE = """
import sys
from apscheduler_tasklock.demo.run import run_demo
database, replicas, seconds, *options = sys.argv[1:]
stories = {"shared_store": "--shared-store" in options, "leader": "--leader" in options}
sys.exit(run_demo(database or None, int(replicas), float(seconds), **stories))
"""
TIMEOUT = 90.0

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Demo:
    """A running demo whose standard output and error are files, or a terminal."""

    def __init__(
        self, folder: Path, database: str, seconds: float, *options: str, **streams: Any
    ) -> None:
        self.folder = folder
        self._out, self._err = folder / "out", folder / "err"
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")
        }
        environment |= {"TMPDIR": str(folder), "TERM": "xterm-256color", "PYTHONUTF8": "1"}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                # The database comes as an argument here, but must not get into the replicas'.
                [sys.executable, "-c", CODE, database, "3", str(seconds), *options],
                env=environment,
                **{"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, **streams},
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def servers(self) -> list[Path]:
        """The folders of its embedded servers."""
        return list(self.folder.glob("tasklock-postgres-*"))

    def wait(self) -> int:
        return self.process.wait(TIMEOUT)

    def wait_for(self, text: str) -> None:
        eventually(lambda: text in self.out or self.process.poll() is not None, TIMEOUT)
        assert text in self.out, self.err


@pytest.fixture
def start() -> Iterator[Callable[..., Demo]]:
    """Start demos, and end those that a failed test leaves behind."""
    # Not tmp_path: only its owner may look into it, and as root the server runs as somebody else.
    folder = Path(tempfile.mkdtemp(prefix="demo-test-"))
    folder.chmod(0o755)
    demos: list[Demo] = []

    def start(seconds: float, database: str = "", *options: str, **streams: Any) -> Demo:
        demos.append(Demo(folder, database, seconds, *options, **streams))
        return demos[-1]

    yield start
    for demo in demos:
        if demo.process.poll() is None:
            demo.process.terminate()
            demo.wait()
    shutil.rmtree(folder)


def descendants(pid: int) -> dict[int, str]:
    """Return the command lines of all processes below one, by their ids."""
    parents, commands = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
            commands[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: commands[child] for child in found - {pid} if child in commands}


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.own_server
def test_piped_it_prints_events_then_a_table_then_the_verdict(start: Callable[..., Demo]) -> None:
    demo = start(8)
    assert demo.wait() == 0, demo.out + demo.err
    lines = demo.out.splitlines()
    match = re.fullmatch(r"windows=(\d+) runs=(\d+) doubled=0 missed=0 takeovers=0", lines[-1])
    assert match is not None, lines[-1]
    assert match[1] == match[2]
    assert int(match[2]) >= 6
    assert "None of them will be killed; that takes 2 replicas and 12 seconds, or more" in lines

    event = re.compile(
        r" *\d+\.\d{3}s  replica [123]  (tick-2s|report-8s|flaky-2s) +"
        r"(granted|refused|released|raised) +\(scheduled \d\d:\d\d:\d\d\.\d\d, .+\)"
    )
    # What a claim is granted just as the demo ends is handed over without having begun.
    told = [line for line in lines if not line.endswith(", handed over)")]
    kinds = Counter(found[2] for line in told if (found := event.fullmatch(line)))
    assert kinds["granted"] == kinds["released"] == int(match[2]), demo.out
    assert kinds["refused"] > kinds["granted"]
    assert kinds["raised"] >= 1

    assert lines[-2] == f"With it, each of the {match[1]} windows ran once."
    asked = kinds["granted"] + kinds["refused"]
    assert lines[-3] == f"Without the lock, every replica would have run every job: {asked} runs."
    explained = lines[lines.index("What the last line counts:") + 1 : -4]
    assert [line.split()[0] for line in explained] == re.findall(r"(\w+)=", lines[-1])

    heading = next(n for n, line in enumerate(lines) if line.startswith("task "))
    assert lines[heading].split()[-4:] == ["takeovers", "#1", "#2", "#3"]
    rows = [line.split() for line in lines[heading + 1 : heading + 4]]
    assert [row[0] for row in rows] == ["tick-2s", "report-8s", "flaky-2s"]
    assert all(sum(map(int, row[6:])) == int(row[2]) for row in rows)
    assert sum(int(row[2]) for row in rows) == int(match[2])
    assert "Traceback" not in demo.err
    assert "\x1b" not in demo.out
    assert demo.servers == []


def test_a_replica_is_killed_in_mid_run_and_its_window_run_again(
    start: Callable[..., Demo], empty_database_url: str
) -> None:
    demo = start(12, empty_database_url)
    assert demo.wait() == 0, demo.out + demo.err
    assert demo.err == ""
    lines = demo.out.splitlines()
    summary = re.fullmatch(
        r"windows=(\d+) runs=(\d+) doubled=0 missed=0 takeovers=(\d+) run_again=(\S+)", lines[-1]
    )
    assert summary is not None, lines[-1]
    assert summary[1] == summary[2]
    assert int(summary[3]) == len(summary[4].split(","))

    story = re.compile(
        r".*s  replica (?P<dead>\d)  report-8s  killed    \(scheduled (?P<at>\S+)\.00, "
        r"token \d+, SIGKILL"
        r".*s  replica (?P<heir>\d)  report-8s  granted   \(scheduled (?P=at)\.00, "
        r"token \d+, takeover.*s  replica 4  started, a new one\n"
        r".*s  replica 4  (tick-2s|flaky-2s) .*"
        r"\nreport-8s of (?P=at): replica (?P=dead) was killed in mid-run, "
        r"replica (?P=heir) ran it again\n",
        re.DOTALL,
    )
    matched = story.match(demo.out)
    assert matched is not None, demo.out
    assert matched["dead"] != matched["heir"]
    assert f"report-8s@{matched['at']}" in summary[4]
    assert f"replica {matched['dead']}  exited" not in demo.out

    event = re.compile(r"s  (replica \d  \S+) +(?:granted|refused) +\((scheduled [^,]+), (.+)\)")
    asked = {found[:2] for found in event.findall(demo.out) if not found[2].endswith("takeover")}
    without, _, outcome = demo.out.rpartition("Without the lock, ")[2].partition("\n")
    assert without == f"every replica would have run every job: {len(asked)} runs."
    assert len(asked) > int(summary[2])
    assert f"report-8s of {matched['at']} began twice" in outcome.replace("\n", " ")


@linux_only
@pytest.mark.own_server
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_process_and_no_folder(
    start: Callable[..., Demo], number: signal.Signals
) -> None:
    demo = start(60)
    demo.wait_for(" granted ")
    children = descendants(demo.process.pid)
    assert sum("demo.replica" in command for command in children.values()) == 3
    assert len(demo.servers) == 1
    demo.process.send_signal(number)
    assert demo.wait() == 130
    assert [command for pid, command in children.items() if alive(pid)] == []
    assert demo.servers == []
    assert "Traceback" not in demo.err
    assert "windows=" not in demo.out


@linux_only
@pytest.mark.own_server
def test_a_replica_is_out_of_reach_of_the_terminals_ctrl_c(start: Callable[..., Demo]) -> None:
    demo = start(60)
    demo.wait_for(" granted ")
    replicas = [p for p, c in descendants(demo.process.pid).items() if "demo.replica" in c]
    assert len(replicas) == 3
    assert all(os.getpgid(pid) != os.getpgid(demo.process.pid) for pid in replicas)


@linux_only
def test_interrupted_while_a_new_replica_starts_it_leaves_none(
    start: Callable[..., Demo], server: Server
) -> None:
    with server.database() as url, psycopg.connect(url, autocommit=True) as connection:
        before = contents(connection)
        demo = start(14, url)
        found: dict[int, str] = {}

        def new_replica() -> bool:
            found.update(descendants(demo.process.pid))
            return any("demo.replica 4 " in command for command in found.values())

        eventually(new_replica, TIMEOUT)
        demo.process.send_signal(signal.SIGINT)
        assert demo.wait() == 130
        assert not any(alive(pid) for pid in found)
        assert "Traceback" not in demo.err
        assert contents(connection) == before


@linux_only
def test_a_killed_demo_takes_its_replicas_along(start: Callable[..., Demo], server: Server) -> None:
    with server.database() as url:
        demo = start(14, url)
        demo.wait_for(" started, a new one")
        children = descendants(demo.process.pid)
        assert len(children) == 3
        assert any("demo.replica 4 " in command for command in children.values())
        demo.process.kill()
        demo.wait()
        eventually(lambda: not any(alive(pid) for pid in children))


@linux_only
def test_a_killed_replica_is_reported(start: Callable[..., Demo], empty_database_url: str) -> None:
    demo = start(5, empty_database_url)
    demo.wait_for(" granted ")
    (victim,) = (p for p, c in descendants(demo.process.pid).items() if "demo.replica 2 " in c)
    os.kill(victim, signal.SIGKILL)
    assert demo.wait() == 1
    assert "replica 2 ended with status -9" in demo.err
    assert demo.out.splitlines()[-1].startswith("windows=")


@linux_only
def test_a_given_database_is_left_as_it_was_and_its_password_unseen(
    start: Callable[..., Demo], server: Server, empty_database_url: str
) -> None:
    name, password = f"demo_{uuid4().hex[:8]}", uuid4().hex
    role = sql.Identifier(name)
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        database = sql.Identifier(connection.info.dbname)
        connection.execute(
            sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, sql.Literal(password))
        )
        connection.execute(sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(database, role))
        info = connection.info
        url = f"postgresql://{name}:{password}@{info.host}:{info.port}/{info.dbname}"
        before = contents(connection)
        demo = start(4, url)
        demo.wait_for(" granted ")
        children = descendants(demo.process.pid)
        assert demo.wait() == 0, demo.out + demo.err
        assert contents(connection) == before
        assert len(children) == 3
        assert not any(password in command for command in children.values())
        assert password not in demo.out + demo.err
        connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
        connection.execute(sql.SQL("DROP ROLE {}").format(role))


def contents(connection: psycopg.Connection[Any]) -> list[Any]:
    """Return the names of all schemas and tables."""
    return connection.execute(
        "SELECT nspname, relname FROM pg_namespace LEFT JOIN pg_class"
        " ON pg_namespace.oid = relnamespace AND relkind = 'r'"
        " WHERE nspname !~ '^pg_(temp|toast)' ORDER BY 1, 2"
    ).fetchall()


def test_faults_in_the_ledger_are_counted_and_end_in_status_1(
    start: Callable[..., Demo], empty_database_url: str
) -> None:
    demo = start(6, empty_database_url)
    demo.wait_for(" granted ")
    schema = re.search(r"tasklock_demo_\w+", demo.out)
    assert schema is not None
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        ledger = sql.Identifier(schema[0], "ledger")
        for statement in (
            "INSERT INTO {0} SELECT * FROM {0}"
            " WHERE task = 'flaky-2s' AND ended_at IS NOT NULL LIMIT 1",
            "DELETE FROM {0} WHERE run_time = (SELECT min(run_time) FROM {0}"
            " WHERE task = 'report-8s') AND task = 'report-8s'",
        ):
            query = sql.SQL(statement).format(ledger)
            eventually(lambda query=query: connection.execute(query).rowcount == 1)
    assert demo.wait() == 1
    assert demo.out.splitlines()[-1].endswith("doubled=1 missed=1 takeovers=0")


def test_a_database_that_is_unavailable_is_named_without_a_traceback(
    start: Callable[..., Demo],
) -> None:
    demo = start(4, "postgresql://app:hidden@127.0.0.1:1/app")
    assert demo.wait() == 2
    assert demo.err.startswith("The demo cannot run: ")
    assert "127.0.0.1" in demo.err
    assert "Traceback" not in demo.err
    assert "hidden" not in demo.out + demo.err


def test_on_a_terminal_it_draws_a_lane_per_replica(
    start: Callable[..., Demo], empty_database_url: str
) -> None:
    shown, lines = on_a_terminal(start, 12, empty_database_url)
    lanes = [line for line in lines if re.match(r"(replica \d|runs \d+|refused \d+) ", line)]
    last = lanes[-12:]
    names = [line[:12].strip() for line in last[::3]]
    assert sorted(name.removesuffix(" ✗") for name in names) == [
        f"replica {n}" for n in range(1, 5)
    ]
    assert [line[12:22].strip() for line in last] == ["tick-2s", "report-8s", "flaky-2s"] * 4
    for task in range(3):
        assert any(re.search("[█▒]", line) for line in last[task::3]), last
        assert any("·" in line for line in last[task::3]), last
    assert max(map(len, lines)) <= 80
    assert re.search("flaky-2s.*\x1b\\[1;31m▒", shown), "runs that raise are red"
    assert any(re.fullmatch(" +0s .* 12s .*", line) for line in lines), "the axis fits"
    assert len(lanes) > 12 * 20, "it is redrawn as time goes by"

    (dead,) = (number for number, name in enumerate(names) if name.endswith("✗"))
    assert re.search("█✗╌+│", last[3 * dead + 1]), "the run that died, and nothing more"
    (again,) = (n for n, line in enumerate(last) if "▓▓" in line)
    assert again % 3 == 1
    assert again != 3 * dead + 1
    assert last[again].index("▓") > last[3 * dead + 1].index("✗")
    # What happens in the very moment of its start is drawn over that.
    assert any("├" in line for line in last[9:]), "the new replica's start"
    assert all(re.match(r".{22} *[├█▒▓·]", line) for line in last[9:]), last[9:]
    summary = r"windows=\d+ runs=\d+ doubled=0 missed=0 takeovers=1 run_again=report-8s@\S+"
    assert re.fullmatch(summary, [*filter(None, lines)][-1])
    assert len([line for line in lines if line.startswith("Without the lock, every ")]) == 1
    assert lines.count("What the last line counts:") == 1


def on_a_terminal(start: Callable[..., Demo], *arguments: Any) -> tuple[str, list[str]]:
    """Run a demo on a terminal; return what it wrote, and its lines without colours."""
    pytest.importorskip("rich", reason="without it, the demo prints plain text only")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    demo = start(*arguments, stdin=slave, stdout=slave)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # EIO, once the demo has ended
        while part := os.read(master, 65536):
            shown += part
    os.close(master)
    assert demo.wait() == 0, demo.err
    text = shown.decode()
    return text, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").split("\n")


SHARED = "--shared-store"


def test_with_a_shared_store_a_job_added_on_one_replica_runs_on_another_and_again_when_that_dies(
    start: Callable[..., Demo], empty_database_url: str
) -> None:
    demo = start(12, empty_database_url, SHARED)
    assert demo.wait() == 0, demo.out + demo.err
    assert demo.err == ""
    lines = demo.out.splitlines()
    story = re.compile(
        r".*s  replica 1  tick-2s    added .*"
        r"s  replica (?P<dead>[23])  (?P<job>report-[12])   killed    \(scheduled (?P<at>\S+), "
        r"token \d+, SIGKILL\).*"
        r"s  replica (?P<heir>\d)  (?P=job)   granted   \(.*takeover\).*"
        r"s  replica (?P<last>[23])  tick-2s    removed .*",
        re.DOTALL,
    )
    matched = story.match(demo.out)
    assert matched is not None, demo.out
    dead, job = matched["dead"], matched["job"]
    assert dead not in (matched["heir"], matched["last"])
    added = rf"s  replica 1  {job}   added +\(scheduled "
    assert re.search(added, demo.out[: matched.start("dead")]), "by another replica than ran it"
    runs = re.findall(r"replica (\d)  (\S+) +granted", demo.out[matched.start("last") :])
    assert runs == [], "nothing runs after it was removed"
    summary = re.fullmatch(
        r"windows=(\d+) runs=(\d+) doubled=0 missed=0 takeovers=\d run_again=(\S+)", lines[-1]
    )
    assert summary is not None, lines[-1]
    assert summary[1] == summary[2]
    assert int(summary[1]) >= 6
    assert f"{job}@" in summary[3]
    outcome = " ".join(lines[-4:-1])
    assert f"All jobs were added on replica 1: each of the {summary[1]} windows ran once" in outcome
    assert f"{job} of " in outcome
    assert "refused" not in demo.out


def test_the_shared_stores_lanes_show_where_a_job_was_added_and_where_it_ran(
    start: Callable[..., Demo], empty_database_url: str
) -> None:
    _, lines = on_a_terminal(start, 12, empty_database_url, SHARED)
    lanes = [line for line in lines if re.match(r"(replica \d|runs \d+|added \d+) ", line)][-9:]
    assert [line[12:22].strip() for line in lanes] == ["tick-2s", "report-1", "report-2"] * 3
    assert ["+" in line[22:] for line in lanes] == [True] * 3 + [False] * 6, lanes
    (dead,) = (number for number in range(3) if "✗" in lanes[3 * number][:12])
    assert dead > 0
    (again,) = (n for n, line in enumerate(lanes) if "▓▓" in line and n % 3)
    assert again // 3 != dead
    assert re.search("█✗╌+│", lanes[3 * dead + again % 3]), "the run that died"


def test_a_shared_stores_demo_that_is_too_short_for_its_story_says_so(
    start: Callable[..., Demo],
) -> None:
    demo = start(4, "", SHARED)
    assert demo.wait() == 2
    assert "12 seconds" in demo.err


LEADER = "--leader"


def test_in_leader_mode_the_leader_is_killed_and_another_replica_leads_and_runs_the_jobs(
    start: Callable[..., Demo], empty_database_url: str
) -> None:
    demo = start(12, empty_database_url, LEADER)
    assert demo.wait() == 0, demo.out + demo.err
    assert demo.err == ""
    assert "The leader will be killed in the middle of report-8s, and a new replica" in demo.out
    story = re.compile(
        r".*s  replica (?P<dead>\d)  leads\n(?P<led>.*"
        r"s  replica (?P=dead)  report-8s  killed ) .*"
        r"s  replica (?P<next>\d)  leads\n.*"
        r"s  replica (?P=next)  (tick-4s|flaky-4s) +granted .*",
        re.DOTALL,
    )
    matched = story.match(demo.out)
    assert matched is not None, demo.out
    assert matched["dead"] != matched["next"]
    assert f"replica {matched['dead']}  report-8s  granted " in matched["led"]
    summary = re.fullmatch(
        r"windows=(\d+) runs=(\d+) doubled=0 missed=0 takeovers=\d run_again=\S*report-8s@\S+",
        demo.out.splitlines()[-1],
    )
    assert summary is not None, demo.out
    assert summary[1] == summary[2]
    assert re.search(r"would have run every job: \d+ runs or more\.\n", demo.out)


def test_in_leader_mode_the_lanes_show_who_leads(
    start: Callable[..., Demo], empty_database_url: str
) -> None:
    _, lines = on_a_terminal(start, 12, empty_database_url, LEADER)
    lanes = [line for line in lines if re.match(r"(replica \d|runs \d+|refused \d+) ", line)]
    names = [line[:12].strip() for line in lanes]
    starred = {name.removesuffix(" ★") for name in names if name.endswith("★")}
    dead = {name.removesuffix(" ✗") for name in names if name.endswith("✗")}
    assert dead < starred, "the leader is killed, and another one leads"
    last = lanes[-12:]
    led = {last[place][:9] for place in range(0, 12, 3) if "─" in last[place]}
    assert led == starred
    (place,) = (place for place in range(0, 12, 3) if last[place][:9] in dead)
    assert re.search("─.*╌+│", last[place]), "it led until it was killed"
    assert "─" not in last[place].partition("╌")[2]
    assert any(line.rstrip().endswith("· refused  ─ leads") for line in lines)
