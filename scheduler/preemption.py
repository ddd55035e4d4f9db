"""Preemption by priority: whose room the first of the queue may take, and that it gets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.placement import loop_debt
from scheduler.pressure import leaving_anyway

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from protocol.identity import RequestKey
    from scheduler.lane import Lane
    from scheduler.request import Request


class Preemption:
    """Who waits for the room of whom. Owner: Engine. Mutated only by: its methods.

    A claim names the lane that will have room for a request once what leaves it has left. While
    the request waits, nobody behind it in the queue is placed on that lane.
    """

    def __init__(self) -> None:
        self._claims: dict[RequestKey, str] = {}
        self._closed: set[str] = set()
        self._is_first = True

    def __repr__(self) -> str:
        return f"<Preemption {self._claims}>"

    def begin(self) -> None:
        """The queue is offered to the lanes anew, from its front."""
        self._closed.clear()
        self._is_first = True

    def open_to(self, lanes: Iterable[Lane]) -> list[Lane]:
        """The lanes that nobody further ahead in the queue has a claim to."""
        return [lane for lane in lanes if lane.name not in self._closed]

    def make_room(self, request: Request, lanes: Sequence[Lane]) -> Lane | None:
        """A request found no room on `lanes`: have victims suspended if it is the first such.

        The lane whose requests it suspends; None when it waits for what leaves anyway, or in vain.
        """
        first, self._is_first = self._is_first, False
        claim = self._claims.get(request.key)
        if claim in self._closed:
            return None
        self.drop(request.key)
        for lane in lanes:
            if lane.name == claim and _comes_free(lane, request):
                self._claim(request, lane)
                return None
        if not first:
            return None
        found = [(lane, choose_victims(lane, request)) for lane in lanes]
        options = [(lane, victims) for lane, victims in found if victims is not None]
        if not options:
            return None
        lane, victims = min(options, key=_cost)
        self._claim(request, lane)
        for victim in victims:
            lane.suspend(victim)
        return lane if victims else None

    def drop(self, key: RequestKey) -> None:
        """The request is placed, or waits no more."""
        self._claims.pop(key, None)

    def _claim(self, request: Request, lane: Lane) -> None:
        self._claims[request.key] = lane.name
        self._closed.add(lane.name)


def choose_victims(lane: Lane, request: Request) -> list[Request] | None:
    """Whom to suspend so that `request` has room on `lane`; None if that cannot be had.

    Nobody, if what leaves the lane anyway is enough. Otherwise the fewest that are enough, of
    strictly lower priority, with snapshots that fit beside those that are there; among as many,
    the lowest priority first, then who owes the fewest loops, then who came last. None while
    the lane takes no plan: what is in flight may make it needless.

    Example: slots 2, both taken by requests of priorities 5 and 9, a request of priority 1 -> the
    one of priority 9 if its blocks are enough, else the other if its are, else both.
    """
    if _comes_free(lane, request):
        return []
    if not lane.takes_plan:
        return None
    eligible = (held for held in lane.requests.values() if _may_leave(lane, held, request))
    candidates = sorted(eligible, key=_rank)
    for count in range(1, len(candidates) + 1):
        victims = _pick(lane, request, candidates, count)
        if victims is not None:
            return _needed(lane, request, victims)
    return None


def _pick(
    lane: Lane, request: Request, candidates: Sequence[Request], count: int
) -> list[Request] | None:
    """The first `count` candidates, in their order, that can be completed to a set that is enough.

    Where snapshots are scarce it may miss a set, since it looks ahead at blocks alone.
    """
    gone = leaving_anyway(lane)
    victims: list[Request] = []
    free = lane.suspended.free_bytes
    for index, candidate in enumerate(candidates):
        size = lane.suspended.takes(candidate)
        if size > free:
            continue
        chosen = [*victims, candidate]
        rest = sorted(candidates[index + 1 :], key=lambda r: lane.kv.held(r.key), reverse=True)
        best = rest[: count - len(chosen)]
        if lane.room_without(request, [*gone, *chosen, *best]) is not None:
            victims, free = chosen, free - size
            if len(victims) == count:
                return victims
    return None


def _needed(lane: Lane, request: Request, victims: list[Request]) -> list[Request]:
    """The victims without those that the others are enough without."""
    gone = leaving_anyway(lane)
    for victim in tuple(victims):
        others = [other for other in victims if other is not victim]
        if lane.room_without(request, [*gone, *others]) is not None:
            victims = others
    return victims


def _may_leave(lane: Lane, victim: Request, request: Request) -> bool:
    return victim.params.priority > request.params.priority and lane.can_suspend(victim)


def _rank(victim: Request) -> tuple[int, int, int]:
    return -victim.params.priority, loop_debt(victim), -victim.key.generation


def _cost(option: tuple[Lane, Sequence[Request]]) -> tuple[int, list[tuple[int, int, int]]]:
    _, victims = option
    return len(victims), [_rank(victim) for victim in victims]


def _comes_free(lane: Lane, request: Request) -> bool:
    return lane.room_without(request, leaving_anyway(lane)) is not None
