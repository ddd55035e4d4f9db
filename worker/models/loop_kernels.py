"""What a layer is made of, as one interface: torch formulas are what other kernels must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from worker.cpu_kernels.availability import hindrance
from worker.models.torch_loop import TorchLoopKernels

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from worker.models.layers import Rotary


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

    def packed(self, weight: Tensor) -> Tensor:
        """The weight [out, K] of a product, as `linear`, `gated`, `branch` and `head` take it."""
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


def loop_kernels(device: torch.device, dtype: torch.dtype) -> LoopKernels:
    """The fastest kernels that there are for a device and a type."""
    # Imported late: Triton is there only where CUDA is, and Numba need not be there.
    if device.type == "cuda":
        from worker.models.triton_loop import TritonLoopKernels

        return TritonLoopKernels()
    if hindrance(dtype, device) is None:
        from worker.models.cpu_loop import CpuLoopKernels

        return CpuLoopKernels()
    return TorchLoopKernels()
