"""What the command line shows: streamed text, coloured by exit depth, and progress."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Generator

    from cluster.generation import Completion, TextDelta

# 256-colour codes from "left after one loop" (green) to "took every loop" (red).
_RAMP = (46, 82, 118, 154, 190, 226, 220, 214, 208, 202, 196)
_RESET = "\x1b[0m"

# A model may write terminal commands into its text; a terminal must not obey them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def colour(depth: int, max_loops: int) -> int:
    """The 256-colour code of an exit depth in [1, max_loops].

    Example: with 4 loops, depths 1 to 4 are entries 0, 3, 7 and 10 of the ramp's 11.
    """
    share = (depth - 1) / (max_loops - 1) if max_loops > 1 else 0.0
    return _RAMP[int(share * (len(_RAMP) - 1) + 0.5)]


def paint(text: str, depth: int, max_loops: int) -> str:
    """`text` in the colour of its exit depth, control characters made visible."""
    shown = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
    return f"\x1b[38;5;{colour(depth, max_loops)}m{shown}{_RESET}" if shown else ""


def legend(max_loops: int) -> str:
    """One line that says which colour is which exit depth."""
    depths = " ".join(paint(str(depth), depth, max_loops) for depth in range(1, max_loops + 1))
    return f"exit depth: {depths}"


class TextWriter:
    """Writes one answer as it grows. Owner: the command. Mutated only by: its methods.

    Plain text unless `coloured`; a piece of text has the colour of the last token in it.
    """

    def __init__(self, out: TextIO, max_loops: int, *, coloured: bool) -> None:
        self._out = out
        self._max_loops = max_loops
        self._coloured = coloured
        self._depth = 1

    def open(self) -> None:
        """Write what comes before the text: the legend, in colour."""
        if self._coloured:
            self._write(legend(self._max_loops) + "\n")

    def head(self, line: str) -> None:
        """Write a line above one of several texts."""
        self._write(line + "\n")

    def write(self, delta: TextDelta) -> None:
        """Write the next piece of text."""
        self._depth = delta.exit_depths[-1] if delta.exit_depths else self._depth
        if self._coloured:
            self._write(paint(delta.text, self._depth, self._max_loops))
        else:
            self._write(delta.text)

    def close(self) -> None:
        """End the last line."""
        self._write("\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def show_stream(stream: Generator[TextDelta, None, Completion], writer: TextWriter) -> Completion:
    """Write every piece of a streamed answer; the finished answer."""
    writer.open()
    while True:
        try:
            writer.write(next(stream))
        except StopIteration as end:
            writer.close()
            answer: Completion = end.value
            return answer


def show_choices(stream: Generator[TextDelta, None, Completion], writer: TextWriter) -> Completion:
    """Write the choices of an answer one after the other, once all have ended."""
    pieces: list[TextDelta] = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            answer: Completion = end.value
            break
    writer.open()
    for choice in answer.choices:
        writer.head(f"[choice {choice.choice}]")
        for piece in pieces:
            if piece.choice == choice.choice:
                writer.write(piece)
        writer.close()
    return answer


def summary(completion: Completion, seconds: float) -> str:
    """One line: tokens, mean exit depth, loops saved and speed, of all choices together.

    Example: "32 tokens in 0.50 s (64.0 tok/s), mean exit depth 2.50 of 4, 37.5 % of loops saved".
    """
    choices = completion.choices
    count = sum(len(choice.token_ids) for choice in choices)
    speed = count / seconds if seconds > 0 else 0.0
    line = f"{count} tokens in {seconds:.2f} s ({speed:.1f} tok/s)"
    later = [depth for choice in choices for depth in choice.exit_depths[1:]]
    if not later:
        return line
    saved = sum(choice.loops_saved for choice in choices)
    share = 100 * saved / sum(choice.loops_possible for choice in choices)
    return (
        f"{line}, mean exit depth {sum(later) / len(later):.2f} of {completion.max_loops}, "
        f"{share:.1f} % of loops saved"
    )


def progress(message: str, out: TextIO) -> None:
    """One line that says what happens now; `out` is standard error."""
    out.write(f"loopmesh: {message}\n")
    out.flush()
