"""Slot table: what a worker keeps of each request, keyed by RequestKey.

Device columns are [slots, ...] tensors that a batch gathers by slot; the host half records how far
each row has come, so that a plan that skips or repeats work is refused before it touches KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from protocol.errors import ProtocolError
from protocol.row_progress import RowProgress, check_table

if TYPE_CHECKING:
    from protocol.identity import RequestKey
    from protocol.plan import Admission, BlockTable, Grant


@dataclass(frozen=True, slots=True)
class SamplingKind:
    """What a request's sampling needs: known on the host, so a batch skips what no row needs."""

    random: bool
    top_k: bool
    top_p: bool


@dataclass(frozen=True, slots=True)
class Slot:
    """Host half of one slot: its row in the device columns and how far the request has come."""

    index: int
    progress: RowProgress
    sampling: SamplingKind


class SlotTable:
    """Device and host state of live requests. Owner: ModelRunner. Mutated only by: its thread.

    hidden [slots, hidden_size] model dtype; token int64 [slots]; survival float32 [slots];
    tables int64 [slots, planes, width]; prompt int64 [slots, max_positions]; temperature and top_p
    float32, top_k int64 [slots]; rng_words int64 [slots, 3] (key low, key high, stream).
    """

    def __init__(
        self,
        *,
        num_slots: int,
        hidden_size: int,
        planes: int,
        max_loops: int,
        max_positions: int,
        block_size: int,
        scratch_block: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        width = -(-max_positions // block_size)
        self.block_size = block_size
        self.planes = planes
        self._max_loops = max_loops
        self._scratch = scratch_block
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[RequestKey, Slot] = {}
        self.hidden = torch.zeros(num_slots, hidden_size, dtype=dtype, device=device)
        self.token = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.survival = torch.ones(num_slots, dtype=torch.float32, device=device)
        self.tables = torch.full(
            (num_slots, planes, width), scratch_block, dtype=torch.int64, device=device
        )
        self.prompt = torch.zeros(num_slots, max_positions, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.top_p = torch.ones(num_slots, dtype=torch.float32, device=device)
        self.top_k = torch.full((num_slots,), -1, dtype=torch.int64, device=device)
        self.rng_words = torch.zeros(num_slots, 3, dtype=torch.int64, device=device)

    def __repr__(self) -> str:
        return f"<SlotTable {len(self._slots)} live, {len(self._free)} free>"

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._slots

    def keys(self) -> tuple[RequestKey, ...]:
        """The live requests."""
        return tuple(self._slots)

    def slot(self, key: RequestKey) -> Slot:
        """The host half of a request's slot. Raises ProtocolError for a request not admitted."""
        try:
            return self._slots[key]
        except KeyError:
            raise ProtocolError(f"request {key} has no slot: it was never admitted") from None

    def admit(self, admission: Admission) -> None:
        """Give a request a slot and fill every column of it."""
        key = admission.key
        if key in self._slots:
            raise ProtocolError(f"request {key} is admitted twice")
        if not self._free:
            raise ProtocolError(f"request {key}: all {len(self._slots)} slots are taken")
        if len(admission.prompt) > self.prompt.shape[1]:
            raise ProtocolError(
                f"request {key}: prompt of {len(admission.prompt)} tokens exceeds "
                f"{self.prompt.shape[1]} positions"
            )
        self._check(admission, start=0)
        index = self._free.pop()
        slot = Slot(
            index=index,
            progress=RowProgress(key, len(admission.prompt), self._max_loops),
            sampling=SamplingKind(
                random=admission.temperature > 0.0,
                top_k=admission.top_k > 0,
                top_p=admission.top_p < 1.0,
            ),
        )
        self._slots[key] = slot
        self.tables[index].fill_(self._scratch)
        self._append(slot, admission.tables)
        self.prompt[index, : len(admission.prompt)] = torch.tensor(admission.prompt)
        self.temperature[index] = admission.temperature
        self.top_p[index] = admission.top_p
        self.top_k[index] = admission.top_k
        self.rng_words[index] = torch.tensor((*admission.rng.philox_key(), admission.rng.stream))
        self.survival[index] = 1.0

    def grant(self, grant: Grant) -> None:
        """Append more blocks to each plane of a request's table."""
        slot = self.slot(grant.key)
        self._check(grant, start=slot.progress.capacity // self.block_size)
        self._append(slot, grant.tables)

    def release(self, key: RequestKey) -> None:
        """Give the slot back; a request without one is ignored, since its admission failed."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot.index)

    def clear(self) -> None:
        """Release every request."""
        for key in self.keys():
            self.release(key)

    def _check(self, item: Admission | Grant, start: int) -> None:
        check_table(item.key, item.tables, self.planes, self._scratch)
        width = self.tables.shape[2]
        if start + len(item.tables[0]) > width:
            raise ProtocolError(f"request {item.key}: more than {width} blocks in a plane")

    def _append(self, slot: Slot, tables: BlockTable) -> None:
        start = slot.progress.capacity // self.block_size
        count = len(tables[0])
        self.tables[slot.index, :, start : start + count] = torch.tensor(tables)
        slot.progress.grant(tables, self.block_size)
