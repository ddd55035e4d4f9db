"""What a layer is made of, as one interface: torch formulas are what other kernels must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch.nn import functional

from worker.models.layers import Rotary, rms_norm, rotary_tables, swiglu

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class LoopKernels(Protocol):
    """The parts of a loop between the attentions. Rows [N, ...] never touch each other.

    A branch is what attention or MLP adds to the residual stream, before its norm: [N, H] in the
    model's dtype, or partial sums float32 [parts, N, H], which `residual_norm` adds up.
    """

    def rotary(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotary:
        """The rotations of rows at int64 positions [N]."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rms_norm of rows [N, H]."""
        ...

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, K] times weight [out, K] -> [N, out]."""
        ...

    def gated(self, x: Tensor, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of x times gate_up [2 * width, K], gate rows first -> [N, width]."""
        ...

    def branch(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, K] times weight [H, K], as a branch."""
        ...

    def residual_norm(
        self, hidden: Tensor, branch: Tensor, branch_weight: Tensor, next_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """hidden + norm(branch), and the norm of that for whatever is next; both [N, H]."""
        ...

    def hazards(self, hidden: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
        """sigmoid(gate [1, H] . hidden + bias [1]), float32 [N], computed in float32."""
        ...

    def head(self, hidden: Tensor, weight: Tensor, wanted: Tensor | None) -> Tensor:
        """Logits float32 [N, V] of hidden [N, H] and weight [V, H], rounded to their dtype before.

        `wanted` int32 [1], on the device: if it is 0 nobody reads them, and they may be anything.
        """
        ...


class TorchLoopKernels:
    """Plain torch, on any device. Stateless."""

    def rotary(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotary:
        """The rotations of rows at int64 positions [N]."""
        return Rotary(*rotary_tables(positions, frequencies, dtype))

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rms_norm of rows [N, H]."""
        return rms_norm(x, weight, eps)

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


def loop_kernels(device: torch.device) -> LoopKernels:
    """The fastest kernels that there are for a device."""
    if device.type != "cuda":
        return TorchLoopKernels()
    # Imported late: Triton is there only where CUDA is.
    from worker.models.triton_loop import TritonLoopKernels

    return TritonLoopKernels()
