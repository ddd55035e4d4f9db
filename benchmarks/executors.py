"""What it costs to have a worker elsewhere, and what a second one gives.

The same decoding requests through a worker of this process and through one that Ray has started on
this machine, in turns, by the ticks of a plan; then one Ray worker beside two that have twice the
requests. On CUDA with the shapes of Ouro-1.4B in bfloat16 and a GPU a worker, elsewhere ouro-tiny
and a thread a worker. The benchmark starts Ray itself, and ends it.

python -m benchmarks.executors --json FILE
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from benchmarks.checkpoint import model_for
from benchmarks.closed_loop import TIMEOUT, ClosedLoop
from benchmarks.command import command_line, finish
from benchmarks.decode import MIXED
from benchmarks.loop_batch import OURO_1_4B
from benchmarks.plot import Panel
from benchmarks.ray_cluster import own_ray
from benchmarks.report import Figure, grid, progress
from benchmarks.workload import held_out_asks, random_asks
from cluster.ray_workers import RayWorkers
from protocol.config import (
    CacheSettings,
    ClusterSettings,
    Configuration,
    ModelSettings,
    SchedulerSettings,
    WorkerSettings,
)
from worker.local_executor import LocalExecutor
from worker.worker import resolve_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.workload import Ask

TICKS = (1, 4, 16, 64)
TWO_WORKERS_TICKS = 16
RAY_GOAL = 97.0
"""Percent of a worker of this process, at least, from so many ticks a plan:"""
RAY_GOAL_TICKS = 16
TWO_GOAL = 1.9
"""Times one GPU, at least, with two."""

ROW = "{} ticks a plan"


@dataclass(frozen=True, slots=True)
class Scale:
    """The requests of two workers, of which one gets half; how often all is run, and goals."""

    asks: Sequence[Ask]
    threshold: float
    rounds: int
    ray_goal: float | None = None
    two_goal: float | None = None

    @property
    def half(self) -> Sequence[Ask]:
        """The requests of one worker."""
        return self.asks[: len(self.asks) // 2]


def scale_of(device: torch.device, *, quick: bool) -> Scale:
    """How much is measured on a device."""
    if device.type == "cuda":
        asks = random_asks(64, 128, 256, MIXED, OURO_1_4B.vocab_size)
        return Scale(asks, 1.0, 3, RAY_GOAL, TWO_GOAL)
    if quick:
        return Scale(held_out_asks(4, (8, 8), (8, 8)), 0.9, 1)
    return Scale(held_out_asks(16, (32, 32), (256, 256)), 0.9, 7, RAY_GOAL)


def scheduler_settings(ticks: int) -> SchedulerSettings:
    """Plans of exactly so many ticks once all prompts are in."""
    return SchedulerSettings(
        prefill_chunk_size=1024,
        max_prefill_tokens=2048,
        prefix_caching=False,
        plans_in_flight=2,
        max_ticks=ticks,
        tick_interval=60.0,
    )


class Bench:
    """The worker of this process and those on Ray. Owner: main. Mutated only by: its runs."""

    def __init__(self, configuration: Configuration, scale: Scale) -> None:
        self._configuration = configuration
        self._scale = scale
        self._rates: dict[str, list[float]] = defaultdict(list)

    def compare(self, local: LocalExecutor, ticks: int) -> list[Figure]:
        """This process beside one Ray worker."""
        settings, rates = scheduler_settings(ticks), self._rates
        rates.clear()
        with RayWorkers.open(self._configuration, 1) as workers:
            local.begin_epoch(local.epoch + 1, TIMEOUT)
            loops = {
                "local": ClosedLoop({"lane-0": local}, settings),
                "Ray": ClosedLoop(workers.executors, settings),
            }
            for number in range(self._scale.rounds + 1):
                for name, loop in loops.items():
                    rate = self._run(loop, self._scale.half, f"{ROW.format(ticks)}, {name}")
                    if number:  # the first is not counted
                        rates[name].append(rate)
        name = ROW.format(ticks)
        goal = self._scale.ray_goal if ticks >= RAY_GOAL_TICKS else None
        shares = [100 * ray / own for ray, own in zip(rates["Ray"], rates["local"], strict=True)]
        return [
            *(Figure(f"{name}: {home}", median(found), "tok/s") for home, found in rates.items()),
            Figure(f"{name}: Ray / local", median(shares), "%", goal, at_least=True),
        ]

    def pair(self) -> list[Figure]:
        """One Ray worker beside two, each opened anew in every round."""
        rates, name = self._rates, ROW.format(TWO_WORKERS_TICKS)
        rates.clear()
        for _ in range(self._scale.rounds):
            for count, asks in ((1, self._scale.half), (2, self._scale.asks)):
                with RayWorkers.open(self._configuration, count) as workers:
                    settings = scheduler_settings(TWO_WORKERS_TICKS)
                    loop = ClosedLoop(workers.executors, settings)
                    for _ in range(2):  # the first is not counted
                        rate = self._run(loop, asks, f"{name}, {count} on Ray")
                    rates[f"{count} on Ray"].append(rate)
        one, two = rates.values()
        ratios = [both / alone for alone, both in zip(one, two, strict=True)]
        return [
            *(Figure(f"{name}: {home}", median(found), "tok/s") for home, found in rates.items()),
            Figure(
                f"{name}: two / one", median(ratios), "times", self._scale.two_goal, at_least=True
            ),
        ]

    def _run(self, loop: ClosedLoop, asks: Sequence[Ask], name: str) -> float:
        progress(f"executors: {name}")
        return loop.run(asks, len(asks), self._scale.threshold).rate


def configuration_of(scale: Scale, model: ModelSettings, device: torch.device) -> Configuration:
    """Workers with room for half of the requests, a GPU or a thread each."""
    rows = len(scale.half)
    longest = max(len(ask.prompt) + ask.outputs for ask in scale.asks)
    on_cuda = device.type == "cuda"
    worker = WorkerSettings(
        model=model,
        cache=CacheSettings(num_blocks=rows * 4 * -(-longest // 16)),
        device=device.type,
        num_slots=rows,
        max_step_tokens=2048,
        num_threads=None if on_cuda else 1,
    )
    cluster = ClusterSettings(num_gpus=1.0 if on_cuda else 0.0)
    return Configuration(worker=worker, cluster=cluster)


def measure(
    configuration: Configuration, scale: Scale, ticks: Sequence[int], *, two: bool
) -> list[Figure]:
    """All figures; `two` when a second worker has a place."""
    bench = Bench(configuration, scale)
    figures: list[Figure] = []
    with own_ray(num_cpus=4):
        with LocalExecutor.open(configuration.worker) as local:
            for count in ticks:
                figures += bench.compare(local, count)
        if two:
            figures += bench.pair()
        else:
            progress("two workers are left out: this machine has one GPU")
    return figures


def panels(figures: Sequence[Figure]) -> list[Panel]:
    """Outputs a second by the ticks of a plan."""
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for figure in figures:
        row, _, column = figure.name.partition(": ")
        if figure.unit == "tok/s":
            lines[column].append((float(row.split()[0]), figure.value))
    return [Panel("output", "ticks a plan", "tok/s", lines, log_x=True)]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write what is asked for."""
    parser = command_line("executors", __doc__, device=True, quick=True)
    arguments = parser.parse_args(argv)
    device, quick = resolve_device(arguments.device), arguments.quick
    on_cuda = device.type == "cuda"
    scale = scale_of(device, quick=quick)
    with model_for(device) as model:
        configuration = configuration_of(scale, model, device)
        two = not on_cuda or torch.cuda.device_count() > 1
        ticks = (RAY_GOAL_TICKS,) if quick else TICKS
        figures = measure(configuration, scale, ticks, two=two)
    finish("executors", figures, grid(figures), arguments, panels(figures))


if __name__ == "__main__":
    main()
