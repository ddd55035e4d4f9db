"""What resident decode gives: tokens a second beside the floor, with all rows busy.

On CUDA with the shapes of Ouro-1.4B in bfloat16 and seeded random weights, context growing from
1,024 tokens; elsewhere with ouro-tiny's shapes and few rows. Exit depths are forced: a seeded
trace of mean 2.5, or 4 throughout. Prompts are taken as prefilled, so that nothing but decode runs.

python -m benchmarks.decode --json FILE
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch

from benchmarks.command import command_line, finish
from benchmarks.device_times import read_bandwidth
from benchmarks.device_trace import outside_percent, record
from benchmarks.loop_batch import OURO_1_4B, random_model
from benchmarks.report import Figure, progress, table
from protocol.identity import RequestKey
from protocol.plan import Admission, ExecutionPlan, PrefillBatch
from protocol.resident import ResidentBatch, ResidentTerms
from protocol.result import ResidentResult
from protocol.rng import RngKey
from worker.attention.choice import choose_attention
from worker.graphs import most_rows
from worker.kv_storage import KVStorage
from worker.model_runner import ModelRunner
from worker.models.config import read_config
from worker.models.ouro import tensor_shapes
from worker.models.registry import EMBEDDED_DIRECTORY
from worker.readback import ReadbackPool
from worker.slot_table import SlotTable
from worker.stages import Device
from worker.worker import open_tick_graphs, resolve_device, with_graphs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.models.config import OuroConfig
    from worker.models.ouro import OuroModel
    from worker.outcome import PlanOutcome

GOALS = {1: 300.0, 32: 3900.0, 128: 6000.0}
"""Output tokens a second, at least, by rows, at a mean depth of 2.5."""

OUTSIDE_GOAL = 5.0
"""Percent of a tick outside the model, at most, from so many rows:"""
OUTSIDE_GOAL_ROWS = 32

FLOORS = {1: 642.0, 32: 5911.0, 128: 7376.0}
"""What reading weights and history once a loop would allow at 4.3 TB/s, computed beforehand."""

FLOOR_BANDWIDTH = 4.3e12
"""Bytes a second that floors are computed with."""

MIXED = (1, 1, 2, 2, 2, 3, 3, 3, 4, 4)
"""Exit depths of ten tokens of the trace, in any order: 2.5 in the mean."""

FULL = (4,)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured on one kind of device."""

    rows: tuple[int, ...]
    context: int
    plans: int
    ticks: int
    block_size: int


def floor_tick_ms(config: OuroConfig, dtype: torch.dtype, rows: int, context: int) -> float:
    """Milliseconds in which a device reads the layers' weights once, and each row's history.

    Example: Ouro-1.4B in bfloat16, 32 rows of 1,088 tokens: (2.47 + 32 * 0.214) GB at 4.3 TB/s ->
    2.16 ms, or 5,911 outputs a second at a mean depth of 2.5.
    """
    layers = (shape for name, shape in tensor_shapes(config).items() if ".layers." in name)
    weights = sum(torch.Size(shape).numel() for shape in layers) * dtype.itemsize
    token = KVStorage.bytes_per_block(
        config.num_hidden_layers, config.num_key_value_heads, 1, config.head_dim, dtype
    )
    return (weights + rows * context * token) / FLOOR_BANDWIDTH * 1e3


