"""No frame is larger than the arithmetic says, and the arithmetic does not say much too much."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import encode
from protocol.identity import MAX_REQUEST_ID_LENGTH, RequestKey
from protocol.plan import (
    Admission,
    CodaBatch,
    ExecutionPlan,
    Grant,
    PrefillBatch,
    PreludeBatch,
    RecurrentBatch,
    Resume,
)
from protocol.plan_size import (
    FRAME_LIMIT,
    PLAN_LIMIT,
    admission_size,
    opening_size,
    rows_size,
    table_size,
)
from protocol.resident import MAX_ENDING_IDS, ResidentBatch, ResidentTerms
from protocol.rng import MAX_SEED, RngKey
from protocol.sampling import MAX_BIASED_TOKENS, MAX_LOGPROBS
from tests.strategies import admissions, block_tables, request_keys

if TYPE_CHECKING:
    from protocol.plan import BlockTable

LARGE = 2**31 - 1
LAST = 2**63 - 1


def key(number: int) -> RequestKey:
    """A key as long as one can be."""
    return RequestKey("\N{GRINNING FACE}" * (MAX_REQUEST_ID_LENGTH - 5) + f"{number:05}", LAST)


def large_table(planes: int, width: int) -> BlockTable:
    return ((LARGE,) * width,) * planes


def large_admission(number: int, prompt: int, planes: int, width: int, banned: int) -> Admission:
    """An admission whose every number takes as many bytes as it can."""
    return Admission(
        key=key(number),
        prompt=(LARGE,) * prompt,
        tables=large_table(planes, width),
        rng=RngKey(MAX_SEED, 2**32 - 1),
        temperature=0.3,
        top_p=0.7,
        top_k=LARGE,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.7,
        logit_bias=tuple((LARGE - token, 0.1) for token in range(MAX_BIASED_TOKENS)),
        min_tokens=LARGE,
        banned_ids=(LARGE,) * banned,
        logprobs=MAX_LOGPROBS,
        prefilled=LARGE,
        resident=ResidentTerms(
            min_loops=LARGE,
            max_loops=LARGE,
            bound=0.1,
            max_tokens=max(banned, 1),
            ending_ids=(LARGE,) * MAX_ENDING_IDS,
            forced_depths=(LARGE,) * banned,
        ),
    )


def full_plan(slots: int, planes: int, granted: int) -> ExecutionPlan:
    """A plan with as many rows, releases and grants as a lane of `slots` could ever have."""
    keys = tuple(map(key, range(slots)))
    large = (LARGE,) * slots
    return ExecutionPlan(
        epoch=LAST,
        seq=LAST,
        releases=tuple(key(slots + number) for number in range(slots)),
        grants=tuple(Grant(each, large_table(planes, granted)) for each in keys),
        steps=(
            CodaBatch(keys, large, large, large),
            PreludeBatch(keys, large, large),
            PrefillBatch(keys, large, large),
            RecurrentBatch(keys, large, large),
            ResidentBatch(keys, LARGE, yields=True),
        ),
        suspends=keys,
    )


def test_the_largest_rows_take_no_more_than_that_and_little_less() -> None:
    for slots, planes, granted in ((1, 1, 0), (40, 4, 3), (300, 6, 1)):
        size = len(encode(full_plan(slots, planes, granted)))
        bound = rows_size(slots, planes, slots * granted)
        assert 0.9 * bound < size <= bound


def test_the_largest_openings_take_no_more_than_that_and_little_less() -> None:
    plain = full_plan(8, 4, 1)
    for prompt, planes, width, banned in ((1, 1, 0, 0), (900, 4, 60, 5), (64, 6, 4, 700)):
        admits = tuple(large_admission(each, prompt, planes, width, banned) for each in range(5))
        resumes = tuple(Resume(key(each), large_table(planes, width)) for each in range(5, 8))
        plan = ExecutionPlan(
            epoch=LAST,
            seq=LAST,
            releases=plain.releases,
            admits=admits,
            grants=plain.grants,
            steps=plain.steps,
            suspends=plain.suspends,
            resumes=resumes,
        )
        extra = len(encode(plan)) - len(encode(plain))
        bound = sum(map(opening_size, admits)) + sum(map(opening_size, resumes))
        assert 0.9 * bound < extra <= bound
        assert opening_size(admits[0]) == admission_size(
            prompt,
            planes,
            width,
            biased=MAX_BIASED_TOKENS,
            banned=banned,
            ending=MAX_ENDING_IDS,
            forced=banned,
        )


@given(
    st.lists(admissions, max_size=4),
    st.lists(st.builds(Resume, request_keys, block_tables()), max_size=4),
)
def test_no_frame_of_openings_exceeds_its_bound(
    admits: list[Admission], resumes: list[Resume]
) -> None:
    plan = ExecutionPlan(1, 1, admits=tuple(admits), resumes=tuple(resumes))
    openings = sum(map(opening_size, admits)) + sum(map(opening_size, resumes))
    assert len(encode(plan)) <= rows_size(len(admits) + len(resumes), 1, 0) + openings


def test_the_examples_hold() -> None:
    assert table_size(4, 10) == 185
    assert admission_size(100, 4, 7) == 726
    assert rows_size(32, 4, 64) == 71_315
    assert PLAN_LIMIT * 2 == FRAME_LIMIT
