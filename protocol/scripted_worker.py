"""ScriptedWorker: what a worker keeps of each request, and the checks of every row.

The device half is left out: hazards and tokens come from functions. A row that does not follow
from what its request has done so far fails that request alone, until it is released.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from protocol.errors import ProtocolError
from protocol.exit_rule import round_to_float32
from protocol.identity import RequestKey
from protocol.plan import SLOT_TOKEN, CodaBatch, PrefillBatch, PreludeBatch, RecurrentBatch
from protocol.result import (
    CodaResult,
    FailedRow,
    PlanResult,
    PrefillResult,
    PreludeResult,
    RecurrentResult,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.plan import Admission, BlockTable, ExecutionPlan, Grant, Step
    from protocol.profile import WorkerProfile
    from protocol.result import StepResult

Hazard: TypeAlias = Callable[[RequestKey, int, int], float]
Token: TypeAlias = Callable[[RequestKey, int], int]


@dataclass(slots=True)
class _Slot:
    """One request's place. Owner: ScriptedWorker. Mutated only by: its steps.

    `capacity` counts the tokens that its blocks hold, `loops` those of the token at `position`;
    `sampled` says that a token waits for its PRELUDE.
    """

    prompt_length: int
    capacity: int
    prefilled: int = 0
    position: int = -1
    loops: int = 0
    survival: float = 1.0
    token: int = -1
    outputs: int = 0
    sampled: bool = False


class ScriptedWorker:
    """Slots of one scripted worker. Owner: ScriptedExecutor. Mutated only by: run and clear."""

    def __init__(self, profile: WorkerProfile, hazard: Hazard, token: Token) -> None:
        self._profile = profile
        self._hazard = hazard
        self._token = token
        self._slots: dict[RequestKey, _Slot] = {}
        self._failed: dict[RequestKey, str] = {}

    def keys(self) -> tuple[RequestKey, ...]:
        """The requests that hold a slot."""
        return tuple(self._slots)

    def clear(self) -> None:
        """Drop every request."""
        self._slots.clear()
        self._failed.clear()

    def check_size(self, plan: ExecutionPlan) -> None:
        """Raise ProtocolError for a step with more rows or tokens than the worker takes."""
        for step in plan.steps:
            rows, tokens = len(step.keys), len(step.keys)
            if isinstance(step, PrefillBatch):
                tokens = sum(step.counts)
            if rows > self._profile.num_slots or tokens > self._profile.max_step_tokens:
                raise ProtocolError(
                    f"{type(step).__name__} of {rows} rows and {tokens} tokens, at most "
                    f"{self._profile.num_slots} and {self._profile.max_step_tokens}: split it"
                )

    def run(self, plan: ExecutionPlan) -> PlanResult:
        """Releases, admits, grants, then the steps in order."""
        failures: dict[RequestKey, str] = {}
        for key in plan.releases:
            self._slots.pop(key, None)
            self._failed.pop(key, None)
        for admission in plan.admits:
            self._try(admission.key, failures, partial(self._admit, admission))
        for grant in plan.grants:
            self._try(grant.key, failures, partial(self._grant, grant))
        steps = tuple(self._run_step(step, failures) for step in plan.steps)
        return PlanResult(
            epoch=plan.epoch,
            seq=plan.seq,
            steps=steps,
            failed=tuple(FailedRow(key, message) for key, message in failures.items()),
            device_us=(0,) * len(steps),
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
                message = self._failed[key] = f"{key}: {error}"
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
                return PrefillResult(keys, tuple(self._slots[key].prefilled for key in keys))
            case PreludeBatch():
                return PreludeResult(keys, pick(step.positions))
            case RecurrentBatch():
                survivals = tuple(self._slots[key].survival for key in keys)
                return RecurrentResult(keys, pick(step.positions), pick(step.depths), survivals)
            case CodaBatch():
                tokens = tuple(self._slots[key].token for key in keys)
                return CodaResult(keys, pick(step.output_indices), tokens)

    def _advance(self, step: Step, row: int) -> None:
        key = step.keys[row]
        slot = self._slot(key)
        match step:
            case PrefillBatch(_, starts, counts):
                self._prefill(slot, starts[row], starts[row] + counts[row])
            case PreludeBatch(_, positions, tokens):
                self._prelude(slot, positions[row], tokens[row])
            case RecurrentBatch(_, positions, depths):
                self._recurrent(key, slot, positions[row], depths[row])
            case CodaBatch(_, positions, exit_depths, output_indices):
                self._coda(key, slot, positions[row], exit_depths[row], output_indices[row])

    def _prefill(self, slot: _Slot, start: int, end: int) -> None:
        _require(start == slot.prefilled, f"prefill from {start}, {slot.prefilled} are done")
        _require(end <= slot.prompt_length, f"prefill to {end} of {slot.prompt_length} tokens")
        _require(end <= slot.capacity, f"prefill to {end}, room for {slot.capacity}")
        slot.prefilled = end
        if end == slot.prompt_length:
            slot.position, slot.loops = end - 1, self._profile.model.max_loops

    def _prelude(self, slot: _Slot, position: int, token: int) -> None:
        _require(slot.sampled or token != SLOT_TOKEN, "prelude without a sampled token")
        _require(position == slot.position + 1, f"prelude at {position} after {slot.position}")
        _require(position < slot.capacity, f"position {position}, room for {slot.capacity}")
        slot.position, slot.loops, slot.survival, slot.sampled = position, 0, 1.0, False

    def _recurrent(self, key: RequestKey, slot: _Slot, position: int, depth: int) -> None:
        _require(not slot.sampled, "a loop before the prelude of the sampled token")
        _require(position == slot.position, f"loop at {position}, in work is {slot.position}")
        _require(depth == slot.loops, f"loop at depth {depth} after {slot.loops} loops")
        _require(depth < self._profile.planes, f"depth {depth}, {self._profile.planes} planes")
        keeps = round_to_float32(1.0 - self._hazard(key, position, depth))
        slot.survival = round_to_float32(slot.survival * keeps)
        slot.loops += 1

    def _coda(
        self, key: RequestKey, slot: _Slot, position: int, exit_depth: int, output_index: int
    ) -> None:
        _require(not slot.sampled, "a second coda of the same token")
        _require(position == slot.position, f"coda at {position}, in work is {slot.position}")
        _require(exit_depth == slot.loops, f"exit depth {exit_depth} after {slot.loops} loops")
        _require(output_index == slot.outputs, f"output {output_index} after {slot.outputs}")
        slot.token = self._token(key, output_index)
        slot.outputs += 1
        slot.sampled = True

    def _admit(self, item: Admission) -> None:
        if item.key in self._slots:
            raise ProtocolError("admitted twice")
        if len(self._slots) >= self._profile.num_slots:
            raise ProtocolError(f"all {self._profile.num_slots} slots are taken")
        capacity = self._capacity(item.tables)
        self._slots[item.key] = _Slot(prompt_length=len(item.prompt), capacity=capacity)

    def _grant(self, item: Grant) -> None:
        self._slot(item.key).capacity += self._capacity(item.tables)

    def _capacity(self, tables: BlockTable) -> int:
        if len(tables) != self._profile.planes:
            raise ProtocolError(f"table of {len(tables)} planes, not {self._profile.planes}")
        if any(block >= self._profile.num_blocks for plane in tables for block in plane):
            raise ProtocolError(f"a block is beyond the {self._profile.num_blocks} of the pool")
        return len(tables[0]) * self._profile.block_size

    def _slot(self, key: RequestKey) -> _Slot:
        if key not in self._slots:
            raise ProtocolError("never admitted")
        return self._slots[key]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ProtocolError(what)
