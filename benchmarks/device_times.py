"""Time on a device, and what it can do at most: read-only bandwidth and matrix products."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

READ_WORDS = 2**31
"""Words of 4 bytes that the bandwidth is measured over: 8.6 GB, far beyond any cache."""


def milliseconds(
    work: Callable[[], object],
    device: torch.device,
    rounds: int = 20,
    between: Callable[[], object] | None = None,
) -> float:
    """Median time of `work`; `between` runs untimed after each round.

    On CUDA that is the device's time, between two events with `work` alone between them.
    """
    for _ in range(2):
        work()
        if between is not None:
            between()
    if device.type != "cuda":
        return median(_host_rounds(work, rounds, between)) * 1e3
    torch.cuda.synchronize(device)
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(rounds):
        start, end = _event(), _event()
        start.record()
        work()
        end.record()
        marks.append((start, end))
        if between is not None:
            between()
    torch.cuda.synchronize(device)
    return float(median(start.elapsed_time(end) for start, end in marks))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _host_rounds(
    work: Callable[[], object], rounds: int, between: Callable[[], object] | None
) -> list[float]:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
        if between is not None:
            between()
    return times


def captured(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`work` as a CUDA graph, so that what launches cost the host is not timed; else `work`."""
    if device.type != "cuda":
        return work
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that the device can read."""
    if device.type != "cuda":
        values = torch.ones(2**24, device=device)
        return values.nbytes / milliseconds(values.sum, device) * 1e3
    # Imported late: Triton is there only where CUDA is.
    from worker.kernels.ceiling import read

    values = torch.ones(READ_WORDS, dtype=torch.int32, device=device)
    return values.nbytes / milliseconds(captured(partial(read, values), device), device) * 1e3


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP a second of a large matrix product of random numbers."""
    size = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    work = captured(lambda: left @ right, device)
    return float(2 * size**3 / milliseconds(work, device) * 1e3)
