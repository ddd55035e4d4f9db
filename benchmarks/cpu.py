"""What a CPU's own kernels are worth: one loop of ouro-tiny's shapes, beside plain torch.

Rows at mixed depth with 112 tokens each, in float32: a loop whole, the attention of all its layers
with rotation and KV write, and its products. Both ways run in turns.

python -m benchmarks.cpu --json FILE
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING

import torch

from benchmarks.command import command_line, finish, positive
from benchmarks.device_times import milliseconds
from benchmarks.loop_batch import LoopBatch, Products, random_weights
from benchmarks.report import Figure, grid, progress
from worker.models.config import read_config
from worker.models.loop_kernels import loop_kernels
from worker.models.ouro import OuroModel
from worker.models.registry import EMBEDDED_DIRECTORY
from worker.models.torch_loop import TorchLoopKernels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol.config import AttentionName
    from worker.models.config import OuroConfig
    from worker.models.loop_kernels import LoopKernels

CPU = torch.device("cpu")
ROWS = (1, 8, 32)
CONTEXT, BLOCK_SIZE = 112, 16
TURNS, QUICK_TURNS = 7, 1


def parts_of(
    config: OuroConfig, rows: int, attention: AttentionName, kernels: LoopKernels
) -> dict[str, Callable[[], object]]:
    """What is timed, by its name."""
    model = OuroModel(config, random_weights(config, torch.float32, CPU), "cpu", "cpu", kernels)
    batch = LoopBatch(config, model, rows, CONTEXT, BLOCK_SIZE, attention=attention)
    products = Products(config, torch.float32, CPU, kernels)
    x = torch.randn(rows, config.hidden_size)

    def loop() -> None:
        batch.rewind()
        batch.loop()

    return {"loop": loop, "attention": batch.attention, "products": lambda: products.run(x)}


@torch.inference_mode()
def measure(rows: Sequence[int], turns: int) -> list[Figure]:
    """Milliseconds of each part, and how many times as fast a CPU's own kernels are."""
    config = read_config(EMBEDDED_DIRECTORY)
    figures = []
    for count in rows:
        progress(f"cpu: {count} rows")
        ways = {
            "torch": parts_of(config, count, "torch", TorchLoopKernels()),
            "ours": parts_of(config, count, "auto", loop_kernels(CPU, torch.float32)),
        }
        times: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(turns):
            for part in ways["torch"]:
                for way, parts in ways.items():
                    times[way, part].append(milliseconds(parts[part], CPU))
        for part in ways["torch"]:
            pairs = zip(times["torch", part], times["ours", part], strict=True)
            name = f"{count} rows, {part}"
            figures += [
                Figure(f"{name}: torch", median(times["torch", part]), "ms"),
                Figure(f"{name}: ours", median(times["ours", part]), "ms"),
                Figure(f"{name}: ratio", median(plain / own for plain, own in pairs), "times"),
            ]
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write what is asked for."""
    parser = command_line("cpu", __doc__, quick=True)
    parser.add_argument("--threads", type=positive, help="that compute (default: torch's choice)")
    arguments = parser.parse_args(argv)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    figures = measure(ROWS, QUICK_TURNS if arguments.quick else TURNS)
    finish("cpu", figures, grid(figures), arguments)


if __name__ == "__main__":
    main()
