"""A worker's profile on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.columns import read_float, read_int, read_text
from protocol.layout import Layout
from protocol.profile import ModelProfile, WorkerProfile
from protocol.snapshot_columns import pack_room, unpack_room

if TYPE_CHECKING:
    from protocol.columns import Packed


def pack_profile(profile: WorkerProfile) -> tuple[object, ...]:
    """A worker's profile as it goes on the wire."""
    model = profile.model
    return (
        (
            model.name,
            model.fingerprint,
            model.vocab_size,
            model.max_positions,
            model.max_loops,
            model.eos_ids,
            float(model.exit_threshold),
        ),
        profile.device,
        profile.dtype,
        pack_room(profile.snapshots),
        profile.num_slots,
        profile.num_blocks,
        profile.block_size,
        profile.planes,
        profile.max_step_tokens,
        profile.max_ticks,
        profile.layout.value,
    )


def unpack_profile(
    model: Packed, device: str, dtype: str, snapshots: Packed, *sizes_and_layout: int | str
) -> WorkerProfile:
    """A worker's profile from the wire."""
    *sizes, layout = sizes_and_layout
    name, fingerprint, vocab_size, max_positions, max_loops, eos_ids, exit_threshold = model
    num_slots, num_blocks, block_size, planes, max_step_tokens, max_ticks = map(read_int, sizes)
    return WorkerProfile(
        ModelProfile(
            read_text(name),
            read_text(fingerprint),
            read_int(vocab_size),
            read_int(max_positions),
            read_int(max_loops),
            tuple(read_int(token) for token in eos_ids),
            read_float(exit_threshold),
        ),
        read_text(device),
        read_text(dtype),
        num_slots,
        num_blocks,
        block_size,
        planes,
        max_step_tokens,
        Layout(layout),
        unpack_room(snapshots),
        max_ticks,
    )
