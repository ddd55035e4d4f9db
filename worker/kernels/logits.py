"""What is done to logits, and told of them: adjustments, and the most likely tokens.

worker/sampling/adjustments.py and worker/sampling/logprobs.py state both in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.launch import dependent_launches, power_of_two, wait_for_inputs
from worker.kernels.sampler import ordered

PART = 4096
"""Logits of a row that one program takes."""


@triton.jit
def adjust_kernel(
    logits, seats, early, bias, counts, marks, penalties, adjusted,
    IN_PROMPT: tl.constexpr, BANNED: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    slot = tl.load(seats + row)
    x = tl.load(logits + row * VOCAB + token, mask=inside, other=0.0)
    place = slot * VOCAB + token
    x += tl.load(bias + place, mask=inside, other=0.0)
    repetition = tl.load(penalties + slot * 3)
    presence = tl.load(penalties + slot * 3 + 1)
    frequency = tl.load(penalties + slot * 3 + 2)
    asks = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    is_early = tl.load(early + row) != 0
    # Rows that ask for nothing do not read what would change nothing.
    times = tl.load(counts + place, mask=inside & asks, other=0)
    mark = tl.load(marks + place, mask=inside & (asks | is_early), other=0)
    seen = (times > 0) | ((mark & IN_PROMPT) != 0)
    repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(seen & asks, repeated, x)
    x = x - times.to(tl.float32) * frequency
    x = x - (times > 0).to(tl.float32) * presence
    x = tl.where(((mark & BANNED) != 0) & is_early, float("-inf"), x)
    tl.store(adjusted + row * VOCAB + token, x, mask=inside)


@triton.jit
def likely_kernel(
    logits, ranked, largest, sums, parts, K: tl.constexpr, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    x = tl.load(logits + row * VOCAB + token, mask=inside, other=float("-inf"))
    place = row * parts + part
    top = tl.max(tl.where(x == x, x, float("-inf")), 0)
    total = tl.sum(tl.exp(x - top), 0)
    broken = tl.max((x != x).to(tl.int32), 0) > 0
    total = tl.where((top == float("-inf")) & (broken == 0), 0.0, total)
    tl.store(largest + place, top)
    tl.store(sums + place, total)
    # Keys that are all different have one order: the id is what is left after the key's bits.
    least = -9223372036854775808
    rank = ordered(x).to(tl.int64) * 4294967296 + (VOCAB - 1 - token)
    rank = tl.where(inside, rank, least)
    for index in tl.range(0, K):
        best = tl.max(rank, 0)
        tl.store(ranked + place * K + index, best)
        rank = tl.where(rank == best, least, rank)


@triton.jit
def tell_kernel(
    logits, tokens, ranked, largest, sums, parts, sampled, top_ids, top, K: tl.constexpr,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    has = part < parts
    tops = tl.load(largest + row * parts + part, mask=has, other=float("-inf"))
    total = tl.load(sums + row * parts + part, mask=has, other=0.0)
    peak = tl.max(tops, 0)
    # A part of nothing but -inf has no weight, and nothing to scale it by.
    scale = tl.where(tops == float("-inf"), 1.0, tl.exp(tops - peak))
    base = tl.log(tl.sum(total * scale, 0))
    value = tl.load(logits + row * VOCAB + tl.load(tokens + row)) - peak - base
    tl.store(sampled + row, tl.where(value == value, value, float("-inf")))
    if K > 0:
        index = tl.arange(0, RANKS)
        least = -9223372036854775808
        rank = tl.load(ranked + row * parts * K + index, mask=index < parts * K, other=least)
        for place in tl.range(0, K):
            best = tl.max(rank, 0)
            token = VOCAB - 1 - (best & 0xFFFFFFFF)
            value = tl.load(logits + row * VOCAB + token) - peak - base
            tl.store(top_ids + row * K + place, token)
            tl.store(top + row * K + place, tl.where(value == value, value, float("-inf")))
            rank = tl.where(rank == best, least, rank)


def adjust(
    logits: torch.Tensor,
    seats: torch.Tensor,
    early: torch.Tensor,
    columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    in_prompt: int,
    banned: int,
) -> torch.Tensor:
    """Bias, penalties and bans of slots int64 [N]; float32 [N, V]. See LogitAdjuster.

    `columns` are bias, counts, marks and penalties; the two numbers are bits of a mark.
    """
    rows, vocabulary = logits.shape
    adjusted = torch.empty_like(logits)
    if rows:
        adjust_kernel[(rows, triton.cdiv(vocabulary, PART))](
            logits, seats, early, *columns, adjusted, in_prompt, banned, vocabulary, PART,
            num_warps=8, enable_fp_fusion=False, **dependent_launches(),
        )  # fmt: skip
    return adjusted


def tell(
    logits: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities of tokens int64 [N], and ids and those of the `count` most likely ones.

    float32 [N], int64 [N, count] and float32 [N, count]; see worker.sampling.logprobs.
    """
    rows, vocabulary = logits.shape
    device, parts = logits.device, triton.cdiv(vocabulary, PART)
    ranked = torch.empty(rows, parts, count, dtype=torch.int64, device=device)
    largest, sums = (torch.empty(rows, parts, device=device) for _ in range(2))
    sampled, top = torch.empty(rows, device=device), torch.empty(rows, count, device=device)
    top_ids = torch.empty(rows, count, dtype=torch.int64, device=device)
    if rows:
        likely_kernel[(rows, parts)](
            logits, ranked, largest, sums, parts, count, vocabulary, PART,
            num_warps=8, **dependent_launches(),
        )  # fmt: skip
        tell_kernel[(rows,)](
            logits, tokens, ranked, largest, sums, parts, sampled, top_ids, top, count,
            vocabulary, power_of_two(parts), power_of_two(parts * count),
            num_warps=2, **dependent_launches(),
        )  # fmt: skip
    return sampled, top_ids, top
