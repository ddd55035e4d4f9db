"""Bodies of the OpenAI completions API, with the fields that looped models add."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import field_validator

from cluster.api_logprobs import ChoiceLogprobs
from cluster.api_sampling import Body, SamplingBody, neutral

if TYPE_CHECKING:
    from cluster.generation import Completion, TextDelta
    from cluster.tokenizer import Tokenizer

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None,),
}
"""Fields of OpenAI's body that only take the values with which they do nothing."""

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


class CompletionRequest(SamplingBody):
    """Body of POST /v1/completions."""

    prompt: str | tuple[int, ...]
    logprobs: int | None = None

    best_of: Any = None
    echo: Any = None
    suffix: Any = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: object) -> str | tuple[int, ...]:
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list | tuple):
            if prompt and all(isinstance(entry, str | list | tuple) for entry in prompt):
                raise ValueError("one prompt per request: send each prompt in its own request")
            if all(type(entry) is int and entry >= 0 for entry in prompt):
                return tuple(prompt)
        raise ValueError("a prompt is a string or a list of token ids (integers from 0)")

    @field_validator(*NEUTRAL_VALUES, mode="before")
    @classmethod
    def _neutral(cls, value: object, info: Any) -> object:  # noqa: ANN401 - pydantic's own object
        return neutral(value, info.field_name, NEUTRAL_VALUES)

    @property
    def wanted_tokens(self) -> int:
        """Most tokens to generate."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives to tell of each token."""
        return self.logprobs


class Usage(Body):
    """What a request cost: its prompt once, and the outputs of all its choices.

    Loops are those of the outputs: `loops_saved` counts what full passes would have run more,
    see cluster/generation.py. `completion_tokens` counts ids, a final stop token among them.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    loops_run: int
    loops_saved: int

    @classmethod
    def of(cls, completion: Completion) -> Self:
        """The cost of a finished answer with all its choices."""
        count = sum(len(choice.token_ids) for choice in completion.choices)
        return cls(
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=count,
            total_tokens=completion.prompt_tokens + count,
            loops_run=sum(choice.loops_run for choice in completion.choices),
            loops_saved=sum(choice.loops_saved for choice in completion.choices),
        )


class Choice(Body):
    """One answer, or in a stream its next piece; one exit depth (1-based) a token id."""

    text: str
    index: int
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    token_ids: tuple[int, ...]
    exit_depths: tuple[int, ...]

    @classmethod
    def of(cls, part: TextDelta | Completion, tokenizer: Tokenizer) -> Self:
        """A whole answer, or a piece of one."""
        return cls(
            text=part.text,
            index=part.choice,
            logprobs=ChoiceLogprobs.of(part, tokenizer),
            finish_reason=None if part.finish_reason is None else part.finish_reason.value,
            token_ids=part.token_ids,
            exit_depths=part.exit_depths,
        )


class CompletionResponse(Body):
    """An answer, or one event of a stream. An unset `usage` is left out of the JSON."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: Usage | None = None

    def to_json(self) -> str:
        """The body as JSON."""
        return self.model_dump_json(exclude_unset=True)


class ModelCard(Body):
    """One entry of GET /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: Literal["loopmesh"] = "loopmesh"


class ModelList(Body):
    """Body of GET /v1/models."""

    object: Literal["list"] = "list"
    data: tuple[ModelCard, ...]
