"""Log probabilities of sampled tokens and of the most likely ones, batched over rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from protocol.sampling import MAX_LOGPROBS
from worker.sampling.sampler import ordered_keys

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of M rows: sampled float32 [M], top_ids int64 [M, K] and top float32 [M, K]."""

    sampled: Tensor
    top_ids: Tensor
    top: Tensor


def most_alternatives(vocab_size: int) -> int:
    """How many of the most likely tokens are told at most."""
    return min(MAX_LOGPROBS, vocab_size)


def token_logprobs(logits: Tensor, tokens: Tensor, *, alternatives: bool) -> Logprobs:
    """log_softmax of float32 logits [M, V] at tokens int64 [M] and at the K most likely ids.

    K is most_alternatives(V), or 0 without `alternatives`. They fall, and the lower
    id comes first among equals. A row that has no distribution tells -inf.

    Example: logits (0, 0, -inf), token 1 -> -0.693; top ids (0, 1, 2), -0.693, -0.693 and -inf.
    """
    vocabulary = logits.shape[1]
    count = most_alternatives(vocabulary) if alternatives else 0
    if logits.is_cuda:
        # Imported late: Triton is there only where CUDA is.
        from worker.kernels.logits import tell

        return Logprobs(*tell(logits.contiguous(), tokens, count))
    logprobs = logits.log_softmax(-1)
    logprobs = logprobs.masked_fill(logprobs.isnan(), float("-inf"))
    # Keys that are all different have one order; the id is what is left after the key's bits.
    ids = torch.arange(vocabulary - 1, -1, -1, device=logits.device)
    ranked = (ordered_keys(logits).long() * 2**32 + ids).topk(count).values
    top_ids = vocabulary - 1 - (ranked & (2**32 - 1))
    return Logprobs(
        sampled=logprobs.gather(1, tokens[:, None])[:, 0],
        top_ids=top_ids,
        top=logprobs.gather(1, top_ids),
    )
