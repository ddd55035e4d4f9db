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
    """CODA, PRELUDE, PREFILL, RECURRENT, without those that have no row; moves the requests on.

    Every request in the core has a row, whatever the prompts of others need. Rows keep the order
    of `requests`, which must not be more than `limits.max_tokens`. A token whose signal is not
    heard has no row, nor has an output before the one ahead of it has come back.
    """
    exited, core, prompts = [], [], []
    for request in requests:
        stage = request.stage
        if stage is _RECURRENT:
            core.append(request)
        elif stage is _CODA:
            if not request.sampling:
                exited.append(request)
        elif request.state is _PREFILL:
            prompts.append(request)
    rows = len(core) + len(exited)
    if exited and core and (not limits.refill or len(exited) < limits.min_coda_batch):
        # The core goes on without them; it empties within a token's loops, so they wait no longer.
        rows, exited = len(core), []
    going_on = [request for request in exited if not request.is_last_output]
    prefill_tokens = min(limits.max_prefill_tokens, limits.max_tokens - rows)
    coda, prelude = _coda(exited), _prelude(going_on)
    if going_on:
        core = [request for request in requests if request.stage is _RECURRENT]
    prefill = _prefill(prompts, limits.chunk_size, prefill_tokens)
    steps: tuple[Step, ...] = (coda, prelude, prefill, _recurrent(core))
    return tuple(step for step in steps if step.keys)


def _coda(exited: Iterable[Request]) -> CodaBatch:
    rows = [(r.key, r.position, r.loops_done, r.output_index) for r in exited]
    keys, positions, exit_depths, output_indices = zip(*rows, strict=True) if rows else ((),) * 4
    for request in exited:
        request.sample()
    return CodaBatch(keys, positions, exit_depths, output_indices)


def _prelude(going_on: Sequence[Request]) -> PreludeBatch:
    for request in going_on:
        request.embed()
    return PreludeBatch(
        keys=tuple(request.key for request in going_on),
        positions=tuple(request.position for request in going_on),
        tokens=(SLOT_TOKEN,) * len(going_on),
    )


def _recurrent(core: Sequence[Request]) -> RecurrentBatch:
    batch = RecurrentBatch(
        keys=tuple([request.key for request in core]),
        positions=tuple([request.position for request in core]),
        depths=tuple([request.loops_done for request in core]),
    )
    for request in core:
        request.loop()
    return batch


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
            request.prefill_to(request.prefilled + count)
    return PrefillBatch(tuple(keys), tuple(starts), tuple(counts))
