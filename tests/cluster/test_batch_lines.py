from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.batch_lines import (
    BatchLine,
    LineError,
    RawLine,
    answer_line,
    call_of,
    custom_id_of,
    derived_seed,
    error_line,
    parse_line,
    split_lines,
)
from cluster.generation import Completion
from protocol.exit_rule import FinishReason
from protocol.rng import MAX_SEED
from tests.cluster.completion_services import TOKENIZER

LIMIT = 400
BODY: dict[str, Any] = {"model": "ouro-tiny", "prompt": "Once"}
LINE: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": BODY,
}


def raw(data: bytes | None, number: int = 7) -> RawLine:
    return RawLine(number - 1, number, data)


def raw_json(value: object) -> RawLine:
    return raw(json.dumps(value).encode())


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The same bytes in chunks that end at these places."""
    ends = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    return [data[first:last] for first, last in pairwise(ends)]


PIECES = st.sampled_from([b"a", b"bc", b" ", b"\r", b"\n", b"\n\n", b"0123456789", b"\xef\xbb\xbf"])


@given(st.lists(PIECES).map(b"".join), st.lists(st.integers(0, 40)))
def test_lines_are_the_same_however_the_file_comes(data: bytes, places: list[int]) -> None:
    told = list(split_lines(cut(data, places), 8))
    assert told == list(split_lines([data], 8))
    plain = [(n, line) for n, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    assert [line.number for line in told] == [number for number, _ in plain]
    assert [line.index for line in told] == list(range(len(plain)))
    for line, (number, text) in zip(told, plain, strict=True):
        kept = text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text
        assert line.data == (kept if len(text) <= 8 else None)


def test_a_line_that_is_too_long_never_stays_in_memory() -> None:
    seen: list[int] = []

    def endless() -> Any:  # noqa: ANN401
        for _ in range(1000):
            seen.append(1)
            yield b"x" * 1000
        yield b"\n{}"

    assert list(split_lines(endless(), 100)) == [RawLine(0, 1, None), RawLine(1, 2, b"{}")]
    assert len(seen) == 1000


def test_a_good_line_is_read() -> None:
    assert parse_line(raw_json(LINE), LIMIT) == BatchLine(**LINE)
    assert parse_line(raw(json.dumps(LINE).encode() + b"\r"), LIMIT).custom_id == "a"


@pytest.mark.parametrize(
    ("data", "code", "message", "custom_id"),
    [
        (None, "line_too_long", "line 7: more than 400 bytes", None),
        (b"\xff{}", "not_utf8", "line 7: not UTF-8 (byte 0)", None),
        (b"{", "invalid_json", "line 7: not JSON: ", None),
        (b'{"custom_id": "\\ud800"}', "invalid_json", "line 7: not JSON: ", None),
        (b"[" * 300, "invalid_json", "line 7: not JSON: ", None),
        (b"[]", "invalid_line", "line 7: not a JSON object", None),
        (b'"x"', "invalid_line", "line 7: not a JSON object", None),
        (b'{"custom_id": "a"}', "invalid_line", "line 7: method: ", "a"),
        ({"custom_id": ""}, "invalid_line", "custom_id: ", None),
        ({"custom_id": 3}, "invalid_line", "custom_id: ", None),
        ({"custom_id": "x" * 513}, "line_too_long", "", None),
        ({"method": "GET"}, "invalid_line", "method: ", "a"),
        ({"body": []}, "invalid_line", "body: ", "a"),
        ({"surprise": 1}, "invalid_line", "surprise: this field is not supported", "a"),
        ({"url": "/v1/embeddings"}, "unknown_url", "'/v1/embeddings' is not served", "a"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(
    data: bytes | dict[str, Any] | None, code: str, message: str, custom_id: str | None
) -> None:
    line = raw_json(LINE | data) if isinstance(data, dict) else raw(data)
    if line.data is not None and len(line.data) > LIMIT:
        line = raw(None)
    with pytest.raises(LineError) as caught:
        parse_line(line, LIMIT)
    assert (caught.value.code, caught.value.custom_id) == (code, custom_id)
    assert message in caught.value.message


def test_a_custom_id_is_known_whatever_else_is_wrong() -> None:
    assert custom_id_of(raw_json({"custom_id": "a", "surprise": 1})) == "a"
    assert [custom_id_of(raw(data)) for data in (b"{", None, b"[]", b"{}", b"\xff")] == [None] * 5


def wrong_body(**fields: Any) -> LineError:  # noqa: ANN401
    line = BatchLine(**(LINE | {"body": BODY | fields}))
    with pytest.raises(LineError) as caught:
        call_of(line, "ouro-tiny", TOKENIZER)
    return caught.value


def test_a_body_is_checked_as_the_endpoint_checks_it() -> None:
    error = wrong_body(max_tokens="3")
    assert (error.code, error.custom_id) == ("invalid_request", "a")
    assert error.answer is not None
    assert (error.answer.status, error.answer.param) == (400, "max_tokens")
    assert wrong_body(surprise=1).message == "surprise: this field is not supported: leave it out"
    assert wrong_body(model="other").code == "model_not_found"
    assert "stream: a batch has none" in wrong_body(stream=True).message
    assert "empty" in wrong_body(prompt="").message
    assert wrong_body(temperature=-1.0).code == "invalid_request"


def test_a_seed_is_the_body_s_or_the_custom_id_s() -> None:
    def seed(custom_id: str, **fields: Any) -> int:  # noqa: ANN401
        line = BatchLine(**(LINE | {"custom_id": custom_id, "body": BODY | fields}))
        return call_of(line, "ouro-tiny", TOKENIZER).seed

    assert seed("a", seed=5) == 5
    assert seed("a") == seed("a", seed=None) == derived_seed("a")
    assert seed("b") != seed("a")
    assert 0 <= derived_seed("a") <= MAX_SEED


def test_an_answer_is_openai_s_line_and_the_same_each_time() -> None:
    line = BatchLine(**LINE)
    completion = Completion(
        text=" upon",
        token_ids=(5,),
        exit_depths=(4,),
        finish_reason=FinishReason.LENGTH,
        prompt_tokens=1,
        max_loops=4,
        seed=0,
    )
    texts = {answer_line(line, call_of(line, "ouro-tiny", TOKENIZER), completion) for _ in range(2)}
    assert len(texts) == 1
    told = json.loads(texts.pop())
    assert set(told) == {"id", "custom_id", "response", "error"}
    assert (told["custom_id"], told["error"]) == ("a", None)
    response = told["response"]
    assert response["status_code"] == 200
    assert response["request_id"] == response["body"]["id"]
    assert response["body"]["choices"][0]["text"] == " upon"
    assert response["body"]["usage"]["loops_run"] == 4


def test_an_error_is_a_line_with_its_code_and_what_http_would_say() -> None:
    error = wrong_body(max_tokens=0)
    told = json.loads(error_line(raw(b"x"), error))
    assert told["error"] == {"code": "invalid_request", "message": error.message}
    assert told["response"]["status_code"] == 400
    assert told["response"]["body"]["error"]["param"] == "max_tokens"
    early = [
        json.loads(error_line(raw(b"{", number), LineError("invalid_json", "no")))
        for number in (1, 2)
    ]
    assert {line["response"] for line in early} == {None}
    assert {line["custom_id"] for line in early} == {None}
    assert early[0]["id"] != early[1]["id"]
