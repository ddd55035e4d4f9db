"""What a worker is to allocate, in what sizes: its slots, its KV, and the plan of its memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from protocol.errors import ConfigError
from worker.device_memory import free_memory
from worker.graphs import ROW_BUCKETS, buckets_up_to, most_rows
from worker.kv_storage import KVStorage
from worker.memory import (
    DERIVED,
    MEASURED,
    Footprint,
    longest_history,
    peak_bytes,
    plan_memory,
    readable,
    sampling_bytes,
)
from worker.probe import probe_peak
from worker.slot_table import SlotTable
from worker.stages import Device
from worker.tick_lines import tick_bytes

if TYPE_CHECKING:
    from protocol.config import WorkerSettings
    from worker.attention.backend import AttentionBackend
    from worker.memory import MemoryPlan
    from worker.models.base import LoopedModel
    from worker.readback import ReadbackPool


def block_shape(
    settings: WorkerSettings, model: LoopedModel
) -> tuple[int, int, int, int, torch.dtype]:
    """What a KV block holds: layers, KV heads, tokens, head dimension and type."""
    size = settings.cache.block_size
    return model.num_layers, model.kv_heads, size, model.head_dim, model.dtype


def open_slots(
    settings: WorkerSettings, model: LoopedModel, scratch_block: int, device: torch.device
) -> SlotTable:
    """The slot table of a worker; on the device "meta" it takes no memory."""
    return SlotTable(
        num_slots=settings.num_slots,
        hidden_size=model.hidden_size,
        planes=settings.cache.layout.planes(model.profile.max_loops),
        max_loops=model.profile.max_loops,
        max_positions=model.profile.max_positions,
        block_size=settings.cache.block_size,
        scratch_block=scratch_block,
        vocab_size=model.profile.vocab_size,
        dtype=model.dtype,
        device=device,
    )


def plan_worker(
    settings: WorkerSettings,
    model: LoopedModel,
    attention: AttentionBackend,
    readback: ReadbackPool,
    device: torch.device,
) -> MemoryPlan:
    """The memory plan of a worker that has all but its slots, its KV and its graphs.

    On CUDA the largest steps are run for it. Raises ConfigError where they do not fit.
    """
    rows, vocab_size = settings.num_slots, model.profile.vocab_size
    slots = open_slots(settings, model, 0, torch.device("meta"))
    block_bytes = KVStorage.bytes_per_block(*block_shape(settings, model))
    # Asked before the probe: the kernels that it loads are in what `graphs` bounds.
    free = free_memory(device)
    peak_source = DERIVED if free is None else MEASURED
    if free is None:
        peak = peak_bytes(settings.step_tokens(device.type), model.loop_row_bytes, rows, vocab_size)
    else:
        positions = model.profile.max_positions
        history = longest_history(settings.cache, block_bytes, slots.planes, positions, free)
        make = partial(_throw_away, settings, model, attention, device)
        peak = probe_peak(make, settings.step_tokens(device.type), history)
    graphed = settings.cuda_graphs and can_capture(attention, device)
    graphs = settings.cache.graph_reserve_bytes if device.type == "cuda" else 0
    if graphed and settings.max_ticks:
        graphs += sampling_bytes(most_rows(rows), vocab_size)  # graphs keep theirs
    footprint = Footprint(
        weights=model.num_bytes,
        attention=attention.workspace_bytes,
        slots=slots.num_bytes,
        ticks=tick_bytes(
            buckets_up_to(ROW_BUCKETS, rows) if graphed else [rows], settings.max_ticks
        ),
        graphs=graphs,
        peak=peak,
        readback=readback.num_bytes,
        peak_source=peak_source,
    )
    pages = slots.tables.shape[1] * slots.tables.shape[2]
    return plan_memory(
        settings.cache,
        block_bytes,
        slots.planes,
        pages * rows,
        footprint,
        free,
    )


def _throw_away(
    settings: WorkerSettings,
    model: LoopedModel,
    attention: AttentionBackend,
    device: torch.device,
) -> Device:
    """What steps run on before there is any KV: all slots, one block and the scratch block."""
    storage = KVStorage(1, *block_shape(settings, model), device)
    slots = open_slots(settings, model, storage.scratch_block, device)
    return Device(model, slots, storage, attention, device)


def can_capture(attention: AttentionBackend, device: torch.device) -> bool:
    """Whether what decodes on a device can be captured."""
    return device.type == "cuda" and attention.abilities.device_metadata


def open_storage(
    memory: MemoryPlan, shape: tuple[int, int, int, int, torch.dtype], device: torch.device
) -> KVStorage:
    """The KV storage of a plan. Raises ConfigError when the device cannot hold it."""
    try:
        return KVStorage(memory.num_blocks, *shape, device)
    except RuntimeError as error:  # torch's OutOfMemoryError is one too
        raise ConfigError(
            f"{memory.num_blocks} KV blocks ({memory.source}) of {memory.block_bytes} bytes do not "
            f"fit on {device}, they take {readable(memory.kv)}: lower cache.num_blocks or "
            "cache.kv_bytes"
        ) from error
