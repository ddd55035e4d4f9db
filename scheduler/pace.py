"""TickPace: how many ticks a plan has, so that outputs arrive at a steady pace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.result import ResidentResult

if TYPE_CHECKING:
    from protocol.result import PlanResult


class TickPace:
    """What one worker's ticks take. Owner: Lane. Mutated only by: note.

    Outputs of resident rows come with their plan, so a plan is as long as `interval` seconds of
    what ticks took lately, and at most `max_ticks`, which it is until there is a measurement.
    """

    def __init__(self, interval: float, max_ticks: int) -> None:
        self._interval_us = interval * 1e6
        self._max_ticks = max_ticks
        self._tick_us = 0.0

    def __repr__(self) -> str:
        return f"<TickPace {self.ticks} ticks of {self._tick_us:.0f} us>"

    @property
    def ticks(self) -> int:
        """Ticks of the next plan. Example: 50 ms, ticks of 12 ms, at most 16 -> 4."""
        if not self._tick_us:
            return self._max_ticks
        return max(min(int(self._interval_us / self._tick_us), self._max_ticks), 1)

    def note(self, result: PlanResult) -> None:
        """Half of what is remembered comes from the latest plan."""
        for step, device_us in zip(result.steps, result.device_us, strict=True):
            if isinstance(step, ResidentResult) and step.ticks and device_us:
                tick_us = device_us / step.ticks
                self._tick_us = (self._tick_us + tick_us) / 2 if self._tick_us else tick_us
