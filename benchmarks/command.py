"""The command line that every benchmark has: its options, and what it ends with."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.plot import plot_file, save_plot
from benchmarks.report import write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.plot import Panel
    from benchmarks.report import Figure


def command_line(
    name: str, description: str | None, *, device: bool = False, quick: bool = False
) -> argparse.ArgumentParser:
    """A parser with --json and --plot, and with --device and --quick where there is a use."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument(
        "--plot", type=plot_file, metavar="FILE", help="draw them as well: FILE.png or FILE.svg"
    )
    if device:
        parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default)")
    if quick:
        parser.add_argument(
            "--quick", action="store_true", help="little of it, to see that it runs"
        )
    return parser


def positive(text: str) -> int:
    """A whole number of at least 1, as the type of an option."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return number


def finish(
    name: str,
    figures: Sequence[Figure],
    text: str,
    arguments: argparse.Namespace,
    panels: Sequence[Panel] | None = None,
) -> None:
    """Print `text`, and write the JSON and the plot that were asked for.

    The plot has `panels`, or a bar a figure without any.
    """
    print(text)
    if arguments.json is not None:
        write_json(arguments.json, name, figures)
    if arguments.plot is not None:
        save_plot(arguments.plot, name, figures, panels)
