"""The exit rule and the order of stop reasons, by table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.exit_rule import (
    NEVER,
    FinishReason,
    exits,
    finish_reason,
    round_to_float32,
    survival_bound,
)


def exit_depth(hazard: float, threshold: float, min_loops: int, max_loops: int) -> int:
    bound, survival = survival_bound(threshold), 1.0
    for loops in range(1, max_loops + 1):
        survival = round_to_float32(survival * round_to_float32(1.0 - hazard))
        if exits(loops, survival, min_loops=min_loops, max_loops=max_loops, bound=bound):
            return loops
    raise AssertionError("a token never leaves later than max_loops")


@pytest.mark.parametrize(
    ("hazard", "threshold", "min_loops", "max_loops", "depth"),
    [
        (0.3, 0.5, 2, 4, 2),
        (0.3, 0.5, 3, 4, 3),
        (0.3, 0.5, 1, 4, 2),
        (0.4, 0.6, 1, 4, 2),
        (0.3, 0.0, 1, 4, 1),
        (0.3, 0.0, 2, 4, 2),
        (0.3, 1.0, 1, 4, 4),
        (1.0, 1.0, 1, 4, 4),
        (0.0, 0.0, 1, 4, 1),
        (0.0, 0.5, 1, 4, 4),
        (0.9, 0.95, 1, 1, 1),
    ],
)
def test_exit_depths(
    hazard: float, threshold: float, min_loops: int, max_loops: int, depth: int
) -> None:
    assert exit_depth(hazard, threshold, min_loops, max_loops) == depth


def test_a_full_threshold_never_exits_early_even_at_survival_zero() -> None:
    assert survival_bound(1.0) == NEVER
    assert not exits(3, 0.0, min_loops=1, max_loops=4, bound=NEVER)


@given(st.floats(0.0, 0.999), st.floats(0.0, 0.999))
def test_a_higher_threshold_never_has_a_higher_bound(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert survival_bound(high) <= survival_bound(low)


@pytest.mark.parametrize(
    ("token", "outputs", "ignore_eos", "reason"),
    [
        (7, 1, False, FinishReason.STOP),
        (7, 4, True, FinishReason.STOP),
        (2, 1, False, FinishReason.STOP),
        (2, 1, True, None),
        (2, 4, True, FinishReason.LENGTH),
        (2, 4, False, FinishReason.STOP),
        (5, 4, False, FinishReason.LENGTH),
        (5, 3, False, None),
    ],
)
def test_stop_ids_then_eos_then_length(
    token: int, outputs: int, ignore_eos: bool, reason: FinishReason | None
) -> None:
    found = finish_reason(
        token, outputs, stop_ids=(7,), eos_ids=(0, 2), ignore_eos=ignore_eos, max_tokens=4
    )
    assert found is reason
