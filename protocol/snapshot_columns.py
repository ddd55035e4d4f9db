"""Handles, losses and room of snapshots as they go on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.columns import KeyTable, Packed, read_index, read_int, read_text
from protocol.snapshot import LossReason, SnapshotHandle, SnapshotLoss, SnapshotRoom

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.identity import RequestKey


def pack_answers(
    handles: Sequence[SnapshotHandle], losses: Sequence[SnapshotLoss], keys: KeyTable
) -> tuple[object, ...]:
    """Two arrays, one array each for a handle or a loss; requests by index."""
    suspended = [(keys.index(h.key), h.epoch, h.bytes, h.planes, h.checksum) for h in handles]
    lost = [(keys.index(loss.key), loss.reason.value, loss.message) for loss in losses]
    return suspended, lost


def unpack_answers(
    packed: Packed, table: Sequence[RequestKey]
) -> tuple[tuple[SnapshotHandle, ...], tuple[SnapshotLoss, ...]]:
    """The handles and losses that `pack_answers` wrote."""
    suspended, lost = packed
    handles = tuple(
        SnapshotHandle(
            table[read_index(key, table)],
            read_int(epoch),
            read_int(size),
            read_int(planes),
            read_int(checksum),
        )
        for key, epoch, size, planes, checksum in suspended
    )
    losses = tuple(
        SnapshotLoss(table[read_index(key, table)], LossReason(reason), read_text(message))
        for key, reason, message in lost
    )
    return handles, losses


def pack_room(room: SnapshotRoom) -> tuple[int, ...]:
    """The numbers of a worker's room for snapshots."""
    return (room.limit, room.row_bytes, room.prompt_bytes, room.token_bytes)


def unpack_room(packed: Packed) -> SnapshotRoom:
    """The room that `pack_room` wrote."""
    limit, row_bytes, prompt_bytes, token_bytes = (read_int(number) for number in packed)
    return SnapshotRoom(limit, row_bytes, prompt_bytes, token_bytes)
