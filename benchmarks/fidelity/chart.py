"""The figures as a chart."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.fidelity.report import COUNTS, Results, per_thousand
from benchmarks.fidelity.rules import RULES

# Grey for other rules, bright colours for this library.
COLOURS = ("#9aa5b1", "#69757f", "#3e4c59", "#e8833a", "#1f7a4d")
PANELS = ("doubled", "missed", "lost_with_holder", "overlapping")


def draw(results: Results, path: Path) -> None:
    """Draw a bar for each rule in each trace, and write the same file for the same figures."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fidelity", "font.size": 9}):
        figure = Figure(figsize=(11, 9), layout="constrained")
        panels = figure.subplots(1, len(PANELS), sharey=True)
        for panel, what in zip(panels, PANELS, strict=True):
            _draw_panel(panel, results, what)
        panels[0].set_yticks(range(len(results)), list(results))
        panels[0].set_ylim(len(results) - 0.5, -0.5)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, metadata={"Date": None})


def _draw_panel(panel: mpl.axes.Axes, results: Results, what: str) -> None:
    height = 0.8 / len(RULES)
    for number, (rule, colour) in enumerate(zip(RULES, COLOURS, strict=True)):
        counts = [per_thousand(figures[rule.name], what) for figures in results.values()]
        middles = [row + (number - (len(RULES) - 1) / 2) * height for row in range(len(results))]
        bars = panel.barh(middles, counts, height, label=rule.name, color=colour)
        texts = [f"{count:.3g}" for count in counts]
        panel.bar_label(bars, texts, padding=2, fontsize=6.5, color=colour)
    panel.set_title(f"{COUNTS[what]}\nper 1,000 windows")
    panel.spines[["top", "right"]].set_visible(False)
    panel.margins(x=0.15)
