"""One stream or three for steps that the scheduler plans one by one.

The same requests through two workers, one with `streams` 1 and one with 3, in turns. Neither has
ticks of its own, so every loop and every boundary is a step of a plan: prompts and loops on the
core stream, PRELUDE and CODA on the boundary stream, values on the copy stream. On CUDA with the
shapes of Ouro-1.4B in bfloat16 and exit depths of a trace of mean 2.5, elsewhere ouro-tiny, where
both do the same.

python -m benchmarks.streams --json FILE
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.checkpoint import model_for
from benchmarks.closed_loop import TIMEOUT, ClosedLoop
from benchmarks.command import command_line, finish
from benchmarks.decode import MIXED
from benchmarks.loop_batch import OURO_1_4B
from benchmarks.report import Figure, grid, progress
from benchmarks.workload import held_out_asks, random_asks
from protocol.config import CacheSettings, SchedulerSettings, WorkerSettings
from worker.local_executor import LocalExecutor
from worker.worker import resolve_device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal

    import torch

    from benchmarks.workload import Ask
    from protocol.config import ModelSettings

STREAMS: tuple[Literal[1, 3], ...] = (1, 3)
ROUNDS = 3
SCHEDULER = SchedulerSettings(
    prefill_chunk_size=1024, max_prefill_tokens=2048, prefix_caching=False, plans_in_flight=2
)


def cases_of(device: torch.device, *, quick: bool) -> dict[int, Sequence[Ask]]:
    """Requests by how many of them are in work at once."""
    if device.type == "cuda":
        vocabulary = OURO_1_4B.vocab_size
        return {size: random_asks(2 * size, 256, 64, MIXED, vocabulary) for size in (1, 8, 32)}
    outputs = (4, 4) if quick else (32, 32)
    return {size: held_out_asks(2 * size, (16, 16), outputs) for size in (1, 8)}


def open_worker(
    asks: Sequence[Ask], size: int, streams: Literal[1, 3], model: ModelSettings, device: str
) -> LocalExecutor:
    """A worker without ticks, with a slot and blocks for so many of these requests."""
    longest = max(len(ask.prompt) + ask.outputs for ask in asks)
    settings = WorkerSettings(
        model=model,
        cache=CacheSettings(num_blocks=size * 4 * -(-longest // 16)),
        device=device,
        num_slots=size,
        max_step_tokens=2048,
        max_ticks=0,
        streams=streams,
    )
    return LocalExecutor.open(settings)


def measure(
    asks: Sequence[Ask], size: int, workers: Mapping[Literal[1, 3], LocalExecutor]
) -> list[Figure]:
    """Outputs a second of each worker, and of three streams over one."""
    rates: dict[int, list[float]] = defaultdict(list)
    for number in range(ROUNDS + 1):
        for streams, worker in workers.items():
            progress(f"streams: {size} at once, {streams}")
            worker.begin_epoch(worker.epoch + 1, TIMEOUT)
            outcome = ClosedLoop({"lane-0": worker}, SCHEDULER).run(asks, size, 0.9)
            if number:  # the first is not counted
                rates[streams].append(outcome.rate)
    ratios = [three / one for one, three in zip(rates[1], rates[3], strict=True)]
    return [
        Figure(f"{size} at once: one stream", median(rates[1]), "tok/s"),
        Figure(f"{size} at once: three streams", median(rates[3]), "tok/s"),
        Figure(f"{size} at once: three / one", median(ratios), "times"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write what is asked for."""
    arguments = command_line("streams", __doc__, device=True, quick=True).parse_args(argv)
    device = resolve_device(arguments.device)
    figures: list[Figure] = []
    with model_for(device) as model:
        for size, asks in cases_of(device, quick=arguments.quick).items():
            with ExitStack() as stack:
                workers = {
                    streams: stack.enter_context(
                        open_worker(asks, size, streams, model, str(device))
                    )
                    for streams in STREAMS
                }
                figures += measure(asks, size, workers)
    finish("streams", figures, grid(figures), arguments)


if __name__ == "__main__":
    main()
