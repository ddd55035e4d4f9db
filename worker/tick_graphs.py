"""Resident ticks as two captured graphs: a loop of all seats, and the boundary of those that leave.

Nothing is read back between ticks but a header that has left the device two ticks before. The
batches have a fixed size: rows that do not take part in a half sit in the trash slot. So a tick is
what worker/resident.py runs, with padding instead of picking.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from worker.boundary import wake
from worker.padded_boundary import VARIANTS, variant_of
from worker.pending_ticks import PendingTicks
from worker.sampling.logprobs import most_alternatives
from worker.streams import here
from worker.tick_lines import TickLines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol.resident import ResidentBatch
    from worker.graphs import Capture, LoopGraphs
    from worker.pending_ticks import TickValues
    from worker.prompt_passes import PromptPasses
    from worker.readback import ReadbackLease
    from worker.slot_table import Slot
    from worker.stages import Device

AHEAD = 2
"""Ticks that are enqueued beyond the one whose header is read."""


class TickGraphs:
    """Ticks in graphs: a loop and the variants of a boundary, a bucket. Owner: ModelRunner.

    Mutated only by: run.
    """

    def __init__(
        self, capture: Capture, on: Device, loops: LoopGraphs, sizes: Sequence[int], max_ticks: int
    ) -> None:
        # Imported late: Triton is there only where CUDA is.
        from worker.fused_boundary import fused_boundary

        self._on = on
        self._loops = loops
        self._max_ticks = max_ticks
        self._lines: dict[int, TickLines] = {}
        self._graphs: dict[tuple[int, str], torch.cuda.CUDAGraph] = {}
        trash, told = on.slots.trash, most_alternatives(on.model.profile.vocab_size)
        for bucket in sorted(sizes, reverse=True):
            lines = TickLines.of(bucket, max_ticks, loops.seats_of(bucket), trash, told)
            self._lines[bucket] = lines
            for variant in VARIANTS:
                run = partial(fused_boundary, on, lines, variant)
                what = f"a {variant.name} boundary of {bucket} rows"
                self._graphs[bucket, variant.name], _ = capture.graph(what, run)

    def __repr__(self) -> str:
        return f"<TickGraphs of {sorted(self._lines)} rows>"

    def fits(self, batch: ResidentBatch) -> bool:
        """Whether there are graphs for so many rows and ticks."""
        return batch.max_ticks <= self._max_ticks and self._loops.fits(len(batch.keys))

    def run(
        self,
        batch: ResidentBatch,
        rows: Sequence[Slot],
        yields: Callable[[], bool],
        lease: ReadbackLease,
        prompts: PromptPasses,
    ) -> PendingTicks:
        """Enqueue a batch; all but its last ticks are over when this returns.

        Rows may have more to come from earlier ticks: what this batch does with them is decided on
        the device. `prompts` run between the first ticks.
        """
        bucket = self._loops.bucket_of(len(rows))
        lines = self._lines[bucket]
        half_b = self._graphs[bucket, variant_of(row.sampling for row in rows).name]
        lines.begin([row.index for row in rows], self._on.slots.trash)
        wake(self._on, lines.rows)
        half_b.replay()
        values = lease.ticks(1 + batch.max_ticks, bucket)
        events: list[torch.cuda.Event] = []
        for tick in range(batch.max_ticks):
            prompts.before_tick(tick)
            self._loops.launch(bucket)
            half_b.replay()
            line = 1 + tick
            values.header[line].copy_(lines.header[line], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            events.append(event)
            if yields() or (tick >= AHEAD and _is_over(batch, values, events, tick - AHEAD)):
                break
        count = 1 + len(events)
        if prompts.rest():  # their rows are sampled, as no plan leaves any behind
            half_b.replay()
            values.header[count].zero_()
            count += 1
        written = values.part(count, bucket)
        lines.leave(written, self._on.slots)
        told = lines.leave_logprobs(written.tokens, [row.sampling.logprobs for row in rows])
        return PendingTicks(batch, rows, written, here(self._on.device), told)


def _is_over(
    batch: ResidentBatch, values: TickValues, events: Sequence[torch.cuda.Event], tick: int
) -> bool:
    """Whether a tick that was enqueued a while ago was the last that is needed."""
    events[tick].synchronize()
    live, _, finished = values.header[1 + tick].tolist()
    nobody = live == 0 and tick >= batch.prompt_ticks
    return nobody or (batch.yields and finished > 0)
