"""Where a worker's memory goes, how many KV blocks it takes, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from protocol.config import CacheSettings, WorkerSettings
from protocol.errors import ConfigError
from protocol.executor import MAX_PLANS_IN_FLIGHT
from protocol.sampling import MAX_LOGPROBS
from worker.device_memory import free_memory, tensor_bytes
from worker.memory import (
    CPU_KV_BYTES,
    DERIVED,
    Footprint,
    MemoryPlan,
    peak_bytes,
    plan_memory,
    readable,
    sampling_bytes,
)
from worker.planning import open_slots, open_storage
from worker.tick_lines import tick_bytes
from worker.worker import Worker, load_settings, resolve_device

CPU = torch.device("cpu")
BLOCK = 131_072
FOOTPRINT = Footprint(
    weights=5 * 2**30,
    attention=2**20,
    slots=10 * BLOCK,
    ticks=2 * BLOCK,
    graphs=30 * BLOCK,
    peak=8 * BLOCK,
    readback=1000,
)
"""50 blocks are still to be allocated."""


def plan_of(cache: CacheSettings, useful: int = 10_000, free: int | None = None) -> MemoryPlan:
    return plan_memory(cache, BLOCK, 4, useful, FOOTPRINT, free)


def test_bytes_are_rounded_down_and_one_block_is_scratch() -> None:
    plan = plan_of(CacheSettings(kv_bytes=8 * BLOCK + 5))
    assert plan == MemoryPlan(7, BLOCK, "kv_bytes", FOOTPRINT)
    assert plan.kv == 8 * BLOCK


def test_an_explicit_count_is_taken_as_it_is() -> None:
    plan = plan_of(CacheSettings(num_blocks=20_000))
    assert plan == MemoryPlan(20_000, BLOCK, "num_blocks", FOOTPRINT)


def test_the_cpu_default_is_capped_by_what_the_slots_can_fill() -> None:
    assert plan_of(CacheSettings(), useful=100).num_blocks == 100
    whole = plan_of(CacheSettings(), useful=10**9)
    assert whole == MemoryPlan(CPU_KV_BYTES // BLOCK - 1, BLOCK, "cpu default", FOOTPRINT)


def test_the_cuda_default_is_a_share_of_what_is_free_less_what_is_to_come() -> None:
    plan = plan_of(CacheSettings(), free=1000 * BLOCK)
    assert plan == MemoryPlan(900 - 50 - 1, BLOCK, "free cuda memory", FOOTPRINT)
    assert plan.kv + FOOTPRINT.to_come == 900 * BLOCK
    half = plan_of(CacheSettings(gpu_memory_utilization=0.5), free=1000 * BLOCK)
    assert half.num_blocks == 500 - 50 - 1
    assert plan_of(CacheSettings(), useful=100, free=1000 * BLOCK).num_blocks == 100


@pytest.mark.parametrize(
    ("cache", "mend"),
    [
        (CacheSettings(num_blocks=3), "raise cache.num_blocks to at least 4"),
        (CacheSettings(kv_bytes=4 * BLOCK), f"raise cache.kv_bytes to at least {5 * BLOCK}"),
    ],
)
def test_less_than_a_block_a_plane_is_refused_with_the_mend(
    cache: CacheSettings, mend: str
) -> None:
    for free in (None, 1000 * BLOCK):
        with pytest.raises(ConfigError, match=rf"3 blocks.*4 planes.*{mend}"):
            plan_of(cache, free=free)


@pytest.mark.parametrize(("free", "blocks"), [(60, 3), (10, 0)])
def test_a_full_device_is_refused_with_all_numbers(free: int, blocks: int) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(CacheSettings(), free=free * BLOCK)
    assert str(caught.value) == (
        f"KV storage of {blocks} blocks (free cuda memory) holds no request: one token needs a "
        "block in each of 4 planes; KV needs 640.00 KiB, but of "
        f"{readable(free * BLOCK)} free 0.9 may be used, and slots take 1.25 MiB, ticks 256.00 "
        "KiB, graphs 3.75 MiB, the largest step 1.00 MiB: free memory of the device, raise "
        "cache.gpu_memory_utilization, or lower num_slots, max_step_tokens or "
        "cache.graph_reserve_bytes"
    )


@pytest.mark.parametrize(
    ("free", "cache", "warning"),
    [
        (149, CacheSettings(num_blocks=99), "12.50 MiB of KV and 6.25 MiB beside it .*num_blocks"),
        (149, CacheSettings(kv_bytes=100 * BLOCK), "18.62 MiB free: lower cache.kv_bytes"),
        (150, CacheSettings(num_blocks=99), None),
        (None, CacheSettings(num_blocks=99), None),
    ],
)
def test_an_explicit_amount_that_leaves_no_room_is_warned_about(
    free: int | None, cache: CacheSettings, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    plan_of(cache, free=None if free is None else free * BLOCK)
    if warning is None:
        assert caplog.text == ""
    else:
        assert re.search(warning, caplog.text)


def test_a_plan_adds_up_and_reads_as_one_line() -> None:
    plan = plan_of(CacheSettings(num_blocks=99))
    assert plan.categories() == {
        "kv": 100 * BLOCK,
        "weights": 5 * 2**30,
        "attention": 2**20,
        "slots": 10 * BLOCK,
        "ticks": 2 * BLOCK,
        "graphs": 30 * BLOCK,
        "peak": 8 * BLOCK,
        "readback": 1000,
    }
    assert plan.allocated == 5 * 2**30 + 2**20 + 112 * BLOCK
    assert plan.total == sum(plan.categories().values()) - 1000
    assert str(replace(plan, footprint=replace(FOOTPRINT, ticks=0, graphs=0))) == (
        "99 KV blocks (num_blocks); kv 12.50 MiB, weights 5.00 GiB, attention 1.00 MiB, "
        "slots 1.25 MiB, peak 1.00 MiB, readback 1000 bytes; peak derived"
    )


def test_only_sampled_rows_have_logits() -> None:
    assert sampling_bytes(32, 49_152) == 72 * 2**20
    assert peak_bytes(512, 1000, 0, 49_152) == 512_000
    assert peak_bytes(512, 1000, 2, 49_152) == 512_000 + sampling_bytes(2, 49_152)


def test_the_plan_of_a_worker_counts_what_is_there() -> None:
    settings = WorkerSettings(cache=CacheSettings(num_blocks=64), device="cpu", num_slots=4)
    worker = Worker.open(settings)
    plan, model = worker.memory_plan, load_settings(settings, CPU)
    held = plan.footprint
    slots = open_slots(settings, model, 64, CPU)
    assert held.slots == slots.num_bytes
    # 4096 tokens of 2048 positions, 4 planes of 128 blocks, one row of nobody: the large columns.
    large = 5 * (4096 * 9 + 2048 * (8 + 1) + 4 * 128 * 8)
    assert large < held.slots < 1.05 * large
    assert plan.kv == worker.storage.pages.nbytes
    layer = 3 * 256 * 256 + 256 * 256 + 3 * 704 * 256 + 4 * 256
    weights = 4 * (2 * 4096 * 256 + 4 * layer + 2 * 256 + 1)
    assert weights <= held.weights < weights + 1024
    assert held.readback == MAX_PLANS_IN_FLIGHT * 256 * (4 + 8 + 4 + MAX_LOGPROBS * (8 + 4))
    assert held.readback == worker.readback.num_bytes
    assert (held.graphs, held.attention) == (0, 0)
    assert held.peak == peak_bytes(256, model.loop_row_bytes, 4, 4096)
    assert held.peak_source == DERIVED
    assert held.ticks == tick_bytes([4], settings.max_ticks)
    worker.close()


def test_lines_of_ticks_are_counted() -> None:
    assert tick_bytes([4, 8], 0) == 0
    # Two lines of tokens and depths, rows, seats, failed; a header a line, and the line itself.
    # The log probability of each token, and of the most likely ones with their ids.
    told = 2 * 4 * (4 + MAX_LOGPROBS * (8 + 4))
    assert tick_bytes([4], 1) == 2 * (2 * 4 * 8) + 2 * 4 * 8 + 4 + 2 * 3 * 8 + 8 + told
    assert tick_bytes([4, 8], 1) == tick_bytes([4], 1) + tick_bytes([8], 1)


def test_a_tensor_counts_once() -> None:
    class Owner:
        def __init__(self) -> None:
            self.one = torch.zeros(10)
            self.same = self.one
            self.name = "no tensor"

    owner = Owner()
    assert tensor_bytes(owner, owner, "none", Owner()) == 80


def test_the_loop_of_a_prompt_stays_below_what_is_planned() -> None:
    config = load_settings(WorkerSettings(), CPU)
    # qkv, the attention's output and gate, up and their product, of 256, 4 heads of 64 and 704.
    assert config.loop_row_bytes == 4 * (2 * 12 * 64 + 4 * 64 + 3 * 704 + 4 * 256)


def test_the_memory_of_a_cpu_is_not_planned() -> None:
    assert free_memory(CPU) is None


def test_sizes_are_readable() -> None:
    sizes = [0, 1023, 1024, 3 * 2**19, 2_868_903_936]
    assert [readable(size) for size in sizes] == [
        "0 bytes",
        "1023 bytes",
        "1.00 KiB",
        "1.50 MiB",
        "2.67 GiB",
    ]


def test_storage_that_no_machine_has_is_refused_with_the_mend() -> None:
    plan = MemoryPlan(10**11, BLOCK, "num_blocks", FOOTPRINT)
    with pytest.raises(
        ConfigError, match=r"100000000000 KV blocks.*take 12207\d*\.\d\d GiB: lower cache\.num_bl"
    ):
        open_storage(plan, (4, 4, 16, 64, torch.float32), CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    assert resolve_device("auto") == CPU
    with pytest.raises(ConfigError, match="no CUDA device"):
        resolve_device("cuda:0")
