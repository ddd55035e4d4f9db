"""ModelRunner: runs one plan on the device and owns every request's device state."""

from __future__ import annotations

import logging
import time
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
from worker.resident import run_ticks
from worker.snapshot import SuspendedRows
from worker.stages import run_coda, run_prefill, run_prelude, run_recurrent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from protocol.identity import RequestKey
    from protocol.plan import Admission, ExecutionPlan, Fork, Resume, StagedStep, Step
    from protocol.snapshot import SnapshotRoom
    from worker.outcome import StepReader
    from worker.readback import ReadbackLease
    from worker.stages import Device
    from worker.tick_graphs import TickGraphs

logger = logging.getLogger(__name__)


def _never() -> bool:
    return False


class ModelRunner:
    """Owner: Worker. Mutated only by: execute and reset, on the worker's device thread.

    A request whose row is refused, or whose step raises, is failed: every later plan that names
    it skips it and reports it again, until it is released.
    """

    def __init__(
        self,
        device: Device,
        snapshots: SnapshotRoom = NO_SNAPSHOTS,
        tick_graphs: TickGraphs | None = None,
    ) -> None:
        self._on = device
        self._tick_graphs = tick_graphs
        self.suspended = SuspendedRows(device, snapshots)
        self._failed: dict[RequestKey, str] = {}
        self.steps_done = 0
        self.ticks_done = 0

    def __repr__(self) -> str:
        return f"<ModelRunner {self._on.slots!r}, {len(self._failed)} failed>"

    @torch.inference_mode()
    def execute(
        self, plan: ExecutionPlan, lease: ReadbackLease, yields: Callable[[], bool] = _never
    ) -> PlanOutcome:
        """Apply what changes the slots, run the steps, return once the device is done.

        Resident ticks end early once `yields()`.
        """
        outcome = PlanOutcome(plan.epoch, plan.seq)
        slots = self._on.slots
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
        for step in plan.steps:
            start = time.perf_counter()
            outcome.steps.append(self._run(step, lease, outcome, yields))
            if self._on.device.type == "cuda":
                torch.cuda.synchronize(self._on.device)
            outcome.device_us.append(round((time.perf_counter() - start) * 1e6))
            self.steps_done += 1
        return outcome

    def reset(self) -> None:
        """Drop every request: the end of an epoch."""
        self._on.slots.clear()
        self._failed.clear()
        self.suspended.store.clear()

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
        if batch.keys:
            with self._failing(batch.keys, outcome):
                if isinstance(batch, ResidentBatch):
                    return self._run_ticks(batch, outcome, yields)
                return self._launch(batch, lease)
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

    def _launch(self, batch: StagedStep, lease: ReadbackLease) -> StepReader:
        """Enqueue a checked batch; the reader returned makes its result once it has run."""
        live = [self._on.slots.slot(key) for key in batch.keys]
        slots = [slot.index for slot in live]
        match batch:
            case PrefillBatch():
                ends = tuple(slot.progress.prefilled for slot in live)
                run_prefill(self._on, batch, slots, [slot.progress.position >= 0 for slot in live])
                return lambda _: PrefillResult(batch.keys, ends)
            case PreludeBatch():
                run_prelude(self._on, batch, slots)
                return lambda _: PreludeResult(batch.keys, batch.positions)
            case RecurrentBatch():
                survivals = lease.put_survivals(run_recurrent(self._on, batch, slots))
                return lambda failed: read_survivals(batch, survivals.tolist(), failed)
            case CodaBatch():
                kinds = [slot.sampling for slot in live]
                counts = [kind.logprobs for kind in kinds]
                sampled = run_coda(self._on, batch, slots, kinds)
                tokens = lease.put_tokens(sampled.tokens)
                values = sampled.logprobs and lease.put_logprobs(sampled.logprobs)
                return lambda failed: read_tokens(
                    batch, tokens.tolist(), read_logprobs(values, counts), failed
                )

    def _run_ticks(
        self, batch: ResidentBatch, outcome: PlanOutcome, yields: Callable[[], bool]
    ) -> StepReader:
        rows = [self._on.slots.slot(key) for key in batch.keys]
        # Read at once: what a later plan may do with these rows depends on where they stand.
        result = run_ticks(self._on, self._tick_graphs, batch, rows, yields, outcome.failed)
        self.ticks_done += result.ticks
        return lambda _: result
