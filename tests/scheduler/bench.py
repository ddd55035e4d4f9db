"""What the scheduler's tests share: profiles, scripts, plans as text, and an engine at its work."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from protocol.config import SchedulerSettings
from protocol.layout import Layout
from protocol.plan import CodaBatch, PrefillBatch, PreludeBatch, RecurrentBatch
from protocol.profile import ModelProfile, WorkerProfile
from protocol.resident import ResidentBatch
from protocol.sampling import SamplingParams
from protocol.scripted_executor import ScriptedExecutor
from protocol.snapshot import NO_SNAPSHOTS, SnapshotRoom
from scheduler.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from protocol.exit_rule import FinishReason
    from protocol.identity import RequestKey
    from protocol.plan import ExecutionPlan, Step
    from protocol.result import PlanResult
    from protocol.scripted_resident import Hazard, Token
    from scheduler.output import RequestOutput

EOS = 0
VOCAB = 64


def make_model(fingerprint: str = "toy", eos_ids: tuple[int, ...] = (EOS,)) -> ModelProfile:
    """A model of 4 loops whose tokens leave at threshold 0.9 if nothing else is asked."""
    return ModelProfile("toy", fingerprint, VOCAB, 64, 4, eos_ids, 0.9)


def make_profile(
    *,
    model: ModelProfile | None = None,
    num_slots: int = 4,
    num_blocks: int = 256,
    block_size: int = 4,
    layout: Layout = Layout.LAST_EXITED,
    max_step_tokens: int = 32,
    snapshots: SnapshotRoom = NO_SNAPSHOTS,
    max_ticks: int = 0,
) -> WorkerProfile:
    """A small CPU worker, without resident ticks unless it is given some."""
    model = model or make_model()
    return WorkerProfile(
        model,
        "cpu",
        "float32",
        num_slots,
        num_blocks,
        block_size,
        layout.planes(model.max_loops),
        max_step_tokens,
        layout,
        snapshots,
        max_ticks,
    )


def make_engine(*profiles: WorkerProfile, **settings: object) -> Engine:
    """An engine with lane-0, lane-1, ... over `profiles`; one default lane without any.

    `chunk` and `prefill` are short for the prefill limits, `caching` and `window` for those of the
    prefix cache; the rest is as in SchedulerSettings.
    """
    limits = {
        "prefill_chunk_size": settings.pop("chunk", 8),
        "max_prefill_tokens": settings.pop("prefill", 16),
        "max_waiting": 64,
        "prefix_caching": settings.pop("caching", True),
        "affinity_window": settings.pop("window", 256),
    }
    engine = Engine(SchedulerSettings.model_validate(limits | settings))
    for index, profile in enumerate(profiles or (make_profile(),)):
        engine.add_lane(f"lane-{index}", 1, profile)
    return engine


def exit_after(depths: Mapping[int, int]) -> Hazard:
    """Gates that fire at these exit depths by position, and nowhere else."""

    def hazard(key: RequestKey, position: int, depth: int) -> float:
        return 1.0 if depth + 1 >= depths.get(position, 1000) else 0.0

    return hazard


def never(key: RequestKey, position: int, depth: int) -> float:
    """Gates that never fire."""
    return 0.0


def counting(key: RequestKey, output_index: int) -> int:
    """Tokens 1, 2, 3, ..."""
    return output_index + 1


def fixed(tokens: Sequence[int]) -> Token:
    """These tokens, whoever asks."""
    return lambda key, output_index: tokens[output_index]


class Bench:
    """An engine and scripted workers, driven one plan at a time. Owner: one test."""

    def __init__(
        self,
        *profiles: WorkerProfile,
        hazard: Hazard | None = never,
        token: Token | None = counting,
        **settings: object,
    ) -> None:
        profiles = profiles or (make_profile(),)
        self.engine = make_engine(*profiles, **settings)
        self.executors = {
            lane: ScriptedExecutor(profile, 1, hazard=hazard, token=token)
            for lane, profile in zip(self.engine.lanes, profiles, strict=True)
        }
        self.now = 0.0
        self.plans: list[ExecutionPlan] = []
        self.outputs: list[RequestOutput] = []
        self.flying: dict[str, deque[PlanResult]] = {lane: deque() for lane in self.executors}

    def add(self, request_id: str, prompt: int = 1, **params: object) -> RequestKey:
        """A request of `prompt` tokens 1, 2, 3, ... with seed 7."""
        tokens = [1 + index % (VOCAB - 1) for index in range(prompt)]
        return self.engine.add(request_id, tokens, SamplingParams.model_validate(params), 7)

    def send(
        self, request_id: str, prompt: Sequence[int], tenant: str = "", **params: object
    ) -> RequestKey:
        """A request of exactly these tokens, with seed 7."""
        checked = SamplingParams.model_validate(params)
        return self.engine.add(request_id, prompt, checked, 7, tenant=tenant)

    def plan(self) -> list[tuple[str, ExecutionPlan]]:
        """The engine's next plans, recorded."""
        self.now += 1.0
        plans = self.engine.plan(self.now)
        self.plans += [plan for _, plan in plans]
        return plans

    def run(self, lane: str, plan: ExecutionPlan) -> PlanResult:
        """What the lane's worker answers."""
        submission = self.executors[lane].submit(plan)
        result = submission.collect(0.0)
        submission.retire()
        return result

    def apply(self, lane: str, result: PlanResult) -> list[RequestOutput]:
        """Apply a result; the outputs are recorded too."""
        outputs = self.engine.apply(lane, result, self.now)
        self.outputs += outputs
        return outputs

    def send_plans(self) -> list[str]:
        """Plan, and have it run; the answers stay in flight."""
        plans = self.plan()
        for lane, plan in plans:
            self.flying[lane].append(self.run(lane, plan))
        return [trace(plan) for _, plan in plans]

    def land(self) -> list[RequestOutput]:
        """Apply the oldest answer in flight of every lane."""
        outputs = []
        for lane, results in self.flying.items():
            if results:
                outputs += self.apply(lane, results.popleft())
        return outputs

    def step(self) -> list[RequestOutput]:
        """Plan, run what is planned, and apply the oldest answer of every lane."""
        self.send_plans()
        return self.land()

    def finish(self, limit: int = 500) -> list[RequestOutput]:
        """Step until there is no work, at most `limit` times."""
        for _ in range(limit):
            if not self.engine.has_work():
                return self.outputs
            self.step()
        raise AssertionError(f"work is left after {limit} steps: {self.engine.stats()}")

    def traces(self) -> list[str]:
        """Every plan so far as text."""
        return [trace(plan) for plan in self.plans]


