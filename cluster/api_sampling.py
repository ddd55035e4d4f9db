"""What the bodies of all generating endpoints have in common: how to sample, and how to loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from cluster.stop_strings import checked_stop
from protocol.errors import RequestError
from protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's default, which differs from SamplingParams' greedy one: a client of this API that
leaves `temperature` out expects sampling."""


class Body(BaseModel):
    """Base of every public body: types are exact, unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream carries besides the text."""

    include_usage: bool = False


class SamplingBody(Body):
    """The fields that say how to sample; a subclass adds the prompt and what it defaults to.

    Types are exact (true is not 1, "1" is not 1) and unknown fields are refused. null means the
    default wherever OpenAI allows it. `top_k`, `min_loops`, `max_loops`, `exit_threshold`,
    `ignore_eos`, `stop_token_ids`, `priority`, `forced_depths`, `repetition_penalty` and
    `min_tokens` are Loopmesh's own; see protocol/sampling.py.
    """

    model: str
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
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

    @property
    def wanted_tokens(self) -> int:
        """Most tokens to generate."""
        raise NotImplementedError

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives to tell of each token; None tells no log probabilities."""
        raise NotImplementedError

    def to_sampling_params(self) -> SamplingParams:
        """The parameters for the engine. Raises pydantic's ValidationError, field by field."""
        return SamplingParams(
            max_tokens=self.wanted_tokens,
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
            logprobs=self.wanted_logprobs,
            n=1 if self.n is None else self.n,
        )


def neutral(value: object, name: str, allowed: Mapping[str, tuple[Any, ...]]) -> object:
    """`value` of a field that only takes the values with which it does nothing, else ValueError."""
    if not any(type(value) is type(entry) and value == entry for entry in allowed[name]):
        raise ValueError(f"not supported: leave it out or send {allowed[name][-1]!r}")
    return value
