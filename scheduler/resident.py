"""Which requests decode on the worker, tick by tick, and how far a plan may bring them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.exit_rule import ending_ids
from protocol.resident import MAX_ENDING_IDS, ResidentTerms
from scheduler.exit_policy import Forced, Ouro

if TYPE_CHECKING:
    from protocol.config import SchedulerSettings
    from protocol.profile import WorkerProfile
    from scheduler.request import Request


def resident_terms(
    request: Request, profile: WorkerProfile, settings: SchedulerSettings
) -> ResidentTerms | None:
    """What the worker must know to decide for a request; None if the scheduler does.

    A worker decides exits at once and forced ones, ends with few tokens, and lets no token wait for
    others; whatever needs more is planned loop by loop.
    """
    policy = request.exit_policy
    waits = settings.mode != "refill" or settings.min_coda_batch > 1
    eos_ids, ignore_eos = profile.model.eos_ids, request.params.ignore_eos
    ending = ending_ids(request.stop_ids, eos_ids, ignore_eos=ignore_eos)
    if not settings.resident or not profile.max_ticks or waits or len(ending) > MAX_ENDING_IDS:
        return None
    max_tokens, ends = request.params.max_tokens, tuple(sorted(ending))
    match policy:
        case Ouro(min_loops, max_loops, bound):
            return ResidentTerms(min_loops, max_loops, bound, max_tokens, ends)
        case Forced(depths):
            bounds = min(depths), request.full_depth
            return ResidentTerms(*bounds, 0.0, max_tokens, ends, depths[:max_tokens])
        case _:
            return None
