"""What a user may ask of one generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from protocol.rng import MAX_SEED

LoopCount = Annotated[int, Field(strict=True, ge=1)]
TokenId = Annotated[int, Field(strict=True, ge=0)]

MAX_TEMPERATURE = 1e6
MAX_TOP_K = 2**31 - 1
MAX_PRIORITY = 2**31 - 1
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
"""Bounds that the wire and a device's float32 and int32 tables can hold."""

MAX_BIASED_TOKENS = 300
"""Entries of a logit_bias, as OpenAI bounds them."""

MAX_CHOICES = 128
"""Choices of one request at most, as OpenAI bounds them."""

MAX_LOGPROBS = 20
"""Alternatives that are told of a token at most; readback buffers are sized by it."""

Penalty = Annotated[float, Field(strict=True, ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(strict=True, ge=-100.0, le=100.0)]


class SamplingParams(BaseModel):
    """Sampling and looping parameters of one request; immutable and checked on construction.

    temperature 0 is greedy. `top_k` -1 keeps every token. `seed` None draws one from the system.
    `max_loops` None means all loops of the model, `exit_threshold` None the model's own threshold;
    1.0 never leaves early. A stop token stays in the output's ids. `priority` counts only where the
    scheduler orders by it; lower is sooner. With `forced_depths`, output i leaves after
    forced_depths[i] loops: the loop bounds and the gate are not consulted. The first is a full
    pass, as it always is.

    `repetition_penalty` divides positive logits of tokens in prompt and output, and multiplies
    negative ones; `presence_penalty` and `frequency_penalty` lower the logits of tokens in the
    output, once and once an occurrence. `logit_bias` (a mapping or pairs of token id and bias) is
    added before. What would end the request is not sampled among the first `min_tokens` outputs.
    `logprobs` asks for each token's log probability, after all of these and before temperature,
    and for those of so many most likely tokens; it changes no token. `n` choices share one prompt,
    choice i draws from stream i of the seed; each ends on its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_tokens: Annotated[int, Field(strict=True, ge=1)] = 16
    temperature: Annotated[float, Field(strict=True, ge=0.0, le=MAX_TEMPERATURE)] = 0.0
    top_p: Annotated[float, Field(strict=True, gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(strict=True, ge=-1, le=MAX_TOP_K)] = -1
    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_SEED)] | None = None
    min_loops: Annotated[int, Field(strict=True, ge=1)] = 1
    max_loops: Annotated[int, Field(strict=True, ge=1)] | None = None
    exit_threshold: Annotated[float, Field(strict=True, ge=0.0, le=1.0)] | None = None
    ignore_eos: Annotated[bool, Field(strict=True)] = False
    stop_token_ids: tuple[TokenId, ...] = ()
    priority: Annotated[int, Field(strict=True, ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    forced_depths: tuple[LoopCount, ...] | None = None
    repetition_penalty: Annotated[
        float, Field(strict=True, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    ] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[
        tuple[tuple[TokenId, Bias], ...], Field(max_length=MAX_BIASED_TOKENS)
    ] = ()
    min_tokens: Annotated[int, Field(strict=True, ge=0)] = 0
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES)] = 1

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _as_pairs(cls, value: object) -> object:
        """A mapping as pairs, so that the parameters stay immutable and hashable."""
        return tuple(value.items()) if isinstance(value, Mapping) else value

    @field_validator("logit_bias")
    @classmethod
    def _distinct(cls, pairs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        counts = Counter(token for token, _ in pairs)
        twice = [token for token, count in counts.items() if count > 1]
        if twice:
            raise ValueError(f"token {twice[0]} appears twice: give it one bias")
        return pairs

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k == 0:
            raise ValueError("top_k is -1 (keep every token) or at least 1")
        if self.max_loops is not None and self.max_loops < self.min_loops:
            raise ValueError(
                f"max_loops {self.max_loops} is below min_loops {self.min_loops}: "
                "raise it or lower min_loops"
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}: "
                "lower it or raise max_tokens"
            )
        return self
