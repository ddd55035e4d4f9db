"""Norms, residual sums, the gated activation and the exit gate, a row or a tile a program.

Each rounds to the model's dtype where the torch formulas do, so float32 differs by the order of
sums alone, and bfloat16 by what that order flips.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.launch import dependent_launches, power_of_two, rounded, wait_for_inputs


@triton.jit
def normed(x, weight, eps, HIDDEN: tl.constexpr):
    """x / rms(x) * weight of one row, float32, rounded twice as rms_norm does."""
    dtype = weight.dtype
    scale = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    return rounded(weight.to(tl.float32) * rounded(x * scale, dtype), dtype)


@triton.jit
def norm_kernel(
    x, weight, output, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    h = tl.arange(0, BLOCK)
    inside = h < HIDDEN
    w = tl.load(weight + h, mask=inside, other=0.0)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    value = tl.load(x + row + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row + h, normed(value, w, eps, HIDDEN).to(w.dtype), mask=inside)


@triton.jit
def residual_norm_kernel(
    hidden, branch, branch_weight, next_weight, hidden_out, output, eps, part_stride,
    PARTS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    h = tl.arange(0, BLOCK)
    inside = h < HIDDEN
    branch_w = tl.load(branch_weight + h, mask=inside, other=0.0)
    next_w = tl.load(next_weight + h, mask=inside, other=0.0)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    value = tl.load(branch + row + h, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(branch + part * part_stride + row + h, mask=inside, other=0.0)
    value = rounded(value, next_w.dtype)
    residual = tl.load(hidden + row + h, mask=inside, other=0.0).to(tl.float32)
    residual = rounded(residual + normed(value, branch_w, eps, HIDDEN), next_w.dtype)
    tl.store(hidden_out + row + h, residual.to(next_w.dtype), mask=inside)
    tl.store(output + row + h, normed(residual, next_w, eps, HIDDEN).to(next_w.dtype), mask=inside)


@triton.jit
def swiglu(gate, up, dtype):
    """silu(gate) * up in float32, rounded as torch does it in `dtype`."""
    return rounded(gate / (1.0 + tl.exp(-gate)), dtype) * up


@triton.jit
def swiglu_kernel(
    gate_up, output, total, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    wait_for_inputs(DEPENDENT)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < total
    source = gate_up + index // WIDTH * (2 * WIDTH) + index % WIDTH
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    dtype = output.dtype.element_ty
    tl.store(output + index, swiglu(gate, up, dtype).to(dtype), mask=inside)


@triton.jit
def hazard_kernel(
    hidden, gate, bias, output, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    h = tl.arange(0, BLOCK)
    inside = h < HIDDEN
    w = tl.load(gate + h, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(bias).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(hidden + row * HIDDEN + h, mask=inside, other=0.0).to(tl.float32)
    score = tl.sum(x * w, 0) + offset
    tl.store(output + row, 1.0 / (1.0 + tl.exp(-score)))


@triton.jit
def rotary_kernel(
    positions, frequencies, cosine, sine,
    HALF: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    j = tl.arange(0, BLOCK)
    inside = j < HALF
    frequency = tl.load(frequencies + j, mask=inside, other=0.0)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    angle = tl.load(positions + row).to(tl.float32) * frequency
    tl.store(cosine + row * HALF + j, tl.cos(angle).to(cosine.dtype.element_ty), mask=inside)
    tl.store(sine + row * HALF + j, tl.sin(angle).to(sine.dtype.element_ty), mask=inside)


def rotary_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [N, 1, D / 2] of position * frequency."""
    count, half = len(positions), len(frequencies)
    cosine = torch.empty(count, 1, half, dtype=dtype, device=positions.device)
    sine = torch.empty_like(cosine)
    if count:
        rotary_kernel[(count,)](
            positions, frequencies, cosine, sine, half, power_of_two(half), num_warps=1,
            **dependent_launches(),
        )  # fmt: skip
    return cosine, sine


def _warps(block: int) -> int:
    return min(max(block // 256, 1), 8)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm of rows [N, H]."""
    count, hidden = x.shape
    output = torch.empty_like(x)
    block = power_of_two(hidden)
    if count:
        norm_kernel[(count,)](
            x, weight, output, eps, hidden, block, num_warps=_warps(block), **dependent_launches()
        )
    return output


def residual_norm(
    hidden: torch.Tensor,
    branch: torch.Tensor,
    branch_weight: torch.Tensor,
    next_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden + norm(branch), and the next norm of that; both [N, H].

    `branch` is [N, H], or partial sums float32 [parts, N, H] that are added in their order.
    """
    count, width = hidden.shape
    parts, part_stride = (1, 0) if branch.dim() == 2 else (branch.shape[0], branch.stride(0))
    summed, output = torch.empty_like(hidden), torch.empty_like(hidden)
    block = power_of_two(width)
    if count:
        residual_norm_kernel[(count,)](
            hidden, branch, branch_weight, next_weight, summed, output, eps, part_stride,
            parts, width, block, num_warps=_warps(block), **dependent_launches(),
        )  # fmt: skip
    return summed, output


def gated(gate_up: torch.Tensor, output: torch.Tensor) -> None:
    """silu(gate) * up of [N, 2 * width] into output [N, width]."""
    count, double = gate_up.shape
    total, block = output.numel(), 1024
    if count:
        swiglu_kernel[(triton.cdiv(total, block),)](
            gate_up, output, total, double // 2, block, num_warps=4, **dependent_launches()
        )


def hazards(hidden: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """sigmoid(gate . hidden + bias), float32 [N]."""
    count, width = hidden.shape
    output = torch.empty(count, device=hidden.device)
    block = power_of_two(width)
    if count:
        hazard_kernel[(count,)](
            hidden, gate, bias, output, width, block, num_warps=_warps(block),
            **dependent_launches(),
        )  # fmt: skip
    return output
