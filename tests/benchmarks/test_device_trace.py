"""The share of a device's time that was not the model."""

from __future__ import annotations

import pytest

from benchmarks.device_trace import Activity, outside_percent


def activities(*entries: tuple[str, float, float]) -> list[Activity]:
    return [Activity(name, start, end) for name, start, end in entries]


def test_what_lies_between_the_model_and_something_else_is_outside() -> None:
    loop = [("gather_kernel", 0.0, 1.0), ("nvjet_sm90", 1.0, 4.0), ("norm_kernel", 4.5, 8.0)]
    end = [("greedy_kernel", 8.0, 9.5), ("gather_kernel", 10.0, 11.0)]
    assert outside_percent(activities(*loop, *end)) == pytest.approx(30.0)


def test_kernels_that_overlap_are_counted_once() -> None:
    found = activities(
        ("gather_kernel", 0.0, 2.0),
        ("skinny_kernel", 1.0, 5.0),
        ("decode_kernel", 3.0, 9.0),
        ("select_kernel", 8.0, 9.5),
        ("head_kernel", 8.5, 9.0),
        ("finalize_kernel", 9.0, 9.8),
        ("gather_kernel", 10.0, 12.0),
        ("skinny_kernel", 11.0, 20.0),
        ("gather_kernel", 20.0, 21.0),
    )
    assert outside_percent(found) == pytest.approx(100 * (1 + 2) / 20)


def test_nothing_is_said_of_fewer_than_two_loops() -> None:
    assert outside_percent([]) == 0.0
    assert outside_percent(activities(("gather_kernel", 0.0, 1.0), ("gemm", 1.0, 2.0))) == 0.0
