"""Where a worker's memory goes, and how many KV blocks it gets, and why."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from protocol.config import CacheSettings

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 256 * 2**20
"""KV storage of a CPU worker that was told nothing."""

LOGIT_BYTES = 48
"""Memory that sampling takes for each logit of a row, at most.

4 for the float32 logit, 4 for its key, and five 8-byte values while exp((logit - largest) / T) is
made in float64 and rounded to an integer (worker/sampling/sampler.py): 48. Kernels on CUDA take
less: 2 for the product, 4 before and after adjustments, 8 for the integer.
"""

_CUDA_DEFAULT = "free cuda memory"

DERIVED, MEASURED = "derived", "measured"
"""How the peak of the largest step is known: from shapes, or from running it on the device."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a worker takes beside its KV, in bytes.

    There when the plan is made: `weights` and `attention`, the workspace of its kernels. Still to
    come: `slots`, all columns of the slot table with tables, prompts, forced depths and the logit
    adjuster; `ticks`, what resident ticks leave; `graphs`, an upper bound of captured graphs,
    loaded kernels and library workspaces; `peak`, what the largest step takes and gives back,
    DERIVED or MEASURED as `peak_source` says. `readback` is host memory, pinned where there is a
    device.
    """

    weights: int
    attention: int
    slots: int
    ticks: int
    graphs: int
    peak: int
    readback: int
    peak_source: str = DERIVED

    @property
    def to_come(self) -> int:
        """Device memory that is not allocated yet when the plan is made."""
        return self.slots + self.ticks + self.graphs + self.peak


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one worker: usable KV blocks, bytes a block, which setting decided, and the rest.

    `source` is "num_blocks", "kv_bytes", "cpu default" or "free cuda memory".
    """

    num_blocks: int
    block_bytes: int
    source: str
    footprint: Footprint

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {readable(size)}" for name, size in self.categories().items() if size
        )
        peak = f"peak {self.footprint.peak_source}"
        return f"{self.num_blocks} KV blocks ({self.source}); {parts}; {peak}"

    @property
    def kv(self) -> int:
        """Bytes of KV storage, the scratch block included."""
        return (self.num_blocks + 1) * self.block_bytes

    def categories(self) -> dict[str, int]:
        """Bytes by what takes them; all but `readback` on the device."""
        sizes = asdict(self.footprint)
        del sizes["peak_source"]
        return {"kv": self.kv, **sizes}

    @property
    def allocated(self) -> int:
        """Bytes of the tensors that an open worker holds between steps.

        Not in it: what graphs and libraries keep for themselves, which `graphs` bounds.
        """
        held = self.footprint
        return self.kv + held.weights + held.attention + held.slots + held.ticks

    @property
    def total(self) -> int:
        """Bytes of the device that the worker may ever take."""
        return self.allocated + self.footprint.graphs + self.footprint.peak


def sampling_bytes(rows: int, vocab_size: int) -> int:
    """Memory that sampling takes while it runs. Example: 32 rows of 49,152 -> 72 MiB."""
    return rows * vocab_size * LOGIT_BYTES


def peak_bytes(tokens: int, row_bytes: int, sampled: int, vocab_size: int) -> int:
    """Memory of the largest step by its shapes: a loop of `tokens` rows, and `sampled` samples.

    Rows of a prompt have no logits. The two never run at once, but torch may keep the memory of one
    in pieces that do not serve the other. What attention in plain torch copies is not in it.
    """
    return tokens * row_bytes + sampling_bytes(sampled, vocab_size)


def plan_memory(
    cache: CacheSettings,
    block_bytes: int,
    planes: int,
    useful_blocks: int,
    footprint: Footprint,
    free: int | None,
) -> MemoryPlan:
    """Decide the number of KV blocks, the scratch block not counted.

    `free` is what a CUDA device has left now, None on a CPU. A plan by default is capped at
    `useful_blocks`, what all slots can ever fill; on CUDA it takes
    free * gpu_memory_utilization - to_come. Raises ConfigError when not even one token of one
    request fits.

    Example: kv_bytes 1 MiB, blocks of 131,072 bytes -> 8 blocks, one of them scratch -> 7.
    """
    kv_bytes, source = _most_kv(cache, block_bytes, free)
    if source == _CUDA_DEFAULT:
        kv_bytes -= footprint.to_come
    blocks = kv_bytes // block_bytes - 1
    if source != "num_blocks":
        blocks = min(blocks, useful_blocks)
    plan = MemoryPlan(blocks, block_bytes, source, footprint)
    if plan.num_blocks < planes:
        raise ConfigError(
            f"KV storage of {max(plan.num_blocks, 0)} blocks ({plan.source}) holds no request: one "
            f"token needs a block in each of {planes} planes; {_mend(plan, cache, planes, free)}"
        )
    if free is not None and plan.kv + footprint.to_come > free:
        logger.warning(
            "%s of KV and %s beside it may not fit into %s free: lower cache.%s",
            readable(plan.kv),
            readable(footprint.to_come),
            readable(free),
            plan.source,
        )
    return plan


def longest_history(
    cache: CacheSettings, block_bytes: int, planes: int, max_positions: int, free: int | None
) -> int:
    """Tokens of the longest request that the KV could hold if nothing else took memory.

    Never less than a block. Example: 64 blocks of 16 tokens in 4 planes -> 256.
    """
    blocks = _most_kv(cache, block_bytes, free)[0] // block_bytes - 1
    return min(max_positions, max(blocks // planes, 1) * cache.block_size)


def _most_kv(cache: CacheSettings, block_bytes: int, free: int | None) -> tuple[int, str]:
    """Bytes of KV that the settings allow, and which of them decides."""
    if cache.num_blocks is not None:
        return (cache.num_blocks + 1) * block_bytes, "num_blocks"
    if cache.kv_bytes is not None:
        return cache.kv_bytes, "kv_bytes"
    if free is not None:
        return int(free * cache.gpu_memory_utilization), _CUDA_DEFAULT
    return CPU_KV_BYTES, "cpu default"


def _mend(plan: MemoryPlan, cache: CacheSettings, planes: int, free: int | None) -> str:
    """What to change so that one request fits."""
    needed = (planes + 1) * plan.block_bytes
    if plan.source == "num_blocks":
        return f"raise cache.num_blocks to at least {planes}"
    if plan.source != _CUDA_DEFAULT or free is None:
        return f"raise cache.kv_bytes to at least {needed}"
    rest = plan.footprint
    return (
        f"KV needs {readable(needed)}, but of {readable(free)} free "
        f"{cache.gpu_memory_utilization:g} may be used, and slots take {readable(rest.slots)}, "
        f"ticks {readable(rest.ticks)}, graphs {readable(rest.graphs)}, the largest step "
        f"{readable(rest.peak)}: free memory of the device, raise cache.gpu_memory_utilization, or "
        "lower num_slots, max_step_tokens or cache.graph_reserve_bytes"
    )


def readable(size: int) -> str:
    """Bytes for people. Example: 2_868_903_936 -> "2.67 GiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"
