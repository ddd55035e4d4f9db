"""What leaving early costs: the loss on held-out text, and the mean depth, by exit threshold.

ouro-tiny in float32 over the text that is shipped with it and that it was not trained on: 16,384
tokens of each of five sources, in windows of 512 tokens, each token at the depth that its gate
picks, with the KV that serving would leave. The loss is the mean of the sources'.

python -m benchmarks.quality --json FILE
"""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

import torch

from benchmarks.command import command_line, finish, positive
from benchmarks.plot import Panel
from benchmarks.report import Figure, grid, progress
from benchmarks.teacher_forcing import score
from benchmarks.workload import held_out
from protocol.config import ModelSettings, WorkerSettings
from worker.worker import load_settings, resolve_device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from worker.models.base import LoopedModel

THRESHOLDS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)
WINDOW, QUICK_WINDOW = 512, 64
MOST = 16_384

LOSS_GOALS = {0.9: 0.005, 0.8: 0.013}
"""Nats above the loss at full depth, less than: a quarter more than 0.0038 and 0.0103."""


def measure(
    model: LoopedModel, texts: Mapping[str, Sequence[int]], window: int, *, goals: bool
) -> list[Figure]:
    """Figures by threshold; the first is full depth, which the others are compared with."""
    figures = []
    full = 0.0
    for threshold in THRESHOLDS:
        progress(f"quality: threshold {threshold:g}")
        losses, depths = [], []
        for text in texts.values():
            loss, depth = _source(model, text, window, threshold)
            losses.append(loss)
            depths.append(depth)
        full = full or mean(losses)
        name = f"threshold {threshold:g}"
        goal = LOSS_GOALS.get(threshold) if goals else None
        figures += [
            Figure(f"{name}: mean depth", mean(depths), "loops"),
            Figure(f"{name}: loss", mean(losses), "nats"),
            Figure(f"{name}: above full depth", mean(losses) - full, "nats", goal),
        ]
        for source, loss in zip(texts, losses, strict=True):
            figures.append(Figure(f"{name}: {source}", loss, "nats"))
    return figures


def _source(
    model: LoopedModel, text: Sequence[int], window: int, threshold: float
) -> tuple[float, float]:
    """Mean loss and mean depth of the predicted tokens of one source."""
    losses, depths = [], []
    for first in range(0, len(text) - 1, window):
        tokens = torch.tensor(text[first : first + window], device=model.device)
        scored = score(model, tokens, threshold)
        losses.append(scored.losses(tokens))
        depths.append(scored.depths[:-1])
    return torch.cat(losses).mean().item(), torch.cat(depths).float().mean().item()


def panels(figures: Sequence[Figure]) -> list[Panel]:
    """The loss over the mean depth."""
    values = {figure.name: figure.value for figure in figures}
    names = [f"threshold {threshold:g}" for threshold in THRESHOLDS]
    points = [(values[f"{name}: mean depth"], values[f"{name}: loss"]) for name in names]
    title = "held-out loss at thresholds " + ", ".join(f"{limit:g}" for limit in THRESHOLDS)
    return [Panel(title, "mean depth, loops", "nats a token", {"ouro-tiny": points})]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write what is asked for."""
    parser = command_line("quality", __doc__, device=True, quick=True)
    parser.add_argument(
        "--tokens", type=positive, default=MOST, help=f"a source (default {MOST}, all)"
    )
    arguments = parser.parse_args(argv)
    model = load_settings(WorkerSettings(model=ModelSettings()), resolve_device(arguments.device))
    window, most = WINDOW, arguments.tokens
    if arguments.quick:
        window, most = QUICK_WINDOW, 2 * QUICK_WINDOW
    texts = {name: ids[:most] for name, ids in held_out().items()}
    figures = measure(model, texts, window, goals=not arguments.quick)
    finish("quality", figures, grid(figures), arguments, panels(figures))


if __name__ == "__main__":
    main()
