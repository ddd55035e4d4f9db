"""Packed prompt chunks: rotary embedding with the KV write, and causal attention over pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from worker.kernels.decode import LOG2_E, LOWEST, turned
from worker.kernels.launch import dependent_launches, power_of_two, wait_for_inputs


@triton.jit
def rotate_and_write_kernel(
    qkv, query, pages, tables, table_rows, positions, cosine, sine,
    layer_offset, stride_block, table_width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_SIZE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (token, tile of heads); the heads of a token are q, then k, then v."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    inside = (d < HEAD_DIM)[None, :]
    wait_for_inputs(DEPENDENT)
    dtype = query.dtype.element_ty
    row = qkv + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    cos = cosine + token * (HEAD_DIM // 2)
    sin = sine + token * (HEAD_DIM // 2)
    rotates = (head < HEADS + KV_HEADS)[:, None]
    values = turned(row, head, d, cos, sin, rotates & inside, HEAD_DIM)
    is_value = ((head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS))[:, None] & inside
    plain = tl.load(row + head[:, None] * HEAD_DIM + d[None, :], mask=is_value, other=0.0)
    values = tl.where(rotates, values, plain.to(tl.float32)).to(dtype)
    target = query + (token * HEADS + head[:, None]) * HEAD_DIM + d[None, :]
    tl.store(target, values, mask=(head < HEADS)[:, None] & inside)
    position = tl.load(positions + token)
    table = tables + tl.load(table_rows + token) * table_width
    block = tl.load(table + position // BLOCK_SIZE)
    page = pages + block * stride_block + layer_offset + position % BLOCK_SIZE * HEAD_DIM
    # Keys and values of a page follow each other head by head, as k and v do in the row.
    place = page + (head - HEADS)[:, None] * (BLOCK_SIZE * HEAD_DIM) + d[None, :]
    stored = (head >= HEADS) & (head < HEADS + 2 * KV_HEADS)
    tl.store(place, values, mask=stored[:, None] & inside)


@triton.jit
def attend_tokens(
    acc, top, total, rows, position, pages, table, start, end, d, stride_block, value_offset,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Go on over tokens [start, end); without MASKED every row sees all of them."""
    dtype = pages.dtype.element_ty
    lane = tl.arange(0, BLOCK_N)
    scale = HEAD_DIM**-0.5 * LOG2_E
    for first in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        token = first + lane
        if MASKED:
            block = tl.load(table + token // BLOCK_SIZE, mask=token < end, other=0).to(tl.int64)
        else:
            block = tl.load(table + token // BLOCK_SIZE).to(tl.int64)
        place = pages + block * stride_block + (token % BLOCK_SIZE) * HEAD_DIM
        where = place[:, None] + d[None, :]
        inside = (d < HEAD_DIM)[None, :]
        if MASKED:
            inside = inside & (token < end)[:, None]
        key = tl.load(where, mask=inside, other=0.0)
        value = tl.load(where + value_offset, mask=inside, other=0.0)
        score = tl.dot(rows, tl.trans(key), input_precision="ieee") * scale
        if MASKED:
            score = tl.where(token[None, :] <= position[:, None], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        decay = tl.exp2(top - new_top)
        weight = tl.exp2(score - new_top[:, None])
        total = total * decay + tl.sum(weight, 1)
        product = tl.dot(weight.to(dtype), value, input_precision="ieee")
        acc = acc * decay[:, None] + product
        top = new_top
    return acc, top, total


@triton.jit
def prefill_kernel(
    query, output, pages, tables, chunk_rows, lengths, edges, chunks,
    layer_offset, stride_block, table_width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, head); each chunk has tiles of its own, found by their running sum."""
    head = tl.program_id(1)
    wait_for_inputs(DEPENDENT)
    c = tl.arange(0, BLOCK_C)
    known = c < chunks
    firsts = tl.load(edges + c, mask=known, other=0).to(tl.int32)
    counts = tl.load(edges + c + 1, mask=known, other=0).to(tl.int32) - firsts
    tiles = tl.cdiv(counts, BLOCK_M)
    ends = tl.cumsum(tiles, 0)
    chunk = tl.sum((ends <= tl.program_id(0)).to(tl.int32), 0)
    here = c == chunk
    first = tl.sum(tl.where(here, firsts, 0), 0)
    count = tl.sum(tl.where(here, counts, 0), 0)
    begin = (tl.program_id(0) - tl.sum(tl.where(here, ends - tiles, 0), 0)) * BLOCK_M
    if begin < count:
        length = tl.load(lengths + chunk).to(tl.int32)
        dtype = pages.dtype.element_ty
        d = tl.arange(0, BLOCK_D)
        m = begin + tl.arange(0, BLOCK_M)
        column = d < HEAD_DIM
        mask = (m < count)[:, None] & column[None, :]
        row = ((first + m).to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
        rows = tl.load(query + row, mask=mask, other=0.0)
        position = length - count + m
        kv_head = head // (HEADS // KV_HEADS)
        own_pages = pages + layer_offset + kv_head * BLOCK_SIZE * HEAD_DIM
        value_offset = KV_HEADS * BLOCK_SIZE * HEAD_DIM
        table = tables + tl.load(chunk_rows + chunk) * table_width
        end = tl.minimum(length, length - count + begin + BLOCK_M)
        # Up to here all rows of the tile see every token.
        common = (length - count + begin) // BLOCK_N * BLOCK_N
        top = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        acc, top, total = attend_tokens(
            acc, top, total, rows, position, own_pages, table, 0, common, d,
            stride_block, value_offset, HEAD_DIM, BLOCK_SIZE, BLOCK_N, STAGES, False,
        )  # fmt: skip
        acc, top, total = attend_tokens(
            acc, top, total, rows, position, own_pages, table, common, end, d,
            stride_block, value_offset, HEAD_DIM, BLOCK_SIZE, BLOCK_N, STAGES, True,
        )  # fmt: skip
        tl.store(output + row, (acc / total[:, None]).to(dtype), mask=mask)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a program attends: rows at once, tokens a step, stages of the loop, warps."""

    rows: int
    tokens: int
    stages: int
    warps: int


WIDE = Tiling(rows=64, tokens=64, stages=3, warps=4)
EXACT = Tiling(rows=32, tokens=32, stages=1, warps=4)
"""For float32, whose products have no tensor cores."""


def rotate_and_write(
    qkv: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    positions: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Rotated queries [T, heads, D] of qkv [T, heads + 2 kv_heads, D]; k and v go to the pages.

    `rotary` is cosine and sine [T, D / 2].
    """
    _, _, _, kv_heads, block_size, head_dim = pages.shape
    tokens, together, _ = qkv.shape
    heads = together - 2 * kv_heads
    query = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return query
    tile = min(power_of_two(together), 16)
    rotate_and_write_kernel[(tokens, triton.cdiv(together, tile))](
        qkv, query, pages, tables, table_rows, positions, *rotary,
        layer * pages.stride(1), pages.stride(0), tables.stride(0),
        heads, kv_heads, head_dim, power_of_two(head_dim), tile, block_size,
        num_warps=4, **dependent_launches(),
    )  # fmt: skip
    return query


def prefill(
    query: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    chunk_rows: torch.Tensor,
    lengths: torch.Tensor,
    edges: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of query [T, heads, D]; chunk c has the rows edges[c] .. edges[c + 1] - 1.

    Rows behind the last edge are not computed.
    """
    _, _, _, kv_heads, block_size, head_dim = pages.shape
    tokens, heads, _ = query.shape
    output = torch.empty_like(query)
    if tokens == 0:
        return output
    tiling = EXACT if query.dtype == torch.float32 else WIDE
    chunks = len(chunk_rows)
    # A tile more for each chunk, since the last one of a chunk need not be full.
    prefill_kernel[(triton.cdiv(tokens, tiling.rows) + chunks, heads)](
        query, output, pages, tables, chunk_rows, lengths, edges, chunks,
        layer * pages.stride(1), pages.stride(0), tables.stride(0),
        heads, kv_heads, head_dim, max(power_of_two(head_dim), 16), block_size,
        power_of_two(chunks), tiling.rows, tiling.tokens, tiling.stages,
        num_warps=tiling.warps, **dependent_launches(),
    )  # fmt: skip
    return output
