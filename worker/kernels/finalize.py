"""Finalize: the KV of tokens that leave early goes into every deeper plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from worker.kernels.launch import dependent_launches, wait_for_inputs

if TYPE_CHECKING:
    import torch

HEADS_A_PROGRAM = 16
"""Head vectors, over layers, keys and values, that one program copies."""


@triton.jit
def finalize_kernel(
    seats, slot_position, slot_loops, tables, pages, trash, width, stride_block, heads,
    PLANES: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    slot = tl.load(seats + tl.program_id(0))
    loops = tl.load(slot_loops + slot)
    if (slot == trash) | (loops < 1) | (loops >= PLANES):
        return
    position = tl.load(slot_position + slot)
    table = tables + slot * PLANES * width + position // BLOCK_SIZE
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, HEAD_DIM)
    token = (h[:, None] * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM + d[None, :]
    mask = (h < heads)[:, None]
    source = tl.load(table + (loops - 1) * width)
    values = tl.load(pages + source * stride_block + token, mask=mask)
    for plane in tl.static_range(1, PLANES):
        if plane >= loops:
            target = tl.load(table + plane * width)
            tl.store(pages + target * stride_block + token, values, mask=mask)


def finalize(
    seats: torch.Tensor,
    position: torch.Tensor,
    loops: torch.Tensor,
    tables: torch.Tensor,
    pages: torch.Tensor,
    trash: int,
) -> None:
    """Copy the token at each slot's position from plane loops - 1, read once, into all deeper ones.

    seats int64 [N]; position and loops int64 [slots]; tables int64 [slots, planes, width]; pages
    [blocks, layers, 2, kv_heads, block_size, head_dim]. The trash slot copies nothing.
    """
    _, layers, parts, kv_heads, block_size, head_dim = pages.shape
    heads = layers * parts * kv_heads
    grid = (len(seats), triton.cdiv(heads, HEADS_A_PROGRAM))
    finalize_kernel[grid](
        seats, position, loops, tables, pages, trash, tables.shape[2], pages.stride(0), heads,
        tables.shape[1], block_size, head_dim, HEADS_A_PROGRAM,
        num_warps=4, **dependent_launches(),
    )  # fmt: skip
