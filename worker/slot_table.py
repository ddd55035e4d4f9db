"""Slot table: what a worker keeps of each request, keyed by RequestKey.

Device columns are [slots, ...] tensors that a batch gathers by slot; the host half records how far
each row has come, so that a plan that skips or repeats work is refused before it touches KV.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from protocol.errors import ProtocolError
from protocol.row_progress import RowProgress, check_table
from worker.cpu_kernels.availability import hindrance
from worker.device_memory import tensor_bytes
from worker.resident_table import ResidentTable
from worker.row_record import COLUMNS, RowRecord, SamplingKind
from worker.sampling.adjustments import Adjustments, LogitAdjuster, adjustment_columns
from worker.upload import fill, same

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from protocol.identity import RequestKey
    from protocol.plan import Admission, BlockTable, Fork, Grant
    from protocol.rng import RngKey


@dataclass(frozen=True, slots=True)
class Slot:
    """Host half of one slot: its row in the device columns and how far the request has come."""

    index: int
    progress: RowProgress
    sampling: SamplingKind


class SlotTable:
    """Device and host state of live requests. Owner: ModelRunner. Mutated only by: its thread.

    hidden [slots, hidden_size] model dtype; token int64 [slots]; survival float32 [slots];
    position int64 [slots] of the token in work and loops int64 [slots] that it has run, as the
    stages leave them; tables int64 [slots, planes, width]; prompt int64 [slots, max_positions];
    temperature and top_p float32, top_k int64 [slots]; rng_words int64 [slots, 3] (key low, key
    high, stream); bias, counts, marks and penalties those of the `adjuster`. `resident` has what
    follows from all that for requests which the device decides about.

    Where `compiled` is set, Numba's kernels move its rows; else torch, which is the definition.

    Every column has one row more than there are slots: `trash`, which belongs to nobody, has only
    the scratch block in its tables, and is where the padding rows of a batch read and write.
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
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        width = -(-max_positions // block_size)
        rows = num_slots + 1
        self.trash = num_slots
        self.compiled = hindrance(dtype, device) is None
        self.block_size = block_size
        self.planes = planes
        self._max_loops = max_loops
        self._scratch = scratch_block
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[RequestKey, Slot] = {}
        self.hidden = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.survival = torch.ones(rows, dtype=torch.float32, device=device)
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)
        self.loops = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tables = torch.full(
            (rows, planes, width), scratch_block, dtype=torch.int64, device=device
        )
        self.prompt = torch.zeros(rows, max_positions, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float32, device=device)
        self.top_k = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.rng_words = torch.zeros(rows, 3, dtype=torch.int64, device=device)
        self.resident = ResidentTable(rows, max_positions, device)
        self.adjuster = LogitAdjuster(rows, vocab_size, device)
        self.bias = self.adjuster.bias
        self.counts = self.adjuster.counts
        self.marks = self.adjuster.marks
        self.penalties = self.adjuster.penalties

    def __repr__(self) -> str:
        return f"<SlotTable {len(self._slots)} live, {len(self._free)} free>"

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._slots

    @property
    def plane_tables(self) -> Tensor:
        """The tables as [slots * planes, width], a view: row slot * planes + plane."""
        return self.tables.flatten(0, 1)

    def keys(self) -> tuple[RequestKey, ...]:
        """The live requests."""
        return tuple(self._slots)

    def indices(self, keys: Iterable[RequestKey]) -> list[int]:
        """The slots of those of these requests that have one."""
        return [self._slots[key].index for key in keys if key in self._slots]

    def slot(self, key: RequestKey) -> Slot:
        """The host half of a request's slot. Raises ProtocolError for a request not admitted."""
        try:
            return self._slots[key]
        except KeyError:
            raise ProtocolError(
                f"request {key} has no slot: it was never admitted, or is suspended"
            ) from None

    def admit(self, admission: Admission) -> None:
        """Give a request a slot and fill every column of it."""
        if len(admission.prompt) > self.prompt.shape[1]:
            raise ProtocolError(
                f"request {admission.key}: prompt of {len(admission.prompt)} tokens exceeds "
                f"{self.prompt.shape[1]} positions"
            )
        self.place(self._new_record(admission), admission.tables)

    def fork(self, fork: Fork) -> None:
        """Give a copy of the parent's row a slot of its own, with another stream of randomness."""
        parent = self.slot(fork.parent)
        check_table(fork.key, fork.tables, self.planes, self._scratch)
        record = replace(
            self._read(parent),
            progress=parent.progress.forked(fork, self.block_size),
            rng_words=rng_words(fork.rng),
        )
        self.place(record, fork.tables)

    def place(self, record: RowRecord, tables: BlockTable) -> None:
        """Give a record any free slot, over these blocks. What does not fit takes no slot."""
        key = record.progress.key
        if key in self._slots:
            raise ProtocolError(f"request {key} is admitted twice")
        if not self._free:
            raise ProtocolError(f"request {key}: all {len(self._slots)} slots are taken")
        self._check(key, tables, start=0)
        progress = record.progress.moved(tables, self.block_size)
        index = self._free.pop()
        self._slots[key] = Slot(index, progress, record.sampling)
        self.tables[index].fill_(self._scratch)
        fill(self.tables[index, :, : len(tables[0])], torch.tensor(tables))
        for name, value in record.columns():
            fill(self._row(name, index, len(record.prompt)), value)
        self.resident.enter(index, progress, record.sampling.adjusts.min_tokens)

    def record(self, key: RequestKey) -> RowRecord:
        """A copy of a request's row, on the host; its blocks are no part of it."""
        live = self._read(self.slot(key))
        progress = replace(live.progress, capacity=0, tables=())
        copies = {name: value.to("cpu", copy=True) for name, value in live.columns()}
        return RowRecord(progress=progress, sampling=live.sampling, **copies)

    def _read(self, slot: Slot) -> RowRecord:
        """A request's row where it lies: its tensors are views of the columns."""
        length = slot.progress.prompt_length
        views = {name: self._row(name, slot.index, length) for name in COLUMNS}
        return RowRecord(progress=slot.progress, sampling=slot.sampling, **views)

    @property
    def num_bytes(self) -> int:
        """Memory of all columns. A table on the device "meta" has them without taking any."""
        return tensor_bytes(self, self.resident, self.adjuster)

    @property
    def row_bytes(self) -> int:
        """Memory of a record, but for its prompt."""
        return sum(self._row(name, 0, 0).nbytes for name in COLUMNS)

    def grant(self, grant: Grant) -> None:
        """Append more blocks to each plane of a request's table."""
        slot = self.slot(grant.key)
        start = slot.progress.capacity // self.block_size
        self._check(grant.key, grant.tables, start)
        count = len(grant.tables[0])
        fill(self.tables[slot.index, :, start : start + count], torch.tensor(grant.tables))
        slot.progress.grant(grant.tables, self.block_size)
        self.resident.granted[slot.index].fill_(slot.progress.capacity)

    def release(self, key: RequestKey) -> None:
        """Give the slot back; a request without one is ignored, since its admission failed."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot.index)

    def clear(self) -> None:
        """Release every request."""
        for key in self.keys():
            self.release(key)

    def _new_record(self, admission: Admission) -> RowRecord:
        """The row of a request that has not run yet."""
        device, int64 = self.token.device, torch.int64
        return RowRecord(
            progress=RowProgress.begin(admission, self._max_loops),
            sampling=SamplingKind(
                random=admission.temperature > 0.0,
                top_k=admission.top_k > 0,
                top_p=admission.top_p < 1.0,
                adjusts=Adjustments.of(admission),
                logprobs=admission.logprobs,
            ),
            prompt=torch.tensor(admission.prompt),
            hidden=same(0.0, self.hidden.dtype, device, (self.hidden.shape[1],)),
            token=same(0, int64, device),
            survival=same(1.0, torch.float32, device),
            position=same(0, int64, device),
            loops=same(0, int64, device),
            temperature=same(admission.temperature, torch.float32, device),
            top_p=same(admission.top_p, torch.float32, device),
            top_k=same(admission.top_k, int64, device),
            rng_words=rng_words(admission.rng),
            **adjustment_columns(admission, self.bias.shape[1], device),
        )

    def _row(self, name: str, index: int, prompt_length: int) -> Tensor:
        """A view of one column's row; of the prompt's, as much as is used."""
        row: Tensor = getattr(self, name)[index]
        return row[:prompt_length] if name == "prompt" else row

    def _check(self, key: RequestKey, tables: BlockTable, start: int) -> None:
        check_table(key, tables, self.planes, self._scratch)
        width = self.tables.shape[2]
        if start + len(tables[0]) > width:
            raise ProtocolError(f"request {key}: more than {width} blocks in a plane")


def rng_words(rng: RngKey) -> Tensor:
    """The row of `rng_words` of a request, on the host: key low, key high, stream."""
    return torch.tensor((*rng.philox_key(), rng.stream))
