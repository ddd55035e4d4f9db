"""Lines of a batch in OpenAI's format: read from bytes, checked, and written as answers.

One input line is {custom_id, method, url, body}; one output line is {id, custom_id, response,
error}. Nothing here reads a file or runs a model, and an output line depends on its input line
alone, so that a batch gives the same bytes however often it was interrupted.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_core import from_json

from cluster.api_calls import BODIES, Call, checked_call
from cluster.api_errors import ApiError, to_api_error
from cluster.api_sampling import Body
from protocol.errors import LoopmeshError
from protocol.rng import MAX_SEED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cluster.generation import Completion
    from cluster.tokenizer import Tokenizer

MAX_CUSTOM_ID = 512
CREATED = 0
"""`created` of every answer: a time would make two runs of a batch differ."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line that is not blank, without its end.

    `index` counts these lines from 0, `number` all lines of the file from 1. `data` is None when
    the line has more bytes than allowed.
    """

    index: int
    number: int
    data: bytes | None


class BatchLine(Body):
    """One line of the input; its body is checked when it is its turn."""

    custom_id: Annotated[str, Field(min_length=1, max_length=MAX_CUSTOM_ID)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class LineError(Exception):
    """What is wrong with a line.

    `custom_id` is the line's own where that could be read; `answer` is set where HTTP would have
    answered the body with this error.
    """

    def __init__(
        self, code: str, message: str, custom_id: str | None = None, answer: ApiError | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.custom_id = custom_id
        self.answer = answer


def split_lines(chunks: Iterable[bytes], max_bytes: int) -> Iterator[RawLine]:
    """The lines of a file that comes in chunks, never more than max_bytes and a chunk in memory.

    Blank lines are none. Example: b"a\\n\\nb" is RawLine(0, 1, b"a") and RawLine(1, 3, b"b").
    """
    index, number, too_long = 0, 1, False
    rest = b""
    for chunk in chunks:
        *whole, tail = chunk.split(b"\n")
        for piece in whole:
            line = rest + piece
            if too_long or not _is_blank(line):
                yield _raw_line(index, number, line, max_bytes, too_long)
                index += 1
            rest, too_long = b"", False
            number += 1
        rest += tail
        if len(rest) > max_bytes:
            rest, too_long = b"", True
    if too_long or not _is_blank(rest):
        yield _raw_line(index, number, rest, max_bytes, too_long)


def _raw_line(index: int, number: int, line: bytes, max_bytes: int, too_long: bool) -> RawLine:
    if number == 1:
        line = line.removeprefix(BYTE_ORDER_MARK)
    return RawLine(index, number, None if too_long or len(line) > max_bytes else line)


def _is_blank(line: bytes) -> bool:
    return not line or line.isspace()


def custom_id_of(raw: RawLine) -> str | None:
    """The custom_id of a line, whatever else is wrong with it; None when it cannot be read."""
    try:
        value = from_json(raw.data or b"")
    except ValueError:
        return None
    return _custom_id(value)


def parse_line(raw: RawLine, max_bytes: int) -> BatchLine:
    """The checked line. Raises LineError."""
    if raw.data is None:
        raise LineError(
            "line_too_long", f"line {raw.number}: more than {max_bytes} bytes, the most allowed"
        )
    try:
        raw.data.decode()
    except UnicodeDecodeError as error:
        raise LineError(
            "not_utf8", f"line {raw.number}: not UTF-8 (byte {error.start}): send UTF-8"
        ) from error
    try:
        value = from_json(raw.data)
    except ValueError as error:
        raise LineError("invalid_json", f"line {raw.number}: not JSON: {error}") from error
    custom_id = _custom_id(value)
    try:
        line = BatchLine.model_validate(value)
    except ValidationError as error:
        told = to_api_error(error).message if isinstance(value, dict) else "not a JSON object"
        message = f"line {raw.number}: {told}"
        raise LineError("invalid_line", message, custom_id) from error
    if line.url not in BODIES:
        served = " and ".join(BODIES)
        message = f"line {raw.number}: url {line.url!r:.80} is not served: there are {served}"
        raise LineError("unknown_url", message, custom_id)
    return line


def _custom_id(value: object) -> str | None:
    custom_id = value.get("custom_id") if isinstance(value, dict) else None
    return custom_id if isinstance(custom_id, str) and custom_id else None


def call_of(line: BatchLine, model_name: str, tokenizer: Tokenizer) -> Call:
    """What the engine is to run for a line. Raises LineError.

    A body without a seed gets one from the line's custom_id.
    """
    try:
        # As JSON, since types are exact there: a list is a tuple, true is not 1.
        body = BODIES[line.url].model_validate_json(json.dumps(line.body))
        if body.stream:
            raise ApiError(
                400, "invalid_request_error", "invalid_request", "stream: a batch has none"
            )
        name, seed = _digest(line.custom_id), derived_seed(line.custom_id)
        return checked_call(body, model_name, tokenizer, name, CREATED, seed)
    except (ApiError, ValidationError, LoopmeshError) as error:
        raise rejected(line.custom_id, error) from error


def rejected(custom_id: str, error: Exception) -> LineError:
    """The LineError that says what HTTP would have answered to this error."""
    answer = to_api_error(error)
    return LineError(answer.code, answer.message, custom_id, answer)


def derived_seed(custom_id: str) -> int:
    """63 bits of the custom_id's SHA-256: the same line draws the same answer in every run."""
    return int.from_bytes(hashlib.sha256(custom_id.encode()).digest()[:8]) & MAX_SEED


def answer_line(line: BatchLine, call: Call, completion: Completion) -> str:
    """The output line of an answered request."""
    response = f'"status_code":200,"request_id":{json.dumps(call.response_id)}'
    return _line(line.custom_id, f'{{{response},"body":{call.answer(completion)}}}', "null")


def error_line(raw: RawLine, error: LineError) -> str:
    """The output line of a line that has no answer."""
    told = json.dumps({"code": error.code, "message": error.message}, ensure_ascii=False)
    if error.custom_id is None or error.answer is None:
        return _line(error.custom_id, "null", told, f" line {raw.number}")
    name = json.dumps(f"req-{_digest(error.custom_id)}")
    body = error.answer.body().decode()
    response = f'{{"status_code":{error.answer.status},"request_id":{name},"body":{body}}}'
    return _line(error.custom_id, response, told)


def _line(custom_id: str | None, response: str, error: str, place: str = "") -> str:
    """`place` tells lines apart that have no custom_id of their own."""
    name = json.dumps(f"batch_req_{_digest(f'{custom_id}{place}')}")
    quoted = json.dumps(custom_id, ensure_ascii=False)
    return f'{{"id":{name},"custom_id":{quoted},"response":{response},"error":{error}}}'


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
