"""ModelRunner: runs one plan on the device and owns every request's device state."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from protocol.errors import ProtocolError
from protocol.plan import CodaBatch, PrefillBatch, PreludeBatch, RecurrentBatch
from protocol.resident import ResidentBatch
from protocol.result import FailedRow, PrefillResult, PreludeResult
from protocol.row_progress import check_parent
from protocol.snapshot import NO_SNAPSHOTS, SnapshotLoss
from worker.fork import fork_row
from worker.outcome import (
    EMPTY_RESULTS,
    PlanOutcome,
    read_logprobs,
    read_survivals,
    read_tokens,
    select_rows,
)
from worker.resident import ResidentTicks
from worker.snapshot import SuspendedRows
from worker.stages import run_coda, run_prefill, run_prelude, run_recurrent
from worker.streams import Lane, open_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from protocol.identity import RequestKey
    from protocol.plan import Admission, ExecutionPlan, Fork, Resume, StagedStep, Step
    from protocol.snapshot import SnapshotRoom
    from worker.outcome import StepReader
    from worker.pending_ticks import PendingTicks
    from worker.readback import ReadbackLease
    from worker.slot_table import Slot
    from worker.stages import Device
    from worker.streams import Streams
    from worker.tick_graphs import TickGraphs

logger = logging.getLogger(__name__)


_LANES = {
    PrefillBatch: Lane.CORE,
    PreludeBatch: Lane.BOUNDARY,
    RecurrentBatch: Lane.CORE,
    CodaBatch: Lane.BOUNDARY,
    ResidentBatch: Lane.CORE,
}
"""Where each step runs."""


def _never() -> bool:
    return False


class ModelRunner:
    """Owner: Worker. Mutated only by: execute and reset, on the worker's device thread; finish
    counts steps.

    A request whose row is refused, or whose step raises, is failed: every later plan that names
    it skips it and reports it again, until it is released.
    """

    def __init__(
        self,
        device: Device,
        snapshots: SnapshotRoom = NO_SNAPSHOTS,
        tick_graphs: TickGraphs | None = None,
        streams: Streams | None = None,
    ) -> None:
        self._on = device
        self._tick_graphs = tick_graphs
        self.suspended = SuspendedRows(device, snapshots)
        self._failed: dict[RequestKey, str] = {}
        self._streams = streams or open_streams(device.device, 1, device.slots.trash)
        self._ticks: deque[PendingTicks] = deque()
        self.steps_done = 0

    def __repr__(self) -> str:
        return f"<ModelRunner {self._on.slots!r}, {len(self._failed)} failed>"

    @torch.inference_mode()
    def execute(
        self, plan: ExecutionPlan, lease: ReadbackLease, yields: Callable[[], bool] = _never
    ) -> PlanOutcome:
        """Apply what changes the slots and enqueue the steps; the outcome says when they are over.

        Resident ticks end early once `yields()`.
        """
        outcome = PlanOutcome(plan.epoch, plan.seq)
        self._settle(whatever=bool(plan.suspends or plan.forks))
        if plan.changes_slots:
            self._change(plan, outcome)
        for step in plan.steps:
            outcome.steps.append(self._run(step, lease, outcome, yields))
            if not self._streams.asynchronous:
                self.steps_done += 1
        outcome.end = self._streams.mark()
        return outcome

    def finish(self, outcome: PlanOutcome) -> None:
        """Return once the device is done with a plan; raise what it failed with. On any thread."""
        for span in outcome.spans:
            span.wait()
            self.steps_done += self._streams.asynchronous
        outcome.wait()

    def reset(self) -> None:
        """Drop every request: the end of an epoch."""
        self._on.slots.clear()
        self._failed.clear()
        self._ticks.clear()
        self.suspended.store.clear()
        self._streams.mark().wait()  # whoever comes next may have any slot and any block

    def _settle(self, *, whatever: bool) -> None:
        """Let requests know what ticks have done to them: those that are over, or all."""
        while self._ticks and (whatever or self._ticks[0].is_over()):
            self._ticks.popleft().settle()

    def _change(self, plan: ExecutionPlan, outcome: PlanOutcome) -> None:
        """What a plan does before its steps.

        It waits for the last work on the slots that it takes something from, and so does whoever
        gets their blocks, since these come by one of the changes.
        """
        slots = self._on.slots
        parents = [fork.parent for fork in plan.forks]
        granted = [grant.key for grant in plan.grants]
        touched = slots.indices([*plan.releases, *plan.suspends, *parents, *granted])
        with self._streams.step(Lane.CORE, touched):
            for key in plan.releases:
                slots.release(key)
                self._failed.pop(key, None)
                self.suspended.store.drop(key)
            for key in plan.suspends:
                self._apply(key, outcome, partial(self._suspend, key, outcome))
            for resume in plan.resumes:
                self._apply(resume.key, outcome, partial(self._resume, resume, outcome))
            for admission in plan.admits:
                self._apply(admission.key, outcome, partial(self._admit, admission))
            for fork in plan.forks:
                self._apply(fork.key, outcome, partial(self._fork, fork))
            for grant in plan.grants:
                self._apply(grant.key, outcome, partial(slots.grant, grant))
            touched += slots.indices(resume.key for resume in plan.resumes)
            touched += slots.indices(admission.key for admission in plan.admits)
            touched += slots.indices(fork.key for fork in plan.forks)

    def _suspend(self, key: RequestKey, outcome: PlanOutcome) -> None:
        answer = self.suspended.suspend(key, outcome.epoch)
        if isinstance(answer, SnapshotLoss):
            self._lose(answer, outcome)
        else:
            outcome.suspended.append(answer)

    def _resume(self, resume: Resume, outcome: PlanOutcome) -> None:
        loss = self.suspended.resume(resume)
        if loss is not None:
            self._lose(loss, outcome)

    def _lose(self, loss: SnapshotLoss, outcome: PlanOutcome) -> None:
        outcome.lost.append(loss)
        self._failed[loss.key] = loss.message

    def _admit(self, admission: Admission) -> None:
        self._check_not_suspended(admission.key)
        self._on.slots.admit(admission)

    def _fork(self, fork: Fork) -> None:
        self._check_not_suspended(fork.key)
        check_parent(fork, self._failed)
        fork_row(self._on, fork)

    def _check_not_suspended(self, key: RequestKey) -> None:
        if key in self.suspended.store:
            raise ProtocolError(f"request {key} is suspended: it cannot be admitted again")

    def _apply(self, key: RequestKey, outcome: PlanOutcome, action: Callable[[], None]) -> bool:
        """Whether `action` ran to its end; a failed request is reported again instead."""
        done = False
        if key not in self._failed:
            with self._failing([key], outcome):
                action()
                done = True
        elif all(failure.key != key for failure in outcome.failed):
            outcome.failed.append(FailedRow(key, self._failed[key]))
        return done

    @contextmanager
    def _failing(self, keys: Sequence[RequestKey], outcome: PlanOutcome) -> Iterator[None]:
        """Whatever the block raises fails the requests that it was for, and no others."""
        try:
            yield
        except ProtocolError as error:
            message = str(error)
        except Exception as error:
            logger.exception("a step failed for %s", ", ".join(map(str, keys)))
            message = f"the worker failed: {type(error).__name__}: {error}"
        else:
            return
        self._failed.update(dict.fromkeys(keys, message))
        outcome.failed.extend(FailedRow(key, message) for key in keys)

    def _run(
        self, step: Step, lease: ReadbackLease, outcome: PlanOutcome, yields: Callable[[], bool]
    ) -> StepReader:
        batch = self._runnable(step, outcome)
        rows = [self._on.slots.slot(key) for key in batch.keys]
        with self._streams.step(_LANES[type(step)], [row.index for row in rows]) as span:
            outcome.spans.append(span)
            if rows:
                with self._failing(batch.keys, outcome):
                    if isinstance(batch, ResidentBatch):
                        return self._run_ticks(batch, rows, lease, yields)
                    return self._launch(batch, rows, lease, outcome)
        return lambda _: EMPTY_RESULTS[type(step)]

    def _runnable(self, step: Step, outcome: PlanOutcome) -> Step:
        """The step without the rows of failed requests and without those that may not run."""
        rows = [
            row
            for row, key in enumerate(step.keys)
            if self._apply(key, outcome, partial(self._advance, step, row))
        ]
        return step if len(rows) == len(step.keys) else select_rows(step, rows)

    def _advance(self, step: Step, row: int) -> None:
        self._on.slots.slot(step.keys[row]).progress.advance(step, row)

    def _launch(
        self,
        batch: StagedStep,
        rows: Sequence[Slot],
        lease: ReadbackLease,
        outcome: PlanOutcome,
    ) -> StepReader:
        """Enqueue a checked batch; the reader returned makes its result once it has run."""
        slots = [row.index for row in rows]
        match batch:
            case PrefillBatch():
                ends = tuple(row.progress.prefilled for row in rows)
                run_prefill(self._on, batch, slots, [row.progress.position >= 0 for row in rows])
                return lambda _: PrefillResult(batch.keys, ends)
            case PreludeBatch():
                run_prelude(self._on, batch, slots)
                return lambda _: PreludeResult(batch.keys, batch.positions)
            case RecurrentBatch():
                signals = run_recurrent(self._on, batch, slots)
                outcome.held.append(signals)
                with self._streams.copies(Lane.CORE):
                    survivals = lease.put_survivals(signals)
                return lambda failed: read_survivals(batch, survivals.tolist(), failed)
            case CodaBatch():
                kinds = [row.sampling for row in rows]
                counts = [kind.logprobs for kind in kinds]
                sampled = run_coda(self._on, batch, slots, kinds)
                outcome.held.append(sampled)
                with self._streams.copies(Lane.BOUNDARY):
                    tokens = lease.put_tokens(sampled.tokens)
                    values = sampled.logprobs and lease.put_logprobs(sampled.logprobs)
                return lambda failed: read_tokens(
                    batch, tokens.tolist(), read_logprobs(values, counts), failed
                )

    def _run_ticks(
        self,
        batch: ResidentBatch,
        rows: Sequence[Slot],
        lease: ReadbackLease,
        yields: Callable[[], bool],
    ) -> StepReader:
        """In captured graphs where the batch fits some, else eagerly."""
        if self._tick_graphs is not None and self._tick_graphs.fits(batch):
            pending = self._tick_graphs.run(batch, rows, yields, lease)
        else:
            self._settle(whatever=True)
            ticks = ResidentTicks(self._on, batch, rows)
            ticks.run(yields)
            pending = ticks.pending()
        self._ticks.append(pending)
        self._settle(whatever=False)
        return pending.read
