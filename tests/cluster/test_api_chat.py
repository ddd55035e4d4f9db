from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from cluster.api_chat import ChatCompletionRequest
from cluster.api_errors import ApiError, to_api_error
from cluster.llm import LLM
from protocol.sampling import SamplingParams
from tests.cluster.completion_services import TOKENIZER, RunningServer, running_server

if TYPE_CHECKING:
    from collections.abc import Iterator

HELLO: list[Any] = [{"role": "user", "content": "Tell me a story."}]
LEAST: dict[str, Any] = {"model": "ouro-tiny", "messages": HELLO}
GREEDY: dict[str, Any] = LEAST | {"temperature": 0.0, "max_completion_tokens": 12}


def parse(**fields: Any) -> ChatCompletionRequest:  # noqa: ANN401
    return ChatCompletionRequest.model_validate_json(json.dumps(LEAST | fields))


def error_of(**fields: Any) -> ApiError:  # noqa: ANN401
    with pytest.raises(ValidationError) as caught:
        parse(**fields).to_sampling_params()
    return to_api_error(caught.value)


def test_defaults_and_the_two_names_of_the_limit() -> None:
    defaults = SamplingParams(max_tokens=256, temperature=1.0)
    assert parse().to_sampling_params() == defaults
    assert parse(max_tokens=7).to_sampling_params().max_tokens == 7
    assert parse(max_completion_tokens=8).to_sampling_params().max_tokens == 8
    assert "send one of them" in error_of(max_tokens=7, max_completion_tokens=8).message


def test_logprobs_are_asked_for_in_two_fields() -> None:
    assert parse(logprobs=False).to_sampling_params().logprobs is None
    assert parse(logprobs=True).to_sampling_params().logprobs == 0
    assert parse(logprobs=True, top_logprobs=3).to_sampling_params().logprobs == 3
    assert "needs logprobs" in error_of(top_logprobs=3).message
    assert error_of(logprobs=2).param == "logprobs"


def test_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = parse(messages=[{"role": "user", "content": parts}]).messages
    assert message.text == "ab"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "Hi",
        [{"role": "tool", "content": "x"}],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": "x", "name": "Eve"}],
    ],
)
def test_other_messages_are_refused_by_name(messages: object) -> None:
    error = error_of(messages=messages)
    assert (error.status, str(error.param).split(".")[0]) == (400, "messages")


def test_what_is_not_served_takes_only_the_values_that_do_nothing() -> None:
    idle = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False}
    assert parse(**idle).to_sampling_params() == parse().to_sampling_params()
    assert error_of(tools=[{"type": "function"}]).param == "tools"
    assert error_of(response_format={"type": "json_object"}).param == "response_format"
    assert error_of(surprise=1).message == "surprise: this field is not supported: leave it out"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


def test_a_chat_is_its_rendered_prompt_continued(server: RunningServer) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=GREEDY, timeout=60).json()
    with LLM() as llm:
        (here,) = llm.generate([TOKENIZER.encode_chat(HELLO)], SamplingParams(max_tokens=12))
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert choice["message"] == {"role": "assistant", "content": here.text}
    assert choice["token_ids"] == list(here.token_ids)
    assert choice["exit_depths"] == list(here.exit_depths)
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["loops_run"] == sum(here.exit_depths)


def test_openai_s_client_streams_the_same_text_choice_by_choice(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    wish: dict[str, Any] = {
        "model": "ouro-tiny",
        "messages": HELLO,
        "max_completion_tokens": 10,
        "seed": 5,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**wish)
    texts, roles, tokens = {0: "", 1: ""}, [], 0
    ends, usage = {}, None
    stream = client.chat.completions.create(
        **wish, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for piece in chunk.choices:
            texts[piece.index] += piece.delta.content or ""
            roles += [piece.index] if piece.delta.role == "assistant" else []
            tokens += len(piece.logprobs.content or ()) if piece.logprobs else 0
            if piece.finish_reason:
                ends[piece.index] = piece.finish_reason
    assert roles == [0, 1]
    assert [texts[choice.index] for choice in whole.choices] == [
        choice.message.content for choice in whole.choices
    ]
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == tokens
    first = whole.choices[0].logprobs
    assert first is not None
    assert first.content is not None
    assert all(len(entry.top_logprobs) == 2 for entry in first.content)


def test_a_wrong_chat_is_an_error_that_names_the_field(server: RunningServer) -> None:
    wrong = LEAST | {"messages": [{"role": "oracle", "content": "x"}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=wrong, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages.0.role")
