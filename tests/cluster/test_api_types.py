from __future__ import annotations

import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.api_errors import ApiError, overloaded, timed_out, to_api_error, unavailable
from cluster.api_types import Choice, CompletionRequest, CompletionResponse, Usage
from cluster.generation import Completion, TextDelta
from protocol.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    DuplicateRequestError,
    ExecutorClosedError,
    ModelError,
    OverloadedError,
    ProtocolError,
    RequestError,
    WorkerLostError,
)
from protocol.exit_rule import FinishReason
from protocol.result import TokenLogprobs
from protocol.sampling import SamplingParams
from tests.cluster.completion_services import TOKENIZER

LEAST: dict[str, Any] = {"model": "m", "prompt": "hello"}


def parse(**fields: Any) -> CompletionRequest:  # noqa: ANN401
    return CompletionRequest.model_validate_json(json.dumps(LEAST | fields))


def error_of(**fields: Any) -> ApiError:  # noqa: ANN401
    with pytest.raises(ValidationError) as caught:
        parse(**fields).to_sampling_params()
    return to_api_error(caught.value)


def test_the_defaults_are_openais() -> None:
    params = parse().to_sampling_params()
    assert params == SamplingParams(max_tokens=16, temperature=1.0, top_p=1.0, seed=None)


def test_null_means_the_default_where_openai_allows_it() -> None:
    names = ("max_tokens", "temperature", "top_p", "seed", "stream", "stream_options", "n", "stop")
    body = parse(**dict.fromkeys(names))
    assert body.to_sampling_params() == parse().to_sampling_params()
    assert not body.stream
    assert not body.include_usage


def test_every_parameter_reaches_the_engine() -> None:
    wish = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 12,
        "min_loops": 2,
        "max_loops": 3,
        "exit_threshold": 0.25,
        "ignore_eos": True,
        "stop_token_ids": [4, 5],
        "priority": -2,
        "forced_depths": [4, 1, 2],
        "repetition_penalty": 1.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -2,
        "logit_bias": {"7": -100, "9": 0.5},
        "min_tokens": 3,
        "logprobs": 5,
        "n": 3,
    }
    assert set(wish) == set(SamplingParams.model_fields)
    same = wish | {"logit_bias": {7: -100.0, 9: 0.5}}
    assert parse(**wish).to_sampling_params() == SamplingParams.model_validate(same)


def test_a_prompt_is_text_or_token_ids() -> None:
    assert parse(prompt="x").prompt == "x"
    assert parse(prompt=[1, 2, 3]).prompt == (1, 2, 3)
    assert parse(temperature=0).to_sampling_params().temperature == 0.0


@pytest.mark.parametrize("prompt", [["a", "b"], ["a"], [[1, 2], [3]], [[1]]])
def test_several_prompts_are_refused_in_so_many_words(prompt: object) -> None:
    error = error_of(prompt=prompt)
    assert (error.status, error.param) == (400, "prompt")
    assert "one prompt per request" in error.message


@pytest.mark.parametrize("value", [None, 1, True, 1.5, {}, [1, "a"], [True], [1.0], [-1], [None]])
def test_other_prompts_are_refused(value: object) -> None:
    error = error_of(prompt=value)
    assert (error.status, error.param) == (400, "prompt")
    assert "string or a list of token ids" in error.message


NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "stop": None,
    "suffix": None,
    "logit_bias": {},
    "user": "somebody",
}


def test_neutral_fields_are_taken_and_change_nothing() -> None:
    assert parse(**NEUTRAL).to_sampling_params() == parse().to_sampling_params()
    assert parse(logit_bias=None, presence_penalty=0.0).to_sampling_params()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("n", 1.0),
        ("n", "1"),
        ("best_of", 3),
        ("echo", True),
        ("echo", 0),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("logprobs", 1.0),
        ("presence_penalty", 2.1),
        ("presence_penalty", False),
        ("frequency_penalty", -2.5),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e7),
        ("min_tokens", -1),
        ("min_tokens", True),
        ("stop", ""),
        ("stop", ["x", ""]),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", [5]),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("suffix", ""),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", [1]),
        ("logit_bias", {str(token): 1 for token in range(301)}),
        ("user", 7),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", "16"),
        ("max_tokens", 16.0),
        ("temperature", -0.1),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2**31),
        ("temperature", 1e30),
        ("top_k", None),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stream", 1),
        ("stream", "true"),
        ("stream_options", True),
        ("min_loops", 0),
        ("max_loops", 0),
        ("exit_threshold", 1.5),
        ("exit_threshold", "0.5"),
        ("ignore_eos", 1),
        ("stop_token_ids", 3),
        ("model", 3),
        ("surprise", 1),
    ],
)
def test_a_wrong_field_is_named(name: str, value: object) -> None:
    error = error_of(**{name: value})
    assert (error.status, error.type, error.code) == (
        400,
        "invalid_request_error",
        "invalid_request",
    )
    assert error.param == name
    assert error.message.startswith(f"{name}: ")


