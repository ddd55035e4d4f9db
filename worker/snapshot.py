"""Suspended requests: their row and their KV in host memory, and the way back, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from protocol.errors import ProtocolError
from protocol.snapshot import (
    LossReason,
    SnapshotHandle,
    SnapshotLoss,
    SnapshotRoom,
    SnapshotStore,
    missing_snapshot,
)
from worker.kv_storage import KVStorage
from worker.row_record import RowRecord, tensor_checksum

if TYPE_CHECKING:
    from torch import Tensor

    from protocol.identity import RequestKey
    from protocol.plan import Resume
    from worker.models.base import LoopedModel
    from worker.slot_table import SlotTable
    from worker.stages import Device


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One suspended request, on the host.

    `kv` [planes, written, layers, 2, kv_heads, head_dim] in the model's dtype holds its first
    `written` tokens, with zeros where the token in work has not been yet. So two snapshots of one
    request have the same checksum exactly when it stands in the same place, bit for bit.
    """

    record: RowRecord
    kv: Tensor
    checksum: int

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors."""
        return self.record.num_bytes + self.kv.nbytes

    @property
    def is_intact(self) -> bool:
        """Whether the bytes are still those that were taken."""
        return self.checksum == _checksum(self.record, self.kv)


def _checksum(record: RowRecord, kv: Tensor) -> int:
    return tensor_checksum(kv, record.checksum())


class SuspendedRows:
    """Snapshots of a worker's suspended requests. Owner: ModelRunner. Mutated only by: it.

    Copies run on the stream of the steps, so a snapshot is taken of what earlier plans left and
    a resumed row is whole before the first step that names it.
    """

    def __init__(self, on: Device, room: SnapshotRoom) -> None:
        self._on = on
        self._room = room
        self.store: SnapshotStore[Snapshot] = SnapshotStore(room.limit)

    def __repr__(self) -> str:
        return f"<SuspendedRows {self.store!r}>"

    def suspend(self, key: RequestKey, epoch: int) -> SnapshotHandle | SnapshotLoss:
        """Take a request off the device; its slot is free, whether it could be kept or not.

        Raises ProtocolError for a request without a slot.
        """
        slots = self._on.slots
        progress = slots.slot(key).progress
        size = self._room.size(progress.prompt_length, progress.written)
        loss = self.store.refuse(key, size)
        if loss is not None:
            slots.release(key)
            return loss
        snapshot = self._take(key)
        self.store.put(key, snapshot.num_bytes, snapshot)
        slots.release(key)
        return SnapshotHandle(key, epoch, snapshot.num_bytes, slots.planes, snapshot.checksum)

    def resume(self, resume: Resume) -> SnapshotLoss | None:
        """Bring a request back into any slot, over the blocks granted; None when that is done.

        Raises ProtocolError, and keeps the snapshot, for a request that has a slot, blocks that do
        not hold what it has written, or when no slot is free.
        """
        key = resume.key
        snapshot = self.store.get(key)
        if snapshot is None:
            if key in self._on.slots:
                raise ProtocolError(f"request {key} is resumed, but it is not suspended")
            return missing_snapshot(key)
        if not snapshot.is_intact:
            self.store.drop(key)
            message = f"request {key}: its snapshot has changed since it was suspended"
            return SnapshotLoss(key, LossReason.CORRUPT, message)
        self._on.slots.place(snapshot.record, resume.tables)
        for plane, values in enumerate(snapshot.kv):
            self._on.storage.write_tokens(*self._addresses(key, plane), values.to(self._on.device))
        self.store.drop(key)
        return None

    def _take(self, key: RequestKey) -> Snapshot:
        record = self._on.slots.record(key)
        pages = self._on.storage.pages
        _, layers, parts, heads, _, head_dim = pages.shape
        planes, written = self._on.slots.planes, record.progress.written
        kv = torch.empty(planes, written, layers, parts, heads, head_dim, dtype=pages.dtype)
        for plane in range(planes):  # one at a time: a gather takes device memory
            kv[plane].copy_(self._on.storage.read_tokens(*self._addresses(key, plane)))
        progress = record.progress
        if progress.position >= 0 and progress.loops > 0 and not progress.sampled:
            kv[progress.loops :, progress.position] = 0  # another request's, before it
        return Snapshot(record, kv, _checksum(record, kv))

    def _addresses(self, key: RequestKey, plane: int) -> tuple[Tensor, Tensor]:
        """Blocks and offsets, int64 [written], of a live request's tokens in one plane."""
        slot, table = self._on.slots.slot(key), self._on.slots
        positions = torch.arange(slot.progress.written, device=self._on.device)
        blocks = table.tables[slot.index, plane, positions // table.block_size]
        return blocks, positions % table.block_size


def snapshot_room(limit: int, slots: SlotTable, model: LoopedModel) -> SnapshotRoom:
    """What a snapshot takes on this worker."""
    token = KVStorage.bytes_per_block(
        model.num_layers, model.kv_heads, 1, model.head_dim, model.dtype
    )
    return SnapshotRoom(
        limit=limit,
        row_bytes=slots.row_bytes,
        prompt_bytes=slots.prompt.element_size(),
        token_bytes=token * slots.planes,
    )
