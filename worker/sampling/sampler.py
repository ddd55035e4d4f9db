"""Token sampling, batched over rows: temperature, top-k, top-p, then one inverse CDF.

A row's token depends on that row alone. Masses are therefore fixed-point integers: their sums are
exact, so they cannot depend on the order in which a device adds them up for one batch or another.
Thresholds are found by bisection over the bit patterns of the logits, which needs no sort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1
_KEY_BITS = 32


def greedy(logits: Tensor) -> Tensor:
    """The largest of float32 logits [N, V], the lowest id among equals: int64 [N].

    What `sample` takes at temperature 0, for batches of nothing else.
    """
    if logits.is_cuda:
        # Imported late: Triton is there only where CUDA is.
        from worker.kernels.sampler import greedy as greedy_on_cuda

        return greedy_on_cuda(logits.contiguous())[0]
    return logits.argmax(-1)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    uniforms: Tensor,
    *,
    any_top_k: bool = True,
    any_top_p: bool = True,
) -> Tensor:
    """One token id a row, int64 [N].

    logits float32 [N, V]; temperature, top_p float32 [N]; top_k int64 [N], -1 keeps all; uniforms
    float64 [N] in [0, 1). In this order:

    1. temperature 0: the largest logit, the lowest id among equals; nothing below applies;
    2. weights exp((logit - largest) / temperature);
    3. top-k: drop logits below the k-th largest, so equals of it stay;
    4. top-p: keep a logit iff the share of strictly greater ones (of what top-k left) is < top_p;
    5. the first id whose running weight, in vocabulary order, exceeds u * total.

    A row that has no distribution (NaN, infinity, or nothing but -inf) is taken as greedy, so what
    comes back is always an id.

    The two flags, when False, say that no row of the batch needs that work. They change the cost,
    not a token: what does not apply to a row keeps all its logits.

    Example: weights (2, 1, 1), top_p 0.5, u 0.9 -> id 0, since the others have a share of 0.5
    above them.
    """
    if logits.is_cuda:
        # Imported late: Triton is there only where CUDA is.
        from worker.kernels.sampler import sample as sample_on_cuda

        bits = weight_bits(logits.shape[1])
        return sample_on_cuda(logits, temperature, top_p, top_k, uniforms, bits)
    keys = ordered_keys(logits)
    weights = _weights(logits, temperature)
    if any_top_k:
        weights = weights * (keys >= _top_k_threshold(keys, top_k))
    if any_top_p:
        weights = weights * (keys >= _top_p_threshold(keys, weights, top_p))
    running = weights.cumsum(-1)
    total = running[:, -1]
    # u is at least 2^-53 below 1, so even a rounded product stays below the total.
    target = (uniforms * total).to(torch.int64)
    drawn = (running <= target[:, None]).sum(-1)
    return torch.where((temperature > 0) & (total > 0), drawn, greedy(logits))


def ordered_keys(logits: Tensor) -> Tensor:
    """int32 keys [N, V] in the order of the float32 logits; equal floats have equal keys.

    Positive floats already sort as their bit patterns; for negative ones the magnitude bits are
    flipped. Adding 0.0 makes -0.0 the same pattern as 0.0.
    """
    bits = (logits + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & _INT32_MAX)


def weight_bits(vocab_size: int) -> int:
    """Bits of the largest weight, so that V of them fit into 62. Example: 49,152 tokens -> 46."""
    return 62 - vocab_size.bit_length()


def _weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """exp((logit - largest) / temperature) as fixed-point int64 [N, V], the largest 2^shift.

    The difference comes before the division, so that no temperature makes it overflow.
    """
    shift = weight_bits(logits.shape[1])
    scale = torch.where(temperature > 0, temperature, 1.0).to(torch.float64)
    wide = logits.to(torch.float64)
    exponents = (wide - wide.amax(-1, keepdim=True)) / scale[:, None]
    # NaN, as of a row of nothing but -inf, becomes weight 0.
    return (exponents.exp().nan_to_num(0.0) * 2.0**shift).to(torch.int64)


def _top_k_threshold(keys: Tensor, top_k: Tensor) -> Tensor:
    """The k-th largest key of each row, [N, 1]: the largest that k or more keys reach."""
    vocabulary = keys.shape[1]
    wanted = torch.where(top_k < 0, vocabulary, top_k).clamp(max=vocabulary)[:, None]
    low = torch.full_like(wanted, _INT32_MIN)  # reached by all
    high = torch.full_like(wanted, _INT32_MAX + 1)  # reached by none
    for _ in range(_KEY_BITS):
        middle = (low + high) >> 1
        enough = (keys >= middle).sum(-1, keepdim=True) >= wanted
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low


def _top_p_threshold(keys: Tensor, weights: Tensor, top_p: Tensor) -> Tensor:
    """The smallest key [N, 1] with a share of strictly greater keys below top_p.

    That share only falls as the key rises, so everything at or above the threshold is kept.
    """
    limit = top_p.to(torch.float64)[:, None] * weights.sum(-1, keepdim=True)
    low = torch.full_like(limit, _INT32_MIN - 1, dtype=torch.int64)  # never kept
    high = torch.full_like(low, _INT32_MAX)  # always kept: nothing is greater
    for _ in range(_KEY_BITS):
        middle = (low + high) >> 1
        greater = (weights * (keys > middle)).sum(-1, keepdim=True)
        kept = greater < limit
        low, high = torch.where(kept, low, middle), torch.where(kept, middle, high)
    # 1.0 keeps all by definition; the comparison would lose weights below its rounding.
    return torch.where(top_p[:, None] < 1.0, high, _INT32_MIN)
