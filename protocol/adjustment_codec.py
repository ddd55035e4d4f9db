"""The sampling extras of an admission as bytes: bias, penalties, banned tokens and logprobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocol.columns import Packed, pack_column, read_float, read_int, unpack_column

if TYPE_CHECKING:
    from protocol.plan import Admission


def pack_adjustments(item: Admission) -> tuple[object, ...]:
    """The fields of an admission that say how its tokens are sampled beyond the usual."""
    return (
        float(item.repetition_penalty),
        float(item.presence_penalty),
        float(item.frequency_penalty),
        pack_column("i", [token for token, _ in item.logit_bias]),
        [float(bias) for _, bias in item.logit_bias],
        item.min_tokens,
        pack_column("i", item.banned_ids),
        item.logprobs,
    )


def unpack_adjustments(fields: Packed) -> dict[str, Any]:
    """The same fields by name, for Admission."""
    repetition, presence, frequency, biased, biases, min_tokens, banned, logprobs = fields
    return {
        "repetition_penalty": read_float(repetition),
        "presence_penalty": read_float(presence),
        "frequency_penalty": read_float(frequency),
        "logit_bias": tuple(zip(unpack_column("i", biased), map(read_float, biases), strict=True)),
        "min_tokens": read_int(min_tokens),
        "banned_ids": unpack_column("i", banned),
        "logprobs": read_int(logprobs),
    }
