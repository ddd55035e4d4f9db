"""TickRunner: resident batches, captured or eager, and what requests are yet to be told of them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from worker.resident import ResidentTicks

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.resident import ResidentBatch
    from worker.outcome import StepReader
    from worker.pending_ticks import PendingTicks
    from worker.prompt_passes import PromptPasses
    from worker.readback import ReadbackLease
    from worker.stages import Device
    from worker.tick_graphs import TickGraphs


class TickRunner:
    """Owner: ModelRunner. Mutated only by: it, on the device thread."""

    def __init__(self, on: Device, graphs: TickGraphs | None) -> None:
        self._on = on
        self._graphs = graphs
        self._pending: deque[PendingTicks] = deque()

    def __repr__(self) -> str:
        return f"<TickRunner, {len(self._pending)} batches to settle>"

    def run(
        self,
        batch: ResidentBatch,
        lease: ReadbackLease,
        yields: Callable[[], bool],
        prompts: PromptPasses,
    ) -> StepReader:
        """Run a checked batch, and some prompts between its first ticks."""
        rows = [self._on.slots.slot(key) for key in batch.keys]
        if self._graphs is not None and self._graphs.fits(batch):
            pending = self._graphs.run(batch, rows, yields, lease, prompts)
        else:
            self.settle(whatever=True)
            ticks = ResidentTicks(self._on, batch, rows)
            ticks.run(yields, prompts)
            pending = ticks.pending()
        self._pending.append(pending)
        self.settle(whatever=False)
        return pending.read

    def settle(self, *, whatever: bool) -> None:
        """Let requests know what ticks have done to them: those that are over, or all."""
        while self._pending and (whatever or self._pending[0].is_over()):
            self._pending.popleft().settle()

    def clear(self) -> None:
        """Forget all of them: their requests are gone."""
        self._pending.clear()
