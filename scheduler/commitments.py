"""Commitments: which requests of a lane are sure of all their blocks, and which are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.stage import Stage
from scheduler.states import State

if TYPE_CHECKING:
    from collections.abc import Collection

    from protocol.config import SchedulerSettings
    from protocol.identity import RequestKey
    from scheduler.kv_manager import KVManager
    from scheduler.request import Request
    from scheduler.suspended import SuspendedRequests


class Commitments:
    """The blocks that each request of a lane may come to hold. Owner: Lane.

    Mutated only by: add and drop. A firm request is sure of all its blocks. A loose one is sure of
    those of its prompt, and can be suspended at any time, since room for its largest snapshot is
    set aside. Any loose request could run alone beside all the firm ones: whatever the first of
    them by the queue's order still needs comes free once the others have made room.
    """

    def __init__(
        self, kv: KVManager, suspended: SuspendedRequests, settings: SchedulerSettings
    ) -> None:
        self.loose: dict[RequestKey, Request] = {}
        self._firm: dict[RequestKey, int] = {}
        self._firm_blocks = 0
        self._kv = kv
        self._suspended = suspended
        self._overcommits = settings.reservation == "overcommit"

    def __repr__(self) -> str:
        return f"<Commitments {len(self._firm)} firm, {len(self.loose)} loose>"

    def takes_loosely(self, request: Request, leaving: Collection[Request] = ()) -> bool:
        """Whether a placement would promise no more than the prompt, were `leaving` gone.

        Never for one that others fork from.

        Example: 32 blocks, firm requests of 8 and 12: one of 12 blocks may be loose if there is
        room for its snapshot, one of 16 may not.
        """
        if not self._overcommits or request.state is State.SUSPENDED or request.unforked:
            return False
        taken = sum(self._suspended.takes(gone) for gone in leaving if gone.is_live)
        if self._suspended.size_at_most(request) + taken > self._suspended.free_bytes:
            return False
        return self._blocks(request) + self._firm_without(leaving) <= self._kv.total_blocks

    def allow_firm(self, request: Request, leaving: Collection[Request] = ()) -> bool:
        """Whether each loose request could still run alone beside the firm ones and this one.

        Example: 32 blocks, a firm request of 8, loose ones of 12 and 16: 8 may be firm, 12 not.
        """
        keys = {gone.key for gone in leaving}
        staying = (other for key, other in self.loose.items() if key not in keys)
        largest = max(map(self._blocks, staying), default=0)
        # Choices share their prompt's blocks for as long as one of them holds it, counted to each.
        firm = len(request.together) * self._blocks(request) + self._firm_without(leaving)
        return not largest or firm + largest <= self._kv.total_blocks

    def wanted(self, leaving: Collection[Request] = ()) -> int:
        """Blocks that loose requests need for their next token at once, were `leaving` gone."""
        keys = {gone.key for gone in leaving}
        return sum(self.lack(request) for key, request in self.loose.items() if key not in keys)

    def lack(self, request: Request) -> int:
        """Blocks beyond table and promise that a request needs in the next plan."""
        return self._kv.lack(request.key, self.need(request))

    def need(self, request: Request) -> int:
        """Tokens that a request needs room for in the next plan, to get on at all.

        One that has left the core needs it for the output that is embedded then, unless that is
        its last, and a resident one for the output that it sampled last, or is to sample first.
        """
        if request.stage is Stage.CODA and not request.is_last_output:
            return request.position + 2
        if request.stage is Stage.RESIDENT:
            tokens = len(request.prompt) + max(request.output_index, 1)
            return min(tokens, request.capacity_tokens)
        return 0

    def add(self, request: Request, *, loose: bool) -> None:
        """A request is placed."""
        if loose:
            self.loose[request.key] = request
            self._suspended.set_aside(request)
        else:
            self._firm[request.key] = self._blocks(request)
            self._firm_blocks += self._blocks(request)

    def drop(self, key: RequestKey) -> None:
        """A request leaves; one that is not here is ignored."""
        self.loose.pop(key, None)
        self._firm_blocks -= self._firm.pop(key, 0)

    def _blocks(self, request: Request) -> int:
        return self._kv.cost(request.capacity_tokens).blocks

    def _firm_without(self, leaving: Collection[Request]) -> int:
        return self._firm_blocks - sum(self._firm.get(gone.key, 0) for gone in leaving)
