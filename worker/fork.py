"""Forks: one more request on the device, from where the prompt of another ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from protocol.plan import Fork
    from worker.stages import Device


def fork_row(on: Device, fork: Fork) -> None:
    """Give a copy of the parent a slot, and its own blocks the prompt's KV that belongs there.

    Tokens in blocks that both share are neither read nor written. Raises ProtocolError, and
    changes nothing, for what RowProgress.forked refuses or when no slot is free.
    """
    slots = on.slots
    parent = slots.slot(fork.parent)
    slots.fork(fork)
    child = slots.slot(fork.key)
    shared = parent.progress.shared_blocks(fork.tables, slots.block_size)
    positions = torch.arange(
        shared * slots.block_size, parent.progress.prompt_length, device=on.device
    )
    if not len(positions):
        return
    pages, offsets = positions // slots.block_size, positions % slots.block_size
    for plane in range(slots.planes):  # one at a time: a copy takes device memory
        on.storage.copy_tokens(
            slots.tables[parent.index, plane, pages],
            slots.tables[child.index, plane, pages],
            offsets,
        )
