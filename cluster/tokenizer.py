"""Tokenizer: text to token ids and back, as the checkpoint's own files say."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING

import tokenizers

from cluster.chat import CONFIG_FILE, load_chat_template
from cluster.detokenizer import Detokenizer
from protocol.errors import ModelError, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from cluster.chat import ChatTemplate


class Tokenizer:
    """The tokenizer of one checkpoint; immutable, safe to share between threads.

    `bos_id` None adds nothing in front of a text. `directory` is where the checkpoint's chat
    template is looked for, once somebody chats.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos_id: int | None = None,
        directory: Path | None = None,
    ) -> None:
        self._backend = backend
        self._bos_id = bos_id
        self._directory = directory

    def __repr__(self) -> str:
        return f"<Tokenizer of {self.vocab_size} tokens>"

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included; a model may have more rows than this."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; a special token written out in it becomes that token.

        Nothing is added, except the start token where the checkpoint asks for one. Raises
        RequestError for text that is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid Unicode (a lone surrogate at character {error.start}): "
                "send well-formed text"
            ) from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids if self._bos_id is None else [self._bos_id, *ids]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of the prompt that the checkpoint's chat template makes of `messages`.

        A template writes its special tokens itself, the start token too, so none is added. Raises
        RequestError for messages that it refuses, or when the checkpoint has no template.
        """
        if self._chat_template is None:
            raise RequestError(
                "messages: this model's checkpoint has no chat template: send a prompt to "
                "/v1/completions"
            )
        text = self._chat_template.render(messages)
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        return load_chat_template(self._directory) if self._directory is not None else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`: special and unknown tokens are silent, broken UTF-8 becomes U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def token_text(self, token: int) -> str:
        """The text of one token by itself, a special one written out.

        A token that is only a part of a character, or unknown, is told as token_id:N.
        """
        text: str = self._backend.decode([token], skip_special_tokens=False)
        return text if text and "\N{REPLACEMENT CHARACTER}" not in text else f"token_id:{token}"

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder for one output."""
        return Detokenizer(self._backend)


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in `directory`: tokenizer.json, and tokenizer_config.json if there is one.

    Raises ModelError when a file is missing, unreadable or contradicts the other.
    """
    path = directory / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"no tokenizer.json in {directory}: a checkpoint needs one; save it with "
            "transformers' AutoTokenizer(use_fast=True)"
        ) from error
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise ModelError(f"{path} is not a readable tokenizer: {error}") from error
    return Tokenizer(backend, _bos_id(directory / CONFIG_FILE, backend), directory)


def _bos_id(path: Path, backend: tokenizers.Tokenizer) -> int | None:
    """The start token that the configuration wants in front of a text, or None."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not a readable tokenizer configuration: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object")
    if not config.get("add_bos_token"):
        return None
    token = config.get("bos_token")
    content = token.get("content") if isinstance(token, dict) else token
    bos_id = backend.token_to_id(content) if isinstance(content, str) else None
    if bos_id is None:
        raise ModelError(f"{path}: add_bos_token is set, but bos_token {token!r} is no known token")
    return bos_id
