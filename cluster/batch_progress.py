"""How far a batch is: a bar in a terminal, a plain line now and then in a log."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from cluster.batch_parts import Tally

BAR_INTERVAL = 0.2
BAR_WIDTH = 20
MIN_TERMINAL_WIDTH = 20


class Progress:
    """Owner: one job. Mutated only by: update and close.

    Speeds are those of this job alone; `before` is what earlier ones left. Times are of one
    monotonic clock.
    """

    def __init__(
        self, out: TextIO, total: int, before: Tally, interval: float, started: float
    ) -> None:
        self._out = out
        self._total = total
        self._before = before
        self._started = started
        self._is_bar = out.isatty()
        self._interval = BAR_INTERVAL if self._is_bar else interval
        self._told = started
        self._drawn = False

    def update(self, tally: Tally, now: float) -> None:
        """Tell how far it is, if it is time to."""
        if now - self._told < self._interval:
            return
        self._told = now
        line = progress_line(tally, self._before, self._total, now - self._started)
        if not self._is_bar:
            self._out.write(f"loopmesh: {line}\n")
        else:
            self._drawn = True
            width = max(shutil.get_terminal_size().columns - 1, MIN_TERMINAL_WIDTH)
            self._out.write(f"\r\x1b[K{f'{bar(tally.lines, self._total)} {line}'[:width]}")
        self._out.flush()

    def close(self) -> None:
        """Leave the line of the bar, if there is one."""
        if self._drawn:
            self._drawn = False
            self._out.write("\n")
            self._out.flush()


def bar(done: int, total: int) -> str:
    """Example: (1, 4) is "[#####...............]"."""
    filled = BAR_WIDTH * done // total if total else BAR_WIDTH
    return f"[{'#' * filled:.<{BAR_WIDTH}}]"


def progress_line(tally: Tally, before: Tally, total: int, seconds: float) -> str:
    """How far a job is that has run for some seconds.

    Example: "1200/2000 lines (60 %), 412 tok/s, 2.93 loops/token, 3 failed, 0:01:22 left".
    """
    lines = tally.lines - before.lines
    tokens = tally.completion_tokens - before.completion_tokens
    loops = tally.loops_run - before.loops_run
    share = 100 * tally.lines // total if total else 100
    parts = [f"{tally.lines}/{total} lines ({share} %)"]
    if seconds > 0:
        parts.append(f"{tokens / seconds:.0f} tok/s")
    if tokens:
        parts.append(f"{loops / tokens:.2f} loops/token")
    if tally.failed:
        parts.append(f"{tally.failed} failed")
    if lines and seconds > 0:
        parts.append(f"{duration(seconds / lines * (total - tally.lines))} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Example: 3725.0 is "1:02:05"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
