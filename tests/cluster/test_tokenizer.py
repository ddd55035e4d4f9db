from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from cluster.tokenizer import load_tokenizer
from protocol.config import ModelSettings
from protocol.errors import ModelError, RequestError
from worker.models.registry import resolve_model

if TYPE_CHECKING:
    from pathlib import Path

SHIPPED = resolve_model(ModelSettings())


def copy_of_shipped(directory: Path, **config: object) -> Path:
    shutil.copy(SHIPPED / "tokenizer.json", directory)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("file", ["golden.json", "golden_last_exited.json"])
def test_prompts_encode_as_in_the_recorded_runs(file: str) -> None:
    tokenizer = load_tokenizer(SHIPPED)
    items = json.loads((SHIPPED / file).read_text())["items"]
    prompts = [(item["prompt"], item["ids"]) for item in items if item.get("prompt")]
    assert prompts
    for text, ids in prompts:
        assert tokenizer.encode(text) == ids
        assert tokenizer.vocab_size == 4096


def test_special_tokens_are_read_in_text_and_silent_in_output() -> None:
    tokenizer = load_tokenizer(SHIPPED)
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "hello"


def test_ids_without_a_token_are_silent() -> None:
    tokenizer = load_tokenizer(SHIPPED)
    assert tokenizer.decode([*tokenizer.encode("hello"), tokenizer.vocab_size + 7]) == "hello"


def test_text_round_trips() -> None:
    tokenizer = load_tokenizer(SHIPPED)
    text = "naïve 42 日本語 👩‍👩‍👧\n\tend "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == []


def test_a_lone_surrogate_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="character 3"):
        load_tokenizer(SHIPPED).encode("abc\ud800")


@pytest.mark.parametrize("bos", ["<|endoftext|>", {"content": "<|endoftext|>", "special": True}])
def test_the_start_token_is_added_only_when_asked_for(tmp_path: Path, bos: object) -> None:
    plain = load_tokenizer(SHIPPED).encode("hello")
    directory = copy_of_shipped(tmp_path, add_bos_token=True, bos_token=bos)
    assert load_tokenizer(directory).encode("hello") == [0, *plain]
    copy_of_shipped(tmp_path, add_bos_token=False, bos_token=bos)
    assert load_tokenizer(directory).encode("hello") == plain


def test_a_tokenizer_without_configuration_adds_nothing(tmp_path: Path) -> None:
    shutil.copy(SHIPPED / "tokenizer.json", tmp_path)
    assert load_tokenizer(tmp_path).encode("hello") == load_tokenizer(SHIPPED).encode("hello")


def test_a_missing_tokenizer_says_which_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1", b"\xff\xfe", b'{"version": "1.0"}'])
def test_a_broken_tokenizer_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        load_tokenizer(tmp_path)


def test_an_unknown_start_token_is_a_model_error(tmp_path: Path) -> None:
    directory = copy_of_shipped(tmp_path, add_bos_token=True, bos_token="<s>")
    with pytest.raises(ModelError, match="<s>"):
        load_tokenizer(directory)


@pytest.mark.parametrize("content", ["[1]", "{"])
def test_a_broken_configuration_is_a_model_error(tmp_path: Path, content: str) -> None:
    copy_of_shipped(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match="tokenizer_config"):
        load_tokenizer(tmp_path)
