"""The parts of a transformer layer, as plain functions on tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    The division is done in float32, the multiplication by `weight` in the dtype of x, as in the
    published Ouro code. Example: x = [3, 4], weight = [1, 1] -> [0.8485, 1.1314].
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def inverse_frequencies(theta: float, head_dim: int, device: torch.device) -> Tensor:
    """theta^(-2j / head_dim) for j = 0 .. head_dim/2 - 1, float32 whatever the model's dtype."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / (theta**exponents)


def rotary_tables(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [N, 1, head_dim/2] of position * frequency.

    Angles are float32, since bfloat16 cannot tell position 1000 from 1001; only the results are
    cast to `dtype`.
    """
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of x [N, heads, head_dim], split-half form.

    Element j of the first half is paired with element j of the second:
    (a, b) -> (a cos - b sin, b cos + a sin). Example: head_dim 2, angle 90 degrees,
    (1, 0) -> (0, 1).
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotations of one loop, which all layers share: rotary_tables of its rows."""

    cosine: Tensor
    sine: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, heads, head_dim], rotated."""
        return rotate(x, self.cosine, self.sine)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [N, 2 * width], the gate in the first half -> [N, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
