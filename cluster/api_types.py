"""Bodies of the OpenAI completions API, with the fields that looped models add."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from cluster.api_logprobs import ChoiceLogprobs
from cluster.stop_strings import checked_stop
from protocol.errors import RequestError
from protocol.sampling import SamplingParams

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
DEFAULT_TEMPERATURE = 1.0
"""OpenAI's defaults, which differ from SamplingParams' greedy one: a client of this API that
leaves `temperature` out expects sampling."""


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """What a stream carries besides the text."""

    include_usage: bool = False


class CompletionRequest(_Body):
    """Body of POST /v1/completions.

    Types are exact (true is not 1, "1" is not 1) and unknown fields are refused. null means the
    default wherever OpenAI allows it. `top_k`, `min_loops`, `max_loops`, `exit_threshold`,
    `ignore_eos`, `stop_token_ids`, `priority`, `forced_depths`, `repetition_penalty` and
    `min_tokens` are Loopmesh's own; see protocol/sampling.py.
    """

    model: str
    prompt: str | tuple[int, ...]
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    top_k: int = -1
    min_loops: int = 1
    max_loops: int | None = None
    exit_threshold: float | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    forced_depths: tuple[int, ...] | None = None
    repetition_penalty: float = 1.0
    min_tokens: int = 0

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
        allowed = NEUTRAL_VALUES[info.field_name]
        if not any(type(value) is type(neutral) and value == neutral for neutral in allowed):
            raise ValueError(f"not supported: leave it out or send {allowed[-1]!r}")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_strings(cls, value: object) -> tuple[str, ...]:
        try:
            return checked_stop(value)
        except RequestError as error:
            raise ValueError(str(error)) from error

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for name in bias or ():
            if not (name.isascii() and name.isdecimal() and len(name) < 20):
                raise ValueError(f"{name!r:.80} is no token id: keys are integers from 0, as text")
        return bias

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with an event that counts tokens and loops."""
        return self.stream_options is not None and self.stream_options.include_usage

    def to_sampling_params(self) -> SamplingParams:
        """The parameters for the engine. Raises pydantic's ValidationError, field by field."""
        return SamplingParams(
            max_tokens=DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            temperature=DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            min_loops=self.min_loops,
            max_loops=self.max_loops,
            exit_threshold=self.exit_threshold,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            priority=self.priority,
            forced_depths=self.forced_depths,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((int(name), bias) for name, bias in (self.logit_bias or {}).items()),
            min_tokens=self.min_tokens,
            logprobs=self.logprobs,
            n=1 if self.n is None else self.n,
        )


class Usage(_Body):
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


class Choice(_Body):
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


class CompletionResponse(_Body):
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


class ModelCard(_Body):
    """One entry of GET /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: Literal["loopmesh"] = "loopmesh"


class ModelList(_Body):
    """Body of GET /v1/models."""

    object: Literal["list"] = "list"
    data: tuple[ModelCard, ...]