@pytest.mark.parametrize("value", [101, -100.5, "1", True, None])
def test_a_wrong_bias_is_named(value: object) -> None:
    error = error_of(logit_bias={"5": value})
    assert error.status == 400
    assert error.param is not None
    assert error.param.startswith("logit_bias")


def test_a_token_is_biased_once() -> None:
    assert "twice" in error_of(logit_bias={"5": 1, "05": 2}).message


def test_a_wrong_entry_inside_a_field_is_named() -> None:
    assert error_of(stop_token_ids=[1, -1]).param == "stop_token_ids.1"
    assert error_of(stream=True, stream_options={"more": 1}).param == "stream_options.more"


def test_fields_that_contradict_each_other_are_refused() -> None:
    assert "below min_loops" in error_of(min_loops=3, max_loops=2).message
    assert "top_k" in error_of(top_k=0).message
    assert "stream: true" in error_of(stream_options={"include_usage": True}).message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"model": "m"}',
        b'{"prompt": "x"}',
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": "x", "temperature": NaN}',
        b'{"model": "m", "prompt": "x", "temperature": Infinity}',
        b"[" * 100_000,
    ],
)
def test_bytes_that_are_no_request_are_400(raw: bytes) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate_json(raw)
    assert to_api_error(caught.value).status == 400


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("m"), 400, "invalid_request"),
        (CapacityError("m"), 400, "invalid_request"),
        (DuplicateRequestError("m"), 400, "invalid_request"),
        (OverloadedError("m"), 429, "overloaded"),
        (WorkerLostError("m"), 503, "unavailable"),
        (ExecutorClosedError("m"), 503, "unavailable"),
        (DeadlineError("m"), 503, "unavailable"),
        (ModelError("m"), 500, "server_error"),
        (ConfigError("m"), 500, "server_error"),
        (ProtocolError("m"), 500, "server_error"),
    ],
)
def test_errors_keep_their_message_and_get_a_status(
    error: Exception, status: int, code: str
) -> None:
    answer = to_api_error(error)
    assert (answer.status, answer.code, answer.message) == (status, code, "m")
    assert ("retry-after" in answer.headers()) == (status in (429, 503))


def test_an_unforeseen_error_tells_nothing_of_the_inside() -> None:
    answer = to_api_error(ZeroDivisionError("secret"))
    assert answer.status == 500
    assert b"secret" not in answer.body()


def test_an_error_body_has_openais_four_fields() -> None:
    body = json.loads(ApiError(400, "t", "c", "m", "p").body())
    assert body == {"error": {"message": "m", "type": "t", "param": "p", "code": "c"}}
    assert overloaded("m").status == 429
    assert unavailable("m").status == 503
    assert timed_out(2.5).status == 504
    assert "2.5 s" in timed_out(2.5).message


def test_responses_serialize_as_openais() -> None:
    answer = Completion("hi", (5, 6, 0), (4, 2, 1), FinishReason.STOP, 7, 4, 1)
    body = CompletionResponse(
        id="cmpl-1",
        object="text_completion",
        created=5,
        model="m",
        choices=(Choice.of(answer, TOKENIZER),),
        usage=Usage.of(answer),
    )
    assert json.loads(body.to_json()) == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 5,
        "model": "m",
        "choices": [
            {
                "text": "hi",
                "index": 0,
                "logprobs": None,
                "finish_reason": "stop",
                "token_ids": [5, 6, 0],
                "exit_depths": [4, 2, 1],
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "loops_run": 7,
            "loops_saved": 5,
        },
    }


def test_logprobs_are_openais_object() -> None:
    first, partial, special = TOKENIZER.encode("Once")[0], TOKENIZER.encode("🎉")[0], 0
    logprobs = (
        TokenLogprobs(-0.5, (first, partial), (-0.5, -1.0)),
        TokenLogprobs(-math.inf, (special, partial), (-0.25, -math.inf)),
    )
    piece = TextDelta("x", (first, partial), (4, 4), None, logprobs, (0, 4))
    choice = Choice.of(piece, TOKENIZER)
    assert choice.logprobs is not None
    name, special_name = TOKENIZER.token_text(first), TOKENIZER.token_text(special)
    assert name == TOKENIZER.decode([first])
    assert special_name.startswith("<")
    assert json.loads(choice.logprobs.model_dump_json()) == {
        "tokens": [name, f"token_id:{partial}"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [
            {name: -0.5, f"token_id:{partial}": -1.0},
            {special_name: -0.25, f"token_id:{partial}": -9999.0},
        ],
        "text_offset": [0, 4],
    }


def test_a_piece_of_a_stream_leaves_usage_out_unless_it_is_set() -> None:
    piece = Choice.of(TextDelta("x", (5,), (4,), None), TOKENIZER)
    plain = CompletionResponse(
        id="i", object="text_completion", created=1, model="m", choices=(piece,)
    )
    assert "usage" not in json.loads(plain.to_json())
    assert json.loads(plain.to_json())["choices"][0]["finish_reason"] is None
    counted = CompletionResponse(
        id="i", object="text_completion", created=1, model="m", choices=(piece,), usage=None
    )
    assert json.loads(counted.to_json())["usage"] is None
