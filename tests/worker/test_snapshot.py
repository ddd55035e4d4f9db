"""Snapshots of a real worker: every byte of a request comes back, every byte of memory too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from protocol.config import CacheSettings, ModelSettings, WorkerSettings
from protocol.identity import RequestKey
from protocol.layout import Layout
from protocol.plan import CodaBatch, ExecutionPlan, PreludeBatch, RecurrentBatch, Resume
from protocol.snapshot import LossReason
from tests.courses import Course
from tests.plans import TIMEOUT, PlanSender, admission, block_table, coda, prefill, prelude
from worker.local_executor import LocalExecutor
from worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from protocol.plan import Step
    from protocol.result import PlanResult, StepResult

A, B = RequestKey("a", 1), RequestKey("b", 2)
PROMPT = (1648, 1424, 261, 658, 14)
COURSE = Course(A, PROMPT, (2, 1, 3))
SETTINGS = WorkerSettings(
    cache=CacheSettings(block_size=4, num_blocks=64), device="cpu", num_slots=3, num_threads=1
)


class Bench:
    """A real worker without its thread, plan by plan. Owner: one test, which alone uses it."""

    def __init__(self, settings: WorkerSettings = SETTINGS) -> None:
        self.worker = Worker.open(settings)
        self.seq = 0

    @property
    def used(self) -> int:
        return self.worker.runner.suspended.store.used

    def run(
        self,
        *steps: Step,
        admit: int | None = None,
        suspends: tuple[RequestKey, ...] = (),
        resume: int | None = None,
        releases: tuple[RequestKey, ...] = (),
    ) -> PlanResult:
        self.seq += 1
        profile = self.worker.profile
        plan = ExecutionPlan(
            1,
            self.seq,
            releases=releases,
            admits=() if admit is None else (COURSE.admit(profile, admit),),
            steps=steps,
            suspends=suspends,
            resumes=() if resume is None else (COURSE.resume(profile, resume),),
        )
        lease = self.worker.readback.lease()
        result = self.worker.runner.execute(plan, lease).read()
        self.worker.readback.give_back(lease)
        return result

    def kv(self, area: int, tokens: int) -> Tensor:
        """[planes, tokens, ...] of the course's first tokens, read from its blocks."""
        pages, size = self.worker.storage.pages, self.worker.profile.block_size
        table = COURSE.resume(self.worker.profile, area).tables
        return torch.stack(
            [
                torch.stack([pages[plane[t // size], ..., t % size, :] for t in range(tokens)])
                for plane in table
            ]
        )


@pytest.fixture
def bench() -> Iterator[Bench]:
    opened = Bench()
    yield opened
    opened.worker.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_comes_back_bit_for_bit_and_nothing_else_is_written(dtype: str) -> None:
    model = ModelSettings.model_validate({"dtype": dtype})
    bench = Bench(SETTINGS.model_copy(update={"model": model}))
    bench.run(*COURSE.steps(bench.worker.profile)[:6], admit=1)
    before = bench.kv(1, 6)
    assert before.abs().sum() > 0
    bench.run(suspends=(A,))
    assert bench.used > 0
    pages = bench.worker.storage.pages
    pages.fill_(7.0)
    assert not bench.run(resume=3).failed
    after = bench.kv(3, 6)
    # Two loops of the sixth token have run: its deeper planes are nobody's yet.
    assert torch.equal(after[:, :5], before[:, :5])
    assert torch.equal(after[:2, 5], before[:2, 5])
    assert not after[2:, 5].any()
    written = torch.full_like(pages, 7.0)
    size = bench.worker.profile.block_size
    for plane in COURSE.resume(bench.worker.profile, 3).tables:
        for token in range(6):
            place = plane[token // size], slice(None), slice(None), slice(None), token % size
            written[place] = pages[place]
    assert torch.equal(pages, written)
    assert bench.used == 0
    bench.worker.close()


def test_a_finalized_token_keeps_every_plane(bench: Bench) -> None:
    steps = COURSE.steps(bench.worker.profile)
    bench.run(*steps[:7], admit=0)
    before = bench.kv(0, 6)
    assert bool(before.flatten(2).any(2).all())
    bench.run(suspends=(A,))
    bench.worker.storage.pages.fill_(7.0)
    bench.run(resume=1)
    assert torch.equal(bench.kv(1, 6), before)


@pytest.mark.parametrize("part", ["kv", "hidden", "token", "prompt"])
def test_a_changed_snapshot_is_lost_and_its_memory_free(bench: Bench, part: str) -> None:
    bench.run(*COURSE.steps(bench.worker.profile)[:3], admit=0)
    bench.run(suspends=(A,))
    snapshot = bench.worker.runner.suspended.store.get(A)
    assert snapshot is not None
    with torch.inference_mode():
        values = snapshot.kv if part == "kv" else getattr(snapshot.record, part)
        values.view(-1)[0] += 1
    answer = bench.run(resume=1)
    assert [(loss.key, loss.reason) for loss in answer.lost] == [(A, LossReason.CORRUPT)]
    assert (bench.used, len(bench.worker.runner.suspended.store.keys())) == (0, 0)
    assert not bench.run(COURSE.steps(bench.worker.profile)[0], admit=0, releases=(A,)).failed


def test_the_profile_tells_what_a_snapshot_takes(bench: Bench) -> None:
    profile = bench.worker.profile
    bench.run(*COURSE.steps(profile)[:3], admit=0)
    (handle,) = bench.run(suspends=(A,)).suspended
    snapshot = bench.worker.runner.suspended.store.get(A)
    assert snapshot is not None
    assert snapshot.num_bytes == handle.bytes == bench.used == profile.snapshots.size(5, 5)
    assert repr(bench.worker.runner.suspended) == (
        f"<SuspendedRows <SnapshotStore 1 kept, {bench.used} of {256 * 2**20} bytes>>"
    )


def test_release_reset_and_close_give_the_memory_back(bench: Bench) -> None:
    def suspend_again() -> None:
        assert not bench.run(prefill(A, 0, 5), admit=0).failed
        assert bench.run(suspends=(A,)).suspended
        assert bench.used > 0

    suspend_again()
    bench.run(releases=(A,))
    assert bench.used == 0
    suspend_again()
    bench.worker.runner.reset()
    assert bench.used == 0
    suspend_again()
    store = bench.worker.runner.suspended.store
    bench.worker.close()
    assert (store.used, store.keys()) == (0, ())


def test_a_new_epoch_has_no_snapshot_of_the_last() -> None:
    with LocalExecutor.open(SETTINGS) as executor:
        profile = executor.profile()
        sender = PlanSender(executor)
        sender.run(prefill(A, 0, 5), admits=(COURSE.admit(profile, 0),))
        (handle,) = sender.run(suspends=(A,)).suspended
        assert handle.epoch == 1
        executor.begin_epoch(2, TIMEOUT)
        answer = PlanSender(executor).run(resumes=(COURSE.resume(profile, 0),))
        assert [loss.reason for loss in answer.lost] == [LossReason.MISSING]


def test_a_worker_without_room_keeps_nothing() -> None:
    with LocalExecutor.open(SETTINGS.model_copy(update={"snapshot_bytes": 0})) as executor:
        sender = PlanSender(executor)
        sender.run(admits=(COURSE.admit(executor.profile(), 0),))
        answer = sender.run(suspends=(A,))
        assert [loss.reason for loss in answer.lost] == [LossReason.OVER_BOUND]


OUTPUTS = 7
"""Tokens of each request of a run; the exit depths go round 1 to 4."""


def chained(keys: tuple[RequestKey, ...], full: int) -> list[tuple[Step, ...]]:
    """The plans of a run as the scheduler makes them: CODA, PRELUDE and first loop together."""
    rows, last = len(keys), len(PROMPT) - 1
    plans: list[tuple[Step, ...]] = [tuple(prefill(key, 0, len(PROMPT)) for key in keys)]
    depth = full
    for output in range(OUTPUTS):
        position = last + output
        plans.append(
            (
                CodaBatch(keys, (position,) * rows, (depth,) * rows, (output,) * rows),
                PreludeBatch(keys, (position + 1,) * rows, (-1,) * rows),
                RecurrentBatch(keys, (position + 1,) * rows, (0,) * rows),
            )
        )
        depth = output % full + 1
        plans += [
            (RecurrentBatch(keys, (position + 1,) * rows, (loop,) * rows),)
            for loop in range(1, depth)
        ]
    return plans


def run_all(sender: PlanSender, temperature: float, *, moving: bool) -> list[StepResult]:
    """Two requests side by side; with `moving`, A leaves the worker after every plan."""
    profile = sender.executor.profile()
    areas = [block_table(profile, 12, first=12 * area) for area in range(5)]
    sender.run(
        admits=(
            admission(A, PROMPT, areas[0], temperature),
            admission(B, PROMPT[::-1], areas[1], temperature),
        )
    )
    answers: list[StepResult] = []
    for turn, steps in enumerate(chained((A, B), profile.model.max_loops)):
        result = sender.run(*steps)
        assert not result.failed
        answers += result.steps
        if moving:
            assert sender.run(suspends=(A,)).suspended
            guest = RequestKey("guest", turn + 1)
            taken, free = (0, 2) if turn % 2 == 0 else (2, 0)
            # A guest takes the slot and all the blocks that were left.
            sender.run(
                prefill(guest, 0, 11),
                coda(guest, 10, profile.model.max_loops, 0),
                prelude(guest, 11),
                admits=(admission(guest, (turn + 9,) * 11, areas[taken]),),
            )
            back = sender.run(releases=(guest,), resumes=(Resume(A, areas[free]),))
            assert (back.failed, back.lost) == ((), ())
    sender.run(releases=(A, B))
    return answers


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_run_moved_after_every_plan_equals_one_left_alone(
    temperature: float, layout: Layout
) -> None:
    cache = SETTINGS.cache.model_copy(update={"layout": layout})
    with LocalExecutor.open(SETTINGS.model_copy(update={"cache": cache})) as executor:
        sender = PlanSender(executor)
        alone = run_all(sender, temperature, moving=False)
        assert run_all(sender, temperature, moving=True) == alone
