"""Checkpoints on disk: what loads, and what each kind of broken one is told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from protocol.errors import ModelError
from tests.checkpoints import (
    config_values,
    random_tensors,
    write_checkpoint,
    write_config,
    write_index,
)
from worker.models.config import OuroConfig
from worker.models.loader import read_weights, verify_checkpoint
from worker.models.ouro import tensor_shapes
from worker.models.registry import load_model

if TYPE_CHECKING:
    from pathlib import Path

    from worker.models.base import LoopedModel

GATE = "model.early_exit_gate.weight"


def load(directory: Path, dtype: torch.dtype = torch.float32) -> LoopedModel:
    return load_model(directory, dtype, torch.device("cpu"), "small")


def refusal(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(directory)
    return str(caught.value)


def logits(model: LoopedModel) -> torch.Tensor:
    return model.logits(model.embed(torch.arange(5)))


# Weights


@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_loads_from_one_file_or_many(tmp_path: Path, shards: int) -> None:
    directory = write_checkpoint(tmp_path, shards=shards)
    tensors = random_tensors(config_values())
    files = verify_checkpoint(directory, tensor_shapes(OuroConfig.model_validate(config_values())))
    weights = read_weights(files, torch.float32, torch.device("cpu"))
    assert weights.keys() == tensors.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in tensors.items())
    expected = tensors["model.embed_tokens.weight"][:5] @ tensors["lm_head.weight"].T
    torch.testing.assert_close(logits(load(directory)), expected)


def test_weights_are_cast_to_the_serving_dtype(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path), torch.bfloat16)
    assert model.dtype == model.embed(torch.tensor([1])).dtype == torch.bfloat16


def test_replacing_the_file_does_not_touch_a_loaded_model(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path))
    before = logits(model)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert torch.equal(logits(model), before)


def test_every_wrong_tensor_is_named_in_one_error(tmp_path: Path) -> None:
    tensors = random_tensors(config_values())
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(40, 24)
    tensors[GATE] = torch.zeros(2, 24)
    tensors["lm_head.weight"] = torch.zeros(97, 24, dtype=torch.int8)
    message = refusal(write_checkpoint(tmp_path, tensors=tensors))
    assert "model.norm.weight: missing" in message
    assert "model.layers.1.mlp.up_proj.weight: missing" in message
    assert "model.layers.2.mlp.up_proj.weight: unexpected" in message
    assert f"{GATE}: shape [2, 24], expected [1, 24]" in message
    assert "lm_head.weight: dtype I8, supported are F64, F32, F16, BF16" in message
    assert message.count(";") == 4


def test_tensors_are_checked_before_any_weight_is_read(tmp_path: Path) -> None:
    # The header alone tells: the weights behind it are a hole of 2^40 bytes that nobody reads.
    write_config(tmp_path, config_values())
    end = 2**40
    header = {"huge": {"dtype": "F32", "shape": [end // 4], "data_offsets": [0, end]}}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    assert "huge: unexpected" in refusal(tmp_path)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_a_pickle_is_never_loaded(tmp_path: Path, file: str) -> None:
    write_config(tmp_path, config_values())
    torch.save(random_tensors(config_values()), tmp_path / file)
    message = refusal(tmp_path)
    assert file in message
    assert "convert the checkpoint to safetensors" in message


def test_a_pickle_beside_safetensors_is_ignored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    load(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, config_values())
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = write_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "broken safetensors file" in refusal(tmp_path)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path) / "model.safetensors").write_bytes(b"PK\x03\x04" * 100)
    assert "broken safetensors file" in refusal(tmp_path)


def test_a_header_whose_ranges_overlap_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    layer = "model.layers.0.mlp."
    header[f"{layer}up_proj.weight"] = header[f"{layer}gate_proj.weight"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])
    assert "model.safetensors: cannot be loaded" in refusal(tmp_path)


def test_a_directory_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    assert "broken safetensors file" in refusal(tmp_path)


# Shards and their index


def shard_map(directory: Path) -> dict[str, str]:
    text = (directory / "model.safetensors.index.json").read_text()
    weight_map: dict[str, str] = json.loads(text)["weight_map"]
    return weight_map


def test_an_index_that_contradicts_its_shards_is_refused(tmp_path: Path) -> None:
    weight_map = shard_map(write_checkpoint(tmp_path, shards=2))
    here = weight_map[GATE]
    (there,) = set(weight_map.values()) - {here}
    write_index(tmp_path, weight_map | {GATE: there})
    message = refusal(tmp_path)
    assert f"{GATE}: the index puts it in {there}, which lacks it" in message
    assert f"{GATE}: in {here}, where the index has no such tensor" in message


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/outside.safetensors", "sub\\x.safetensors", "x.bin", 3]
)
def test_an_index_names_plain_safetensors_files_only(tmp_path: Path, file: object) -> None:
    directory = tmp_path / "model"
    save_file(random_tensors(config_values()), tmp_path / "outside.safetensors")
    write_config(directory, config_values())
    write_index(directory, dict.fromkeys(random_tensors(config_values()), file))
    assert "a shard is a plain *.safetensors file name in the same directory" in refusal(directory)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_without_a_map_is_refused(tmp_path: Path, weight_map: object) -> None:
    write_config(tmp_path, config_values())
    write_index(tmp_path, weight_map)
    assert "no weight_map" in refusal(tmp_path)


def test_a_broken_index_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, config_values())
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert "model.safetensors.index.json: cannot be read as JSON" in refusal(tmp_path)


# Fingerprint


def fingerprint(directory: Path, dtype: torch.dtype = torch.float32) -> str:
    return load(directory, dtype).profile.fingerprint


def test_equal_checkpoints_have_equal_fingerprints_wherever_they_lie(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "first")
    second = write_checkpoint(tmp_path / "second")
    assert fingerprint(first) == fingerprint(second)
    assert len(fingerprint(first)) == 64


def test_weights_configuration_and_dtype_each_change_the_fingerprint(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base")
    tensors = random_tensors(config_values())
    tensors[GATE][0, 0] += 1.0
    other_weights = write_checkpoint(tmp_path / "weights", tensors=tensors)
    other_config = write_checkpoint(tmp_path / "config", config_values(rope_theta=5000.0))
    other_stop = write_checkpoint(tmp_path / "stop")
    (other_stop / "generation_config.json").write_text('{"eos_token_id": 9}')
    found = [
        fingerprint(base),
        fingerprint(base, torch.bfloat16),
        fingerprint(other_weights),
        fingerprint(other_config),
        fingerprint(other_stop),
    ]
    assert len(set(found)) == 5
