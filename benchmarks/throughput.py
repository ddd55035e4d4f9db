"""Output tokens a second of an engine and its worker, prompts included, beside plain baselines.

A closed loop: so many requests are in work at any time; as one ends, the next begins. On CUDA with
the shapes of Ouro-1.4B in bfloat16, seeded random weights, 1,024 tokens in and 128 out, exit depths
forced to a seeded trace of mean 2.5 or to 4. Elsewhere ouro-tiny in float32 at falling thresholds:
pieces of held-out text, mixed lengths. The same requests run through static batches of the same
model and, on a CPU with the extra `baseline`, through Hugging Face generate on a Llama with as many
operations a token. What is compared runs in turns; figures are medians of the rounds.

python -m benchmarks.throughput --json FILE
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

import torch

from benchmarks.apart import Apart
from benchmarks.checkpoint import model_for
from benchmarks.command import command_line, finish, positive
from benchmarks.comparison import Comparison, Variant
from benchmarks.decode import FULL, MIXED, floor_tick_ms
from benchmarks.hugging_face import MISSING, LlamaBatches, is_available
from benchmarks.loop_batch import OURO_1_4B
from benchmarks.plot import Panel
from benchmarks.report import Figure, grid, progress
from benchmarks.static_batch import StaticBatches
from benchmarks.workload import held_out_asks, random_asks
from protocol.config import CacheSettings, ModelSettings, SchedulerSettings, WorkerSettings
from worker.local_executor import LocalExecutor
from worker.models.config import read_config
from worker.models.registry import EMBEDDED_DIRECTORY
from worker.models.torch_loop import TorchLoopKernels
from worker.worker import load_settings, resolve_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from benchmarks.apart import Batches
    from benchmarks.comparison import Baseline
    from benchmarks.workload import Ask

GOALS = {32: 2500.0, 128: 3200.0}
"""Output tokens a second, at least, on CUDA at a mean depth of 2.5."""

OUTSIDE_GOAL = 15.0
"""Percent of the time outside the model, at most, on a CPU with 32 requests at once."""

STATIC, LLAMA = "static batches", "Hugging Face"
RATIO_GOALS = {
    1: {("threshold 0.9", LLAMA): 3.0},
    8: {("threshold 0.9", LLAMA): 3.0},
    32: {("threshold 0.9", LLAMA): 3.0, ("threshold 0.9", STATIC): 3.0},
}
"""Times a baseline's outputs a second, at least, on a CPU, by requests at once."""

SCHEDULER = SchedulerSettings(max_waiting=4096, prefix_caching=False)
"""As it comes, but for a cache that the second run would profit from."""

PROMPT, OUTPUTS = 1024, 128
"""Tokens of a request on CUDA."""


@dataclass(frozen=True, slots=True)
class Case:
    """So many requests at once, in each of these ways."""

    concurrency: int
    variants: tuple[Variant, ...]

    @property
    def asks(self) -> Sequence[Ask]:
        """The requests; all ways have the same lengths."""
        return self.variants[0].asks


def cases_of(
    device: torch.device, sizes: Sequence[int] | None = None, *, quick: bool
) -> list[Case]:
    """What is measured on a device, with `sizes` requests at once, or as many as are usual."""
    cases = []
    if device.type == "cuda":
        for size in sizes or (1, 8, 32, 128):
            variants = []
            for name, depths in (("depth 2.5", MIXED), ("depth 4", FULL)):
                asks = random_asks(
                    4 * size, PROMPT, OUTPUTS, depths, OURO_1_4B.vocab_size, concurrency=size
                )
                goal = GOALS.get(size) if depths == MIXED else None
                variants.append(Variant(name, asks, goal=goal))
            cases.append(Case(size, tuple(variants)))
        return cases
    for size in sizes or ((1, 4) if quick else (1, 8, 32)):
        lengths = ((8, 16), (4, 8)) if quick else ((16, 128), (16, 128))
        asks = held_out_asks(2 * size if quick else max(4 * size, 8), *lengths)
        limits = (1.0, 0.9, 0.7)
        ways = tuple(Variant(f"threshold {limit}", asks, limit) for limit in limits)
        cases.append(Case(size, ways))
    return cases


