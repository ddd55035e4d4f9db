"""Bodies of the OpenAI chat completions API, with the fields that looped models add."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from cluster.api_logprobs import LEAST_LOGPROB
from cluster.api_sampling import Body, SamplingBody, neutral
from cluster.api_types import Usage

if TYPE_CHECKING:
    from cluster.generation import Completion, TextDelta
    from cluster.tokenizer import Tokenizer

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, False, True),
    "prediction": (None,),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "default", "auto"),
    "store": (None, False),
    "tool_choice": (None, "none"),
    "tools": (None, []),
}
"""Fields of OpenAI's body that only take the values with which they do nothing."""

DEFAULT_CHAT_TOKENS = 256
"""OpenAI's API goes on to the end of the context; here an answer without a limit has this one."""


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message; several text parts are one text."""

    role: Literal["system", "user", "assistant"]
    content: str | Annotated[tuple[TextPart, ...], Field(min_length=1)]

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatCompletionRequest(SamplingBody):
    """Body of POST /v1/chat/completions; `max_tokens` is the older `max_completion_tokens`."""

    messages: Annotated[tuple[ChatMessage, ...], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    response_format: Any = None
    service_tier: Any = None
    store: Any = None
    tool_choice: Any = None
    tools: Any = None

    @field_validator(*NEUTRAL_VALUES, mode="before")
    @classmethod
    def _neutral(cls, value: object, info: Any) -> object:  # noqa: ANN401 - pydantic's own object
        return neutral(value, info.field_name, NEUTRAL_VALUES)

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are the same: send one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def wanted_tokens(self) -> int:
        """Most tokens to generate."""
        given = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        return DEFAULT_CHAT_TOKENS if given is None else given

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives to tell of each token."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TopLogprob(Body):
    """One of the most likely tokens, by its text; `bytes` are those of the text."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class TokenLogprob(TopLogprob):
    """A sampled token, and the most likely ones in its place."""

    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(Body):
    """One entry a token."""

    content: tuple[TokenLogprob, ...]

    @classmethod
    def of(cls, part: TextDelta | Completion, tokenizer: Tokenizer) -> Self | None:
        """The log probabilities of an answer or a piece of one; None when it has none."""
        if not part.logprobs:
            return None
        content = []
        for token, entry in zip(part.token_ids, part.logprobs, strict=True):
            top = zip(entry.top_ids, entry.top_logprobs, strict=True)
            told = tuple(TopLogprob(**_told(tokenizer, *pair)) for pair in top)
            own = _told(tokenizer, token, entry.logprob)
            content.append(TokenLogprob(**own, top_logprobs=told))
        return cls(content=tuple(content))


class AssistantMessage(Body):
    """A whole answer, or in a stream its next piece, whose `role` comes first."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(Body):
    """One answer (`message`), or in a stream its next piece (`delta`); one depth a token id."""

    index: int
    message: AssistantMessage | None = None
    delta: AssistantMessage | None = None
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: tuple[int, ...]
    exit_depths: tuple[int, ...]

    @classmethod
    def whole(cls, part: Completion, tokenizer: Tokenizer) -> Self:
        """A whole answer."""
        message = AssistantMessage(role="assistant", content=part.text)
        return cls(message=message, **_shared(part, tokenizer))

    @classmethod
    def piece(cls, part: TextDelta, tokenizer: Tokenizer) -> Self:
        """A piece of an answer."""
        return cls(delta=AssistantMessage(content=part.text), **_shared(part, tokenizer))

    @classmethod
    def opening(cls, index: int) -> Self:
        """What a stream says of a choice before its first piece: who speaks."""
        return cls(
            index=index,
            delta=AssistantMessage(role="assistant", content=""),
            logprobs=None,
            finish_reason=None,
            token_ids=(),
            exit_depths=(),
        )


class ChatCompletionResponse(Body):
    """An answer, or one event of a stream. Unset fields are left out of the JSON."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage | None = None

    def to_json(self) -> str:
        """The body as JSON."""
        return self.model_dump_json(exclude_unset=True)


def _shared(part: TextDelta | Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "index": part.choice,
        "logprobs": ChatLogprobs.of(part, tokenizer),
        "finish_reason": None if part.finish_reason is None else part.finish_reason.value,
        "token_ids": part.token_ids,
        "exit_depths": part.exit_depths,
    }


def _told(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.token_text(token)
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": tuple(text.encode())}
