"""ScriptedWorker: what a worker keeps of each request, and the checks of every row.

The device half is left out: hazards and tokens come from functions. A row that does not follow
from what its request has done so far fails that request alone, until it is released.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from protocol.errors import ProtocolError
from protocol.exit_rule import round_to_float32
from protocol.plan import NO_LOGPROBS, CodaBatch, PrefillBatch, PreludeBatch, RecurrentBatch
from protocol.resident import ResidentBatch
from protocol.result import (
    CodaResult,
    FailedRow,
    PlanResult,
    PrefillResult,
    PreludeResult,
    RecurrentResult,
    ResidentResult,
    TokenLogprobs,
)
from protocol.row_progress import RowProgress, check_parent, check_table, check_vocabulary
from protocol.scripted_resident import TickingRow, run_ticks
from protocol.snapshot import SnapshotHandle, SnapshotLoss, SnapshotStore, missing_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol.identity import RequestKey
    from protocol.plan import Admission, ExecutionPlan, Fork, Grant, Resume, Step
    from protocol.profile import WorkerProfile
    from protocol.result import StepResult
    from protocol.scripted_resident import Hazard, Token


@dataclass(slots=True)
class _Slot:
    """One request's place. Owner: ScriptedWorker. Mutated only by: its steps."""

    progress: RowProgress
    logprobs: int
    survival: float = 1.0
    token: int = -1


@dataclass(slots=True)
class _Answers:
    """What came of a plan's suspends and resumes. Owner: one run. Mutated only by: it."""

    epoch: int
    suspended: list[SnapshotHandle] = field(default_factory=list)
    lost: list[SnapshotLoss] = field(default_factory=list)


