"""What a loop, a prompt and a start cost a worker: time beside its floor, and memory.

On CUDA with the shapes of Ouro-1.4B in bfloat16; elsewhere with ouro-tiny and few rows, which shows
that the benchmark runs.

python -m benchmarks.worker --json FILE
python -m benchmarks.worker --part prefill
"""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from benchmarks.command import command_line, finish, positive
from benchmarks.device_times import captured, milliseconds, product_rate, read_bandwidth
from benchmarks.loop_batch import OURO_1_4B, LoopBatch, Products, random_model
from benchmarks.report import Figure, progress, table
from protocol.identity import RequestKey
from protocol.plan import PrefillBatch
from worker.attention.choice import choose_attention
from worker.graphs import ROW_BUCKETS, TOKEN_BUCKETS
from worker.models.config import read_config
from worker.models.registry import EMBEDDED_DIRECTORY
from worker.stages import run_prefill
from worker.worker import resolve_device, with_graphs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.models.config import OuroConfig
    from worker.models.ouro import OuroModel

GOALS = {1: 1.2, 32: 2.8, 128: 7.4}
"""Milliseconds of a loop, at most, by rows."""

PARTS = ("start", "prefill", "loop")

START_GOAL = 60.0
"""Seconds from weights to the last captured graph, at most."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the measurements are on one kind of device."""

    config: OuroConfig
    dtype: torch.dtype
    rows: tuple[int, ...]
    context: int
    prompts: tuple[int, ...]
    rounds: int


def scale_of(device: torch.device) -> Scale:
    """Ouro-1.4B on CUDA, ouro-tiny elsewhere."""
    if device.type == "cuda":
        rows = (1, 8, 32, 64, 128, 256)
        return Scale(OURO_1_4B, torch.bfloat16, rows, 1024, (128, 512, 1024, 2048), 20)
    return Scale(read_config(EMBEDDED_DIRECTORY), torch.float32, (1, 4), 64, (64,), 3)


def loop_figures(
    scale: Scale, model: OuroModel, block_size: int, bandwidth: float, rate: float
) -> list[Figure]:
    """Milliseconds of a loop by rows: eager, as a graph, the better, and its parts and floor."""
    device, figures = model.device, []
    products = Products(scale.config, scale.dtype, device)
    for rows in scale.rows:
        # All planes of 256 rows of 1,024 tokens would take 192 GiB.
        read_planes = rows > 128
        batch = LoopBatch(
            scale.config, model, rows, scale.context, block_size, read_planes=read_planes
        )
        name = f"loop, {rows} rows"
        eager = milliseconds(batch.loop, device, scale.rounds, batch.rewind)
        figures.append(Figure(f"{name}: eager", eager, "ms"))
        best = eager
        if device.type == "cuda":
            graph = milliseconds(captured(batch.loop, device), device, scale.rounds, batch.rewind)
            figures.append(Figure(f"{name}: graph", graph, "ms"))
            best = min(best, graph)
        floor = max(batch.num_bytes / bandwidth, batch.flops / rate) * 1e3
        hidden = batch.slots.hidden[:rows].clone()
        attention = captured(batch.attention, device)
        matrices = captured(partial(products.run, hidden), device)
        figures += [
            Figure(f"{name}: best", best, "ms", GOALS.get(rows) if device.type == "cuda" else None),
            Figure(f"{name}: floor", floor, "ms"),
            Figure(f"{name}: attention", milliseconds(attention, device, scale.rounds), "ms"),
            Figure(f"{name}: products", milliseconds(matrices, device, scale.rounds), "ms"),
        ]
        progress(f"{name}: best {best:.3f} ms, floor {floor:.3f} ms")
        del batch, attention, matrices
        release(device)
    return figures


