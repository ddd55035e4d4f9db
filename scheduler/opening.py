"""The admission that a request's first row is sent with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.exit_rule import ending_ids
from protocol.plan import NO_LOGPROBS, Admission

if TYPE_CHECKING:
    from protocol.plan import BlockTable
    from protocol.resident import ResidentTerms
    from protocol.rng import RngKey
    from scheduler.request import Request


def admission_of(
    request: Request,
    tables: BlockTable,
    rng: RngKey,
    eos_ids: tuple[int, ...],
    resident: ResidentTerms | None,
) -> Admission:
    """All that a worker must know of a request that is placed, over its first blocks."""
    params = request.params
    return Admission(
        key=request.key,
        prompt=request.prompt,
        tables=tables,
        rng=rng,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        min_tokens=params.min_tokens,
        banned_ids=_banned_ids(request, eos_ids),
        logprobs=NO_LOGPROBS if params.logprobs is None else params.logprobs,
        prefilled=request.prefilled,
        resident=resident,
    )


def _banned_ids(request: Request, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """What may not be sampled among the first min_tokens outputs."""
    if request.params.min_tokens == 0:
        return ()
    ignore_eos = request.params.ignore_eos
    return tuple(sorted(ending_ids(request.stop_ids, eos_ids, ignore_eos=ignore_eos)))
