"""Choices of one public request: made at once, forked from the first when its prompt is through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.identity import RequestKey
from protocol.plan import Fork
from protocol.plan_size import fork_size
from scheduler.request import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.config import ExitPolicyName
    from protocol.profile import ModelProfile
    from protocol.rng import RngKey
    from protocol.sampling import SamplingParams
    from scheduler.kv_manager import KVManager


def create_choices(
    key: RequestKey,
    prompt: tuple[int, ...],
    params: SamplingParams,
    model: ModelProfile,
    policy: ExitPolicyName,
    tenant: str,
) -> tuple[Request, ...]:
    """The waiting requests of one public request, choice 0 first, under `key`.

    The others have the generations that follow.
    """
    first, *others = (
        Request.create(
            RequestKey(key.request_id, key.generation + choice),
            prompt,
            params,
            model,
            policy,
            tenant,
        )
        for choice in range(params.n)
    )
    for choice, other in enumerate(others, start=1):
        other.choice, other.parent = choice, first
    first.unforked = tuple(others)
    return first, *others


class UnsentForks:
    """Placed choices whose fork was not planned yet, and what they will draw from.

    Owner: Lane. Mutated only by: hold, send and forget. Their blocks are promised to them.
    """

    def __init__(self, kv: KVManager, *, grows: bool) -> None:
        self._kv = kv
        self._grows = grows
        self._rngs: dict[RequestKey, RngKey] = {}

    def __repr__(self) -> str:
        return f"<UnsentForks {len(self._rngs)}>"

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._rngs

    def hold(self, request: Request, rng: RngKey, parent: Request) -> None:
        """A choice is placed beside its parent, which has its blocks."""
        own = self._kv.own_blocks(request.capacity_tokens, len(parent.prompt))
        self._kv.reserve(request.key, own)
        self._rngs[request.key] = rng

    def send(self, requests: Sequence[Request], room: int) -> tuple[Fork, ...]:
        """The forks of those among `requests` whose prompt is planned; moves them on.

        They take at most `room` bytes of the plan, where one always fits; the others come with the
        plans after it.
        """
        if not self._rngs:
            return ()
        forks: list[Fork] = []
        for request in requests:
            if request.can_fork:
                cost = self._kv.cost(self._num_tokens(request))
                size = fork_size(cost.planes, cost.blocks_per_plane)
                count = min(len(request.unforked), room // size)
                room -= count * size
                forks += [self._fork(other, request) for other in request.unforked[:count]]
                request.fork(count)
        return tuple(forks)

    def forget(self, key: RequestKey) -> None:
        """The choice has ended before its fork; one that is not here is ignored."""
        self._rngs.pop(key, None)

    def _num_tokens(self, request: Request) -> int:
        """Tokens that a fork's table has blocks for; growing ones are granted the others."""
        return len(request.prompt) if self._grows else request.capacity_tokens

    def _fork(self, request: Request, parent: Request) -> Fork:
        num_tokens = self._num_tokens(request)
        tables = self._kv.fork(request.key, parent.key, len(parent.prompt), num_tokens)
        return Fork(request.key, parent.key, tables, self._rngs.pop(request.key))
