"""config.json and generation_config.json: what is served, refused, or only warned about."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

from protocol.errors import ModelError
from tests.checkpoints import config_values, write_checkpoint, write_config
from worker.models.config import OuroConfig, read_config
from worker.models.registry import EMBEDDED_DIRECTORY, load_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def refusal(directory: Path) -> str:
    """The message with which loading the directory is refused."""
    with pytest.raises(ModelError) as caught:
        load_model(directory, torch.float32, torch.device("cpu"), "small")
    return str(caught.value)


def configured(directory: Path, **changes: object) -> OuroConfig:
    write_config(directory, config_values(**changes))
    return read_config(directory)


@pytest.mark.parametrize(
    ("key", "value", "supported"),
    [
        ("hidden_act", "gelu", "'silu'"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "None"),
        ("use_sliding_window", True, "False"),
        ("sliding_window", 4096, "None"),
        ("layer_types", ["full_attention", "sliding_attention"], "'full_attention'"),
        ("head_dim", 7, "multiple of 2"),
        ("head_dim", 0, "greater than or equal to 2"),
        ("early_exit_threshold", 1.5, "less than or equal to 1"),
        ("early_exit_threshold", -0.1, "greater than or equal to 0"),
        ("early_exit_threshold", float("nan"), "finite number"),
        ("total_ut_steps", 0, "greater than or equal to 1"),
        ("num_hidden_layers", "24", "valid integer"),
        ("vocab_size", 97.5, "valid integer"),
        ("rope_theta", "10000", "valid number"),
        ("rms_norm_eps", 0.0, "greater than 0"),
        ("tie_word_embeddings", "no", "valid boolean"),
        ("eos_token_id", "</s>", "valid tuple"),
        ("eos_token_id", [1, -1], "greater than or equal to 0"),
    ],
)
def test_an_unsupported_value_is_refused_by_key_value_and_what_is_supported(
    tmp_path: Path, key: str, value: object, supported: str
) -> None:
    write_checkpoint(tmp_path)
    write_config(tmp_path, config_values(**{key: value}))
    message = refusal(tmp_path)
    shown = value[1] if isinstance(value, list) else value
    assert key in message
    assert f"is {shown!r}, which is not supported" in message
    assert supported in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"eos_token_id": 97}, "(97,) is outside the vocabulary"),
        ({"head_dim": None, "hidden_size": 25}, "hidden_size 25 is not a multiple of 4 heads"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "supported is rope_type 'default'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": 3}, "rope_parameters is 3"),
    ],
)
def test_values_that_contradict_each_other_are_refused(
    tmp_path: Path, changes: Mapping[str, Any], words: str
) -> None:
    write_config(tmp_path, config_values(**changes))
    assert words in refusal(tmp_path)


def test_every_wrong_key_is_named_in_one_error(tmp_path: Path) -> None:
    values = config_values(hidden_act="relu", total_ut_steps=-1)
    del values["vocab_size"]
    write_config(tmp_path, values)
    message = refusal(tmp_path)
    assert "hidden_act is 'relu'" in message
    assert "total_ut_steps is -1" in message
    assert "vocab_size: Field required" in message


def test_another_model_type_names_the_supported_one(tmp_path: Path) -> None:
    write_config(tmp_path, config_values(model_type="llama"))
    assert "model_type is 'llama', supported is 'ouro'" in refusal(tmp_path)


def test_an_unknown_key_is_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        configured(tmp_path, thinking_budget=7, torch_dtype="bfloat16")
    (record,) = caplog.records
    assert "ignoring unknown keys: thinking_budget" in record.getMessage()


def test_the_shipped_configuration_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = read_config(EMBEDDED_DIRECTORY)
    assert not caplog.records
    assert config.eos_token_id == (0, 2)


def test_absent_sizes_follow_from_the_others(tmp_path: Path) -> None:
    config = configured(tmp_path, num_key_value_heads=None, head_dim=None)
    assert (config.num_key_value_heads, config.head_dim) == (4, 6)


@pytest.mark.parametrize("window", [None, 4096])
def test_a_window_that_is_off_is_no_obstacle(tmp_path: Path, window: int | None) -> None:
    configured(tmp_path, use_sliding_window=False, sliding_window=window)


def test_theta_may_stand_in_rope_parameters(tmp_path: Path) -> None:
    values = config_values(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    del values["rope_theta"]
    write_config(tmp_path, values)
    assert read_config(tmp_path).rope_theta == 500.0


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (5, None, (5,)),
        ([5, 6], None, (5, 6)),
        (None, None, ()),
        (5, {"eos_token_id": [0, 2]}, (0, 2)),
        (5, {"eos_token_id": 7}, (7,)),
        (5, {"eos_token_id": None}, (5,)),
        (5, {"eos_token_id": []}, (5,)),
        (5, {"do_sample": False}, (5,)),
    ],
)
def test_stop_ids_of_the_generation_config_win(
    tmp_path: Path, own: object, generation: object, expected: tuple[int, ...]
) -> None:
    write_config(tmp_path, config_values(eos_token_id=own))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_config(tmp_path).eos_token_id == expected


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_broken_json_is_refused_by_file_name(tmp_path: Path, file: str, text: bytes) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / file).write_bytes(text)
    assert file in refusal(tmp_path)


def test_a_directory_without_configuration_is_refused(tmp_path: Path) -> None:
    assert "no config.json; is this a model directory?" in refusal(tmp_path)
    assert "not a directory" in refusal(tmp_path / "absent")
