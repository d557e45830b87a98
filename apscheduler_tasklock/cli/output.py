"""Writes to standard output: tables for people, columns for awk, JSON for programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from apscheduler_tasklock._lock.outcomes import outcome_named
from apscheduler_tasklock._lock.words import printable, seconds_in_words
from apscheduler_tasklock._values import cut
from apscheduler_tasklock._words.json_text import as_json
from apscheduler_tasklock._words.runs import longest_of
from apscheduler_tasklock.cli.text import (
    local,
    local_time,
    one_cell,
    plain_seconds,
    time_in_cell,
    zone_now,
)
from apscheduler_tasklock.status import Run, TaskState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

# rich's names of colours.
STATE_STYLES = {
    TaskState.OK: "green",
    TaskState.GONE: "dim",
    TaskState.NEW: "cyan",
    TaskState.RUNNING: "bold blue",
    TaskState.HOLDER_SILENT: "yellow",
    TaskState.PAUSED: "magenta",
    TaskState.LATE: "yellow",
    TaskState.CUT: "yellow",
    TaskState.MISSED: "yellow",
    TaskState.RETRYING: "yellow",
    TaskState.FAILING: "red",
    TaskState.OVERDUE: "bold red",
    TaskState.DEAD: "bold red",
    TaskState.TOO_LONG: "bold red",
    TaskState.UNREADABLE: "bold red",
}

# The columns whose texts may be broken into lines on a terminal, and their least widths.
_LONG_COLUMNS = {
    "task": 16,
    "schedule": 20,
    "holder": 20,
    "notes": 20,
    "error": 20,
    "replica": 20,
    "running": 16,
    "job": 16,
    "trigger": 16,
    "function": 20,
    "what": 12,
    "how it is": 18,
}

# The columns of times.
_TIMES = {"when", "last run", "next run", "due", "started", "seen"}

# The least width of the columns above, if the table does not fit otherwise.
_NARROW_COLUMN = 14

# Limits the share of a line that the first column takes if the table does not fit otherwise.
_NARROW_FIRST = 0.2

# Limits the characters that are shown of a cell, and of a line outside of tables.
_LONGEST_CELL, _LONGEST_LINE = 500, 4_000

# Spaces between two columns on a terminal.
_GAP = 2

_BARS = "▁▂▃▄▅▆▇█"

_LEGEND_PLAIN = "took: 1 short, 8 as the longest; end: . ok, x another outcome"
_LEGEND = "height: how long it took; ✗: it did not end well"


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    :ivar text: its text, as it came from the database; ``""`` for nothing
    :ivar style: rich's style for it
    """

    text: str
    style: str = ""


@dataclass(frozen=True)
class Table:
    """A table, for any kind of output.

    :ivar columns: the names of the columns
    :ivar rows: the cells of each row
    :ivar numbers: the columns that are aligned to the right
    :ivar dispensable: the columns that a terminal does not show while they are empty, or all 0
    :ivar dropped: the columns that a narrow terminal leaves out, in this order
    :ivar dropped_last: the columns that a terminal leaves out if it is still too narrow after long
        texts in other columns were broken into lines. All further columns are always shown.
    :ivar first_share: the share of a line that the first column may take before its texts are
        broken into lines. The share is large, because people copy the name or id in this column.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    numbers: frozenset[str] = field(default=frozenset())
    dispensable: frozenset[str] = field(default=frozenset())
    dropped: Sequence[str] = ()
    dropped_last: Sequence[str] = ()
    first_share: float = 0.45


class PlainOutput:
    """Lines for programs: columns with two spaces or more between them, and no colours."""

    def moment(self, moment: datetime | None) -> str:
        """Return a time of this machine's zone, as in ``2026-01-01T03:00:00+01:00``."""
        if moment is None:
            return ""
        return local(moment).isoformat(timespec="seconds").replace("+00:00", "Z")

    def cell(self, moment: datetime | None) -> str:
        """Return a time for a column of times."""
        return self.moment(moment)

    def seconds(self, seconds: float | None) -> str:
        """Return a duration, as in ``90s``."""
        return "" if seconds is None else plain_seconds(seconds)

    def print(self, line: str = "", style: str = "") -> None:
        """Print a line."""
        print(printable(cut(line, _LONGEST_LINE)), flush=True)

    def print_beside(self, left: str, text: str, style: str = "") -> None:
        """Print a text of a row beside what stands at the left."""
        self.print(left + text)

    def print_table(self, table: Table) -> None:
        """Print a table."""
        for line in plain_lines(table):
            print(line)
        sys.stdout.flush()

    def print_bars(self, runs: Sequence[Run]) -> None:
        """Print runs as a picture: a digit for the duration of each, and a mark for its outcome."""
        heights = "".join(str(height + 1) for height in _heights(runs))
        print(f"took  {heights}\nend   {_marks(runs, '.', 'x')}\n{_LEGEND_PLAIN}")


