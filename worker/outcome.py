"""PlanOutcome: what a plan left in its readback lease, and how it becomes a typed result."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from protocol.plan import NO_LOGPROBS, CodaBatch, PrefillBatch, PreludeBatch, RecurrentBatch
from protocol.resident import ResidentBatch
from protocol.result import (
    CodaResult,
    FailedRow,
    PlanResult,
    PrefillResult,
    PreludeResult,
    RecurrentResult,
    ResidentResult,
    StepResult,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.plan import Step
    from protocol.snapshot import SnapshotHandle, SnapshotLoss
    from worker.sampling.logprobs import Logprobs
    from worker.streams import Mark, Span

StepReader: TypeAlias = Callable[[list[FailedRow]], StepResult]
"""Makes one step's result from the host buffers; adds the rows that have no usable value."""

EMPTY_RESULTS: dict[type[Step], StepResult] = {
    PrefillBatch: PrefillResult((), ()),
    PreludeBatch: PreludeResult((), ()),
    RecurrentBatch: RecurrentResult((), (), (), ()),
    CodaBatch: CodaResult((), (), ()),
    ResidentBatch: ResidentResult((), (), (), (), (), (), (), ()),
}

_Step = TypeVar("_Step", bound="Step")

NOT_A_NUMBER = "the model computed values that are not numbers; check the checkpoint and its dtype"


@dataclass(slots=True)
class PlanOutcome:
    """A plan that was enqueued, its values in the readback lease or on their way there.

    Owner: the plan's ticket. Mutated only by: ModelRunner.execute. `steps` builds each step's
    result from the host buffers and tells which of its rows the device could not compute. `spans`
    and `end` say when, and `held` keeps what is being copied.
    """

    epoch: int
    seq: int
    steps: list[StepReader] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    held: list[object] = field(default_factory=list)
    end: Mark | None = None
    failed: list[FailedRow] = field(default_factory=list)
    suspended: list[SnapshotHandle] = field(default_factory=list)
    lost: list[SnapshotLoss] = field(default_factory=list)

    def wait(self) -> None:
        """Return once the device is done; raise what it failed with."""
        if self.end is not None:
            self.end.wait()
            self.held.clear()

    def read(self) -> PlanResult:
        """The typed result, copied into independent host values, once the device is done."""
        self.wait()
        failed = list(self.failed)
        steps = tuple(step(failed) for step in self.steps)
        return PlanResult(
            epoch=self.epoch,
            seq=self.seq,
            steps=steps,
            failed=tuple(failed),
            device_us=tuple(span.microseconds() for span in self.spans),
            suspended=tuple(self.suspended),
            lost=tuple(self.lost),
        )


def select_rows(step: _Step, rows: Sequence[int]) -> _Step:
    """The step with only these of its rows; every field of a staged step is a column."""
    if isinstance(step, ResidentBatch):
        return replace(step, keys=tuple(step.keys[row] for row in rows))
    columns = (getattr(step, column.name) for column in fields(step))
    return type(step)(*(tuple(column[row] for row in rows) for column in columns))


def read_survivals(
    batch: RecurrentBatch, survivals: Sequence[float], failed: list[FailedRow]
) -> RecurrentResult:
    """Survivals with their rows; a row whose survival is no number goes to `failed`."""
    rows = [row for row, survival in enumerate(survivals) if not math.isnan(survival)]
    _fail_others(batch, rows, failed)
    return RecurrentResult(
        tuple(batch.keys[row] for row in rows),
        tuple(batch.positions[row] for row in rows),
        tuple(batch.depths[row] for row in rows),
        tuple(survivals[row] for row in rows),
    )


def read_tokens(
    batch: CodaBatch,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    failed: list[FailedRow],
) -> CodaResult:
    """Tokens with their rows; a row without one (-1) goes to `failed`.

    `logprobs` has one entry a row, or none at all.
    """
    rows = [row for row, token in enumerate(tokens) if token >= 0]
    _fail_others(batch, rows, failed)
    return CodaResult(
        tuple(batch.keys[row] for row in rows),
        tuple(batch.output_indices[row] for row in rows),
        tuple(tokens[row] for row in rows),
        tuple(logprobs[row] for row in rows) if logprobs else (),
    )


def read_logprobs(values: Logprobs | None, counts: Sequence[int]) -> list[TokenLogprobs | None]:
    """One entry a row of a batch, or none at all when no row asked for any.

    `counts` says how many alternatives each row asked for, NO_LOGPROBS for none; `values` are
    those of the rows that asked, in order.
    """
    if values is None:
        return []
    sampled, ids, tops = values.sampled.tolist(), values.top_ids.tolist(), values.top.tolist()
    rows = iter(zip(sampled, ids, tops, strict=True))
    read: list[TokenLogprobs | None] = []
    for count in counts:
        if count == NO_LOGPROBS:
            read.append(None)
        else:
            value, top_ids, top = next(rows)
            read.append(TokenLogprobs(value, tuple(top_ids[:count]), tuple(top[:count])))
    return read


def _fail_others(batch: Step, good: Sequence[int], failed: list[FailedRow]) -> None:
    good_rows = set(good)
    failed.extend(
        FailedRow(key, NOT_A_NUMBER)
        for row, key in enumerate(batch.keys)
        if row not in good_rows and all(failure.key != key for failure in failed)
    )
