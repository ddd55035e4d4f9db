"""LoopKernels on CUDA: fused Triton kernels around the library's matrix products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from worker.kernels import pointwise, skinny
from worker.kernels.head import head
from worker.kernels.launch import HOPPER
from worker.kernels.skinny import Tiling
from worker.models.layers import Rotary

if TYPE_CHECKING:
    from torch import Tensor

FEW_ROWS = 64
"""Up to so many rows no product is left to the library."""

MOST_ROWS = 128
"""Up to so many rows, products with few outputs are split over their inputs instead.

So far the head has a kernel of its own as well.
"""

PRODUCT_ROWS = 1024
"""Rows of a block of the widest product: the library is faster at 1,024 than at 2,048."""

HEAD = Tiling(columns=64, inner=128, stages=3, warps=4)
WIDE_HEAD = Tiling(columns=64, inner=64, stages=3, warps=4)
LINEAR = Tiling(columns=64, inner=128, stages=5, warps=4)
NARROW_GATED = Tiling(columns=32, inner=128, stages=4, warps=4)
WIDE_GATED = Tiling(columns=64, inner=64, stages=5, warps=8)
BRANCH = Tiling(columns=64, inner=128, stages=5, warps=4, parts=4)
WIDE_BRANCH = Tiling(columns=64, inner=128, stages=4, warps=4, parts=4)
"""Tilings that were the fastest for the shapes of Ouro-1.4B on an H200."""


class TritonLoopKernels:
    """See LoopKernels for the verbs. Stateless.

    bfloat16 products of few rows have kernels of their own on Hopper and newer; float32 ones are
    always the library's, in full precision.
    """

    def rotary(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotary:
        """The rotations of rows at int64 positions [N]."""
        return Rotary(*pointwise.rotary_tables(positions, frequencies, dtype))

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rms_norm of rows [N, H]."""
        return pointwise.norm(x, weight, eps)

    def packed(self, weight: Tensor) -> Tensor:
        """The weight as it is."""
        return weight

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, K] times weight [out, K] -> [N, out]."""
        if not _at_most(x, FEW_ROWS):
            return functional.linear(x, weight)
        if x.shape[0] == 1:
            return skinny.gemv(x, weight, gated=False, columns=2, warps=4)
        return skinny.skinny(x, weight, LINEAR, gated=False)

    def gated(self, x: Tensor, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of x times gate_up [2 * width, K], gate rows first -> [N, width]."""
        if not _at_most(x, FEW_ROWS):
            return _gated_blocks(x, gate_up)
        if x.shape[0] == 1:
            return skinny.gemv(x, gate_up, gated=True, columns=2, warps=4)
        tiling = NARROW_GATED if x.shape[0] <= 16 else WIDE_GATED
        return skinny.skinny(x, gate_up, tiling, gated=True)

    def branch(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, K] times weight [H, K], as a branch."""
        if not _at_most(x, MOST_ROWS):
            return functional.linear(x, weight)
        if x.shape[0] == 1:
            long = x.shape[1] > 4096
            return skinny.gemv(
                x, weight, gated=False, columns=2 if long else 4, warps=8 if long else 4
            )
        tiling = BRANCH if x.shape[0] <= FEW_ROWS else WIDE_BRANCH
        return skinny.skinny(x, weight, tiling, gated=False)

    def residual_norm(
        self, hidden: Tensor, branch: Tensor, branch_weight: Tensor, next_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """hidden + norm(branch), and the norm of that for whatever is next; both [N, H]."""
        return pointwise.residual_norm(hidden, branch, branch_weight, next_weight, eps)

    def hazards(self, hidden: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
        """sigmoid(gate [1, H] . hidden + bias [1]), float32 [N], computed in float32."""
        return pointwise.hazards(hidden, gate, bias)

    def head(self, hidden: Tensor, weight: Tensor, wanted: Tensor | None) -> Tensor:
        """Logits float32 [N, V]; up to 128 rows of bfloat16 are not computed for nobody."""
        if not _at_most(hidden, MOST_ROWS):
            return functional.linear(hidden, weight).float()
        if wanted is None:
            wanted = torch.ones(1, dtype=torch.int32, device=hidden.device)
        tiling = HEAD if hidden.shape[0] <= FEW_ROWS else WIDE_HEAD
        return head(hidden, weight, wanted, tiling)


def _at_most(x: Tensor, limit: int) -> bool:
    return HOPPER and x.dtype == torch.bfloat16 and 0 < x.shape[0] <= limit


def row_blocks(rows: int) -> list[int]:
    """The rows of each block: PRODUCT_ROWS, and the last one up to twice as many.

    Example: 1,536 -> 1,536; 2,048 -> 1,024 twice; 2,560 -> 1,024 and 1,536.
    """
    whole = max(rows // PRODUCT_ROWS - 1, 0)
    return [PRODUCT_ROWS] * whole + [rows - PRODUCT_ROWS * whole]


def _gated_blocks(x: Tensor, gate_up: Tensor) -> Tensor:
    blocks = row_blocks(x.shape[0])
    output = x.new_empty(x.shape[0], gate_up.shape[0] // 2)
    for part, target in zip(torch.split(x, blocks), torch.split(output, blocks), strict=True):
        pointwise.gated(functional.linear(part, gate_up), target)
    return output