def trace(plan: ExecutionPlan) -> str:
    """A plan as text, in the order in which it is applied.

    `-id` release, `~id` suspend, `^id` resume, `+id` admission, `*id2` fork of choice 2, then
    PREFILL a[0:4), PRELUDE a@5, LOOP a@5d0 (0-based depth), CODA a@5x2#1 (exit depth, output),
    TICKS a b x16 (ticks at most).
    """
    parts = [f"-{key.request_id}" for key in plan.releases]
    parts += [f"~{key.request_id}" for key in plan.suspends]
    parts += [f"^{item.key.request_id}" for item in plan.resumes]
    parts += [f"+{item.key.request_id}" for item in plan.admits]
    parts += [f"*{item.key.request_id}{item.rng.stream}" for item in plan.forks]
    return " | ".join(parts + [_step(step) for step in plan.steps])


def _step(step: Step) -> str:
    ids = [key.request_id for key in step.keys]
    match step:
        case PrefillBatch(_, starts, counts):
            rows: Iterable[str] = (
                f"{i}[{s}:{s + c})" for i, s, c in zip(ids, starts, counts, strict=True)
            )
            return "PREFILL " + " ".join(rows)
        case PreludeBatch(_, positions, _):
            return "PRELUDE " + " ".join(f"{i}@{p}" for i, p in zip(ids, positions, strict=True))
        case RecurrentBatch(_, positions, depths):
            rows = (f"{i}@{p}d{d}" for i, p, d in zip(ids, positions, depths, strict=True))
            return "LOOP " + " ".join(rows)
        case CodaBatch(_, positions, exits, indices):
            rows = (
                f"{i}@{p}x{x}#{o}"
                for i, p, x, o in zip(ids, positions, exits, indices, strict=True)
            )
            return "CODA " + " ".join(rows)
        case ResidentBatch(_, ticks, yields):
            return f"TICKS {' '.join(ids)} x{ticks}{' yields' if yields else ''}"


def texts(outputs: Iterable[RequestOutput]) -> dict[str, tuple[list[int], list[int]]]:
    """All tokens and exit depths by request id; checks that they follow without a gap."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    for output in outputs:
        tokens, depths = found.setdefault(output.key.request_id, ([], []))
        assert output.start_index == len(tokens)
        tokens += output.tokens
        depths += output.exit_depths
    return found


def reasons(outputs: Iterable[RequestOutput]) -> dict[str, FinishReason]:
    """Why each ended request ended."""
    return {o.key.request_id: o.finish_reason for o in outputs if o.finish_reason is not None}
