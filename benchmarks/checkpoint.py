"""The model that a benchmark serves: shapes of Ouro-1.4B on CUDA, elsewhere ouro-tiny."""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from benchmarks.loop_batch import OURO_1_4B, random_weights
from protocol.config import ModelSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worker.models.config import OuroConfig


@contextmanager
def model_for(device: torch.device) -> Iterator[ModelSettings]:
    """The settings of a model that is there within the block: on CUDA a checkpoint is written."""
    if device.type != "cuda":
        yield ModelSettings()
        return
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(OURO_1_4B, Path(directory), device)
        yield ModelSettings(model=directory, dtype="bfloat16")


def write_checkpoint(config: OuroConfig, directory: Path, device: torch.device) -> None:
    """A checkpoint of these shapes with seeded random weights, bfloat16."""
    fields = config.model_dump() | {"architectures": ["OuroForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    weights = random_weights(config, torch.bfloat16, device)
    on_host = {name: value.cpu().contiguous() for name, value in weights.items()}
    save_file(on_host, directory / "model.safetensors")
