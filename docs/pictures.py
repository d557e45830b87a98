"""Draw the pictures of the documentation: `make pictures`."""

from __future__ import annotations

import os
from contextlib import closing
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

import psycopg
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger
from PIL import Image
from psycopg import sql
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from apscheduler_tasklock import TaskLocks, upgrade
from apscheduler_tasklock._runs.task_names import canonical_schedule
from apscheduler_tasklock.cli.output import TerminalOutput
from apscheduler_tasklock.cli.status import task_table
from apscheduler_tasklock.demo.jobs import TASKS as DEMO_TASKS
from apscheduler_tasklock.demo.run import run_demo
from apscheduler_tasklock.demo.server import EmbeddedServer
from apscheduler_tasklock.demo.timeline import LiveView
from tests.night.recording import show_pictured
from tests.support.chromium import chromium
from tests.support.dashboards import DashboardProcess
from tests.support.rows import FAILING, OVERDUE, RUNNING, add_task, paused

HERE = Path(__file__).parent
STATUS_WIDTH, DEMO_WIDTH = 132, 110
DEMO_HEIGHT = 40  # lines: room for a lane of each task on each replica
DEMO_REPLICAS, DEMO_SECONDS = 3, 30
DASHBOARD_WIDTH = 1240

# The pages of the dashboard: the address, the height, and light or dark.
DASHBOARD = {
    "dashboard-overview": ("./", 900, "light"),
    "dashboard-overview-dark": ("./", 900, "dark"),
    "dashboard-task": ("task?name=sync-prices", 900, "light"),
    "dashboard-timeline": ("timeline?hours=4&by=task", 900, "light"),
}

TASKS = {
    "clean-up": (CronTrigger(hour=3), paused(reason="'migration'")),
    "daily-report": (CronTrigger(hour=6, minute=30), OVERDUE),
    "remind": (IntervalTrigger(minutes=15), RUNNING),
    "sync-prices": (IntervalTrigger(minutes=5), FAILING),
    "thumbnails": (IntervalTrigger(hours=1), {}),
}

# As rich draws a terminal, but with fonts that are there: its own would come from the network.
_SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width;
}}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""

# Readable beside a light page and a dark one.
_THEME = TerminalTheme(
    (30, 33, 39),
    (214, 219, 229),
    [
        (140, 146, 158),
        (240, 113, 120),
        (140, 204, 110),
        (229, 192, 96),
        (100, 170, 245),
        (206, 147, 230),
        (90, 200, 210),
        (214, 219, 229),
    ],
)


def main() -> None:
    """Draw pages of the dashboard, what ``status`` shows, and the timeline of a demo's run."""
    os.environ.pop("NO_COLOR", None)
    draw_dashboard()
    with open(os.devnull, "w") as nowhere:
        draw_status(nowhere)
        draw_demo(nowhere)


def draw_dashboard() -> None:
    """Draw pages of the dashboard, which show the recorded night of `tests/night`."""
    with EmbeddedServer() as server, chromium() as browser, TemporaryDirectory() as folder:
        upgrade(server.url)
        with psycopg.connect(server.url, autocommit=True) as connection:
            show_pictured(connection)
        log = Path(folder, "log")
        with DashboardProcess(log, server.url, "--operate") as dashboard:
            for name, (address, height, scheme) in DASHBOARD.items():
                page = browser.new_page(
                    base_url=dashboard.url,
                    viewport={"width": DASHBOARD_WIDTH, "height": height},
                    color_scheme=scheme,  # type: ignore[arg-type]  # one of the two
                )
                page.goto(address)
                save_png(page.screenshot(), name)
                page.close()


def save_png(drawn: bytes, name: str) -> None:
    """Write a picture with a palette, which takes a third of the room."""
    with Image.open(BytesIO(drawn)) as picture:
        few = picture.convert("RGB").quantize(
            256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
        few.save(HERE / f"{name}.png", optimize=True)


def draw_status(nowhere: TextIO) -> None:
    """Draw the tasks of :data:`TASKS`."""
    console = recording(nowhere, STATUS_WIDTH)
    with EmbeddedServer() as server, psycopg.connect(server.url, autocommit=True) as connection:
        upgrade(server.url)
        for name, (trigger, row) in TASKS.items():
            schedule = sql.Literal(canonical_schedule(trigger)).as_string(None)
            add_task(
                connection, name, **{**row, "schedule": schedule, "locked_by": "'web-1:68:4f'"}
            )
        with closing(TaskLocks(server.url)) as locks:
            shown, now = TerminalOutput(console), locks.overview().now
            shown.print_table(task_table(locks.tasks(), locks.usual_durations(), now, shown))
    save(console, "status", "apscheduler-tasklock status")


def draw_demo(nowhere: TextIO) -> None:
    """Run the demo, and draw its timeline as it stands at the end."""
    view = LiveView(
        recording(nowhere, DEMO_WIDTH, DEMO_HEIGHT), DEMO_REPLICAS, DEMO_SECONDS, DEMO_TASKS
    )
    if run_demo(None, DEMO_REPLICAS, DEMO_SECONDS, view=view):
        raise SystemExit("The demo failed, so its timeline is not drawn.")
    console = recording(nowhere, DEMO_WIDTH, DEMO_HEIGHT)
    view.print_timeline(console)
    save(console, "demo", "apscheduler-tasklock demo")


def recording(nowhere: TextIO, width: int, height: int | None = None) -> Console:
    """Return a terminal of which a picture can be made."""
    return Console(
        file=nowhere,
        record=True,
        width=width,
        height=height,
        force_terminal=True,
        color_system="truecolor",
    )


def save(console: Console, name: str, title: str) -> None:
    """Write what the console shows into a file beside this one."""
    path = HERE / f"{name}.svg"
    console.save_svg(str(path), title=title, theme=_THEME, code_format=_SVG, unique_id=name)


if __name__ == "__main__":
    main()
