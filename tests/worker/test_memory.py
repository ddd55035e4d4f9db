"""How many KV blocks a worker takes, and the refusal of storage that holds nothing."""

from __future__ import annotations

import pytest
import torch

from protocol.config import CacheSettings
from protocol.errors import ConfigError
from worker.memory import CPU_KV_BYTES, MemoryPlan, plan_memory
from worker.worker import open_storage, resolve_device

CPU = torch.device("cpu")
BLOCK = 131_072


def test_bytes_are_rounded_down_and_one_block_is_scratch() -> None:
    plan = plan_memory(CacheSettings(kv_bytes=8 * BLOCK + 5), BLOCK, 4, 10_000, CPU)
    assert plan == MemoryPlan(7, BLOCK, "kv_bytes")


def test_an_explicit_count_is_taken_as_it_is() -> None:
    plan = plan_memory(CacheSettings(num_blocks=20_000), BLOCK, 4, 10_000, CPU)
    assert plan == MemoryPlan(20_000, BLOCK, "num_blocks")


def test_the_cpu_default_is_capped_by_what_the_slots_can_fill() -> None:
    assert plan_memory(CacheSettings(), BLOCK, 4, 100, CPU).num_blocks == 100
    whole = plan_memory(CacheSettings(), BLOCK, 4, 10**9, CPU)
    assert whole == MemoryPlan(CPU_KV_BYTES // BLOCK - 1, BLOCK, "cpu default")


@pytest.mark.parametrize(
    ("cache", "mend"),
    [
        (CacheSettings(num_blocks=3), "num_blocks to at least 4"),
        (CacheSettings(kv_bytes=4 * BLOCK), f"kv_bytes to at least {5 * BLOCK}"),
    ],
)
def test_less_than_a_block_a_plane_is_refused_with_the_mend(
    cache: CacheSettings, mend: str
) -> None:
    with pytest.raises(ConfigError, match=rf"3 blocks.*4 planes.*{mend}"):
        plan_memory(cache, BLOCK, 4, 10_000, CPU)


def test_storage_that_no_machine_has_is_refused_with_the_mend() -> None:
    plan = MemoryPlan(10**11, BLOCK, "num_blocks")
    with pytest.raises(ConfigError, match=r"100000000000 KV blocks.*lower cache\.num_blocks"):
        open_storage(plan, (4, 4, 16, 64, torch.float32), CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    assert resolve_device("auto") == CPU
    with pytest.raises(ConfigError, match="no CUDA device"):
        resolve_device("cuda:0")
