"""Split-KV attention of single-token rows over paged KV.

One program attends one split of one row's history for the query heads of one KV head. The splits of
a row are as long as its length asks for, decided on the device; the last of them to end merges all,
in their order, so the result does not depend on which one that was. Everything about a row is read
from device memory: a captured launch serves any rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from worker.kernels.launch import dependent_launches, power_of_two, rounded, wait_for_inputs

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)
"""Stands for -inf where a difference of two of them must be 0."""


@triton.jit
def turned(base, head, d, cosine, sine, mask, HEAD_DIM: tl.constexpr):
    """Heads [G] of one token after the split-half rotation, float32 [G, D], rounded as stored.

    cosine and sine [D / 2] of the token's position, by their address.
    """
    half: tl.constexpr = HEAD_DIM // 2
    dtype = base.dtype.element_ty
    first = d < half
    pair = tl.where(first, d, d - half)
    cos = tl.load(cosine + pair, mask=d < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sine + pair, mask=d < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    row = base + head[:, None] * HEAD_DIM
    own = tl.load(row + d[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.where(first, d + half, d - half)
    other = tl.load(row + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    sign = tl.where(first, -1.0, 1.0)[None, :]
    turn = rounded(own * cos, dtype) + sign * rounded(other * sin, dtype)
    return rounded(turn, dtype)


@triton.jit
def attend(
    query, pages, table, start, end, d,
    stride_block, value_offset,
    HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The query heads [G, D] of one KV head over tokens [start, end), an online softmax.

    ALIGNED: the tokens of a step lie in one block.
    """
    dtype = pages.dtype.element_ty
    lane = tl.arange(0, BLOCK_N)
    top = tl.full([BLOCK_G], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    column = d < HEAD_DIM
    scale = HEAD_DIM**-0.5 * LOG2_E
    narrow = query.to(dtype)
    for first in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        token = first + lane
        seen = token < end
        if ALIGNED:
            block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        else:
            block = tl.load(table + token // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        row = pages + block * stride_block + (token % BLOCK_SIZE) * HEAD_DIM
        where = row[:, None] + d[None, :]
        mask = seen[:, None] & column[None, :]
        key = tl.load(where, mask=mask, other=0.0)
        value = tl.load(where + value_offset, mask=mask, other=0.0)
        score = tl.dot(narrow, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        decay = tl.exp2(top - new_top)
        weight = tl.exp2(score - new_top[:, None])
        total = total * decay + tl.sum(weight, 1)
        product = tl.dot(weight.to(dtype), value, input_precision="ieee")
        acc = acc * decay[:, None] + product
        top = new_top
    return acc, top, total


@triton.jit
def merge(
    output, partials, stats, first_part, used, d,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Put the splits of one query head together, in their order."""
    s = tl.arange(0, SPLITS)
    part = first_part + s
    tops = tl.load(stats + part * 2, mask=s < used, other=LOWEST, cache_modifier=".cg")
    totals = tl.load(stats + part * 2 + 1, mask=s < used, other=0.0, cache_modifier=".cg")
    values = tl.load(
        partials + part[:, None] * BLOCK_D + d[None, :],
        mask=(s < used)[:, None],
        other=0.0,
        cache_modifier=".cg",
    )
    share = tl.exp2(tops - tl.max(tops, 0))
    merged = tl.sum(values * share[:, None], 0) / tl.sum(totals * share, 0)
    tl.store(output + d, merged.to(output.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def decode_kernel(
    query, output, pages, tables, table_rows, lengths, cosine, sine,
    partials, stats, arrivals,
    query_stride, layer_offset, stride_block, table_width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, STAGES: tl.constexpr,
    FUSED: tl.constexpr, ALIGNED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """See `decode`. FUSED: `query` has q, k and v before the rotation, and k, v are written."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    dtype = pages.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    g = tl.arange(0, BLOCK_G)
    mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    out = output + (row * HEADS + kv_head * GROUP) * HEAD_DIM
    place = out + g[:, None] * HEAD_DIM + d[None, :]
    # What the batch is was settled two kernels ago: only `query` is the last one's work.
    length = tl.load(lengths + row).to(tl.int32)
    table = tables + tl.load(table_rows + row) * table_width
    wait_for_inputs(DEPENDENT)
    even = tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), MIN_SPLIT), 1) * MIN_SPLIT
    used = tl.cdiv(length, even)
    if (length == 0) & (split == 0):
        tl.store(place, tl.zeros([BLOCK_G, BLOCK_D], dtype), mask=mask)
    if split < used:
        start = split * even
        end = tl.minimum(start + even, length)
        base = query + row * query_stride
        head = kv_head * GROUP + g
        if FUSED:
            cos = cosine + row * (HEAD_DIM // 2)
            sin = sine + row * (HEAD_DIM // 2)
            heads = turned(base, head, d, cos, sin, mask, HEAD_DIM)
        else:
            heads = tl.load(base + head[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
            heads = heads.to(tl.float32)
        scaled = heads * (HEAD_DIM**-0.5 * LOG2_E)
        own_pages = pages + layer_offset + kv_head * BLOCK_SIZE * HEAD_DIM
        value_offset = KV_HEADS * BLOCK_SIZE * HEAD_DIM
        # The row's own token is not in the pages yet: its program takes it from `query`.
        old_end = tl.minimum(end, length - 1) if FUSED else end
        acc, top, total = attend(
            heads, own_pages, table, start, old_end, d, stride_block, value_offset,
            HEAD_DIM, BLOCK_G, BLOCK_D, BLOCK_SIZE, BLOCK_N, STAGES, ALIGNED,
        )  # fmt: skip
        if FUSED:
            owner = split == used - 1
            position = length - 1
            one = tl.arange(0, 1)
            own = (one == 0)[:, None] & (d < HEAD_DIM)[None, :]
            key = turned(base, HEADS + kv_head + one, d, cos, sin, own, HEAD_DIM)
            value = tl.load(
                base + (HEADS + KV_HEADS + kv_head + one)[:, None] * HEAD_DIM + d[None, :],
                mask=own,
                other=0.0,
            ).to(tl.float32)
            block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
            page = own_pages + block * stride_block + (position % BLOCK_SIZE) * HEAD_DIM
            target = page + d[None, :] + one[:, None]
            tl.store(target, key.to(dtype), mask=own & owner)
            tl.store(target + value_offset, value.to(dtype), mask=own & owner)
            score = tl.where(owner, tl.sum(scaled * key, 1), LOWEST)
            new_top = tl.maximum(top, score)
            decay = tl.exp2(top - new_top)
            weight = tl.where(owner, tl.exp2(score - new_top), 0.0)
            total = total * decay + weight
            acc = acc * decay[:, None] + weight[:, None] * value
            top = new_top
        if used == 1:
            tl.store(place, (acc / total[:, None]).to(dtype), mask=mask)
        elif SPLITS > 1:
            # [row, query head, split] of partial outputs, largest scores and sums.
            part = (row * HEADS + head) * SPLITS + split
            inside = g < GROUP
            tl.store(partials + part[:, None] * BLOCK_D + d[None, :], acc, mask=inside[:, None])
            tl.store(stats + part * 2, top, mask=inside)
            tl.store(stats + part * 2 + 1, total, mask=inside)
            tl.debug_barrier()
            arrival = arrivals + row * KV_HEADS + kv_head
            if tl.atomic_add(arrival, 1, sem="acq_rel") == used - 1:
                tl.store(arrival, 0)
                for member in tl.static_range(GROUP):
                    first = (row * HEADS + kv_head * GROUP + member) * SPLITS
                    merge(
                        out + member * HEAD_DIM, partials, stats, first, used, d,
                        HEAD_DIM, BLOCK_D, SPLITS,
                    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a program goes through its split: tokens a step, stages of the loop, warps.

    The address of a page is a load of its own, so K and V are (stages - 1) / 2 steps ahead.
    """

    tokens: int
    stages: int
    warps: int


NARROW = Tiling(tokens=16, stages=5, warps=1)
"""For bfloat16: many small programs keep more of memory busy than few large ones."""

EXACT = Tiling(tokens=16, stages=1, warps=4)
"""For float32, whose products have no tensor cores."""

MIN_SPLIT = 32
"""A split has a multiple of so many tokens."""


class DecodeWorkspace:
    """Room for partial results. Owner: TritonAttention. Mutated only by: its kernels.

    `arrivals` counts the splits of each (row, KV head) that have ended; whoever comes last sets
    it to 0 again. Launches that share a workspace must run one after the other.
    """

    def __init__(
        self, parts: int, rows: int, heads: int, head_dim: int, device: torch.device
    ) -> None:
        """`parts` is the largest rows * splits of a launch, `rows` the largest rows."""
        width = max(power_of_two(head_dim), 16)
        self.partials = torch.empty(parts * heads * width, device=device)
        self.stats = torch.empty(parts * heads * 2, device=device)
        self.arrivals = torch.zeros(rows * heads, dtype=torch.int32, device=device)


def decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    lengths: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    workspace: DecodeWorkspace,
    splits: int,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Attention of rows [N]; without `rotary`, query [N, heads, D] is rotated, KV written.

    With its cosine and sine [N, D / 2], query is [N, heads + 2 kv_heads, D] before the rotation,
    and the rows' keys and values are written to the pages. Rows of length 0 yield zeros and write
    nothing.
    """
    _, _, _, kv_heads, block_size, head_dim = pages.shape
    count, heads, _ = query.shape
    fused = rotary is not None
    cosine, sine = rotary if rotary is not None else (query, query)
    if fused:
        heads -= 2 * kv_heads
    output = torch.empty(count, heads, head_dim, dtype=query.dtype, device=query.device)
    if count == 0:
        return output
    if tiling is None:
        tiling = EXACT if query.dtype == torch.float32 else NARROW
    decode_kernel[(kv_heads, splits, count)](
        query, output, pages, tables, table_rows, lengths, cosine, sine,
        workspace.partials, workspace.stats, workspace.arrivals,
        query.stride(0), layer * pages.stride(1), pages.stride(0), tables.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
        BLOCK_D=max(power_of_two(head_dim), 16),
        BLOCK_G=max(power_of_two(heads // kv_heads), 16),
        BLOCK_SIZE=block_size, BLOCK_N=tiling.tokens, SPLITS=splits,
        MIN_SPLIT=max(MIN_SPLIT, tiling.tokens), STAGES=tiling.stages, FUSED=fused,
        ALIGNED=block_size % tiling.tokens == 0,
        num_warps=tiling.warps, **dependent_launches(),
    )  # fmt: skip
    return output
