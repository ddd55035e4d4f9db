"""The head of up to 128 rows: products over the whole vocabulary that nobody may want.

Most ticks of a small batch sample nothing, which only the device knows. So each program asks first
whether anybody reads its logits, and is gone if not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from worker.kernels.launch import dependent_launches, power_of_two, rounded, wait_for_inputs

if TYPE_CHECKING:
    from worker.kernels.skinny import Tiling


@triton.jit
def head_kernel(
    x, weight, output, wanted, rows, vocabulary,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    if tl.load(wanted) == 0:
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_K)
    source = weight + n[:, None].to(tl.int64) * K + lane[None, :]
    inner = x + m[None, :] * K + lane[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = k + lane < K
        mask = (n < vocabulary)[:, None] & inside[None, :]
        value = tl.load(inner + k, mask=(m < rows)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(tl.load(source + k, mask=mask, other=0.0), value, acc)
    place = output + m[None, :].to(tl.int64) * vocabulary + n[:, None]
    mask = (m < rows)[None, :] & (n < vocabulary)[:, None]
    tl.store(place, rounded(acc, x.dtype.element_ty), mask=mask)


def head(
    x: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor, tiling: Tiling
) -> torch.Tensor:
    """Logits float32 [N, V] of x [N, K] and weight [V, K], rounded as a product of their dtype is.

    If `wanted`, int32 [1], is 0, nothing is computed, and they are anything.
    """
    rows, inner = x.shape
    vocabulary = weight.shape[0]
    output = torch.empty(rows, vocabulary, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(vocabulary, tiling.columns),)
    head_kernel[grid](
        x, weight, output, wanted, rows, vocabulary, inner, max(power_of_two(rows), 16),
        tiling.columns, tiling.inner, tiling.stages,
        num_warps=tiling.warps, **dependent_launches(),
    )  # fmt: skip
    return output
