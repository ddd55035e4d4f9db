"""From the host to the device without waiting: a copy is enqueued, and the host goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def same(
    value: float, dtype: torch.dtype, device: torch.device, shape: tuple[int, ...] = ()
) -> Tensor:
    """A tensor of a device that is one number everywhere, and takes the memory of one.

    The number travels with the launch that writes it: there is nothing to copy.
    """
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


def fill(target: Tensor, values: Tensor) -> None:
    """Copy `values`, of any device, into `target`.

    From memory that is not pinned torch would wait until the device has come to the copy, and with
    it to all that was enqueued before. Torch keeps what is pinned here until it has.
    """
    if target.is_cuda and not values.is_cuda:
        values = values.pin_memory()
    target.copy_(values, non_blocking=True)