class TerminalOutput:
    """Tables and colours, drawn by rich."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def moment(self, moment: datetime | None) -> str:
        """Return a time of this machine's zone."""
        return "" if moment is None else local_time(moment)

    def cell(self, moment: datetime | None) -> str:
        """Return a time for a column of times, whose head has the zone."""
        return "" if moment is None else time_in_cell(moment)

    def seconds(self, seconds: float | None) -> str:
        """Return a duration in words."""
        return "" if seconds is None else seconds_in_words(seconds)

    def print(self, line: str = "", style: str = "") -> None:
        """Print a line."""
        self.console.print(_text(Cell(cut(line, _LONGEST_LINE), style)))

    def print_beside(self, left: str, text: str, style: str = "") -> None:
        """Print a text of a row beside what stands at the left.

        Its further lines begin farther to the right than any line of a command's own, so that a
        long text cannot look like these.
        """
        from rich.text import Text

        indent = " " * max(len(left), _GAP)
        told = _text(Cell(cut(text, _LONGEST_LINE), style))
        width = max(1, self.console.width - len(indent))
        for place, line in enumerate(told.wrap(self.console, width, overflow="fold")):
            before = indent if place else left
            self.console.print(Text(before, style), line, sep="", overflow="fold")

    def print_table(self, table: Table) -> None:
        """Print a table."""
        self.console.print(self.drawn(table))

    def drawn(self, table: Table) -> RichTable:
        """Return a table as rich draws it."""
        from rich import box
        from rich.table import Table as RichTable

        drawn = RichTable(
            box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True
        )
        widths = terminal_widths(table, self.console.width)
        for name, columns in widths.items():
            drawn.add_column(
                _head(name),
                justify="right" if name in table.numbers else "left",
                width=columns,
                overflow="fold",
            )
        shown = [table.columns.index(name) for name in widths]
        for row in table.rows:
            drawn.add_row(*(_text(_cell(row[index])) for index in shown))
        return drawn

    def print_bars(self, runs: Sequence[Run]) -> None:
        """Print runs as bars, whose height is the duration, with a mark below failed runs."""
        from rich.text import Text

        bars, marks = Text(), Text(_marks(runs, " ", "✗"), style=outcome_named("error").style)
        for run, height in zip(runs, _heights(runs), strict=True):
            bars.append(_BARS[height], style=outcome_named(run.outcome).style)
        self.console.print(bars)
        if marks.plain.strip():
            self.console.print(marks)
        self.console.print(_LEGEND)


Output = PlainOutput | TerminalOutput


def output() -> Output:
    """Return the output for standard output: plain, or for a terminal if rich is installed."""
    if sys.stdout is None or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return PlainOutput()
    try:
        from rich.console import Console
    except ImportError:
        return PlainOutput()
    no_color = True if os.environ.get("NO_COLOR") else None
    return TerminalOutput(Console(highlight=False, markup=False, emoji=False, no_color=no_color))


def print_json(data: Any) -> None:
    """Print data as one JSON document, in ASCII, so that no name can steer a terminal."""
    print(as_json(data, indent=2), flush=True)


def plain_lines(table: Table, widths: Sequence[int] = ()) -> list[str]:
    """Return a table's lines, the first of them with the names of its columns.

    :param widths: the least widths of the columns
    """
    widths = column_widths(table, widths)
    return [_aligned(table, line, widths) for line in _plain(table)]


def column_widths(table: Table, widths: Sequence[int] = ()) -> list[int]:
    """Return how wide a table's columns are.

    :param widths: the least widths of the columns
    """
    lines = _plain(table)
    at_least = widths or [0] * len(table.columns)
    return [
        max(least, *(len(line[index]) for line in lines)) for index, least in enumerate(at_least)
    ]


