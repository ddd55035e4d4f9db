"""Streams: steps on the same slots run one after the other, and only those."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from worker.streams import PASSED, CudaStreams, HostStreams, Lane, here, open_streams

if TYPE_CHECKING:
    from collections.abc import Iterator

CUDA = torch.device("cuda")
LONG, SHORT = 400_000_000, 20_000_000
"""Cycles of a GPU: some 200 and 10 ms."""


def sleep(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001 - it has no other name


@pytest.fixture(autouse=True)
def at_rest() -> Iterator[None]:
    if torch.cuda.is_available():
        # A kernel is loaded when it is first used, for which the host waits for those that run.
        table = torch.zeros(2, device=CUDA)
        table[0].fill_(1.0)
        table[1].copy_(table[0])
        sleep(1)
        torch.cuda.synchronize()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def test_a_step_of_a_cpu_is_over_when_its_code_has_run() -> None:
    streams = open_streams(torch.device("cpu"), 3, 2)
    assert isinstance(streams, HostStreams)
    with streams.step(Lane.CORE, [0]) as span, streams.copies(Lane.CORE):
        total = sum(range(100_000))
    span.wait()
    assert total
    assert span.microseconds() > 0
    assert streams.mark().passed()
    assert PASSED.passed()


@pytest.mark.gpu
@pytest.mark.parametrize("first", list(Lane))
def test_a_step_waits_for_the_last_one_on_its_slots_alone(first: Lane) -> None:
    streams, second = CudaStreams(CUDA, 3, 3), Lane(1 - first)
    table = torch.zeros(3, device=CUDA)
    for lane in Lane:  # a stream that is used for the first time may wait for the others
        with streams.step(lane, [0]):
            table[1].fill_(0.0)
    torch.cuda.synchronize()
    with streams.step(first, [0, 2]) as slow:
        sleep(LONG)
        table[0].fill_(5.0)
        slow_end = here(CUDA)
    with streams.step(second, [1]) as other:
        table[1].fill_(7.0)
    other.wait()
    assert not slow_end.passed()
    with streams.step(second, [0]) as behind:
        table[1].copy_(table[0])
    behind.wait()
    assert slow_end.passed()
    assert table.tolist() == [5.0, 5.0, 0.0]
    assert slow.microseconds() > behind.microseconds()


@pytest.mark.gpu
def test_no_step_waits_on_one_stream_and_all_are_in_order() -> None:
    streams = CudaStreams(CUDA, 1, 2)
    table = torch.zeros(2, device=CUDA)
    with streams.step(Lane.CORE, [0]):
        sleep(SHORT)
        table[0].fill_(5.0)
    with streams.step(Lane.BOUNDARY, [1]) as last:
        table[1].copy_(table[0])
    last.wait()
    assert table.tolist() == [5.0, 5.0]


@pytest.mark.gpu
def test_what_was_done_to_a_slot_that_a_step_came_to_is_waited_for() -> None:
    streams = CudaStreams(CUDA, 3, 2)
    table, touched = torch.zeros(2, device=CUDA), [0]
    torch.cuda.synchronize()
    with streams.step(Lane.CORE, touched):
        sleep(SHORT)
        table[1].fill_(5.0)
        touched.append(1)
    with streams.step(Lane.BOUNDARY, [1]):
        table[0].copy_(table[1])
    end = streams.mark()
    end.wait()
    assert table.tolist() == [5.0, 5.0]
    assert end.passed()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 3])
def test_copies_come_after_what_the_step_has_done(count: int) -> None:
    streams = CudaStreams(CUDA, count, 1)
    value = torch.zeros(4, device=CUDA)
    held = torch.zeros(4, pin_memory=True)
    torch.cuda.synchronize()
    with streams.step(Lane.BOUNDARY, [0]):
        sleep(SHORT)
        value.fill_(3.0)
        with streams.copies(Lane.BOUNDARY):
            held.copy_(value, non_blocking=True)
    streams.mark().wait()
    assert held.tolist() == [3.0] * 4
