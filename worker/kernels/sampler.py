"""Sampling as worker/sampling/ defines it, a row a program where the formulas take many passes.

Masses are the same integers and thresholds the same keys, so tokens are the same ones. A row that
draws nothing, or filters nothing, costs next to nothing in the batch of one that does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.launch import dependent_launches, wait_for_inputs

BLOCK = 4096
"""Logits that a program reads at once."""

WARPS = 16
"""Warps of a program that reads a row several times."""


@triton.jit
def uniform_kernel(rng, indices, purpose, output, DEPENDENT: tl.constexpr):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(indices + row)
    key = rng + row * 3
    low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
    why = (tl.zeros_like(index) + purpose).to(tl.uint32)
    stream = tl.load(key + 2).to(tl.uint32)
    first, second, _, _ = tl.philox_impl(
        low, high, why, stream, tl.load(key).to(tl.uint32), tl.load(key + 1).to(tl.uint32), 10
    )
    bits = (first >> 5).to(tl.int64) * 67108864 + (second >> 6).to(tl.int64)
    tl.store(output + row, bits.to(tl.float64) * 1.1102230246251565e-16)


@triton.jit
def greedy_kernel(
    logits, tokens, largest, broken, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    bad_id = tl.full([BLOCK], VOCAB, tl.int32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
        token = start + lane
        x = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
        bad_id = tl.where(x != x, tl.minimum(bad_id, token), bad_id)
        better = x > best  # of equals, the lowest id stays
        best = tl.where(better, x, best)
        best_id = tl.where(better, token, best_id)
    top = tl.max(best, 0)
    bad = tl.min(bad_id, 0)
    token = tl.min(tl.where(best == top, best_id, VOCAB), 0)
    tl.store(tokens + row, tl.where(bad < VOCAB, bad, token).to(tl.int64))
    tl.store(largest + row, top)
    tl.store(broken + row, bad < VOCAB)


@triton.jit
def weights_kernel(
    logits, largest, temperature, weights,
    SCALE: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row).to(tl.float64)
    if heat <= 0.0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    x = tl.load(logits + row * VOCAB + token, mask=inside, other=float("-inf")).to(tl.float64)
    share = tl.exp((x - tl.load(largest + row).to(tl.float64)) / heat)
    share = tl.where(share == share, share, 0.0)
    mass = (share * SCALE).to(tl.int64)
    tl.store(weights + row * VOCAB + token, mass, mask=inside)


@triton.jit
def ordered(x):
    """int32 keys in the order of float32 x, see worker.sampling.sampler.ordered_keys."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def keys_of(logits, row, token, VOCAB: tl.constexpr):
    """int32 keys of tokens; behind the vocabulary there is none that any threshold keeps."""
    x = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=0.0)
    return tl.where(token < VOCAB, ordered(x), -2147483648)


@triton.jit
def kept(logits, weights, row, token, cut, VOCAB: tl.constexpr):
    """int64 weights of tokens, 0 where the key is below the threshold `cut`."""
    mass = tl.load(weights + row * VOCAB + token, mask=token < VOCAB, other=0)
    return tl.where(keys_of(logits, row, token, VOCAB) >= cut, mass, 0)


