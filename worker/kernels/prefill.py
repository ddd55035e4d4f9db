"""Causal attention of packed prompt chunks.

In large batches a chunk's own keys and values are read where they are dense, by tensor maps, and
only the history before the chunk page by page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from worker.kernels.chunk_write import turned_tokens
from worker.kernels.decode import LOG2_E, LOWEST
from worker.kernels.launch import HOPPER, dependent_launches, power_of_two, wait_for_inputs


@triton.jit
def attend_tile(acc, top, total, score, value, HEAD_DIM: tl.constexpr):
    """Go on over a tile of tokens, an online softmax of products [M, N] and values [N, D]."""
    scale = HEAD_DIM**-0.5 * LOG2_E
    new_top = tl.maximum(top, tl.max(score, 1) * scale)
    decay = tl.exp2(top - new_top)
    weight = tl.exp2(score * scale - new_top[:, None])
    total = total * decay + tl.sum(weight, 1)
    weight = weight.to(value.dtype)
    acc = tl.dot(weight, value, acc * decay[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def attend_pages(
    acc, top, total, rows, position, pages, table, start, end, d, stride_block, value_offset,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Go on over tokens [start, end) of the pages; start is a multiple of BLOCK_N.

    A row sees the tokens up to its position; without MASKED, every row all of them.
    """
    lane = tl.arange(0, BLOCK_N)
    inside = (d < HEAD_DIM)[None, :]
    for first in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        token = first + lane
        if BLOCK_N % BLOCK_SIZE == 0:
            entry, offset = first // BLOCK_SIZE + lane // BLOCK_SIZE, lane % BLOCK_SIZE
        else:
            entry, offset = token // BLOCK_SIZE, token % BLOCK_SIZE
        if MASKED:
            block = tl.load(table + entry, mask=token < end, other=0).to(tl.int32)
            mask = inside & (token < end)[:, None]
        else:
            block = tl.load(table + entry).to(tl.int32)
            mask = inside
        place = pages + (block.to(tl.int64) * stride_block + offset * HEAD_DIM)
        where = place[:, None] + d[None, :]
        if MASKED or HEAD_DIM != BLOCK_D:
            key = tl.load(where, mask=mask, other=0.0)
            value = tl.load(where + value_offset, mask=mask, other=0.0)
        else:
            key = tl.load(where)
            value = tl.load(where + value_offset)
        score = tl.dot(rows, tl.trans(key), input_precision="ieee")
        if MASKED:
            score = tl.where(token[None, :] <= position[:, None], score, float("-inf"))
        acc, top, total = attend_tile(acc, top, total, score, value, HEAD_DIM)
    return acc, top, total


