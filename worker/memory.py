"""How many KV blocks a worker gets, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from protocol.config import CacheSettings

CPU_KV_BYTES = 256 * 2**20
"""KV storage of a CPU worker that was told nothing."""

CUDA_FREE_SHARE = 0.8
"""Share of the free device memory that a CUDA worker takes for KV when it was told nothing."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """KV storage of one worker: usable blocks, bytes a block, and which setting decided.

    `source` is "num_blocks", "kv_bytes", "cpu default" or "free cuda memory".
    """

    num_blocks: int
    block_bytes: int
    source: str


def plan_memory(
    cache: CacheSettings, block_bytes: int, planes: int, useful_blocks: int, device: torch.device
) -> MemoryPlan:
    """Decide the number of KV blocks, the scratch block not counted.

    A plan by default is capped at `useful_blocks`, what all slots can ever fill. Raises
    ConfigError when not even one token of one request fits.

    Example: kv_bytes 1 MiB, blocks of 131,072 bytes -> 8 blocks, one of them scratch -> 7.
    """
    if cache.num_blocks is not None:
        plan = MemoryPlan(cache.num_blocks, block_bytes, "num_blocks")
    else:
        if cache.kv_bytes is not None:
            kv_bytes, source = cache.kv_bytes, "kv_bytes"
        elif device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            kv_bytes, source = int(free * CUDA_FREE_SHARE), "free cuda memory"
        else:
            kv_bytes, source = CPU_KV_BYTES, "cpu default"
        blocks = kv_bytes // block_bytes - 1
        plan = MemoryPlan(min(blocks, useful_blocks), block_bytes, source)
    if plan.num_blocks < planes:
        mend = f"cache.kv_bytes to at least {(planes + 1) * block_bytes}"
        if plan.source == "num_blocks":
            mend = f"cache.num_blocks to at least {planes}"
        raise ConfigError(
            f"KV storage of {max(plan.num_blocks, 0)} blocks ({plan.source}) holds no request: one "
            f"token needs a block in each of {planes} planes; raise {mend}"
        )
    return plan
