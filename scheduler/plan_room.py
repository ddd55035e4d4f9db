"""PlanRoom: what a plan may carry, so that its frame stays within the limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.errors import ConfigError
from protocol.executor import MAX_PLANS_IN_FLIGHT
from protocol.plan_size import PLAN_LIMIT, admission_size, fork_size, opening_size, rows_size
from protocol.resident import MAX_ENDING_IDS
from protocol.sampling import MAX_BIASED_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from protocol.plan import Admission, Fork, Resume
    from protocol.profile import WorkerProfile
    from scheduler.planner import StepLimits
    from scheduler.request import Request


@dataclass(frozen=True, slots=True)
class PlanRoom:
    """Bytes that the admissions, resumes and forks of one plan may take together.

    That is what is left of the limit once every slot may have a row in every step, a grant and a
    key of full length. The largest request that the lane could hold fits, so each has its turn.
    """

    bytes: int

    @classmethod
    def of(
        cls, profile: WorkerProfile, limits: StepLimits, slots: int, limit: int = PLAN_LIMIT
    ) -> PlanRoom:
        """The room of a lane that uses `slots` slots. Raises ConfigError when it is too little."""
        planes, block_size = profile.planes, profile.block_size
        # A row begins one block more at most than it has tokens for: those of its chunk, or what
        # the ticks in flight may reach.
        reach = 1 + profile.model.max_loops + limits.max_ticks * MAX_PLANS_IN_FLIGHT
        prefill_tokens = min(limits.max_prefill_tokens, limits.max_tokens)
        granted = slots * (1 + reach // block_size) + prefill_tokens // block_size
        room = cls(limit - rows_size(slots, planes, granted))
        tokens = min(profile.model.max_positions, profile.num_blocks // planes * block_size)
        largest = admission_size(
            tokens,
            planes,
            -(-tokens // block_size),
            biased=MAX_BIASED_TOKENS,
            banned=profile.model.vocab_size,
            ending=MAX_ENDING_IDS,
            forced=1,  # each depth more is of an output that needs a position, too
        )
        if largest > room.bytes:
            raise ConfigError(
                f"a request of {tokens} tokens takes up to {largest} bytes of a plan, and "
                f"{room.bytes} of {limit} are left beside {slots} slots: lower worker.num_slots, "
                "or give the worker larger or fewer blocks"
            )
        return room

    def select(
        self,
        requests: Iterable[Request],
        opening: Callable[[Request], Admission | Resume | None],
        forks: Iterable[Fork] = (),
    ) -> list[Request]:
        """The requests that the next plan may have rows of, in their order.

        `opening` is what must be sent with a request's first row, beside the `forks`. Once one does
        not fit, it and all behind it that have any wait for the plan after.
        """
        left = self.bytes
        left -= sum(fork_size(len(fork.tables), len(fork.tables[0])) for fork in forks)
        selected = []
        for request in requests:
            item = opening(request)
            if item is not None:
                left -= opening_size(item)
            if item is None or left >= 0:
                selected.append(request)
        return selected