def terminal_widths(table: Table, terminal: int) -> dict[str, int]:
    """Return the columns that a terminal shows, and how wide each of them is.

    :param terminal: the number of characters in a line of the terminal
    """
    fitting = _Fitting(table, terminal)
    fitting.drop(table.dropped)
    first = table.columns[0]
    # The first column is narrowed last, because people copy from it.
    long = [name for name in _LONG_COLUMNS if name in fitting.widths and name != first]
    for name in long:
        fitting.narrow(name, _NARROW_COLUMN)
    if table.dropped_last:
        fitting.narrow(first, max(_NARROW_COLUMN, int(terminal * _NARROW_FIRST)))
    fitting.drop(table.dropped_last)
    for name in (*long, first):
        fitting.narrow(name, 1)
    fitting.widen()
    return fitting.widths


class _Fitting:
    """Fits a table into the lines of a terminal. Long texts are broken into lines, and never cut.

    :ivar widths: the width of each column that is shown
    """

    def __init__(self, table: Table, terminal: int) -> None:
        self._terminal = terminal
        self._natural = _natural_widths(table)
        first = table.columns[0]
        wanted = dict(_LONG_COLUMNS)
        share = int(terminal * table.first_share)
        wanted[first] = max(wanted.get(first, self._natural[first]), share)
        self.widths = {
            name: min(natural, wanted.get(name, natural)) for name, natural in self._natural.items()
        }

    @property
    def _left(self) -> int:
        return self._terminal - sum(self.widths.values()) - _GAP * (len(self.widths) - 1)

    def drop(self, names: Sequence[str]) -> None:
        """Leave columns out, one after the other, until the other columns fit."""
        for name in names:
            if self._left < 0:
                self.widths.pop(name, None)

    def narrow(self, name: str, at_least: int) -> None:
        """Make a column narrower, if the table does not fit."""
        if name in self.widths:
            columns = self.widths[name]
            self.widths[name] = max(min(columns, at_least), columns + min(0, self._left))

    def widen(self) -> None:
        """Give the rest of the line to the columns that are narrower than their texts."""
        for name, columns in list(self.widths.items()):
            self.widths[name] = columns + max(0, min(self._natural[name] - columns, self._left))


def _natural_widths(table: Table) -> dict[str, int]:
    """Return the columns' widths if there is room for all, without empty dispensable columns."""
    from rich.cells import cell_len

    natural = {}
    for index, name in enumerate(table.columns):
        texts = [_cell(row[index]).text for row in table.rows]
        if name not in table.dispensable or any(text not in ("", "0") for text in texts):
            natural[name] = max(cell_len(printable(text)) for text in [_head(name), *texts])
    return natural


def _head(name: str) -> str:
    """Return the head of a column on a terminal, where times have their zone in it."""
    return f"{name} ({zone_now()})" if name in _TIMES else name


def _plain(table: Table) -> list[list[str]]:
    rows = ([one_cell(_cell(cell).text) for cell in row] for row in table.rows)
    return [list(table.columns), *rows]


def _aligned(table: Table, line: Sequence[str], widths: Sequence[int]) -> str:
    padded = []
    for name, text, wanted in zip(table.columns, line, widths, strict=True):
        padding = " " * (wanted - len(text))
        padded.append(padding + text if name in table.numbers else text + padding)
    return "  ".join(padded).rstrip()


def _cell(cell: Cell | str) -> Cell:
    """Return a cell whose text is cut, because a row may have texts of any length."""
    known = Cell(cell) if isinstance(cell, str) else cell
    return Cell(cut(known.text, _LONGEST_CELL), known.style)


def _text(cell: Cell) -> Text:
    from rich.text import Text

    return Text(printable(cell.text), style=cell.style, overflow="fold")


def _heights(runs: Sequence[Run]) -> list[int]:
    """Return the height of each run's bar, from 0 to 7. The longest run has the height 7."""
    highest = longest_of(runs)
    longest = highest.took if highest is not None else 0.0
    top = len(_BARS) - 1
    return [min(top, max(0, round(run.took / longest * top))) if longest else 0 for run in runs]


def _marks(runs: Sequence[Run], ok: str, failed: str) -> str:
    return "".join(ok if run.outcome == "ok" else failed for run in runs)
