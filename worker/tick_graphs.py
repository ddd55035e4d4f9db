"""Resident ticks as two captured graphs: a loop of all seats, and the boundary of those that leave.

Nothing is read back between ticks but a header that has left the device two ticks before. The
batches have a fixed size: rows that do not take part in a half sit in the trash slot. So a tick is
what worker/resident.py runs, with padding instead of picking.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from protocol.plan import NO_LOGPROBS
from worker.batch import column
from worker.boundary import boundary, leaves, wake
from worker.device_memory import tensor_bytes
from worker.pending_ticks import PendingTicks
from worker.resident_table import PENDING, READY
from worker.row_record import SamplingKind
from worker.sampling.adjustments import AdjustmentNeeds, Adjustments
from worker.streams import here

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from protocol.resident import ResidentBatch
    from worker.graphs import Capture, LoopGraphs
    from worker.pending_ticks import TickValues
    from worker.readback import ReadbackLease
    from worker.slot_table import Slot, SlotTable
    from worker.stages import Device

AHEAD = 2
"""Ticks that are enqueued beyond the one whose header is read."""

_NONE = -1
_NO_NEEDS = AdjustmentNeeds(biased=False, penalized=False, banned=False)
_PLAIN = Adjustments(biased=False, penalized=False, min_tokens=0)
_KINDS = {
    random: SamplingKind(random, top_k=False, top_p=False, adjusts=_PLAIN, logprobs=NO_LOGPROBS)
    for random in (False, True)
}


@dataclass(frozen=True, slots=True)
class TickLines:
    """What the ticks of one bucket read and leave, on the device.

    rows int64 [bucket], slots, padded with the trash slot; seats int64 [bucket], those that loop
    next; tokens and exit_depths int64 [1 + max_ticks, bucket], -1 for none; header int64
    [1 + max_ticks, 3]: rows that looped, left and ended; failed bool [bucket]; line int64 [1], the
    line that the next boundary writes.
    """

    rows: Tensor
    seats: Tensor
    tokens: Tensor
    exit_depths: Tensor
    header: Tensor
    failed: Tensor
    line: Tensor

    @classmethod
    def of(cls, bucket: int, max_ticks: int, seats: Tensor, trash: int) -> TickLines:
        """Lines of a bucket that loops the slots in `seats`."""
        device, lines = seats.device, 1 + max_ticks
        return cls(
            rows=torch.full((bucket,), trash, dtype=torch.int64, device=device),
            seats=seats,
            tokens=torch.full((lines, bucket), _NONE, dtype=torch.int64, device=device),
            exit_depths=torch.full((lines, bucket), _NONE, dtype=torch.int64, device=device),
            header=torch.zeros(lines, 3, dtype=torch.int64, device=device),
            failed=torch.zeros(bucket, dtype=torch.bool, device=device),
            line=torch.zeros(1, dtype=torch.int64, device=device),
        )

    def begin(self, rows: Sequence[int], trash: int) -> None:
        """A new plan over these slots."""
        self.rows.fill_(trash)[: len(rows)] = column(rows, self.rows.device)
        self.tokens.fill_(_NONE)
        self.exit_depths.fill_(_NONE)
        self.failed.zero_()
        self.line.zero_()

    def leave(self, values: TickValues, slots: SlotTable) -> None:
        """Enqueue the copies of all but the header, and of where the rows of the plan stand."""
        count = len(values.tokens)
        values.tokens.copy_(self.tokens[:count], non_blocking=True)
        values.exit_depths.copy_(self.exit_depths[:count], non_blocking=True)
        values.broken.copy_(self.failed, non_blocking=True)
        values.loops.copy_(slots.loops[self.rows], non_blocking=True)
        values.states.copy_(slots.resident.state[self.rows], non_blocking=True)


def tick_bytes(buckets: Sequence[int], max_ticks: int) -> int:
    """Device memory of the lines of these buckets; none without ticks."""
    if not max_ticks:
        return 0
    seats = [torch.empty(bucket, dtype=torch.int64, device="meta") for bucket in buckets]
    return sum(tensor_bytes(TickLines.of(len(each), max_ticks, each, 0)) for each in seats)


def padded_boundary(on: Device, lines: TickLines, kind: SamplingKind) -> Tensor:
    """Half B of all rows of a bucket; returns the header of its line, int64 [3].

    Rows that neither leave nor wait for their first sample take no part. Those of them that are
    READY were tested after their last loop already, and the test says the same again.
    """
    trash, resident = on.slots.trash, on.slots.resident
    rows, state = lines.rows, resident.state[lines.rows]
    looped = state == READY
    leaving = (looped & leaves(on, rows)) | (state == PENDING)
    found = boundary(on, rows.where(leaving, trash), [kind], _NO_NEEDS)
    nothing = ~leaving | found.broken
    lines.tokens.index_copy_(0, lines.line, found.tokens.masked_fill(nothing, _NONE)[None])
    lines.exit_depths.index_copy_(
        0, lines.line, found.exit_depths.masked_fill(nothing, _NONE)[None]
    )
    lines.failed.logical_or_(found.broken)
    header = torch.stack((looped.sum(), leaving.sum(), found.ends.sum()))
    lines.header.index_copy_(0, lines.line, header[None])
    lines.seats.copy_(rows.where(resident.state[rows] == READY, trash))
    lines.line.add_(1)
    return header


class TickGraphs:
    """Ticks of plain batches, one pair of graphs a bucket. Owner: Device. Mutated only by: run.

    Plain are greedy rows and those that sample by temperature alone; filters, penalties, biases and
    log probabilities are for the eager tick.
    """

    def __init__(
        self, capture: Capture, on: Device, loops: LoopGraphs, sizes: Sequence[int], max_ticks: int
    ) -> None:
        self._on = on
        self._loops = loops
        self._max_ticks = max_ticks
        self._lines: dict[int, TickLines] = {}
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        for bucket in sorted(sizes, reverse=True):
            lines = TickLines.of(bucket, max_ticks, loops.seats_of(bucket), on.slots.trash)
            self._lines[bucket] = lines
            for random, kind in _KINDS.items():
                how = "sampled" if random else "greedy"
                run = partial(self._captured, lines, kind)
                what = f"a {how} boundary of {bucket} rows"
                self._graphs[bucket, random], _ = capture.graph(what, run)

    def __repr__(self) -> str:
        return f"<TickGraphs of {sorted(self._lines)} rows>"

    def fits(self, batch: ResidentBatch, rows: Sequence[Slot]) -> bool:
        """Whether these rows are plain and there are graphs for so many."""
        plain = all(
            row.sampling.adjusts == _PLAIN
            and row.sampling.logprobs == NO_LOGPROBS
            and not (row.sampling.random and (row.sampling.top_k or row.sampling.top_p))
            for row in rows
        )
        return plain and batch.max_ticks <= self._max_ticks and self._loops.fits(len(rows))

    def run(
        self,
        batch: ResidentBatch,
        rows: Sequence[Slot],
        yields: Callable[[], bool],
        lease: ReadbackLease,
    ) -> PendingTicks:
        """Enqueue a batch; all but its last ticks are over when this returns.

        Rows may have more to come from earlier ticks: what this batch does with them is decided on
        the device.
        """
        bucket = self._loops.bucket_of(len(rows))
        lines = self._lines[bucket]
        half_b = self._graphs[bucket, any(row.sampling.random for row in rows)]
        lines.begin([row.index for row in rows], self._on.slots.trash)
        wake(self._on, lines.rows)
        half_b.replay()
        values = lease.ticks(1 + batch.max_ticks, bucket)
        events: list[torch.cuda.Event] = []
        for tick in range(batch.max_ticks):
            self._loops.launch(bucket)
            half_b.replay()
            line = 1 + tick
            values.header[line].copy_(lines.header[line], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            events.append(event)
            if yields() or (tick >= AHEAD and _is_over(batch, values, events, tick - AHEAD)):
                break
        written = values.part(1 + len(events), bucket)
        lines.leave(written, self._on.slots)
        return PendingTicks(batch, rows, written, here(self._on.device))

    def _captured(self, lines: TickLines, kind: SamplingKind) -> Tensor:
        # While it is captured, and warmed up before, the line must not run past the end.
        lines.line.remainder_(1 + self._max_ticks)
        return padded_boundary(self._on, lines, kind)


def _is_over(
    batch: ResidentBatch, values: TickValues, events: Sequence[torch.cuda.Event], tick: int
) -> bool:
    """Whether a tick that was enqueued a while ago was the last that is needed."""
    events[tick].synchronize()
    live, _, finished = values.header[1 + tick].tolist()
    return live == 0 or (batch.yields and finished > 0)
