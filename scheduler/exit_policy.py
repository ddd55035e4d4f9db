"""Exit policies: which loop's signal says whether a token leaves, and what it says.

A policy is immutable and keeps nothing between loops. Because it says beforehand which signal it
needs, a loop can be planned before the signals of earlier ones are read, as far as the policy
allows, and never one too many. What a signal is compared with stands in protocol/exit_rule.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from protocol.exit_rule import NEVER, exits, survival_bound

if TYPE_CHECKING:
    from protocol.config import ExitPolicyName
    from protocol.profile import ModelProfile
    from protocol.sampling import SamplingParams


STAYS = 0
"""Answer of `awaits`: another loop follows, whatever any signal says."""

LEAVES = -1
"""Answer of `awaits`: the token leaves, whatever any signal says."""


class ExitPolicy(Protocol):
    """Decides for one request. Loops are counted from 1."""

    def awaits(self, output_index: int, loops: int) -> int:
        """The loop whose signal says whether this output's token leaves after `loops` loops.

        STAYS or LEAVES when no signal is needed.
        """

    def fires(self, loops: int, survival: float) -> bool:
        """Whether the signal of a loop says that the token leaves."""


@dataclass(frozen=True, slots=True)
class Ouro:
    """Leave after the loop whose survival reaches the bound (see protocol.exit_rule.exits)."""

    min_loops: int
    max_loops: int
    bound: float

    def awaits(self, output_index: int, loops: int) -> int:
        """Example: min_loops 2, max_loops 4 -> STAYS, 2, 3, LEAVES after loops 1 to 4."""
        if loops >= self.max_loops:
            return LEAVES
        return STAYS if loops < self.min_loops or self.bound == NEVER else loops

    def fires(self, loops: int, survival: float) -> bool:
        """Example: bound 0.5, min_loops 2, survivals 0.7, 0.49 -> only the second."""
        return exits(
            loops,
            survival,
            min_loops=self.min_loops,
            max_loops=self.max_loops,
            bound=self.bound,
        )


@dataclass(frozen=True, slots=True)
class OuroDelayed:
    """Leave one loop after the one whose survival reaches the bound, or after max_loops.

    The loop that follows can be planned before its predecessor's survival is read.
    """

    rule: Ouro

    def awaits(self, output_index: int, loops: int) -> int:
        """Example: min_loops 2, max_loops 4 -> STAYS, STAYS, 2, LEAVES after loops 1 to 4."""
        if loops >= self.rule.max_loops:
            return LEAVES
        return self.rule.awaits(output_index, loops - 1)

    def fires(self, loops: int, survival: float) -> bool:
        """Example: bound 0.5, min_loops 2, survivals 0.7, 0.49 -> only the second."""
        return self.rule.fires(loops, survival)


@dataclass(frozen=True, slots=True)
class Forced:
    """Output i leaves after `depths[i]` loops; the gate is not consulted."""

    depths: tuple[int, ...]

    def awaits(self, output_index: int, loops: int) -> int:
        """Example: depths (4, 2, 3), output 1 -> STAYS after loop 1, LEAVES after loop 2."""
        return LEAVES if loops >= self.depths[output_index] else STAYS

    def fires(self, loops: int, survival: float) -> bool:
        """No signal says anything here."""
        return False


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
