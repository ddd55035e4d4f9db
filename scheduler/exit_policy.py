"""Exit policies: after which loop a token leaves, told from what the loop returned.

A policy is immutable and keeps nothing between loops; the one thing that a request remembers is
that it leaves after the next loop. What a loop is compared with stands in protocol/exit_rule.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from protocol.exit_rule import exits, survival_bound

if TYPE_CHECKING:
    from protocol.config import ExitPolicyName
    from protocol.profile import ModelProfile
    from protocol.sampling import SamplingParams


class Exit(Enum):
    """What becomes of a token after a loop: it goes on, leaves after the next one, or leaves."""

    STAY = "stay"
    NEXT = "next"
    NOW = "now"


# Looked up once: every loop of every row asks.
_STAY, _NOW = Exit.STAY, Exit.NOW


class ExitPolicy(Protocol):
    """Decides for one request."""

    def decide(self, output_index: int, loops: int, survival: float) -> Exit:
        """After `loops` loops (1-based) of the token that gives this output, with this survival."""


@dataclass(frozen=True, slots=True)
class Ouro:
    """Leave after the loop whose survival reaches the bound (see protocol.exit_rule.exits)."""

    min_loops: int
    max_loops: int
    bound: float

    def decide(self, output_index: int, loops: int, survival: float) -> Exit:
        """Example: bound 0.5, min_loops 2, survivals 0.7, 0.49 -> STAY, NOW."""
        leaves = exits(
            loops,
            survival,
            min_loops=self.min_loops,
            max_loops=self.max_loops,
            bound=self.bound,
        )
        return _NOW if leaves else _STAY


@dataclass(frozen=True, slots=True)
class OuroDelayed:
    """Leave one loop after the one whose survival reaches the bound, or after max_loops.

    The loop that follows can be submitted before its predecessor's survival is read.
    """

    rule: Ouro

    def decide(self, output_index: int, loops: int, survival: float) -> Exit:
        """Example: bound 0.5, min_loops 2, survivals 0.7, 0.49 -> STAY, NEXT."""
        if loops >= self.rule.max_loops:
            return Exit.NOW
        crosses = self.rule.decide(output_index, loops, survival) is Exit.NOW
        return Exit.NEXT if crosses else Exit.STAY


@dataclass(frozen=True, slots=True)
class Forced:
    """Output i leaves after `depths[i]` loops; the gate is not consulted."""

    depths: tuple[int, ...]

    def decide(self, output_index: int, loops: int, survival: float) -> Exit:
        """Example: depths (4, 2, 3), output 1 -> STAY after loop 1, NOW after loop 2."""
        return Exit.NOW if loops >= self.depths[output_index] else Exit.STAY


def exit_policy(params: SamplingParams, model: ModelProfile, name: ExitPolicyName) -> ExitPolicy:
    """The policy of a request, with the model's defaults where `params` leaves them."""
    if params.forced_depths is not None:
        return Forced(params.forced_depths)
    threshold = params.exit_threshold
    rule = Ouro(
        min_loops=params.min_loops,
        max_loops=model.max_loops if params.max_loops is None else params.max_loops,
        bound=survival_bound(model.exit_threshold if threshold is None else threshold),
    )
    return OuroDelayed(rule) if name == "ouro_delayed" else rule
