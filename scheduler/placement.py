"""Placement: how much work each lane owes, and which lane takes a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.identity import RequestKey
    from scheduler.lane import Lane
    from scheduler.request import Request


def loop_debt(request: Request) -> int:
    """Loops that a request is still expected to cost; 0 once it has ended.

    The expected loops of a token are the mean exit depth of its outputs so far, rounded up,
    without the first, which is always at full depth; before there is any, the maximum.

    Example: max_tokens 10, exit depths 4, 2, 3 -> ceil(5 / 2) * 7 = 21 less the loops done.
    """
    if not request.is_live:
        return 0
    later = request.exit_depths[1:]
    expected = -(-sum(later) // len(later)) if later else request.max_loops
    remaining = expected * (request.params.max_tokens - len(request.tokens))
    return max(remaining - request.loops_done, 0) if request.tokens else remaining


class LoadLedger:
    """Loop debt by lane. Owner: Engine. Mutated only by: settle and close.

    A request's debt enters, follows its progress and leaves through `settle` alone, so a lane
    whose requests have all ended owes nothing.
    """

    def __init__(self) -> None:
        self._debts: dict[RequestKey, int] = {}
        self._loads: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<LoadLedger {self._loads}>"

    def settle(self, request: Request, lane: str) -> None:
        """Bring the figures up to what `request`, placed on `lane`, owes now."""
        debt = loop_debt(request)
        change = debt - self._debts.pop(request.key, 0)
        self._loads[lane] = self._loads.get(lane, 0) + change
        if debt:
            self._debts[request.key] = debt

    def load(self, lane: str) -> int:
        """Loops that the live requests of a lane are expected to cost."""
        return self._loads.get(lane, 0)

    def close(self, lane: str) -> None:
        """Forget a closed lane, whose requests have all ended and been settled."""
        self._loads.pop(lane, None)


def choose_lane(lanes: Iterable[Lane], num_tokens: int, ledger: LoadLedger) -> Lane | None:
    """The least loaded lane with a free slot and blocks for `num_tokens`; the first of equals."""
    candidates = (lane for lane in lanes if lane.has_room(num_tokens))
    return min(candidates, key=lambda lane: ledger.load(lane.name), default=None)
