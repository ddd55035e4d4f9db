"""Memory on CUDA: what the plan says is what the device shows, and cycles leave nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.loop_batch import OURO_1_4B, random_model
from protocol.config import CacheSettings, ModelSettings, WorkerSettings
from protocol.errors import ConfigError
from protocol.identity import RequestKey
from tests.plans import TIMEOUT, PlanSender, admission, block_table, coda, prefill
from worker.device_memory import DeviceUsers, free_memory
from worker.local_executor import LocalExecutor
from worker.worker import Worker

if TYPE_CHECKING:
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