def worker_settings(
    case: Case, model: ModelSettings, device: torch.device, threads: int | None
) -> WorkerSettings:
    """A worker with a slot and blocks for each request of a case."""
    longest = max(len(ask.prompt) + ask.outputs for ask in case.asks)
    return WorkerSettings(
        model=model,
        cache=CacheSettings(num_blocks=case.concurrency * 4 * -(-longest // 16)),
        device=str(device),
        num_slots=case.concurrency,
        num_threads=threads,
    )


class Baselines:
    """What the engine is compared with. Owner: main. Mutated only by: __exit__, which ends them."""

    def __init__(self, settings: ModelSettings, device: torch.device) -> None:
        self._device = device
        self._apart = ExitStack()
        self._batches: dict[str, Batches] = {}
        if device.type == "cuda":
            self._batches[STATIC] = plain_batches(settings, device)
            return
        makers: dict[str, Callable[[], Batches]] = {
            STATIC: partial(plain_batches, settings, device)
        }
        if is_available():
            makers[LLAMA] = partial(LlamaBatches, read_config(EMBEDDED_DIRECTORY))
        else:
            progress(MISSING)
        for name, make in makers.items():
            self._batches[name] = self._apart.enter_context(Apart(make))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._apart.__exit__(kind, error, traceback)

    def fitting(self, case: Case) -> dict[str, Baseline]:
        """Those whose batches fit beside the worker that is open."""
        static = self._batches[STATIC]
        if isinstance(static, StaticBatches):
            needed = static.cache_bytes(case.asks[: case.concurrency])
            if 1.1 * needed > torch.cuda.mem_get_info(self._device)[0]:
                progress(f"{STATIC} of {case.concurrency} are left out: no room for their KV")
                return {}
        return {name: batches.run for name, batches in self._batches.items()}


def plain_batches(settings: ModelSettings, device: torch.device) -> StaticBatches:
    """Static batches of a model in plain torch."""
    return StaticBatches(load_settings(WorkerSettings(model=settings), device, TorchLoopKernels()))


def measure(
    case: Case, executor: LocalExecutor, baselines: Baselines, rounds: int, *, quick: bool
) -> list[Figure]:
    """All figures of a case, over a worker that has as many slots."""
    on_cpu = executor.profile().device == "cpu"
    size, floor = case.concurrency, None
    if not on_cpu:
        floor = floor_tick_ms(OURO_1_4B, torch.bfloat16, size, PROMPT + OUTPUTS // 2)
    fitting = baselines.fitting(case)
    progress(f"throughput: {size} at once, not counted")
    # The first run pays for what is compiled and cached as it is met.
    first = Variant("warm-up", case.asks[:size], case.variants[-1].threshold)
    Comparison(size, [first], fitting, on_cpu=False).turn(executor, SCHEDULER)
    comparison = Comparison(size, case.variants, fitting, on_cpu=on_cpu, floor_ms=floor)
    for number in range(rounds):
        progress(f"throughput: {size} at once, round {number + 1} of {rounds}")
        comparison.turn(executor, SCHEDULER)
    has_goals = on_cpu and not quick
    goals = RATIO_GOALS.get(size, {}) if has_goals else {}
    return comparison.figures(OUTSIDE_GOAL if has_goals and size == 32 else None, goals)


def panels(figures: Sequence[Figure]) -> list[Panel]:
    """Outputs a second, and the time outside the model, by requests at once."""
    found = []
    for column, label in (("output", "tok/s"), ("outside the model", "% of the time")):
        lines: dict[str, list[tuple[float, float]]] = {}
        for figure in figures:
            row, _, name = figure.name.rpartition(": ")
            if name == column:
                size, _, line = row.partition(" at once, ")
                lines.setdefault(line, []).append((float(size), figure.value))
        if lines:
            found.append(Panel(column, "requests at once", label, lines, log_x=True))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write what is asked for."""
    parser = command_line("throughput", __doc__, device=True, quick=True)
    parser.add_argument("--rounds", type=positive, default=3, help="of everything (default 3)")
    parser.add_argument(
        "--at-once",
        type=positive,
        nargs="+",
        help="requests, in place of the usual numbers of them",
    )
    parser.add_argument("--threads", type=positive, help="of a CPU, for each of those compared")
    arguments = parser.parse_args(argv)
    device, quick = resolve_device(arguments.device), arguments.quick
    rounds = 1 if quick else arguments.rounds
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    figures: list[Figure] = []
    with model_for(device) as model, Baselines(model, device) as baselines:
        for case in cases_of(device, arguments.at_once, quick=quick):
            settings = worker_settings(case, model, device, arguments.threads)
            with LocalExecutor.open(settings) as executor:
                figures += measure(case, executor, baselines, rounds, quick=quick)
    finish("throughput", figures, grid(figures), arguments, panels(figures))


if __name__ == "__main__":
    main()
