"""Small random checkpoints in the Ouro format, written to disk."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from worker.models.config import OuroConfig
from worker.models.ouro import tensor_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor


def config_values(**changes: object) -> dict[str, Any]:
    """A config.json of two layers, three loops and grouped heads, with `changes` applied."""
    values: dict[str, Any] = {
        "model_type": "ouro",
        "vocab_size": 97,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "total_ut_steps": 3,
        "early_exit_threshold": 0.75,
        "eos_token_id": 5,
    }
    return values | changes


def random_tensors(values: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """A float32 tensor for every name of the format; norms near 1, the rest of unit gain."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(OuroConfig.model_validate(values)).items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1.0 + 0.1 * noise if "norm" in name else noise * shape[-1] ** -0.5
    return tensors


def write_config(directory: Path, values: Mapping[str, Any]) -> None:
    """Write config.json, creating the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))


def write_checkpoint(
    directory: Path,
    values: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    shards: int = 1,
) -> Path:
    """Write config.json and the weights: one file, or `shards` files and their index."""
    values = config_values() if values is None else values
    tensors = random_tensors(values) if tensors is None else tensors
    write_config(directory, values)
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors")
        return directory
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(sorted(tensors.items())[shard::shards])
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: object) -> None:
    """Write model.safetensors.index.json."""
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
