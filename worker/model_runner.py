"""ModelRunner: runs one plan on the device and owns every request's device state."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeVar

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
from worker.prompt_passes import PromptPasses, no_passes
from worker.snapshot import SuspendedRows
from worker.stages import (
    num_passes,
    prefill_passes,
    run_coda,
    run_prefill,
    run_prelude,
    run_recurrent,
)
from worker.streams import Lane, Parts, Without, open_streams
from worker.tick_runner import TickRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from protocol.identity import RequestKey
    from protocol.plan import Admission, ExecutionPlan, Fork, Resume, StagedStep, Step
    from protocol.snapshot import SnapshotRoom
    from worker.outcome import StepReader
    from worker.readback import ReadbackLease
    from worker.slot_table import Slot
    from worker.stages import Device
    from worker.streams import Span, Streams
    from worker.tick_graphs import TickGraphs

logger = logging.getLogger(__name__)


_Step = TypeVar("_Step", bound="Step")

_LANES: dict[type[StagedStep], Lane] = {
    PrefillBatch: Lane.CORE,
    PreludeBatch: Lane.BOUNDARY,
    RecurrentBatch: Lane.CORE,
    CodaBatch: Lane.BOUNDARY,
}
"""Where each step runs; ticks run on the core lane."""


def _never() -> bool:
    return False


def _nothing(step: Step) -> StepReader:
    return lambda _: EMPTY_RESULTS[type(step)]


def _shares_ticks(step: Step | None) -> bool:
    """Whether prompts right before a step run between its ticks."""
    return isinstance(step, ResidentBatch) and step.prompt_ticks > 1


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
        self.suspended = SuspendedRows(device, snapshots)
        self._failed: dict[RequestKey, str] = {}
        self._streams = streams or open_streams(device.device, 1, device.slots.trash)
        self._ticks = TickRunner(device, tick_graphs)
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
        self._ticks.settle(whatever=bool(plan.suspends or plan.forks))
        if plan.changes_slots:
            self._change(plan, outcome)
        prompts: PrefillBatch | None = None
        for step, behind in zip_longest(plan.steps, plan.steps[1:]):
            if isinstance(step, ResidentBatch):
                self._run_ticks(step, prompts, lease, outcome, yields)
            elif isinstance(step, PrefillBatch) and _shares_ticks(behind):
                prompts = step
            else:
                self._run(step, lease, outcome)
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

    def _run(self, step: StagedStep, lease: ReadbackLease, outcome: PlanOutcome) -> None:
        batch = self._runnable(step, outcome)
        rows = [self._on.slots.slot(key) for key in batch.keys]
        with self._streams.step(_LANES[type(step)], [row.index for row in rows]) as span:
            read = _nothing(step)
            if rows:
                with self._failing(batch.keys, outcome):
                    read = self._launch(batch, rows, lease, outcome)
        self._add(outcome, read, span)

    def _add(self, outcome: PlanOutcome, read: StepReader, span: Span) -> None:
        outcome.steps.append(read)
        outcome.spans.append(span)
        if not self._streams.asynchronous:
            self.steps_done += 1

    def _run_ticks(
        self,
        step: ResidentBatch,
        prompts: PrefillBatch | None,
        lease: ReadbackLease,
        outcome: PlanOutcome,
        yields: Callable[[], bool],
    ) -> None:
        """Resident ticks, and between the first ones the prompts of the plan, if there are any."""
        passes, parts = no_passes(), Parts()
        chunks = self._runnable(prompts, outcome) if prompts is not None else None
        batch = self._runnable(step, outcome)
        keys = [*batch.keys, *(chunks.keys if chunks is not None else ())]
        with self._streams.step(Lane.CORE, self._on.slots.indices(keys)) as span:
            if chunks is not None:
                passes = self._passes(chunks, step.prompt_ticks, parts, outcome)
            read = _nothing(step)
            if batch.keys:
                with self._failing(batch.keys, outcome):
                    read = self._ticks.run(batch, lease, yields, passes)
            passes.rest()
        if chunks is not None:
            done = PrefillResult(chunks.keys, self._prefilled(chunks.keys))
            nothing = _nothing(chunks)
            self._add(outcome, nothing if passes.failed else lambda _: done, parts)
        self._add(outcome, read, Without(span, parts))

    def _passes(
        self, batch: PrefillBatch, ticks: int, parts: Parts, outcome: PlanOutcome
    ) -> PromptPasses:
        """The passes of a checked batch, spread over so many ticks."""
        if not batch.keys:
            return no_passes()
        rows = [self._on.slots.slot(key) for key in batch.keys]
        slots, last = [row.index for row in rows], [row.progress.position >= 0 for row in rows]

        def run(work: Callable[[], None]) -> bool:
            with self._failing(batch.keys, outcome), self._streams.piece() as piece:
                parts.pieces.append(piece)
                work()
                return True
            return False

        passes = prefill_passes(self._on, batch, slots, last)
        return PromptPasses(passes, num_passes(self._on, batch), ticks, run)

    def _prefilled(self, keys: Sequence[RequestKey]) -> tuple[int, ...]:
        return tuple(self._on.slots.slot(key).progress.prefilled for key in keys)

    def _runnable(self, step: _Step, outcome: PlanOutcome) -> _Step:
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
                ends = self._prefilled(batch.keys)
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
