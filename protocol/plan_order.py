"""PlanOrder: which plan an executor takes next, and how many it may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import ProtocolError
from protocol.executor import MAX_PLANS_IN_FLIGHT
from protocol.plan import CodaBatch, PrefillBatch, RecurrentBatch
from protocol.resident import ResidentBatch

if TYPE_CHECKING:
    from protocol.plan import ExecutionPlan
    from protocol.profile import WorkerProfile


class PlanOrder:
    """One executor's count of plans. Owner: an executor. Mutated only by: it, under its lock."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.last_seq = 0
        self.in_flight = 0

    def take(self, plan: ExecutionPlan, profile: WorkerProfile) -> None:
        """Count a plan as submitted.

        Raises ProtocolError, and counts nothing, for another epoch, a seq that is not the next, one
        plan too many in flight, or a plan larger than the worker takes.
        """
        if plan.epoch != self.epoch:
            raise ProtocolError(f"plan of epoch {plan.epoch}, this executor is {self.epoch}")
        if plan.seq != self.last_seq + 1:
            raise ProtocolError(f"plan {plan.seq} follows plan {self.last_seq}: out of order")
        if self.in_flight >= MAX_PLANS_IN_FLIGHT:
            raise ProtocolError(
                f"{self.in_flight} plans in flight, at most {MAX_PLANS_IN_FLIGHT}: "
                "retire submissions first"
            )
        check_size(plan, profile)
        self.last_seq = plan.seq
        self.in_flight += 1

    def retire(self) -> None:
        """A submission was retired."""
        self.in_flight -= 1

    def begin(self, epoch: int) -> None:
        """Count a new epoch's plans from 1; what is in flight still has to be retired."""
        if epoch <= self.epoch:
            raise ProtocolError(f"epoch {epoch} is not newer than {self.epoch}")
        self.epoch, self.last_seq = epoch, 0


def check_size(plan: ExecutionPlan, profile: WorkerProfile) -> None:
    """Raise ProtocolError for a plan that is larger than the worker takes.

    A step has at most a row a slot and max_step_tokens tokens; all steps of a plan together read
    back at most max_step_tokens survivals and as many tokens. A resident one has at most
    max_ticks ticks.
    """
    read_back = {RecurrentBatch: 0, CodaBatch: 0}
    for step in plan.steps:
        name, rows = type(step).__name__, len(step.keys)
        tokens = sum(step.counts) if isinstance(step, PrefillBatch) else rows
        if rows > profile.num_slots or tokens > profile.max_step_tokens:
            raise ProtocolError(
                f"{name} of {rows} rows and {tokens} tokens, at most {profile.num_slots} and "
                f"{profile.max_step_tokens}: split the plan"
            )
        if isinstance(step, ResidentBatch) and step.max_ticks > profile.max_ticks:
            raise ProtocolError(
                f"{name} of {step.max_ticks} ticks, at most {profile.max_ticks}: "
                "ask for fewer, or for single steps if that is none"
            )
        if isinstance(step, RecurrentBatch | CodaBatch):
            read_back[type(step)] += rows
            if read_back[type(step)] > profile.max_step_tokens:
                raise ProtocolError(
                    f"more than {profile.max_step_tokens} rows of {name} in one plan: split it"
                )