class ScriptedWorker:
    """Slots of one scripted worker. Owner: ScriptedExecutor. Mutated only by: run and clear."""

    def __init__(self, profile: WorkerProfile, hazard: Hazard, token: Token) -> None:
        self._profile = profile
        self._hazard = hazard
        self._token = token
        self._slots: dict[RequestKey, _Slot] = {}
        self._failed: dict[RequestKey, str] = {}
        self._snapshots: SnapshotStore[_Slot] = SnapshotStore(profile.snapshots.limit)

    def keys(self) -> tuple[RequestKey, ...]:
        """The requests that hold a slot."""
        return tuple(self._slots)

    def suspended_keys(self) -> tuple[RequestKey, ...]:
        """The requests that hold a snapshot."""
        return self._snapshots.keys()

    def clear(self) -> None:
        """Drop every request."""
        self._slots.clear()
        self._failed.clear()
        self._snapshots.clear()

    def run(self, plan: ExecutionPlan) -> PlanResult:
        """Releases, suspends, resumes, admits, forks, grants, then the steps in order."""
        failures: dict[RequestKey, str] = {}
        answers = _Answers(plan.epoch)
        for key in plan.releases:
            self._slots.pop(key, None)
            self._failed.pop(key, None)
            self._snapshots.drop(key)
        for key in plan.suspends:
            self._try(key, failures, partial(self._suspend, key, answers))
        for resume in plan.resumes:
            self._try(resume.key, failures, partial(self._resume, resume, answers))
        for admission in plan.admits:
            self._try(admission.key, failures, partial(self._admit, admission))
        for fork in plan.forks:
            self._try(fork.key, failures, partial(self._fork, fork))
        for grant in plan.grants:
            self._try(grant.key, failures, partial(self._grant, grant))
        steps = tuple(self._run_step(step, failures) for step in plan.steps)
        return PlanResult(
            epoch=plan.epoch,
            seq=plan.seq,
            steps=steps,
            failed=tuple(FailedRow(key, message) for key, message in failures.items()),
            device_us=(0,) * len(steps),
            suspended=tuple(answers.suspended),
            lost=tuple(answers.lost),
        )

    def _try(
        self, key: RequestKey, failures: dict[RequestKey, str], action: Callable[[], None]
    ) -> bool:
        """Whether `action` ran; a failed request stays failed until it is released."""
        message = self._failed.get(key)
        if message is None:
            try:
                action()
            except ProtocolError as error:
                message = self._failed[key] = str(error)
        if message is not None:
            failures[key] = message
        return message is None

    def _run_step(self, step: Step, failures: dict[RequestKey, str]) -> StepResult:
        """The step's result, without the rows of requests that failed now or before."""
        rows = [
            row
            for row, key in enumerate(step.keys)
            if self._try(key, failures, partial(self._advance, step, row))
        ]
        keys = tuple(step.keys[row] for row in rows)

        def pick(column: Sequence[int]) -> tuple[int, ...]:
            return tuple(column[row] for row in rows)

        match step:
            case PrefillBatch():
                return PrefillResult(
                    keys, tuple(self._slots[key].progress.prefilled for key in keys)
                )
            case PreludeBatch():
                return PreludeResult(keys, pick(step.positions))
            case RecurrentBatch():
                survivals = tuple(self._slots[key].survival for key in keys)
                return RecurrentResult(keys, pick(step.positions), pick(step.depths), survivals)
            case CodaBatch():
                tokens = tuple(self._slots[key].token for key in keys)
                logprobs = tuple(self._logprobs(self._slots[key]) for key in keys)
                told = logprobs if any(logprobs) else ()
                return CodaResult(keys, pick(step.output_indices), tokens, told)
            case ResidentBatch():
                return self._run_resident(step, [self._slots[key] for key in keys])

    def _run_resident(self, step: ResidentBatch, slots: Sequence[_Slot]) -> ResidentResult:
        rows = [
            TickingRow.of(slot.progress, slot.progress.terms, slot.survival)
            for slot in slots
            if slot.progress.terms is not None
        ]
        live, exited, finished = run_ticks(rows, step, self._hazard, self._token)
        logprobs = []
        for slot, row in zip(slots, rows, strict=True):
            slot.survival = row.survival
            logprobs += [self._logprobs(slot)] * len(row.tokens)
        return ResidentResult(
            keys=tuple(row.progress.key for row in rows),
            tokens=tuple(tuple(row.tokens) for row in rows),
            exit_depths=tuple(tuple(row.exit_depths) for row in rows),
            loops=tuple(row.loops for row in rows),
            states=tuple(row.state for row in rows),
            live=tuple(live),
            exits=tuple(exited),
            finished=tuple(finished),
            logprobs=tuple(logprobs) if any(logprobs) else (),
        )

    def _logprobs(self, slot: _Slot) -> TokenLogprobs | None:
        """The sampled token at -0.5, and the ids from 0 on at -1, -2, ..."""
        if slot.logprobs == NO_LOGPROBS:
            return None
        ids = tuple(range(min(slot.logprobs, self._profile.model.vocab_size)))
        return TokenLogprobs(-0.5, ids, tuple(-1.0 - token for token in ids))

    def _advance(self, step: Step, row: int) -> None:
        key = step.keys[row]
        slot = self._slot(key)
        slot.progress.advance(step, row)
        match step:
            case PreludeBatch():
                slot.survival = 1.0
            case RecurrentBatch(_, positions, depths):
                keeps = round_to_float32(1.0 - self._hazard(key, positions[row], depths[row]))
                slot.survival = round_to_float32(slot.survival * keeps)
            case CodaBatch(_, _, _, output_indices):
                slot.token = self._token(key, output_indices[row])

    def _admit(self, item: Admission) -> None:
        self._check_not_suspended(item.key)
        check_vocabulary(item, self._profile.model.vocab_size)
        progress = RowProgress.begin(item, self._profile.model.max_loops)
        self._place(_Slot(progress, item.logprobs), item)

    def _fork(self, item: Fork) -> None:
        self._check_not_suspended(item.key)
        check_parent(item, self._failed)
        parent = self._slot(item.parent)
        self._check(item)
        progress = parent.progress.forked(item, self._profile.block_size)
        self._place(replace(parent, progress=progress), item)

    def _check_not_suspended(self, key: RequestKey) -> None:
        if key in self._snapshots:
            raise ProtocolError(f"request {key} is suspended: it cannot be admitted again")

    def _suspend(self, key: RequestKey, answers: _Answers) -> None:
        slot = self._slot(key)
        size = self._profile.snapshots.size(slot.progress.prompt_length, slot.progress.written)
        loss = self._snapshots.refuse(key, size)
        if loss is None:
            self._snapshots.put(key, size, slot)
            state = replace(slot, progress=replace(slot.progress, capacity=0))
            checksum = zlib.crc32(repr(state).encode())
            answers.suspended.append(
                SnapshotHandle(key, answers.epoch, size, self._profile.planes, checksum)
            )
        else:
            self._lose(loss, answers)
        del self._slots[key]

    def _resume(self, item: Resume, answers: _Answers) -> None:
        slot = self._snapshots.get(item.key)
        if slot is not None:
            self._place(slot, item)
            self._snapshots.drop(item.key)
        elif item.key in self._slots:
            raise ProtocolError(f"request {item.key} is resumed, but it is not suspended")
        else:
            self._lose(missing_snapshot(item.key), answers)

    def _lose(self, loss: SnapshotLoss, answers: _Answers) -> None:
        answers.lost.append(loss)
        self._failed[loss.key] = loss.message

    def _place(self, slot: _Slot, item: Admission | Resume | Fork) -> None:
        if item.key in self._slots:
            raise ProtocolError(f"request {item.key} is admitted twice")
        if len(self._slots) >= self._profile.num_slots:
            raise ProtocolError(f"request {item.key}: all {len(self._slots)} slots are taken")
        self._check(item)
        progress = slot.progress.moved(item.tables, self._profile.block_size)
        self._slots[item.key] = replace(slot, progress=progress)

    def _grant(self, item: Grant) -> None:
        self._check(item)
        self._slot(item.key).progress.grant(item.tables, self._profile.block_size)

    def _check(self, item: Admission | Fork | Grant | Resume) -> None:
        check_table(item.key, item.tables, self._profile.planes, self._profile.num_blocks)

    def _slot(self, key: RequestKey) -> _Slot:
        if key not in self._slots:
            raise ProtocolError(
                f"request {key} has no slot: it was never admitted, or is suspended"
            )
        return self._slots[key]
