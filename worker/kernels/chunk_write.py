"""Prompt chunks before their attention: rotary embedding of keys, and the KV write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from worker.kernels.launch import dependent_launches, power_of_two, rounded, wait_for_inputs

if TYPE_CHECKING:
    import torch


@triton.jit
def turned_tokens(source, cosine, sine, d, mask, HEAD_DIM: tl.constexpr):
    """A head of tokens [M] after the split-half rotation, [M, D], rounded as stored.

    `source`, `cosine` and `sine` are the addresses [M] of the head and of the token's rotation.
    """
    half: tl.constexpr = HEAD_DIM // 2
    dtype = source.dtype.element_ty
    first = d < half
    pair = tl.where(first, d, d - half)
    partner = tl.where(first, d + half, d - half)
    own = tl.load(source[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(source[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cosine[:, None] + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sine[:, None] + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    sign = tl.where(first, -1.0, 1.0)[None, :]
    return (rounded(own * cos, dtype) + sign * rounded(other * sin, dtype)).to(dtype)


@triton.jit
def write_kernel(
    qkv, keys, pages, tables, table_rows, positions, cosine, sine, tokens,
    layer_offset, stride_block, table_width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_SIZE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (key or value head, tile of tokens); the heads of a token are q, then k, then v."""
    head = tl.program_id(0)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    known = token < tokens
    mask = known[:, None] & (d < HEAD_DIM)[None, :]
    wait_for_inputs(DEPENDENT)
    wide = token.to(tl.int64)
    source = qkv + (wide * (HEADS + 2 * KV_HEADS) + HEADS + head) * HEAD_DIM
    position = tl.load(positions + token, mask=known, other=0)
    table = tables + tl.load(table_rows + token, mask=known, other=0) * table_width
    block = tl.load(table + position // BLOCK_SIZE, mask=known, other=0)
    # Keys and values of a page follow each other head by head, as k and v do in the row.
    page = pages + block * stride_block + layer_offset + head * (BLOCK_SIZE * HEAD_DIM)
    place = (page + position % BLOCK_SIZE * HEAD_DIM)[:, None] + d[None, :]
    if head < KV_HEADS:
        rotation = wide * (HEAD_DIM // 2)
        key = turned_tokens(source, cosine + rotation, sine + rotation, d, mask, HEAD_DIM)
        tl.store(place, key, mask=mask)
        if keys is not None:
            dense = keys + ((wide * KV_HEADS + head) * HEAD_DIM)[:, None] + d[None, :]
            tl.store(dense, key, mask=mask)
    else:
        value = tl.load(source[:, None] + d[None, :], mask=mask, other=0.0)
        tl.store(place, value, mask=mask)


WRITTEN_TOKENS = 16
"""Tokens whose keys or values of one head a program writes."""


def write(
    qkv: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    positions: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    *,
    keep_keys: bool,
) -> torch.Tensor | None:
    """Write rotated k, and v, of qkv [T, heads + 2 kv_heads, D] to the pages.

    `rotary` is cosine and sine [T, D / 2]. With `keep_keys` the rotated k are returned as well,
    [T, kv_heads, D].
    """
    _, _, _, kv_heads, block_size, head_dim = pages.shape
    tokens, together, _ = qkv.shape
    keys = qkv.new_empty(tokens, kv_heads, head_dim) if keep_keys else None
    if tokens:
        write_kernel[(2 * kv_heads, triton.cdiv(tokens, WRITTEN_TOKENS))](
            qkv, keys, pages, tables, table_rows, positions, *rotary, tokens,
            layer * pages.stride(1), pages.stride(0), tables.stride(0),
            together - 2 * kv_heads, kv_heads, head_dim, power_of_two(head_dim),
            WRITTEN_TOKENS, block_size, num_warps=4, **dependent_launches(),
        )  # fmt: skip
    return keys
