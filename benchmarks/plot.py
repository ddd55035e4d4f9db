"""Figures as a picture: lines where there is something to go along, else bars.

matplotlib is imported only when a picture is asked for.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.report import Figure

FORMATS = (".png", ".svg")
WIDTH, HEIGHT, BAR = 8.0, 4.0, 0.22
"""Inches of a panel, and of a bar in one."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over one horizontal axis; `goals` are drawn across, named."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    log_x: bool = False
    goals: Sequence[float] = ()


def plot_file(text: str) -> Path:
    """The argument of --plot. Raises ArgumentTypeError, before anything is measured."""
    path = Path(text)
    if path.suffix not in FORMATS:
        raise argparse.ArgumentTypeError(f"{text}: a plot ends in {' or '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "a plot needs matplotlib, which is not installed: "
            "pip install -c constraints.txt -e '.[benchmarks]'"
        )
    return path


def save_plot(
    path: Path, title: str, figures: Sequence[Figure], panels: Sequence[Panel] | None
) -> None:
    """Draw the panels, or each unit's figures as bars, one below the other."""
    # Imported late: only a picture needs it.
    from matplotlib.figure import Figure as Canvas

    ordered = sorted(figures, key=lambda figure: figure.unit)
    by_unit = [list(group) for _, group in groupby(ordered, key=lambda figure: figure.unit)]
    bars = [] if panels else by_unit
    heights = [HEIGHT] * len(panels or ()) + [1.0 + BAR * len(group) for group in bars]
    canvas = Canvas(figsize=(WIDTH, sum(heights)), layout="constrained")
    canvas.suptitle(title)
    axes = canvas.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    for axis, panel in zip(axes, panels or (), strict=bool(panels)):
        _draw_lines(axis, panel)
    for axis, group in zip(axes, bars, strict=bool(bars)):
        _draw_bars(axis, group)
    canvas.savefig(path)


def _draw_lines(axis: Any, panel: Panel) -> None:  # noqa: ANN401 (matplotlib may not be there)
    for name, points in panel.lines.items():
        axis.plot(*zip(*points, strict=True), marker="o", label=name)
    for goal in panel.goals:
        axis.axhline(goal, linestyle="--", color="grey", label=f"goal {goal:g}")
    if panel.log_x:
        ticks = sorted({x for points in panel.lines.values() for x, _ in points})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    axis.grid(visible=True, alpha=0.3)
    axis.legend()


def _draw_bars(axis: Any, figures: Sequence[Figure]) -> None:  # noqa: ANN401 (as above)
    places = range(len(figures))
    axis.barh(places, [figure.value for figure in figures])
    axis.set_yticks(places, [figure.name for figure in figures])
    axis.invert_yaxis()
    for place, figure in enumerate(figures):
        if figure.goal is not None:
            axis.vlines(figure.goal, place - 0.5, place + 0.5, color="black", linestyle="--")
    axis.set_xlabel(figures[0].unit)
