"""What a plan and its result are as bytes, and what it takes to write and read them.

Plans and results are those of an engine that runs on a scripted worker, without a model: so many
requests that decode, planned loop by loop or in 16 resident ticks. No torch.

python -m benchmarks.wire --json FILE
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING

from benchmarks.command import command_line, finish
from benchmarks.report import Figure, grid, progress
from protocol.codec import decode, encode
from protocol.config import SchedulerSettings
from protocol.profile import ModelProfile, WorkerProfile
from protocol.sampling import SamplingParams
from protocol.scripted_executor import ScriptedExecutor
from scheduler.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.plan import ExecutionPlan
    from protocol.result import PlanResult

ROWS = (1, 32, 256)
TICKS = 16
WAYS = {"staged": 0, f"{TICKS} resident ticks": TICKS}
"""Ticks of a plan by the name of the way."""

THRESHOLD = 0.5
PLANS, QUICK_PLANS = 200, 4
PROMPT = 64


def decoding(rows: int, ticks: int, plans: int) -> list[tuple[ExecutionPlan, PlanResult]]:
    """So many plans in a row, and their results, of `rows` requests that all decode.

    The first of them come once each request has two outputs. Staged plans of mixed depths have
    CODA, PRELUDE and RECURRENT steps, and blocks are granted as they are needed.
    """
    model = ModelProfile("wire", "wire", 49152, 2**20, 4, (0,), 1.0)
    blocks = rows * 4 * (2**13 // 16)
    profile = WorkerProfile(
        model, "none", "float32", rows, blocks, 16, 4, rows * PROMPT, max_ticks=ticks
    )
    settings = SchedulerSettings(
        prefill_chunk_size=PROMPT,
        max_prefill_tokens=rows * PROMPT,
        max_waiting=rows,
        admission_scan_limit=rows,
        reservation="incremental",
        prefix_caching=False,
        max_ticks=max(ticks, 1),
    )
    engine = Engine(settings)
    engine.add_lane("lane-0", 1, profile)
    executor = ScriptedExecutor(profile)
    # Ids as the endpoint makes them.
    names = [f"cmpl-{index:032x}" for index in range(rows)]
    outputs = 2 + plans * max(ticks, 1)
    params = SamplingParams(
        max_tokens=2 * outputs + 16, exit_threshold=THRESHOLD, ignore_eos=True, seed=0
    )
    for index, name in enumerate(names):
        prompt = [1 + (index * PROMPT + place) % 49151 for place in range(PROMPT)]
        engine.add(name, prompt, params, index)
    counts = dict.fromkeys(names, 0)
    found: list[tuple[ExecutionPlan, PlanResult]] = []
    while len(found) < plans:
        ((lane, plan),) = engine.plan(0.0)
        submission = executor.submit(plan)
        result = submission.collect(0.0)
        submission.retire()
        if min(counts.values()) >= 2:
            found.append((plan, result))
        for output in engine.apply(lane, result, 0.0):
            output.raise_error()
            counts[output.key.request_id] += len(output.tokens)
    return found


def measure(rows: Sequence[int], plans: int) -> list[Figure]:
    """Medians over the plans: bytes, and microseconds of writing and reading, taken in turns."""
    pairs = {}
    for way, ticks in WAYS.items():
        for count in rows:
            progress(f"wire: {way}, {count} rows")
            pairs[f"{way}, {count} rows"] = decoding(count, ticks, plans)
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for turn in range(plans):
        for name, of in pairs.items():
            plan, result = of[turn]
            frames: dict[str, ExecutionPlan | PlanResult] = {"plan": plan, "result": result}
            for kind, frame in frames.items():
                started = perf_counter_ns()
                data = encode(frame)
                written = perf_counter_ns()
                same = decode(data)
                read = perf_counter_ns()
                if same != frame:
                    raise RuntimeError(f"{name}: a {kind} came back as another one")
                found[name, f"{kind} size", "bytes"].append(len(data))
                found[name, f"{kind} encode", "us"].append((written - started) / 1e3)
                found[name, f"{kind} decode", "us"].append((read - written) / 1e3)
    return [
        Figure(f"{name}: {column}", median(values), unit)
        for (name, column, unit), values in found.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write what is asked for."""
    arguments = command_line("wire", __doc__, quick=True).parse_args(argv)
    figures = measure(ROWS, QUICK_PLANS if arguments.quick else PLANS)
    finish("wire", figures, grid(figures), arguments)


if __name__ == "__main__":
    main()
