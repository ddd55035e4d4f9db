"""What every benchmark ends with: a table for people and a JSON file for programs."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value; `met` says whether it is good.

    That is below `goal`, or, where it has to be `at_least` so much, not below it.
    """

    name: str
    value: float
    unit: str
    goal: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        return None if self.goal is None else (self.value < self.goal) is not self.at_least


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    return {
        "processor": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def table(figures: Sequence[Figure]) -> str:
    """The figures as text, one a line."""
    width = max((len(figure.name) for figure in figures), default=0)
    lines = []
    for figure in figures:
        goal = ""
        if figure.goal is not None:
            sign = ">=" if figure.at_least else "<"
            goal = f"  goal {sign} {figure.goal:g}: {'met' if figure.met else 'MISSED'}"
        value = f"{figure.value:>10.{_digits(figure.unit)}f}"
        lines.append(f"{figure.name:<{width}}  {value} {figure.unit}{goal}")
    return "\n".join(lines)


def grid(figures: Sequence[Figure]) -> str:
    """Figures named "row: column" as lines and columns, then those with a goal one a line."""
    rows: dict[str, dict[str, str]] = {}
    units: dict[str, str] = {}
    for figure in figures:
        row, _, column = figure.name.rpartition(": ")
        units[column] = figure.unit
        rows.setdefault(row, {})[column] = f"{figure.value:.{_digits(figure.unit)}f}"
    cells = [["", *units], ["", *units.values()]]
    cells += [[row, *(found.get(column, "") for column in units)] for row, found in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in cells
    ]
    goals = [figure for figure in figures if figure.goal is not None]
    return "\n".join(lines) + (f"\n\n{table(goals)}" if goals else "")


def _digits(unit: str) -> int:
    """Digits behind the point that a value of this unit is shown with."""
    return {"loops": 2, "ms": 3, "TB/s": 3, "times": 2, "nats": 4}.get(unit, 1)


def write_json(path: Path, benchmark: str, figures: Sequence[Figure]) -> None:
    """Write the figures with the machine that they were measured on."""
    names = ("name", "value", "unit", "goal", "met")
    results = [{name: getattr(figure, name) for name in names} for figure in figures]
    report = {"benchmark": benchmark, "machine": machine(), "results": results}
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def progress(message: str) -> None:
    """One line on standard error, so that the table on standard output stays clean."""
    print(message, file=sys.stderr, flush=True)
