"""Plots are drawn when asked for, and what they need is told before anything is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from benchmarks.command import command_line
from benchmarks.plot import Panel, save_plot
from benchmarks.report import Figure, grid

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
FIGURES = [
    Figure("1 at once: output", 10.0, "tok/s", 20.0, at_least=True),
    Figure("1 at once: a tick", 1.5, "ms"),
    Figure("8 at once: output", 30.0, "tok/s", 20.0, at_least=True),
]
PANELS = [Panel("output", "at once", "tok/s", {"all": [(1, 10), (8, 30)]}, log_x=True, goals=(20,))]


def test_rows_and_columns_of_a_grid() -> None:
    assert grid(FIGURES).splitlines() == [
        "           output  a tick",
        "            tok/s      ms",
        "1 at once    10.0   1.500",
        "8 at once    30.0",
        "",
        "1 at once: output        10.0 tok/s  goal >= 20: MISSED",
        "8 at once: output        30.0 tok/s  goal >= 20: met",
    ]
    assert grid(FIGURES[1:2]).count("\n") == 2


@pytest.mark.parametrize("panels", [None, PANELS])
def test_a_plot_is_drawn(tmp_path: Path, panels: Sequence[Panel] | None) -> None:
    pytest.importorskip("matplotlib")
    picture, drawing = tmp_path / "all.png", tmp_path / "all.svg"
    save_plot(picture, "speed", FIGURES, panels)
    assert picture.read_bytes().startswith(b"\x89PNG")
    save_plot(drawing, "speed", FIGURES, panels)
    text = ElementTree.parse(drawing).getroot()
    comments = drawing.read_text(encoding="utf-8")
    assert text.tag.endswith("svg")
    assert "speed" in comments
    assert "tok/s" in comments
    assert ("goal 20" in comments) is (panels is not None)
    assert ("8 at once: output" in comments) is (panels is None)


def test_a_plot_without_matplotlib_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        command_line("decode", None).parse_args(["--plot", "a.png"])
    assert "'.[benchmarks]'" in capsys.readouterr().err


def test_a_plot_of_another_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line("decode", None).parse_args(["--plot", "a.gif"])
    assert "a.gif: a plot ends in .png or .svg" in capsys.readouterr().err


def test_nobody_who_wants_no_plot_loads_matplotlib() -> None:
    code = (
        "import sys, benchmarks.throughput, benchmarks.scheduler;"
        "print({'matplotlib', 'transformers'} & set(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.strip() == "set()"
