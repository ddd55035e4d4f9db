"""TickPace: how many ticks a plan has, so that outputs arrive at a steady pace."""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING, Self

from protocol.plan import PrefillBatch
from protocol.result import ResidentResult

if TYPE_CHECKING:
    from protocol.config import SchedulerSettings
    from protocol.plan import ExecutionPlan
    from protocol.profile import WorkerProfile
    from protocol.result import PlanResult

SMALLEST_PROMPT = 64
"""Tokens; the kernels of a pass over fewer take as long as over these."""


class TickPace:
    """What one worker's ticks and prompts take. Owner: Lane. Mutated only by: note.

    Outputs of resident rows come with their plan, so a plan is as long as `interval` seconds of
    what ticks took lately, and at most `max_ticks`, which it is until there is a measurement.
    Prompts run in between, in up to `passes` parts.
    """

    def __init__(self, interval: float, max_ticks: int, passes: int) -> None:
        self._interval_us = interval * 1e6
        self._max_ticks = max_ticks
        self._passes = passes
        self._tick_us = 0.0
        self._token_us = 0.0

    @classmethod
    def of(cls, settings: SchedulerSettings, profile: WorkerProfile) -> Self:
        """That of a lane."""
        max_ticks = min(settings.max_ticks, profile.max_ticks)
        return cls(settings.tick_interval, max_ticks, profile.model.max_loops)

    def __repr__(self) -> str:
        return f"<TickPace {self.ticks} ticks of {self._tick_us:.0f} us>"

    @property
    def ticks(self) -> int:
        """Ticks of the next plan. Example: 50 ms, ticks of 12 ms, at most 16 -> 4."""
        if not self._tick_us:
            return self._max_ticks
        return max(min(int(self._interval_us / self._tick_us), self._max_ticks), 1)

    def ticks_beside(self, tokens: int) -> int:
        """Ticks of a plan that has so many prompt tokens: the fewest that keep the interval.

        Each tick has an equal part of the prompts before it, and both together should take no
        longer. One until prompts were measured.

        Example: 50 ms, ticks of 10 ms, prompts of 100 ms -> parts of at most 40 ms -> 3.
        """
        left = max(self._interval_us - self._tick_us, 1.0)
        parts = ceil(tokens * self._token_us / left)
        return max(min(parts, self._passes, self._max_ticks), 1)

    @property
    def prompt_tokens(self) -> float:
        """Prompt tokens of which a pass and a tick together keep the interval; any until measured.

        A pass may take as long as a tick, so that long ticks leave prompts half of the time. Never
        fewer than SMALLEST_PROMPT, of which a pass takes hardly less.

        Example: 50 ms, ticks of 10 ms, 4 passes, a token 0.1 ms -> 40 * 4 / 0.1 = 1600.
        """
        if not self._token_us:
            return inf
        left = max(self._interval_us - self._tick_us, self._tick_us)
        return max(left * self._passes / self._token_us, SMALLEST_PROMPT)

    def note(self, plan: ExecutionPlan, result: PlanResult) -> None:
        """Half of what is remembered comes from the latest plan."""
        for step, answer, device_us in zip(
            plan.steps, result.steps, result.device_us, strict=False
        ):
            if isinstance(answer, ResidentResult) and answer.ticks and device_us:
                self._tick_us = _moved(self._tick_us, device_us / answer.ticks)
            elif isinstance(step, PrefillBatch) and device_us:
                self._token_us = _moved(self._token_us, device_us / sum(step.counts))


def _moved(before: float, latest: float) -> float:
    return (before + latest) / 2 if before else latest