def prefill_figures(scale: Scale, model: OuroModel, block_size: int) -> list[Figure]:
    """Tokens a second of one prompt through all loops, by the tokens of its chunk."""
    device, figures = model.device, []
    batch = LoopBatch(scale.config, model, 1, scale.prompts[-1], block_size)
    graphed = with_graphs(batch.on, 1, scale.prompts[-1])
    for tokens in scale.prompts:
        prompt = PrefillBatch((RequestKey("prompt", 1),), (0,), (tokens,))
        for name, on in (("eager", batch.on), ("graph", graphed)):
            if name == "graph" and on.prefill_graphs is None:
                continue
            run = partial(run_prefill, on, prompt, [0], [True])
            rate = tokens / milliseconds(run, device, scale.rounds) * 1e3
            figures.append(Figure(f"prefill, {tokens} tokens: {name}", rate, "tokens/s"))
    return figures


def start_figures(scale: Scale, device: torch.device, block_size: int) -> list[Figure]:
    """Seconds until all graphs are captured, and device memory by what takes it."""
    started = time.perf_counter()
    before = allocated(device)
    model = random_model(scale.config, scale.dtype, device)
    weights = allocated(device) - before
    rows = ROW_BUCKETS[-1] if device.type == "cuda" else scale.rows[-1]
    batch = LoopBatch(scale.config, model, rows, block_size, block_size, read_planes=True)
    held = allocated(device)
    workspace = choose_attention("auto", model, rows, device)
    workspace_bytes = allocated(device) - held
    progress(f"attention: {workspace.name}")
    release(device)
    held = free(device)
    graphed = with_graphs(batch.on, rows, TOKEN_BUCKETS[-1])
    taken = held - free(device)
    seconds = time.perf_counter() - started
    progress(f"{graphed.loop_graphs}, {graphed.prefill_graphs}: {seconds:.1f} s")
    token = batch.storage.pages[0].nbytes * model.profile.max_loops / block_size
    return [
        Figure("start, kernels and graphs included", seconds, "s", START_GOAL),
        Figure("memory: weights", weights / 2**20, "MiB"),
        Figure("memory: attention's workspace", workspace_bytes / 2**20, "MiB"),
        Figure(f"memory: graphs of up to {rows} rows", taken / 2**20, "MiB"),
        Figure("memory: KV of a token at all depths", token / 2**10, "KiB"),
    ]


def allocated(device: torch.device) -> int:
    """Bytes that torch has handed out on a CUDA device; 0 elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free(device: torch.device) -> int:
    """Bytes that a CUDA device has left; 0 elsewhere."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def release(device: torch.device) -> None:
    """Give memory that nobody uses any more back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@torch.inference_mode()
def measure(device: torch.device, block_size: int, parts: Sequence[str]) -> list[Figure]:
    """The figures of these PARTS on a device; those of loops need its ceilings."""
    scale = scale_of(device)
    figures = []
    if "start" in parts:
        figures += start_figures(scale, device, block_size)
        release(device)
    bandwidth = rate = 0.0
    if "loop" in parts:
        bandwidth, rate = read_bandwidth(device), product_rate(device, scale.dtype)
        release(device)
        figures += [
            Figure("ceiling: read-only bandwidth", bandwidth / 1e12, "TB/s"),
            Figure("ceiling: matrix products", rate / 1e12, "TFLOP/s"),
        ]
    model = random_model(scale.config, scale.dtype, device)
    if "prefill" in parts:
        figures += prefill_figures(scale, model, block_size)
        release(device)
    if "loop" in parts:
        figures += loop_figures(scale, model, block_size, bandwidth, rate)
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write it as JSON if asked to."""
    parser = command_line("worker", __doc__, device=True)
    parser.add_argument(
        "--block-size", type=positive, default=16, help="tokens a block (default 16)"
    )
    parser.add_argument(
        "--part",
        action="append",
        choices=PARTS,
        dest="parts",
        help="measure this alone; may be repeated (default all)",
    )
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parts = arguments.parts or PARTS
    figures = measure(resolve_device(arguments.device), arguments.block_size, parts)
    finish("worker", figures, table(figures), arguments)


if __name__ == "__main__":
    main()
