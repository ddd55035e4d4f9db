"""Pressure: who gets no row, and who is suspended, when a plan needs blocks that are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.stage import Stage
from scheduler.planner import rows_to_sample
from scheduler.states import State

if TYPE_CHECKING:
    from collections.abc import Collection

    from scheduler.lane import Lane
    from scheduler.request import Request

_LEAVING = (State.SUSPENDING, State.RELEASING)


def leaving_anyway(lane: Lane) -> list[Request]:
    """Those whose slot and blocks come back whatever is decided now."""
    return [
        request
        for request in lane.requests.values()
        if request.state in _LEAVING
        or request.output_index >= request.params.max_tokens
        or request.ends_in_flight
    ]


def left_out(lane: Lane) -> set[Request]:
    """Those that get no row in the lane's next plan for want of blocks; none if it takes no plan.

    The rows that need a block to get on at all are served in the queue's order. One that cannot be
    stands still, and loose requests behind it are suspended, the last first, until enough will come
    free; only if that is not enough is it suspended itself.

    Example: A, B and C are loose and came in this order, no block is free, and each holds 8 of
    them. B needs 4: C is suspended, and B stands still until those 8 are free. C needs 4: C is
    suspended.
    """
    idle: set[Request] = set()
    if not lane.commitments.loose or not lane.takes_plan:
        return idle
    staying = [r for r in lane.requests.values() if r.state is not State.SUSPENDING]
    rows = rows_to_sample(staying, lane.limits)
    leaving = leaving_anyway(lane) + [request for request in rows if request.is_last_output]
    rows += [request for request in staying if request.stage is Stage.RESIDENT]
    wanted = served = 0
    for request in sorted(rows, key=lane.order):
        lack = lane.commitments.lack(request)
        if not lack or request in leaving:
            continue
        wanted += lack
        if served + lack > lane.kv.unpromised_blocks:
            victims = _make_room(lane, request, wanted, leaving)
            leaving += victims
            idle.update(victims)
        # What was promised to a victim is free at once; what it holds is once it has left.
        if served + lack <= lane.kv.unpromised_blocks:
            served += lack
        else:
            idle.add(request)
    return idle


def _make_room(
    lane: Lane, request: Request, wanted: int, leaving: Collection[Request]
) -> list[Request]:
    """Have loose requests suspended until `wanted` blocks are free or will be; who they are."""
    behind = [
        other
        for other in lane.commitments.loose.values()
        if lane.order(other) > lane.order(request) and other not in leaving
    ]
    victims = [other for other in behind if lane.can_suspend(other)]
    victims.sort(key=lane.order, reverse=True)
    if len(victims) == len(behind):
        # Otherwise it waits for those behind it whose admission is on its way to the worker.
        victims.append(request)
    suspended: list[Request] = []
    for victim in victims:
        gone = [other.key for other in (*leaving, *suspended)]
        if wanted <= lane.kv.unpromised_blocks + lane.kv.freed_by(gone):
            break
        lane.suspend(victim, pressed=True)
        suspended.append(victim)
    return suspended
