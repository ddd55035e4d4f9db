"""LoopKernels in plain torch, on any device: what other kernels must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from worker.models.layers import Rotary, rms_norm, rotary_tables, swiglu

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class TorchLoopKernels:
    """Plain torch, on any device. Stateless."""

    def rotary(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotary:
        """The rotations of rows at int64 positions [N]."""
        return Rotary(*rotary_tables(positions, frequencies, dtype))

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rms_norm of rows [N, H]."""
        return rms_norm(x, weight, eps)

    def packed(self, weight: Tensor) -> Tensor:
        """The weight as it is."""
        return weight

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, K] times weight [out, K] -> [N, out]."""
        return functional.linear(x, weight)

    def gated(self, x: Tensor, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of x times gate_up [2 * width, K], gate rows first -> [N, width]."""
        return swiglu(functional.linear(x, gate_up))

    def branch(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, K] times weight [H, K], whole."""
        return functional.linear(x, weight)

    def residual_norm(
        self, hidden: Tensor, branch: Tensor, branch_weight: Tensor, next_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """hidden + norm(branch), and the norm of that for whatever is next; both [N, H]."""
        hidden = hidden + rms_norm(branch, branch_weight, eps)
        return hidden, rms_norm(hidden, next_weight, eps)

    def hazards(self, hidden: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
        """sigmoid(gate [1, H] . hidden + bias [1]), float32 [N], computed in float32."""
        score = functional.linear(hidden.float(), gate.float(), bias.float())
        return score.squeeze(-1).sigmoid()

    def head(self, hidden: Tensor, weight: Tensor, wanted: Tensor | None) -> Tensor:
        """Logits float32 [N, V]; always computed."""
        del wanted
        return functional.linear(hidden, weight).float()
