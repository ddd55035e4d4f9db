from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from cluster.chat import ChatTemplate, load_chat_template
from cluster.tokenizer import load_tokenizer
from protocol.config import ModelSettings
from protocol.errors import ModelError, RequestError
from tests.cluster.completion_services import TOKENIZER
from worker.models.registry import resolve_model

if TYPE_CHECKING:
    from pathlib import Path

SHIPPED = resolve_model(ModelSettings())
HELLO = [{"role": "user", "content": "Hi"}]
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def test_the_shipped_template_makes_one_prompt_of_the_messages() -> None:
    template = load_chat_template(SHIPPED)
    assert template is not None
    messages = [{"role": "system", "content": "Be kind."}, *HELLO]
    assert template.render(messages) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_its_delimiters_become_their_tokens() -> None:
    ids = TOKENIZER.encode_chat(HELLO)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 2, 1)


def write_config(directory: Path, **config: Any) -> None:  # noqa: ANN401
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_template_file_goes_before_the_configuration_and_a_list_has_a_default(
    tmp_path: Path,
) -> None:
    assert load_chat_template(tmp_path) is None
    write_config(tmp_path, chat_template=None)
    assert load_chat_template(tmp_path) is None
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "listed"}]
    write_config(tmp_path, chat_template=named)
    listed = load_chat_template(tmp_path)
    assert listed is not None
    assert listed.render(HELLO) == "listed"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    filed = load_chat_template(tmp_path)
    assert filed is not None
    assert filed.render(HELLO) == "from a file"


def test_a_template_knows_the_special_tokens_and_the_start_token_comes_once(
    tmp_path: Path,
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((SHIPPED / "tokenizer.json").read_bytes())
    token = {"content": "<|endoftext|>"}
    source = "{{ bos_token }}{{ messages[0].content }}"
    write_config(tmp_path, add_bos_token=True, bos_token=token, chat_template=source)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Hi")[0] == 0
    assert tokenizer.encode_chat(HELLO) == tokenizer.encode("Hi")


def test_a_checkpoint_without_a_template_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((SHIPPED / "tokenizer.json").read_bytes())
    with pytest.raises(RequestError, match="no chat template"):
        load_tokenizer(tmp_path).encode_chat(HELLO)


@pytest.mark.parametrize("source", ["{% for %}", "{{", "{% surprise %}"])
def test_a_broken_template_is_the_checkpoint_s_fault(source: str) -> None:
    with pytest.raises(ModelError, match="chat template is not valid"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses them: roles must alternate"),
        ("{{ messages[0].content.x.y }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ 1 // 0 }}", "cannot render"),
    ],
)
def test_a_template_that_refuses_or_reaches_out_is_a_wrong_request(
    source: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplate(source, {}).render(HELLO)


def test_blank_lines_around_blocks_and_html_leave_no_trace() -> None:
    loop = "  {% for m in messages %}\n{{ m.content | tojson }}\n  {% endfor %}\n"
    source = "{% if true %}\n" + loop + "{% endif %}"
    assert ChatTemplate(source, {}).render([{"role": "user", "content": "<é>"}]) == '"<é>"\n'
