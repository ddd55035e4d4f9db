"""Chat: messages to the text of one prompt, as the checkpoint's own template says.

A template is a program of the checkpoint, so it runs in jinja2's sandbox, which reaches nothing of
this process. What roles and contents there may be is for cluster/api_chat.py to check.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.errors import ModelError, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
DEFAULT_TEMPLATE = "default"
"""The name of the one that counts where a checkpoint has several."""


class ChatTemplate:
    """The chat template of one checkpoint; immutable, safe to share between threads.

    `tokens` are the special tokens that a template may name, such as bos_token. Raises ModelError
    for a template that does not compile.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        # The blank lines around a block are no part of a prompt: checkpoints are written for that.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(
                f"the checkpoint's chat template is not valid (line {getattr(error, 'lineno', 0)}: "
                f"{error}): mend chat_template in {CONFIG_FILE}"
            ) from error
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that ends where the assistant's next message begins.

        Each message has `role` and `content`. Raises RequestError for messages that the template
        refuses or cannot render.

        Example, with ouro-tiny's: one user message "Hi" is
        "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n".
        """
        try:
            return self._template.render(
                self._tokens,
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
            )
        except RequestError:
            raise
        except Exception as error:  # a template may divide by zero, recurse or index what is not
            raise RequestError(
                f"messages: the model's chat template cannot render them: {error}"
            ) from error


def load_chat_template(directory: Path) -> ChatTemplate | None:
    """The template of the checkpoint in `directory`; None when it has none.

    chat_template.jinja goes before the `chat_template` of tokenizer_config.json. Raises ModelError
    for one that cannot be read.
    """
    config = _read_config(directory / CONFIG_FILE)
    source = _template_file(directory / TEMPLATE_FILE) or _source(config.get("chat_template"))
    if source is None:
        return None
    tokens = {
        name: text
        for name, value in config.items()
        if name.endswith("_token") and (text := _token_text(value)) is not None
    }
    return ChatTemplate(source, tokens)


def _template_file(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not a readable chat template: {error}") from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not a readable tokenizer configuration: {error}") from error
    return config if isinstance(config, dict) else {}


def _source(value: object) -> str | None:
    """The template's text: a text, or the default one of a list of named ones."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if _is_object(entry)}
        value = named.get(DEFAULT_TEMPLATE)
    return value if isinstance(value, str) else None


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _token_text(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _to_json(value: object, indent: int | None = None) -> str:
    """JSON for a prompt; jinja2's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: object) -> NoReturn:
    """What a template calls when it does not take the messages."""
    raise RequestError(f"messages: the model's chat template refuses them: {message}")
