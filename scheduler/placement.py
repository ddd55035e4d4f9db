"""Placement: how much work each lane owes, and which lane takes a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from scheduler.states import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.config import PlacementName
    from scheduler.kv_cost import KVCost
    from scheduler.lane import Lane
    from scheduler.request import Request


_OFF_SLOT = (State.SUSPENDING, State.SUSPENDED)


def loop_debt(request: Request) -> int:
    """Loops that a request is still expected to cost; 0 once it has ended, or while suspended.

    The expected loops of a token are the mean exit depth of its outputs so far, rounded up,
    without the first, which is always at full depth; before there is any, the maximum.

    Example: max_tokens 10, exit depths 4, 2, 3 -> ceil(5 / 2) * 7 = 21 less the loops done.

    Where depths are forced the figure is exact: those of the outputs still to come, less the loops
    done. Example: forced depths 4, 2, 3, 1 and two outputs -> 3 + 1 = 4 less the loops done.
    """
    if not request.is_live or request.state in _OFF_SLOT:
        return 0
    if request.forced_loops is not None:
        return request.forced_loops[request.output_index] - request.loops_done
    count = len(request.tokens)
    expected = -(-request.later_loops // (count - 1)) if count > 1 else request.max_loops
    remaining = expected * (request.params.max_tokens - request.output_index)
    return max(remaining - request.loops_done, 0) if count else remaining


class LoadLedger:
    """Loop debt by lane. Owner: Engine. Mutated only by: place and forget.

    A lane's figure is the sum over its requests, made when somebody asks for the first time after
    a change; so it cannot drift, and a plan costs nothing while nobody waits for a lane.
    """

    def __init__(self) -> None:
        self._loads: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<LoadLedger {self._loads}>"

    def load(self, lane: Lane) -> int:
        """Loops that the live requests of a lane are expected to cost."""
        if lane.name not in self._loads:
            self._loads[lane.name] = sum(map(loop_debt, lane.requests.values()))
        return self._loads[lane.name]

    def place(self, request: Request, lane: str) -> None:
        """A lane has taken a request, and the choices that wait for its prompt."""
        if lane in self._loads:
            self._loads[lane] += sum(map(loop_debt, request.together))

    def forget(self, lane: str) -> None:
        """A lane's requests have got on or ended, or the lane was closed: sum anew."""
        self._loads.pop(lane, None)


class PlacementPolicy(Protocol):
    """Which of several lanes takes a request. Owner: Engine, which asks once a placement."""

    def choose(self, lanes: Sequence[Lane]) -> Lane:
        """One of `lanes`, which all have room; there is at least one."""


class LoopDebt:
    """The lane that owes the fewest loops; the first of equals."""

    def __init__(self, ledger: LoadLedger) -> None:
        self._ledger = ledger

    def choose(self, lanes: Sequence[Lane]) -> Lane:
        """See PlacementPolicy."""
        return min(lanes, key=self._ledger.load)


class LeastRequests:
    """The lane with the fewest requests; the first of equals."""

    def choose(self, lanes: Sequence[Lane]) -> Lane:
        """See PlacementPolicy."""
        return min(lanes, key=lambda lane: len(lane.requests))


class RoundRobin:
    """The lane whose last turn is longest ago. Owner: Engine. Mutated only by: choose."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._turn = 0

    def choose(self, lanes: Sequence[Lane]) -> Lane:
        """See PlacementPolicy."""
        lane = min(lanes, key=lambda lane: self._turns.get(lane.name, 0))
        self._turn += 1
        self._turns[lane.name] = self._turn
        return lane


def placement_policy(name: PlacementName, ledger: LoadLedger) -> PlacementPolicy:
    """The policy of that name; only loop debt reads the ledger."""
    match name:
        case "loop_debt":
            return LoopDebt(ledger)
        case "least_requests":
            return LeastRequests()
        case "round_robin":
            return RoundRobin()


def with_affinity(
    rooms: Sequence[tuple[Lane, KVCost]], ledger: LoadLedger, window: int
) -> list[Lane]:
    """The lanes that the policy may choose from: of those that have room, the warmest.

    These are the ones that have most of the prompt cached, in tokens, among those that owe at most
    `window` loops more than the least loaded; all of them if none of these has any.

    Example: window 50, loads 0, 40, 60 and 8, 32, 64 cached tokens -> the second alone.
    """
    lanes = [lane for lane, _ in rooms]
    if not any(cost.cached for _, cost in rooms):
        return lanes
    limit = min(map(ledger.load, lanes)) + window
    cached = {
        lane.name: cost.cached * lane.profile.block_size
        for lane, cost in rooms
        if ledger.load(lane) <= limit
    }
    most = max(cached.values())
    return [lane for lane in lanes if cached.get(lane.name) == most] if most else lanes
