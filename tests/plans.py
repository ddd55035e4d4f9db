"""Building and running plans by hand, as a scheduler would."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.plan import (
    SLOT_TOKEN,
    Admission,
    CodaBatch,
    ExecutionPlan,
    PrefillBatch,
    PreludeBatch,
    RecurrentBatch,
)
from protocol.rng import RngKey

if TYPE_CHECKING:
    from protocol.executor import Executor, Submission
    from protocol.identity import RequestKey
    from protocol.plan import BlockTable, Fork, Grant, Resume, Step
    from protocol.profile import WorkerProfile
    from protocol.result import PlanResult

TIMEOUT = 30.0


def block_table(profile: WorkerProfile, tokens: int, first: int = 0) -> BlockTable:
    """Blocks for `tokens` tokens in every plane, numbered from `first`."""
    width = -(-tokens // profile.block_size)
    return tuple(
        tuple(range(first + plane * width, first + (plane + 1) * width))
        for plane in range(profile.planes)
    )


def admission(
    key: RequestKey,
    prompt: tuple[int, ...],
    tables: BlockTable,
    temperature: float = 0.0,
    prefilled: int = 0,
) -> Admission:
    """A greedy request, or one that samples with seed 7; prefill starts at `prefilled`."""
    return Admission(key, prompt, tables, RngKey(7), temperature, 1.0, -1, prefilled=prefilled)


@dataclass(slots=True)
class PlanSender:
    """Numbers and sends plans to one executor. Owner: one test, which alone uses it."""

    executor: Executor
    seq: int = field(default=0)

    def submit(
        self,
        *steps: Step,
        admits: tuple[Admission, ...] = (),
        releases: tuple[RequestKey, ...] = (),
        grants: tuple[Grant, ...] = (),
        suspends: tuple[RequestKey, ...] = (),
        resumes: tuple[Resume, ...] = (),
        forks: tuple[Fork, ...] = (),
    ) -> Submission:
        """Send the next plan."""
        self.seq += 1
        plan = ExecutionPlan(
            self.executor.epoch,
            self.seq,
            releases,
            admits,
            grants,
            steps,
            suspends,
            resumes,
            forks,
        )
        return self.executor.submit(plan)

    def run(
        self,
        *steps: Step,
        admits: tuple[Admission, ...] = (),
        releases: tuple[RequestKey, ...] = (),
        grants: tuple[Grant, ...] = (),
        suspends: tuple[RequestKey, ...] = (),
        resumes: tuple[Resume, ...] = (),
        forks: tuple[Fork, ...] = (),
    ) -> PlanResult:
        """Send the next plan, collect its result and retire it."""
        submission = self.submit(
            *steps,
            admits=admits,
            releases=releases,
            grants=grants,
            suspends=suspends,
            resumes=resumes,
            forks=forks,
        )
        result = submission.collect(TIMEOUT)
        submission.retire()
        return result


def prefill(key: RequestKey, start: int, count: int) -> PrefillBatch:
    """One chunk of one request."""
    return PrefillBatch((key,), (start,), (count,))


def prelude(key: RequestKey, position: int, token: int = SLOT_TOKEN) -> PreludeBatch:
    """Embed one token of one request."""
    return PreludeBatch((key,), (position,), (token,))


def recurrent(key: RequestKey, position: int, depth: int) -> RecurrentBatch:
    """One loop of one request."""
    return RecurrentBatch((key,), (position,), (depth,))


def coda(key: RequestKey, position: int, exit_depth: int, output_index: int) -> CodaBatch:
    """One sample of one request."""
    return CodaBatch((key,), (position,), (exit_depth,), (output_index,))
