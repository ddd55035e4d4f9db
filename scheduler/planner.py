"""The steps of the next plan, from how far each request has come.

A row that exited passes CODA, PRELUDE and its first loop in one plan, because the sampled token
stays in the worker's slot: a token takes exactly as many plans as its exit depth. If the token
turns out to end the request, what ran after its CODA is discarded. A resident row has one step for
all that, of many ticks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.plan import SLOT_TOKEN, CodaBatch, PrefillBatch, PreludeBatch, RecurrentBatch
from protocol.resident import ResidentBatch
from protocol.stage import Stage
from scheduler.states import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from protocol.config import SchedulerSettings
    from protocol.plan import Step
    from protocol.profile import WorkerProfile
    from scheduler.pace import TickPace
    from scheduler.request import Request


# Looked up once: a plan asks for the stage of every row.
_RECURRENT, _CODA, _RESIDENT = Stage.RECURRENT, Stage.CODA, Stage.RESIDENT
_PREFILL = State.PREFILL


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one lane's plans and their steps are bounded by.

    `chunk_size` one request's prompt tokens in a plan, `max_prefill_tokens` those of all requests,
    `max_tokens` them and the rows that are planned loop by loop. Without `refill`, tokens that have
    left the core wait until nobody is left in it; with it, until there are `min_coda_batch` of
    them. `max_ticks` bounds the ticks of resident rows, `plans_in_flight` the plans that are sent
    before the first of them is answered.
    """

    chunk_size: int
    max_prefill_tokens: int
    max_tokens: int
    refill: bool
    min_coda_batch: int
    max_ticks: int
    plans_in_flight: int

    @classmethod
    def of(cls, settings: SchedulerSettings, profile: WorkerProfile) -> StepLimits:
        """The limits of the settings, within those of the worker; what is not set suits it."""
        largest, on_gpu = profile.max_step_tokens, profile.device.startswith("cuda")
        return cls(
            chunk_size=settings.prefill_chunk_size or max(largest // 2, 1),
            max_prefill_tokens=settings.max_prefill_tokens or largest,
            max_tokens=min(settings.max_step_tokens or largest, largest),
            refill=settings.mode == "refill",
            min_coda_batch=settings.min_coda_batch,
            max_ticks=min(settings.max_ticks, profile.max_ticks),
            plans_in_flight=settings.plans_in_flight or (2 if on_gpu else 1),
        )


def plan_steps(
    requests: Sequence[Request], limits: StepLimits, pace: TickPace, *, yields: bool = False
) -> tuple[Step, ...]:
    """CODA, PRELUDE, PREFILL, RECURRENT, RESIDENT, without those that have no row.

    Moves the requests on. Every request in the core has a row, whatever the prompts of others need.
    Rows keep the order of `requests`, which are not more than `limits.max_tokens`. A token whose
    signal is not heard has no row, nor has an output before the one ahead of it has come back, nor
    a resident request that ends in the ticks in flight. `pace` says how many ticks resident rows
    have at most; with `yields` they stop when a row ends.
    """
    exited, core, prompts = _rows(requests, limits)
    going_on = [request for request in exited if not request.is_last_output]
    # Ticks run apart from prompts, so resident rows take nothing from them; but they wait for each
    # pass of them.
    rows = len(core) + len(exited)
    prefill_tokens = min(limits.max_prefill_tokens, limits.max_tokens - rows)
    if limits.max_ticks and any(request.stage is _RESIDENT for request in requests):
        prefill_tokens = int(min(prefill_tokens, pace.prompt_tokens))
    coda, prelude = _coda(exited), _prelude(going_on)
    if going_on:
        core = [request for request in requests if request.stage is _RECURRENT]
    prefill = _prefill(prompts, limits.chunk_size, prefill_tokens)
    staged: tuple[Step, ...] = (coda, prelude, prefill, _recurrent(core))
    resident = _resident(requests, pace, sum(prefill.counts), yields) if limits.max_ticks else ()
    return tuple(step for step in staged if step.keys) + resident


def rows_to_sample(requests: Sequence[Request], limits: StepLimits) -> list[Request]:
    """Those that a plan of `requests` would give a CODA; moves nobody on."""
    exited, _, _ = _rows(requests, limits)
    return exited


def _rows(
    requests: Sequence[Request], limits: StepLimits
) -> tuple[list[Request], list[Request], list[Request]]:
    """Those that have exited and go on now, those in the core, and those in their prompts."""
    exited: list[Request] = []
    core: list[Request] = []
    prompts: list[Request] = []
    for request in requests:
        stage = request.stage
        if stage is _RECURRENT:
            core.append(request)
        elif stage is _CODA:
            if not (request.sampling or request.unforked):
                exited.append(request)
        elif request.state is _PREFILL and request.parent is None:
            prompts.append(request)
    if exited and core and (not limits.refill or len(exited) < limits.min_coda_batch):
        # The core goes on without them; it empties within a token's loops, so they wait no longer.
        exited = []
    return exited, core, prompts


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


def _resident(
    requests: Sequence[Request], pace: TickPace, prompt_tokens: int, yields: bool
) -> tuple[ResidentBatch, ...]:
    """One batch of the resident rows, or none; also those whose prompt this plan completes."""
    # One whose other choices are not forked yet may not sample before them.
    resident = (r for r in requests if r.stage is _RESIDENT and not r.unforked)
    rows = [request for request in resident if not request.ends_in_flight]
    if not rows:
        return ()
    # Whoever is planned loop by loop gets on by one step a plan, and prompts by one chunk.
    others = [r for r in requests if r.is_live and r.stage is not _RESIDENT]
    prompt_ticks = pace.ticks_beside(prompt_tokens)
    if any(request.state is not _PREFILL for request in others):
        ticks = prompt_ticks = 1
    else:
        ticks = prompt_ticks if others else max(pace.ticks, prompt_ticks)
    for request in rows:
        request.tick(ticks)
    keys = tuple([request.key for request in rows])
    return (ResidentBatch(keys, ticks, yields, prompt_ticks),)


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
