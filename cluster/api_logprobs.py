"""The `logprobs` object of OpenAI's completions API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from cluster.generation import Completion, TextDelta
    from cluster.tokenizer import Tokenizer
    from protocol.result import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class ChoiceLogprobs(BaseModel):
    """One entry a token; `text_offset` counts characters from the start of the answer's text.

    `top_logprobs` has the most likely tokens by their text, and the sampled one, so up to one
    more than were asked for. Of tokens with the same text the most likely is told.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    text_offset: tuple[int, ...]

    @classmethod
    def of(cls, part: TextDelta | Completion, tokenizer: Tokenizer) -> Self | None:
        """The log probabilities of an answer or a piece of one; None when it has none."""
        if not part.logprobs:
            return None
        tokens = tuple(tokenizer.token_text(token) for token in part.token_ids)
        entries = zip(tokens, part.logprobs, strict=True)
        return cls(
            tokens=tokens,
            token_logprobs=tuple(_finite(entry.logprob) for entry in part.logprobs),
            top_logprobs=tuple(_top(text, entry, tokenizer) for text, entry in entries),
            text_offset=part.text_offsets,
        )


def _top(sampled: str, entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    top: dict[str, float] = {}
    for token, value in zip(entry.top_ids, entry.top_logprobs, strict=True):
        top.setdefault(tokenizer.token_text(token), _finite(value))
    top.setdefault(sampled, _finite(entry.logprob))
    return top


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