class DecodeRun:
    """One worker's runner with `rows` requests in work. Owner: one measurement."""

    def __init__(self, model: OuroModel, scale: Scale, rows: int, depths: Sequence[int]) -> None:
        planes, device = model.profile.max_loops, model.device
        outputs = 1 + scale.plans * scale.ticks
        width = -(-(scale.context + outputs) // scale.block_size)
        shape = (model.num_layers, model.kv_heads, scale.block_size, model.head_dim)
        storage = KVStorage(rows * planes * width, *shape, model.dtype, device)
        slots = SlotTable(
            num_slots=rows,
            hidden_size=model.hidden_size,
            planes=planes,
            max_loops=planes,
            max_positions=width * scale.block_size,
            block_size=scale.block_size,
            scratch_block=storage.scratch_block,
            vocab_size=model.profile.vocab_size,
            dtype=model.dtype,
            device=device,
        )
        attention = choose_attention("auto", model, most_rows(rows), device)
        on = with_graphs(Device(model, slots, storage, attention, device), rows, 64)
        self._runner = ModelRunner(on, tick_graphs=open_tick_graphs(on, rows, scale.ticks))
        pool = ReadbackPool(2, max(rows, 64), device, 1 + scale.ticks, most_rows(rows))
        self._leases = deque((pool.lease(), pool.lease()))
        self._keys = tuple(RequestKey(f"r{row}", row + 1) for row in range(rows))
        self._seq = 0
        pick = random.Random(0)
        admits = []
        for row, key in enumerate(self._keys):
            first = row * planes * width
            tables = tuple(
                tuple(range(first + plane * width, first + (plane + 1) * width))
                for plane in range(planes)
            )
            tens = [pick.sample(depths, len(depths)) for _ in range(outputs)]
            trace = tuple(chain.from_iterable(tens))[:outputs]
            terms = ResidentTerms(1, planes, -1.0, outputs, forced_depths=trace)
            prompt = (1,) * scale.context
            admits.append(
                Admission(
                    key,
                    prompt,
                    tables,
                    RngKey(row),
                    0.0,
                    1.0,
                    -1,
                    prefilled=scale.context - 1,
                    resident=terms,
                )
            )
        last = (scale.context - 1,) * rows
        self._enqueue(PrefillBatch(self._keys, last, (1,) * rows), admits=tuple(admits)).read()

    def ticks(self, plans: int, count: int) -> tuple[int, int, float]:
        """Outputs and loops of so many plans of `count` ticks, two in flight, and their seconds."""
        started = time.perf_counter()
        tokens = loops = 0
        running: deque[PlanOutcome] = deque()
        for number in range(plans + 1):
            if number < plans:
                running.append(self._enqueue(ResidentBatch(self._keys, count)))
            if len(running) > (number < plans):
                result = running.popleft().read()
                if result.failed:
                    raise RuntimeError(result.failed[0].message)
                (done,) = result.steps
                if isinstance(done, ResidentResult):
                    tokens += sum(map(len, done.tokens))
                    loops += sum(done.live)
        return tokens, loops, time.perf_counter() - started

    def _enqueue(
        self, step: PrefillBatch | ResidentBatch, admits: tuple[Admission, ...] = ()
    ) -> PlanOutcome:
        self._seq += 1
        self._leases.rotate()
        self._leases[0].clear()
        plan = ExecutionPlan(1, self._seq, admits=admits, steps=(step,))
        return self._runner.execute(plan, self._leases[0])


def measure(model: OuroModel, scale: Scale, rows: int, depths: Sequence[int]) -> list[Figure]:
    """Tokens a second over all plans of one run, and a tick's time."""
    name = f"{rows} rows, depth {'2.5' if len(depths) > 1 else depths[0]}"
    progress(f"decode: {name}")
    run = DecodeRun(model, scale, rows, depths)
    run.ticks(1, min(4, scale.ticks))
    tokens, loops, seconds = run.ticks(scale.plans, scale.ticks)
    on_cuda = model.device.type == "cuda" and len(depths) > 1
    goal = GOALS.get(rows) if on_cuda else None
    tick_ms = seconds / (scale.plans * scale.ticks) * 1e3
    figures = [
        Figure(f"{name}: decode", tokens / seconds, "tok/s", goal, at_least=True),
        Figure(f"{name}: loops", loops / seconds, "loops/s"),
        Figure(f"{name}: mean depth", loops / max(tokens, 1), "loops"),
        Figure(f"{name}: a tick", tick_ms, "ms"),
    ]
    if on_cuda and rows in FLOORS:
        figures.append(Figure(f"{name}: floor", FLOORS[rows], "tok/s"))
    if on_cuda:
        trace = record(partial(run.ticks, 1, scale.ticks), model.device)
        outside_goal = OUTSIDE_GOAL if rows >= OUTSIDE_GOAL_ROWS else None
        outside = outside_percent(trace)
        figures.append(Figure(f"{name}: outside the model", outside, "%", outside_goal))
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write it as JSON if asked to."""
    arguments = command_line("decode", __doc__, device=True).parse_args(argv)
    device = resolve_device(arguments.device)
    on_cuda = device.type == "cuda"
    config = OURO_1_4B if on_cuda else read_config(EMBEDDED_DIRECTORY)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    cuda = Scale(rows=(1, 32, 128), context=1024, plans=5, ticks=64, block_size=64)
    scale = cuda if on_cuda else Scale((1, 4), context=32, plans=2, ticks=8, block_size=16)
    model = random_model(config, dtype, device)
    figures = []
    if on_cuda:
        figures.append(Figure("read bandwidth", read_bandwidth(device) / 1e12, "TB/s"))
    for rows in scale.rows:
        for depths in (MIXED, FULL):
            figures += measure(model, scale, rows, depths)
            if on_cuda:
                torch.cuda.empty_cache()
    finish("decode", figures, table(figures), arguments)


if __name__ == "__main__":
    main()