@triton.jit
def top_k_cut(logits, row, k, lowest, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key that k or more keys of a row reach, two bits at a time."""
    lane = tl.arange(0, BLOCK)
    cut = lowest
    part = lowest * 0 + (1 << 30)
    for _ in tl.range(0, 16):
        first = tl.zeros([BLOCK], tl.int32)
        second = tl.zeros([BLOCK], tl.int32)
        third = tl.zeros([BLOCK], tl.int32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
            key = keys_of(logits, row, start + lane, VOCAB)
            first += (key >= cut + part).to(tl.int32)
            second += (key >= cut + 2 * part).to(tl.int32)
            third += (key >= cut + 2 * part + part).to(tl.int32)
        reached = (tl.sum(first, 0) >= k).to(tl.int32) + (tl.sum(second, 0) >= k).to(tl.int32)
        cut += (reached + (tl.sum(third, 0) >= k).to(tl.int32)) * part
        part = part >> 2
    return cut


@triton.jit
def is_much(mass, limit):
    """Whether the weights of all lanes reach a limit, 1 or 0."""
    return (tl.sum(mass, 0).to(tl.float64) >= limit).to(tl.int32)


@triton.jit
def top_p_cut(logits, weights, row, limit, cut, lowest, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key with weights below `limit` strictly above it, two bits at a time.

    `limit` is above 0, so the largest key there is will do.
    """
    lane = tl.arange(0, BLOCK)
    base = lowest
    part = lowest * 0 + (1 << 30)
    for _ in tl.range(0, 16):
        # Above the last key of each part but the highest one.
        first = tl.zeros([BLOCK], tl.int64)
        second = tl.zeros([BLOCK], tl.int64)
        third = tl.zeros([BLOCK], tl.int64)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
            token = start + lane
            key = keys_of(logits, row, token, VOCAB)
            mass = tl.load(weights + row * VOCAB + token, mask=token < VOCAB, other=0)
            mass = tl.where(key >= cut, mass, 0)
            first += tl.where(key >= base + part, mass, 0)
            second += tl.where(key >= base + 2 * part, mass, 0)
            third += tl.where(key >= base + 2 * part + part, mass, 0)
        much = is_much(first, limit) + is_much(second, limit) + is_much(third, limit)
        base += much * part
        part = part >> 2
    return base


@triton.jit
def mass_above(logits, weights, row, cut, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """All weights of a row that a threshold keeps."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
        total += kept(logits, weights, row, start + tl.arange(0, BLOCK), cut, VOCAB)
    return tl.sum(total, 0)


@triton.jit
def pick_kernel(
    logits, weights, broken, temperature, top_p, top_k, uniforms, tokens,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    # What is there already is the greedy token.
    if (tl.load(temperature + row) <= 0.0) | (tl.load(broken + row) != 0):
        return
    lowest = tl.full([], -2147483648, tl.int32)
    cut = lowest
    k = tl.load(top_k + row)
    if (k > 0) & (k < VOCAB):
        cut = top_k_cut(logits, row, k, lowest, VOCAB, BLOCK)
    total = mass_above(logits, weights, row, cut, VOCAB, BLOCK)
    if total <= 0:
        return
    p = tl.load(top_p + row)
    if p < 1.0:
        limit = p.to(tl.float64) * total.to(tl.float64)
        cut = tl.maximum(cut, top_p_cut(logits, weights, row, limit, cut, lowest, VOCAB, BLOCK))
        total = mass_above(logits, weights, row, cut, VOCAB, BLOCK)
    target = (tl.load(uniforms + row) * total.to(tl.float64)).to(tl.int64)
    # The block in which the running weight exceeds the target, and the weight before it.
    place = tl.full([], 0, tl.int32)
    base = tl.zeros_like(row)
    before = tl.zeros_like(row)
    lane = tl.arange(0, BLOCK)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
        after = before + tl.sum(kept(logits, weights, row, start + lane, cut, VOCAB), 0)
        here = (before <= target) & (after > target)
        place = tl.where(here, start, place)
        base = tl.where(here, before, base)
        before = after
    running = base + tl.cumsum(kept(logits, weights, row, place + lane, cut, VOCAB), 0)
    passed = tl.sum((running <= target).to(tl.int32), 0)
    tl.store(tokens + row, (place + passed).to(tl.int64))


def uniform(rng: torch.Tensor, purpose: int, indices: torch.Tensor) -> torch.Tensor:
    """See worker.sampling.philox.uniform."""
    output = torch.empty(len(indices), dtype=torch.float64, device=indices.device)
    if len(indices):
        uniform_kernel[(len(indices),)](
            rng, indices, purpose, output, num_warps=1, **dependent_launches()
        )
    return output


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of float32 logits [N, V]: the id of the largest, int64 [N]; it, float32 [N]; any NaN, bool.

    The lowest id among equals. Where one is no number, the first such id is told, and the largest
    is that of the others.
    """
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    largest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    broken = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        greedy_kernel[(rows,)](
            logits, tokens, largest, broken, vocabulary, BLOCK,
            num_warps=8, **dependent_launches(),
        )  # fmt: skip
    return tokens, largest, broken


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    top_k: torch.Tensor,
    uniforms: torch.Tensor,
    weight_bits: int,
) -> torch.Tensor:
    """See worker.sampling.sampler.sample. The largest weight is 2^weight_bits."""
    logits = logits.contiguous()
    tokens, largest, broken = greedy(logits)
    rows, vocabulary = logits.shape
    if not rows:
        return tokens
    weights = torch.empty(rows, vocabulary, dtype=torch.int64, device=logits.device)
    weights_kernel[(rows, triton.cdiv(vocabulary, 2048))](
        logits, largest, temperature, weights, 2.0**weight_bits, vocabulary, 2048,
        num_warps=8, **dependent_launches(),
    )  # fmt: skip
    pick_kernel[(rows,)](
        logits, weights, broken, temperature, top_p, top_k, uniforms, tokens,
        vocabulary, BLOCK, num_warps=WARPS, **dependent_launches(),
    )  # fmt: skip
    return tokens
