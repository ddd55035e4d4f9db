"""What a CUDA device did when, from torch's profiler, and how much of it was not the model."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOOP_BEGINS = "gather_kernel"
"""The first kernel of a loop: it takes the rows out of their slots."""

MODEL = (
    "rotary_kernel",
    "norm_kernel",
    "skinny_kernel",
    "gemv_kernel",
    "nvjet",
    "gemm",
    "splitK",
    "decode_kernel",
    "swiglu_kernel",
    "hazard_kernel",
    "head_kernel",
)
"""What kernels of layers, final norm, gate and head have in their names."""


@dataclass(frozen=True, slots=True)
class Activity:
    """A kernel or a copy, and when it ran, in microseconds."""

    name: str
    start: float
    end: float


def record(work: Callable[[], object], device: torch.device) -> list[Activity]:
    """What the device does for `work`, by its start."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        work()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    found = [
        Activity(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in kinds and "dur" in event
    ]
    return sorted(found, key=lambda activity: activity.start)


def outside_percent(activities: Sequence[Activity]) -> float:
    """Share of the time outside the model, from the first loop's start to the last one's.

    That is what lies between two kernels of the model with something else between them, the waiting
    in it included; from one kernel of the model to the next is the model's. 0 without two loops.

    Example: a loop begins at 0 and takes a slot's row until 1; the model runs until 8, a sampler
    until 10, and the next loop begins there: 3 of 10, 30 %.
    """
    begins = [index for index, one in enumerate(activities) if one.name.startswith(LOOP_BEGINS)]
    if len(begins) < 2:
        return 0.0
    first, last = begins[0], begins[-1]
    outside, reached, others = 0.0, activities[first].start, False
    for one in activities[first:last]:
        if any(part in one.name for part in MODEL):
            outside += max(one.start - reached, 0.0) * others
            reached, others = max(reached, one.end), False
        else:
            others = True
    outside += max(activities[last].start - reached, 0.0)
    return 100 * outside / (activities[last].start - activities[first].start)
