"""LoopKernels for float32 on a CPU: products over packed weights, norms in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worker.cpu_kernels import pointwise
from worker.models.layers import swiglu
from worker.models.torch_loop import TorchLoopKernels

if TYPE_CHECKING:
    from torch import Tensor

PACKED_FOR = 128
"""Rows that weights are packed for; what is best for these serves any number nearly as well."""


class CpuLoopKernels(TorchLoopKernels):
    """See LoopKernels for the verbs. Stateless.

    torch multiplies float32 by MKL, which leaves half of the lanes of some processors unused, and
    packs weights anew in each call. oneDNN, which torch holds as well, packs them once and for all;
    and a row's product does not depend on how many others there are. Of a norm of few rows, the
    seven calls of torch that it takes cost more than the norm does.
    """

    def packed(self, weight: Tensor) -> Tensor:
        """The weight [out, K] of a product, as oneDNN reads it."""
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)  # noqa: SLF001
        return packed

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rms_norm of rows [N, H]."""
        return pointwise.norm(x, weight, eps)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, K] times a packed weight [out, K] -> [N, out]."""
        # What torch.utils.mkldnn ends in, but without converting each input and output.
        multiply = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
        product: Tensor = multiply(x, weight, None, "none", [], "")
        return product

    def gated(self, x: Tensor, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of x times gate_up [2 * width, K], gate rows first -> [N, width]."""
        return swiglu(self.linear(x, gate_up))

    def branch(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, K] times weight [H, K], whole."""
        return self.linear(x, weight)

    def residual_norm(
        self, hidden: Tensor, branch: Tensor, branch_weight: Tensor, next_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """hidden + norm(branch), and the norm of that for whatever is next; both [N, H]."""
        return pointwise.residual_norm(hidden, branch, branch_weight, next_weight, eps)

    def head(self, hidden: Tensor, weight: Tensor, wanted: Tensor | None) -> Tensor:
        """Logits float32 [N, V]; always computed."""
        del wanted
        return self.linear(hidden, weight)
