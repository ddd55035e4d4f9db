"""The fastest way to read memory: what bandwidth-bound kernels are compared with."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def read_kernel(x, output, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):
        acc ^= tl.load(x + index + step * BLOCK)
    tl.store(output + tl.program_id(0), tl.xor_sum(acc, 0))


def read(x: torch.Tensor) -> torch.Tensor:
    """Read int32 values, a multiple of 16,384; the result only keeps that from being skipped."""
    block, steps = 4096, 4
    programs = x.numel() // (block * steps)
    output = torch.empty(programs, dtype=torch.int32, device=x.device)
    read_kernel[(programs,)](x, output, block, steps, num_warps=8)
    return output
