"""What a request has shown and what blocks would hold: the state machine's own account of both."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import add
from typing import TYPE_CHECKING

from protocol.exit_rule import FinishReason, exits, round_to_float32, survival_bound
from protocol.identity import RequestKey
from protocol.plan import CodaBatch, PrefillBatch, RecurrentBatch
from protocol.result import ResidentResult
from protocol.rng import RngKey
from protocol.scripted_executor import scripted_hazard, scripted_token
from tests.scheduler.bench import make_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from protocol.plan import Admission, ExecutionPlan, Fork, Resume
    from protocol.result import PlanResult
    from protocol.sampling import SamplingParams
    from scheduler.output import RequestOutput

MODEL = make_model()
_TOKEN = scripted_token(MODEL)


def speaker(key: RequestKey) -> RequestKey:
    """Whose script a request follows: choices of one request do not say the same."""
    return RequestKey(f"{key.request_id}{key.generation % 3}", 1)


def token(key: RequestKey, output_index: int) -> int:
    """The sampled token of an output."""
    return _TOKEN(speaker(key), output_index)


def hazard(key: RequestKey, position: int, depth: int) -> float:
    """The gate after the loop at a 0-based depth."""
    return scripted_hazard(speaker(key), position, depth)


@dataclass(slots=True)
class Life:
    """What one request has shown so far. Owner: the machine. Mutated only by: its `see`."""

    key: RequestKey
    prompt: tuple[int, ...]
    tenant: str
    params: SamplingParams
    delayed: bool = False
    count: int = 0
    reason: FinishReason | None = None
    choice: int = 0

    @property
    def first(self) -> RequestKey:
        """The choice 0 of the same request."""
        return RequestKey(self.key.request_id, self.key.generation - self.choice)

    def see(self, output: RequestOutput) -> None:
        """Check an output against the script and the exit rule."""
        assert self.reason is None, "an output after the end"
        assert output.start_index == self.count, "a gap"
        assert output.tokens or output.finish_reason
        assert output.choice == self.choice
        for sampled, depth in zip(output.tokens, output.exit_depths, strict=True):
            assert sampled == token(self.key, self.count)
            assert depth == self.exit_depth(self.count)
            self.count += 1
        self.reason = output.finish_reason
        assert (output.error is not None) is (self.reason is FinishReason.ERROR)
        assert self.count <= self.params.max_tokens
        if self.reason is FinishReason.LENGTH:
            assert self.count == self.params.max_tokens
        stopped = bool(output.tokens) and output.tokens[-1] in self.params.stop_token_ids
        assert stopped is (self.reason is FinishReason.STOP)

    def exit_depth(self, output_index: int) -> int:
        """The exit depth of an output, one loop after the other."""
        if output_index == 0:
            return MODEL.max_loops
        threshold = self.params.exit_threshold
        bound = survival_bound(MODEL.exit_threshold if threshold is None else threshold)
        max_loops = self.params.max_loops or MODEL.max_loops
        position, survival = len(self.prompt) + output_index - 1, 1.0
        if self.params.forced_depths is not None:
            return self.params.forced_depths[output_index]
        due = False
        for loops in range(1, max_loops + 1):
            keeps = round_to_float32(1.0 - hazard(self.key, position, loops - 1))
            survival = round_to_float32(survival * keeps)
            least = self.params.min_loops
            leaves = exits(loops, survival, min_loops=least, max_loops=max_loops, bound=bound)
            if due or (leaves and not (self.delayed and loops < max_loops)):
                return loops
            due = leaves
        raise AssertionError("no exit")


@dataclass(slots=True)
class Storage:
    """What one worker's blocks would hold. Owner: the machine. Mutated only by: run and drop.

    A cell is a token's place in a block; a prompt's KV is named by its tenant and all tokens up to
    its own, anything else by its request and position.
    """

    block_size: int
    admitted: dict[RequestKey, Admission] = field(default_factory=dict)
    cells: dict[tuple[int, int], object] = field(default_factory=dict)
    prefilled: dict[RequestKey, int] = field(default_factory=dict)
    asleep: dict[RequestKey, tuple[Admission, int]] = field(default_factory=dict)
    outputs: dict[RequestKey, int] = field(default_factory=dict)

    def drop(self, keys: Iterable[RequestKey]) -> None:
        for key in keys:
            if self.asleep.pop(key, None) is None:
                del self.admitted[key], self.prefilled[key]

    def suspend(self, keys: Iterable[RequestKey]) -> None:
        for key in keys:
            self.asleep[key] = self.admitted.pop(key), self.prefilled.pop(key)

    def resume(self, resume: Resume, life: Life) -> None:
        item, prefilled = self.asleep.pop(resume.key)
        self.admitted[resume.key] = replace(item, tables=resume.tables)
        self.prefilled[resume.key] = prefilled
        for position in range(prefilled):
            for table in resume.tables:
                block = table[position // self.block_size]
                self.cells[block, position % self.block_size] = known(life, position)

    def fork(self, fork: Fork, life: Life) -> None:
        parent = self.admitted[fork.parent]
        assert self.prefilled[fork.parent] == len(parent.prompt), "a fork before the prompt"
        assert fork.rng == RngKey(parent.rng.seed, life.choice)
        self.admitted[fork.key] = replace(parent, key=fork.key, tables=fork.tables)
        self.prefilled[fork.key] = len(parent.prompt)
        for theirs, own in zip(parent.tables, fork.tables, strict=True):
            for position in range(len(parent.prompt)):
                page, offset = position // self.block_size, position % self.block_size
                self.cells[own[page], offset] = self.cells[theirs[page], offset]

    def run(
        self, plan: ExecutionPlan, result: PlanResult, lives: Mapping[RequestKey, Life]
    ) -> None:
        """Take the plan's admissions and writes, and check what it may read and write.

        Where resident rows have written is told by their result alone.
        """
        for resume in plan.resumes:
            self.resume(resume, lives[resume.key])
        for item in plan.admits:
            self.admitted[item.key] = item
            self.prefilled[item.key] = item.prefilled
            assert item.prefilled < len(item.prompt)
        for fork in plan.forks:
            self.fork(fork, lives[fork.key])
        for grant in plan.grants:
            item = self.admitted[grant.key]
            tables = tuple(map(add, item.tables, grant.tables))
            self.admitted[grant.key] = replace(item, tables=tables)
        holders = self.holders()
        for key, plane, position, full in (*writes(plan), *self.ticked(result)):
            block = self.admitted[key].tables[plane][position // self.block_size]
            assert holders[block] == [key], "a block with two writers"
            value = known(lives[key], position) if full else (key, position)
            self.cells[block, position % self.block_size] = value
            if full:
                self.prefilled[key] = max(self.prefilled[key], position + 1)
        for key, item in self.admitted.items():
            for position in range(self.prefilled[key]):
                place = position // self.block_size, position % self.block_size
                for table in item.tables:
                    cell = self.cells.get((table[place[0]], place[1]))
                    assert cell == known(lives[key], position), f"{key} reads other KV"

    def ticked(self, result: PlanResult) -> Iterator[tuple[RequestKey, int, int, bool]]:
        """What resident rows have written, from where their last plan left them."""
        for step in result.steps:
            if not isinstance(step, ResidentResult):
                continue
            for key, tokens, loops in zip(step.keys, step.tokens, step.loops, strict=True):
                start = self.outputs.get(key, 0)
                self.outputs[key] = end = start + len(tokens)
                base = len(self.admitted[key].prompt)
                # Output i sits at base + i; the last one has KV once it has run a loop.
                for position in range(base + max(start - 1, 0), base + end - (loops == 0)):
                    yield from ((key, plane, position, False) for plane in range(MODEL.max_loops))

    def holders(self) -> dict[int, list[RequestKey]]:
        """The live tables that each block is in."""
        holders: dict[int, list[RequestKey]] = {}
        for key, item in self.admitted.items():
            for block in (block for table in item.tables for block in table):
                holders.setdefault(block, []).append(key)
        return holders


def known(life: Life, position: int) -> object:
    """The name of a prompt token's full-depth KV."""
    return life.tenant, life.prompt[: position + 1]


def writes(plan: ExecutionPlan) -> Iterator[tuple[RequestKey, int, int, bool]]:
    """Every (request, plane, position) that a plan writes, and whether it is prompt KV."""
    for step in plan.steps:
        match step:
            case PrefillBatch(keys, starts, counts):
                for key, start, count in zip(keys, starts, counts, strict=True):
                    for plane in range(MODEL.max_loops):
                        yield from ((key, plane, p, True) for p in range(start, start + count))
            case RecurrentBatch(keys, positions, depths):
                for key, position, depth in zip(keys, positions, depths, strict=True):
                    yield key, depth, position, False
            case CodaBatch(keys, positions, exit_depths, _):
                for key, position, depth in zip(keys, positions, exit_depths, strict=True):
                    yield from ((key, p, position, False) for p in range(depth, MODEL.max_loops))
