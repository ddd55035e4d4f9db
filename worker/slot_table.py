"""Slot table: what a worker keeps of each request, keyed by RequestKey.

Device columns are [slots, ...] tensors that a batch gathers by slot; the host half records how far
each row has come, so that a plan that skips or repeats work is refused before it touches KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from protocol.errors import ProtocolError

if TYPE_CHECKING:
    from protocol.identity import RequestKey
    from protocol.plan import Admission, BlockTable


@dataclass(frozen=True, slots=True)
class SamplingKind:
    """What a request's sampling needs: known on the host, so a batch skips what no row needs."""

    random: bool
    top_k: bool
    top_p: bool


@dataclass(slots=True)
class SlotProgress:
    """Host half of one slot. Owner: SlotTable. Mutated only by: ModelRunner's stage checks.

    `position` is the token in work, `loops` the loops it has run; before the prompt is through,
    `position` is -1. `capacity` counts the tokens its granted blocks hold.
    """

    index: int
    prompt_length: int
    capacity: int
    sampling: SamplingKind
    prefilled: int = 0
    position: int = -1
    loops: int = 0


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
        max_positions: int,
        block_size: int,
        scratch_block: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        width = -(-max_positions // block_size)
        self.block_size = block_size
        self.planes = planes
        self._scratch = scratch_block
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[RequestKey, SlotProgress] = {}
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

    def progress(self, key: RequestKey) -> SlotProgress:
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
        self._check_table(key, admission.tables, start=0)
        index = self._free.pop()
        slot = SlotProgress(
            index=index,
            prompt_length=len(admission.prompt),
            capacity=0,
            sampling=SamplingKind(
                random=admission.temperature > 0.0,
                top_k=admission.top_k > 0,
                top_p=admission.top_p < 1.0,
            ),
        )
        self._slots[key] = slot
        self.tables[index].fill_(self._scratch)
        self._append(slot, admission.tables)
        self.prompt[index, : slot.prompt_length] = torch.tensor(admission.prompt)
        self.temperature[index] = admission.temperature
        self.top_p[index] = admission.top_p
        self.top_k[index] = admission.top_k
        self.rng_words[index] = torch.tensor((*admission.rng.philox_key(), admission.rng.stream))
        self.survival[index] = 1.0

    def grant(self, key: RequestKey, tables: BlockTable) -> None:
        """Append more blocks to each plane of a request's table."""
        slot = self.progress(key)
        self._check_table(key, tables, start=slot.capacity // self.block_size)
        self._append(slot, tables)

    def release(self, key: RequestKey) -> None:
        """Give the slot back; a request without one is ignored, since its admission failed."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot.index)

    def clear(self) -> None:
        """Release every request."""
        for key in self.keys():
            self.release(key)

    def _check_table(self, key: RequestKey, tables: BlockTable, start: int) -> None:
        width = self.tables.shape[2]
        if len(tables) != self.planes:
            raise ProtocolError(f"request {key}: table of {len(tables)} planes, not {self.planes}")
        if start + len(tables[0]) > width:
            raise ProtocolError(f"request {key}: more than {width} blocks in a plane")
        if any(block >= self._scratch for plane in tables for block in plane):
            raise ProtocolError(f"request {key}: a block is beyond the {self._scratch} of the pool")

    def _append(self, slot: SlotProgress, tables: BlockTable) -> None:
        start = slot.capacity // self.block_size
        count = len(tables[0])
        self.tables[slot.index, :, start : start + count] = torch.tensor(tables)
        slot.capacity += count * self.block_size
