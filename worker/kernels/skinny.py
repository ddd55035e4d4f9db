"""Matrix products of few rows, which only read weights: what a library leaves of the bandwidth.

`gemv` loads all weights of a program before it waits for its input, so that they are on their way
while the previous kernel still runs. `skinny` is for more rows: the weights are the large operand
of the tensor cores, the rows the narrow one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from worker.kernels.launch import (
    dependent_launches,
    power_of_two,
    wait_for_inputs,
)
from worker.kernels.pointwise import swiglu


@triton.jit
def gemv_kernel(
    x, weight, output, width,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    GATED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    mask = (n < width)[:, None] & (k < K)[None, :]
    source = weight + n[:, None].to(tl.int64) * K + k[None, :]
    w = tl.load(source, mask=mask, other=0.0)
    if GATED:
        u = tl.load(source + width.to(tl.int64) * K, mask=mask, other=0.0)
    wait_for_inputs(DEPENDENT)
    dtype = output.dtype.element_ty
    value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    result = tl.sum(w.to(tl.float32) * value, 1)
    if GATED:
        up = tl.sum(u.to(tl.float32) * value, 1)
        gate = result.to(dtype).to(tl.float32)
        result = swiglu(gate, up.to(dtype).to(tl.float32), dtype)
    tl.store(output + n, result.to(dtype), mask=n < width)


@triton.jit
def skinny_kernel(
    x, weight, output, rows, width, part_stride,
    K: tl.constexpr, K_PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GATED: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_K)
    source = weight + n[:, None].to(tl.int64) * K + lane[None, :]
    second = source + width.to(tl.int64) * K
    inner = x + m[None, :] * K + lane[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    start = part * K_PART
    wait_for_inputs(DEPENDENT)
    for k in tl.range(start, tl.minimum(start + K_PART, K), BLOCK_K, num_stages=STAGES):
        inside = k + lane < K
        mask = (n < width)[:, None] & inside[None, :]
        value = tl.load(inner + k, mask=(m < rows)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(tl.load(source + k, mask=mask, other=0.0), value, acc)
        if GATED:
            up = tl.dot(tl.load(second + k, mask=mask, other=0.0), value, up)
    dtype = output.dtype.element_ty
    if GATED:
        narrow = x.dtype.element_ty
        gate = acc.to(narrow).to(tl.float32)
        acc = swiglu(gate, up.to(narrow).to(tl.float32), narrow)
    place = output + part * part_stride + m[None, :] * width + n[:, None]
    tl.store(place, acc.to(dtype), mask=(m < rows)[None, :] & (n < width)[:, None])


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut: output columns a program, inputs a step, stages, warps, parts."""

    columns: int
    inner: int
    stages: int
    warps: int
    parts: int = 1


def gemv(
    x: torch.Tensor, weight: torch.Tensor, *, gated: bool, columns: int, warps: int
) -> torch.Tensor:
    """x [1, K] times weight [out, K] -> [1, out].

    `gated`: the weight has gate rows, then up rows, and silu(gate) * up [1, out / 2] comes out.
    """
    inner = x.shape[1]
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    output = torch.empty(1, width, dtype=x.dtype, device=x.device)
    gemv_kernel[(triton.cdiv(width, columns),)](
        x, weight, output, width, inner, power_of_two(inner), columns, gated,
        num_warps=warps, **dependent_launches(),
    )  # fmt: skip
    return output


def skinny(x: torch.Tensor, weight: torch.Tensor, tiling: Tiling, *, gated: bool) -> torch.Tensor:
    """The same for up to 128 rows. With several parts, their sums float32 [parts, N, out]."""
    rows, inner = x.shape
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    parts = tiling.parts
    shape = (rows, width) if parts == 1 else (parts, rows, width)
    dtype = x.dtype if parts == 1 else torch.float32
    output = torch.empty(shape, dtype=dtype, device=x.device)
    k_part = triton.cdiv(triton.cdiv(inner, parts), tiling.inner) * tiling.inner
    skinny_kernel[(triton.cdiv(width, tiling.columns), parts)](
        x, weight, output, rows, width, rows * width,
        inner, k_part, max(power_of_two(rows), 16), tiling.columns, tiling.inner,
        gated, tiling.stages, num_warps=tiling.warps, **dependent_launches(),
    )  # fmt: skip
    return output
