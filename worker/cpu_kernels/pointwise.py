"""What stands between the products of a layer, each as one pass over its rows. All float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worker.cpu_kernels import compiled_layers
from worker.cpu_kernels.team import Kernel

if TYPE_CHECKING:
    from torch import Tensor

FEW = 1 << 13
"""Numbers that one thread has done by the time that a team has begun."""

_NORM = Kernel(compiled_layers.norm)
_RESIDUAL_NORM = Kernel(compiled_layers.residual_norm)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """layers.rms_norm of rows [N, H] -> [N, H]."""
    x = x.contiguous()
    normed = torch.empty_like(x)
    _NORM((*x.shape, eps), (x, weight, normed), alone=x.numel() <= FEW)
    return normed


def residual_norm(
    hidden: Tensor, branch: Tensor, branch_weight: Tensor, next_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """hidden + norm(branch), and the norm of that; rows [N, H], weights [H]."""
    hidden, branch = hidden.contiguous(), branch.contiguous()
    summed, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    tensors = (hidden, branch, branch_weight, next_weight, summed, normed)
    _RESIDUAL_NORM((*hidden.shape, eps), tensors, alone=hidden.numel() <= FEW)
    return summed, normed
