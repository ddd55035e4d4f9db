"""The steps of the next plan, from how far each request has come.

A row that exited passes CODA, PRELUDE and its first loop in one plan, because the sampled token
stays in the worker's slot: a token takes exactly as many plans as its exit depth. If the token
turns out to end the request, what ran after its CODA is discarded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.plan import SLOT_TOKEN, CodaBatch, PrefillBatch, PreludeBatch, RecurrentBatch
from protocol.stage import Stage
from scheduler.states import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from protocol.config import SchedulerSettings
    from protocol.plan import Step
    from protocol.profile import WorkerProfile
    from scheduler.request import Request


# Looked up once: a plan asks for the stage of every row.
_RECURRENT, _CODA, _PREFILL = Stage.RECURRENT, Stage.CODA, State.PREFILL


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What the steps of one lane's plans are bounded by.

    `chunk_size` one request's prompt tokens in a plan, `max_prefill_tokens` those of all requests,
    `max_tokens` them and the decoding rows together. Without `refill`, tokens that have left the
    core wait until nobody is left in it; with it, until there are `min_coda_batch` of them.
    """

    chunk_size: int
    max_prefill_tokens: int
    max_tokens: int
    refill: bool
    min_coda_batch: int

    @classmethod
    def of(cls, settings: SchedulerSettings, profile: WorkerProfile) -> StepLimits:
        """The limits of the settings, within those of the worker."""
        largest = profile.max_step_tokens
        return cls(
            chunk_size=settings.prefill_chunk_size,
            max_prefill_tokens=settings.max_prefill_tokens,
            max_tokens=min(settings.max_step_tokens or largest, largest),
            refill=settings.mode == "refill",
            min_coda_batch=settings.min_coda_batch,
        )


def plan_steps(requests: Sequence[Request], limits: StepLimits) -> tuple[Step, ...]:
    """CODA, PRELUDE, PREFILL, RECURRENT, without those that have no row.

    Every request in the core has a row, whatever the prompts of others need. Rows keep the order
    of `requests`, which must not be more than `limits.max_tokens`.
    """
    exited, core, prompts = [], [], []
    for request in requests:
        stage = request.stage
        if stage is _RECURRENT:
            core.append(request)
        elif stage is _CODA:
            exited.append(request)
        elif request.state is _PREFILL:
            prompts.append(request)
    rows = len(core) + len(exited)
    if exited and core and (not limits.refill or len(exited) < limits.min_coda_batch):
        # The core goes on without them; it empties within a token's loops, so they wait no longer.
        rows, exited = len(core), []
    going_on = [request for request in exited if not request.is_last_output]
    if going_on:
        core = [r for r in requests if r.stage is _RECURRENT or _goes_on(r)]
    prefill_tokens = min(limits.max_prefill_tokens, limits.max_tokens - rows)
    steps: tuple[Step, ...] = (
        _coda(exited),
        _prelude(going_on),
        _prefill(prompts, limits.chunk_size, prefill_tokens),
        _recurrent(core),
    )
    return tuple(step for step in steps if step.keys)


def _goes_on(request: Request) -> bool:
    """Whether the token that is sampled next will be looped."""
    return request.stage is _CODA and not request.is_last_output


def _coda(exited: Iterable[Request]) -> CodaBatch:
    rows = [(r.key, r.position, r.loops_done, len(r.tokens)) for r in exited]
    keys, positions, exit_depths, output_indices = zip(*rows, strict=True) if rows else ((),) * 4
    return CodaBatch(keys, positions, exit_depths, output_indices)


def _prelude(going_on: Sequence[Request]) -> PreludeBatch:
    return PreludeBatch(
        keys=tuple(request.key for request in going_on),
        positions=tuple(request.position + 1 for request in going_on),
        tokens=(SLOT_TOKEN,) * len(going_on),
    )


def _recurrent(core: Sequence[Request]) -> RecurrentBatch:
    starts = [request.stage is _CODA for request in core]
    return RecurrentBatch(
        keys=tuple([request.key for request in core]),
        positions=tuple([r.position + start for r, start in zip(core, starts, strict=True)]),
        depths=tuple([0 if s else r.loops_done for r, s in zip(core, starts, strict=True)]),
    )


def _prefill(requests: Iterable[Request], chunk_size: int, max_tokens: int) -> PrefillBatch:
    """Chunks in the order of arrival, until `max_tokens` are planned.

    Example: chunk size 4, 6 tokens; A has 4 of 10, B 0 of 3 -> A [4, 8), B [0, 2).
    """
    keys, starts, counts = [], [], []
    budget = max_tokens
    for request in requests:
        if budget > 0:
            count = min(budget, chunk_size, len(request.prompt) - request.prefilled)
            keys.append(request.key)
            starts.append(request.prefilled)
            counts.append(count)
            budget -= count
    return PrefillBatch(tuple(keys), tuple(starts), tuple(counts))
