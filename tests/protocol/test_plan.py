"""Plans, results and profiles refuse what can mean nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from protocol.identity import MAX_REQUEST_ID_LENGTH, RequestKey
from protocol.plan import (
    Admission,
    CodaBatch,
    ExecutionPlan,
    Fork,
    Grant,
    PrefillBatch,
    PreludeBatch,
    RecurrentBatch,
    Resume,
)
from protocol.profile import ModelProfile, WorkerProfile
from protocol.result import (
    CodaResult,
    PlanResult,
    PrefillResult,
    RecurrentResult,
    TokenLogprobs,
)
from protocol.rng import MAX_SEED, Purpose, RngKey, philox_counter
from protocol.snapshot import SnapshotHandle, SnapshotRoom

if TYPE_CHECKING:
    from collections.abc import Callable

A, B = RequestKey("a", 1), RequestKey("b", 2)
RNG = RngKey(0)
MODEL = ModelProfile("m", "f", 10, 20, 4, (), 1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RequestKey("", 1),
        lambda: RequestKey("x" * (MAX_REQUEST_ID_LENGTH + 1), 1),
        lambda: RequestKey("a", 0),
        lambda: RngKey(-1),
        lambda: RngKey(MAX_SEED + 1),
        lambda: RngKey(0, 2**32),
        lambda: Admission(A, (), ((0,),), RNG, 0.0, 1.0, -1),
        lambda: Admission(A, (1,), ((0,), (1, 2)), RNG, 0.0, 1.0, -1),
        lambda: Admission(A, (-1,), ((0,),), RNG, 0.0, 1.0, -1),
        lambda: Admission(A, (1,), ((0,),), RNG, 0.0, 1.0, -1, repetition_penalty=0.0),
        lambda: Admission(A, (1,), ((0,),), RNG, 0.0, 1.0, -1, logit_bias=((-1, 0.5),)),
        lambda: Admission(A, (1,), ((0,),), RNG, 0.0, 1.0, -1, banned_ids=(-1,)),
        lambda: Admission(A, (1,), ((0,),), RNG, 0.0, 1.0, -1, min_tokens=-1),
        lambda: Admission(A, (1,), ((0,),), RNG, 0.0, 1.0, -1, logprobs=-2),
        lambda: Admission(A, (1,), ((0,),), RNG, 0.0, 1.0, -1, logprobs=21),
        lambda: TokenLogprobs(float("nan")),
        lambda: TokenLogprobs(0.0, (1,), (float("nan"),)),
        lambda: TokenLogprobs(0.0, (1,), ()),
        lambda: TokenLogprobs(0.0, (-1,), (0.0,)),
        lambda: CodaResult((A,), (0,), (1,), (None, None)),
        lambda: Admission(A, (1, 2), ((0,),), RNG, 0.0, 1.0, -1, prefilled=-1),
        lambda: Grant(A, ((-1,),)),
        lambda: Resume(A, ((-1,),)),
        lambda: Resume(A, ((0,), ())),
        lambda: Fork(A, A, ((0,),), RNG),
        lambda: Fork(A, B, ((-1,),), RNG),
        lambda: Fork(A, B, ((0,), ()), RNG),
        lambda: SnapshotHandle(A, 0, 0, 1, 0),
        lambda: SnapshotHandle(A, 1, 0, 0, 0),
        lambda: SnapshotHandle(A, 1, -1, 1, 0),
        lambda: SnapshotHandle(A, 1, 0, 1, 2**32),
        lambda: SnapshotRoom(limit=-1),
        lambda: PrefillBatch((A,), (0,), (0,)),
        lambda: PrefillBatch((A, A), (0, 0), (1, 1)),
        lambda: PreludeBatch((A,), (0,), (-2,)),
        lambda: PreludeBatch((A, A), (0, 1), (-1, -1)),
        lambda: RecurrentBatch((A, A), (0, 0), (0, 1)),
        lambda: CodaBatch((A, A), (0, 0), (1, 1), (0, 1)),
        lambda: RecurrentBatch((A, B), (0,), (0, 0)),
        lambda: RecurrentBatch((A,), (-1,), (0,)),
        lambda: CodaBatch((A,), (0,), (0,), (0,)),
        lambda: ExecutionPlan(0, 1),
        lambda: ExecutionPlan(1, 0),
        lambda: PlanResult(1, 0),
        lambda: PlanResult(1, 1, (PrefillResult((), ()),), (), ()),
        lambda: RecurrentResult((A,), (0,), (0,), (1.5,)),
        lambda: RecurrentResult((A,), (0,), (0,), (float("nan"),)),
        lambda: CodaResult((A,), (0,), (-1,)),
        lambda: ModelProfile("m", "f", 0, 1, 1, (), 1.0),
        lambda: WorkerProfile(MODEL, "cpu", "float32", 1, 1, 1, 0, 1),
        lambda: WorkerProfile(MODEL, "cpu", "float32", 1, 1, 1, 3, 1),
    ],
)
def test_nonsense_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        make()


def test_draws_are_told_apart_by_stream_purpose_and_index() -> None:
    assert philox_counter(RngKey(5, 3), Purpose.SAMPLE, 7) == (7, 0, 0, 3)
    assert philox_counter(RngKey(5, 3), Purpose.SAMPLE, 2**32 + 1) == (1, 1, 0, 3)
    assert RngKey(2**40 + 9).philox_key() == (9, 256)
