"""From the host to the device without waiting: a copy is enqueued, and the host goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def fill(target: Tensor, values: Tensor) -> None:
    """Copy `values`, of any device, into `target`.

    From memory that is not pinned torch would wait until the device has come to the copy, and with
    it to all that was enqueued before. Torch keeps what is pinned here until it has.
    """
    if target.is_cuda and not values.is_cuda:
        values = values.pin_memory()
    target.copy_(values, non_blocking=True)