@triton.jit
def prefill_kernel(
    query, keys, key_map, value_map, cosine, sine,
    output, pages, tables, chunk_rows, lengths, edges, chunks,
    layer_offset, stride_block, table_width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PAGE_STAGES: tl.constexpr,
    FUSED: tl.constexpr, DENSE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (head, tile of rows); each chunk has tiles of its own, found by their running sum.

    FUSED: `query` has q, k and v before the rotation. DENSE: the chunk's own tokens are taken from
    `keys` and `query`, and the tiles are as wide as they are high.
    """
    head = tl.program_id(0)
    # What the batch is was settled two kernels ago: only keys and `query` are the last ones' work.
    # The last tile comes first: those that see most begin first, so that all end together.
    skip = tl.program_id(1)
    chunk, begin = 0, -1
    upper = tl.load(edges + chunks).to(tl.int32)
    for back in range(chunks):
        lower = tl.load(edges + chunks - 1 - back).to(tl.int32)
        tiles = tl.cdiv(upper - lower, BLOCK_M)
        found = (skip >= 0) & (skip < tiles)
        chunk = tl.where(found, chunks - 1 - back, chunk)
        begin = tl.where(found, (tiles - 1 - skip) * BLOCK_M, begin)
        skip -= tiles
        upper = lower
    wait_for_inputs(DEPENDENT)
    if begin >= 0:
        first = tl.load(edges + chunk).to(tl.int32)
        count = tl.load(edges + chunk + 1).to(tl.int32) - first
        length = tl.load(lengths + chunk).to(tl.int32)
        start = length - count
        d = tl.arange(0, BLOCK_D)
        m = begin + tl.arange(0, BLOCK_M)
        mask = (m < count)[:, None] & (d < HEAD_DIM)[None, :]
        token = (first + m).to(tl.int64)
        kv_head = head // (HEADS // KV_HEADS)
        WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS if FUSED else HEADS) * HEAD_DIM
        source = query + token * WIDTH + head * HEAD_DIM
        if FUSED:
            rotation = token * (HEAD_DIM // 2)
            rows = turned_tokens(source, cosine + rotation, sine + rotation, d, mask, HEAD_DIM)
        else:
            rows = tl.load(source[:, None] + d[None, :], mask=mask, other=0.0)
        top = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if DENSE:
            own_keys = keys + first.to(tl.int64) * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
            column = (HEADS + KV_HEADS + kv_head) * HEAD_DIM
            own_values = query + first.to(tl.int64) * WIDTH + column
            lane = tl.arange(0, BLOCK_N)
            # The rows themselves: no tensor map, which would read on into the next chunk. One step,
            # yet a loop, since its buffers are then those of the loops that follow.
            for n in tl.range(begin, begin + BLOCK_M, BLOCK_N, num_stages=1):
                own = n + lane
                wide = own.to(tl.int64)[:, None]
                inside = (own < count)[:, None] & (d < HEAD_DIM)[None, :]
                place = own_keys + wide * (KV_HEADS * HEAD_DIM) + d[None, :]
                key = tl.load(place, mask=inside, other=0.0)
                place = own_values + wide * WIDTH + d[None, :]
                value = tl.load(place, mask=inside, other=0.0)
                score = tl.dot(rows, tl.trans(key), input_precision="ieee")
                score = tl.where(own[None, :] <= m[:, None], score, float("-inf"))
                acc, top, total = attend_tile(acc, top, total, score, value, HEAD_DIM)
            for n in tl.range(0, begin, BLOCK_N, num_stages=STAGES):
                key = key_map.load([first + n, kv_head * HEAD_DIM])
                score = tl.dot(rows, key.T)
                value = value_map.load([first + n, column])
                acc, top, total = attend_tile(acc, top, total, score, value, HEAD_DIM)
            common = start // BLOCK_N * BLOCK_N
            end = start
            position = tl.zeros([BLOCK_M], tl.int32) + (start - 1)
        else:
            # Up to here all rows of the tile see every token.
            common = (start + begin) // BLOCK_N * BLOCK_N
            end = tl.minimum(length, start + begin + BLOCK_M)
            position = start + m
        own_pages = pages + layer_offset + kv_head * BLOCK_SIZE * HEAD_DIM
        value_offset = KV_HEADS * BLOCK_SIZE * HEAD_DIM
        table = tables + tl.load(chunk_rows + chunk) * table_width
        acc, top, total = attend_pages(
            acc, top, total, rows, position, own_pages, table, 0, common, d,
            stride_block, value_offset,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, PAGE_STAGES, False,
        )  # fmt: skip
        acc, top, total = attend_pages(
            acc, top, total, rows, position, own_pages, table, common, end, d,
            stride_block, value_offset,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, 1 if DENSE else PAGE_STAGES, True,
        )  # fmt: skip
        target = output + (token * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
        tl.store(target, (acc / total[:, None]).to(rows.dtype), mask=mask)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a program attends: rows at once, tokens a step, stages of its loops, warps.

    The address of a page is a load of its own, so pages are (page_stages - 1) / 2 steps ahead.
    """

    rows: int
    tokens: int
    stages: int
    page_stages: int
    warps: int


MAPPED = Tiling(rows=64, tokens=64, stages=3, page_stages=3, warps=4)
"""For chunks whose own tokens are read by tensor maps."""

PAGED = Tiling(rows=64, tokens=64, stages=1, page_stages=5, warps=4)
EXACT = Tiling(rows=32, tokens=32, stages=1, page_stages=1, warps=4)
"""For float32, whose products have no tensor cores."""

MAPPED_DIMS = (64, 128)
"""Head dimensions whose tiles a tensor map brings as the matrix units want them."""

MAPPED_TOKENS, MAPPED_CHUNKS = 512, 16
"""Tensor maps cost the host time at each launch that no graph takes over: fewer tokens gain too
little by them, and more chunks are in no graph."""


def reads_dense_keys(qkv: torch.Tensor, chunks: int) -> bool:
    """Whether `prefill` should be given the keys of these rows, by their shape alone."""
    tokens, _, head_dim = qkv.shape
    large = tokens >= MAPPED_TOKENS and chunks <= MAPPED_CHUNKS
    return HOPPER and qkv.dtype == torch.bfloat16 and head_dim in MAPPED_DIMS and large


def prefill(
    query: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    chunk_rows: torch.Tensor,
    lengths: torch.Tensor,
    edges: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention [T, heads, D]; chunk c has the rows edges[c] .. edges[c + 1] - 1.

    `query` is [T, heads, D], rotated; with `rotary`, it is what `write` was given, and `keys` may
    be what that returned: what a chunk sees of itself is then read from both, not from the pages.
    All keys and values are in the pages already. Rows behind the last edge are not computed.
    """
    _, _, _, kv_heads, block_size, head_dim = pages.shape
    tokens, heads, _ = query.shape
    if rotary is not None:
        heads -= 2 * kv_heads
    output = torch.empty(tokens, heads, head_dim, dtype=query.dtype, device=query.device)
    if tokens == 0:
        return output
    tiling = PAGED if keys is None else MAPPED
    if query.dtype == torch.float32:
        tiling = EXACT
    key_map = value_map = None
    if keys is not None:
        tile = [tiling.tokens, head_dim]
        key_map = TensorDescriptor.from_tensor(keys.view(tokens, -1), tile)
        value_map = TensorDescriptor.from_tensor(query.view(tokens, -1), tile)
    cosine, sine = (None, None) if rotary is None else rotary
    chunks = len(chunk_rows)
    # A tile more for each chunk, since the last one of a chunk need not be full.
    prefill_kernel[(heads, triton.cdiv(tokens, tiling.rows) + chunks)](
        query, keys, key_map, value_map, cosine, sine,
        output, pages, tables, chunk_rows, lengths, edges, chunks,
        layer * pages.stride(1), pages.stride(0), tables.stride(0),
        heads, kv_heads, head_dim, max(power_of_two(head_dim), 16), block_size,
        tiling.rows, tiling.tokens, tiling.stages, tiling.page_stages,
        rotary is not None, keys is not None,
        num_warps=tiling.warps, **dependent_launches(),
    )  # fmt: skip
    return output
