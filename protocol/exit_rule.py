"""When a token leaves the loop and when a request ends: stated once, used by whoever decides.

The survival of a token after loop r is the product of (1 - hazard) over its loops so far, in
float32: s <- f32(s * f32(1 - hazard)). It starts again at 1 with every token, and every loop
counts, also those below the minimum. (Rule of the published Ouro model, with the exit CDF
written as 1 - s.)
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

NEVER = -1.0
"""A bound that no survival reaches: threshold 1.0 means that the gate never fires."""


class FinishReason(Enum):
    """Why a request ended, in the words of the public API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def round_to_float32(value: float) -> float:
    """The float32 nearest to `value`, as a Python float."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


def survival_bound(threshold: float) -> float:
    """The float32 bound for an exit threshold in [0, 1]: exit once survival <= bound.

    Example: threshold 0.9 -> f32(0.1) = 0.10000000149011612; threshold 1.0 -> NEVER, even when a
    survival rounds to 0.
    """
    return NEVER if threshold >= 1.0 else round_to_float32(1.0 - threshold)


def exits(loops: int, survival: float, *, min_loops: int, max_loops: int, bound: float) -> bool:
    """Whether a token leaves after `loops` loops (1-based) with this float32 survival.

    Example: hazards 0.3, 0.3 give survivals 0.7, 0.49; with bound 0.5 and min_loops 2 the token
    stays after loop 1 and leaves after loop 2.
    """
    return loops >= max_loops or (loops >= min_loops and survival <= bound)


def ending_ids(
    stop_ids: Collection[int], eos_ids: Collection[int], *, ignore_eos: bool
) -> frozenset[int]:
    """The tokens with which a request ends, whatever its length."""
    return frozenset(stop_ids) if ignore_eos else frozenset((*stop_ids, *eos_ids))


def finish_reason(
    token: int,
    num_outputs: int,
    *,
    stop_ids: Collection[int],
    eos_ids: Collection[int],
    ignore_eos: bool,
    max_tokens: int,
) -> FinishReason | None:
    """Why a request ends with `token`, its `num_outputs`-th output (1-based), or None.

    The order is stop ids, end of sequence, length: a stop id that is also the last token allowed
    reports STOP.
    """
    if token in stop_ids or (not ignore_eos and token in eos_ids):
        return FinishReason.STOP
    return FinishReason.LENGTH if num_outputs >= max_tokens else None
