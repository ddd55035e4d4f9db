"""PlanResult: what came of a plan, typed per stage, each row with its key.

A result has one entry a step of the plan, in the plan's order, so a reader never guesses which
stage a value belongs to. Rows of requests that failed are missing from it and listed in `failed`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeAlias

from protocol.checks import require_equal_lengths, require_non_negative

if TYPE_CHECKING:
    from protocol.identity import RequestKey
    from protocol.resident import RowState
    from protocol.snapshot import SnapshotHandle, SnapshotLoss


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """Prompt tokens [0, end) of each row now have KV at every depth."""

    keys: tuple[RequestKey, ...]
    ends: tuple[int, ...]

    def __post_init__(self) -> None:
        require_equal_lengths("prefill result", self.keys, self.ends)
        require_non_negative("prefill result", self.ends)


@dataclass(frozen=True, slots=True)
class PreludeResult:
    """Each row's token at `positions` is embedded."""

    keys: tuple[RequestKey, ...]
    positions: tuple[int, ...]

    def __post_init__(self) -> None:
        require_equal_lengths("prelude result", self.keys, self.positions)
        require_non_negative("prelude result", self.positions)


@dataclass(frozen=True, slots=True)
class RecurrentResult:
    """Survival (float32 values in [0, 1]) of each row after its loop at 0-based `depths`."""

    keys: tuple[RequestKey, ...]
    positions: tuple[int, ...]
    depths: tuple[int, ...]
    survivals: tuple[float, ...]

    def __post_init__(self) -> None:
        require_equal_lengths(
            "recurrent result", self.keys, self.positions, self.depths, self.survivals
        )
        require_non_negative("recurrent result", self.positions, self.depths)
        if not all(0.0 <= survival <= 1.0 for survival in self.survivals):
            raise ValueError("recurrent result: a survival is outside [0, 1]")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities (float32 values) where one token was sampled.

    `logprob` is the sampled token's; `top_logprobs` are those of the most likely tokens `top_ids`,
    falling, the lower id first among equals. The sampled one need not be among them.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require_equal_lengths("logprobs", self.top_ids, self.top_logprobs)
        require_non_negative("logprobs", self.top_ids)
        if any(math.isnan(value) for value in (self.logprob, *self.top_logprobs)):
            raise ValueError("logprobs: a value is not a number")


@dataclass(frozen=True, slots=True)
class CodaResult:
    """The sampled token of each row's output index.

    `logprobs` is empty when no row asked for any; else it has one entry a row, None for those
    that did not ask.
    """

    keys: tuple[RequestKey, ...]
    output_indices: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()

    def __post_init__(self) -> None:
        require_equal_lengths("coda result", self.keys, self.output_indices, self.tokens)
        if self.logprobs:
            require_equal_lengths("coda result", self.keys, self.logprobs)
        require_non_negative("coda result", self.output_indices, self.tokens)


@dataclass(frozen=True, slots=True)
class ResidentResult:
    """What came of a ResidentBatch: the outputs of each row, and where it stands now.

    `tokens` and `exit_depths` have a tuple a row, in the order of the outputs; `loops` are those of
    the token that is in work at the end, 0 when it has not begun. `logprobs` is empty when no row
    asked for any; else it has an entry for each output, row after row.

    `live`, `exits` and `finished` have an entry a tick that was run: rows that looped, rows
    whose token left, rows that ended.
    """

    keys: tuple[RequestKey, ...]
    tokens: tuple[tuple[int, ...], ...]
    exit_depths: tuple[tuple[int, ...], ...]
    loops: tuple[int, ...]
    states: tuple[RowState, ...]
    live: tuple[int, ...]
    exits: tuple[int, ...]
    finished: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()

    def __post_init__(self) -> None:
        require_equal_lengths(
            "resident result", self.keys, self.tokens, self.exit_depths, self.loops, self.states
        )
        require_equal_lengths("resident ticks", self.live, self.exits, self.finished)
        require_non_negative(
            "resident result", self.loops, self.live, self.exits, self.finished, *self.tokens
        )
        for tokens, depths in zip(self.tokens, self.exit_depths, strict=True):
            require_equal_lengths("resident outputs", tokens, depths)
            if depths and min(depths) < 1:
                raise ValueError("resident result: an exit depth is at least 1")
        if self.logprobs and len(self.logprobs) != sum(map(len, self.tokens)):
            raise ValueError("resident result: log probabilities do not fit the outputs")

    @property
    def ticks(self) -> int:
        """The ticks that were run."""
        return len(self.live)

    def logprobs_by_row(self) -> tuple[tuple[TokenLogprobs | None, ...], ...]:
        """The entries of `logprobs` by row; None for each output if there are none."""
        told = self.logprobs or (None,) * sum(map(len, self.tokens))
        ends = tuple(accumulate(map(len, self.tokens), initial=0))
        return tuple(told[start:end] for start, end in pairwise(ends))


StepResult: TypeAlias = (
    PrefillResult | PreludeResult | RecurrentResult | CodaResult | ResidentResult
)


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A request that a step could not run; the worker skips it until it is released."""

    key: RequestKey
    message: str


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The answer to the plan with the same (epoch, seq).

    Applying it also acknowledges the plan's releases. `device_us` is the time of each step on the
    device, in microseconds, in the plan's order.

    A suspend is answered by its handle in `suspended`, or in `lost` when nothing could be kept; a
    resume that found nothing to go on from is in `lost` as well. A resume that is neither there
    nor in `failed` has been done.
    """

    epoch: int
    seq: int
    steps: tuple[StepResult, ...] = ()
    failed: tuple[FailedRow, ...] = ()
    device_us: tuple[int, ...] = ()
    suspended: tuple[SnapshotHandle, ...] = ()
    lost: tuple[SnapshotLoss, ...] = ()

    def __post_init__(self) -> None:
        if self.epoch < 1 or self.seq < 1:
            raise ValueError(f"epoch {self.epoch} and seq {self.seq} count from 1")
        require_equal_lengths("plan result", self.steps, self.device_us)
        require_non_negative("plan result", self.device_us)
