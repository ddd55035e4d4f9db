"""Output tokens a second of an engine and its worker, prompts included, in a closed loop.

`concurrency` requests are in work at any time; as one ends, the next begins. On CUDA with the
shapes of Ouro-1.4B in bfloat16, seeded random weights, 1,024 tokens in and 128 out, exit depths
forced to a seeded trace of mean 2.5 or to 4; elsewhere ouro-tiny at falling thresholds.

python -m benchmarks.throughput --json FILE
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from benchmarks.decode import FULL, MIXED
from benchmarks.loop_batch import OURO_1_4B, random_weights
from benchmarks.report import Figure, progress, table, write_json
from cluster.drivers import SyncDriver
from protocol.config import CacheSettings, ModelSettings, SchedulerSettings, WorkerSettings
from protocol.sampling import SamplingParams
from scheduler.engine import Engine
from worker.local_executor import LocalExecutor
from worker.worker import resolve_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.models.config import OuroConfig

GOALS = {32: 2500.0, 128: 3200.0}
"""Output tokens a second, at least, on CUDA at a mean depth of 2.5."""

TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """One closed loop: how many at once and in all, and what each of them is."""

    name: str
    concurrency: int
    requests: int
    prompt: int
    outputs: int
    depths: tuple[int, ...] = ()
    threshold: float = 1.0

    def params(self, pick: random.Random) -> SamplingParams:
        """Greedy outputs, at forced depths if there are any."""
        forced = None
        if self.depths:
            tens = (pick.sample(self.depths, len(self.depths)) for _ in range(self.outputs))
            forced = (4, *chain.from_iterable(tens))[: self.outputs]
        return SamplingParams(
            max_tokens=self.outputs,
            exit_threshold=self.threshold,
            forced_depths=forced,
            ignore_eos=True,
            seed=0,
        )


def write_checkpoint(config: OuroConfig, directory: Path, device: torch.device) -> None:
    """A checkpoint of these shapes with seeded random weights, bfloat16."""
    fields = config.model_dump() | {"architectures": ["OuroForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    weights = random_weights(config, torch.bfloat16, device)
    on_host = {name: value.cpu().contiguous() for name, value in weights.items()}
    save_file(on_host, directory / "model.safetensors")


def run(load: Load, executor: LocalExecutor, settings: SchedulerSettings) -> list[Figure]:
    """One closed loop over a worker."""
    progress(f"throughput: {load.name}")
    executor.begin_epoch(executor.epoch + 1, TIMEOUT)
    engine = Engine(settings)
    driver = SyncDriver(engine, {"lane-0": executor}, TIMEOUT)
    pick = random.Random(0)
    vocab_size = executor.profile().model.vocab_size
    started = time.perf_counter()
    added: dict[str, float] = {}
    firsts: list[float] = []
    tokens = loops = 0

    def add() -> None:
        name = f"r{len(added)}"
        prompt = [pick.randrange(1, vocab_size) for _ in range(load.prompt)]
        added[name] = time.perf_counter()
        engine.add(name, prompt, load.params(pick), 0)

    for _ in range(load.concurrency):
        add()
    while engine.has_work():
        for output in driver.step():
            output.raise_error()
            if output.start_index == 0 and output.tokens:
                firsts.append(time.perf_counter() - added[output.key.request_id])
            tokens += len(output.tokens)
            loops += sum(output.exit_depths)
            if output.finish_reason is not None and len(added) < load.requests:
                add()
    seconds = time.perf_counter() - started
    on_cuda = executor.profile().device.startswith("cuda")
    goal = GOALS.get(load.concurrency) if on_cuda and load.depths == MIXED else None
    return [
        Figure(f"{load.name}: output", tokens / seconds, "tok/s", goal, at_least=True),
        Figure(f"{load.name}: prompts", load.requests * load.prompt / seconds, "tok/s"),
        Figure(f"{load.name}: mean depth", loops / tokens, "loops"),
        Figure(f"{load.name}: first output, mean", sum(firsts) / len(firsts) * 1e3, "ms"),
    ]


def loads_of(device: torch.device, quick: bool) -> list[Load]:
    """What is measured on a device."""
    if device.type == "cuda":
        return [
            Load(f"{size} at once, depth {name}", size, 2 * size, 1024, 128, depths)
            for size in (32, 128)
            for name, depths in (("2.5", MIXED), ("4", FULL))
        ]
    sizes, outputs = ((1, 4), 8) if quick else ((1, 8, 32), 64)
    return [
        Load(f"{size} at once, threshold {limit}", size, 2 * size, 48, outputs, (), limit)
        for size in sizes
        for limit in (1.0, 0.9, 0.7)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default)")
    parser.add_argument("--quick", action="store_true", help="few and short requests on a CPU")
    arguments = parser.parse_args(argv)
    device = resolve_device(arguments.device)
    on_cuda = device.type == "cuda"
    loads = loads_of(device, arguments.quick)
    scheduler = SchedulerSettings(
        prefill_chunk_size=1024,
        max_prefill_tokens=2048,
        max_waiting=4096,
        prefix_caching=False,
        plans_in_flight=2,
        max_ticks=16,
    )
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as directory:
        model = ModelSettings()
        if on_cuda:
            write_checkpoint(OURO_1_4B, Path(directory), device)
            model = ModelSettings(model=directory, dtype="bfloat16")
        slots = max(load.concurrency for load in loads)
        longest = max(load.prompt + load.outputs for load in loads)
        cache = CacheSettings(num_blocks=slots * 4 * -(-longest // 16))
        worker = WorkerSettings(
            model=model,
            cache=cache,
            device=str(device),
            num_slots=slots,
            max_step_tokens=2048,
        )
        with LocalExecutor.open(worker) as executor:
            # The first requests pay for what is compiled and cached as it is met.
            first = replace(loads[0], name="warm-up, not counted", requests=loads[0].concurrency)
            run(first, executor, scheduler)
            for load in loads:
                figures += run(load, executor, scheduler)
    print(table(figures))
    if arguments.json is not None:
        write_json(arguments.json, "throughput", figures)


if __name__ == "__main__":
    main()
