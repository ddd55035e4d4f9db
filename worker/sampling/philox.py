"""Philox4x32-10: random words as a pure function of a counter and a key.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). 32-bit words are
held in int64, which every device can multiply, shift and compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from protocol.rng import MASK32

if TYPE_CHECKING:
    from torch import Tensor

    from protocol.rng import Purpose

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85


def words(counter: Tensor, key: Tensor) -> Tensor:
    """Four 32-bit words a row, [N, 4], from counter [N, 4] and key [N, 2]; all int64.

    Example: counter (0, 0, 0, 0), key (0, 0) -> (6627e8d5, e169c58d, bc57ac4c, 9b00dbd8).
    """
    c0, c1, c2, c3 = counter.unbind(1)
    k0, k1 = key.unbind(1)
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply(_MULTIPLIER_0, c0)
        high_1, low_1 = _multiply(_MULTIPLIER_1, c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _WEYL_0) & MASK32, (k1 + _WEYL_1) & MASK32
    return torch.stack((c0, c1, c2, c3), dim=1)


def _multiply(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, by halves so that int64 never overflows."""
    low = factor * (x & 0xFFFF)
    middle = factor * (x >> 16) + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def uniform(rng: Tensor, purpose: Purpose, indices: Tensor) -> Tensor:
    """One uniform a row in [0, 1), float64 [N]; the tensor form of protocol.rng.

    `rng` int64 [N, 3] is each row's RngKey as (key word, key word, stream), `indices` int64 [N]
    what philox_counter calls the index. The upper 27 bits of the first random word and the upper
    26 of the second make a 53-bit integer, so every value is a multiple of 2^-53 and 1.0 cannot
    come out.
    """
    if rng.is_cuda:
        # Imported late: Triton is there only where CUDA is.
        from worker.kernels.sampler import uniform as uniform_on_cuda

        return uniform_on_cuda(rng, int(purpose), indices)
    purposes = torch.full_like(indices, int(purpose))
    counter = torch.stack((indices & MASK32, indices >> 32, purposes, rng[:, 2]), dim=1)
    first, second = words(counter, rng[:, :2])[:, :2].unbind(1)
    return ((first >> 5) * 2**26 + (second >> 6)).to(torch.float64) * 2.0**-53
