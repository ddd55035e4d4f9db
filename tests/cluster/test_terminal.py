from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

import pytest

from cluster.generation import Completion, TextDelta
from cluster.terminal import TextWriter, colour, legend, paint, progress, show_stream, summary
from protocol.exit_rule import FinishReason

if TYPE_CHECKING:
    from collections.abc import Generator

DELTAS = [
    TextDelta("One", (5,), (4,), None),
    TextDelta("", (6,), (1,), None),
    TextDelta(" two\n", (7, 8), (1, 2), FinishReason.LENGTH),
]
ANSWER = Completion("One two\n", (5, 6, 7, 8), (4, 1, 1, 2), FinishReason.LENGTH, 3, 4, 0)


def played() -> Generator[TextDelta, None, Completion]:
    yield from DELTAS
    return ANSWER


def test_depths_have_the_documented_colours() -> None:
    assert [colour(depth, 4) for depth in (1, 2, 3, 4)] == [46, 154, 214, 196]
    assert colour(1, 1) == 46


@pytest.mark.parametrize("max_loops", [2, 4, 8])
def test_every_depth_has_a_colour_of_its_own(max_loops: int) -> None:
    colours = [colour(depth, max_loops) for depth in range(1, max_loops + 1)]
    assert len(set(colours)) == max_loops


def test_the_legend_names_every_depth() -> None:
    assert re.sub(r"\x1b\[[0-9;]*m", "", legend(4)) == "exit depth: 1 2 3 4"
    assert legend(4).count("\x1b[38;5;") == 4


def test_text_cannot_command_the_terminal() -> None:
    shown = paint("a\x1b]0;title\x07\tb\r\x9bc\n", 1, 4)
    inner = shown.removeprefix("\x1b[38;5;46m").removesuffix("\x1b[0m")
    assert inner == "a\ufffd]0;title\ufffd\tb\ufffd\ufffdc\n"
    assert paint("", 1, 4) == ""


def test_plain_text_is_written_as_it_is() -> None:
    out = io.StringIO()
    assert show_stream(played(), TextWriter(out, 4, coloured=False)) is ANSWER
    assert out.getvalue() == "One two\n\n"


def test_coloured_text_has_the_colour_of_its_last_token() -> None:
    out = io.StringIO()
    show_stream(played(), TextWriter(out, 4, coloured=True))
    lines = out.getvalue()
    assert lines.startswith(legend(4) + "\n")
    assert lines.endswith(paint("One", 4, 4) + paint(" two\n", 2, 4) + "\n")


def test_the_summary_counts_the_outputs_after_the_first() -> None:
    assert summary(ANSWER, 0.5) == (
        "4 tokens in 0.50 s (8.0 tok/s), mean exit depth 1.33 of 4, 66.7 % of loops saved"
    )
    one = Completion("x", (5,), (4,), FinishReason.STOP, 3, 4, 0)
    assert summary(one, 0.0) == "1 tokens in 0.00 s (0.0 tok/s)"


def test_progress_is_one_line() -> None:
    out = io.StringIO()
    progress("loading", out)
    assert out.getvalue() == "loopmesh: loading\n"
