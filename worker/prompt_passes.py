"""Prompts between ticks: the passes of a plan's chunks, a few before each of its first ticks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class PromptPasses:
    """The prompts of one plan. Owner: one ModelRunner step. Mutated only by: it, and the ticks.

    Example: 4 passes over 3 ticks: two before the first, one before the second and the third.
    """

    def __init__(
        self,
        passes: Iterator[None],
        count: int,
        ticks: int,
        run: Callable[[Callable[[], None]], bool],
    ) -> None:
        """`passes` does one each time it is asked, `count` in all; `run` may not raise.

        It runs one of them and says whether that went well; else the others are left out.
        """
        self._passes = passes
        self._left = count
        self._ticks = ticks
        self._run = run
        self.failed = False

    def before_tick(self, tick: int) -> None:
        """Run what is due before a tick, counted from 0."""
        ticks = self._ticks - tick
        if ticks > 0:
            self._advance(-(-self._left // ticks))

    def rest(self) -> bool:
        """Run what is left, if ticks have ended early; whether there was anything."""
        left = self._left > 0
        self._advance(self._left)
        return left

    def _advance(self, count: int) -> None:
        for _ in range(count):
            if self._left:
                self._left -= 1
                if not self._run(self._next):
                    self.failed = True
                    self._left = 0

    def _next(self) -> None:
        next(self._passes, None)


def no_passes() -> PromptPasses:
    """Those of a plan without prompts, or whose prompts came before its ticks."""
    return PromptPasses(iter(()), 0, 1, lambda work: True)
