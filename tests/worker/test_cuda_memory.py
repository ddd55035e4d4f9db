"""Memory on CUDA: what the plan says is what the device shows, and cycles leave nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.loop_batch import OURO_1_4B, random_model
from protocol.config import CacheSettings, ModelSettings, WorkerSettings
from protocol.errors import ConfigError
from protocol.identity import RequestKey
from protocol.plan import SLOT_TOKEN, CodaBatch, PreludeBatch, RecurrentBatch
from tests.plans import TIMEOUT, PlanSender, admission, block_table, coda, prefill
from worker.attention.choice import choose_attention
from worker.device_memory import DeviceUsers, free_memory
from worker.kv_storage import KVStorage
from worker.local_executor import LocalExecutor
from worker.memory import MEASURED
from worker.planning import block_shape, open_slots
from worker.probe import SEGMENT_BYTES, probe_peak
from worker.stages import Device
from worker.worker import Worker, load_settings

if TYPE_CHECKING:
    from protocol.config import AttentionName
    from protocol.plan import Admission
    from protocol.profile import WorkerProfile
    from worker.models.base import LoopedModel

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
MIB = 2**20
A = RequestKey("a", 1)
PROMPT = (1648, 1424, 261, 658, 14)
TINY = WorkerSettings(cache=CacheSettings(kv_bytes=512 * MIB), device="cuda")
CYCLES = 10


def large_model(settings: WorkerSettings, device: torch.device) -> LoopedModel:
    """Ouro-1.4B in its shapes, with random weights."""
    with torch.inference_mode():
        return random_model(OURO_1_4B, torch.bfloat16, device)


def allocated() -> int:
    """Bytes of live tensors, without what libraries keep, once nobody uses a device."""
    users = DeviceUsers()
    users.enter()
    users.leave(CUDA)
    return torch.cuda.memory_allocated(CUDA)


def free() -> int:
    left = free_memory(CUDA)
    assert left is not None
    return left


def run_one_request() -> None:
    with LocalExecutor.open(TINY) as executor:
        sender = PlanSender(executor)
        admit = admission(A, PROMPT, block_table(executor.profile(), 8))
        result = sender.run(prefill(A, 0, 5), coda(A, 4, 4, 0), admits=(admit,))
        executor.synchronize(TIMEOUT)
        assert result.failed == ()


def test_ten_cycles_leave_nothing() -> None:
    torch.zeros(1, device=CUDA)  # the context is there
    before = allocated()
    run_one_request()
    after_one = free()  # kernels and library handles are loaded once, and stay
    for _ in range(CYCLES - 1):
        run_one_request()
    assert torch.cuda.memory_allocated(CUDA) == before
    assert abs(free() - after_one) < 64 * MIB


def test_a_failure_after_the_model_leaves_nothing() -> None:
    torch.zeros(1, device=CUDA)
    before = allocated()
    settings = TINY.model_copy(update={"cache": CacheSettings(num_blocks=10**8)})
    with pytest.raises(ConfigError, match="do not fit on cuda") as caught:
        Worker.open(settings)
    assert torch.cuda.memory_allocated(CUDA) == before
    assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", ["tiny", "large"])
def test_the_plan_is_within_five_percent_of_what_is_allocated(name: str, graphs: bool) -> None:
    settings, load = TINY.model_copy(update={"cuda_graphs": graphs}), None
    if name == "large":
        model = ModelSettings(dtype="bfloat16")
        cache = CacheSettings(kv_bytes=2048 * MIB)
        settings, load = settings.model_copy(update={"model": model, "cache": cache}), large_model
    torch.zeros(1, device=CUDA)
    before, had = allocated(), free()
    worker = Worker.open(settings, load)
    try:
        plan = worker.memory_plan
        taken = had - free()
        # Workspaces of libraries belong to what `graphs` bounds. This worker runs nothing more.
        found = allocated() - before
        print(plan, "found", found, "taken", taken)
        assert found == pytest.approx(plan.allocated, rel=0.05)
        assert taken <= plan.total
    finally:
        worker.close()


def test_the_default_plan_leaves_the_share_that_nobody_asked_for() -> None:
    torch.zeros(1, device=CUDA)
    allocated()
    settings = WorkerSettings(model=ModelSettings(dtype="bfloat16"), device="cuda", num_slots=64)
    had = free()
    worker = Worker.open(settings, large_model)
    try:
        plan, taken = worker.memory_plan, had - free()
        print(plan, "taken", taken)
        assert plan.source == "free cuda memory"
        assert taken <= plan.total <= had
        assert taken == pytest.approx(plan.total, rel=0.05)
    finally:
        worker.close()


LONGEST = 2046
"""Tokens of a prompt that leaves room for one more, in blocks of 16 of a model with 2048."""


def full_admission(profile: WorkerProfile, number: int) -> Admission:
    """A prompt that fills its history, and sampling with all there is."""
    key = RequestKey(f"r{number}", 1)
    blocks = profile.planes * -(-profile.model.max_positions // profile.block_size)
    tables = block_table(profile, profile.model.max_positions, first=number * blocks)
    plain = admission(key, (PROMPT * 410)[:LONGEST], tables, temperature=1.0)
    return replace(
        plain,
        top_p=0.9,
        top_k=50,
        logit_bias=((7, 1.0),),
        repetition_penalty=1.1,
        min_tokens=2,
        banned_ids=(0,),
        logprobs=5,
    )


def run_largest_plans(executor: LocalExecutor) -> None:
    """All slots at their longest: prompts in steps of all tokens, then every row in every step."""
    sender, profile = PlanSender(executor), executor.profile()
    admits = tuple(full_admission(profile, number) for number in range(profile.num_slots))
    keys = tuple(admit.key for admit in admits)
    assert not sender.run(admits=admits).failed
    for key in keys:
        for start in range(0, LONGEST, profile.max_step_tokens):
            count = min(profile.max_step_tokens, LONGEST - start)
            assert not sender.run(prefill(key, start, count)).failed
    depth, rows = profile.model.max_loops, len(keys)

    def all_rows(value: int) -> tuple[int, ...]:
        return (value,) * rows

    result = sender.run(
        CodaBatch(keys, all_rows(LONGEST - 1), all_rows(depth), all_rows(0)),
        PreludeBatch(keys, all_rows(LONGEST), all_rows(SLOT_TOKEN)),
        RecurrentBatch(keys, all_rows(LONGEST), all_rows(0)),
        CodaBatch(keys, all_rows(LONGEST), all_rows(1), all_rows(1)),
    )
    assert not result.failed


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_real_largest_steps_stay_within_the_peak_that_was_measured(name: AttentionName) -> None:
    settings = TINY.model_copy(update={"attention": name, "num_slots": 8, "cuda_graphs": False})
    settings = settings.model_copy(update={"cache": CacheSettings(num_blocks=8 * 4 * 128)})
    torch.zeros(1, device=CUDA)
    worker = Worker.open(settings)
    worker.close()
    planned = worker.memory_plan.footprint
    assert planned.peak_source == MEASURED
    with LocalExecutor.open(settings) as executor:
        free()
        held, had = torch.cuda.memory_allocated(CUDA), torch.cuda.memory_reserved(CUDA)
        torch.cuda.reset_peak_memory_stats(CUDA)
        run_largest_plans(executor)
        found = torch.cuda.max_memory_allocated(CUDA) - held
        reserved = torch.cuda.max_memory_reserved(CUDA) - had
    print(name, "planned", planned.peak, "found", found, "reserved", reserved)
    most = max(found, reserved)
    assert most <= planned.peak < 1.2 * most + 2 * SEGMENT_BYTES


def test_the_probe_leaves_nothing() -> None:
    model = load_settings(TINY, CUDA)
    attention = choose_attention("torch", model, TINY.num_slots, CUDA)

    def make() -> Device:
        storage = KVStorage(1, *block_shape(TINY, model), CUDA)
        slots = open_slots(TINY, model, storage.scratch_block, CUDA)
        return Device(model, slots, storage, attention, CUDA)

    probe = partial(probe_peak, make, TINY.step_tokens("cuda"), 2048)
    before = allocated()
    first = probe()
    assert allocated() == before
    reserved = torch.cuda.memory_reserved(CUDA)
    assert probe() == first > 0
    assert allocated() == before
    assert torch.cuda.memory_reserved(CUDA) == reserved


def test_a_probe_that_does_not_fit_is_refused_and_leaves_nothing() -> None:
    torch.zeros(1, device=CUDA)
    before = allocated()
    settings = TINY.model_copy(update={"attention": "torch", "num_slots": 256})
    total = torch.cuda.mem_get_info(CUDA)[1]
    # Every row's copy of 2048 keys is 2 MiB: 512 MiB for all, and as much for the values.
    torch.cuda.set_per_process_memory_fraction((before + 512 * MIB) / total)
    try:
        with pytest.raises(ConfigError, match="lower max_step_tokens or num_slots") as caught:
            Worker.open(settings)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.memory_allocated(CUDA) == before
    assert caught.value.__cause__ is not None
