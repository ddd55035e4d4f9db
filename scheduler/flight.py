"""PlansInFlight: what one lane's worker was sent and has not answered, oldest first."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from protocol.resident import ResidentBatch

if TYPE_CHECKING:
    from protocol.identity import RequestKey
    from protocol.plan import ExecutionPlan
    from protocol.result import PlanResult


class PlansInFlight:
    """Owner: Lane. Mutated only by: add and take."""

    def __init__(self) -> None:
        self._plans: deque[tuple[ExecutionPlan, float]] = deque()

    def __len__(self) -> int:
        return len(self._plans)

    def __repr__(self) -> str:
        return f"{len(self._plans)} in flight" if self._plans else "idle"

    @property
    def since(self) -> float | None:
        """When the oldest was made."""
        return self._plans[0][1] if self._plans else None

    @property
    def are_ticking(self) -> bool:
        """Whether one of them has ticks that may end early for a plan behind them."""
        steps = (step for plan, _ in self._plans for step in plan.steps)
        return any(isinstance(step, ResidentBatch) and step.max_ticks > 1 for step in steps)

    def releases(self, key: RequestKey) -> bool:
        """Whether a request's release is on its way."""
        return any(key in plan.releases for plan, _ in self._plans)

    def suspends(self, key: RequestKey) -> bool:
        """Whether a request's suspend is on its way."""
        return any(key in plan.suspends for plan, _ in self._plans)

    def add(self, plan: ExecutionPlan, now: float) -> None:
        """A plan is sent."""
        self._plans.append((plan, now))

    def take(self, result: PlanResult) -> ExecutionPlan | None:
        """The plan that `result` answers, no longer in flight; None unless it is the oldest."""
        plan = self._plans[0][0] if self._plans else None
        if plan is None or (result.epoch, result.seq) != (plan.epoch, plan.seq):
            return None
        self._plans.popleft()
        return plan
